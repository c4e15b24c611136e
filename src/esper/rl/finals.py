"""The last observations of episodes that were cut, kept until the rollout ends and then valued in one go.

The value of what a cut episode would have gone on to is the critic's on its final observation, with the memory that belongs to it: the
state after the action that was cut.

Shapes: N = environments, S = state width, R = rows kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.rl.policy import Policy
from esper.vecenv import Obs

_MISSING = "an episode was truncated but the environment gave no `final_obs`"


class Finals:
    """Gathers rows where `truncated`. On CPU exactly those; elsewhere into a fixed buffer without asking the device how many."""

    def __init__(self, num_steps: int, num_envs: int, device: torch.device) -> None:
        self.num_envs = num_envs
        self.capacity = num_steps * num_envs
        self.exact = device.type == "cpu"
        self.device = device
        self._rows: list[tuple[Obs, Tensor, Tensor]] = []  # final observations, states, positions in [T·N]
        self._buffer: tuple[Obs, Tensor, Tensor] | None = None
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._missing = torch.zeros((), dtype=torch.bool, device=device)  # was an episode cut without a final observation?

    def clear(self) -> None:
        self._rows.clear()
        self._count.zero_()
        self._missing.zero_()

    def add(self, step: int, final_obs: Obs | None, state: Tensor, truncated: Tensor) -> None:
        """Keeps the truncated rows of `final_obs` [N, ...], normalised as usual, and of `state` [N, S] after the action."""
        if self.exact:
            envs = truncated.nonzero().squeeze(1)
            if len(envs):
                if final_obs is None:
                    raise ValueError(_MISSING)
                self._rows.append(({name: value[envs] for name, value in final_obs.items()}, state[envs], envs + step * self.num_envs))
        elif final_obs is None:
            self._missing |= truncated.any()
        else:
            self._scatter(step, final_obs, state, truncated)

    def _scatter(self, step: int, final_obs: Obs, state: Tensor, truncated: Tensor) -> None:
        if self._buffer is None:
            rows = self.capacity + 1  # the last row takes what is not truncated
            obs = {name: value.new_zeros(rows, *value.shape[1:]) for name, value in final_obs.items()}
            self._buffer = (obs, state.new_zeros(rows, state.shape[1]), torch.zeros(rows, dtype=torch.int64, device=self.device))
        obs, states, positions = self._buffer
        place = self._count + torch.cumsum(truncated, 0) - 1
        place = torch.where(truncated, place, self.capacity)
        for name, value in final_obs.items():
            obs[name].index_copy_(0, place, value)
        states.index_copy_(0, place, state)
        positions.index_copy_(0, place, torch.arange(self.num_envs, device=self.device) + step * self.num_envs)
        self._count += truncated.sum()

    def values(self, policy: Policy) -> tuple[Tensor, Tensor] | None:
        """Positions in the flattened rollout [R] and the values there [R], or None where nothing was cut."""
        if self.exact:
            if not self._rows:
                return None
            obs = {name: torch.cat([row[0][name] for row in self._rows]) for name in self._rows[0][0]}
            states, positions = torch.cat([row[1] for row in self._rows]), torch.cat([row[2] for row in self._rows])
        else:
            if bool(self._missing):
                raise ValueError(_MISSING)
            count = int(self._count)
            if self._buffer is None or count == 0:
                return None
            obs = {name: value[:count] for name, value in self._buffer[0].items()}
            states, positions = self._buffer[1][:count], self._buffer[2][:count]
        features, _ = policy.step(policy.normalize(obs), states)
        return positions, policy.value(features)
