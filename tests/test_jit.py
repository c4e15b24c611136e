"""Compiled kernels: their cache, and the fallback without Numba."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from esper import jit

HELPER = "def bonus():\n    return {bonus}\n"
KERNELS = """
from pathlib import Path
from esper import jit
import helper

kernel = jit.compiler([__file__, helper.__file__])
bonus = kernel(helper.bonus)

@kernel
def add(x):
    return x + bonus()
"""
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); import kernels; print(kernels.add(1), len(kernels.add.stats.cache_hits))"


def run_kernels(folder: Path) -> list[int]:
    """The answer of the kernel in a fresh process, and how many of its compiled forms came from the disk."""
    finished = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True)
    return [int(word) for word in finished.stdout.split()]


@pytest.mark.slow  # compiles in processes of their own
def test_an_edit_in_a_file_called_by_a_kernel_recompiles_it(tmp_path):
    pytest.importorskip("numba")
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "helper.py").write_text(HELPER.format(bonus=10))
    assert run_kernels(tmp_path) == [11, 0]
    assert run_kernels(tmp_path) == [11, 1], "the second process finds it compiled"
    (tmp_path / "helper.py").write_text(HELPER.format(bonus=20))
    assert run_kernels(tmp_path) == [21, 0]
    assert len(list((tmp_path / "__pycache__").glob("kernels-numba-*"))) == 1, "the folder of the earlier source is removed"


def test_another_source_gives_another_cache_folder(tmp_path):
    sources = tuple(tmp_path / name for name in ("one.py", "two.py"))
    for source in sources:
        source.write_text("a = 1\n")
    first = jit.cache_folder(sources)
    assert jit.cache_folder(sources) == first
    sources[1].write_text("a = 2\n")
    second = jit.cache_folder(sources)
    assert second != first
    assert not first.exists()


def test_environments_with_other_versions_keep_their_cache_folders(tmp_path):
    source = tmp_path / "one.py"
    source.write_text("a = 1\n")
    old, new = (jit.cache_folder((source,), versions=versions) for versions in ("1.0-numpy-2.4", "1.0-numpy-2.5"))
    assert old.exists()
    assert new.exists()
    assert old != new
    source.write_text("a = 2\n")
    assert jit.cache_folder((source,), versions="1.0-numpy-2.5") != new
    assert not new.exists()
    assert old.exists()


def test_the_cache_lies_in_the_users_folder_where_the_sources_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "kernels.py"
    source.write_text("")
    (tmp_path / "__pycache__").write_text("a file, so no folder can be made here")
    assert jit.cache_folder((source,)).parent == tmp_path / "cache/esper"


@pytest.mark.parametrize(("name", "value"), [("ESPER_NUMBA", "0"), ("NUMBA_DISABLE_JIT", "1")])
def test_kernels_can_be_switched_off(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert jit.has_numba.__wrapped__() is False


def test_a_broken_numba_is_reported_and_not_used(tmp_path, monkeypatch):
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.4 or less')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "numba"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(RuntimeWarning, match="needs NumPy 2.4 or less"):
        assert jit.has_numba.__wrapped__() is False


@pytest.mark.slow  # imports torch in a process of its own
def test_importing_the_learner_does_not_import_numba():
    """The learner is imported without Numba, which comes with the first packed sequence."""
    code = "import sys, esper.rl.ppo; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numbers_beyond_the_flat_part_of_tanh_are_as_exact_as_the_others():
    pytest.importorskip("numba")
    from esper.rl.lstm_kernels import _sigmoid

    numbers = np.concatenate([np.linspace(-30, 30, 301), 10.0 ** np.linspace(-6, 4, 50)]).astype(np.float32)
    exact = 1 / (1 + np.exp(-numbers.astype(np.float64)))
    assert max(abs(float(_sigmoid(number)) - right) for number, right in zip(numbers, exact, strict=True)) < 5e-7
    assert np.isnan(_sigmoid(np.float32(np.nan)))
