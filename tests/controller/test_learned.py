"""A trained controller in a file, and as the controller of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from esper.controller.branches import Improved
from esper.controller.config import GainsConfig
from esper.controller.description import card, read_description
from esper.controller.features import HOST, VERSION, Observation, observe
from esper.controller.learned import ControllerError, Learned, load_controller, save_controller
from esper.controller.policy import SIZES, StepController, spec
from esper.controller.trained import file_of
from esper.controller.turn import Turn
from esper.fleet.config import FleetConfig, HostConfig
from esper.growth import grow
from esper.growth.config import GrowthConfig, HeuristicConfig, LifecycleConfig, RentConfig
from esper.growth.controllers.baselines import as_controller
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.lifecycle.stages import CompleteController, Decision, GrowthState
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy
from esper.runs import CheckpointStore, read_tensors, write_tensors
from tests.controller.hosts import BLUEPRINTS, drawn_state, state
from tests.controller.policies import MEMORY, trained_policy
from tests.controller.test_branches import gains_of, lives
from tests.fleet.builders import BATCH, small_task, train_alone, train_in_fleet
from tests.growth.builders import SLOTS, make_data, make_host

GAINS = GainsConfig(caution=1.0, most=2)
KINDS = ["policy", "ensemble", "both"]
MEMORIES = {"lstm": MEMORY, "none": NetworkConfig(core="none"), "two": NetworkConfig(core="gru", critic_memory="own", hidden_size=6)}


def save(path: Path, kind: str = "policy") -> Path:
    """Write a file with a policy, an ensemble that is for something else than the heuristic, or both."""
    policy, ensemble = trained_policy() if kind != "ensemble" else None, gains_of(-0.01) if kind != "policy" else None
    save_controller(path, policy, {"tasks": ["digits"], "rounds": 3}, ensemble=ensemble, gains=None if ensemble is None else GAINS)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "controller.safetensors")


@pytest.fixture(params=KINDS)
def any_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(tmp_path / "controller.safetensors", request.param)


def life(seed: int = 0, *, slots: int = 3, epochs: int = 12) -> list[GrowthState]:
    rng = np.random.default_rng(seed)
    return [drawn_state(rng, slots=slots) for _ in range(epochs)]


# Round trips


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [MEMORY, NetworkConfig(core="none"), NetworkConfig(core="gru", critic_memory="own", hidden_size=6)],
    ids=["lstm", "none", "two"],
)
@pytest.mark.parametrize("has_ensemble", [False, True])
def test_a_controller_from_a_file_decides_as_the_policy_that_was_saved(memory: NetworkConfig, has_ensemble: bool, tmp_path: Path) -> None:
    policy, path = trained_policy(memory), tmp_path / "here" / "controller.safetensors"
    ensemble = gains_of(-0.01) if has_ensemble else None
    save_controller(path, policy, ensemble=ensemble, gains=GAINS if has_ensemble else None)
    config = GrowthConfig()
    advisor = Improved(gains_of(-0.01), config, caution=1.0, most=2) if has_ensemble else Heuristic(config)
    loaded, expected = load_controller(path), StepController(policy, advisor)
    assert [decision for _, decision in lives(lambda: loaded)] == [decision for _, decision in lives(lambda: expected)]
    assert expected.others, "it is not as its advisor"
    assert loaded.policy is not None
    assert (loaded.policy.network, loaded.description.memory, loaded.description.network) == (memory, memory, policy.encoder.config)


def test_an_ensemble_is_loaded_as_it_was_saved_and_without_a_policy(tmp_path: Path) -> None:
    path = save(tmp_path / "ensemble.safetensors", "ensemble")
    loaded = load_controller(path)
    assert (loaded.policy, loaded.description.network, loaded.description.memory) == (None, None, None)
    assert loaded.ensemble is not None
    saved = gains_of(-0.01).state_dict()
    assert all(torch.equal(weight, saved[name]) for name, weight in loaded.ensemble.state_dict().items())
    assert loaded.description.gains == GainsConfig(members=8, width=4, caution=1.0, most=2)


def test_both_parts_of_a_file_are_kept_apart(tmp_path: Path) -> None:
    loaded = load_controller(save(tmp_path / "both.safetensors", "both"))
    assert loaded.ensemble is not None
    assert loaded.policy is not None
    for part, saved in ((loaded.ensemble, gains_of(-0.01)), (loaded.policy, trained_policy())):
        assert all(torch.equal(weight, saved.state_dict()[name]) for name, weight in part.state_dict().items())
    advisor = loaded.advisor(GrowthConfig())
    assert isinstance(advisor, Improved)
    assert (advisor.gains, advisor.caution, advisor.most) == (loaded.ensemble, 1.0, 2)
    assert isinstance(load_controller(save(tmp_path / "policy.safetensors")).advisor(GrowthConfig()), Heuristic)
    described = card(tmp_path / "both.safetensors", read_description(tmp_path / "both.safetensors"))
    assert "policy with LSTM memory of width 12, which sees what would be done by the heuristic, or another step where 8 net" in described


def test_the_shipped_ensemble_survives_another_round_trip(tmp_path: Path) -> None:
    shipped = load_controller(file_of("learned"))
    assert shipped.ensemble is not None
    assert shipped.policy is None
    save_controller(
        tmp_path / "copy.safetensors", ensemble=shipped.ensemble, info=shipped.description.info, gains=shipped.description.gains
    )
    copy = load_controller(tmp_path / "copy.safetensors")
    assert copy.description == shipped.description
    both = tmp_path / "both.safetensors"
    save_controller(both, trained_policy(), ensemble=shipped.ensemble, gains=shipped.description.gains)
    advisor = load_controller(both).advisor(GrowthConfig())
    assert isinstance(advisor, Improved)
    assert all(torch.equal(weight, shipped.ensemble.state_dict()[name]) for name, weight in advisor.gains.state_dict().items())


def test_a_file_is_only_written_again_if_its_content_is_another(path: Path) -> None:
    before = path.stat().st_mtime_ns
    save(path)
    assert path.stat().st_mtime_ns == before
    save(path, "both")
    assert load_controller(path).ensemble is not None


def test_the_rules_of_the_settings_are_those_of_the_advisor(any_kind: Path) -> None:
    config = GrowthConfig(heuristic=HeuristicConfig(grow_at=0.5))
    advisor = load_controller(any_kind, config=config).advisor(config)
    rules = advisor.heuristic if isinstance(advisor, Improved) else advisor
    assert isinstance(rules, Heuristic)
    assert rules.first_look(16) > Heuristic(GrowthConfig()).first_look(16)


# Growing with it


def test_a_learned_controller_is_accepted_by_grow(any_kind: Path) -> None:
    controller = load_controller(any_kind)
    assert isinstance(controller, CompleteController)
    assert as_controller(controller, GrowthConfig()) is controller
    assert controller.name == "learned"
    assert controller.description.info == {"tasks": ["digits"], "rounds": 3}


@pytest.mark.parametrize("mode", ["joint", pytest.param("shadow", marks=pytest.mark.slow)])
def test_a_learned_controller_grows_a_model_without_refused_actions(path: Path, mode: Literal["joint", "shadow"]) -> None:
    rules = LifecycleConfig(raise_mode=mode, training_epochs=1, blend_epochs=1, holding_epochs=1, withdraw_epochs=1, embargo_epochs=1)
    settings = GrowthConfig(slots=SLOTS, lifecycle=rules, blueprints=BLUEPRINTS)
    kinds = set()
    for seed in range(2):
        controller = load_controller(path, seed=seed)
        grown = grow(make_host(), make_data(), make_data(seed=2), cross_entropy, epochs=10, controller=controller, config=settings)
        assert grown.controller == "learned"
        assert not grown.ledger.refused
        kinds |= {entry.blueprint for entry in grown.ledger.seeds}
    assert len(kinds) > 1


class Watched:
    """A learned controller, and all that it has seen."""

    name = "learned"

    def __init__(self, controller: Learned) -> None:
        self.controller, self.seen = controller, list[Observation]()

    def decide(self, state: GrowthState) -> Decision:
        self.seen.append(observe(Turn(state)))
        return self.controller.decide(state)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["joint", "shadow"])
def test_a_host_is_observed_alike_in_a_fleet_and_in_grow(path: Path, mode: Literal["joint", "shadow"]) -> None:
    """As controllers are trained, and as they are used: nobody tells grow the uninformed loss, nor the controller the rules."""
    task = small_task()
    rules = LifecycleConfig(raise_mode=mode, training_epochs=2, blend_epochs=1, holding_epochs=2, withdraw_epochs=1, embargo_epochs=1)
    growth, config = (
        GrowthConfig(lifecycle=rules, blueprints=BLUEPRINTS),
        FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64"),
    )
    setting = HostConfig(seed=3, growth_seed=5, horizon=9, learning_rate=0.01, rent=RentConfig(parameters=0.2, flops=0.1))
    one, other = (Watched(load_controller(path, seed=4)) for _ in range(2))
    grown = train_alone(task, setting, growth, config, one)
    fleet = train_in_fleet(task, setting, growth, config, other)
    assert len(one.seen) == len(other.seen) == setting.horizon + 1
    for expected, found in zip(one.seen, other.seen, strict=True):
        assert expected.names == found.names
        for name in ("host", "targets", "options", "may", "where", "which"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-5, err_msg=name)
    seen = dict(zip((feature.name for feature in HOST.features), one.seen[-1].host.tolist(), strict=False))
    assert seen["val_loss"] > 0, "the scale is known"
    assert grown.ledger.seeds
    assert not grown.ledger.refused
    assert not fleet.rows[0].lifecycles.ledger.refused


@pytest.mark.slow
def test_any_number_of_slots_is_decided_about(path: Path) -> None:
    controller = load_controller(path)
    for now in (state(), *life(slots=2), *life(slots=20), *life(slots=1)):
        for action in controller.decide(now).actions:
            assert action.slot in {one.place.name for one in now.slots}


# Saved states


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 7])
def test_a_learned_controller_resumes_from_its_saved_state(any_kind: Path, seed: int | None, tmp_path: Path) -> None:
    whole = load_controller(any_kind, seed=seed)
    found = lives(lambda: whole)
    half = len(found) // 2
    first, second = (load_controller(any_kind, seed=seed) for _ in range(2))
    for now, _ in found[:half]:
        first.decide(now)
    store = CheckpointStore(tmp_path / "checkpoints", kind="test")
    store.save(6, first.state_dict())
    second.load_state_dict(store.load().state)
    assert [second.decide(now) for now, _ in found[half:]] == [decision for _, decision in found[half:]]
    third = load_controller(any_kind, seed=seed)
    third.load_state_dict(first.state_dict())
    assert_same_tree(second.state_dict(), whole.state_dict())
    assert third.state_dict()["inner"].keys() == whole.state_dict()["inner"].keys()


def assert_same_tree(one: object, other: object) -> None:
    if isinstance(one, dict):
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert_same_tree(value, other[name])
    elif isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.slow
def test_the_memory_is_a_part_of_the_saved_state(path: Path) -> None:
    whole, forgetful = load_controller(path), load_controller(path)
    states = life()
    for now in states:
        whole.decide(now)
    for now in states[6:]:
        forgetful.decide(now)
    memories = [controller.state_dict()["inner"]["memory"] for controller in (whole, forgetful)]
    assert not torch.equal(*memories)


@pytest.mark.slow
def test_a_controller_draws_its_steps_with_a_seed_and_takes_the_likeliest_without(path: Path) -> None:
    states = life(epochs=8)

    def decisions(seed: int | None) -> list[object]:
        controller = load_controller(path, seed=seed)
        return [controller.decide(now) for now in states]

    assert decisions(None) == decisions(None)
    assert decisions(1) == decisions(1)
    assert decisions(1) != decisions(2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 5])
def test_a_new_copy_has_the_same_weights_and_rules_and_an_empty_memory(any_kind: Path, seed: int | None) -> None:
    first = load_controller(any_kind, seed=seed, config=GrowthConfig(heuristic=HeuristicConfig(grow_at=0.5)))
    before = first.state_dict()
    found = lives(lambda: first, epochs=10)
    copy = first.new_copy()
    assert_same_tree(copy.state_dict(), before)
    assert copy.description == first.description
    assert [copy.decide(now) for now, _ in found] == [decision for _, decision in found]


def test_a_state_that_does_not_fit_is_refused(path: Path, tmp_path: Path) -> None:
    controller = load_controller(path)
    controller.decide(life()[0])
    saved = controller.state_dict()
    with pytest.raises(ValueError, match=r"shape \(1, 24\); got \(1, 5\)"):
        controller.load_state_dict({**saved, "inner": {**saved["inner"], "memory": torch.zeros(1, 5)}})
    with pytest.raises(ControllerError, match=r"takes the likeliest steps, but the saved one drew its; load it in the same way"):
        controller.load_state_dict(load_controller(path, seed=3).state_dict())
    with pytest.raises(ControllerError, match=r"draws its steps, but the saved one took the likeliest; load it"):
        load_controller(path, seed=3).load_state_dict(saved)
    with pytest.raises(ControllerError, match="decided by another controller file"):
        controller.load_state_dict(saved | {"sha256": "0" * 64})
    with pytest.raises(ControllerError, match="decided by another controller file"):
        controller.load_state_dict(load_controller(save(tmp_path / "other.safetensors", "both")).state_dict())


# Files that cannot be used


def test_a_damaged_controller_file_is_refused(path: Path) -> None:
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-5] ^= 1
    for damaged, complaint in (
        (content[: len(content) // 2], "is damaged: .*; copy the file again"),
        (b"", "cannot be read as a safetensors file"),
        (b"these are no tensors, only words about them", "cannot be read as a safetensors file"),
        (bytes(flipped), "is damaged: its sha256 is not that of its content"),
        (content.replace(b'rounds\\": 3', b'rounds\\": 4'), "is damaged: its sha256 is not that of its content"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ControllerError, match=complaint):
            load_controller(path)


def test_a_file_without_a_digest_of_everything_loads_with_checked_weights(path: Path) -> None:
    rewrite(path)
    assert load_controller(path).description.info["rounds"] == 3
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ControllerError, match="its weights do not match their sha256"):
        load_controller(path)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("network", "width", 65_536),
        ("network", "width", 2**40),
        ("network", "width", 0),
        ("memory", "hidden_size", 65_536),
        ("memory", "head_sizes", [65_536] * 10_000),
        ("memory", "encoder_sizes", [-1]),
        ("gains", "width", 65_536),
        ("gains", "members", 10_000_000),
        ("gains", "members", 0),
    ],
)
def test_a_description_of_impossible_sizes_is_refused_before_a_network_is_built(
    tmp_path: Path, part: str, name: str, value: object
) -> None:
    path = save(tmp_path / "controller.safetensors", "both")
    weights, metadata = read_tensors(path)
    described = json.loads(metadata["esper controller"])
    described[part][name] = value
    write_tensors(path, weights, {"esper controller": json.dumps(described)})
    with pytest.raises(ControllerError, match=r"controller\.safetensors.*(larger than its weights|cannot be understood)"):
        load_controller(path)


def test_a_file_that_is_no_controller_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ControllerError, match="holds tensors, but no controller"):
        load_controller(tmp_path / "other.safetensors")
    with pytest.raises(ControllerError, match=r"there is no file .*missing; give the path"):
        load_controller(tmp_path / "missing")
    with pytest.raises(ControllerError, match="is a folder and no file"):
        load_controller(tmp_path)


def rewrite(path: Path, **changes: object) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["esper controller"])
    save_file(load_file(path), path, {"esper controller": json.dumps({**header, **changes})})


def test_a_file_of_another_layout_is_refused_with_both_versions(any_kind: Path) -> None:
    rewrite(any_kind, layout="0-old", esper="0.0.1")
    with pytest.raises(ControllerError, match=rf"layout 0-old of .* has layout {VERSION}; use it with esper 0.0.1, or train"):
        load_controller(any_kind)
    assert read_description(any_kind).layout == "0-old", "its card can be read"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("policy", {"network": {"width": 64}}, "do not fit their own description"),
        ("policy", {"memory": {"hidden_size": 5}}, "do not fit their own description"),
        ("policy", {"network": {"width": "wide"}}, "cannot be understood"),
        ("policy", {"network": {"depth": 3}}, "cannot be understood"),
        ("policy", {"memory": None}, r"cannot be understood; .* \(it must have a network with a memory, or gains\)"),
        ("policy", {"network": None}, r"cannot be understood; .* \(it must have a network with a memory, or gains\)"),
        ("policy", {"network": None, "memory": None}, r"cannot be understood; .* \(it must have a network with a memory, or gains\)"),
        ("policy", {"network": None, "memory": None, "gains": {}}, "do not fit their own description"),
        ("policy", {"gains": {}}, "do not fit their own description"),
        ("ensemble", {"gains": {"members": 9}}, "do not fit their own description"),
        ("ensemble", {"gains": None}, "cannot be understood"),
        ("ensemble", {"network": {}, "memory": {}}, "do not fit their own description"),
    ],
)
def test_a_description_that_does_not_fit_the_weights_is_refused(
    kind: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "controller.safetensors", kind)
    rewrite(path, **changes)
    with pytest.raises(ControllerError, match=message):
        load_controller(path)


def test_saving_replaces_the_file_in_one_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def crash(*names: object) -> None:
        raise OSError("power is out")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="power is out"):
        save_controller(path, trained_policy(NetworkConfig(hidden_size=5)))
    assert path.read_bytes() == before


def test_only_a_controllers_policy_can_be_saved(tmp_path: Path) -> None:
    other = Policy(*spec(SIZES), NetworkConfig(), generator=torch.Generator())
    with pytest.raises(ControllerError, match="needs a StepEncoder, but this one has a Encoder; see make_policy"):
        save_controller(tmp_path / "controller", other)
    assert not (tmp_path / "controller").exists()
