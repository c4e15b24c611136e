"""`esper arena eval`: battles of a run's player against a scripted bot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from esper.cli.arena_battles import fight, in_words, match_json, print_match
from esper.cli.arena_players import Contender, mistakes, of_run, saved_arena
from esper.cli.outcome import Outcome
from esper.cli.parse import parse
from esper.config import Config, NonNegativeInt
from esper.league.config import PairedBattles
from esper.league.training_config import Anchor

DESCRIPTION = """Lets the player of a run fight a scripted bot on maps that it was never trained on, twice on each with sides swapped.

  esper arena eval runs/arena-... --against strong --battles 512
  esper arena eval runs/arena-... --battles 16 --replay runs/arena-...

The score counts draws half, and its 95 % interval is over the maps. Another opponent than a bot: esper arena match."""


class EvalArguments(Config):
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of the run"""
    against: Anchor = "strong"
    """the bot"""
    battles: PairedBattles = 512
    """how many, all at once: two on every map, one from each side"""
    checkpoint: Literal["best", "latest"] = "best"
    """which of its players"""
    seed: NonNegativeInt = 0
    """of the maps and of all that is drawn"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""
    draw: tyro.conf.FlagCreatePairsOff[bool] = False
    """draw its actions, as in training; else it takes the likeliest ones"""
    replay: Path | None = None
    """keep the first battle that it won, in this file, or in the folder replays of this run"""


def run(argv: list[str], prog: str) -> Outcome:
    arguments = parse(EvalArguments, argv, prog, description=DESCRIPTION)
    from esper.devices import find_device

    with mistakes():
        config = saved_arena(arguments.run)
        device = find_device(arguments.device)
        player = of_run(arguments.run, arguments.checkpoint, device=device)
        arena = msgspec.structs.replace(config.arena, battles=arguments.battles, smallest_team=None)
        bot = Contender(arguments.against, arguments.against)
        print(f"{arguments.checkpoint} player of {arguments.run} against {bot.name}: {in_words(arena)}, on {device}", flush=True)
        fought = fight(arena, player, bot, seed=arguments.seed, device=device, replay=arguments.replay, draw=arguments.draw)
    print_match(fought)
    about = {"run": str(arguments.run), "checkpoint": arguments.checkpoint, "against": bot.name}
    return Outcome({**about, **match_json(fought, arena)})
