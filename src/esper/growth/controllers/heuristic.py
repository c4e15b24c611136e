"""The heuristic controller: grows a starved host early, in width and in depth, chooses slots and blueprints by the probe, and keeps seeds
that pay their rent.

When it checks the host. After a twentieth of the training, then every epoch up to three tenths of it until the host is found to be starved,
and again a quarter later if nothing would pay then; at once when seeds were kept by a measurement precise enough to tell how much they
gained; and whenever the training loss stops falling or jumps up, as long as enough of the training is left. So a host grows in steps until
a further one would not pay, or the data do not suffice. It requests a probe one epoch before it grows anything.

Starved hosts. A host is starved if its training loss is still high, it does not overfit, the data suffice for the weights it has (see
`samples_for_host`), and one of these holds:
- its loss is expected to end high, by extrapolating the last epochs with a power law of time;
- the data suffice to train more weights than the host has.

Undertrained hosts. A row of layers is passed over if longer training would gain more for the same FLOPs. That is so if the host's loss
would fall further by the power law, and the estimated fall by no seed of the row is many times as large. The threshold was measured
(docs/log.md).

Choice of seeds. It widens as many layers in a row as it can, in the size that is worth most at the end of the training, minus its rent, at
most one per slot and row. It takes the whole step at once, because a large early step ends better than several small ones (docs/log.md).
Each candidate is credited with half of the remaining loss at most, and what it leaves must pay for the next. A further step at most doubles
the FLOPs.

Data. The data must suffice for all weights of the host with the seed, with a margin, because wide layers overfit less than their number of
weights suggests. A seed in depth must also be trainable in its place: a convolution sees many positions per sample in a wide feature map,
and few in a small one. Right before the head it demands many times as much data per weight, because a seed there lowers the training loss
fastest of all but does not generalise from few samples.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from esper.growth.config import GrowthConfig, HeuristicConfig, LifecycleConfig
from esper.growth.lifecycle.stages import (
    LIVING,
    Action,
    Advance,
    Candidate,
    Contribution,
    Cost,
    Decision,
    Fossilize,
    Germinate,
    GrowthState,
    Prune,
    SlotState,
    Stage,
)
from esper.growth.measure.contribution import Allowance, total, why_undecided
from esper.text_table import counted, figure

FIRST_LOOK = 2  # earliest epoch of the first check
PATIENCE = 3  # a seed is pruned only after this many times `holding_epochs`, because some seeds become useful late, but then if it is open
LITTLE_BEHIND = 0.1  # a slot is at the end of the host if less than this share of the host's FLOPs comes after it
MOST_OF_THE_LOSS = 0.5  # a seed lowers the loss by this fraction at most; the first steps of a candidate often promise all of it
HOPEFUL_END = 0.03  # relative loss that a host may end with in the best case, where it is decided what is probed
LEAST_END = 0.06  # relative loss that a host is expected to end with at least, where sizes of seeds are compared
KNEW_NOTHING = 0.5  # least relative training loss of the first epoch of a host that had not learned from these data before
LATER_LOOKS = 1.25  # an early check that found nothing to grow is repeated at this many times its epoch
MOST_UNCERTAIN = 0.5  # a further step needs a kept seed whose contribution is known to within this share of it
MOST_EPOCHS = 10_000  # search range for the advice on how long to train
MOST_REASONS = 200  # candidates that a decision says why they were left out, so that its event stays small
NOTHING = Cost(0, 0)
UNKNOWN_HORIZON = 10  # if the length of the training is unknown, assume this many times the epochs so far


class Heuristic:
    """Controller that follows the fixed rules of `config.heuristic`; see the module's docstring."""

    name = "heuristic"

    def __init__(self, config: GrowthConfig) -> None:
        self.rules = self._rules = config.heuristic
        self.lifecycle = config.lifecycle
        self._looks_at: int | None = None  # epoch after which the requested probe has results
        self._is_next_step = False  # the requested probe is for a further step of growth
        self._cannot_judge = ""  # why no seed can be kept here, such as validation data in one batch
        self._has_warned = False  # about intervals that cannot decide

    def decide(self, state: GrowthState) -> Decision:
        self.lifecycle = state.lifecycle  # that of the run, whatever the config said
        self.rules = for_length(self._rules, state)
        # Existing seeds are reviewed in any case. New ones come in two steps: request a probe, and grow one epoch later by its results.
        actions = [action for slot in state.slots for action in self._review(slot, state)]
        if why := self.why_nothing_can_grow(state.epochs) or self._cannot_judge:
            return Decision(tuple(actions), why)
        if self._looks_at == state.epoch:
            grown, why = self._grow(state)
            return Decision((*actions, *grown), why, passed_over=passed_over(state, self.rules, grown))
        self._is_next_step = self._may_step_again(state, actions)
        must_look, why = (True, "looks for the next step") if self._is_next_step else self._look(state)
        if not must_look:
            return Decision(tuple(actions), why)
        self._looks_at = state.epoch + 1
        return Decision(tuple(actions), why, probe=True, not_probed=never_grown(state, self.rules))

    # Existing seeds

    def _review(self, slot: SlotState, state: GrowthState) -> list[Action]:
        """Return the action for the seed in a slot, if one is due."""
        name = slot.place.name
        if slot.stage is Stage.TRAINING and slot.epochs_in_stage >= self.lifecycle.training_epochs:
            return [Advance(slot=name, reason=f"it has learned for {slot.epochs_in_stage} epochs")]
        # Only a seed on probation with a contribution of this epoch can be judged.
        measured = slot.contribution
        if slot.stage is not Stage.HOLDING or measured is None or measured.epoch != state.epoch:
            return []
        assert state.scale is not None  # known after the first epoch
        undecided = why_undecided(measured, state.scale.range)
        if undecided and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"the seed in {name!r} cannot be judged: {undecided}", RuntimeWarning, stacklevel=2)
        if not math.isfinite(measured.gain.high):
            self._cannot_judge = f"leaves the host alone, because no seed could be kept: {undecided}"
        # A seed that is still open after its patience goes while the host has time to recover: at the end, only the epochs before its birth
        # could be the result.
        is_over = state.epochs is not None and state.epoch >= state.epochs
        is_final = undecided != "" or is_over or slot.epochs_in_stage >= PATIENCE * self.lifecycle.holding_epochs
        return judge(name, measured, slot.rent, may_prune=is_final and not slot.prune_embargo, is_last=is_final, undecided=undecided)

    # New seeds

    def _look(self, state: GrowthState) -> tuple[bool, str]:
        """Return whether to probe the candidates during the next epoch, and the reason."""
        first, has_candidates = self.first_look(state.epochs), any(slot.candidates for slot in state.slots)
        if state.epoch < first - 1 or not has_candidates or not self.is_in_time(state.epochs, at=state.epoch + 1):
            return False, ""
        # Early checks only need a starved host. They are repeated until a seed grows, because projections become better with time. Later
        # checks need a jump or a plateau of the training loss too.
        if any(slot.stage in LIVING for slot in state.slots):  # wait for the verdict on the present seeds
            return False, ""
        verdict = starvation(state, self.rules)
        is_early = not has_grown(state) and state.epoch < max(first, self.rules.first_look_until * (state.epochs or first))
        if is_early and state.epoch + 1 >= LATER_LOOKS * (self._looks_at or 0):
            return verdict.is_starved, "looks for places to grow" if verdict.is_starved else f"leaves the host alone: {verdict.reason}"
        has_just_looked = self._looks_at is not None and state.epoch < self._looks_at + self.rules.plateau_epochs
        if has_just_looked or not verdict.is_starved:
            return False, ""
        why = has_jumped(state, self.rules) or has_stopped_falling(state, self.rules)
        return bool(why), why

    def _may_step_again(self, state: GrowthState, actions: Sequence[Action]) -> bool:
        """Return whether all seeds are judged now, one of them is surely kept (its slot opens again), and the host may grow further."""
        ended = {action.slot for action in actions if isinstance(action, Fossilize | Prune)}
        is_over = all(slot.place.name in ended for slot in state.slots if slot.stage in LIVING)
        kept = {action.slot for action in actions if isinstance(action, Fossilize)}
        is_kept = any(slot.contribution and is_precise(slot.contribution) for slot in state.slots if slot.place.name in kept)
        return is_over and is_kept and self.is_in_time(state.epochs, at=state.epoch + 1) and next_step(state, self.rules).is_starved

    def first_look(self, epochs: int | None) -> int:
        """Return the epoch of the first check in a training of `epochs` epochs."""
        return max(FIRST_LOOK, round(self.rules.grow_at * epochs) if epochs else FIRST_LOOK)

    def is_in_time(self, epochs: int | None, *, at: int) -> bool:
        """Return whether a seed that germinates after epoch `at` is early enough to pay and to be kept."""
        if epochs is None:
            return True
        return at <= max(self.rules.grow_until * epochs, self.first_look(epochs)) and epochs - at >= least_epochs(self.lifecycle)

    def why_nothing_can_grow(self, epochs: int | None) -> str:
        """Return why a training of `epochs` epochs is too short to grow anything; empty if it is long enough."""
        first = self.first_look(epochs)
        if epochs is None or self.is_in_time(epochs, at=first):
            return ""
        # Find the shortest training that is long enough, for the advice.
        longer = range(epochs + 1, epochs + MOST_EPOCHS)
        least = next((count for count in longer if self.is_in_time(count, at=self.first_look(count))), None)
        advice = "lower heuristic.grow_at" if least is None else f"train for at least {least} epochs, or shorten lifecycle.holding_epochs"
        return (
            f"nothing can grow in {epochs} epochs: the first seed would germinate after epoch {first}, and needs "
            f"{least_epochs(self.lifecycle)} more before it can be kept; {advice}"
        )

    def _grow(self, state: GrowthState) -> tuple[list[Action], str]:
        """Return the seeds to germinate after a probe, and the reason."""
        verdict = next_step(state, self.rules) if self._is_next_step else starvation(state, self.rules)
        if not verdict.is_starved:
            return [], f"leaves the host alone: {verdict.reason}"
        plan = choose(state, self.rules)
        if not plan and (slow := choose(state, self.rules, longer_training=1e-9)):
            times = max(speed_over_longer_training(state, candidate) for _, candidate in slow)
            return [], (
                f"leaves the host alone: it is undertrained. For the same FLOPs, seeds would lower the loss {times:.1f} times as fast as "
                f"longer training, but growing pays from {self.rules.longer_training:g} times on; train longer"
            )
        if not plan:
            return [], f"nothing that fits would pay, though {verdict.reason}"
        return [Germinate(slot=name, reason=_why(one, state), blueprint=one.blueprint) for name, one in plan], f"grows: {verdict.reason}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "looks_at": self._looks_at,
            "is_next_step": self._is_next_step,
            "cannot_judge": self._cannot_judge,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._looks_at = state["looks_at"]
        self._is_next_step, self._cannot_judge = state["is_next_step"], state["cannot_judge"]


def least_epochs(rules: LifecycleConfig) -> int:
    """Return the least number of epochs between the germination of a seed and the one after which it may be fossilized."""
    before = rules.training_epochs + rules.blend_epochs if rules.raise_mode == "shadow" else 0
    return before + rules.holding_epochs + 1


def judge(name: str, measured: Contribution, rent: float, *, may_prune: bool, is_last: bool, undecided: str = "") -> list[Action]:
    """Decide about a seed by the interval of its contribution.

    Fossilize it if the whole interval is above its rent. If it `may_prune`, prune it if the whole interval is below, or if this `is_last`
    look leaves it open: a seed is never kept on an estimate. Otherwise wait. `undecided` says why further looks would not help.
    """
    gain = measured.gain
    words = f"{measured.in_words()}, and its rent is {figure(rent)}"
    if gain.low > rent:
        return [Fossilize(slot=name, reason=words)]
    if may_prune and (gain.high < rent or is_last):
        open_end = "" if gain.high < rent else f"; {undecided or 'this is the last look, and leaves it open'}"
        return [Prune(slot=name, reason=words + open_end)]
    return []


def for_length(rules: HeuristicConfig, state: GrowthState) -> HeuristicConfig:
    """Return the rules for a training of this many steps; see `HeuristicConfig.few_steps`."""
    steps = (state.epochs or math.inf) * state.steps_per_epoch
    if not 0 < steps < rules.few_steps:
        return rules
    share = steps / rules.few_steps
    return msgspec.structs.replace(rules, longer_training=share * rules.longer_training, evidence_of_host=share * rules.evidence_of_host)


def has_grown(state: GrowthState) -> bool:
    """Return whether anything has ever grown in the host, which ends the early checks."""
    return any(slot.seed is not None or slot.tried for slot in state.slots)


def is_precise(measured: Contribution) -> bool:
    """Return whether the interval of a contribution tells how much a seed gains, and not only that it does."""
    return measured.gain.high - measured.gain.low <= 2 * MOST_UNCERTAIN * abs(measured.gain.estimate)


@dataclass(frozen=True, slots=True)
class Starvation:
    """Whether a host needs more capacity, with the reason."""

    is_starved: bool
    reason: str


def starvation(state: GrowthState, rules: HeuristicConfig) -> Starvation:
    """Judge from the losses whether more capacity would help."""
    assert state.scale is not None  # known after the first epoch
    scale, train, val = state.scale, state.train_losses[-1], state.val_losses[-1]
    is_now = f"its training loss is {figure(train)}"
    if scale.relative(train) < rules.high_loss:
        return Starvation(False, f"{is_now}, below {rules.high_loss:.0%} of the uninformed loss, {figure(scale.uninformed)}")
    if overfits(state, rules):
        return Starvation(False, f"it overfits: validation loss {figure(val)}, training loss {figure(train)}")
    end, samples = projected_end(state), state.samples
    if samples is not None and (needed := samples_for_host(state, NOTHING, rules)) > samples:
        return Starvation(False, f"{is_now}, and by its projected end, {figure(end)}, it needs {needed:,.0f} samples")
    if scale.relative(end) > rules.projected_loss:
        return Starvation(True, f"{is_now} and is projected to end at about {figure(end)}")
    if samples and state.host_load < samples:
        return Starvation(True, f"{is_now}, and the data could teach more parameters than it has")
    return Starvation(False, f"its training loss is projected to end at about {figure(end)}")


def next_step(state: GrowthState, rules: HeuristicConfig) -> Starvation:
    """Judge whether a host whose last seeds were kept may grow further. Whether it pays is a matter of the candidates."""
    train, val = state.train_losses[-1], state.val_losses[-1]
    assert state.scale is not None
    if state.scale.relative(train) < rules.low_loss:
        return Starvation(False, f"its training loss is {figure(train)}, and a further step could not lower it by much")
    if gap(state) > rules.lost_share * (1 - state.scale.relative(train)):
        return Starvation(False, f"what it learns does not carry over: validation loss {figure(val)}, training loss {figure(train)}")
    return Starvation(True, f"its last seeds are kept, and its training loss is {figure(train)}")


def overfits(state: GrowthState, rules: HeuristicConfig) -> bool:
    """Return whether the validation loss is so far above the training loss that data are lacking rather than capacity."""
    return gap(state) > rules.overfit_gap


def gap(state: GrowthState) -> float:
    """Return the validation loss minus the training loss, as a fraction of the uninformed loss.

    The lowest of the last validation losses counts, because a batch norm makes single ones high while the learning rate is large. Every
    sample of the first epoch is new to a host that knew nothing, so a gap there says that the validation data are harder. It shrinks with
    the loss, and is not counted.
    """
    assert state.scale is not None
    relative = state.scale.relative
    first, now = relative(state.train_losses[0]), relative(state.train_losses[-1])
    harder = max(relative(state.val_losses[0]) - first, 0.0) * min(now / first, 1.0) if first > KNEW_NOTHING else 0.0
    return min(map(relative, state.val_losses[-3:])) - now - harder


def projected_end(state: GrowthState) -> float:
    """Return the training loss that the host is expected to end with."""
    assert state.scale is not None
    above = state.scale.above_floor(state.train_losses)
    return projected_loss(above, state.epochs or UNKNOWN_HORIZON * state.epoch) + state.scale.floor


def projected_loss(losses: Sequence[float], epochs: int) -> float:
    """Extrapolate a loss to the end of a training, by the power law of time through the last two epochs.

    `losses` are above their floor, one per epoch. A rising loss is taken as constant.

    >>> round(projected_loss([1.0, 0.5, 1 / 3], 30), 4)
    0.0333
    """
    # loss(t) = c · t^-power, with the power fitted to the last two epochs.
    now = len(losses)
    if now < 2 or losses[-1] <= 0 or losses[-2] <= 0 or epochs <= now:
        return losses[-1]
    power = math.log(losses[-2] / losses[-1]) / math.log(now / (now - 1))
    return losses[-1] * math.exp(-max(power, 0.0) * math.log(epochs / now))


def has_stopped_falling(state: GrowthState, rules: HeuristicConfig) -> str:
    """Return a description of a plateau of the training loss; empty if there is none."""
    assert state.scale is not None
    losses, count = state.train_losses, rules.plateau_epochs
    if len(losses) <= count:
        return ""
    before, now = losses[-1 - count], min(losses[-count:])
    if state.scale.relative(now) > (1 - rules.plateau_fall) * state.scale.relative(before):
        return f"the training loss was {figure(before)} {count} epochs ago and is {figure(losses[-1])}"
    return ""


def has_jumped(state: GrowthState, rules: HeuristicConfig) -> str:
    """Return a description of a jump of the training loss, as after a change of the data; empty if there is none.

    A jump means that the last two losses are well above the median of those before.
    """
    assert state.scale is not None
    losses, count = state.train_losses, rules.plateau_epochs
    if len(losses) < count + 2:
        return ""
    before = sorted(losses[-2 - count : -2])[count // 2]
    if state.scale.relative(min(losses[-2:])) > rules.data_change * state.scale.relative(before):
        return f"the training loss has risen from {figure(before)} to {figure(losses[-1])}"
    return ""


def gain_of_longer_training(losses: Sequence[float], epochs: int, times: float) -> float:
    """Return how much lower a loss would end after `times` as many epochs, by the power law of time through the last two losses.

    `losses` are above their floor, one per epoch. The mean loss of an epoch is taken as the loss at its middle.

    >>> round(gain_of_longer_training([(epoch + 0.5) ** -0.5 for epoch in range(4)], 100, 4.0), 6)
    0.05
    """
    now = len(losses)
    if now < 2 or not 0 < losses[-1] < losses[-2]:
        return 0.0
    # loss(t) = c · t^-power
    power = math.log(losses[-2] / losses[-1]) / math.log((now - 0.5) / (now - 1.5))
    end = losses[-1] * math.exp(-power * math.log(max(epochs, now) / (now - 0.5)))
    return -end * math.expm1(-power * math.log(times))


def speed_over_longer_training(state: GrowthState, candidate: Candidate) -> float:
    """Return the ratio of two falls of the loss per epoch: by a seed now, and by longer training of the host for the same FLOPs."""
    assert state.scale is not None
    epochs = state.epochs or UNKNOWN_HORIZON * state.epoch
    times = 1 + candidate.cost.flops / max(state.host_cost.flops + state.added.flops, 1)  # FLOPs of an epoch with the seed / without
    own = gain_of_longer_training(state.scale.above_floor(state.train_losses), epochs, times) / epochs
    promised = (candidate.promise or 0.0) * max(state.steps_per_epoch, 1)
    return promised / own if own > 0 else math.inf


def choose(state: GrowthState, rules: HeuristicConfig, *, longer_training: float | None = None) -> list[tuple[str, Candidate]]:
    """Return the (slot, candidate) pairs to grow, one per slot, within the budget: long rows of layers first, then by worth after rent.

    A further one must pay its rent with what those before it leave of the loss. `longer_training` replaces the rule of this name.
    """
    assert state.scale is not None
    if longer_training is not None:
        rules = msgspec.structs.replace(rules, longer_training=longer_training)
    options = [(slot, option) for slot in state.slots for option in _worthy(slot, state, rules)]
    # Longer training is the alternative to growing a row of layers, whose sizes are compared by what they are worth at the end.
    is_fast = [speed_over_longer_training(state, candidate) >= rules.longer_training for _, candidate in options]
    rows = {unit for (_, candidate), fast in zip(options, is_fast, strict=True) if fast for unit in candidate.widened}
    options = [one for one, fast in zip(options, is_fast, strict=True) if fast or not rows.isdisjoint(one[1].widened)]
    plan: dict[str, Candidate] = {}
    allowed = Allowance(state.seeds_left, state.parameters_left, state.flops_left)
    left = state.scale.above_floor(state.train_losses)[-1]
    chosen, wider = NOTHING, set[str]()  # cost of the plan so far, and the units that it could widen in its slots

    for slot, candidate in sorted(options, key=lambda pair: _rank(pair[1], state), reverse=True):
        gain = min(_worth(candidate, state) + candidate.rent, MOST_OF_THE_LOSS * left)
        # One seed per row of layers. A second one in width would lack the weights between both sets of new units, and one in depth would
        # see none of the new units.
        reach = _row_of(slot)
        is_free = slot.place.name not in plan and not wider & reach and allowed.refusal(candidate.cost) is None
        if is_free and gain > candidate.rent and _objection(slot, candidate, state, rules, beside=chosen) is None:
            allowed, left = allowed.after(candidate.cost), left - gain
            chosen, wider = total([chosen, candidate.cost]), wider | reach
            plan[slot.place.name] = candidate
    return list(plan.items())


def _rank(candidate: Candidate, state: GrowthState) -> tuple[float, ...]:
    """Return the order of choice, the highest first: layers in a row, worth at the end, speed."""
    return len(candidate.widened), worth_at_the_end(candidate, state), _speed(candidate, state)


def _row_of(slot: SlotState) -> set[str]:
    """Return the units that candidates of a slot could widen. Slots in one row of layers have some in common."""
    return {unit for candidate in slot.candidates for unit in candidate.widened}


def never_grown(state: GrowthState, rules: HeuristicConfig) -> frozenset[tuple[str, str]]:
    """Return the (slot, blueprint) of candidates that even a loss of `HOPEFUL_END` would leave without enough data. They are not probed."""
    samples, scale = state.samples, state.scale
    if samples is None or scale is None:
        return frozenset()
    return frozenset(
        (slot.place.name, candidate.blueprint)
        for slot in state.slots
        for candidate in slot.candidates
        if samples_for_host(state, candidate.cost, rules, relative_end=HOPEFUL_END) / rules.overshoot > samples
    )


def passed_over(state: GrowthState, rules: HeuristicConfig, grown: Sequence[Action]) -> dict[str, dict[str, str]]:
    """Return slot -> blueprint -> the rule by which a candidate does not grow: for those with the best estimates, or not probed."""
    chosen = {action.slot: action.blueprint for action in grown if isinstance(action, Germinate)}
    left = [
        (slot, candidate)
        for slot in state.slots
        for candidate in slot.candidates
        if chosen.get(slot.place.name) != candidate.blueprint
        and (candidate.promise is not None or _objection(slot, candidate, state, rules) is not None)
    ]
    reasons: dict[str, dict[str, str]] = {}
    for slot, candidate in sorted(left, key=lambda pair: _worth(pair[1], state), reverse=True)[:MOST_REASONS]:
        reasons.setdefault(slot.place.name, {})[candidate.blueprint] = _why_not(slot, candidate, chosen, state, rules)
    return reasons


def _why_not(slot: SlotState, candidate: Candidate, chosen: Mapping[str, str], state: GrowthState, rules: HeuristicConfig) -> str:
    """Return the first rule that a candidate fails."""
    if (objection := _objection(slot, candidate, state, rules)) is not None:
        return objection
    worth = _worth(candidate, state)
    if worth <= 0:
        return f"an epoch of it would lower the loss by about {figure(worth + candidate.rent)}, its rent is {figure(candidate.rent)}"
    here = chosen.get(slot.place.name)
    if here is not None and (why := _why_behind(candidate, next(one for one in slot.candidates if one.blueprint == here), state)):
        return why
    is_beside = any(_row_of(other) & _row_of(slot) for other in state.slots if other.place.name in chosen)
    if not is_beside and (times := speed_over_longer_training(state, candidate)) < rules.longer_training:
        return (
            f"for the same FLOPs it would lower the loss {times:.1f} times as much as longer training; {rules.longer_training:g} are needed"
        )
    spent = [(other.candidates, chosen[other.place.name]) for other in state.slots if other.place.name in chosen and other is not slot]
    allowed = Allowance(state.seeds_left, state.parameters_left, state.flops_left)
    for candidates, blueprint in spent:
        allowed = allowed.after(next(other.cost for other in candidates if other.blueprint == blueprint))
    if refusal := allowed.refusal(candidate.cost):
        return refusal
    if here is not None:
        return f"{here} is chosen in this slot"
    if is_beside:
        return "another seed is chosen in this row of layers"
    return "what the chosen seeds leave of the loss would not pay its rent" if chosen else "the host is left alone, see the decision"


def _why_behind(candidate: Candidate, chosen: Candidate, state: GrowthState) -> str:
    """Return by which rule the chosen candidate comes before another one in its slot; empty if it does not."""
    ours, theirs = _rank(candidate, state), _rank(chosen, state)
    if ours >= theirs:
        return ""
    if ours[0] < theirs[0]:
        return f"{chosen.blueprint} widens {counted(len(chosen.widened), 'layer')} in a row, this one {len(candidate.widened) or 'none'}"
    if ours[1] < theirs[1]:
        return f"{chosen.blueprint} is worth more at the end of the training: {figure(theirs[1])} after rent, this one {figure(ours[1])}"
    return f"{chosen.blueprint} is worth as much at the end of the training, and learns faster"


def _why(candidate: Candidate, state: GrowthState) -> str:
    gain = _worth(candidate, state) + candidate.rent
    return f"an epoch of it would lower the loss by about {figure(gain)}, and its rent is {figure(candidate.rent)}"


def _worthy(slot: SlotState, state: GrowthState, rules: HeuristicConfig) -> list[Candidate]:
    """Return the candidates of a slot that nothing is against, and that are worth their rent."""
    return [one for one in slot.candidates if _objection(slot, one, state, rules) is None and _worth(one, state) > 0]


def _worth(candidate: Candidate, state: GrowthState) -> float:
    """Return the estimated fall of the loss within an epoch, minus the rent."""
    return (candidate.promise or 0.0) * max(state.steps_per_epoch, 1) - candidate.rent


def worth_at_the_end(candidate: Candidate, state: GrowthState) -> float:
    """Return the estimated fall of the loss at the end of the training, minus the rent: by this, sizes are compared.

    The loss at the end is taken to fall with the parameters P of a host like P^-0.5, about as of static hosts (docs/log.md), and by no more
    than the probe promises. A projection below `LEAST_END` is not trusted, because it is made early.
    """
    assert state.scale is not None
    scale, before = state.scale, state.host_cost.parameters + state.added.parameters
    end = max(projected_end(state) - scale.floor, LEAST_END * scale.unit)
    share = 1 - (before / (before + candidate.cost.parameters)) ** 0.5 if before else 1.0
    return min(share * end, _worth(candidate, state) + candidate.rent) - candidate.rent


def _speed(candidate: Candidate, state: GrowthState) -> float:
    """Return how fast a candidate would lower the loss at first, per epoch, minus its rent.

    Many candidates would lower a loss that is almost zero by all that is left of it. The speed still tells them apart.
    """
    assert state.scale is not None
    left = state.scale.above_floor(state.train_losses)[-1]
    share = (_worth(candidate, state) + candidate.rent) / left if left > 0 else 0.0
    return -left * math.log1p(-min(share, 1 - 1e-12)) - candidate.rent


def _objection(slot: SlotState, candidate: Candidate, state: GrowthState, rules: HeuristicConfig, *, beside: Cost = NOTHING) -> str | None:
    """Return why a candidate should not be considered at all, whatever its probe says; None if nothing is against it.

    `beside` is the cost of the candidates that are chosen at the same time.
    """
    if candidate.blueprint in slot.tried:
        return "it was tried in this slot before"
    least = rules.least_share * state.host_cost.parameters / len(state.slots)
    if candidate.cost.parameters < least:
        return f"its {candidate.cost.parameters:,} parameters are too few to matter; {math.ceil(least):,} are the least"
    if state.added.flops and beside.flops + candidate.cost.flops > state.host_cost.flops + state.added.flops:
        return "it would more than double the FLOPs, which only a first step may"
    if state.samples is None:
        return None
    needed = samples_for_host(state, total([candidate.cost, beside]), rules) / rules.overshoot
    if needed > state.samples:
        return f"too few data: with it the host needs {needed:,.0f} samples"
    if not candidate.widened:
        is_at_the_end = slot.place.flops_behind < LITTLE_BEHIND * state.host_cost.flops
        needed = candidate.load * (rules.evidence_at_the_end if is_at_the_end else rules.evidence)
        if needed > state.samples:
            return f"too few data: its parameters need {needed:,.0f} samples"
    return None


def samples_for_host(state: GrowthState, new: Cost, rules: HeuristicConfig, *, relative_end: float | None = None) -> float:
    """Return the number of training samples that a host with new seeds of this cost needs.

    `relative_end` is the loss that it ends with, relative to the uninformed one; by default the projected one.

    The gap between training and validation loss grows with the load of the host (its weights per position that shares them), and with the
    loss itself: a host that will end near 0 has little to overfit to. A host of P parameters and F FLOPs has a load in proportion to
    P² / F if all its layers grow alike.
    """
    assert state.scale is not None
    grown, host = total([state.host_cost, state.added, new]), state.host_cost
    times = (grown.parameters / max(host.parameters, 1)) ** 2 * max(host.flops, 1) / max(grown.flops, 1)
    end = state.scale.relative(projected_end(state)) if relative_end is None else relative_end
    return rules.evidence_of_host * end * times * state.host_load
