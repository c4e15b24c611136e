"""The page that plays replays, as a NiceGUI element whose work is done in the browser, and the routes that give it the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import FastAPI, Response
from nicegui import ui
from starlette.middleware.trustedhost import TrustedHostMiddleware

from esper.replay_file import DRAWN, INFO, ReplayError, read_replay

HERE = Path(__file__).parent
TITLE = "esper arena"
ROUTE = "/replays/"

WITH_THREE_JS = ui.scene  # to be named is enough: the library that it brings is then served


class ReplayPlayer(ui.element, component="replay_player.js", esm={"esper-player": "player"}):
    """Plays the first of the replays, and lets choose among them."""

    def __init__(self, replays: list[dict[str, str]]) -> None:
        super().__init__()
        self._props["replays"] = replays


def build_app(list_replays: Callable[[], list[Path]]) -> FastAPI:
    """An application with the page at `/`. The replays are listed anew whenever the page is loaded."""
    app = FastAPI(title=TITLE, docs_url=None, redoc_url=None, openapi_url=None)
    # Another site's page could otherwise reach this one by a name of its own that leads to 127.0.0.1.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])

    @app.get(ROUTE + "{name}")
    def replay(name: str) -> Response:
        path = next((path for path in list_replays() if path.name == name), None)
        if path is None:
            return Response(f"{name} is not there any more; load this page again", status_code=404, media_type="text/plain")
        try:
            return Response(for_the_browser(path), media_type="application/octet-stream", headers={"Cache-Control": "no-store"})
        except ReplayError as error:
            return Response(str(error), status_code=422, media_type="text/plain")

    def root() -> None:
        ui.add_css((HERE / "player.css").read_text(encoding="utf-8"))
        ReplayPlayer([{"name": path.stem, "url": ROUTE + quote(path.name)} for path in list_replays()])

    # The page needs the server only to load: a browser that is too busy to answer for a while must not be made to load it again.
    settings: dict[str, Any] = {"dark": True, "tailwind": False, "show_welcome_message": False, "reconnect_timeout": 60.0}
    ui.run_with(app, root=root, title=TITLE, favicon="⬡", **settings)
    return app


def for_the_browser(path: Path) -> bytes:
    """A checked replay with nothing but what the page reads, in the same format."""
    from safetensors.torch import save

    replay = read_replay(path)
    return save({name: replay.tensors[name] for name in DRAWN}, metadata={INFO: msgspec.json.encode(replay.info).decode()})
