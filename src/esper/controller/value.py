"""The value of growing: a regression of what a move gains in the end, fitted to hosts that grew at random.

    records = Records()                               # filled by RandomPlan(record=...), see `Recorder`
    model = fit(records, seed=0).model
    controller = ValueController(model)               # makes the moves that are worth more than their rent, by the model

For a state of a host and a move, or NOTHING, which means to grow nothing more, the model predicts two figures for the end of the training:
the gain over the twin, which never grows, in units of the loss scale; and the size, the rent at a price of 1. Both are means over a random
continuation: after the move, some hosts of the data went on to grow at random. So the value of a move is gain - price × size, at any price.
A host that has not grown, and grows nothing more, is its twin: there, both are exactly 0.

The members of an ensemble are fitted to different samples of the cells. Their spread, times a factor that makes it agree with their errors
in the cells that they have not seen, is the uncertainty.

Shapes: M = records, F = features, E = members of the ensemble.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.controller.branches import bootstrap_counts
from esper.controller.config import MoveNetworkConfig
from esper.controller.layout import FEATURES, Vector, decision, host_features, move_features, options, sizes_after, why_no_move
from esper.growth.controllers.moves import NOTHING, Move
from esper.growth.lifecycle.stages import Decision, GrowthState
from esper.rng import Streams

MEMBERS, WIDTH = MoveNetworkConfig().members, MoveNetworkConfig().width


# Data


def describe(state: GrowthState, some: Sequence[Move]) -> Vector:
    """Return the features [moves, F] of a host and each of these moves."""
    return np.concatenate([np.tile(host_features(state), (len(some), 1)), move_features(state, some)], axis=1)


@dataclass
class Recorder:
    """Records the moves of one host; it is the `record` of a plan."""

    features: list[Vector] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)  # with the move

    def __call__(self, state: GrowthState, move: Move) -> None:
        self.features.append(describe(state, [move])[0])
        self.sizes += sizes_after(state, [move])


@dataclass
class Records:
    """The moves of many hosts, with what came of them."""

    features: list[Vector] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)  # number of the cell; members of the ensemble are fitted to different cells
    sizes: list[float] = field(default_factory=list)  # right after the move
    gains: list[float] = field(default_factory=list)  # at the end, in units
    end_sizes: list[float] = field(default_factory=list)  # at the end

    def add(self, recorder: Recorder, *, cell: int, gain: float, end_size: float) -> None:
        count = len(recorder.sizes)
        self.features += recorder.features
        self.sizes += recorder.sizes
        self.cells += [cell] * count
        self.gains += [gain] * count
        self.end_sizes += [end_size] * count

    def __len__(self) -> int:
        return len(self.sizes)


# Model


@dataclass(frozen=True)
class Prediction:
    """What a move comes to, by all members of an ensemble."""

    gain: Tensor  # [E, M]
    size: Tensor  # [E, M]

    def value(self, price: float | Tensor) -> Tensor:
        """Return gain - price × size [E, M], at one price or at one for each move [M]."""
        return self.gain - price * self.size


class ValueModel(nn.Module):
    """An ensemble of small networks. The first dimension of every weight is the member."""

    mean: Tensor
    deviation: Tensor
    gain_scale: Tensor
    calibration: Tensor

    def __init__(self, *, width: int = WIDTH, members: int = MEMBERS, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.width, self.members = width, members
        sizes = [len(FEATURES), width, width, 2]
        self.weights = nn.ParameterList(
            torch.randn(members, before, after, generator=generator) * math.sqrt((2.0 if number else 1.0) / before)
            for number, (before, after) in enumerate(pairwise(sizes))
        )
        with torch.no_grad():
            self.weights[-1] *= 0.1
        self.biases = nn.ParameterList(torch.zeros(members, 1, after) for after in sizes[1:])
        self.register_buffer("mean", torch.zeros(len(FEATURES)))
        self.register_buffer("deviation", torch.ones(len(FEATURES)))
        self.register_buffer("gain_scale", torch.ones(()))
        self.register_buffer("calibration", torch.ones(()))  # standard error of a prediction / standard deviation of the members

    def forward(self, features: Tensor, sizes: Tensor) -> Prediction:
        """Predict what moves with these features [M, F] come to; `sizes` [M] are those of the host right after them."""
        hidden = ((features - self.mean) / self.deviation).clamp(-4, 4).expand(len(self.weights[0]), -1, -1)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            if number < len(self.weights) - 1:
                hidden = F.silu(hidden)
        gain, more = hidden.unbind(dim=2)
        has_grown = sizes > 0
        return Prediction(self.gain_scale * gain * has_grown, (sizes + F.softplus(more - 1)) * has_grown)

    def scores(self, value: Tensor, caution: float) -> Tensor:
        """Return how far moves are ahead of the first one, by their values [E, ..., moves], less `caution` times the standard error."""
        ahead = value - value[..., :1]
        return ahead.mean(0) - caution * self.calibration * (ahead.var(0) + 1e-12).sqrt()


@dataclass(frozen=True)
class Fit:
    """A fitted model, and its R² in cells that its members have not seen."""

    model: ValueModel
    r2: float  # of the gains


def fit(
    records: Records,
    *,
    seed: int,
    steps: int = 400,
    learning_rate: float = 3e-3,
    weight_decay: float = 0.3,
    device: torch.device | str = "cpu",
) -> Fit:
    """Fit a model by Huber's loss. Every member sees the cells of a bootstrap sample, and is tested in the others.

    Errors of gains above the mean absolute gain count linearly, because in some cells hosts gain more than ten times the mean.
    """
    streams = Streams(seed)
    model = ValueModel(generator=streams.torch("weights")).to(device)
    features = torch.from_numpy(np.stack(records.features)).to(device)
    sizes, gains, ends = (torch.tensor(values, device=device).float() for values in (records.sizes, records.gains, records.end_sizes))
    with torch.no_grad():
        model.mean.copy_(features.mean(0))
        model.deviation.copy_(features.std(0).clamp(min=0.05))
        model.gain_scale.copy_(gains.abs().mean().clamp(min=1e-3))
    drawn = torch.from_numpy(bootstrap_counts(records.cells, MEMBERS, streams.numpy("bootstrap"))).float().to(device)  # [E, M]
    weights = drawn / drawn.sum(dim=1, keepdim=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for _ in range(steps):
        found = model(features, sizes)
        wanted, expected = gains.expand_as(found.gain), found.gain
        loss = 2 * F.huber_loss(expected / model.gain_scale, wanted / model.gain_scale, reduction="none")
        loss = loss + 0.1 * (ends - found.size).square()
        optimizer.zero_grad()
        (weights * loss).sum().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        calibration, r2 = _test_unseen(model(features, sizes).gain, gains, drawn == 0, records.cells)
        model.calibration.fill_(calibration)
    return Fit(model.cpu().eval(), r2)


def _test_unseen(predicted: Tensor, gains: Tensor, is_unseen: Tensor, cells: Sequence[int]) -> tuple[float, float]:
    """Return the calibration of a model and its R², from predictions [E, M] of members for records that they have not seen.

    The calibration is the ratio of two means over cells: of the squared errors of the cell's mean gain, and of the variances of the
    members' predictions of it. It is 1 where no cell is unseen by two members.
    """
    of_cell = torch.from_numpy(np.unique(cells, return_inverse=True)[1]).to(gains.device)
    squared_errors, variances, residual, total = [], [], 0.0, 0.0
    for cell in range(int(of_cell.max()) + 1):
        records = of_cell == cell
        members = is_unseen[:, records].all(dim=1)
        if members.sum() < 2:
            continue
        some, truth = predicted[members][:, records], gains[records]
        means = some.mean(dim=1)
        squared_errors.append((means.mean() - truth.mean()).square())
        variances.append(means.var())
        residual += float((some.mean(dim=0) - truth).square().sum())
        total += float((truth - gains.mean()).square().sum())
    if not variances or not total:
        return 1.0, math.nan
    return math.sqrt(float(sum(squared_errors)) / max(float(sum(variances)), 1e-12)), 1 - residual / total


# Deciding


class ValueController:
    """Makes the move with the highest value, if it is above that of growing nothing more by `caution` standard errors.

    It decides from the second decision on, when there are losses and the estimates of a probe. The price is that of the host's parameters;
    another price of FLOPs than that of `rent_at` is not seen.
    """

    name = "value"

    def __init__(self, model: ValueModel, *, caution: float = 0.0) -> None:
        self.model, self.caution = model, caution

    def decide(self, state: GrowthState) -> Decision:
        return decision(state, *self._choose(state, list(options(state).values())))

    def _choose(self, state: GrowthState, possible: Sequence[Move]) -> tuple[Move, str]:
        """Return the move to make and the reason. The first of the possible moves is NOTHING."""
        if len(possible) < 2:
            return NOTHING, why_no_move(state)
        with torch.no_grad():
            found = self.model(torch.from_numpy(describe(state, possible)), torch.tensor(sizes_after(state, possible)))
        value = found.value(state.rent.parameters)
        score = self.model.scores(value, self.caution)
        best = int(score.argmax())
        second = best or 1 + int(score[1:].argmax())
        gain, more = float(found.gain[:, second].mean()), float((value[:, second] - value[:, 0]).mean())
        why = f"{possible[second].name}: expected to end {gain:.3g} ahead of never growing, and {more:.3g} ahead of growing nothing more"
        return possible[best], why if best else f"grows nothing; best is {why}"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
