"""`esper controller card` shows the card of the controller that comes with esper, or of a controller file. torch is not imported."""

from __future__ import annotations

from typing import Annotated

import msgspec
import tyro

from esper.cli.command import CommandError, CommandResult
from esper.cli.parse import parse
from esper.config import Config

DESCRIPTION = """Shows the card of a controller: what decides, what it was trained on, and the figures of its training.

  esper controller card                                      the controller of esper grow --controller learned
  esper controller card runs/first/controller.safetensors    a controller of your own"""


class CardArguments(Config):
    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")] = "learned"
    """controller file; learned: the one that comes with esper"""


def run(argv: list[str], prog: str) -> CommandResult:
    name = parse(CardArguments, argv, prog, description=DESCRIPTION).file
    from esper.controller.description import ControllerError, card, read_description
    from esper.controller.trained import NAME, file_of, text_of_learned

    path = file_of(name)
    try:
        description = read_description(path)
    except ControllerError as error:
        raise CommandError(str(error)) from error
    title, text = ('controller "learned", which comes with esper', text_of_learned()) if name == NAME else ("", "")
    print(card(path, description, title=title, text=text))
    return CommandResult({"file": str(path), "bytes": path.stat().st_size, **msgspec.to_builtins(description), "text": text})
