"""What a step gains over the one that the heuristic would take, learned from branches.

A branch is a copy of a host that takes another step at some turn, and is decided about by the heuristic from then on. Its end, minus that
of the host, is what the step changes: the loss, and the size that the rent is paid for. Pairs of hosts differ in nothing else, so a branch
tells more about a step than a host of its own would.

    gains = fit(branches, seed=0)
    controller = Improved(gains, config, caution=0.5, most=1)     # the heuristic, but where another step is surely better

An ensemble predicts the changes from what is seen of the turn, of the step and of the advised one. Its members are fitted to different
samples of the cells. A step is taken if it is better than what the heuristic advises by their mean, and still is with `caution` standard
deviations added. Where the members differ much, the host is grown as the heuristic would grow it. So it is where a turn and a step are
farther from those that were learned from than nearly all of these are from their mean.

Shapes: M = branches, F = features, E = members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from esper.controller.features import HOST_WIDTH, OPTION, TARGET, Observation, Vector, observe
from esper.controller.turn import OPS, Step, Turn, steps_of
from esper.growth.config import GrowthConfig, RentConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.controllers.lookahead import Lookahead, seeds_of
from esper.growth.lifecycle.stages import Action, Decision, Germinate, GrowthState, Trial
from esper.rng import Streams

STEP_WIDTH = len(OPS) + TARGET.width + OPTION.width  # of the features of a step
WIDTH = HOST_WIDTH + 2 * STEP_WIDTH
GROWING = ("germinate", "wait")  # operations that may take each other's place
FAR = 0.99  # share of the branches that are not farther than the limit of an ensemble
UNITS = (0.1, 1.0, 1.0)  # typical changes: of the loss, in units of its scale, and of the logarithms of parameters and FLOPs


# Data


class Change(NamedTuple):
    """What a step changes at the end of the training, in comparison with the advised one."""

    loss: float  # of data that the host did not learn from, in units of the scale
    parameters: float  # of log(1 + added / host)
    flops: float  # likewise

    def cost(self, rent: RentConfig) -> float:
        """Return the change of loss and rent together; below 0 if the step was better."""
        return self.loss + rent.parameters * self.parameters + rent.flops * self.flops


@dataclass
class Branches:
    """The branches of many hosts."""

    features: list[Vector] = field(default_factory=list)  # see `described`
    changes: list[Change] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)  # number of the cell

    def __len__(self) -> int:
        return len(self.cells)


def described(seen: Observation, step: Step, advised: Step) -> Vector:
    """Return the features [F] of a step at a turn, and of the one that is advised there."""
    return np.concatenate([seen.host, _step_features(seen, step), _step_features(seen, advised)]).astype(np.float32)


def _step_features(seen: Observation, step: Step) -> Vector:
    op, target, option = seen.numbers_of(step)
    of_target = seen.targets[target] if step.target else np.zeros(TARGET.width, np.float32)
    of_option = seen.options[target, option] if step.blueprint else np.zeros(OPTION.width, np.float32)
    return np.concatenate([np.eye(len(OPS), dtype=np.float32)[op], of_target, of_option])


# Model


class Gains(nn.Module):
    """An ensemble of small networks. The first dimension of every weight is the member."""

    mean: Tensor
    deviation: Tensor
    limit: Tensor  # distance from what was learned from, beyond which nothing is predicted

    def __init__(self, *, width: int = 32, members: int = 16, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.width, self.members = width, members
        sizes = [WIDTH, width, width, len(UNITS)]
        self.weights = nn.ParameterList(
            torch.randn(members, before, after, generator=generator) * math.sqrt(2.0 / before) for before, after in pairwise(sizes)
        )
        with torch.no_grad():
            self.weights[-1] *= 0.1
        self.biases = nn.ParameterList(torch.zeros(members, 1, after) for after in sizes[1:])
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("deviation", torch.ones(WIDTH))
        self.register_buffer("limit", torch.tensor(math.inf))

    def distance(self, features: Tensor) -> Tensor:
        """Return how far features [M, F] are from the mean of those that were learned from: the mean square, in standard deviations [M]."""
        return ((features - self.mean) / self.deviation).square().mean(1)

    def forward(self, features: Tensor) -> Tensor:
        """Return the changes [E, M, 3] that members expect of steps with these features [M, F], in `UNITS`."""
        hidden = ((features - self.mean) / self.deviation).clamp(-4, 4).expand(self.members, -1, -1)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            if number < len(self.weights) - 1:
                hidden = F.silu(hidden)
        return hidden

    @torch.no_grad()
    def costs(self, features: NDArray[np.float32], rent: RentConfig) -> tuple[Vector, Vector, NDArray[np.bool_]]:
        """Return mean and standard deviation over the members of the change of loss and rent by each step [M], and which are too far."""
        prices = torch.tensor([1.0, rent.parameters, rent.flops]) * torch.tensor(UNITS)
        found = self(torch.from_numpy(features)) @ prices  # [E, M]
        return found.mean(0).numpy(), found.std(0).numpy(), (self.distance(torch.from_numpy(features)) > self.limit).numpy()


def fit(branches: Branches, *, seed: int, steps: int = 400, learning_rate: float = 3e-3, weight_decay: float = 1.0, **sizes: int) -> Gains:
    """Fit an ensemble by Huber's loss. Every member sees the cells of a bootstrap sample, large cells by the root of their branches."""
    streams = Streams(seed)
    gains = Gains(generator=streams.torch("weights"), **sizes)
    features = torch.from_numpy(np.stack(branches.features))
    wanted = torch.tensor(branches.changes, dtype=torch.float32) / torch.tensor(UNITS)
    with torch.no_grad():
        gains.mean.copy_(features.mean(0))
        gains.deviation.copy_(features.std(0).clamp(min=0.05))
        gains.limit.copy_(gains.distance(features).quantile(FAR))
    weights = _sample_weights(branches.cells, gains.members, streams.numpy("bootstrap"))
    matters = torch.tensor([2.0, 0.3, 0.3])  # of the changes
    optimizer = torch.optim.AdamW(gains.parameters(), lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for _ in range(steps):
        found = gains(features)
        errors = F.huber_loss(found, wanted.expand_as(found), reduction="none") @ matters
        optimizer.zero_grad()
        torch.autograd.backward((weights * errors).sum())
        optimizer.step()
        schedule.step()
    return gains.eval()


def bootstrap_counts(cells: Sequence[int], members: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return how often the sample of each member contains each record [E, M]. All records of a cell are drawn together."""
    names, of_record = np.unique(cells, return_inverse=True)
    counts = np.stack([np.bincount(rng.integers(len(names), size=len(names)), minlength=len(names)) for _ in range(members)])
    return counts[:, of_record]


def _sample_weights(cells: Sequence[int], members: int, rng: np.random.Generator) -> Tensor:
    """Return the weight of every branch for every member [E, M]."""
    _, of_branch, sizes = np.unique(cells, return_inverse=True, return_counts=True)
    weights = bootstrap_counts(cells, members, rng) / np.sqrt(sizes[of_branch])
    return torch.from_numpy((weights / weights.sum(1, keepdims=True)).astype(np.float32))


# Deciding


class Improved:
    """Decides as the heuristic does, but where the ensemble is sure that another step is better, after a probe.

    `most` is the number of other steps in a turn. With `tries` it looks ahead: copies of the training try what the controller `lookahead`
    would try, and what the ensemble prefers, and the best one goes on.
    """

    name = "improved"

    def __init__(self, gains: Gains, config: GrowthConfig, *, caution: float, most: int, tries: bool = False) -> None:
        self.gains, self.caution, self.most = gains, caution, most
        self.advisor: Heuristic | Lookahead = Lookahead(config) if tries else Heuristic(config)
        self.most_trials = 1 + self.advisor.most_trials if isinstance(self.advisor, Lookahead) else 0  # that it asks for at once
        self._looked_at: int | None = None
        self.improved = self.far = self.turns = 0  # decisions after a probe: other than the heuristic's, as its for being far, and all

    @property
    def heuristic(self) -> Heuristic:
        return self.advisor.heuristic if isinstance(self.advisor, Lookahead) else self.advisor

    def decide(self, state: GrowthState) -> Decision:
        decision = self.advisor.decide(state)
        if self._looked_at == state.epoch - 1:
            decision = self._improve(decision, state)
        if self._must_look(state):
            decision = replace(decision, probe=True)
        if decision.probe:
            decision, self._looked_at = replace(decision, not_probed=frozenset()), state.epoch
        return decision

    def _must_look(self, state: GrowthState) -> bool:
        """Return whether the heuristic would look at the host after the next epoch, if its losses called for it."""
        return state.epoch == self.heuristic.first_look(state.epochs) - 1 and Turn(state).may_look()

    def _improve(self, decision: Decision, state: GrowthState) -> Decision:
        """Return the decision with steps that are surely better in the place of those that the heuristic would take."""
        # The first trial is what the heuristic would do.
        advised = replace(decision, actions=(*decision.actions, *(decision.trials[0].actions if decision.trials else ())))
        turn, others, is_far = Turn(state, steps_of(advised, state), looked_at=self._looked_at), list[str](), False
        while not turn.is_over:
            step = turn.advised
            if len(others) < self.most and step.op in GROWING:
                step, cost, passed_over = self._best(turn)
                is_far = is_far or passed_over
                if step != turn.advised:
                    others.append(f"{step.in_words()} instead of {turn.advised.in_words()}: {cost:+.3f}")
            turn = turn.after(step)
        self.turns, self.improved, self.far = self.turns + 1, self.improved + bool(others), self.far + (is_far and not others)
        if not others:
            why = "far from all that was learned from, so as the heuristic" if is_far else ""
            return replace(decision, reason="; ".join(filter(None, (decision.reason, why))))
        if not self.most_trials or decision.probe:
            return turn.decision("; ".join(others))

        # Let copies of the training try it. What the heuristic decides about seeds that have grown is carried out at once.
        at_once = tuple(one for one in decision.actions if not isinstance(one, Germinate))
        own, heuristic = Trial("learned", _germinations(turn.actions)), Trial("heuristic", _germinations(advised.actions))
        trials = decision.trials or (heuristic,)
        if all(seeds_of(own.actions) != seeds_of(trial.actions) for trial in trials):
            trials = (*trials, own)
        return replace(decision, actions=at_once, reason=f"tries {'; '.join(others)}", passed_over={}, trials=trials)

    def _best(self, turn: Turn) -> tuple[Step, float, bool]:
        """Return the step to take, what it changes for sure, and whether a better one was passed over because it is too far."""
        advised = turn.advised
        others = [step for step in turn.legal() if step != advised and step.op in GROWING]
        if not others:
            return advised, 0.0, False
        seen = observe(turn)
        means, deviations, is_far = self.gains.costs(np.stack([described(seen, step, advised) for step in others]), turn.state.rent)
        costs = means + self.caution * deviations
        near = np.where(is_far, np.inf, costs)
        best = int(near.argmin())
        if near[best] < 0:
            return others[best], float(near[best]), False
        return advised, 0.0, bool(costs.min() < 0)

    def state_dict(self) -> dict[str, Any]:
        return {"heuristic": self.advisor.state_dict(), "looked_at": self._looked_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.advisor.load_state_dict(state["heuristic"])
        self._looked_at = state["looked_at"]


def _germinations(actions: Sequence[Action]) -> tuple[Germinate, ...]:
    return tuple(action for action in actions if isinstance(action, Germinate))
