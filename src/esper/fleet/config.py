"""Settings of a fleet and of each of its hosts, the error that fleets raise, and the check of a saved state. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from esper.config import Config, ConfigError, Count, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from esper.growth.config import RentConfig


class FleetError(ValueError):
    """A request that a fleet cannot fulfil. The message says what to do instead."""


Share = Annotated[float, Meta(gt=0, le=1)]


class FleetConfig(Config):
    """How the hosts of a fleet train."""

    batch_size: Count = 64  # training samples per host and step
    steps_per_decision: PositiveInt | None = None  # training steps between two decisions; None: once through the training data
    validation_samples: PositiveInt | None = None  # number of validation samples, taken from the start; None: all
    validation_batch: Count = 128  # samples of one validation batch; hosts without a seed on trial are read by batch
    optimizer: Literal["adamw", "sgd"] = "adamw"  # of hosts and seeds
    weight_decay: NonNegativeFloat = 0.01
    momentum: Fraction = 0.9  # of sgd
    schedule: Literal["none", "cosine"] = "cosine"  # of the learning rate, by decisions; cosine: towards 0 at the horizon
    graphs: bool = True  # on a GPU, record a training step as a CUDA graph and replay it until the next decision
    precision: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """bfloat16 and float16 are the precision of activations, by autocast; weights stay in float32. In float16 every host has a loss scale.
    In float32, convolutions on a GPU do not use TF32."""
    accumulate: PositiveInt = 1
    """Number of parts that a batch is cut into. The parts are computed one after another, and one step follows the mean of their gradients,
    so activations take that many times less memory. A batch norm sees each part as a batch, and a probe counts each part as a step."""
    keep: Literal["best", "last"] = "last"
    """The result of a host: its last state, or the one with the lowest validation loss, whose weights are then held on the device."""
    checkpoint: bool = False
    """Recompute the activations inside a block of a host in the backward pass instead of keeping them. A block is a submodule with children
    and without slots inside, all of whose parts have a lowering. Other modules, and seeds, keep their activations."""

    def steps_for(self, samples: int) -> int:
        """Return the number of training steps between two decisions, for a task with `samples` training samples."""
        return self.steps_per_decision or max(samples // self.batch_size, 1)

    def check(self) -> None:
        if self.batch_size % self.accumulate:
            raise ConfigError("accumulate", expected=f"a divisor of batch_size, which is {self.batch_size}", got=self.accumulate)


class HostConfig(Config):
    """The random seeds, data, length of training and rent of one host of a fleet."""

    seed: NonNegativeInt = 0  # of the host's first weights and of the order of its data
    growth_seed: NonNegativeInt = 0  # of the first weights of the seeds it grows
    horizon: PositiveInt = 20  # number of decisions until its training ends
    learning_rate: PositiveFloat = 0.01
    label_noise: Fraction = 0.0  # share of its training labels that are wrong; the same ones in every epoch
    data_share: Share = 1.0  # share of the training data that it sees
    classes_share: Share = 1.0  # share of the task's classes that it sees
    rent: RentConfig = RentConfig()

    def check(self) -> None:
        if self.label_noise >= 1:
            raise ConfigError("label_noise", expected="a float >= 0 and < 1", got=self.label_noise)


def check_state(state: Mapping[str, Any], shapes: Mapping[str, list[int]], *, hosts: int, keep: int) -> None:
    """Raise FleetError unless the state fits a fleet with tensors of these shapes, `hosts` hosts, and `keep` snapshots of every host."""
    if len(state["rows"]) != hosts:
        raise FleetError(f"the saved fleet has {len(state['rows'])} hosts, and this one {hosts}; make one of the same size")
    if len(state["snapshots"]) > keep:
        raise FleetError(
            f"the saved fleet has {len(state['snapshots'])} snapshots of every host, but this one keeps {keep}; "
            "make one with the same governor.keep"
        )
    saved = {name: list(tensor.shape) for name, tensor in state["tensors"].items()}
    for name in sorted(shapes.keys() | saved.keys()):
        if shapes.get(name) != saved.get(name):
            raise FleetError(
                f"the saved fleet has other hosts: the shape of {name!r} is {saved.get(name, 'missing')} in it "
                f"and {shapes.get(name, 'missing')} here; make one of the same hosts"
            )
