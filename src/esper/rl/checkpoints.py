"""Read and write the states of learners: checkpoints of a training run, files of single learners, and the policies in either.

States of older versions are migrated when they are read (`MIGRATIONS`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from esper.files import FileError, reason_of
from esper.rl.config import PPOConfig
from esper.rl.normalize import is_bytes
from esper.runs import Checkpoint, CheckpointError, CheckpointStore, Tree, read_state_file, write_state
from esper.runs.folder import CHECKPOINTS
from esper.vecenv import ObservationSpec

KIND = "ppo"  # of checkpoints and files of learners
SCHEMA = 5  # version of the state; raise it together with a new row in MIGRATIONS
POLICY_KIND, POLICY_SCHEMA = "policy", 1  # kind and version of the files that `Policy.save` writes

_MANIFEST = "manifest.json"  # file in the folder of a checkpoint, but not in that of a run


def _rng_to_streams(state: Tree) -> Tree:
    """1 -> 2: rename the key "rng" of the learner's random streams to "streams"."""
    ppo = dict(state["ppo"])
    ppo["streams"] = ppo.pop("rng")
    return {**state, "ppo": ppo}


def _without_spaces(state: Tree) -> Tree:
    """2 -> 3: add spaces and number of environments, which were not saved, and the image encoder, which was always "small"."""
    ppo = state["ppo"]
    network = {**ppo["config"]["network"], "image_encoder": "small"}
    return {**state, "ppo": {**ppo, "spaces": None, "num_envs": None, "config": {**ppo["config"], "network": network}}}


def _evaluation_after_saving(state: Tree) -> Tree:
    """3 -> 4: note that the evaluation is done. Checkpoints were evaluated before they were saved, so `best` knows their scores."""
    return {**state, "eval_steps": 0, "awaits_evaluation": False}


def _bytes_in_units_of_255(state: Tree) -> Tree:
    """4 -> 5: move the scaling of bytes that are no image from the encoder to the normaliser, and add the count of bad rewards.

    The built-in encoder divided such bytes by 255. The normaliser gets moments with so much weight that it keeps dividing by 255, which is
    what the policy has learned from.
    """
    ppo = dict(state["ppo"])
    others = [dict(other) for other in ppo.get("other_ranks", [])]
    for rank in (ppo, *others):
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
    """Return the checkpoints of the run in a folder, without reading or changing anything."""
    return CheckpointStore(Path(run) / CHECKPOINTS, kind=KIND, keep=keep, schema_version=SCHEMA, migrations=MIGRATIONS)


def read_policy(source: Path | str, which: Literal["best", "latest"] = "best") -> Tree:
    """Return the state of the policy in a run's folder, a checkpoint's folder, or a file of `Policy.save` or `PPO.save`.

    It is the state that `Policy.from_state` takes. `which` only matters for runs.
    """
    if not Path(source).is_file():
        return policy_state(load_checkpoint(source, which))
    kind, state = _read_file(source)
    return state if kind == POLICY_KIND else _policy_of_learner(state["ppo"])


def load_checkpoint(folder: Path | str, which: Literal["best", "latest"] = "best") -> Checkpoint:
    """Return a checkpoint, given the folder of its run or its own folder. `which` only matters for runs."""
    folder = Path(folder)
    if (folder / _MANIFEST).exists():
        return open_store(folder.parent.parent).load(folder)
    return open_store(folder).load(which)


def policy_state(checkpoint: Checkpoint) -> Tree:
    """Return the state of the policy in a checkpoint, for `Policy.from_state`."""
    return _policy_of_learner(checkpoint.state["ppo"])


def _policy_of_learner(ppo: dict[str, Any]) -> Tree:
    """Return the part of a learner's state that `Policy.save` writes."""
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
    """Return the state of a learner as `save_learner` wrote it."""
    kind, state = _read_file(path)
    if kind != KIND:
        raise CheckpointError(f"{path} holds only a policy, which cannot continue to learn; load it with Policy.load")
    learner: dict[str, Any] = state["ppo"]
    return learner


def _read_file(path: Path | str) -> tuple[str, Tree]:
    """Return the kind and the state of a file, migrated to the present version."""
    try:
        kind, schema, state = read_state_file(path)
    except FileError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(reason_of(error)) from error
    known = {KIND: SCHEMA, POLICY_KIND: POLICY_SCHEMA}
    if kind not in known:
        raise CheckpointError(f"{path} holds a state of kind {kind!r}, which is neither a policy nor a learner")
    if schema > known[kind]:
        raise CheckpointError(f"{path} was written by a newer esper: its state has version {schema}, this one reads up to {known[kind]}")
    for version in range(schema, known[kind]):
        state = MIGRATIONS[version](state)
    return kind, state
