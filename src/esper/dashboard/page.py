"""The page that plays replays: a NiceGUI element that runs in the browser, and answers with the list and the files. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from nicegui import ui
from starlette.middleware.trustedhost import TrustedHostMiddleware

from esper.dashboard.origin import OwnOriginOnly
from esper.files import printable
from esper.replay_file import ReplayError, drawn_part
from esper.runs.opponents import replay_rows

HERE = Path(__file__).parent
TITLE = "esper arena"
ROUTE = "/replays"

WITH_THREE_JS = ui.scene  # naming it is enough: NiceGUI then serves three.js


class ReplayPlayer(ui.element, component="replay_player.js", esm={"esper-player": "player"}):
    """Plays replays. It asks `source` for their list again and again, and plays the newest one until another one is chosen."""

    def __init__(self, source: str, when_empty: str) -> None:
        super().__init__()
        ui.add_css((HERE / "player.css").read_text(encoding="utf-8"))
        self._props |= {"source": source, "when-empty": when_empty}


def build_app(list_replays: Callable[[], list[Path]]) -> FastAPI:
    """Return an application with the page at `/`. It lists the replays again whenever the page asks."""
    app = FastAPI(title=TITLE, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OwnOriginOnly)
    # Refuse other host names: a page of another site could reach this one by a name that resolves to 127.0.0.1.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])

    def found() -> list[Path]:
        """Return the replays; empty if all were removed while the page is open."""
        with contextlib.suppress(ReplayError):
            return list_replays()
        return []

    @app.get(ROUTE)
    def replays() -> Response:
        return answer_with_list(found(), ROUTE)

    @app.get(ROUTE + "/{name}")
    def replay(name: str) -> Response:
        return answer_with_replay(found(), name)

    def root() -> None:
        ReplayPlayer(ROUTE, "There are no replays any more. Record one with esper arena eval or esper arena match, and it appears here.")

    # The page needs the server only for loading. A long timeout keeps a busy browser, which answers late, from loading the page again.
    settings: dict[str, Any] = {"dark": None, "tailwind": False, "show_welcome_message": False, "reconnect_timeout": 60.0}
    ui.run_with(app, root=root, title=TITLE, favicon="⬡", **settings)
    return app


def answer_with_list(replays: list[Path], base: str) -> Response:
    """Answer with the rows of replays, newest first. Their addresses begin with `base`."""
    rows = msgspec.json.encode(replay_rows(replays, base))
    return Response(rows, media_type="application/json", headers={"Cache-Control": "no-store"})


def answer_with_replay(replays: list[Path], name: str) -> Response:
    """Answer with the drawn part of the replay of this name. Only files in `replays` can be named."""
    path = next((path for path in replays if printable(path.name) == name), None)
    if path is None:
        return Response(f"{printable(name)} does not exist any more; choose another replay", status_code=404, media_type="text/plain")
    try:
        return Response(drawn_part(path), media_type="application/octet-stream", headers={"Cache-Control": "no-store"})
    except ReplayError as error:
        return Response(printable(str(error)), status_code=422 if path.exists() else 404, media_type="text/plain")
