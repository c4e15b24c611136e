"""What became of blueprints, from made events against plain counts; and the file of an analysis."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from esper.config import save
from esper.controller.config import ControllerConfig
from esper.controller.events import BlueprintCount, RoundEnded
from esper.growth.events import ActionRefused, Birth, GrowthStarted, Measured, RolledBack, SeedBack, StageEntered
from esper.intervals import Interval, student_interval
from esper.runs import Event, EventLog, RunError
from esper.runs.analysis import (
    ANALYSIS,
    AnalysedSeed,
    Analysis,
    Estimate,
    Interaction,
    MeasureResult,
    analysis_section,
    blueprint_rows,
    blueprint_section,
    pair_matrix,
    read_analysis,
    seed_rows,
    write_analysis,
)
from esper.runs.catalog import open_run
from esper.runs.folder import CONFIG, EVENTS
from tests.runs.made import made_growth

SIZE: dict[str, int] = {"parameters": 1000, "flops": 5000}


def entered(epoch: int, slot: str, number: int, blueprint: str, stage: str, reason: str = "") -> StageEntered:
    size = {1: (100, 300), 2: (50, 200), 3: (8, 16)}.get(number, (10, 20))
    birth = Birth("joint", *size) if stage == "GERMINATED" else None
    return StageEntered(epoch=epoch, slot=slot, number=number, blueprint=blueprint, stage=stage, reason=reason, birth=birth)


def measured(slot: str, number: int, gain: float) -> Measured:
    return Measured(epoch=2, slot=slot, number=number, gain=gain, gain_low=gain - 0.1, gain_high=gain + 0.1, rent=0.01)


def made(folder: Path, events: list[Event], kind: str = "growth") -> Path:
    """Write a run of these events."""
    if kind == "growth":
        made_growth(folder, [1.0])
        (folder / EVENTS).unlink()
        events = [GrowthStarted(epoch=0, epochs=9, controller="x", raise_mode="joint", slots=["a", "b"], **SIZE), *events]
    else:
        folder.mkdir()
        save(ControllerConfig(), folder / CONFIG)
    with EventLog(folder / EVENTS, run=folder.name) as log:
        for event in events:
            log.emit(event)
    return folder


def first_run(folder: Path) -> Path:
    """Write a run with a kept mlp in a, a pruned mlp in b, then a norm in b that the governor removes, and a refused action."""
    refused: dict[str, Any] = {"number": 2, "action": "fossilize", "blueprint": "mlp"}
    return made(
        folder,
        [
            entered(1, "a", 1, "mlp", "GERMINATED"),
            entered(1, "b", 2, "mlp", "GERMINATED"),
            measured("a", 1, 0.2),
            measured("a", 1, 0.3),
            measured("b", 2, 0.1),
            ActionRefused(slot="b", epoch=2, reason="its gain of 0.1 is below its rent of 0.2", **refused),
            ActionRefused(slot="b", epoch=3, reason="its gain of 0.3 is below its rent of 0.4", **refused),
            entered(4, "a", 1, "mlp", "FOSSILIZED"),
            entered(4, "b", 2, "mlp", "PRUNED", "its gain of 0.1 is not enough"),
            entered(5, "b", 3, "norm", "GERMINATED"),
            RolledBack(epoch=6, to_epoch=5, reason="the loss is not finite", embargoed=["b"], gone=[3]),
        ],
    )


def test_blueprints_of_a_growth_run_are_counted_with_reasons_gates_and_size(tmp_path: Path) -> None:
    mlp, norm = blueprint_rows([open_run(first_run(tmp_path / "one"), cache=tmp_path)])
    assert (mlp.blueprint, mlp.tried, mlp.kept, mlp.pruned, mlp.rolled_back) == ("mlp", 2, 1, 1, 0)
    assert mlp.reasons == {"its gain of … is not enough": 1}
    assert mlp.refused == {"fossilize: its gain of … is below its rent of …": 2}
    assert (mlp.measured, mlp.cells, mlp.gain_low) == (2, 1, None)
    assert mlp.gain == pytest.approx(0.2)  # the mean of the last gains, 0.3 and 0.1
    assert (mlp.parameters, mlp.flops) == (75, 250)
    assert mlp.gain_per_thousand == pytest.approx(0.2 / 75 * 1000)
    assert (norm.tried, norm.kept, norm.pruned, norm.rolled_back, norm.gain) == (1, 0, 0, 1, None)
    assert norm.reasons == {"the governor went back: the loss is not finite": 1}


def test_the_interval_of_a_gain_is_over_runs_and_not_over_seeds(tmp_path: Path) -> None:
    gains = {"one": [0.1, 0.2, 0.3], "two": [0.5], "three": [0.9, 0.7]}
    for name, of_seeds in gains.items():
        events: list[Event] = []
        for number, gain in enumerate(of_seeds, start=1):
            events += [entered(1, f"s{number}", number, "mlp", "GERMINATED"), measured(f"s{number}", number, gain)]
        made(tmp_path / name, events)
    (row,) = blueprint_rows([open_run(tmp_path / name, cache=tmp_path) for name in gains])
    wanted = student_interval([sum(of_seeds) / len(of_seeds) for of_seeds in gains.values()])
    assert (row.tried, row.living, row.cells) == (6, 6, 3)
    assert (row.gain, row.gain_low, row.gain_high) == pytest.approx((wanted.estimate, wanted.low, wanted.high))


def test_blueprints_of_a_controller_run_are_counted_by_task_and_host(tmp_path: Path) -> None:
    base: dict[str, Any] = {
        "horizon": 3, "hosts": 4, "gain": 0.0, "rent": 0.0, "utility": 0.0, "worth": 0.0, "grown": 4, "kept": 1, "rollbacks": 0,
        "samples": 1,
    }  # fmt: skip
    counted: dict[str, Any] = {"tried": 4, "kept": 1, "pruned": 2, "rolled_back": 1, "parameters": 400, "flops": 800}
    rounds = [
        ("digits", "starved", BlueprintCount(gain=0.1, measured=3, reasons={"too weak": 1, "not finite": 1}, **counted)),
        ("digits", "starved", BlueprintCount(gain=0.5, measured=1, refused={"fossilize: too early": 2}, **counted)),
        ("digits", "right", BlueprintCount(gain=0.4, measured=2, **counted)),
    ]
    run = made(tmp_path / "c", [RoundEnded(task=task, host=host, blueprints={"norm": count}, **base) for task, host, count in rounds], "c")
    (row,) = blueprint_rows([open_run(run, cache=tmp_path)])
    assert (row.tried, row.kept, row.pruned, row.rolled_back, row.living) == (12, 3, 3, 3, 3)
    assert (row.reasons, row.refused) == ({"too weak": 1, "not finite": 1}, {"fossilize: too early": 2})
    cells = [(3 * 0.1 + 0.5) / 4, 0.4]
    assert (row.cells, row.gain, row.gain_high) == pytest.approx((2, sum(cells) / 2, student_interval(cells).high))
    assert (row.parameters, row.flops) == (100, 200)


def test_lines_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    run = first_run(tmp_path / "one")
    lines = (run / EVENTS).read_text().splitlines()
    assert ',"gain":0.3,' in lines[5]
    damaged = [lines[5].replace(',"gain":0.3,', ",")]
    (run / EVENTS).write_text("\n".join([*lines[:5], *damaged, *lines[6:]]) + "\n")
    mlp = blueprint_rows([open_run(run, cache=tmp_path)])[0]
    assert (mlp.tried, mlp.kept, mlp.gain) == (2, 1, pytest.approx(0.15)), "the gain of seed 1 is the one before"


def test_a_seed_that_a_rollback_removes_is_named_by_its_number(tmp_path: Path) -> None:
    run = made(
        tmp_path / "one",
        [
            entered(1, "a", 1, "mlp", "GERMINATED"),
            entered(2, "b", 2, "norm", "GERMINATED"),
            RolledBack(epoch=3, to_epoch=1, reason="spike", embargoed=[], gone=[2]),
        ],
    )
    mlp, norm = blueprint_rows([open_run(run, cache=tmp_path)])
    assert (mlp.living, mlp.parameters, norm.rolled_back) == (1, 100, 1)
    assert norm.reasons == {"the governor went back: spike": 1}


def test_a_pruned_seed_that_a_rollback_brings_back_is_living_again(tmp_path: Path) -> None:
    run = made(
        tmp_path / "one",
        [
            entered(1, "a", 1, "mlp", "GERMINATED"),
            entered(1, "a", 1, "mlp", "HOLDING"),
            entered(2, "a", 1, "mlp", "PRUNED", "its gain of 0.1 is not enough"),
            RolledBack(epoch=3, to_epoch=1, reason="spike", embargoed=[], back=[SeedBack(1, "a", "HOLDING", "living", True)]),
        ],
    )
    (mlp,) = blueprint_rows([open_run(run, cache=tmp_path)])
    assert (mlp.living, mlp.pruned, mlp.reasons) == (1, 0, {})


# The results of esper analyse


def some_analysis(names: tuple[str, str] = ("first", "second")) -> Analysis:
    values = {names[0]: Estimate(0.5, 0.4, 0.6), names[1]: Estimate(-0.1, None, None)}
    loss = MeasureResult("loss", True, 2.0, 1.6, values, values, values, [Interaction(*names, Estimate(-0.25, -0.5, -0.1))])
    seeds = [AnalysedSeed(name, "mlp", "kept", 1.0, 200, 400) for name in names]
    return Analysis(seeds=seeds, measures=[loss], batches=4, samples=64, coalitions=4, orders=0, epoch=9)


def test_an_analysis_is_read_as_it_was_written_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    assert read_analysis(tmp_path) is None
    write_analysis(tmp_path, some_analysis())
    assert read_analysis(tmp_path) == some_analysis()
    (tmp_path / ANALYSIS).write_bytes(msgspec.json.encode(msgspec.structs.replace(some_analysis(), version=99)))
    with pytest.raises(RunError, match="write it again with: esper analyse"):
        read_analysis(tmp_path)
    (tmp_path / ANALYSIS).write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        read_analysis(tmp_path)


def test_numbers_that_are_not_finite_have_no_interval() -> None:
    assert Estimate.of(Interval(0.5, float("-inf"), float("inf"))) == Estimate(0.5, None, None)
    assert str(Estimate.of(Interval(float("nan"), 0.0, 0.0))) == "not finite"


def test_tables_show_values_with_intervals_and_mark_sure_interactions() -> None:
    found = some_analysis()
    assert seed_rows(found, found.measures[0])[0] == (
        "first",
        "mlp",
        "kept",
        "+0.5000 ±0.1000",
        "0.5000 ±0.1000",
        "+0.5000 ±0.1000",
        "200",
        "+2.5000",
    )
    assert pair_matrix(found, found.measures[0]) == [("first", "", "-0.2500*"), ("second", "-0.2500*", "")]
    assert found.measures[0].gain == pytest.approx(0.4)
    assert "+0.5000 ±0.1000" in found._repr_html_()


def test_sections_escape_all_names(tmp_path: Path) -> None:
    name = "<img src=x>"
    run = made(tmp_path / "one", [entered(1, "a", 1, name, "GERMINATED"), entered(2, "a", 1, name, "PRUNED", name)])
    text = blueprint_section(blueprint_rows([open_run(run, cache=tmp_path)])) + analysis_section(some_analysis((name, ":x")))
    assert "<img" not in text
    assert text.count("&lt;img src=x&gt;") > 5


@pytest.mark.slow
def test_reading_an_analysis_and_counting_blueprints_imports_no_torch(tmp_path: Path) -> None:
    run = first_run(tmp_path / "one")
    write_analysis(run, some_analysis())
    code = (
        "import sys; from esper.cli.main import main; from esper.runs.analysis import read_analysis; "
        f"read_analysis({str(run)!r}); main(['analyse', {str(run)!r}, '--blueprints-only']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
