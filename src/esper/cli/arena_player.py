"""`esper arena export` writes the player of a run to one file; `esper arena card` shows what such a file says about its player."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from esper.cli.arena_battles import describe_arena, saved_train_config, user_errors
from esper.cli.command import FAILED, CommandError, CommandResult
from esper.cli.parse import parse
from esper.config import Config
from esper.files import printable, reason_of
from esper.league.trained import SUFFIX

if TYPE_CHECKING:
    from esper.league.config import ArenaTrainConfig
    from esper.runs import Checkpoint

DESCRIPTION = """Writes the player of a run to one file that plays on any machine, without the run.

  esper arena export runs/first player.safetensors
  esper arena export runs/first player.safetensors --note "5v5-city-v1: 61.3 % against expert"
  esper arena match player.safetensors expert

The file holds the weights that playing needs, the settings of network and arena, and a card: what it was trained on and for how long, its
score when it was chosen, and your --note. esper arena match, eval and leaderboard take it as a player. Reading it executes nothing."""


class ExportArguments(Config):
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of the run"""
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """file to write, *.safetensors; an existing one is replaced"""
    checkpoint: Literal["best", "latest"] = "best"
    """which player of the run"""
    note: str = ""
    """text that is added to the card"""


def run(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(ExportArguments, argv, prog, description=DESCRIPTION)
    path = arguments.file if arguments.file.suffix == SUFFIX else arguments.file.with_name(f"{arguments.file.name}{SUFFIX}")
    from esper.league.player_file import save_player
    from esper.league.training import load_checkpoint
    from esper.rl.checkpoints import open_store

    with user_errors():
        config = saved_train_config(arguments.run)
        store = open_store(arguments.run)
        if not store.has_any():
            raise CommandError(f"{arguments.run} has no checkpoint yet; train it for longer")
        checkpoint = load_checkpoint(store, arguments.checkpoint)
    card = "\n".join(filter(None, [_training(config, checkpoint), arguments.note]))
    try:
        save_player(path, checkpoint.state["ppo"]["policy"], config, card)
    except OSError as error:
        raise CommandError(f"no player can be written to {path}: {reason_of(error)}; choose another file", exit_code=FAILED) from error
    size, quoted = path.stat().st_size, shlex.quote(str(path))
    print(f"wrote {path}, {size:,} bytes: the {arguments.checkpoint} player of {arguments.run}, after {checkpoint.step:,} steps")
    print(printable(card))
    print(f"see it fight     esper arena match {quoted} expert --battles 16 --replay battle && esper arena watch battle{SUFFIX}")
    return CommandResult(
        {
            "file": str(path),
            "bytes": size,
            "run": str(arguments.run),
            "checkpoint": arguments.checkpoint,
            "step": checkpoint.step,
            "card": card,
        }
    )


def _training(config: ArenaTrainConfig, checkpoint: Checkpoint) -> str:
    """Return the sentences of a card about the training."""
    arena = config.arena
    where = f"Trained {describe_arena(arena)} of {', '.join(arena.landscapes)}, for {checkpoint.step:,} steps, seed {config.ppo.seed}."
    evaluation = (checkpoint.note or {}).get("evaluation")
    if not evaluation:
        return where
    score = f"{100 * evaluation['mean_return']:.1f} % of {evaluation['episodes']} battles against {config.eval_against}"
    return f"{where}\nScore when its checkpoint was evaluated: {score}; the best checkpoint was chosen by such scores."


CARD_DESCRIPTION = """Shows the card of a player file: what the player was trained on, how well it plays, and its settings.

  esper arena card player.safetensors
  esper arena card player-2v2              a player that comes with esper"""


class CardArguments(Config):
    player: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """player file, or the name of a player that comes with esper"""


def run_card(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(CardArguments, argv, prog, description=CARD_DESCRIPTION)
    import msgspec

    from esper.league.player_file import read_player_description
    from esper.league.trained import shipped_players
    from esper.text_table import aligned

    path = shipped_players().get(arguments.player, Path(arguments.player))
    with user_errors():
        description = read_player_description(path)
    arena, unit, network = description.arena, description.unit, description.network
    core = "no memory" if network.core == "none" else f"{network.core.upper()} of width {network.hidden_size}"
    contacts, allies = "contact" if arena.contacts == 1 else "contacts", "ally" if arena.allies == 1 else "allies"
    rows = [
        ("file", f"{path}, {path.stat().st_size:,} bytes"),
        ("written by", f"esper {description.esper}, rules version {description.rules}"),
        ("arena", f"{describe_arena(arena)}; landscapes: {', '.join(arena.landscapes)}"),
        ("observes", f"{arena.contacts} {contacts} and {arena.allies} {allies}"),
        ("network", f"{core}, encoding of width {unit.width}"),
    ]
    lines = printable(description.card).split("\n")
    print(aligned(rows), *("".join(filter(str.isprintable, line)) for line in ["", *lines]), sep="\n")
    return CommandResult({"file": str(path), "bytes": path.stat().st_size, **msgspec.to_builtins(description)})
