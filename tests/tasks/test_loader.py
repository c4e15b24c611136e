"""Batches: whole epochs, orders that depend on the seed alone, and exact resuming."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from esper.tasks import BatchLoader, TaskError, batch_bounds, shuffled_order


def loader_of(num_samples: int, batch_size: int, *, seed: int | None = 0, drop_last: bool = False, noisy: bool = False) -> BatchLoader:
    """Samples that are their own numbers, with targets ten times as large; with `noisy`, an augmentation that draws."""
    numbers = torch.arange(num_samples)

    def add_noise(inputs: Tensor, generator: torch.Generator) -> Tensor:
        return inputs + torch.rand(inputs.shape, generator=generator)

    augmentation = add_noise if noisy else None
    return BatchLoader(numbers.float(), 10 * numbers, batch_size=batch_size, seed=seed, drop_last=drop_last, augmentation=augmentation)


def inputs_of(batches: Iterable[tuple[Tensor, Tensor]]) -> list[list[float]]:
    return [inputs.tolist() for inputs, _ in batches]


@given(num_samples=st.integers(2, 200), batch_size=st.integers(2, 70))
def test_every_sample_comes_once_and_no_batch_has_one_sample(num_samples: int, batch_size: int) -> None:
    loader = loader_of(num_samples, batch_size)
    batches = inputs_of(loader)
    assert sorted(chain.from_iterable(batches)) == list(range(num_samples))
    assert len(batches) == len(loader)
    assert all(2 <= len(batch) <= batch_size + 1 for batch in batches)
    assert all(len(batch) == batch_size for batch in batches[:-1])


@pytest.mark.slow
@given(num_samples=st.integers(5, 200), batch_size=st.integers(1, 5))
def test_with_drop_last_all_batches_are_full(num_samples: int, batch_size: int) -> None:
    loader = loader_of(num_samples, batch_size, drop_last=True)
    batches = inputs_of(loader)
    assert [len(batch) for batch in batches] == [batch_size] * (num_samples // batch_size)
    assert len(loader) == len(batches)


def test_a_batch_size_of_one_is_kept_when_it_is_what_the_user_set() -> None:
    assert batch_bounds(3, 1) == [(0, 1), (1, 2), (2, 3)]


def test_targets_stay_with_their_inputs() -> None:
    for inputs, targets in loader_of(23, 4):
        assert torch.equal(10 * inputs.long(), targets)


def test_the_same_seed_gives_the_same_order_and_each_epoch_and_seed_its_own() -> None:
    loader = loader_of(50, 8, seed=3)
    first, second = inputs_of(loader), inputs_of(loader)
    again = loader_of(50, 8, seed=3)
    assert [inputs_of(again), inputs_of(again)] == [first, second]
    assert first != second
    assert inputs_of(loader_of(50, 8, seed=4)) != first


def test_the_order_of_an_epoch_is_known_without_a_loader() -> None:
    loader = loader_of(50, 8, seed=3)
    list(loader)
    assert list(chain.from_iterable(inputs_of(loader))) == shuffled_order(50, seed=3, epoch=1).tolist()


def test_without_a_seed_the_order_never_changes() -> None:
    loader = loader_of(10, 4, seed=None)
    assert inputs_of(loader) == inputs_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("seed", [0, None])
def test_changing_a_batch_leaves_the_data_unchanged(seed: int | None) -> None:
    loader = loader_of(10, 4, seed=seed)
    for inputs, targets in loader:
        inputs.zero_()
        targets.zero_()
    assert loader.inputs.tolist() == list(range(10))
    assert loader.targets.tolist() == list(range(0, 100, 10))


@pytest.mark.slow
@given(given_batches=st.integers(0, 17), noisy=st.booleans())
def test_a_loader_resumes_exactly_from_any_place(given_batches: int, noisy: bool) -> None:
    loader = loader_of(23, 4, noisy=noisy)  # 6 batches
    expected = inputs_of(batch for _ in range(4) for batch in loader)
    loader = loader_of(23, 4, noisy=noisy)
    seen, state = list[list[float]](), loader.state_dict()
    while len(seen) < given_batches:
        for inputs, _ in loader:
            seen.append(inputs.tolist())
            state = loader.state_dict()
            if len(seen) == given_batches:
                break
    resumed = loader_of(23, 4, noisy=noisy)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    while len(seen) < len(expected):
        seen += inputs_of(resumed)
    assert seen == expected


def test_a_state_saved_during_the_last_batch_has_no_batches_left() -> None:
    loader = loader_of(12, 4)
    states = [loader.state_dict() for _ in loader]
    resumed = loader_of(12, 4)
    resumed.load_state_dict(states[-1])
    assert inputs_of(resumed) == []
    assert inputs_of(resumed) == inputs_of(loader)


def test_an_aborted_iteration_is_followed_by_a_new_epoch() -> None:
    loader, whole = loader_of(12, 4), loader_of(12, 4)
    next(iter(loader))
    list(whole)
    assert inputs_of(loader) == inputs_of(whole)


def test_an_older_iteration_does_not_move_the_state() -> None:
    loader = loader_of(12, 4)
    older = iter(loader)
    next(older)
    next(iter(loader))
    before = loader.state_dict()
    assert len(list(older)) == 2
    assert loader.state_dict() == before


def test_loading_in_the_middle_of_an_epoch_goes_back_to_the_saved_place() -> None:
    loader = loader_of(20, 4)
    batches = iter(loader)
    first = next(batches)[0].tolist()
    state = loader.state_dict()
    rest = inputs_of(batches)
    loader.load_state_dict(state)
    assert inputs_of(loader) == rest
    assert first not in rest


@pytest.mark.parametrize(("name", "other"), [("seed", 1), ("batch_size", 5), ("num_samples", 21), ("augmented", True)])
def test_a_state_of_other_data_is_refused_by_name(name: str, other: object) -> None:
    loader = loader_of(20, 4)
    with pytest.raises(TaskError, match=f"{name} {other}"):
        loader.load_state_dict({**loader.state_dict(), "epoch": 3, name: other})
    assert loader.epoch == 0


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True])
def test_an_impossible_batch_size_is_refused(batch_size: int) -> None:
    with pytest.raises(TaskError, match="batch size"):
        loader_of(10, batch_size)


def test_drop_last_that_would_leave_nothing_is_refused() -> None:
    with pytest.raises(TaskError, match="batches of 11 leave nothing of 10"):
        loader_of(10, 11, drop_last=True)


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    list(loader_of(23, 4, noisy=True))
    assert torch.equal(torch.get_rng_state(), before)
