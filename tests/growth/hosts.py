"""Small hosts of common model families, each with a batch.

Shapes: B = batch, C = channels, H, W, L = positions in space, T = positions in a sequence, D = features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += identity
        result: Tensor = self.relu(x)
        return result


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        narrow = width // 4
        self.conv1, self.bn1 = nn.Conv2d(inputs, narrow, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv2, self.bn2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv3, self.bn3 = nn.Conv2d(narrow, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        result: Tensor = self.relu(self.bn3(self.conv3(x)) + identity)
        return result


class ResNet(nn.Module):
    def __init__(self, block: Callable[[int, int, int], nn.Module] = BasicBlock) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(block(8, 8, 1), block(8, 8, 1))
        self.layer2 = nn.Sequential(block(8, 16, 2), block(16, 16, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        result: Tensor = self.fc(torch.flatten(x, 1))
        return result


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(inputs, width, 3, padding=1),
            nn.GroupNorm(2, width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = DoubleConv(1, 4), DoubleConv(4, 8), DoubleConv(8, 16)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)
        self.merge2, self.merge1 = DoubleConv(16, 8), DoubleConv(8, 4)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.up2(self.middle(self.pool(second)))
        x = self.up1(self.merge2(torch.cat([x, second], 1)))
        result: Tensor = self.out(self.merge1(torch.cat([x, first], 1)))
        return result


class Attention(nn.Module):
    def __init__(self, width: int, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        result: Tensor = self.project(seen.transpose(1, 2).flatten(2))
        return result


class Feedforward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.act(self.up(x)))
        return result


class Block(nn.Module):
    def __init__(self, width: int, *, is_causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, is_causal=is_causal)
        self.norm2, self.mlp = nn.LayerNorm(width), Feedforward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class ViT(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 5, width) * 0.1)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, is_causal=False) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x)[:, 0])
        return result


class GPT(nn.Module):
    """Embedding and head are one weight. Float inputs are taken as embeddings."""

    def __init__(self, width: int = 16, length: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, is_causal=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.is_floating_point() else self.tokens(x)
        x = x + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


class Shifting(GPT):
    """A GPT that makes its own inputs of what it is given: without some tokens at the end, or moved along."""

    def __init__(self, shift: Callable[[Tensor], Tensor] = lambda ids: ids[:, :-1]) -> None:
        super().__init__(length=16)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.shift(x))


class Remembering(GPT):
    """Reads one token after another if it is told so, and remembers what it has read: in itself, or in what the caller holds."""

    def __init__(self, *, has_attribute: bool) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = RememberingAttention(16, is_causal=True)
        if has_attribute:
            self.kv_cache: list[Tensor] | None = None
            self.forward = self.read  # type: ignore[method-assign]

    def read(self, x: Tensor, position: int = 0) -> Tensor:
        return self.forward_from(x, position, self.kv_cache)

    def forward(self, x: Tensor, position: int = 0, past: list[Tensor] | None = None) -> Tensor:
        return self.forward_from(x, position, past)

    def forward_from(self, x: Tensor, position: int, past: list[Tensor] | None) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(position, position + x.shape[1]))
        for number, block in enumerate(self.blocks):
            block.attention.memory = None if past is None else (past, number)
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


class RememberingAttention(Attention):
    """`memory` is where what was read is kept by all layers, and the number of this one."""

    memory: tuple[list[Tensor], int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        if self.memory is not None:
            past, number = self.memory
            if len(past) > number:
                key, value = torch.cat([past[number], torch.stack([key, value])], 2)
                past[number] = torch.stack([key, value])
            else:
                past.append(torch.stack([key, value]))
        is_seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(key.shape[1] - query.shape[1])
        result: Tensor = self.project(F.scaled_dot_product_attention(query, key, value, attn_mask=is_seen))
        return result


class PadToken(nn.Module):
    """Token 0 is padding, which nobody sees, by a mask that is made inside and is no argument of any module."""

    def __init__(self, *, has_index: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16, padding_idx=0 if has_index else None)
        self.blocks = nn.ModuleList(Block(16, is_causal=False) for _ in range(2))
        for block in self.blocks:
            block.attention = Selective(16, is_causal=False)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            block.attention.is_seen = (ids != 0)[:, None]
            x = block(x)
        result: Tensor = self.head(x[:, 0])
        return result


class Selective(Attention):
    is_seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        result: Tensor = self.project(F.scaled_dot_product_attention(query, key, value, attn_mask=self.is_seen))
        return result


class PrefixLM(GPT):
    """The first half of the sequence sees itself in both directions, the rest looks back."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, is_causal=True) for _ in range(2))
        for block in self.blocks:
            block.attention = PrefixAttention(16, is_causal=True)


class PrefixAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        is_seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        is_seen[:, : x.shape[1] // 2] = True
        query, key, value = self.qkv(x).chunk(3, -1)
        result: Tensor = self.project(F.scaled_dot_product_attention(query, key, value, attn_mask=is_seen))
        return result


class Seq2Seq(nn.Module):
    """As T5 with `labels`: the decoder's inputs are the labels, moved on by one, and what is to be ignored becomes padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        targets = F.pad(labels, (1, -1)).clamp(min=0)
        mask = nn.Transformer.generate_square_subsequent_mask(targets.shape[1])
        memory = self.encoder(self.embed(ids))
        logits: Tensor = self.head(self.decoder(self.embed(targets), memory, tgt_mask=mask, tgt_is_causal=True))
        return logits


class Patches(nn.Module):
    """A series cut into patches of four, read by blocks that look back or both ways."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.patch = nn.Conv1d(1, 16, 4, 4)
        self.blocks = nn.ModuleList(Block(16, is_causal=is_causal) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


class MaskedConv(nn.Conv2d):
    """Sees what lies above, and to the left; itself unless it is the first."""

    def __init__(self, inputs: int, width: int, *, sees_itself: bool) -> None:
        super().__init__(inputs, width, 3, padding=1)
        is_seen = torch.ones(3, 3)
        is_seen[1, 1 + sees_itself :], is_seen[2] = 0, 0
        self.register_buffer("is_seen", is_seen)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.is_seen, self.bias, padding=1)


class PixelCNN(nn.Module):
    """Draws a picture pixel by pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MaskedConv(1, 8, sees_itself=False), MaskedConv(8, 8, sees_itself=True)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(self.first(x).relu()).relu())
        return result


class Encoder(nn.Module):
    """torch's own layers under a classifier."""

    def __init__(self, *, batch_first: bool, width: int = 16) -> None:
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=batch_first)
        self.embed = nn.Linear(4, width)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.encoder(self.embed(x)).mean(1 if self.batch_first else 0))
        return result


class PaddedEncoder(nn.Module):
    """As in torch's tutorials: padding is left out. With `nested`, evaluation does not even compute it."""

    def __init__(self, *, nested: bool, width: int = 16) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, 5)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

    def forward(self, ids: Tensor, is_padding: Tensor | None = None) -> Tensor:
        result: Tensor = self.head(self.encoder(self.embed(ids), src_key_padding_mask=is_padding)[:, 0])
        return result


class Transposing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Encoder(batch_first=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x.transpose(0, 1))
        return result


class FunctionalMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.last(F.relu(self.second(F.relu(self.first(x))))), -1)


class Conv1dNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 8, 5, 2, 2), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 16, 3, 2, 1), nn.BatchNorm1d(16), nn.ReLU()
        )
        self.classifier = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.features(x).mean(-1))
        return result


class Returning(nn.Module):
    """A model that gives what `form` makes of its logits and its features."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.form = form
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        return self.form(self.head(features), features)


class Finetuned(nn.Module):
    """A backbone that is frozen but for its last part, under a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = ResNet()
        self.backbone.fc = nn.Identity()  # type: ignore[assignment]
        for parameter in self.backbone.parameters():
            parameter.requires_grad_(False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.backbone(x))
        return result


def logits_as_dict(logits: Tensor, features: Tensor) -> dict[str, Tensor]:
    return {"logits": logits}


def logits_as_tuple(logits: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    return logits, logits.softmax(-1)


def sequential_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))


class Family(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a batch
    slots: tuple[str, ...]  # that it gets when the user names none
    is_tokens: bool = False
    is_fused: bool = False  # torch computes it by one kernel in evaluation, but not where there are hooks

    def model(self) -> nn.Module:
        """With the same weights every time, and statistics of norms that are not those of birth."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make()
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_(0, 0.1)
        return model.eval()

    def batch(self, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.is_tokens:
            return torch.randint(VOCABULARY, self.shape, generator=generator)
        return torch.randn(self.shape, generator=generator)


RESNET_BLOCKS = ("layer1.0", "layer1.1", "layer2.0", "layer2.1")
FAMILIES = {
    "resnet": Family(ResNet, (3, 3, 16, 16), RESNET_BLOCKS),
    "bottleneck resnet": Family(lambda: ResNet(Bottleneck), (3, 3, 16, 16), RESNET_BLOCKS),
    "unet": Family(UNet, (3, 1, 16, 16), ("down1", "down2", "middle", "merge2", "merge1")),
    "vit": Family(ViT, (3, 3, 8, 8), ("blocks.0", "blocks.1")),
    "gpt": Family(GPT, (3, 8), ("blocks.0", "blocks.1"), is_tokens=True),
    "encoder": Family(lambda: Encoder(batch_first=True), (3, 7, 4), ("encoder.layers.0", "encoder.layers.1"), is_fused=True),
    "sequential mlp": Family(sequential_mlp, (3, 6), ("1", "4")),
    "functional mlp": Family(FunctionalMLP, (3, 6), ("first", "second")),
    "conv1d": Family(Conv1dNet, (3, 1, 32), ("features.2", "features.5")),
    "dict": Family(lambda: Returning(logits_as_dict), (3, 6), ("body.1", "body.3")),
    "tuple": Family(lambda: Returning(logits_as_tuple), (3, 6), ("body.1", "body.3")),
    "finetuned": Family(Finetuned, (3, 3, 16, 16), tuple(f"backbone.{name}" for name in RESNET_BLOCKS)),
}


# Kinds of models beyond the families above, for the table of tests/growth/host/test_model_kinds.py


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution in [B, C, H, W], then a norm and an MLP in [B, H, W, C]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        inner = self.gamma * self.pwconv2(self.act(self.pwconv1(inner)))
        return x + inner.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.stages = nn.Sequential(
            nn.Sequential(ConvNeXtBlock(8), ConvNeXtBlock(8)), nn.Conv2d(8, 12, 2, 2), nn.Sequential(ConvNeXtBlock(12))
        )
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.stages(self.stem(x)).mean((2, 3))))
        return result


class MaskedBlock(nn.Module):
    """Takes a mask that is True at padding, as keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(width), nn.LayerNorm(width), Feedforward(width)

    def forward(self, x: Tensor, *, padding: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0])
        result: Tensor = self.norm2(x + self.mlp(x))
        return result


class Bert(nn.Module):
    """`attention_mask` is 1 at tokens and 0 at padding."""

    def __init__(self, width: int = 16, length: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(MaskedBlock(width) for _ in range(2))
        self.classifier = nn.Linear(width, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = layer(x, padding=attention_mask == 0)
        result: Tensor = self.classifier(x[:, 0])
        return result


class CachedAttention(nn.Module):
    """Attends to the keys and values of earlier calls as well, and gives them back with its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        earlier = key.shape[2] - query.shape[2]
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(earlier)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.project(seen.transpose(1, 2).flatten(2)), (key, value)


class CachedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), CachedAttention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), Feedforward(width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        seen, cache = self.attention(self.norm1(x), past)
        x = x + seen
        return x + self.mlp(self.norm2(x)), cache


class CachedGPT(nn.Module):
    """Gives logits and a cache; with the cache, it takes only the tokens that are new."""

    def __init__(self, width: int = 16, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(CachedBlock(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, past: list[tuple[Tensor, Tensor]] | None = None) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        earlier = 0 if past is None else past[0][0].shape[2]
        x = self.tokens(input_ids) + self.positions(torch.arange(earlier, earlier + input_ids.shape[1]))
        caches = []
        for number, block in enumerate(self.blocks):
            x, cache = block(x, None if past is None else past[number])
            caches.append(cache)
        return self.head(self.norm(x)), caches


@dataclass
class LossAndLogits:
    loss: Tensor
    logits: Tensor


class T5(nn.Module):
    """Encoder and decoder; the decoder's input is made of the labels by a shift in `forward`."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(Block(width, is_causal=False) for _ in range(2))
        self.decoder = nn.ModuleList(Block(width, is_causal=True) for _ in range(2))
        self.cross = nn.ModuleList(nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> LossAndLogits:
        memory = self.shared(input_ids)
        for block in self.encoder:
            memory = block(memory)
        x = self.shared(F.pad(labels[:, :-1], (1, 0)))
        for block, cross in zip(self.decoder, self.cross, strict=True):
            x = block(x)
            x = x + cross(x, memory, memory, need_weights=False)[0]
        logits = self.head(x)
        return LossAndLogits(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class LSTMTagger(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.norm, self.hidden, self.head = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.tokens(x))
        result: Tensor = self.head(F.relu(self.hidden(self.norm(states))))
        return result


class GRUSeq2Seq(nn.Module):
    """The decoder starts from the last state of the encoder and reads one token at a time."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.bridge = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.encoder, self.decoder = nn.GRU(width, width, batch_first=True), nn.GRUCell(width, width)
        self.output = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, VOCABULARY))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, last = self.encoder(self.source(source))
        state = self.bridge(last[0])
        states = []
        for token in self.target(target).unbind(1):
            state = self.decoder(token, state)
            states.append(state)
        result: Tensor = self.output(torch.stack(states, 1))
        return result


class WindowAttention(nn.Module):
    """Attention within windows of 2 × 2 positions of [B, H, W, C]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width, is_causal=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        windows = x.view(batch, height // 2, 2, width // 2, 2, channels).transpose(2, 3).reshape(-1, 4, channels)
        seen = self.attention(windows).view(batch, height // 2, width // 2, 2, 2, channels)
        result: Tensor = seen.transpose(2, 3).reshape(batch, height, width, channels)
        return result


class SwinBlock(nn.Module):
    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm1, self.attention = nn.LayerNorm(width), WindowAttention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), Feedforward(width)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.attention(self.norm1(x).roll((-self.shift, -self.shift), (1, 2)))
        x = x + seen.roll((self.shift, self.shift), (1, 2))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class PatchMerging(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)], -1)
        result: Tensor = self.reduction(self.norm(x))
        return result


class Swin(nn.Module):
    """[B, H, W, C] everywhere behind the patches."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 2, 2)
        self.layers = nn.Sequential(
            nn.Sequential(SwinBlock(width, 0), SwinBlock(width, 1)), PatchMerging(width), nn.Sequential(SwinBlock(2 * width, 0))
        )
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.layers(self.patch(x).permute(0, 2, 3, 1))).mean((1, 2)))
        return result


class TiedAutoencoder(nn.Module):
    """The decoder's weights are those of the encoder, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(6, 16), nn.Linear(16, 8)
        self.act = nn.Tanh()
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        code = self.middle(self.inner(self.act(self.outer(x))))
        return F.linear(torch.tanh(F.linear(code, self.inner.weight.t())), self.outer.weight.t(), self.bias)


class CheckpointedGPT(GPT):
    """Blocks are computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        result: Tensor = self.head(self.norm(x))
        return result


class LoRALinear(nn.Module):
    """A frozen layer and a low-rank change of it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + 0.5 * self.lora_B(self.lora_A(x))
        return result


def lora_vit() -> nn.Module:
    model = ViT().requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = LoRALinear(block.attention.qkv)
        block.mlp.up = LoRALinear(block.mlp.up)
    model.head.requires_grad_()
    return model


class SumOfChildren(nn.Module):
    """Adds up all its children, as ResNeXt, Inception and mixtures do."""

    def __init__(self, width: int, count: int = 2) -> None:
        super().__init__()
        for number in range(count):
            self.add_module(f"branch{number}", nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([child(x) for child in self.children()]).sum(0)


class SumNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = SumOfChildren(6), SumOfChildren(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(F.relu(self.second(F.relu(self.first(x)))))
        return result


class Mixture(nn.Module):
    """Experts weighted by a gate. The number of experts is read from the container."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Feedforward(width) for _ in range(3))
        self.gate = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        assert outputs.shape[-1] == len(self.experts)
        return (outputs * weights.unsqueeze(-2)).sum(-1)


class MixtureGPT(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, is_causal=True) for _ in range(2))
        for block in self.blocks:
            block.mlp = Mixture(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


class Conditional(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.time = nn.Linear(width, width), nn.Linear(2, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return F.relu(self.layer(x) + self.time(time))


class ConditionalSequential(nn.Sequential):
    """Passes the condition to every part, as networks of diffusion models do."""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        for part in self:
            x = part(x, time)
        return x


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ConditionalSequential(Conditional(6), Conditional(6)), ConditionalSequential(Conditional(6))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(self.first(x, time), time))
        return result


class IndexedNet(nn.Module):
    """Runs a container as a whole, and uses its length, its last part and all but its last part as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x) / len(self.body) + self.body[-1](self.body[:-1](x))
        result: Tensor = self.head(F.relu(x))
        return result


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.dense1 = nn.Sequential(DenseLayer(8, 4), DenseLayer(12, 4))
        self.transition = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.AvgPool2d(2))
        self.dense2 = nn.Sequential(DenseLayer(8, 4), DenseLayer(12, 4))
        self.classifier = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.dense2(self.transition(self.dense1(self.stem(x)))).mean((2, 3)))
        return result


class Siamese(nn.Module):
    """One encoder for two inputs, so it runs twice, and a comparison that runs once."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8))
        self.compare = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        result: Tensor = self.compare(torch.cat([self.encoder(left), self.encoder(right)], -1))
        return result


class MBConv(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 2 * width
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        self.depthwise = nn.Sequential(nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        self.squeeze, self.excite = nn.Conv2d(inner, 4, 1), nn.Conv2d(4, inner, 1)
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.depthwise(self.expand(x))
        inner = inner * self.excite(F.silu(self.squeeze(inner.mean((2, 3), keepdim=True)))).sigmoid()
        result: Tensor = x + self.project(inner)
        return result


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.blocks = nn.Sequential(MBConv(8), MBConv(8))
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.blocks(self.stem(x)).mean((2, 3)))
        return result


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.tokens = nn.LayerNorm(width), Feedforward(tokens)
        self.norm2, self.channels = nn.LayerNorm(width), Feedforward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.channels(self.norm2(x))
        return result


class Mixer(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(4, width), MixerBlock(4, width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1))
        return result


class ConvAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU())
        self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 4, 2, 2), nn.ReLU(), nn.ConvTranspose2d(4, 1, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.decoder(self.encoder(x))
        return result


class Tabular(nn.Module):
    """Numbers and categories, as keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.category, self.wide = nn.EmbeddingBag(VOCABULARY, 6, mode="mean"), nn.Linear(5, 3)
        self.deep = nn.Sequential(nn.Linear(11, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, numbers: Tensor, categories: Tensor) -> dict[str, Tensor]:
        deep = self.deep(torch.cat([numbers, self.category(categories)], -1))
        return {"logits": self.head(deep) + self.wide(numbers)}


def parametrized_mlp() -> nn.Module:
    """Weights that torch computes: weight norm and spectral norm."""
    weight_norm, spectral_norm = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    return nn.Sequential(weight_norm(nn.Linear(6, 16)), nn.ReLU(), spectral_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 5))


class MaskedEncoder(nn.Module):
    """torch's encoder with a mask of padding, as people call it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        encoded = self.encoder(self.tokens(tokens), src_key_padding_mask=src_key_padding_mask)
        result: Tensor = self.head(encoded[:, 0])
        return result


class MultiScale(nn.Module):
    """Gives a list of predictions, one for each scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([BasicBlock(3, 8, 2), BasicBlock(8, 8, 2)])
        self.heads = nn.ModuleList([nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)])

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            outputs.append(head(x))
        return outputs


class Perceiver(nn.Module):
    """Learned queries look at the inputs: a submodule gets a view of a parameter as its input."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, width))
        self.embed, self.prepare = nn.Linear(4, width), nn.Linear(width, width)
        self.cross = nn.MultiheadAttention(width, 2, batch_first=True)
        self.blocks = nn.ModuleList(Block(width, is_causal=False) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        queries = self.prepare(self.queries.expand(len(x), -1, -1))
        x = queries + self.cross(queries, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x.mean(1))
        return result


class Routed(nn.Module):
    """As in Mixtral: each token goes through two gated experts, which get only the tokens that are sent to them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList(GatedFeedforward(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # [B·T, D]
        shares, chosen = self.router(flat).softmax(-1).topk(2)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True)
            result = result.index_add(0, token, expert(flat[token]) * shares[token, rank, None])
        return result.reshape(x.shape)


class GatedFeedforward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 24, bias=False), nn.Linear(width, 24, bias=False), nn.Linear(24, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Mixtral(MixtureGPT):
    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        for block in self.blocks:
            block.mlp, block.norm1, block.norm2 = Routed(width), nn.RMSNorm(width), nn.RMSNorm(width)


class Mamba(nn.Module):
    """A residual stream of selective state spaces."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCABULARY, width), nn.ModuleList(StateSpace(width) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.head(self.norm(x))
        return result


class StateSpace(nn.Module):
    def __init__(self, width: int, states: int = 4) -> None:
        super().__init__()
        inner, self.states = 2 * width, states
        self.norm, self.into, self.out = nn.RMSNorm(width), nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.conv = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.select, self.step = nn.Linear(inner, 2 * states + 1, bias=False), nn.Linear(1, inner)
        self.log_decay, self.skip = nn.Parameter(torch.zeros(inner, states)), nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.into(self.norm(x)).chunk(2, -1)
        x = F.silu(self.conv(x.mT)[..., : x.shape[1]].mT)  # [B, T, inner]
        delta, write, read = self.select(x).split([1, self.states, self.states], -1)
        delta = F.softplus(self.step(delta))
        state, outputs = x.new_zeros(len(x), x.shape[-1], self.states), []
        for t in range(x.shape[1]):
            decay = torch.exp(-delta[:, t, :, None] * self.log_decay.exp())
            state = decay * state + (delta * x)[:, t, :, None] * write[:, t, None]
            outputs.append((state * read[:, t, None]).sum(-1))
        result: Tensor = self.out((torch.stack(outputs, 1) + self.skip * x) * F.silu(gate))
        return result


class GraphNet(nn.Module):
    """Messages between the nodes of graphs: features [B, N, D] and edges [B, N, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(4, 16), nn.ModuleList(GraphLayer(16) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.embed(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        result: Tensor = self.head(x.mean(1))
        return result


class GraphLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = (
            nn.Linear(width, width),
            nn.Sequential(nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)),
        )

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        received = edges @ self.message(x) / edges.sum(-1, keepdim=True).clamp(min=1)
        result: Tensor = x + self.update(torch.cat([x, received], -1))
        return result


class TwoTower(nn.Module):
    """A query and an item are embedded by towers of their own and compared by the cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY, 12)
        self.query, self.item = (nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, 8)) for width in (12, 5))

    def forward(self, words: Tensor, features: Tensor) -> Tensor:
        return F.cosine_similarity(self.query(self.words(words)), self.item(features))


class Generator(nn.Module):
    """The generator of a GAN: pictures from noise."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 12 * 4)
        self.body = nn.Sequential(
            *(nn.BatchNorm2d(12), nn.ReLU(), nn.ConvTranspose2d(12, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()),
        )

    def forward(self, noise: Tensor) -> Tensor:
        result: Tensor = self.body(self.project(noise).view(-1, 12, 2, 2))
        return result


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.LeakyReLU(0.2)))
        self.head = nn.Linear(16 * 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x).flatten(1))
        return result
