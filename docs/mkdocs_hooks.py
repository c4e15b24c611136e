"""Hooks of the documentation build.

- `on_config` keeps the pages free of scripts from the network.
- `on_files` adds the pages that are made from the program: command_line.md has the `--help` text of every command in the program's own
  table, and api/*.md have the public names of the package roots, for mkdocstrings to describe.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from esper.cli.main import COMMANDS, main

ROOTS = ("growth", "tasks", "experiment", "fleet", "controller", "rl", "vecenv", "arena", "league")
COLUMNS = "92"

INTRODUCTION = """# Command line

This page is made from the program when the documentation is built: it shows what `esper --help` and `esper COMMAND --help` print.

[Runs and resume](runs.md) explains run folders, config files and exit codes, which all commands share.
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the script that the `offline` plugin would load from the network by our own."""
    config.extra["polyfills"] = ["scripts/search_from_disk.js"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "command_line.md", content=command_line_page()))
    for root in ROOTS:
        files.append(File.generated(config, f"api/{root}.md", content=api_page(f"esper.{root}")))
    return files


def command_line_page() -> str:
    """Return the page in Markdown: an overview, then one section for each command."""
    sections = [INTRODUCTION, _block(help_text([]))]
    sections += [f"## esper {name}\n\n{_block(help_text(name.split()))}" for name in COMMANDS]
    return "\n\n".join(sections) + "\n"


def help_text(words: list[str]) -> str:
    """Return what `esper WORDS --help` prints, wrapped to the width of a page and without colours."""
    output = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": COLUMNS, "NO_COLOR": "1", "TERM": "dumb"}), contextlib.redirect_stdout(output):
        code = main([*words, "--help"])
    if code != 0:
        raise RuntimeError(f"esper {' '.join(words)} --help ended with code {code}")
    return output.getvalue()


def _block(text: str) -> str:
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    return "\n".join(["```text", *lines, "```"])


def api_page(package: str) -> str:
    """Return a page in Markdown with one directive of mkdocstrings for every public name of a package."""
    module = importlib.import_module(package)
    introduction = (module.__doc__ or "").partition("\n")[0]
    names = sorted(module.__all__, key=str.lower)
    also = [name for name in names if name in importlib.import_module("esper").__all__]
    note = f"These names can also be imported from `esper` itself: {', '.join(f'`{name}`' for name in also)}." if also else ""
    directives = [f"::: {package}.{name}" for name in names]
    return "\n\n".join([f"# {package}", introduction, note, *directives]) + "\n"
