"""Training a controller from Python: stopping, resuming, and the controller file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from esper.controller import ControllerConfig
from esper.controller.config import DomainConfig
from esper.controller.learned import Learned, load_controller, save_controller
from esper.controller.network import MoveEncoder
from esper.controller.training import CONTROLLER, prepare_controller, train_controller
from esper.controller.value import ValueModel
from esper.fleet.config import FleetConfig
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.rl import training
from esper.rl.checkpoints import open_store
from esper.rl.config import NetworkConfig
from esper.rl.training import RunResult
from esper.runs import Tree
from esper.runs.folder import CHECKPOINTS, RunError
from tests.commands import assert_same_state, events_of
from tests.controller.policies import NETWORK

CONFIG = ControllerConfig(
    hosts=4,
    rounds=3,
    device="cpu",
    threads=1,
    fleets=2,
    hosts_per_twin=2,
    domain=DomainConfig(
        sources=("digits",),
        families=("mlp", "conv"),
        width=(2, 3),
        blocks=(1, 1),
        batch_size=(16, 16),
        horizon=(3, 4),
        samples_of_a_life=(96, 128),
    ),
    fleet=FleetConfig(validation_samples=64),
    growth=GrowthConfig(blueprints=("norm", "widen_100"), lifecycle=LifecycleConfig(holding_epochs=1)),
    network=NETWORK,
    ppo=msgspec.structs.replace(ControllerConfig().ppo, num_steps=6, num_minibatches=2, num_epochs=1, network=NetworkConfig(hidden_size=8)),
)


def learner_of(result: RunResult) -> Tree:
    state: Tree = open_store(result.folder).load("latest").state["ppo"]
    return state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train_controller(CONFIG, tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.slow
def test_a_stopped_and_resumed_training_equals_an_uninterrupted_one(whole: RunResult, tmp_path: Path) -> None:
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


class Killed(BaseException):
    """Nothing in a training catches it."""


@pytest.mark.slow
@pytest.mark.parametrize("decision", [0, 9])  # of six in a round
def test_a_training_that_is_killed_within_a_round_goes_on_from_its_last_checkpoint_there(
    decision: int, whole: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_WITHIN_S", 0.0)
    seen, save = [], training._Session._after_decision

    def killed(session: training._Session, done: int) -> None:
        save(session, done)
        seen.append(done)
        if len(seen) == decision + 1:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(training._Session, "_after_decision", killed)
        with pytest.raises(Killed):
            train_controller(CONFIG, tmp_path / "run")
    saved = open_store(tmp_path / "run").load()
    assert saved.step == 4 * sum(1 for done in seen[1:] if done), "as many decisions of four hosts were made"
    assert saved.state["ppo"]["counters"]["step"] == saved.step // 24 * 24
    resumed = train_controller(None, tmp_path / "run", resume=True)
    assert (resumed.status, resumed.step) == ("finished", whole.step)
    assert events_of(resumed.folder) == events_of(whole.folder)
    assert_same_state(learner_of(resumed), learner_of(whole))
    ends = range(24, whole.step + 1, 24)
    assert {open_store(resumed.folder).load(path).step for path in open_store(resumed.folder).list()} <= {saved.step, *ends}


@pytest.mark.slow
def test_a_training_that_ends_before_any_host_writes_a_controller(tmp_path: Path) -> None:
    domain = msgspec.structs.replace(CONFIG.domain, horizon=(8, 8), samples_of_a_life=(128, 128))
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
    name = "encoder.value.weights.0"
    of_first, of_last = (open_store(folder).load(path).state["ppo"]["policy"][name] for path in (first, last))
    written = load_file(folder / CONTROLLER)[name]
    assert torch.equal(written, of_last)
    assert not torch.equal(written, of_first)
    assert load_controller(folder / CONTROLLER).description.info["step"] == 2 * 4 * 6


@pytest.mark.slow
def test_a_training_starts_from_the_value_model_of_a_file(tmp_path: Path) -> None:
    model = ValueModel(width=NETWORK.width, members=NETWORK.members, generator=torch.Generator().manual_seed(8))
    save_controller(tmp_path / "value.safetensors", model)
    started = msgspec.structs.replace(CONFIG, start=str(tmp_path / "value.safetensors"))
    with prepare_controller(started) as (ppo, _):
        encoder = ppo.policy.encoder
        assert isinstance(encoder, MoveEncoder)
        assert torch.equal(encoder.value.weights[0], model.weights[0])
    other = msgspec.structs.replace(started, network=msgspec.structs.replace(NETWORK, width=8))
    with pytest.raises(RunError, match=r"network: expected members 3 and width 16, those of .*, got 3 and 8"):
        train_controller(other, tmp_path / "other")
    missing = msgspec.structs.replace(CONFIG, start=str(tmp_path / "missing"))
    with pytest.raises(RunError, match="there is no file"):
        train_controller(missing, tmp_path / "missing run")
