"""Two ranks with growth stay identical, and are the same as one process with the batches of both."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from esper.growth import Grower, add_slots
from esper.growth.decisions import Advance, Fossilize, Germinate, Prune
from tests.growth.small import QUICK, QUICK_SHADOW, SLOTS, Data, Lifecycle, Script, config, make_data, make_host

pytestmark = pytest.mark.slow  # they start processes of their own

RANKS, EPOCHS = 2, 9
LIVES = {
    0: [Germinate("first", "test", "mlp"), Germinate("second", "test", "low_rank")],
    1: [Advance("first", "test"), Advance("second", "test")],
    3: [Prune("second", "test"), Fossilize("first", "test")],
    4: [Fossilize("first", "test")],
    6: [Germinate("second", "test", "mlp")],
}
CASES: dict[str, tuple[Lifecycle, bool]] = {
    "joint": (QUICK, False),
    "shadow": (QUICK_SHADOW, False),
    "joint with batch norm": (QUICK, True),
    "shadow with batch norm": (QUICK_SHADOW, True),
}


def whole_data() -> Data:
    return make_data(4, size=16, dtype=torch.float64)


def train(model: nn.Module, data: Data, lifecycle: Lifecycle, *, poison_at: int | None = None) -> dict[str, Any]:
    """What a training leaves behind. Every rank evaluates the same batches."""
    host = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    slotted = add_slots(model, data[0][0][:2], slots=list(SLOTS))
    grower = Grower(slotted, optimizer, controller=Script(LIVES, probes=[0, 5]), config=config(lifecycle, probe_steps=2))
    grower.begin()
    val = make_data(3, seed=2, dtype=torch.float64)

    def evaluate() -> list[torch.Tensor]:
        slotted.eval()
        with torch.no_grad():
            return [cross_entropy(slotted(x), y) for x, y in val]

    for epoch in range(EPOCHS):
        if epoch == poison_at:
            with torch.no_grad():
                host.head.weight.fill_(math.nan)
        for x, y in data:
            loss = cross_entropy(slotted(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            grower.after_step(loss, closure=lambda x=x, y=y: cross_entropy(slotted(x), y))
        grower.after_epoch(evaluate)
    return {
        "host": copy.deepcopy(dict(host.state_dict())),
        "seeds": {name: copy.deepcopy(dict(slot.seed.state_dict())) for name, slot in slotted.slots.items() if slot.seed is not None},
        "optimizers": {name: bed.learner.optimizer.state_dict() for name, bed in grower.garden.beds.items() if bed.learner is not None},
        "ledger": msgspec.to_builtins(grower.ledger),
        "rollbacks": grower.rollbacks,
        "val_losses": grower.chronicle.val_losses,
    }


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    try:
        half = [(x.chunk(RANKS)[rank], y.chunk(RANKS)[rank]) for x, y in whole_data()]
        results = {}
        for name, (lifecycle, norm) in CASES.items():
            host = make_host(dtype=torch.float64, dropout=0.0, norm=norm)
            results[name] = train(DistributedDataParallel(host), half, lifecycle)
        host = make_host(dtype=torch.float64, dropout=0.0, norm=False)
        results["poisoned"] = train(DistributedDataParallel(host), half, QUICK, poison_at=5)
        torch.save(results, folder / f"results {rank}")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each of two ranks. Starting processes is slow, so all tests share two."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, (folder,), nprocs=RANKS)
    return [torch.load(folder / f"results {rank}", weights_only=False) for rank in range(RANKS)]


def assert_close(one: Any, other: Any, *, atol: float) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key], atol=atol)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_close(left, right, atol=atol)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=atol, nan_ok=True)
    elif not isinstance(one, str):  # reasons hold rounded numbers
        assert one == other


@pytest.mark.parametrize("name", [*CASES, "poisoned"])
def test_both_ranks_have_the_same_host_seeds_and_ledger_bit_for_bit(name: str, results: list[dict[str, Any]]) -> None:
    one, other = (rank[name] for rank in results)
    if "norm" in name:  # batch norm has its own statistics on each rank, as ever under data parallelism
        one["host"] = {key: value for key, value in one["host"].items() if "running" not in key}
        other["host"] = {key: value for key, value in other["host"].items() if "running" not in key}
    assert one["seeds"] or name == "poisoned"
    assert_close(one, other, atol=0.0)
    assert one["ledger"] == other["ledger"]


@pytest.mark.parametrize("name", ["joint", "shadow"])
def test_two_ranks_are_one_process_with_the_batches_of_both(name: str, results: list[dict[str, Any]]) -> None:
    lifecycle, norm = CASES[name]
    alone = train(make_host(dtype=torch.float64, dropout=0.0, norm=norm), whole_data(), lifecycle)
    assert len(alone["ledger"]["entries"]) == 3
    for rank in results:
        assert_close(rank[name], alone, atol=1e-9)


def test_a_rollback_happens_on_all_ranks_and_training_goes_on(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["poisoned"]
        assert found["rollbacks"] == 1
        assert math.isfinite(found["val_losses"][-1])
        assert all(torch.isfinite(value).all() for value in found["host"].values())
