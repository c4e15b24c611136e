"""Small hosts, data and loops for the tests of growth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from esper.growth import Grower, Grown, GrowthConfig, Planned, Slotted, add_slots, grow
from esper.growth.config import LifecycleConfig
from esper.growth.lifecycle.ledger import SeedRecord
from esper.growth.lifecycle.stages import Action, Decision, GrowthState, Trial
from esper.growth.metrics import accuracy
from esper.growth.training import default_optimizer
from esper.runs import Event
from esper.statistics import Interval

Batch = tuple[Tensor, Tensor]
Data = list[Batch]

QUICK = LifecycleConfig(training_epochs=1, blend_epochs=1, holding_epochs=1, withdraw_epochs=1, embargo_epochs=1)
QUICK_SHADOW = LifecycleConfig(
    raise_mode="shadow", training_epochs=1, blend_epochs=1, holding_epochs=1, withdraw_epochs=1, embargo_epochs=1
)


class Host(nn.Module):
    """Batch norm and dropout, and a ReLU that works in place behind the first slot."""

    def __init__(self, *, dropout: float = 0.2, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.after = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Dropout(dropout))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.second(self.after(self.first(x))))
        return output


SLOTS = ("first", "second")


def make_host(seed: int = 0, *, dtype: torch.dtype = torch.float32, **options: Any) -> Host:
    torch.manual_seed(seed)
    return Host(**options).to(dtype)


def make_data(batches: int = 4, *, seed: int = 1, size: int = 8, dtype: torch.dtype = torch.float32) -> Data:
    """Something that can be learned: the class is that of the largest of three sums."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(size, 6, generator=generator).to(dtype) for _ in range(batches)]
    return [(x, (x[:, :3] * x[:, 3:]).argmax(dim=1)) for x in inputs]


def config(lifecycle: LifecycleConfig = QUICK, **others: Any) -> GrowthConfig:
    return GrowthConfig(lifecycle=lifecycle, **others)


@dataclass
class Script:
    """Decides what it is told for an epoch, and nothing else."""

    actions: Mapping[int, Sequence[Action]] = field(default_factory=dict)
    probes: Sequence[int] = ()
    not_probed: frozenset[tuple[str, str]] = frozenset()
    trials: Mapping[int, Sequence[Trial]] = field(default_factory=dict)
    name: str = "script"
    states: list[GrowthState] = field(default_factory=list)

    def decide(self, state: GrowthState) -> Decision:
        self.states.append(state)
        actions = tuple(self.actions.get(state.epoch, ()))
        trials = tuple(self.trials.get(state.epoch, ()))
        return Decision(actions, "as written", probe=state.epoch in self.probes, not_probed=self.not_probed, trials=trials)

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclass
class Loop:
    """A user's own training loop."""

    host: nn.Module
    optimizer: Optimizer
    slotted: Slotted
    grower: Grower
    data: Data
    val: Data
    events: list[Event]
    losses: list[float] = field(default_factory=list)

    def epoch(self, *, epochs: int = 1) -> None:
        for _ in range(epochs):
            for x, y in self.data:
                self.step(x, y)
            self.grower.after_epoch(self.evaluate)

    def step(self, x: Tensor, y: Tensor) -> None:
        loss = cross_entropy(self.slotted(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.grower.after_step(loss, closure=lambda: cross_entropy(self.slotted(x), y), samples=len(x))

    def step_host(self) -> None:
        """A step that the grower is still to be told of."""
        cross_entropy(self.slotted(self.data[0][0]), self.data[0][1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> list[Tensor]:
        self.host.eval()
        with torch.no_grad():
            return [cross_entropy(self.slotted(x), y) for x, y in self.val]


def make_loop(
    controller: Any = "never",
    settings: GrowthConfig | None = None,
    *,
    host: nn.Module | None = None,
    make_optimizer: MakeOptimizer = sgd,
    dtype: torch.dtype = torch.float32,
    slots: Sequence[str] = SLOTS,
    **options: Any,
) -> Loop:
    host = make_host(dtype=dtype) if host is None else host
    optimizer = make_optimizer(host)
    events: list[Event] = []
    slotted = add_slots(host, torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).to(dtype), slots=list(slots))
    grower = Grower(slotted, optimizer, controller=controller, config=settings or config(), on_event=events.append, **options)
    return Loop(host, optimizer, slotted, grower, make_data(dtype=dtype), make_data(3, seed=2, dtype=dtype), events)


def grow_small(val_data: Data | None = None, **options: Any) -> Grown:
    """Grow the small host for three epochs, with one planned seed and the accuracy beside the loss. `options` are those of `grow`."""
    given: dict[str, Any] = {
        "epochs": 3,
        "controller": Planned([(0, SLOTS[0], "mlp")]),
        "config": config(slots=SLOTS),
        "metrics": {"accuracy": accuracy},
        **({} if "step_loss" in options else {"loss_fn": cross_entropy}),
    }
    return grow(make_host(), make_data(), val_data or make_data(2), **{**given, **options})


def plain_losses(host: nn.Module, optimizer: Optimizer, data: Data, *, epochs: int) -> list[float]:
    """The same loop without any of ours."""
    losses = []
    for _ in range(epochs):
        for x, y in data:
            loss = cross_entropy(host(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def in_other_units(state: GrowthState, factor: float) -> GrowthState:
    """The same host whose loss is `factor` times as large."""
    assert state.scale is not None

    def times(interval: Interval) -> Interval:
        return Interval(factor * interval.estimate, factor * interval.low, factor * interval.high)

    slots = [
        replace(
            slot,
            rent=factor * slot.rent,
            candidates=tuple(
                replace(one, rent=factor * one.rent, promise=None if one.promise is None else factor * one.promise)
                for one in slot.candidates
            ),
            contribution=slot.contribution and replace(slot.contribution, gain=times(slot.contribution.gain)),
            gradients=slot.gradients
            and replace(slot.gradients, mean_norm=factor * slot.gradients.mean_norm, max_norm=factor * slot.gradients.max_norm),
        )
        for slot in state.slots
    ]
    return replace(
        state,
        slots=tuple(slots),
        train_losses=tuple(factor * loss for loss in state.train_losses),
        val_losses=tuple(factor * loss for loss in state.val_losses),
        scale=replace(state.scale, uninformed=factor * state.scale.uninformed, range=factor * state.scale.range),
    )


def snapshot(*parts: nn.Module | Optimizer) -> list[dict[str, Any]]:
    """Copies of the host's and the optimiser's states, without seeds."""
    return [copy.deepcopy(host_state(part) if isinstance(part, nn.Module) else part.state_dict()) for part in parts]


def host_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model without the seeds in its slots."""
    return {name: tensor for name, tensor in model.state_dict().items() if ".esper_seed" not in name}


def assert_same(one: Any, other: Any, *, place: str = "") -> None:
    """The same tree, to the last bit."""
    assert type(one) is type(other), place
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same(one[key], other[key], place=f"{place}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, place=f"{place}/{index}")
    elif isinstance(one, Tensor):
        assert torch.equal(one, other), place
    else:
        assert one == other, place


class SAM(Optimizer):
    """Sharpness-aware minimisation as it is commonly written: two passes, the second at perturbed weights."""

    def __init__(self, parameters: Any, base: type[Optimizer], rho: float = 0.05, **settings: Any) -> None:
        super().__init__(parameters, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.add_(parameter.grad * self.param_groups[0]["rho"] / norm)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Callable[[], Any]) -> None:
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


def plain_training(
    host: nn.Module,
    loader,
    *,
    epochs: int,
    schedule=None,
    optimizer=default_optimizer,
    precision: torch.dtype | None = None,
    max_grad_norm: float | None = None,
    per_step: bool = False,
) -> nn.Module:
    """Train a copy of the host by a plain loop of torch, and return it."""
    host = copy.deepcopy(host)
    device = next(host.parameters()).device.type
    optimizer = optimizer(host.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    scaler = torch.amp.GradScaler(device, enabled=precision is torch.float16)
    for _ in range(epochs):
        host.train()
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=precision, enabled=precision is not None):
                loss = cross_entropy(host(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            if max_grad_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(host.parameters(), max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            if scheduler is not None and per_step:
                scheduler.step()
        if scheduler is not None and not per_step:
            scheduler.step()
    return host


def seed_record(blueprint: str, *, slot: str = "a") -> SeedRecord:
    """Return the record of a seed that has just been born."""
    return SeedRecord(1, slot, blueprint, "joint", born=0, reason="test", parameters=0, flops=0)
