"""Native battles agree with the golden trajectories of the tensor version."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba.core import event

import esper.arena
from esper.arena.config import ArenaConfig
from esper.arena.native import compiling
from esper.arena.native.battle import step_battles
from esper.arena.native.bots import act_bots
from esper.arena.native.compiling import CACHE, BattleLoop, arena_cache, for_battles
from esper.arena.native.layout import Battles, make_battles, make_maps
from esper.arena.native.simulation import Simulation, compile_bots
from esper.arena.specs import PHYSICS
from esper.arena.start import make_grids
from esper.devices import threads
from tests.arena import native_golden
from tests.conftest import interprets_arena

HERE = Path(__file__).parent
SHARE = 0.001  # of observations that may differ, at ties


def test_development_loop_interprets_the_rules_and_all_other_tests_run_them_compiled(pytestconfig: pytest.Config) -> None:
    compiled = list[str]()

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            compiled.append(event.data["dispatcher"].py_func.__name__)

        def on_end(self, event: Any) -> None: ...

    config = ArenaConfig(battles=1, maps=1, size=16, team_size=1)
    with event.install_listener("numba:compile", Listener()):
        simulation = Simulation(config, make_grids(config, seed=0), battles=1, device=torch.device("cpu"))
        simulation.begin(seed=0)
        simulation.act(torch.zeros(2, 1, dtype=torch.int32))
    if interprets_arena(pytestconfig):
        assert not compiled
    for loop in (step_battles, act_bots):
        assert hasattr(loop.kernel, "signatures") != interprets_arena(pytestconfig)


def replay_interpreted(case: str, decisions: int) -> dict[str, Any]:
    """Replay golden decisions with interpreted rules. If this process runs compiled rules, another process does it."""
    if compiling.IS_INTERPRETED:
        return native_golden.replay(native_golden.DATA / f"{case}.npz", decisions=decisions)
    command = [sys.executable, "-m", "tests.arena.native_golden", case, "--decisions", str(decisions)]
    environment = {**os.environ, "ESPER_ARENA_NUMBA": "0"}
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("case", "decisions"),
    [("ladder_2v2", 2), pytest.param("jets_3v3", 1, marks=pytest.mark.slow), pytest.param("random_5v5", 1, marks=pytest.mark.slow)],
)
def test_interpreted_rules_agree_with_golden_decisions(case: str, decisions: int) -> None:
    assert replay_interpreted(case, decisions)["above"] == {}


@pytest.mark.slow
def test_compiled_rules_agree_with_all_golden_decisions() -> None:
    files = list(native_golden.DATA.glob("*.npz"))
    assert files
    for result in map(native_golden.replay, files):
        assert result["above"] == {}
        assert result["ties"] <= SHARE * result["living"]


def floats_and_doubles(loop: BattleLoop[...]) -> tuple[int, int]:
    """Return how often a kernel names each type, after LLVM has optimised it. Code that was loaded from the disk has this text too."""
    (compiled,) = loop.kernel.overloads.values()
    text = str(compiled.library._get_module_for_linking())
    return len(re.findall(r"\bfloat\b", text)), len(re.findall(r"\bdouble\b", text))


@for_battles
def shrink(first: int, last: int, s: Battles) -> None:
    for b in range(first, last):
        s.unit[0, b, 0] *= 0.1


@pytest.mark.slow
def test_compiled_rules_and_bots_have_no_double() -> None:
    config = ArenaConfig(battles=1, maps=1, size=16, team_size=1)
    simulation = Simulation(config, make_grids(config, seed=0), battles=1, device=torch.device("cpu"))
    simulation.begin(seed=0)
    simulation.act(torch.zeros(2, 1, dtype=torch.int32))
    for loop in (step_battles, act_bots):
        floats, doubles = floats_and_doubles(loop)
        assert floats > 100
        assert doubles == 0
    shrink(make_battles(config, 1))
    assert floats_and_doubles(shrink)[1] > 0, "a literal in a product with float32 makes a double"


@for_battles
def count_visits(first: int, last: int, s: Battles) -> None:
    for b in range(first, last):
        s.status[0, b] += 1


@pytest.mark.parametrize("height", [0.3, -0.5, 16.0])
def test_heights_that_maps_cannot_store_are_refused(height: float) -> None:
    grid, flat = np.full((1, 2, 2), height, np.float32), np.zeros((1, 2, 2), np.int8)
    with pytest.raises(ValueError, match=r"multiples of 0\.0625 m from 0 to 15\.9375 m"):
        make_maps(grid, flat, flat, grid, np.ones(1, np.float32))


@pytest.mark.parametrize(
    ("bots", "found"),
    [
        (torch.zeros(2, 1, dtype=torch.int64), r"got torch.int64 \(2, 1\) on cpu"),
        (torch.zeros(1, 2, dtype=torch.int32), r"got torch.int32 \(1, 2\) on cpu"),
        (torch.zeros(2, 1, dtype=torch.int32, device="meta"), r"got torch.int32 \(2, 1\) on meta"),
        (torch.zeros(2, 2, dtype=torch.int32)[:, :1], r"got torch.int32 \(2, 1\) on cpu, not contiguous"),
    ],
)
def test_bots_of_a_wrong_kind_are_refused(bots: torch.Tensor, found: str) -> None:
    config = ArenaConfig(battles=1, maps=1, size=16, team_size=1)
    simulation = Simulation(config, make_grids(config, seed=0), battles=1, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=rf"bots should be contiguous torch.int32 \(2, 1\) on cpu; {found}"):
        simulation.act(bots)


def test_cache_folder_changes_with_any_source_of_the_arena(tmp_path: Path) -> None:
    package = Path(esper.arena.__file__).parent
    copy = Path(shutil.copytree(package, tmp_path / "arena", ignore=shutil.ignore_patterns("__pycache__")))
    assert arena_cache(copy).name == CACHE.name
    for name in ("specs.py", "native/ticks.py"):  # kernels are in neither of them
        before, path = arena_cache(copy), copy / name
        path.write_text(path.read_text().replace("0.5", "0.25", 1))
        assert arena_cache(copy) != before


GRAVITY = """
import numpy as np
from esper.arena.config import ArenaConfig
from esper.arena.native.compiling import const, for_battles
from esper.arena.native.layout import Battles, make_battles
from esper.arena.specs import PHYSICS

G = const(PHYSICS.gravity_mps2)

@for_battles
def drop(first: int, last: int, s: Battles) -> None:
    for b in range(first, last):
        s.unit[0, b, 0] = G

state = make_battles(ArenaConfig(size=16, team_size=1), 1)
drop(state)
print(state.unit[0, 0, 0], sum(drop.kernel.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_changed_constant_in_another_file_changes_the_result_of_a_stored_kernel(tmp_path: Path) -> None:
    package = Path(esper.__file__).parent
    copy = Path(shutil.copytree(package, tmp_path / "esper", ignore=shutil.ignore_patterns("__pycache__", "trained")))
    kernel, specs = tmp_path / "gravity.py", copy / "arena" / "specs.py"
    kernel.write_text(GRAVITY)

    def run() -> tuple[float, int]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, str(kernel)], env=environment, capture_output=True, text=True, check=True)
        gravity, hits = done.stdout.split()
        return float(gravity), int(hits)

    before = PHYSICS.gravity_mps2
    assert (run(), run()) == ((before, 0), (before, 1)), "the second process loads the kernel from the disk"
    text = f"gravity_mps2: float = {before}"
    assert specs.read_text().count(text) == 1
    specs.write_text(specs.read_text().replace(text, f"gravity_mps2: float = {2 * before}"))
    assert run() == (2 * before, 0)


@pytest.mark.slow
def test_kernels_are_stored_in_the_cache_folder() -> None:
    count_visits(make_battles(ArenaConfig(size=16, team_size=1), 1))
    assert Path(count_visits.kernel.stats.cache_path).is_relative_to(CACHE)


@pytest.mark.slow
def test_kernel_on_disk_is_compiled_by_no_other_process() -> None:
    count_visits(make_battles(ArenaConfig(size=16, team_size=1), 1))
    again = BattleLoop(count_visits.kernel.py_func)
    again.compile_beside(compile_bots)
    assert again._compiler is None


@pytest.mark.slow
def test_kernel_is_compiled_by_its_first_call_if_the_other_process_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "CACHE", tmp_path)  # where no earlier run has stored the kernel

    @for_battles
    def count_down(first: int, last: int, s: Battles) -> None:
        for b in range(first, last):
            s.status[0, b] -= 1

    def missing() -> None: ...

    missing.__module__ = "esper.no_such_module"
    count_down.compile_beside(missing)
    assert count_down._compiler is not None
    state = make_battles(ArenaConfig(size=16, team_size=1), 2)
    count_down(state)
    assert count_down._compiler.returncode == 1
    assert state.status[0].tolist() == [-1, -1]


@pytest.mark.slow
def test_kernel_that_another_process_compiles_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "CACHE", tmp_path)

    @for_battles
    def count_up(first: int, last: int, s: Battles) -> None:
        for b in range(first, last):
            s.status[0, b] += 1

    state = make_battles(ArenaConfig(size=16, team_size=1), 1)
    waiting, said = threading.Thread(target=count_up, args=(state,)), ""
    with (tmp_path / "count_up.lock").open("w") as lock:  # as another process would hold it
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        while "waiting for another process" not in said and waiting.is_alive():
            time.sleep(0.01)
            said += capfd.readouterr().err
        assert waiting.is_alive()
        assert not count_up.is_on_disk
    waiting.join(timeout=60)
    assert state.status[0, 0] == 1
    assert count_up.is_on_disk


@pytest.mark.slow
def test_the_other_process_compiles_bots_for_the_types_of_every_arena() -> None:
    compile_bots()
    config = ArenaConfig(battles=2, maps=2, size=32, team_size=2, state_view=True)
    simulation = Simulation(config, make_grids(config, seed=0), battles=2, device=torch.device("cpu"))
    simulation.begin(seed=0)
    simulation.act(torch.zeros(2, 2, dtype=torch.int32))
    assert len(act_bots.kernel.signatures) == 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("battles", [1, 2, 5, 50])
def test_threads_run_each_battle_once(count: int, battles: int) -> None:
    state = make_battles(ArenaConfig(size=16, team_size=1), battles)
    with threads(count):
        count_visits(state)
    assert state.status[0].tolist() == [1] * battles


def test_no_thread_changes_battles_after_an_interrupted_call(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, runs = threading.get_ident(), list[int]()

    def kernel(first: int, last: int, s: Battles) -> None:
        if threading.get_ident() == caller:
            raise KeyboardInterrupt
        time.sleep(0.02)
        runs.append(first)

    monkeypatch.setattr(count_visits, "kernel", kernel)
    monkeypatch.setattr(count_visits, "_is_compiled", True)
    with threads(2), pytest.raises(KeyboardInterrupt):
        count_visits(make_battles(ArenaConfig(size=16, team_size=1), 64))
    done = len(runs)
    time.sleep(0.1)
    assert len(runs) == done
