"""Parts of a training run (environments, learner, evaluator), and the events that a run adds to those of the learner.

Nothing here touches a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from esper.devices import determinism, find_device, threads
from esper.parallel import ALONE, Group
from esper.rl.evaluate import PolicyEvaluation, evaluate
from esper.rl.events import (
    CheckpointEvaluated as CheckpointEvaluated,
    Evaluated as Evaluated,
    RunEnded as RunEnded,
    RunStarted as RunStarted,
)
from esper.rl.policy import Policy
from esper.rl.ppo import PPO
from esper.rl.run_config import TrainConfig
from esper.rng import Streams
from esper.runs import Event
from esper.runs.folder import RunError
from esper.vecenv import VecEnv, make
from esper.vecenv.builtin import BUILTIN


class Relay:
    """Passes events of the learner on to the log. Keeps them until there is one: the learner is built before the folder is touched."""

    def __init__(self) -> None:
        self._waiting: list[Event] = []
        self._emit: Callable[[Event], None] = self._waiting.append

    def __call__(self, event: Event) -> None:
        self._emit(event)

    def connect(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        for event in self._waiting:
            emit(event)
        self._waiting.clear()


@contextlib.contextmanager
def prepare(config: TrainConfig, *, encoder: nn.Module | None = None, group: Group = ALONE) -> Iterator[tuple[PPO, Relay]]:
    """Yield the learner of a run in its environment, which is closed at the end. Mistakes in the config are RunErrors."""
    device = group.place(find_device(config.device))
    relay = Relay()
    with threads(config.threads), determinism(config.deterministic), contextlib.closing(make_env(config, config.num_envs, device)) as env:
        try:
            ppo = PPO(env, config.ppo, encoder, device=device, on_event=relay, group=group)
        except ValueError as error:
            raise RunError(str(error)) from error
        yield ppo, relay


def make_env(config: TrainConfig, num_envs: int, device: torch.device) -> VecEnv:
    """Make the environments of a run: built-in ones on the learner's device, Gymnasium's on the CPU."""
    place = device if config.env in BUILTIN else torch.device("cpu")
    keywords: dict[str, Any] = dict(config.env_args)
    try:
        return make(config.env, num_envs, device=place, wrappers=config.wrappers, **keywords)
    except Exception as error:  # the environment's constructor may raise anything
        if isinstance(error, ValueError) or type(error) is ImportError:  # Gymnasium is missing
            raise RunError(str(error)) from error
        options = f" with {config.env_args}" if config.env_args else ""
        raise RunError(f"the environment {config.env!r} cannot be made{options}: {type(error).__name__}: {error}") from error


class EpisodeEvaluator:
    """Plays episodes in the environment of a run. Its environments are made at the first use and kept until `close`."""

    def __init__(
        self, config: TrainConfig, *, episodes: int | None = None, deterministic: bool = True, max_steps: int | None = None
    ) -> None:
        self.config, self.deterministic = config, deterministic
        self.episodes = config.eval_episodes if episodes is None else episodes
        self.max_steps = config.eval_max_steps if max_steps is None else max_steps
        self._env: VecEnv | None = None

    def score(
        self, policy: Policy, seed: int, should_stop: Callable[[], bool] = lambda: False, *, name: str = "policy"
    ) -> PolicyEvaluation | None:
        """Return the results of fresh episodes; the same `seed` gives the same episodes. None if the config asks for none.

        Writes no files, so the `name` of the policy is not used.
        """
        if not self.episodes:
            return None
        if self._env is None:
            self._env = make_env(self.config, min(self.config.num_envs, self.episodes), policy.device)
        streams = Streams(self.config.ppo.seed).spawn("evaluation of a run")
        return evaluate(
            policy,
            self._env,
            episodes=self.episodes,
            generator=None if self.deterministic else streams.torch(f"actions {seed}", policy.device),
            seed=streams.integer(f"environment {seed}"),
            max_steps=self.max_steps,
            should_stop=should_stop,
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def count_parameters(policy: nn.Module) -> int:
    """Count the weights that are trained; the statistics of normalisers are not."""
    return sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
