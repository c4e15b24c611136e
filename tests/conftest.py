"""Settings for all tests: properties may take their time, and torch computes on one thread so that results are the same everywhere."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fcntl
import functools
import gc
import importlib
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro._docstrings
from hypothesis import settings

import esper.files
from esper.runs.folder import CONFIG, EVENTS

gc.disable()  # until the tests are collected: importing makes no garbage
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined
# Keep the folders of tests in memory if there is room. Runs sync every file that they write, and a sync to disk takes about 10 ms.
IN_MEMORY = Path("/dev/shm")
if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > 2**31:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))
# Read the comments of options in the source once, instead of in every call of `main`.
_tokenization = tyro._docstrings._ClassTokenization
_tokenization.make = staticmethod(functools.cache(_tokenization.make))  # type: ignore[method-assign]
settings.register_profile("esper", deadline=None, max_examples=50)
settings.register_profile("quick", deadline=None, max_examples=20)  # for the development loop
settings.load_profile("esper")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--extras", action="store_true", help="run the tests that need extras, and fail where a package is missing")


def pytest_configure(config: pytest.Config) -> None:
    """Let Python interpret the rules of the arena in the development loop, which must not wait for their compiler.

    Processes of xdist and processes that tests start inherit the setting. All other runs, such as `make test`, and machines with a GPU use
    the compiled rules.
    """
    assert "esper.arena.native.compiling" not in sys.modules, "the switch is read when the arena is imported, so no conftest may import it"
    os.environ["ESPER_ARENA_NUMBA"] = "0" if interprets_arena(config) else "1"


def interprets_arena(config: pytest.Config) -> bool:
    """Return whether these tests interpret the rules of the arena. Kernels for GPUs cannot be made of interpreted functions."""
    return is_development_loop(config) and not torch.cuda.is_available()


def is_development_loop(config: pytest.Config) -> bool:
    """Return whether the tests with the mark `slow` are left out, as `make check` does."""
    return "not slow" in config.option.markexpr


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests in browsers. With --extras, keep the tests that need packages of extras; `make test` has run the others."""
    for item in items:
        if {"browser", "browser_with_webgl"} & set(getattr(item, "fixturenames", ())):
            item.user_properties.append((IN_BROWSER, True))
    if config.getoption("--extras"):
        others = [item for item in items if item.get_closest_marker("extra") is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("extra") is not None]


def pytest_collection_finish() -> None:
    """Keep modules and tests out of later garbage collections, each of which would take a quarter of a second to look through them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # otherwise, libraries find their objects alive at exit and report leaks


def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = [name for marker in item.iter_markers("extra") for name in marker.args if find_spec(name) is None]
    if missing:
        end = pytest.fail if item.config.getoption("--extras") else pytest.skip
        end(f"needs {', '.join(missing)}, which `make test-all` installs")


# Files of a run are opened by two functions of `esper.files`, which follow no links. A test fails that opens one in another way.
# An open is judged by the path, and by the innermost function of esper or of the tests on the stack; tests themselves may open anything.
# Files that users name, such as models and settings for --config, may be inside a run too: `open_file` may read those. TensorBoard and
# Weights & Biases open the files in their folders themselves, and torch writes the trace of a profile.

USER_NAMED = (".safetensors", ".toml")
FOLDERS_OF_OTHERS = frozenset({"tensorboard", "wandb", "profile"})
ESPER, TESTS = f"{Path(esper.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}"
_opened_otherwise: list[str] = []
_tests_folder = "\0"  # prefix of the paths in which tests work; known when the first test has a folder


def _watch_opening(event: str, arguments: tuple[Any, ...]) -> None:
    """Note where esper opens a file of a run. Python calls this for every audit event, also for those that no test is about."""
    if event != "open" or not isinstance(arguments[0], str) or not os.path.abspath(arguments[0]).startswith(_tests_folder):
        return
    path, flags = Path(os.path.abspath(arguments[0])), arguments[2]
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith((ESPER, TESTS)):
        frame = frame.f_back
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    if not file.startswith(ESPER) or flags & os.O_DIRECTORY:
        return
    is_door = file == esper.files.__file__ and (flags & (os.O_NOFOLLOW | os.O_EXCL) or path.suffix in USER_NAMED)
    run = next((place for place in list(path.parents)[:4] if (place / CONFIG).is_file() and (place / EVENTS).exists()), None)
    if run is not None and not is_door and path.relative_to(run).parts[0] not in FOLDERS_OF_OTHERS:
        _opened_otherwise.append(f"{path} by {function} in {file}, line {frame.f_lineno}")


sys.addaudithook(_watch_opening)


@pytest.fixture(autouse=True)
def _runs_opened_through_one_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    global _tests_folder
    _tests_folder = str(tmp_path_factory.getbasetemp())
    yield
    found, _opened_otherwise[:] = list(dict.fromkeys(_opened_otherwise)), []
    assert not found, f"files of a run are opened by open_in_run and write_in_run of esper.files only, but not {'; '.join(found)}"


@pytest.fixture(autouse=True)
def _kernels_kept() -> Iterator[None]:
    """On processors without bfloat16, a product of such numbers makes torch change the kernels of all that comes after."""
    is_enabled = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.set_flags(is_enabled)


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Set CUDA's mode for finding synchronisations inside, and the default one afterwards.

    At the first call, torch sets the mode and then warns that it is a prototype: where warnings are errors, it fails and the mode stays.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode(mode)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def alone_with_device_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measure the memory of the device in one test process at a time, and without the garbage of earlier tests."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # shared by the processes of one run
    with (folder / "device-memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        gc.collect()
        torch.cuda.empty_cache()
        yield


IN_BROWSER = "in a browser"  # property of a test
BROWSER_SECONDS = 90.0  # for all of them on a machine that does nothing else


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell the time of the tests in browsers, and name the tests that `make check` should not have to wait for."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports if isinstance(report, pytest.TestReport)]
    browsers = sum(report.duration for report in reports if (IN_BROWSER, True) in map(tuple, report.user_properties))
    if browsers:
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        terminalreporter.write_line(
            f"tests in browsers took {browsers:.0f} s in all, and should take {BROWSER_SECONDS:.0f} s; the load is {load:.1f} per core"
        )
    if is_development_loop(config):
        long = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call" and report.duration > 1]
        for report in sorted(long, key=lambda report: -report.duration):
            terminalreporter.write_line(f"{report.duration:.1f} s without the mark `slow`: {report.nodeid}")


@pytest.fixture
def scalar_inductor() -> Iterator[None]:
    """Let torch's compiler write scalar code in this process: vector code takes twice as long to compile, and its instructions to find."""
    inductor = importlib.import_module("torch._inductor.config")
    with inductor.patch({"cpp.vec_isa_ok": False, "compile_threads": 1}):
        yield


class Clock:
    """Replaces `time.perf_counter`. It advances a millisecond whenever it is read, and by what `sleep` is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Make measured times the same on every machine, however busy it is."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock
