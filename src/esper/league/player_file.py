"""A trained player in one safetensors file, with everything that is needed to play.

    save_player("player.safetensors", policy.state_dict(), config, card="Trained on 2v2-open-v1 for 100 million steps.")
    policy, description = load_player_file("player.safetensors", device="cpu")

The file holds the weights without the critic's, and in its header a JSON description: the settings of network and arena, versions, and a
card. Its metadata have a sha256 of everything, see `esper.runs.tensors`. Loading a file executes nothing from it.

A player that plays needs neither the critic nor its view of the whole battle, so a loaded one plays in arenas with and without that view,
in teams of any size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

import esper
from esper.arena.config import ArenaConfig
from esper.arena.specs import RULES_VERSION
from esper.config import Config, from_mapping
from esper.files import MAX_FILE_BYTES, FileError, check_safetensors, parse_json, read_file, reason_of
from esper.league.config import ArenaTrainConfig, UnitNetworkConfig
from esper.league.league import LeagueError
from esper.league.network import make_policy
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy
from esper.runs import load_module, plain_names, read_tensors, write_tensors
from esper.runs.versions import VersionError, Versions

HEADER = "esper player"  # key of the description in the file's metadata
VERSIONS = Versions("player")  # of descriptions
_OF_CRITIC = ("critic.", "encoder.battle.", "value_normalizer.")  # prefixes of weights that are not needed to play
_SMALL = 1024  # sizes up to this are not checked, since they may belong to optional parts without weights
_WHAT_TO_DO = "copy the file again, or write it again with: esper arena export RUN FILE"


class PlayerError(LeagueError):
    """A player file that cannot be used; the message says why and what to do."""


class PlayerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a player file says about itself."""

    format: int  # version of the description
    esper: str  # version that wrote the file
    rules: int  # version of the arena's rules in its training
    arena: ArenaConfig  # of its training, without the view of the whole battle
    unit: UnitNetworkConfig
    network: NetworkConfig
    card: str  # what it was trained on, and how well it plays


def save_player(path: Path | str, policy_weights: Mapping[str, Tensor], config: ArenaTrainConfig, card: str) -> None:
    """Write the player with these weights of a training to a file. An existing file is replaced atomically.

    Raises ValueError if the weights do not fit the config.
    """
    description = PlayerDescription(
        format=VERSIONS.present,
        esper=esper.__version__,
        rules=RULES_VERSION,
        arena=msgspec.structs.replace(config.arena, state_view=False),
        unit=config.unit,
        network=config.ppo.network,
        card=card,
    )
    # Check that the weights fit before anything is written.
    make_playing_policy(config.unit, config.ppo.network, config.arena, policy_weights, device=torch.device("cpu"))
    header = json.dumps(msgspec.to_builtins(description), allow_nan=False)
    write_tensors(path, _needed_to_play(policy_weights), {HEADER: header})


def load_player_file(path: Path | str, device: torch.device | str = "cpu") -> tuple[Policy, PlayerDescription]:
    """Return the player of a file, ready to play, and its description. Raise PlayerError for a wrong or damaged file."""
    path = Path(path)
    try:
        weights, metadata = read_tensors(path)
    except (FileError, OSError) as error:
        raise _explained(path, error) from error
    description = _parse(path, metadata)
    _check_sizes(path, description, weights)
    try:
        policy = make_playing_policy(description.unit, description.network, description.arena, weights, device=torch.device(device))
    except ValueError as error:
        raise PlayerError(f"{path} is damaged: its weights do not fit its own description; {_WHAT_TO_DO} ({error})") from error
    return policy, description


def read_player_description(path: Path | str) -> PlayerDescription:
    """Return the description of a player file without making the player."""
    path = Path(path)
    try:
        _, metadata, _ = check_safetensors(read_file(path, max_bytes=MAX_FILE_BYTES), path)
    except (FileError, OSError) as error:
        raise _explained(path, error) from error
    return _parse(path, metadata)


def make_playing_policy(
    unit: UnitNetworkConfig, network: NetworkConfig, arena: ArenaConfig, weights: Mapping[str, Tensor], *, device: torch.device
) -> Policy:  # fmt: skip
    """Return a policy with the weights of a training that plays without a view of the whole battle, or raise ValueError.

    It acts exactly as the policy of the training. Weights of the critic are ignored, and values are 0.
    """
    arena = msgspec.structs.replace(arena, state_view=False)
    generator = torch.Generator().manual_seed(0)  # the weights that it draws are replaced
    policy = make_policy(unit, network, arena, generator=generator, device=device, normalize_values=False)
    critic = {name: torch.zeros_like(weight) for name, weight in policy.state_dict().items() if name.startswith(_OF_CRITIC)}
    load_module(policy, {**critic, **_needed_to_play(weights)})
    return policy.eval().requires_grad_(False)


def _needed_to_play(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight for name, weight in plain_names(weights).items() if not name.startswith(_OF_CRITIC)}


def _explained(path: Path, error: FileError | OSError) -> PlayerError:
    if isinstance(error, FileNotFoundError):
        return PlayerError(f"there is no file {path}; write one with: esper arena export RUN FILE")
    if isinstance(error, FileError):
        return PlayerError(f"{error}; {_WHAT_TO_DO}")
    return PlayerError(f"no player can be read: {reason_of(error)}")


def _parse(path: Path, metadata: Mapping[str, str]) -> PlayerDescription:
    """Return the description in the metadata of a file, or raise PlayerError."""
    header = metadata.get(HEADER)
    if header is None:
        raise PlayerError(f"{path} holds tensors, but no player; a player file is written by: esper arena export RUN FILE")
    try:
        raw = parse_json(header)
        raw = VERSIONS.migrated(raw, raw["format"], writer=str(raw["esper"]))
        kinds: dict[str, type[Config]] = {"arena": ArenaConfig, "unit": UnitNetworkConfig, "network": NetworkConfig}
        configs = {name: from_mapping(kind, raw[name]) for name, kind in kinds.items()}
        return msgspec.convert({**raw, **configs, "format": VERSIONS.present}, PlayerDescription)
    except VersionError as error:
        raise PlayerError(f"{path} {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlayerError(f"{path} is damaged: its description cannot be understood; {_WHAT_TO_DO} ({error})") from error


def _check_sizes(path: Path, description: PlayerDescription, weights: Mapping[str, Tensor]) -> None:
    """Raise PlayerError if the described network is larger than the weights, before memory is allocated for it."""
    most = max((size for weight in weights.values() for size in weight.shape), default=0)
    most = max(most, _SMALL)
    arena = {name: getattr(description.arena, name) for name in ("contacts", "allies")}
    for name, value in {**arena, **msgspec.to_builtins(description.unit), **msgspec.to_builtins(description.network)}.items():
        if type(value) is int and value > most:
            raise PlayerError(f"{path} is damaged: its {name} is larger than its weights; {_WHAT_TO_DO}")
