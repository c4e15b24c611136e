"""Serve web pages on this machine: `esper watch` shows runs, `esper arena watch` plays replays. Imports no torch, so both start at once."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from esper.runs.folder import RunError, check_holds_a_run, kind_of

HOST = "127.0.0.1"  # other machines cannot reach it


def serve_runs(*roots: Path | str, port: int = 0, show: bool = True, announce: Callable[[str], None] = print) -> None:
    """Serve the dashboard of the runs in some folders until Ctrl-C. Call `announce` with the address once it can be reached.

    Port 0 takes any free port. `show` opens the page in the browser. The page of several runs is their comparison.
    """
    folders = list(map(Path, roots))
    if missing := next((folder for folder in folders if not folder.is_dir()), None):
        raise RunError(f"{missing} is no folder; give a run or a folder with runs")
    check_nicegui("the dashboard")
    from esper.dashboard.app import build_app
    from esper.dashboard.data import Watcher, name_in_address

    is_comparison = len(folders) > 1 and all(kind_of(folder) is not None for folder in folders)
    place = f"#/compare/{','.join(map(name_in_address, folders))}" if is_comparison else ""
    _serve(build_app(Watcher(*folders)), place=place, port=port, show=show, announce=announce)


def serve(path: Path | str, *, port: int = 0, show: bool = True, announce: Callable[[str], None] = print) -> None:
    """Serve a replay, or all replays of a run's folder, until Ctrl-C. Call `announce` with the address once it can be reached.

    Port 0 takes any free port. `show` opens the page in the browser.
    """
    path = Path(path)
    _check_any_can_be_played(list_replays(path))  # raise here rather than show the reason in the browser
    check_nicegui()
    from esper.dashboard.page import build_app

    _serve(build_app(lambda: list_replays(path)), port=port, show=show, announce=announce)


def check_nicegui(what: str = "the page that plays replays") -> None:
    """Import the package that serves pages; raise ImportError if it is missing."""
    if importlib.util.find_spec("nicegui") is None:
        raise ImportError(f"{what} needs NiceGUI; install it with: pip install 'esper-grow[dashboard]'")
    # NiceGUI imports a client of HTTP for requests that no page of ours makes. Without it the import is a sixth shorter.
    is_hidden = sys.modules.setdefault("aiohttp", None) is None  # type: ignore[arg-type]  # as Python marks what cannot be imported
    try:
        importlib.import_module("nicegui")
    finally:
        if is_hidden:
            del sys.modules["aiohttp"]


def _serve(app: Any, *, port: int, show: bool, announce: Callable[[str], None], place: str = "") -> None:
    import uvicorn

    listening = _listen(port)
    address = f"http://{HOST}:{listening.getsockname()[1]}/{place}"
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    app.state.is_stopping = lambda: server.should_exit
    announce(address)  # connections wait in the socket until the server runs
    if show:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    with listening, contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def _check_any_can_be_played(replays: list[Path]) -> None:
    """If no replay can be read, raise the error of the first one."""
    from esper.replay_file import ReplayError, drawn_part

    problems: list[ReplayError] = []
    for replay in replays:
        try:
            drawn_part(replay)
            return
        except ReplayError as error:
            problems.append(error)
    raise problems[0]


def list_replays(path: Path) -> list[Path]:
    """Return the file itself, or the replays of a run folder, newest first. Raise ReplayError if there are none."""
    from esper.replay_file import ReplayError, find_replays

    if not path.is_dir():
        return [path]
    found = find_replays(path)
    if not found:
        if kind_of(path) is not None:
            check_holds_a_run(path, "arena")
        raise ReplayError(f"there are no replays in {path / 'replays'}; record one with esper arena eval or esper arena match")
    return found


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise OSError(f"port {port} of {HOST} cannot be used ({error}); choose another port, or 0 for any free port") from error
    listening.listen()
    return listening
