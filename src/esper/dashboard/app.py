"""The dashboard as a web application: one page, which asks for data, and the routes that answer. Imports no torch."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from nicegui import ui
from starlette.middleware.trustedhost import TrustedHostMiddleware

from esper.dashboard.data import Watcher
from esper.dashboard.origin import OwnOriginOnly
from esper.dashboard.page import ROUTE, ReplayPlayer, answer_with_list, answer_with_replay
from esper.files import printable
from esper.runs.opponents import replays_of
from esper.runs.stages import STAGES, stage_variables

HERE = Path(__file__).parent
TITLE = "esper"
MAX_REQUEST_BYTES = 2**20
HOLD_S = 4.0  # a request for a page is answered after this time even if nothing has changed
LOOK_EVERY_S = 0.1  # at the sizes of logs, while a request waits
LOOK_PAUSE = 30  # or, where there are many runs, this many times as long as looking took

WITH_ECHARTS = ui.echart  # naming it is enough: NiceGUI then serves ECharts


class Dashboard(ui.element, component="dashboard.js", esm={"esper-watch": "watch"}):
    """The whole page. It runs in the browser and asks the routes below for data."""

    def __init__(self) -> None:
        super().__init__()
        ui.add_css((HERE / "dashboard.css").read_text(encoding="utf-8"))
        ui.add_css(f".esper-watch {{ {stage_variables('light')} }} .esper-watch.is-dark {{ {stage_variables('dark')} }}")
        self._props |= {"words": {name: look.word for name, look in STAGES.items()}}


def build_app(watcher: Watcher) -> FastAPI:
    """Return an application that shows the runs of a watcher. It answers to its own page alone, and changes no run."""
    app = FastAPI(title=TITLE, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.is_stopping = lambda: False  # the server replaces it; requests that wait must not delay its end
    app.add_middleware(OwnOriginOnly)
    # Refuse other host names: a page of another site could reach this one by a name that resolves to 127.0.0.1.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])

    @app.get("/api/overview")
    async def overview(mark: str = "") -> Response:
        # A browser that has the table already waits here until a run begins, writes or goes.
        end = time.monotonic() + HOLD_S
        while mark and time.monotonic() < end and not app.state.is_stopping():
            began = time.monotonic()
            if await asyncio.to_thread(watcher.overview_mark) != mark:
                break
            await asyncio.sleep(max(LOOK_EVERY_S, LOOK_PAUSE * (time.monotonic() - began)))
        return _json(await asyncio.to_thread(watcher.overview))

    @app.get("/api/loading")
    def loading() -> Response:
        return _json({"share": watcher.loading})

    @app.get("/api/runs/{name}")
    async def run(name: str, mark: str = "") -> Response:
        # A browser that has the page already waits here until its log grows, so that a new event is shown at once.
        if mark:
            stamp, end = watcher.stamp(name), time.monotonic() + HOLD_S
            while watcher.has_seen(name, mark, stamp) and watcher.stamp(name) == stamp and time.monotonic() < end:
                if app.state.is_stopping():
                    break
                await asyncio.sleep(LOOK_EVERY_S)
        page = await asyncio.to_thread(watcher.page, name, mark)
        if page is not None and "controller" in page:
            page["controller"].pop("utility")  # asked for as series
        return _missing("such run") if page is None else _json(page)

    @app.get("/api/runs/{name}/hosts/{number}")
    async def hosts(name: str, number: int) -> Response:
        return _json(await asyncio.to_thread(watcher.hosts, name, number))

    @app.post("/api/runs/{name}/series")
    async def series(name: str, request: Request) -> Response:
        body = await request.body()
        try:
            asked = msgspec.json.decode(body[:MAX_REQUEST_BYTES], type=SeriesRequest)
        except msgspec.MsgspecError as error:
            return Response(f"this is no request for series: {error}", status_code=422, media_type="text/plain")
        answer = await asyncio.to_thread(watcher.series, name, asked.names, asked.seen, asked.generation, twin=asked.twin)
        return _json(answer)

    @app.get("/api/compare")
    async def compare(runs: str = "") -> Response:
        return _json(await asyncio.to_thread(watcher.compare, runs.split(",")))

    @app.get(ROUTE + "/{name}")
    def replays(name: str) -> Response:
        run = watcher.run(name)
        return _missing(name) if run is None else answer_with_list(replays_of(run.folder), f"{ROUTE}/{name}")

    @app.get(ROUTE + "/{name}/{replay}")
    def replay(name: str, replay: str) -> Response:
        run = watcher.run(name)
        return answer_with_replay([] if run is None else replays_of(run.folder), replay)

    def root() -> None:
        watched = ui.context.client.request.query_params.get("replays")
        if watched is not None and watcher.run(watched) is not None:
            ReplayPlayer(f"{ROUTE}/{watched}", "This run has no replays yet. The next evaluation of its training records one.")
            return
        Dashboard()

    settings: dict[str, Any] = {"dark": None, "tailwind": False, "show_welcome_message": False, "reconnect_timeout": 60.0}
    ui.run_with(app, root=root, title=TITLE, favicon="⬡", **settings)
    return app


class SeriesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Names of series, the number of points of each that the page has, and the generation of the log that they are of."""

    names: list[str]
    seen: dict[str, int] = {}
    generation: int | None = None
    twin: bool = False


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def _missing(what: str) -> Response:
    return Response(f"there is no {printable(what)} any more", status_code=404, media_type="text/plain")
