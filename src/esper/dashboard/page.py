"""The web page that plays replays: a NiceGUI element that runs in the browser, and the routes that serve it the files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import FastAPI, Response
from nicegui import ui
from starlette.middleware.trustedhost import TrustedHostMiddleware

from esper.dashboard.origin import OwnOriginOnly
from esper.files import printable
from esper.replay_file import DRAWN, INFO, ReplayError, read_replay

HERE = Path(__file__).parent
TITLE = "esper arena"
ROUTE = "/replays/"

WITH_THREE_JS = ui.scene  # naming it is enough: NiceGUI then serves three.js


class ReplayPlayer(ui.element, component="replay_player.js", esm={"esper-player": "player"}):
    """Plays the first replay, and offers a choice of the others."""

    def __init__(self, replays: list[dict[str, str]]) -> None:
        super().__init__()
        self._props["replays"] = replays


def build_app(list_replays: Callable[[], list[Path]]) -> FastAPI:
    """Return an application with the page at `/`. It lists the replays again whenever the page is loaded."""
    app = FastAPI(title=TITLE, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OwnOriginOnly)
    # Refuse other host names: a page of another site could reach this one by a name that resolves to 127.0.0.1.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])

    def found() -> list[Path]:
        """Return the replays; empty if all were removed while the page is open."""
        with contextlib.suppress(ReplayError):
            return list_replays()
        return []

    @app.get(ROUTE + "{name}")
    def replay(name: str) -> Response:
        path = next((path for path in found() if printable(path.name) == name), None)
        if path is None:
            return Response(f"{name} does not exist any more; load this page again", status_code=404, media_type="text/plain")
        try:
            return Response(browser_data(path), media_type="application/octet-stream", headers={"Cache-Control": "no-store"})
        except ReplayError as error:
            return Response(printable(str(error)), status_code=422 if path.exists() else 404, media_type="text/plain")

    def root() -> None:
        ui.add_css((HERE / "player.css").read_text(encoding="utf-8"))
        replays = [{"name": printable(path.stem), "url": ROUTE + quote(printable(path.name))} for path in found()]
        if replays:
            ReplayPlayer(replays)
        else:
            ui.label("There are no replays any more. Record one with esper arena eval or esper arena match, and load this page again.")

    # The page needs the server only for loading. A long timeout keeps a busy browser, which answers late, from loading the page again.
    settings: dict[str, Any] = {"dark": True, "tailwind": False, "show_welcome_message": False, "reconnect_timeout": 60.0}
    ui.run_with(app, root=root, title=TITLE, favicon="⬡", **settings)
    return app


def browser_data(path: Path) -> bytes:
    """Read and check a replay, and return a file in the same format with only the tensors that the page needs."""
    from safetensors.torch import save

    replay = read_replay(path)
    return save({name: replay.tensors[name] for name in DRAWN}, metadata={INFO: msgspec.json.encode(replay.info).decode()})
