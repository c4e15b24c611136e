"""Normalisers of observations, rewards and values.

They do not change while a rollout is collected. They are updated after it with the rollouts of all ranks, so all ranks have the same
moments. Numbers that are not finite are left out, so that one of them does not spoil the moments forever. The normalisers are not
thread-safe: one learner owns them.

Shapes: T = steps in the rollout, N = parallel environments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.parallel import ALONE, Group
from esper.rl.gae import discounted_sums
from esper.rl.networks import is_image, module_names
from esper.statistics import ExponentialMoments, RunningMoments, Sums, sums_of
from esper.vecenv import Obs, ObservationSpec, TensorSpec

CLIP = 10.0  # normalised observations and rewards are clipped to ± this
SMALLEST_SPREAD = 1e-4  # lower limit of a spread, so that a feature that hardly varies is not scaled up without limit
VALUE_MOMENTUM = 0.9  # per rollout; old returns are forgotten because they change with the policy


class ObservationNormalizer(nn.Module):
    """Shifts and scales floating-point observations by their running moments; with `with_bytes`, also bytes that are no image.

    Images and other integers stay as they are. Means and scales are frozen parameters, so they are saved with the policy; the moments they
    come from belong to training.
    """

    def __init__(self, spec: ObservationSpec, *, momentum: float | None, device: torch.device, with_bytes: bool = False) -> None:
        super().__init__()
        self.names = tuple(name for name, part in spec.items() if part.torch_dtype.is_floating_point or (with_bytes and is_bytes(part)))
        self.moments = {
            name: RunningMoments(spec[name].shape, device)
            if momentum is None
            else ExponentialMoments(spec[name].shape, device, momentum=momentum)
            for name in self.names
        }
        self.means, self.scales = nn.ParameterDict(), nn.ParameterDict()
        self._inside = module_names(self.names)
        for name, inside in self._inside.items():
            self.means[inside] = nn.Parameter(torch.zeros(spec[name].shape), requires_grad=False)
            self.scales[inside] = nn.Parameter(torch.ones(spec[name].shape), requires_grad=False)

    def forward(self, obs: Obs) -> Obs:
        return {name: self._normalize(name, value) if name in self.moments else value for name, value in obs.items()}

    def _normalize(self, name: str, value: Tensor) -> Tensor:
        normalized: Tensor = (value - self.means[self._inside[name]]) * self.scales[self._inside[name]]
        return normalized.clamp_(-CLIP, CLIP)

    def update(self, raw: Obs, valid: Tensor | None, group: Group = ALONE) -> None:
        """Update the moments with the raw observations of a rollout [T, N, ...]."""
        sums = group.merge([_finite_sums(raw[name], moments.shape, valid) for name, moments in self.moments.items()])
        for (name, moments), seen in zip(self.moments.items(), sums, strict=True):
            moments.absorb(seen)
            self.means[self._inside[name]].copy_(moments.mean)
            self.scales[self._inside[name]].copy_(1.0 / moments.std.clamp_min(SMALLEST_SPREAD))

    def training_state(self) -> dict[str, Any]:
        return {name: moments.state_dict() for name, moments in self.moments.items()}

    def load_training_state(self, state: dict[str, Any]) -> None:
        for name, moments in self.moments.items():
            moments.load_state_dict(state[name])


def is_bytes(part: TensorSpec) -> bool:
    """Return whether a part of an observation holds bytes that are no image, such as the kinds of objects in the cells of a grid."""
    return part.torch_dtype == torch.uint8 and not is_image(part.shape)


def _finite_sums(values: Tensor, shape: Sequence[int], valid: Tensor | None) -> Sums:
    """Return the sums over the rows [..., *shape] that were real and are finite."""
    leading = values.dim() - len(shape)
    finite = torch.isfinite(values).flatten(leading).all(-1) if shape else torch.isfinite(values)
    return sums_of(values, shape, valid=finite if valid is None else finite & valid)


class RewardNormalizer:
    """Divides rewards by the running spread of discounted returns. It does not subtract a mean: the sign of a reward has a meaning."""

    def __init__(self, num_envs: int, *, gamma: float, device: torch.device) -> None:
        self.gamma = gamma
        self.moments = RunningMoments((), device=device)
        self.running = torch.zeros(num_envs, device=device)  # discounted return of each episode so far

    def __call__(self, rewards: Tensor, ended: Tensor, valid: Tensor | None, group: Group = ALONE) -> Tensor:
        """Update the moments with the rewards of a rollout [T, N]. Return the rewards normalised by the new moments."""
        sums = discounted_sums(rewards, ended, self.running, gamma=self.gamma)
        self.running = torch.where(ended[-1] | ~torch.isfinite(sums[-1]), 0.0, sums[-1])
        self.moments.absorb(*group.merge([_finite_sums(sums, (), valid)]))
        return (rewards / self.moments.std.clamp_min(SMALLEST_SPREAD).to(rewards.dtype)).clamp_(-CLIP, CLIP)

    def forget_episodes(self) -> None:
        """Set the returns of unfinished episodes to zero, because all environments begin new ones."""
        self.running = torch.zeros_like(self.running)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments.state_dict(), "running": self.running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments.load_state_dict(state["moments"])
        self.running.copy_(state["running"])


class ValueNormalizer(nn.Module):
    """Expresses returns in units of their running mean and spread. The critic predicts in these units; `restore` converts back.

    When the units change, the critic's last layer is adapted, so that its predictions do not jump.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.moments = ExponentialMoments((), device, momentum=VALUE_MOMENTUM)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))
        self.mean: Tensor
        self.spread: Tensor

    def restore(self, predicted: Tensor) -> Tensor:
        return predicted * self.spread + self.mean

    def normalize(self, returns: Tensor) -> Tensor:
        return (returns - self.mean) / self.spread

    @torch.no_grad()
    def update(self, returns: Tensor, valid: Tensor | None, last_layer: nn.Linear, group: Group = ALONE) -> None:
        """Update the moments with the returns of a rollout [T, N], and convert the critic's last layer to the new units."""
        self.moments.absorb(*group.merge([_finite_sums(returns, (), valid)]))
        mean = self.moments.mean.to(self.mean.dtype)
        spread = self.moments.std.clamp_min(SMALLEST_SPREAD).to(self.spread.dtype)
        last_layer.weight.mul_(self.spread / spread)
        last_layer.bias.mul_(self.spread).add_(self.mean - mean).div_(spread)
        self.mean.copy_(mean)
        self.spread.copy_(spread)
