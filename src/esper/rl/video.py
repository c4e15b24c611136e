"""A video of a policy that plays in a Gymnasium environment.

    record_video(policy, "CartPole-v1", "cartpole.gif")

Pillow writes animated GIF, WebP and PNG files, and comes with esper; no ffmpeg is needed. The environment must be able to draw itself:
Gymnasium's own classic ones need pygame for that.

Shapes: frames are [height, width, 3] bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from esper.files import write_file
from esper.rl.policy import Policy
from esper.vecenv import EnvSource
from esper.vecenv.registry import Wrapper, make_single
from esper.vecenv.spaces import spaces_of

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {".gif": "GIF", ".webp": "WEBP", ".png": "PNG"}
_COLOURS = 256  # of a frame
_FPS = 30  # where the environment does not say


class VideoError(ValueError):
    """A video that cannot be made, with the reason."""


def check_video_path(path: Path | str) -> None:
    """Raise VideoError where the name ends in no format that can be written."""
    if Path(path).suffix.lower() not in FORMATS:
        raise VideoError(f"a video is written as {', '.join(FORMATS)}; got {path}")


def record_video(
    policy: Policy,
    env: EnvSource,
    path: Path | str,
    *,
    episodes: int = 1,
    seed: int = 0,
    deterministic: bool = True,
    max_steps: int = 1000,
    wrappers: Sequence[Wrapper] = (),
    **kwargs: Any,
) -> list[float]:
    """Play `episodes` episodes of `max_steps` steps at most, write what they look like, and return what they earned.

    `env` is anything that `esper.vecenv.make` makes single environments from. It is made with `render_mode="rgb_array"`; a function takes
    that as a keyword, or makes such environments by itself.
    """
    check_video_path(path)
    if episodes < 1 or max_steps < 1:
        raise VideoError(f"episodes and max_steps must be at least 1; got {episodes} and {max_steps}")
    single = make_single(env, wrappers=wrappers, render_mode="rgb_array", **kwargs)
    try:
        if single.render_mode != "rgb_array":
            raise VideoError(
                f"{single} does not draw itself as arrays: its render_mode is {single.render_mode!r}. Let the function that makes it take "
                "render_mode as a keyword and pass it on"
            )
        policy.fit_spaces(spaces_of(single.observation_space, single.action_space))
        frames: list[Image] = []
        returns = [_play(policy, single, frames, seed + episode, deterministic, max_steps) for episode in range(episodes)]
        fps = float(single.metadata.get("render_fps") or _FPS)
    finally:
        single.close()
    content = io.BytesIO()
    options: dict[str, Any] = {"save_all": True, "append_images": frames[1:], "duration": round(1000 / fps), "loop": 0}
    frames[0].save(content, format=FORMATS[Path(path).suffix.lower()], **options)
    write_file(path, content.getvalue())
    return returns


def _play(policy: Policy, env: Any, frames: list[Image], seed: int, deterministic: bool, max_steps: int) -> float:
    """One episode; its frames are added to the others."""
    observation, info = env.reset(seed=seed)
    state, total = None, 0.0
    frames.append(_frame(env))
    for _ in range(max_steps):
        masks = info.get("action_mask")
        if masks is None and env.has_wrapper_attr("action_masks"):
            masks = env.get_wrapper_attr("action_masks")()
        action, state = policy.predict(observation, state, deterministic=deterministic, action_masks=masks)
        observation, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        frames.append(_frame(env))
        if terminated or truncated:
            break
    return total


def _frame(env: Any) -> Image:
    from PIL import Image

    picture = env.render()
    if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[2] != 3:
        what = f"the shape {picture.shape}" if isinstance(picture, np.ndarray) else f"a {type(picture).__name__}"
        raise VideoError(f"{env} should draw itself as an array [height, width, 3]; got {what}")
    # With a palette of its own a frame takes a third of the memory, and a GIF has one anyway.
    return Image.fromarray(picture.astype(np.uint8)).quantize(_COLOURS)
