"""Checkpoints: exact, refused with a reason when damaged, and never lost to a crash."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from esper.files import with_digest, without_digest
from esper.runs import CheckpointError, CheckpointStore, Versions, load_module, plain_names
from tests.faults import Crash, _without_syncs, crash_at  # noqa: F401 — a fixture


def store_at(root: Path, **options: Any) -> CheckpointStore:
    return CheckpointStore(root, **({"kind": "test"} | options))


def same(left: Any, right: Any) -> bool:
    """Whether two trees agree in every type and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return (left.dtype, left.shape, bits(left)) == (right.dtype, right.shape, bits(right))
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, dict):
        return list(left) == list(right) and [*map(type, left)] == [*map(type, right)] and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)  # tells -0.0 from 0.0, and nan is nan


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def round_trip(root: Path, state: Any) -> Any:
    store_at(root).save(1, state)
    return store_at(root).load().state


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.uint32]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(DTYPES))
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if size else torch.zeros(shape, dtype=dtype)


arrays = tensors().filter(lambda tensor: tensor.dtype != torch.bfloat16).map(lambda tensor: tensor.numpy())  # numpy has no bfloat16
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors() | arrays
keys = st.text() | st.integers()
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(state=trees)
def test_any_state_tree_is_saved_and_loaded_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    assert same(round_trip(tmp_path_factory.mktemp("store"), state), state)


def test_similar_names_are_not_confused(tmp_path: Path) -> None:
    state = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 0: torch.tensor(3), "0": torch.tensor(4), "__metadata__": torch.tensor(5)}
    state |= {"a/b#2": torch.tensor(6), "tensor": "a/b", "x": {"tensor": "a/b"}, "": torch.tensor(7)}
    assert same(round_trip(tmp_path, state), state)


def test_views_transposes_and_shared_memory_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    parameter = nn.Parameter(base.clone())
    state = {"base": base, "again": base, "row": base[1], "transposed": base.T, "strided": base[:, ::2], "expanded": base[0].expand(2, 4)}
    loaded = round_trip(tmp_path, state | {"parameter": parameter, "reversed": np.arange(5)[::-1]})
    for name, tensor in state.items():
        assert same(loaded[name], tensor)
    assert same(loaded["parameter"], parameter.detach())
    assert not loaded["parameter"].requires_grad
    assert loaded["reversed"].tolist() == [4, 3, 2, 1, 0]
    loaded["base"].zero_()
    assert loaded["again"].sum() == base.sum()


def test_an_optimiser_and_generators_resume_exactly(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.Generator, np.random.Generator]:
        model = nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1), torch.Generator().manual_seed(3), np.random.default_rng(3)

    def train(model: nn.Module, optimiser: torch.optim.Optimizer, generator: torch.Generator, rng: np.random.Generator) -> None:
        for _ in range(3):
            batch = torch.randn(4, 3, generator=generator) + rng.normal()
            optimiser.zero_grad()
            model(batch).square().sum().backward()
            optimiser.step()

    first = build()
    train(*first)
    model, optimiser, generator, rng = first
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "generator": generator.get_state(),
        "rng": rng.bit_generator.state,
    }
    assert isinstance(state["model"], OrderedDict)
    assert state["rng"]["state"]["state"] > 2**64
    loaded = round_trip(tmp_path, state)
    assert list(loaded["optimiser"]["state"]) == [0, 1]

    second = build()
    load_module(second[0], loaded["model"])
    second[1].load_state_dict(loaded["optimiser"])
    second[2].set_state(loaded["generator"])
    second[3].bit_generator.state = loaded["rng"]
    train(*first)
    train(*second)
    assert same(dict(first[0].state_dict()), dict(second[0].state_dict()))


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "builtins.object"),
        (Point(1, 2), "Point"),
        (np.float64(1.0), "numpy.float64"),
        (np.array(["text"]), "numpy array of <U4"),
        (torch.zeros(2, dtype=torch.complex64), "torch.complex64"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        ({(1, 2): 3}, r"key \(1, 2\)"),
        ({True: 3}, "key True"),
    ],
)
def test_an_unsupported_value_is_refused_with_its_path_before_anything_is_written(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"state\['deep'\]\[1\].*{message}"):
        store_at(tmp_path).save(1, {"deep": [0, value]})
    assert list(tmp_path.iterdir()) == []


def test_step_note_and_layout_are_as_documented(tmp_path: Path) -> None:
    note = {"score": math.nan, "events_offset": 17}
    folder = store_at(tmp_path / "new" / "checkpoints").save(1024, {"w": torch.ones(2)}, note=note)
    assert folder.name == "step-000000001024"
    assert {path.name for path in folder.iterdir()} == {"tensors.safetensors", "state.json", "manifest.json"}
    loaded = store_at(folder.parent).load()
    assert (loaded.step, loaded.path, loaded.skipped) == (1024, folder, ())
    assert same(loaded.note, note)
    with pytest.raises(TypeError, match="belong into the state"):
        store_at(tmp_path).save(1, {}, note={"w": torch.ones(2)})
    with pytest.raises(ValueError, match="negative"):
        store_at(tmp_path).save(-1, {})


def test_a_loaded_state_does_not_depend_on_the_file(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    folder = store.save(1, {"w": torch.ones(1000)})
    loaded = store.load().state["w"]
    (folder / "tensors.safetensors").write_bytes(b"\0" * (folder / "tensors.safetensors").stat().st_size)
    assert loaded.sum() == 1000


def test_loading_from_an_empty_store_is_refused(tmp_path: Path) -> None:
    store = store_at(tmp_path / "nowhere")
    assert not store.has_any()
    assert store.list() == ()
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        store.load()
    with pytest.raises(CheckpointError, match="marked as the best"):
        store.load("best")
    with pytest.raises(CheckpointError, match="is missing"):
        store.load(tmp_path / "step-000000000007")
    with pytest.raises(ValueError, match="not 'newest'"):
        store.load("newest")  # type: ignore[arg-type]


def test_the_last_and_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    store = store_at(tmp_path, keep=2)
    for step in range(6):
        store.save(step, {"step": step}, is_best=step == 1)
    assert [path.name[-1] for path in store.list()] == ["1", "4", "5"]
    assert store.load("best").state == {"step": 1}
    assert store.load().state == {"step": 5}
    store.save(6, {"step": 6}, is_best=True)
    assert [path.name[-1] for path in store.list()] == ["5", "6"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest", "step-000000000005", "step-000000000006"]


def test_a_run_that_returns_to_an_earlier_step_keeps_its_latest_checkpoint(tmp_path: Path) -> None:
    store = store_at(tmp_path, keep=2)
    for step in (10, 20, 5):
        store.save(step, {"step": step})
    assert store.load().state == {"step": 5}
    assert [int(path.name[-2:]) for path in store.list()] == [20, 5]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    for value in range(3):
        store.save(7, {"value": value, "w": torch.full((3,), value)})
    assert len(store.list()) == 1
    assert store.load().state["value"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("_without_syncs")
@pytest.mark.parametrize("second_step", [1, 2], ids=["same step", "next step"])
def test_a_crash_at_any_moment_loses_nothing(tmp_path: Path, second_step: int) -> None:
    number, has_finished, answers = 0, False, []
    while not has_finished:
        number += 1
        store = store_at(tmp_path / str(number), keep=1)
        store.save(1, {"value": "old", "w": torch.zeros(3)}, is_best=True)
        with crash_at(number):
            try:
                store.save(second_step, {"value": "new", "w": torch.ones(3)}, is_best=True)
                has_finished = True
            except Crash:
                pass
        after = store_at(store.root, keep=1)
        loaded = after.load()
        assert loaded.skipped == ()
        assert same(loaded.state["w"], torch.zeros(3) if loaded.state["value"] == "old" else torch.ones(3))
        assert after.load("best").state["value"] in ("old", "new")
        assert after.has_any()
        answers.append(loaded.state["value"])
        after.save(3, {"value": "third"})
        assert after.load().state["value"] == "third"
        assert not [path for path in store.root.iterdir() if path.name.startswith(".")]
    assert number > 20
    assert answers == sorted(answers, reverse=True)  # old up to some moment, new from then on
    assert {answers[0], answers[-1]} == {"old", "new"}


@pytest.mark.slow
def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    program = (
        "import sys, os, threading, torch; from esper.runs import CheckpointStore\n"
        "store = CheckpointStore(sys.argv[1], kind='test', keep=1)\n"
        "for step in range(10**6):\n"
        "    store.save(step % 2, {'w': torch.full((20000,), step), 'step': step})\n"
        "    if step == 5: threading.Timer(0.1, os._exit, [9]).start()\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 9
    loaded = store_at(tmp_path).load()
    assert loaded.state["step"] >= 5
    assert (loaded.state["w"] == loaded.state["step"]).all()
    assert loaded.skipped == ()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def replace(path: Path, old: bytes, new: bytes) -> None:
    """In the last place where it stands."""
    before, _, after = path.read_bytes().rpartition(old)
    path.write_bytes(before + new + after)


def edit_manifest(folder: Path, **changes: Any) -> None:
    """As another program would have written it, with the digest that belongs to it."""
    path = folder / "manifest.json"
    values = without_digest(json.loads(path.read_text()))
    path.write_text(json.dumps(with_digest(values | changes)))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped tensors": (lambda folder: flip(folder / "tensors.safetensors"), "corrupt: the sha256 of tensors.safetensors"),
    "flipped state": (lambda folder: flip(folder / "state.json"), "corrupt: the sha256 of state.json"),
    "longer": (lambda folder: os.truncate(folder / "state.json", 10_000), "corrupt: .*state.json has 10,000 bytes"),
    "truncated": (lambda folder: os.truncate(folder / "tensors.safetensors", 20), "truncated: tensors.safetensors has 20 of"),
    "no tensors": (lambda folder: (folder / "tensors.safetensors").unlink(), "incomplete: tensors.safetensors is missing"),
    "no state": (lambda folder: (folder / "state.json").unlink(), "incomplete: state.json is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "incomplete: manifest.json is missing"),
    "torn manifest": (lambda folder: os.truncate(folder / "manifest.json", 20), "corrupt: manifest.json cannot be understood"),
    "noise": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\0"), "corrupt: manifest.json cannot be understood"),
    "wrong manifest": (lambda folder: edit_manifest(folder, step="one"), "corrupt: manifest.json cannot be understood"),
    "flipped step": (lambda folder: replace(folder / "manifest.json", b'"step": 2', b'"step": 3'), "its sha256 is not that of its content"),
    "no digest": (lambda folder: replace(folder / "manifest.json", b'"sha256": "', b'"sha257": "'), "its sha256 is missing"),
    "wrong note": (lambda folder: edit_manifest(folder, note={"dibt": {}}), "corrupt: manifest.json cannot be understood"),
    "no digests": (lambda folder: edit_manifest(folder, files={}), "corrupt: manifest.json does not list tensors.safetensors"),
    "newer format": (lambda folder: edit_manifest(folder, format=99, kind=None), "written by a newer esper: its format is 99"),
    "newer schema": (lambda folder: edit_manifest(folder, schema=2), r"written by a newer esper \(.*\): the version of its state is 2"),
    "other kind": (lambda folder: edit_manifest(folder, kind="arena"), "another kind: it holds the state of 'arena', not of 'test'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_latest_falls_back(tmp_path: Path, damage: str) -> None:
    store = store_at(tmp_path)
    good = store.save(1, {"w": torch.ones(3)})
    bad = store.save(2, {"w": torch.zeros(3)}, is_best=True)
    break_it, message = DAMAGES[damage]
    break_it(bad)
    for which in (bad, "best"):
        with pytest.raises(CheckpointError, match=message):
            store.load(which)
    loaded = store.load()
    assert loaded.path == good
    assert [refused.path for refused in loaded.skipped] == [bad]
    assert message.split(":")[0].split(" ")[0] in loaded.skipped[0].reason
    break_it(good)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded: .*000002.*; .*000001"):
        store.load()


def test_lost_or_broken_pointers_do_not_hide_the_latest(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    for step in (1, 3, 2):
        store.save(step, {"step": step})
    whole = (tmp_path / "latest").read_bytes()
    for content in (None, b"", b"\xff", b"../../etc", b"step-000000000009\n", whole.replace(b"2\n", b"3\n", 1), whole[:-2]):
        (tmp_path / "latest").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "latest").write_bytes(content)
        assert store.load().step == 2


@pytest.mark.parametrize("content", [None, b"", b"step-000000000003\nsha256 0\n"])
def test_the_best_checkpoint_survives_the_loss_of_its_pointer(tmp_path: Path, content: bytes | None) -> None:
    store = store_at(tmp_path, keep=1)
    for step in (1, 2, 3):
        store.save(step, {"step": step}, is_best=step < 3)
    (tmp_path / "best").unlink()
    if content is not None:
        (tmp_path / "best").write_bytes(content)
    assert store.load("best").step == 2
    store.save(4, {"step": 4})
    assert [int(folder.name[-1]) for folder in store.list()] == [2, 4]


def test_a_checkpoint_with_code_in_it_is_never_executed(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    folder = store.save(1, {"w": torch.ones(3)})
    torch.save({"w": torch.ones(3)}, folder / "tensors.safetensors")  # a pickle
    content = (folder / "tensors.safetensors").read_bytes()
    digests = json.loads((folder / "manifest.json").read_text())["files"]
    digests["tensors.safetensors"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    edit_manifest(folder, files=digests)
    with pytest.raises(CheckpointError, match="do not make a state"):
        store.load(folder)


# A worked migration. Version 1 had one seed; version 2 names the seeds; version 3 counts steps per environment.
def name_the_seed(state: dict[str, Any]) -> dict[str, Any]:
    return {"steps": state["steps"], "w": state["w"], "seeds": {"data": state["seed"]}}


def count_per_environment(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"steps": torch.full((2,), state["steps"] // 2)}


def test_old_states_are_migrated_one_version_at_a_time(tmp_path: Path) -> None:
    store_at(tmp_path).save(1, {"steps": 10, "w": torch.ones(2), "seed": 5})
    current = store_at(tmp_path, kind=Versions("test", {1: name_the_seed, 2: count_per_environment}))
    expected = {"steps": torch.tensor([5, 5]), "w": torch.ones(2), "seeds": {"data": 5}}
    assert same(current.load().state, expected)
    current.save(2, expected)
    assert same(current.load().state, expected)


def test_a_gap_in_the_migrations_is_named() -> None:
    with pytest.raises(ValueError, match=r"start from the versions \[2\]; they must begin with 1"):
        Versions("test", {2: count_per_environment})


def test_a_failing_migration_falls_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    current = store_at(tmp_path, kind=Versions("test", {1: name_the_seed}))
    current.save(1, {"steps": 10})
    store_at(tmp_path).save(2, {"other": 10})
    with pytest.raises(CheckpointError, match=r"cannot be brought from version 1 to 2 \(KeyError: 'steps'\)"):
        current.load(tmp_path / "step-000000000002")
    loaded = current.load()
    assert loaded.step == 1
    assert [refused.path.name for refused in loaded.skipped] == ["step-000000000002"]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1"):
        store_at(tmp_path, keep=0)


class Parallel(nn.Module):
    """Names its entries as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]  # never called, so the lightest backend does


def network() -> nn.Module:
    return nn.Sequential(OrderedDict(encoder=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), head=nn.Linear(4, 2)))


def partly_compiled() -> nn.Module:
    model = network()
    model.encoder = compiled(model.get_submodule("encoder"))
    return model


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "plain": network,
    "compiled": lambda: compiled(network()),
    "partly compiled": partly_compiled,
    "parallel": lambda: Parallel(network()),
    "parallel of compiled": lambda: Parallel(compiled(network())),
    "compiled parallel": lambda: compiled(Parallel(network())),
}


@pytest.mark.parametrize("source", WRAPPERS)
@pytest.mark.parametrize("target", WRAPPERS)
def test_weights_move_between_wrapped_and_plain_modules(source: str, target: str) -> None:
    saved, receiving = WRAPPERS[source](), WRAPPERS[target]()
    load_module(receiving, saved.state_dict())
    assert same(plain_names(receiving.state_dict()), plain_names(saved.state_dict()))
    assert list(plain_names(saved.state_dict())) == list(network().state_dict())


def test_weights_of_a_real_data_parallel_module_load_into_a_plain_one(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(network())
        saved = wrapped.state_dict()
        del wrapped  # before its process group: a wrapper that goes after it may wait for ever
        plain = network()
        load_module(plain, saved)
        assert same(plain_names(saved), dict(plain.state_dict()))
    finally:
        torch.distributed.destroy_process_group()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    saved, receiving = tied(), tied()
    load_module(receiving, round_trip(tmp_path, saved.state_dict()))
    assert receiving[1].weight is receiving[0].weight
    assert same(dict(receiving.state_dict()), dict(saved.state_dict()))


def test_all_mismatches_are_named_at_once_and_nothing_is_changed() -> None:
    model = network()
    before = copy.deepcopy(dict(model.state_dict()))
    weights = dict(network().state_dict()) | {"extra.bias": torch.zeros(1), "head.weight": torch.zeros(5, 4), "norm.weight": "text"}
    del weights["encoder.bias"]
    with pytest.raises(ValueError) as caught:
        load_module(compiled(model), weights)
    for problem in (
        "encoder.bias is missing",
        "extra.bias is unexpected",
        "head.weight has the shape (5, 4) instead of (2, 4)",
        "norm.weight is a str",
    ):
        assert problem in str(caught.value)
    assert same(dict(model.state_dict()), before)


def test_a_child_called_module_keeps_its_name_beside_others() -> None:
    assert plain_names({"module.weight": 1, "weight": 2}) == {"module.weight": 1, "weight": 2}
    assert plain_names({"module.module.weight": 1, "module.weight": 2}) == {"module.weight": 1, "weight": 2}


def test_names_that_collide_without_wrappers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'_orig_mod\.weight' and 'weight' are both called 'weight'"):
        plain_names({"_orig_mod.weight": 1, "weight": 2})
