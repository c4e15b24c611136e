"""Play whole episodes with a fixed policy: `evaluate` measures returns and lengths, `record_video` writes a video.

    record_video(policy, "CartPole-v1", "cartpole.gif")

`evaluate` fixes beforehand how many episodes each environment plays. Counting the episodes that finish first would favour short ones.

Videos are animated GIF, WebP and PNG files, written by Pillow, which is installed with esper; ffmpeg is not needed. The environment must be
able to draw itself, for which the classic ones of Gymnasium need pygame.

Shapes: N = environments. Frames are [height, width, 3] bytes.
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

MAX_STEPS = 10_000  # steps after which an episode is cut
_ASK_EVERY_S = 0.5  # seconds between calls of `should_stop`


class EvaluationStopped(RuntimeError):
    """An evaluation was asked to stop before all episodes were played."""


@dataclass(frozen=True, slots=True)
class PolicyEvaluation:
    """Raw returns and lengths of episodes, environment by environment."""

    returns: list[float]
    lengths: list[int]
    cut: int = 0  # episodes that had not ended at the step limit
    steps: int = 0  # calls of `env.step`, each of which steps all environments

    @property
    def mean_return(self) -> float:
        return sum(self.returns) / len(self.returns)

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def warning(self, max_steps: int) -> str | None:
        """Return a sentence about the episodes that were cut; None if all of them ended."""
        if not self.cut:
            return None
        return (
            f"{self.cut} of {len(self.returns)} episodes had not ended after {max_steps:,} steps and were cut there: "
            "their returns are those of the steps until then"
        )


def _never() -> bool:
    return False


@torch.no_grad()  # environments are no part of the inference mode below: their tensors are written later
def evaluate(
    policy: Policy,
    env: VecEnv,
    *,
    episodes: int,
    generator: torch.Generator | None,
    seed: int,
    max_steps: int = MAX_STEPS,
    should_stop: Callable[[], bool] = _never,
) -> PolicyEvaluation:
    """Play `episodes` episodes: the same number in each environment, and one more in the first ones if the number does not divide evenly.

    With a generator the actions are drawn at random, without one they are the most likely ones. An episode that is longer than `max_steps`
    steps is cut. Raises EvaluationStopped soon after `should_stop()` becomes true.
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
) -> PolicyEvaluation:
    """Play the episodes of `evaluate` with a policy in evaluation mode."""
    device, num_envs = policy.device, env.num_envs
    share, extra = divmod(episodes, num_envs)
    left = share + (torch.arange(num_envs) < extra).to(torch.int64)  # [N] episodes still to play
    finished: list[list[tuple[float, int]]] = [[] for _ in range(num_envs)]  # returns and lengths by environment
    steps = cut = 0
    asked = time.monotonic()
    while bool((left > 0).any()):
        # A VecEnv can only be reset as a whole. So an environment whose episode was cut waits until all others have played theirs; then
        # all are reset, and those with episodes left play on.
        timestep, state = env.reset(seed), policy.initial_state(num_envs)
        seed += 1
        waits = left <= 0  # [N] environments whose steps are not counted any more
        returns, lengths = torch.zeros(num_envs), torch.zeros(num_envs, dtype=torch.int64)
        starts = torch.ones(num_envs, dtype=torch.bool, device=device)
        while not bool(waits.all()):
            if time.monotonic() - asked > _ASK_EVERY_S:
                asked = time.monotonic()
                if should_stop():
                    raise EvaluationStopped(f"stopped after {sum(map(len, finished))} of {episodes} episodes")
            obs = {name: value.to(device) for name, value in timestep.obs.items()}
            masks = {head: mask.to(device) for head, mask in timestep.masks.items()}
            with torch.inference_mode():
                actions, state = policy.act(obs, state, masks=masks, starts=starts, generator=generator)
            # Copy the actions: environments may write to them.
            timestep = env.step({head: action.clone().to(env.device) for head, action in actions.items()})
            steps += 1
            valid = torch.ones(num_envs, dtype=torch.bool) if timestep.valid is None else timestep.valid.cpu()
            ended = timestep.ended.cpu()
            returns += torch.where(valid, timestep.reward.cpu(), 0.0)
            lengths += valid
            # Note the episodes that ended or were cut, except those of waiting environments.
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
    return PolicyEvaluation([row[0] for row in played], [row[1] for row in played], cut=cut, steps=steps)


FORMATS = {".gif": "GIF", ".webp": "WEBP", ".png": "PNG"}
_COLOURS = 256  # in the palette of a frame
_FPS = 30  # frames per second, if the environment does not set it


class VideoError(ValueError):
    """A video cannot be made; the message says why."""


def check_video_path(path: Path | str) -> None:
    """Raise VideoError unless the file name ends in a format that can be written."""
    if Path(path).suffix.lower() not in FORMATS:
        raise VideoError(f"the name of a video must end in {', '.join(FORMATS)}; got {path}")


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
    """Play `episodes` episodes of at most `max_steps` steps, write them as a video, and return their returns.

    `env` is anything that `esper.vecenv.make` makes single environments from. It is made with `render_mode="rgb_array"`. A function must
    take that as a keyword, or make such environments by itself.
    """
    check_video_path(path)
    if episodes < 1 or max_steps < 1:
        raise VideoError(f"episodes and max_steps must be at least 1; got {episodes} and {max_steps}")
    single = make_single(env, wrappers=wrappers, render_mode="rgb_array", **kwargs)
    try:
        if single.render_mode != "rgb_array":
            raise VideoError(
                f"{single} does not draw itself as arrays: its render_mode is {single.render_mode!r}, not 'rgb_array'. The function that "
                "makes it must take render_mode as a keyword and pass it on"
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
    """Play one episode and append its frames. Return its return."""
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
    """Return the present picture of the environment."""
    from PIL import Image

    picture = env.render()
    if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[2] != 3:
        what = f"the shape {picture.shape}" if isinstance(picture, np.ndarray) else f"a {type(picture).__name__}"
        raise VideoError(f"{env} must draw itself as an array [height, width, 3]; got {what}")
    # A frame with a palette takes a third of the memory, and a GIF needs one anyway.
    return Image.fromarray(picture.astype(np.uint8)).quantize(_COLOURS)
