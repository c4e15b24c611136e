"""Time and peak memory of growing a model of 124 million parameters on the CPU: slots, a step, a step with the probe, germination, bake.

    python benchmarks/growth/large.py

The model is a GPT of the size of the smallest GPT-2, with random weights, and a batch has 2 × 32 tokens. Times are CPU seconds
of the process on one thread. Memory is the largest resident size so far, which begins with model, gradients and AdamW's moments.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth import Decision, Germinate, Grower, add_slots
from esper.growth.config import BudgetConfig, GrowthConfig


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.project(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    def __init__(self, *, vocabulary: int = 50257, length: int = 1024, width: int = 768, heads: int = 12, blocks: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


class OneSeed:
    """Asks for a probe before the training, and grows a seed in the first slot that takes one after the first epoch."""

    name = "one seed"

    def decide(self, state: Any) -> Decision:
        if state.epoch == 0:
            return Decision((), "look", probe=True)
        if state.epoch > 1:
            return Decision((), "nothing")
        place = next(slot.place.name for slot in state.slots for candidate in slot.candidates if candidate.blueprint == "mlp")
        return Decision((Germinate(slot=place, reason="now", blueprint="mlp"),), "grow")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(50257, (2, 32))
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    print(f"{sum(one.numel() for one in model.parameters()) / 1e6:.0f} M parameters")

    def loss_of() -> Tensor:
        return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def step(grower: Grower | None) -> None:
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if grower is not None:
            grower.after_step(loss)

    def evaluate() -> list[Tensor]:
        with torch.no_grad():
            return [loss_of()]

    timed("a step without slots, with AdamW's moments", lambda: step(None))
    timed("a forward pass", evaluate)
    slotted = timed("add_slots", lambda: add_slots(model, tokens))
    print(f"{len(slotted.slots)} slots")
    free = BudgetConfig(max_parameters=None, max_flops=None)
    grower = timed("Grower, with a snapshot", lambda: Grower(slotted, optimizer, controller=OneSeed(), config=GrowthConfig(budget=free)))
    timed("begin, which requests the probe", grower.begin)
    timed("two steps with the probe", lambda: [step(grower) for _ in range(2)])
    timed("after_epoch, which germinates a seed", lambda: grower.after_epoch(evaluate))
    timed("a step with the seed", lambda: step(grower))
    for slot in slotted.slots.values():
        slot.is_kept = slot.seed is not None
    timed("bake", grower.bake)


def timed(what: str, function: Callable[[], Any]) -> Any:
    begun = time.process_time()
    result = function()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{what}: {time.process_time() - begun:.1f} CPU s, peak {peak:.2f} GiB", flush=True)
    return result


if __name__ == "__main__":
    main()
