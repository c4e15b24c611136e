"""Player files: a player that is loaded acts as the one that was saved, and a wrong or damaged file is explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.config import ArenaRewardConfig
from esper.league import trained
from esper.league.config import ArenaTrainConfig
from esper.league.matches import MatchArena
from esper.league.network import make_player
from esper.league.player_file import HEADER, VERSIONS, PlayerError, load_player_file, read_player_description, save_player
from esper.league.players import PolicyPlayer
from esper.rl.policy import Policy
from esper.runs import read_tensors, write_tensors
from tests.league.arenas import small_policy, small_training

CPU = torch.device("cpu")


def training(**arena: Any) -> ArenaTrainConfig:
    settings = {"battles": 4, "state_view": True, **arena}
    return small_training(arena=settings, ppo={"gamma": ArenaRewardConfig().gamma})


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Policy, ArenaTrainConfig]:
    config = training()
    policy = small_policy(config, seed=3).eval()
    path = tmp_path / "player.safetensors"
    save_player(path, policy.state_dict(), config, "It was never trained.")
    return path, policy, config


def test_a_loaded_player_acts_as_the_saved_one_without_the_view_of_its_critic(saved: tuple[Path, Policy, ArenaTrainConfig]) -> None:
    path, policy, config = saved
    loaded, _ = load_player_file(path)
    arena = Arena(config.arena, seed=1)
    rows = torch.arange(config.arena.battles * config.arena.units)
    players = [PolicyPlayer(one, rows, units=config.arena.units) for one in (policy, loaded)]
    result = arena.reset()
    assert result.whole is not None
    for _ in range(4):
        first, second = (player.act(result) for player in players)
        assert all(torch.equal(first[name], second[name]) for name in first)
        result = arena.step(first)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.slow
def test_a_loaded_player_plays_in_arenas_without_the_view_and_in_other_teams(saved: tuple[Path, Policy, ArenaTrainConfig]) -> None:
    loaded, description = load_player_file(saved[0])
    for changes in ({"state_view": False}, {"team_size": 3, "state_view": True}):
        arena = msgspec.structs.replace(description.arena, battles=2, **changes)
        assert MatchArena(arena, seed=0, device="cpu").play(loaded, "random").record.battles == 2


def test_the_description_has_the_settings_and_the_card(saved: tuple[Path, Policy, ArenaTrainConfig]) -> None:
    path, _, config = saved
    description = read_player_description(path)
    assert description == load_player_file(path)[1]
    assert description.card == "It was never trained."
    assert description.arena == msgspec.structs.replace(config.arena, state_view=False)
    assert (description.unit, description.network) == (config.unit, config.ppo.network)


def test_the_file_has_no_weights_of_the_critic(saved: tuple[Path, Policy, ArenaTrainConfig]) -> None:
    names, policy_names = set(read_tensors(saved[0])[0]), set(saved[1].state_dict())
    assert names < policy_names
    assert {name.split(".")[0] for name in policy_names - names} == {"critic", "encoder", "value_normalizer"}
    assert {name for name in policy_names - names if name.startswith("encoder")} == {"encoder.battle.0.weight", "encoder.battle.0.bias"}


def test_a_player_of_the_default_network_has_less_than_3_megabytes(tmp_path: Path) -> None:
    config = ArenaTrainConfig()
    save_player(tmp_path / "default.safetensors", make_player(config, device=CPU).state_dict(), config, "")
    assert (tmp_path / "default.safetensors").stat().st_size < 3_000_000
    load_player_file(tmp_path / "default.safetensors")


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = training()
    weights = small_policy(config).state_dict()
    del weights["actor.plain.bias"]
    with pytest.raises(ValueError, match=r"actor\.plain\.bias is missing"):
        save_player(tmp_path / "player.safetensors", weights, config, "")
    with pytest.raises(ValueError, match="has the shape"):
        save_player(tmp_path / "player.safetensors", small_policy(training(contacts=3)).state_dict(), config, "")
    assert not list(tmp_path.iterdir())


# Wrong and damaged files


def test_a_missing_file_and_a_folder_are_explained(tmp_path: Path) -> None:
    with pytest.raises(PlayerError, match=r"there is no file .*none; write one with: esper arena export RUN FILE"):
        load_player_file(tmp_path / "none")
    with pytest.raises(PlayerError, match="no player can be read"):
        load_player_file(tmp_path)


def test_files_of_other_kinds_are_explained(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a player")
    with pytest.raises(PlayerError, match=r"cannot be read as a safetensors file.*; copy the file again"):
        load_player_file(tmp_path / "text")
    write_tensors(tmp_path / "others", {"weight": torch.zeros(2)})
    with pytest.raises(PlayerError, match="holds tensors, but no player; a player file is written by: esper arena export"):
        load_player_file(tmp_path / "others")


def test_a_changed_byte_is_noticed(saved: tuple[Path, Policy, ArenaTrainConfig]) -> None:
    path = saved[0]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    for read in (load_player_file, read_player_description):
        with pytest.raises(PlayerError, match="copy the file again"):
            read(path)


def rewritten(path: Path, **changes: Any) -> Path:
    """Write the file again with another description and a right sha256."""
    weights, metadata = read_tensors(path)
    description = json.loads(metadata[HEADER])
    for name, value in changes.items():
        description[name] = {**description[name], **value} if isinstance(value, dict) else value
    write_tensors(path, weights, {HEADER: json.dumps(description)})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": VERSIONS.present + 1}, f"newer esper .*state is {VERSIONS.present + 1}, this one reads up to {VERSIONS.present}"),
        ({"format": "one"}, "is damaged: the version of its state is 'one'"),
        ({"arena": 3}, "its description cannot be understood"),
        ({"arena": {"contacts": -1}}, "its description cannot be understood.*contacts: expected"),
        ({"unit": {"widht": 8}}, "its description cannot be understood.*unknown key"),
        ({"card": None}, "its description cannot be understood"),
        ({"unit": {"width": 9}}, "its weights do not fit its own description"),
        ({"unit": {"width": 60_000}}, "its width is larger than its weights"),
        ({"network": {"hidden_size": 60_000}}, "its hidden_size is larger than its weights"),
        ({"arena": {"allies": 10**9}}, "its allies is larger than its weights"),
    ],
)
def test_a_wrong_description_is_explained(saved: tuple[Path, Policy, ArenaTrainConfig], changes: dict[str, Any], message: str) -> None:
    path = rewritten(saved[0], **changes)
    with pytest.raises(PlayerError, match=message):
        load_player_file(path)


# Players that come with the package


def test_every_shipped_player_can_be_loaded_and_is_small() -> None:
    for path in trained.shipped_players().values():
        _, description = load_player_file(path)
        assert path.stat().st_size < 3_000_000
        assert description.card


def test_the_files_of_a_folder_are_the_shipped_players(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "FOLDER", tmp_path)
    assert trained.shipped_players() == {}
    for name in ("player-5v5.safetensors", "player-2v2.safetensors", "card.md"):
        (tmp_path / name).touch()
    assert list(trained.shipped_players()) == ["player-2v2", "player-5v5"]


def test_an_arena_without_the_view_is_saved_too(tmp_path: Path) -> None:
    config = training(state_view=False, allies=0)
    save_player(tmp_path / "player", small_policy(config).state_dict(), config, "")
    assert load_player_file(tmp_path / "player")[1].arena == config.arena
