"""Anomalies: each is provoked by a fault in a real small training, and healthy trainings raise none."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.functional import cross_entropy

from esper.controller.training import prepare_controller
from esper.growth import grow
from esper.growth.config import ThresholdsConfig
from esper.growth.events import EpochEnded
from esper.growth.telemetry import GrowthMonitor
from esper.league.training import prepare_arena
from esper.rl import PPO
from esper.rl.config import NetworkConfig, PPOConfig
from esper.runs import Event
from esper.runs.anomalies import (
    ADVICE,
    Anomaly,
    Degradation,
    InputDrift,
    MemoryGrowth,
    Plateau,
    Standstill,
    Threshold,
    Vanished,
    resident_bytes,
)
from esper.tasks import Split, load_task
from esper.vecenv import Actions, Timestep, VecEnv, make
from tests.controller.test_training import CONFIG as SMALL_CONTROLLER
from tests.growth.builders import config, make_loop
from tests.league.arenas import small_training

UPDATES = 20  # within which a fault must be found


def events_of(detector: Any, *readings: Any, **options: Any) -> list[tuple[int, bool]]:
    """Feed the readings and return the number of the reading and the `has_ended` of every event."""
    seen = [(step, detector.see(*(one if isinstance(one, tuple) else (one,)), step=step, **options)) for step, one in enumerate(readings)]
    return [(step, anomaly.has_ended) for step, anomaly in seen if anomaly is not None]


def test_an_anomaly_gives_one_event_when_it_begins_and_one_when_it_ends() -> None:
    wrong, right = 2.0, 0.5
    assert events_of(Threshold("kl", above=1.0), right, *[wrong] * 50, *[right] * 50) == [(1, False), (53, True)]


def test_a_reading_that_flickers_around_the_limit_gives_one_event() -> None:
    assert events_of(Threshold("kl", above=1.0), *[2.0, 0.5] * 50) == [(0, False)]


def test_an_anomaly_that_needs_several_readings_in_a_row_does_not_begin_by_fewer() -> None:
    assert events_of(Threshold("kl", above=1.0, begins_after=3), *[2.0, 2.0, 0.5] * 10) == []
    assert events_of(Threshold("kl", above=1.0, begins_after=3), 2.0, 2.0, 2.0) == [(2, False)]


def test_nan_is_no_reading_and_infinity_is_above_every_limit() -> None:
    assert events_of(Threshold("kl", above=1.0, begins_after=2), 2.0, math.nan, None, 2.0) == [(3, False)]
    assert events_of(Threshold("kl", above=1.0), math.inf) == [(0, False)]


def test_an_event_has_kind_subject_value_limit_and_advice() -> None:
    anomaly = Threshold("entropy_collapse", "op", below=0.1).see(0.05, step=7)
    assert anomaly == Anomaly(
        step=7, what="entropy_collapse", subject="op", value=0.05, limit=0.1, advice=ADVICE["entropy_collapse"], has_ended=False
    )
    assert anomaly.shown() == {"entropy_collapse": {"op": 0.05}}


@pytest.mark.parametrize("advice", ADVICE.values())
def test_an_advice_is_one_sentence(advice: str) -> None:
    assert advice.endswith(".")
    assert ". " not in advice


def test_a_loss_that_never_falls_below_its_first_value_stands_still() -> None:
    noise = itertools.cycle([0.99, 1.01])
    assert events_of(Standstill("return", window=5), *(next(noise) for _ in range(9)), error=0.02) == [(5, False)]
    assert events_of(Standstill("return", window=5), *(1.0 - 0.1 * step for step in range(9)), error=0.02) == []
    assert events_of(Standstill("return", window=5), *[1.0] * 9, error=0.02, is_learning=True) == []


def test_a_plateau_is_a_high_loss_that_no_longer_falls() -> None:
    falling = [2.0 * 0.9**step for step in range(12)]
    assert events_of(Plateau("train_loss", window=4, fall=0.01), *falling, high=0.1) == []
    assert events_of(Plateau("train_loss", window=4, fall=0.01), *falling, *[falling[-1]] * 8, high=0.1) == [(16, False)]
    assert events_of(Plateau("train_loss", window=4, fall=0.01), *falling, *[falling[-1]] * 8, high=1.0) == []  # low enough


def test_a_degradation_loses_a_share_of_what_was_gained() -> None:
    learned = [1.0, 0.6, 0.2]
    assert events_of(Degradation("return", share=0.5), *learned, *[0.5] * 5, least=0.1) == []
    assert events_of(Degradation("return", share=0.5), *learned, *[0.7] * 5, least=0.1) == [(5, False)]
    assert events_of(Degradation("return", share=0.5), *[1.0, 1.05] * 5, least=0.1) == []  # noise


def test_inputs_drift_if_they_grow_or_no_longer_vary() -> None:
    usual = [(1.0, 0.9)] * 8
    assert events_of(InputDrift("obs", largest=3.0), (900.0, 800.0), *usual) == []  # not normalised yet
    assert events_of(InputDrift("obs", largest=3.0), *usual, (9.0, 5.0), (8.0, 4.0)) == [(8, False)]
    assert events_of(InputDrift("obs", largest=3.0), *usual, *[(1.0, 0.0)] * 8) == [(13, False)]
    assert events_of(InputDrift("obs", largest=3.0), *[(1.0, 0.9), (0.5, 0.0), (0.5, 0.0)] * 8) == []  # a rare signal


def test_inputs_without_a_normaliser_are_measured_by_their_usual_size() -> None:
    usual = [(0.3, 0.1)] * 8
    drift = {"largest": 4.0, "is_relative": True}
    assert events_of(InputDrift("obs", **drift), *usual, (1.1, 0.1), (1.3, 0.1)) == [(9, False)]
    assert events_of(InputDrift("obs", **drift), *[(30.0, 10.0)] * 8) == []
    assert events_of(InputDrift("obs", **drift), *[(0.0, 0.0)] * 8, (0.3, 0.1)) == []  # nothing to compare with
    early = events_of(InputDrift("obs", **drift, skipped=0), *usual[:3], (1.3, 0.1))
    assert early == [(3, False)]


def test_memory_grows_if_every_update_adds_to_it() -> None:
    leak, once = [100 + 10 * step for step in range(20)], [100] * 10 + [600] * 10
    assert events_of(MemoryGrowth(limit=8), *leak) == [(11, False)]
    assert events_of(MemoryGrowth(limit=8), *once) == []
    assert events_of(MemoryGrowth(limit=20), *leak) == []


def test_a_detector_goes_on_after_a_resume_as_if_it_had_not_stopped() -> None:
    readings = [*[2.0 * 0.9**step for step in range(8)], *[1.0] * 10]
    for detector in (
        lambda: Plateau("train_loss", window=4, fall=0.01),
        lambda: Degradation("train_loss", share=0.1),
        lambda: Standstill("train_loss", window=5),
    ):
        options = {"high": 0.1} if isinstance(detector(), Plateau) else {"least" if isinstance(detector(), Degradation) else "error": 0.01}
        whole, first, second = detector(), detector(), detector()
        expected = events_of(whole, *readings, **options)
        events = events_of(first, *readings[:9], **options)
        second.load_state_dict(first.state_dict())
        events += [(step + 9, ended) for step, ended in events_of(second, *readings[9:], **options)]
        assert events == expected
        assert second.state_dict() == whole.state_dict()


def test_a_gradient_of_zero_has_vanished() -> None:
    assert events_of(Vanished("gradient_health", "actor", begins_after=3), *[1e-4] * 5, *[0.0] * 3) == [(7, False)]


def test_resident_bytes_are_those_of_this_process() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 64 * 2**20) as pages:  # a tensor could be given memory that is resident already
        pages.write(b"1" * len(pages))
        assert resident_bytes() - before > 48 * 2**20


def test_detectors_and_levels_need_no_torch() -> None:
    code = "import sys, esper.runs.anomalies, esper.runs.telemetry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Faults in a real training


class Broken:
    """An environment whose observations become wrong after some steps."""

    def __init__(self, env: VecEnv, change: Callable[[torch.Tensor], torch.Tensor], *, after: int) -> None:
        self.env, self.change, self.after, self.steps = env, change, after, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, seed: int | None = None) -> Timestep:
        return self.env.reset(seed)

    def step(self, actions: Actions) -> Timestep:
        self.steps += 1
        timestep = self.env.step(actions)
        if self.steps <= self.after:
            return timestep
        return replace(timestep, obs={name: self.change(value) for name, value in timestep.obs.items()})


SMALL = NetworkConfig(hidden_size=16, encoder_sizes=(16,), head_sizes=(16,))


def learner(env: Any = "cue", *, num_envs: int = 8, env_args: dict[str, Any] | None = None, **config: Any) -> PPO:
    options = {"num_steps": 16, "num_epochs": 2, "num_minibatches": 4, "network": SMALL, **config}
    batch = make(env, num_envs, **({"delay": 2} if env == "cue" and env_args is None else env_args or {})) if isinstance(env, str) else env
    return PPO(batch, PPOConfig(**options))


def anomalies_of(ppo: PPO, updates: int = UPDATES, *, callback: Callable[[PPO], None] = lambda ppo: None) -> list[Anomaly]:
    found: list[Anomaly] = []
    ppo.on_event = lambda event: found.append(event) if isinstance(event, Anomaly) else None
    for _ in ppo.train(ppo.step + updates * ppo.steps_per_update):
        callback(ppo)
    return found


def assert_found(what: str, ppo: PPO, *, subject: str | None = None, **options: Any) -> Anomaly:
    found = [anomaly for anomaly in anomalies_of(ppo, **options) if anomaly.what == what and not anomaly.has_ended]
    assert found, what
    assert len(found) <= len({anomaly.subject for anomaly in found}) + 1, "it begins on every update"
    assert subject is None or subject in {anomaly.subject for anomaly in found}
    return found[0]


def last_layer(module: torch.nn.Module) -> torch.nn.Linear:
    return [part for part in module.modules() if isinstance(part, torch.nn.Linear)][-1]


def at_update(number: int, change: Callable[[PPO], None]) -> Callable[[PPO], None]:
    return lambda ppo: change(ppo) if ppo.updates == number else None


@pytest.mark.slow
def test_a_learning_rate_that_is_far_too_low_is_a_ratio_collapse_and_a_plateau() -> None:
    found = {anomaly.what for anomaly in anomalies_of(learner(learning_rate=1e-9))}
    assert found >= {"ratio_collapse", "plateau"}


@pytest.mark.slow
def test_a_learning_rate_that_is_far_too_high_is_a_ratio_explosion_and_a_large_kl() -> None:
    assert_found("kl", learner(learning_rate=3.0), updates=3)
    assert_found("ratio_explosion", learner("conditional", learning_rate=0.1), updates=5)


@pytest.mark.slow
def test_a_policy_that_forgets_what_it_had_learned_is_a_degradation() -> None:
    def forget(ppo: PPO) -> None:
        with torch.no_grad():
            last_layer(ppo.policy.actor).bias.copy_(torch.tensor([9.0, -9.0, -9.0, -9.0]))

    ppo = learner(env_args={"delay": 1}, num_steps=32, learning_rate=5e-3)
    anomaly = assert_found("degradation", ppo, callback=at_update(8, forget))
    assert 8 * ppo.steps_per_update < anomaly.step


@pytest.mark.slow
def test_a_critic_that_gives_every_state_the_same_value_is_a_value_collapse() -> None:
    ppo = learner("cartpole-hidden")
    weight = last_layer(ppo.policy.critic).weight
    with torch.no_grad():
        weight.zero_()
    weight.register_hook(torch.zeros_like)
    assert_found("value_collapse", ppo, updates=5)


@pytest.mark.slow
def test_a_policy_that_always_acts_alike_is_an_entropy_collapse_of_its_head() -> None:
    ppo = learner()
    with torch.no_grad():
        last_layer(ppo.policy.actor).bias.copy_(torch.tensor([30.0, -30.0, -30.0, -30.0]))
    assert_found("entropy_collapse", ppo, subject="action", updates=3)


@pytest.mark.slow
def test_a_frozen_head_has_unhealthy_gradients() -> None:
    ppo = learner()
    for parameter in last_layer(ppo.policy.actor).parameters():
        parameter.register_hook(torch.zeros_like)
    assert_found("gradient_health", ppo, subject="head action", updates=8)


@pytest.mark.slow
def test_a_scale_that_explodes_has_unhealthy_gradients() -> None:
    def explode(ppo: PPO) -> None:
        with torch.no_grad():
            last_layer(ppo.policy.critic).weight.mul_(1e7)

    assert_found("gradient_health", learner(normalize_values=False), updates=8, callback=at_update(4, explode))


@pytest.mark.slow
def test_a_memory_that_never_forgets_has_a_large_hidden_state() -> None:
    ppo = learner("pendulum-hidden")
    with torch.no_grad():
        for name, parameter in ppo.policy.core.named_parameters():
            if "bias" in name:
                parameter.fill_(50.0)
    assert_found("hidden_state", ppo, updates=5)


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda obs: 100 * obs + 50, torch.zeros_like], ids=["larger", "constant"])
def test_observations_that_leave_their_range_are_a_drift_of_the_inputs(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert_found("input_drift", learner(Broken(make("cartpole-hidden", 8), change, after=7 * 16)), subject="obs")


@pytest.mark.slow
def test_tensors_that_a_callback_keeps_are_a_growth_of_memory() -> None:
    kept: list[torch.Tensor] = []
    anomaly = assert_found("memory_growth", learner(), callback=lambda ppo: kept.append(torch.ones(4 * 2**20)))  # 16 MiB each
    assert anomaly.value == pytest.approx(16 * 2**20, rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda obs: 100 * obs, torch.zeros_like], ids=["larger", "constant"])
def test_observations_of_self_play_that_leave_their_range_are_a_drift_of_the_inputs(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with self_play(seed=0) as ppo:
        ppo.collector.env = Broken(ppo.env, change, after=7 * ppo.config.num_steps)
        anomaly = assert_found("input_drift", ppo, subject="obs", updates=14)
    assert 7 * ppo.steps_per_update < anomaly.step


@pytest.mark.slow
def test_a_return_that_stands_still_against_opponents_that_learn_is_no_plateau() -> None:
    with self_play(seed=0) as ppo:
        assert not ppo.monitor.compares_returns
    still = learner(learning_rate=1e-9)  # it finds a plateau of the return, see above
    still.monitor.compares_returns = False
    assert "plateau" not in {anomaly.what for anomaly in anomalies_of(still)}


@pytest.mark.parametrize("plateau_epochs", [3, 6])
def test_the_limits_of_growth_are_settings(plateau_epochs: int) -> None:
    monitor = GrowthMonitor(ThresholdsConfig(plateau_epochs=plateau_epochs))
    ended = EpochEnded(epoch=0, train_loss=1.0, val_loss=1.0, learning_rate=0.1, decision="", slots=[], parameters=1, flops=1)
    epochs = [msgspec.structs.replace(ended, epoch=epoch) for epoch in range(20)]
    found = [anomaly for epoch in epochs for anomaly in monitor.see(epoch, uninformed=2.0, memory={})]
    assert [(anomaly.what, anomaly.step) for anomaly in found] == [("plateau", plateau_epochs + 1)]


def test_a_grower_looks_for_anomalies_with_the_limits_of_its_config() -> None:
    limits = ThresholdsConfig(plateau_epochs=9)
    loop = make_loop(settings=config(thresholds=limits))
    assert loop.grower.telemetry.monitor.thresholds == limits


@contextlib.contextmanager
def self_play(seed: int) -> Iterator[PPO]:
    """A learner in short battles, without trials for the league."""
    config = small_training(selfplay={"enter_every": 1000}, ppo={"num_steps": 2, "bptt_length": 2, "seed": seed})
    with prepare_arena(config) as (ppo, _):
        yield ppo


def of_ppo(env: str, seed: int, **env_args: Any) -> list[Anomaly]:
    return anomalies_of(learner(env, env_args=env_args, seed=seed, num_minibatches=2, learning_rate=3e-3))


def of_self_play(seed: int) -> list[Anomaly]:
    with self_play(seed) as ppo:
        return anomalies_of(ppo)


def of_controller(seed: int) -> list[Anomaly]:
    growth = msgspec.structs.replace(SMALL_CONTROLLER.growth, blueprints=("norm", "low_rank", "widen_100", "widen_300"))
    learner = msgspec.structs.replace(SMALL_CONTROLLER.ppo, seed=seed)
    settings = msgspec.structs.replace(SMALL_CONTROLLER, rounds=6, growth=growth, ppo=learner)
    with prepare_controller(settings) as (ppo, _):
        return anomalies_of(ppo, settings.rounds)


def of_growth(name: str, seed: int) -> list[Anomaly]:
    """Grow a small host on some samples of a task. Three seeds begin in the first epoch."""
    task, found = load_task(name), list[Anomaly]()

    def batches(part: Split, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(part.inputs[:size].split(32), part.targets[:size].split(32), strict=True))

    def collect(event: Event) -> None:
        if isinstance(event, Anomaly):
            found.append(event)

    grow(
        task.make_host("starved", seed=seed),
        batches(task.train, 128),
        batches(task.validation, 64),
        cross_entropy,
        epochs=8,
        controller="schedule",
        progress=False,
        callbacks=[collect],
    )
    return found


HEALTHY: tuple[tuple[Callable[..., list[Anomaly]], dict[str, Any]], ...] = (
    *((of_growth, {"name": name, "seed": seed}) for name in ("digits", "digits-1d") for seed in range(2)),
    *((of_controller, {"seed": seed}) for seed in range(2)),
    *((of_self_play, {"seed": seed}) for seed in range(2)),
    *((of_ppo, {"env": "cue", "delay": 2, "seed": seed}) for seed in range(3)),
    *((of_ppo, {"env": "conditional", "seed": seed}) for seed in range(3)),
    *((of_ppo, {"env": "cartpole-hidden", "seed": seed}) for seed in range(3)),
    *((of_ppo, {"env": "pendulum-hidden", "max_steps": 50, "seed": seed}) for seed in range(3)),
)


@pytest.mark.slow
def test_twenty_healthy_trainings_of_all_kinds_raise_at_most_one_alarm_in_all() -> None:
    assert len(HEALTHY) == 20
    alarms = [(training.__name__, settings, anomaly) for training, settings in HEALTHY for anomaly in training(**settings)]
    assert len(alarms) <= 1, alarms
