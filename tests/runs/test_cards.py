"""The card beside a model, controller, player or policy: what it is, how it was made, figures, how to load it."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import esper
from esper.experiment import GrowTaskConfig, grow_task
from esper.growth import Grower
from esper.growth.lifecycle.stages import Fossilize, Germinate
from esper.runs.cards import MARK, write_card
from tests.growth.builders import Script, grow_small, make_host, make_loop
from tests.runs.test_report import NASTY, make_run, round_ended, updates


def test_the_card_of_a_policy_says_how_it_was_made_and_its_evaluation(tmp_path: Path) -> None:
    evaluated = {"kind": "evaluated", "step": 400, "episodes": 16, "mean_return": 1.75, "mean_length": 8.0}
    ended = {"kind": "run_ended", "step": 400, "status": "finished", "seconds": 75.0}
    path = write_card(make_run(tmp_path / "run", "ppo", [*updates(4), evaluated, ended]))
    assert path == tmp_path / "run/policy.md"
    text = path.read_text()
    assert "- made by: `esper ppo train cue --config config.toml`" in text
    assert "- mean return of the best checkpoint: 1.750 in 16 episodes" in text
    assert "- state: finished, 1:15 of training" in text
    assert f"torch {importlib.metadata.version('torch')}" in text
    assert f'policy = load_policy("{tmp_path}/run")' in text


def test_the_card_of_a_player_gives_its_win_rate(tmp_path: Path) -> None:
    evaluated = {"kind": "evaluated", "step": 400, "episodes": 128, "mean_return": 0.625, "mean_length": 8.0}
    path = write_card(make_run(tmp_path, "arena", [*updates(4), evaluated]))
    assert path is not None
    assert path.name == "player.md"
    assert "- win rate of the best checkpoint: 62.5% in 128 battles" in path.read_text()
    assert "- state: not finished" in path.read_text()


def test_the_card_of_a_controller_gives_its_utility_over_the_twins_under_its_advisor(tmp_path: Path) -> None:
    path = write_card(make_run(tmp_path, "controller", [round_ended(100, "digits", 0.2), round_ended(200, "text", 0.4)]))
    assert path is not None
    text = path.read_text()
    assert "trained by PPO on the lives of hosts: digits with 5 hosts, text with 5 hosts" in text
    assert "- mean utility over the twins, last 2 fleets: +0.3000 (gain +0.4000, rent +0.1000)" in text
    assert "the heuristic or an ensemble" in " ".join(text.split())
    assert "esper controller compare" not in text


def test_names_in_a_card_are_no_markup(tmp_path: Path) -> None:
    path = write_card(make_run(tmp_path / "a<b>*c*", "controller", updates(1)))
    assert path is not None
    assert "# a\\<b\\>\\*c\\*" in path.read_text()
    assert NASTY not in path.read_text()


def test_a_card_replaces_an_older_one_but_no_file_of_the_user(tmp_path: Path) -> None:
    run = make_run(tmp_path, "ppo", updates(1))
    assert write_card(run) is not None
    assert write_card(run) is not None
    (run / "policy.md").write_text("my notes\n")
    assert write_card(run) is None
    assert (run / "policy.md").read_text() == "my notes\n"


@pytest.mark.slow
def test_grow_writes_a_card_with_the_kept_seeds_and_the_sha256_of_the_model(tmp_path: Path) -> None:
    grown = grow_small(run=tmp_path / "run")
    text = (tmp_path / "run/model.md").read_text()
    assert text.startswith(MARK)
    assert f"- validation accuracy: {grown.metrics['accuracy']:.2%}" in text
    assert f"kept {grown.ledger.count('kept')} of 1" in text
    assert "it is unknown how much of this is due to growth" in text
    assert re.search(r"sha256 [0-9a-f]{64}", text)
    assert "esper.grow(model, train_loader, val_loader" in text


@pytest.mark.slow
def test_the_code_on_the_card_of_a_task_loads_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = grow_task(GrowTaskConfig(task="digits", epochs=1, twin=True, threads=1), tmp_path / "run")
    text = (result.folder / "model.md").read_text()
    assert "- validation loss against the twin: " in text
    assert "- made by: `esper grow --config grow.toml`" in text
    assert "trained without growth" in (result.folder / "twin/model.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert code is not None
    (tmp_path / "load.py").write_text(code[1])
    monkeypatch.chdir(result.folder)
    loaded = runpy.run_path(str(tmp_path / "load.py"))["model"]
    again = esper.load(result.folder, model=esper.tasks.load_task("digits").make_host("starved"))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in loaded.state_dict().items())


@pytest.mark.slow
def test_a_model_that_is_saved_outside_of_a_run_has_a_card_beside_it(tmp_path: Path) -> None:
    grown = grow_small()
    grown.save(tmp_path / "net.safetensors")
    text = (tmp_path / "net.md").read_text()
    digest = hashlib.sha256((tmp_path / "net.safetensors").read_bytes()).hexdigest()
    assert digest in text
    assert f"{grown.host.parameters + grown.added.parameters:,}" in text
    assert "| mlp |" in text
    assert 'esper.load("net.safetensors", model=model)' in text
    (tmp_path / "net.md").write_text("mine")
    grown.save(tmp_path / "net.safetensors")
    assert (tmp_path / "net.md").read_text() == "mine"


def baked_by_loop(*, by_slotted: bool = False) -> tuple[nn.Module, Grower]:
    """Grow a model in a loop of its own: one seed is kept, another still lives when the model is baked."""
    loop = make_loop(
        Script(
            {
                0: [Germinate(slot="first", reason="test", blueprint="mlp")],
                3: [Fossilize(slot="first", reason="test"), Germinate(slot="second", reason="test", blueprint="norm")],
            }
        )
    )
    loop.epoch(epochs=4)
    return loop.slotted.bake() if by_slotted else loop.grower.bake(), loop.grower


@pytest.mark.slow
@pytest.mark.parametrize("by_slotted", [False, True])
def test_esper_save_writes_the_card_of_a_model_that_a_grower_has_grown(by_slotted: bool, tmp_path: Path) -> None:
    model, grower = baked_by_loop(by_slotted=by_slotted)
    esper.save(model, tmp_path / "net.safetensors")
    text = (tmp_path / "net.md").read_text()
    assert "# Host: kept 1 of 2 seeds" in text
    assert f"- validation loss after the first and the last epoch: {grower.history.val_losses[0]:.4f} → " in text
    assert f"- parameters: {sum(parameter.numel() for parameter in model.parameters() if parameter.is_floating_point()):,} (" in text
    assert re.search(r"\| first \| mlp \|.*\| kept \|", text)
    assert re.search(r"\| second \| norm \|.*\| pruned \|.*not fossilized when the model was baked", text)
    assert [seed.outcome for seed in grower.ledger.seeds] == ["kept", "pruned"]
    assert hashlib.sha256((tmp_path / "net.safetensors").read_bytes()).hexdigest() in text


@pytest.mark.slow
def test_esper_save_leaves_the_card_out_if_asked_to_and_never_replaces_a_file_of_the_user(tmp_path: Path) -> None:
    model, _ = baked_by_loop()
    esper.save(model, tmp_path / "net.safetensors", card=False)
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]
    (tmp_path / "net.md").mkdir()
    esper.save(model, tmp_path / "net.safetensors")
    (tmp_path / "other.md").write_text("mine")
    esper.save(model, tmp_path / "other.safetensors")
    assert (tmp_path / "other.md").read_text() == "mine"


@pytest.mark.slow
def test_the_card_of_a_loaded_or_copied_model_lists_its_seeds_and_claims_no_training(tmp_path: Path) -> None:
    model, _ = baked_by_loop()
    esper.save(model, tmp_path / "net.safetensors", card=False)
    loaded = esper.load(tmp_path / "net.safetensors", model=make_host())
    for name, other in (("loaded", loaded), ("copied", copy.deepcopy(model))):
        esper.save(other, tmp_path / f"{name}.safetensors")
        text = (tmp_path / f"{name}.md").read_text()
        assert "- seeds: 1\n" in text
        assert "| first | mlp | " in text
        assert "validation" not in text
        assert "made by" not in text


def test_a_model_that_is_not_baked_has_no_card(tmp_path: Path) -> None:
    esper.save(make_host(), tmp_path / "plain.safetensors")
    loop = make_loop(Script({0: [Germinate(slot="first", reason="test", blueprint="mlp")]}))
    esper.save(loop.grower, tmp_path / "growing.safetensors")
    esper.save(loop.slotted, tmp_path / "slotted.safetensors")
    esper.save(loop.host, tmp_path / "host.safetensors")
    assert not list(tmp_path.glob("*.md"))
    esper.save(loop.grower.bake(), tmp_path / "baked.safetensors")
    assert "nothing grew" in (tmp_path / "baked.md").read_text()
