"""Read and write the states of learners: checkpoints of a training run, files of single learners, and the policies in either.

After a change of the states, add a migration to `LEARNER` or `POLICY`, see `esper.runs.versions`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from esper.files import FileError, reason_of
from esper.rl.config import PPOConfig
from esper.runs import Checkpoint, CheckpointError, CheckpointStore, Tree, read_state_file, write_state
from esper.runs.versions import Versions

LEARNER = Versions("ppo")  # of checkpoints of all learners, with their environments, and of the files that `PPO.save` writes
POLICY = Versions("policy")  # of the files that `Policy.save` writes

_MANIFEST = "manifest.json"  # file in the folder of a checkpoint, but not in that of a run


def open_store(run: Path | str, *, keep: int = 3) -> CheckpointStore:
    """Return the checkpoints of the run in a folder, without reading or changing anything."""
    return CheckpointStore.of_run(run, kind=LEARNER, keep=keep)


def read_policy(source: Path | str, which: Literal["best", "latest"] = "best") -> Tree:
    """Return the state of the policy in a run's folder, a checkpoint's folder, or a file of `Policy.save` or `PPO.save`.

    It is the state that `Policy.from_state` takes. `which` only matters for runs.
    """
    if not Path(source).is_file():
        return policy_state(load_checkpoint(source, which))
    kind, state = _read_file(source)
    return state if kind is POLICY else _policy_of_learner(state["ppo"])


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
    write_state(path, {"ppo": ppo}, LEARNER)


def load_learner(path: Path | str) -> dict[str, Any]:
    """Return the state of a learner as `save_learner` wrote it."""
    kind, state = _read_file(path)
    if kind is not LEARNER:
        raise CheckpointError(f"{path} holds only a policy, which cannot continue to learn; load it with Policy.load")
    learner: dict[str, Any] = state["ppo"]
    return learner


def _read_file(path: Path | str) -> tuple[Versions, Tree]:
    """Return the kind and the state of a file, in its present version."""
    try:
        return read_state_file(path, LEARNER, POLICY)
    except FileError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(reason_of(error)) from error
