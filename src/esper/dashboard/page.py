"""The page that plays replays, as a NiceGUI element whose work is done in the browser, and the routes that give it the files."""

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

from esper.files import printable
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


class OwnOriginOnly:
    """Refuse requests and websockets that a page of another site has made its visitor's browser send.

    A browser names the page that asks in `Origin`. It does not keep that page from opening a websocket, and NiceGUI lets every origin read
    what its polling transport answers. Requests without `Origin` are those of an address that was typed in, and of other programs.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and not _is_own_origin(scope["headers"]):
            if scope["type"] == "http":
                answer = Response("this page answers to itself alone", status_code=403, media_type="text/plain")
                await answer(scope, receive, send)
            else:
                await receive()  # the wish to connect
                await send({"type": "websocket.close", "code": 1008})  # before it is accepted: the server answers with 403
            return
        await self.app(scope, receive, send)


def _is_own_origin(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether every `Origin` among the headers is the address that `Host` says was asked for."""
    hosts = [value.lower() for name, value in headers if name == b"host"]
    return all(value.lower() in (b"http://" + host for host in hosts) for name, value in headers if name == b"origin")


def build_app(list_replays: Callable[[], list[Path]]) -> FastAPI:
    """An application with the page at `/`. The replays are listed anew whenever the page is loaded."""
    app = FastAPI(title=TITLE, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OwnOriginOnly)
    # Another site's page could otherwise reach this one by a name of its own that leads to 127.0.0.1.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])

    @app.get(ROUTE + "{name}")
    def replay(name: str) -> Response:
        path = next((path for path in found() if printable(path.name) == name), None)
        if path is None:
            return Response(f"{name} is not there any more; load this page again", status_code=404, media_type="text/plain")
        try:
            return Response(for_the_browser(path), media_type="application/octet-stream", headers={"Cache-Control": "no-store"})
        except ReplayError as error:
            return Response(printable(str(error)), status_code=422 if path.exists() else 404, media_type="text/plain")

    def found() -> list[Path]:
        """None where the last one was removed while the page is open."""
        with contextlib.suppress(ReplayError):
            return list_replays()
        return []

    def root() -> None:
        ui.add_css((HERE / "player.css").read_text(encoding="utf-8"))
        replays = [{"name": printable(path.stem), "url": ROUTE + quote(printable(path.name))} for path in found()]
        if replays:
            ReplayPlayer(replays)
        else:
            ui.label("There are no replays any more. Record one with esper arena eval or esper arena match, and load this page again.")

    # The page needs the server only to load: a browser that is too busy to answer for a while must not be made to load it again.
    settings: dict[str, Any] = {"dark": True, "tailwind": False, "show_welcome_message": False, "reconnect_timeout": 60.0}
    ui.run_with(app, root=root, title=TITLE, favicon="⬡", **settings)
    return app


def for_the_browser(path: Path) -> bytes:
    """A checked replay with nothing but what the page reads, in the same format."""
    from safetensors.torch import save

    replay = read_replay(path)
    return save({name: replay.tensors[name] for name in DRAWN}, metadata={INFO: msgspec.json.encode(replay.info).decode()})
