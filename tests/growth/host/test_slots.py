"""Discovery of slots, errors for wrong slots and inputs, and no state changed after an error."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from esper.config import ConfigError
from esper.growth import GrowthConfig, GrowthError, add_slots
from esper.growth.host.slotted import Slotted
from esper.growth.seeds.blueprints import cost_of, get_blueprint
from tests.growth.host.helpers import germinate, hooks_of, is_same, perturb, plant_kept_seeds, run
from tests.growth.hosts import FAMILIES, GPT, DoubleConv, ResNet, Returning, Swin, ViT

RESNET = FAMILIES["resnet"]


def slots_of(*patterns: str) -> list[str]:
    return list(add_slots(RESNET.model(), RESNET.batch(), slots=list(patterns)).slots)


def refused(model: nn.Module, example_input: Any, message: str, **arguments: Any) -> None:
    """The mistake is answered, and the model is what it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    with pytest.raises(GrowthError, match=message):
        add_slots(model, example_input, **arguments)
    assert not hooks_of(model)
    assert [module.training for module in model.modules()] == modes
    assert is_same(list(model.state_dict().values()), list(before.values()))


# Names


@pytest.mark.slow
def test_patterns_select_slots_in_the_order_of_the_forward_pass() -> None:
    assert slots_of("layer?.0") == ["layer1.0", "layer2.0"]
    assert slots_of("layer2.*", "layer1.0") == ["layer1.0", *(name for name in slots_of("layer2.*"))]
    assert slots_of("layer2.1", "layer1.0") == ["layer1.0", "layer2.1"]
    assert slots_of("[lm]ayer[12].1") == ["layer1.1", "layer2.1"]


@pytest.mark.slow
def test_a_pattern_gives_one_slot_for_a_tensor_with_two_names_and_both_names_work() -> None:
    assert slots_of("layer1", "layer1.1") == ["layer1.1", "layer1"]
    assert slots_of("layer1*") == [name for name in slots_of("*") if name.startswith("layer1")]
    assert "layer1" in slots_of("layer1*")
    assert "layer1.1" not in slots_of("layer1*")
    assert slots_of("layer1.1", "layer?") == ["layer1.1", "layer2"]


def test_a_pattern_skips_places_that_are_refused() -> None:
    assert not any(name.endswith("0.relu") for name in slots_of("layer1.*"))


@pytest.mark.slow
def test_an_unknown_slot_name_is_refused_with_similar_names() -> None:
    refused(RESNET.model(), RESNET.batch(), r"no submodule is named 'layer1.3'; near to it: layer1.\d, layer1", slots=["layer1.3"])
    refused(RESNET.model(), RESNET.batch(), "no submodule is named '7'; near to it: conv1, bn1", slots=["layer1.0", "7"])


@pytest.mark.slow
def test_naming_a_refused_place_gives_the_reason() -> None:
    model, batch = RESNET.model(), RESNET.batch()
    refused(model, batch, "nothing can grow after 'layer1.0.relu': it runs 2 times in a forward pass", slots=["layer1.0.relu"])
    refused(model, batch, "nothing can grow after 'layer1.0.relu': it runs 2", slots=["layer1.0", "layer?.?.relu"])


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([], "no slot is named; name at least one, or leave slots out to have them chosen"),
        ("layer1", "slots are given as a list of names or patterns, such as .*, not as 'layer1'"),
        (["layer1", "layer1"], "'layer1' is named twice in slots"),
        (["layer1", 3], r"slots are given as a list of names or patterns, such as .*, not as \['layer1', 3\]"),
        (["layer1", "laier2"], "no submodule is named 'laier2'; near to it: layer2, "),
        (["layer1", "block?"], r"no submodule is named 'block\?'; near to it: "),
    ],
)
def test_slots_are_a_list_of_different_names(slots: Any, message: str) -> None:
    refused(RESNET.model(), RESNET.batch(), message, slots=slots)


@pytest.mark.parametrize("slots", [(), ("layer1", "layer1")])
def test_a_config_refuses_slots_in_the_same_words(slots: tuple[str, ...]) -> None:
    with pytest.raises(GrowthError) as by_model:
        add_slots(RESNET.model(), RESNET.batch(), slots=slots)
    with pytest.raises(ConfigError) as by_config:
        GrowthConfig(slots=slots)
    assert str(by_config.value) == f"slots: {by_model.value}"


def test_a_missing_slot_is_refused_with_the_existing_ones() -> None:
    slotted = add_slots(RESNET.model(), RESNET.batch(), slots=["layer1", "layer2"])
    with pytest.raises(GrowthError, match="no slot is named 'layer3'; the slots of this model are layer1, layer2"):
        slotted.slot("layer3")


# Example inputs


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (torch.randn(2, 5, 16, 16), r"cannot run the example input \(\[2, 5, 16, 16\] float32\): RuntimeError: .*pass a batch as"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.int64), r"cannot run the example input \(\[2, 3, 16, 16\] int64\)"),
        ((torch.randn(2, 3, 16, 16), torch.zeros(2)), r"cannot run the example input .*TypeError.*takes 2 positional arguments"),
        ({"image": torch.randn(2, 3, 16, 16)}, r"TypeError.*unexpected keyword argument 'image'"),
        ("a string", "the example input holds no batch: a str without a tensor; pass a batch .* such as x"),
        (torch.randn(0, 3, 16, 16), r"the example input holds no batch: \[0, 3, 16, 16\]"),
        (torch.tensor(1.0), "the example input holds no batch"),
        (None, "the example input holds no batch: a NoneType"),
    ],
    ids=["channels", "integers", "too many", "keyword", "no tensor", "empty", "scalar", "nothing"],
)
def test_a_wrong_example_input_is_refused_with_advice(example: Any, message: str) -> None:
    refused(RESNET.model().train(), example, message)


class FailsLate(nn.Module):
    """Has drawn random numbers and moved its statistics when it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.last = nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        noise = torch.randn(4) + random.random() + np.random.rand()  # noqa: NPY002
        result: Tensor = self.last(self.dropout(self.norm(x)) + noise)
        return result.reshape(7, 7, 7)


def test_weights_that_see_no_sample_are_no_part_of_what_each_sample_must_teach() -> None:
    """The load is the sum over layers of weights per position. An embedding of positions learns from no sample's content."""

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions, self.head = nn.Embedding(20, 8), nn.Embedding(16, 8), nn.Linear(8, 20, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return cast(Tensor, self.head(self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))))

    assert add_slots(Text(), torch.arange(32).reshape(2, 16) % 20).discovery.load == 2 * 20 * 8 / 16


def test_a_failed_discovery_draws_no_random_numbers() -> None:
    model = FailsLate().train()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]  # noqa: NPY002
    refused(model, torch.randn(3, 4, generator=torch.Generator()), "cannot run the example input")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[2]) == states[1:]  # noqa: NPY002


def test_a_discovery_draws_no_random_numbers_and_changes_no_state() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    add_slots(model, torch.randn(3, 4, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())


@pytest.mark.slow
def test_a_batch_of_one_sample_is_enough_to_find_slots() -> None:
    for name in ("resnet", "vit", "gpt", "sequential mlp", "encoder"):
        family = FAMILIES[name]
        model = family.model().train()
        assert tuple(add_slots(model, family.batch()[:1]).slots) == family.slots


@pytest.mark.slow
def test_examples_may_be_arguments_or_keywords() -> None:
    family = FAMILIES["gpt"]
    for example in (family.batch(), (family.batch(),), [family.batch()], {"x": family.batch()}):
        slotted = add_slots(family.model(), example)
        assert [slot.place.is_causal for slot in slotted.slots.values()] == [True, True]


def test_a_lazy_layer_is_refused_with_advice() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(GrowthError, match=r"'0.weight' of a lazy layer has no size yet; run the model once"):
        add_slots(model, torch.randn(2, 4))
    assert isinstance(model[0], nn.LazyLinear)


# Models


@pytest.mark.slow
def test_slots_cannot_be_added_twice() -> None:
    model = RESNET.model()
    slotted = add_slots(model, RESNET.batch())
    with pytest.raises(GrowthError, match=r"already has slots \(after 'layer1.0'\); remove them first"):
        add_slots(model, RESNET.batch())
    assert len(hooks_of(model)) == 5 + len(slotted.wide)  # four slots, the whole model, and the layers that can be widened
    slotted.remove()
    slotted.remove()
    assert list(add_slots(model, RESNET.batch(), slots=["layer1"]).slots) == ["layer1"]


def test_an_object_that_is_no_model_is_refused() -> None:
    slotted = add_slots(RESNET.model(), RESNET.batch())
    with pytest.raises(GrowthError, match=r"add_slots needs an nn.Module, and got a Slotted"):
        add_slots(slotted, RESNET.batch())  # type: ignore[arg-type]
    refused(nn.DataParallel(RESNET.model()), RESNET.batch(), "use DistributedDataParallel, or model.module")


class Shared(nn.Module):
    """One layer twice, one that gives a tuple, one that is not called, one of whose features nothing is known, one in five dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.lstm, self.unused = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.torn, self.other = Torn(), Weights()
        self.volume, self.count, self.head = nn.Conv3d(1, 2, 1), Count(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x))
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x)
        aside = (self.torn(x), self.other(x), self.volume(x[:, None, None]), self.count(x))
        x = x + sum(part.flatten(1).sum(1) for part in aside)[:, None, None]  # type: ignore[index]
        result: Tensor = self.head(x)
        return result


class Torn(nn.Module):
    """Half of the features in one dimension, and half in another."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), 2, -1, 2).transpose(1, 2)


class Weights(nn.Module):
    """Something between all positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


class Count(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


FIT = "fit [B, C, H, W], [B, C, L], [B, T, D], [T, B, D], [B, H, W, D] and [B, D]"
INSIDE = "choose a layer inside it or after it"


def test_every_refusal_has_its_reason() -> None:
    model, batch = Shared(), torch.randn(3, 4, 8)
    reasons = {refusal.name: refusal.reason for refusal in add_slots(model, batch, slots=["head"]).discovery.refusals}
    assert reasons == {
        "twice": "runs 2 times in a forward pass, and a seed would act each time",
        "lstm": "gives a tuple, not one tensor",
        "attention": "gives a tuple, not one tensor",
        "attention.out_proj": "does not run as a module of its own",
        "unused": "does not run as a module of its own",
        "torn": f"gives [3, 8, 2, 2] (the batch is dimension 0, the features are not certain), and seeds {FIT}; {INSIDE}",
        "other": f"gives [3, 4, 4] (the batch is dimension 0, the features are not certain), and seeds {FIT}; {INSIDE}",
        "volume": f"gives [3, 2, 1, 4, 8], and seeds {FIT}",
        "count": "gives torch.int64, not floating-point numbers",
    }


class ConvNeXtBlock(nn.Module):
    """Channels are last inside and first outside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(self.act(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return x + inner.permute(0, 3, 1, 2)


def test_channels_moved_back_to_the_front_are_found() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), ConvNeXtBlock(8), ConvNeXtBlock(8), nn.Flatten(), nn.Linear(128, 5))
    slotted = add_slots(model, torch.randn(2, 3, 16, 16))
    assert {name: (slot.place.kind, slot.place.shape) for name, slot in slotted.slots.items()} == {
        "1": ("conv", (8, 4, 4)),
        "2": ("conv", (8, 4, 4)),
    }
    inner = slotted.discovery.places["1.norm"]
    assert (inner.kind, inner.shape, inner.width, inner.positions) == ("token", (4, 4, 8), 8, 16)


class Gated(nn.Module):
    """Channels are last; some of them pass through a convolution, for which they come second."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.GELU(),
            nn.Linear(3 * width // 2, width),
        )
        self.conv, self.sizes = nn.Conv2d(width // 2, width // 2, 3, padding=1), [3 * width // 2, width, width // 2]

    def forward(self, x: Tensor) -> Tensor:
        gate, straight, local = self.up(self.norm(x)).split(self.sizes, -1)
        local = self.conv(local.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        result: Tensor = x + self.down(self.act(gate) * torch.cat([straight, local], -1))
        return result


class ChannelsLast(nn.Module):
    """[B, H, W, C] behind the stem, with as many rows and columns as the convolutions inside have channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 16, 4, 4), nn.Sequential(Gated(16), Gated(16)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.stem(x).permute(0, 2, 3, 1)).mean((1, 2)))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 8, 16], ids=["two samples", "as many samples as rows", "as many samples as channels"])
def test_channels_last_are_not_taken_for_rows(batch: int) -> None:
    model = ChannelsLast().eval()
    slotted = add_slots(model, torch.randn(batch, 3, 32, 32))
    assert {name: (slot.place.kind, slot.place.shape) for name, slot in slotted.slots.items()} == {
        "blocks.0": ("token", (8, 8, 16)),
        "blocks.1": ("token", (8, 8, 16)),
    }
    assert slotted.discovery.places["blocks.0.act"].shape == (8, 8, 24)
    assert slotted.discovery.places["blocks.0.conv"].kind == "conv"
    larger = torch.randn(3, 3, 48, 48)
    before = run(model, larger)
    for name in slotted.slots:
        for blending in ("add", "multiply", "gate"):
            for blueprint in ("norm", "low_rank", "mlp"):
                seed = germinate(slotted, name, blueprint, blending=blending)
                assert is_same(run(model, larger), before)
                perturb(seed)
                (together,), (alone,) = run(model, larger), run(model, larger[1:2])
                assert not torch.equal(together, before[0])
                torch.testing.assert_close(alone[0], together[1], rtol=1e-4, atol=1e-5)
        slotted.slot(name).plant(None)


@pytest.mark.slow
def test_blocks_of_windows_get_slots() -> None:
    slotted = add_slots(Swin(), torch.randn(2, 3, 24, 24))
    assert list(slotted.slots) == ["layers.0.0", "layers.0.1", "layers.1", "layers.2.0"]
    assert "attention cannot grow in token 12×12×8, token 12×12×16, token 6×6×32, token 6×6×16" in slotted.describe()


def test_a_norm_over_the_batch_changes_no_slots() -> None:
    def make(*, is_tracking: bool) -> nn.Module:
        norm = nn.BatchNorm1d(8, track_running_stats=is_tracking)
        return nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))

    batch = torch.randn(8, 8, 8)
    places = [add_slots(make(is_tracking=is_tracking), batch).discovery.places for is_tracking in (True, False)]
    assert {name: (place.kind, place.shape) for name, place in places[0].items()} == {
        name: (place.kind, place.shape) for name, place in places[1].items()
    }


class TakesTwo(nn.Module):
    """Can run only as many samples as it was made for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(4, 16), nn.TransformerEncoderLayer(16, 2, 32), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 2
        result: Tensor = self.head(self.block(self.embed(x).transpose(0, 1)).mean(0))
        return result


def test_the_batch_is_found_where_the_number_of_samples_cannot_change() -> None:
    slotted = add_slots(TakesTwo(), torch.randn(2, 2, 4))
    assert {name: slotted.discovery.places[name].batch_axis for name in ("embed", "block")} == {"embed": 0, "block": 1}


def test_as_many_tokens_as_channels_are_still_tokens() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Conv2d(3, 16, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.project(x).flatten(2).transpose(1, 2)

    model = nn.Sequential(Patches(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    assert add_slots(model, torch.randn(2, 3, 8, 8)).discovery.places["0"].kind == "token"


def test_weights_computed_by_modules_are_not_slots() -> None:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU()
    )
    model.append(nn.Linear(8, 2))
    slotted = add_slots(model, torch.randn(8, 6))  # as many samples as a weight has rows
    assert list(slotted.slots) == ["1", "3"]
    assert not any("parametrizations" in name for name in slotted.discovery.places)


@dataclasses.dataclass
class Output:
    logits: Tensor


@pytest.mark.parametrize(
    "form",
    [lambda logits, features: Output(logits), lambda logits, features: logits.squeeze(-1), lambda logits, features: [{"a": (logits,)}]],
    ids=["dataclass", "squeezed", "nested"],
)
def test_the_outputs_of_a_model_are_not_slots_in_any_format(form: Callable[[Tensor, Tensor], Any]) -> None:
    assert list(add_slots(Returning(form), torch.randn(3, 6)).slots) == ["body.1", "body.3"]


def test_returned_features_are_not_default_slots_where_inner_places_exist() -> None:
    both = Returning(lambda logits, features: (logits, features))
    assert list(add_slots(both, torch.randn(3, 6)).slots) == ["body.1"]


class HiddenStates(nn.Module):
    """Gives away everything that is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one = self.first(x)
        two = self.second(one)
        return self.head(two), one, two


def test_a_model_that_returns_all_features_gets_inner_slots() -> None:
    assert list(add_slots(HiddenStates(), torch.randn(3, 6)).slots) == ["first", "second"]


def test_a_model_without_inner_places_is_refused_with_the_possible_slots() -> None:
    refused(nn.Sequential(nn.Linear(6, 2)), torch.randn(3, 6), r"no place for a slot inside this model: .*can be chosen: 0")
    assert list(add_slots(nn.Sequential(nn.Linear(6, 2)), torch.randn(3, 6), slots=["0"]).slots) == ["0"]


def test_a_model_of_one_layer_is_refused_with_the_reason_and_advice() -> None:
    refused(
        nn.Linear(6, 2),
        torch.randn(3, 6),
        r"no place for a slot inside this model: a Linear has no submodules, and seeds grow after submodules; "
        r"put hidden layers before it, as in nn.Sequential\(nn.Linear\(.*\), nn.ReLU\(\), nn.Linear\(.*\)\)",
    )
    with pytest.raises(GrowthError, match="'0' gives the predictions, and a seed there would change them directly"):
        add_slots(nn.Sequential(nn.Linear(6, 2)), torch.randn(3, 6))
    with pytest.raises(GrowthError, match="'1' has nothing behind it that could use a seed's output"):
        add_slots(nn.Sequential(nn.Flatten(), nn.Linear(6, 2), nn.Softmax(-1)), torch.randn(3, 6))


# Places of the same thing at different costs


def conv(inputs: int, width: int, *others: nn.Module) -> list[nn.Module]:
    return [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), *others]


def test_a_slot_is_placed_after_the_pool() -> None:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)]
    model = nn.Sequential(*conv(3, 8, nn.MaxPool2d(2)), *conv(8, 8, nn.Dropout(), nn.AvgPool2d(2), nn.Dropout()), *conv(8, 8), *head)
    slotted = add_slots(model, torch.randn(2, 3, 16, 16))
    assert {name: slot.place.shape for name, slot in slotted.slots.items()} == {"3": (8, 8, 8), "8": (8, 4, 4), "12": (8, 4, 4)}


class Tutorial(nn.Module):
    """As people learn to write it."""

    def __init__(self, *, has_skip: bool = False) -> None:
        super().__init__()
        self.conv1, self.pool1, self.conv2, self.pool2 = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.MaxPool2d(2),
        )
        self.fc, self.head, self.has_skip = nn.Linear(8 * 16, 16), nn.Linear(16, 2), has_skip

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.conv1(x))
        second = torch.relu(self.conv2(self.pool1(first)))
        if self.has_skip:
            second = second + first[:, :, ::2, ::2]
        result: Tensor = self.head(torch.relu(self.fc(self.pool2(second).flatten(1))))
        return result


def test_a_slot_is_placed_after_the_pool_where_activations_are_functions() -> None:
    assert list(add_slots(Tutorial(), torch.randn(2, 3, 16, 16)).slots) == ["pool1", "pool2", "fc"]


def test_a_slot_stays_before_a_pool_that_is_not_its_only_consumer() -> None:
    assert list(add_slots(Tutorial(has_skip=True), torch.randn(2, 3, 16, 16)).slots) == ["conv1", "conv2", "fc"]


def test_a_slot_after_a_block_moves_after_its_pool() -> None:
    model = nn.Sequential(DoubleConv(1, 4), nn.MaxPool2d(2), DoubleConv(4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    assert list(add_slots(model, torch.randn(2, 1, 8, 8)).slots) == ["1", "2"]


# The description


def described(slotted: Slotted) -> list[str]:
    """First cells of the table of places."""
    table = slotted.describe().split("\n\n")[0]
    return [line.split("  ")[0] for line in table.splitlines()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("make", [ResNet, ViT, GPT], ids=lambda make: make.__name__)
def test_the_description_lists_every_submodule_once(make: Callable[[], nn.Module]) -> None:
    family = next(family for family in FAMILIES.values() if family.make is make)
    model = family.model()
    names = [name for name, _ in model.named_modules() if name]
    assert sorted(described(add_slots(model, family.batch()))) == sorted(names)


def test_the_description_shows_slots_with_their_places_and_costs() -> None:
    slotted = add_slots(RESNET.model(), RESNET.batch())
    perturb(germinate(slotted, "layer1.0", "conv3x3"))
    slotted.slot("layer1.0").alpha = 0.25
    plant_kept_seeds(slotted, "layer2.1")
    lines = {line.split("  ")[0]: line for line in slotted.describe().splitlines()}
    assert lines["layer1.0"].split("  ")[-1].strip() == "conv3x3, alpha 0.25"
    assert lines["layer2.1"].split("  ")[-1].strip() == "depthwise, kept"
    assert lines["layer1.1"].split("  ")[-1].strip() == "empty"
    assert lines["layer1.1.conv1"].split("  ")[-1].strip() == "–"
    assert lines["layer1.1.relu"].endswith("none: it runs 2 times in a forward pass, and a seed would act each time")
    parameters = cost_of(get_blueprint("conv3x3"), slotted.slot("layer1.0").place).parameters
    assert f"{parameters} · 73.73k" in lines["conv 8×8×8"]
    assert max(map(len, lines.values())) <= 140
    assert run(slotted, RESNET.batch())


# What idle slots cost


def python_calls(model: nn.Module, batch: Tensor) -> int:
    """Count the calls of Python functions in one forward pass."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        model(batch)
    finally:
        sys.setprofile(before)
    return calls


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.layer(x))


@pytest.mark.parametrize("has_gradient", [False, True])
def test_an_idle_slot_costs_one_call_of_python_and_the_whole_model_five(has_gradient: bool) -> None:
    blocks, batch = 20, torch.zeros(2, 8)
    plain, model = (nn.Sequential(*(Adding() for _ in range(blocks)), nn.Linear(8, 2)) for _ in range(2))
    slotted = add_slots(model, batch, slots=[str(number) for number in range(blocks)])
    assert all(slot.is_idle for slot in slotted.slots.values())
    with torch.set_grad_enabled(has_gradient):
        more = python_calls(model, batch) - python_calls(plain, batch)
    assert blocks <= more <= blocks + 5
