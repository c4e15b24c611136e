"""How much the loss jumps when something grows, is taken out, or goes back, beside a twin to which nothing happens.

    python benchmarks/growth/jumps.py

Events are forced, `--gap` epochs apart. With seeds that are raised jointly: germinate, prune (alpha falls over an epoch, then the seed is
gone), germinate again, a NaN in a seed's weights, which makes the governor go back and banish the seed, and a NaN in the host's weights
while nothing grows. With seeds in the shadow: germinate, blend, prune.

After every step of the training the loss of the validation part is computed as a whole, and leaves no trace: once as evaluation sees it, by
the running statistics of the batch norms, which lag behind, and once as training sees it, by those of the batch. The jump of an event is
the largest of these losses within 50 steps less the one just before it. The twin has the same first weights and sees the same batches; its
jump is that over the same steps. Differences are paired over seeds. Taking out a seed that was useful gives back what it gave, so beside
the jump stands the peak: the largest loss in those steps less the twin's, which says whether it is ever worse than never to have grown.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn

from esper.growth import Decision, GrowthState
from esper.growth.config import LifecycleConfig
from esper.growth.host.isolation import isolated
from esper.growth.lifecycle.stages import Action, Advance, Germinate, Prune

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import Loop, Setting, add_options, difference, earlier_runs, mean, print_table, run_all, setting_of, shown
from benchmarks.records import RESULTS, Output, Record

EVENTS = {
    "joint": ("germinate", "prune", "germinate again", "rollback, NaN in a seed", "rollback, NaN in the host"),
    "shadow": ("germinate", "blend", "prune"),
}
VIEWS = ("evaluation", "training")  # the mode in which a loss is computed
# Nothing is measured or kept, and nothing has to be healthy: all that happens is what is forced.
LIFE = LifecycleConfig(holding_epochs=10_000, embargo_epochs=0, training_epochs=1, minimum_health=0.0)


@dataclass(frozen=True)
class Events:
    """When what happens, where, and how long it is watched."""

    slots: tuple[str, ...]
    blueprint: str
    first: int  # epochs before the first event
    gap: int  # epochs from one event to the next
    window: int  # steps

    def epochs(self, mode: str) -> dict[str, int]:
        return {event: self.first + number * self.gap for number, event in enumerate(EVENTS[mode])}

    def actions(self, event: str) -> tuple[Action, ...]:
        if event.startswith("germinate"):
            return tuple(Germinate(slot=slot, reason="forced", blueprint=self.blueprint) for slot in self.slots)
        kinds: dict[str, type[Action]] = {"blend": Advance, "prune": Prune}
        return tuple(kinds[event](slot=slot, reason="forced") for slot in self.slots) if event in kinds else ()

    @property
    def about(self) -> Record:
        return {"slots": list(self.slots), "blueprint": self.blueprint, "first": self.first, "gap": self.gap, "window": self.window}


class Forced:
    """Decides what the plan says, epoch by epoch."""

    name = "forced"

    def __init__(self, plan: dict[int, tuple[Action, ...]]) -> None:
        self.plan = plan

    def decide(self, state: GrowthState) -> Decision:
        return Decision(self.plan.get(state.epoch, ()), "forced")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Watched:
    """A run whose losses on the validation part are known after every step."""

    def __init__(self, setting: Setting, events: Events, mode: str | None, *, seed: int) -> None:
        self.events, self.mode = events, mode
        self.times = {} if mode is None else events.epochs(mode)
        plan = {epoch: events.actions(event) for event, epoch in self.times.items()}
        life = structs.replace(LIFE, raise_mode=mode or "joint")
        config = setting.config(seed, lifecycle=life, slots=events.slots)
        self.loop = Loop(setting, setting.load().make_host("starved", seed=seed), Forced(plan), config, seed=seed)
        data = setting.load().validation
        self._inputs, self._targets = data.inputs.to(setting.device), data.targets.to(setting.device)
        self.losses: dict[str, list[float]] = {view: [] for view in VIEWS}  # before the first step, and after each
        self._look()

    def run(self, epochs: int) -> None:
        for _ in range(epochs):
            self.loop.run_epoch(before_step=self._harm, after_step=self._look)
        assert not self.loop.grower.ledger.refused, self.loop.grower.ledger.refused

    def _look(self) -> None:
        model = self.loop.slotted.model
        for view, losses in self.losses.items():
            with isolated(model), torch.no_grad():
                model.train(view == "training")
                losses.append(float(self.loop.task.loss_fn(model(self._inputs), self._targets)))

    def _harm(self, step: int) -> None:
        """In the middle of its epoch, so that going back costs steps."""
        event = next((event for event, epoch in self.times.items() if epoch == self.loop.grower.epoch), "")
        if step != len(self.loop.batches) // 2 or not event.startswith("rollback"):
            return
        seed = self.loop.slotted.slot(self.events.slots[0]).seed
        harmed: nn.Module | None = seed if event.endswith("seed") else self.loop.slotted.host
        assert harmed is not None, "there is no seed to harm"
        with torch.no_grad():
            next(harmed.parameters()).fill_(math.nan)

    def step_of(self, event: str) -> int:
        """How many steps were over when it happened."""
        length = len(self.loop.batches)
        return self.times[event] * length + (length // 2 if event.startswith("rollback") else 0)


def jump(losses: Sequence[float], start: int, window: int) -> float:
    """The largest loss within the window after `start`, less the loss there.

    >>> jump([3.0, 2.0, 2.5, 1.0, 9.0], 1, 2)
    0.5
    """
    return max(losses[start + 1 : start + 1 + window]) - losses[start]


def run_seed(setting: Setting, events: Events, seed: int) -> list[Record]:
    last = max(epoch for mode in EVENTS for epoch in events.epochs(mode).values())
    twin = Watched(setting, events, None, seed=seed)
    twin.run(last + events.gap)
    records = []
    for mode in EVENTS:
        run = Watched(setting, events, mode, seed=seed)
        run.run(max(run.times.values()) + events.gap)
        for event, view in product(EVENTS[mode], VIEWS):
            start, losses, twins = run.step_of(event), run.losses[view], twin.losses[view]
            records.append(
                {
                    **setting.about,
                    **events.about,
                    "seed": seed,
                    "raise": mode,
                    "event": event,
                    "view": view,
                    "step": start,
                    "before": losses[start],
                    "twin_before": twins[start],
                    "jump": jump(losses, start, events.window),
                    "twin_jump": jump(twins, start, events.window),
                    "rollbacks": run.loop.grower.rollbacks,
                }
            )
    return records


def whole_seed(earlier: list[Record], seed: int) -> list[Record]:
    """The records of a seed; none where whoever wrote them was stopped before the last."""
    found = {(run["raise"], run["event"], run["view"]): run for run in earlier if run["seed"] == seed}
    return list(found.values()) if len(found) == len(VIEWS) * sum(map(len, EVENTS.values())) else []


def summary(setting: Setting, events: Events, runs: list[Record]) -> Record:
    rows = []
    for view, mode, event in [(view, mode, event) for view in VIEWS for mode, names in EVENTS.items() for event in names]:
        some = [run for run in runs if (run["view"], run["raise"], run["event"]) == (view, mode, event)]
        found = difference(some, [{**run, "jump": run["twin_jump"]} for run in some], "jump")
        means = {name: mean(some, name) for name in ("jump", "twin_jump", "before", "twin_before")}
        peaks = [{"seed": run["seed"], "peak": run["before"] + run["jump"]} for run in some]
        twins = [{"seed": run["seed"], "peak": run["twin_before"] + run["twin_jump"]} for run in some]
        is_above = None if found is None else found["low"] > 0
        about = {"view": view, "raise": mode, "event": event}
        rows.append({**about, **means, "difference": found, "is_above": is_above, "peak_difference": difference(peaks, twins, "peak")})
    return {"what": "summary", **setting.about, **events.about, "rows": rows}


def show(record: Record) -> None:
    rows = [("seen in", "raise", "event", "loss before", "twin's", "largest jump", "twin's", "difference", "above", "peak − twin's")]
    for about in record["rows"]:
        numbers = [f"{about[name]:.4f}" for name in ("before", "twin_before", "jump", "twin_jump")]
        verdict = {None: "–", True: "yes", False: "no"}[about["is_above"]]
        rows.append(
            (
                about["view"],
                about["raise"],
                about["event"],
                *numbers,
                shown(about["difference"], 4),
                verdict,
                shown(about["peak_difference"], 4),
            )
        )
    print_table(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, out=RESULTS / "growth_jumps.jsonl")
    parser.add_argument("--slots", default="blocks.0,blocks.1")
    parser.add_argument("--blueprint", default="wide_conv3x3")
    parser.add_argument("--first", type=int, default=4, help="epochs before the first event")
    parser.add_argument("--gap", type=int, default=4, help="epochs from one event to the next")
    parser.add_argument("--window", type=int, default=50, help="steps after an event")
    options = parser.parse_args(arguments)
    setting = setting_of(options)
    events = Events(tuple(options.slots.split(",")), options.blueprint, options.first, options.gap, options.window)
    length = len(setting.load().train_loader())
    if (options.gap - 0.5) * length < options.window:
        parser.error(f"{options.gap} epochs of {length} steps are too short for a window of {options.window} steps; choose a larger --gap")
    output = Output(options.out, resume=not options.fresh)
    earlier = earlier_runs(output, setting, **events.about)
    runs = [run for seed in range(options.seeds) for run in whole_seed(earlier, seed)]
    have = {run["seed"] for run in runs}
    jobs = [partial(run_seed, setting, events, seed) for seed in range(options.seeds) if seed not in have]
    runs += run_all(jobs, processes=options.jobs, output=output)
    record = summary(setting, events, runs)
    output.write(record)
    show(record)


if __name__ == "__main__":
    main()
