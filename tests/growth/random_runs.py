"""Random growing runs, and what every reader of a run says of its seeds.

`play` trains one small random run: legal and illegal actions, losses that are NaN, a kill and a resume, and growing the result again.
`what_is_said` returns the same facts of every seed from the model, the ledger and all readers of the run folder.
"""

from __future__ import annotations

import html
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from esper.cli.runs import seeds_of as show
from esper.dashboard.data import growth_story
from esper.growth import Grower, Grown, SlotState, grow
from esper.growth.config import BudgetConfig, GovernorConfig, GrowthConfig, LifecycleConfig, RentConfig
from esper.growth.lifecycle.ledger import SeedRecord, ledger_rows
from esper.growth.lifecycle.stages import (
    LIVING,
    OCCUPIED,
    Action,
    Advance,
    Decision,
    Fossilize,
    Germinate,
    GrowthState,
    Prune,
    Retarget,
    Shrink,
    Stage,
)
from esper.growth.report.story import read_story
from esper.runs.analysis import blueprint_rows
from esper.runs.catalog import open_run
from esper.runs.tables import Table, opened, seeds_table

BLUEPRINTS = ("low_rank", "mlp", "widen_50")


class Killed(BaseException):
    """The process of a run is killed: nothing after this point happens."""


@dataclass
class Chance:
    """A controller that tries a random action in every slot, legal or not. Equal states give equal decisions, so it can be resumed."""

    seed: int
    name: str = "chance"

    def decide(self, state: GrowthState) -> Decision:
        chance = random.Random(f"{self.seed} {state.epoch} {state.rollbacks}")
        actions = [action for slot in state.slots if (action := self._action(slot, chance)) is not None]
        return Decision(tuple(actions), reason="by chance", measure_kept=chance.random() < 0.8)

    def _action(self, slot: SlotState, chance: random.Random) -> Action | None:
        name, reason = slot.place.name, f"chance {chance.randrange(1000)}"
        likely: list[Callable[[], Action]] = []
        if slot.stage is Stage.DORMANT:
            likely = [lambda: Germinate(slot=name, reason=reason, blueprint=chance.choice(BLUEPRINTS))]
        elif slot.stage is Stage.TRAINING:
            likely = [lambda: Advance(slot=name, reason=reason)]
        elif slot.stage in LIVING:
            likely = [lambda: Fossilize(slot=name, reason=reason)] * 3 + [lambda: Prune(slot=name, reason=reason)]
        elif slot.stage is Stage.FOSSILIZED:
            likely = [lambda: Shrink(slot=name, reason=reason)]
        every: list[Callable[[], Action]] = [
            lambda: Germinate(slot=name, reason=reason, blueprint=chance.choice([*BLUEPRINTS, "nothing"])),
            lambda: Advance(slot=name, reason=reason),
            lambda: Retarget(slot=name, reason=reason, alpha=chance.choice([0.0, 0.5, 1.0])),
            lambda: Fossilize(slot=name, reason=reason),
            lambda: Prune(slot=name, reason=reason),
            lambda: Shrink(slot=name, reason=reason),
        ]
        draw = chance.random()
        if draw < 0.65 and likely:
            return chance.choice(likely)()
        return chance.choice(every)() if draw < 0.8 else None

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


@dataclass
class Batches:
    """Training batches that call `before` with the number of every batch, counted over all epochs."""

    batches: list[tuple[Tensor, Tensor]]
    before: Callable[[int], None]
    count: int = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.batches:
            self.count += 1
            self.before(self.count)
            yield batch


@dataclass
class Played:
    """One run that is over: its folder, its result, and what happened in it."""

    folder: Path
    grown: Grown
    grower: Grower
    planted: dict[int, tuple[str, str, str]]  # seeds that the model held before it was baked: number -> slot, blueprint, stage
    added_parameters: int  # of the baked model, beyond those of the one that the run began with
    happened: Counter[str] = field(default_factory=Counter)


def seeds_in(grower: Grower) -> dict[int, tuple[str, str, str]]:
    """Return slot, blueprint and stage of every seed that the model holds, by number. The blueprint is that of the module itself."""
    found = {}
    for name, slot in grower.lifecycles.slots.items():
        module = grower.slotted.slots[name].seed
        assert (module is not None) == (slot.record.number is not None) == (slot.stage in OCCUPIED), name
        if module is not None:
            assert slot.record.number is not None
            assert grower.slotted.slots[name].is_kept == (slot.stage is Stage.FOSSILIZED), name
            found[slot.record.number] = (name, module.spec.blueprint, slot.stage.name)
    return found


def play(seed: int, folder: Path, *, traits: set[str] | None = None) -> list[Played]:
    """Train a random run, and grow its result again in some cases. `traits` overrules the drawn ones; see the first lines."""
    chance = random.Random(seed)
    drawn = {name for name, share in (("rollback", 0.6), ("kill", 0.3), ("again", 0.3), ("stop", 0.1)) if chance.random() < share}
    traits = drawn if traits is None else traits
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    played = [_train(seed, model, folder / "first", traits, chance)]
    if "again" in traits:
        result = played[0].grown.model
        again = _train(seed + 1_000_000, result, folder / "again", traits, chance)
        again.happened["grown again"] += 1
        played.append(again)
    return played


def _train(seed: int, model: nn.Module, folder: Path, traits: set[str], chance: random.Random) -> Played:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(seed))
    targets = (inputs[:, 0] * inputs[:, 1] > 0).long()
    batches = [(inputs[i : i + 6], targets[i : i + 6]) for i in range(0, 24, 6)]
    epochs, happened = chance.randint(6, 9), Counter[str]()
    lost = set(chance.sample(range(5, len(batches) * epochs), 3)) if "rollback" in traits else set()
    # The validation loss is scaled epoch by epoch, so that any epoch may be the best one.
    scales = [chance.uniform(0.8, 1.2) for _ in range(epochs)] + [1.5]
    kill_at = chance.randrange(len(batches) + 1, len(batches) * epochs) if "kill" in traits else None
    stop_at = chance.randrange(len(batches) + 1, len(batches) * epochs) if "stop" in traits and kill_at is None else None
    growers: list[Grower] = []
    counted = {"steps": 0}

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        if model.training:
            return loss * float("nan") if counted["steps"] in lost else loss
        return loss * scales[min(growers[-1].epoch if growers else 0, epochs)]

    def before(number: int) -> None:
        counted["steps"] += 1
        lost_now = counted["steps"]
        if lost_now == kill_at:
            shutil.copytree(folder, folder.with_name(f"{folder.name}-killed"))
            raise Killed
        if lost_now == stop_at:
            raise KeyboardInterrupt

    config = GrowthConfig(
        seed=seed % 1000,
        blueprints=BLUEPRINTS,
        budget=BudgetConfig(max_parameters=None, max_flops=None, max_seeds_per_place=2),
        rent=RentConfig(parameters=chance.choice([0.0, 0.3]), flops=0.0),
        lifecycle=LifecycleConfig(
            raise_mode=chance.choice(["joint", "shadow"]),
            training_epochs=1,
            minimum_health=0.0,
            blend_epochs=chance.choice([0, 1]),
            holding_epochs=1,
            withdraw_epochs=chance.choice([0, 1, 2]),
            embargo_epochs=chance.choice([0, 1, 2]),
        ),
        governor=GovernorConfig(max_rollbacks=50, snapshot_every=chance.choice([1, 2])),
    )
    planted: dict[int, tuple[str, str, str]] = {}
    bake = Grower.bake
    make = Grower.__init__

    def noted_make(self: Grower, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        growers.append(self)

    def noted_bake(self: Grower, **options: Any) -> nn.Module:
        planted.clear()
        planted.update(seeds_in(self))
        return bake(self, **options)

    def call(place: Path, *, resume: bool) -> Grown:
        return grow(
            model,
            Batches(batches, before),
            batches,
            epochs=epochs,
            step_loss=loss_of,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            controller=Chance(seed),
            config=config,
            run=place,
            resume=resume,
            progress=False,
        )

    Grower.bake, Grower.__init__ = noted_bake, noted_make  # type: ignore[method-assign]
    try:
        try:
            grown = call(folder, resume=False)
        except Killed:
            # A killed process does not clean up, so go on in the copy of what it had written by then.
            happened["killed"] += 1
            folder = folder.with_name(f"{folder.name}-killed")
            grown = call(folder, resume=True)
        if grown.status == "stopped":
            happened["stopped"] += 1
            stop_at = None
            grown = call(folder, resume=True)
    finally:
        Grower.bake, Grower.__init__ = bake, make  # type: ignore[method-assign]
    happened["rollbacks"] += grown.rollbacks
    happened["best restored"] += grown.best_epoch is not None
    seeds = grown.ledger.seeds
    happened["shrunk"] += sum({"FOSSILIZED", "PRUNED"} <= {step.stage.name for step in seed.stages} for seed in seeds)
    happened["brought back"] += sum(seed.brought_back for seed in seeds)
    sizes = [sum(parameter.numel() for parameter in one.parameters()) for one in (model, grown.model)]
    return Played(folder, grown, growers[-1], planted, sizes[1] - sizes[0], happened)


# What is said of the seeds

Facts = dict[int, tuple[Any, ...]]  # number of a seed -> what a reader says of it


def facts_of(seeds: Iterable[SeedRecord]) -> Facts:
    """Return all facts of the seeds in a ledger."""
    return {
        seed.number: (
            seed.slot,
            seed.blueprint,
            [(step.epoch, step.stage.name, step.reason) for step in seed.stages],
            seed.outcome,
            seed.why,
            [(gain.epoch, gain.gain, gain.gain_low, gain.gain_high, gain.rent) for gain in seed.contributions],
        )
        for seed in seeds
    }


def facts_of_dicts(seeds: Iterable[Mapping[str, Any]]) -> Facts:
    """Return the same facts of the seeds of a page or a table."""
    return {
        seed["number"]: (
            seed["slot"],
            seed["blueprint"],
            [(step["epoch"], step["stage"], step["reason"]) for step in seed["stages"]],
            seed["outcome"],
            seed["why"],
            [tuple(gain[name] for name in ("epoch", "gain", "gain_low", "gain_high", "rent")) for gain in seed["contributions"]],
        )
        for seed in seeds
    }


def disagreements(played: Played) -> list[str]:
    """Return what the model, the ledger and the readers of the run folder say differently of the seeds of a run."""
    ledger, run, found = played.grown.ledger, open_run(played.folder), list[str]()
    wanted = facts_of(ledger.seeds)

    def compare(source: str, said: object, expected: object) -> None:
        if said != expected:
            found.append(f"{source} says {said}, and the ledger {expected}")

    # The model decides: the seeds that it held before it was baked, and the parameters that it has after it.
    held = {seed.number: (seed.slot, seed.blueprint, seed.stage.name) for seed in ledger.seeds if seed.is_present}
    compare("the model", played.planted, held)
    kept = [seed for seed in ledger.seeds if seed.outcome == "kept"]
    compare("the baked model", played.added_parameters, played.grown.added.parameters)
    # The ledger that is folded from the log equals the one of the training in every field.
    story = read_story(played.folder)
    compare("the log", msgspec.json.encode(story.ledger), msgspec.json.encode(ledger))
    # All readers of the folder.
    compare("the dashboard", facts_of_dicts(growth_story(run)["seeds"]), wanted)
    compare("a query", facts_of_dicts(_rows(seeds_table(opened([played.folder])))), wanted)
    page = (played.folder / "report.html").read_text() if (played.folder / "report.html").exists() else ""
    rows = [list(row[:-1]) for row in ledger_rows(ledger.seeds, is_short=True)]
    compare("report.html", _table_below(page, "<h2>Lives of the seeds</h2>"), rows)
    shown = {seed.number: (seed.slot, seed.blueprint, seed.stage, seed.outcome, seed.why, seed.cost_of_removal) for seed in show(run)}
    compare(
        "runs show", shown, {one.number: (one.slot, one.blueprint, one.stage.name, one.outcome, one.why, one.gain) for one in ledger.seeds}
    )
    card = (played.folder / "model.md").read_text()
    lines = [line.replace("\\", "") for line in card.splitlines() if ", kept in epoch " in line]
    compare("the card", lines, [f"- `{one.blueprint}` after `{one.slot}`, kept in epoch {one.ended}: {one.why}" for one in kept])
    rows = {row.blueprint: (row.tried, row.kept, row.pruned, row.rolled_back, row.living) for row in blueprint_rows([run])}
    outcomes = {name: Counter(one.outcome for one in ledger.seeds if one.blueprint == name) for name in rows}
    counts = {name: (sum(of.values()), of["kept"], of["pruned"], of["rolled back"], of["living"]) for name, of in outcomes.items()}
    compare("the analysis", rows, counts)
    return found


def _rows(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def _table_below(page: str, heading: str) -> list[list[str]]:
    """Return the texts of the cells of the first table below a heading, without its own heading."""
    table = page.partition(heading)[2].partition("</table>")[0]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", table, re.DOTALL)
    cells = [[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)] for row in rows]
    return [row for row in cells if row]
