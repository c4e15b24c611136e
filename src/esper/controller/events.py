"""What a controller's training tells beside what the learner does."""

from __future__ import annotations

from esper.events import Event


class RoundEnded(Event, tag="round_ended", frozen=True):
    """All hosts of a squad have come to their end. Means over the hosts, in nats of validation loss."""

    task: str
    host: str
    horizon: int
    hosts: int
    gain: float  # over the never-grow twin
    rent: float
    utility: float  # gain minus rent
    worth: float  # what the reward adds up to
    grown: int  # seeds of all hosts
    kept: int
    rollbacks: int
    samples: int  # trained on by all hosts, twins included
    steps: int = 0  # of the environment, over all hosts
    memory_per_host: int = 0  # bytes, with the largest seed in every slot
    recordings: int = 0  # of steps that were then replayed, on a GPU
    kernels: int = 0  # of our own, compiled in this process so far
    reward: dict[str, float] = {}  # parts of what a host is worth, weighted, before their sum is bounded
