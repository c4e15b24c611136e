"""The network of a unit: what it knows of itself, of contacts, comrades and the ground around it, in one vector.

Contacts share one encoder and keep their order, near to far, because the actor aims at them by their place in it; comrades share another
and are pooled. The vector goes through the policy's memory and around it. With a centralised critic the whole battle goes around it too,
for the critic alone.

Shapes: B = any leading dimension, C = contacts, A = allies, E = width of the vector, Z = width of what the critic knows besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.arena.config import ArenaConfig
from esper.arena.env import observation_spec
from esper.arena.layout import parts, state_width
from esper.arena.orders import action_spec
from esper.league.training_config import ArenaTrainConfig, UnitNetworkConfig
from esper.rl.config import NetworkConfig
from esper.rl.distributions import ActionDistribution
from esper.rl.networks import Dense, initialize, mlp
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.runs import load_module
from esper.vecenv import Obs

_ACTIVATION = "relu"
_NEARLY_UNIFORM = 0.01  # gain of the layer that choices come from


class UnitEncoder(nn.Module):
    """From an observation to [B, E], and behind it what goes around the core: the same again, and with a state view [B, Z]."""

    def __init__(self, config: UnitNetworkConfig, arena: ArenaConfig) -> None:
        super().__init__()
        self.layout = {part.name: part for part in parts(arena)}
        self.widths = [part.width for part in parts(arena)]
        entity, view = config.entity_width, config.terrain_width
        contacts, allies = self.layout["contacts"], self.layout["allies"]
        self.contact = mlp((contacts.width // contacts.times, entity), _ACTIVATION)
        self.ally = mlp((allies.width // allies.times, entity), _ACTIVATION) if allies.times else None
        self.terrain = mlp((self.layout["terrain"].width, view), _ACTIVATION)
        joined = self.layout["own"].width + contacts.times * entity + (entity if self.ally else 0) + view
        self.joint = mlp((joined, config.width), _ACTIVATION)
        self.battle = mlp((state_width(arena), config.state_width), _ACTIVATION) if arena.state_view else None
        self.output_size = config.width
        self.bypass_size = config.width + (config.state_width if arena.state_view else 0)

    def forward(self, obs: Obs | Tensor) -> Tensor:
        seen = obs if isinstance(obs, Tensor) else obs["obs"]
        own, contacts, allies, terrain = torch.split(seen, self.widths, dim=1)
        rows = len(seen)
        features = [own, self.contact(contacts.reshape(rows * self.layout["contacts"].times, -1)).view(rows, -1)]
        if self.ally is not None:
            features.append(self.ally(allies.reshape(rows * self.layout["allies"].times, -1)).view(rows, -1, self.ally_width).amax(1))
        features.append(self.terrain(terrain))
        joint = self.joint(torch.cat(features, 1))
        around = [joint, joint] if self.battle is None or isinstance(obs, Tensor) else [joint, joint, self.battle(obs["state"])]
        return torch.cat(around, 1)

    @property
    def ally_width(self) -> int:
        assert self.ally is not None
        layer = self.ally[0]
        assert isinstance(layer, nn.Linear)
        return layer.out_features


class UnitActor(nn.Module):
    """From what the core and the unit itself know to choices; of the whole battle, behind it, an actor knows nothing."""

    def __init__(self, width: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(*mlp((width, hidden), _ACTIVATION), Dense(hidden, outputs))

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layers(features[:, : self.width])
        return outputs


class Parts(NamedTuple):
    encoder: UnitEncoder
    actor: UnitActor
    critic: nn.Sequential


def make_parts(config: UnitNetworkConfig, network: NetworkConfig, arena: ArenaConfig, *, generator: torch.Generator) -> Parts:
    """Encoder, actor and critic, initialised."""
    with torch.random.fork_rng(devices=[]):  # torch's layers draw first weights from the global generator, and ours replace them
        encoder = UnitEncoder(config, arena)
        core = network.hidden_size if network.core != "none" else encoder.output_size
        actor = UnitActor(core + config.width, config.head_width, ActionDistribution(action_spec(arena)).num_outputs)
        critic = nn.Sequential(*mlp((core + encoder.bypass_size, config.head_width), _ACTIVATION), Dense(config.head_width, 1))
    for module in (encoder, actor.layers[:-1], critic[:-1]):
        initialize(module, generator)
    initialize(actor.layers[-1], generator, gain=_NEARLY_UNIFORM)
    initialize(critic[-1], generator, gain=1.0)
    return Parts(encoder, actor, critic)


def make_policy(
    config: UnitNetworkConfig, network: NetworkConfig, arena: ArenaConfig, *, generator: torch.Generator, device: torch.device,
    normalize_values: bool = True,
) -> Policy:  # fmt: skip
    """A policy for the units of an arena. Observations are scaled by their layout and need no normaliser."""
    encoder, actor, critic = make_parts(config, network, arena, generator=generator)
    return Policy(
        observation_spec(arena),
        action_spec(arena),
        network,
        generator=generator,
        device=device,
        encoder=encoder,
        actor=actor,
        critic=critic,
        normalize_observations=False,
        normalize_values=normalize_values,
    )


def make_player(config: ArenaTrainConfig, weights: Mapping[str, Tensor] | None = None, *, device: torch.device) -> Policy:
    """A policy of a training that learns no more, with these weights, or the first ones that the training had."""
    policy = make_policy(
        config.unit,
        config.ppo.network,
        config.arena,
        generator=Streams(config.ppo.seed).torch("unit"),
        device=device,
        normalize_values=config.ppo.normalize_values,
    )
    if weights is not None:
        load_module(policy, weights)
    return policy.eval().requires_grad_(False)
