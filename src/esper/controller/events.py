"""What a controller's training tells beside what the learner does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from esper.runs import Event


class BlueprintCount(msgspec.Struct, frozen=True):
    """What became of the seeds of one blueprint; a part of `RoundEnded`."""

    tried: int
    kept: int
    pruned: int  # or taken out by the governor
    parameters: int  # of all that were tried
    gain: float | None = None  # what removing one would cost, as last measured: mean over those that were measured, in nats


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
    blueprints: dict[str, BlueprintCount] = {}  # those that were tried
    skipped: int = 0  # steps that hosts did not take because their gradients overflowed in float16
    reward: dict[str, float] = {}  # parts of what a host is worth, weighted, before their sum is bounded

    def shown(self) -> Mapping[str, Any]:
        """Show blueprints under their names: blueprints/norm/kept."""
        blueprints = {name: msgspec.structs.asdict(count) for name, count in self.blueprints.items()}
        return {**super().shown(), "blueprints": blueprints}
