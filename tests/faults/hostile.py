"""Hostile runs: links, pipes, folders, devices, deep nesting, absurd headers and escape sequences in the files of a run.

No command may hang, print a traceback or an escape sequence, or change anything outside the run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from esper.files import with_digest
from tests.faults.damage import COMMANDS, HANGS_AFTER_S, Hang, run_quietly
from tests.faults.runs import HUNG, Tally, forked, is_raw

ESCAPE = "\x1b]0;pwned\x07\x1b[2J\x9b2J"
PRECIOUS = "PRECIOUS\n"


def deep_json(path: Path, outside: Path) -> None:
    path.write_text('{"a":' * 50_000 + "1" + "}" * 50_000 + "\n")


def deep_toml(path: Path, outside: Path) -> None:
    path.write_text("a = " + "[" * 50_000 + "]" * 50_000 + "\n[" + ".".join("a" * 50_000) + "]\n")


def long_header(path: Path, outside: Path) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + b'{"a":1}')


def absurd_shape(path: Path, outside: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def many_tensors(path: Path, outside: Path) -> None:
    header = json.dumps({f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(20_000)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


HOSTILE: dict[str, dict[str, Callable[[Path, Path], object]]] = {
    "link": {
        "link to a file outside": lambda path, outside: path.symlink_to(outside / "file"),
        "link to a folder outside": lambda path, outside: path.symlink_to(outside),
        "link to itself": lambda path, outside: path.symlink_to(path.name),
    },
    "pipe, device or folder": {
        "pipe": lambda path, outside: os.mkfifo(path),
        "endless device": lambda path, outside: path.symlink_to("/dev/zero"),
        "folder": lambda path, outside: path.mkdir(),
    },
    "deep JSON or TOML": {"deep JSON": deep_json, "deep TOML": deep_toml},
    "absurd safetensors header": {
        "header of 2^62 bytes": long_header,
        "shape of 2^80 elements": absurd_shape,
        "20,000 tensors": many_tensors,
    },
}
EXTRA = (".lock", "labels.json", "analysis.json", "report.html", "tensorboard", "league", "checkpoints")  # that may not exist yet


def files_of(run: Path) -> list[str]:
    """Return the files and folders of a run in whose place something hostile may stand; of the checkpoints, those of the newest."""
    newest = max((run / "checkpoints").glob("step-*"))
    found = {path.relative_to(run) for path in run.rglob("*") if path.is_file()}
    old = {path for path in found if path.parts[0] == "checkpoints" and len(path.parts) == 3 and path.parts[1] != newest.name}
    return sorted({*map(str, found - old), *EXTRA})


def trials(run: Path) -> list[tuple[str, str, str]]:
    return [(file, group, hostile) for file in files_of(run) for group, kinds in HOSTILE.items() for hostile in kinds]


def command_hostile(run: Path, resume: list[str], file: str, hostile: tuple[str, str], folder: Path) -> Tally:
    """Put something hostile in the place of a file of a run, and run all commands on it, in a process of their own."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run.parent, folder)
    shutil.copytree(run, folder / "other")
    outside = folder / "outside"
    outside.mkdir()
    (outside / "file").write_text(PRECIOUS)
    place, tally = folder / "run" / file, Tally()
    argvs = [*COMMANDS, resume, ["runs", "rm", "run", "--yes"]]

    def all_commands() -> list[tuple[str, int | str, str]]:
        found: list[tuple[str, int | str, str]] = []
        for argv in argvs:
            # A command before may have replaced it.
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            place.unlink(missing_ok=True)
            if place.parent.is_dir():
                HOSTILE[hostile[0]][hostile[1]](place, outside)
            try:
                code, printed = run_quietly(argv, folder)
                found.append((" ".join(argv[:3]), code, printed))
            except Hang:
                found.append((" ".join(argv[:3]), "hang", ""))
            except BaseException as error:
                found.append((" ".join(argv[:3]), "raw", f"{type(error).__name__}: {error}"))
        return found

    ended = forked(all_commands, seconds=HANGS_AFTER_S * len(argvs))
    tally.trials += len(argvs)
    if ended.code == HUNG or ended.value is None:
        tally.hung.append(f"{hostile[1]} for {file}: {ended.printed[-300:]}")
        return tally
    for argv, code, printed in ended.value:
        what = f"{argv}, {hostile[1]} for {file}"
        text = " ".join(printed.split())[-300:]
        if code == "hang":
            tally.hung.append(what)
        elif is_raw(printed) or code not in (0, 1, 2):
            tally.raw.append(f"{what}: {code}: {text}")
        elif code:
            tally.refused += 1
        else:
            tally.right += 1
    if sorted(path.name for path in outside.iterdir()) != ["file"] or (outside / "file").read_text() != PRECIOUS:
        tally.wrong.append(f"{hostile[1]} for {file}: something outside was changed: {sorted(path.name for path in outside.iterdir())}")
    return tally


def command_escapes(run: Path, resume: list[str], folder: Path) -> Tally:
    """Put escape sequences into the name, the labels, the settings and every text of the events of a run, and run all commands."""
    tally = Tally()
    name = f"run{ESCAPE}"

    def all_commands() -> list[tuple[str, int | str, str]]:
        found: list[tuple[str, int | str, str]] = []
        for argv in [*COMMANDS, resume, ["runs", "rm", "run", "--yes"]]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(run.parent, folder)
            shutil.copytree(run, folder / "other")
            (folder / "run").rename(folder / name)
            (folder / name / "labels.json").write_text(json.dumps(with_digest({"tags": [f"a{ESCAPE}"], "note": f"b{ESCAPE}"})))
            events = folder / name / "events.jsonl"
            lines = [with_escapes(json.loads(line)) for line in events.read_text().splitlines()]
            events.write_text("".join(json.dumps(line) + "\n" for line in lines))
            try:
                code, printed = run_quietly([name if word == "run" else word for word in argv], folder)
                found.append((" ".join(argv[:3]), code, printed))
            except BaseException as error:
                found.append((" ".join(argv[:3]), "raw", f"{type(error).__name__}: {error}"))
        return found

    for argv, code, printed in forked(all_commands, seconds=600).value or []:
        tally.trials += 1
        if "\x1b]0;" in printed or "\x1b[2J" in printed:
            tally.wrong.append(f"{argv}: printed an escape sequence")
        elif is_raw(printed) or code not in (0, 1, 2):
            tally.raw.append(f"{argv}, escapes: {code}: {printed[-300:]!r}")
        elif code:
            tally.refused += 1
        else:
            tally.right += 1
    return tally


def with_escapes(value: object, key: str = "") -> object:
    """Return an event with an escape sequence in each of its texts, but in none that says what it is, and in no number."""
    if isinstance(value, dict):
        return {name: with_escapes(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [with_escapes(item) for item in value]
    is_text = isinstance(value, str) and key not in ("kind", "esper") and value not in ("nan", "inf", "-inf")
    return f"{value}{ESCAPE}" if is_text else value
