"""Files of the project beside its code: they name paths that exist, versions that agree and checks that are run."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import esper
from esper.league.trained import shipped_players

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MADE_LATER = {".venv"}  # by make

yaml = pytest.importorskip("yaml")


def load_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def mentioned_paths(text: str) -> set[str]:
    """Return every word in code spans and blocks that looks like a path of the repository."""
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
    words = re.findall(r"[\w.-]+(?:/[\w.-]*)+|[\w-]+\.(?:md|toml|txt|cff|ya?ml)\b|\.[\w-]+\.yaml", code)
    return {word for word in words if word.split("/")[0] not in MADE_LATER}


def test_the_paths_of_a_text_are_found() -> None:
    text = "See `src/a.py`, `.venv/bin/python -m b docs/c.md` and\n```\ntests/d.py -k e\n```\nbut not src/f.py or `esper.grow`."
    assert mentioned_paths(text) == {"src/a.py", "docs/c.md", "tests/d.py"}


def test_every_path_that_contributing_mentions_exists() -> None:
    paths = mentioned_paths((ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 40
    # The config of a run is no file of the repository.
    assert not [path for path in sorted(paths - {"config.toml"}) if not (ROOT / path).exists()]


def test_the_index_of_the_benchmarks_names_every_script_and_every_file_of_results() -> None:
    folder = ROOT / "benchmarks"
    names = set(re.findall(r"`([\w./*-]+)`", (folder / "README.md").read_text()))
    scripts = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
    results = {path.name for path in (folder / "results").iterdir()}
    assert scripts <= names
    assert not [result for result in sorted(results) if not any(fnmatch(result, name) for name in names)]
    former = {"growth_digits.py", "growth_promise.py", "arena.py", "fleet.py", "speed.py"}
    assert {name for name in names if name.endswith(".py")} - former <= scripts


def test_every_test_that_contributing_mentions_exists() -> None:
    names = re.findall(r"`(test_\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert names
    assert not [name for name in names if f"def {name}(" not in tests]


def test_every_command_of_make_that_contributing_mentions_is_a_target() -> None:
    commands = set(re.findall(r"`make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert commands <= targets


def test_the_citation_and_the_changelog_name_the_version() -> None:
    assert load_yaml("CITATION.cff")["version"] == esper.__version__
    assert load_yaml("CITATION.cff")["license"] == PROJECT["project"]["license"]
    assert esper.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_runs_the_steps_of_ci_on_the_oldest_python_and_a_newer_one() -> None:
    workflow = load_yaml(".github/workflows/ci.yml")
    assert {"push", "pull_request"} <= workflow[True].keys()  # YAML takes the key `on` for true
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    pythons = job["strategy"]["matrix"]["python"]
    assert f">={pythons[0]}" == PROJECT["project"]["requires-python"]
    assert all(isinstance(python, str) for python in pythons), "unquoted, 3.10 would be 3.1"
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_the_git_hooks_are_the_steps_of_make_lint_and_download_nothing() -> None:
    config = load_yaml(".pre-commit-config.yaml")
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint is not None
    steps = [line.replace("$(BIN)", ".venv/bin").split() for line in re.sub(r"\t@", "", lint[1]).splitlines()]
    assert [hook["entry"].split()[:2] for hook in hooks] == [step[:2] for step in steps]


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.md")), ids=lambda path: path.stem)
def test_an_issue_template_has_a_name_and_says_what_it_is_for(path: Path) -> None:
    _, head, body = path.read_text().split("---\n", 2)
    assert {"name", "about"} <= yaml.safe_load(head).keys()
    assert "\n## " in body


def test_type_checkers_find_the_annotations_in_the_package_that_becomes_the_wheel() -> None:
    (package,) = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (ROOT / package).samefile(Path(esper.__file__).parent)
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" not in (ROOT / ".gitignore").read_text()


def test_files_of_the_package_that_are_no_code_are_not_ignored_by_git_and_become_part_of_the_wheel() -> None:
    """Hatchling puts every file of the package into the wheel, unless git ignores it."""
    package = Path(esper.__file__).parent
    names = ["py.typed", "tasks/data/digits.npz", "controller/trained/learned.safetensors", "controller/trained/learned.md"]
    names += [f"league/trained/{path.name}" for path in shipped_players().values()]
    assert not [name for name in names if not (package / name).is_file()]
    ignored = [pattern.strip("/") for pattern in (ROOT / ".gitignore").read_text().split()]
    assert not [(name, pattern) for name in names for pattern in ignored for part in Path(name).parts if fnmatch(part, pattern)]
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"].keys() == {"packages"}, "nothing is excluded"


def test_the_source_distribution_has_the_documentation_and_the_files_that_it_mentions() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert not [path for path in included if not (ROOT / path.removeprefix("/")).exists()]
    assert {"/docs", "/examples", "/CHANGELOG.md", "/CONTRIBUTING.md", "/CITATION.cff"} <= set(included)
