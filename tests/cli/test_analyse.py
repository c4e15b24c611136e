"""`esper analyse`: blueprints and seeds of runs, finished and not, of tasks and of the user's code; mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from esper.cli.main import main
from esper.growth.run import MODEL
from esper.runs.analysis import ANALYSIS, read_analysis
from esper.runs.folder import GROW
from tests.commands import assert_explains, last_line
from tests.runs.made import made_growth, made_ppo

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

CODE = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

def make_loaders():
    inputs = torch.randn(240, 6)
    targets = (inputs[:, :3] * inputs[:, 3:]).argmax(dim=1)
    batches = list(zip(inputs.split(16), targets.split(16)))
    return batches[:10], batches[10:]
"""
GROW_OWN = ["grow", "--model", "own:make_model", "--data", "own:make_loaders", "--controller", "schedule", "--threads", "1"]
GROW_OWN += ["--device", "cpu", "--rent.parameters", "0", "--rent.flops", "0", "--learning-rate", "0.02"]


@pytest.fixture(name="run")
def grown_run(capsys: pytest.CaptureFixture[str]) -> Path:
    Path("own.py").write_text(CODE)
    assert main([*GROW_OWN, "--epochs", "6", "--run", "run"]) == 0
    capsys.readouterr()
    return Path("run")


@pytest.mark.slow
def test_the_seeds_of_the_users_own_model_are_measured_and_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyse", "run", "--dry-run"]) == 0
    assert "would measure 2 seeds (1, 3) with 4 sets of them on 5 validation batches" in " ".join(capsys.readouterr().out.split())
    assert not (run / ANALYSIS).exists()
    assert main(["analyse", "run", "--json"]) == 0
    output = capsys.readouterr().out
    result, found = last_line(output), read_analysis(run)
    assert found is not None
    assert (found.epoch, found.batches, [seed.name for seed in found.seeds]) == (6, 5, ["1", "3"])
    assert [measure.name for measure in found.measures] == ["loss", "accuracy"]
    assert result["analysis"]["measures"][0]["with_all"] == found.measures[0].with_all
    assert result["blueprints"][0]["tried"] == 2
    assert "written to run/analysis.json" in output
    assert main(["report", "run"]) == 0
    page = (run / "report.html").read_text()
    assert "Shapley values of the seeds" in page
    assert str(found.measures[0].shapley["1"]) in page


@pytest.mark.slow
def test_living_seeds_of_a_run_that_has_not_ended_come_from_its_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyse", "run", "--batches", "2"]) == 0
    finished = read_analysis(run)
    (run / MODEL).unlink()
    assert main(["analyse", "run", "--batches", "2"]) == 0
    found = read_analysis(run)
    assert found is not None
    assert finished is not None
    assert found.batches == 2
    assert found.measures[0].shapley["1"].estimate == pytest.approx(finished.measures[0].shapley["1"].estimate, rel=1e-4)
    # In the checkpoint of the third epoch, the seeds are still on trial.
    capsys.readouterr()
    assert main([*GROW_OWN, "--epochs", "3", "--run", "young"]) == 0
    (Path("young") / MODEL).unlink()
    assert main(["analyse", "young"]) == 0
    young = read_analysis("young")
    assert young is not None
    assert {(seed.outcome, young.epoch) for seed in young.seeds} == {("living", 3)}


@pytest.mark.slow
def test_code_that_is_gone_is_explained_and_the_blueprints_are_shown(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own.py").rename("elsewhere.py")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not Path(path, "own.py").exists()])
    sys.modules.pop("own", None)
    assert main(["analyse", "run"]) == 2
    told = capsys.readouterr()
    assert "the model or data of the run cannot be made again: --model: there is no module 'own'" in told.err
    assert "mlp" in told.out
    (run / GROW).unlink()
    assert main(["analyse", "run"]) == 2
    assert "was started from Python" in capsys.readouterr().err
    assert main(["analyse", "run", "--blueprints-only"]) == 0


def test_runs_without_seeds_and_folders_without_runs_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    made_ppo(Path("policy"), [1.0])
    assert_explains(["analyse", "policy"], "policy is a ppo run, which has no seeds; esper analyse is about seeds", capsys)
    assert_explains(["analyse", "nothing"], "there is no folder nothing", capsys)
    Path("empty").mkdir()
    assert_explains(["analyse", "empty"], "there is no run in empty", capsys)
    assert_explains(["analyse"], "name a run", capsys)
    assert_explains(["analyse", "policy", "--groups", "1"], "at least 2 groups", capsys)


def test_several_runs_are_counted_together_and_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        made_growth(Path("all") / name, [1.0, 0.9])
    made_ppo(Path("all/policy"), [1.0])
    assert main(["analyse", "all", "--json"]) == 0
    output = capsys.readouterr().out
    assert "no seed was tried in these 2 runs" in output
    assert last_line(output) == {"runs": ["all/a", "all/b"], "blueprints": []}
