"""Recurrent PPO for factored actions, and training runs as folders.

Names are imported when they are first used, so that importing `esper.rl.config` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import lazy_names

if TYPE_CHECKING:
    from esper.rl.config import NetworkConfig as NetworkConfig, PPOConfig as PPOConfig
    from esper.rl.evaluate import PolicyEvaluation as PolicyEvaluation, record_video as record_video
    from esper.rl.events import Update as Update
    from esper.rl.policy import Policy as Policy, load_policy as load_policy
    from esper.rl.ppo import PPO as PPO, TrainingStopped as TrainingStopped
    from esper.rl.run_config import TrainConfig as TrainConfig
    from esper.rl.training import RunResult as RunResult, train_run as train_run
    from esper.runs.folder import RunError as RunError

__getattr__, __dir__, __all__ = lazy_names(__name__)
