"""Width seeds in a fleet: a row equals the same host grown alone, whatever grows beside it."""

from __future__ import annotations

import copy
import dataclasses
import math

import msgspec
import pytest
import torch
from torch import nn

from esper.fleet import width
from esper.fleet.config import FleetConfig
from esper.fleet.fleet import Fleet
from esper.fleet.memory import Memory, width_bytes
from esper.fleet.width import WidthKind
from esper.growth.config import BudgetConfig, GovernorConfig, GrowthConfig, LifecycleConfig, SeedOptimizerConfig
from esper.growth.lifecycle.stages import Advance, Decision, Fossilize, GrowthState, Prune, Retarget, Stage
from esper.tasks.hosts import make_host as family_host
from tests.fleet.builders import (
    CONFIG,
    JOINT,
    LIFECYCLES,
    SHADOW,
    SLOTS,
    MakeHost,
    Script,
    Scripted,
    assert_fields_close,
    assert_identical,
    assert_row_equals,
    build_seeded,
    copy_rows,
    decide,
    germinate,
    host_settings,
    make_fleet,
    make_gpt_host,
    make_host,
    rename_dtype,
    small_task,
    text_task,
    train_alone,
    train_fleet,
)
from tests.fleet.test_fleet import sequence_loss

BUDGET = BudgetConfig(max_parameters=None, max_flops=None)
# Those that the scripts grow and a few more: the widest ones take much longer and are computed in the same way.
BLUEPRINTS = ("norm", "conv1x1", "conv3x3", "bottleneck", "low_rank", "mlp", "widen_25", "widen_50", "widen_50_chain", "widen_100")
PROBED = ("norm", "conv3x3", "widen_25", "widen_50", "widen_50_chain", "widen_100")


class MLP(nn.Module):
    """Layers with weights, statistics or neither for each unit between them. Its forward method has no lowering."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 5)
        self.slope = nn.PReLU(5)
        self.head = nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x.flatten(1))).tanh()
        return self.head(self.slope(self.second(hidden)))


def make_mlp(seed: int) -> nn.Module:
    return build_seeded(seed, MLP)


def assert_rows_equal_hosts_alone(
    scripts: list[Script],
    lifecycle: LifecycleConfig,
    *,
    make_host: MakeHost = make_host,
    slots: tuple[str, ...] | None = None,
    config: FleetConfig = CONFIG,
    horizon: int = 8,
    train: int = 50,
) -> Fleet:
    """Train one host per script as a fleet and alone on `train` samples, and compare ledgers, losses and weights."""
    task = (text_task if make_host is make_gpt_host else small_task)(train=train, others=40)
    # A single run measures the loss of a constant predictor, with noise of its own.
    governor = GovernorConfig(uninformed_loss=task.uninformed_loss)
    growth = GrowthConfig(lifecycle=lifecycle, slots=slots, blueprints=BLUEPRINTS, budget=BUDGET, governor=governor)
    settings = host_settings(len(scripts), horizon=horizon)
    fleet = train_fleet(task, settings, scripts, growth, config, make_host=make_host)
    loss_fn = sequence_loss if make_host is make_gpt_host else nn.functional.cross_entropy
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        grown = train_alone(task, setting, growth, config, Scripted(script), make_host=make_host, loss_fn=loss_fn)
        assert_row_equals(fleet, row, grown, atol=1e-10)
    return fleet


def test_a_row_with_a_chain_of_wider_layers_equals_the_same_host_alone() -> None:
    fleet = assert_rows_equal_hosts_alone(
        [{}, {0: [germinate("blocks.0", "widen_50_chain")], 2: [Fossilize(slot="blocks.0", reason="")]}], JOINT, horizon=3
    )
    assert [entry.outcome for entry in fleet.rows[1].lifecycles.ledger.seeds] == ["kept"]


def parts_of(fleet: Fleet) -> list[list[int]]:
    """Return the hosts that are computed together, part by part."""
    arrangement = fleet.stacked_model(range(fleet.hosts)).arrangement
    assert arrangement is not None
    return [sorted(part.hosts) for part in arrangement.parts]


def test_hosts_of_different_widths_compute_the_same_together_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of zero, with which narrow hosts are padded, change neither their seeds in depth nor their running statistics."""
    one, two, _ = SLOTS
    blueprints = [None, (one, "widen_50_chain"), (one, "widen_25"), (two, "conv3x3")]
    tensors: list[dict[str, torch.Tensor]] = []
    for work, parts in ((math.inf, [[0, 1, 2, 3]]), (0.0, [[0, 3], [1], [2]])):
        monkeypatch.setattr(width, "_WORK_OF_A_PART", {"cpu": work})
        fleet = make_fleet(host_settings(4, horizon=4), GrowthConfig(lifecycle=JOINT, blueprints=BLUEPRINTS, budget=BUDGET))
        fleet.decide({row: Decision((germinate(*some),)) for row, some in enumerate(blueprints) if some is not None})
        for _ in range(2):
            fleet.advance()
        assert sorted(parts_of(fleet)) == parts
        tensors.append({name: tensor.clone() for name, tensor in fleet.tensors().items()})
    together, apart = tensors
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, apart[name], rtol=0, atol=1e-12)


class Grouped(nn.Module):
    """A host whose norm has groups of units, so that units of zero would change the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()
        self.second, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.relu(self.second(self.act(self.norm(self.first(x))))).mean((2, 3)))
        return result


def make_grouped(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Grouped().double()


@pytest.mark.slow
def test_hosts_with_groups_of_units_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(width, "_WORK_OF_A_PART", {"cpu": math.inf})
    assert_rows_equal_hosts_alone([{}, {0: [germinate("act", "widen_50")]}], JOINT, make_host=make_grouped, horizon=3)
    fleet = make_fleet(host_settings(2), GrowthConfig(lifecycle=JOINT, budget=BUDGET), make_host=make_grouped)
    fleet.decide({1: Decision((germinate("act", "widen_50"),))})
    assert sorted(parts_of(fleet)) == [[0], [1]]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_width_seeds_raised_jointly_equal_those_of_hosts_alone(optimizer: str) -> None:
    """Pairs and chains, one behind another, kept, pruned and moved, with seeds in depth inside and beside hosts without any."""
    one, two, three = SLOTS
    scripts: list[Script] = [
        {},
        {
            0: [germinate(one, "widen_50")],
            2: [Fossilize(slot=one, reason="")],
            3: [germinate(two, "widen_100")],
            6: [Fossilize(slot=two, reason="")],
        },
        {
            0: [germinate(one, "widen_50_chain"), germinate(two, "conv3x3")],
            3: [Fossilize(slot=one, reason=""), Prune(slot=two, reason="")],
        },
        {
            1: [germinate(two, "widen_25"), germinate(one, "norm")],
            3: [Fossilize(slot=two, reason="")],
            4: [Prune(slot=one, reason="")],
            6: [germinate(one, "widen_50_chain")],
        },
        {
            0: [germinate(three, "widen_25"), germinate(two, "widen_50_chain")],
            2: [Retarget(slot=two, reason="", alpha=0.5)],
            5: [Fossilize(slot=two, reason="")],
        },
        {
            1: [germinate(two, "bottleneck")],
            3: [Fossilize(slot=two, reason="")],
            4: [germinate(one, "widen_50")],
            6: [Fossilize(slot=one, reason="")],
        },
    ]
    fleet = assert_rows_equal_hosts_alone(scripts, JOINT, config=msgspec.structs.replace(CONFIG, optimizer=optimizer))
    outcomes = [entry.outcome for host in fleet.rows for entry in host.lifecycles.ledger.seeds if entry.blueprint.startswith("widen")]
    assert outcomes.count("kept") == 6, outcomes
    assert "pruned" in outcomes


@pytest.mark.slow
def test_width_seeds_raised_in_the_shadow_equal_those_of_hosts_alone() -> None:
    """Seeds that learn in a second pass, beside connected ones of both kinds, before them and behind them."""
    lifecycle = msgspec.structs.replace(SHADOW, blend_epochs=2, alpha_target=0.8, alpha_curve="cosine")
    one, two, three = SLOTS
    scripts: list[Script] = [
        {},
        {
            0: [germinate(one, "widen_50")],
            2: [Advance(slot=one, reason="")],
            3: [germinate(two, "widen_50_chain")],
            6: [Fossilize(slot=one, reason="")],
            7: [Advance(slot=two, reason="")],
        },
        {
            0: [germinate(two, "widen_100")],
            2: [Advance(slot=two, reason=""), germinate(one, "conv3x3")],
            4: [Advance(slot=one, reason="")],
            6: [Fossilize(slot=two, reason="")],
        },
        {
            0: [germinate(one, "norm"), germinate(two, "widen_25")],
            2: [Advance(slot=one, reason="")],
            4: [Prune(slot=two, reason="")],
            6: [Fossilize(slot=one, reason="")],
        },
        {
            0: [germinate(one, "widen_50_chain")],
            2: [Advance(slot=one, reason=""), germinate(three, "bottleneck")],
            5: [Advance(slot=three, reason="")],
        },
    ]
    fleet = assert_rows_equal_hosts_alone(scripts, lifecycle, horizon=9)
    outcomes = [entry.outcome for host in fleet.rows for entry in host.lifecycles.ledger.seeds if entry.blueprint.startswith("widen")]
    assert "kept" in outcomes
    assert "pruned" in outcomes


@pytest.mark.slow
@LIFECYCLES
def test_units_of_a_module_without_a_lowering_equal_those_of_hosts_alone(lifecycle: LifecycleConfig) -> None:
    scripts: list[Script] = [
        {},
        {0: [germinate("first", "widen_50")], 3: [Advance(slot="first", reason="")], 5: [Fossilize(slot="first", reason="")]},
        {
            1: [germinate("first", "widen_50_chain"), germinate("slope", "low_rank")],
            3: [Advance(slot="first", reason="")],
            6: [Fossilize(slot="first", reason="")],
        },
        {
            0: [germinate("norm", "widen_100")],
            2: [Advance(slot="norm", reason=""), germinate("slope", "widen_100")],
            6: [Fossilize(slot="norm", reason="")],
        },
    ]
    # By SGD: Adam enlarges the rounding of weights that have hardly any gradient, as those of the pixels at the border.
    config = msgspec.structs.replace(CONFIG, optimizer="sgd")
    fleet = assert_rows_equal_hosts_alone(scripts, lifecycle, make_host=make_mlp, slots=("first", "norm", "slope"), config=config)
    assert any(entry.outcome == "kept" for host in fleet.rows for entry in host.lifecycles.ledger.seeds)


@pytest.mark.slow
@LIFECYCLES
def test_hidden_units_of_a_transformer_equal_those_of_hosts_alone(lifecycle: LifecycleConfig) -> None:
    scripts: list[Script] = [
        {},
        {
            0: [germinate("blocks.0", "widen_25")],
            3: [Advance(slot="blocks.0", reason=""), germinate("blocks.1", "mlp")],
            5: [Fossilize(slot="blocks.0", reason="")],
        },
        {1: [germinate("blocks.1", "widen_50"), germinate("blocks.0", "low_rank")], 4: [Prune(slot="blocks.1", reason="")]},
    ]
    assert_rows_equal_hosts_alone(scripts, lifecycle, make_host=make_gpt_host, slots=("blocks.0", "blocks.1"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first", "second"), [("residual-2x2", "blocks.1", "blocks.2"), ("mlp-4x2", "blocks.0.1", "blocks.1.1")])
def test_hosts_of_other_families_equal_those_alone(name: str, first: str, second: str) -> None:
    in_depth = "conv1x1" if name.startswith("residual") else "mlp"
    scripts: list[Script] = [
        {},
        {0: [germinate(first, "widen_50")], 3: [Fossilize(slot=first, reason="")], 4: [germinate(second, in_depth)]},
        {1: [germinate(first, in_depth)], 2: [germinate(second, in_depth)], 5: [Prune(slot=first, reason="")]},
    ]
    assert_rows_equal_hosts_alone(
        scripts, JOINT, make_host=lambda seed: build_seeded(seed, lambda: family_host(name, torch.zeros(2, 1, 8, 8), 10))
    )


@pytest.mark.slow
@LIFECYCLES
def test_slots_open_again_behind_kept_seeds_as_in_hosts_alone(lifecycle: LifecycleConfig) -> None:
    """In depth, in width, and in turns; one host grows a third time, another not even once."""
    scripts: list[Script] = [
        {},
        {
            0: [germinate("blocks.1", "conv3x3")],
            2: [Advance(slot="blocks.1", reason="")],
            4: [Fossilize(slot="blocks.1", reason="")],
            5: [germinate("blocks.1#2", "norm"), germinate("blocks.0", "conv1x1")],
            7: [Advance(slot="blocks.1#2", reason="")],
            9: [Fossilize(slot="blocks.1#2", reason="")],
            10: [germinate("blocks.1#3", "conv1x1")],
        },
        {
            0: [germinate("blocks.0", "widen_50")],
            2: [Advance(slot="blocks.0", reason="")],
            4: [Fossilize(slot="blocks.0", reason="")],
            5: [germinate("blocks.0#2", "widen_50_chain")],
            7: [Advance(slot="blocks.0#2", reason="")],
            9: [Fossilize(slot="blocks.0#2", reason="")],
            10: [germinate("blocks.0#3", "conv3x3")],
        },
        {
            0: [germinate("blocks.0", "bottleneck")],
            2: [Advance(slot="blocks.0", reason="")],
            4: [Fossilize(slot="blocks.0", reason="")],
            5: [germinate("blocks.0#2", "widen_25")],
            8: [Prune(slot="blocks.0#2", reason="")],
        },
    ]
    fleet = assert_rows_equal_hosts_alone(scripts, lifecycle, horizon=12, train=100)
    kept = [[entry.slot for entry in host.lifecycles.ledger.seeds if entry.outcome == "kept"] for host in fleet.rows]
    assert kept[1:] == [["blocks.1", "blocks.1#2"], ["blocks.0", "blocks.0#2"], ["blocks.0"]]


class Curious(Scripted):
    """Decides a script, and asks for a probe and for the contributions of kept seeds at every decision."""

    name = "curious"

    def decide(self, state: GrowthState) -> Decision:
        return dataclasses.replace(super().decide(state), probe=True, measure_kept=True)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_controller_sees_the_same_promises_and_contributions_as_of_the_host_alone(optimizer: str) -> None:
    """Candidates in width beside connected and kept seeds, and kept seeds whose units another seed reads."""
    task, config = small_task(), msgspec.structs.replace(CONFIG, optimizer=optimizer)
    growth = GrowthConfig(lifecycle=JOINT, blueprints=PROBED, budget=BUDGET, probe_steps=2)
    scripts: list[Script] = [
        {1: [germinate("blocks.0", "widen_50")], 3: [Fossilize(slot="blocks.0", reason="")], 4: [germinate("blocks.1", "widen_25")]},
        {0: [germinate("blocks.1", "widen_100")], 3: [germinate("blocks.0", "conv3x3")]},
    ]
    settings = host_settings(2, horizon=6)
    fleet = make_fleet(settings, growth, config, task=task)
    controllers = [Curious(script) for script in scripts]
    rows = fleet.training()
    while rows:
        fleet.decide({row: controllers[row].decide(fleet.state(row)) for row in rows})
        rows = fleet.advance()
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        alone = Curious(script)
        train_alone(task, setting, growth, config, alone)
        for expected, found in zip(alone.seen, controllers[row].seen, strict=True):
            assert_fields_close(dataclasses.asdict(found), dataclasses.asdict(expected))
        promised = [candidate.blueprint for slot in alone.seen[5].slots for candidate in slot.candidates if candidate.promise is not None]
        assert "widen_100" in promised
    kept = controllers[0].seen[-1].slots[0]
    assert kept.stage is Stage.FOSSILIZED
    assert kept.contribution is not None
    assert kept.contribution.epoch == 6


@pytest.mark.slow
def test_seeds_in_the_shadow_learn_the_same_beside_a_probe_as_in_a_host_alone() -> None:
    """A portion of the probe with width candidates ends while a seed learns in the second pass."""
    task, growth = small_task(), GrowthConfig(lifecycle=SHADOW, blueprints=PROBED, budget=BUDGET, probe_steps=2)
    script: Script = {
        0: [germinate("blocks.1", "conv3x3")],
        3: [Advance(slot="blocks.1", reason="")],
        6: [Fossilize(slot="blocks.1", reason="")],
    }
    (setting,) = host_settings(1, horizon=8)
    fleet, controller = make_fleet([setting], growth, task=task), Curious(script)
    rows = [0]
    while rows:
        fleet.decide({0: controller.decide(fleet.state(0))})
        rows = fleet.advance()
    fleet.finish([0])
    assert_row_equals(fleet, 0, train_alone(task, setting, growth, CONFIG, Curious(script)), atol=1e-10)


@pytest.mark.slow
def test_a_width_seed_that_explodes_is_rolled_back_as_in_a_host_alone() -> None:
    task = small_task()
    seed_optimizer = SeedOptimizerConfig(learning_rate_factor=300_000.0, warmup_epochs=0.0)
    growth = GrowthConfig(lifecycle=JOINT, budget=BUDGET, seed_optimizer=seed_optimizer)
    scripts: list[Script] = [{}, {4: [germinate("blocks.2", "widen_100")]}]
    settings = host_settings(2, horizon=8, learning_rate=0.001)
    fleet = train_fleet(task, settings, scripts, growth, CONFIG)
    assert [entry.outcome for entry in fleet.rows[1].lifecycles.ledger.seeds] == ["rolled back"]
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        assert_row_equals(fleet, row, train_alone(task, setting, growth, CONFIG, Scripted(script)), atol=1e-9)


def grow_beyond_the_first_room(fleet: Fleet) -> None:
    """Let a second seed widen layers in row 0 which a kept one has doubled. No seed of a new host is that large."""
    decide(fleet, 0, germinate("blocks.0", "widen_100_chain"))
    for _ in range(5):
        fleet.advance()
        is_held = fleet.state(0).slots[0].stage is Stage.HOLDING
        decide(fleet, 0, Fossilize(slot="blocks.0", reason="") if is_held else Advance(slot="blocks.0", reason=""))
    room = max(kind.layout.width for kind in fleet.seed_storages["blocks.1"].seed_kinds.values())
    decide(fleet, 0, germinate("blocks.1", "widen_1500_chain"), germinate("blocks.0#2", "conv1x1"))
    assert fleet.seed_storages["blocks.1"].tensors["weights"].shape[1] > room
    decide(fleet, 1, germinate("blocks.1", "conv3x3"))
    fleet.advance()


@pytest.mark.slow
@LIFECYCLES
def test_a_saved_fleet_with_width_seeds_goes_on_bit_for_bit(lifecycle: LifecycleConfig) -> None:
    growth, settings = GrowthConfig(lifecycle=lifecycle, budget=BUDGET), host_settings(2, horizon=12)
    fleet, resumed = make_fleet(settings, growth), make_fleet(settings, growth)
    grow_beyond_the_first_room(fleet)
    resumed.advance()
    resumed.load_state_dict(copy.deepcopy(fleet.state_dict()))
    for each in (fleet, resumed):
        for _ in range(3):
            each.advance()
        decide(each, 0, Advance(slot="blocks.1", reason=""))
        each.advance()
        each.finish([0, 1])
    assert_identical(copy_rows(fleet, [0, 1]), copy_rows(resumed, [0, 1]))
    for own, other in zip(fleet.rows, resumed.rows, strict=True):
        assert own.lifecycles.ledger == other.lifecycles.ledger
        assert own.lifecycles.history.val_losses == other.lifecycles.history.val_losses


@pytest.mark.slow
def test_a_rollback_restores_width_seeds_although_rows_have_become_wider_since() -> None:
    fleet = make_fleet(host_settings(2, horizon=12), GrowthConfig(lifecycle=JOINT, budget=BUDGET))
    decide(fleet, 1, germinate("blocks.1", "widen_25"))
    fleet.advance()
    fleet.advance()
    host, widths = fleet.rows[1], {name: tensor.shape[-1] for name, tensor in fleet.tensors().items()}
    before, lifecycles = copy_rows(fleet, [1]), copy.deepcopy(host.lifecycles.slots_state())
    host.is_given_up = True  # it does not train any more, so its snapshot stays the newest
    grow_beyond_the_first_room(fleet)
    assert any(tensor.shape[-1] > widths.get(name, math.inf) for name, tensor in fleet.tensors().items())
    with torch.no_grad():
        for tensor in fleet.tensors().values():
            tensor[1] = 0
    assert host.recovery.go_back(is_repeated=False) == 2
    fleet._pending.carry_out(fleet._snapshots)
    after = copy_rows(fleet, [1])
    assert_identical(before, {name: after[name][..., : tensor.shape[-1]] for name, tensor in before.items()})
    assert host.lifecycles.slots_state() == lifecycles


@pytest.mark.slow
def test_hosts_of_different_widths_train_in_parts_and_recomputed_as_they_do_at_once() -> None:
    growth = GrowthConfig(lifecycle=JOINT, budget=BUDGET)
    plain = msgspec.structs.replace(CONFIG, accumulate=5)
    fleets = []
    for config in (plain, msgspec.structs.replace(plain, checkpoint=True)):
        fleet = make_fleet(host_settings(3), growth, config)
        decide(fleet, 0, germinate("blocks.0", "widen_50_chain"), germinate("blocks.1", "conv3x3"))
        decide(fleet, 1, germinate("blocks.1", "widen_50"))
        fleet.advance()
        fleet.advance()
        fleets.append(fleet)
    for name, tensor in fleets[0].tensors().items():
        torch.testing.assert_close(fleets[1].tensors()[name], tensor, atol=1e-12, rtol=0)


@pytest.mark.slow
@LIFECYCLES
def test_one_step_of_width_seeds_in_lower_precision_agrees_with_float64(lifecycle: LifecycleConfig) -> None:
    growth = GrowthConfig(lifecycle=lifecycle, budget=BUDGET)
    config = msgspec.structs.replace(CONFIG, steps_per_decision=1)
    exact = make_fleet(host_settings(2), growth, config)
    decide(exact, 0, germinate("blocks.0", "widen_50_chain"))
    decide(exact, 1, germinate("blocks.1", "conv3x3"))
    for _ in range(3):
        exact.advance()
    for precision, tolerance in (("float32", 1e-5), ("bfloat16", 2e-2)):
        lower = make_fleet(host_settings(2), growth, msgspec.structs.replace(config, precision=precision))
        lower.load_state_dict(rename_dtype(copy.deepcopy(exact.state_dict()), torch.float32))
        at_once = make_fleet(host_settings(2), growth, config)
        at_once.load_state_dict(copy.deepcopy(exact.state_dict()))
        for fleet in (at_once, lower):
            fleet.advance()
        for name, tensor in at_once.tensors().items():
            found = lower.tensors()[name.replace("torch.float64", "torch.float32")]
            torch.testing.assert_close(found.to(tensor.dtype), tensor, atol=tolerance, rtol=tolerance)


def test_the_memory_of_a_host_includes_the_largest_width_seed_in_every_slot() -> None:
    def memory(*blueprints: str) -> Memory:
        return make_fleet(host_settings(1), GrowthConfig(budget=BUDGET, blueprints=blueprints)).memory_per_host()

    deep, pair, chain = memory("norm"), memory("norm", "widen_100"), memory("norm", "widen_100_chain")
    assert deep.state == pair.state == chain.state  # room for width seeds is made when they grow
    assert deep.seeds < pair.seeds < chain.seeds
    assert chain.seeds > deep.step  # the chain behind the first slot alone has as many units as the host


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_state_of_a_width_seed_is_estimated_as_the_tensors_become_wider(optimizer: str) -> None:
    config = msgspec.structs.replace(CONFIG, optimizer=optimizer)
    fleet = make_fleet(host_settings(1), GrowthConfig(lifecycle=JOINT, budget=BUDGET), config)
    before = sum(tensor.nbytes for tensor in fleet.tensors().values())
    decide(fleet, 0, germinate("blocks.0", "widen_100_chain"))
    storage = fleet.seed_storages["blocks.0"]
    kind = storage.seed_kinds["widen_100_chain"]
    assert isinstance(kind, WidthKind)
    after = sum(tensor.nbytes for tensor in fleet.tensors().values())
    assert after - before == width_bytes(kind, storage.seed_kinds, storage.make) > 0


def test_a_fleet_without_width_seeds_is_computed_as_one_network() -> None:
    fleet = make_fleet(host_settings(3))
    decide(fleet, 0, germinate("blocks.0", "conv3x3"))
    assert fleet.segment(fleet.plan([0, 1, 2]))._arrangement is None
    assert fleet.stacked_model([0, 1, 2]).arrangement is None
