"""Every trainer: a resumed run goes on in the same TensorBoard folder and W&B run, and all tools show the same names."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from esper.cli.main import main
from esper.controller.events import RoundEnded
from esper.growth.events import EpochEnded, GrowthFinished, GrowthStarted
from esper.league.events import RoundFought
from esper.rl.events import Skipped, Update
from esper.rl.run_setup import CheckpointEvaluated, Evaluated, RunEnded, RunStarted
from esper.runs import CheckpointStore, Event, read
from esper.runs.events import scalars_of
from esper.runs.folder import CHECKPOINTS, EVENTS
from esper.runs.index import EventIndex
from tests.cli import arena_runs, test_controller, test_ppo
from tests.commands import shown_in_tensorboard
from tests.runs.test_wandb import StandIn, stand_in as stand_in

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
SINKS = ("--tensorboard", "--wandb", "offline")
GROW = ["grow", "--task", "digits", "--controller", "schedule", "--threads", "1", "--device", "cpu", "--run", "run"]


def grow(epochs: int, *more: str) -> int:
    return main([*GROW, "--epochs", str(epochs), *more])


def resume(kind: str, length: str, value: int) -> Callable[[], int]:
    return lambda: main([*kind.split(), "--resume", "--run", "run", length, str(value)])


# A figure -> events of trainers that tell it, and words that would be a second name for it.
FIGURES: dict[str, tuple[tuple[type[Event], ...], tuple[str, ...]]] = {
    "learning_rate": ((EpochEnded, Update), ("lr", "rate")),
    "grad_norm": ((Update, Skipped), ("gradient_norm", "norm")),
    "skipped": ((EpochEnded, Update, RoundEnded), ("skipped_steps", "skips")),
    "parameters": ((GrowthStarted, EpochEnded, RunStarted), ("params", "weights", "num_parameters")),
    "device": ((GrowthStarted, RunStarted), ("accelerator",)),
    "seconds": ((EpochEnded, GrowthFinished, RunEnded), ("duration", "elapsed", "wall_s")),
    "mean_return": ((Update, CheckpointEvaluated, Evaluated), ("return", "reward_mean", "score")),
    "reward": ((RoundEnded, RoundFought), ("reward_parts", "reward_terms")),
    "kept": ((GrowthFinished, RoundEnded), ("fossilized",)),
    "rollbacks": ((GrowthFinished, RoundEnded), ("rolled_back_times",)),
}


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_that_means_the_same_has_the_same_name_in_all_trainers(figure: str) -> None:
    told_by, others = FIGURES[figure]
    for event in told_by:
        assert figure in event.__struct_fields__
        assert not set(others) & set(event.__struct_fields__)


# Kind of checkpoint, main series, a short training, and its continuation.
TRAINERS: dict[str, tuple[str, str, Callable[[], int], Callable[[], int]]] = {
    "growth": ("growth", "epoch_ended/val_loss", lambda: grow(2, *SINKS), resume("grow", "--epochs", 3)),
    "ppo": (
        "ppo",
        "update/value_loss",
        lambda: test_ppo.train("run", 2, *SINKS),
        resume("ppo train", "--total-steps", 3 * test_ppo.UPDATE_STEPS),
    ),
    "controller": (
        "ppo",
        "update/value_loss",
        lambda: test_controller.train("run", 2, *SINKS),
        resume("controller train", "--rounds", 3),
    ),
    "arena": (
        "ppo",
        "update/value_loss",
        lambda: arena_runs.train("run", 2, *SINKS),
        resume("arena train", "--total-steps", 3 * arena_runs.UPDATE_STEPS),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_resumed_run_is_shown_once_under_the_same_names_everywhere(trainer: str, stand_in: StandIn) -> None:
    pytest.importorskip("tensorboard")
    kind, series, train, go_on = TRAINERS[trainer]
    assert train() == 0
    logged = len(stand_in.logged)
    # Without its last checkpoint, the run is as if it had been killed after the one before: something happens again.
    shutil.rmtree(CheckpointStore(Path("run") / CHECKPOINTS, kind=kind).list()[-1])
    assert go_on() == 0

    records = list(read(Path("run") / EVENTS))
    wanted = [(record.step, values[series]) for record in records if series in (values := scalars_of(record))]
    assert len(wanted) == 3
    board = shown_in_tensorboard(Path("run"))
    assert [step for step, _ in board[series]] == [step for step, _ in wanted]
    assert [value for _, value in board[series]] == pytest.approx([value for _, value in wanted])
    assert len(set(stand_in.sessions)) == 1
    in_wandb = stand_in.logged[logged:]  # offline, the second session holds everything
    assert [(values["step"], values[series]) for values in in_wandb if series in values] == wanted

    # The names of TensorBoard and W&B are those of the dashboard, of `esper runs` and of `esper query`.
    index = EventIndex(Path("run") / EVENTS)
    index.refresh()
    names = {name for record in records for name in scalars_of(record)}
    assert set(board) == names
    assert {name for values in in_wandb for name in values} - {"step"} == names
    assert sorted(names - set(index.names())) == []
