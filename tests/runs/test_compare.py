"""Comparing runs: groups of seeds, paired differences, differing settings, and the plot."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from esper.intervals import student_interval
from esper.runs import RunError, compare_runs
from esper.runs.folder import CONFIG, GROW
from tests.runs.made import made_growth, made_ppo


def test_runs_that_differ_only_in_the_seed_form_a_group_with_an_interval_over_seeds(tmp_path: Path) -> None:
    for seed, loss in enumerate((0.5, 0.6, 0.9)):
        made_growth(tmp_path / "small" / f"seed-{seed}", [1.0, loss], seed=seed, tensorboard=seed == 1)
    made_growth(tmp_path / "other", [1.0, 0.4], learning_rate=0.1)
    comparison = compare_runs([tmp_path / "small", tmp_path / "other"])
    assert [(group.name, [run.seed for run in group.runs]) for group in comparison.groups] == [("small", [0, 1, 2]), ("other", [0])]
    assert comparison.groups[0].mean == student_interval([0.5, 0.6, 0.9])
    assert comparison.groups[1].mean is None
    assert comparison.differing == {"learning_rate": {"small": 0.001, "other": 0.1}}


def test_groups_are_compared_by_pairs_of_equal_seeds(tmp_path: Path) -> None:
    # The spread over seeds is large and the differences are equal: only the pairing shows that one setting is better.
    for seed, loss in enumerate((0.2, 0.5, 0.8)):
        made_growth(tmp_path / "a" / f"seed-{seed}", [1.0, loss], seed=seed)
        made_growth(tmp_path / "b" / f"seed-{seed}", [1.0, loss - 0.01 * (1 + 0.1 * seed)], seed=seed, learning_rate=0.1)
    made_growth(tmp_path / "b" / "seed-9", [1.0, 5.0], seed=9, learning_rate=0.1)  # has no partner
    (pair,) = compare_runs([tmp_path / "a", tmp_path / "b"]).paired
    assert (pair.ours, pair.theirs, pair.seeds) == ("b", "a", [0, 1, 2])
    assert pair.differences == pytest.approx([-0.01, -0.011, -0.012])
    assert pair.interval is not None
    assert pair.interval.high < 0
    assert pair.verdict(better="down") == "better"


def test_grown_runs_are_compared_with_their_twins_over_seeds(tmp_path: Path) -> None:
    for seed, (grown, twin) in enumerate([(0.5, 0.6), (0.7, 0.9), (0.4, 0.4)]):
        made_growth(tmp_path / f"seed-{seed}", [1.0, grown], twin=[1.0, twin], seed=seed)
    comparison = compare_runs([tmp_path])
    (pair,) = comparison.twins
    assert pair.differences == pytest.approx([-0.1, -0.2, 0.0])
    assert pair.interval == student_interval(pair.differences)
    assert pair.verdict(better="down") == "may be chance"
    (pair,) = compare_runs([tmp_path], figure="test accuracy").twins
    assert pair.differences == pytest.approx([0.1, 0.1, 0.1])


def test_two_runs_of_one_seed_are_one_sample(tmp_path: Path) -> None:
    for name, seed, value in (("a", 0, 1.0), ("again", 0, 2.0), ("b", 1, 5.0)):
        made_ppo(tmp_path / name, [0.0, value], seed=seed)
    (group,) = compare_runs([tmp_path]).groups
    assert group.by_seed() == {0: 1.5, 1: 5.0}
    assert group.mean == student_interval([1.5, 5.0])


def test_growth_runs_of_python_with_equal_seeds_are_not_one_group(tmp_path: Path) -> None:
    for name, loss in (("small", 0.5), ("large", 0.4)):
        (made_growth(tmp_path / name, [1.0, loss]) / GROW).unlink()
    comparison = compare_runs([tmp_path / "small", tmp_path / "large"])
    assert [group.name for group in comparison.groups] == ["small", "large"]
    assert comparison.paired[0].estimate == pytest.approx(-0.1)


def test_runs_that_have_not_ended_are_compared_at_the_last_common_step(tmp_path: Path) -> None:
    made_ppo(tmp_path / "done", [1.0, 2.0, 3.0, 4.0])
    made_ppo(tmp_path / "half", [1.5, 2.5], seed=1, status="stopped")
    comparison = compare_runs([tmp_path / "done", tmp_path / "half"])
    assert {run.name: run.value for run in comparison.runs} == {"done": 2.0, "half": 2.5}
    assert "half is stopped" in comparison.notes[0]
    assert "at step 200" in comparison.notes[0]


def test_any_number_of_events_can_be_compared_and_a_wrong_name_is_answered_with_the_right_one(tmp_path: Path) -> None:
    made_growth(tmp_path / "run", [1.0, 0.5])
    assert compare_runs([tmp_path / "run"], figure="epoch_ended/train_loss").runs[0].value == 0.5
    with pytest.raises(RunError, match="did you mean 'test accuracy'"):
        compare_runs([tmp_path / "run"], figure="test acuracy")


def test_runs_of_several_kinds_and_folders_without_runs_are_refused(tmp_path: Path) -> None:
    made_growth(tmp_path / "runs" / "grown", [1.0])
    made_ppo(tmp_path / "runs" / "cue", [1.0])
    with pytest.raises(RunError, match=r"several kinds \(ppo, growth\)"):
        compare_runs([tmp_path / "runs"])
    with pytest.raises(RunError, match="there is no such folder"):
        compare_runs([tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="it holds no run"):
        compare_runs([tmp_path / "empty"])


def test_a_run_without_events_is_compared_as_having_no_value(tmp_path: Path) -> None:
    made_ppo(tmp_path / "a", [1.0])
    made_ppo(tmp_path / "b", [1.0], seed=1)
    os.unlink(tmp_path / "b" / "events.jsonl")
    comparison = compare_runs([tmp_path / "a", tmp_path / "b"])
    assert [run.value for run in comparison.runs] == [1.0, None]
    assert "b" in comparison.notes[-1]
    assert str(comparison)


def test_the_text_shows_figures_settings_and_differences(tmp_path: Path) -> None:
    for seed in range(2):
        made_growth(tmp_path / "a" / f"seed-{seed}", [1.0, 0.5 + seed], seed=seed)
        made_growth(tmp_path / "b" / f"seed-{seed}", [1.0, 0.25 + seed], seed=seed, learning_rate=0.1)
    text = " ".join(str(compare_runs([tmp_path / "a", tmp_path / "b"])).split())
    assert "learning_rate 0.001 0.1" in text
    assert "a/seed-0 0 0.5" in text
    assert "b − a 2 -0.25 [-0.25, -0.25] better" in text


@pytest.mark.slow
def test_the_plot_has_a_line_for_every_run_and_the_names_of_the_groups(tmp_path: Path) -> None:
    for seed in range(2):
        made_ppo(tmp_path / "many" / f"seed-{seed}", [0.0, 1.0, 2.0 + seed], seed=seed)
    made_ppo(tmp_path / "one", [0.0, 3.0], num_envs=2)
    comparison = compare_runs([tmp_path / "many", tmp_path / "one"])
    comparison.plot(tmp_path / "plot.svg")
    svg = (tmp_path / "plot.svg").read_text()
    ElementTree.fromstring(svg)
    assert svg.count("stroke: #0072b2") > 2, "two runs and their mean"
    assert "stroke: #d55e00" in svg
    comparison.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RunError, match=r"name a \.png, \.svg or \.pdf file"):
        comparison.plot(tmp_path / "plot.txt")
    assert sorted(path.name for path in tmp_path.glob("*plot*")) == ["plot.png", "plot.svg"]


def test_without_matplotlib_a_plot_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_ppo(tmp_path / "one", [0.0, 3.0])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RunError, match="a plot needs matplotlib; install it with"):
        compare_runs([tmp_path / "one"]).plot(tmp_path / "plot.svg")


def test_a_damaged_config_is_no_run(tmp_path: Path) -> None:
    made_ppo(tmp_path / "a", [1.0])
    (tmp_path / "a" / CONFIG).write_text("env = ")
    with pytest.raises(RunError, match="it holds no run"):
        compare_runs([tmp_path / "a"])
