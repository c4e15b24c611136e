"""Training a controller from Python: stopping, resuming, what it starts from, and the controller file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from esper.controller import ControllerConfig
from esper.controller.branches import Improved
from esper.controller.config import DomainConfig, GainsConfig, StepNetworkConfig
from esper.controller.events import HostEnded
from esper.controller.learned import load_controller, save_controller
from esper.controller.lives import Life, Lives
from esper.controller.trained import file_of
from esper.controller.training import CONTROLLER, prepare_controller, train_controller
from esper.fleet.config import FleetConfig
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.rl.checkpoints import open_store
from esper.rl.config import NetworkConfig
from esper.rl.events import RewardsNotFinite
from esper.rl.ppo import TrainingStopped
from esper.rl.training import RunResult
from esper.runs import Tree, read
from esper.runs.folder import CHECKPOINTS, RunError
from tests.commands import assert_same_state, events_of
from tests.controller.policies import NETWORK, new_policy, trained_policy
from tests.controller.test_branches import gains_of

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
    network=StepNetworkConfig(width=8, trust=1.0),
    ppo=msgspec.structs.replace(ControllerConfig().ppo, num_minibatches=2, num_epochs=1, network=NetworkConfig(hidden_size=8)),
)


def learner_of(result: RunResult) -> Tree:
    state: Tree = open_store(result.folder).load("latest").state["ppo"]
    return state


def assert_same_file(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / CONTROLLER) for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train_controller(CONFIG, tmp_path_factory.mktemp("whole") / "run")


# Stopping and going on


@pytest.mark.slow
def test_a_stopped_and_resumed_training_equals_an_uninterrupted_one(whole: RunResult, tmp_path: Path) -> None:
    stopped = train_controller(CONFIG, tmp_path / "stopped", should_stop=lambda: True)
    assert (whole.status, whole.step, stopped.status, stopped.step) == ("finished", 12, "stopped", 4)
    assert load_controller(stopped.folder / CONTROLLER).description.info["step"] == 4, "a stopped one can be used"

    resumed = train_controller(None, tmp_path / "stopped", resume=True)
    assert (resumed.status, resumed.step) == ("finished", whole.step)
    assert events_of(resumed.folder) == events_of(whole.folder)
    assert_same_state(learner_of(resumed), learner_of(whole))
    assert_same_file(resumed.folder, whole.folder)
    assert any(event["grown"] for event in events_of(whole.folder) if event["kind"] == "host_ended"), "or little could be different"


class Killed(BaseException):
    """Nothing in a training catches it."""


@pytest.mark.slow
@pytest.mark.parametrize(("fleet", "step"), [(1, 0), (3, 4), (5, 8)])  # two in a round
def test_a_training_that_is_killed_within_a_round_goes_on_from_its_last_checkpoint(
    fleet: int, step: int, whole: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, lived, live = msgspec.structs.replace(CONFIG, checkpoint_every=1), [], Lives._live

    def killed(*given: Any) -> Any:
        if len(lived) == fleet:
            raise Killed
        lived.append(live(*given))
        return lived[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Lives, "_live", killed)
        with pytest.raises(Killed):
            train_controller(config, tmp_path / "run")
    store = open_store(tmp_path / "run")
    assert [store.load(path).step for path in store.list()] == list(range(4, step + 1, 4))
    resumed = train_controller(None, tmp_path / "run", resume=True)
    assert (resumed.status, resumed.step) == ("finished", whole.step)
    assert events_of(resumed.folder) == events_of(whole.folder)
    assert_same_state(learner_of(resumed), learner_of(whole))
    assert_same_file(resumed.folder, whole.folder)


@pytest.mark.slow
def test_a_finished_training_goes_on_with_more_rounds(tmp_path: Path) -> None:
    short = train_controller(msgspec.structs.replace(CONFIG, rounds=1), tmp_path / "run")
    assert (short.status, short.step) == ("finished", 4)
    longer = train_controller(msgspec.structs.replace(CONFIG, rounds=2), tmp_path / "run", resume=True)
    assert (longer.status, longer.step) == ("finished", 8)
    rounds = [event["round"] for event in events_of(longer.folder) if event["kind"] == "round_ended"]
    assert rounds == [0, 0, 1, 1]
    with pytest.raises(RunError, match="hosts is 4 in the saved run and cannot become 8 now"):
        train_controller(msgspec.structs.replace(CONFIG, hosts=8), tmp_path / "run", resume=True)


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


# The file


@pytest.mark.slow
def test_the_controller_is_the_last_policy_whichever_had_the_best_returns(tmp_path: Path) -> None:
    folder = train_controller(msgspec.structs.replace(CONFIG, rounds=2, checkpoint_every=1), tmp_path / "run").folder
    first, last = open_store(folder).list()
    (folder / CHECKPOINTS / "best").write_text(first.name)
    (folder / CONTROLLER).unlink()
    train_controller(None, folder, resume=True)
    name = "encoder.host.0.weight"
    of_first, of_last = (open_store(folder).load(path).state["ppo"]["policy"][name] for path in (first, last))
    written = load_file(folder / CONTROLLER)[f"policy.{name}"]
    assert torch.equal(written, of_last)
    assert not torch.equal(written, of_first)
    described = load_controller(folder / CONTROLLER).description
    assert (described.info["step"], described.info["run"], described.info["domain"]["sources"]) == (8, "run", ["digits"])
    assert (described.network, described.memory, described.gains) == (CONFIG.network, CONFIG.ppo.network, None)


# What it starts from


def test_without_a_start_a_training_begins_with_a_policy_that_trusts_the_heuristic() -> None:
    with prepare_controller(CONFIG) as (ppo, _):
        assert isinstance(ppo.collector, Lives)
        assert ppo.collector.advisor is Heuristic
        assert ppo.collector.policy is ppo.policy
        assert ppo.policy.state_dict()["actor.trust"].tolist() == [1.0] * 3
    with prepare_controller(CONFIG) as (again, _):
        assert all(torch.equal(weight, again.policy.state_dict()[name]) for name, weight in ppo.policy.state_dict().items())
    other = msgspec.structs.replace(CONFIG, ppo=msgspec.structs.replace(CONFIG.ppo, seed=1))
    with prepare_controller(other) as (another, _):
        assert not torch.equal(another.policy.state_dict()["encoder.host.0.weight"], ppo.policy.state_dict()["encoder.host.0.weight"])


@pytest.mark.slow
def test_a_training_starts_from_the_policy_of_a_file(tmp_path: Path) -> None:
    policy, path = trained_policy(), tmp_path / "policy.safetensors"
    save_controller(path, policy)
    config = msgspec.structs.replace(
        CONFIG, rounds=1, start=str(path), network=policy.encoder.config, ppo=msgspec.structs.replace(CONFIG.ppo, network=policy.network)
    )
    with prepare_controller(config) as (ppo, _):
        assert all(torch.equal(weight, ppo.policy.state_dict()[name]) for name, weight in policy.state_dict().items())
        assert isinstance(ppo.collector, Lives)
        assert isinstance(ppo.collector.advisor(GrowthConfig()), Heuristic)
    trained = load_controller(train_controller(config, tmp_path / "run").folder / CONTROLLER)
    assert trained.ensemble is None
    assert trained.policy is not None
    changed = [name for name, weight in trained.policy.state_dict().items() if not torch.equal(weight, policy.state_dict()[name])]
    assert "actor.trust" in changed


@pytest.mark.slow
def test_the_ensemble_of_the_shipped_controller_becomes_the_advisor_and_a_part_of_the_file(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, rounds=1, start="learned")
    with prepare_controller(config) as (ppo, _):
        assert isinstance(ppo.collector, Lives)
        advisor = ppo.collector.advisor(GrowthConfig())
        assert isinstance(advisor, Improved)
        assert ppo.policy.state_dict()["actor.trust"].tolist() == [1.0] * 3, "the policy is a new one"
    result = train_controller(config, tmp_path / "run")
    shipped, trained = load_controller(file_of("learned")), load_controller(result.folder / CONTROLLER)
    assert shipped.ensemble is not None
    assert trained.ensemble is not None
    for name, weight in shipped.ensemble.state_dict().items():
        assert torch.equal(trained.ensemble.state_dict()[name], weight)
        assert torch.equal(advisor.gains.state_dict()[name], weight)
    assert trained.description.gains == shipped.description.gains
    assert trained.policy is not None

    again = msgspec.structs.replace(config, start=str(result.folder / CONTROLLER))
    with prepare_controller(again) as (ppo, _):
        assert all(torch.equal(weight, ppo.policy.state_dict()[name]) for name, weight in trained.policy.state_dict().items())
        assert isinstance(ppo.collector, Lives)
        assert isinstance(ppo.collector.advisor(GrowthConfig()), Improved)


@pytest.mark.slow
def test_an_ensemble_that_would_try_its_steps_in_copies_advises_without_them(tmp_path: Path) -> None:
    path = tmp_path / "trying.safetensors"
    save_controller(path, ensemble=gains_of(-0.01), gains=GainsConfig(caution=0.5, tries=True))
    assert load_controller(path).most_trials == 5
    config = msgspec.structs.replace(CONFIG, rounds=1, start=str(path))
    with prepare_controller(config) as (ppo, _):
        assert isinstance(ppo.collector, Lives)
        assert getattr(ppo.collector.advisor(GrowthConfig()), "most_trials", None) == 0
    result = train_controller(config, tmp_path / "run")
    assert result.status == "finished"
    trained = load_controller(result.folder / CONTROLLER)
    assert trained.description.gains == GainsConfig(members=8, width=4, caution=0.5, tries=True)
    assert trained.most_trials == 0, "a policy decides"


def test_a_start_that_does_not_fit_is_refused_in_one_sentence_before_a_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save_controller(path, new_policy())
    of_file = msgspec.structs.replace(CONFIG, start=str(path))
    fits = msgspec.structs.replace(of_file, network=NETWORK, ppo=msgspec.structs.replace(CONFIG.ppo, network=new_policy().network))
    with prepare_controller(fits):
        pass
    wider = msgspec.structs.replace(fits, network=msgspec.structs.replace(NETWORK, width=24))
    memory = msgspec.structs.replace(fits, ppo=msgspec.structs.replace(fits.ppo, network=NetworkConfig(core="gru", hidden_size=12)))
    for config, words in (
        (wider, r"^network: expected a width of 16 and .*, those of .*policy\.safetensors, got 24 and"),
        (memory, r"^network: expected .*core='lstm'.*, those of .*policy\.safetensors, got .*core='gru'"),
        (msgspec.structs.replace(CONFIG, start=str(tmp_path / "missing")), "^there is no file .*missing; give the path"),
    ):
        with pytest.raises(RunError, match=words) as refused:
            train_controller(config, tmp_path / "run")
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


# Losses that are not finite


@pytest.mark.slow
def test_lives_without_a_finite_loss_are_reported_as_bad_rewards_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gain = Life.gain.fget
    assert gain is not None
    monkeypatch.setattr(Life, "gain", property(lambda self: math.nan if self.controller.others else gain(self)))
    result = train_controller(CONFIG, tmp_path / "run")
    assert result.status == "finished"
    events = [record.event for record in read(result.folder / "events.jsonl")]
    hosts = [event for event in events if isinstance(event, HostEnded)]
    bad = sum(math.isnan(host.gain) for host in hosts)
    assert 0 < bad < len(hosts) == 12
    assert bad == sum(bool(host.others) for host in hosts)
    assert sum(event.count for event in events if isinstance(event, RewardsNotFinite)) == bad
    assert math.isfinite(result.mean_return)
    assert all(weight.isfinite().all() for weight in load_file(result.folder / CONTROLLER).values())


@pytest.mark.slow
def test_a_training_without_any_finite_reward_stops_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Life, "gain", property(lambda self: math.nan))
    with pytest.raises(TrainingStopped, match="no reward was finite"):
        train_controller(msgspec.structs.replace(CONFIG, rounds=1), tmp_path / "run")
