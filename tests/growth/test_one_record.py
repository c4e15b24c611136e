"""Model, ledger, log, report, dashboard, card, `runs show`, query and analysis say the same of every seed of random runs.

20 runs are played by default, and as many as ESPER_RANDOM_RUNS says:

    ESPER_RANDOM_RUNS=200 .venv/bin/pytest -q tests/growth/test_one_record.py --timeout 900
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from esper.growth.events import BestRestored, Birth, EpochEnded, Measured, RolledBack, SeedBack, SlotView, StageEntered
from esper.growth.lifecycle.ledger import Ledger
from esper.growth.lifecycle.stages import Stage
from tests.growth.random_runs import Played, disagreements, play

RUNS = int(os.environ.get("ESPER_RANDOM_RUNS", "20"))
PART = 5  # runs of one test, so that several processes share them


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    """How often each thing has happened in the runs so far."""
    return Counter()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, RUNS, PART))
def test_the_model_and_all_readers_say_the_same_of_every_seed(first: int, tmp_path: Path, happened: Counter[str]) -> None:
    for number in range(first, min(first + PART, RUNS)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as about losses that are not finite
            runs = play(number, tmp_path / str(number))
        for run in runs:
            assert disagreements(run) == [], f"run {number} in {run.folder.name}"
            note(run, happened)
    if first + PART >= 200:  # all of them were played by this process
        assert happened["runs with rollbacks"] >= 60
        assert all(happened[f"runs with {what}"] >= 30 for what in ("shrunk", "best restored", "killed", "grown again")), happened


def note(run: Played, happened: Counter[str]) -> None:
    happened.update({f"runs with {what}" for what, times in run.happened.items() if times})


# The fold


def entered(number: int, stage: Stage, epoch: int) -> StageEntered:
    birth = Birth("joint", 10, 20) if stage is Stage.GERMINATED else None
    return StageEntered(epoch=epoch, slot="a", number=number, blueprint="norm", stage=stage.name, reason=f"because {epoch}", birth=birth)


def measured(number: int, epoch: int) -> Measured:
    return Measured(epoch=epoch, slot="a", number=number, gain=epoch / 10, gain_low=0.0, gain_high=1.0, rent=0.01)


def test_a_rollback_takes_back_measurements_of_the_seeds_that_stay() -> None:
    ledger = Ledger.of([entered(1, Stage.GERMINATED, 1), entered(1, Stage.HOLDING, 1), measured(1, 2), measured(1, 3)])
    ledger.take(RolledBack(epoch=3, to_epoch=2, reason="a spike", embargoed=[]))
    (seed,) = ledger.seeds
    assert ([gain.epoch for gain in seed.contributions], seed.gain, seed.outcome) == ([2], 0.2, "living")


def test_a_rollback_before_the_removal_of_a_kept_seed_keeps_it_again() -> None:
    stages = (Stage.GERMINATED, Stage.HOLDING, Stage.FOSSILIZED, Stage.PRUNED)
    ledger = Ledger.of([entered(1, stage, epoch) for epoch, stage in enumerate(stages, start=1)])
    assert ledger.seeds[0].outcome == "pruned"
    ledger.take(RolledBack(epoch=5, to_epoch=3, reason="a spike", embargoed=[], back=[SeedBack(1, "a", "FOSSILIZED", "kept")]))
    (seed,) = ledger.seeds
    assert (seed.outcome, seed.stage, seed.why) == ("kept", Stage.FOSSILIZED, "it is back: the governor went back: a spike")


def test_a_seed_that_grew_again_after_an_earlier_checkpoint_replaces_the_lost_one() -> None:
    lost = [entered(1, Stage.GERMINATED, 1), entered(2, Stage.GERMINATED, 2), entered(3, Stage.GERMINATED, 3)]
    ledger = Ledger.of([*lost, entered(2, Stage.GERMINATED, 4)])
    assert [(seed.number, seed.born) for seed in ledger.seeds] == [(1, 1), (2, 4)]


def test_a_log_whose_beginning_is_missing_gives_the_seeds_that_its_epochs_tell() -> None:
    view = SlotView("a", 7, "FOSSILIZED", "norm", 1.0, 3, 1.0, None, None, None, 10, 0.02, flops=20)
    size = {"parameters": 100, "flops": 200}
    ended = EpochEnded(epoch=5, train_loss=1.0, val_loss=1.0, learning_rate=0.1, decision="", slots=[view], **size)
    restored = BestRestored(epoch=4, val_loss=1.0, last_epoch=5, last_val_loss=2.0, back=[SeedBack(7, "a", "FOSSILIZED", "kept")])
    (seed,) = Ledger.of([measured(7, 4), ended, restored]).seeds
    assert (seed.number, seed.born, seed.outcome, seed.parameters) == (7, 2, "kept", 10)
    assert seed.why == "it is back: the state after epoch 4 was restored"


def test_a_ledger_is_restored_from_its_saved_state() -> None:
    ledger = Ledger.of([entered(1, Stage.GERMINATED, 1), measured(1, 2)])
    ledger.take(RolledBack(epoch=3, to_epoch=2, reason="a spike", embargoed=["a"], gone=[1]))
    assert msgspec.convert(msgspec.to_builtins(ledger), Ledger) == ledger
