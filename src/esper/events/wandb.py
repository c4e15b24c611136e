"""Scalars for Weights & Biases: kept in the run folder, and sent only where that is asked for.

What was kept is sent later by W&B's own program: `wandb sync runs/maze-7/wandb/offline-run-*`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from esper.events.event import Record
from esper.events.scalars import scalars_of

WandbMode = Literal["offline", "online"]
STEP = "step"  # the metric that all others are plotted over


class WandbSink:
    """Writes each finite number of each event at the record's step, named as `scalars_of` names it, into `folder`/wandb.

    Offline nothing leaves this machine. A run that is resumed becomes another one of W&B's, in the group of the same name.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        run: str,
        mode: WandbMode = "offline",
        project: str = "esper",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if mode not in get_args(WandbMode):
            raise ValueError(f"the mode of Weights & Biases must be one of {get_args(WandbMode)}, not {mode!r}")
        if mode == "offline":
            # Its error reports go out by a way of their own, which the mode of a run does not close. Read when it is imported and started.
            os.environ["WANDB_ERROR_REPORTING"] = "false"
        try:
            from wandb import Error, Settings, init
        except ImportError as error:
            raise ImportError(f"Weights & Biases cannot be imported ({error}); install it with: pip install 'esper[wandb]'") from error
        try:
            self._run: Any = init(
                dir=str(folder),
                project=project,
                name=run,
                group=run,
                mode=mode,
                config=dict(config or {}),
                reinit="create_new",  # leaves alone whatever else this process has going at W&B
                settings=Settings(**_settings(mode)),
            )
        except Error as error:
            raise RuntimeError(f"Weights & Biases does not start in mode {mode!r}: {error}") from error
        # Not W&B's own step, which must never fall: an evaluation belongs to the step of an earlier checkpoint.
        self._run.define_metric("*", step_metric=STEP)

    def write(self, record: Record) -> None:
        values = scalars_of(record)
        if values:
            self._run.log({STEP: record.step, **values})

    def close(self) -> None:
        self._run.finish()


def _settings(mode: WandbMode) -> dict[str, Any]:
    """Silent, and standard output stays as it is. Offline it does not look at the machine either: that may ask the network."""
    about_the_machine = ("x_disable_machine_info", "x_disable_meta", "x_disable_stats")
    quiet = {"silent": True, "console": "off", "disable_git": True, "disable_code": True}
    return quiet | {name: mode == "offline" for name in about_the_machine}
