"""Damaged files are refused with a reason, or read as if nothing had happened; a damaged checkpoint gives way to the one before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.faults import damaged
from tests.faults.damage import KINDS, LAST, make_checkpoints, plain, read_damaged, store_at

DAMAGES = 100  # of each kind; `make faults` has more
WITHOUT_DIGEST = {"events"}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS.keys() - WITHOUT_DIGEST)
def test_a_damaged_file_is_refused_by_name_or_loads_unchanged(name: str, tmp_path: Path) -> None:
    tally = read_damaged(name, DAMAGES, tmp_path)
    assert not [*tally.wrong, *tally.hung, *tally.raw]
    assert tally.refused > 0 or name in ("latest", "best", "kept index"), "what they say can be found again"


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "tensors.safetensors"])
def test_a_damaged_latest_checkpoint_falls_back_to_the_one_before(file: str, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    make_checkpoints(tmp_path)
    content = (tmp_path / LAST / file).read_bytes()
    states = {step: plain(store_at(tmp_path).load(tmp_path / f"step-{step:012d}").state) for step in (18, 19)}
    for _ in range(DAMAGES):
        (tmp_path / LAST / file).write_bytes(damaged(content, random))
        loaded = store_at(tmp_path).load()
        assert plain(loaded.state) == states[loaded.step]
        assert [refused.path.name for refused in loaded.skipped] == ([LAST] if loaded.step == 18 else [])
