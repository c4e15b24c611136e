"""Start weights of new units: GradMax is what it claims, changes no step of the host, and is refused with a reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import SGD

from esper.growth import GrowthConfig, add_slots
from esper.growth.config import LifecycleConfig
from esper.growth.events import Widened
from esper.growth.lifecycle.stages import Germinate
from esper.growth.seeds.start import NEARLY_ZERO, GradMax, reason_against_gradmax
from esper.growth.seeds.width import WidthSeed
from tests.growth.builders import QUICK, QUICK_SHADOW, Loop, Script, adamw, assert_same, config, make_host, make_loop, plain_losses
from tests.growth.host.test_units import Attention, Gated

SEARCH = 8  # steps of a search: two epochs


def settings(start: str, lifecycle: LifecycleConfig = QUICK) -> GrowthConfig:
    return config(msgspec.structs.replace(lifecycle, start_weights=start), probe_steps=SEARCH // 2, slots=("first",))


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.0)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {"first": nn.Linear(6, 8), "between": nn.ReLU(), "head": nn.Linear(8, 3)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def loop_with(start: str, blueprint: str = "widen_50", **options: object) -> Loop:
    controller = Script({0: [Germinate("first", "test", blueprint)]})
    loop = make_loop(controller, settings(start), **{"host": mlp(), "make_optimizer": frozen, "slots": ["first"], **options})  # type: ignore[arg-type]
    loop.grower.begin()
    return loop


def seed_of(loop: Loop) -> WidthSeed:
    seed = loop.slotted.slot("first").seed
    assert isinstance(seed, WidthSeed)
    return seed


def seed_search(loop: Loop) -> Any:
    learner = loop.grower.lifecycles.backends["first"].learner
    assert learner is not None
    return learner.search


def weights(seed: WidthSeed) -> tuple[Tensor, Tensor]:
    """Return the incoming weights [k, inputs] and the outgoing ones [outputs, k] of a seed with one pair of layers."""
    new, back = seed.parts[0].new, seed.parts[-1].back
    assert new is not None
    assert back is not None
    return new.weight.detach(), back.weight.detach()


def statistic(host: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of (gradient of the output) · (input of the first layer), [outputs, inputs]."""
    output = host(x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(output, y), output)
    return gradient.T @ x


def test_gradmax_starts_with_zero_incoming_weights_and_singular_vectors_as_outgoing_ones() -> None:
    loop = loop_with("gradmax", "widen_25")
    loop.data = loop.data[:1]  # two units show three columns in turn, on the same batch
    M = statistic(loop.host, *loop.data[0])
    expected = torch.linalg.svd(M)[0][:, :2]
    loop.epoch(epochs=SEARCH)
    incoming, outgoing = weights(seed_of(loop))
    assert not incoming.any()
    length = loop.host.head.weight.detach().square().sum(0).mean().sqrt()
    assert torch.allclose(outgoing.norm(dim=0), length.expand(2))
    assert torch.allclose((outgoing / length).abs(), expected.abs(), atol=1e-4)  # signs are free
    # No other outgoing weights of this length give the incoming ones a larger gradient.
    others = [torch.linalg.qr(torch.randn(3, 2))[0] * length for _ in range(50)]
    assert all((outgoing.T @ M).norm() >= (other.T @ M).norm() for other in others)


def test_units_without_a_singular_vector_of_their_own_start_randomly() -> None:
    loop = loop_with("gradmax", "widen_100")  # 8 units for 3 outputs, whose gradients sum to zero
    loop.epoch(epochs=2)
    incoming, outgoing = weights(seed_of(loop))
    assert not incoming[:2].any()
    assert outgoing[:, :2].norm(dim=0).min() > 0
    assert incoming[2:].abs().min() > 0
    assert not outgoing[:, 2:].any()


def test_gradmax_measures_all_columns_in_turn_if_a_layer_has_more_than_the_seed_has_units() -> None:
    torch.manual_seed(0)
    host = nn.Sequential()
    for name, layer in {"first": nn.Linear(6, 8), "between": nn.Tanh(), "then": nn.Linear(8, 6), "head": nn.Linear(6, 3)}.items():
        host.add_module(name, layer)
    loop = loop_with("gradmax", "widen_25", host=host)  # 2 units for 6 outputs: three rounds
    loop.data = loop.data[:1]
    x, y = loop.data[0]
    hidden = host.then(host.between(host.first(x))).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(host.head(hidden), y), hidden)
    expected = torch.linalg.svd(gradient.T @ x)[0][:, :2]
    loop.epoch(epochs=SEARCH)
    _, outgoing = weights(seed_of(loop))
    assert torch.allclose((outgoing / outgoing.norm(dim=0)).abs(), expected.abs(), atol=1e-4)


def test_gradmax_finds_the_largest_gradient_through_convolutions_pools_and_two_readers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), nn.Linear(36, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.first(x))
            output: Tensor = self.right(torch.max_pool2d(h, 2).flatten(1)) + self.left(h).mean((2, 3)).sum(1, keepdim=True)
            return output

    torch.manual_seed(0)
    host, x, y = Two(), torch.randn(16, 3, 8, 8), torch.randint(3, (16,))
    slotted = add_slots(host, x[:2], slots=["first"])
    seed = slotted.new_seed("first", "widen_50", random_seed=1)
    assert isinstance(seed, WidthSeed)
    seed.alpha.fill_(1.0)
    slotted.slot("first").plant(seed, connected=True)
    born = {name: parameter.detach().clone() for name, parameter in seed.named_parameters()}
    search = GradMax(seed, born, slotted.place("first").chain, dict(host.named_modules()), steps=100)
    search.show()

    def gradient() -> Tensor:
        seed.zero_grad()
        cross_entropy(host(x), y).backward()
        assert seed.parts[0].new is not None
        assert seed.parts[0].new.weight.grad is not None
        return seed.parts[0].new.weight.grad.norm()

    while not search.is_over:
        search.take(gradient())
    assert not search.failure
    found, backs = gradient(), [part.back.weight for part in seed.parts if part.back is not None]
    length = torch.cat([back.detach().flatten() for back in backs]).norm()
    for _ in range(50):
        others = [torch.randn_like(back) for back in backs]
        factor = length / torch.cat([other.flatten() for other in others]).norm()
        for back, other in zip(backs, others, strict=True):
            back.data.copy_(factor * other)
        assert gradient() < found
    assert len(search._sets[0].columns) == 2 * 9 + 3 * 9


@pytest.mark.parametrize("blueprint", ["widen_50", "widen_50_chain"])
def test_a_search_changes_no_step_of_the_host_and_the_seed_learns_when_it_is_over(blueprint: str) -> None:
    host = make_host(dropout=0.0, norm=False)
    twin = copy.deepcopy(host)
    loop = loop_with("gradmax", blueprint, host=host, make_optimizer=adamw)
    expected = plain_losses(twin, adamw(twin), loop.data, epochs=3)
    loop.epoch(epochs=3)
    assert loop.losses[: SEARCH + 1] == expected[: SEARCH + 1]  # the first step with the start weights is still that of the host
    assert loop.losses[-1] != expected[-1]
    assert all(bool(parameter.any()) for parameter in seed_of(loop).parameters())


def test_a_search_in_the_shadow_gives_the_same_weights() -> None:
    found = []
    for lifecycle in (QUICK, QUICK_SHADOW):
        loop = make_loop(
            Script({0: [Germinate("first", "test", "widen_25")]}),
            settings("gradmax", lifecycle),
            host=mlp(),
            make_optimizer=frozen,
            slots=["first"],
        )
        loop.grower.begin()
        loop.epoch(epochs=2)
        found.append(weights(seed_of(loop))[1])
    assert torch.allclose(*found, atol=1e-5)


@pytest.mark.parametrize("steps", [3, SEARCH, SEARCH + 1])
def test_a_run_that_is_resumed_in_the_middle_of_a_search_equals_an_uninterrupted_one(steps: int, tmp_path: Path) -> None:
    def run(loop: Loop, first: int, last: int) -> None:
        for number in range(first, last):
            loop.step(*loop.data[number % 4])
            if number % 4 == 3:
                loop.grower.after_epoch(loop.evaluate)

    whole, killed = (loop_with("gradmax", "widen_100", make_optimizer=adamw) for _ in range(2))
    run(whole, 0, 16)
    run(killed, 0, steps)
    killed.grower.save(tmp_path)
    host = mlp()
    for parameter in host.parameters():
        parameter.data.normal_()
    resumed = make_loop(Script(), settings("gradmax"), host=host, make_optimizer=adamw, slots=["first"])
    resumed.grower.load(tmp_path)
    run(resumed, steps, 16)
    assert_same(resumed.grower.state_dict()["recovery"], whole.grower.state_dict()["recovery"])


def between(*modules: nn.Module, first: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(first or nn.Linear(6, 8), *modules, nn.Linear(8, 3))


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


VECTORS, TOKENS = torch.randn(8, 6), torch.randn(2, 5, 6)


@pytest.mark.parametrize(
    ("host", "slot", "example", "reason"),
    [
        (between(nn.ReLU()), "0", VECTORS, ""),
        (between(nn.GELU(), nn.Dropout(0.1)), "0", VECTORS, ""),
        (between(nn.Sigmoid()), "0", VECTORS, "its units are 0.5 for an input of zero"),
        (between(nn.BatchNorm1d(8), nn.ReLU()), "0", VECTORS, "divides by the spread"),
        (between(nn.ReLU(), nn.BatchNorm1d(8)), "0", VECTORS, "divides by the spread"),
        (between(nn.GroupNorm(2, 8)), "0", VECTORS, "divides by the spread"),
        (between(Squared()), "0", VECTORS, "no gradient at zero"),
        (between(nn.ReLU(), first=nn.Linear(6, 8, bias=False)), "0", VECTORS, "no gradient at zero"),
        (between(nn.ReLU(), first=weight_norm(nn.Linear(6, 8))), "0", VECTORS, "weight norm"),
        (nn.Sequential(Gated(6, 8), nn.Linear(6, 3)), "0", VECTORS, "several layers make its units"),
        (nn.Sequential(Attention(6, heads=2), nn.Linear(6, 3)), "0", TOKENS, "several layers make its units"),
    ],
    ids=["relu", "gelu", "sigmoid", "batch norm", "batch norm last", "group norm", "square", "no bias", "weight norm", "gated", "heads"],
)
def test_gradmax_is_refused_where_units_cannot_start_at_zero(host: nn.Module, slot: str, example: Tensor, reason: str) -> None:
    slotted = add_slots(host.train(), example, slots=[slot])
    before = copy.deepcopy(host.state_dict())
    found = reason_against_gradmax(slotted, slot, "widen_50")
    assert reason in found if reason else not found
    assert_same(dict(host.state_dict()), dict(before))
    assert not slotted.wide_seeds()


def test_the_event_says_that_and_why_start_weights_are_random() -> None:
    for norm, expected in ((True, "divides by the spread"), (False, "")):
        loop = loop_with("gradmax", host=make_host(norm=norm))
        loop.epoch()
        (event,) = [event for event in loop.events if isinstance(event, Widened)]
        assert event.start == ("random" if norm else "gradmax")
        assert expected in event.why_random if norm else not event.why_random
        assert (seed_search(loop) is None) == norm


def test_a_seed_that_no_gradient_reaches_keeps_its_random_weights_and_the_ledger_says_so() -> None:
    loop = loop_with("gradmax")
    born = copy.deepcopy(seed_search(loop)._born)
    for _ in range(SEARCH):
        loss = 1.0 + 0.0 * cross_entropy(loop.slotted(loop.data[0][0]), loop.data[0][1])
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.grower.after_step(loss)
    loop.grower.after_epoch(loop.evaluate)
    assert_same({name: parameter.detach() for name, parameter in seed_of(loop).named_parameters()}, born)
    assert "no gradient reached" in loop.grower.ledger.entries[0].steps[-1].reason


def test_a_bias_of_a_unit_at_zero_is_lost_in_the_sum() -> None:
    values = torch.randn(1000)
    assert torch.equal(values + NEARLY_ZERO, values)
    assert torch.tensor(NEARLY_ZERO) > 0
