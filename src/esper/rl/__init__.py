"""Recurrent PPO for factored actions, and training runs as folders.

Names are imported when they are first used: `from esper.rl.config import PPOConfig` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import names_of

if TYPE_CHECKING:
    from esper.rl.checkpoints import load_policy
    from esper.rl.config import NetworkConfig, PPOConfig
    from esper.rl.evaluate import Evaluation
    from esper.rl.events import Update
    from esper.rl.policy import Policy
    from esper.rl.ppo import PPO, TrainingStopped
    from esper.rl.run_config import TrainConfig
    from esper.rl.runs import Result, RunError, resume_run, train_run
    from esper.rl.video import record_video

_MODULES = {
    "PPO": "ppo",
    "Evaluation": "evaluate",
    "NetworkConfig": "config",
    "PPOConfig": "config",
    "Policy": "policy",
    "Result": "runs",
    "RunError": "runs",
    "TrainConfig": "run_config",
    "TrainingStopped": "ppo",
    "Update": "events",
    "load_policy": "checkpoints",
    "record_video": "video",
    "resume_run": "runs",
    "train_run": "runs",
}

__all__ = [
    "PPO", "Evaluation", "NetworkConfig", "PPOConfig", "Policy", "Result", "RunError", "TrainConfig", "TrainingStopped", "Update",
    "load_policy", "record_video", "resume_run", "train_run",
]  # fmt: skip


__getattr__, __dir__ = names_of(__name__, _MODULES)
