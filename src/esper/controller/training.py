"""Training of a controller: a PPO run over the lives of hosts. Its result is a file for `esper grow --controller`.

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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import msgspec
import torch

from esper.controller.config import ControllerConfig
from esper.controller.events import DECLARED
from esper.controller.learned import Learned, load_controller, save_controller
from esper.controller.lives import Lives
from esper.controller.policy import SIZES, StepEncoder, make_policy
from esper.controller.trained import file_of
from esper.devices import determinism, find_device, threads
from esper.growth.controllers.heuristic import Heuristic
from esper.parallel import ALONE, Group
from esper.rl.collector import RolloutSource
from esper.rl.policy import Policy
from esper.rl.ppo import PPO, NoEnvironment
from esper.rl.run_setup import Relay
from esper.rl.training import RunOptions, RunResult, Trainer, run_trainer
from esper.rng import Streams
from esper.runs import Event, load_module
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
    """Build the learner of a run. Reads only the start and the files of the tasks. A mistake in the config raises RunError."""
    device, relay = group.place(find_device(config.device)), Relay()
    with threads(config.threads), determinism(config.deterministic):
        try:
            begun = None if config.start is None else load_controller(file_of(config.start))
            first, advisor = first_policy(config, begun), Heuristic if begun is None else begun.advisor
            lives = partial(Lives, config, advisor, partial(load_task_from, config.data_dir), device=device, on_event=relay, group=group)
            ppo = make_learner(config, first, lives, on_event=relay, group=group)
        except (ValueError, TaskError) as error:
            raise RunError(str(error)) from error
        yield ppo, relay


def make_learner(
    config: ControllerConfig,
    first: Policy,
    lives: Callable[[Policy], RolloutSource],
    *,
    on_event: Callable[[Event], None] = lambda event: None,
    group: Group = ALONE,
) -> PPO:
    """Build a learner that begins with the weights of a policy. `lives` returns what collects the rollouts of the learner's own policy."""
    ppo = PPO(
        NoEnvironment(config.hosts, first.observation_spec, first.action_spec),
        config.ppo,
        first.encoder,
        actor=first.actor,
        critic=first.critic,
        on_event=on_event,
        group=group,
        counts_waiting=True,
        collector=lives,
    )
    load_module(ppo.policy, first.state_dict())
    return ppo


def first_policy(config: ControllerConfig, begun: Learned | None) -> Policy:
    """Return the policy that the training starts from. It stays on the CPU, because it decides about one host at a time."""
    network, memory = config.network, config.ppo.network
    if begun is None or begun.policy is None:
        return make_policy(network, memory, SIZES, generator=Streams(config.ppo.seed).torch("controller"))
    assert isinstance(begun.policy.encoder, StepEncoder)
    theirs, their_memory = begun.policy.encoder.config, begun.policy.network
    if (theirs.width, their_memory) != (network.width, memory):  # the trust is learned
        raise ValueError(
            f"network: expected a width of {theirs.width} and {their_memory}, those of {config.start}, got {network.width} and {memory}"
        )
    return begun.policy


def load_task_from(data_dir: str | None, name: str) -> Task:
    """Load a task by name. Tasks with built-in data do not get the folder."""
    return load_task(name, data_dir=None if name in TASKS and TASKS[name].has_own_data else data_dir)


def write_controller(folder: Path, config: ControllerConfig, step: int, state: dict[str, Any]) -> None:
    """Write the policy of a checkpoint as a controller file into the folder of the run."""
    saved: dict[str, Any] = state["ppo"]
    policy = make_policy(config.network, config.ppo.network, SIZES, generator=torch.Generator())
    load_module(policy, saved["policy"])
    begun = None if config.start is None else load_controller(file_of(config.start))
    # Drop NaN, which JSON does not allow: a run that was stopped before any episode had ended has no mean return.
    summary = {name: value for name, value in state["summary"].items() if not isinstance(value, float) or math.isfinite(value)}
    info = {"run": folder.name, "step": step, "domain": msgspec.to_builtins(config.domain), **summary}
    if begun is None:
        save_controller(folder / CONTROLLER, policy, info)
    else:
        save_controller(folder / CONTROLLER, policy, info, ensemble=begun.ensemble, gains=begun.description.gains)


GROWTH = Trainer(
    config=ControllerConfig,
    title=lambda config: "controller",
    prepare=lambda config, encoder, group: prepare_controller(config, group),
    changeable=("rounds", "resident", "threads", "checkpoint_every", "keep", "data_dir"),
    declared=DECLARED,
    steps_of_all_ranks=False,
    after_checkpoint=write_controller,
)
