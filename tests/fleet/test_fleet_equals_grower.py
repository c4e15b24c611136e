"""A row of a fleet equals the same host trained alone through `Grower`, for any decisions."""

from __future__ import annotations

import dataclasses

import pytest

from esper.fleet.config import FleetConfig, HostConfig
from esper.fleet.fleet import Fleet
from esper.growth.config import GrowthConfig, LifecycleConfig, RentConfig
from esper.growth.host.layout import Place
from esper.growth.lifecycle.stages import Advance, Fossilize, Prune, Retarget
from esper.growth.seeds.blueprints import blueprints_for
from tests.fleet.builders import (
    BATCH,
    Script,
    Scripted,
    assert_fields_close,
    assert_row_equals,
    germinate,
    make_host,
    small_task,
    train_alone,
    train_fleet,
)


@pytest.mark.slow
def test_a_row_stops_at_a_plateau_as_the_same_host_alone_does() -> None:
    """One host learns nothing and stops at once, unless a seed is on its way; the other goes on to its horizon."""
    task = small_task()
    growth = GrowthConfig(lifecycle=LifecycleConfig(holding_epochs=1, embargo_epochs=1), patience=1)
    config = FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64", weight_decay=0.0)
    settings = [HostConfig(seed=1, growth_seed=1, horizon=7, learning_rate=rate) for rate in (1e-30, 1e-30, 0.003)]
    scripts: list[Script] = [{}, {1: [germinate("blocks.0", "norm")], 3: [Prune(slot="blocks.0", reason="")]}, {}]
    fleet = train_fleet(task, settings, scripts, growth, config)
    grown = [train_alone(task, setting, growth, config, Scripted(script)) for setting, script in zip(settings, scripts, strict=True)]
    assert [host.lifecycles.epoch for host in fleet.rows] == [one.epochs for one in grown]
    assert [one.status for one in grown] == ["stopped early", "stopped early", "finished"], [one.epochs for one in grown]
    assert grown[0].epochs < grown[1].epochs < 7
    for row, one in enumerate(grown):
        assert_row_equals(fleet, row, one, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_row_equals_the_same_host_alone_through_joint_lives(optimizer: str) -> None:
    """Hosts with other seeds in other places at other times, kept, pruned and moved, beside one that never grows."""
    task = small_task()
    growth = GrowthConfig(lifecycle=LifecycleConfig(holding_epochs=1, embargo_epochs=1))
    config = FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64", optimizer=optimizer)
    scripts: list[Script] = [
        {},
        {0: [germinate("blocks.0", "conv3x3")], 3: [Fossilize(slot="blocks.0", reason="")], 4: [germinate("blocks.2", "norm")]},
        {
            1: [germinate("blocks.1", "bottleneck"), germinate("blocks.2", "conv3x3")],
            3: [Prune(slot="blocks.1", reason="")],
            5: [Fossilize(slot="blocks.2", reason="")],
        },
        {2: [germinate("blocks.0", "squeeze_excite")], 4: [Retarget(slot="blocks.0", reason="", alpha=0.5)]},
    ]
    settings = [HostConfig(seed=row, growth_seed=10 + row, horizon=8, learning_rate=0.01 / (1 + row)) for row in range(len(scripts))]
    fleet = train_fleet(task, settings, scripts, growth, config)
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        assert_row_equals(fleet, row, train_alone(task, setting, growth, config, Scripted(script)), atol=1e-9)


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
        {0: [germinate("blocks.1", "conv3x3")], 2: [Advance(slot="blocks.1", reason="")], 6: [Fossilize(slot="blocks.1", reason="")]},
        {
            1: [germinate("blocks.0", "conv1x1"), germinate("blocks.2", "bottleneck")],
            3: [Advance(slot="blocks.2", reason="")],
            4: [germinate("blocks.1", "norm")],
            6: [Prune(slot="blocks.0", reason="")],
            7: [Fossilize(slot="blocks.2", reason="")],
        },
        {
            0: [germinate("blocks.2", "depthwise")],
            2: [Advance(slot="blocks.2", reason="", epochs=1, curve="sigmoid_12", alpha=0.6), germinate("blocks.0", "conv3x3")],
            5: [Prune(slot="blocks.2", reason="", epochs=3, curve="linear")],
        },
    ]
    settings = [HostConfig(seed=row, growth_seed=10 + row, horizon=9, learning_rate=0.01) for row in range(len(scripts))]
    fleet = train_fleet(task, settings, scripts, growth, config)
    assert any(entry.outcome == "kept" for host in fleet.rows for entry in host.lifecycles.ledger.seeds)
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        assert_row_equals(fleet, row, train_alone(task, setting, growth, config, Scripted(script)), atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("blending", ["add", "multiply", "gate"])
def test_every_blueprint_equals_itself_alone(blending: str) -> None:
    """One host for each blueprint, in the same slot at the same time, with horizons of their own: some end before the others."""
    task = small_task()
    growth = GrowthConfig(lifecycle=LifecycleConfig(holding_epochs=1, blending=blending))
    config = FleetConfig(batch_size=BATCH, validation_batch=60, precision="float64")
    names = [blueprint.name for blueprint in blueprints_for(Place("", "conv", (6, 2, 2)))]
    scripts: list[Script] = [{1: [germinate("blocks.1", name)], 3: [Fossilize(slot="blocks.1", reason="")]} for name in names]
    settings = [HostConfig(seed=row, growth_seed=row, horizon=4 + row % 2, learning_rate=0.01) for row in range(len(names))]
    fleet = train_fleet(task, settings, scripts, growth, config)
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        assert_row_equals(fleet, row, train_alone(task, setting, growth, config, Scripted(script)), atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("raise_mode", ["joint", "shadow"])
def test_a_controller_sees_the_same_of_a_row_as_of_the_host_alone(raise_mode: str) -> None:
    """Every number of every state, from the first decision to the last."""
    lifecycle = LifecycleConfig(raise_mode=raise_mode, training_epochs=1, holding_epochs=1, blend_epochs=1)
    task, growth = small_task(), GrowthConfig(lifecycle=lifecycle)
    config = FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64")
    script: Script = {
        1: [germinate("blocks.1", "conv3x3")],
        2: [germinate("blocks.0", "norm"), Advance(slot="blocks.1", reason="")],
        4: [Fossilize(slot="blocks.1", reason=""), Prune(slot="blocks.0", reason="")],
    }
    setting = HostConfig(seed=3, growth_seed=5, horizon=7, learning_rate=0.01, rent=RentConfig(parameters=0.2, flops=0.1))
    one, other = Scripted(script), Scripted(script)
    train_alone(task, setting, growth, config, one)
    fleet = Fleet(task, make_host, hosts=2, growth=growth, config=config)
    fleet.reset({0: HostConfig(seed=1, horizon=7), 1: setting})
    rows = [0, 1]
    while rows:
        fleet.decide({1: other.decide(fleet.state(1))})
        rows = fleet.advance()
    assert len(one.seen) == len(other.seen) == 8
    for expected, found in zip(one.seen, other.seen, strict=True):
        assert_fields_close(dataclasses.asdict(found), dataclasses.asdict(expected))
