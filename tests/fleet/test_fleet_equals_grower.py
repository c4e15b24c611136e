"""A row of a fleet is the same host trained alone through `Grower`, whatever is decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import pytest
import torch
from torch import nn

import esper
from esper.fleet.config import FleetConfig, HostConfig
from esper.fleet.fleet import Fleet
from esper.growth.config import GrowthConfig, LifecycleConfig, RentConfig
from esper.growth.host.layout import Place
from esper.growth.lifecycle.stages import Action, Advance, Decision, Fossilize, Germinate, GrowthState, Prune, Retarget
from esper.growth.seeds.blueprints import blueprints_for
from esper.tasks import BatchLoader, ConvHost, Split, Task, load_task

SLOTS = ("blocks.0", "blocks.1", "blocks.2")
BATCH = 25
Script = Mapping[int, Sequence[Action]]  # epoch -> what is decided then


class Scripted:
    """Decides what is written, epoch by epoch."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[GrowthState] = []

    def decide(self, state: GrowthState) -> Decision:
        self.seen.append(state)
        return Decision(tuple(self.script.get(state.epoch, ())))


def small_task() -> Task:
    task = load_task("digits")
    return Task(
        name="some digits",
        title="",
        source="",
        num_classes=10,
        train=Split(task.train.inputs[:100].double(), task.train.targets[:100]),
        validation=Split(task.validation.inputs[:60].double(), task.validation.targets[:60]),
        test=Split(task.test.inputs[:60].double(), task.test.targets[:60]),
        hosts={},
        batch_size=BATCH,
    )


def make_host(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return ConvHost(1, 10, (4, 6, 8)).double()


def alone(
    task: Task, setting: HostConfig, script: Script, growth: GrowthConfig, config: FleetConfig, controller: Scripted | None = None
) -> esper.Grown:
    def optimizer(parameters):
        if config.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=setting.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay)
        return torch.optim.AdamW(parameters, lr=setting.learning_rate, weight_decay=config.weight_decay)

    return esper.grow(
        make_host(setting.seed),
        BatchLoader(task.train.inputs, task.train.targets, batch_size=BATCH, seed=setting.seed),
        BatchLoader(task.validation.inputs, task.validation.targets, batch_size=config.validation_batch),
        loss_fn=nn.functional.cross_entropy,
        epochs=setting.horizon,
        optimizer=optimizer,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=setting.horizon),
        controller=controller or Scripted(script),
        config=msgspec.structs.replace(growth, seed=setting.growth_seed, rent=setting.rent),
    )


def together(task: Task, settings: list[HostConfig], scripts: list[Script], growth: GrowthConfig, config: FleetConfig) -> Fleet:
    fleet = Fleet(task, make_host, hosts=len(settings), growth=growth, config=config)
    fleet.reset(dict(enumerate(settings)))
    controllers = [Scripted(script) for script in scripts]

    def decide(rows):
        fleet.decide({row: controllers[row].decide(fleet.state(row)) for row in rows})

    decide(range(len(settings)))
    while fleet.training():
        decide(fleet.advance())
    fleet.finish(range(len(settings)))
    return fleet


def assert_same(fleet: Fleet, row: int, grown: esper.Grown, *, atol: float) -> None:
    host_growth = fleet.rows[row].host_growth
    assert [(entry.slot, entry.blueprint, entry.outcome, [step.stage for step in entry.steps]) for entry in host_growth.ledger.entries] == [
        (entry.slot, entry.blueprint, entry.outcome, [step.stage for step in entry.steps]) for entry in grown.ledger.entries
    ]
    assert host_growth.ledger.refused == grown.ledger.refused
    torch.testing.assert_close(host_growth.history.val_losses, list(grown.val_losses), atol=atol, rtol=0)
    torch.testing.assert_close(host_growth.history.train_losses, list(grown.train_losses), atol=1e-6, rtol=0)
    for entry, other in zip(host_growth.ledger.entries, grown.ledger.entries, strict=True):
        if other.gain is not None:
            torch.testing.assert_close(entry.gain, other.gain, atol=atol, rtol=0)
    state = grown.model.state_dict()
    for name, tensor in fleet.host.rows.state_dict_of(row).items():
        torch.testing.assert_close(tensor, state[name], atol=atol, rtol=0)
    for slot, backend in host_growth.lifecycles.occupied():
        seed_kind = fleet.seed_storages[slot].seed_kinds[str(backend.life.blueprint)]
        flat = fleet.seed_storages[slot].tensors["weights"][row : row + 1, : seed_kind.layout.width]
        for name, weight in seed_kind.layout.unflatten(flat).items():
            (grown_weight,) = (state[key] for key in state if key.startswith(f"{slot}.") and key.endswith(f".esper_seed.{name}"))
            torch.testing.assert_close(weight[0], grown_weight, atol=atol, rtol=0)


def germinate(slot: str, blueprint: str) -> Germinate:
    return Germinate(slot, "planned", blueprint)


@pytest.mark.slow
def test_a_row_stops_at_a_plateau_as_the_same_host_alone_does() -> None:
    """One host learns nothing and stops at once, unless a seed is on its way; the other goes on to its horizon."""
    task = small_task()
    growth = GrowthConfig(lifecycle=LifecycleConfig(holding_epochs=1, embargo_epochs=1), patience=1)
    config = FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64", weight_decay=0.0)
    settings = [HostConfig(seed=1, growth_seed=1, horizon=7, learning_rate=rate) for rate in (1e-30, 1e-30, 0.003)]
    scripts: list[Script] = [{}, {1: [germinate("blocks.0", "norm")], 3: [Prune("blocks.0", "")]}, {}]
    fleet = together(task, settings, scripts, growth, config)
    grown = [alone(task, setting, script, growth, config) for setting, script in zip(settings, scripts, strict=True)]
    assert [host.host_growth.epoch for host in fleet.rows] == [one.epochs for one in grown]
    assert [one.status for one in grown] == ["stopped early", "stopped early", "finished"], [one.epochs for one in grown]
    assert grown[0].epochs < grown[1].epochs < 7
    for row, one in enumerate(grown):
        assert_same(fleet, row, one, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_row_equals_the_same_host_alone_through_joint_lives(optimizer: str) -> None:
    """Hosts with other seeds in other places at other times, kept, pruned and moved, beside one that never grows."""
    task = small_task()
    growth = GrowthConfig(lifecycle=LifecycleConfig(holding_epochs=1, embargo_epochs=1))
    config = FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64", optimizer=optimizer)
    scripts: list[Script] = [
        {},
        {0: [germinate("blocks.0", "conv3x3")], 3: [Fossilize("blocks.0", "")], 4: [germinate("blocks.2", "norm")]},
        {
            1: [germinate("blocks.1", "bottleneck"), germinate("blocks.2", "conv3x3")],
            3: [Prune("blocks.1", "")],
            5: [Fossilize("blocks.2", "")],
        },
        {2: [germinate("blocks.0", "squeeze_excite")], 4: [Retarget("blocks.0", "", 0.5)]},
    ]
    settings = [HostConfig(seed=row, growth_seed=10 + row, horizon=8, learning_rate=0.01 / (1 + row)) for row in range(len(scripts))]
    fleet = together(task, settings, scripts, growth, config)
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        assert_same(fleet, row, alone(task, setting, script, growth, config), atol=1e-9)


@pytest.mark.slow
def test_a_row_equals_the_same_host_alone_through_lives_in_the_shadow() -> None:
    """Seeds that learn in a second pass, in one slot and in several, behind connected ones and before them."""
    task = small_task()
    growth = GrowthConfig(
        lifecycle=LifecycleConfig(
            raise_mode="shadow",
            training_epochs=2,
            blend_epochs=2,
            holding_epochs=1,
            embargo_epochs=1,
            alpha_target=0.8,
            alpha_curve="cosine",
        )
    )
    config = FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64")
    scripts: list[Script] = [
        {},
        {0: [germinate("blocks.1", "conv3x3")], 2: [Advance("blocks.1", "")], 6: [Fossilize("blocks.1", "")]},
        {
            1: [germinate("blocks.0", "conv1x1"), germinate("blocks.2", "bottleneck")],
            3: [Advance("blocks.2", "")],
            4: [germinate("blocks.1", "norm")],
            6: [Prune("blocks.0", "")],
            7: [Fossilize("blocks.2", "")],
        },
        {
            0: [germinate("blocks.2", "depthwise")],
            2: [Advance("blocks.2", ""), germinate("blocks.0", "conv3x3")],
            5: [Prune("blocks.2", "")],
        },
    ]
    settings = [HostConfig(seed=row, growth_seed=10 + row, horizon=9, learning_rate=0.01) for row in range(len(scripts))]
    fleet = together(task, settings, scripts, growth, config)
    assert any(entry.outcome == "kept" for host in fleet.rows for entry in host.host_growth.ledger.entries)
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        assert_same(fleet, row, alone(task, setting, script, growth, config), atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("blending", ["add", "multiply", "gate"])
def test_every_blueprint_equals_itself_alone(blending: str) -> None:
    """One host for each blueprint, in the same slot at the same time, with horizons of their own: some end before the others."""
    task = small_task()
    growth = GrowthConfig(lifecycle=LifecycleConfig(holding_epochs=1, blending=blending))
    config = FleetConfig(batch_size=BATCH, validation_batch=60, precision="float64")
    names = [blueprint.name for blueprint in blueprints_for(Place("", "conv", (6, 2, 2)))]
    scripts: list[Script] = [{1: [germinate("blocks.1", name)], 3: [Fossilize("blocks.1", "")]} for name in names]
    settings = [HostConfig(seed=row, growth_seed=row, horizon=4 + row % 2, learning_rate=0.01) for row in range(len(names))]
    fleet = together(task, settings, scripts, growth, config)
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        assert_same(fleet, row, alone(task, setting, script, growth, config), atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("raise_mode", ["joint", "shadow"])
def test_a_controller_sees_the_same_of_a_row_as_of_the_host_alone(raise_mode: str) -> None:
    """Every number of every state, from the first decision to the last."""
    lifecycle = LifecycleConfig(raise_mode=raise_mode, training_epochs=1, holding_epochs=1, blend_epochs=1)
    task, growth = small_task(), GrowthConfig(lifecycle=lifecycle)
    config = FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64")
    script: Script = {
        1: [germinate("blocks.1", "conv3x3")],
        2: [germinate("blocks.0", "norm"), Advance("blocks.1", "")],
        4: [Fossilize("blocks.1", ""), Prune("blocks.0", "")],
    }
    setting = HostConfig(seed=3, growth_seed=5, horizon=7, learning_rate=0.01, rent=RentConfig(parameters=0.2, flops=0.1))
    one, other = Scripted(script), Scripted(script)
    alone(task, setting, script, growth, config, one)
    fleet = Fleet(task, make_host, hosts=2, growth=growth, config=config)
    fleet.reset({0: HostConfig(seed=1, horizon=7), 1: setting})
    rows = [0, 1]
    while rows:
        fleet.decide({1: other.decide(fleet.state(1))})
        rows = fleet.advance()
    assert len(one.seen) == len(other.seen) == 8
    for expected, found in zip(one.seen, other.seen, strict=True):
        assert_alike(dataclasses.asdict(found), dataclasses.asdict(expected))


def assert_alike(found: object, expected: object, where: str = "state") -> None:
    """Numbers to 1e-6, for a single run notes training losses in float32; all else exactly."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_alike(found[name], value, f"{where}.{name}")
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple)
        assert len(found) == len(expected), where
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_alike(mine, theirs, f"{where}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-6, rel=1e-5), where
    else:
        assert found == expected, where
