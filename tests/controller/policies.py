"""Policies of controllers with weights that are not those of birth."""

from __future__ import annotations

import torch

from esper.controller.config import MoveNetworkConfig
from esper.controller.network import make_policy
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy

NETWORK = MoveNetworkConfig(members=3, width=16, summary_width=16, temperature=0.2)


def perturbed_policy(policy: Policy, seed: int = 1) -> Policy:
    """Perturb all weights of a policy: corrections of zero would hide mistakes."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=draws))
    return policy


def trained_policy(memory: NetworkConfig = NetworkConfig(hidden_size=12)) -> Policy:  # noqa: B008 — frozen
    return perturbed_policy(make_policy(NETWORK, memory, generator=torch.Generator().manual_seed(0)))
