"""The network of a controller: a value model of the moves, and a recurrent core that corrects it.

Encoder: the value model predicts what every move is worth at the price of the host, compared with growing nothing more. The host, the price
and these scores make a summary, which is the input of the core. The summary, the scores and the worth of the state bypass the core.

Actor: the logit of a move is its score / temperature, plus a correction by core and summary. Critic: the worth of the state, plus a
correction. Both corrections are 0 at first, so a policy starts as its value model does, and differs from it where it has learned to.

Shapes: B = any leading dimension (hosts, or packed steps), K = moves, nothing included, M = members of the value model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.controller.config import MoveNetworkConfig
from esper.controller.features import HOST, MOVE
from esper.controller.layout import MOVE_NAMES, spec
from esper.controller.value import ValueModel
from esper.rl.config import NetworkConfig
from esper.rl.networks import Dense, initialize, mlp
from esper.rl.policy import Policy
from esper.vecenv import Obs

_ACTIVATION = "relu"
_MOVES = len(MOVE_NAMES)
_LOWEST_PRICE = 1e-4  # where the logarithm of the price is cut off


class MoveEncoder(nn.Module):
    """Encodes an observation as [B, E + bypass]: the summary for the core; again the summary, the scores of the moves and the worth."""

    def __init__(self, config: MoveNetworkConfig, *, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.output_size = config.summary_width
        self.bypass_size = config.summary_width + _MOVES + 1
        self.value = ValueModel(width=config.width, members=config.members, generator=generator)
        self.summary = mlp((HOST.width + 1 + _MOVES, config.summary_width), _ACTIVATION)

    def forward(self, obs: Obs) -> Tensor:
        scores, worth = self.scores(obs)
        price = obs["price"].clamp_min(_LOWEST_PRICE).log() / 5
        summary = self.summary(torch.cat((obs["host"], price, scores), dim=1))
        return torch.cat((summary, summary, scores, worth), dim=1)

    def scores(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Return the score of every move, 0 for growing nothing and for what is not possible [B, K], and the worth of the state [B, 1]."""
        count = len(obs["host"])
        hosts = obs["host"].unsqueeze(1).expand(-1, _MOVES, -1)
        features = torch.cat((hosts, obs["moves"]), dim=2)
        found = self.value(features.flatten(0, 1), obs["sizes"].flatten())
        value = found.value(obs["price"].expand(-1, _MOVES).flatten()).view(-1, count, _MOVES)  # [M, B, K]
        scores = self.value.scores(value, self.config.caution) * (obs["moves"][..., MOVE.column("grows")] > 0.5)
        return scores, value.mean(0)[:, :1] + scores.amax(1, keepdim=True)


class MoveActor(nn.Module):
    """Computes the logits [B, K] from core output, summary, scores and worth."""

    def __init__(self, config: MoveNetworkConfig, *, core_width: int) -> None:
        super().__init__()
        self.temperature, self.front = config.temperature, core_width + config.summary_width
        self.correction = Dense(self.front, _MOVES)

    def forward(self, features: Tensor) -> Tensor:
        correction: Tensor = self.correction(features[:, : self.front])
        return correction + features[:, self.front : -1] / self.temperature


class CriticInput(nn.Module):
    """Returns core output, summary and worth, without the scores."""

    def __init__(self, front: int) -> None:
        super().__init__()
        self.front = front

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat((features[:, : self.front], features[:, -1:]), dim=1)


class ControllerNetworkParts(NamedTuple):
    """Custom parts of a controller's policy: `PPO(env, config, parts.encoder, actor=parts.actor, critic=parts.critic)`."""

    encoder: MoveEncoder
    actor: MoveActor
    critic: nn.Sequential


def make_parts(
    config: MoveNetworkConfig, memory: NetworkConfig, *, generator: torch.Generator, value: ValueModel | None = None
) -> ControllerNetworkParts:
    """Build encoder, actor and critic, with the weights of a value model if one is given."""
    # torch's layers draw initial weights from the global generator. Fork it, so that it stays as it is; `initialize` overwrites them.
    with torch.random.fork_rng(devices=[]):
        encoder = MoveEncoder(config, generator=generator)
        actor = MoveActor(config, core_width=encoder.output_size if memory.core == "none" else memory.hidden_size)
        last = Dense(actor.front + 1, 1)
        critic = nn.Sequential(CriticInput(actor.front), last)
    initialize(encoder.summary, generator)
    if value is not None:
        encoder.value.load_state_dict(value.state_dict())
    with torch.no_grad():
        for layer in (actor.correction, last):
            layer.weight.zero_()
            layer.bias.zero_()
        last.weight[0, -1] = 1.0
    return ControllerNetworkParts(encoder, actor, critic)


def make_policy(config: MoveNetworkConfig, memory: NetworkConfig, *, generator: torch.Generator, value: ValueModel | None = None) -> Policy:
    """Build a new policy, in the same way as training does."""
    parts = make_parts(config, memory, generator=generator, value=value)
    return Policy(
        *spec(),
        memory,
        generator=generator,
        encoder=parts.encoder,
        actor=parts.actor,
        critic=parts.critic,
        normalize_observations=False,
        normalize_values=False,
    )
