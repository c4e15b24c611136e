"""Training of a controller: a PPO run in the environment `GrowthEnv`. Its result is a file for `esper grow --controller`.

    result = train_controller(ControllerConfig(rounds=50), "runs/controller")
    result = train_controller(None, "runs/controller", resume=True)   # after a crash, or with a config of more rounds
    controller = load_controller("runs/controller/controller.safetensors")

The controller is the last policy, not the one with the best returns. Rounds draw different architectures, and these change the possible
gain by more than policies differ; and only the last policy has seen the end of the schedules of learning rate and entropy. The file is
written after every checkpoint, and again when a run is resumed, so it always holds the policy of the latest checkpoint.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import msgspec

from esper.controller.config import ControllerConfig
from esper.controller.env import GrowthEnv
from esper.controller.learned import load_controller, save_controller
from esper.controller.network import make_parts, make_policy
from esper.controller.value import ValueModel
from esper.devices import determinism, find_device, threads
from esper.parallel import ALONE, Group
from esper.rl.ppo import PPO
from esper.rl.run_setup import Relay
from esper.rl.training import RunOptions, RunResult, Trainer, run_trainer
from esper.rng import Streams
from esper.runs import load_module
from esper.runs.folder import RunError
from esper.tasks import TASKS, Task, TaskError, load_task

CONTROLLER = "controller.safetensors"  # file with the last policy, in the folder of a run


def train_controller(
    config: ControllerConfig | None, folder: Path | str | None = None, *, resume: bool = False, **options: Unpack[RunOptions]
) -> RunResult:
    """Train a controller in the folder of a new run; with `resume`, continue the run in the folder.

    A resumed run needs no `config`; if one is given, it may have more rounds. The run stops with a checkpoint after the round in which
    `should_stop()` becomes true.
    """
    return run_trainer(GROWTH, config, folder, resume=resume, **options)


@contextlib.contextmanager
def prepare_controller(config: ControllerConfig, group: Group = ALONE) -> Iterator[tuple[PPO, Relay]]:
    """Build the learner of a run and its environment. Reads only the files of the tasks. A mistake in the config raises RunError."""
    device, relay = group.place(find_device(config.device)), Relay()
    with threads(config.threads), determinism(config.deterministic):
        try:
            env = GrowthEnv(config, partial(load_task_from, config.data_dir), seed=config.ppo.seed, device=device, on_event=relay)
            generator = Streams(config.ppo.seed).torch("controller")
            parts = make_parts(config.network, config.ppo.network, generator=generator, value=start_value(config))
            ppo = PPO(
                env,
                config.ppo,
                parts.encoder,
                actor=parts.actor,
                critic=parts.critic,
                device=device,
                on_event=relay,
                group=group,
                counts_waiting=True,
            )
        except (ValueError, TaskError) as error:
            raise RunError(str(error)) from error
        with contextlib.closing(env):
            yield ppo, relay


def start_value(config: ControllerConfig) -> ValueModel | None:
    """Return the value model that the training starts from; None: one with random weights."""
    if config.start is None:
        return None
    value, network = load_controller(config.start).value, config.network
    if (value.members, value.width) != (network.members, network.width):
        raise ValueError(
            f"network: expected members {value.members} and width {value.width}, those of {config.start}, "
            f"got {network.members} and {network.width}"
        )
    return value


def load_task_from(data_dir: str | None, name: str) -> Task:
    """Load a task by name. Tasks with built-in data do not get the folder."""
    return load_task(name, data_dir=None if name in TASKS and TASKS[name].has_own_data else data_dir)


def write_controller(folder: Path, config: ControllerConfig, step: int, state: dict[str, Any]) -> None:
    """Write the policy of a checkpoint as a controller file into the folder of the run."""
    saved: dict[str, Any] = state["ppo"]
    policy = make_policy(config.network, config.ppo.network, generator=Streams(config.ppo.seed).torch("controller"))
    load_module(policy, saved["policy"])
    # Drop NaN, which JSON does not allow: a run that was stopped before any episode had ended has no mean return.
    summary = {name: value for name, value in state["summary"].items() if not isinstance(value, float) or math.isfinite(value)}
    info = {"run": folder.name, "step": step, "domain": msgspec.to_builtins(config.domain), **summary}
    save_controller(folder / CONTROLLER, policy, info)


GROWTH = Trainer(
    config=ControllerConfig,
    title=lambda config: "controller",
    prepare=lambda config, encoder, group: prepare_controller(config, group),
    changeable=("rounds", "threads", "checkpoint_every", "keep", "data_dir"),
    run_kind="controller",
    steps_of_all_ranks=False,
    after_checkpoint=write_controller,
    saves_within_rollouts=True,
)
