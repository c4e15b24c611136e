"""Runs killed while they save, and resumed: no file beside the checkpoints is stale. `tests.faults` kills whole trainings."""

from __future__ import annotations

import contextlib
import shutil
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import esper
from esper.controller.learned import load_controller
from esper.controller.training import CONTROLLER, GROWTH, train_controller
from esper.growth import GrowthError
from esper.growth.run import KIND, open_run
from esper.league.league import League, LeagueError
from esper.league.store import FOLDER, LeagueStore
from esper.league.training import ARENA, train_arena
from esper.parallel import ALONE
from esper.rl import training
from esper.rl.checkpoints import open_store
from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.run_config import TrainConfig
from esper.rl.training import Trainer, train_run
from esper.runs import Checkpoint, CheckpointError, CheckpointRefused, CheckpointStore, EventLog, read
from esper.runs.folder import CHECKPOINTS, EVENTS
from tests.commands import assert_same_state
from tests.faults import Crash, crash_at
from tests.growth.builders import QUICK

PPO_CONFIG = TrainConfig(
    env="cue",
    env_args={"delay": 1},
    num_envs=2,
    total_steps=2 * 2 * 4,
    device="cpu",
    threads=1,
    checkpoint_every=1,
    keep=1,
    eval_episodes=2,
    ppo=PPOConfig(num_steps=4, num_minibatches=1, num_epochs=1, network=NetworkConfig(hidden_size=4, encoder_sizes=(4,))),
)


# Files beside the checkpoints


@contextlib.contextmanager
def one_more_save(trainer: Trainer[Any], folder: Path, config: Any) -> Iterator[Callable[[Path], None]]:
    """Trains the run in a folder for one more update, and gives the function that saves it in a copy of the folder."""
    checkpoint = open_store(folder).load()
    options = training.Options(None, (), lambda: False, ALONE, trainer)
    with trainer.prepare(config, None, ALONE) as (ppo, relay):
        ppo.load_state_dict(checkpoint.state["ppo"])
        update = next(iter(ppo.train(10**9)))

        def save(copy: Path) -> None:
            with EventLog.resume(copy / EVENTS, checkpoint.state["events_offset"]) as log:
                training._Session(config, copy, ppo, relay, log, options)._save(update, is_due=True)

        yield save


def steps_after_kills(
    trainer: Trainer[Any], folder: Path, config: Any, train: Callable[..., object], tmp_path: Path, *, first: int
) -> Iterator[tuple[Path, int]]:
    """Kill the second save at every second call from `first` on, and resume. Yield the folder and the step of its latest checkpoint."""
    with one_more_save(trainer, folder, config) as save:
        for call in count(first, 2):
            copy = shutil.copytree(folder, tmp_path / f"killed at {call}")
            with crash_at(call):
                try:
                    save(copy)
                    return
                except Crash:
                    pass
            train(None, copy, resume=True)
            yield copy, open_store(copy).load("latest").step
            shutil.rmtree(copy)


@pytest.mark.slow
def test_the_controller_is_that_of_the_latest_checkpoint_whenever_its_training_was_killed(tmp_path: Path) -> None:
    from tests.controller.test_training import CONFIG as WHOLE

    config = msgspec.structs.replace(WHOLE, rounds=1)
    folder = train_controller(config, tmp_path / "run").folder
    steps = []
    for copy, step in steps_after_kills(GROWTH, folder, config, train_controller, tmp_path, first=1):
        controller = load_controller(copy / CONTROLLER)
        policy = open_store(copy).load("latest").state["ppo"]["policy"]
        assert controller.description.info["step"] == step
        assert controller.policy is not None
        assert all(torch.equal(weight, policy[name]) for name, weight in controller.policy.state_dict().items())
        steps.append(step)
    assert steps == sorted(steps)
    assert len(set(steps)) == 2, "some were killed before the second checkpoint, others between it and the controller"


@pytest.mark.slow
def test_the_files_of_the_league_are_those_of_the_latest_checkpoint_whenever_the_run_was_killed(tmp_path: Path) -> None:
    from tests.league.test_training import config_for

    config = config_for(1, checkpoint_every=1, eval_battles=0)
    folder = train_arena(config, tmp_path / "run").folder
    sizes = []
    for copy, _ in steps_after_kills(ARENA, folder, config, train_arena, tmp_path, first=2):
        saved = open_store(copy).load("latest").state["ppo"]["environment"]
        found, expected = LeagueStore(copy / FOLDER).load(), League.from_state(saved["league"], saved["members"])
        assert found.to_state() == expected.to_state()
        assert found.weights.keys() == expected.weights.keys()
        sizes.append(len(found.weights))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 2


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_and_files_match_the_one_before(tmp_path: Path) -> None:
    from tests.controller.test_training import CONFIG as WHOLE

    config = msgspec.structs.replace(WHOLE, rounds=2, checkpoint_every=1)
    folder = train_controller(config, tmp_path / "run").folder
    first, last = open_store(folder).list()
    (last / "state.json").write_text("{}")
    train_controller(msgspec.structs.replace(config, rounds=1), folder, resume=True)
    assert load_controller(folder / CONTROLLER).description.info["step"] == open_store(folder).load(first).step


# Memory


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The very tensors of a state, and not copies."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict | list | tuple):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from named_tensors(item, f"{name}/{key}")


class Watched:
    """The tensors of the checkpoints that were loaded, without holding them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.tensors: dict[str, weakref.ref[torch.Tensor]] = {}
        load = CheckpointStore.load

        def watched(store: CheckpointStore, *arguments: Any) -> Checkpoint:
            checkpoint = load(store, *arguments)
            self.tensors |= {name: weakref.ref(tensor) for name, tensor in named_tensors(checkpoint.state)}
            return checkpoint

        patch.setattr(CheckpointStore, "load", watched)

    def alive(self) -> set[str]:
        return {name for name, tensor in self.tensors.items() if tensor() is not None}


def test_a_resumed_ppo_run_releases_the_loaded_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_run(PPO_CONFIG, tmp_path / "run", should_stop=lambda: True)
    watched, seen = Watched(monkeypatch), []
    train_run(None, tmp_path / "run", resume=True, should_stop=lambda: bool(seen.append(watched.alive())))
    assert any(name.startswith("/ppo/policy/") for name in watched.tensors)
    assert not [name for name in seen[0] if not name.startswith("/ppo/learner/optimizer/state/")], (
        "the optimiser takes its state over as it is"
    )


@pytest.mark.slow
def test_a_resumed_growing_run_releases_the_loaded_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.growth.test_resume import Countdown, script, stateful, training

    def run(stop: Callable[[], bool], *, resume: bool) -> None:
        one = training(stateful(), QUICK, epochs=2)
        with open_run(tmp_path / "run", resume=resume, config=one.config, should_stop=stop) as opened:
            one.run(script(), opened)

    run(Countdown(3), resume=False)
    watched, seen = Watched(monkeypatch), []
    run(lambda: bool(seen.append(watched.alive())), resume=True)
    assert any("/now/parameters/" in name for name in watched.tensors)
    assert not [name for name in seen[-1] if "/now/parameters/" in name or name.startswith(("/random/", "/loader/"))]


class Killed(BaseException):
    """Nothing in a training catches it."""


@pytest.mark.slow
def test_a_longer_training_that_is_killed_leaves_no_model_of_its_earlier_end(tmp_path: Path) -> None:
    from tests.growth.test_resume import start

    def kill(parameters: Any) -> torch.optim.Optimizer:
        class Dying(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                raise Killed

        Dying.__name__ = "AdamW"
        return Dying(parameters, lr=1e-3)

    folder = tmp_path / "run"
    start(folder, epochs=1)
    first = (folder / "model.safetensors").read_bytes()
    with pytest.raises(GrowthError, match="with the controller 'never', not 'random'"):
        start(folder, epochs=2, resume=True, controller="random")
    assert (folder / "model.safetensors").read_bytes() == first, "nothing was changed yet"
    with pytest.raises(Killed):
        start(folder, epochs=2, resume=True, optimizer=kill)
    assert not (folder / "model.safetensors").exists()
    start(folder, epochs=2, resume=True)
    assert (folder / "model.safetensors").read_bytes() != first


@pytest.mark.slow
def test_a_growing_run_skips_a_damaged_checkpoint_and_reports_it(tmp_path: Path) -> None:
    from tests.growth.test_resume import start

    start(tmp_path / "run", epochs=2)
    whole = CheckpointStore(tmp_path / "run" / CHECKPOINTS, kind=KIND).load()
    (whole.path / "tensors.safetensors").write_bytes(b"")
    start(tmp_path / "run", epochs=2, resume=True)
    refused = [record.event for record in read(tmp_path / "run" / EVENTS) if isinstance(record.event, CheckpointRefused)]
    assert [event.checkpoint for event in refused] == [whole.path.name]
    again = CheckpointStore(tmp_path / "run" / CHECKPOINTS, kind=KIND).load()
    assert again.step == whole.step
    assert_same_state(again.state["grower"]["recovery"]["now"]["parameters"], whole.state["grower"]["recovery"]["now"]["parameters"])


# Files of another run


def refused_in(folder: Path) -> list[CheckpointRefused]:
    return [record.event for record in read(folder / EVENTS) if isinstance(record.event, CheckpointRefused)]


@pytest.mark.slow
def test_a_checkpoint_copied_from_another_run_is_passed_over_and_stays(tmp_path: Path) -> None:
    longer = msgspec.structs.replace(PPO_CONFIG, total_steps=4 * 8, ppo=msgspec.structs.replace(PPO_CONFIG.ppo, seed=7))
    train_run(PPO_CONFIG, tmp_path / "own")
    train_run(longer, tmp_path / "other")
    own, foreign = open_store(tmp_path / "own").load(), open_store(tmp_path / "other").load()
    shutil.copytree(tmp_path / "own", tmp_path / "moved")  # a copy of a whole run is that run
    for name in (foreign.path.name, "latest", "best"):
        copy = shutil.copytree if (foreign.path.parent / name).is_dir() else shutil.copy
        copy(foreign.path.parent / name, tmp_path / "moved" / CHECKPOINTS / name)
    found = open_store(tmp_path / "moved").load()
    assert found.path.name == own.path.name
    assert_same_state(found.state, own.state)
    assert open_store(tmp_path / "moved").load("best").path.name == own.path.name
    with pytest.raises(CheckpointError, match=r"belongs to another run, other begun .*, and not to own begun "):
        open_store(tmp_path / "moved").load(tmp_path / "moved" / CHECKPOINTS / foreign.path.name)
    train_run(msgspec.structs.replace(PPO_CONFIG, total_steps=3 * 8), tmp_path / "moved", resume=True)
    (refused,) = refused_in(tmp_path / "moved")
    assert (refused.checkpoint, "is not used" in refused.reason) == (foreign.path.name, True)
    assert_same_state(open_store(tmp_path / "moved").load().state["ppo"]["counters"]["step"], 3 * 8)
    kept = [path.name for path in open_store(tmp_path / "moved").list()]
    assert foreign.path.name in kept, "it may be the only copy"
    shutil.rmtree(own.path)
    shutil.copytree(foreign.path, tmp_path / "own" / CHECKPOINTS / foreign.path.name)
    with pytest.raises(CheckpointError, match=r"can be loaded: .* belongs to another run, other begun "):
        train_run(None, tmp_path / "own", resume=True)


@pytest.mark.slow
def test_a_growing_run_passes_over_a_checkpoint_of_another_and_writes_its_own_model_again(tmp_path: Path) -> None:
    from tests.growth.test_resume import make_host, start

    for name, epochs in (("own", 1), ("other", 3)):
        start(tmp_path / name, epochs=epochs)
    own = (tmp_path / "own" / "model.safetensors").read_bytes()
    foreign = CheckpointStore.of_run(tmp_path / "other", kind=KIND).load().path
    shutil.copytree(foreign, tmp_path / "own" / CHECKPOINTS / foreign.name)
    shutil.copy(foreign.parent / "latest", tmp_path / "own" / CHECKPOINTS / "latest")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "own" / "model.safetensors")
    with pytest.raises(GrowthError, match=r"model.safetensors belongs to another run, other begun .*, and not to own begun .*resume"):
        esper.load(tmp_path / "own", model=make_host())
    start(tmp_path / "own", epochs=1, resume=True)
    assert [event.checkpoint for event in refused_in(tmp_path / "own")] == [foreign.name, "model.safetensors"]
    assert (tmp_path / "own" / "model.safetensors").read_bytes() == own
    esper.load(tmp_path / "own", model=make_host())


@pytest.mark.slow
def test_a_league_copied_from_another_run_is_refused(tmp_path: Path) -> None:
    from tests.league.test_training import config_for

    config = config_for(1, eval_battles=0)
    own, other = (train_arena(config, tmp_path / name).folder for name in ("own", "other"))
    shutil.rmtree(own / FOLDER)
    shutil.copytree(other / FOLDER, own / FOLDER)
    with pytest.raises(LeagueError, match=r"belongs to another run, other begun .*resume the run, which writes it again"):
        LeagueStore(own / FOLDER).load()
    train_arena(None, own, resume=True)
    LeagueStore(own / FOLDER).load()
