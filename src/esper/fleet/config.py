"""The error of a fleet: something that was asked for cannot be done, with what to do instead.

What can be set about a fleet, for all of its hosts and for each of them. Imports no torch.

Whether the saved state of a fleet can be loaded into another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from esper.config import Config, ConfigError, Count, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from esper.growth.config import Rent

if TYPE_CHECKING:
    from torch import Tensor


class FleetError(ValueError):
    pass


Share = Annotated[float, Meta(gt=0, le=1)]


class FleetConfig(Config):
    """How the hosts of a fleet train."""

    batch_size: Count = 64  # training samples of each host in a step
    steps_per_decision: PositiveInt | None = None  # training steps between two decisions; None: once through the training data
    validation_samples: PositiveInt | None = None  # the first so many of the validation part; None: all of it
    validation_batch: Count = 128  # samples of one forward pass; contributions are paired over these batches
    optimizer: Literal["adamw", "sgd"] = "adamw"  # of hosts and seeds
    weight_decay: NonNegativeFloat = 0.01
    momentum: Fraction = 0.9  # of sgd
    schedule: Literal["none", "cosine"] = "cosine"  # of the learning rate, by decisions; cosine: towards 0 at the horizon
    graphs: bool = True  # on a GPU, the steps between two decisions are recorded once and replayed
    precision: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """bfloat16 and float16 are those of activations, by autocast; weights stay in float32. In float16 every host has a loss scale. float32
    means all of its digits in convolutions on a GPU too, not TF32."""
    accumulate: PositiveInt = 1
    """Parts that a batch is cut into, one after another, with one step by the mean of their gradients: activations take so many times less
    memory. A batch norm sees the parts, and a probe takes each of them for a step."""
    checkpoint: bool = False
    """The activations inside a block of a host are not kept but computed again in the backward pass. A block is a module with parts of its
    own and no slots inside, of which every part has a lowering; what has none, and seeds, keep theirs."""

    def steps_for(self, samples: int) -> int:
        """Training steps between two decisions, where there are so many training samples."""
        return self.steps_per_decision or max(samples // self.batch_size, 1)

    def check(self) -> None:
        if self.batch_size % self.accumulate:
            raise ConfigError("accumulate", expected=f"a divisor of batch_size, which is {self.batch_size}", got=self.accumulate)


class HostSetting(Config):
    """What one host of a fleet trains on, and for how long."""

    seed: NonNegativeInt = 0  # of its first weights and of the order of its data
    growth_seed: NonNegativeInt = 0  # of the first weights of its seeds
    horizon: PositiveInt = 20  # decisions in its life
    learning_rate: PositiveFloat = 0.01
    label_noise: Fraction = 0.0  # share of its training labels that are wrong, for good
    data_share: Share = 1.0  # of the training data
    classes_share: Share = 1.0  # of the task's classes
    rent: Rent = Rent()

    def check(self) -> None:
        if self.label_noise >= 1:
            raise ConfigError("label_noise", expected="a float >= 0 and < 1", got=self.label_noise)


def check_state(state: Mapping[str, Any], tensors: Mapping[str, Tensor], *, hosts: int, keep: int) -> None:
    """Raises FleetError unless it is that of a fleet of as many hosts, with tensors of these names and shapes and no more snapshots."""
    if len(state["rows"]) != hosts:
        raise FleetError(f"the saved fleet has {len(state['rows'])} hosts, and this one {hosts}; make one of the same size")
    if len(state["snapshots"]) > keep:
        raise FleetError(
            f"the saved fleet has {len(state['snapshots'])} snapshots of every host, and this one keeps {keep}; "
            "make one with the same governor.keep"
        )
    own, saved = ({name: list(tensor.shape) for name, tensor in some.items()} for some in (tensors, state["tensors"]))
    for name in sorted(own.keys() | saved.keys()):
        if own.get(name) != saved.get(name):
            there, here = (shapes.get(name, "not there") for shapes in (saved, own))
            raise FleetError(f"the saved fleet is of other hosts: {name!r} is {there} in it and {here} here; make one of the same hosts")
