"""`esper watch --terminal`: the same parts as the page in the browser, at every width, with keys and a comparison."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import statistics
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from esper.cli.main import main
from esper.cli.watch import Screen, Window, keys_in
from esper.dashboard.data import Watcher, name_in_address
from esper.replay_file import write_replay
from esper.runs.analysis import write_analysis
from esper.runs.catalog import label
from tests.replays import staged_battle
from tests.runs.made import made_growth, made_ppo
from tests.runs.test_analysis import some_analysis
from tests.runs.test_report import host_ended, make_run, round_ended, shown_seed, updates

CALIBRATION = {"predicted": [0.0, 1.0], "achieved": [0.1, 0.8], "low": [0.0, 0.6], "high": [0.2, 1.0], "steps": [50, 50]}
LONG = "encoder.layers.11.feed_forward.second"  # the name of a slot


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def growth_events() -> list[dict[str, Any]]:
    """A run with a kept seed, a seed that a rollback took, a probe, and the use of the machine."""
    view = {"alpha": 0.5, "age": 4, "health": 1.0, "gain": 0.05, "gain_low": 0.03, "gain_high": 0.07, "parameters": 300, "rent": 0.01}
    slots = [
        {"slot": "conv1", "number": 1, "stage": "BLENDING", "blueprint": "mlp", **view},
        {"slot": LONG, "number": None, "stage": "DORMANT", "blueprint": None, **view},
    ]
    size = {"parameters": 1_300, "flops": 9_000, "learning_rate": 0.1}
    started = {"epochs": 6, "controller": "heuristic", "raise_mode": "joint", "slots": ["conv1", LONG], "parameters": 1_000, "flops": 8_000}
    entered = {"kind": "stage_entered", "slot": "conv1", "number": 1, "blueprint": "mlp"}
    lost = {"kind": "rolled_back", "epoch": 3, "to_epoch": 1, "embargoed": [LONG], "gone": [2], "steps_lost": 37, "seconds_lost": 2.5}
    used = {"samples_per_second": 250.0, "step_seconds": 0.004, "resources": {"memory_bytes": 300 * 2**20}}
    told = {"slots": slots, **size, **used}
    return [
        {"kind": "growth_started", "epoch": 0, **started},
        {"kind": "probed", "epoch": 1, "promises": {"conv1": {"mlp": 0.02, "norm": 0.01}}},
        {"kind": "passed_over", "epoch": 1, "reasons": {"conv1": {"norm": "mlp is worth more"}}},
        {**entered, "epoch": 1, "stage": "GERMINATED", "reason": "promising"},
        {**entered, "epoch": 2, "stage": "BLENDING", "reason": "it has learned"},
        {**entered, "epoch": 1, "stage": "GERMINATED", "reason": "promising too", "slot": LONG, "number": 2, "blueprint": "norm"},
        {"kind": "measured", "epoch": 2, "slot": "conv1", "number": 1, "gain": 0.05, "gain_low": 0.03, "gain_high": 0.07, "rent": 0.01},
        {**lost, "reason": "the loss is nan"},
        *(
            {"kind": "epoch_ended", "epoch": n, "step": n, "train_loss": 1 / n, "val_loss": 1.5 / n, "decision": "waits", **told}
            for n in range(1, 5)
        ),
    ]  # fmt: skip


def make_all(root: Path) -> None:
    """Write a run of every kind, with everything that its page can show."""
    grown = make_run(root / "grown", "growth", growth_events())
    write_analysis(grown, some_analysis())
    label(grown, add=["baseline"], note="the first one")
    told = {"seeds": [shown_seed((1, "GERMINATED", "the policy chose it"))], "others": ["germinate conv1 mlp instead of wait"]}
    hosts = [host_ended(number, env, rent="low", seed=env, utility=0.1 * env, **told) for number in (1, 2) for env in (0, 1)]
    calibration = {"kind": "calibration", "step": 100, **CALIBRATION}
    events = [*updates(3), round_ended(100, "digits", 0.3), *hosts, calibration]
    make_run(root / "controller", "controller", events)
    fought = {"results": {"strong": [5, 10, 5]}, "opponents": [], "team": 2, "overflow": 0, "reward": {"kill": 0.5}, "update": 1}
    changed = {"update": 2, "name": "p1", "is_promoted": True, "reason": "it is the first", "retired": [], "against": {}}
    changed |= {"ratings": {"strong": [28.0, 1.5], "p1": [24.0, 3.0]}, "anchors": ["strong"]}
    battles = [{"kind": "round_fought", "step": 100, **fought}, {"kind": "league_changed", "step": 200, **changed}]
    arena = make_run(root / "arena", "arena", [*updates(3), *battles, calibration])
    write_replay(arena / "replays" / "evaluation-step-200.safetensors", *staged_battle(team_size=2, size=16, frames=12))
    make_run(root / "policy", "ppo", [*updates(3), calibration, {"kind": "sink_failed", "sink": "wandb", "error": "no disk"}])


def shown(capsys: pytest.CaptureFixture[str], *words: str, width: int = 120) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        assert main(["watch", "--terminal", *words]) == 0
    return capsys.readouterr().out


PARTS = {
    "grown": [
        "the first one", "baseline", "network", "├●  conv1", "blends", "█░", "0.50", "0.0500 ±0.0200", "lives of the seeds", "promising",
        "passed over: mlp is worth more", "lost 37 steps and 2.5 s", "rolled back", "epochs 1 to 4: waits", "since the first epoch",
        "FLOPs of a forward pass", "learning rate", "Shapley value", "-0.2500*", "per 1,000", "300 MiB", "250", "lifecycle",
    ],
    "controller": [
        "utility per round, by rent", "utility per round, by cell", "digits · 5-10", "hosts of round 2", "gain and rent: gain",
        "operations that the policy chose: wait", "explained variance", "entropy by head", "KL divergence", "the critic predicts",
        "0.8000 [0.6000, 1]", "blueprints", "mlp", "the policy chose it", "seeds grown and kept", "lives per second",
        "Not as advised: germinate conv1 mlp instead of wait", "share of lives decided as advised",
    ],
    "arena": [
        "win rate: strong", "parts of the reward", "ratings of the league", "evaluation-step-200", "wins", "50.0% [29.9%, 70.1%]",
        "28.0 ± 1.5", "p1 entered the league: it is the first", "anchor", "esper arena watch", "the critic predicts", "samples per second",
    ],
    "policy": ["return", "episode length", "health of the learner", "the critic predicts", "sink wandb · error no disk", "env  cue"],
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_the_terminal_shows_every_part_of_the_page(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_all(tmp_path / "runs")
    if name == "grown":
        (tmp_path / "runs" / "grown" / "config.toml").write_text("[lifecycle]\nholding_epochs = 3\n")
    text = shown(capsys, str(tmp_path / "runs" / name))
    assert [part for part in PARTS[name] if part not in text] == [], text


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_all(tmp_path / "runs")
    runs = [str(tmp_path / "runs" / name) for name in PARTS]
    for words in ([str(tmp_path / "runs")], *([run] for run in runs), runs[2:]):
        text = shown(capsys, *words, width=width)
        assert max(map(len, text.splitlines())) <= width, text


def test_a_log_without_details_of_slots_does_not_claim_that_they_are_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [{**event, "slots": []} if event["kind"] == "epoch_ended" else event for event in growth_events()]
    folder = make_run(tmp_path / "run", "growth", events)
    (folder / "config.toml").write_text('telemetry = "minimal"\n[lifecycle]\n')
    text = shown(capsys, str(folder))
    assert "Train with --telemetry normal" in text
    assert "empty" not in text


# Comparison


@pytest.mark.slow
def test_several_runs_are_compared_by_pairs_of_equal_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = [1.0, 2.0, 4.0], [2.0, 2.5, 5.5]
    for name, values, num_envs in (("small", small, 4), ("large", large, 8)):
        for seed, value in enumerate(values):
            made_ppo(tmp_path / f"{name}-{seed}", [0.0, value], seed=seed, num_envs=num_envs)
    folders = [str(tmp_path / f"{name}-{seed}") for name in ("small", "large") for seed in range(3)]
    text = shown(capsys, *folders, width=200)
    differences = [one - other for one, other in zip(large, small, strict=True)]
    half = 4.3027 * statistics.stdev(differences) / 3**0.5  # quantile of Student's distribution with two degrees of freedom
    middle = statistics.mean(differences)
    found = re.search(r"large-0 and 2 more − small-0 and 2 more +(\S+) \[(\S+), (\S+)\] +3  may be chance", text)
    assert found is not None, text
    assert [float(value) for value in found.groups()] == pytest.approx([middle, middle - half, middle + half], abs=1e-3)
    assert re.search(r"num_envs +4 +4 +4 +8 +8 +8", text)
    # Curves of one series share a scale: the lowest end stands lower than the highest one.
    curves = dict(re.findall(r"^(\S+-\d) +([▁▂▃▄▅▆▇█]+) +\S+$", text, flags=re.MULTILINE))
    assert (curves["small-0"], curves["large-2"]) == ("▁▂", "▁█")


@pytest.mark.slow
def test_a_comparison_shows_the_twins_and_says_if_runs_are_of_several_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grown = [made_growth(tmp_path / f"grown-{seed}", [1.0, 0.5], twin=[1.0, 0.75], seed=seed) for seed in (0, 1)]
    text = shown(capsys, *map(str, grown))
    assert re.search(r"twin of grown-0 +█\S+ +0.7500", text)
    assert re.search(r"− its twins +-0.2500 \[-0.2500, -0.2500\] +2  better", text)
    other = made_ppo(tmp_path / "cue", [1.0, 2.0])
    assert "runs of several kinds" in shown(capsys, str(grown[0]), str(other))


# Keys


def screen_of(*paths: Path) -> Screen:
    return Screen(Watcher(*paths, cache=paths[0].parent / "cache"), paths, has_keys=True)


def press(screen: Screen, *keys: str, height: int = 12) -> list[str]:
    """Press keys, and return the lines that the terminal shows then."""
    console = Console(width=80, height=height, file=io.StringIO())
    for key in (*keys, ""):
        screen.press(key, page=height - 2)
        view = screen.view(80)
        lines = console.render_lines(Window(screen, view), console.options.update(height=height), pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


@pytest.mark.slow
def test_keys_open_a_run_choose_runs_and_compare_them(tmp_path: Path) -> None:
    for seed in range(3):
        made_ppo(tmp_path / "runs" / f"cue-{seed}", [0.0, 1.0], seed=seed)
        os.utime(tmp_path / "runs" / f"cue-{seed}" / "events.jsonl", (1000 - seed, 1000 - seed))
    screen = screen_of(tmp_path / "runs")
    lines = press(screen)
    assert [line.split()[0] for line in lines[1:4]] == [">", "cue-1", "cue-2"]
    assert "Enter open" in lines[-1]
    assert press(screen, "down", "enter")[0].startswith("cue-1 · ppo")
    assert "Enter open" in press(screen, "r")[-1], "all runs again"
    lines = press(screen, "x", "j", "x")
    assert [line.split()[:2] for line in lines[2:4]] == [["×", "cue-1"], [">", "×"]]
    assert "c compare 2" in lines[-1]
    assert press(screen, "c")[0] == "cue-1 and cue-2"
    assert "x choose" in press(screen, "escape")[-1]
    assert not screen.is_over
    press(screen, "q")
    assert screen.is_over


@pytest.mark.slow
def test_a_page_longer_than_the_terminal_scrolls_and_opens(tmp_path: Path) -> None:
    make_all(tmp_path / "runs")
    screen = screen_of(tmp_path / "runs" / "controller")
    first = press(screen)
    assert len(first) == 12
    assert first[-1].startswith("1 to 11 of")
    assert press(screen, "down")[0] == first[1]
    assert press(screen, "home")[0] == first[0]
    count = int(first[-1].split()[4])
    assert press(screen, "end")[-1].startswith(f"{count - 10} to {count} of {count} lines")
    assert int(press(screen, "o")[-1].split()[4]) > count, "single lives and settings are shown now"
    tall = press(screen, "o", "<", "home", height=300)
    assert any(line.startswith("hosts of round 1") for line in tall), "the round before the newest"
    assert any(line.startswith("hosts of round 2") for line in press(screen, ">", height=300))


def test_the_view_of_a_run_is_made_again_only_if_something_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    folder = make_run(tmp_path / "run", "ppo", updates(2))
    screen = screen_of(folder)
    screen.view(80)
    view = screen.view(80)
    assert screen.view(80) is view
    with (folder / "events.jsonl").open("a") as log:
        log.write(json.dumps({**updates(3)[-1], "mean_return": 7.25, "time": 2.0, "run": "run", "rank": 0}) + "\n")
    assert any("7.2500" in line for line in press(screen, height=60))
    shutil.rmtree(folder)
    assert "was moved or removed" in " ".join(press(screen))


def test_keys_are_read_from_what_a_terminal_sends() -> None:
    assert keys_in("jk\x1b[A\x1bOB\x1b[6~ \r\x1b") == ["j", "k", "up", "down", "pagedown", "space", "enter", "escape"]


@pytest.mark.slow
def test_the_command_follows_keys_in_a_real_terminal_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    made_ppo(tmp_path / "runs" / "cue", [0.0, 1.0])
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
    before, said, end = termios.tcgetattr(theirs), b"", time.monotonic() + 60
    command = [sys.executable, "-m", "esper.cli.main", "watch", "--terminal", str(tmp_path / "runs")]
    keys = {b"Enter open": b"\n", b"r all runs": b"q"}  # text on the screen -> the key to press then
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        while process.poll() is None and time.monotonic() < end:
            if select.select([ours], [], [], 0.1)[0]:
                said += os.read(ours, 65536)
            for text in [text for text in keys if text in said]:
                os.write(ours, keys.pop(text))
        process.kill()
    assert process.returncode == 0, said.decode(errors="replace")
    assert keys == {}
    assert b"cue \xc2\xb7 ppo" in re.sub(rb"\x1b\[[0-9;]*m", b"", said)
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


# Help


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("watch", "[RUN_OR_FOLDER ...]"),
        ("compare", "RUN ..."),
        ("report", "RUN"),
        ("runs rm", "RUN ..."),
        ("runs export", "RUN ..."),
        ("runs tag", "RUN [TAG ...]"),
        ("runs ls", "[FOLDER]"),
        ("query", "SQL [RUN ...]"),
        ("analyse", "RUN ..."),
    ],
)
def test_help_says_where_several_runs_may_be_given_and_names_every_default(
    command: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert usage in text.splitlines()[0]
    assert "(default: )" not in text


def test_names_of_runs_are_known_to_the_watcher_of_several_folders(tmp_path: Path) -> None:
    folders = [made_ppo(tmp_path / place / "cue", [1.0]) for place in ("one", "two")]
    watcher = Watcher(*folders, cache=tmp_path / "cache")
    assert [row["id"] for row in watcher.overview()["runs"]] == [name_in_address(folder) for folder in reversed(folders)]


@pytest.mark.slow
@pytest.mark.extra("nicegui")
def test_several_runs_open_their_comparison_in_the_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from esper.dashboard import watch

    folders = [made_ppo(tmp_path / f"cue-{seed}", [1.0], seed=seed) for seed in (0, 1)]
    places: list[str] = []
    monkeypatch.setattr(watch, "_serve", lambda app, *, place, **options: places.append(place))
    watch.serve_runs(*folders)
    watch.serve_runs(folders[0])
    watch.serve_runs(tmp_path, folders[0])
    assert places == [f"#/compare/{name_in_address(folders[0])},{name_in_address(folders[1])}", "", ""]
