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
from esper.growth.lifecycle.ledger import SeedRecord, Step
from esper.growth.lifecycle.stages import Stage
from esper.intervals import wilson_interval
from esper.replay_file import write_replay
from esper.runs.catalog import open_run
from esper.runs.folder import RunError
from esper.runs.opponents import win_rates
from esper.runs.report import write_run_report
from tests.replays import staged_battle

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
    wrong = {"kind": "anomaly", "what": "value_collapse", "subject": NASTY, "value": 0.001, "limit": 1.0, "advice": "", "has_ended": False}
    warned = [{**wrong, "step": 100 * n} for n in (1, 3)]
    ended = {"kind": "run_ended", "step": 400, "status": "finished", "seconds": 75.0}
    page = write_run_report(make_run(tmp_path, "ppo", [*updates(4), checkpoint, *warned, evaluated, ended])).read_text()
    figures = dict(re.findall(r"<strong>(.*?)</strong><span>(.*?)</span>", page))
    assert next(iter(figures)) == "1.750"
    assert figures["2"] == "return in training, last 100 episodes"
    assert figures["1:15"] == "of training"
    charts = charts_of(page)
    assert charts["Return"]["training, last 100 episodes"] == ([100, 200, 300, 400], [0.5, 1.0, 1.5, 2.0])
    assert charts["Return"]["checkpoints"] == ([200], [1.25])
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


def host_ended(number: int, env: int, *, rent: str, seed: int, utility: float, task: str = "digits", **more: list[Any]) -> dict[str, Any]:
    counts = {"gain": utility + 0.1, "rent": 0.1, "utility": utility, "grown": 1, "kept": 1, "rollbacks": 0}
    return {
        "kind": "host_ended", "step": 100 * number, "time": 10.0 * number, "env": env, "fleet": 0, "round": number, "task": task,
        "host": "5-10", "seed": seed, "horizon": 3, "rent_level": rent, "rent_parameters": 0.02, "val_losses": [2.0, 1.0, 0.5],
        "twin_losses": [2.0, 1.5, 1.0], **counts, **more,
    }  # fmt: skip


def round_ended(step: int, task: str, utility: float) -> dict[str, Any]:
    counts = {"tried": 4, "kept": 1, "pruned": 3, "parameters": 400, "gain": None}
    return {
        "kind": "round_ended", "step": step, "task": task, "host": "5-10", "horizon": 3, "hosts": 2, "gain": utility + 0.1, "rent": 0.1,
        "utility": utility, "worth": 0.0, "grown": 4, "kept": 1, "rollbacks": 0, "samples": 9, "blueprints": {"mlp": counts},
        "decisions": {"wait": 7, "germinate": 4}, "alike": 0.25,
    }  # fmt: skip


def test_the_report_of_a_controller_run_shows_utility_by_rent_and_by_cell_with_intervals_over_twins(tmp_path: Path) -> None:
    # Hosts 0 and 1 share a twin, so the interval of round 1 is over the means 0.3 and 0.5, not over three hosts.
    hosts = [
        host_ended(1, 0, rent="low", seed=7, utility=0.2),
        host_ended(1, 1, rent="low", seed=7, utility=0.4),
        host_ended(1, 2, rent="low", seed=8, utility=0.5),
        host_ended(2, 0, rent="high", seed=9, utility=-0.25, task="text"),
        *(host_ended(3, env, rent="high", seed=env, utility=0.5 * env, task="text") for env in (0, 1)),
        *(host_ended(4, env, rent="high", seed=env, utility=0.5 * env, task="text") for env in (0, 1)),
    ]
    page = write_run_report(make_run(tmp_path, "controller", [*updates(3), round_ended(100, "digits", 0.3), *hosts])).read_text()
    charts = charts_of(page)
    assert charts["Utility per round, by rent"] == {"low": ([1], [0.4]), "high": ([2, 3, 4], [-0.25, 0.25, 0.25])}
    assert charts["Utility per round, by cell"] == {"digits · 5-10": ([1], [0.4]), "text · 5-10": ([2, 3, 4], [-0.25, 0.25, 0.25])}
    half = 12.7062 * 0.1  # quantile of Student's distribution with one degree of freedom, times the standard error of two means
    cells = ("3", f"+0.4000 [{0.4 - half:+.4f}, {0.4 + half:+.4f}]", "+0.4667", "+0.1000", "1.00", "1.00")
    assert "<td>digits · 5-10</td>" + "".join(f'<td class="number">{value}</td>' for value in cells) in page
    assert page.count("<polygon") == 2, "in both charts, rounds 3 and 4 have a band"
    assert page.count('stroke-width="6"') == 2, "round 1 has an interval, but no neighbour that has one"


def test_the_report_of_a_controller_run_shows_fleets_decisions_and_blueprints(tmp_path: Path) -> None:
    rounds = [round_ended(100, "digits", 0.2), round_ended(200, "text", 0.4), round_ended(200, "digits", 0.3)]
    page = write_run_report(make_run(tmp_path, "controller", [*updates(3), *rounds])).read_text()
    charts = charts_of(page)
    assert charts["Utility of a fleet"]["utility"] == ([1, 2, 3], [0.2, 0.4, 0.3]), "two fleets ended at one step"
    assert charts["Operations that the policy chose"] == {"wait": ([1, 2, 3], [7, 7, 7]), "germinate": ([1, 2, 3], [4, 4, 4])}
    assert charts["Share of lives decided as advised"]["as advised"] == ([1, 2, 3], [0.25] * 3)
    assert charts["Entropy by head"]["action"][1] == [0.5] * 3
    assert charts["KL divergence"] == {"total": ([100, 200, 300], [0.01] * 3)}, "the only head equals the total"
    assert "<strong>+0.3000</strong><span>utility, mean of the last 3 fleets</span>" in page
    cells = (12, 3, 9, 0, 0, "–", 0, 100, "–", "–")  # tried, kept, pruned, rolled back, refused, gain, cells, parameters, FLOPs, per 1,000
    assert "<td>mlp</td>" + "".join(f'<td class="number">{value}</td>' for value in cells) in page


def shown_seed(*stages: tuple[int, str, str], blueprint: str = "mlp") -> dict[str, Any]:
    """Return a seed that was kept, as the event of its host tells it."""
    seed = SeedRecord(1, "conv1", blueprint, "joint", born=1, reason="", parameters=9, flops=9, outcome="kept", ended=3)
    seed.stages += [Step(epoch, Stage[stage], why) for epoch, stage, why in stages]
    return seed.as_dict()


def test_a_host_of_a_controllers_training_opens_to_the_stages_of_its_seeds_and_to_the_steps_that_were_not_advised(tmp_path: Path) -> None:
    seeds = [shown_seed((1, "GERMINATED", "the policy chose it"), (3, "FOSSILIZED", f"it pays {NASTY}"), blueprint=NASTY)]
    host = host_ended(1, 0, rent="low", seed=7, utility=0.2, seeds=seeds, others=[f"look instead of {NASTY}", "a", "a"])
    wrong = host_ended(1, 1, rent="low", seed=7, utility=0.2, seeds=[{"stages": [1]}])
    page = write_run_report(make_run(tmp_path, "controller", [*updates(1), round_ended(100, "digits", 0.3), host, wrong])).read_text()
    details = re.search(r"<details><summary><svg.*?</details>", page, flags=re.DOTALL)
    assert details is not None
    text = re.sub(r" +", " ", unescape(re.sub(r"<[^>]*>", " ", details[0])))
    assert f"3 seed 1: {NASTY} after conv1 fossilized it pays {NASTY}" in text
    assert "+0.2000 = gain +0.3000 − rent +0.1000" in text
    assert f"Not as advised: look instead of {NASTY}; a (2 times)." in text
    assert details[0].count("<polyline") == 2, "the host and its twin"
    assert details[0].count("<circle") == 2
    assert "The log has no stages of its seeds." in page
    assert page.count("<script") == 1


def test_the_report_shows_the_calibration_of_the_critic_and_the_use_of_the_machine(tmp_path: Path) -> None:
    bins = {"predicted": [0.0, 1.0], "achieved": [0.1, 0.8], "low": [0.0, 0.6], "high": [0.2, 1.0], "steps": [50, 50]}
    used = {"cpu_cores": 1.5, "memory_bytes": 300 * 2**20}
    busy = [{**event, "collect_seconds": 2.0, "env_seconds": 0.5, "resources": used} for event in updates(2)]
    failed = {"kind": "sink_failed", "sink": NASTY, "error": "the disk is full"}
    page = write_run_report(make_run(tmp_path, "ppo", [*busy, {"kind": "calibration", "step": 100, **bins}, failed])).read_text()
    charts = charts_of(page)
    assert charts["Achieved return"] == {"achieved": ([0, 1], [0.1, 0.8]), "as predicted": ([0, 1], [0, 1])}
    assert '<td class="number">0.8000 [0.6000, 1]</td><td class="number">50</td>' in page
    assert charts["Samples per second"]["samples per second"][1] == [100, 100]
    assert charts["Seconds of an update"] == {"collecting": ([100, 200], [2, 2]), "environments": ([100, 200], [0.5, 0.5])}
    figures = {name: value for value, name in re.findall(r"<strong>(.*?)</strong><span>(.*?)</span>", page)}
    assert (figures["memory"], figures["cores in use"], figures["collecting"]) == ("300 MiB", "1.50", "2 s")
    assert f"sink {NASTY} · error the disk is full" in unescape(page)


def test_the_report_of_an_arena_run_shows_win_rates_with_intervals_ratings_and_battles(tmp_path: Path) -> None:
    fought = [
        {"kind": "round_fought", "step": 100, "update": 1, "results": {"strong": [5, 10, 5], "self": [0, 0, 0]}, "opponents": [],
         "team": 2, "overflow": 0, "reward": {"kill": 0.5}},
        {"kind": "round_fought", "step": 200, "update": 2, "results": {"strong": [15, 0, 5]}, "opponents": [], "team": 2, "overflow": 0,
         "reward": {"kill": 0.7}},
        {"kind": "round_fought", "step": 300, "update": 3, "results": {"weak": [1, 0, 1]}, "opponents": [], "team": 2, "overflow": 0,
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
        "ratings": {"strong": [28.0, 1.5], "p1": [24.0, 3.0]},
        "anchors": ["strong"],
    }
    folder = make_run(tmp_path, "arena", [*updates(2), *fought, changed])
    write_replay(folder / "replays" / "evaluation-step-200.safetensors", *staged_battle(team_size=2, size=16, frames=12))
    page = write_run_report(folder).read_text()
    charts = charts_of(page)
    rates = charts["Win rate by opponent, with 95 % intervals"]
    assert rates["strong"] == ([100, 200], [0.5, 0.75])
    assert rates["weak"] == ([300], [0.5])
    assert page.count("<polygon") >= 1, "the interval is a band"
    assert charts["Parts of the reward"]["kill"] == ([100, 200, 300], [0.5, 0.7, 0.7])
    assert charts["Ratings of the league"] == {"strong": ([200], [28]), "p1": ([200], [24])}
    cells = (20, 10, 10, "62.5% [47.0%, 75.8%]", "28.0 ± 1.5")
    assert "<td>strong</td><td>anchor</td>" + "".join(f'<td class="number">{value}</td>' for value in cells) in page
    assert "<td>entered</td>" in page
    assert "<td>evaluation-step-200</td>" in page
    assert "wins</td>" in page


def test_rounds_with_few_battles_are_joined_in_the_curve_of_win_rates(tmp_path: Path) -> None:
    few = {"opponents": [], "team": 2, "overflow": 0, "reward": {}, "results": {"strong": [1, 0, 3]}}
    events = [{"kind": "round_fought", "step": 100 * number, "update": number, **few} for number in range(1, 13)]
    found = win_rates(open_run(make_run(tmp_path, "arena", events), cache=tmp_path / "cache").index, most_players=5, most_points=40)
    assert [(line.name, line.steps, line.rates) for line in found] == [("strong", [500, 1200], [0.25, 0.25])], (
        "20 battles, then the other 28"
    )
    assert found[0].low[0] == pytest.approx(wilson_interval(5, 20).low)


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
