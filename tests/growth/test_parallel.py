"""Two ranks with growth stay identical, and equal one process with the batches of both."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
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
from esper.growth.lifecycle.stages import Action, Advance, Fossilize, Germinate, Prune, Trial
from tests.growth.builders import QUICK, QUICK_SHADOW, SLOTS, Data, LifecycleConfig, Script, config, make_data, make_host
from tests.processes import results_of_ranks

pytestmark = pytest.mark.slow  # they start processes of their own

RANKS, EPOCHS = 2, 8
LIVES = {
    0: [Germinate(slot="first", reason="test", blueprint="mlp"), Germinate(slot="second", reason="test", blueprint="low_rank")],
    1: [Advance(slot="first", reason="test"), Advance(slot="second", reason="test")],
    3: [Prune(slot="second", reason="test"), Fossilize(slot="first", reason="test")],
    4: [Fossilize(slot="first", reason="test")],
    6: [Germinate(slot="second", reason="test", blueprint="mlp")],
}
IN_WIDTH = {
    0: [Germinate(slot="first", reason="test", blueprint="widen_50"), Germinate(slot="second", reason="test", blueprint="widen_100")],
    1: [Advance(slot="first", reason="test"), Advance(slot="second", reason="test")],
    3: [Prune(slot="second", reason="test"), Fossilize(slot="first", reason="test")],
    4: [Fossilize(slot="first", reason="test")],
    6: [Germinate(slot="second", reason="test", blueprint="widen_50")],
}
WITH_TRIALS = {
    **LIVES,
    6: [
        Trial("again", (Germinate(slot="second", reason="test", blueprint="mlp"),)),
        Trial("nothing"),
        Trial("wider", (Germinate(slot="second", reason="test", blueprint="widen_100"),)),
    ],
}
BLUEPRINTS = ("mlp", "low_rank", "widen_50", "widen_100")  # the candidates of the probe, each of which takes as long as some steps
Lives = dict[int, list[Any]]
CASES: dict[str, tuple[LifecycleConfig, bool, Lives]] = {
    "joint": (QUICK, False, LIVES),
    "shadow": (QUICK_SHADOW, False, LIVES),
    "joint in width": (QUICK, False, IN_WIDTH),
    "shadow in width": (QUICK_SHADOW, False, IN_WIDTH),
    "joint with trials": (QUICK, False, WITH_TRIALS),
    "joint with batch norm": (QUICK, True, LIVES),
    "shadow with batch norm": (QUICK_SHADOW, True, LIVES),
}


def whole_data() -> Data:
    return make_data(2, size=16, dtype=torch.float64)


def validation() -> Data:
    return make_data(2, seed=2, size=12, dtype=torch.float64)


def train(
    model: nn.Module, data: Data, lifecycle: LifecycleConfig, lives: Lives = LIVES, *, val: Data | None = None, poison_at: int | None = None
) -> dict[str, Any]:
    """Train and return the host, the seeds and the ledger. Every rank evaluates the same batches, unless `val` gives it its own."""
    host = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    slotted = add_slots(model, data[0][0][:2], slots=list(SLOTS))
    settings = config(lifecycle, probe_steps=2, blueprints=BLUEPRINTS)
    actions, trials = ({at: [one for one in some if isinstance(one, kind)] for at, some in lives.items()} for kind in (Action, Trial))
    grower = Grower(slotted, optimizer, controller=Script(actions, probes=[0, 5], trials=trials), config=settings)
    grower.begin()
    batches = validation() if val is None else val

    def evaluate() -> list[tuple[torch.Tensor, int]]:
        slotted.eval()
        with torch.no_grad():
            return [(cross_entropy(slotted(x), y), len(x)) for x, y in batches]

    def train_epoch() -> None:
        for x, y in data:
            loss = cross_entropy(slotted(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            grower.after_step(loss, closure=lambda x=x, y=y: cross_entropy(slotted(x), y))
        grower.after_epoch(evaluate)

    for epoch in range(EPOCHS):
        if epoch == poison_at:
            with torch.no_grad():
                host.head.weight.fill_(math.nan)
        if grower.trials:
            grower.try_out(train_epoch)
        else:
            train_epoch()
    return {
        "host": copy.deepcopy(dict(host.state_dict())),
        "seeds": {name: copy.deepcopy(dict(slot.seed.state_dict())) for name, slot in slotted.slots.items() if slot.seed is not None},
        "optimizers": {
            name: backend.learner.optimizers[0].state_dict()
            for name, backend in grower.lifecycles.slots.items()
            if backend.learner is not None
        },
        "ledger": msgspec.to_builtins(grower.ledger),
        "rollbacks": grower.rollbacks,
        "val_losses": grower.history.val_losses,
        "train_losses": torch.tensor(grower.history.train_losses).half().tolist(),  # they are told in single precision
        "samples": grower.state().samples_per_epoch,
        "alpha": grower.search_alpha(next(iter(slotted.slots)), evaluate, alphas=[0.5, 1.0]).losses if lifecycle is QUICK else {},
    }


def message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mistakes(rank: int) -> dict[str, str]:
    """Collect the errors for models that would drift apart, and for an evaluation that fails on one rank."""
    data = whole_data()
    found = {}
    slotted = add_slots(make_host(dtype=torch.float64), data[0][0][:2], slots=list(SLOTS))
    optimizer = torch.optim.SGD(slotted.model.parameters(), lr=0.1)
    found["no DDP"] = message_of(lambda: Grower(slotted, optimizer))
    wrapped = DistributedDataParallel(slotted.model)
    found["slots before DDP"] = message_of(lambda: Grower(slotted, optimizer))
    slotted.remove()
    single = dist.new_group([rank], use_local_synchronization=True)
    partly = add_slots(DistributedDataParallel(make_host(dtype=torch.float64), process_group=single), data[0][0][:2], slots=list(SLOTS))
    found["a group of one"] = message_of(lambda: Grower(partly, torch.optim.SGD(partly.model.parameters(), lr=0.1)))

    slotted = add_slots(wrapped, data[0][0][:2], slots=list(SLOTS))
    grower = Grower(slotted, optimizer)
    x, y = data[0]
    loss = cross_entropy(slotted(x), y)
    loss.backward()
    optimizer.step()
    grower.after_step(loss)
    wrapped(x)
    found["samples"] = str(slotted.calls.samples)
    found["evaluation"] = message_of(lambda: grower.after_epoch(lambda: [1.0, 2.0 // rank]))
    found["after that"] = message_of(lambda: grower.after_epoch(lambda: [1.0, 2.0]))
    return found


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    try:
        half = [(x.chunk(RANKS)[rank], y.chunk(RANKS)[rank]) for x, y in whole_data()]
        results = {}
        for name, (lifecycle, norm, lives) in CASES.items():
            host = make_host(dtype=torch.float64, dropout=0.0, norm=norm)
            results[name] = train(DistributedDataParallel(host), half, lifecycle, lives)
        shards = [(x.split([8, 4])[rank], y.split([8, 4])[rank]) for x, y in validation()]
        host = make_host(dtype=torch.float64, dropout=0.0, norm=False)
        results["shards"] = train(DistributedDataParallel(host), half, QUICK, val=shards)
        results["mistakes"] = mistakes(rank)
        host = make_host(dtype=torch.float64, dropout=0.0, norm=False)
        results["poisoned"] = train(DistributedDataParallel(host), half, QUICK, poison_at=5)
        torch.save(results, folder / f"results {rank}")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two ranks. Starting processes is slow, so all tests share them."""
    return results_of_ranks(run_rank, tmp_path_factory.mktemp("ranks"), RANKS)


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


@pytest.mark.parametrize("name", [*CASES, "shards", "poisoned"])
def test_both_ranks_have_the_same_host_seeds_and_ledger_bit_for_bit(name: str, results: list[dict[str, Any]]) -> None:
    one, other = (rank[name] for rank in results)
    if "norm" in name:  # batch norm has its own statistics on each rank, as ever under data parallelism
        one["host"] = {key: value for key, value in one["host"].items() if "running" not in key}
        other["host"] = {key: value for key, value in other["host"].items() if "running" not in key}
    assert one["seeds"] or name == "poisoned"
    assert_close(one, other, atol=0.0)
    assert one["ledger"] == other["ledger"]


@pytest.mark.parametrize("name", ["joint", "shadow", "joint in width", "shadow in width", "joint with trials"])
def test_two_ranks_equal_one_process_with_the_batches_of_both(name: str, results: list[dict[str, Any]]) -> None:
    lifecycle, norm, lives = CASES[name]
    alone = train(make_host(dtype=torch.float64, dropout=0.0, norm=norm), whole_data(), lifecycle, lives)
    assert len(alone["ledger"]["seeds"]) == 3
    for rank in results:
        assert_close(rank[name], alone, atol=1e-9)


def test_ranks_that_evaluate_parts_of_every_batch_equal_one_process_that_evaluates_the_whole(results: list[dict[str, Any]]) -> None:
    """Parts of 8 and 4 samples, which weigh as many."""
    lifecycle, norm, _ = CASES["joint"]
    alone = train(make_host(dtype=torch.float64, dropout=0.0, norm=norm), whole_data(), lifecycle)
    assert [seed["contributions"] for seed in alone["ledger"]["seeds"]].count([]) < 3
    for rank in results:
        assert_close(rank["shards"], alone, atol=1e-9)


@pytest.mark.parametrize("how", ["no DDP", "slots before DDP"])
def test_slots_in_a_process_group_without_data_parallelism_are_refused(how: str, results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert "there are 2 processes" in rank["mistakes"][how]
        assert "add_slots(DistributedDataParallel(model)" in rank["mistakes"][how]


def test_data_parallelism_over_some_of_the_ranks_is_refused(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["mistakes"]["samples"] == "16"
        assert "over 1 of 2 processes" in rank["mistakes"]["a group of one"]


def test_an_evaluation_that_fails_on_one_rank_fails_on_all_and_can_be_repeated(results: list[dict[str, Any]]) -> None:
    assert results[0]["mistakes"]["evaluation"].startswith("ZeroDivisionError")
    assert results[1]["mistakes"]["evaluation"].startswith("GrowthError: evaluate() failed on rank 0: ZeroDivisionError")
    assert [rank["mistakes"]["after that"] for rank in results] == ["no error", "no error"]


def test_a_rollback_happens_on_all_ranks_and_training_goes_on(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["poisoned"]
        assert found["rollbacks"] == 1
        assert math.isfinite(found["val_losses"][-1])
        assert all(torch.isfinite(value).all() for value in found["host"].values())
