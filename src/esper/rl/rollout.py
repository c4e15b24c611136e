"""One rollout: what was seen, chosen and paid, in tensors allocated once.

Shapes: T = steps, N = environments, L = steps that gradients flow through, S = state width, H = core width, P = distribution parameters,
D = discrete heads, C = continuous numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.rl.distributions import Choice
from esper.rl.policy import Policy
from esper.vecenv import Masks, Obs


@dataclass
class Rollout:
    """Filled step by step by the collector, read by the learner. All but `states` is [T, N, ...]."""

    obs: Obs  # as the environment gave them
    masks: Masks  # of the heads that were ever masked
    choice: Choice
    parameters: Tensor  # [T, N, P] of the distribution that was acted from
    features: Tensor  # [T, N, H] what the heads saw
    states: Tensor  # [T/L, N, S] at the first step of each unit
    starts: Tensor  # bool: this step is the first of an episode
    rewards: Tensor  # 0 where they were not finite
    bad_rewards: Tensor  # bool: the reward was not finite, so the step teaches nothing and no advantage goes past it
    terminated: Tensor
    truncated: Tensor
    valid: Tensor  # bool: the step was real
    values: Tensor  # in units of the reward
    next_values: Tensor  # value of what followed the step; 0 where the episode terminated

    @classmethod
    def allocate(cls, policy: Policy, *, num_steps: int, num_envs: int, length: int) -> Rollout:
        device = policy.device
        shape = (num_steps, num_envs)

        def zeros(*tail: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, *tail, dtype=dtype, device=device)

        distribution = policy.distribution
        index = zeros(len(distribution.spec.discrete), dtype=torch.int64)
        return cls(
            obs={name: zeros(*part.shape, dtype=part.torch_dtype) for name, part in policy.observation_spec.items()},
            masks={},
            choice=Choice(index, zeros(distribution.num_continuous)),
            parameters=zeros(distribution.num_parameters),
            features=zeros(policy.core.output_size),
            states=torch.zeros(num_steps // length, num_envs, policy.core.state_size, device=device),
            starts=zeros(dtype=torch.bool),
            rewards=zeros(),
            bad_rewards=zeros(dtype=torch.bool),
            terminated=zeros(dtype=torch.bool),
            truncated=zeros(dtype=torch.bool),
            valid=torch.ones(shape, dtype=torch.bool, device=device),
            values=zeros(),
            next_values=zeros(),
        )

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated
