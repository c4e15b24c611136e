"""Lowered modules: a row of a stacked module equals the same module alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.fleet.stacked.layers import Convolution, Scope, lowering_of, lowers
from esper.fleet.stacked.lowering import At, lower
from esper.fleet.stacked.rows import ModuleRows
from esper.growth.host.layout import Place
from esper.growth.seeds.blueprints import KINDS, blueprints_for, build_branch
from esper.tasks.gpt_host import GPTHost
from esper.tasks.hosts import ConvHost, make_host
from tests.fleet.stacked.comparison import (
    EXACT,
    HOSTS,
    SAMPLES,
    assert_gradients_equal,
    assert_rows_equal_hosts,
    inputs_for,
    loss_of,
    make_different,
)

IDS = torch.randint(11, (SAMPLES, HOSTS, 6), generator=torch.Generator().manual_seed(3))

conv_2d = partial(ConvHost, 1, 3, (2, 4, 3), pool=(True, True, False))
conv_1d = partial(ConvHost, 1, 3, (2, 4), pool=(True, True), spatial=1)
CONV_HOSTS = [(conv_2d, (1, 8, 8)), (conv_1d, (1, 12))]


@pytest.mark.parametrize(("make", "shape"), CONV_HOSTS, ids=["images", "series"])
@pytest.mark.parametrize("convolution", ["grouped", "unfolded"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_row_equals_the_conv_host_alone(
    make: Callable[[], nn.Module], shape: tuple[int, ...], convolution: Convolution, training: bool
) -> None:
    assert_rows_equal_hosts(make_different(make), inputs_for(shape), training=training, convolution=convolution)


@pytest.mark.parametrize("name", ["residual-2x3", "mlp-3x2"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_row_equals_the_host_of_a_family_alone(name: str, training: bool) -> None:
    hosts = make_different(lambda: make_host(name, torch.zeros(2, 1, 8, 8), 3))
    assert all(lowering_of(module, training=training) is not None for module in hosts[0].modules())
    assert_rows_equal_hosts(hosts, inputs_for((1, 8, 8)), training=training)


class DerivedGPT(GPTHost):
    """Not known, so that all of it runs through vmap."""


@pytest.mark.parametrize("tie_head", [True, False])
@pytest.mark.parametrize("kind", [GPTHost, DerivedGPT])
def test_a_row_equals_the_gpt_host_alone(kind: type[GPTHost], tie_head: bool) -> None:
    hosts = make_different(lambda: kind(11, sequence_length=6, width=8, heads=2, layers=2, tie_head=tie_head))
    assert_rows_equal_hosts(hosts, IDS)


PLACES = [
    Place("images", "conv", (8, 4, 3), dtype=torch.float64),
    Place("series", "conv", (6, 7), dtype=torch.float64),
    Place("tokens", "token", (5, 32), dtype=torch.float64),
    Place("causal", "token", (5, 32), dtype=torch.float64, is_causal=True),
    Place("dense", "dense", (9,), dtype=torch.float64),
]
BRANCHES = [pytest.param(place, name.name, id=f"{place.name}-{name.name}") for place in PLACES for name in blueprints_for(place)]


def test_all_kinds_of_places_are_among_the_tested_ones() -> None:
    assert {place.kind for place in PLACES} == set(KINDS)


@pytest.mark.parametrize(("place", "name"), BRANCHES)
def test_a_row_equals_the_branch_of_a_seed_alone(place: Place, name: str) -> None:
    (blueprint,) = blueprints_for(place, [name])
    branches = make_different(lambda: build_branch(blueprint, place, seed=0))
    assert_rows_equal_hosts(branches, inputs_for(place.shape, requires_grad=True))


LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), groups=2), (4, 5, 6)),
    (lambda: nn.Conv2d(3, 4, 3, padding="same", dilation=2, bias=False), (3, 5, 6)),
    (lambda: nn.Conv2d(3, 4, (2, 4), padding="same"), (3, 5, 6)),
    (lambda: nn.Conv2d(3, 4, 1), (3, 5, 6)),
    (lambda: nn.Conv2d(3, 4, 1, stride=2), (3, 5, 6)),
    (lambda: nn.Conv1d(4, 4, 3, padding="valid", groups=4), (4, 7)),
    (lambda: nn.Conv1d(2, 4, 4, stride=3, padding=2, dilation=2), (2, 9)),
    (lambda: nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular"), (2, 9)),
    (lambda: nn.Linear(4, 3), (4,)),
    (lambda: nn.Linear(4, 3, bias=False), (2, 6, 4)),
    (lambda: nn.BatchNorm1d(4), (4,)),
    (lambda: nn.BatchNorm1d(4, momentum=None), (4, 6)),
    (lambda: nn.BatchNorm2d(4, momentum=0.3, affine=False), (4, 2, 3)),
    (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 2, 3)),
    (lambda: nn.GroupNorm(2, 4), (4, 2, 3)),
    (lambda: nn.GroupNorm(1, 4, affine=False), (4, 6)),
    (lambda: nn.LayerNorm(4), (6, 4)),
    (lambda: nn.LayerNorm((2, 4), bias=False), (6, 2, 4)),
    (lambda: nn.LayerNorm(4, elementwise_affine=False), (4,)),
    (lambda: nn.MaxPool1d(3, stride=2, padding=1), (2, 8)),
    (lambda: nn.MaxPool2d((2, 3), stride=(1, 2), ceil_mode=True), (2, 5, 6)),
    (lambda: nn.AvgPool1d(3, padding=1, count_include_pad=False), (2, 8)),
    (lambda: nn.AvgPool1d(3, padding=1), (2, 8)),
    (lambda: nn.AvgPool2d(2, divisor_override=3), (2, 5, 6)),
    (lambda: nn.AdaptiveAvgPool1d(3), (2, 8)),
    (lambda: nn.AdaptiveAvgPool2d((1, None)), (2, 5, 6)),
    (lambda: nn.Sequential(nn.ReLU(), nn.LeakyReLU(0.2), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Identity()), (4,)),
    (lambda: nn.Dropout(0.0), (4,)),
    (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)), (2, 6, 6)),
    (lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), (2, 3, 2)),
    (lambda: nn.Flatten(-3, -2), (2, 3, 2)),
    (lambda: nn.Flatten(2), (2, 3, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("samples_are", ["outermost", "innermost"])
@pytest.mark.parametrize(("make", "shape"), LAYERS, ids=[str(make()) for make, _ in LAYERS])
def test_a_row_equals_the_layer_alone(make: Callable[[], nn.Module], shape: tuple[int, ...], samples_are: str, training: bool) -> None:
    x = inputs_for(shape)
    if samples_are == "innermost":
        x = x.movedim(0, -1).contiguous().movedim(-1, 0)
    assert_rows_equal_hosts(make_different(make), x.requires_grad_(), training=training)


class Words(nn.Module):
    """Not known, so that its embedding runs through vmap."""

    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 3, padding_idx=padding_idx)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).sin()


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("make", [partial(nn.Embedding, 6, 3), Words])
def test_a_row_equals_the_embedding_alone(make: Callable[..., nn.Module], padding_idx: int | None) -> None:
    assert_rows_equal_hosts(make_different(lambda: make(padding_idx=padding_idx)), IDS % 6)


@pytest.mark.parametrize("settings", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_an_embedding_that_no_fleet_can_train_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"embedding 'words' asks for {next(iter(settings))}"):
        lower(nn.Sequential(OrderedDict(words=nn.Embedding(6, 3, **settings))))


class Mixer(nn.Module):
    """A module of a user's own, with a buffer that it updates, a norm that tracks, and a layer used twice."""

    total: Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.layer = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total.add_(x.detach().sum())
        mixed = torch.einsum("btd,de->bte", self.layer(self.layer(x)), self.weight)
        normed: Tensor = self.norm(mixed.transpose(1, 2))
        return normed


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_row_equals_a_custom_module_alone(training: bool) -> None:
    hosts = make_different(lambda: nn.Sequential(nn.Linear(3, 4), Mixer(), nn.Flatten(), nn.Linear(8, 2)))
    assert_rows_equal_hosts(hosts, inputs_for((2, 3), requires_grad=True), training=training)


def add_to_slots(weights: Tensor, calls: list[str]) -> At:
    """A seed behind every slot: host n adds tanh(h)·weights[n]. Acts on one host, too."""

    def at(name: str, h: Tensor) -> Tensor:
        calls.append(name)
        return h + h.tanh() * weights.view(1, -1, *[1] * (h.ndim - 2))

    return at


@pytest.mark.parametrize(
    ("make", "slots", "x"),
    [
        (conv_2d, ["blocks.0", "blocks.2", "blocks.1.conv"], inputs_for((1, 8, 8))),
        (lambda: GPTHost(11, sequence_length=6, width=8, heads=2, layers=2), ["blocks.0", "blocks.1", "blocks.1.mlp"], IDS),
        (lambda: DerivedGPT(11, sequence_length=6, width=8, heads=2, layers=2), ["blocks.0", "blocks.1", "blocks.1.mlp"], IDS),
        (lambda: nn.Sequential(nn.Linear(3, 4), Mixer()), ["0", "1", "1.norm"], inputs_for((2, 3))),
    ],
    ids=["conv", "gpt", "gpt through vmap", "own"],
)
def test_a_seed_in_a_stacked_slot_learns_as_it_does_alone(make: Callable[[], nn.Module], slots: list[str], x: Tensor) -> None:
    hosts = make_different(make)
    rows = ModuleRows.of(hosts)
    strengths = torch.tensor([0.5, -0.3, 2.0], dtype=torch.float64, requires_grad=True)
    calls: list[str] = []
    outputs = lower(hosts[0], slots=slots)(rows.tensors(), x, training=True, at=add_to_slots(strengths, calls))
    assert sorted(calls) == sorted(slots)
    torch.autograd.backward([sum((loss_of(outputs[:, row]) for row in range(HOSTS)), torch.zeros(()))])
    assert strengths.grad is not None
    close = partial(torch.testing.assert_close, rtol=EXACT, atol=EXACT)
    for row, host in enumerate(hosts):
        strength = strengths.detach()[row].clone().requires_grad_()
        for slot in slots:
            host.get_submodule(slot).register_forward_hook(lambda module, given, h, strength=strength: h + h.tanh() * strength)
        expected = host(x[:, row])
        torch.autograd.backward([loss_of(expected)])
        close(outputs[:, row], expected)
        close(strengths.grad[row], strength.grad)
        assert_gradients_equal(rows, row, host, close)


def test_a_slot_without_seeds_changes_nothing() -> None:
    hosts = make_different(conv_2d)
    tensors, x = ModuleRows.of(hosts).tensors(), inputs_for((1, 8, 8))
    assert torch.equal(lower(hosts[0], slots=["blocks.0"])(tensors, x, training=False), lower(hosts[0])(tensors, x, training=False))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "shape"), CONV_HOSTS, ids=["images", "series"])
@pytest.mark.parametrize("convolution", ["grouped", "unfolded"])
def test_a_float32_row_is_close_to_the_host_alone(make: Callable[[], nn.Module], shape: tuple[int, ...], convolution: Convolution) -> None:
    x = inputs_for(shape, torch.float32)
    assert_rows_equal_hosts(make_different(make, torch.float32), x, tolerance=1e-5, convolution=convolution)


@pytest.mark.parametrize(("make", "shape"), CONV_HOSTS, ids=["images", "series"])
@pytest.mark.parametrize("convolution", ["grouped", "unfolded"])
def test_a_bfloat16_row_is_close_to_the_host_alone(make: Callable[[], nn.Module], shape: tuple[int, ...], convolution: Convolution) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_rows_equal_hosts(
            make_different(make, torch.float32), inputs_for(shape, torch.float32), tolerance=2e-2, convolution=convolution
        )


def test_a_bfloat16_row_is_close_to_the_gpt_host_alone() -> None:
    hosts = make_different(lambda: GPTHost(11, sequence_length=6, width=8, heads=2, layers=2), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert_rows_equal_hosts(hosts, IDS, tolerance=2e-2)


@pytest.mark.parametrize("kind", [GPTHost, DerivedGPT])
def test_a_seed_in_a_stacked_slot_acts_without_gradients(kind: type[GPTHost]) -> None:
    host = kind(11, sequence_length=6, width=8, heads=2, layers=2)
    tensors = ModuleRows.of([host] * HOSTS).tensors()
    stacked = lower(host, slots=["blocks.1"])
    with torch.no_grad():
        silenced = stacked(tensors, IDS, training=False, at=lambda name, h: torch.zeros_like(h))
        assert torch.equal(silenced, torch.zeros_like(silenced))  # the norm of nothing, times a head without bias


def test_a_subset_of_hosts_computes_the_same_as_among_all() -> None:
    hosts = make_different(conv_2d)
    rows, x, chosen = ModuleRows.of(hosts), inputs_for((1, 8, 8)), torch.tensor([2, 0])
    stacked = lower(hosts[0])
    some = stacked(rows.tensors(chosen), x[:, chosen], training=False)
    torch.testing.assert_close(some, stacked(rows.tensors(), x, training=False)[:, chosen], rtol=EXACT, atol=EXACT)


def test_dropout_is_different_in_every_host_and_absent_in_evaluation() -> None:
    host = nn.Dropout(0.5)
    x = torch.ones(64, 2, 3)
    dropped = lower(host)({}, x, training=True)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(dropped[:, 0], dropped[:, 1])
    assert torch.equal(lower(host)({}, x, training=False), x)


def test_the_module_that_was_lowered_stays_as_it_was() -> None:
    host = nn.Sequential(nn.Linear(3, 4), Mixer()).eval()
    before = {name: tensor.clone() for name, tensor in host.state_dict().items()}
    rows = ModuleRows.of([host, host])
    lower(host, slots=["1.norm"])(rows.tensors(), torch.randn(5, 2, 2, 3), training=True, at=lambda name, h: h + 1)
    assert not host.training
    assert not host[1].get_submodule("norm")._forward_hooks
    for name, tensor in host.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_subclass_is_not_lowered_as_its_base_class() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert lowering_of(Doubled(2, 2), training=True) is None
    assert_rows_equal_hosts(make_different(lambda: Doubled(3, 2)), inputs_for((3,)))


def test_a_forward_hook_of_the_host_is_called() -> None:
    def hooked() -> nn.Module:
        layer = nn.Linear(3, 2)
        layer.register_forward_hook(lambda module, given, output: output * 3)
        return layer

    assert_rows_equal_hosts(make_different(hooked), inputs_for((3,)))


def test_a_custom_lowering_is_used_and_reaches_its_children() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.layer(x)

    seen = []

    @lowers(Twice)
    def twice(module: Twice, scope: Scope, x: Tensor) -> Tensor:
        seen.append(scope.name)
        return 2 * scope.child("layer", x)

    assert_rows_equal_hosts(make_different(Twice), inputs_for((3,)))
    assert seen == ["", ""]


def test_a_missing_stacked_slot_is_refused_with_the_existing_ones() -> None:
    with pytest.raises(ValueError, match=r"no submodule named 'blocks.7'.*'blocks.0'"):
        lower(conv_2d(), slots=["blocks.7"])


def test_an_input_of_other_hosts_than_the_tensors_is_refused() -> None:
    host = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"\[5, 4, 3\] with tensors of \[2\] hosts"):
        lower(host)(ModuleRows.of([host, host]).tensors(), torch.randn(5, 4, 3), training=True)
