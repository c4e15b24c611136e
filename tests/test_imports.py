"""The layers of the design: allowed imports, and the requirements of the computing packages."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import esper

SOURCE = Path(esper.__file__).parent
SHARED = frozenset(
    {
        "config",
        "devices",
        "display",
        "files",
        "gradients",
        "intervals",
        "jit",
        "lazy",
        "parallel",
        "profiling",
        "replay_file",
        "rng",
        "runs",
        "statistics",
        "text_table",
        "torch_internals",
        "vecenv",
    }
)
LIBRARIES = frozenset({"rl", "growth", "tasks", "arena"})

# Part of the package -> the parts that it may import, besides the shared modules and itself.
MAY_IMPORT: dict[str, frozenset[str]] = {
    **dict.fromkeys(SHARED | LIBRARIES | {"dashboard"}, frozenset()),
    "fleet": frozenset({"growth", "tasks"}),
    "controller": frozenset({"rl", "fleet", "growth", "tasks"}),
    "league": frozenset({"rl", "arena"}),
    "experiment": frozenset({"growth", "tasks", "controller"}),
    "__main__": frozenset({"cli"}),
    "cli": LIBRARIES | {"fleet", "controller", "league", "experiment", "dashboard"},
    "": LIBRARIES | {"fleet", "controller", "league", "experiment"},  # esper/__init__.py
}


def imported_modules(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Full names of all modules of esper that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str:
    """`esper.rl.ppo` -> `rl`; `esper` itself and names defined in it (`esper.__version__`) -> the empty string."""
    part = [*module.split("."), ""][1]
    return part if part in MAY_IMPORT else ""


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    own = part_of(module)
    found = []
    for name in imported_modules(source, module, is_package=is_package):
        part = part_of(name)
        is_allowed = part in ("", own) or part in SHARED or part in MAY_IMPORT[own]
        if name.split(".")[0] == "esper" and not is_allowed:
            found.append(f"{module} imports {name}")
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        yield ".".join(("esper", *(part for part in parts if part != "__init__"))), path


@pytest.mark.slow
def test_every_import_follows_the_layers() -> None:
    found = [
        violation for module, path in modules() for violation in violations(path.read_text(), module, is_package=path.name == "__init__.py")
    ]
    assert not found


def test_every_part_of_the_package_has_its_place_in_the_layers() -> None:
    parts = {module.split(".")[1] for module, _ in modules() if module != "esper"}
    assert parts <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("esper.rng", "import esper.rl.config"),
        ("esper.vecenv.registry", "from esper.rl import PPO"),
        ("esper.vecenv.registry", "from esper import rl"),
        ("esper.rl.ppo", "def late():\n    from esper.growth import grow"),
        ("esper.growth.host.slots", "from esper.tasks import data"),
        ("esper.arena.battle", "from ..rl import ppo"),
        ("esper.rl.ppo", "from esper.cli.main import main"),
        ("esper.controller.policy", "import esper.arena"),
        ("esper.arena.replay", "import esper.dashboard"),
        ("esper.league.rounds", "if TYPE_CHECKING:\n    from esper.dashboard.page import Page"),
    ],
)
def test_an_import_against_the_layers_is_found(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("esper.rl.ppo", "import esper\nfrom esper.rng import Streams\nfrom .config import PPOConfig\nimport torch"),
        ("esper.fleet.stacked.rows", "from esper.growth import grow"),
        ("esper.cli.main", "from esper.cli.command import OK\nfrom esper.rl import PPO"),
    ],
)
def test_an_import_along_the_layers_is_no_violation(module: str, source: str) -> None:
    assert not violations(source, module)


def import_graph(sources: dict[str, str], packages: set[str]) -> dict[str, set[str]]:
    """Return the files that each file imports, by module. Imports inside of functions and for type checkers count.

    A package's table of names, which are imported on first use, does not count. Who imports such a name imports the file that has it.
    """
    trees = {package: ast.parse(sources[package]) for package in packages}
    origins = {
        package: {alias.name: node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        for package, tree in trees.items()
    }
    for tree in trees.values():
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]

    def file_of(name: str) -> str:
        parent, _, last = name.rpartition(".")
        origin = origins.get(parent, {}).get(last, parent)
        if name in sources:
            return name
        return parent if origin == parent else file_of(f"{origin}.{last}")

    graph = {}
    for module, source in sources.items():
        is_package = module in packages
        names = imported_modules(ast.unparse(trees[module]) if is_package else source, module, is_package=is_package)
        graph[module] = {file_of(name) for name in names} & sources.keys() - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the files that import one another, directly or through others: each circle sorted by name."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        waiting, reached[module] = [module], set()
        while waiting:
            new = graph[waiting.pop()] - reached[module]
            reached[module] |= new
            waiting += new
    found = {tuple(sorted(other for other in after if module in reached[other])) for module, after in reached.items() if module in after}
    return [list(circle) for circle in sorted(found)]


@pytest.mark.slow
def test_no_files_import_one_another_in_a_circle() -> None:
    files = dict(modules())
    packages = {module for module, path in files.items() if path.name == "__init__.py"}
    assert circles(import_graph({module: path.read_text() for module, path in files.items()}, packages)) == []


TABLE = "if TYPE_CHECKING:\n    from e.a import A as A"


@pytest.mark.parametrize(
    "back",
    [
        "from e import a",
        "from e.a import A",
        "from e import A",
        "from e.c import C",
        "import e.a",
        "def late():\n    from e.a import A",
        "if TYPE_CHECKING:\n    from e.a import A",
    ],
)
def test_a_circle_is_found(back: str) -> None:
    sources = {"e": TABLE, "e.a": "from e.b import B", "e.b": back, "e.c": "from e import a", "e.d": "from e.a import A"}
    found = circles(import_graph(sources, {"e"}))
    assert found == [["e.a", "e.b", *(["e.c"] if "e.c" in back else [])]]


def test_files_that_import_one_way_are_no_circle() -> None:
    sources = {"e": TABLE, "e.a": "from e import __version__", "e.b": "from e import A\nimport torch"}
    assert circles(import_graph(sources, {"e"})) == []


COMPUTING = (*sorted(SHARED), "rl", "growth", "tasks", "fleet", "controller")
COMPILED = ("arena", "league")  # need Numba, which imports numba-cuda where that is installed
EDGES = (
    *("esper.vecenv.gymnasium", "esper.vecenv.to_gymnasium", "esper.vecenv.images"),  # need Gymnasium
    *("esper.arena.pettingzoo", "esper.arena.gymnasium_vector"),  # need PettingZoo and Gymnasium
    *("esper.growth.integrations.lightning", "esper.growth.integrations.huggingface"),  # need Lightning and transformers
    *("esper.fleet.kernels.convolution", "esper.fleet.kernels.norm_pool", "esper.fleet.kernels.host_rows"),  # need Triton
    "esper.rl.lstm_kernels",  # needs Numba
)

IMPORT_ALL = """
import importlib, json, sys

forbidden, names = json.load(sys.stdin)

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in forbidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Forbid())
for name in names:
    importlib.import_module(name)
import esper.rl
for name in esper.rl.__all__:
    getattr(esper.rl, name)
"""


def _import_with_little(names: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    message = json.dumps([sorted(_forbidden_packages(*more)), names])
    return subprocess.run([sys.executable, "-c", IMPORT_ALL], input=message, capture_output=True, text=True, check=False)


def _forbidden_packages(*more: str) -> set[str]:
    """Top-level names of everything installed that neither torch, numpy, msgspec and `more` nor what they require bring along."""
    allowed = _with_requirements({"torch", "numpy", "msgspec", "esper-grow", *more}, stop_at="esper-grow")
    owners = importlib.metadata.packages_distributions()
    return {package for package, names in owners.items() if not {_normal(name) for name in names} & allowed}


def _with_requirements(names: set[str], *, stop_at: str) -> set[str]:
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            requirements = [] if name == stop_at else importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # required on other systems only
            continue
        waiting += [_normal(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in requirements if "extra ==" not in text]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def modules_of(parts: tuple[str, ...]) -> list[str]:
    names = ["esper"]
    for part in parts:
        names.append(f"esper.{part}")
        if (SOURCE / part).is_dir():
            names += [found.name for found in pkgutil.walk_packages([str(SOURCE / part)], f"esper.{part}.")]
    return [name for name in names if name not in EDGES]


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "more"), [(COMPUTING, ()), (COMPILED, ("numba", "numba-cuda"))])
def test_the_computing_packages_import_with_little(parts: tuple[str, ...], more: tuple[str, ...]) -> None:
    forbidden = _forbidden_packages(*more)
    assert {"tyro", "rich", "safetensors", "pytest"} <= forbidden
    assert not {"torch", "numpy", "msgspec", "esper", *more} & forbidden
    finished = _import_with_little(modules_of(parts), *more)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.slow
def test_an_import_of_an_edge_package_is_detected() -> None:
    finished = _import_with_little(["esper.cli.parse"])
    assert finished.returncode == 1
    assert "No module named 'tyro'" in finished.stderr


@pytest.mark.slow
def test_configs_import_without_torch() -> None:
    program = (
        "import sys, esper.rl.config, esper.rl.run_config, esper.rl.events, esper.arena.config, esper.arena.scenarios; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
