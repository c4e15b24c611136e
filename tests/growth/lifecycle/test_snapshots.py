"""Snapshots are exact copies, share no memory with the model, and use constant memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.growth import memory as growth_memory
from esper.growth.lifecycle.snapshots import Snapshots
from esper.runs.tensors import join, split
from tests.growth.builders import Loop, make_loop

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Training:
    """A host with buffers and tied weights, its optimiser and a schedule that knows how far it is."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4)).to(device)
        self.model[3].weight = self.model[0].weight
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=5_000)
        self.inputs = torch.randn(8, 4, device=device)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors(item)


def equal(one: Any, other: Any) -> bool:
    """Down to the last bit, plain values included."""
    (structure, left), (other_structure, right) = split(one), split(other)
    return structure == other_structure and all(torch.equal(left[name], right[name]) for name in left)


def held(snapshots: Snapshots) -> list[Any]:
    return [entry["state"] for entry in snapshots.state_dict()["entries"]]


def latest(snapshots: Snapshots) -> Any:
    snapshot = snapshots.latest()
    assert snapshot is not None
    return snapshot.state


def test_training_from_a_restored_snapshot_equals_the_original_training() -> None:
    training, snapshots = Training(), Snapshots(keep=2)
    training.step(3)
    snapshots.take(training.state_dict(), epoch=3)
    expected = copy.deepcopy(training.state_dict())
    training.step(5)
    after = copy.deepcopy(training.state_dict())
    assert not equal(after, expected)
    training.load_state_dict(latest(snapshots))
    assert equal(training.state_dict(), expected)
    training.step(5)
    assert equal(training.state_dict(), after)


def test_tied_weights_are_still_tied_after_going_back() -> None:
    training, snapshots = Training(), Snapshots(keep=1)
    snapshots.take(training.state_dict(), epoch=0)
    before = training.model[0].weight.detach().clone()
    training.step()
    training.load_state_dict(latest(snapshots))
    assert training.model[3].weight is training.model[0].weight
    assert torch.equal(training.model[0].weight, before)


def test_training_on_from_a_snapshot_does_not_change_it() -> None:
    """Adam takes over the tensors that it is given, so the second way back would otherwise lead elsewhere than the first."""
    training, snapshots = Training(), Snapshots(keep=1)
    training.step(3)
    snapshots.take(training.state_dict(), epoch=3)
    expected = copy.deepcopy(training.state_dict())
    for _ in range(3):
        training.load_state_dict(latest(snapshots))
        assert equal(training.state_dict(), expected)
        training.step(4)


def test_later_snapshots_do_not_change_what_was_handed_out() -> None:
    training, snapshots = Training(), Snapshots(keep=1)
    snapshots.take(training.state_dict(), epoch=0)
    state = latest(snapshots)
    expected = copy.deepcopy(state)
    training.step()
    snapshots.take(training.state_dict(), epoch=1)
    assert equal(state, expected)


def test_plain_values_that_change_in_place_do_not_reach_the_snapshot() -> None:
    state: dict[Any, Any] = {"history": [1, {2}], "pair": (torch.zeros(2), {"count": 1}), 7: None}
    snapshots = Snapshots(keep=1)
    snapshots.take(state, epoch=0)
    state["history"][1].add(3)
    state["pair"][1]["count"] = 2
    state["pair"][0].fill_(5.0)
    taken = latest(snapshots)
    assert taken["history"] == [1, {2}]
    assert taken["pair"][1] == {"count": 1}
    assert taken["pair"][0].tolist() == [0.0, 0.0]
    assert taken[7] is None
    taken["history"][1].clear()
    taken["pair"][0].fill_(9.0)
    assert latest(snapshots)["history"] == [1, {2}]
    assert latest(snapshots)["pair"][0].tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_a_thousand_snapshots_reuse_the_memory_of_the_first_ones() -> None:
    training, snapshots = Training(), Snapshots(keep=2)
    training.step()  # Adam has no state before
    for epoch in range(2):
        snapshots.take(training.state_dict(), epoch=epoch)
    nbytes = snapshots.nbytes
    memory = {tensor.data_ptr() for tensor in tensors(held(snapshots))}
    for epoch in range(2, 1_002):
        snapshots.take(training.state_dict(), epoch=epoch)
        assert snapshots.nbytes == nbytes
    assert {tensor.data_ptr() for tensor in tensors(held(snapshots))} == memory
    assert snapshots.epochs == (1_000, 1_001)
    assert nbytes == 2 * sum(tensor.nbytes for tensor in tensors(training.state_dict()))


def test_only_the_last_snapshots_are_kept() -> None:
    snapshots = Snapshots(keep=3)
    for epoch in range(5):
        snapshots.take({"weight": torch.full((2,), float(epoch))}, epoch=epoch)
    assert len(snapshots) == 3
    assert snapshots.epochs == (2, 3, 4)
    assert [state["weight"].tolist() for state in held(snapshots)] == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]


def test_snapshots_follow_a_seed_that_appears_changes_shape_and_disappears() -> None:
    host = torch.arange(3.0)
    trees: list[dict[str, Any]] = [
        {"host": host, "seeds": []},
        {"host": host + 1, "seeds": [torch.ones(2)]},
        {"host": host + 2, "seeds": [torch.ones(2, 2), torch.ones(1)]},
        {"host": host + 3, "seeds": [torch.ones(2, 2, dtype=torch.float64), {"alpha": torch.ones(())}]},
        {"host": host + 4, "seeds": {"a": torch.ones(2, 2)}},
        {"host": host + 5, "seeds": torch.ones(2)},
        {"host": host + 6},
    ]
    snapshots = Snapshots(keep=1)
    snapshots.take(trees[0], epoch=0)
    memory = held(snapshots)[0]["host"].data_ptr()
    for epoch, tree in enumerate(trees):
        snapshots.take(tree, epoch=epoch)
        assert equal(latest(snapshots), tree)
        assert held(snapshots)[0]["host"].data_ptr() == memory
        assert snapshots.nbytes == sum(tensor.nbytes for tensor in tensors(tree))


def test_a_repeated_disaster_restores_an_older_snapshot_and_drops_the_latest() -> None:
    snapshots = Snapshots(keep=2)
    for epoch in (4, 5):
        snapshots.take({"weight": torch.full((2,), float(epoch))}, epoch=epoch)
    assert snapshots.to_restore(is_repeated=False).epoch == 5
    snapshot = snapshots.to_restore(is_repeated=True)
    assert snapshot.epoch == 4
    assert snapshot.state["weight"].tolist() == [4.0, 4.0]
    snapshots.drop_after(snapshot)
    assert snapshots.epochs == (4,)
    assert snapshots.to_restore(is_repeated=True).epoch == 4, "there is no earlier one"
    snapshots.take({"weight": torch.full((2,), 6.0)}, epoch=6)
    assert snapshots.epochs == (4, 6)


def test_there_is_one_snapshot_per_epoch_the_last() -> None:
    snapshots = Snapshots(keep=3)
    for value in (1.0, 2.0):
        snapshots.take({"weight": torch.full((2,), value)}, epoch=7)
    assert snapshots.epochs == (7,)
    assert snapshots.to_restore(is_repeated=False).state["weight"].tolist() == [2.0, 2.0]


def test_a_snapshot_that_fails_leaves_the_others_whole() -> None:
    snapshots = Snapshots(keep=2)
    for epoch in (1, 2):
        snapshots.take({"weight": torch.full((2,), float(epoch)), "more": 0}, epoch=epoch)
    with pytest.raises(TypeError, match="pickle"):
        snapshots.take({"weight": torch.zeros(2), "more": (number for number in range(3))}, epoch=3)
    assert snapshots.epochs == (2,)
    assert latest(snapshots)["weight"].tolist() == [2.0, 2.0]


def test_a_resumed_run_can_still_go_back() -> None:
    training, snapshots = Training(), Snapshots(keep=2)
    for epoch in range(3):
        training.step()
        snapshots.take(training.state_dict(), epoch=epoch)
    saved = copy.deepcopy(join(*split(snapshots.state_dict())))  # what a checkpoint gives back
    resumed = Snapshots(keep=2)
    resumed.load_state_dict(saved)
    assert resumed.epochs == (1, 2)
    training.step()
    training.load_state_dict(latest(resumed))
    assert equal(training.state_dict(), latest(snapshots))
    for tensor in tensors(saved):
        tensor.zero_()
    assert equal(latest(resumed), latest(snapshots))


def test_a_resumed_run_that_keeps_fewer_has_the_latest_ones() -> None:
    snapshots, fewer = Snapshots(keep=3), Snapshots(keep=1)
    for epoch in range(3):
        snapshots.take({"epoch": epoch}, epoch=epoch)
    fewer.load_state_dict(snapshots.state_dict())
    assert fewer.epochs == (2,)


def test_parameters_strided_and_empty_tensors_are_copied_as_plain_ones() -> None:
    tree = {
        "parameter": nn.Parameter(torch.ones(2)),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "expanded": torch.ones(1).expand(4),
        "image": torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "step": torch.tensor(3),
    }
    snapshots = Snapshots(keep=1)
    for epoch in range(2):  # into memory of its own, and into memory that is there
        snapshots.take(tree, epoch=epoch)
        state = latest(snapshots)
        assert all(torch.equal(state[name], tensor) for name, tensor in tree.items())
        assert not any(tensor.requires_grad for tensor in state.values())
        assert state["image"].is_contiguous(memory_format=torch.channels_last)


def test_the_extra_state_of_a_module_is_kept() -> None:
    snapshots = Snapshots(keep=1)
    state = nn.BatchNorm1d(2).state_dict()
    snapshots.take(state, epoch=0)
    assert latest(snapshots)._metadata == state._metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_no_snapshot_is_refused(keep: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1.*got {keep}"):
        Snapshots(keep)


@needs_cuda
def test_a_state_on_the_gpu_is_held_in_pinned_memory_that_is_reused() -> None:
    training, snapshots = Training("cuda"), Snapshots(keep=2)
    for epoch in range(10):
        training.step()
        snapshots.take(training.state_dict(), epoch=epoch)
        if epoch == 1:
            memory = {tensor.data_ptr() for tensor in tensors(held(snapshots))}
    assert {tensor.data_ptr() for tensor in tensors(held(snapshots))} == memory
    assert all(tensor.is_pinned() for tensor in tensors([state["model"] for state in held(snapshots)]))
    expected = copy.deepcopy(training.state_dict())
    assert equal(latest(snapshots), expected)
    training.step(3)
    training.load_state_dict(latest(snapshots))
    assert equal(training.state_dict(), expected)


@needs_cuda
def test_memory_loaded_from_a_checkpoint_is_replaced_by_pinned_memory() -> None:
    training, snapshots = Training("cuda"), Snapshots(keep=1)
    snapshots.take(training.state_dict(), epoch=0)
    snapshots.load_state_dict(join(*split(snapshots.state_dict())))
    snapshots.take(training.state_dict(), epoch=1)
    assert all(tensor.is_pinned() for tensor in tensors(held(snapshots)[0]["model"]))
    assert equal(latest(snapshots), training.state_dict())


@pytest.mark.parametrize("end", [lambda loop: loop.grower.bake(), lambda loop: loop.slotted.remove(), lambda loop: loop.grower.stop()])
def test_snapshots_and_best_states_are_freed_when_a_grower_ends(end: Callable[[Loop], object]) -> None:
    loop = make_loop()
    loop.epoch()
    held = loop.grower._recovery
    assert held._snapshots.nbytes > 0
    assert held.best_states.nbytes > 0
    end(loop)
    assert held._snapshots.nbytes == held.best_states.nbytes == 0


@pytest.mark.slow
def test_hosts_that_come_and_go_leave_nothing_in_memory() -> None:
    growth_memory.grow_one(0)  # the first of a process imports parts of torch, whose frames are freed one collection later
    gc.collect()
    growers = [growth_memory.grow_one(number) for number in range(8)]
    assert not any(grower._recovery._snapshots.nbytes for grower in (one() for one in growers) if grower is not None)
    gc.collect()
    assert not any(one() for one in growers)
