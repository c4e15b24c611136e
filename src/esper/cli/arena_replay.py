"""`esper arena replay` shows what a replay holds and verifies it; `esper arena watch` plays replays in the browser."""

from __future__ import annotations

import tempfile
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from esper.cli.arena_battles import user_errors
from esper.cli.command import FAILED, OK, CommandError, CommandResult
from esper.cli.parse import parse
from esper.config import Config, NonNegativeInt
from esper.files import reason_of
from esper.runs.foreign import clean, quoted

if TYPE_CHECKING:
    import torch

    from esper.replay_file import ReplayFile, ReplayInfo


DESCRIPTION = """Says what is in a replay: who fought, where, how long, who won, and what happened. For a run's folder, lists its replays.

  esper arena replay runs/arena-.../replays/won.safetensors --verify

--verify computes the battle again from its actions and compares the state with what was recorded, bit for bit. That works on the same kind
of device with the same version of the rules; a replay of another device or version can be played, but not verified."""


class ReplayArguments(Config):
    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE_OR_RUN")]
    """a replay, or the folder of a run with replays"""
    verify: tyro.conf.FlagCreatePairsOff[bool] = False
    """compute the battle again and compare"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device to verify on; auto: the GPU if the battle was recorded on one of its kind, else the CPU"""


def run(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(ReplayArguments, argv, prog, description=DESCRIPTION)
    path = arguments.path
    if not path.exists():
        raise CommandError(f"there is no file or folder {path}; give a replay, or the folder of a run")
    with user_errors():
        return _listed(path, prog) if path.is_dir() else _shown(path, arguments)


def _listed(folder: Path, prog: str) -> CommandResult:
    """List the replays of a run, newest first; one that cannot be read is listed with the reason."""
    from esper.dashboard.watch import list_replays
    from esper.replay_file import ReplayError, read_replay

    found: list[dict[str, Any]] = []
    for path in list_replays(folder):
        try:
            about = about_replay(read_replay(path))
            print(f"{clean(path)}  {' against '.join(about['players'])}: {about['result']} after {about['seconds']:.1f} s")
            found.append({"file": str(path), **about})
        except ReplayError as error:
            print(f"{clean(path)}  cannot be read: {clean(str(error))}")
            found.append({"file": str(path), "error": str(error)})
    print(f"more of one of them: {prog} FILE; all in the browser: esper arena watch {quoted(folder)}")
    return CommandResult({"replays": found})


def _shown(path: Path, arguments: ReplayArguments) -> CommandResult:
    """Print one replay, and verify it if asked."""
    from esper.replay_file import read_replay

    replay = read_replay(path)
    info, about = replay.info, about_replay(replay)
    first, second = info.teams
    team = info.unit_classes[: info.units // 2]
    print(f"{first} against {second}, {len(team)} on each side ({', '.join(team)})")
    print(f"map         {info.size} × {info.size}, seed {info.seed}")
    print(f"length      {about['seconds']:.1f} s of at most {info.seconds:.0f} s, {replay.frames - 1} decisions")
    print(f"result      {about['result']}; zone held for {about['score'][0]:.1f} s and {about['score'][1]:.1f} s")
    print(f"recorded    on {info.device}, by esper {info.esper_version}, rules version {info.rules_version}")
    for item in info.feed:
        print(f"{item.frame * info.decision_s:>8.1f} s  {item.text}")
    result: dict[str, Any] = {"file": str(path), **about}
    if not arguments.verify:
        return CommandResult(result)
    from esper.arena.replay import verify

    found = verify(path, _device(info, arguments.device))
    print(f"verify      {found.message}")
    frames = {"frames": found.checked, "first_wrong_frame": found.first_wrong_frame}
    result["verified"] = {"ok": found.ok, "device_matches": found.device_matches, **frames, "message": found.message}
    # A file that contradicts itself is wrong on every device. Then no frame is checked.
    is_unknown = not found.device_matches and found.checked > 0
    return CommandResult(result, OK if found.ok or is_unknown else FAILED)


def _device(info: ReplayInfo, wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device to verify on; for "auto" one of the kind that the replay was recorded on, else the CPU."""
    import torch

    from esper.arena.replay import device_kind
    from esper.devices import find_device
    from esper.runs.folder import RunError

    if wanted != "auto":
        return find_device(wanted)
    with suppress(ImportError, RunError):  # the arena cannot run on this GPU, for example because numba-cuda is missing
        if torch.cuda.is_available() and device_kind("cuda") == info.device:
            return torch.device("cuda")
    return torch.device("cpu")


def about_replay(replay: ReplayFile) -> dict[str, Any]:
    """Return the facts of a replay for `--json`."""
    info = replay.info
    winner = None if info.winner is None else info.teams[info.winner]
    return {
        "players": list(info.teams),
        "winner": winner,
        "result": "a draw" if winner is None else f"{winner} won",
        "seconds": (replay.frames - 1) * info.decision_s,
        "decisions": replay.frames - 1,
        "score": replay.tensors["frames/score"][-1].tolist(),
        "size": info.size,
        "units": info.unit_classes,
        "seed": info.seed,
        "device": info.device,
        "rules_version": info.rules_version,
        "esper_version": info.esper_version,
        "feed": [{"seconds": item.frame * info.decision_s, "kind": item.kind, "text": item.text} for item in info.feed],
    }


WATCH_DESCRIPTION = """Plays a replay, or those of a run, in the browser: terrain in 3D, units, shots, the zone, scores and what happened.

The page is on 127.0.0.1, which only this machine can reach, and loads nothing from the internet. Ctrl-C ends it. Replays are written by
--replay of esper arena eval and esper arena match, and by the evaluations of esper arena train; #live at the end of the address plays the
newest one, and each newer one after it. --demo needs no replay: a player that comes with esper fights the expert bot first. Needs the extra
dashboard."""


DEMO_BOT, DEMO_RIVAL = "strong-v1", "expert"  # the bot plays if no trained player comes with esper
DEMO_BATTLES = 16  # battles of which one is shown


class WatchArguments(Config):
    path: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[FILE_OR_RUN]")] = None
    """a replay, or the folder of a run with replays"""
    demo: tyro.conf.FlagCreatePairsOff[bool] = False
    """play a battle of a player that comes with esper against the expert bot"""
    port: NonNegativeInt = 0
    """port of the page; 0: any free one"""
    show: bool = True
    """open the page in the browser"""


def run_watch(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(WatchArguments, argv, prog, description=WATCH_DESCRIPTION)
    if (arguments.path is None) != arguments.demo:
        raise CommandError(
            "--demo plays a battle of its own; leave the file out" if arguments.demo else "give a replay or a run, or --demo"
        )
    if arguments.path is not None and not arguments.path.exists():
        raise CommandError(f"there is no file or folder {arguments.path}; give a replay, or the folder of a run")
    from esper.dashboard.watch import check_nicegui, list_replays, serve

    addresses: list[str] = []
    with user_errors(), ExitStack() as stack:
        try:
            path = arguments.path
            if path is None:
                check_nicegui()
                # NiceGUI inspects all objects of the program, and one of torch then warns.
                warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
                path = _play_demo(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="esper-demo-"))))

            def announce(address: str) -> None:
                addresses.append(address)
                count = len(list_replays(path))
                what = f"{count} {'replay' if count == 1 else 'replays'} of {path}" if path.is_dir() else str(path)
                print(f"{address} plays {what}; Ctrl-C ends it", flush=True)

            serve(path, port=arguments.port, show=arguments.show, announce=announce)
        except ImportError as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            raise CommandError(reason_of(error)) from error
    return CommandResult({"address": addresses[0]})


def _play_demo(folder: Path) -> Path:
    """Let a player that comes with esper fight the expert on test maps of a scenario that it fits. Return the replay of one battle."""
    import torch

    from esper.arena.scenarios import SCENARIOS
    from esper.cli.arena_battles import find_player, misfit, progress_bar
    from esper.league.matches import play_and_record
    from esper.league.trained import shipped_players
    from esper.replay_file import SUFFIX

    device = torch.device("cpu")
    players = [find_player(name, device=device) for name in (*reversed(shipped_players()), DEMO_BOT)]
    fitting = [(player, scenario) for player in players for scenario in SCENARIOS.values() if not misfit(scenario.arena, player)]
    player, scenario = fitting[0]
    if player.name == DEMO_BOT:
        print(f"no trained player comes with this version of esper yet, so the bot {DEMO_BOT} plays")
    print(f"{player.name} fights {DEMO_RIVAL} on {scenario.name}: {scenario.description}", flush=True)
    arena, path = scenario.test_arena(DEMO_BATTLES), folder / f"{player.name}-against-{DEMO_RIVAL}{SUFFIX}"
    with progress_bar("battles", arena.decisions) as on_step:
        play_and_record(
            arena, player.player, DEMO_RIVAL, seed=scenario.test_seed, path=path, names=(player.name, DEMO_RIVAL), device=device,
            on_step=on_step,
        )  # fmt: skip
    return path
