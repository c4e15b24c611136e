"""What can be set about a fleet, for all of its hosts and for each of them. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from esper.config import Config, ConfigError, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from esper.growth.config import Rent

Share = Annotated[float, Meta(gt=0, le=1)]


class FleetConfig(Config):
    """How the hosts of a fleet train."""

    batch_size: PositiveInt = 64  # training samples of each host in a step
    steps_per_decision: PositiveInt | None = None  # training steps between two decisions; None: once through the training data
    validation_samples: PositiveInt | None = None  # the first so many of the validation part; None: all of it
    validation_batch: PositiveInt = 128  # samples of one forward pass; contributions are paired over these batches
    optimizer: Literal["adamw", "sgd"] = "adamw"  # of hosts and seeds
    weight_decay: NonNegativeFloat = 0.01
    momentum: Fraction = 0.9  # of sgd
    schedule: Literal["none", "cosine"] = "cosine"  # of the learning rate, by decisions; cosine: towards 0 at the horizon
    precision: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16: of activations, by autocast; weights stay in float32


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
