"""Small hosts of the families that people train, written as people write them, each with a batch that it takes.

Shapes: B = batch, C = channels, H, W, L = positions in space, T = positions in a sequence, D = features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
