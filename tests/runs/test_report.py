"""The report of ppo, controller and arena runs: figures from the events, escaped, without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from esper.cli.main import main
from esper.runs.folder import RunError
from esper.runs.report import write_run_report

NASTY = "<script>alert('x')</script>"
KEYS = {"ppo": 'env = "cue"', "controller": "[domain]", "arena": "[selfplay]", "growth": "[lifecycle]"}
UPDATE = {
    "episodes": 5, "mean_length": 9.0, "policy_loss": 0.1, "value_loss": 0.5, "entropy": {"action": 0.5}, "kl": {"action": 0.01},
    "total_kl": 0.01, "clip_fraction": 0.1, "ratio_max": 1.5, "explained_variance": 0.6, "grad_norm": 0.5, "learning_rate": 1e-3,
    "gradient_steps": 8, "skipped": 0, "steps_per_second": 100.0,
}  # fmt: skip


def make_run(folder: Path, kind: str, events: list[dict[str, Any]], *, has_begun: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(f"# {NASTY}\n{KEYS[kind]}\n")
    start = {
        "kind": "run_started",
        "step": 0,
        "total_steps": 400,
        "steps_per_update": 100,
        "env_id": NASTY,
        "num_envs": 4,
        "device": "cpu",
        "parameters": 9,
    }
    first = [{"kind": "header", "schema": 1, "esper": "0.1.0"}, *([start] if has_begun else [])]
    stamp = {"time": 1.0, "run": "run", "rank": 0, "step": 0}
    (folder / "events.jsonl").write_text(
        "".join(json.dumps({"kind": event["kind"], **stamp, **event}) + "\n" for event in [*first, *events])
    )
    return folder


def updates(count: int) -> list[dict[str, Any]]:
    return [
        {"kind": "update", "update": number, "step": 100 * number, "mean_return": 0.5 * number, **UPDATE} for number in range(1, count + 1)
    ]


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    """Return the lines of every chart, by its title and their names."""
    found = re.findall(r'data-chart="([^"]*)">(?:<figcaption>(.*?)</figcaption>)?', page)
    return {
        unescape(title): {line["name"]: (line["x"], line["y"]) for line in json.loads(unescape(data))["lines"]} for data, title in found
    }


def test_the_report_of_a_ppo_run_shows_the_numbers_of_its_events(tmp_path: Path) -> None:
    evaluated = {"kind": "evaluated", "step": 400, "episodes": 16, "mean_return": 1.75, "mean_length": 8.0}
    checkpoint = {"kind": "checkpoint_evaluated", "step": 200, "episodes": 16, "mean_return": 1.25, "mean_length": 8.0}
    warned = [
        {"kind": "warned", "step": 100 * n, "diagnostic": "value_collapse", "subject": NASTY, "value": 0.001, "threshold": 1}
        for n in (1, 3)
    ]
    ended = {"kind": "run_ended", "step": 400, "status": "finished", "seconds": 75.0}
    page = write_run_report(make_run(tmp_path, "ppo", [*updates(4), checkpoint, *warned, evaluated, ended])).read_text()
    figures = dict(re.findall(r"<strong>(.*?)</strong><span>(.*?)</span>", page))
    assert next(iter(figures)) == "1.750"
    assert figures["2.000"] == "return in training, last 100 episodes"
    assert figures["1:15"] == "of training"
    charts = charts_of(page)
    assert charts[""]["training, last 100 episodes"] == ([100, 200, 300, 400], [0.5, 1.0, 1.5, 2.0])
    assert charts[""]["evaluation of checkpoints"] == ([200], [1.25])
    assert charts["Explained variance"]["explained variance"][1] == [0.6] * 4
    assert "<td>value collapse</td>" in page
    assert '<td class="number">2</td><td class="number">100</td><td class="number">300</td>' in page
    assert "has finished after 400 steps" in page


def test_the_report_escapes_names_and_loads_nothing(tmp_path: Path) -> None:
    page = write_run_report(make_run(tmp_path / "a<b>", "ppo", updates(2))).read_text()
    assert page.count("<script") == 1
    assert "<title>a&lt;b&gt;</title>" in page
    assert not re.search(r"https?://|@import|src=", page)
    assert NASTY in unescape(page)


def test_the_report_of_a_controller_run_shows_utility_by_cell_and_blueprints(tmp_path: Path) -> None:
    def ended(step: int, task: str, utility: float) -> dict[str, Any]:
        counts = {"tried": 4, "kept": 1, "pruned": 3, "parameters": 400, "gain": None}
        return {
            "kind": "round_ended", "step": step, "task": task, "host": "5-10", "horizon": 3, "hosts": 2, "gain": utility + 0.1, "rent": 0.1,
            "utility": utility, "worth": 0.0, "grown": 4, "kept": 1, "rollbacks": 0, "samples": 9, "blueprints": {"mlp": counts},
        }  # fmt: skip

    rounds = [ended(100, "digits", 0.2), ended(200, "text", 0.4), ended(300, "digits", 0.3)]
    page = write_run_report(make_run(tmp_path, "controller", [*updates(3), *rounds])).read_text()
    chart = charts_of(page)["Utility of a round: gain over the twin minus rent"]
    assert chart["all rounds"] == ([100, 200, 300], [0.2, 0.4, 0.3])
    assert chart["digits, 5-10"] == ([100, 300], [0.2, 0.3])
    assert "<strong>+0.3000</strong><span>utility, mean of the last 3 rounds</span>" in page
    cells = (12, 3, 9, 0, 0, "–", 0, 100, "–", "–")  # tried, kept, pruned, rolled back, refused, gain, cells, parameters, FLOPs, per 1,000
    assert "<td>mlp</td>" + "".join(f'<td class="number">{value}</td>' for value in cells) in page


def test_the_report_of_an_arena_run_shows_win_rates_by_opponent(tmp_path: Path) -> None:
    fought = [
        {"kind": "round_fought", "step": 100, "update": 1, "results": {"strong": [1, 2, 1], "self": [0, 0, 0]}, "opponents": [], "team": 2,
         "overflow": 0, "reward": {"kill": 0.5}},
        {"kind": "round_fought", "step": 200, "update": 2, "results": {"strong": [3, 0, 1]}, "opponents": [], "team": 2, "overflow": 0,
         "reward": {"kill": 0.7}},
    ]  # fmt: skip
    changed = {
        "kind": "league_changed",
        "step": 200,
        "update": 2,
        "name": "p1",
        "is_promoted": True,
        "reason": NASTY,
        "retired": [],
        "against": {},
    }
    page = write_run_report(make_run(tmp_path, "arena", [*updates(2), *fought, changed])).read_text()
    charts = charts_of(page)
    assert charts["Win rate by opponent; a draw is half a win"]["strong"] == ([100, 200], [0.5, 0.75])
    assert charts["Parts of the reward"]["kill"] == ([100, 200], [0.5, 0.7])
    cells = (4, 2, 2, "62.5% [30.6%, 86.3%]", "–")
    assert "<td>strong</td><td></td>" + "".join(f'<td class="number">{value}</td>' for value in cells) in page
    assert "<td>promoted</td>" in page


def test_a_diagnostic_out_of_its_range_says_what_to_do(tmp_path: Path) -> None:
    sick = [{**event, "total_kl": 0.5, "explained_variance": 0.0} for event in updates(12)]
    page = write_run_report(make_run(tmp_path, "ppo", sick)).read_text()
    assert '<td class="trouble">the policy changes too much per update; lower learning_rate or num_epochs</td>' in page
    assert '<td class="fair">the critic explains little' in page
    assert '<td class="good">entropy of action</td>' in page


def test_a_run_without_updates_has_a_report_and_one_that_has_not_begun_has_none(tmp_path: Path) -> None:
    assert "There was no update yet." in write_run_report(make_run(tmp_path / "begun", "ppo", [])).read_text()
    with pytest.raises(RunError, match="the training has not begun"):
        write_run_report(make_run(tmp_path / "new", "ppo", [], has_begun=False))
    with pytest.raises(RunError, match="esper report"):
        write_run_report(make_run(tmp_path / "grown", "growth", []))


def test_the_command_writes_the_report_of_a_run_and_explains_wrong_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", "ppo", updates(2))
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/run/report.html\n"
    assert main(["report", str(tmp_path / "gone")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "there is no run in" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_imports_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    make_run(tmp_path, "ppo", updates(2))
    code = f"""import sys
from esper.cli.main import main
main(["report", {str(tmp_path)!r}])
print({{"torch", "matplotlib"}} & set(sys.modules))"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.endswith("set()\n")
