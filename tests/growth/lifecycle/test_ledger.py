"""The ledger's tables of seeds and blueprints."""

from __future__ import annotations

import re

from esper.growth.lifecycle.ledger import ANALYTICS_HEADING, LEDGER_HEADING, Gain, Ledger, Outcome, SeedRecord, Step
from esper.growth.lifecycle.stages import Stage


def entry(number: int, blueprint: str, outcome: Outcome, *, gain: float | None = None, parameters: int = 1_000) -> SeedRecord:
    contributions = [] if gain is None else [Gain(8, gain, gain - 0.01, gain + 0.01, 0.015)]
    return SeedRecord(
        number, f"blocks.{number}", blueprint, "joint", 4, "it looked good", parameters, 9_000, None,
        [Step(4, Stage.HOLDING, "on probation")], contributions, outcome, 9, rent=0.015,
    )  # fmt: skip


def some() -> Ledger:
    entries = [
        entry(1, "conv3x3", "kept", gain=0.1),
        entry(2, "conv3x3", "kept", gain=0.3, parameters=3_000),
        entry(3, "conv3x3", "pruned", gain=-0.2, parameters=2_000),
        entry(4, "norm", "rolled back"),
        entry(5, "norm", "living"),
    ]
    return Ledger(entries)


def cells(line: str) -> tuple[str, ...]:
    return tuple(re.split(r" {2,}", line))


def test_the_table_has_a_line_for_a_seed() -> None:
    heading, first, *others = some().table().splitlines()
    assert cells(heading) == LEDGER_HEADING
    gain = "0.1000 [0.0900, 0.1100]"
    assert cells(first) == ("1", "blocks.1", "conv3x3", "epoch 4", "kept", gain, "0.0150", "1,000", "on probation")
    assert len(others) == 4
    assert cells(others[2])[4:6] == ("rolled back", "–")


def test_table_columns_are_aligned_with_their_names() -> None:
    heading, *lines = some().table().splitlines()
    for name in ("outcome", "rent", "parameters"):
        assert all(line[heading.index(name) - 1] == " " != line[heading.index(name)] for line in lines), name


def test_blueprints_are_summed_up() -> None:
    heading, conv, norm = some().analytics().splitlines()
    assert cells(heading) == ANALYTICS_HEADING
    assert cells(conv) == ("conv3x3", "3", "2", "1", "0", "0.2000", "2,000"), "the gain is that of what was kept"
    assert cells(norm) == ("norm", "2", "0", "0", "1", "–", "1,000")


def test_an_empty_ledger_says_that_nothing_was_tried() -> None:
    assert Ledger().table() == "no seed was tried"
    assert Ledger().analytics() == "no blueprint was tried"
