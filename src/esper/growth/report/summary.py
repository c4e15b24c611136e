"""Tables and sentences about a run: before, after and cost; results of the probe; the role of chance and of the rent; progress lines.

Cells are finished text; the terminal and the report only lay them out. The tables of seeds and blueprints are in the ledger's module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from esper.display import Card
from esper.growth.config import RentConfig
from esper.growth.events import (
    BestRestored,
    EpochEnded,
    FinalTest,
    GrowthFinished,
    GrowthStarted,
    LoaderRestarted,
    Probed,
    RolledBack,
    TrialsCompared,
    TwinCompared,
)
from esper.growth.lifecycle.ledger import LEDGER_HEADING, Row, SeedRecord, ledger_rows
from esper.growth.lifecycle.stages import OCCUPIED, Stage
from esper.growth.report.story import Story, is_share, metric_in_words, restored_in_words
from esper.runs import Event
from esper.text_table import NONE, added, counted, duration, figure, points

if TYPE_CHECKING:  # it imports torch
    from esper.growth.lifecycle.lifecycles import Lifecycles

PROBE_HEADING = ("epoch", "slot", "blueprint", "fall of the loss per step", "verdict")
ROLLBACK_HEADING = ("epoch", "back to", "steps lost", "time lost", "reason", "under embargo", "brought back")
ABOUT_REMOVAL = (
    "The cost of removal is the rise of the validation loss if the seed were switched off now. The host has learned to rely on the seed, "
    "so this is more than the gain from growing it. That gain is the difference to a twin that never grew."
)
TEST_ACCURACY = "test accuracy"
_BEST_PER_SLOT = 3
_LAST_PROBES = 20  # whose candidates are all listed
_MOMENTUM = 0.7  # of the moving averages of the speed


def headline(story: Story, twin: Story | None = None) -> str:
    """Return one line about the state of a run, or about its result."""
    began, finished = story.began, story.finished
    if began is None or not story.epochs:
        return "nothing was trained yet"
    if finished is None:
        last = story.epochs[-1]
        seeds = f"{counted(len(story.seeds), 'seed')} so far"
        return f"not finished: epoch {last.epoch} of {began.epochs} · validation loss {figure(last.val_loss)} · {seeds}"
    return result_in_words(finished, None if twin is None else twin.finished)


def training_card(
    name: str,
    lifecycles: Lifecycles[Any],
    *,
    restored: BestRestored | None,
    metrics: Mapping[str, float],
    controller: str,
    optimizers: Sequence[str],
) -> Card:
    """Return a training in the user's own loop so far, for notebooks and for the model card of the baked model: figures, and all seeds."""
    losses, seeds, host = lifecycles.history.val_losses, lifecycles.ledger.seeds, lifecycles.host.parameters
    more = lifecycles.added().parameters
    which, last = ("last", losses[-1:]) if restored is None else ("best", [restored.val_loss])
    loss = [f"{figure(losses[0])} → {figure(one)}" for one in last]
    figures = [
        ("epochs", str(lifecycles.epoch)),
        *((f"validation loss after the first and the {which} epoch", change) for change in loss),
        *((f"validation {name}", metric_in_words(name, value)) for name, value in metrics.items()),
        ("parameters", f"{host + more:,} ({added(more, host)} by seeds)"),
        ("rollbacks", str(lifecycles.governor.rollbacks)),
        ("controller", controller),
        ("optimiser", " and ".join(optimizers)),
    ]
    title = f"{name}: kept {lifecycles.ledger.count('kept')} of {counted(len(seeds), 'seed')}"
    return Card(title, figures, LEDGER_HEADING, ledger_rows(seeds, is_short=True))


def trials_in_words(compared: TrialsCompared) -> str:
    """Return what came of trials in a line: "tried heuristic 0.412, branches 0.298; branches goes on (2.1 GFLOPs for the other)"."""
    losses = ", ".join(f"{trial.name} {figure(trial.val_loss)}" for trial in compared.trials)
    others = "the other" if len(compared.trials) == 2 else "the others"
    return f"tried {losses}; {compared.chosen} goes on ({figure(compared.gflops_lost)} GFLOPs for {others})"


def result_in_words(finished: GrowthFinished, twin: GrowthFinished | None = None) -> str:
    """Return a line like "kept 2 of 5 seeds · validation loss 2.3100 → 0.3710 · +8.3% parameters · +9.1% FLOPs".

    With a twin, the difference between the two losses comes first, because most of the fall since the start is due to ordinary training.
    """
    tried = counted(finished.tried, "seed")
    verdict = "nothing is kept yet" if finished.why == "stopped" else "nothing was worth keeping"
    nothing = f"{verdict} ({tried} tried)" if finished.tried else "nothing was grown"
    kept = f"kept {finished.kept} of {tried}" if finished.kept else nothing
    loss = figure(finished.val_loss)
    if twin is None:
        first = [kept, f"validation loss {figure(finished.val_loss_before)} → {loss}"]
    else:
        difference = twin.val_loss - finished.val_loss
        gained = f"{figure(abs(difference))} {'below' if difference > 0 else 'above'} its twin's: {loss} against {figure(twin.val_loss)}"
        first = [f"validation loss {gained if difference else f'{loss}, the same as its twin'}", kept]
    of_twin = {} if twin is None else twin.metrics
    against = {name: f" against {metric_in_words(name, of_twin[name])}" if name in of_twin else "" for name in finished.metrics}
    parts = [*first, *(f"validation {name} {metric_in_words(name, value)}{against[name]}" for name, value in finished.metrics.items())]
    if finished.parameters_added:
        parts.append(f"{added(finished.parameters_added, finished.parameters - finished.parameters_added)} parameters")
        parts.append(f"{added(finished.flops_added, finished.flops - finished.flops_added)} FLOPs")
    if finished.rollbacks:
        parts.append(counted(finished.rollbacks, "rollback"))
    if finished.best_epoch is not None:
        parts.append(f"best state, after epoch {finished.best_epoch} of {finished.epoch}")
    if finished.why != "finished":
        parts.append(f"{finished.why} after epoch {finished.epoch}")
    return " · ".join(parts)


def tiles(story: Story, twin: Story | None = None) -> list[tuple[str, str]]:
    """Return the main figures as (value, name), that of the difference to the twin first."""
    began, finished = story.began, story.finished
    if began is None or not story.epochs:
        return []
    last = story.epochs[-1]
    loss = last.val_loss if finished is None else finished.val_loss
    metrics = last.metrics if finished is None else finished.metrics
    parameters = last.parameters if finished is None else finished.parameters
    found: list[tuple[str, str]] = []
    if twin is not None and twin.finished is not None and finished is not None:
        found.append((figure(finished.val_loss - twin.finished.val_loss, sign="+"), "validation loss against the twin"))
        if twin.compared is not None:
            compared = twin.compared
            found.append((points(compared.accuracy_difference, compared.low, compared.high), "test accuracy against the twin"))
    found.append((figure(loss), "validation loss"))
    found += [(metric_in_words(name, value), f"validation {name}") for name, value in list(metrics.items())[:3]]
    found.append((f"{len(story.kept())} of {len(story.seeds)}", "seeds kept"))
    more = f", {added(parameters - began.parameters, began.parameters)}" if parameters != began.parameters else ""
    found.append((f"{parameters:,}", f"parameters{more}"))
    return found


def about_twin(story: Story, twin: Story | None) -> list[str]:
    """Return a sentence about what is missing if there is no twin to compare with."""
    if twin is not None or story.finished is None or not story.kept():
        return []
    return [
        "There is no twin, so it is unknown how much of the result is due to growth. A twin is the same training without growth: "
        "esper grow --twin."
    ]


# Before, after, and the twin


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the comparison. `write` turns a value into text."""

    name: str
    before: float | None
    after: float | None
    write: Callable[[float], str]
    change: Literal["loss", "points", "share"]  # format of a difference

    def cells(self) -> Row:
        return (self.name, self._written(self.before), self._written(self.after), self._difference(self.after, self.before))

    def against(self, twin: _Line | None, compared: TwinCompared | None) -> Row:
        """Return the cells with the result of the same line of the twin, and the difference."""
        before, after = self._written(self.before), self._written(self.after)
        if twin is None:
            return (self.name, after, NONE, NONE, before)
        difference = self._difference(self.after, twin.after)
        if self.name == TEST_ACCURACY and compared is not None:
            difference = points(compared.accuracy_difference, compared.low, compared.high)
        return (self.name, after, self._written(twin.after), difference, before)

    def _difference(self, one: float | None, other: float | None) -> str:
        if one is None or other is None:
            return NONE
        match self.change:
            case "share":
                return added(one - other, other) if other else NONE
            case "points":
                return points(one - other)
        return figure(one - other, sign="+")

    def _written(self, value: float | None) -> str:
        return NONE if value is None else self.write(value)


def comparison(story: Story, twin: Story | None = None) -> tuple[Row, list[Row]]:
    """Return heading and rows of the table of before, after and cost; with a twin, also its results and the differences.

    Accuracies of run and twin are compared sample by sample, with a 95 % interval.
    """
    lines = _lines(story)
    if twin is None:
        return ("", "before", "after", "change"), [line.cells() for line in lines]
    others = {line.name: line for line in _lines(twin)}
    rows = [line.against(others.get(line.name), twin.compared) for line in lines]
    return ("", "grown", "its twin", "difference", "before"), rows


def about_chance(twin: Story | None) -> list[str]:
    """Return a sentence on how far a difference between a run and its twin may be chance; empty without a finished twin."""
    if twin is None or twin.finished is None:
        return []
    compared = twin.compared
    if compared is None or not _reach(compared):
        return ["This is one run: another random seed gives another difference, so compare several runs before you rely on it."]
    return [
        f"One run on {counted(compared.samples, 'test sample')}: a difference in test accuracy below {_reach(compared):.2f} points may be "
        "chance. Another random seed gives another difference."
    ]


def _reach(compared: TwinCompared) -> float:
    """Return half the width of the interval, in percentage points."""
    return 50 * (compared.high - compared.low)


def _lines(story: Story) -> list[_Line]:
    """Return the lines of the comparison for a finished run."""
    began, finished = story.began, story.finished
    if began is None or finished is None or not story.epochs:
        return []
    return [
        _Line("validation loss", finished.val_loss_before, finished.val_loss, figure, "loss"),
        *_metric_lines(began.metrics, finished.metrics),
        *_test_lines(story.tested),
        _Line("parameters", began.parameters, finished.parameters, figure, "share"),
        _Line("FLOPs per sample", began.flops, finished.flops, figure, "share"),
        _Line("training GFLOPs", None, finished.total_gflops, partial(figure, decimals=2), "share"),
        _Line("seconds", None, story.seconds, partial(figure, decimals=2), "share"),
    ]


def _metric_lines(before: Mapping[str, float], after: Mapping[str, float]) -> list[_Line]:
    return [
        _Line(f"validation {name}", before.get(name), value, partial(metric_in_words, name), "points" if is_share(name) else "loss")
        for name, value in after.items()
    ]


def _test_lines(tested: FinalTest | None) -> list[_Line]:
    if tested is None:
        return []
    lines = [_Line("test loss", tested.loss_before, tested.loss, figure, "loss")]
    if tested.accuracy is not None:
        lines.append(_Line(TEST_ACCURACY, tested.accuracy_before, tested.accuracy, "{:.2%}".format, "points"))
    return lines


# Results of the probe


def probe_rows(story: Story, *, is_complete: bool = False) -> list[Row]:
    """Return one row per candidate with its estimate and what became of it.

    The candidates are the best few of every slot, from the last probe of that slot. With `is_complete`, they are all of the last
    probes, the newest probe first.
    """
    last = {slot: probe for probe in story.probes for slot in probe.promises}
    chosen = [(probe, slot, _best(probe.promises[slot])[:_BEST_PER_SLOT]) for slot, probe in last.items()]
    if is_complete:
        probes = story.probes[: -_LAST_PROBES - 1 : -1]
        chosen = [(probe, slot, _best(promises)) for probe in probes for slot, promises in probe.promises.items()]
    return [
        (str(probe.epoch), slot, blueprint, figure(promise), _verdict(story, probe.epoch, slot, blueprint))
        for probe, slot, candidates in chosen
        for blueprint, promise in candidates
    ]


def _verdict(story: Story, epoch: int, slot: str, blueprint: str) -> str:
    """Return what became of a candidate of a probe: it grew, or the rule that rejected it; nothing if neither is known."""
    if any((seed.slot, seed.blueprint, seed.born) == (slot, blueprint, epoch) for seed in story.seeds):
        return "grows"
    reasons = (event.reasons.get(slot, {}).get(blueprint) for event in story.passed_over if event.epoch == epoch)
    return next((f"passed over: {reason}" for reason in reasons if reason), "")


def probe_in_words(probe: Probed) -> str:
    """Return one line with the best candidates of the best slots."""
    tops = [(slot, *_best(promises)[0]) for slot, promises in probe.promises.items() if promises]
    tops.sort(key=lambda top: -top[2])
    shown = ", ".join(f"{figure(promise)} with {blueprint} after {slot}" for slot, blueprint, promise in tops[:_BEST_PER_SLOT])
    return f"the probe estimates a fall of the loss per step of {shown}" if tops else "the probe found no candidate"


def _best(promises: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(promises.items(), key=lambda item: -item[1])


# The governor


def rollback_rows(story: Story) -> list[Row]:
    """Return one row per rollback, with its cost."""
    return [
        (
            str(back.epoch),
            f"epoch {back.to_epoch}",
            NONE if back.steps_lost is None else f"{back.steps_lost:,}",
            NONE if back.seconds_lost is None else f"{figure(back.seconds_lost, 1)} s",
            back.reason,
            ", ".join(back.embargoed),
            ", ".join(_protected(back)),
        )
        for back in story.rollbacks
    ]


def _protected(event: RolledBack) -> list[str]:
    """Return the slots of the seeds whose removal may have caused the disaster, and which are back."""
    return [seed.slot for seed in event.back if seed.is_protected]


def about_rollbacks(story: Story) -> str:
    """Return how often the governor went back, and the cost of that."""
    steps = [back.steps_lost for back in story.rollbacks if back.steps_lost is not None]
    seconds = [back.seconds_lost for back in story.rollbacks if back.seconds_lost is not None]
    lost = [counted(sum(steps), "step"), *([f"{figure(sum(seconds), 1)} s"] if seconds else [])] if steps else []
    return f"{counted(len(story.rollbacks), 'rollback')}{', which cost ' + ' and '.join(lost) if lost else ''}."


def about_skipped(story: Story) -> list[str]:
    """Return a sentence for every seed that skipped steps."""
    return [
        f"Seed {seed.number}, {seed.blueprint} after {seed.slot}, skipped {counted(seed.skipped, 'step')}, because its gradient or that "
        "of its host was not finite."
        for seed in story.seeds
        if seed.skipped
    ]


# The role of the rent


def about_rent(story: Story, rent: RentConfig) -> list[str]:
    """Return up to two sentences on the rent at which the outcome would have changed.

    A seed pays if removing it would cost more than its rent.
    """
    if rent.parameters == 0 and rent.flops == 0:
        return ["There is no rent, so a seed pays if it lowers the loss at all; set rent.parameters and rent.flops to charge for size."]
    # The kept seed with the least gain per rent limits how far the rent could rise, the best pruned one how far it would have to fall.
    measured = [seed for seed in story.seeds if seed.gain is not None and seed.rent > 0 and seed.outcome != "rolled back"]
    kept = [seed for seed in measured if seed.outcome == "kept"]
    sentences = []
    if kept:
        sentences.append(_about_kept(min(kept, key=_sure_ratio), rent))
    almost = [seed for seed in measured if seed.outcome == "pruned" and 0 < _ratio(seed) < 1]
    if almost:
        sentences.append(_about_pruned(max(almost, key=_ratio), rent))
    if not sentences and story.seeds:
        sentences.append("No seed lowered the loss enough for a lower rent to make it worth keeping.")
    return sentences


def _about_kept(seed: SeedRecord, rent: RentConfig) -> str:
    who, gain = f"{seed.blueprint} after {seed.slot}", seed.gain or 0.0
    if _sure_ratio(seed) > 1:
        return (
            f"Even the weakest of the kept seeds, {who}, pays: the lower end of its cost of removal, {figure(seed.gain_low)}, is "
            f"{figure(_sure_ratio(seed), 1)} times its rent, {figure(seed.rent)}. At {_scaled(rent, _sure_ratio(seed))} it would not have "
            "been kept."
        )
    costs = f"{who} has a cost of removal of {figure(gain)} and a rent of {figure(seed.rent)}"
    if _ratio(seed) > 1:
        return f"The weakest of the kept seeds, {costs}. It would not pay at {_scaled(rent, _ratio(seed))}."
    return f"The kept seed {costs}: it does not pay, and was kept all the same."


def _about_pruned(seed: SeedRecord, rent: RentConfig) -> str:
    return (
        f"The best of the pruned seeds, {seed.blueprint} after {seed.slot}, had a cost of removal of {figure(seed.gain)} and a rent of "
        f"{figure(seed.rent)}. It would have paid at {_scaled(rent, _ratio(seed))}."
    )


def _ratio(seed: SeedRecord) -> float:
    assert seed.gain is not None
    return seed.gain / seed.rent


def _sure_ratio(seed: SeedRecord) -> float:
    """Return the ratio for the lower end of the interval, which the heuristic controller uses."""
    assert seed.gain_low is not None
    return seed.gain_low / seed.rent


def _scaled(rent: RentConfig, factor: float) -> str:
    """Return the settings of a rent that is `factor` times as high."""
    given: Sequence[tuple[str, float]] = [("rent.parameters", rent.parameters), ("rent.flops", rent.flops)]
    return " and ".join(f"{name} = {value * factor:.2g}" for name, value in given if value > 0)


# Progress during training


class GrowthProgress:
    """Progress of a run, folded from its events, as lines of text. `title` names the run in the first line."""

    def __init__(self, title: str) -> None:
        from esper.statistics import Ema  # it imports torch, which the report does without

        self.title, self.story = title, Story()
        self.seconds_per_epoch, self.samples_per_second = Ema(_MOMENTUM), Ema(_MOMENTUM)

    def take_event(self, event: Event) -> bool:
        """Add an event; return whether `line` has changed."""
        self.story.take(event)
        if not isinstance(event, EpochEnded):
            return False
        self.seconds_per_epoch.update(event.seconds)
        if event.samples_per_second is not None:
            self.samples_per_second.update(event.samples_per_second)
        return True

    @property
    def last(self) -> EpochEnded:
        return self.story.epochs[-1]

    @property
    def planned(self) -> int:
        """Planned number of epochs, or the number so far if none is planned."""
        started = self.story.started
        return (started.epochs if started is not None else None) or self.last.epoch

    @property
    def left(self) -> str:
        """Estimated time left, or the reason for the end."""
        finished = self.story.finished
        if finished is not None:
            return finished.why
        return f"{duration((self.planned - self.last.epoch) * self.seconds_per_epoch.value)} left"

    @property
    def speed(self) -> str:
        """Samples per second, or time per epoch if the samples are unknown."""
        value = self.samples_per_second.value
        return f"{value:,.0f} samples/s" if value == value else f"{duration(self.seconds_per_epoch.value)} an epoch"

    def line(self) -> str:
        """Return a line about the last epoch."""
        last = self.last
        occupied = sum(Stage[view.stage] in OCCUPIED for view in last.slots)
        metrics = "".join(f"  {name} {metric_in_words(name, value)}" for name, value in last.metrics.items())
        losses = f"train {figure(last.train_loss)}  val {figure(last.val_loss)}{metrics}"
        seeds = f"{counted(occupied, 'seed')}  {last.parameters:,} parameters"
        return f"epoch {last.epoch}/{self.planned}  {losses}  {seeds}  {self.speed}  {self.left}"

    def remark_on(self, event: Event) -> str | None:
        """Return a line about an event other than the end of an epoch; None if it needs none."""
        match event:
            case GrowthStarted() as started:
                again = f", going on after epoch {started.epoch}" if started.epoch else ""
                size = f"{counted(started.parameters, 'parameter')}, {counted(len(started.slots), 'slot')}"
                what = f"{self.title}: {size} on {started.device}, {started.optimizer}"
                note = f"; {started.note}" if started.note else ""
                return f"{what}, {started.epochs} epochs, controller {started.controller}, {started.raise_mode}{again}{note}"
            case LoaderRestarted():
                return "the epoch begins again, because this loader cannot resume in the middle of an epoch"
            case RolledBack() as back:
                lost = f"; taken out: {', '.join(back.embargoed)}" if back.embargoed else ""
                found = f"; brought back: {', '.join(_protected(back))}" if _protected(back) else ""
                return f"epoch {back.epoch}: went back to epoch {back.to_epoch}: {back.reason}{lost}{found}"
            case BestRestored() as restored:
                return restored_in_words(restored)
            case Probed() as probe:
                return f"epoch {probe.epoch}: {probe_in_words(probe)}"
            case TrialsCompared() as compared:
                return f"epoch {compared.epoch}: {trials_in_words(compared)}"
        return None


class ProgressLines:
    """Event sink that prints one line per epoch to stderr, with the decision, and one at the end. Stops if stderr fails."""

    def __init__(self, title: str) -> None:
        self._progress = GrowthProgress(title)
        self._decision = ""  # the last one; it is not printed twice in a row
        self._is_gone = False  # stderr has failed

    def __call__(self, event: Event) -> None:
        is_news = self._progress.take_event(event)
        if isinstance(event, GrowthFinished):
            self._print(result_in_words(event))
        elif isinstance(event, EpochEnded) and is_news:
            decision, self._decision = event.decision if event.decision != self._decision else "", event.decision
            self._print("  ".join(filter(None, [self._progress.line(), decision])))
        elif not isinstance(event, Probed) and (remark := self._progress.remark_on(event)):
            self._print(remark)

    def _print(self, line: str) -> None:
        if self._is_gone or sys.stderr is None:
            return
        try:
            print(line, file=sys.stderr, flush=True)
        except (OSError, ValueError):  # a closed terminal, a closed file
            self._is_gone = True
