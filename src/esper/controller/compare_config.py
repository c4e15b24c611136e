"""What can be set about a comparison of controllers. Imports no torch, so that a command line can show it at once."""

from __future__ import annotations

from typing import Literal

from esper.config import Config, ConfigError, Count, NonNegativeInt, PositiveFloat, PositiveInt, Threads
from esper.controller.config import HELD_OUT_SEEDS, Channels
from esper.fleet.config import FleetConfig
from esper.growth.config import GrowthConfig

NAMES = ("never", "random", "schedule", "heuristic")  # beside paths of controller files
Level = Literal["low", "middle", "high"]


class CompareConfig(Config):
    """Controllers on the same hosts with the same data orders, seed by seed, with everything counted that it cost."""

    controllers: tuple[str, ...] = NAMES  # names, or paths of controller files; the first file is what the others are held against
    tasks: tuple[str, ...] = ("digits",)
    hosts: tuple[Channels, ...] = ("4-8-16",)  # channels of their blocks
    seeds: PositiveInt = 20  # hosts of each kind, seeds 0, 1, ...: never trained on
    levels: tuple[Level, ...] = ("low", "middle", "high")  # of rent
    horizon: PositiveInt = 20  # decisions
    learning_rate: PositiveFloat = 0.01
    controls: bool = True  # small-trained-longer and final-size, both at the FLOPs of what is compared
    sweep: tuple[Channels, ...] = ()  # static sizes that somebody would try instead of growing
    tuning_seeds: PositiveInt = 6  # training seeds that the fixed schedule is chosen by
    rows: Count = 128  # hosts that train at once
    seed: NonNegativeInt = 0  # of random plans and bootstrap
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    threads: Threads | None = None  # CPU threads of torch; None: its own choice
    data_dir: str | None = None  # where tasks that need files find them
    fleet: FleetConfig = FleetConfig()
    growth: GrowthConfig = GrowthConfig()

    def check(self) -> None:
        for name in ("controllers", "tasks", "hosts", "levels"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ConfigError(name, expected="names, at least one and each once", got=given)
        if self.seeds > HELD_OUT_SEEDS:
            raise ConfigError("seeds", expected=f"at most {HELD_OUT_SEEDS:,}: those above are trained on", got=self.seeds)
        if self.controls and self.growth.lifecycle.raise_mode == "shadow":
            raise ConfigError("controls", expected="false where seeds are raised in the shadow: none is there from the start", got=True)

    @property
    def files(self) -> tuple[str, ...]:
        """Those of the controllers that are paths."""
        return tuple(name for name in self.controllers if name not in NAMES)

    @property
    def compared(self) -> str:
        """The controller that the others are held against."""
        return next((name for name in (*self.files, "heuristic", "schedule", "random") if name in self.controllers), "never")
