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

from esper.controller import layout, learned
from esper.controller.config import BLUEPRINTS, MoveNetworkConfig
from esper.controller.features import HOST
from esper.controller.layout import MOVE_NAMES, observe, options
from esper.controller.learned import ControllerError, load_controller, save_controller
from esper.controller.tokens import VERSION
from esper.controller.value import ValueController, ValueModel
from esper.fleet.config import FleetConfig, HostConfig
from esper.growth import grow
from esper.growth.config import GrowthConfig, LifecycleConfig, RentConfig
from esper.growth.controllers.baselines import as_controller
from esper.growth.lifecycle.stages import CompleteController, Decision, GrowthState
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy
from esper.runs import CheckpointStore, read_tensors, write_tensors
from tests.controller.hosts import drawn_state, state
from tests.controller.policies import NETWORK, trained_policy
from tests.fleet.builders import BATCH, small_task, train_alone, train_in_fleet
from tests.growth.builders import SLOTS, make_data, make_host


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_controller(tmp_path / "controller.safetensors", trained_policy(), {"tasks": ["digits"], "rounds": 3})
    return tmp_path / "controller.safetensors"


def life(seed: int = 0, *, slots: int = 3, epochs: int = 12) -> list[GrowthState]:
    rng = np.random.default_rng(seed)
    return [drawn_state(rng, slots=slots) for _ in range(epochs)]


def value_model(seed: int = 0) -> ValueModel:
    return ValueModel(width=16, members=3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory", [NetworkConfig(hidden_size=12), NetworkConfig(core="none"), NetworkConfig(core="gru", critic_memory="own")]
)
def test_a_controller_from_a_file_decides_as_the_policy_that_was_saved(memory: NetworkConfig, tmp_path: Path) -> None:
    policy = trained_policy(memory)
    save_controller(tmp_path / "here" / "controller.safetensors", policy)
    controller = load_controller(tmp_path / "here" / "controller.safetensors")
    core_state = None
    for now in life():
        obs, masks = observe([now])
        actions, core_state = policy.act(obs, core_state, masks=masks)
        name = MOVE_NAMES[int(actions["move"])]
        assert controller.decide(now) == layout.decision(now, options(now)[name], f"the policy makes the move {name}")


def test_a_value_model_from_a_file_decides_as_the_one_that_was_saved(tmp_path: Path) -> None:
    model, path = value_model(), tmp_path / "value.safetensors"
    save_controller(path, model, {"cells": 12}, network=MoveNetworkConfig(caution=0.25))
    loaded = load_controller(path)
    assert (loaded.description.memory, loaded.description.network.caution, loaded.description.info) == (None, 0.25, {"cells": 12})
    expected = ValueController(model, caution=0.25)
    states = life(epochs=30)
    assert [loaded.decide(now) for now in states] == [expected.decide(now) for now in states]
    assert loaded.new_copy().decide(states[3]) == expected.decide(states[3])
    again = load_controller(path)
    again.load_state_dict(loaded.state_dict())
    assert as_controller(again, GrowthConfig()) is again


def test_the_value_model_of_a_policy_is_a_part_of_it(path: Path) -> None:
    controller = load_controller(path)
    assert controller.value.members == NETWORK.members
    assert torch.equal(controller.value.weights[0], trained_policy().state_dict()["encoder.value.weights.0"])


def test_a_learned_controller_is_accepted_by_grow(path: Path) -> None:
    controller = load_controller(path)
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

    def __init__(self, controller: learned.Learned) -> None:
        self.controller, self.seen = controller, []

    def decide(self, state: GrowthState) -> Decision:
        self.seen.append(observe([state]))
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
        for part, same in zip(expected, found, strict=True):
            for name in part:
                torch.testing.assert_close(same[name], part[name], rtol=0, atol=1e-5)
    seen = dict(zip((feature.name for feature in HOST.features), one.seen[-1][0]["host"][0].tolist(), strict=True))
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 7])
def test_a_learned_controller_resumes_from_its_saved_state(path: Path, seed: int | None, tmp_path: Path) -> None:
    states = life(epochs=12)
    whole = load_controller(path, seed=seed)
    expected = [whole.decide(now) for now in states]
    first, second = (load_controller(path, seed=seed) for _ in range(2))
    for now in states[:6]:
        first.decide(now)
    store = CheckpointStore(tmp_path / "checkpoints", kind="test")
    store.save(6, first.state_dict())
    second.load_state_dict(store.load().state)
    assert [second.decide(now) for now in states[6:]] == expected[6:]
    forgetful = load_controller(path, seed=seed)
    assert not torch.equal(forgetful_memory(forgetful, states[6:]), whole.state_dict()["memory"])


def forgetful_memory(controller: learned.Learned, states: list[GrowthState]) -> torch.Tensor:
    for now in states:
        controller.decide(now)
    memory = controller.state_dict()["memory"]
    assert isinstance(memory, torch.Tensor)
    return memory


@pytest.mark.slow
def test_a_controller_samples_with_a_seed_and_makes_the_likeliest_move_without(path: Path) -> None:
    states = life(epochs=8)

    def decisions(seed: int | None) -> list[object]:
        controller = load_controller(path, seed=seed)
        return [controller.decide(now) for now in states]

    assert decisions(None) == decisions(None)
    assert decisions(1) == decisions(1)
    assert decisions(1) != decisions(2)


def test_a_state_that_does_not_fit_is_refused(path: Path, tmp_path: Path) -> None:
    controller = load_controller(path)
    with pytest.raises(ValueError, match=r"shape \(1, 24\); got \(1, 5\)"):
        controller.load_state_dict(controller.state_dict() | {"memory": torch.zeros(1, 5)})
    with pytest.raises(ControllerError, match="makes the most likely moves, but the saved one sampled them"):
        controller.load_state_dict(load_controller(path, seed=3).state_dict())
    with pytest.raises(ControllerError, match="decided by another controller file"):
        controller.load_state_dict(controller.state_dict() | {"sha256": "0" * 64})


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
        ("network", "summary_width", 65_536),
        ("network", "members", 10_000_000),
        ("network", "members", 0),
        ("memory", "hidden_size", 65_536),
        ("memory", "head_sizes", [65_536] * 10_000),
        ("memory", "encoder_sizes", [-1]),
    ],
)
def test_a_description_of_impossible_sizes_is_refused_before_a_network_is_built(path: Path, part: str, name: str, value: object) -> None:
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


def test_a_file_of_another_layout_is_refused_with_both_versions(path: Path) -> None:
    rewrite(path, layout="0-old", esper="0.0.1")
    with pytest.raises(
        ControllerError, match=rf"layout 0-old of .* has layout {layout.LAYOUT_VERSION} and {VERSION}; use it with esper 0.0.1, or train"
    ):
        load_controller(path)


def test_a_description_that_does_not_fit_the_weights_is_refused(path: Path) -> None:
    rewrite(path, network={"width": 64})
    with pytest.raises(ControllerError, match="do not fit their own description"):
        load_controller(path)
    rewrite(path, network={"width": "wide"})
    with pytest.raises(ControllerError, match="cannot be understood"):
        load_controller(path)
    rewrite(path, network={}, memory=None)
    with pytest.raises(ControllerError, match="do not fit their own description"):
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
    other = Policy(*layout.spec(), NetworkConfig(), generator=torch.Generator())
    with pytest.raises(ControllerError, match="needs a MoveEncoder, but this one has a Encoder"):
        save_controller(tmp_path / "controller", other)
