"""Units that can be widened are found by trial runs, and those that cannot be are refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from esper.growth import add_slots
from esper.growth.host import discover
from esper.growth.host.find_units import find_units
from esper.growth.host.layout import Reader, Through, Units
from esper.growth.host.units import chains
from esper.growth.lifecycle.stages import Cost
from esper.growth.seeds.blueprints import WIDENINGS, blueprints_for, flop_counter, widening_cost
from tests.growth.hosts import GPT, Block, CachedGPT

IMAGES = torch.randn(2, 3, 8, 8)
TOKENS = torch.randn(2, 5, 16)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class InvertedResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 4 * width
        self.expand, self.bn1 = nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self.depthwise, self.bn2 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False), nn.BatchNorm2d(hidden)
        self.project = nn.Conv2d(hidden, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(F.relu6(self.bn2(self.depthwise(F.relu6(self.bn1(self.expand(x)))))))


class ConvNeXt(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.pw1, self.pw2, self.gamma = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.pw2(F.gelu(self.pw1(h)))).permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Causal attention with heads of a fixed size, whose number follows from the width. Heads of queries share those of keys and values.

    `cache` holds the keys and values of earlier positions, and is extended.
    """

    def __init__(self, width: int, *, heads: int, shared_by: int = 1, size: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.size, self.shared_by = size, shared_by
        self.query, self.key = nn.Linear(width, heads * size), nn.Linear(width, heads // shared_by * size, bias=False)
        self.value, self.out = nn.Linear(width, heads // shared_by * size, bias=False), nn.Linear(heads * size, width)
        self.norm, self.dropout = nn.LayerNorm(size), nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        split = [made.view(*x.shape[:2], -1, self.size).transpose(1, 2) for made in (self.query(x), self.key(x), self.value(x))]
        query, (key, value) = self.norm(split[0]), split[1:]  # [B, heads, T, size]
        if cache is not None:
            key, value = (torch.cat(pair, 2) for pair in zip(cache, (key, value), strict=True)) if cache else (key, value)
            cache[:] = key, value
        key, value = (part.repeat_interleave(self.shared_by, 1) for part in (key, value))
        scores = query @ key.transpose(2, 3) / self.size**0.5
        ahead = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + scores.shape[3] - scores.shape[2])
        mixed = self.dropout(scores.masked_fill(ahead, -torch.inf).softmax(3)) @ value
        return x + self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


class FixedHeads(nn.Module):
    """Attention with a fixed number of heads, whose size follows from the width; with one layer for all three, or with three."""

    def __init__(self, width: int, *, heads: int, split: str) -> None:
        super().__init__()
        self.heads, self.split = heads, split
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.split == "view":
            made = self.all(x).view(*x.shape[:2], 3, self.heads, -1).unbind(2)
        else:
            parts = self.all(x).chunk(3, -1) if self.split == "chunk" else (self.query(x), self.key(x), self.value(x))
            made = tuple(part.view(*x.shape[:2], self.heads, -1) for part in parts)
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in made), is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(16, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        return self.left(h) + self.right(h)


def found(host: nn.Module, example: Tensor) -> dict[str, Units]:
    return {units.name: units for units in find_units(host, example)[0]}


def structure(units: Units) -> Units:
    """Return the units without carriers and costs."""
    return replace(units, carriers=(), sizes=(), own_cost=(0, 0))


def reasons(host: nn.Module, example: Tensor) -> dict[str, str]:
    return {refusal.name: refusal.reason for refusal in find_units(host, example)[1]}


def test_a_chain_of_convolutions_and_a_flattened_map_is_widened_from_layer_to_layer() -> None:
    host = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10)),
    )
    units, refusals = find_units(host, IMAGES)
    assert [structure(one) for one in units] == [
        Units(("0",), ("1",), (Reader("4", 1),), 8, 1),
        Units(("4",), (), (Reader("8", 4),), 16, 1),
        Units(("8",), ("10",), (Reader("11", 1),), 32, 1, through=(("10", Through(axis=-1)),)),
    ]
    assert [refusal.name for refusal in refusals] == ["11"]
    assert units[0].carriers == ("0", "1", "2", "3")
    assert [(name, size.positions) for name, size in units[0].sizes] == [("0", 64), ("4", 16)]
    assert [[one.name for one in chain] for chain in chains(units)] == [["0", "4", "8"]]


FEEDFORWARD = Units(("linear1",), ("dropout",), (Reader("linear2", 1),), 32, 1, through=(("dropout", Through(axis=-1)),))


@pytest.mark.parametrize(
    ("host", "example", "expected"),
    [
        (Residual(8), torch.randn(2, 8, 4, 4), Units(("conv1",), ("bn1",), (Reader("conv2", 1),), 8, 1)),
        (Gated(16, 24), TOKENS, Units(("gate", "up"), (), (Reader("down", 1),), 24, 1)),
        (InvertedResidual(4), torch.randn(2, 4, 4, 4), Units(("expand",), ("bn1", "depthwise", "bn2"), (Reader("project", 1),), 16, 1)),
        (ConvNeXt(4), torch.randn(2, 4, 8, 8), Units(("pw1",), (), (Reader("pw2", 1),), 16, 1)),
        (Two(), TOKENS, Units(("first",), (), (Reader("left", 1), Reader("right", 1)), 8, 1)),
        (nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), TOKENS, FEEDFORWARD),
    ],
    ids=["residual", "gated", "inverted", "convnext", "two readers", "encoder layer"],
)
def test_units_inside_blocks_are_found_by_data_flow(host: nn.Module, example: Tensor, expected: Units) -> None:
    assert [structure(one) for one in found(host, example).values()] == [expected]


def test_new_units_of_a_group_norm_are_whole_groups() -> None:
    host = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 2, 1), nn.Flatten(), nn.Linear(128, 2))
    units = found(host, IMAGES)["0"]
    assert (units.step, units.added(0.25), units.added(0.5), units.added(1.0)) == (4, 4, 4, 8)


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (nn.LayerNorm(8), "go through '1', a LayerNorm, which normalises over all of them"),
        (nn.RMSNorm(8), "go through '1', a RMSNorm, which normalises over all of them"),
        (nn.Softmax(dim=-1), "are mixed outside of layers"),
    ],
    ids=["layer norm", "rms norm", "softmax"],
)
def test_units_that_something_mixes_are_refused(middle: nn.Module, reason: str) -> None:
    host = nn.Sequential(nn.Linear(16, 8), middle, nn.Linear(8, 4))
    assert reason in reasons(host, TOKENS)["0"]


def test_weights_that_are_made_from_all_rows_are_refused() -> None:
    assert "parametrization" in reasons(nn.Sequential(spectral_norm(nn.Linear(16, 8)), nn.Linear(8, 4)), TOKENS)["0"]
    assert "parametrization" in reasons(nn.Sequential(nn.Linear(16, 8), weight_norm(nn.Linear(8, 4))), TOKENS)["0"]
    by_column = nn.Sequential(weight_norm(nn.Linear(16, 8), dim=1), nn.Linear(8, 4))
    assert "parametrization" in reasons(by_column, TOKENS)["0"]
    assert "parametrization" in add_slots(by_column, TOKENS).describe()


def test_a_layer_with_a_weight_norm_for_each_row_gets_new_units() -> None:
    host = nn.Sequential(weight_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 16))
    assert structure(found(host, TOKENS)["0"]) == Units(("0",), (), (Reader("2", 1),), 16, 1)
    host[2].weight = host[0].parametrizations.weight.original1
    assert "share the weight" in reasons(host, TOKENS)["0"]


def test_a_batch_norm_that_averages_over_all_batches_is_refused() -> None:
    host = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, momentum=None), nn.Conv2d(8, 2, 1))
    assert "momentum=None" in reasons(host, IMAGES)["0"]


def test_a_squeeze_excite_gate_and_a_residual_stream_are_refused() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.squeeze, self.excite, self.out = nn.Conv2d(3, 8, 1), nn.Linear(8, 2), nn.Linear(2, 8), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x)
            return self.out(h * self.excite(self.squeeze(h.mean((2, 3)))).sigmoid()[..., None, None])

    host = Gate()
    assert "combined with others that would not be more" in reasons(host, IMAGES)["conv"]
    assert list(found(host, IMAGES)) == ["squeeze"]
    assert "combined" in reasons(Residual(8), torch.randn(2, 8, 4, 4))["conv2"]


def test_tied_weights_and_layers_that_run_twice_are_refused() -> None:
    tied = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    tied[2].weight = tied[0].weight
    assert "share the weight" in reasons(tied, TOKENS)["0"]
    layer = nn.Linear(16, 16)
    assert "2 times" in reasons(nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(16, 2)), TOKENS)["0"]


def test_features_that_a_flatten_interleaves_are_refused() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 4, 1), nn.Linear(256, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.conv(x).permute(0, 2, 3, 1).flatten(1))

    assert "mixed outside of layers" in reasons(Last(), IMAGES)["conv"]


def test_a_search_changes_nothing_in_the_host() -> None:
    host = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Conv2d(8, 2, 1)).train()
    before, random = {name: tensor.clone() for name, tensor in host.state_dict().items()}, torch.get_rng_state()
    find_units(host, IMAGES)
    assert all(torch.equal(tensor, before[name]) for name, tensor in host.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert host[1].training
    assert "forward" not in vars(host[0])


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_cost_of_new_units_is_that_of_the_wider_network(share: float) -> None:
    def counted(width: int, second: int) -> Cost:
        host = nn.Sequential(
            *(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, second, 3), nn.GroupNorm(2, second), nn.ReLU(), nn.Flatten(), nn.Linear(4 * second, 5)),
        )
        with flop_counter() as counter, torch.no_grad():
            host(IMAGES)
        hosts.append(host)
        return Cost(sum(parameter.numel() for parameter in host.parameters()), counter.get_total_flops() // len(IMAGES))

    hosts: list[nn.Module] = []
    before = counted(4, 8)
    (chain,) = chains(find_units(hosts[0], IMAGES)[0])
    added = [units.added(share) for units in chain]
    after = counted(4 + added[0], 8 + added[1])
    assert widening_cost(chain, added) == Cost(after.parameters - before.parameters, after.flops - before.flops)


def test_a_batch_norm_behind_a_flattened_map_has_several_features_for_each_unit() -> None:
    host = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.BatchNorm1d(144), nn.ReLU(), nn.Linear(144, 5))
    units = found(host, IMAGES)["0"]
    assert (units.own, units.through, units.readers) == (("2",), (("2", Through(36)),), (Reader("4", 36),))
    slotted = add_slots(host.eval(), IMAGES, slots=["0"])
    before = host(IMAGES)
    seed = slotted.new_seed("0", "widen_50", random_seed=1)
    slotted.slot("0").plant(seed, connected=True)
    assert torch.equal(host(IMAGES), before)
    slotted.slot("0").is_kept = True
    assert torch.allclose(slotted.bake()(IMAGES), before, atol=1e-6)
    assert host[2].weight.shape == (6 * 36,)


def test_a_dropout_that_runs_several_times_draws_for_new_units_as_for_others() -> None:
    dropout = nn.Dropout(0.5)
    host = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), dropout, nn.Linear(8, 8), nn.ReLU(), dropout, nn.Linear(8, 2))
    assert [(units.name, units.own) for units in find_units(host, TOKENS)[0]] == [("0", ()), ("3", ())]


def heads_of(shared_by: int) -> Units:
    made = (("query", 4 * shared_by), ("key", 4), ("value", 4))
    through = (("dropout", Through(shared_by, -3)),)
    readers = (Reader("out", 4 * shared_by),)
    return Units(("query", "key", "value"), ("dropout",), readers, 4 // shared_by, 1, through=through, made=made)


@pytest.mark.parametrize("shared_by", [1, 2])
def test_attention_is_widened_by_whole_heads_with_all_queries_that_share_their_keys(shared_by: int) -> None:
    units = found(Attention(16, heads=4, shared_by=shared_by), TOKENS)
    assert [structure(one) for one in units.values()] == [heads_of(shared_by)]
    assert [units["query"].added(share) for share in (0.25, 0.5, 1.0)] == [1, 2 // shared_by, 4 // shared_by]


@pytest.mark.parametrize(
    ("split", "layer", "reason"),
    [("three", "query", "are split into heads"), ("chunk", "all", "are split into parts"), ("view", "all", "are split into parts")],
)
def test_heads_whose_number_the_host_fixes_are_refused_and_described(split: str, layer: str, reason: str) -> None:
    host = FixedHeads(16, heads=4, split=split)
    assert not found(host, TOKENS)
    assert reason in reasons(host, TOKENS)[layer]
    assert reason in add_slots(host, TOKENS).describe()


def test_the_cost_of_new_heads_is_that_of_the_attention_with_more_heads() -> None:
    def counted(heads: int) -> Cost:
        host = Attention(16, heads=heads, shared_by=2)
        with flop_counter() as counter, torch.no_grad():
            host(TOKENS)
        return Cost(sum(parameter.numel() for parameter in host.parameters()), counter.get_total_flops() // len(TOKENS))

    (units,) = found(Attention(16, heads=4, shared_by=2), TOKENS).values()
    before, after = counted(4), counted(8)
    assert widening_cost((units,), [2]) == Cost(after.parameters - before.parameters, after.flops - before.flops)


def test_a_slot_after_a_block_widens_the_feedforward_network_and_one_after_the_attention_its_heads() -> None:
    host = nn.Sequential(nn.Sequential(Attention(16, heads=4), Gated(16, 24)), nn.Linear(16, 2))
    slotted = add_slots(host, TOKENS, slots=["0", "0.0"])
    widened = {
        (slot, name): [plan.module for plan in slotted.new_seed(slot, name, random_seed=0).spec.wide if plan.outputs and not plan.inputs]
        for slot in ("0", "0.0")
        for name in ("widen_50", "widen_50_chain")
        if slot == "0" or name == "widen_50"
    }
    heads, hidden = ["0.0.query", "0.0.key", "0.0.value"], ["0.1.gate", "0.1.up"]
    assert widened == {("0", "widen_50"): hidden, ("0", "widen_50_chain"): [*heads, *hidden], ("0.0", "widen_50"): heads}
    assert "4 of 4 features" in slotted.describe()


def test_a_last_block_has_a_default_slot_for_seeds_that_widen_the_units_inside_it_and_for_no_others() -> None:
    slotted = add_slots(nn.Sequential(Residual(8), Residual(8)), torch.randn(2, 8, 4, 4))
    assert list(slotted.slots) == ["0", "1"]
    assert {blueprint.name for blueprint in blueprints_for(slotted.place("1"))} == {f"widen_{percent}" for percent in WIDENINGS}
    assert "conv3x3" in {blueprint.name for blueprint in blueprints_for(slotted.place("0"))}
    assert "it would change the predictions directly" in slotted.describe()
    named = add_slots(nn.Sequential(Residual(8), Residual(8)), torch.randn(2, 8, 4, 4), slots=["1"])
    assert "conv3x3" in {blueprint.name for blueprint in blueprints_for(named.place("1"))}  # whoever names it may have any seed there
    alone = add_slots(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), TOKENS)
    assert list(alone.slots) == ["1"]
    assert list(add_slots(nn.Sequential(Gated(16, 24)), TOKENS).slots) == ["0.gate", "0.up"]  # inside it


def test_a_pruned_layer_is_refused() -> None:
    host = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    prune.l1_unstructured(host[2], "weight", 0.3)
    units, refusals = find_units(host, torch.randn(2, 6))
    assert not [one for one in units if one.name in ("0", "2")]
    assert "pruning" in next(one.reason for one in refusals if one.name == "2")


# Many blocks in one pass


def deep(model: GPT | CachedGPT, blocks: int) -> nn.Module:
    """Return a GPT of more blocks."""
    kind: Any = type(model.blocks[0])
    model.blocks.extend(Block(16, is_causal=True) if kind is Block else kind(16) for _ in range(blocks - 2))
    return model


@pytest.mark.parametrize("make", [GPT, CachedGPT])
def test_slots_in_a_deep_gpt_take_no_more_passes_than_in_a_flat_one(make: type[GPT] | type[CachedGPT]) -> None:
    calls = {}
    for blocks in (4, 16):
        model, count = deep(make(), blocks), [0]
        model.register_forward_pre_hook(lambda module, arguments, count=count: count.__setitem__(0, count[0] + 1))
        slotted = add_slots(model, torch.randint(1, 11, (2, 8)))
        calls[blocks] = count[0]
        widened = {units.producers for place in slotted.discovery.places.values() for units in place.chain}
        assert len(widened) == blocks  # the feedforward network of every block
    assert calls[4] == calls[16] <= 40


class SharesKeys(nn.Module):
    """The second attention takes the keys and values of the first out of a cache, which the host gives to both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SharedAttention() for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return cast(Tensor, self.head(x))


class Cache:
    keys: Tensor | None = None


class SharedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys, self.out = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        own = self.keys(x)
        cache.keys = own if cache.keys is None else cache.keys
        query, keys = (made.unflatten(-1, (-1, 4)).transpose(1, 2) for made in (self.query(x), cache.keys))
        return x + cast(Tensor, self.out(F.scaled_dot_product_attention(query, keys, keys).transpose(1, 2).flatten(2)))


def test_units_that_get_from_one_block_into_another_are_not_found_in_both_alone() -> None:
    """Heads of the first block must match those of all others, so that none can be widened."""
    widened = found(SharesKeys(), TOKENS)
    assert not any("blocks" in name for name in widened)
    assert not find_units(SharesKeys(), TOKENS)[0]


def test_a_slow_search_says_what_it_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    add_slots(deep(GPT(), 4), torch.randint(1, 11, (2, 8)))
    assert not capsys.readouterr().err
    monkeypatch.setattr(discover, "SAY_EVERY", 0.0)
    add_slots(deep(GPT(), 4), torch.randint(1, 11, (2, 8)))
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("esper: looking where the model can grow; ") for line in lines)
    assert any("changing the example" in line for line in lines)
    assert lines[-1].endswith("layers are tried out, 4 at once are next") or lines[-1].endswith("1 at once are next")
