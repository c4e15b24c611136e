"""Models of every family take slots: nothing changes until a seed has learned, and everything can be undone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth import add_slots
from esper.growth.host.layout import Place
from esper.growth.host.saving import load
from esper.growth.host.slots import tensors_in
from esper.growth.host.slotted import Slotted
from esper.growth.seeds.blueprints import WIDENINGS, blueprints_for, flop_counter
from esper.growth.seeds.seed import Blending
from tests.growth.host.helpers import every_family, germinate, hooks_of, is_close, is_same, perturb, plant_kept_seeds, possible_growths, run
from tests.growth.hosts import (
    FAMILIES,
    GPT,
    VOCABULARY,
    Block,
    Encoder,
    Family,
    PaddedEncoder,
    PadToken,
    Patches,
    PixelCNN,
    PrefixLM,
    Remembering,
    Seq2Seq,
    Shifting,
    Transposing,
)

# Torch says so once on processors that have to do without.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")


@pytest.mark.slow
@every_family
def test_slots_are_found_and_change_nothing(family: Family) -> None:
    model, batch = family.model(), family.batch()
    before, names, parameters = run(model, batch), list(model.state_dict()), list(model.parameters())
    slotted = add_slots(model, batch[:2])
    assert tuple(slotted.slots) == family.slots
    assert (is_close if family.is_fused else is_same)(run(slotted, batch), before)
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert slotted.remove() is model
    assert not hooks_of(model)
    assert is_same(run(model, batch), before)


@pytest.mark.slow
@every_family
def test_slots_change_nothing_in_training(family: Family) -> None:
    """With dropout, statistics of norms, and gradients."""
    plain, model, batch = family.model().train(), family.model().train(), family.batch()
    slotted = add_slots(model, batch[:2])
    results = []
    for callee in (plain, slotted):
        torch.manual_seed(0)
        outputs = list(tensors_in(callee(batch)))
        sum(output.square().sum() for output in outputs).backward()  # type: ignore[union-attr]
        results.append([output.detach() for output in outputs])
    assert is_same(*results)
    assert is_same(list(plain.buffers()), list(model.buffers()))
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.slow
@every_family
def test_a_baked_model_keeps_its_names_and_outputs_and_survives_pickle_copy_and_a_second_growth(family: Family) -> None:
    model, batch = family.model(), family.batch()
    names = list(model.state_dict())
    slotted = add_slots(model, batch[:2])
    plant_kept_seeds(slotted, family.slots[0])
    expected = run(slotted, batch)
    baked = slotted.bake()
    assert baked is model
    assert slotted.bake() is model  # and again, nothing
    assert is_same(run(baked, batch), expected)
    assert [name for name in baked.state_dict() if name in names] == names
    added = set(baked.state_dict()) - set(names)
    assert added
    assert all(name.startswith(f"{family.slots[0]}.") and ".esper_seed." in name for name in added)
    assert is_same(run(copy.deepcopy(baked), batch), expected)
    assert is_same(run(pickle.loads(pickle.dumps(baked)), batch), expected)

    again = add_slots(baked, batch[:2])
    assert tuple(again.slots) == family.slots
    plant_kept_seeds(again, family.slots[0], family.slots[-1])
    expected = run(again, batch)
    twice = again.bake()
    assert is_same(run(twice, batch), expected)
    assert any(name.startswith(f"{family.slots[0]}.") and name.endswith(".esper_seed_2.use_esper_load") for name in twice.state_dict())
    assert is_same(run(load(twice.state_dict(), model=family.model()), batch), expected)


def test_baking_without_seeds_gives_the_model_without_hooks() -> None:
    family = FAMILIES["resnet"]
    model, batch = family.model(), family.batch()
    slotted = add_slots(model, batch)
    perturb(germinate(slotted, "layer1.0", "conv3x3"))  # which nobody kept
    assert slotted.bake() is model
    assert not hooks_of(model)
    assert is_same(run(model, batch), run(family.model(), batch))


def test_a_seed_after_a_container_acts_once_when_it_is_baked() -> None:
    family = FAMILIES["resnet"]
    batch = family.batch()
    slotted = add_slots(family.model(), batch, slots=["layer1", "layer2.0.downsample"])
    plant_kept_seeds(slotted, "layer1", "layer2.0.downsample")
    expected = run(slotted, batch)
    assert is_same(run(slotted.bake(), batch), expected)


class RunsItsChildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


def test_a_seed_in_a_block_that_runs_all_of_its_children_acts_once_when_it_is_baked() -> None:
    model, batch = nn.Sequential(RunsItsChildren(), nn.Linear(8, 2)), torch.randn(3, 8)
    slotted = add_slots(model, batch)
    plant_kept_seeds(slotted, "0")
    expected = run(slotted, batch)
    assert is_same(run(slotted.bake(), batch), expected)


# Copies


@pytest.mark.slow
def test_a_copy_with_a_seed_on_trial_is_independent() -> None:
    family = FAMILIES["resnet"]
    model, batch = family.model(), family.batch()
    slotted = add_slots(model, batch)
    seed = germinate(slotted, "layer1.1", "conv3x3")
    perturb(seed)
    grown = run(model, batch)
    twin = copy.deepcopy(model)
    assert is_same(run(twin, batch), grown)
    perturb(seed)
    assert is_same(run(twin, batch), grown)
    assert not is_close(run(model, batch), grown)
    slotted.slot("layer1.1").plant(None)
    assert is_same(run(twin, batch), grown)


def test_a_copy_of_a_slotted_model_grows_and_is_undone_independently() -> None:
    family = FAMILIES["gpt"]
    batch = family.batch()
    slotted = add_slots(family.model(), batch)
    before = run(slotted, batch)
    slotted.slot("blocks.0").observe(lambda slot, output: output + 1)
    twin = copy.deepcopy(slotted)
    slotted.slot("blocks.0").observe(None)
    assert is_same(run(twin, batch), before)  # nobody looks at the copy
    perturb(germinate(twin, "blocks.1", "attention"))
    assert is_same(run(slotted, batch), before)
    grown = run(twin, batch)
    assert not is_close(grown, before)
    perturb(germinate(slotted, "blocks.1", "mlp"))
    assert is_same(run(twin, batch), grown)
    twin.remove()
    assert not hooks_of(twin.host)
    assert is_same(run(twin.host, batch), before)
    assert len(hooks_of(slotted.host)) == 3 + len(slotted.wide)  # two slots, the whole model, and the layers that can be widened


# Sequences


def flows_back(model: Any, batch: Tensor) -> bool:
    """Whether earlier outputs change with the last input."""
    changed = batch.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY if not batch.is_floating_point() else -changed[:, -1]
    (before,), (after,) = run(model, batch), run(model, changed)
    assert not torch.equal(before[:, -1], after[:, -1])
    return not torch.equal(before[:, :-1], after[:, :-1])


@pytest.mark.slow
@pytest.mark.parametrize("is_float", [False, True], ids=["tokens", "embeddings"])
def test_a_causal_host_stays_causal_with_every_blueprint(is_float: bool) -> None:
    family = FAMILIES["gpt"]
    batch = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0)) if is_float else family.batch()
    slotted = add_slots(family.model(), batch[:2])
    assert all(place.is_causal for place in slotted.discovery.places.values())
    for name, blueprint in possible_growths(slotted):
        perturb(germinate(slotted, name, blueprint))
        assert not flows_back(slotted, batch)
        slotted.slot(name).plant(None)
    assert "causal" in slotted.describe()


class TwoStreams(nn.Module):
    """A bidirectional encoder, and a decoder that looks at it and back."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        self.source, self.target = nn.Embedding(VOCABULARY, 16), nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        memory = self.encoder(self.source(source))
        result: Tensor = self.head(self.decoder(self.target(target), memory, tgt_mask=mask, tgt_is_causal=True))
        return result


@pytest.mark.slow
def test_causality_is_detected_separately_for_each_input() -> None:
    batch = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
    slotted = add_slots(TwoStreams(), {"source": batch, "target": batch.flip(0)})
    assert {name: slot.place.is_causal for name, slot in slotted.slots.items()} == {
        "encoder": False,
        "decoder.layers.0": True,
        "decoder.layers.1": True,
    }


IDS = torch.randint(VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "without the last": lambda ids: ids[:, :-1],
    "without the last five": lambda ids: ids[:, :-5],
    "without the first": lambda ids: ids[:, 1:],
    "without the first four": lambda ids: ids[:, 4:],
    "moved on": lambda ids: F.pad(ids, (1, -1)),
    "moved back": lambda ids: F.pad(ids, (-1, 1)),
    "moved back by three": lambda ids: F.pad(ids, (-3, 3)),
    "rolled": lambda ids: ids.roll(-1, 1),
    "three of them": lambda ids: ids[:, 5:8],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIFTS)
def test_a_host_that_shifts_its_inputs_stays_causal_with_every_blueprint(name: str) -> None:
    slotted = add_slots(Shifting(SHIFTS[name]).eval(), IDS[:2])
    assert list(slotted.slots) == ["blocks.0", "blocks.1"]
    assert all(slot.place.is_causal for slot in slotted.slots.values())
    changed = IDS.clone()
    changed[:, 6] = (changed[:, 6] + 1) % VOCABULARY
    first = int((SHIFTS[name](IDS) != SHIFTS[name](changed)).any(0).nonzero()[0])  # the position that sees the change
    for slot, blueprint in possible_growths(slotted):
        perturb(germinate(slotted, slot, blueprint))
        (before,), (after,) = run(slotted, IDS), run(slotted, changed)
        assert torch.equal(before[:, :first], after[:, :first])
        assert not torch.equal(before[:, first:], after[:, first:])
        slotted.slot(slot).plant(None)


IGNORED = torch.full_like(IDS, -100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [{"ids": IDS, "labels": IDS.flip(1)}, (IDS, IDS), {"ids": IDS, "labels": IDS[:, :4]}, {"ids": IDS, "labels": IGNORED}],
    ids=["labels", "labels that are the inputs", "fewer labels", "labels that are all ignored"],
)
def test_a_decoder_that_reads_the_labels_is_causal_and_its_encoder_is_not(example: Any) -> None:
    slotted = add_slots(Seq2Seq(), example)
    assert {name: slot.place.is_causal for name, slot in slotted.slots.items()} == {
        "encoder": False,
        "decoder.layers.0": True,
        "decoder.layers.1": True,
    }


def test_a_host_that_looks_ahead_in_a_prefix_counts_as_causal() -> None:
    assert all(slot.place.is_causal for slot in add_slots(PrefixLM(), IDS[:, :8]).slots.values())


@pytest.mark.parametrize("is_causal", [False, True])
def test_causality_is_detected_through_patches(is_causal: bool) -> None:
    slotted = add_slots(Patches(is_causal=is_causal), torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0)))
    assert {name: slot.place.is_causal for name, slot in slotted.slots.items()} == dict.fromkeys(("blocks.0", "blocks.1"), is_causal)


class Deaf(nn.Module):
    """Looks both ways, but nothing that could be changed reaches it, or what it does changes by itself, or it refuses other inputs."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason, self.calls, self.given = reason, 0, IDS[:2].clone()
        self.embed, self.block, self.head = nn.Embedding(VOCABULARY, 16), Block(16, is_causal=False), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        if self.reason == "refuses" and not torch.equal(ids, self.given):
            raise ValueError("no other input, please")
        ids = ids * 0 if self.reason == "sees nothing" else ids
        x = self.embed(ids) + (self.calls if self.reason == "changes" else 0)
        result: Tensor = self.head(self.block(x))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["sees nothing", "changes", "refuses"])
def test_a_host_of_unknown_causality_counts_as_causal(reason: str) -> None:
    assert add_slots(Deaf(reason), IDS[:2]).slots["block"].place.is_causal
    assert not add_slots(Deaf("is well"), IDS[:2]).slots["block"].place.is_causal


class Prefixed(GPT):
    """Puts a position of its own before the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([torch.zeros_like(x[:, :1]), x], 1))


def test_causality_is_detected_where_the_host_changes_the_length() -> None:
    slotted = add_slots(Prefixed(), torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0)))
    assert all(slot.place.is_causal and slot.place.shape == (7, 16) for slot in slotted.slots.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "encoder"])
def test_a_host_that_looks_both_ways_is_not_taken_for_causal(name: str) -> None:
    family = FAMILIES[name]
    assert not any(slot.place.is_causal for slot in add_slots(family.model(), family.batch()[:2]).slots.values())


class Wave(nn.Module):
    """Convolutions along a line that look back only, unless padded on both sides."""

    def __init__(self, *, kernel: int = 3, is_causal: bool = True) -> None:
        super().__init__()
        self.padding = (kernel - 1, 0) if is_causal else (kernel // 2, kernel // 2)
        self.first, self.second, self.head = nn.Conv1d(4, 8, kernel), nn.Conv1d(8, 8, kernel), nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        pad = F.pad
        result: Tensor = self.head(self.second(pad(self.first(pad(x, self.padding)).relu(), self.padding)).relu())
        return result


def looks_ahead(model: Any, batch: Tensor, index: int, line: int) -> bool:
    """Whether outputs before this position of the input change with it."""
    changed = batch.clone()
    changed.select(line, index).neg_()
    (before,), (after,) = run(model, batch), run(model, changed)
    assert not torch.equal(before, after)
    return not torch.equal(before.narrow(line, 0, index), after.narrow(line, 0, index))


def test_seeds_in_causal_convolutions_see_no_later_position() -> None:
    batch = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(0))
    slotted = add_slots(Wave().eval(), batch)
    assert {name: slot.place.is_causal for name, slot in slotted.slots.items()} == {"first": True, "second": True}
    grown = {blueprint for _, blueprint in possible_growths(slotted)}
    deep = {name for name in grown if not name.startswith("widen")}
    assert deep == {"conv1x1", "conv3x3", "double_conv3x3", "wide_conv3x3", "bottleneck", "depthwise"}
    assert "widen_100_chain" in grown
    for name, blueprint in possible_growths(slotted):
        perturb(germinate(slotted, name, blueprint))
        assert not looks_ahead(slotted, batch, 5, line=2)
        slotted.slot(name).plant(None)


def test_convolutions_that_look_both_ways_are_not_taken_for_causal() -> None:
    batch = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(0))
    slotted = add_slots(Wave(is_causal=False), batch)
    assert {name: slot.place.is_causal for name, slot in slotted.slots.items()} == {"first": False, "second": False}
    family = FAMILIES["conv1d"]  # with strides
    assert not any(slot.place.is_causal for slot in add_slots(family.model(), family.batch()).slots.values())


@pytest.mark.parametrize("channels", [4, 11, 12, 24])
def test_causal_convolutions_that_leave_out_the_last_position_stay_causal(channels: int) -> None:
    """Also where there are as many channels as positions, which a change of a channel reaches all."""

    class Shortened(Wave):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :4, :-1])

    slotted = add_slots(Shortened(), torch.randn(2, channels, 12, generator=torch.Generator().manual_seed(0)))
    assert all(slot.place.is_causal for slot in slotted.slots.values())


def test_seeds_in_an_autoregressive_image_model_see_no_later_pixel() -> None:
    batch = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    slotted = add_slots(PixelCNN().eval(), batch)
    assert {blueprint for _, blueprint in possible_growths(slotted)} == {"conv1x1"}
    for name, blueprint in possible_growths(slotted):
        perturb(germinate(slotted, name, blueprint))
        assert not looks_ahead(slotted, batch, 3, line=2)
        slotted.slot(name).plant(None)
    with pytest.raises(ValueError, match="'conv3x3' does not fit"):
        germinate(slotted, "first", "conv3x3")


def test_inputs_with_time_first_are_refused_with_advice() -> None:
    batch = torch.randn(7, 3, 4)
    with pytest.raises(ValueError, match=r"'embed' has no batch as its first dimension.*batch_first=True"):
        add_slots(Encoder(batch_first=False), batch)


@pytest.mark.slow
@pytest.mark.parametrize("length", [7, 3, 1], ids=["another length", "as long as the batch", "one step"])
@pytest.mark.parametrize("samples", [3, 1])
def test_time_first_layout_inside_a_model_is_detected_for_all_sizes(length: int, samples: int) -> None:
    torch.manual_seed(0)
    slotted = add_slots(Transposing().eval(), torch.randn(samples, length, 4))
    assert {name: (slot.place.kind, slot.place.shape, slot.place.batch_axis) for name, slot in slotted.slots.items()} == {
        f"inner.encoder.layers.{number}": ("token", (length, 16), 1) for number in (0, 1)
    }


@pytest.mark.slow
@pytest.mark.parametrize("blending", ["add", "multiply", "gate"])
def test_seeds_in_a_time_first_sequence_do_not_mix_samples(blending: Blending) -> None:
    torch.manual_seed(0)
    model, batch = Transposing().eval(), torch.randn(3, 7, 4)
    slotted = add_slots(model, batch)
    before = run(model, batch)
    assert offered(slotted) == {"norm", "low_rank", "mlp", "attention", *WIDER}
    for name, blueprint in possible_growths(slotted):
        if blending != "add" and blueprint in WIDER:
            continue
        seed = germinate(slotted, name, blueprint, blending=blending)
        assert is_same(run(model, batch), before)
        perturb(seed)
        (together,) = run(model, batch)
        assert not torch.allclose(together, before[0], atol=1e-4)
        for row in range(3):
            torch.testing.assert_close(run(model, batch[row : row + 1])[0][0], together[row], rtol=1e-4, atol=1e-5)
        slotted.slot(name).plant(None)
    plant_kept_seeds(slotted, "inner.encoder.layers.0")
    expected = run(model, batch)
    torch.manual_seed(0)
    assert is_same(run(load(slotted.bake().state_dict(), model=Transposing().eval()), batch), expected)


# Masks and caches


WIDER = tuple(f"widen_{percent}" for percent in WIDENINGS)


def offered(slotted: Slotted) -> set[str]:
    return {blueprint for _, blueprint in possible_growths(slotted)}


@pytest.mark.slow
@pytest.mark.parametrize("has_attribute", [False, True], ids=["of the caller", "of the host"])
def test_decoding_with_a_cache_gives_the_same_outputs_with_every_blueprint(has_attribute: bool) -> None:
    torch.manual_seed(0)
    model, ids = Remembering(has_attribute=has_attribute).eval(), IDS[:, :8]
    slotted = add_slots(model, ids)
    assert list(slotted.slots) == ["blocks.0", "blocks.1"]
    assert offered(slotted) == {"norm", "low_rank", "mlp", *WIDER}
    name = "a cache ('kv_cache')" if has_attribute else "'past'"
    assert "attention cannot grow in token 8×16 causal" in slotted.describe()
    assert f": the host takes {name}, and a seed would miss positions that only it holds" in slotted.describe()
    for slot, blueprint in possible_growths(slotted):
        perturb(germinate(slotted, slot, blueprint))
        with torch.no_grad():
            whole, cache = model(ids), list[Tensor]()
            if has_attribute:
                model.kv_cache = cache
                steps = [model(ids[:, index : index + 1], index) for index in range(8)]
                model.kv_cache = None
            else:
                steps = [model(ids[:, index : index + 1], index, cache) for index in range(8)]
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)
        slotted.slot(slot).plant(None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_index", "has_padding", "reason"),
    [
        (True, False, "the host takes padding (padding_idx of 'embed'), and a seed would see positions that it hides"),
        (False, True, "the host takes padding, and a seed would see positions that it hides"),
    ],
    ids=["an embedding knows", "the example shows"],
)
def test_seeds_do_not_see_padding_that_the_host_masks_itself(has_index: bool, has_padding: bool, reason: str) -> None:
    torch.manual_seed(0)
    ids = IDS[:, :8].clamp(min=1)
    padded = ids.clone()
    padded[1, 5:], padded[2, 3:] = 0, 0
    slotted = add_slots(PadToken(has_index=has_index).eval(), padded if has_padding else ids)
    assert offered(slotted) == {"norm", "low_rank", "mlp", *WIDER}
    assert reason in slotted.describe()
    for slot, blueprint in possible_growths(slotted):
        perturb(germinate(slotted, slot, blueprint))
        (together,) = run(slotted, padded)
        torch.testing.assert_close(run(slotted, padded[2:, :3])[0], together[2:], rtol=1e-4, atol=1e-5)
        slotted.slot(slot).plant(None)


@pytest.mark.slow
def test_a_causal_mask_does_not_count_as_a_padding_mask() -> None:
    batch = torch.randint(VOCABULARY, (6, 6), generator=torch.Generator().manual_seed(0))  # as many samples as tokens
    slotted = add_slots(TwoStreams(), (batch, batch.flip(0)))
    assert len(slotted.slots) == 3
    assert all("attention" in {blueprint.name for blueprint in blueprints_for(slot.place)} for slot in slotted.slots.values())


def test_a_gate_is_refused_where_padding_would_reach_it() -> None:
    slotted = add_slots(PadToken(has_index=True), IDS[:, :8])
    with pytest.raises(
        ValueError, match=r"the gate looks at the mean of the whole sequence, and 'blocks.1' must not: the host takes padding"
    ):
        germinate(slotted, "blocks.1", "mlp", blending="gate")


# Modules that compute their submodules by one kernel in evaluation


pytest_nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@pytest.mark.slow
def test_slots_inside_an_encoder_layer_act_in_evaluation() -> None:
    family = FAMILIES["encoder"]
    model, batch = family.model(), family.batch()
    before = run(model, batch)
    slotted = add_slots(model, batch[:2], slots=["encoder.layers.*.linear1", "encoder.layers.0.norm1"])
    assert len(slotted.slots) == 3
    assert is_close(run(slotted, batch), before)
    plant_kept_seeds(slotted, "encoder.layers.1.linear1")
    expected = [tensor.detach() for tensor in tensors_in(slotted(batch))]  # with gradients, for which there is no such kernel
    assert not is_close(expected, before)
    assert is_close(run(slotted, batch), expected)
    assert is_close(run(copy.deepcopy(slotted), batch), expected)
    with slotted.without(["encoder.layers.1.linear1"]):
        assert is_close(run(slotted, batch), before)
    assert is_close(run(slotted.bake(), batch), expected)
    again = family.model()
    add_slots(again, batch, slots=["encoder.layers.0.linear1"]).remove()
    assert not hooks_of(again)
    assert is_same(run(again, batch), before)


@pytest.mark.slow
@pytest_nested
@pytest.mark.parametrize("slots", [None, ["encoder.layers.*.linear2", "encoder.layers.1"]], ids=["layers", "inside"])
@pytest.mark.parametrize("nested", [True, False])
def test_seeds_in_an_encoder_with_padding_do_not_see_the_padding(nested: bool, slots: list[str] | None) -> None:
    torch.manual_seed(0)
    model, is_padding = PaddedEncoder(nested=nested).eval(), torch.zeros(3, 8, dtype=torch.bool)
    is_padding[1, 5:], is_padding[2, 3:] = True, True
    ids = IDS[:, :8]
    with torch.no_grad():
        before = model(ids, is_padding)
    slotted = add_slots(model, (ids, is_padding), slots=slots)
    assert len(slotted.slots) == (2 if slots is None else 3)
    with torch.no_grad():
        torch.testing.assert_close(slotted(ids, is_padding), before, rtol=0, atol=0 if slots is None else 1e-5)
        for name, blueprint in possible_growths(slotted):
            perturb(germinate(slotted, name, blueprint))
            together = slotted(ids, is_padding)
            assert not torch.allclose(together, before, atol=1e-4)
            for row, length in enumerate((8, 5, 3)):
                torch.testing.assert_close(slotted(ids[row : row + 1, :length])[0], together[row], rtol=1e-4, atol=1e-5)
            slotted.slot(name).plant(None)


class Fused(nn.Module):
    """Computes its layer in another way in evaluation, unless somebody watches itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or self._forward_hooks:
            result: Tensor = self.inner(x)
            return result
        return F.linear(x, self.inner.weight, self.inner.bias)


def test_a_place_that_evaluation_skips_is_refused() -> None:
    model = nn.Sequential(Fused(), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"nothing can grow after '0.inner': it does not run in evaluation"):
        add_slots(model, torch.randn(3, 8), slots=["0.inner"])
    assert list(add_slots(model, torch.randn(3, 8)).slots) == ["0"]


# Precision and memory format


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["resnet", "vit", "gpt", "sequential mlp"])
def test_seeds_have_the_precision_of_the_host(name: str, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    batch = family.batch() if family.is_tokens else family.batch().to(dtype)
    model = family.model().to(dtype)
    before = run(model, batch)
    slotted = add_slots(model, batch[:2])
    for slot, blueprint in possible_growths(slotted):
        seed = germinate(slotted, slot, blueprint)
        assert {tensor.dtype for tensor in (*seed.parameters(), seed.alpha)} == {dtype}
        assert is_same(run(slotted, batch), before)
        slotted.slot(slot).plant(None)
    plant_kept_seeds(slotted, family.slots[0])
    expected = run(slotted, batch)
    baked = slotted.bake()
    assert is_same(run(load(baked.state_dict(), model=family.model().to(dtype)), batch), expected)


@pytest.mark.parametrize("is_inside", [False, True], ids=["slots outside autocast", "slots inside"])
@pytest.mark.parametrize("name", ["resnet", "vit", "gpt", "sequential mlp", "conv1d"])
@pytest.mark.slow
def test_identity_at_birth_is_exact_under_autocast(name: str, is_inside: bool) -> None:
    family = FAMILIES[name]
    model, batch = family.model(), family.batch()[:2]
    if batch.ndim == 4:
        batch = batch[..., :8, :8]  # without bfloat16 in the processor, larger images take seconds
    with torch.autocast("cpu", torch.bfloat16):
        before = run(model, batch)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
        slotted = add_slots(model, batch)
    assert all(slot.place.dtype == torch.float32 for slot in slotted.slots.values())
    with torch.autocast("cpu", torch.bfloat16):
        for slot, blueprint in possible_growths(slotted):
            seed = germinate(slotted, slot, blueprint)
            assert is_same(run(slotted, batch), before)
            next(tensors_in(slotted(batch))).square().mean().backward()
            assert any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in seed.parameters())
            slotted.slot(slot).plant(None)


class MixedPrecision(nn.Module):
    """Norms in float32 in a host of another precision, as large models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8).bfloat16(), nn.LayerNorm(8), nn.Linear(8, 2).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x).float()).bfloat16())
        return result


def test_a_seed_has_the_precision_of_the_activations_at_its_place() -> None:
    batch = torch.randn(3, 6).bfloat16()
    slotted = add_slots(MixedPrecision(), batch)
    assert {name: slot.place.dtype for name, slot in slotted.slots.items()} == {"first": torch.bfloat16, "norm": torch.float32}
    for name, blueprint in possible_growths(slotted):
        germinate(slotted, name, blueprint)
        run(slotted, batch)


@pytest.mark.slow
def test_channels_last_is_kept() -> None:
    family = FAMILIES["resnet"]
    batch = family.batch().to(memory_format=torch.channels_last)
    model = family.model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    slotted = add_slots(model, batch)
    before = run(slotted, batch)
    seen = []
    model.get_submodule("layer2.0.conv1").register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    for blueprint in blueprints_for(slotted.slot("layer1.1").place):
        germinate(slotted, "layer1.1", blueprint.name)
        assert is_same(run(slotted, batch), before)
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in seen)


# Frozen and tied weights, places and FLOPs


def test_frozen_parts_stay_frozen_and_seeds_in_them_learn() -> None:
    family = FAMILIES["finetuned"]
    model, batch = family.model(), family.batch()
    slotted = add_slots(model, batch)
    seed = germinate(slotted, "backbone.layer1.0", "conv3x3")
    slotted(batch).square().mean().backward()
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name.startswith("backbone"))
    assert all(parameter.requires_grad for parameter in seed.parameters())
    assert any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in seed.parameters())


def test_a_tied_head_stays_tied_through_growth() -> None:
    family = FAMILIES["gpt"]
    slotted = add_slots(family.model(), family.batch())
    plant_kept_seeds(slotted, "blocks.1")
    baked = slotted.bake()
    assert baked.get_submodule("head").weight is baked.get_submodule("tokens").weight
    twin = copy.deepcopy(baked)
    assert twin.get_submodule("head").weight is twin.get_submodule("tokens").weight


@pytest.mark.slow
def test_the_gate_refuses_a_causal_place_and_opens_elsewhere() -> None:
    for name, is_refused in (("gpt", True), ("vit", False), ("resnet", False), ("sequential mlp", False)):
        family = FAMILIES[name]
        model, batch = family.model(), family.batch()
        before = run(model, batch)
        slotted = add_slots(model, batch)
        first = family.slots[0]
        blueprint = [blueprint.name for blueprint in blueprints_for(slotted.slot(first).place) if blueprint.share is None][-1]
        if is_refused:
            with pytest.raises(ValueError, match="the gate looks at the mean of the whole sequence"):
                germinate(slotted, first, blueprint, blending="gate")
            continue
        for blending in ("gate", "multiply"):
            seed = germinate(slotted, first, blueprint, blending=blending)
            assert is_same(run(slotted, batch), before)
            perturb(seed)
            assert not is_close(run(slotted, batch), before)


@pytest.mark.slow
def test_places_have_their_depth_and_the_flops_after_them() -> None:
    family = FAMILIES["resnet"]
    found = add_slots(family.model(), family.batch()).discovery
    inner = [found.places[name] for name in family.slots]
    assert [place.depth for place in inner] == sorted(place.depth for place in inner)
    assert all(0 < place.depth < 1 for place in inner)
    for place in inner:
        assert place.flops_behind == pytest.approx((1 - place.depth) * found.host.flops, abs=1)
    why = "its units are read by no layer of their own, only by the host's output"
    assert found.places["fc"] == Place("fc", "dense", (5,), depth=1.0, why_not_wider=why)
    assert found.host.parameters == sum(parameter.numel() for parameter in family.model().parameters())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_flops_of_recurrent_layers_are_counted(kind: str, gates: int, dtype: torch.dtype) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = getattr(nn, kind)(6, 16, num_layers=2, bidirectional=True, batch_first=True)
            self.fc, self.head = nn.Linear(32, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.fc(self.layers(x)[0][:, -1]).relu())
            return result

    found = add_slots(Tagger().to(dtype), torch.randn(3, 10, 6, dtype=dtype)).discovery
    first, second = gates * 16 * (6 + 16), gates * 16 * (32 + 16)
    assert found.host.flops == 2 * (10 * 2 * (first + second) + 32 * 8 + 8 * 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_flops_of_torchs_own_attention_are_counted(dtype: torch.dtype) -> None:
    family = FAMILIES["encoder"]
    width, length, inner, layers = 16, 7, 32, 2
    attention = 2 * 4 * length * width**2 + 2 * 2 * length**2 * width
    expected = 2 * length * 4 * width + layers * (attention + 2 * 2 * length * width * inner) + 2 * width * 5
    assert add_slots(family.model().to(dtype), family.batch().to(dtype)).discovery.host.flops == expected


@pytest.mark.parametrize("kernel", ["flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"])
def test_flops_of_grouped_query_attention_are_counted_with_every_kernel(kernel: str) -> None:
    counted = flop_counter().flop_registry[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")]
    queries, keys, values = torch.empty(2, 4, 5, 8), torch.empty(2, 2, 7, 8), torch.empty(2, 2, 7, 6)
    assert counted(queries, keys, values, out_val=values) == 2 * 2 * 4 * 5 * 7 * (8 + 6)


def test_flops_of_fused_kernels_equal_those_of_the_plain_computation() -> None:
    x, other = torch.randn(3, 7, 16), torch.randn(3, 5, 16)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    counts = []
    for is_fused in (True, False):
        torch.backends.mha.set_fastpath_enabled(is_fused)
        try:
            with torch.no_grad(), flop_counter() as counter:
                layer(x)
                layer.self_attn(x, x, x)
                layer.self_attn(x, other, other)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
def test_flops_of_attention_are_counted() -> None:
    width, length, blocks = 16, 5, 2
    family = FAMILIES["vit"]
    per_block = 2 * length * width * (3 * width + width + 4 * width) + 2 * 2 * length**2 * width
    patches = 2 * (length - 1) * width * 3 * 16
    assert add_slots(family.model(), family.batch()).discovery.host.flops == patches + blocks * per_block + 2 * width * 5
