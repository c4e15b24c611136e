"""Whole episodes with a fixed policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from esper.rl.policy import Policy
from esper.vecenv import VecEnv


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Raw returns and lengths of finished episodes."""

    returns: list[float]
    lengths: list[int]

    @property
    def mean_return(self) -> float:
        return sum(self.returns) / len(self.returns)

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.lengths)


@torch.no_grad()
def evaluate(policy: Policy, env: VecEnv, *, episodes: int, generator: torch.Generator | None, seed: int) -> Evaluation:
    """The first `episodes` episodes, an equal share from each environment, so that short ones are not favoured."""
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1; got {episodes}")
    was_training = policy.training
    policy.eval()
    try:
        return _evaluate(policy, env, episodes=episodes, generator=generator, seed=seed)
    finally:
        policy.train(was_training)


def _evaluate(policy: Policy, env: VecEnv, *, episodes: int, generator: torch.Generator | None, seed: int) -> Evaluation:
    device = policy.device
    share = -(-episodes // env.num_envs)
    left = torch.full((env.num_envs,), share)
    returns, lengths = torch.zeros(env.num_envs), torch.zeros(env.num_envs, dtype=torch.int64)
    finished: list[tuple[float, int]] = []
    timestep, state = env.reset(seed), policy.initial_state(env.num_envs)
    starts = torch.ones(env.num_envs, dtype=torch.bool, device=device)
    while len(finished) < episodes and bool((left > 0).any()):
        obs = {name: value.to(device) for name, value in timestep.obs.items()}
        masks = {head: mask.to(device) for head, mask in timestep.masks.items()}
        actions, state = policy.act(obs, state, masks=masks, starts=starts, generator=generator)
        # Copies, because what comes out of inference mode must not leak into environments, which may write to what they are given.
        timestep = env.step({head: action.clone().to(env.device) for head, action in actions.items()})
        valid = torch.ones(env.num_envs, dtype=torch.bool) if timestep.valid is None else timestep.valid.cpu()
        ended = timestep.ended.cpu()
        returns += timestep.reward.cpu() * valid
        lengths += valid
        counted = (ended & (left > 0)).nonzero().flatten()
        finished.extend(zip(returns[counted].tolist(), lengths[counted].tolist(), strict=True))
        left -= ended.to(left.dtype)
        returns.masked_fill_(ended, 0.0)
        lengths.masked_fill_(ended, 0)
        starts = (ended | ~valid).to(device)
    kept = finished[:episodes]
    return Evaluation([row[0] for row in kept], [row[1] for row in kept])
