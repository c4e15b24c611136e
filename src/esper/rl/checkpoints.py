"""The checkpoints of a training run, and policies taken from them without an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from esper.checkpoint import Checkpoint, CheckpointStore, Tree, load_module
from esper.rl.config import PPOConfig
from esper.rl.policy import Policy
from esper.run_folder import CHECKPOINTS
from esper.vecenv import ActionSpec, ObservationSpec

KIND = "ppo"
SCHEMA = 2  # of the state; raise it together with a new row in MIGRATIONS

_MANIFEST = "manifest.json"  # what tells a checkpoint from a run


def _rng_to_streams(state: Tree) -> Tree:
    """1 -> 2: the learner's random streams were saved under the key "rng"."""
    ppo = dict(state["ppo"])
    ppo["streams"] = ppo.pop("rng")
    return {**state, "ppo": ppo}


MIGRATIONS = {1: _rng_to_streams}


def open_store(run: Path | str, *, keep: int = 3) -> CheckpointStore:
    """The checkpoints of the run in a folder. Nothing is touched."""
    return CheckpointStore(Path(run) / CHECKPOINTS, kind=KIND, keep=keep, schema_version=SCHEMA, migrations=MIGRATIONS)


def load_policy(
    folder: Path | str,
    which: Literal["best", "latest"] = "best",
    encoder: nn.Module | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Policy:
    """The policy of a run, or of one checkpoint where `folder` is one (`which` says nothing then), ready to act.

    A run that was trained with an encoder of one's own needs a fresh instance of it here.
    """
    return policy_from(load_checkpoint(folder, which), encoder, device=device)


def load_checkpoint(folder: Path | str, which: Literal["best", "latest"] = "best") -> Checkpoint:
    """A checkpoint of a run, or the one that `folder` is."""
    folder = Path(folder)
    if (folder / _MANIFEST).exists():
        return open_store(folder.parent.parent).load(folder)
    return open_store(folder).load(which)


def policy_from(checkpoint: Checkpoint, encoder: nn.Module | None = None, *, device: torch.device | str = "cpu") -> Policy:
    """The policy that a checkpoint holds, on `device`, in evaluation mode."""
    saved: dict[str, Any] = checkpoint.state["ppo"]
    config = msgspec.convert(saved["config"], PPOConfig)
    policy = Policy(
        msgspec.convert(saved["observation_spec"], ObservationSpec),
        msgspec.convert(saved["action_spec"], ActionSpec),
        config.network,
        generator=torch.Generator().manual_seed(0),  # of first weights, which the saved ones replace
        device=torch.device(device),
        encoder=encoder,
        normalize_observations=config.normalize_observations,
        normalize_values=config.normalize_values,
        observation_momentum=config.observation_momentum,
    )
    load_module(policy, saved["policy"])
    return policy.eval()
