"""A growing run that was stopped or killed and resumed equals an uninterrupted one, bit for bit."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from esper.growth import Grown, GrowthConfig, GrowthError, grow
from esper.growth.lifecycle.stages import Action, Advance, Fossilize, Germinate, Prune
from esper.growth.run import open_run
from esper.growth.training import training_config
from esper.growth.training_loop import Training
from esper.runs import CheckpointStore, read
from esper.runs.folder import EVENTS, RunError
from esper.runs.tensors import join, split
from esper.tasks.loader import BatchLoader
from tests.growth.builders import (
    QUICK,
    QUICK_SHADOW,
    SLOTS,
    LifecycleConfig,
    Script,
    adamw,
    assert_same,
    config,
    make_data,
    make_host,
    make_loop,
)
from tests.processes import Process

pytestmark = pytest.mark.slow  # whole trainings, several times over

EPOCHS = 7
LIVES = {
    1: [Germinate(slot="first", reason="test", blueprint="mlp"), Germinate(slot="second", reason="test", blueprint="low_rank")],
    2: [Advance(slot="first", reason="test"), Advance(slot="second", reason="test")],
    4: [Fossilize(slot="first", reason="test"), Prune(slot="second", reason="test")],
    5: [Fossilize(slot="first", reason="test")],
}


WIDER = {1: [Germinate(slot="second", reason="test", blueprint="widen_100")], 5: [Fossilize(slot="second", reason="test")]}


def script(lives: Mapping[int, Sequence[Action]] = LIVES) -> Script:
    return Script(lives, probes=[0, 2, 3])


def settings(lifecycle: LifecycleConfig = QUICK, **others: Any) -> GrowthConfig:
    return config(lifecycle, slots=SLOTS, probe_steps=3, **others)


def stateful() -> BatchLoader:
    x, y = make_data(1, size=40)[0]
    return BatchLoader(x, y, batch_size=8, seed=4)


def shuffling() -> DataLoader:
    x, y = make_data(1, size=40)[0]
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


def training(loader: Any, lifecycle: LifecycleConfig, *, schedule: Any = None, epochs: int = EPOCHS) -> Training:
    return Training(
        make_host(),
        loader,
        make_data(2, seed=2),
        lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        epochs=epochs,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        make_scheduler=schedule,
        config=training_config(settings(lifecycle)),
    )


class Countdown:
    """Asks for a stop after so many looks."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def run(
    folder: Path,
    make_loader: Callable[[], Any],
    lifecycle: LifecycleConfig = QUICK,
    *,
    stop=lambda: False,
    resume=False,
    schedule: Any = None,
    lives: Mapping[int, Sequence[Action]] = LIVES,
) -> Grown:
    torch.manual_seed(100 if resume else 7)  # another process would not be at the same numbers
    one = training(make_loader(), lifecycle, schedule=schedule)
    if not resume:
        torch.manual_seed(7)
    with open_run(folder, resume=resume, config=one.config, should_stop=stop) as opened:
        return one.run(script(lives), opened)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Grown, Path]]:
    """Return a function that gives the result and the folder of a run that never stopped, each of which is run once."""

    @cache
    def whole(make_loader: Callable[[], Any], lifecycle: LifecycleConfig = QUICK) -> tuple[Grown, Path]:
        folder = tmp_path_factory.mktemp("runs") / "whole"
        return run(folder, make_loader, lifecycle), folder

    return whole


CLOCK = {"seconds", "samples_per_second", "step_seconds", "data_wait_seconds", "seconds_lost", "resources", "memory_bytes"}
COMINGS = {"header", "run_declared", "resumed", "growth_started", "loader_restarted", "growth_finished"}


def story(folder: Path) -> list[dict[str, Any]]:
    """All that happened, without the times and the comings and goings."""
    events = [record.event for record in read(folder / EVENTS)]
    plain = [{"kind": event.kind, **msgspec.to_builtins(event)} for event in events if event.kind not in COMINGS]
    return [{key: value for key, value in event.items() if key not in CLOCK} for event in plain]


def kinds(folder: Path) -> list[str]:
    return [record.event.kind for record in read(folder / EVENTS)]


def assert_same_result(one: Grown, other: Grown) -> None:
    assert_same(dict(one.model.state_dict()), dict(other.model.state_dict()))
    assert one.ledger == other.ledger
    assert (one.train_losses, one.val_losses, one.val_loss_before, one.val_loss) == (
        other.train_losses,
        other.val_losses,
        other.val_loss_before,
        other.val_loss,
    )
    assert one.gflops == other.gflops


@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
@pytest.mark.parametrize("make_loader", [stateful, shuffling], ids=["loader with a state", "loader without"])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(
    make_loader, lifecycle: LifecycleConfig, uninterrupted, tmp_path: Path
) -> None:
    whole, of_whole = uninterrupted(make_loader, lifecycle)
    assert len(whole.ledger.seeds) == 2
    for looks in (1, 15, 22):  # within epochs, and between them
        folder = tmp_path / f"after {looks}"
        stopped = run(folder, make_loader, lifecycle, stop=Countdown(looks))
        assert stopped.status == "stopped"
        resumed = run(folder, make_loader, lifecycle, resume=True)
        assert resumed.status == "finished"
        assert_same_result(resumed, whole)
        assert story(folder) == story(of_whole)
        assert ("loader_restarted" in kinds(folder)) == (make_loader is shuffling)


@pytest.mark.parametrize("looks", [3, 13])
def test_a_run_may_be_stopped_and_resumed_many_times(looks: int, uninterrupted, tmp_path: Path) -> None:
    whole, of_whole = uninterrupted(stateful, QUICK_SHADOW)
    result = run(tmp_path / "run", stateful, QUICK_SHADOW, stop=Countdown(looks))
    while result.status == "stopped":
        result = run(tmp_path / "run", stateful, QUICK_SHADOW, stop=Countdown(looks), resume=True)
    assert_same_result(result, whole)
    assert story(tmp_path / "run") == story(of_whole)


def test_a_run_that_is_stopped_while_its_new_units_warm_up_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", stateful, QUICK, lives=WIDER)
    assert [entry.outcome for entry in whole.ledger.seeds] == ["kept"]
    result = run(tmp_path / "run", stateful, QUICK, lives=WIDER, stop=Countdown(8))
    while result.status == "stopped":
        result = run(tmp_path / "run", stateful, QUICK, lives=WIDER, stop=Countdown(3), resume=True)
    assert_same_result(result, whole)
    assert story(tmp_path / "run") == story(tmp_path / "whole")


@pytest.mark.parametrize("make_loader", [stateful, shuffling], ids=["loader with a state", "loader without"])
def test_a_run_ended_by_an_error_resumes_from_its_last_checkpoint(make_loader, uninterrupted, tmp_path: Path) -> None:
    whole, of_whole = uninterrupted(make_loader)

    class Broken:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self) -> bool:
            self.calls += 1
            if self.calls == 18:
                raise MemoryError("the machine is full")
            return False

    with pytest.raises(MemoryError):
        run(tmp_path / "run", make_loader, stop=Broken())
    assert_same_result(run(tmp_path / "run", make_loader, resume=True), whole)
    assert story(tmp_path / "run") == story(of_whole)


SCHEDULES = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=200),
    "steps": lambda optimizer: MultiStepLR(optimizer, [2, 4]),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
    "in sequence": lambda optimizer: SequentialLR(
        optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)], milestones=[2]
    ),
    "by a function": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*epoch parameter.*:UserWarning")  # SequentialLR's own
@pytest.mark.filterwarnings("ignore:LambdaLR is stepped once an epoch")
def test_schedules_resume_where_they_were(name: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", stateful, schedule=SCHEDULES[name])
    run(tmp_path / "run", stateful, stop=Countdown(18), schedule=SCHEDULES[name])
    assert_same_result(run(tmp_path / "run", stateful, resume=True, schedule=SCHEDULES[name]), whole)


def ruined(optimizer: torch.optim.Optimizer) -> MultiStepLR:
    """A schedule whose learning rate is far too high after epoch 3, so that the losses jump and epoch 5 of 7 is the best."""
    return MultiStepLR(optimizer, [3], gamma=20.0)


def test_a_run_killed_or_stopped_after_its_best_epoch_returns_the_same_best_state(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", stateful, schedule=ruined)
    assert (whole.best_epoch, whole.ledger.count("kept")) == (5, 1)
    stopped = run(tmp_path / "stopped", stateful, stop=Countdown(33), schedule=ruined)
    assert (stopped.status, stopped.epochs, stopped.best_epoch) == ("stopped", 5, 5)
    assert_same(dict(stopped.model.state_dict()), dict(whole.model.state_dict()))
    process = Process(partial(run, tmp_path / "killed", stateful, stop=linger, schedule=ruined))
    checkpoints, deadline = tmp_path / "killed" / "checkpoints", time.monotonic() + 60
    while not list(checkpoints.glob("step-*6000000")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=90) == -signal.SIGKILL
    for name in ("stopped", "killed"):
        resumed = run(tmp_path / name, stateful, resume=True, schedule=ruined)
        assert (resumed.status, resumed.best_epoch) == ("finished", 5)
        assert_same_result(resumed, whole)
        assert story(tmp_path / name) == story(tmp_path / "whole")


def start(folder: Path, model: torch.nn.Module | None = None, **options: Any) -> Grown:
    options = {"config": settings(), "epochs": 3, "controller": "never", **options}
    return grow(make_host() if model is None else model, make_data(), make_data(2), cross_entropy, run=folder, **options)


def test_a_finished_run_that_is_resumed_says_so_and_gives_the_same_result(tmp_path: Path) -> None:
    first = start(tmp_path / "run")
    again = start(tmp_path / "run", resume=True)
    assert not first.had_finished
    assert again.had_finished
    assert again.report() == f"{first.report()} · had finished already"
    assert_same_result(again, first)


def test_a_run_that_stopped_early_stays_stopped(tmp_path: Path) -> None:
    options = {"config": settings(patience=1), "epochs": 30, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-12)}
    first = start(tmp_path / "run", **options)
    assert first.status == "stopped early"
    again = start(tmp_path / "run", resume=True, **options)
    assert again.had_finished
    assert (again.status, again.epochs) == ("stopped early", first.epochs)


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", epochs=5)
    start(tmp_path / "run")
    torch.manual_seed(99)
    longer = start(tmp_path / "run", epochs=5, resume=True)
    assert not longer.had_finished
    assert longer.epochs == 5
    assert longer.val_losses[:3] == whole.val_losses[:3]


MISFITS = {
    "settings": ({"config": settings(seed=1)}, "was started with seed = 0 and cannot go on with 1"),
    "controller": ({"controller": "random"}, "with the controller 'never', not 'random'"),
    "optimiser": ({"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}, "was trained by AdamW, and this one has SGD"),
    "schedule": ({"scheduler": lambda optimizer: MultiStepLR(optimizer, [1])}, "had no scheduler, and this one has one"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_run_resumes_only_with_the_settings_it_was_started_with(what: str, tmp_path: Path) -> None:
    start(tmp_path / "run", epochs=1)
    options, words = MISFITS[what]
    with pytest.raises(GrowthError, match=words):
        start(tmp_path / "run", resume=True, **options)
    assert start(tmp_path / "run", resume=True).epochs == 3  # nothing was spoiled


def test_another_model_is_refused_by_name_and_shape(tmp_path: Path) -> None:
    start(tmp_path / "run", epochs=1)
    other = make_host()
    other.head = torch.nn.Linear(8, 4)
    with pytest.raises(GrowthError, match=r"another model: head.bias is \[3\] in it and \[4\] here"):
        grow(
            other,
            make_data(),
            make_data(2),
            cross_entropy,
            epochs=3,
            run=tmp_path / "run",
            resume=True,
            controller="never",
            config=settings(),
        )


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    start(tmp_path / "run")
    with pytest.raises(RunError, match="already holds a run"):
        start(tmp_path / "run")


def test_an_interrupt_is_raised_and_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    class Impatient(list):
        def __iter__(self):
            yield self[0]
            raise KeyboardInterrupt

    interrupted = training(Impatient(make_data()), QUICK)
    with pytest.raises(KeyboardInterrupt), open_run(tmp_path / "run", resume=False, config=interrupted.config) as opened:
        interrupted.run(script(), opened)
    assert not any(module._forward_hooks or "forward" in vars(module) for module in interrupted.model.modules())
    again = training(make_data(), QUICK, epochs=2)
    with open_run(tmp_path / "run", resume=True, config=again.config) as opened:
        assert again.run(script(), opened).epochs == 2


def test_a_run_interrupted_after_its_first_checkpoint_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(store: CheckpointStore) -> None:
        raise KeyboardInterrupt

    interrupted = training(make_data(), QUICK)
    monkeypatch.setattr(CheckpointStore, "_prune", interrupt)
    with pytest.raises(KeyboardInterrupt), open_run(tmp_path / "run", resume=False, config=interrupted.config) as opened:
        interrupted.run(script(), opened)
    monkeypatch.undo()
    again = training(make_data(), QUICK, epochs=2)
    with open_run(tmp_path / "run", resume=True, config=again.config) as opened:
        assert again.run(script(), opened).epochs == 2


def test_a_grower_of_a_users_own_loop_saves_and_loads_everything_in_the_middle_of_an_epoch() -> None:
    def fresh():
        torch.manual_seed(7)
        return make_loop(script(), settings(), make_optimizer=adamw)

    whole = fresh()
    torch.manual_seed(8)
    whole.epoch(epochs=5)
    first = fresh()
    torch.manual_seed(8)
    first.epoch(epochs=2)
    first.step(*first.data[0])
    state, numbers = first.grower.state_dict(), torch.get_rng_state()
    state = copy.deepcopy(join(*split(state)))  # as a checkpoint would hold it
    first.epoch()
    second = fresh()
    second.grower.load_state_dict(state)
    torch.set_rng_state(numbers)
    for x, y in second.data[1:]:
        second.step(x, y)
    second.grower.after_epoch(second.evaluate)
    second.epoch(epochs=2)
    assert second.losses == whole.losses[-len(second.losses) :]
    assert second.grower.ledger == whole.grower.ledger
    tail = [event for event in second.events if event.kind != "epoch_ended"]
    assert tail == [event for event in whole.events if event.kind != "epoch_ended"][-len(tail) :]


def linger() -> bool:
    time.sleep(0.02)
    return False


@pytest.mark.slow
def test_a_killed_run_resumes_as_an_uninterrupted_one(uninterrupted, tmp_path: Path) -> None:
    whole, of_whole = uninterrupted(stateful, QUICK_SHADOW)
    folder = tmp_path / "run"
    for attempt in range(2):
        process = Process(partial(run, folder, stateful, QUICK_SHADOW, stop=linger, resume=attempt > 0))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.returncode is None:
            checkpoints = sorted((folder / "checkpoints").glob("step-*")) if (folder / "checkpoints").exists() else []
            if checkpoints and int(checkpoints[-1].name.removeprefix("step-")) // 1_000_000 >= 2 + 2 * attempt:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=90) == -signal.SIGKILL
    assert_same_result(run(folder, stateful, QUICK_SHADOW, resume=True), whole)
    assert story(folder) == story(of_whole)
