"""Blueprints: every branch is the identity at birth, learns at once, has the counted cost, and depends on its seed alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from esper.growth.host.layout import Place
from esper.growth.seeds import blueprints
from esper.growth.seeds.blueprints import (
    Blueprint,
    blueprints_for,
    build_branch,
    check_branch,
    cost_of,
    get_blueprint,
    is_built_in,
    register_blueprint,
)

PLACES = [
    *(Place("planes", "conv", (channels, size, size)) for channels in (1, 2, 3, 4, 8, 16, 32, 48, 64) for size in (1, 2, 5, 8)),
    *(
        Place("lines", "conv", (channels, size), is_causal=is_causal)
        for channels in (1, 3, 32)
        for size in (1, 2, 5)
        for is_causal in (False, True)
    ),
    Place("pixels", "conv", (8, 5, 5), is_causal=True),
    *(
        Place("words", "token", (length, features), is_causal=is_causal)
        for features in (1, 8, 32, 64, 100)
        for length in (1, 5)
        for is_causal in (False, True)
    ),
    *(Place("numbers", "dense", (features,)) for features in (1, 2, 8, 100)),
]
SINGLE = [  # nothing to normalise
    Place("one", "conv", (1, 1, 1)),
    Place("one", "conv", (1, 1)),
    Place("one", "token", (5, 1)),
    Place("one", "dense", (1,)),
]
CONV = Place("body", "conv", (16, 6, 5))
TOKEN = Place("body", "token", (7, 32))
DENSE = Place("body", "dense", (24,))
EVERY = [(blueprint, place) for place in (CONV, TOKEN, DENSE) for blueprint in blueprints_for(place)]
every_blueprint = pytest.mark.parametrize(("blueprint", "place"), EVERY, ids=[f"{place.kind}-{each.name}" for each, place in EVERY])


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    before = dict(blueprints.REGISTRY)
    yield
    blueprints.REGISTRY.clear()
    blueprints.REGISTRY.update(before)


def draw(place: Place, batch: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(batch, *place.shape, generator=torch.Generator().manual_seed(seed)).to(place.dtype)


def last_layer(branch: nn.Module) -> list[nn.Parameter]:
    """Weight and bias of the last layer that has any."""
    *_, last = (module for module in branch.modules() if list(module.parameters(recurse=False)))
    return list(last.parameters())


def is_live(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.isfinite().all() and parameter.grad.any())


def step(branch: nn.Module, h: Tensor, direction: Tensor) -> None:
    """One step of gradient descent; the gradients stay."""
    branch.zero_grad()
    (branch(h) * direction).sum().backward()
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator]


def names(place: Place) -> list[str]:
    return [blueprint.name for blueprint in blueprints_for(place)]


# At birth


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for place in PLACES for name in names(place)}))
def test_a_branch_is_zero_at_birth_and_learns_from_the_first_step(name: str) -> None:
    blueprint = get_blueprint(name)
    places = [place for place in PLACES if blueprint in blueprints_for(place)]
    assert len(places) > 5
    for place in places:
        for batch in (1, 4):
            branch, h = build_branch(blueprint, place, seed=1), draw(place, batch)
            output = branch(h)
            assert (output.shape, output.dtype) == (h.shape, h.dtype), place
            assert not output.any(), place
            assert torch.equal(h + output, h), place
            step(branch, h, draw(place, batch, seed=2))
            weight, bias = last_layer(branch)
            assert is_live(bias), place
            assert is_live(weight), place
            assert branch(h).any(), place


@every_blueprint
def test_only_the_last_layer_is_zero_at_birth(blueprint: Blueprint, place: Place) -> None:
    branch = build_branch(blueprint, place, seed=1)
    last = last_layer(branch)
    assert not any(parameter.any() for parameter in last)
    weights = [module.weight for module in branch.modules() if isinstance(getattr(module, "weight", None), nn.Parameter)]
    assert all(weight.all() for weight in weights if weight is not last[0])


@every_blueprint
def test_all_parameters_learn_once_the_last_layer_is_not_zero(blueprint: Blueprint, place: Place) -> None:
    branch = build_branch(blueprint, place, seed=1)
    for _ in range(2):
        step(branch, draw(place), draw(place, seed=2))
    assert all(is_live(parameter) for parameter in branch.parameters())


@every_blueprint
def test_a_trained_branch_computes_the_same_in_both_modes_and_for_each_sample_alone(blueprint: Blueprint, place: Place) -> None:
    branch, h = build_branch(blueprint, place, seed=1), draw(place)
    for parameter in last_layer(branch):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    together = branch.train()(h)
    assert not list(branch.buffers())
    assert torch.equal(branch.eval()(h), together)
    for index in range(len(h)):
        torch.testing.assert_close(branch(h[index : index + 1])[0], together[index], rtol=1e-4, atol=1e-4)


@every_blueprint
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on processors without bfloat16, said once
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_branch_has_the_dtype_of_its_place(blueprint: Blueprint, place: Place, dtype: torch.dtype) -> None:
    place = Place(place.name, place.kind, place.shape, dtype=dtype)
    branch, h = build_branch(blueprint, place, seed=1), draw(place)
    output = branch(h)
    output.sum().backward()
    assert {parameter.dtype for parameter in branch.parameters()} == {dtype} == {output.dtype}
    assert not output.any()


@every_blueprint
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_branch_is_zero_at_birth_under_autocast(blueprint: Blueprint, place: Place) -> None:
    branch, h = build_branch(blueprint, place, seed=1), draw(place)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (h, h.bfloat16()):
            output = branch(given)
            assert not output.any()
            assert torch.equal(given + output, given)
    (output.float() * draw(place, seed=2)).sum().backward()
    assert all(is_live(parameter) for parameter in last_layer(branch))


def test_a_norm_is_not_offered_where_a_feature_has_a_single_value() -> None:
    assert "norm" not in {name for place in SINGLE for name in names(place)}
    assert "norm" in names(Place("two", "conv", (1, 2)))
    with pytest.raises(
        ValueError,
        match=r"'norm' does not fit the conv output 1×1×1 of 'one': it has no use for this shape; .*that fit: squeeze_excite, conv1x1",
    ):
        build_branch(get_blueprint("norm"), Place("one", "conv", (1, 1, 1)), seed=0)


def test_a_branch_sees_a_single_value() -> None:
    for place in SINGLE:
        for blueprint in blueprints_for(place):
            branch = build_branch(blueprint, place, seed=1)
            for parameter in branch.parameters():
                nn.init.ones_(parameter)  # so that the only unit of a ReLU is on
            first, second = branch(draw(place, batch=2).abs())
            assert not torch.equal(first, second), (blueprint.name, place)


# Attention


def trained_attention(*, is_causal: bool) -> nn.Module:
    branch = build_branch(get_blueprint("attention"), Place("body", "token", (6, 32), is_causal=is_causal), seed=1)
    nn.init.eye_(branch.get_submodule("out").weight)
    return branch


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_sees_later_positions_only_where_the_host_does(is_causal: bool) -> None:
    branch, h = trained_attention(is_causal=is_causal), draw(Place("body", "token", (6, 32)), batch=2)
    changed = h.clone()
    changed[:, 3] = -h[:, 3]
    difference = (branch(changed) - branch(h)).abs().amax((0, 2))  # [T]
    assert difference[3:].min() > 1e-3
    assert difference[:3].max() == 0 if is_causal else difference[:3].min() > 1e-3


def test_branches_of_a_causal_place_see_no_later_position() -> None:
    for place in (place for place in PLACES if place.is_causal and place.shape[-2 if place.kind == "token" else 1] > 2):
        line = 1 if place.kind == "token" else 2
        for blueprint in blueprints_for(place):
            branch, h = build_branch(blueprint, place, seed=1), draw(place)
            for parameter in last_layer(branch):
                nn.init.normal_(parameter)
            changed = h.clone()
            changed.select(line, 2).neg_()
            before, after = branch(h), branch(changed)
            assert torch.equal(before.narrow(line, 0, 2), after.narrow(line, 0, 2)), (blueprint.name, place)
            assert not torch.equal(before, after), (blueprint.name, place)


@every_blueprint
def test_a_branch_takes_more_and_fewer_positions_than_it_was_built_for(blueprint: Blueprint, place: Place) -> None:
    branch = build_branch(blueprint, place, seed=1)
    for change in (-2, 3):
        sizes = tuple(size + change for size in (place.shape[1:] if place.kind == "conv" else place.shape[:-1]))
        h = torch.randn(2, *((place.width, *sizes) if place.kind == "conv" else (*sizes, place.width)))
        assert branch(h).shape == h.shape


def test_attention_takes_any_leading_dimensions() -> None:
    branch, h = trained_attention(is_causal=True), draw(Place("body", "token", (6, 32)))
    torch.testing.assert_close(branch(h.reshape(2, 2, 6, 32)).reshape(4, 6, 32), branch(h))


def test_attention_equals_torchs_own() -> None:
    branch, h = trained_attention(is_causal=False), draw(Place("body", "token", (6, 32)))
    theirs = nn.MultiheadAttention(32, num_heads=2, batch_first=True)
    qkv, out, norm = (branch.get_submodule(name) for name in ("qkv", "out", "norm"))
    theirs.load_state_dict(
        {
            "in_proj_weight": qkv.weight,
            "in_proj_bias": qkv.bias,
            "out_proj.weight": out.weight,
            "out_proj.bias": out.bias,
        }
    )
    normed = norm(h)
    torch.testing.assert_close(branch(h), theirs(normed, normed, normed)[0])


# Cost


@pytest.mark.slow
def test_cost_counts_the_parameters_that_are_built() -> None:
    for place in PLACES[::5]:
        for blueprint in blueprints_for(place):
            branch = build_branch(blueprint, place, seed=0)
            assert cost_of(blueprint, place).parameters == sum(parameter.numel() for parameter in branch.parameters()) > 0


def test_flops_count_the_multiplications_of_a_branch() -> None:
    channels, positions = 16, 30
    expected = {
        "norm": 0,
        "squeeze_excite": 2 * 2 * channels * 4,
        "conv1x1": 2 * channels**2 * positions,
        "conv3x3": 2 * 9 * channels**2 * positions,
        "double_conv3x3": 2 * 2 * 9 * channels**2 * positions,
        "wide_conv3x3": 2 * 2 * 9 * 2 * channels**2 * positions,
        "bottleneck": 2 * (2 * 4 * channels + 9 * 4**2) * positions,
        "depthwise": 2 * (9 * channels + channels**2) * positions,
    }
    assert {blueprint.name: cost_of(blueprint, CONV).flops for blueprint in blueprints_for(CONV)} == expected
    length, features = 7, 32
    assert cost_of(get_blueprint("mlp"), DENSE).flops == 2 * 2 * 24 * 48
    assert cost_of(get_blueprint("low_rank"), TOKEN).flops == 2 * 2 * 8 * features * length
    attention = 2 * (4 * features**2 * length + 2 * features * length**2)
    assert cost_of(get_blueprint("attention"), TOKEN).flops == attention


def test_equal_places_share_a_cached_cost_until_the_blueprint_is_replaced() -> None:
    calls: list[Place] = []

    def of_width(width: int) -> Callable[[Place], nn.Module]:
        def build(place: Place) -> nn.Module:
            calls.append(place)
            return nn.Sequential(nn.Linear(place.width, width), zeroed(nn.Linear(width, place.width)))

        return build

    register_blueprint("narrow", kinds=["dense"])(of_width(3))
    costs = {cost_of(get_blueprint("narrow"), Place(name, "dense", (24,), depth=0.5)) for name in ("first", "second")}
    assert len(costs) == len(calls) == 1
    register_blueprint("narrow", kinds=["dense"], replace=True)(of_width(6))
    assert cost_of(get_blueprint("narrow"), DENSE).flops == 2 * costs.pop().flops


class NeedsNumbers(nn.Module):
    """Cannot run on tensors that hold nothing, and attends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = zeroed(nn.Linear(width, width))

    def forward(self, h: Tensor) -> Tensor:
        assert h.sum().item() < 1e6
        result: Tensor = self.out(torch.nn.functional.scaled_dot_product_attention(h, h, h))
        return result


def test_the_cost_of_a_branch_that_reads_values_is_counted() -> None:
    register_blueprint("needs_numbers", kinds=["token"])(lambda place: NeedsNumbers(place.width))
    cost = cost_of(get_blueprint("needs_numbers"), TOKEN)
    assert (cost.parameters, cost.flops) == (33 * 32, 2 * 32**2 * 7 + 2 * 2 * 7**2 * 32)


# Randomness


@every_blueprint
def test_weights_depend_on_the_seed_alone(blueprint: Blueprint, place: Place) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = build_branch(blueprint, place, seed=5).state_dict()
    cost_of(blueprint, place)
    blueprints._check.__wrapped__(blueprint, place)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    with torch.device("meta"):  # another default device
        again, other = (build_branch(blueprint, place, seed=seed).state_dict() for seed in (5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    is_drawn = any(first[name].unique().numel() > 2 for name in first)  # norms are ones and zeros
    assert is_drawn == any(not torch.equal(first[name], other[name]) for name in first)


@every_blueprint
def test_a_branch_is_built_independently_of_the_callers_torch_modes(blueprint: Blueprint, place: Place) -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        blueprints._check.__wrapped__(blueprint, place)
        branch = build_branch(blueprint, place, seed=1)
    step(branch, draw(place), draw(place, seed=2))
    assert all(is_live(parameter) for parameter in last_layer(branch))


# Registry


def zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def test_blueprints_of_a_place_come_in_the_order_of_registration() -> None:
    conv = ["norm", "squeeze_excite", "conv1x1", "conv3x3", "double_conv3x3", "wide_conv3x3", "bottleneck", "depthwise"]
    assert (names(CONV), names(TOKEN), names(DENSE)) == (conv, ["norm", "low_rank", "mlp", "attention"], ["norm", "low_rank", "mlp"])
    assert [blueprint.name for blueprint in blueprints_for(CONV, ["conv3x3", "mlp", "norm"])] == ["norm", "conv3x3"]
    assert blueprints_for(DENSE, ["conv3x3"]) == blueprints_for(DENSE, []) == ()
    assert all(blueprint.description and is_built_in(blueprint) for blueprint in blueprints_for(CONV) + blueprints_for(TOKEN))


def test_a_users_blueprint_is_found_checked_and_built() -> None:
    @register_blueprint("plain", kinds=["dense", "token"], fits=lambda place: place.width > 1)
    def plain(place: Place) -> nn.Module:
        """One linear layer.

        Nothing else.
        """
        return zeroed(nn.Linear(place.width, place.width))

    blueprint = get_blueprint("plain")
    assert plain(DENSE) is not plain(DENSE)
    assert blueprint == Blueprint("plain", frozenset({"dense", "token"}), plain, "One linear layer.", blueprint.fits)
    assert names(DENSE)[-1] == names(TOKEN)[-1] == "plain"
    assert "plain" not in names(CONV) + names(Place("one", "dense", (1,)))
    assert not is_built_in(blueprint)
    check_branch(blueprint, DENSE)
    assert cost_of(blueprint, TOKEN).flops == 2 * 32 * 32 * 7
    assert not build_branch(blueprint, DENSE, seed=0)(draw(DENSE)).any()


def test_a_branch_is_trainable_even_if_its_blueprint_froze_it() -> None:
    register_blueprint("frozen", kinds=["dense"])(lambda place: zeroed(nn.Linear(place.width, place.width)).requires_grad_(False))
    check_branch(get_blueprint("frozen"), DENSE)
    assert all(parameter.requires_grad for parameter in build_branch(get_blueprint("frozen"), DENSE, seed=0).parameters())


def test_a_blueprint_name_is_registered_once_unless_replaced() -> None:
    with pytest.raises(ValueError, match=r"'mlp' already.*replace=True"):
        register_blueprint("mlp", kinds=["dense"])(lambda place: nn.Identity())
    before = names(DENSE)
    register_blueprint("mlp", kinds=["dense"], description="mine", replace=True)(lambda place: nn.Identity())
    assert get_blueprint("mlp").description == "mine"
    assert names(DENSE) == before
    assert not is_built_in(get_blueprint("mlp"))


def test_names_and_kinds_of_blueprints_are_checked() -> None:
    with pytest.raises(ValueError, match=r"one word.*'my conv'"):
        register_blueprint("my conv", kinds=["conv"])
    for kinds in ([], ["image"], "conv"):
        with pytest.raises(ValueError, match=r"\['conv', 'token', 'dense'\], not"):
            register_blueprint("mine", kinds=kinds)  # type: ignore[arg-type]


def test_an_unknown_blueprint_is_refused_with_the_nearest_name_and_all_names() -> None:
    with pytest.raises(ValueError, match=r"'conv_3x3'; did you mean 'conv3x3'\? the blueprints are norm, squeeze_excite, .*attention"):
        get_blueprint("conv_3x3")
    with pytest.raises(ValueError, match=r"'film'; the blueprints are norm"):
        blueprints_for(DENSE, ["mlp", "film"])


def test_a_branch_of_another_kind_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"'conv3x3' does not fit the dense output 24 of 'body': it is made for conv outputs; .*that fit: norm, low_rank, mlp",
    ):
        build_branch(get_blueprint("conv3x3"), DENSE, seed=0)


# Checks


@pytest.mark.slow
def test_every_built_in_blueprint_passes_the_check() -> None:
    for place in PLACES[::4]:
        for blueprint in blueprints_for(place):
            check_branch(blueprint, place)


SHARED = zeroed(nn.Linear(24, 24))
FAULTS: dict[str, tuple[Callable[[Place], object], str]] = {
    "no_module": (lambda place: torch.relu, "returned a builtin_function_or_method; return an nn.Module"),
    "wrong_shape": (lambda place: zeroed(nn.Linear(24, 12)), r"turns \[2, 24\] in torch.float32 into \[2, 12\] in torch.float32"),
    "wrong_dtype": (lambda place: nn.Sequential(zeroed(nn.Linear(24, 24)), AsDouble()), r"\[2, 24\] in torch.float64"),
    "tuple": (lambda place: Pair(), "into a tuple"),
    "not_zero": (lambda place: nn.Linear(24, 24), r"not zero at birth, but up to \d.*last layer to zero"),
    "not_a_number": (lambda place: nn.LayerNorm(24, eps=float("nan")), "not zero at birth, but up to nan"),
    "relu_behind": (lambda place: nn.Sequential(zeroed(nn.Linear(24, 24)), nn.ReLU()), "no gradient at birth.*no norm or ReLU behind"),
    "all_zero": (lambda place: AllZero(), "no gradient at birth.*only its last layer"),
    "no_parameters": (lambda place: nn.Threshold(1e9, 0.0), "no gradient at birth"),
    "in_place": (lambda place: nn.Sequential(nn.ReLU(inplace=True), zeroed(nn.Linear(24, 24))), "changes its input"),
    "lazy": (lambda place: nn.LazyLinear(24), "lazy or empty tensors; give its layers their sizes"),
    "shared": (lambda place: SHARED, "same parameters twice.*new layers in every call"),
}


class AsDouble(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.double()


class Pair(nn.Module):
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, h


class AllZero(nn.Module):
    """Zero times zero: neither factor ever moves."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.gain = nn.Parameter(torch.zeros(24)), nn.Parameter(torch.zeros(24))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.down * self.gain


@pytest.mark.parametrize("name", FAULTS)
def test_a_blueprint_with_a_fault_is_refused_with_what_to_do(name: str) -> None:
    build, message = FAULTS[name]
    register_blueprint(name, kinds=["dense"])(build)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"blueprint '{name}' for the dense output 24: .*{message}"):
        check_branch(get_blueprint(name), DENSE)


class Mixed(nn.Module):
    """The mean over all positions, or over those so far, through a layer."""

    def __init__(self, width: int, *, is_causal: bool) -> None:
        super().__init__()
        self.out, self.is_causal = zeroed(nn.Linear(width, width)), is_causal

    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = self.out(h.cumsum(1) if self.is_causal else h.mean(1, keepdim=True).expand_as(h))
        return result


def test_a_custom_blueprint_grows_only_where_its_mixing_of_positions_is_allowed() -> None:
    register_blueprint("mean", kinds=["token"])(lambda place: Mixed(place.width, is_causal=False))
    register_blueprint("sum", kinds=["token"])(lambda place: Mixed(place.width, is_causal=True))
    register_blueprint("each", kinds=["token"])(lambda place: zeroed(nn.Linear(place.width, place.width)))
    causal, alone = replace(TOKEN, is_causal=True), replace(TOKEN, alone="the host takes 'mask'")
    assert names(TOKEN)[-3:] == ["mean", "sum", "each"]
    assert names(causal)[-3:] == ["attention", "sum", "each"]
    assert names(alone)[-2:] == ["mlp", "each"]
    with pytest.raises(
        ValueError, match=r"'mean' does not fit the token output 7×32 of 'body': it would look ahead, .*blueprints that fit: .*sum, each"
    ):
        build_branch(get_blueprint("mean"), causal, seed=0)
    with pytest.raises(
        ValueError, match=r"'sum' does not fit the token output 7×32 of 'body': the host takes 'mask'; blueprints that fit: "
    ):
        build_branch(get_blueprint("sum"), alone, seed=0)


def test_only_blueprints_without_mixing_of_positions_grow_in_places_that_forbid_it() -> None:
    alone = "the host takes 'mask'"
    assert names(replace(TOKEN, alone=alone)) == ["norm", "low_rank", "mlp"]
    assert names(Place("line", "conv", (16, 9), alone=alone)) == ["conv1x1"]


def test_a_blueprint_is_checked_once_for_equal_places() -> None:
    calls: list[Place] = []

    @register_blueprint("counted", kinds=["dense"])
    def counted(place: Place) -> nn.Module:
        calls.append(place)
        return zeroed(nn.Linear(place.width, place.width))

    for name in ("first", "second"):
        with torch.no_grad():
            check_branch(get_blueprint("counted"), Place(name, "dense", (24,)))
    before = len(calls)
    check_branch(get_blueprint("counted"), Place("third", "dense", (24,)))
    assert len(calls) == before
    check_branch(get_blueprint("counted"), Place("other", "dense", (8,)))
    assert len(calls) > before
