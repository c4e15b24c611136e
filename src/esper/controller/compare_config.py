"""Settings of a comparison of controllers. Imports no torch, so that the command line shows them quickly."""

from __future__ import annotations

from typing import Literal

from esper.config import Config, ConfigError, Count, NonNegativeInt, PositiveFloat, PositiveInt, Threads
from esper.controller.config import HELD_OUT_SEEDS, Channels
from esper.fleet.config import FleetConfig
from esper.growth.config import GrowthConfig

NAMES = ("never", "random", "schedule", "heuristic")  # built-in controllers; other names are paths of controller files
Level = Literal["low", "middle", "high"]


class CompareConfig(Config):
    """Comparison of controllers on the same hosts with the same data orders, seed by seed, with all costs counted."""

    controllers: tuple[str, ...] = NAMES  # names, or paths of controller files; the first file is compared with all others
    tasks: tuple[str, ...] = ("digits",)
    hosts: tuple[Channels, ...] = ("4-8-16",)  # channels of the blocks of the hosts
    seeds: PositiveInt = 20  # hosts per task and architecture; their seeds 0, 1, ... are never trained on
    levels: tuple[Level, ...] = ("low", "middle", "high")  # rent levels
    horizon: PositiveInt = 20  # training segments of a host
    learning_rate: PositiveFloat = 0.01
    controls: bool = True  # add the controls longer and final size, both with the FLOPs of the compared controller
    sweep: tuple[Channels, ...] = ()  # static sizes to try instead of growing
    tuning_seeds: PositiveInt = 6  # number of training seeds for choosing the fixed schedule
    rows: Count = 128  # hosts trained at once
    seed: NonNegativeInt = 0  # random seed of random plans and bootstrap
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available
    threads: Threads | None = None  # CPU threads of torch; None: torch's default
    data_dir: str | None = None  # folder with the files of tasks that need some
    fleet: FleetConfig = FleetConfig()
    growth: GrowthConfig = GrowthConfig()

    def check(self) -> None:
        for name in ("controllers", "tasks", "hosts", "levels"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ConfigError(name, expected="names, at least one and each once", got=given)
        if self.seeds > HELD_OUT_SEEDS:
            raise ConfigError("seeds", expected=f"at most {HELD_OUT_SEEDS:,}, because host seeds above are for training", got=self.seeds)
        if self.controls and self.growth.lifecycle.raise_mode == "shadow":
            raise ConfigError(
                "controls", expected="false with raise_mode shadow, because a shadow seed is not part of the host from the start", got=True
            )

    @property
    def files(self) -> tuple[str, ...]:
        """Controllers that are given as paths of files."""
        return tuple(name for name in self.controllers if name not in NAMES)

    @property
    def compared(self) -> str:
        """The controller that is compared with all others: the first file, else the first built-in one of a fixed order."""
        return next((name for name in (*self.files, "heuristic", "schedule", "random") if name in self.controllers), "never")
