"""Training a controller from Python: stopping, resuming, and the controller file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from esper.controller import ControllerConfig
from esper.controller.config import DomainConfig, SlotNetworkConfig
from esper.controller.learned import Learned, load_controller
from esper.controller.training import CONTROLLER, train_controller
from esper.fleet.config import FleetConfig
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.rl.checkpoints import open_store
from esper.rl.config import NetworkConfig
from esper.rl.training import RunResult
from esper.runs import Tree
from esper.runs.folder import CHECKPOINTS
from tests.commands import assert_same_state, events_of

CONFIG = ControllerConfig(
    hosts=4,
    rounds=3,
    device="cpu",
    threads=1,
    domain=DomainConfig(tasks=("digits",), hosts=("2-4-8",), held_out_hosts=("3-6-12",), horizon=(3, 4)),
    fleet=FleetConfig(batch_size=16, steps_per_decision=2, validation_samples=64),
    growth=GrowthConfig(blueprints=("norm", "conv1x1"), lifecycle=LifecycleConfig(holding_epochs=1)),
    network=SlotNetworkConfig(width=8),
    ppo=msgspec.structs.replace(ControllerConfig().ppo, num_steps=6, num_minibatches=2, num_epochs=1, network=NetworkConfig(hidden_size=8)),
)


def learner_of(result: RunResult) -> Tree:
    state: Tree = open_store(result.folder).load("latest").state["ppo"]
    return state


@pytest.mark.slow
def test_a_stopped_and_resumed_training_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = train_controller(CONFIG, tmp_path / "whole")
    stopped = train_controller(CONFIG, tmp_path / "stopped", should_stop=lambda: True)
    assert (whole.status, stopped.status, stopped.step) == ("finished", "stopped", 4 * 6)
    assert isinstance(load_controller(stopped.folder / CONTROLLER), Learned), "a stopped one can be used"

    resumed = train_controller(None, tmp_path / "stopped", resume=True)
    assert (resumed.status, resumed.step) == ("finished", whole.step)
    assert events_of(resumed.folder) == events_of(whole.folder)
    assert_same_state(learner_of(resumed), learner_of(whole))
    ours, theirs = (load_file(result.folder / CONTROLLER) for result in (resumed, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


@pytest.mark.slow
def test_a_training_that_ends_before_any_host_writes_a_controller(tmp_path: Path) -> None:
    domain = msgspec.structs.replace(CONFIG.domain, horizon=(8, 8))
    result = train_controller(msgspec.structs.replace(CONFIG, rounds=1, domain=domain), tmp_path / "short")
    assert isinstance(load_controller(result.folder / CONTROLLER), Learned)


@pytest.mark.slow
def test_resuming_a_finished_training_only_rewrites_a_lost_file(tmp_path: Path) -> None:
    short = msgspec.structs.replace(CONFIG, rounds=1)
    path = train_controller(short, tmp_path / "run").folder / CONTROLLER
    first, written_at = path.read_bytes(), path.stat().st_mtime_ns
    assert train_controller(None, tmp_path / "run", resume=True).status == "had finished"
    assert path.stat().st_mtime_ns == written_at
    path.unlink()
    assert train_controller(None, tmp_path / "run", resume=True).status == "had finished"
    assert path.read_bytes() == first


@pytest.mark.slow
def test_the_controller_is_the_last_policy_whichever_had_the_best_returns(tmp_path: Path) -> None:
    folder = train_controller(msgspec.structs.replace(CONFIG, rounds=2, checkpoint_every=1), tmp_path / "run").folder
    first, last = open_store(folder).list()
    (folder / CHECKPOINTS / "best").write_text(first.name)
    (folder / CONTROLLER).unlink()
    train_controller(None, folder, resume=True)
    first_op, last_op = (open_store(folder).load(path).state["ppo"]["policy"]["actor.op.weight"] for path in (first, last))
    written = load_file(folder / CONTROLLER)["actor.op.weight"]
    assert torch.equal(written, last_op)
    assert not torch.equal(written, first_op)
    assert load_controller(folder / CONTROLLER).description.info["step"] == 2 * 4 * 6
