"""The checkpoints of a training run, files of single learners, and policies taken from either without an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from esper.files import FileError, reason_of
from esper.rl.config import PPOConfig
from esper.rl.normalize import is_bytes
from esper.rl.policy import FILE_KIND, FILE_SCHEMA, Policy
from esper.runs import Checkpoint, CheckpointError, CheckpointStore, Tree, read_state_file, write_state
from esper.runs.folder import CHECKPOINTS
from esper.vecenv import ObservationSpec

KIND = "ppo"
SCHEMA = 5  # of the state; raise it together with a new row in MIGRATIONS

_MANIFEST = "manifest.json"  # what tells a checkpoint from a run


def _rng_to_streams(state: Tree) -> Tree:
    """1 -> 2: the learner's random streams were saved under the key "rng"."""
    ppo = dict(state["ppo"])
    ppo["streams"] = ppo.pop("rng")
    return {**state, "ppo": ppo}


def _without_spaces(state: Tree) -> Tree:
    """2 -> 3: neither the form of observations and actions nor the number of environments was saved, and images had one kind of encoder."""
    ppo = state["ppo"]
    network = {**ppo["config"]["network"], "image_encoder": "small"}
    return {**state, "ppo": {**ppo, "spaces": None, "num_envs": None, "config": {**ppo["config"], "network": network}}}


def _evaluation_after_saving(state: Tree) -> Tree:
    """3 -> 4: a checkpoint was evaluated before it was saved, so `best` knows its score."""
    return {**state, "eval_steps": 0, "awaits_evaluation": False}


def _bytes_in_units_of_255(state: Tree) -> Tree:
    """4 -> 5: bytes that are no image were divided by 255 in the encoder, and rewards that are not finite were not counted.

    The normaliser does it now. It starts with moments so heavy that it goes on dividing by 255, as the policy has learned it.
    """
    ppo = dict(state["ppo"])
    for rank in (ppo, *(others := [dict(other) for other in ppo.get("other_ranks", [])])):
        if rank["collector"] is not None:
            rank["collector"] = {**rank["collector"], "bad_rewards": 0}
    if others:
        ppo["other_ranks"] = others
    weights = ppo["policy"]
    is_own_encoder = any(name.startswith("encoder.") for name in weights) and not any(
        name.startswith("encoder.layers.") for name in weights
    )
    if is_own_encoder or not ppo["config"]["normalize_observations"]:
        return {**state, "ppo": ppo}
    parts = msgspec.convert(ppo["observation_spec"], ObservationSpec)
    added = {name: part.shape for name, part in parts.items() if is_bytes(part)}
    moments = {}
    for name, shape in added.items():
        weights = {**weights, f"normalizer.means.{name}": torch.zeros(shape), f"normalizer.scales.{name}": torch.full(shape, 1 / 255)}
        weight, one = torch.tensor(1e15, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
        moments[name] = {"weight": weight, "mean": 0.0 * one, "m2": weight * 255.0**2 * one}
    training = {**ppo["policy_training"], "observations": {**ppo["policy_training"]["observations"], **moments}}
    return {**state, "ppo": {**ppo, "policy": weights, "policy_training": training}}


MIGRATIONS = {1: _rng_to_streams, 2: _without_spaces, 3: _evaluation_after_saving, 4: _bytes_in_units_of_255}


def open_store(run: Path | str, *, keep: int = 3) -> CheckpointStore:
    """The checkpoints of the run in a folder. Nothing is touched."""
    return CheckpointStore(Path(run) / CHECKPOINTS, kind=KIND, keep=keep, schema_version=SCHEMA, migrations=MIGRATIONS)


def load_policy(
    source: Path | str,
    which: Literal["best", "latest"] = "best",
    encoder: nn.Module | None = None,
    *,
    actor: nn.Module | None = None,
    critic: nn.Sequential | None = None,
    device: torch.device | str = "cpu",
) -> Policy:
    """The policy of a run's folder, of one checkpoint's folder, or of a file of `Policy.save` or `PPO.save`, ready to act.

    `which` matters for runs alone. A policy that was trained with parts of one's own needs fresh instances of them here.
    """
    parts = {"encoder": encoder, "actor": actor, "critic": critic}
    if not Path(source).is_file():
        return policy_from(load_checkpoint(source, which), device=device, **parts)
    kind, state = _read_file(source)
    return Policy.from_state(state if kind == FILE_KIND else _policy_state(state["ppo"]), device=device, **parts)


def load_checkpoint(folder: Path | str, which: Literal["best", "latest"] = "best") -> Checkpoint:
    """A checkpoint of a run, or the one that `folder` is."""
    folder = Path(folder)
    if (folder / _MANIFEST).exists():
        return open_store(folder.parent.parent).load(folder)
    return open_store(folder).load(which)


def policy_from(checkpoint: Checkpoint, encoder: nn.Module | None = None, *, device: torch.device | str = "cpu", **parts: Any) -> Policy:
    """The policy that a checkpoint holds, on `device`, in evaluation mode."""
    return Policy.from_state(_policy_state(checkpoint.state["ppo"]), device=device, encoder=encoder, **parts)


def _policy_state(ppo: dict[str, Any]) -> dict[str, Any]:
    """The part of a learner's state that `Policy.save` writes."""
    config = msgspec.convert(ppo["config"], PPOConfig)
    return {
        **{name: ppo[name] for name in ("observation_spec", "action_spec", "spaces")},
        "network": msgspec.to_builtins(config.network),
        "normalize_observations": config.normalize_observations,
        "normalize_values": config.normalize_values,
        "weights": ppo["policy"],
    }


def save_learner(path: Path | str, ppo: dict[str, Any]) -> None:
    """Write the state of a learner as one file."""
    write_state(path, {"ppo": ppo}, kind=KIND, schema=SCHEMA)


def load_learner(path: Path | str) -> dict[str, Any]:
    """The state of a learner as `save_learner` wrote it."""
    kind, state = _read_file(path)
    if kind != KIND:
        raise CheckpointError(f"{path} holds a policy alone, which cannot go on learning; load it with Policy.load")
    learner: dict[str, Any] = state["ppo"]
    return learner


def _read_file(path: Path | str) -> tuple[str, Tree]:
    """The kind and the state of a file, brought to the version of today."""
    try:
        kind, schema, state = read_state_file(path)
    except FileError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(reason_of(error)) from error
    known = {KIND: SCHEMA, FILE_KIND: FILE_SCHEMA}
    if kind not in known:
        raise CheckpointError(f"{path} holds a state of kind {kind!r}, and neither a policy nor a learner")
    if schema > known[kind]:
        raise CheckpointError(f"{path} was written by a newer esper: its state has version {schema}, this one reads up to {known[kind]}")
    for version in range(schema, known[kind]):
        state = MIGRATIONS[version](state)
    return kind, state
