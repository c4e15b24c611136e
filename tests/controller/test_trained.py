"""The controller that comes with the package, and the cards of controller files."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
import torch
from torch.nn.functional import cross_entropy

import esper
from esper.config import load_saved
from esper.controller import trained
from esper.controller.config import DomainConfig, GainsConfig
from esper.controller.description import ControllerError, card, read_description
from esper.controller.features import VERSION
from esper.controller.learned import Learned, load_controller, save_controller
from esper.controller.turn import OPS
from esper.growth.config import BudgetConfig, GrowthConfig, LifecycleConfig, TrainingConfig
from esper.growth.events import EpochEnded
from esper.growth.grower import Grower
from esper.growth.host.slotted import add_slots
from esper.rl.config import NetworkConfig
from esper.runs import Event, read_tensors, write_tensors
from esper.tasks import load_task
from tests.controller.hosts import BLUEPRINTS
from tests.controller.policies import new_policy, trained_policy
from tests.controller.test_branches import gains_of
from tests.growth.builders import SLOTS, make_data, make_host


def eager_file(folder: Path, name: str = "eager.safetensors") -> Path:
    """Write a policy that grows as soon and as often as it may, whatever is advised."""
    policy = new_policy(trust=0.0)
    with torch.no_grad():
        policy.get_submodule("actor.op.2").bias[OPS.index("germinate")] = 9.0  # type: ignore[index, operator]
    save_controller(folder / name, policy)
    return folder / name


# The shipped file


def test_the_shipped_controller_is_a_resource_of_the_package_and_small() -> None:
    resources = {resource.name: resource for resource in files("esper.controller.trained").iterdir()}
    assert 10_000 < len(resources["learned.safetensors"].read_bytes()) < 2_000_000
    assert resources["learned.md"].read_text().startswith("# The learned controller\n")
    assert trained.file_of("learned").read_bytes() == resources["learned.safetensors"].read_bytes()


def test_the_shipped_controller_has_the_layout_of_this_version() -> None:
    """After a change of the observations or steps, a new one has to be trained and shipped."""
    assert read_description(trained.file_of("learned")).layout == VERSION
    learned = trained.load_learned(GrowthConfig())
    assert learned.ensemble is not None
    assert all(weight.isfinite().all() for weight in learned.ensemble.parameters())


def test_a_replaced_file_is_the_shipped_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_controller(tmp_path / "learned.safetensors", trained_policy(), {"cells": 3})
    monkeypatch.setattr(trained, "files", lambda package: tmp_path)
    assert trained.load_learned(GrowthConfig()).description.info == {"cells": 3}


def test_a_path_is_not_taken_for_the_shipped_controller() -> None:
    assert [trained.file_of(name) for name in ("./mine/learned", "learned.safetensors")] == [
        Path("mine/learned"),
        Path("learned.safetensors"),
    ]


# Growing with it


def grower(controller: Learned | str, config: GrowthConfig | None = None) -> Grower:
    model = make_host()
    slotted = add_slots(model, make_data()[0][0], slots=SLOTS)
    return Grower(slotted, torch.optim.AdamW(model.parameters()), controller=controller, config=config, epochs=8)


def test_the_name_learned_is_the_shipped_controller() -> None:
    controller = grower("learned").controller
    assert isinstance(controller, Learned)
    assert controller.description == read_description(trained.file_of("learned"))


def test_without_a_config_every_controller_grows_by_the_defaults(tmp_path: Path) -> None:
    for controller in ("learned", load_controller(eager_file(tmp_path)), "heuristic"):
        assert grower(controller).config == GrowthConfig()


def test_a_given_config_holds_as_it_is() -> None:
    config = GrowthConfig(seed=3, budget=BudgetConfig(max_parameters=2.0))
    assert grower("learned", config).config is config


def test_a_trained_controller_takes_only_the_steps_that_the_settings_allow(tmp_path: Path) -> None:
    rules = LifecycleConfig(holding_epochs=1)
    grown = {}
    wide = GrowthConfig(blueprints=BLUEPRINTS[:3], lifecycle=rules)
    for name, config in {"wide": wide, "norms": GrowthConfig(blueprints=("norm",), lifecycle=rules)}.items():
        controller = load_controller(eager_file(tmp_path))
        result = esper.grow(make_host(), make_data(), make_data(seed=2), cross_entropy, epochs=6, controller=controller, config=config)
        grown[name] = {entry.blueprint for entry in result.ledger.seeds}
        assert not result.ledger.refused
    assert grown["norms"] == {"norm"}
    assert grown["wide"]
    assert {name.removesuffix("_chain") for name in grown["wide"]} <= set(BLUEPRINTS[:3])


def test_a_run_of_a_trained_controller_keeps_the_settings_of_the_user(tmp_path: Path) -> None:
    run = tmp_path / "run"
    esper.grow(make_host(), make_data(), make_data(seed=2), cross_entropy, epochs=1, controller="learned", run=run)
    saved = load_saved(TrainingConfig, run / "config.toml")
    assert (saved.blueprints, saved.budget) == (None, BudgetConfig())
    again = esper.grow(make_host(), make_data(), make_data(seed=2), cross_entropy, epochs=2, controller="learned", run=run, resume=True)
    assert len(again.val_losses) == 2


@pytest.mark.slow
def test_the_shipped_controller_grows_a_small_network_and_gives_reasons() -> None:
    task, events = load_task("digits"), list[Event]()
    data = task.train_loader(), task.val_loader()
    grown = esper.grow(task.make_host("starved"), *data, task.loss_fn, epochs=5, controller="learned", callbacks=[events.append])
    decisions = [event.decision for event in events if isinstance(event, EpochEnded)]
    assert len(decisions) == 5
    assert all(decisions)
    assert not grown.ledger.refused
    result = task.evaluate(grown.model, task.test_loader())
    assert result.loss < task.uninformed_loss
    assert grown.val_loss < grown.val_loss_before


@pytest.mark.slow
def test_growth_imports_no_learned_controller_before_one_is_named() -> None:
    program = """
import sys
from esper.growth.config import GrowthConfig
from esper.growth.grower import Grower
from esper.growth.controllers.baselines import make_controller
make_controller("heuristic", GrowthConfig())
assert not [name for name in sys.modules if name.startswith("esper.controller")]
assert make_controller("learned", GrowthConfig()).name == "learned"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# Cards

INFO = {
    "cells": 120,
    "branches": 4_000,
    "domain": msgspec.to_builtins(DomainConfig(sources=("digits", "text"), samples=(256, 4_096))),
    "share_of_hosts": 0.4567,
    "seed": 7,
    "stopped_by": "hand",
}


def lines_of(path: Path) -> dict[str, str]:
    """Return first column -> rest of the lines of a card."""
    lines = [line for line in card(path, read_description(path)).splitlines() if line]
    return {first.strip(): rest.strip() for first, _, rest in (line.partition("  ") for line in lines)}


def test_the_card_of_an_ensemble_shows_what_its_file_knows(tmp_path: Path) -> None:
    path = tmp_path / "ensemble.safetensors"
    save_controller(path, info=INFO, ensemble=gains_of(0.1), gains=GainsConfig(caution=0.5))
    shown = lines_of(path)
    assert shown["what"] == "the heuristic, or another step where 8 networks of width 4 are sure of it by 0.5 standard deviations"
    assert shown["file"] == f"{path}, {path.stat().st_size:,} bytes"
    assert shown["layout"] == f"{VERSION}, written by esper {esper.__version__}"
    assert shown["trained on sources"] == "digits, text"
    assert shown["trained on samples"] == "256 to 4,096"
    assert (shown["cells"], shown["branches"], shown["seed"]) == ("120", "4,000", "7")
    assert (shown["share of hosts"], shown["stopped by"]) == ("0.4567", "hand")
    assert all(f"trained on {name.replace('_', ' ')}" in shown for name in DomainConfig.__struct_fields__)


SEES = "which sees what would be done by the heuristic"


@pytest.mark.parametrize(
    ("memory", "has_ensemble", "what"),
    [
        (
            NetworkConfig(core="gru", hidden_size=12),
            False,
            "policy with GRU memory of width 12, which sees what would be done by the heuristic",
        ),
        (NetworkConfig(core="none"), False, f"policy without memory, {SEES}"),
        (
            NetworkConfig(hidden_size=12),
            True,
            f"policy with LSTM memory of width 12, {SEES}, or another step where 8 networks of width 4 are sure of it",
        ),
    ],
    ids=["gru", "none", "both"],
)
def test_the_card_of_a_policy_names_its_memory_and_nothing_that_its_file_does_not_know(
    memory: NetworkConfig, has_ensemble: bool, what: str, tmp_path: Path
) -> None:
    path = tmp_path / "policy.safetensors"
    ensemble = {"ensemble": gains_of(0.1), "gains": GainsConfig(caution=0.0)} if has_ensemble else {}
    save_controller(path, trained_policy(memory), {"run": "first"}, **ensemble)
    shown = lines_of(path)
    assert shown["what"] == what
    assert shown["run"] == "first"
    assert shown.keys() == {"controller policy.safetensors", "what", "file", "sha256", "layout", "run"}


def test_a_card_has_no_control_characters_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ensemble.safetensors"
    save_controller(path, info={"note": "\x1b[31mred\x07"}, ensemble=gains_of(0.1))
    assert "\x1b" not in card(path, read_description(path))
    assert lines_of(path)["note"] == "[31mred"


def test_a_file_of_another_layout_has_a_card_but_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save_controller(path, trained_policy())
    tensors, metadata = read_tensors(path)
    write_tensors(path, tensors, {name: text.replace(VERSION, "0-00000000") for name, text in metadata.items()})
    assert lines_of(path)["layout"].startswith("0-00000000, ")
    with pytest.raises(ControllerError, match="has layout 0-00000000"):
        load_controller(path)
