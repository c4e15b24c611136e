"""The heuristic controller: grows a starved host early, where and what the probe says, and keeps what pays its rent.

It looks once after a tenth of the training, and again whenever the training loss stops falling or jumps up, as long as enough of the
training is left. Before it looks it asks for a probe.

A host is starved when its training loss is still high, validation does not lag behind it, and one of these holds:
- the loss is going to end high: training losses fall like a power of time, and the last epochs tell which;
- the data could teach more weights than the host has.

A starved host is undertrained where longer training would give more for the same FLOPs: its own loss is still going to fall at the end, and
what the seeds promise now is not many times as much. It is let alone. How many times was measured (docs/log.md).

In every free slot it takes the candidate that would lower the loss most within an epoch, after its rent, as long as the data could teach
that many weights in that place: a convolution over a wide map sees many positions in one sample, one over a small map few. Right before the
head it asks for ten times the evidence: what grows there lowers the training loss fastest of all, and does not generalise from few samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from esper.growth.config import GrowthConfig, HeuristicConfig
from esper.growth.lifecycle.stages import (
    LIVING,
    Action,
    Advance,
    Candidate,
    Contribution,
    Decision,
    Fossilize,
    Germinate,
    GrowthState,
    Prune,
    SlotState,
    Stage,
)
from esper.growth.measure.rent import Allowance
from esper.text_table import figure

FIRST_LOOK = 2  # epochs that a look needs at least
PATIENCE = 3  # probations before a seed can be found useless: it takes longer to show than to be seen
LITTLE_BEHIND = 0.1  # of the host's FLOPs
MOST_EPOCHS = 10_000  # more than anybody is advised to train for
UNKNOWN_HORIZON = 10  # where nobody knows how long the training will be: this many times longer than now


class Heuristic:
    name = "heuristic"

    def __init__(self, config: GrowthConfig) -> None:
        self.rules = config.heuristic
        self.lifecycle = config.lifecycle
        self._looks_at: int | None = None  # the epoch after which the probe that it asked for will have answered

    def decide(self, state: GrowthState) -> Decision:
        actions = [action for slot in state.slots for action in self._review(slot, state)]
        if why := self.why_nothing_can_grow(state.epochs):
            return Decision(tuple(actions), why)
        if self._looks_at == state.epoch:
            grown, why = self._grow(state)
            return Decision((*actions, *grown), why)
        must_look, why = self._look(state)
        if must_look:
            self._looks_at = state.epoch + 1
        return Decision(tuple(actions), why, probe=must_look)

    # Seeds that are there

    def _review(self, slot: SlotState, state: GrowthState) -> list[Action]:
        name = slot.place.name
        if slot.stage is Stage.TRAINING and slot.epochs_in_stage >= self.lifecycle.training_epochs:
            return [Advance(name, f"it has learned for {slot.epochs_in_stage} epochs")]
        measured = slot.contribution
        if slot.stage is not Stage.HOLDING or measured is None or measured.epoch != state.epoch:
            return []
        is_last = state.epochs is not None and state.epoch >= state.epochs
        is_settled = slot.epochs_in_stage >= PATIENCE * self.lifecycle.holding_epochs
        return judge(name, measured, slot.rent, may_prune=is_settled or is_last, is_last=is_last)

    # Seeds to come

    def _look(self, state: GrowthState) -> tuple[bool, str]:
        """Whether a probe should look at the candidates during the next epoch, and why or why not."""
        first, has_candidates = self._first_look(state.epochs), any(slot.candidates for slot in state.slots)
        if state.epoch < first - 1 or not has_candidates or not self._is_in_time(state.epochs, at=state.epoch + 1):
            return False, ""
        verdict = starvation(state, self.rules)
        if state.epoch == first - 1:
            return verdict.is_starved, "looks for places to grow" if verdict.is_starved else f"lets the host alone: {verdict.reason}"
        is_busy = any(slot.stage in LIVING for slot in state.slots)  # first let those on trial show what they are worth
        has_just_looked = self._looks_at is not None and state.epoch < self._looks_at + self.rules.plateau_epochs
        if is_busy or has_just_looked or not verdict.is_starved:
            return False, ""
        why = has_jumped(state, self.rules) or has_stopped_falling(state, self.rules)
        return bool(why), why

    def _first_look(self, epochs: int | None) -> int:
        return max(FIRST_LOOK, round(self.rules.grow_at * epochs) if epochs else FIRST_LOOK)

    def _is_in_time(self, epochs: int | None, *, at: int) -> bool:
        if epochs is None:
            return True
        return at <= max(self.rules.grow_until * epochs, self._first_look(epochs)) and epochs - at >= self._trial_epochs()

    def why_nothing_can_grow(self, epochs: int | None) -> str:
        """Why a training of so many epochs is too short to grow anything; empty where it is not."""
        first = self._first_look(epochs)
        if epochs is None or self._is_in_time(epochs, at=first):
            return ""
        longer = range(epochs + 1, epochs + MOST_EPOCHS)
        least = next((longer for longer in longer if self._is_in_time(longer, at=self._first_look(longer))), None)
        advice = "lower heuristic.grow_at" if least is None else f"train for at least {least} epochs, or shorten lifecycle.holding_epochs"
        return (
            f"nothing can grow in {epochs} epochs: the first seed would germinate after epoch {first}, and needs "
            f"{self._trial_epochs()} more before it can be kept; {advice}"
        )

    def _trial_epochs(self) -> int:
        """What a seed needs at least before it can be kept."""
        rules = self.lifecycle
        before = rules.training_epochs + rules.blend_epochs if rules.raise_mode == "shadow" else 0
        return before + rules.holding_epochs + 1

    def _grow(self, state: GrowthState) -> tuple[list[Action], str]:
        verdict = starvation(state, self.rules)
        if not verdict.is_starved:
            return [], f"lets the host alone: {verdict.reason}"
        plan = choose(state, self.rules)
        if not plan:
            return [], f"the host is starved ({verdict.reason}), but nothing that fits would pay"
        times = speed_over_longer_training(state, [candidate for _, candidate in plan])
        if times < self.rules.longer_training:
            return [], (
                f"lets the host alone: it is undertrained. For the same FLOPs, seeds promise {times:.1f} times the fall of the loss that "
                f"the host would still make by itself at the end of its training, and it takes {self.rules.longer_training:g} times to "
                "pay; train longer"
            )
        return [Germinate(name, _why(one, state), one.blueprint) for name, one in plan], f"the host is starved: {verdict.reason}"

    def state_dict(self) -> dict[str, Any]:
        return {"looks_at": self._looks_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._looks_at = state["looks_at"]


def judge(name: str, measured: Contribution, rent: float, *, may_prune: bool, is_last: bool) -> list[Action]:
    """Keep a seed that certainly pays its rent, prune one that certainly does not, wait while it is open, and end with the estimate."""
    gain = measured.gain
    words = f"{measured.in_words()}, and its rent is {figure(rent)}"
    if gain.low > rent or (is_last and gain.estimate > rent):
        return [Fossilize(name, words)]
    if may_prune and (gain.high < rent or is_last):
        return [Prune(name, words)]
    return []


@dataclass(frozen=True, slots=True)
class Starvation:
    is_starved: bool
    reason: str


def starvation(state: GrowthState, rules: HeuristicConfig) -> Starvation:
    """Whether more capacity would help, from what the losses tell."""
    assert state.scale is not None  # it is known when the first epoch is over
    scale, train, val = state.scale, state.train_losses[-1], state.val_losses[-1]
    is_now = f"its training loss is {figure(train, 3)}"
    if scale.relative(train) < rules.high_loss:
        return Starvation(False, f"{is_now}, below {rules.high_loss:.0%} of the uninformed loss, {figure(scale.uninformed, 2)}")
    if scale.relative(val) > rules.overfit_gap * scale.relative(train):
        return Starvation(False, f"it overfits: validation loss {figure(val, 3)}, training loss {figure(train, 3)}")
    end = projected_loss(scale.above_floor(state.train_losses), state.epochs or UNKNOWN_HORIZON * state.epoch) + scale.floor
    if scale.relative(end) > rules.projected_loss:
        return Starvation(True, f"{is_now} and going to end at about {figure(end, 3)}")
    if state.samples_per_epoch and state.host_load < state.samples_per_epoch:
        return Starvation(True, f"{is_now}, and the data could teach more weights than it has")
    return Starvation(False, f"its training loss is going to end at about {figure(end, 3)}")


def projected_loss(losses: Sequence[float], epochs: int) -> float:
    """Where a loss above its floor will be after so many epochs, if it goes on falling by the power of time of the last two.

    >>> round(projected_loss([1.0, 0.5, 1 / 3], 30), 4)
    0.0333
    """
    now = len(losses)
    if now < 2 or losses[-1] <= 0 or losses[-2] <= 0 or epochs <= now:
        return losses[-1]
    power = math.log(losses[-2] / losses[-1]) / math.log(now / (now - 1))
    return losses[-1] * math.exp(-max(power, 0.0) * math.log(epochs / now))


def has_stopped_falling(state: GrowthState, rules: HeuristicConfig) -> str:
    assert state.scale is not None
    losses, count = state.train_losses, rules.plateau_epochs
    if len(losses) <= count:
        return ""
    before, now = losses[-1 - count], min(losses[-count:])
    if state.scale.relative(now) > (1 - rules.plateau_fall) * state.scale.relative(before):
        return f"the training loss was {figure(before, 3)} {count} epochs ago and is {figure(losses[-1], 3)}"
    return ""


def has_jumped(state: GrowthState, rules: HeuristicConfig) -> str:
    """The data have changed: the last two losses are well above those before."""
    assert state.scale is not None
    losses, count = state.train_losses, rules.plateau_epochs
    if len(losses) < count + 2:
        return ""
    before = sorted(losses[-2 - count : -2])[count // 2]
    if state.scale.relative(min(losses[-2:])) > rules.data_change * state.scale.relative(before):
        return f"the training loss has risen from {figure(before, 3)} to {figure(losses[-1], 3)}"
    return ""


def fall_at_the_end(losses: Sequence[float], epochs: int) -> float:
    """How far a loss above its floor will fall in the last of so many epochs, if it goes on falling by the power of time of the last two.

    The mean loss of an epoch is taken for that of its middle.

    >>> round(fall_at_the_end([(epoch + 0.5) ** -0.5 for epoch in range(4)], 100), 6)
    0.0005
    """
    now = len(losses)
    if now < 2 or not 0 < losses[-1] < losses[-2]:
        return 0.0
    power = math.log(losses[-2] / losses[-1]) / math.log((now - 0.5) / (now - 1.5))
    end = losses[-1] * math.exp(-power * math.log(max(epochs, now) / (now - 0.5)))
    return power * end / max(epochs, now)


def speed_over_longer_training(state: GrowthState, chosen: Sequence[Candidate]) -> float:
    """How many times as much these would lower the loss now as the host by itself at the end of its training, for the same FLOPs."""
    assert state.scale is not None
    own = fall_at_the_end(state.scale.above_floor(state.train_losses), state.epochs or UNKNOWN_HORIZON * state.epoch)
    cost = sum(candidate.cost.flops for candidate in chosen) / max(state.host_cost.flops, 1)  # of a step of the host's own
    promised = sum(candidate.promise or 0.0 for candidate in chosen) * max(state.steps_per_epoch, 1)
    return promised / (own * cost) if own * cost > 0 else math.inf


def choose(state: GrowthState, rules: HeuristicConfig) -> list[tuple[str, Candidate]]:
    """(slot, candidate) of what to grow: the best candidate of every free slot, the best slots first, within the budget."""
    best = [(slot, option) for slot in state.slots if (option := _best(slot, state, rules)) is not None]
    plan = []
    allowed = Allowance(state.seeds_left, state.parameters_left, state.flops_left)
    for slot, candidate in sorted(best, key=lambda pair: _worth(pair[1], state), reverse=True):
        if allowed.refusal(candidate.cost) is None:
            allowed = allowed.after(candidate.cost)
            plan.append((slot.place.name, candidate))
    return plan


def _why(candidate: Candidate, state: GrowthState) -> str:
    gain = _worth(candidate, state) + candidate.rent
    return f"an epoch of it would lower the loss by about {figure(gain, 3)}, and its rent is {figure(candidate.rent)}"


def _best(slot: SlotState, state: GrowthState, rules: HeuristicConfig) -> Candidate | None:
    options = [candidate for candidate in _teachable(slot, state, rules) if _worth(candidate, state) > 0]
    return max(options, key=lambda candidate: _worth(candidate, state), default=None)


def _worth(candidate: Candidate, state: GrowthState) -> float:
    """What an epoch at the promised speed would give, after rent."""
    return (candidate.promise or 0.0) * max(state.steps_per_epoch, 1) - candidate.rent


def _teachable(slot: SlotState, state: GrowthState, rules: HeuristicConfig) -> list[Candidate]:
    """Those that the data could teach, that are no trifles, and that were not tried here before."""
    least = rules.least_share * state.host_cost.parameters / len(state.slots)
    fresh = [candidate for candidate in slot.candidates if candidate.blueprint not in slot.tried and candidate.cost.parameters >= least]
    if state.samples_per_epoch is None:
        return fresh
    is_at_the_end = slot.place.flops_behind < LITTLE_BEHIND * state.host_cost.flops
    evidence = rules.evidence_at_the_end if is_at_the_end else rules.evidence
    limit = state.samples_per_epoch / evidence
    return [candidate for candidate in fresh if candidate.load <= limit]
