"""What a controller file says about itself, and its card: a text with everything that is known about the controller. Imports no torch.

    description = read_description("runs/first/controller.safetensors")
    print(card("runs/first/controller.safetensors", description))

The description is JSON in the header of the safetensors file. Its `info` is free: the card shows what the training of controllers writes
there under a title, and every other entry by its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from esper.controller.config import DomainConfig, GainsConfig, StepNetworkConfig
from esper.files import MAX_FILE_BYTES, FileError, check_safetensors, parse_json, printable, read_file, reason_of
from esper.rl.config import NetworkConfig
from esper.runs.folder import kind_of, name_of
from esper.runs.versions import VersionError, Versions
from esper.text_table import aligned, figure

HEADER = "esper controller"  # key of the description in the file's metadata
VERSIONS = Versions("controller")  # of descriptions
WHAT_TO_DO = "copy the file again, or train a new controller"


class ControllerError(ValueError):
    """A controller file or state that cannot be used; the message says why and what to do."""


class ControllerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the weights in a controller file."""

    version: int  # of the description
    layout: str  # of observations and actions
    esper: str  # version that wrote the file
    network: StepNetworkConfig | None  # of a policy
    memory: NetworkConfig | None  # of the recurrent core of a policy
    gains: GainsConfig | None = None  # of an ensemble that improves on the heuristic
    sha256: str  # of the weights
    info: dict[str, Any]  # run, domain and results of its training, or anything else


# Reading


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors of reading a controller file into a ControllerError."""
    try:
        yield
    except FileNotFoundError as error:
        raise ControllerError(f"there is no file {path}; give the path of a controller file, such as RUN/controller.safetensors") from error
    except IsADirectoryError as error:
        raise ControllerError(f"{path} {_why_no_controller(path)}") from error
    except FileError as error:
        raise ControllerError(f"{error}; {WHAT_TO_DO}") from error
    except OSError as error:
        raise ControllerError(f"no controller can be read: {reason_of(error)}") from error


def _why_no_controller(folder: Path) -> str:
    """Describe a folder that was given instead of a controller file."""
    kind = kind_of(folder)
    if kind == "controller":
        return f"is a folder; give the controller of that run, {folder / 'controller.safetensors'}"
    what = "is a folder and no file" if kind is None else f"is {name_of(kind)} and not a controller"
    return f"{what}; give the file RUN/controller.safetensors of a controller run"


def parse_description(path: Path, metadata: Mapping[str, str], *, layouts: Collection[str] = ()) -> ControllerDescription:
    """Return the description in the metadata of a file. With `layouts`, check that one of them is that of the file."""
    import esper

    header = metadata.get(HEADER)
    if header is None:
        raise ControllerError(f"{path} holds tensors, but no controller; give a controller file, such as RUN/controller.safetensors")
    try:
        raw = parse_json(header)
        raw = VERSIONS.migrated(raw, raw["version"], writer=str(raw["esper"]))
        found, writer = raw["layout"], raw["esper"]
        if not layouts or found in layouts:
            description = msgspec.convert({**raw, "version": VERSIONS.present}, ControllerDescription)
            if (description.network is None) != (description.memory is None) or (description.network is None and description.gains is None):
                raise ValueError("it must have a network with a memory, or gains")
            return description
    except VersionError as error:
        raise ControllerError(f"{path} {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ControllerError(f"{path} is damaged: its description cannot be understood; {WHAT_TO_DO} ({error})") from error
    raise ControllerError(
        f"{path} has layout {found} of observations and actions, but this esper {esper.__version__} has layout {' and '.join(layouts)}; "
        f"use it with esper {writer}, or train a new controller"
    )


def read_description(path: Path | str) -> ControllerDescription:
    """Return the description of a controller file, which may be of another layout than that of this version."""
    path = Path(path)
    with explained(path):
        _, metadata, _ = check_safetensors(read_file(path, max_bytes=MAX_FILE_BYTES), path)
    return parse_description(path, metadata)


# The card


def card(path: Path | str, description: ControllerDescription, *, title: str = "", text: str = "") -> str:
    """Return the card of a controller file with this description. `text` follows the tables."""
    rows = [
        ("what", _what(description)),
        ("file", f"{path}, {Path(path).stat().st_size:,} bytes"),
        ("sha256", f"{description.sha256} (of the weights)"),
        ("layout", f"{description.layout}, written by esper {description.esper}"),
        *_training(description.info),
    ]
    parts = [title or f"controller {Path(path).name}", aligned(rows), text.strip()]
    return _on_a_terminal("\n\n".join(filter(None, parts)))


def _what(description: ControllerDescription) -> str:
    """Describe what decides: an ensemble, or a policy."""
    memory, gains = description.memory, description.gains
    advisor = "the heuristic"
    if gains is not None:
        certain = f" by {gains.caution:g} standard deviations" if gains.caution else ""
        advisor = f"the heuristic, or another step where {gains.members} networks of width {gains.width} are sure of it{certain}"
    if memory is None:
        return advisor
    core = "without memory" if memory.core == "none" else f"with {memory.core.upper()} memory of width {memory.hidden_size}"
    return f"policy {core}, which sees what would be done by {advisor}"


TITLES = {  # entries of the info that the training of controllers writes -> their names on the card
    "run": "run",
    "cells": "cells",
    "branches": "branches",
    "seed": "seed",
}


def _training(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows about the training: the domain first, then the entries of TITLES, then all others."""
    domain = info.get("domain")
    if isinstance(domain, dict):
        for name in DomainConfig.__struct_fields__:
            if name in domain:
                yield f"trained on {name.replace('_', ' ')}", _in_words(domain[name])
    for name in [*TITLES, *(name for name in info if name not in TITLES)]:
        if name in info and name != "domain":
            yield TITLES.get(name, name.replace("_", " ")), _in_words(info[name])


def _in_words(value: object) -> str:
    """Return a value of the info as text; two numbers are a range.

    >>> _in_words([2, 4096]), _in_words(["conv", "mlp"]), _in_words(0.61803), _in_words([0.003, 0.1])
    ('2 to 4,096', 'conv, mlp', '0.6180', '0.003 to 0.1')
    """
    if isinstance(value, list) and len(value) == 2 and all(isinstance(end, int | float) for end in value):
        return " to ".join(f"{end:,}" for end in value)
    if isinstance(value, list | tuple):
        return ", ".join(dict.fromkeys(map(str, value)))  # sources may be named more than once
    if isinstance(value, float):
        return figure(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _on_a_terminal(text: str) -> str:
    """Return a text without control characters, which a file from elsewhere may hold, but with its lines."""
    return "\n".join("".join(character for character in line if character.isprintable()) for line in printable(text).split("\n"))
