"""Hosts in float16, each with its own loss scale."""

from __future__ import annotations

import copy

import msgspec
import pytest
import torch
from torch import Tensor

from esper import gradients
from esper.fleet import Fleet, FleetConfig
from esper.gradients import LossScales
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.growth.lifecycle.stages import Decision
from tests.fleet.builders import (
    BATCH,
    JOINT,
    LIFECYCLES,
    SHADOW,
    assert_identical,
    copy_rows,
    enlarge_head,
    germinate,
    germinate_in_every_slot,
    host_settings,
    make_fleet,
    rename_dtype,
)

FLOAT64 = FleetConfig(batch_size=BATCH, validation_batch=20, validation_samples=20, precision="float64", steps_per_decision=1)
FLOAT16 = msgspec.structs.replace(FLOAT64, precision="float16")
START = 65536.0


def make_growing_fleet(lifecycle: LifecycleConfig, config: FleetConfig = FLOAT16, hosts: int = 3) -> Fleet:
    """Make a fleet with seeds in the hosts 0 and 1."""
    fleet = make_fleet(host_settings(hosts, horizon=20), GrowthConfig(lifecycle=lifecycle, probe_steps=2), config)
    germinate_in_every_slot(fleet, 0)
    germinate_in_every_slot(fleet, 1, ("squeeze_excite", "depthwise", "wide_conv3x3"))
    return fleet


def scales_of(fleet: Fleet) -> list[float]:
    return list(fleet.tensors()["host scale"].tolist())


def trained_tensors(fleet: Fleet, rows: list[int]) -> dict[str, Tensor]:
    """Return the tensors that a step changes by its gradients."""
    return {name: tensor for name, tensor in copy_rows(fleet, rows).items() if "constants" not in name and name not in SCALES}


SCALES = ("host scale", "host good steps", "host skipped steps")


# One step


@pytest.mark.slow
@LIFECYCLES
def test_one_step_in_float16_agrees_with_float64(lifecycle: LifecycleConfig) -> None:
    fleet = make_growing_fleet(lifecycle, FLOAT64)
    for _ in range(5):
        fleet.advance()
    state = rename_dtype(copy.deepcopy(fleet.state_dict()), torch.float32)
    other = make_growing_fleet(lifecycle)
    for tensors in (state["tensors"], *state["snapshots"].values()):
        tensors |= {name: tensor for name, tensor in other.tensors().items() if name in SCALES}
    other.load_state_dict(state)
    for each in (fleet, other):
        each.advance()
    assert other.tensors()["host good steps"].tolist() == [1, 1, 1]
    for name, tensor in fleet.host.rows.tensors().items():
        torch.testing.assert_close(other.host.rows.tensors()[name].to(tensor.dtype), tensor, atol=1e-2, rtol=1e-2)
    for slot, storage in fleet.seed_storages.items():
        torch.testing.assert_close(other.seed_storages[slot].tensors["weights"].double(), storage.tensors["weights"], atol=1e-2, rtol=1e-2)
    for own, there in zip(fleet.rows, other.rows, strict=True):
        assert there.lifecycles.history.train_losses[-1] == pytest.approx(own.lifecycles.history.train_losses[-1], rel=1e-2)
        assert there.lifecycles.history.val_losses[-1] == pytest.approx(own.lifecycles.history.val_losses[-1], rel=1e-2)


@pytest.mark.slow
@LIFECYCLES
def test_a_host_whose_gradients_overflow_skips_its_step_and_leaves_the_others_alone(lifecycle: LifecycleConfig) -> None:
    calm, other = make_growing_fleet(lifecycle), make_growing_fleet(lifecycle)
    enlarge_head(other, 1)
    before = trained_tensors(other, [1])
    for fleet in (calm, other):
        fleet.advance()
    assert_identical(trained_tensors(other, [1]), before)
    assert_identical(copy_rows(other, [0, 2]), copy_rows(calm, [0, 2]))
    assert scales_of(calm) == [START, START, START]
    assert scales_of(other) == [START, START / 2, START]
    assert other.tensors()["host good steps"].tolist() == [1, 0, 1]
    assert other.skipped_steps.tolist() == [0, 1, 0]
    assert other.rows[1].lifecycles.governor.rollbacks == 0


@pytest.mark.slow
def test_a_scale_falls_until_the_gradients_fit_and_then_the_host_learns() -> None:
    fleet = make_growing_fleet(JOINT)
    enlarge_head(fleet, 1)
    before = fleet.tensors()["host weights"][1].clone()
    for _ in range(12):
        fleet.advance()
    assert 1 <= scales_of(fleet)[1] < START
    assert not torch.equal(fleet.tensors()["host weights"][1], before)


@pytest.mark.slow
@LIFECYCLES
def test_an_overflow_in_one_seed_skips_the_step_of_all_seeds_of_its_host(lifecycle: LifecycleConfig) -> None:
    calm, other = make_growing_fleet(lifecycle), make_growing_fleet(lifecycle)
    for fleet in (calm, other):
        fleet.advance()
        fleet.advance()
    with torch.no_grad():
        other.seed_storages["blocks.2"].tensors["weights"][0] *= 10000
    before = trained_tensors(other, [0])
    for fleet in (calm, other):
        fleet.advance()
    after = trained_tensors(other, [0])
    assert scales_of(calm) == [START, START, START]
    assert scales_of(other) == [START / 2, START, START]
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith("host"))
    has_stepped = not torch.equal(after["host weights"], before["host weights"])
    assert has_stepped == (lifecycle is SHADOW)  # before the second pass
    assert_identical(copy_rows(other, [1, 2]), copy_rows(calm, [1, 2]))


@pytest.mark.slow
def test_seeds_in_the_shadow_of_a_host_that_skips_its_step_skip_it_too() -> None:
    """Their own gradients are finite: only what lies before their slot overflows."""
    fleet = make_fleet(host_settings(2, horizon=20), GrowthConfig(lifecycle=SHADOW), FLOAT16)
    fleet.decide({row: Decision((germinate("blocks.2", "bottleneck"),)) for row in range(2)})
    fleet.advance()
    with torch.no_grad():
        fleet.host.rows.tensors()["blocks.0.conv.weight"][1] *= 1e-4  # the norm behind it makes its gradients large
    fleet.host.scales.tensors["scale"][1] *= 4
    before = trained_tensors(fleet, [1])
    fleet.advance()
    assert scales_of(fleet) == [START, 2 * START]
    gradients = fleet.rows[1].lifecycles.slots["blocks.2"].record.gradients
    assert gradients is not None
    assert gradients.skipped == 1
    calm = fleet.rows[0].lifecycles.slots["blocks.2"].record.gradients
    assert calm is not None
    assert calm.skipped == 0
    assert_identical(trained_tensors(fleet, [1]), before)


@pytest.mark.slow
@LIFECYCLES
def test_the_loss_scale_of_a_host_does_not_affect_the_others(lifecycle: LifecycleConfig) -> None:
    """The hosts with seeds are not the first ones."""
    fleets = [make_fleet(host_settings(3, horizon=20), GrowthConfig(lifecycle=lifecycle), FLOAT16) for _ in range(2)]
    fleets[1].host.scales.tensors["scale"][0] = 256.0
    for fleet in fleets:
        germinate_in_every_slot(fleet, 1)
        germinate_in_every_slot(fleet, 2)
        fleet.advance()
    assert_identical(copy_rows(fleets[0], [1, 2]), copy_rows(fleets[1], [1, 2]))
    norms = [[backend.record.gradients for host in fleet.rows[1:] for backend in host.lifecycles.slots.values()] for fleet in fleets]
    assert norms[0] == norms[1]
    assert all(gradients is not None and gradients.mean_norm > 0 for gradients in norms[0])


# Many steps


def test_scales_halve_at_once_and_double_after_many_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "GROWTH_INTERVAL", 3)
    scales = LossScales.fresh(2, "cpu")
    places = [tensor.data_ptr() for tensor in scales.tensors.values()]
    seen = []
    for is_fine in ([1, 1], [1, 0], [1, 1], [1, 1], [1, 1], [0, 1], [0, 1]):
        scales.update_(torch.tensor(is_fine, dtype=torch.bool))
        seen.append([scale / START for scale in scales.scale.tolist()])
    assert seen == [[1, 1], [1, 0.5], [2, 0.5], [2, 0.5], [2, 1], [1, 1], [0.5, 1]]
    assert places == [tensor.data_ptr() for tensor in scales.tensors.values()]  # a recorded step finds them again


def test_a_loss_scale_never_falls_to_zero() -> None:
    scales = LossScales.fresh(1, "cpu")
    for _ in range(300):
        scales.update_(torch.tensor([False]))
    assert scales.scale.item() > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_gradients_are_unscaled_and_checked_per_host(bad: float) -> None:
    scales = LossScales(torch.tensor([2.0, 4.0, 8.0]), *torch.zeros(2, 3, dtype=torch.int64))
    host, seeds = torch.full((3, 5), 8.0), torch.full((2, 4), 8.0)
    seeds[1, 3] = bad
    stepping = scales.unscale_([(host, None), (seeds, torch.tensor([2, 0]))])
    assert stepping.tolist() == [False, True, True]
    assert host[:, 0].tolist() == [4, 2, 1]
    assert seeds[0].tolist() == [1, 1, 1, 1]
    assert scales.unscale_([], stepping).tolist() == [False, True, True]


# Life


@pytest.mark.slow
def test_a_probe_sees_gradients_without_their_scale() -> None:
    promises = []
    for config in (FLOAT64, FLOAT16):
        growth = GrowthConfig(probe_steps=2, blueprints=("norm", "conv3x3", "bottleneck", "widen_25", "widen_50_chain"))
        fleet = make_fleet(host_settings(2), growth, msgspec.structs.replace(config, steps_per_decision=2))
        fleet.decide({1: Decision(probe=True)})
        fleet.advance()
        promises.append(fleet.rows[1].lifecycles.promises)
    assert promises[0]
    assert promises[1] == pytest.approx(promises[0], rel=0.2)


@pytest.mark.slow
def test_loss_scales_are_restored_and_reset_with_their_host() -> None:
    fleet = make_growing_fleet(JOINT)
    fleet.advance()  # a snapshot of a healthy epoch
    before = copy_rows(fleet, [1])
    with torch.no_grad():
        fleet.tensors()["host weights"][1] = float("inf")
    fleet.advance()
    assert fleet.rows[1].lifecycles.governor.rollbacks == 1
    assert_identical(copy_rows(fleet, [1]), before)
    fleet.tensors()["host scale"].fill_(2.0)
    fleet.reset({1: host_settings(2)[1]})
    assert scales_of(fleet) == [2, START, 2]
    assert fleet.tensors()["host good steps"].tolist() == [2, 0, 2]


@pytest.mark.slow
@LIFECYCLES
def test_a_saved_fleet_in_float16_goes_on_bit_for_bit(lifecycle: LifecycleConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "GROWTH_INTERVAL", 3)
    fleet, resumed = make_growing_fleet(lifecycle), make_growing_fleet(lifecycle)
    enlarge_head(fleet, 1)
    for _ in range(2):
        fleet.advance()
    assert scales_of(fleet)[1] < START
    resumed.load_state_dict(copy.deepcopy(fleet.state_dict()))
    for each in (fleet, resumed):
        for _ in range(2):
            each.advance()
    assert scales_of(fleet)[0] == 2 * START  # the count of good steps went along
    assert_identical(copy_rows(fleet, [0, 1, 2]), copy_rows(resumed, [0, 1, 2]))


@pytest.mark.slow
def test_only_float16_has_loss_scales() -> None:
    fleet = make_growing_fleet(JOINT, FLOAT64)
    assert not any(name in fleet.tensors() for name in SCALES)


@pytest.mark.slow
def test_scales_are_part_of_the_memory_of_a_host() -> None:
    fleet = make_growing_fleet(JOINT)
    held = sum(tensor.nbytes for tensor in fleet.tensors().values())
    assert fleet.memory_per_host().state == held // 3 * (2 + fleet.growth.governor.keep)
