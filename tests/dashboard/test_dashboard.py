"""The dashboard: its data against a plain loop over the lines of a log, its page in a real browser, and what it must not do."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import esper
from esper.dashboard.data import POINTS, Watcher, name_in_address
from esper.growth.controllers.baselines import Planned
from esper.rl import PPOConfig, TrainConfig, train_run
from esper.runs.folder import EVENTS
from tests.dashboard.chromium import Page, skip_without_a_browser, start_chromium

pytestmark = pytest.mark.slow

SERVE = """
import sys
from pathlib import Path
from esper.dashboard.watch import serve_runs

serve_runs(Path(sys.argv[1]), show=False, announce=lambda address: print(address, "torch" in sys.modules, flush=True))
"""
EPOCHS = 12
NASTY = ":x<b>"  # a name that must be a name only: of a metric, and of a run


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def data(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 16, 4, generator=generator)
    return [(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()) for x in inputs]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two kinds, one that was killed, one with names made to do harm, and one with many events."""
    root = tmp_path_factory.mktemp("runs")
    plan = Planned([(2, "1", "mlp"), (3, "3", "norm")])
    esper.grow(model(), data(), data(3), loss_fn=cross_entropy, epochs=EPOCHS, controller=plan, run=root / "grown", progress=False)
    for seed in (0, 1):
        config = TrainConfig(env="cue", num_envs=4, total_steps=512, eval_episodes=0, ppo=PPOConfig(num_steps=16, seed=seed))
        train_run(config, root / f"cue-{seed}")
    killed = Path(shutil.copytree(root / "cue-0", root / "killed"))
    lines = (killed / EVENTS).read_text().splitlines()[:-1]
    (killed / EVENTS).write_text("\n".join(lines) + "\n")
    os.utime(killed / EVENTS, (1e9, 1e9))
    nasty = Path(shutil.copytree(root / "cue-1", root / "<img src=x onerror=alert(1)>"))
    update = next(line for line in (nasty / EVENTS).read_text().splitlines() if '"update"' in line)
    event = json.loads(update)
    event["entropy"] = {NASTY: 0.5, "__proto__": 0.25}
    with (nasty / EVENTS).open("a") as file:
        file.writelines(json.dumps({**event, "step": step, NASTY: 1.0}, separators=(",", ":")) + "\n" for step in range(600, 640))
    many = Path(shutil.copytree(root / "cue-1", root / "many"))
    with (many / EVENTS).open("a") as file:
        for step in range(1000, 31_000):
            file.write(update.replace('"step":64', f'"step":{step}').replace('"step":16', f'"step":{step}') + "\n")
    return root


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


# Data


def test_the_page_of_a_growth_run_tells_the_lives_of_its_seeds(runs: Path, tmp_path: Path) -> None:
    watcher = Watcher(runs, cache=tmp_path)
    watcher.refresh()
    page = watcher.page(name_in_address(runs / "grown"))
    assert page is not None
    entered = [event for event in lines_of(runs / "grown") if event["kind"] == "stage_entered"]
    born = [(event["slot"], event["blueprint"], event["epoch"]) for event in entered if event["stage"] == "GERMINATED"]
    assert (
        [(seed["slot"], seed["blueprint"], seed["born"]) for seed in page["growth"]["seeds"]] == born == [("1", "mlp", 2), ("3", "norm", 3)]
    )
    kept = {event["slot"] for event in entered if event["stage"] == "FOSSILIZED"}
    assert {seed["slot"] for seed in page["growth"]["seeds"] if seed["outcome"] == "kept"} == kept
    last = [event for event in lines_of(runs / "grown") if event["kind"] == "epoch_ended"][-1]
    assert {slot["slot"]: slot["stage"] for slot in page["growth"]["slots"]} == {view["slot"]: view["stage"] for view in last["slots"]}


def test_series_are_sent_once_then_only_what_is_new_and_never_too_many(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "many", tmp_path / "runs" / "many"))
    watcher, name, label = Watcher(tmp_path / "runs", cache=tmp_path / "cache"), name_in_address(folder), "update/value_loss"
    watcher.refresh()
    first = watcher.series(name, [label], {}, None)
    part = first["series"][label]
    by_hand = [event["value_loss"] for event in lines_of(folder) if event["kind"] == "update"]
    assert part["total"] == len(by_hand) > 30_000
    assert len(part["values"]) <= POINTS
    assert (min(part["values"]), max(part["values"])) == (min(by_hand), max(by_hand))
    with (folder / EVENTS).open("a") as file:
        event = {**[event for event in lines_of(folder) if event["kind"] == "update"][-1], "step": 99_999, "value_loss": 7.5}
        file.write(json.dumps(event, separators=(",", ":")) + "\n")
    then = watcher.series(name, [label], {label: part["total"]}, first["generation"])["series"][label]
    assert (then["start"], then["steps"], then["values"]) == (part["total"], [99_999], [7.5])


def test_runs_of_one_setting_with_other_seeds_have_a_mean_over_seeds(runs: Path, tmp_path: Path) -> None:
    watcher = Watcher(runs, cache=tmp_path)
    watcher.refresh()
    found = watcher.compare([name_in_address(runs / f"cue-{seed}") for seed in (0, 1)])["over_seeds"]
    assert [run["seed"] for run in found["runs"]] == [0, 1]
    assert len(found["groups"]) == 1, "they differ only in the seed"


def test_no_run_is_changed_by_looking_at_it(runs: Path, tmp_path: Path) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(runs.rglob("*")) if path.is_file()}

    before = state()
    watcher = Watcher(runs, cache=tmp_path)
    overview = watcher.overview()
    for row in overview["runs"]:
        page = watcher.page(row["id"])
        assert page is not None
        watcher.series(row["id"], page["series"], {}, None)
    watcher.compare([row["id"] for row in overview["runs"]])
    assert state() == before


# The server


@pytest.fixture(scope="module")
def address(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a dashboard; its process must end by itself when it is interrupted."""
    skip_without_a_browser()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    with subprocess.Popen([sys.executable, "-c", SERVE, str(runs)], stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            found, has_torch = server.stdout.readline().split()
            assert has_torch == "False"
            yield found
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0


def ask(address: str, path: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address.rstrip("/") + path, headers=headers)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..%2f..%2fetc%2fpasswd",
        "/api/runs/grown",
        "/replays/../../etc/passwd",
        "/replays/0123456789ab/..%2f..%2fconfig.toml",
        "/api/runs/%00",
    ],
)
def test_an_address_outside_the_runs_is_not_served(address: str, path: str) -> None:
    code, body = ask(address, path)
    assert code in (400, 404) or b"<!doctype html" in body.lower(), "unknown addresses get an error, or the page itself"
    assert b"root:" not in body
    assert b"lifecycle" not in body


def test_replays_that_are_links_are_not_served(address: str, runs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"secret")
    (runs / "cue-0" / "replays").mkdir(exist_ok=True)
    link = runs / "cue-0" / "replays" / "link.safetensors"
    link.symlink_to(secret)
    try:
        assert ask(address, f"/replays/{name_in_address(runs / 'cue-0')}/link")[0] == 404
    finally:
        link.unlink()
        (runs / "cue-0" / "replays").rmdir()


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}])
def test_requests_of_other_sites_are_refused(address: str, headers: dict[str, str]) -> None:
    assert ask(address, "/api/overview", **headers)[0] in (400, 403)
    assert ask(address, "/api/overview")[0] == 200


# The browser


@pytest.fixture(scope="module")
def browser(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    driver = start_chromium(tmp_path_factory.mktemp("profile"))
    try:
        yield Page(driver)
    finally:
        driver.quit()


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """A page without errors, which asks nobody but this machine for anything."""
    browser.driver.set_window_size(1280, 940)
    yield browser
    assert browser.errors() == []
    assert browser.hosts() <= {"127.0.0.1"}


def show(page: Page, address: str, place: str, selector: str) -> None:
    """Open a page and wait for something on it. Its picture is kept beside the results of the test."""
    page.driver.get("about:blank")
    page.driver.get(f"{address}#{place}")
    page.wait(lambda: page.text(selector) != "", f"{selector} did not appear on {place}")
    page.settle()


def keep(page: Page, name: str) -> None:
    folder = Path(os.environ.get("ESPER_SCREENSHOTS", "screenshots"))
    if folder.is_dir():
        page.driver.save_screenshot(str(folder / f"{name}.png"))


def number(text: str) -> float:
    return float(text.replace(",", "").split()[0])


def test_the_table_shows_all_runs_with_their_state(page: Page, address: str, runs: Path) -> None:
    show(page, address, "/", "[data-run]")
    rows = dict(zip(page.texts("[data-run] td:nth-child(2)"), page.texts("[data-run] .state"), strict=True))
    assert set(rows) == {folder.name for folder in runs.iterdir()}
    assert (rows["grown"], rows["killed"], rows["cue-0"]) == ("finished", "dead", "finished")
    page.driver.execute_script("document.querySelector('input[type=search]').focus()")
    page.press("dead")
    page.wait(lambda: len(page.texts("[data-run]")) == 1, "the filter does not filter")
    keep(page, "runs")


def test_figures_of_the_growth_page_equal_a_plain_loop_over_the_lines(page: Page, address: str, runs: Path) -> None:
    show(page, address, f"/runs/{name_in_address(runs / 'grown')}", "[data-kept]")
    events = lines_of(runs / "grown")
    ended = [event for event in events if event["kind"] == "epoch_ended"]
    kept = [event for event in events if event["kind"] == "stage_entered" and event["stage"] == "FOSSILIZED"]
    assert math.isclose(number(page.text("[data-last]")), ended[-1]["val_loss"], rel_tol=1e-3)
    assert math.isclose(number(page.text("[data-best]")), min(event["val_loss"] for event in ended), rel_tol=1e-3)
    assert page.text("[data-kept]") == f"{len(kept)} of 2"
    assert number(page.text("[data-parameters]")) == ended[-1]["parameters"]
    assert len(page.texts("svg.network [data-slot]")) == len(ended[-1]["slots"])
    assert page.texts("[data-ledger] td:nth-child(3)") == ["mlp", "norm"]
    page.driver.execute_script("document.querySelector('[data-seed]').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    page.wait(lambda: "seed 1: mlp after 1" in page.text("[data-detail]"), "the seed does not open")
    keep(page, "growth")


def test_curves_move_while_a_run_trains(page: Page, address: str, runs: Path) -> None:
    folder = Path(shutil.copytree(runs / "cue-0", runs / "live"))
    lines = [line for line in (folder / EVENTS).read_text().splitlines() if '"run_ended"' not in line]
    (folder / EVENTS).write_text("\n".join(lines) + "\n")
    try:
        page.driver.get("about:blank")
        time.sleep(2.5)  # until the server looks for new folders again
        show(page, address, f"/runs/{name_in_address(folder)}", "[data-progress]")
        update = json.loads(next(line for line in reversed(lines) if '"update"' in line))
        page.wait(lambda: bool(page.texts("[data-chart='losses']")), "there is no chart")
        before = page.picture()
        with (folder / EVENTS).open("a") as file:
            file.write(json.dumps({**update, "step": 5000, "value_loss": 50.0, "time": time.time()}, separators=(",", ":")) + "\n")
        page.wait(lambda: (page.picture() != before).any(), "the curve does not move")
    finally:
        shutil.rmtree(folder)


def test_two_runs_are_compared_with_the_settings_in_which_they_differ(page: Page, address: str, runs: Path) -> None:
    names = ",".join(name_in_address(runs / f"cue-{seed}") for seed in (0, 1))
    show(page, address, f"/compare/{names}", "tbody tr")
    assert page.texts("tbody tr td") == ["ppo.seed", "0", "1"]
    assert "update/mean_return" in page.texts(".chart h3") or "update/policy_loss" in page.texts(".chart h3")
    keep(page, "compare")


def test_names_made_to_do_harm_are_only_names(page: Page, address: str, runs: Path) -> None:
    folder = next(folder for folder in runs.iterdir() if folder.name.startswith("<img"))
    show(page, address, f"/runs/{name_in_address(folder)}", "[data-title]")
    assert page.text("[data-title]") == folder.name
    assert not page.driver.execute_script("return document.querySelector('img[src=x]')")
    page.wait(lambda: f"entropy of {NASTY}" in page.text(".lights"), "the head with the odd name is not listed")
    options = page.driver.execute_script("return [...document.querySelectorAll('details option')].map((item) => item.value)")
    assert f"update/{NASTY}" in options


def test_a_phone_shows_everything_without_scrolling_sideways(page: Page, address: str, runs: Path) -> None:
    page.driver.set_window_size(500, 900)
    for place, selector in (("/", "[data-run]"), (f"/runs/{name_in_address(runs / 'grown')}", "[data-kept]")):
        show(page, address, place, selector)
        wide = page.driver.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, place
    keep(page, "phone")
