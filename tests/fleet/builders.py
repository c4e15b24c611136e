"""Small tasks, hosts and fleets, and one host trained alone, for the tests of fleets."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import esper
from esper.fleet import Fleet, FleetConfig, HostConfig
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.growth.lifecycle.ledger import SeedRecord
from esper.growth.lifecycle.stages import Action, Advance, Controller, Decision, Fossilize, Germinate, GrowthState
from esper.tasks import BatchLoader, ConvHost, Split, Task, load_task
from esper.tasks.gpt_host import GPTHost
from tests.conftest import sync_debug_mode

SLOTS = ("blocks.0", "blocks.1", "blocks.2")
BATCH = 25
CONFIG = FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64")
JOINT = LifecycleConfig(holding_epochs=1, embargo_epochs=1)
SHADOW = LifecycleConfig(raise_mode="shadow", training_epochs=2, minimum_health=0.0, blend_epochs=1, holding_epochs=1)
LIFECYCLES = pytest.mark.parametrize("lifecycle", [JOINT, SHADOW], ids=["joint", "shadow"])

MakeHost = Callable[[int], nn.Module]
Script = Mapping[int, Sequence[Action]]  # epoch -> the actions decided then
State = dict[str, Tensor]


class Scripted:
    """A controller that decides the actions of a script and keeps the states it was shown."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[GrowthState] = []

    def decide(self, state: GrowthState) -> Decision:
        self.seen.append(state)
        return Decision(tuple(self.script.get(state.epoch, ())))


# Tasks and hosts


def small_task(*, train: int = 100, others: int = 60) -> Task:
    task = load_task("digits")
    return Task(
        name="some digits",
        title="",
        source="",
        num_classes=10,
        train=Split(task.train.inputs[:train].double(), task.train.targets[:train]),
        validation=Split(task.validation.inputs[:others].double(), task.validation.targets[:others]),
        test=Split(task.test.inputs[:others].double(), task.test.targets[:others]),
        hosts={},
        batch_size=BATCH,
    )


def text_task(*, train: int = 100, others: int = 60) -> Task:
    task = load_task("text", sequence_length=8, batch_size=BATCH)
    parts = {name: Split(split.inputs[:count], split.targets[:count]) for name, split, count in (
        ("train", task.train, train), ("validation", task.validation, others), ("test", task.test, others)
    )}  # fmt: skip
    return replace(task, **parts)


def build_seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a host in float64 from its seed, without moving the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build().double()


def make_host(seed: int) -> nn.Module:
    return build_seeded(seed, lambda: ConvHost(1, 10, (4, 6, 8)))


def make_gpt_host(seed: int) -> nn.Module:
    """Build a host for `text_task`."""
    classes = text_task().num_classes
    return build_seeded(seed, lambda: GPTHost(classes, sequence_length=8, width=8, layers=2, heads=2))


# Fleets


def host_settings(count: int, **changes: Any) -> list[HostConfig]:
    return [HostConfig(**{"seed": row, "growth_seed": row, "horizon": 8, "learning_rate": 0.01, **changes}) for row in range(count)]


def make_fleet(
    settings: list[HostConfig],
    growth: GrowthConfig | None = None,
    config: FleetConfig = CONFIG,
    *,
    task: Task | None = None,
    make_host: MakeHost = make_host,
    device: str = "cpu",
) -> Fleet:
    growth = growth or GrowthConfig(lifecycle=JOINT)
    fleet = Fleet(task or small_task(), make_host, hosts=len(settings), growth=growth, config=config, device=device)
    fleet.reset(dict(enumerate(settings)))
    return fleet


def germinate(slot: str, blueprint: str) -> Germinate:
    return Germinate(slot=slot, reason="planned", blueprint=blueprint)


def decide(fleet: Fleet, row: int, *actions: Action) -> None:
    fleet.decide({row: Decision(actions)})


def germinate_in_every_slot(fleet: Fleet, row: int, blueprints: tuple[str, str, str] = ("conv3x3", "bottleneck", "norm")) -> None:
    decide(fleet, row, *(germinate(slot, blueprint) for slot, blueprint in zip(SLOTS, blueprints, strict=True)))


def advance_and_fossilize(fleet: Fleet, row: int, slot: str, *, epochs: int) -> None:
    """Let a seed blend in, train for some epochs, fossilize it, and train for one more."""
    decide(fleet, row, Advance(slot=slot, reason=""))
    for _ in range(epochs):
        fleet.advance()
    decide(fleet, row, Fossilize(slot=slot, reason=""))
    fleet.advance()


def copy_rows(fleet: Fleet, rows: list[int]) -> State:
    """Copy every tensor of these hosts."""
    return {name: tensor[rows].clone() for name, tensor in fleet.tensors().items()}


def assert_identical(first: State, second: State) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def rename_dtype(state: Any, dtype: torch.dtype) -> Any:
    """Rename the keys of a float64 fleet's state as a fleet of another dtype names them."""
    if not isinstance(state, dict):
        return state
    return {name.replace("torch.float64", str(dtype)): rename_dtype(value, dtype) for name, value in state.items()}


def enlarge_head(fleet: Fleet, row: int) -> None:
    """Enlarge the head until gradients overflow at the first scale, and nothing in the forward pass does."""
    with torch.no_grad():
        fleet.host.rows.tensors()["head.weight"][row] *= 1000


def assert_waits_once(fleet: Fleet) -> None:
    """Check that training up to the next decision synchronises with the device once."""
    torch.cuda.synchronize()
    with sync_debug_mode("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fleet.advance()
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    assert len(waits) == 1, [f"{warning.filename}:{warning.lineno}" for warning in waits]


def step_in_two_precisions(
    lifecycle: LifecycleConfig, precision: str, *, epochs: int, tolerance: float, device: str = "cpu"
) -> tuple[Fleet, Fleet]:
    """Take one step in float64 and one in another precision from the same trained state, and compare all weights."""
    growth, settings = GrowthConfig(lifecycle=lifecycle, probe_steps=2), host_settings(3, horizon=20)
    config = msgspec.structs.replace(CONFIG, steps_per_decision=1)
    exact = make_fleet(settings, growth, config, device=device)
    germinate_in_every_slot(exact, 0)
    germinate_in_every_slot(exact, 1, ("squeeze_excite", "depthwise", "wide_conv3x3"))
    for _ in range(epochs):
        exact.advance()
    lower = make_fleet(settings, growth, msgspec.structs.replace(config, precision=precision), device=device)
    lower.load_state_dict(rename_dtype(copy.deepcopy(exact.state_dict()), torch.float32))
    for fleet in (exact, lower):
        fleet.advance()
    for name, tensor in exact.host.rows.tensors().items():
        torch.testing.assert_close(lower.host.rows.tensors()[name].to(tensor.dtype), tensor, atol=tolerance, rtol=tolerance)
    for slot, storage in exact.seed_storages.items():
        weights = lower.seed_storages[slot].tensors["weights"].double()
        torch.testing.assert_close(weights, storage.tensors["weights"], atol=tolerance, rtol=tolerance)
    return exact, lower


# A row beside the same host alone


def train_alone(
    task: Task,
    setting: HostConfig,
    growth: GrowthConfig,
    config: FleetConfig,
    controller: object,
    *,
    make_host: MakeHost = make_host,
    loss_fn: Callable[..., Tensor] = nn.functional.cross_entropy,
) -> esper.Grown:
    """Train the host of one row through `grow`, with the data, the optimiser and the schedule that it has in a fleet."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if config.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=setting.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay)
        return torch.optim.AdamW(parameters, lr=setting.learning_rate, weight_decay=config.weight_decay)

    return esper.grow(
        make_host(setting.seed),
        BatchLoader(task.train.inputs, task.train.targets, batch_size=BATCH, seed=setting.seed),
        BatchLoader(task.validation.inputs, task.validation.targets, batch_size=config.validation_batch),
        loss_fn=loss_fn,
        epochs=setting.horizon,
        optimizer=optimizer,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=setting.horizon),
        controller=controller,
        keep=config.keep,
        config=msgspec.structs.replace(growth, seed=setting.growth_seed, rent=setting.rent),
    )


def train_fleet(
    task: Task,
    settings: list[HostConfig],
    scripts: list[Script],
    growth: GrowthConfig,
    config: FleetConfig,
    *,
    make_host: MakeHost = make_host,
) -> Fleet:
    """Train one host per script until all of them have finished."""
    fleet = make_fleet(settings, growth, config, task=task, make_host=make_host)
    controllers = [Scripted(script) for script in scripts]

    def decide_all(rows: Iterable[int]) -> None:
        fleet.decide({row: controllers[row].decide(fleet.state(row)) for row in rows})

    decide_all(range(len(settings)))
    while fleet.training():
        decide_all(fleet.advance())
    fleet.finish(range(len(settings)))
    return fleet


def train_in_fleet(task: Task, setting: HostConfig, growth: GrowthConfig, config: FleetConfig, controller: Controller) -> Fleet:
    """Train one host as a fleet of its own, up to its last decision. See `train_alone`."""
    fleet = Fleet(task, make_host, hosts=1, growth=growth, config=config)
    fleet.reset({0: setting})
    rows = [0]
    while rows:
        fleet.decide({0: controller.decide(fleet.state(0))})
        rows = fleet.advance()
    return fleet


def wide_state(fleet: Fleet, row: int) -> State:
    """Return the state of a host with its kept width seeds as parts of its layers."""
    model = fleet.stacked_model([row], only_kept=True)
    if model.arrangement is None:
        return fleet.host.rows.state_dict_of(row)
    (tensors,) = model.wide_tensors
    return {name: tensor[0] for name, tensor in tensors.items()}


def assert_row_equals(fleet: Fleet, row: int, grown: esper.Grown, *, atol: float) -> None:
    """Check that a row has the ledger, the losses and the weights of the host that was trained alone."""
    lifecycles = fleet.rows[row].lifecycles
    assert [(entry.slot, entry.blueprint, entry.outcome, [step.stage for step in entry.stages]) for entry in lifecycles.ledger.seeds] == [
        (entry.slot, entry.blueprint, entry.outcome, [step.stage for step in entry.stages]) for entry in grown.ledger.seeds
    ]
    assert lifecycles.ledger.refused == grown.ledger.refused
    torch.testing.assert_close(lifecycles.history.val_losses, list(grown.val_losses), atol=atol, rtol=0)
    torch.testing.assert_close(lifecycles.history.train_losses, list(grown.train_losses), atol=1e-6, rtol=0)
    for entry, other in zip(lifecycles.ledger.seeds, grown.ledger.seeds, strict=True):
        if other.gain is not None:
            torch.testing.assert_close(entry.gain, other.gain, atol=atol, rtol=0)
    # The width seeds of the host that was trained alone are folded into its layers.
    state = grown.model.state_dict()
    for name, tensor in wide_state(fleet, row).items():
        torch.testing.assert_close(tensor, state[name], atol=atol, rtol=0)
    for slot, backend in lifecycles.occupied():
        if backend.wide:
            continue
        seed_kind = fleet.seed_storages[slot].seed_kinds[str(backend.seed.blueprint)]
        flat = fleet.seed_storages[slot].tensors["weights"][row : row + 1, : seed_kind.layout.width]
        for name, weight in seed_kind.layout.unflatten(flat).items():
            suffix = "" if not backend.place.earlier else f"_{backend.place.earlier + 1}"
            start, end = f"{backend.place.module}.", f".esper_seed{suffix}.{name}"
            (grown_weight,) = (state[key] for key in state if key.startswith(start) and key.endswith(end))
            torch.testing.assert_close(weight[0], grown_weight, atol=atol, rtol=0)


NOT_IN_FLEETS = {"rent", "alpha", "age", "health", "skipped"}  # what a fleet does not tell of a seed at the end of an epoch


def assert_fields_close(found: object, expected: object, where: str = "state") -> None:
    """Compare numbers to 1e-6, for a single run keeps training losses in float32, and everything else exactly."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_fields_close(found[name], value, f"{where}.{name}")
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple)
        assert len(found) == len(expected), where
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_fields_close(mine, theirs, f"{where}[{number}]")
    elif isinstance(expected, msgspec.Struct):
        assert isinstance(found, type(expected))
        mine, theirs = (msgspec.structs.asdict(one) for one in (found, expected))
        for name in mine.keys() - (NOT_IN_FLEETS if isinstance(expected, SeedRecord) else set()):
            assert_fields_close(mine[name], theirs[name], f"{where}.{name}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-6, rel=1e-5), where
    else:
        assert found == expected, where
