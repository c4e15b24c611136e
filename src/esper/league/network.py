"""The network of a unit: encodes its own state, contacts, allies and the terrain around it as one vector.

All contacts share one encoder and stay in order, nearest first, because the actor aims at a contact by its index. All allies share another
encoder and are max-pooled. The vector goes into the policy's recurrent core and also bypasses it. With a centralised critic, an encoding
of the whole battle bypasses the core too; only the critic reads it.

Shapes: B = rows, C = contacts, A = allies, E = width of the vector, Z = width of the encoded battle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.arena.config import ArenaConfig
from esper.arena.env import observation_spec
from esper.arena.observe import parts, state_width
from esper.arena.orders import action_spec
from esper.league.config import ArenaTrainConfig, UnitNetworkConfig
from esper.rl.config import NetworkConfig
from esper.rl.distributions import ActionDistribution
from esper.rl.networks import Dense, initialize, mlp
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.runs import load_module
from esper.vecenv import Obs

_ACTIVATION = "relu"
_NEARLY_UNIFORM = 0.01  # gain of the actor's last layer: first choices are nearly uniform


class UnitEncoder(nn.Module):
    """Encodes observations as [B, E + bypass_size]: the input of the core [B, E], then the columns that bypass it.

    These are the same vector [B, E] and, with a state view, the encoded battle [B, Z].
    """

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
        # Contacts: [B, C * width] -> [B * C, width] -> encoder -> [B, C * entity]; allies likewise, then the maximum over A.
        features = [own, self.contact(contacts.reshape(rows * self.layout["contacts"].times, -1)).view(rows, -1)]
        if self.ally is not None:
            features.append(self.ally(allies.reshape(rows * self.layout["allies"].times, -1)).view(rows, -1, self.ally_width).amax(1))
        features.append(self.terrain(terrain))
        joint = self.joint(torch.cat(features, 1))
        columns = [joint, joint] if self.battle is None or isinstance(obs, Tensor) else [joint, joint, self.battle(obs["state"])]
        return torch.cat(columns, 1)

    @property
    def ally_width(self) -> int:
        assert self.ally is not None
        layer = self.ally[0]
        assert isinstance(layer, nn.Linear)
        return layer.out_features


class UnitActor(nn.Module):
    """Computes logits and means of the action from the first `width` features: the core's output and the unit's own vector.

    The features may end with the encoded battle, which only the critic reads.
    """

    def __init__(self, width: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(*mlp((width, hidden), _ACTIVATION), Dense(hidden, outputs))

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layers(features[:, : self.width])
        return outputs


class UnitNetworkParts(NamedTuple):
    """Custom parts of a `Policy`."""

    encoder: UnitEncoder
    actor: UnitActor
    critic: nn.Sequential


def make_parts(config: UnitNetworkConfig, network: NetworkConfig, arena: ArenaConfig, *, generator: torch.Generator) -> UnitNetworkParts:
    """Make encoder, actor and critic, initialised with `generator`."""
    with torch.random.fork_rng(devices=[]):  # constructors of torch's layers draw from the global generator; keep it unchanged
        encoder = UnitEncoder(config, arena)
        core = network.hidden_size if network.core != "none" else encoder.output_size
        actor = UnitActor(core + config.width, config.head_width, ActionDistribution(action_spec(arena)).num_outputs)
        critic = nn.Sequential(*mlp((core + encoder.bypass_size, config.head_width), _ACTIVATION), Dense(config.head_width, 1))
    for module in (encoder, actor.layers[:-1], critic[:-1]):
        initialize(module, generator)
    initialize(actor.layers[-1], generator, gain=_NEARLY_UNIFORM)
    initialize(critic[-1], generator, gain=1.0)
    return UnitNetworkParts(encoder, actor, critic)


def make_policy(
    config: UnitNetworkConfig, network: NetworkConfig, arena: ArenaConfig, *, generator: torch.Generator, device: torch.device,
    normalize_values: bool = True,
) -> Policy:  # fmt: skip
    """Make a policy for the units of an arena. Observations are scaled by their layout and need no normaliser."""
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
    """Make a frozen policy of a run with the given weights; without weights, with the initial ones of the run."""
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
