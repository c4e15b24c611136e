"""Run folders made of settings and events, without training: as fast as writing a file, with numbers that a test chooses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esper.config import save
from esper.experiment.config import GrowTaskConfig
from esper.growth.events import EpochEnded, FinalTest, GrowthFinished, GrowthStarted
from esper.rl import PPOConfig, TrainConfig
from esper.rl.run_setup import CheckpointEvaluated, Evaluated, RunEnded, RunStarted
from esper.runs import EventLog
from esper.runs.folder import CONFIG, EVENTS, GROW


def made_growth(
    folder: Path, losses: Sequence[float], *, twin: Sequence[float] = (), accuracy: float = 0.9, has_ended: bool = True, **settings: Any
) -> Path:
    """Write a growth run with these validation losses, and a twin with its own; `settings` are those of `esper grow`."""
    config = GrowTaskConfig(task="digits", twin=bool(twin), epochs=len(losses), **settings)
    folder.mkdir(parents=True)
    save(config, folder / GROW)
    save(config, folder / CONFIG)
    size: dict[str, int] = {"parameters": 1000, "flops": 5000}
    with EventLog(folder / EVENTS, run=folder.name) as log:
        log.emit(GrowthStarted(epoch=0, epochs=config.epochs, controller=config.controller, raise_mode="joint", slots=["conv1"], **size))
        for epoch, loss in enumerate(losses, start=1):
            log.emit(EpochEnded(epoch=epoch, train_loss=loss, val_loss=loss, learning_rate=1e-3, decision="", slots=[], **size))
        if has_ended:
            log.emit(_growth_finished(losses))
            log.emit(FinalTest(loss_before=2.3, loss=losses[-1], accuracy_before=0.1, accuracy=accuracy))
    if twin:
        made_growth(folder / "twin", twin, accuracy=accuracy - 0.1, **settings | {"controller": "never"})
    return folder


def _growth_finished(losses: Sequence[float]) -> GrowthFinished:
    counts: dict[str, int] = {"tried": 0, "kept": 0, "rollbacks": 0, "parameters": 1000, "parameters_added": 0, "flops": 5000}
    loss = {"val_loss_before": 2.3, "val_loss": losses[-1]}
    return GrowthFinished(epoch=len(losses), why="finished", flops_added=0, total_gflops=1.0, seconds=1.0, **counts, **loss)


def made_ppo(folder: Path, returns: Sequence[float], *, seed: int = 0, status: str | None = "finished", **settings: Any) -> Path:
    """Write a PPO run whose checkpoints were evaluated with these returns. A status of None leaves out the end."""
    config = TrainConfig(env="cue", total_steps=100 * len(returns), ppo=PPOConfig(seed=seed), **settings)
    folder.mkdir(parents=True)
    save(config, folder / CONFIG)
    with EventLog(folder / EVENTS, run=folder.name) as log:
        of_env: dict[str, Any] = {"env_id": "cue", "num_envs": 4, "device": "cpu", "parameters": 10}
        log.emit(RunStarted(step=0, total_steps=config.total_steps, steps_per_update=100, **of_env))
        for number, mean_return in enumerate(returns, start=1):
            log.emit(CheckpointEvaluated(step=100 * number, episodes=4, mean_return=mean_return, mean_length=9.0))
        if status == "finished":
            log.emit(Evaluated(step=100 * len(returns), episodes=4, mean_return=returns[-1], mean_length=9.0))
        if status is not None:
            log.emit(RunEnded(step=100 * len(returns), status=status, seconds=1.0))
    time.sleep(0.001)  # so that later runs have later times
    return folder
