"""The network of a unit: encodes its own state, contacts, allies and the terrain around it as one vector.

All contacts share one encoder and stay in order, nearest first. All allies share another encoder and are max-pooled. The vector goes into
the policy's recurrent core and also bypasses it, and so do the encoded contacts: the actor points at one of them by the product of its
encoding with a query. With a centralised critic, an encoding of the whole battle bypasses the core too; only the critic reads it.

Shapes: B = rows, C = contacts, A = allies, E = width of the vector, K = width of an encoded contact, Z = width of the encoded battle.
"""

from __future__ import annotations

import math
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
from esper.vecenv import ActionSpec, Obs

_ACTIVATION = "relu"
_NEARLY_UNIFORM = 0.01  # gain of the actor's last layer: first choices are nearly uniform


class UnitEncoder(nn.Module):
    """Encodes observations as [B, E + bypass_size]: the input of the core [B, E], then the columns that bypass it.

    These are the same vector [B, E], the encoded contacts [B, C·K] and, with a state view, the encoded battle [B, Z].
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
        self.bypass_size = config.width + contacts.times * entity + (config.state_width if arena.state_view else 0)

    def forward(self, obs: Obs | Tensor) -> Tensor:
        seen = obs if isinstance(obs, Tensor) else obs["obs"]
        own, contacts, allies, terrain = torch.split(seen, self.widths, dim=1)
        rows = len(seen)
        # Contacts: [B, C * width] -> [B * C, width] -> encoder -> [B, C * entity]; allies likewise, then the maximum over A.
        encoded = self.contact(contacts.reshape(rows * self.layout["contacts"].times, -1)).view(rows, -1)
        features = [own, encoded]
        if self.ally is not None:
            features.append(self.ally(allies.reshape(rows * self.layout["allies"].times, -1)).view(rows, -1, self.ally_width).amax(1))
        features.append(self.terrain(terrain))
        joint = self.joint(torch.cat(features, 1))
        columns = [joint, joint, encoded]
        if self.battle is not None and not isinstance(obs, Tensor):
            columns.append(self.battle(obs["state"]))
        return torch.cat(columns, 1)

    @property
    def ally_width(self) -> int:
        assert self.ally is not None
        layer = self.ally[0]
        assert isinstance(layer, nn.Linear)
        return layer.out_features


class UnitActor(nn.Module):
    """Computes logits and means of the action from the first `width` features: the core's output and the unit's own vector.

    The encoded contacts follow. The logit of a contact is the product of its encoding and a query; without `points`, it is an output like
    the others. The features may end with the encoded battle, which only the critic reads.
    """

    def __init__(self, width: int, hidden: int, spec: ActionSpec, *, contacts: int, entity: int, points: bool) -> None:
        super().__init__()
        self.width, self.contacts, self.entity = width, contacts, entity
        place = ActionDistribution(spec).output_slices["target"]
        outputs = ActionDistribution(spec).num_outputs
        self.widths = [place.start, outputs - place.stop] if points else [outputs]  # outputs before and after the logits of contacts
        self.hidden = mlp((width, hidden), _ACTIVATION)
        self.plain = Dense(hidden, sum(self.widths))
        self.query = Dense(hidden, entity) if points else None
        self.heads_of_layers = {"query": ("target",)}  # heads that a layer affects; other layers affect all

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.hidden(features[:, : self.width])
        outputs: Tensor = self.plain(hidden)
        if self.query is None:
            return outputs
        keys = features[:, self.width : self.width + self.contacts * self.entity].reshape(-1, self.contacts, self.entity)
        target = torch.matmul(keys, self.query(hidden).unsqueeze(2)).squeeze(2) / math.sqrt(self.entity)
        before, after = torch.split(outputs, self.widths, dim=1)
        return torch.cat((before, target, after), 1)


class UnitNetworkParts(NamedTuple):
    """Custom parts of a `Policy`."""

    encoder: UnitEncoder
    actor: UnitActor
    critic: nn.Sequential


def player_spec(config: UnitNetworkConfig, arena: ArenaConfig) -> ActionSpec:
    """Return the action spec of a player."""
    return action_spec(arena, is_categorical=config.motion == "categorical")


def make_parts(config: UnitNetworkConfig, network: NetworkConfig, arena: ArenaConfig, *, generator: torch.Generator) -> UnitNetworkParts:
    """Make encoder, actor and critic, initialised with `generator`."""
    with torch.random.fork_rng(devices=[]):  # constructors of torch's layers draw from the global generator; keep it unchanged
        encoder = UnitEncoder(config, arena)
        core = network.hidden_size if network.core != "none" else encoder.output_size
        spec = player_spec(config, arena)
        sizes = {"contacts": encoder.layout["contacts"].times, "entity": config.entity_width}
        actor = UnitActor(core + config.width, config.head_width, spec, **sizes, points=config.points)
        critic = nn.Sequential(*mlp((core + encoder.bypass_size, config.head_width), _ACTIVATION), Dense(config.head_width, 1))
    for module in (encoder, actor.hidden, critic[:-1]):
        initialize(module, generator)
    for layer in (actor.plain, actor.query):
        if layer is not None:
            initialize(layer, generator, gain=_NEARLY_UNIFORM)
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
        player_spec(config, arena),
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
