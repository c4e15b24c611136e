"""Events of a controller's training, in addition to those of the learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from esper.rl.events import TRAINING_RETURN
from esper.runs import Event
from esper.runs.events import Figure, RunDeclared

DECLARED = RunDeclared(
    run_kind="controller",
    figures=[
        Figure("utility", "round_ended/utility", unit="nats", better="up"),
        Figure("gain", "round_ended/gain", unit="nats", better="up"),
        Figure("rent", "round_ended/rent", unit="nats", better="down"),
        TRAINING_RETURN,
    ],
    unit="lives",
)


class BlueprintCount(msgspec.Struct, frozen=True):
    """Outcomes of the seeds of one blueprint; a part of `RoundEnded`."""

    tried: int
    kept: int
    pruned: int  # including those removed by the governor
    parameters: int  # sum over all that were tried
    gain: float | None = None  # cost of removing one as measured last, in nats: mean over the measured seeds
    measured: int = 0  # seeds with a measured gain
    rolled_back: int = 0  # seeds removed by the governor; also counted in `pruned`
    flops: int | None = None  # of a forward pass for one sample, sum over all that were tried
    reasons: dict[str, int] = {}  # why seeds were pruned or rolled back, without numbers -> times
    refused: dict[str, int] = {}  # action and reason of gates that refused, without numbers -> times


class HostEnded(Event, tag="host_ended", frozen=True):
    """A life under the policy has ended. `env` is its place in the round. Its twin is the same host, decided for by the heuristic."""

    fleet: int  # number of its fleet within the batch
    round: int  # of its fleet
    task: str
    host: str
    seed: int  # lives of the same seed have the same twin
    horizon: int
    rent_level: str  # low, middle or high, see RENT_LEVELS
    rent_parameters: float  # its price of parameters, see RentConfig
    gain: float  # over the twin, in units of validation loss
    rent: float  # more than that of the twin
    utility: float  # gain minus rent
    grown: int
    kept: int
    rollbacks: int
    val_losses: list[float]  # after every training segment
    twin_losses: list[float]
    samples: int = 0  # training samples; 0: unknown
    label_noise: float = 0.0
    seeds: list[dict[str, Any]] = []  # all that were grown, as tables show them
    others: list[str] = []  # steps that the heuristic would not have taken


class RoundEnded(Event, tag="round_ended", frozen=True):
    """All lives of a fleet have ended. Means are over the lives, in units of validation loss."""

    task: str
    host: str
    horizon: int
    hosts: int
    gain: float  # over the twins, the same hosts under the heuristic
    rent: float  # more than that of the twins
    utility: float  # gain minus rent
    worth: float  # the rewards
    grown: int  # seeds of all hosts
    kept: int
    rollbacks: int
    samples: int  # trained on by all hosts, twins included
    steps: int = 0  # of the policy, over all lives
    alike: float = 0.0  # share of the lives in which every step was the heuristic's
    memory_per_host: int = 0  # bytes, with the largest seed in every slot
    recordings: int = 0  # number of times that training steps were recorded for replay, on a GPU
    kernels: int = 0  # number of Triton kernels compiled in this process so far
    blueprints: dict[str, BlueprintCount] = {}  # by name, only those that were tried
    skipped: int = 0  # steps that hosts skipped because their gradients overflowed in float16
    reward: dict[str, float] = {}  # its parts, before their sum is limited
    decisions: dict[str, int] = {}  # operation -> how often the policy chose it
    gflops: float = 0.0  # used by all hosts and twins, validation and pruned seeds included
    round: int = 0  # number of rounds that the fleet had before
    fleet: int = 0  # number of the fleet within the batch
    step_seconds: float | None = None  # mean duration of a training step of all hosts and twins, in this session
    measure_seconds: float = 0.0  # time for validation and contributions, in this session
    reused: bool = False  # whether its fleet had trained other hosts before, in this session

    def shown(self) -> Mapping[str, Any]:
        """Show blueprints under their names: blueprints/norm/kept."""
        blueprints = {
            name: {key: value for key, value in msgspec.structs.asdict(count).items() if not isinstance(value, dict)}
            for name, count in self.blueprints.items()
        }
        return {**super().shown(), "blueprints": blueprints}
