"""Exact properties of growing on a table of kinds of models.

    python -m tests.growth.host.test_model_kinds                      prints the table kind × property
    pytest tests/growth/host/test_model_kinds.py -k "swin and bake"   runs one cell

Kinds of other libraries (transformers, peft) are skipped where these are missing; `make test-all` installs them. Two kinds are compared in
float64 up to 1e-12 instead: torch computes its encoder layers by one fused kernel in evaluation, and by others where a slot is inside.
"""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper
from esper.growth import Grower, GrowthConfig, GrowthError, Planned, add_slots
from esper.growth.config import BudgetConfig
from esper.growth.host.discover import call
from esper.growth.host.slots import tensors_in
from esper.growth.host.slotted import Slotted
from esper.growth.host.state_dict import agree
from esper.growth.seeds.blueprints import blueprints_for, get_blueprint
from esper.growth.seeds.seed import SPEC_KEY
from esper.growth.seeds.width import WidthSeed
from tests.growth import hosts
from tests.growth.builders import QUICK
from tests.growth.host.helpers import germinate, hooks_of, perturb, possible_growths
from tests.growth.hosts import FAMILIES, VOCABULARY, Transposing

pytestmark = [
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning"),  # torch says so once on processors that have to do without
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),  # torch's own encoder makes them of padding
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),  # in the code of transformers
]


class Kind(NamedTuple):
    make: Callable[[], nn.Module]
    example: Any  # a batch as the model takes it: a tensor, a tuple of arguments or a dict of keyword arguments
    slots: tuple[str, ...] | None = None  # None: those of a user who names none
    is_quick: bool = False  # part of `make check`
    is_fused: bool = False  # compared in float64
    is_strided: bool = (
        False  # its slots get strided gradients, a seed's sum is dense: on some processors, biases then add up in another order
    )
    causal: str | int | None = None  # number or name of the input whose later tokens no earlier output may see
    padded: str | int | None = None  # number or name of the input with padding that no output may see
    needs: tuple[str, ...] = ()  # libraries
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] | None = None  # None: SGD
    is_averaged: bool = False  # an average that was made before the slots grows with it
    is_grown: bool = False  # a seed in width and one in depth were baked into it before

    def model(self, seed: int = 0) -> nn.Module:
        """Return the model with weights drawn from `seed`, in eval mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_(0, 0.1)
        return (model.double() if self.is_fused else model).eval()

    def batch(self) -> Any:
        cast = (lambda tensor: tensor.double() if tensor.is_floating_point() else tensor.clone()) if self.is_fused else Tensor.clone
        return mapped(cast, self.example)

    def before(self) -> nn.Module:
        """Return the model that gets slots."""
        model = self.model()
        for is_wide in (True, False) if self.is_grown else ():
            slotted = add_slots(model, self.batch())
            name, blueprint = next(one for one in possible_growths(slotted) if (get_blueprint(one[1]).share is not None) == is_wide)
            perturb(germinate(slotted, name, blueprint))
            slotted.slot(name).is_kept = True
            model = slotted.bake()
        return model

    def slotted(self) -> Slotted:
        return add_slots(self.before(), self.batch(), slots=self.slots)

    def run(self, model: Any, batch: Any = None) -> list[Tensor]:
        with torch.no_grad():
            return list(tensors_in(call(model, self.batch() if batch is None else batch)))

    def is_same(self, some: list[Tensor], others: list[Tensor]) -> bool:
        if not self.is_fused:
            return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(some, others, strict=True))
        return all(torch.allclose(one, other, rtol=0.0, atol=1e-12) for one, other in zip(some, others, strict=True))

    def is_same_folded(self, slotted: Slotted, some: list[Tensor], others: list[Tensor]) -> bool:
        """Return whether outputs are the same after the width seeds of a model were folded, which changes the order of sums."""
        if any(slot.seed is not None and slot.seed.spec.wide for slot in slotted.slots.values()):
            return agree(some, others)
        return self.is_same(some, others)


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(mapped(function, item) for item in value)
    return value


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [1] * 3 + [0] * 5])  # 1 at tokens, 0 at padding
PADDED = {"input_ids": tokens(3, 8), "attention_mask": MASK}


def family(name: str, **options: Any) -> Kind:
    return Kind(FAMILIES[name].make, FAMILIES[name].batch(), **options)


def channels_last() -> nn.Module:
    return hosts.ResNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = ([one for one in model.parameters() if (one.ndim == 2) is is_matrix] for is_matrix in (True, False))
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)]


OWN_KINDS = {
    "resnet": family("resnet"),
    "bottleneck resnet": family("bottleneck resnet"),
    "resnet, channels-last": Kind(channels_last, numbers(3, 3, 16, 16).to(memory_format=torch.channels_last)),
    "resnet, bfloat16": Kind(lambda: hosts.ResNet().bfloat16(), numbers(2, 3, 8, 8).bfloat16()),
    "frozen backbone": family("finetuned"),
    "convnext": Kind(hosts.ConvNeXt, numbers(3, 3, 20, 20)),
    "efficientnet": Kind(hosts.EfficientNet, numbers(3, 3, 18, 18), is_strided=True),
    "densenet": Kind(hosts.DenseNet, numbers(3, 3, 10, 10)),
    "multi-scale detector": Kind(hosts.MultiScale, numbers(3, 3, 20, 20)),
    "unet": family("unet"),
    "conv autoencoder": Kind(hosts.ConvAutoencoder, numbers(3, 1, 20, 20)),
    "conv1d": family("conv1d"),
    "vit": family("vit"),
    "vit, lora": Kind(hosts.lora_vit, numbers(3, 3, 8, 8)),
    "vit, bfloat16": Kind(lambda: hosts.ViT().bfloat16(), numbers(3, 3, 8, 8).bfloat16()),
    "swin": Kind(hosts.Swin, numbers(3, 3, 24, 24)),
    "perceiver, learned queries": Kind(hosts.Perceiver, numbers(3, 7, 4), is_fused=True),
    "mlp-mixer": Kind(hosts.Mixer, numbers(3, 3, 8, 8)),
    "bert with padding": Kind(hosts.Bert, PADDED, is_fused=True, is_quick=True, padded="input_ids"),
    "gpt, tied": family("gpt", causal=0),
    "gpt with cache": Kind(hosts.CachedGPT, tokens(3, 8), causal=0, is_quick=True),
    "gpt, checkpointed": Kind(hosts.CheckpointedGPT, tokens(3, 8), causal=0),
    "gpt, mixture of experts": Kind(hosts.MixtureGPT, tokens(3, 8), causal=0, is_strided=True),
    "t5, shifting labels": Kind(hosts.T5, {"input_ids": tokens(3, 7), "labels": tokens(3, 6, seed=1)}, causal="labels"),
    "transformer encoder": family("encoder", is_fused=True),
    "transformer encoder, time first": Kind(Transposing, numbers(3, 3, 4), is_fused=True),
    "transformer encoder, nested tensors of padding": Kind(
        hosts.MaskedEncoder, {"tokens": tokens(3, 8), "src_key_padding_mask": MASK == 0}, is_fused=True, padded="tokens"
    ),
    "lstm": Kind(hosts.LSTMTagger, tokens(3, 8), causal=0),
    "gru seq2seq": Kind(hosts.GRUSeq2Seq, (tokens(3, 8), tokens(3, 5, seed=1)), causal=1),
    "mlp": family("sequential mlp", is_quick=True),
    "mlp, functional": family("functional mlp"),
    "mlp, parametrized weights": Kind(hosts.parametrized_mlp, numbers(3, 6)),
    "tied autoencoder": Kind(hosts.TiedAutoencoder, numbers(3, 6)),
    "sum over children": Kind(hosts.SumNet, numbers(6, 6), slots=("first", "second"), is_quick=True),
    "conditional sequential": Kind(hosts.Denoiser, (numbers(3, 6), numbers(3, 2)), slots=("first", "second"), is_quick=True),
    "indexed sequential": Kind(hosts.IndexedNet, numbers(3, 6), slots=("body",), is_quick=True),
    "siamese": Kind(hosts.Siamese, (numbers(3, 6), numbers(3, 6).flip(0))),
    "tabular, dict output": Kind(hosts.Tabular, {"numbers": numbers(3, 5), "categories": tokens(3, 4)}),
    "tuple output": family("tuple"),
    "gpt, mixtral": Kind(hosts.Mixtral, tokens(3, 8), causal=0, is_strided=True),
    "mamba": Kind(hosts.Mamba, tokens(3, 8), causal=0),
    "graph network": Kind(hosts.GraphNet, (numbers(3, 6, 4), (numbers(3, 6, 6) > 0).float())),
    "two towers": Kind(hosts.TwoTower, (tokens(4, 3), numbers(4, 5))),
    "gan, generator": Kind(hosts.Generator, numbers(4, 6)),
    "gan, discriminator": Kind(hosts.Discriminator, numbers(4, 3, 8, 8)),
    "gpt, grown twice": family("gpt", causal=0, is_grown=True),
    "resnet, grown twice": family("resnet", is_grown=True),
    "mlp, muon and adamw": family("sequential mlp", optimizers=muon_and_adamw),
    "mlp, adafactor": family("sequential mlp", optimizers=lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.01)]),
    "mlp, averaged": family("sequential mlp", is_averaged=True),
}


# Models of other libraries, built from small configurations


def of_transformers(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return built

    return make


def with_lora(make: Callable[[], nn.Module], *targets: str, **options: Any) -> Callable[[], nn.Module]:
    """The model with peft's LoRA around these layers, with adapters that are not those of birth."""

    def build() -> nn.Module:
        peft = importlib.import_module("peft")
        config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, **options)
        model: nn.Module = peft.get_peft_model(make(), config)
        return model

    return build


def library(make: Callable[[], nn.Module], example: Any, *, needs: tuple[str, ...] = ("transformers",), **options: Any) -> Kind:
    return Kind(make, example, needs=needs, **options)


TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LENGTH = {"max_position_embeddings": 32}
BOTH_STACKS = {
    **{f"{stack}_{size}": 2 for stack in ("encoder", "decoder") for size in ("layers", "attention_heads")},
    **{"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 1, "forced_eos_token_id": None},
}
GPT2 = of_transformers("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, n_positions=32, **TEXT)
LLAMA = of_transformers("LlamaForCausalLM", "LlamaConfig", **SIZE, **LENGTH, **TEXT, num_key_value_heads=1)
BERT = of_transformers("BertForSequenceClassification", "BertConfig", **SIZE, **LENGTH, **TEXT)
VIT = of_transformers("ViTForImageClassification", "ViTConfig", **SIZE, image_size=16, patch_size=8)
PREDICTED = {"input_ids": tokens(3, 8), "attention_mask": torch.ones_like(MASK), "labels": tokens(3, 8)}
CLASSIFIED = {**PADDED, "labels": torch.tensor([0, 1, 1])}
TRANSLATED = {**PADDED, "labels": tokens(3, 6, seed=1)}
IMAGES = {"pixel_values": numbers(3, 3, 16, 16), "labels": torch.tensor([0, 1, 1])}

LIBRARY_KINDS = {
    "transformers GPT-2": library(GPT2, PREDICTED, causal="input_ids"),
    "transformers GPT-NeoX": library(
        of_transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZE, **LENGTH, **TEXT), PREDICTED, causal="input_ids"
    ),
    "transformers Llama": library(LLAMA, PREDICTED, causal="input_ids"),
    "transformers Mistral": library(
        of_transformers("MistralForCausalLM", "MistralConfig", **SIZE, **LENGTH, **TEXT, num_key_value_heads=1, sliding_window=4),
        PREDICTED,
        causal="input_ids",
    ),
    "transformers Mamba": library(
        of_transformers("MambaForCausalLM", "MambaConfig", hidden_size=16, state_size=4, num_hidden_layers=2, **TEXT),
        PREDICTED,
        causal="input_ids",
    ),
    "transformers BERT": library(BERT, CLASSIFIED, padded="input_ids"),
    "transformers RoBERTa": library(
        of_transformers("RobertaForSequenceClassification", "RobertaConfig", **SIZE, **LENGTH, **TEXT), CLASSIFIED, padded="input_ids"
    ),
    "transformers DistilBERT": library(
        of_transformers(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            dim=16,
            hidden_dim=32,
            n_layers=2,
            n_heads=2,
            vocab_size=VOCABULARY,
            **LENGTH,
        ),
        CLASSIFIED,
        padded="input_ids",
    ),
    "transformers T5": library(
        of_transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            pad_token_id=0,
            decoder_start_token_id=0,
        ),
        TRANSLATED,
        causal="labels",
        padded="input_ids",
    ),
    "transformers BART": library(
        of_transformers("BartForConditionalGeneration", "BartConfig", **BOTH_STACKS, **LENGTH, **TEXT),
        TRANSLATED,
        causal="labels",
        padded="input_ids",
    ),
    "transformers Whisper": library(
        of_transformers(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **{key: value for key, value in BOTH_STACKS.items() if key != "forced_eos_token_id"},
            **TEXT,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=32,
        ),
        {"input_features": numbers(3, 8, 32), "labels": tokens(3, 6)},
        causal="labels",
    ),
    "transformers ViT": library(VIT, IMAGES),
    "transformers Swin": library(
        of_transformers(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[2, 2],
            window_size=4,
        ),
        IMAGES,
    ),
    "transformers ConvNeXt": library(
        of_transformers(
            "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[6, 12], depths=[2, 1], num_stages=2, patch_size=2
        ),
        IMAGES,
    ),
    "transformers ResNet": library(
        of_transformers(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=6,
            hidden_sizes=[6, 12],
            depths=[1, 1],
            layer_type="basic",
        ),
        {**IMAGES, "pixel_values": numbers(3, 3, 32, 32)},
    ),
    "transformers CLIP": library(
        of_transformers(
            "CLIPModel",
            "CLIPConfig",
            text_config={**SIZE, **LENGTH, **TEXT, "projection_dim": 8},
            vision_config={**SIZE, "image_size": 16, "patch_size": 8, "projection_dim": 8},
            projection_dim=8,
        ),
        {**PADDED, "pixel_values": numbers(3, 3, 16, 16), "return_loss": True},
        is_strided=True,
    ),
    "peft LoRA of GPT-2": library(
        with_lora(GPT2, "c_attn", "c_fc", fan_in_fan_out=True), PREDICTED, needs=("transformers", "peft"), causal="input_ids"
    ),
    "peft LoRA of Llama": library(with_lora(LLAMA, "q_proj", "up_proj"), PREDICTED, needs=("transformers", "peft"), causal="input_ids"),
    "peft LoRA of ViT": library(with_lora(VIT, "q_proj", "v_proj"), IMAGES, needs=("transformers", "peft")),
}
KINDS = {**OWN_KINDS, **LIBRARY_KINDS}


Names = dict[str, dict[str, int]]  # table -> name -> identity of what has this name


def named(model: nn.Module) -> Names:
    return {
        # The description of a baked seed is made for every state dict.
        "state": {name: 0 if name.endswith(SPEC_KEY) else id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()},
        "parameters": {name: id(parameter) for name, parameter in model.named_parameters()},
        "modules": {name: id(module) for name, module in model.named_modules()},
    }


class Fresh(NamedTuple):
    slotted: Slotted  # with empty slots
    outputs: list[Tensor]  # of the model before it had slots
    names: Names


def fresh(kind: Kind) -> Fresh:
    model = kind.before()
    outputs, names = kind.run(model), named(model)
    return Fresh(add_slots(model, kind.batch(), slots=kind.slots), outputs, names)


def living(kind: Kind, slotted: Slotted, averages: Sequence[AveragedModel] = ()) -> tuple[Slotted, Grower, list[torch.optim.Optimizer]]:
    """Train the model for some steps, with a seed in every slot; neighbours get different blueprints."""
    plan = []
    for number, (name, slot) in enumerate(slotted.slots.items()):
        fitting = blueprints_for(slot.place)
        plan.append((0, name, fitting[-1 - number % len(fitting)].name))
    optimizers = (kind.optimizers or sgd)(slotted.host)
    settings = GrowthConfig(budget=BudgetConfig(max_parameters=None, max_flops=None))
    grower = Grower(slotted, optimizers, controller=Planned(plan), config=settings, epochs=10, averages=averages)
    grower.begin()
    slotted.train()
    for _ in range(3):
        train_step(kind, slotted, optimizers, averages, grower)
    slotted.eval()
    assert all(slot.seed is not None and slot.alpha == 1.0 for slot in slotted.slots.values())
    return slotted, grower, optimizers


def train_step(
    kind: Kind, model: Any, optimizers: Sequence[torch.optim.Optimizer], averages: Sequence[AveragedModel], grower: Grower | None = None
) -> float:
    torch.manual_seed(0)
    loss = loss_of(call(model, kind.batch()))
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if grower is not None:
        grower.after_step(loss)
    for average in averages:
        average.update_parameters(model.host if isinstance(model, Slotted) else model)
    return loss.item()


# Finding slots and training take longer than most properties take to test, so the properties of one kind share its models.
_shared: dict[str, Any] = {}  # the kind that was asked for last, its fresh model and its living one


def shared(kind: Kind) -> dict[str, Any]:
    if _shared.get("kind") is not kind:
        _shared.clear()
        _shared["kind"] = kind
    return _shared


@contextmanager
def shared_fresh(kind: Kind) -> Iterator[Fresh]:
    """Lend the model of a kind with empty slots. Leave it as it was; after an error, nobody else gets it."""
    lent = shared(kind).pop("fresh", None) or fresh(kind)
    yield lent
    shared(kind)["fresh"] = lent


def shared_living(kind: Kind) -> Slotted:
    """Return the living model of a kind, which the fresh one becomes. Change only a copy of it."""
    if "living" not in shared(kind):
        slotted = (shared(kind).pop("fresh", None) or fresh(kind)).slotted
        shared(kind)["living"], _, _ = living(kind, slotted)
    slotted = shared(kind)["living"]
    assert isinstance(slotted, Slotted)
    return slotted


def loss_of(output: Any) -> Tensor:
    return torch.stack([(tensor.float() - 1).square().mean() for tensor in tensors_in(output) if tensor.is_floating_point()]).sum()


def keep_all(slotted: Slotted) -> None:
    for slot in slotted.slots.values():
        slot.is_kept = True


def gradients(kind: Kind, slotted: Slotted) -> list[Tensor | None]:
    """Return the gradients of the host in training mode, with the same dropout every time."""
    slotted.train()
    slotted.host.zero_grad()
    torch.manual_seed(0)
    loss_of(call(slotted, kind.batch())).backward()
    return [parameter.grad for parameter in slotted.host.parameters()]


# The properties, each as a function of a kind that raises AssertionError


def check_identity(kind: Kind) -> None:
    """Every blueprint in every default slot leaves the output as the host without slots gives it, and is removed without a trace."""
    with shared_fresh(kind) as (slotted, before, names):
        assert kind.is_same(kind.run(slotted), before)
        for name, blueprint in possible_growths(slotted):  # a trace of one would be seen in the next
            seed = germinate(slotted, name, blueprint)
            assert kind.is_same(kind.run(slotted), before), (name, blueprint)
            perturb(seed)
            assert not kind.is_same(kind.run(slotted), before), (name, blueprint)
            slotted.slot(name).plant(None)
            assert list(slotted.host.state_dict()) == list(names["state"]), (name, blueprint)
        assert kind.is_same(kind.run(slotted), before)


def restore(slotted: Slotted, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in slotted.host.named_buffers():
        buffer.copy_(buffers[name])


def check_gradients(kind: Kind) -> None:
    """A newborn seed changes no gradient of the host, and has a gradient of its own."""
    with shared_fresh(kind) as (slotted, _, _):
        buffers = {name: buffer.clone() for name, buffer in slotted.host.named_buffers()}
        before = [None if gradient is None else gradient.clone() for gradient in gradients(kind, slotted)]
        for name, blueprint in possible_growths(slotted):
            restore(slotted, buffers)
            seed = germinate(slotted, name, blueprint)
            after = gradients(kind, slotted)
            for one, other in zip(before, after, strict=True):
                assert (one is None) == (other is None), (name, blueprint)
                if one is not None and other is not None:
                    is_close = kind.is_strided or kind.is_fused
                    same = torch.allclose(one, other, rtol=1e-6, atol=1e-7) if is_close else torch.equal(one, other)
                    assert same, (name, blueprint)
            assert any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in seed.parameters()), (name, blueprint)
            slotted.slot(name).plant(None)
        restore(slotted, buffers)
        slotted.host.zero_grad()
        slotted.eval()


def check_names(kind: Kind) -> None:
    """Names, order and identity of the host's tensors stay; remove() leaves nothing behind, even after training."""
    with shared_fresh(kind) as (slotted, _, before):
        assert named(slotted.host) == before
        assert [list(table) for table in named(slotted.host).values()] == [list(table) for table in before.values()]
    grown = copy.deepcopy(shared_living(kind))
    for table, of_host in named(grown.host).items():
        assert [name for name in of_host if name in before[table]] == list(before[table]), table
    values = {name: tensor.clone() for name, tensor in grown.host.state_dict().items() if name in before["state"]}
    plain = kind.before()
    hooks = len(hooks_of(plain))  # of the model itself: weight norm has some
    removed = grown.remove()
    assert [list(table) for table in named(removed).values()] == [list(table) for table in before.values()]
    assert all(torch.equal(tensor, values[name]) for name, tensor in removed.state_dict().items())
    assert len(hooks_of(removed)) == hooks
    plain.load_state_dict(values)
    assert kind.is_same(kind.run(removed), kind.run(plain))


def check_deepcopy(kind: Kind) -> None:
    """A copy with living seeds gives the same outputs, and neither is changed by training the other."""
    slotted = shared_living(kind)
    before = kind.run(slotted)
    twin = copy.deepcopy(slotted)
    copied = copy.deepcopy(twin.model)
    assert kind.is_same(kind.run(twin), before)
    assert kind.is_same(kind.run(copied), before)
    for slot in twin.slots.values():
        assert slot.seed is not None
        perturb(slot.seed)
    assert not kind.is_same(kind.run(twin), before)
    assert kind.is_same(kind.run(slotted), before)
    for slot in twin.slots.values():
        slot.plant(None)
    assert kind.is_same(kind.run(slotted), before)
    assert kind.is_same(kind.run(copied), before)


def check_state_dict(kind: Kind) -> None:
    """The state dict of the live model, in the middle of growing, builds a fresh model with the same outputs."""
    slotted = shared_living(kind)
    before = kind.run(slotted)
    state = {name: tensor.clone() for name, tensor in slotted.model.state_dict().items()}
    fresh = esper.load(state, model=kind.model(seed=1))
    assert kind.is_same_folded(slotted, kind.run(fresh.eval()), before)


def check_bake(kind: Kind) -> None:
    """Baking changes no output and no name of the host."""
    slotted = copy.deepcopy(shared_living(kind))
    keep_all(slotted)
    names = list(kind.model().state_dict())
    before = kind.run(slotted)
    baked = slotted.bake()
    after = kind.run(baked)
    assert kind.is_same_folded(slotted, after, before)
    assert [name for name in baked.state_dict() if name in names] == names
    assert kind.is_same(kind.run(copy.deepcopy(baked)), after)
    assert not any(isinstance(module, WidthSeed) for module in baked.modules())


def check_save_load(kind: Kind) -> None:
    """A file of the baked model and one of the living model give a fresh instance the same outputs."""
    slotted = shared_living(kind)
    before = kind.run(slotted)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        esper.save(slotted.model, path)
        assert kind.is_same_folded(slotted, kind.run(esper.load(path, model=kind.model(seed=1)).eval()), before), "living"
        twin = copy.deepcopy(slotted)
        keep_all(twin)
        baked = twin.bake()
        expected = kind.run(baked)
        esper.save(baked, path)
        assert kind.is_same(kind.run(esper.load(path, model=kind.model(seed=1)).eval()), expected), "baked"


def check_compile(kind: Kind) -> None:
    """A compiled model with living seeds gives what it gives without the compiler."""
    slotted = shared_living(kind)
    before = kind.run(slotted)
    torch.compiler.reset()
    try:
        compiled = torch.compile(slotted.model, backend="eager")
        assert kind.is_same(kind.run(compiled), before)
    finally:
        torch.compiler.reset()


PROPERTIES: dict[str, Callable[[Kind], None]] = {
    "identity": check_identity,
    "gradients": check_gradients,
    "names": check_names,
    "deepcopy": check_deepcopy,
    "state dict": check_state_dict,
    "bake": check_bake,
    "save/load": check_save_load,
    "compile": check_compile,
}


def marks(kind: Kind, *, is_quick: bool = True) -> list[pytest.MarkDecorator]:
    slow = [] if kind.is_quick and is_quick else [pytest.mark.slow]
    return [*slow, pytest.mark.extra(*kind.needs)] if kind.needs else slow


cells = [
    pytest.param(name, title, id=f"{name}-{title}", marks=marks(kind, is_quick=title != "compile"))
    for name, kind in KINDS.items()
    for title in PROPERTIES
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "title"), cells)
def test_growing_is_exact(kind: str, title: str) -> None:
    PROPERTIES[title](KINDS[kind])


# Properties of some kinds: a direction of time, padding, a cache, their own loss


def kinds_with(has: Callable[[Kind], bool]) -> pytest.MarkDecorator:
    chosen = {name: kind for name, kind in KINDS.items() if has(kind)}
    return pytest.mark.parametrize("kind", [pytest.param(kind, id=name, marks=marks(kind)) for name, kind in chosen.items()])


def with_input(batch: Any, key: str | int, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with one of its tensors changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {**batch, key: change(batch[key])}
    return tuple(change(item) if number == key else item for number, item in enumerate(batch))


def learned_growths(slotted: Slotted) -> Iterator[tuple[str, str]]:
    """Put every blueprint into every slot, one at a time and as if it had learned something."""
    for name, blueprint in possible_growths(slotted):
        perturb(germinate(slotted, name, blueprint))
        yield name, blueprint
        slotted.slot(name).plant(None)


@kinds_with(lambda kind: kind.causal is not None)
def test_no_seed_sees_later_tokens(kind: Kind) -> None:
    assert kind.causal is not None
    middle, lengths = 3, []

    def change(tokens: Tensor) -> Tensor:
        lengths.append(tokens.shape[1])
        changed = tokens.clone()
        changed[:, middle] = changed[:, middle] % (VOCABULARY - 1) + 1
        return changed

    changed = with_input(kind.batch(), kind.causal, change)
    slotted = kind.slotted()
    for growth in learned_growths(slotted):
        pairs = [(one, other) for one, other in zip(kind.run(slotted), kind.run(slotted, changed), strict=True) if one.ndim == 3]
        seen = [(one[:, :middle], other[:, :middle]) for one, other in pairs if one.shape[1] == lengths[0]]
        assert seen
        assert all(torch.equal(one, other) for one, other in seen), growth
        assert any(not torch.equal(one, other) for one, other in pairs), growth


@pytest.mark.slow
@kinds_with(lambda kind: kind.padded is not None)
def test_no_seed_sees_padding(kind: Kind) -> None:
    assert kind.padded is not None
    changed = with_input(kind.batch(), kind.padded, lambda tokens: torch.where(MASK == 1, tokens, tokens % (VOCABULARY - 1) + 1))
    slotted = kind.slotted()
    for growth in learned_growths(slotted):
        before, after = (
            [tensor for tensor in kind.run(slotted, batch) if tensor.shape[:2] != MASK.shape] for batch in (kind.batch(), changed)
        )
        assert before
        assert kind.is_same(before, after), growth


@pytest.mark.slow
def test_a_cache_gives_the_same_outputs_with_every_blueprint() -> None:
    kind = OWN_KINDS["gpt with cache"]
    slotted, batch = kind.slotted(), kind.batch()
    for growth in learned_growths(slotted):
        with torch.no_grad():
            whole, _ = slotted(batch)
            first, cache = slotted(batch[:, :5])
            second, _ = slotted(batch[:, 5:], cache)
        assert torch.allclose(torch.cat([first, second], 1), whole, atol=1e-5), growth


@kinds_with(lambda kind: bool(kind.needs) and kind.causal == "input_ids")
def test_generated_text_is_the_same_with_and_without_a_cache(kind: Kind) -> None:
    slotted, prompt = kind.slotted(), tokens(2, 4, seed=5)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    for growth in learned_growths(slotted):
        texts = [slotted.host.generate(input_ids=prompt, use_cache=use_cache, **options) for use_cache in (True, False)]  # type: ignore[operator]
        assert torch.equal(*texts), growth


@pytest.mark.slow
@pytest.mark.extra("transformers")
def test_llama_gets_new_heads_with_their_queries_keys_and_values_and_generates_the_same_text_when_they_are_folded() -> None:
    kind, layer = KINDS["transformers Llama"], "model.layers.0.self_attn"
    slotted = add_slots(kind.model(), kind.batch(), slots=[f"{layer}.q_proj"])
    options = {"input_ids": tokens(2, 4, seed=5), "attention_mask": torch.ones(2, 4), "max_new_tokens": 6, "do_sample": False}
    before = kind.run(slotted)
    seed = germinate(slotted, f"{layer}.q_proj", "widen_100")
    assert kind.is_same(kind.run(slotted), before)
    assert [(plan.module.removeprefix(f"{layer}."), plan.inputs, plan.outputs) for plan in seed.spec.wide] == [
        ("q_proj", 0, 16),  # two heads of 8 features, which share one head of keys and values
        ("k_proj", 0, 8),
        ("v_proj", 0, 8),
        ("o_proj", 16, 0),
    ]
    perturb(seed)
    grown, text = kind.run(slotted), slotted.host.generate(**options)  # type: ignore[operator]
    assert not kind.is_same(grown, before)
    keep_all(slotted)
    folded = slotted.bake()
    assert agree(kind.run(folded), grown)
    assert torch.equal(folded.generate(**options), text)  # type: ignore[operator]


@kinds_with(lambda kind: bool(kind.needs))
def test_a_model_of_a_library_is_grown_saved_and_loaded(kind: Kind, tmp_path: Path) -> None:
    plan = [(0, name, blueprints_for(slot.place)[-1].name) for name, slot in kind.slotted().slots.items()]
    grown = esper.grow(
        kind.model(),
        [kind.batch()] * 4,
        [kind.batch()] * 2,
        step_loss=lambda model, batch: model(**batch).loss,
        epochs=4,
        controller=Planned(plan),
        config=GrowthConfig(lifecycle=QUICK, budget=BudgetConfig(max_parameters=None, max_flops=None)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3),
        progress=False,
    )
    assert grown.val_loss < grown.val_loss_before
    assert [(0, entry.slot, entry.blueprint) for entry in grown.ledger.seeds] == plan
    assert grown.ledger.count("kept") > 0
    expected = kind.run(grown.model.eval())
    grown.save(tmp_path / "model.safetensors")
    assert kind.is_same(kind.run(esper.load(tmp_path / "model.safetensors", model=kind.model(seed=1))), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in OWN_KINDS.items() if kind.optimizers or kind.is_averaged])
def test_optimisers_and_averages_go_on_with_the_model_after_a_bake(kind: Kind) -> None:
    model = kind.model()
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))] if kind.is_averaged else []
    slotted, grower, optimizers = living(kind, add_slots(model, kind.batch()), averages)
    keep_all(slotted)
    expected, averaged = kind.run(slotted), [kind.run(average) for average in averages]
    baked = grower.bake()
    assert agree(kind.run(baked), expected)
    assert all(agree(kind.run(average), before) for average, before in zip(averages, averaged, strict=True))
    losses = [train_step(kind, baked, optimizers, averages) for _ in range(20)]
    assert losses[-1] < losses[0]
    for average in averages:
        for _ in range(40):
            average.update_parameters(baked)
        assert agree(kind.run(average.eval()), kind.run(baked.eval()))


@pytest.mark.slow
@pytest.mark.extra("onnx", "onnxscript")
@pytest.mark.parametrize("name", ["resnet", "gpt, tied", "mlp"])
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # of torch's own exporter
def test_a_baked_model_is_exported_to_onnx(name: str, tmp_path: Path) -> None:
    reference = importlib.import_module("onnx.reference")
    kind = KINDS[name]
    slotted, _, _ = living(kind, kind.slotted())
    keep_all(slotted)
    (expected,) = kind.run(slotted)
    torch.onnx.export(slotted.bake(), (kind.batch(),), tmp_path / "model.onnx", verbose=False)
    exported = reference.ReferenceEvaluator(str(tmp_path / "model.onnx"))
    (output,) = exported.run(None, {exported.input_names[0]: kind.batch().numpy()})
    assert torch.allclose(torch.from_numpy(output), expected, atol=1e-5)


def main(*names: str) -> int:
    """Print the table of these kinds, or of all that can be run here, as Markdown. Return the number of cells that fail."""
    torch.set_num_threads(1)
    failures = []
    print(f"| kind | slots | blueprints | {' | '.join(PROPERTIES)} |\n|{'---|' * (3 + len(PROPERTIES))}")
    begun = time.process_time()
    for name in names or KINDS:
        kind = KINDS[name]
        if any(find_spec(library) is None for library in kind.needs):
            continue
        try:
            slotted = kind.slotted()
        except GrowthError as error:
            failures.append(f"{name}: {error}")
            print(f"| {name} | – | – |{' – |' * len(PROPERTIES)}")
            continue
        counts = len(slotted.slots), len({blueprint for _, blueprint in possible_growths(slotted)})
        slotted.remove()
        row = []
        for title, check in PROPERTIES.items():
            try:
                check(kind)
                row.append("float64" if kind.is_fused else "exact")
            except Exception as error:  # the table shows what fails, whatever it is
                failures.append(f"{name}, {title}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}")
                row.append("**no**")
        print(f"| {name} | {counts[0]} | {counts[1]} | {' | '.join(row)} |", flush=True)
    print(f"\n{len(KINDS)} kinds, {time.process_time() - begun:.0f} s on one core; not exact: {len(failures)}")
    print("\n".join(failures))
    return len(failures)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
