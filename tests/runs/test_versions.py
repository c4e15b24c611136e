"""A change of what is saved: files of the version before are read by every kind of store, and those of a later one are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from esper.controller.description import HEADER as CONTROLLER_HEADER, VERSIONS as CONTROLLER
from esper.controller.learned import load_controller, save_controller
from esper.files import with_digest, without_digest
from esper.growth.grower import KIND as GROWTH
from esper.league.league import VERSIONS as LEAGUE
from esper.league.player_file import HEADER as PLAYER_HEADER, VERSIONS as PLAYER, load_player_file, save_player
from esper.league.store import LeagueStore
from esper.rl import PPO, NetworkConfig, Policy, PPOConfig
from esper.rl.checkpoints import LEARNER, POLICY
from esper.runs import CheckpointStore, Versions, read_state_file, read_tensors, write_state, write_tensors
from esper.vecenv import make
from tests.controller.policies import trained_policy
from tests.growth.builders import make_loop
from tests.league.arenas import small_policy, small_training
from tests.league.leagues import promoted, small_league

SMALL = PPOConfig(num_steps=8, num_minibatches=1, network=NetworkConfig(hidden_size=4, encoder_sizes=(4,)))


@dataclass(frozen=True)
class Store:
    """One kind of saved state. `write` returns what is saved, `read` what is loaded, and `change` replaces the state in a file."""

    versions: Versions
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    change: Callable[[Path, Callable[[Any], Any]], None]


def write_grower(path: Path) -> Any:
    loop = make_loop()
    loop.epoch()
    loop.grower.save(path)
    return loop.grower.history.val_losses


def read_grower(path: Path) -> Any:
    loop = make_loop()
    loop.grower.load(path)
    return loop.grower.history.val_losses


def change_checkpoint(path: Path, change: Callable[[Any], Any]) -> None:
    store = CheckpointStore(path, kind=GROWTH.kind)
    saved = store.load()
    store.save(saved.step, change(saved.state))


def learner() -> PPO:
    return PPO(make("cue", 2), SMALL)


def write_learner(path: Path) -> Any:
    ppo = learner()
    ppo.update(ppo.collect())
    ppo.save(path)
    return ppo.step


def write_policy(path: Path) -> Any:
    policy = learner().policy
    policy.save(path)
    return [*policy.state_dict()]


def change_state(versions: Versions) -> Callable[[Path, Callable[[Any], Any]], None]:
    def change_in(path: Path, change: Callable[[Any], Any]) -> None:
        first = Versions(versions.kind)
        write_state(path, change(read_state_file(path, first)[1]), first)

    return change_in


def write_league(path: Path) -> Any:
    league = promoted(small_league(), "one")
    LeagueStore(path).save(league)
    return league.to_state()["entries"]


def change_league(path: Path, change: Callable[[Any], Any]) -> None:
    file = path / "league.json"
    values = without_digest(json.loads(file.read_text()))
    values["league"] = {"version": 1, **change(values["league"])}
    file.write_text(json.dumps(with_digest(values)))


def write_player(path: Path) -> Any:
    config = small_training()
    save_player(path, small_policy(config).state_dict(), config, "a card")
    return "a card"


def write_controller(path: Path) -> Any:
    save_controller(path, trained_policy(), {"cells": 3})
    return {"cells": 3}


def change_header(header: str, **kept: Any) -> Callable[[Path, Callable[[Any], Any]], None]:
    def change_in(path: Path, change: Callable[[Any], Any]) -> None:
        tensors, metadata = read_tensors(path)
        write_tensors(path, tensors, {header: json.dumps({**kept, "esper": "0.0.9", **change(json.loads(metadata[header]))})})

    return change_in


STORES = {
    "growth": Store(GROWTH, write_grower, read_grower, change_checkpoint),
    "learner": Store(LEARNER, write_learner, lambda path: PPO.load(path, make("cue", 2)).step, change_state(LEARNER)),
    "policy": Store(POLICY, write_policy, lambda path: [*Policy.load(path).state_dict()], change_state(POLICY)),
    "league": Store(LEAGUE, write_league, lambda path: LeagueStore(path).load().to_state()["entries"], change_league),
    "player": Store(PLAYER, write_player, lambda path: load_player_file(path)[1].card, change_header(PLAYER_HEADER, format=1)),
    "controller": Store(
        CONTROLLER, write_controller, lambda path: load_controller(path).description.info, change_header(CONTROLLER_HEADER, version=1)
    ),
}


def before(state: Any) -> Any:
    """Return a state as a version that never was would have saved it."""
    return {"everything": state}


@pytest.mark.parametrize("name", STORES)
def test_a_file_of_the_version_before_is_migrated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = STORES[name], tmp_path / "saved"
    saved = store.write(path)
    store.change(path, before)
    monkeypatch.setitem(store.versions.migrations, 1, lambda state: state["everything"])
    assert store.read(path) == saved
    store.write(path)  # what is written now has the second version, and is not migrated
    assert store.read(path) == saved


@pytest.mark.parametrize("name", STORES)
def test_a_file_of_a_later_version_and_a_migration_that_fails_are_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = STORES[name], tmp_path / "saved"
    with monkeypatch.context() as later:
        later.setitem(store.versions.migrations, 1, lambda state: state["everything"])
        store.write(path)
    with pytest.raises(ValueError, match=r"saved.*was written by a newer esper.*the version of its state is 2, this one reads up to 1"):
        store.read(path)
    other = tmp_path / "saved too"
    store.write(other)
    monkeypatch.setitem(store.versions.migrations, 1, lambda state: state["everything"])
    with pytest.raises(ValueError, match=r"saved too.*cannot be brought from version 1 to 2 \(KeyError: 'everything'\)"):
        store.read(other)
