"""The count of files that a training passes through, and that it stays small: a reader follows a step through these files."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks/ is not part of an installed package")]


def test_a_step_passes_eleven_files_and_the_end_of_an_epoch_twenty_two() -> None:
    """The training of this test grows in width, and `seeds/width.py` is one more file."""
    from benchmarks import code_shape

    crossed = code_shape.files_crossed(BENCHMARKS.parent)
    assert "growth/seeds/width.py" in crossed["step_files"]
    assert crossed["step"] <= 11 + 1, crossed["step_files"]
    assert crossed["end"] <= 22 + 1, crossed["end_files"]
