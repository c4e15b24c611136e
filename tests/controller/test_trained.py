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
from esper.controller.config import BLUEPRINTS, DomainConfig, MoveNetworkConfig
from esper.controller.description import ControllerError, card, read_description
from esper.controller.layout import LAYOUT_VERSION
from esper.controller.learned import Learned, load_controller, save_controller
from esper.controller.tokens import VERSION
from esper.controller.value import ValueModel
from esper.growth.config import BudgetConfig, GrowthConfig, LifecycleConfig, TrainingConfig
from esper.growth.events import EpochEnded
from esper.growth.grower import Grower
from esper.growth.host.slotted import add_slots
from esper.rl.config import NetworkConfig
from esper.runs import Event, read_tensors, write_tensors
from esper.tasks import load_task
from tests.controller.policies import NETWORK, trained_policy
from tests.growth.builders import SLOTS, make_data, make_host


def eager_file(folder: Path) -> Path:
    """Write a value model that expects a gain of every move, the more the larger its seeds are."""
    model = ValueModel(width=16, members=3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for bias in model.biases:
            bias.fill_(1.0)
        model.gain_scale.fill_(10.0)
        model.weights[-1].abs_()
    save_controller(folder / "eager.safetensors", model)
    return folder / "eager.safetensors"


# The shipped file


def test_the_shipped_controller_is_a_resource_of_the_package_and_small() -> None:
    resources = {resource.name: resource for resource in files("esper.controller.trained").iterdir()}
    assert 10_000 < len(resources["learned.safetensors"].read_bytes()) < 2_000_000
    assert resources["learned.md"].read_text().startswith("# The learned controller\n")
    assert trained.file_of("learned").read_bytes() == resources["learned.safetensors"].read_bytes()


def test_the_shipped_controller_has_the_layout_of_this_version() -> None:
    """After a change of the observations or moves, a new one has to be trained and shipped."""
    assert read_description(trained.file_of("learned")).layout == VERSION
    assert all(weight.isfinite().all() for weight in trained.load_learned(GrowthConfig()).trained.state_dict().values())


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


def test_a_trained_controller_makes_only_the_moves_that_the_settings_allow(tmp_path: Path) -> None:
    rules = LifecycleConfig(holding_epochs=1)
    grown = {}
    for name, config in {"any": None, "norms": GrowthConfig(blueprints=("norm",), lifecycle=rules)}.items():
        controller = load_controller(eager_file(tmp_path))
        result = esper.grow(make_host(), make_data(), make_data(seed=2), cross_entropy, epochs=6, controller=controller, config=config)
        grown[name] = {entry.blueprint for entry in result.ledger.seeds}
        assert not result.ledger.refused
    assert grown["norms"] == {"norm"}
    assert grown["any"]
    assert grown["any"] <= set(BLUEPRINTS) - {"norm"}


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
    "moves": 4_000,
    "domain": msgspec.to_builtins(DomainConfig(sources=("digits", "text"), samples=(256, 4_096))),
    "blind": {"0.003": "widen_300 at 0", "0.1": "never"},
    "r2_in_unseen_cells": 0.4567,
    "calibration": 1.25,
    "seed": 7,
    "stopped_by": "hand",
}


def lines_of(path: Path) -> dict[str, str]:
    """Return first column -> rest of the lines of a card."""
    lines = [line for line in card(path, read_description(path)).splitlines() if line]
    return {first.strip(): rest.strip() for first, _, rest in (line.partition("  ") for line in lines)}


def test_the_card_of_a_value_model_shows_what_its_file_knows(tmp_path: Path) -> None:
    path = tmp_path / "value.safetensors"
    save_controller(path, ValueModel(width=16, members=3), INFO, network=MoveNetworkConfig(caution=0.5))
    shown = lines_of(path)
    assert shown["what"] == "value model, 3 members of width 16; a move must be ahead by 0.5 standard errors"
    assert shown["file"] == f"{path}, {path.stat().st_size:,} bytes"
    assert shown["layout"] == f"{LAYOUT_VERSION}, written by esper {esper.__version__}"
    assert shown["trained on sources"] == "digits, text"
    assert shown["trained on samples"] == "256 to 4,096"
    assert (shown["cells"], shown["moves"], shown["seed"]) == ("120", "4,000", "7")
    assert (shown["R² in unseen cells"], shown["calibration"], shown["stopped by"]) == ("0.4567", "1.2500", "hand")
    assert (shown["price of rent"], shown["0.003"], shown["0.1"]) == (
        "best constant plan in the training cells",
        "widen_300 at 0",
        "never",
    )
    assert all(f"trained on {name.replace('_', ' ')}" in shown for name in DomainConfig.__struct_fields__)


def test_the_card_of_a_policy_names_its_memory_and_nothing_that_its_file_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save_controller(path, trained_policy(NetworkConfig(core="gru", hidden_size=12)), {"run": "first"})
    shown = lines_of(path)
    assert shown["what"] == f"policy with GRU memory of width 12, from a value model of {NETWORK.members} members of width {NETWORK.width}"
    assert shown["run"] == "first"
    assert shown.keys() == {"controller policy.safetensors", "what", "file", "sha256", "layout", "run"}


def test_a_card_has_no_control_characters_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "value.safetensors"
    save_controller(path, ValueModel(width=16, members=3), {"note": "\x1b[31mred\x07"})
    assert "\x1b" not in card(path, read_description(path))
    assert lines_of(path)["note"] == "[31mred"


def test_a_file_of_another_layout_has_a_card_but_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "value.safetensors"
    save_controller(path, ValueModel(width=16, members=3))
    tensors, metadata = read_tensors(path)
    write_tensors(path, tensors, {name: text.replace(LAYOUT_VERSION, "0-00000000") for name, text in metadata.items()})
    assert lines_of(path)["layout"].startswith("0-00000000, ")
    with pytest.raises(ControllerError, match="has layout 0-00000000"):
        load_controller(path)
