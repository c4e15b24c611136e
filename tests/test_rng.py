"""Random streams: the same for the same seed and name, independent otherwise, continued exactly."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from esper.rng import Streams


def draws(streams: Streams, name: str) -> tuple[list[float], list[float], int]:
    return torch.rand(4, generator=streams.torch(name)).tolist(), streams.numpy(name).random(4).tolist(), streams.integer(name)


@given(seed=st.integers(0, 2**128), name=st.text(st.characters(exclude_categories=["Cs"]), max_size=9))
def test_the_same_seed_and_name_give_the_same_streams(seed: int, name: str) -> None:
    assert draws(Streams(seed), name) == draws(Streams(seed), name)


@pytest.mark.slow
def test_streams_are_the_same_in_another_process() -> None:
    code = "from esper.rng import Streams; print(Streams(3).integer('env'), Streams(3).numpy('x').integers(10**9))"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert answer.split() == [str(Streams(3).integer("env")), str(Streams(3).numpy("x").integers(10**9))]


def test_different_names_seeds_and_families_give_different_streams() -> None:
    root = Streams(0)
    families = [root, root.spawn("a"), root.spawn("b"), root.spawn("a").spawn("a"), Streams(1), Streams(1).spawn("a")]
    seen = [draws(family, name) for family in families for name in ("a", "b", "")]
    for values in zip(*seen, strict=True):
        assert len({str(value) for value in values}) == len(seen)


def test_streams_of_different_names_are_not_correlated() -> None:
    streams = Streams(0)
    table = np.stack([streams.numpy(f"numpy {index}").standard_normal(4000) for index in range(8)])
    table = np.concatenate([table, torch.randn(8, 4000, generator=streams.torch("torch")).numpy()])
    correlation = np.corrcoef(table) - np.eye(16)
    assert np.abs(correlation).max() < 5 / np.sqrt(4000)


def test_creating_a_stream_does_not_change_others() -> None:
    alone, crowded = Streams(5), Streams(5)
    crowded.numpy("other").random(100)
    crowded.torch("other")
    crowded.spawn("other")
    assert draws(alone, "mine") == draws(crowded, "mine")


def test_a_name_has_one_generator_whose_state_is_shared() -> None:
    streams = Streams(0)
    assert streams.torch("x") is streams.torch("x", torch.device("cpu"))
    assert streams.numpy("x") is streams.numpy("x")
    assert streams.spawn("x") is streams.spawn("x")
    assert streams.integer("x") == streams.integer("x")


def test_no_global_generator_is_touched() -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    draws(Streams(0).spawn("x"), "y")
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_integers_fit_into_31_bits() -> None:
    values = [Streams(0).integer(str(index)) for index in range(500)]
    assert all(0 <= value < 2**31 for value in values)
    assert max(values) > 2**30


@pytest.mark.parametrize("seed", [-1, 1.0, True, None])
def test_a_seed_that_is_no_natural_number_is_refused(seed: object) -> None:
    with pytest.raises(ValueError, match="a seed is an int >= 0"):
        Streams(seed)


def used_streams() -> Streams:
    streams = Streams(11)
    for family in (streams, streams.spawn("rank 1"), streams.spawn("rank 1").spawn("env")):
        torch.randn(3, generator=family.torch("noise"))  # an odd number of normals leaves one in the cache
        family.numpy("shuffle").integers(5, size=3, dtype=np.uint32)  # leaves half a word in the cache
    return streams


def continuation(streams: Streams) -> list[object]:
    families = (streams, streams.spawn("rank 1"), streams.spawn("rank 1").spawn("env"), streams.spawn("late"))
    return [
        (torch.randn(5, generator=family.torch(name)).tolist(), family.numpy(name).integers(99, size=5, dtype=np.uint32).tolist())
        for family in families
        for name in ("noise", "shuffle", "late")
    ]


def through_json(tree: object) -> object:
    """A tree after a trip through JSON that keeps only 64 bits of a number, tensors aside."""
    if isinstance(tree, dict):
        return {key: through_json(value) for key, value in tree.items()}
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    assert not isinstance(tree, int) or abs(tree) < 2**63
    return json.loads(json.dumps(tree))


def test_streams_created_after_loading_continue_exactly() -> None:
    streams = used_streams()
    state = through_json(streams.state_dict())
    fresh = Streams(11)
    fresh.load_state_dict(state)
    assert continuation(fresh) == continuation(streams)


def test_loading_moves_the_generators_that_others_already_hold() -> None:
    streams = used_streams()
    state = through_json(streams.state_dict())
    expected = continuation(streams)
    held = streams.torch("noise")
    streams.load_state_dict(state)  # streams that came after the state was taken start anew
    assert continuation(streams) == expected
    assert streams.torch("noise") is held


def test_a_saved_state_does_not_move_with_its_stream() -> None:
    streams = used_streams()
    state = streams.state_dict()
    expected = continuation(streams)
    fresh = Streams(11)
    fresh.load_state_dict(state)
    assert continuation(fresh) == expected


def test_a_state_of_another_seed_is_refused_and_changes_nothing() -> None:
    streams = Streams(1)
    with pytest.raises(ValueError, match="belong to seed 11, these to seed 1"):
        streams.load_state_dict(used_streams().state_dict())
    assert draws(streams, "noise") == draws(Streams(1), "noise")


def test_a_stream_on_a_missing_cuda_device_is_refused_before_anything_changes() -> None:
    state = used_streams().state_dict()
    state["children"]["rank 1"]["torch"] = {"cuda:99": {"noise": torch.zeros(16, dtype=torch.uint8)}}
    streams = Streams(11)
    with pytest.raises(ValueError, match=r"\['noise'\] are on cuda:99, but this machine has"):
        streams.load_state_dict(state)
    assert draws(streams, "noise") == draws(Streams(11), "noise")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cuda device")
def test_a_name_on_two_devices_has_two_streams_and_both_continue() -> None:
    streams = Streams(0)
    assert streams.torch("x", "cuda") is streams.torch("x", "cuda:0")
    assert streams.torch("x", "cuda") is not streams.torch("x")
    torch.rand(3, generator=streams.torch("x", "cuda"), device="cuda")
    fresh = Streams(0)
    fresh.load_state_dict(streams.state_dict())
    first, second = (torch.rand(3, generator=family.torch("x", "cuda"), device="cuda") for family in (streams, fresh))
    assert torch.equal(first, second)
