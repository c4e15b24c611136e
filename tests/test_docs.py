"""The documentation is tested: its Python runs, its commands exist, and its site builds.

A comment on the line before a code block says how to test it:

    <!-- setup -->                          run it in every test of this page, before the others
    <!-- needs: lightning, transformers --> run it only where these packages are installed, in a test of its own with the mark `extra`
    <!-- in tests: epochs=40 = epochs=2 --> replace a text first, so that the block takes seconds; several, separated by semicolons
    <!-- run -->                            run the commands of a shell block, in this order; other commands are only parsed
    <!-- not run: needs two GPUs -->        do not run or parse it

The blocks of a page share their names and one temporary folder. `esper` commands that run are marked `slow`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tyro

from esper.cli.main import COMMANDS, main
from esper.growth.seeds import blueprints

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="docs/ is not part of an installed package")

_BLOCK = re.compile(r"(?P<comments>(?:^<!--[^\n]*-->\n)*)^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- *(setup|run|needs|in tests|not run)(?:: *(.*?))? *-->")
OUTPUT = ("text", "toml", "")  # languages of blocks that nobody runs


@dataclass(frozen=True)
class Block:
    """One code block of a page, and what the comments before it say."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.marks["needs"].split(",")) if "needs" in self.marks else ()

    def source(self) -> str:
        """Return the text with the replacements for tests, behind as many empty lines as precede it on the page."""
        text = self.text
        for pair in filter(None, self.marks.get("in tests", "").split(";")):
            before, _, after = (part.strip() for part in pair.partition(" = "))
            assert before in text, f"{self.page}:{self.line}: there is no {before!r} to replace"
            text = text.replace(before, after)
        return text

    def commands(self) -> list[str]:
        """Return the command lines of a shell block, without comments, with continued lines joined."""
        return [line for line in (line.strip() for line in self.source().replace("\\\n", " ").splitlines()) if line and line[0] != "#"]


def blocks_in(page: str, text: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(text):
        marks = {name: value or "" for name, value in _COMMENT.findall(match["comments"])}
        assert len(marks) == len(match["comments"].splitlines()), f"{page}: unknown comment before a block: {match['comments']}"
        line = text[: match.start("text")].count("\n") + 1
        found.append(Block(page, line, match["language"], match["text"], marks))
    return found


def pages() -> dict[str, list[Block]]:
    paths = [README, *sorted(DOCS.glob("*.md"))] if DOCS.is_dir() else []
    return {path.name: blocks_in(path.name, path.read_text(encoding="utf-8")) for path in paths}


PAGES = pages()


LONG = ("arena.md", "controllers.md", "grow.md", "learner.md")  # pages that only `make test-all` runs


def python_tests() -> Iterator[Any]:
    """One test for each page with Python, and one more for each set of packages that some of its blocks need."""
    for page, blocks in PAGES.items():
        wanted = [block for block in blocks if block.language == "python" and "not run" not in block.marks]
        for needs in dict.fromkeys(block.needs for block in wanted if "setup" not in block.marks):
            chosen = [block for block in wanted if "setup" in block.marks or block.needs == needs]
            marks = [pytest.mark.slow, *([pytest.mark.extra(*needs)] if needs or page in LONG else [])]
            yield pytest.param(chosen, id="-".join([page.removesuffix(".md"), *needs]), marks=marks)


def shell_blocks(*, run: bool) -> list[Block]:
    shell = [block for blocks in PAGES.values() for block in blocks if block.language == "sh" and "not run" not in block.marks]
    return [block for block in shell if ("run" in block.marks) == run]


@pytest.mark.parametrize("blocks", list(python_tests()))
def test_the_python_of_a_page_runs(blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # for modules that a block writes
    monkeypatch.setattr(blueprints, "REGISTRY", dict(blueprints.REGISTRY))  # pages register blueprints of their own
    names: dict[str, Any] = {"__name__": "__docs__"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing can grow in")  # in the few epochs of a test
        if any(block.needs for block in blocks):
            warnings.simplefilter("default")  # other libraries warn of themselves
        for block in blocks:
            source = "\n" * (block.line - 1) + block.source()
            exec(compile(source, str(ROOT / block.page), "exec", dont_inherit=True), names)


# Commands


class Parsed(BaseException):
    """The parser has accepted the options; nothing was done with them."""


@pytest.mark.slow
def test_every_shell_command_is_one_that_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    parse = tyro.cli

    def stop_after_parsing(*arguments: Any, **keywords: Any) -> None:
        parse(*arguments, **keywords)
        raise Parsed

    monkeypatch.setattr(tyro, "cli", stop_after_parsing)
    seen = 0
    for block in [*shell_blocks(run=False), *shell_blocks(run=True)]:
        for command in block.commands():
            check_command(command, f"{block.page}:{block.line}: {command}")
            seen += 1
    assert seen > 20


def check_command(command: str, place: str) -> None:
    """Check one line of a shell block without running it."""
    words = shlex.split(command, comments=True)
    if "esper" in words and words[0] in ("esper", "torchrun"):
        check_esper(words[words.index("esper") + 1 :], place)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), place
    elif words[:2] == ["pip", "install"]:
        assert all(word.startswith("esper-grow") for word in words[2:]), place
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file() or words[1] == "-m", place
    else:
        pytest.fail(f"{place}: not a command that the documentation may use")


def check_esper(words: list[str], place: str) -> None:
    given = [word for word in words if word != "--resume"]  # it would read the run, which is not there
    try:
        code = main(given)
    except Parsed:
        return
    assert code == 0, place  # it has no options, or lists what there is


@pytest.mark.slow
def test_a_command_with_an_unknown_option_is_found() -> None:
    with pytest.raises(AssertionError, match="--num-enves"):
        check_command("esper ppo train cue --num-enves 8", "page.md:1: esper ppo train cue --num-enves 8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.extra] if page in LONG else [])
        for page in sorted({block.page for block in shell_blocks(run=True)})
    ],
)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for block in shell_blocks(run=True):
        for command in block.commands() if block.page == page else ():
            words = shlex.split(command, comments=True)
            assert words[0] == "esper", f"only esper commands are run: {command}"
            code = main(words[1:])
            assert code == 0, f"{page}:{block.line}: {command}\n{capsys.readouterr()}"


# The site


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_every_block_has_a_language_that_a_test_knows() -> None:
    for blocks in PAGES.values():
        for block in blocks:
            assert block.language in ("python", "sh", *OUTPUT), f"{block.page}:{block.line}"


@pytest.mark.slow
def test_every_name_of_the_package_in_the_text_exists() -> None:
    texts = [(README if name == README.name else DOCS / name).read_text(encoding="utf-8") for name in PAGES if name != "log.md"]
    names = {match for text in texts for match in re.findall(r"`(esper(?:\.[A-Za-z_]\w*)+)", text)}
    assert len(names) > 15
    assert not [name for name in sorted(names) if not exists(name)]


def exists(name: str) -> bool:
    """Return whether a dotted name is that of a module, or of something in one."""
    *parents, last = name.split(".")
    try:
        return hasattr(importlib.import_module(".".join(parents)), last) or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_every_extra_that_a_page_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    texts = {name: (README if name == README.name else DOCS / name).read_text(encoding="utf-8") for name in PAGES}
    named = {
        (page, extra) for page, text in texts.items() for group in re.findall(r"esper-grow\[([\w,]+)\]", text) for extra in group.split(",")
    }
    assert len(named) > 5
    assert not [(page, extra) for page, extra in named if extra not in extras]


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text(encoding="utf-8"))
    assert len(links) > 10
    missing = [link for link in links if not (ROOT / link).exists()]
    # command_line.md is written when the site is built.
    assert not [link for link in missing if link != "docs/command_line.md"]


def test_the_animation_of_the_documentation_is_small() -> None:
    assert (DOCS / "images" / "growing_network.gif").stat().st_size <= 400_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:nothing can grow in")
def test_the_script_draws_one_frame_for_each_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setattr(sys, "argv", ["growing_network.py", "--epochs", "3", "--output", str(tmp_path / "short.gif")])
    runpy.run_path(str(DOCS / "growing_network.py"), run_name="__main__")
    with Image.open(tmp_path / "short.gif") as animation:
        assert getattr(animation, "n_frames", 1) == 3


@pytest.mark.slow
@pytest.mark.extra("mkdocs", "material", "mkdocstrings")
def test_the_site_builds_strictly_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    for name in ("mkdocs.yml", "docs", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    html = {str(path.relative_to(tmp_path / "site")): path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")}
    assert {path.stem for path in DOCS.glob("*.md")} <= {name.removesuffix(".html") for name in html}
    for name, page in html.items():
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(https?:[^\"\s>]+)", page)
        assert not loaded, f"{name} loads {loaded[0]}"
    commands = html["command_line.html"]
    assert all(f">esper {name}<" in commands for name in COMMANDS)
    assert 'id="esper.growth.Grower"' in html["api/growth.html"]
    shutil.rmtree(tmp_path / "site")
