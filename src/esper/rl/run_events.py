"""What a training run reports beside what the learner does."""

from __future__ import annotations

from esper.events import Event


class RunStarted(Event, tag="run_started"):
    """Training begins, or goes on, at `step`."""

    step: int
    total_steps: int
    steps_per_update: int
    env_id: str
    num_envs: int
    device: str
    parameters: int


class CheckpointEvaluated(Event, tag="checkpoint_evaluated"):
    """The policy of a checkpoint played the episodes that the best one is chosen by."""

    step: int
    episodes: int
    mean_return: float
    mean_length: float
    cut: int = 0  # episodes that had not ended at the step limit
    steps: int = 0  # of all environments as one


class Evaluated(Event, tag="evaluated"):
    """The best policy played fresh episodes."""

    step: int  # of the checkpoint that it was taken from
    episodes: int
    mean_return: float
    mean_length: float
    cut: int = 0  # episodes that had not ended at the step limit
