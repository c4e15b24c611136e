"""The page that plays replays, in a real browser: drawing, playback, time line, keys and clicks."""

from __future__ import annotations

import base64
import itertools
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from esper.arena.specs import PHYSICS, WEAPONS
from esper.replay_file import DRAWN, ReplayInfo, read_replay, write_replay
from tests.dashboard.chromium import Page, keep, skip_without_a_browser
from tests.replays import COLUMN, WON, staged_battle

pytestmark = pytest.mark.slow

SERVE = """
import sys
from esper.dashboard.watch import serve

serve(sys.argv[1], show=False, announce=lambda address: print(address, flush=True))
"""
LAST = 39  # frame


@pytest.fixture(scope="module")
def battle() -> tuple[dict[str, Tensor], ReplayInfo]:
    return staged_battle(team_size=3, size=32, frames=LAST + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def address(folder: Path, battle: tuple[dict[str, Tensor], ReplayInfo]) -> Iterator[str]:
    """The address of a server that plays the replays of a run; it must end by itself when it is interrupted."""
    skip_without_a_browser()
    run = folder
    for age, (name, (tensors, info)) in enumerate({"newest": battle, "older": staged_battle(team_size=2, size=16, frames=8)}.items()):
        path = write_replay(run / "replays" / f"{name}.safetensors", tensors, info)
        os.utime(path, (1000 - age, 1000 - age))
    os.utime(shutil.copy(WON, run / "replays" / "won.safetensors"), (950, 950))
    broken = run / "replays" / "broken.safetensors"
    broken.write_bytes(path.read_bytes()[:-9])
    os.utime(broken, (900, 900))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    with subprocess.Popen([sys.executable, "-c", SERVE, str(run)], stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def opened(address: str, browser_with_webgl: Page) -> Page:
    page = browser_with_webgl
    page.driver.set_window_size(1280, 940)
    page.errors(), page.hosts()
    page.driver.get(address)
    page.wait(lambda: page.text("[data-frame]") == "0", "the replay was not loaded")
    assert page.hosts() == {"127.0.0.1"}
    return page


@pytest.fixture
def page(opened: Page) -> Iterator[Page]:
    """At the start of the battle, with nobody chosen. The browser must have nothing to complain about, and ask nobody else."""
    opened.press("\ue00c")  # escape
    opened.press("\ue011")  # home
    opened.wait(lambda: opened.frame == 0 and not opened.texts("[data-panel]"), "the start was not reached")
    yield opened
    assert opened.errors() == []
    assert opened.hosts() <= {"127.0.0.1"}


def stage_of(page: Page) -> np.ndarray:
    """The part of the picture that nothing but the battle is drawn in."""
    return page.picture()[60:680, 260:1020]


def test_the_battle_is_drawn_and_changes_with_the_time(page: Page) -> None:
    before = stage_of(page)
    assert len(np.unique(before.astype(int) @ (65536, 256, 1))) > 500
    ground = (before.astype(int).max(-1) > 40).mean()
    assert ground > 0.3, "the terrain should fill a good part of the stage"
    page.press("\ue010")  # end
    page.wait(lambda: page.frame == LAST, "the end was not reached")
    page.wait(lambda: bool((stage_of(page) != before).any()), "the picture did not change")


def test_playback_continues_until_it_is_paused(page: Page) -> None:
    page.click_on("[data-play]")
    page.wait(lambda: page.frame >= 2, "the battle did not play")
    page.click_on("[data-play]")
    page.wait(lambda: not is_playing(page), "it was not paused")
    frame = page.frame
    page.press("\ue014")  # right
    page.wait(lambda: page.frame == frame + 1, "one frame on")


def pick(page: Page, name: str) -> None:
    """Choose a replay in the list."""
    from selenium.webdriver.support.select import Select

    select = Select(page.driver.find_element("css selector", "select.replays"))
    select.select_by_visible_text(next(text for text in page.texts("select.replays option") if text.startswith(f"{name}:")))


def is_playing(page: Page) -> bool:
    return bool(page.driver.execute_script("return document.querySelector('[data-play]').getAttribute('aria-label') === 'pause'"))


def test_keys_play_step_and_jump(page: Page) -> None:
    right, left, home, end, up = "\ue014", "\ue012", "\ue011", "\ue010", "\ue013"
    for key, frame in ((right, 1), (right, 2), (left, 1), (end, LAST), (left, LAST - 1), (home, 0)):
        page.press(key)
        page.wait(lambda frame=frame: page.frame == frame, f"frame {frame} was not reached")
    page.press(" ")
    page.wait(lambda: page.frame > 0, "the space bar did not play")
    page.press(" ")
    page.wait(lambda: not is_playing(page), "the space bar did not pause")
    page.press(up)
    page.wait(lambda: page.driver.execute_script("return document.querySelector('[data-speed]').value") == "2", "not faster")


def test_a_click_on_the_time_line_moves_to_that_time(page: Page, battle: tuple[dict[str, Tensor], ReplayInfo]) -> None:
    line = page.box("[data-scrub]")
    page.click(line["x"] + 0.75 * line["width"], line["y"] + line["height"] / 2)
    page.wait(lambda: abs(page.frame - 0.75 * LAST) <= 1, "the time was not reached")
    score = battle[0]["frames/score"][page.frame].tolist()
    assert [page.text(f"[data-score='{team}']") for team in (0, 1)] == [f"{value:.1f}" for value in score]
    seconds = page.frame * battle[1].decision_s
    assert page.text("[data-clock]") == f"0:{int(seconds):02d}"


def test_a_click_on_a_unit_shows_its_state_contacts_and_orders(page: Page, battle: tuple[dict[str, Tensor], ReplayInfo]) -> None:
    tensors, info = battle
    unit, frame = 0, LAST // 2
    for _ in range(frame):
        page.press("\ue014")  # right
    page.wait(lambda: page.frame == frame, "the frame was not reached")
    page.settle()
    label = page.box(f".unit-label[data-unit='{unit}']")
    page.click(label["x"] + label["width"] / 2, label["y"] + label["height"] + 8)
    page.wait(lambda: bool(page.texts(f"[data-panel='{unit}']")), "the panel did not open")
    most = info.class_table[info.unit_classes[unit]]
    for name, limit in (("hit_points", most["hit_points"]), ("legs", most["legs"]), ("heat", most["heat_cap"])):
        value = float(tensors["frames/units"][frame, unit, COLUMN[name]])
        assert page.text(f"[data-number='{name}']") == f"{value:.0f} / {limit:.0f}"
    sensed = tensors["frames/sensed"][frame, unit]
    contacts = page.driver.execute_script(
        "return [...document.querySelectorAll('[data-contact]')].map((item) => [+item.dataset.contact, item.className.includes('is-seen')])"
    )
    assert sorted(map(tuple, contacts)) == [(other, int(how) == 2) for other, how in enumerate(sensed) if how]
    assert len(contacts) > 0
    wish = page.text("[data-wish]")
    fire = int(tensors["actions/fire"][frame, unit])
    assert (info.weapons[fire - 1] if fire else "nothing") in wish
    assert "ahead 100 %" in wish
    assert "left 100 %" in wish  # the first unit's strafe is -1, and +1 is to the right


def test_a_click_beside_every_unit_closes_the_panel(page: Page) -> None:
    page.click_on("[data-roster='1']")
    page.wait(lambda: bool(page.texts("[data-panel='1']")), "the panel did not open")
    page.click(640, 90)
    page.wait(lambda: not page.texts("[data-panel]"), "the panel did not close")


def test_winner_and_length_are_shown_before_the_battle_has_played(page: Page, battle: tuple[dict[str, Tensor], ReplayInfo]) -> None:
    assert page.frame == 0
    seconds = int(LAST * battle[1].decision_s)
    assert page.text("[data-result]") == f"blue wins after 0:{seconds:02d}"
    assert page.text("[data-length]") == f"of 0:{seconds:02d}"


def test_the_legend_names_both_teams_and_all_weapons_and_can_be_closed(page: Page, battle: tuple[dict[str, Tensor], ReplayInfo]) -> None:
    def is_open() -> bool:
        return bool(page.driver.execute_script("return document.querySelector('[data-legend]').open"))

    if not is_open():
        page.press("l")
    page.wait(is_open, "the legend does not open")
    legend = page.text("[data-legend]")
    for word in (*battle[1].weapons, "blue: round rings", "red: square rings", "hit points", "heat", "zone"):
        assert word in legend
    page.press("l")
    page.wait(lambda: not is_open(), "the legend does not close")


def test_following_a_unit_zooms_onto_it_and_back(page: Page) -> None:
    def distance() -> float:
        return float(page.driver.execute_script("return document.querySelector('.stage').dataset.distance"))

    page.press("r")
    page.settle()
    far = distance()
    page.click_on("[data-roster='1']")
    page.press("f")
    page.wait(lambda: abs(distance() - 20) < 0.05 < far - 20, "the camera does not come near")
    page.click_on("[data-play]")
    page.wait(lambda: page.frame >= 2, "the battle did not play")
    page.settle()
    label, stage = page.box(".unit-label[data-unit='1']"), page.box(".stage")
    across = label["x"] + label["width"] / 2 - stage["x"] - stage["width"] / 2
    assert abs(across) < 30, "the unit should stay in the middle while it walks"
    page.press("f")
    page.wait(lambda: abs(distance() - far) < 0.2, "the camera does not go back")


def test_nothing_overlaps_or_needs_sideways_scrolling_on_a_laptop_and_a_phone(page: Page) -> None:
    parts = (".bar-top", ".bar-bottom", ".left .roster", ".right .roster", ".feed", ".panel", ".legend")
    try:
        for width, height in ((1280, 720), (420, 860)):
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            page.settle()
            page.click_on("[data-roster='1']")
            page.wait(lambda: bool(page.texts("[data-panel='1']")), "the panel did not open")
            boxes = {
                part: page.box(part) for part in (*parts, *([".stage"] if width == 420 else []))
            }  # on a laptop, panels cover the stage
            for one, other in itertools.combinations(boxes, 2):
                assert not overlap(boxes[one], boxes[other]), (width, one, other)
            assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes.values()), width
            scrolled = "const page = document.documentElement; return Math.max(page.scrollWidth, document.body.scrollWidth) - innerWidth"
            assert page.driver.execute_script(scrolled) <= 0
            keep(page, f"player-{width}")
            page.press("d")
            page.settle()
            keep(page, f"player-{width}-other")
            page.press("\ue00c")  # escape
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    is_apart = any(
        a[axis] + a[size] <= b[axis] + 0.5 for a, b in ((one, other), (other, one)) for axis, size in (("x", "width"), ("y", "height"))
    )
    return not is_apart


def test_a_newer_replay_plays_when_the_present_one_has_ended(page: Page, folder: Path) -> None:
    page.click_on("[data-live]")
    page.press("\ue011")  # home, which pauses
    path = write_replay(folder / "replays" / "next.safetensors", *staged_battle(team_size=2, size=16, frames=24))
    try:
        page.wait(lambda: any(text.startswith("next: blue wins, 0:05") for text in page.texts("select.replays option")), "it is not listed")
        assert f"of {LAST}" in page.text(".frame"), "the present battle has not ended"
        page.press("\ue010")  # end
        page.wait(lambda: "of 23" in page.text(".frame") and page.frame > 0, "the next battle does not play")
    finally:
        pick(page, "newest")
        path.unlink()
        page.wait(lambda: f"of {LAST}" in page.text(".frame"), "the first replay was not loaded again")
        page.wait(lambda: "next" not in page.text("select.replays"), "a file that was removed is still listed")


def test_the_feed_shows_kills_at_their_time(page: Page, battle: tuple[dict[str, Tensor], ReplayInfo]) -> None:
    assert page.texts("[data-kind='kill']") == []
    page.press("\ue010")  # end
    page.wait(lambda: page.frame == LAST, "the end was not reached")
    (kill,) = [item for item in battle[1].feed if item.kind == "kill"]
    (told,) = page.texts("[data-kind='kill']")
    assert kill.text in told
    assert any("blue wins" in text for text in page.texts("[data-kind='end']"))
    page.click_on("[data-kind='kill']")
    page.wait(lambda: page.frame == kill.frame, "a click on what happened did not go there")


def test_another_replay_of_the_run_can_be_chosen_and_a_broken_one_says_what_is_wrong(page: Page) -> None:
    assert [text.partition(":")[0] for text in page.texts("select.replays option")] == ["newest", "older", "won", "broken"]
    pick(page, "older")
    page.wait(lambda: "of 7" in page.text(".frame"), "the other replay was not loaded")
    pick(page, "broken")
    page.wait(lambda: "broken.safetensors is damaged" in page.text(".problem"), "it was not told what is wrong")
    assert all("422" in error for error in page.errors())
    pick(page, "newest")
    page.wait(lambda: f"of {LAST}" in page.text(".frame"), "the first replay was not loaded again")
    assert page.text(".problem") == ""


def test_a_recorded_battle_is_played(page: Page) -> None:
    won = read_replay(WON)
    weapon = won.info.weapons.index("autocannon")
    flies = (won.tensors["frames/projectiles"][..., 0] > 0).view(won.frames, won.info.units, -1).any(-1)
    burst = ((won.tensors["frames/shots"][..., 0] == weapon) & ~flies).nonzero()  # at once, so that only a tracer shows it
    pick(page, "won")
    page.wait(lambda: f"of {won.frames - 1}" in page.text(".frame"), "it was not loaded")
    assert page.text(".problem") == ""
    before = stage_of(page)
    assert len(np.unique(before.astype(int) @ (65536, 256, 1))) > 500
    scrub = "const line = document.querySelector('[data-scrub]'); line.value = arguments[0]; line.dispatchEvent(new Event('input'))"
    shot_at = int(burst[0, 0])
    page.driver.execute_script(scrub, shot_at - 0.5)  # while it is drawn
    page.wait(lambda: page.frame == shot_at - 1, "the frame was not reached")
    page.wait(lambda: bool((stage_of(page) != before).any()), "the picture did not change")
    pick(page, "newest")
    page.wait(lambda: f"of {LAST}" in page.text(".frame"), "the first replay was not loaded again")


def asked(page: Page, script: str, *arguments: object) -> object:
    """Return the result of a script on the page's own `fetchReplay`, or the message of its error."""
    whole = f"""
        const [done, args] = [arguments[arguments.length - 1], arguments];
        import("esper-player").then(({{ fetchReplay }}) => {script}).then(done, (error) => done(error.message));
    """
    return page.driver.execute_async_script(whole, *arguments)


def test_the_page_distinguishes_shots_that_burst_from_shots_in_flight(page: Page, battle: tuple[dict[str, Tensor], ReplayInfo]) -> None:
    script = "fetchReplay(args[0]).then((replay) => args[1].map(([frame, unit]) => replay.shotFlies(frame, unit)))"
    tensors, info = battle
    flying = torch.isin(
        tensors["frames/shots"][..., 0], torch.tensor([info.weapons.index(name) for name in ("missile", "gauss", "autocannon")])
    )
    found = asked(page, script, "/replays/newest.safetensors", flying.nonzero().tolist())
    assert found == [True] * int(flying.sum())

    won = read_replay(WON)
    weapon = won.info.weapons.index("autocannon")
    fired = (won.tensors["frames/shots"][..., 0] == weapon).nonzero().tolist()
    shells = won.tensors["frames/projectiles"].view(won.frames, won.info.units, -1, 5)
    flown = (shells[..., 2:] - won.tensors["frames/units"][:, :, None, :3]).norm(dim=-1)
    in_a_decision = PHYSICS.tick_s * PHYSICS.ticks_per_decision * WEAPONS["autocannon"].flight_mps
    is_young = ((shells[..., 0] > 0) & (shells[..., 1] == weapon) & (flown < in_a_decision + 1.5)).any(-1)
    found = asked(page, script, "/replays/won.safetensors", fired)
    assert isinstance(found, list)
    assert set(found) == {True, False}
    assert found == [bool(is_young[tuple(shot)]) for shot in fired]


def test_a_type_that_the_page_does_not_know_is_named(page: Page) -> None:
    sent = save({"frames/new": torch.zeros(2, dtype=torch.int16)}, metadata={"info": "{}"})
    found = asked(page, "fetchReplay(args[0])", "data:application/octet-stream;base64," + base64.b64encode(sent).decode())
    assert "frames/new is of type I16, and this page reads F32" in str(found)


def test_the_page_gets_only_what_it_reads_and_only_replays(address: str) -> None:
    with urllib.request.urlopen(f"{address}replays/newest.safetensors", timeout=60) as answer:
        tensors = load(answer.read())
    assert set(tensors) == set(DRAWN)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}replays/other.safetensors", timeout=60)


def test_a_request_with_another_host_name_is_refused(address: str) -> None:
    request = urllib.request.Request(address, headers={"Host": "rebound.example"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=60)
