"""Language-model hosts: small transformers like GPT.

    GPTHost
      tokens, positions   embeddings, which are added
      blocks              nn.ModuleList of GPTBlock, each called once per forward, so a slot can follow any of them ("blocks.0", ...)
                            x + attention(norm(x))      causal, all heads at once
                            x + mlp(norm(x))            hidden layer four times as wide, GELU
      norm                layer norm
      head                nn.Linear without bias; with `tie_head`, it shares the weight of `tokens`

Shapes: B = sequences, T = tokens of a sequence, D = width, H = heads, K = size of the vocabulary.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_INITIAL_STD = 0.02


class CausalAttention(nn.Module):
    """Multi-head attention in which each position attends to itself and those before it: [B, T, D] to [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        batch, length, width = inputs.shape
        split = self.query_key_value(inputs).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, H, T, D / H]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class GPTBlock(nn.Module):
    """Attention and a two-layer network, each with a layer norm before it and a residual connection: [B, T, D] to [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        attended = inputs + self.attention(self.attention_norm(inputs))
        return cast(Tensor, attended + self.mlp(self.mlp_norm(attended)))


class GPTHost(nn.Module):
    """Predict the token after each position: ids int64 [B, T] to logits [B, T, K]. T is at most `sequence_length`."""

    def __init__(
        self, vocabulary_size: int, *, sequence_length: int, width: int = 32, layers: int = 2, heads: int = 2, tie_head: bool = False
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"the width must be a multiple of the number of heads; got width={width} and heads={heads}")
        self.sequence_length = sequence_length
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        if tie_head:
            self.head.weight = self.tokens.weight
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Scale the layers that write to the residual stream down by the number of additions, so that depth does not raise its variance.
        std = _INITIAL_STD / math.sqrt(2 * len(self.blocks))
        for block in self.blocks:
            assert isinstance(block, GPTBlock)
            nn.init.normal_(block.attention.out.weight, std=std)
            nn.init.normal_(cast(nn.Linear, block.mlp[-1]).weight, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length > self.sequence_length:
            raise ValueError(f"this host reads sequences of up to {self.sequence_length} tokens; got {length}")
        states = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        for block in self.blocks:
            states = block(states)
        return cast(Tensor, self.head(self.norm(states)))
