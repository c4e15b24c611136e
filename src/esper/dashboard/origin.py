"""Protection of pages that are served on this machine from the pages of other sites."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response


class OwnOriginOnly:
    """Refuses requests and websockets that a page of another site made the user's browser send.

    A browser sends the site of the requesting page as `Origin`. It does not stop that page from opening a websocket, and NiceGUI lets every
    origin read the answers of its polling transport. Requests without `Origin` come from an address that the user typed, or from other
    programs.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and not _is_own_origin(scope["headers"]):
            if scope["type"] == "http":
                answer = Response("this page answers only requests of its own", status_code=403, media_type="text/plain")
                await answer(scope, receive, send)
            else:
                await receive()  # the request to connect
                await send({"type": "websocket.close", "code": 1008})  # closed before it was accepted, so the server answers 403
            return
        await self.app(scope, receive, send)


def _is_own_origin(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether every `Origin` in the headers is the address in `Host`."""
    hosts = [value.lower() for name, value in headers if name == b"host"]
    return all(value.lower() in (b"http://" + host for host in hosts) for name, value in headers if name == b"origin")
