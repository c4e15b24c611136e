"""A part of `make faults`, in a process of its own that can fork others, and the checkpoint that takes the place of a damaged one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.faults import damaged
from tests.faults.damage import LAST, make_checkpoints, plain, store_at
from tests.processes import Process


def short_form() -> int:
    from tests.faults.__main__ import run

    return run(short=True, only=["deaths", "damage", "hostile"], jobs=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_fault_of_the_short_form_costs_a_run_or_a_word(tmp_path: Path) -> None:
    process = Process(short_form, cwd=tmp_path)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, output + errors


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "tensors.safetensors"])
def test_a_damaged_latest_checkpoint_falls_back_to_the_one_before(file: str, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    make_checkpoints(tmp_path)
    content = (tmp_path / LAST / file).read_bytes()
    states = {step: plain(store_at(tmp_path).load(tmp_path / f"step-{step:012d}").state) for step in (18, 19)}
    for _ in range(100):
        (tmp_path / LAST / file).write_bytes(damaged(content, random))
        loaded = store_at(tmp_path).load()
        assert plain(loaded.state) == states[loaded.step]
        assert [refused.path.name for refused in loaded.skipped] == ([LAST] if loaded.step == 18 else [])
