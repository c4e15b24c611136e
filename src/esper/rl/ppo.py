"""Recurrent PPO: collect, update, evaluate, save.

    ppo = PPO(env, PPOConfig(num_steps=128))
    for update in ppo.train(total_steps=200_000):
        print(update.step, update.mean_return)

`PPO` joins the parts: the `Policy`, the `Collector` that acts in the environments, and the `Learner` that takes gradient steps. `collect`
and `update` can also be called on their own. With several ranks, all of them must call every method (see `esper.parallel`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Never
from warnings import warn

import msgspec
import numpy as np
import torch
from torch import nn

from esper.devices import Stopwatch
from esper.gradients import gradient_health
from esper.intervals import student_quantile
from esper.parallel import ALONE, Group
from esper.profiling import TELEMETRY
from esper.rl.batch import Rollout
from esper.rl.checkpoints import load_learner, save_learner
from esper.rl.collector import Collector, RolloutSource
from esper.rl.config import PPOConfig
from esper.rl.evaluate import MAX_STEPS, PolicyEvaluation, evaluate
from esper.rl.events import (
    FEW_EPISODES,
    Calibration,
    CompileFailed,
    EpisodesRestarted,
    GradientNorms,
    LearnerMonitor,
    RewardsNotFinite,
    Skipped,
    Update,
)
from esper.rl.learner import Learner, Outcome
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.runs import Event, load_module, plain_names
from esper.runs.anomalies import resident_bytes
from esper.runs.telemetry import Internals, Telemetry
from esper.text_table import did_you_mean
from esper.vecenv import Actions, ActionSpec, EnvSource, ObservationSpec, Saveable, Spaces, Timestep, VecEnv, make
from esper.vecenv.builtin import BUILTIN
from esper.vecenv.spaces import HasSpaces, spaces_of_specs

DEFAULT_NUM_ENVS = 16  # environments made from a name or a function


class TrainingStopped(RuntimeError):
    """Training ended because too many gradient steps, or all rewards of too many updates, were not finite.

    No such gradient step has changed the weights, and no such reward was learned from.
    """


def _ignore(event: Event) -> None:
    pass


Callback = Callable[["PPO", Update], bool | None]  # called after every update; False ends training

_OTHER_POLICIES = [f"{encoder}{core}Policy" for encoder in ("Mlp", "Cnn", "MultiInput") for core in ("", "Lstm")]  # Stable-Baselines3's
# Fields that `Outcome` and the event `Update` share.
_SHARED = tuple(field.name for field in dataclasses.fields(Outcome) if field.name in Update.__struct_fields__)


class PPO:
    """Trains a recurrent policy in a batch of environments.

    - `env`: a batch from `esper.vecenv.make`, or anything that `make` takes: a name, a function that makes one environment, or a Gymnasium
      environment.
    - `num_envs`: the number of environments to make from it; by default 16, or 1 if `env` is a single environment.
    - `encoder`, `actor`, `critic`: replace the built-in ones (see `Policy`).
    - `device`: of the policy; by default that of the environment.
    - `on_event`: called with every event: updates, skipped steps, anomalies.
    - `learning_rate`: replaces the schedule of the config; a function of the share of training that is left, which falls from 1 to 0.
    - `group`: the ranks that train together; all train the same policy, each in its own environments.
    - `counts_waiting`: count rows that only wait for their next episode (`Timestep.valid` is false) as steps, too.
    - `collector`: collects rollouts for the policy in its own way; `env` then only tells what is observed and done.
    """

    def __init__(
        self,
        env: VecEnv | EnvSource,
        config: PPOConfig | None = None,
        encoder: nn.Module | None = None,
        *,
        num_envs: int | None = None,
        actor: nn.Module | None = None,
        critic: nn.Sequential | None = None,
        device: torch.device | str | None = None,
        on_event: Callable[[Event], None] = _ignore,
        learning_rate: Callable[[float], float] | None = None,
        group: Group | None = None,
        counts_waiting: bool = False,
        collector: Callable[[Policy], RolloutSource] | None = None,
        **unknown: Never,
    ) -> None:
        _check_call(env, config, learning_rate, unknown)
        env = _as_batch(env, num_envs, device)
        self.env, self.config = env, config or PPOConfig()
        self.device = torch.device(device) if device is not None else env.device
        self.on_event = on_event
        self.group, self.counts_waiting = group or ALONE, counts_waiting
        config = self.config
        common = Streams(config.seed)
        self.streams = common.spawn(f"rank {self.group.rank}") if self.group.rank else common
        self.policy = Policy(
            env.observation_spec,
            env.action_spec,
            config.network,
            generator=common.torch("policy"),
            device=self.device,
            encoder=encoder,
            actor=actor,
            critic=critic,
            normalize_observations=config.normalize_observations,
            normalize_values=config.normalize_values,
            observation_momentum=config.observation_momentum,
            spaces=env.spaces if isinstance(env, HasSpaces) else None,
        )
        self.policy.eval()  # acting and deployment use evaluation mode; only an update trains
        self.group.broadcast_(self.policy.state_dict().values())  # a custom encoder may have different first weights on every rank
        self.collector: RolloutSource = (
            Collector(
                env,
                self.policy,
                num_steps=config.num_steps,
                length=config.sequence_length,
                time_limit_is_end=config.time_limit_is_end,
                validate=config.validate,
            )
            if collector is None
            else collector(self.policy)
        )
        self.learner = Learner(
            self.policy,
            config,
            num_envs=env.num_envs,
            rng=self.streams.numpy("minibatches"),
            on_compile_failure=self._compile_failed,
            group=self.group,
            schedule=learning_rate,
        )
        self.step = 0  # steps of all environments of all ranks so far
        self._new_steps = 0  # those of the last rollout
        self.seconds = 0.0  # that training has taken so far, with what its caller did between updates
        self.updates = 0
        self.skipped = 0  # gradient steps that were not finite so far
        self.telemetry = Telemetry()
        self.monitor = LearnerMonitor(config.thresholds, has_normalizer=config.normalize_observations)
        self._has_reward = True  # whether any reward of the last update was finite, over all ranks
        self._return_error = math.nan  # standard error of the last mean return; nan if it is over few episodes
        self._reported_bad_rewards = 0  # bad rewards of all ranks that events have reported so far
        self._has_begun = False  # whether the environments were reset

    @property
    def steps_per_update(self) -> int:
        """Steps of one rollout of all ranks. Fewer count where environments spend some of them on resets."""
        return self.config.num_steps * self.env.num_envs * self.group.world_size

    def train(self, total_steps: int, *, seconds: float | None = None) -> Iterator[Update]:
        """Train until the environments have taken `total_steps` steps, including those before this call. Yield after every update.

        With `seconds`, training ends after that time if it is earlier, and schedules follow steps or time, whichever is ahead.
        """
        if total_steps < 1:
            raise ValueError(f"total_steps must be at least 1; got {total_steps}")
        done, updates, without_reward = None, 0, 0  # time, updates of this call, updates in a row without a finite reward
        while self.progress(total_steps, seconds) < 1.0:
            other = 0.0 if done is None else time.perf_counter() - done  # time that the caller spent since the previous update
            watch = Stopwatch(self.device)
            watch.mark()
            progress = self.progress(total_steps, seconds)  # when the rollout begins
            rollout = self.collect()
            watch.mark()
            outcome = self.update(rollout, progress=progress)
            watch.mark()
            collect_seconds, update_seconds = watch.seconds()
            self.seconds += collect_seconds + update_seconds + other
            with TELEMETRY:
                update = self._report(outcome, collect_seconds, update_seconds, other)
            done = time.perf_counter()
            yield update
            if outcome.skipped_in_a_row >= self.config.max_skips:
                raise TrainingStopped(
                    f"{outcome.skipped_in_a_row} gradient steps in a row were not finite (limit {self.config.max_skips}); "
                    "the events of kind 'skipped' show which part of the loss it was"
                )
            updates, without_reward = updates + 1, 0 if self._has_reward else without_reward + 1
            is_over = self.progress(total_steps, seconds) == 1.0
            is_all = without_reward == updates and is_over  # a short training had no finite reward at all
            if without_reward >= self.config.max_skips or is_all:
                which = "update" if without_reward == 1 else f"{without_reward} updates"
                raise TrainingStopped(
                    f"no reward was finite in the last {which} (limit {self.config.max_skips}), so nothing was learned; look for NaN and "
                    "infinity in the rewards of the environment"
                )

    def progress(self, total_steps: int, seconds: float | None = None) -> float:
        """Return the share of training that is done, from 0 to 1, by the steps or by the time, whichever is ahead."""
        by_time = 0.0 if seconds is None else self.group.first(lambda: self.seconds) / seconds
        return min(1.0, max(self.step / total_steps, by_time))

    def learn(self, steps: int, callback: Callback | None = None) -> PPO:
        """Train for `steps` more steps, rounded up to whole updates. `callback(ppo, update)` is called after each; False ends training.

        Schedules run over all steps so far and these: two calls for 1,000 steps each begin the second half at a progress of 0.5.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1; got {steps}")
        for update in self.train(self.step + steps):
            if callback is not None and callback(self, update) is False:
                break
        return self

    def collect(self) -> Rollout:
        """Collect one rollout with the current policy. The next call overwrites it."""
        if not self._has_begun:
            self._begin(self.streams.integer(f"environment after {self.step}" if self.step else "environment"))
        with self._or_new_episodes():
            rollout = self.collector.collect(self.streams.torch("actions", self.device))
        self._new_steps = self.steps_per_update if self.counts_waiting else sum(self.group.gather_objects(self.collector.steps))
        self.step += self._new_steps
        return rollout

    @contextlib.contextmanager
    def _or_new_episodes(self) -> Iterator[None]:
        """Begin new episodes in the next rollout if an error or Ctrl-C breaks off this one or its update.

        The environments have moved on then, but returns, memory and normalisers know nothing of the steps that are thrown away.
        """
        try:
            yield
        except BaseException:
            self._has_begun = False
            raise

    def _begin(self, seed: int) -> None:
        """Begin new episodes in all environments."""
        self.collector.reset(seed)
        self.learner.forget_episodes()
        self._has_begun = True

    def update(self, rollout: Rollout, *, progress: float = 0.0) -> Outcome:
        """Learn from a rollout. `progress`, the share of training that is done, drives the schedules."""
        with self._or_new_episodes():
            outcome = self.learner.update(rollout, progress=progress)
        self.updates += 1
        self.skipped += outcome.skipped
        return outcome

    def _report(self, outcome: Outcome, collect_seconds: float, update_seconds: float, other_seconds: float) -> Update:
        """Emit the events of an update: its summary, gradient norms, bad rewards, skipped steps and anomalies. Return the summary."""
        norms = outcome.gradient_norms
        update = self._summary(outcome, collect_seconds, update_seconds, other_seconds)
        gradients = GradientNorms(step=self.step, norms=norms, health={name: gradient_health(norm) for name, norm in norms.items()})
        self.on_event(update)
        self.on_event(gradients)
        if outcome.calibration[:, 3].any():
            self.on_event(self._calibration(outcome))
        if update.bad_rewards > self._reported_bad_rewards:
            self.on_event(RewardsNotFinite(step=self.step, count=update.bad_rewards - self._reported_bad_rewards))
            self._reported_bad_rewards = update.bad_rewards
        if outcome.first_skipped is not None:
            parts = outcome.first_skipped._asdict()
            self.on_event(Skipped(step=self.step, count=outcome.skipped, in_a_row=outcome.skipped_in_a_row, **parts))
        if self.telemetry.is_on:
            self._monitor(outcome, update, gradients)
        return update

    def _calibration(self, outcome: Outcome) -> Calibration:
        bins = [[float(f"{value:.5g}") for value in row] for row in outcome.calibration.tolist() if row[3]]
        margin = student_quantile(0.975, max(self.env.num_envs - 1, 1))
        return Calibration(
            step=self.step,
            predicted=[row[0] for row in bins],
            achieved=[row[1] for row in bins],
            low=[row[1] - margin * row[2] for row in bins],
            high=[row[1] + margin * row[2] for row in bins],
            steps=[int(row[3]) for row in bins],
        )

    def _monitor(self, outcome: Outcome, update: Update, gradients: GradientNorms) -> None:
        """Emit the anomalies that begin or end with an update and, at the level "debug", its internals."""
        heads = self.policy.distribution.head_names
        memory = {"": resident_bytes()}
        if self.device.type == "cuda":
            memory["device"] = torch.cuda.memory_allocated(self.device)
        mattered = {head.name: outcome.mattered[heads.index(head.name)] for head in self.env.action_spec.discrete}
        # An actor of the user's own may tell which of its layers serve which heads only: these matter if one of the heads does.
        for layer, served in getattr(self.policy.actor, "heads_of_layers", {}).items():
            mattered[f"actor.{layer}"] = any(mattered.get(head, True) for head in served)
        anomalies = self.monitor.see(
            update,
            gradients,
            value_spread=outcome.value_spread,
            return_spread=outcome.return_spread,
            mattered=mattered,
            return_error=self._return_error,
            hidden_state=outcome.hidden_state,
            inputs=outcome.inputs,
            memory=memory,
        )
        if self.telemetry.is_debug:
            self.on_event(
                Internals(
                    step=self.step,
                    hidden_state=None if math.isnan(outcome.hidden_state) else outcome.hidden_state,
                    inputs={name: {"size": size, "spread": spread} for name, (size, spread) in outcome.inputs.items()},
                    memory_bytes=memory[""],
                    device_memory_bytes=memory.get("device"),
                )
            )
        for anomaly in anomalies:
            self.on_event(anomaly)
        self.telemetry.end_update(anomalies)

    def _summary(self, outcome: Outcome, collect_seconds: float, update_seconds: float, other_seconds: float) -> Update:
        """Return the event of an update, with the episodes of all ranks."""
        collector, heads = self.collector, self.policy.distribution.head_names
        own = (
            collector.episodes,
            list(collector.recent_returns),
            list(collector.recent_lengths),
            collector.bad_rewards,
            collector.has_reward,
        )
        episodes, returns, lengths, bad_rewards, has_reward = zip(*self.group.gather_objects(own), strict=True)
        self._has_reward = any(has_reward)
        recent = list(itertools.chain(*returns))
        self._return_error = float(np.std(recent)) / math.sqrt(len(recent)) if len(recent) >= FEW_EPISODES else math.nan
        # The outcome has lists by head and the count of this update; the event has dictionaries and the count so far.
        changed = {
            "entropy": dict(zip(heads, outcome.entropy, strict=True)),
            "kl": dict(zip(heads, outcome.kl, strict=True)),
            "skipped": self.skipped,
        }
        return Update(
            **({name: getattr(outcome, name) for name in _SHARED} | changed),
            step=self.step,
            update=self.updates,
            episodes=sum(episodes),
            mean_return=_mean(recent),
            mean_length=_mean(list(itertools.chain(*lengths))),
            learning_rate=self.learner.learning_rate,
            gradient_steps=outcome.steps_taken,
            steps_per_second=self._new_steps / (collect_seconds + update_seconds + other_seconds),
            collect_seconds=collect_seconds,
            env_seconds=self.collector.env_seconds,
            update_seconds=update_seconds,
            other_seconds=other_seconds,
            bad_rewards=sum(bad_rewards),
            resources=self.telemetry.resources.read(self.device),
        )

    def _compile_failed(self, error: Exception) -> None:
        self.on_event(CompileFailed(reason=f"{type(error).__name__}: {error}".splitlines()[0][:500]))

    def evaluate(
        self,
        env: VecEnv | EnvSource | None = None,
        *,
        episodes: int = 100,
        deterministic: bool = True,
        seed: int = 0,
        max_steps: int = MAX_STEPS,
    ) -> PolicyEvaluation:
        """Play whole episodes and return their returns and lengths. Nothing is learned, and no normaliser changes.

        `env` is anything that PPO takes; environments made from a name or a function are closed afterwards. Without `env` the training
        environments are used; if they are used, or given, they begin new episodes afterwards. An episode that is longer than `max_steps`
        steps is cut, with a warning.
        """
        generator = None if deterministic else self.streams.spawn("evaluation").torch(str(seed), self.device)
        batch = self.env if env is None else _as_batch(env, None, self.device)
        if any(one is other for one in _inside(batch) for other in _inside(self.env)):
            self._has_begun = False
        try:
            result = evaluate(self.policy, batch, episodes=episodes, generator=generator, seed=seed, max_steps=max_steps)
        finally:
            if env is not None and (isinstance(env, type) or not hasattr(env, "step")):  # it was made here
                batch.close()
        if (warning := result.warning(max_steps)) is not None:
            warn(f"{warning}; set max_steps to change the limit", stacklevel=2)
        return result

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False, action_masks: Any = None
    ) -> tuple[Any, Any]:
        """Return actions in the form the environment takes; see `Policy.predict`."""
        return self.policy.predict(observation, state, episode_start, deterministic, action_masks)

    def save(self, path: Path | str) -> None:
        """Write everything needed to continue training into one safetensors file, for `PPO.load`. All ranks call it; the first writes."""
        state = self.state_dict()
        self.group.first(lambda: save_learner(path, state))

    @classmethod
    def load(
        cls,
        path: Path | str,
        env: VecEnv | EnvSource | None = None,
        *,
        num_envs: int | None = None,
        config: PPOConfig | None = None,
        **options: Any,
    ) -> PPO:
        """Return the saved learner, ready to continue in an environment like the one it was saved with. Without `env` it can only predict.

        Episodes continue where they were if the environment can be saved (`esper.vecenv.Saveable`) and `num_envs` is the same, and training
        then goes on bit for bit, on the CPU with the same number of threads. Otherwise new episodes begin: that is so for most environments
        of Gymnasium. Dropout draws from torch's global generator, which is not saved. `config` replaces the saved one, for example for
        another learning rate. `options` are further arguments of PPO; custom parts must be given again.
        """
        state = load_learner(path)
        specs = (
            msgspec.convert(state["observation_spec"], ObservationSpec),
            msgspec.convert(state["action_spec"], ActionSpec),
            None if state["spaces"] is None else msgspec.convert(state["spaces"], Spaces),
        )
        if env is None:
            env = NoEnvironment(state["num_envs"] or 1, *specs)
        env = _as_batch(env, num_envs, options.get("device"))
        for what, ours, saved in (("observes", env.observation_spec, specs[0]), ("takes", env.action_spec, specs[1])):
            if ours != saved:
                raise ValueError(
                    f"the environment {what} {ours}, but {path} was trained in one that {what} {saved}; give an environment like that"
                )
        ppo = cls(env, config or msgspec.convert(state["config"], PPOConfig), **options)
        if isinstance(env, NoEnvironment) or env.num_envs != state["num_envs"]:
            state = _without_episodes(state, env.num_envs)
        ppo.load_state_dict(state)
        return ppo

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue exactly, as a tree for `esper.runs`. Call it between updates.

        All ranks must call it; the result of rank 0 holds the state of all ranks and is the one to save.
        """
        learner = self.learner.state_dict()
        own = {
            "collector": self.collector.state_dict(with_episodes=self._has_begun),
            "environment": self.env.state_dict() if self._has_begun and isinstance(self.env, Saveable) else None,
            "streams": self.streams.state_dict(),
        }
        others = self.group.gather_trees({**own, "reward_normalizer": learner["reward_normalizer"]})[1:]
        return {
            "config": msgspec.to_builtins(self.config),
            "observation_spec": msgspec.to_builtins(self.env.observation_spec),
            "action_spec": msgspec.to_builtins(self.env.action_spec),
            "spaces": msgspec.to_builtins(self.policy.spaces),
            "num_envs": self.env.num_envs,
            "policy": plain_names(self.policy.state_dict()),
            "policy_training": self.policy.training_state(),
            "learner": learner,
            **own,
            "counters": {"step": self.step, "updates": self.updates, "skipped": self.skipped, "seconds": self.seconds},
            "monitor": {**self.monitor.state_dict(), **self.telemetry.state_dict()},
            **({"other_ranks": others} if others else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. An environment that cannot be saved begins new episodes, and an event reports it."""
        state = _state_of_rank(state, self.group)
        load_module(self.policy, state["policy"])
        self.policy.load_training_state(state["policy_training"])
        self.learner.load_state_dict(state["learner"])
        self.streams.load_state_dict(state["streams"])
        counters = state["counters"]
        self.step, self.updates, self.skipped = (counters[name] for name in ("step", "updates", "skipped"))
        self.seconds = counters["seconds"]
        self.monitor.load_state_dict(state["monitor"])
        self.telemetry.load_state_dict(state["monitor"])
        self._has_begun = self.collector.load_state_dict(state["collector"])
        self._reported_bad_rewards = sum(self.group.gather_objects(self.collector.bad_rewards))
        if not self._has_begun or isinstance(self.env, NoEnvironment):  # its rollouts come from a collector that was restored as a whole
            return
        if isinstance(self.env, Saveable) and state["environment"] is not None:
            self.env.load_state_dict(state["environment"])
        else:
            self._begin(self.streams.integer(f"environment after {self.step}"))
            self.on_event(EpisodesRestarted(step=self.step))


def _check_call(env: Any, config: Any, learning_rate: Any, unknown: dict[str, Any]) -> None:
    """Raise TypeError for calls in the form of Stable-Baselines3, and say what to write instead."""
    if isinstance(env, str) and env in _OTHER_POLICIES:
        network = "" if "Lstm" in env else ', PPOConfig(network=NetworkConfig(core="none"))'
        raise TypeError(
            f"PPO takes the environment first, and the config describes the networks: instead of {env!r}, write PPO(env{network})"
        )
    for name, value in unknown.items():
        if name in PPOConfig.__struct_fields__ or name in PPOConfig.OTHER_NAMES:
            written = PPOConfig.OTHER_NAMES.get(name, name)
            raise TypeError(f"{name}={value!r} is a setting of the learner: write PPO(env, PPOConfig(...)), where it is {written}")
        raise TypeError(f"PPO takes no {name!r}; {did_you_mean(name, _KEYWORDS, otherwise='it takes ' + ', '.join(_KEYWORDS))}")
    if config is not None and not isinstance(config, PPOConfig):
        raise TypeError(f"config must be a PPOConfig; got {config!r}")
    if learning_rate is not None and not callable(learning_rate):
        raise TypeError(
            f"learning_rate takes a function of the share of training that is left; write PPOConfig(learning_rate={learning_rate!r})"
        )


def _as_batch(env: VecEnv | EnvSource, num_envs: int | None, device: torch.device | str | None) -> VecEnv:
    """Return the environments to train in, made from `env` unless it is a batch already."""
    if hasattr(env, "num_envs"):
        return make(env, env.num_envs if num_envs is None else num_envs)
    on_device = device is not None and isinstance(env, str) and env in BUILTIN  # all others run on the CPU
    default = 1 if hasattr(env, "step") and not isinstance(env, type) else DEFAULT_NUM_ENVS
    return make(env, default if num_envs is None else num_envs, device=device if on_device and device is not None else "cpu")


def _inside(env: Any) -> list[Any]:
    """Return a batch and the environments that it wraps, down to those of the user."""
    vector_env = getattr(getattr(env, "vector_env", env), "unwrapped", None)
    return [env, vector_env or env, *(single.unwrapped for single in getattr(vector_env, "envs", ()))]


_KEYWORDS = list(inspect.signature(PPO.__init__).parameters)[1:-1]


class NoEnvironment:
    """Tells what is observed and done, for a learner that cannot step an environment."""

    def __init__(self, num_envs: int, observation_spec: ObservationSpec, action_spec: ActionSpec, spaces: Spaces | None = None) -> None:
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.observation_spec, self.action_spec = observation_spec, action_spec
        self.spaces = spaces or spaces_of_specs(observation_spec, action_spec)

    def reset(self, seed: int | None = None) -> Timestep:
        raise ValueError("this learner was loaded without an environment and can only predict; use PPO.load(path, env) to train")

    def step(self, actions: Actions) -> Timestep:
        return self.reset()

    def close(self) -> None:
        pass


def _without_episodes(state: dict[str, Any], num_envs: int) -> dict[str, Any]:
    """Drop the state of the episodes from a saved state, so that it fits another number of environments."""
    learner, rewards = state["learner"], state["learner"]["reward_normalizer"]
    if rewards is not None:
        learner = {**learner, "reward_normalizer": {**rewards, "running": torch.zeros(num_envs)}}
    collector = {**state["collector"], "episodes_now": None}
    return {**state, "learner": learner, "collector": collector, "environment": None, "other_ranks": []}


def _state_of_rank(state: dict[str, Any], group: Group) -> dict[str, Any]:
    """Return a saved state in which this rank's parts replace those of rank 0."""
    others = state.get("other_ranks", [])
    if len(others) + 1 != group.world_size:
        raise ValueError(
            f"the state was saved by a training on {len(others) + 1} ranks, and now there are {group.world_size}; use the same number"
        )
    if group.rank == 0:
        return state
    own = others[group.rank - 1]
    return {**state, **own, "learner": {**state["learner"], "reward_normalizer": own["reward_normalizer"]}}


def _mean(values: Any) -> float:
    return sum(values) / len(values) if values else math.nan
