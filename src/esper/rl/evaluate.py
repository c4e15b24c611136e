"""Whole episodes with a fixed policy.

Every environment plays a share of the episodes that is fixed beforehand. Counting the episodes that finish first would favour short ones.

Shapes: N = environments.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from esper.rl.policy import Policy
from esper.vecenv import VecEnv

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
