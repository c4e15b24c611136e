"""Run every example and the notebook, and check that each shows what its header says."""

from __future__ import annotations

import base64
import copy
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.notebook import execute
from tests.processes import Process

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
STORY = EXAMPLES / "story_of_a_growth.ipynb"
MOST_LINES = 80
MOST_BYTES_OF_FIGURES = 100_000


def run(name: str, folder: Path) -> str:
    """Run an example in an empty folder; return its output."""
    process = Process(_run_script, str(EXAMPLES / f"{name}.py"), cwd=folder)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert not list(folder.iterdir()), "an example leaves nothing behind"
    return output


def _run_script(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


def numbers(pattern: str, output: str) -> tuple[float, ...]:
    """Return the groups of the first match as numbers."""
    found = re.search(pattern, output)
    assert found is not None, output
    return tuple(float(group.replace(",", "")) for group in found.groups())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_is_short_and_its_header_has_the_command(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    header = text.split('"""')[1]
    assert f"\n    python examples/{script.name}\n" in header
    assert "esper.growth." not in text, "examples import from the roots of packages"


def test_every_example_has_a_test_that_runs_it() -> None:
    run_here = set(re.findall(r'run\("(\w+)", tmp_path\)', Path(__file__).read_text()))
    assert run_here == {script.stem for script in SCRIPTS}


@pytest.mark.slow
def test_grow_your_model_grows_and_lowers_the_loss(tmp_path: Path) -> None:
    output = run("grow_your_model", tmp_path)
    before, after = numbers(r"validation loss ([\d.]+) → ([\d.]+)", output)
    assert after < 0.2 * before
    host, grown = numbers(r"parameters ([\d,]+) -> ([\d,]+)", output)
    assert grown > host
    assert "loaded again, it is the same: True" in output


@pytest.mark.slow
@pytest.mark.extra
def test_own_training_loop_keeps_seeds_and_bakes_them(tmp_path: Path) -> None:
    output = run("own_training_loop", tmp_path)
    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", output)]
    assert losses[-1] < 0.7 * losses[0]
    assert re.search(r"epoch \d+ +kept", output)
    (host,), (grown,) = numbers(r"validation loss \S+  (\d+) parameters", output), numbers(r"after bake\(\): (\d+) parameters", output)
    assert grown > host


@pytest.mark.slow
@pytest.mark.extra
def test_own_blueprint_fits_products_better_than_an_mlp(tmp_path: Path) -> None:
    output = run("own_blueprint", tmp_path)
    (mlp,), (product,) = (numbers(rf"{name}: kept 2 of 2 .*→ ([\d.]+)", output) for name in ("mlp", "product"))
    assert product < 0.5 * mlp


@pytest.mark.slow
@pytest.mark.extra
def test_own_controller_keeps_what_contributes_more_than_its_rent(tmp_path: Path) -> None:
    output = run("own_controller", tmp_path)
    judged = re.findall(r" (kept|pruned) .* it contributes at least (\S+), and its rent is ([\d.]+\d)", output)
    assert judged
    assert all((outcome == "kept") == (float(low) > float(rent)) for outcome, low, rent in judged)
    assert re.search(r"one at a time: kept [1-9]", output)
    assert "never: nothing was grown" in output


@pytest.mark.slow
@pytest.mark.extra
def test_ppo_memory_is_right_with_memory_and_guesses_without(tmp_path: Path) -> None:
    with_memory, without = numbers(r"([\d.]+)% with an LSTM, ([\d.]+)% without memory", run("ppo_memory", tmp_path))
    assert with_memory > 90
    assert without < 40


@pytest.mark.slow
@pytest.mark.extra
def test_own_environment_is_learned_in_both_forms(tmp_path: Path) -> None:
    output = run("own_environment", tmp_path)
    for name in ("PointEnv", "PointBatch"):
        before, after = numbers(rf"{name}: mean return (-[\d.]+) before the training, (-[\d.]+) after it", output)
        assert after > 0.2 * before


@pytest.mark.slow
@pytest.mark.extra
def test_train_a_controller_raises_its_return_and_decides(tmp_path: Path) -> None:
    output = run("train_a_controller", tmp_path)
    returns = [float(value) for value in re.findall(r"mean return (\S+) nats", output)]
    assert len(returns) == 16
    assert returns[-1] > returns[0] + 0.05
    assert "learned on a host of 4-8-16 channels: " in output


@pytest.mark.slow
@pytest.mark.extra
def test_arena_selfplay_sends_a_past_self_to_the_league(tmp_path: Path) -> None:
    output = run("arena_selfplay", tmp_path)
    assert re.search(r"^update-2 +best", output, re.MULTILINE)
    assert sum(numbers(r"random bot: (\d+) won, (\d+) drawn, (\d+) lost", output)) == 16


@pytest.mark.slow
@pytest.mark.extra("lightning")
def test_lightning_callback_grows_the_module(tmp_path: Path) -> None:
    loss, before, after = numbers(r"validation loss ([\d.]+), parameters ([\d,]+) -> ([\d,]+)", run("lightning_callback", tmp_path))
    assert loss < 0.5
    assert after > before


@pytest.mark.slow
@pytest.mark.extra("transformers", "accelerate")
def test_huggingface_trainer_grows_the_transformer(tmp_path: Path) -> None:
    output = run("huggingface_trainer", tmp_path)
    (first,), (last,) = numbers(r"loss before +([\d.]+)", output), numbers(r"loss after +([\d.]+)", output)
    assert last < 0.2 * first
    before, after = numbers(r"parameters ([\d,]+) -> ([\d,]+)", output)
    assert after > before


# The notebook


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def printed(notebook: dict[str, Any]) -> str:
    return "".join("".join(output["text"]) for output in outputs(notebook) if output["output_type"] == "stream")


def test_the_notebook_has_small_saved_outputs() -> None:
    notebook = json.loads(STORY.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    figures = [output["data"]["image/png"] for output in outputs(notebook) if output["output_type"] == "display_data"]
    assert len(figures) == 2
    assert sum(len(base64.b64decode(figure)) for figure in figures) < MOST_BYTES_OF_FIGURES
    assert "test accuracy" in printed(notebook)


@pytest.mark.slow
@pytest.mark.extra
def test_the_notebook_tells_of_a_seed_that_is_kept_and_one_that_is_pruned() -> None:
    saved = json.loads(STORY.read_text())
    notebook = copy.deepcopy(saved)
    names = execute(notebook)
    assert sorted(entry.outcome for entry in names["grower"].ledger.seeds) == ["kept", "pruned"]
    assert "while the seeds are in the shadow: True" in printed(notebook)
    assert names["losses"][-1] < names["twin_losses"][-1]
    assert len(outputs(notebook)) == len(outputs(saved)), "the saved outputs are those of these cells"
