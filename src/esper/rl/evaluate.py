"""Whole episodes with a fixed policy.

Every environment plays a share of the episodes that is fixed beforehand. Counting the episodes that finish first would favour short ones.

Shapes: N = environments.

A video of a policy that plays in a Gymnasium environment.

    record_video(policy, "CartPole-v1", "cartpole.gif")

Pillow writes animated GIF, WebP and PNG files, and comes with esper; no ffmpeg is needed. The environment must be able to draw itself:
Gymnasium's own classic ones need pygame for that.

Shapes: frames are [height, width, 3] bytes.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from esper.files import write_file
from esper.rl.policy import Policy
from esper.vecenv import EnvSource, VecEnv
from esper.vecenv.registry import Wrapper, make_single
from esper.vecenv.spaces import spaces_of

if TYPE_CHECKING:
    from PIL.Image import Image


MAX_STEPS = 10_000  # of an episode, after which it is cut
_ASK_EVERY_S = 0.5  # seconds between questions whether to stop


class EvaluationStopped(RuntimeError):
    """Somebody asked to stop before all episodes were played."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Raw returns and lengths of episodes, environment by environment. `cut` of them had not ended at the step limit."""

    returns: list[float]
    lengths: list[int]
    cut: int = 0
    steps: int = 0  # of all environments as one

    @property
    def mean_return(self) -> float:
        return sum(self.returns) / len(self.returns)

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def warning(self, max_steps: int) -> str | None:
        """A sentence on the episodes that were cut; None where all came to their end."""
        if not self.cut:
            return None
        return (
            f"{self.cut} of {len(self.returns)} episodes had not ended after {max_steps:,} steps and were cut there: "
            "their returns are those of the steps so far"
        )


def _never() -> bool:
    return False


@torch.no_grad()
def evaluate(
    policy: Policy,
    env: VecEnv,
    *,
    episodes: int,
    generator: torch.Generator | None,
    seed: int,
    max_steps: int = MAX_STEPS,
    should_stop: Callable[[], bool] = _never,
) -> Evaluation:
    """Play `episodes` episodes, an equal share in each environment; the first environments play one more where it does not come out even.

    An episode of more than `max_steps` steps is cut there. Raises EvaluationStopped soon after `should_stop()` becomes true.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1; got {episodes}")
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1; got {max_steps}")
    was_training = policy.training
    policy.eval()
    try:
        return _evaluate(policy, env, episodes, generator, seed, max_steps, should_stop)
    finally:
        policy.train(was_training)


def _evaluate(
    policy: Policy,
    env: VecEnv,
    episodes: int,
    generator: torch.Generator | None,
    seed: int,
    max_steps: int,
    should_stop: Callable[[], bool],
) -> Evaluation:
    device, num_envs = policy.device, env.num_envs
    share, extra = divmod(episodes, num_envs)
    left = share + (torch.arange(num_envs) < extra).to(torch.int64)  # [N] episodes to play
    finished: list[list[tuple[float, int]]] = [[] for _ in range(num_envs)]  # returns and lengths by environment
    steps = cut = 0
    asked = time.monotonic()
    while bool((left > 0).any()):
        # One environment cannot be reset alone. A cut one waits for the others; then all start again, until every share is played.
        timestep, state = env.reset(seed), policy.initial_state(num_envs)
        seed += 1
        waits = left <= 0
        returns, lengths = torch.zeros(num_envs), torch.zeros(num_envs, dtype=torch.int64)
        starts = torch.ones(num_envs, dtype=torch.bool, device=device)
        while not bool(waits.all()):
            if time.monotonic() - asked > _ASK_EVERY_S:
                asked = time.monotonic()
                if should_stop():
                    raise EvaluationStopped(f"stopped after {sum(map(len, finished))} of {episodes} episodes")
            obs = {name: value.to(device) for name, value in timestep.obs.items()}
            masks = {head: mask.to(device) for head, mask in timestep.masks.items()}
            actions, state = policy.act(obs, state, masks=masks, starts=starts, generator=generator)
            # Copies, because what comes out of inference mode must not leak into environments, which may write to what they are given.
            timestep = env.step({head: action.clone().to(env.device) for head, action in actions.items()})
            steps += 1
            valid = torch.ones(num_envs, dtype=torch.bool) if timestep.valid is None else timestep.valid.cpu()
            ended = timestep.ended.cpu()
            returns += torch.where(valid, timestep.reward.cpu(), 0.0)
            lengths += valid
            is_cut = ~ended & (lengths >= max_steps) & ~waits
            for row in ((ended | is_cut) & ~waits).nonzero().flatten().tolist():
                finished[row].append((float(returns[row]), int(lengths[row])))
                left[row] -= 1
            cut += int(is_cut.sum())
            waits = waits | is_cut | (left <= 0)
            returns.masked_fill_(ended, 0.0)
            lengths.masked_fill_(ended, 0)
            starts = (ended | ~valid).to(device)
    played = [episode for row in finished for episode in row]
    return Evaluation([row[0] for row in played], [row[1] for row in played], cut=cut, steps=steps)


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
