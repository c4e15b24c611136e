"""Policies of controllers, for tests: new ones, and some with weights that are not those of birth."""

from __future__ import annotations

import torch

from esper.controller.config import StepNetworkConfig
from esper.controller.policy import SIZES, Sizes, make_policy
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy

NETWORK = StepNetworkConfig(width=16)
MEMORY = NetworkConfig(hidden_size=12)


def new_policy(*, trust: float = 4.0, memory: NetworkConfig = MEMORY, sizes: Sizes = SIZES, seed: int = 0) -> Policy:
    network = StepNetworkConfig(width=NETWORK.width, trust=trust)
    return make_policy(network, memory, sizes, generator=torch.Generator().manual_seed(seed)).eval()


def perturbed_policy(policy: Policy, seed: int = 1) -> Policy:
    """Perturb all weights of a policy: logits near zero would hide mistakes."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=draws))
    return policy


def trained_policy(memory: NetworkConfig = MEMORY, *, sizes: Sizes = SIZES) -> Policy:
    """Return a policy that decides otherwise than its advisor, also by its likeliest steps."""
    return perturbed_policy(new_policy(trust=0.0, memory=memory, sizes=sizes))
