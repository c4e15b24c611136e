"""Training a controller: a run of `esper.rl` in the environment of growth, whose end is a file that `esper grow --controller` takes.

result = train_controller(ControllerConfig(rounds=50), "runs/controller")
result = train_controller(None, "runs/controller", resume=True)   # after a crash, or with a config of more rounds
controller = load_controller("runs/controller/controller.safetensors")

The controller is the last policy, for which learning rate and entropy come to their ends, and not the one with the best returns: rounds
differ in the architectures that they draw, and so in what can be gained at all, by more than policies do. Its file is written after every
checkpoint, and again when a run goes on, so it is that of the latest checkpoint.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import msgspec
from torch import nn

from esper.controller.config import ControllerConfig
from esper.controller.env import GrowthEnv
from esper.controller.learned import save_controller
from esper.controller.network import make_parts, make_policy
from esper.devices import determinism, find_device, threads
from esper.parallel import ALONE, Group
from esper.rl.evaluate import Evaluation
from esper.rl.policy import Policy
from esper.rl.ppo import PPO
from esper.rl.run_setup import Relay
from esper.rl.training import RunOptions, RunResult, Trainer, run_trainer
from esper.rng import Streams
from esper.runs import load_module
from esper.runs.folder import RunError
from esper.tasks import TASKS, Task, TaskError, load_task

CONTROLLER = "controller.safetensors"  # in the folder of a run: its last policy


def train_controller(
    config: ControllerConfig | None, folder: Path | str | None = None, *, resume: bool = False, **options: Unpack[RunOptions]
) -> RunResult:
    """Train a controller in the folder of a new run; with `resume`, go on with the run in the folder, with seeds alive in the fleets.

    A resumed run needs no `config`; one that is given may ask for more rounds. The run stops after the round in which `should_stop()`
    becomes true, with a checkpoint.
    """
    return run_trainer(GROWTH, config, folder, resume=resume, **options)


@contextlib.contextmanager
def prepare_controller(config: ControllerConfig, group: Group = ALONE) -> Iterator[tuple[PPO, Relay]]:
    """The learner of a run in its environment. Touches no files but those of the tasks; mistakes in the config are RunErrors."""
    device, relay = group.place(find_device(config.device)), Relay()
    with threads(config.threads), determinism(config.deterministic):
        try:
            env = GrowthEnv(config, partial(load_from, config.data_dir), seed=config.ppo.seed, device=device, on_event=relay)
            parts = make_parts(
                config.network,
                config.ppo.network,
                slots=env.slots,
                blueprints=env.blueprints,
                generator=Streams(config.ppo.seed).torch("controller"),
            )
            ppo = PPO(env, config.ppo, parts.encoder, actor=parts.actor, critic=parts.critic, device=device, on_event=relay, group=group)
        except (ValueError, TaskError) as error:
            raise RunError(str(error)) from error
        with contextlib.closing(env):
            yield ppo, relay


def load_from(data_dir: str | None, name: str) -> Task:
    """A task; those that bring their own data take no folder."""
    return load_task(name, data_dir=None if name in TASKS and TASKS[name].has_own_data else data_dir)


def _prepare(config: ControllerConfig, encoder: nn.Module | None, group: Group) -> contextlib.AbstractContextManager[tuple[PPO, Relay]]:
    return prepare_controller(config, group)


def _no_score(config: ControllerConfig, policy: Policy, seed: int) -> Evaluation | None:
    """Fresh lives are dear, and nobody needs the best policy: the last one is the controller."""
    return None


def write_controller(folder: Path, config: ControllerConfig, step: int, state: dict[str, Any]) -> None:
    """Write the controller of a checkpoint."""
    saved: dict[str, Any] = state["ppo"]
    slots, blueprints, _ = saved["observation_spec"]["candidates"]["shape"]
    policy = make_policy(
        config.network,
        config.ppo.network,
        slots=slots,
        blueprints=blueprints,
        generator=Streams(config.ppo.seed).torch("controller"),
        normalize_values=config.ppo.normalize_values,
    )
    load_module(policy, saved["policy"])
    # A training that was stopped before any host's life had ended has no mean return.
    summary = {name: value for name, value in state["summary"].items() if not isinstance(value, float) or math.isfinite(value)}
    info = {"run": folder.name, "step": step, "domain": msgspec.to_builtins(config.domain), **summary}
    save_controller(folder / CONTROLLER, policy, info, ops=("wait", *config.ops), actions=config.actions)


GROWTH = Trainer(
    config=ControllerConfig,
    title=lambda config: "controller",
    prepare=_prepare,
    changeable=("rounds", "threads", "checkpoint_every", "keep", "data_dir"),
    score=_no_score,
    is_evaluated=lambda config: False,
    run_kind="controller",
    steps_of_all_ranks=False,
    after_checkpoint=write_controller,
)
