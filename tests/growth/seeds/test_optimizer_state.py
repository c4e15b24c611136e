"""Optimisers go on after new units became rows and columns of the host's layers: elementwise, factored and matrix ones, one or several."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

import esper
from esper.growth import Grower, GrowthConfig, GrowthError, Planned, add_slots
from esper.growth.config import BudgetConfig, SeedOptimizerConfig
from esper.growth.events import EpochEnded
from esper.growth.lifecycle.stages import Germinate
from esper.runs import Event
from tests.growth.builders import QUICK, Script, make_data, make_host

DATA = make_data(dtype=torch.float64)
FREE = GrowthConfig(
    lifecycle=QUICK,
    budget=BudgetConfig(max_parameters=None, max_flops=None),
    seed_optimizer=SeedOptimizerConfig(max_grad_norm=None),
)
Make = Callable[[nn.Module], Optimizer | Sequence[Optimizer]]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices, others = ([one for one in model.parameters() if (one.ndim == 2) is wanted] for wanted in (True, False))
    return [Muon(matrices, lr=0.02), AdamW(others, lr=0.01)]


class Run:
    """A host in float64 with one width seed, which grows after some steps of the host alone, and a loop of its own."""

    def __init__(self, make: Make, *, alone: int = 0, **options: Any) -> None:
        self.host = make_host(dropout=0.0, norm=False, dtype=torch.float64)
        made = make(self.host)
        self.optimizers = [made] if isinstance(made, Optimizer) else list(made)
        self.step(alone, is_baked=True)
        self.slotted = add_slots(self.host, DATA[0][0], slots=["first", "second"])
        script = Script({0: [Germinate(slot="first", reason="now", blueprint="widen_100")]})
        self.grower = Grower(self.slotted, made, controller=script, config=FREE, **options)
        self.grower.begin()

    def step(self, steps: int, *, is_baked: bool = False) -> list[float]:
        losses = []
        for number in range(steps):
            x, y = DATA[number % len(DATA)]
            loss = cross_entropy(self.host(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if not is_baked:
                self.grower.after_step(loss)
            losses.append(loss.item())
        return losses

    def bake(self) -> nn.Module:
        self.slotted.slot("first").is_kept = True
        return self.grower.bake()


ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.05),
    "SGD, momentum": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD, nesterov": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "Adam, amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.01),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=0.01),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05, lr_decay=0.01),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.005),
    "RMSprop, centered": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.005, momentum=0.5, centered=True),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=1.0),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.001),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), lr=0.01, t0=5),
    "two groups": lambda model: AdamW(
        [
            {"params": [one for one in model.parameters() if one.ndim == 2]},
            {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0, "lr": 0.003},
        ],
        lr=0.01,
    ),
    "two optimisers": lambda model: [
        SGD([one for one in model.parameters() if one.ndim == 2], lr=0.05, momentum=0.9),
        AdamW([one for one in model.parameters() if one.ndim == 1], lr=0.01),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_steps_after_a_bake_are_those_without_one(name: str) -> None:
    static, baked = Run(ELEMENTWISE[name]), Run(ELEMENTWISE[name])
    for run in (static, baked):
        run.step(7)
    baked.bake()
    assert baked.host.first.weight.shape == (16, 6)
    expected = static.step(21)
    losses = baked.step(21, is_baked=True)
    assert losses == pytest.approx(expected, rel=1e-9)


def test_the_steps_after_a_bake_are_nearly_those_without_one_if_the_seed_is_younger_than_the_optimiser() -> None:
    static, baked = (Run(ELEMENTWISE["AdamW"], alone=40) for _ in range(2))
    for run in (static, baked):
        run.step(12)
    baked.bake()
    expected, losses = static.step(21), baked.step(21, is_baked=True)
    assert losses[0] == pytest.approx(expected[0], rel=1e-9)
    assert losses == pytest.approx(expected, rel=0.05)


def transformers_adafactor(model: nn.Module) -> Optimizer:
    made: Optimizer = importlib.import_module("transformers.optimization").Adafactor(
        model.parameters(), lr=0.01, scale_parameter=False, relative_step=False
    )
    return made


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model: Adafactor(model.parameters(), lr=0.01), id="torch"),
        pytest.param(transformers_adafactor, id="transformers", marks=[pytest.mark.slow, pytest.mark.extra("transformers")]),
    ],
)
def test_factored_state_is_refolded(make: Make) -> None:
    run = Run(make)
    run.step(7)
    host, (optimizer,) = run.host, run.optimizers
    keys = ("row_var", "col_var") if "row_var" in optimizer.state[host.first.weight] else ("exp_avg_sq_row", "exp_avg_sq_col")
    rows, columns = (optimizer.state[host.first.weight][key].clone() for key in keys)
    run.bake()
    state = optimizer.state[host.first.weight]
    assert state["step"] == 7
    # The layer has the same inputs and twice as many units: the rows of the host's units are what they were.
    assert torch.allclose(state[keys[0]][:8], rows)
    assert state[keys[0]].shape[0] == 16
    assert state[keys[0]].min() > 0
    assert state[keys[1]].shape == columns.shape
    losses = run.step(40, is_baked=True)
    assert losses[-1] < losses[0]


def test_muon_for_matrices_and_adamw_for_the_rest_train_and_fold_a_seed() -> None:
    run = Run(muon_and_adamw)
    run.step(7)
    (seed,) = run.slotted.wide_seeds()
    learner = run.grower.lifecycles.slots["first"].learner
    assert learner is not None
    assert [type(one) for one in learner.optimizers] == [Muon, AdamW]
    new, back = (next(getattr(part, name) for part in seed.parts if getattr(part, name) is not None) for name in ("new", "back"))
    momenta = {layer: learner.optimizers[0].state[layer.weight]["momentum_buffer"].clone() for layer in (new, back)}
    moments = learner.optimizers[1].state[new.bias]["exp_avg"].clone()
    run.bake()
    muon, adamw = run.optimizers
    assert torch.equal(muon.state[run.host.first.weight]["momentum_buffer"][8:], momenta[new])
    assert torch.equal(muon.state[run.host.second[0].weight]["momentum_buffer"][:, 8:], momenta[back])
    assert torch.allclose(adamw.state[run.host.first.bias]["exp_avg"][8:], moments)
    losses = run.step(40, is_baked=True)
    assert losses[-1] < losses[0]


def test_optimisers_may_clear_their_gradients_one_after_the_other() -> None:
    """Muon's `zero_grad` comes before AdamW's `step`, which must find its part of the seed's gradient."""
    run = Run(muon_and_adamw)
    learner = run.grower.lifecycles.slots["first"].learner
    assert learner is not None
    before = [parameter.detach().clone() for parameter in learner.parameters]
    run.step(3)
    assert all(not torch.equal(one, other) for one, other in zip(before, learner.parameters, strict=True))
    assert not learner.has_gradients
    assert learner.report().steps == 3, "one norm for each step, not for each optimiser"


def test_a_bake_with_an_optimiser_of_seeds_of_another_class_says_what_begins_anew() -> None:
    def adamw(parameters: list[nn.Parameter], rate: float) -> Optimizer:
        return AdamW(parameters, lr=rate)

    run = Run(ELEMENTWISE["SGD, momentum"], seed_optimizer=adamw)
    run.step(7)
    buffer = run.optimizers[0].state[run.host.first.weight]["momentum_buffer"].clone()
    with pytest.warns(RuntimeWarning, match="the state of SGD for the new part of first.weight, which AdamW trained"):
        run.bake()
    state = run.optimizers[0].state[run.host.first.weight]["momentum_buffer"]
    assert torch.equal(state[:8], buffer)
    assert not state[8:].any()
    run.step(4, is_baked=True)


class WithHistory(SGD):
    """Keeps a state of a layout that nobody else knows."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("history", torch.zeros(3, parameter.numel())).add_(1)
                assert self.state[parameter]["history"].shape[1] == parameter.numel()
        return super().step(closure)


def test_a_state_of_another_layout_begins_anew_with_a_warning() -> None:
    run = Run(lambda model: WithHistory(model.parameters(), lr=0.05))
    run.step(3)
    with pytest.warns(RuntimeWarning, match="begin anew: the state of WithHistory for first.weight"):
        run.bake()
    run.step(3, is_baked=True)


def everything(run: Run) -> Any:
    return copy.deepcopy(
        (
            run.slotted.state_dict(),
            [optimizer.state_dict() for optimizer in run.optimizers],
            [parameter.grad for parameter in run.host.parameters()],
        )
    )


@pytest.mark.parametrize("make", [muon_and_adamw, lambda model: WithHistory(model.parameters(), lr=0.05)], ids=["muon", "another layout"])
@pytest.mark.filterwarnings("ignore:these states have a layout:RuntimeWarning")
def test_a_bake_that_fails_leaves_everything_as_it_was(make: Make) -> None:
    run = Run(make)
    run.step(3)
    cross_entropy(run.host(DATA[0][0]), DATA[0][1]).backward()  # type: ignore[no-untyped-call]
    before, monkeys = everything(run), pytest.MonkeyPatch()
    monkeys.setattr("esper.growth.host.slotted.agree", lambda before, after: False)
    with pytest.raises(GrowthError, match="nothing was baked"):
        run.bake()
    monkeys.undo()
    torch.testing.assert_close(everything(run), before, rtol=0, atol=0)
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    run.step(3)
    run.bake()
    run.step(3, is_baked=True)


def test_a_parameter_that_may_grow_and_that_no_optimiser_trains_is_refused_before_anything_changes() -> None:
    host = make_host(dropout=0.0, norm=False)
    slotted = add_slots(host, torch.randn(2, 6), slots=["first"])
    _, adamw = muon_and_adamw(host)
    before = list(vars(adamw)), len(host.first._forward_hooks), dict(vars(host))
    with pytest.raises(GrowthError, match=r"first.weight can get new rows or columns, and none of the optimisers has it"):
        Grower(slotted, adamw, config=FREE)
    assert before == (list(vars(adamw)), len(host.first._forward_hooks), dict(vars(host)))
    host.first.requires_grad_(False)
    host.second.requires_grad_(False)
    Grower(slotted, AdamW(host.head.parameters(), lr=0.1), config=FREE)


@pytest.mark.parametrize("wrong", [[], "adamw", [1], None])
def test_what_is_no_optimiser_is_refused(wrong: Any) -> None:
    slotted = add_slots(make_host(), torch.randn(2, 6))
    with pytest.raises(GrowthError, match="needs the optimiser of the model, or a list of different ones"):
        Grower(slotted, wrong)


def test_an_optimiser_that_chooses_its_learning_rate_is_refused() -> None:
    host = make_host()
    optimizer = SGD(host.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(GrowthError, match="chooses its learning rate itself"):
        Grower(add_slots(host, torch.randn(2, 6)), optimizer)


class AdamW8bit(AdamW):
    """Named as that of bitsandbytes."""


class Quantised(AdamW):
    """Holds what bitsandbytes holds after a step: numbers of 8 bits, and a scale for each block of them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"state1": torch.zeros(parameter.shape, dtype=torch.uint8), "absmax1": torch.zeros(3)}


def of_bitsandbytes(model: nn.Module) -> AdamW:
    """Return an optimiser with the settings of bitsandbytes."""
    optimizer = AdamW(model.parameters())
    optimizer.args = SimpleNamespace(optim_bits=8)  # type: ignore[attr-defined]
    return optimizer


EIGHT_BITS: list[Callable[[nn.Module], AdamW]] = [
    lambda model: AdamW8bit(model.parameters()),
    lambda model: Quantised(model.parameters()),
    of_bitsandbytes,
]


@pytest.mark.parametrize("make", EIGHT_BITS, ids=["by name", "by state", "by settings"])
def test_optimisers_of_8_bits_are_refused_in_words(make: Callable[[nn.Module], AdamW]) -> None:
    host = make_host()
    optimizer = make(host)
    if isinstance(optimizer, Quantised):
        optimizer.step()
    before = dict(vars(host))
    slotted = add_slots(host, torch.randn(2, 6))
    with pytest.raises(GrowthError, match=r"keeps its state in 8 bits or fewer, .*; grow with the same optimiser in 32 bits"):
        Grower(slotted, optimizer)
    slotted.remove()
    assert dict(vars(host)) == before


@pytest.mark.slow
def test_grow_takes_several_optimisers_with_a_schedule_each_and_resumes(tmp_path: Any) -> None:
    data = make_data()

    def grow(**options: Any) -> esper.growth.Grown:
        return esper.grow(
            make_host(dropout=0.0, norm=False),
            data,
            data,
            cross_entropy,
            controller=Planned([(0, "after.0", "widen_100"), (0, "second.1", "mlp")]),
            config=FREE,
            optimizer=lambda parameters: muon_and_adamw(nn.ParameterList(parameters)),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
            progress=False,
            **options,
        )

    whole = grow(epochs=5)
    assert whole.ledger.count("kept") == 2
    assert whole.optimizer == "Muon, learning rate 0.02 and AdamW, learning rate 0.01"

    def stop(event: Event) -> None:
        if isinstance(event, EpochEnded) and event.epoch == 3:
            raise KeyboardInterrupt

    first = grow(epochs=5, run=tmp_path / "run", callbacks=[stop])
    assert first.status == "stopped"
    resumed = grow(epochs=5, run=tmp_path / "run", resume=True)
    assert resumed.val_losses == whole.val_losses
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name
