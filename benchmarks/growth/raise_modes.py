"""Three ways to raise a seed, grown at a tenth and at a third of the training: jointly, in the shadow, and straight-through.

    python benchmarks/growth/raise_modes.py --task digits
    python benchmarks/growth/raise_modes.py --task digits-1d

    joint              the seed is part of the host from birth, and both learn together
    shadow             it learns in a second forward pass that really uses it, the host does not notice; then it is blended in
    straight_through   it learns in the host's own pass, where its output has a gradient and no value: h + (s - s without gradient); the
                       host does not notice; then it is blended in. So it never sees what its output would do, and nothing tells it when
                       it has grown large enough. Made here for the comparison
    never              the host that never grows

All grow the same seeds in the same slots at the same time. Reported are the test scores, paired over seeds, and how large the seed's output
is beside what it is added to, |s(h)| / |h|, when it would be blended in; for joint at the same age.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from esper.growth import Planned
from esper.growth.config import LifecycleConfig
from esper.growth.host.slots import Slot
from esper.growth.lifecycle.backend import SlotBackend
from esper.growth.lifecycle.stages import Cost
from esper.growth.seeds.shadow import Closure, Shadow
from esper.parallel import Group

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import Loop, Setting, add_options, compared, difference, earlier_runs, print_table, run_all, setting_of, shown
from benchmarks.records import RESULTS, Output, Record

WAYS = ("joint", "shadow", "straight_through")
TIMES = (0.1, 0.33)  # parts of the training after which the seeds germinate


class StraightThrough(Shadow):
    """Stands in for the shadow: seeds learn by the gradient that the host's own pass gives them."""

    _watched: Sequence[SlotBackend] = ()

    def prepare(self, backends: Sequence[SlotBackend]) -> None:
        self.rest()
        self._watched = list(backends)
        for backend in self._watched:
            backend.slot.observe(pass_through)

    def rest(self) -> None:
        for backend in self._watched:
            backend.slot.observe(None)
        self._watched = ()

    def step(self, backends: Sequence[SlotBackend], closure: Closure, *, scale: Tensor | None, group: Group) -> None:
        """Nothing: the seeds have learned in the host's step."""

    def learn(self, *_: object) -> None:
        """After a step of the host's optimiser, while the gradients are still there."""
        for backend in self._watched:
            if backend.learner is not None:
                backend.learner.step()

    def flops(self, backends: Sequence[SlotBackend], costs: Sequence[Cost]) -> int:
        return 3 * sum(cost.flops for cost in costs)


def pass_through(slot: Slot, output: Tensor) -> Tensor:
    """The same values; the seed gets the gradient of what is behind, and the host gets none by way of the seed."""
    if slot.seed is None or not torch.is_grad_enabled():
        return output
    delta = slot.seed.delta(output.detach())
    return output + (delta - delta.detach())


def relative_size(loop: Loop, slot: Slot) -> float:
    """|s(h)| / |h| over the validation part."""
    assert slot.seed is not None
    caught: list[Tensor] = []

    def catch(slot: Slot, output: Tensor) -> Tensor:
        caught.append(output)
        return output

    data = loop.task.validation
    before = slot.observer
    slot.observe(catch)
    loop.slotted.eval()
    with torch.no_grad():
        loop.slotted(data.inputs.to(loop.setting.device))
        slot.observe(before)
        h = caught[0]
        return float(slot.seed.delta(h).norm() / h.norm())


def run_one(setting: Setting, grown: Record, way: str, at: float, seed: int) -> list[Record]:
    """One training; `grown` are the slots and the blueprint."""
    epoch, slots = max(round(at * setting.epochs), 1), tuple(grown["slots"])
    life = LifecycleConfig(raise_mode="joint" if way in ("joint", "never") else "shadow")
    plan = [] if way == "never" else [(epoch, slot, grown["blueprint"]) for slot in slots]
    host = setting.load().make_host("starved", seed=seed)
    loop = Loop(setting, host, Planned(plan), setting.config(seed, lifecycle=life, slots=slots), seed=seed)
    if way == "straight_through":
        loop.grower._steps.shadow = StraightThrough(loop.slotted)
        loop.optimizer.register_step_post_hook(loop.grower._steps.shadow.learn)
    sizes: dict[str, float] = {}
    for _ in range(setting.epochs):
        loop.run_epoch()
        if plan and loop.grower.epoch == epoch + life.training_epochs:
            sizes = {slot: relative_size(loop, loop.slotted.slot(slot)) for slot in slots}
    return [{"way": way, "at": at, **grown, **loop.finish(), "relative_size": sizes}]


def summary(setting: Setting, grown: Record, runs: list[Record]) -> Record:
    never = [run for run in runs if run["way"] == "never"]
    rows = []
    for at in sorted({run["at"] for run in runs if run["way"] != "never"}):
        some = {way: [run for run in runs if (run["way"], run["at"]) == (way, at)] for way in WAYS}
        for way in WAYS:
            sizes = {slot: fmean(run["relative_size"][slot] for run in some[way]) for slot in grown["slots"]}
            against_joint = {
                "joint_accuracy_ahead": difference(some["joint"], some[way], "test_accuracy", scale=100),
                "joint_loss_ahead": difference(some["joint"], some[way], "test_loss"),
            }
            rows.append({"way": way, "at": at, **compared(some[way], never), **against_joint, "relative_size": sizes})
    rows.append({"way": "never", "at": None, **compared(never, never)})
    return {"what": "summary", **setting.about, **grown, "rows": rows}


def show(record: Record) -> None:
    head = ("way", "grown at", "test accuracy", "test loss", "|s(h)| / |h|", "points − never", "joint − it, points", "joint − it, loss")
    rows = [head]
    for about in record["rows"]:
        scores = (f"{about['test_accuracy']:.2f} %", f"{about['test_loss']:.4f}")
        if about["way"] == "never":
            rows.append(("never", "", *scores, "", "", "", ""))
            continue
        sizes = " ".join(f"{slot} {size:.2f}" for slot, size in about["relative_size"].items())
        ahead = (shown(about["joint_accuracy_ahead"]), shown(about["joint_loss_ahead"], 4)) if about["way"] != "joint" else ("", "")
        rows.append((about["way"], f"{about['at']:.0%}", *scores, sizes, shown(about["accuracy_difference"]), *ahead))
    print_table(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, out=RESULTS / "growth_raise.jsonl")
    parser.add_argument("--slots", default="blocks.0,blocks.1")
    parser.add_argument("--blueprint", default="double_conv3x3")
    options = parser.parse_args(arguments)
    setting, output = setting_of(options), Output(options.out, resume=not options.fresh)
    grown = {"slots": options.slots.split(","), "blueprint": options.blueprint}
    wanted = [
        (way, at, seed) for seed in range(options.seeds) for way, at in [("never", 0.0), *((way, at) for at in TIMES for way in WAYS)]
    ]
    runs = [run for run in earlier_runs(output, setting, **grown) if (run["way"], run["at"], run["seed"]) in wanted]
    have = {(run["way"], run["at"], run["seed"]) for run in runs}
    jobs = [partial(run_one, setting, grown, *what) for what in wanted if what not in have]
    runs += run_all(jobs, processes=options.jobs, output=output)
    record = summary(setting, grown, runs)
    output.write(record)
    show(record)


if __name__ == "__main__":
    main()
