"""The built-in environments keep the contract, move as documented, and are solved by a script."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from esper.vecenv import Saveable, Timestep, VecEnv, check_env, check_timestep, make, sample_actions
from esper.vecenv.builtin import ANGLE_LIMIT, BUILTIN

SHORT = {"cue": {"delay": 7, "jitter": 3}, "cartpole-hidden": {"max_steps": 40}, "pendulum-hidden": {"max_steps": 30}}


def short(name: str, num_envs: int = 4, **kwargs) -> VecEnv:
    return make(name, num_envs, **SHORT.get(name, {}) | kwargs)


class Solver:
    """Sees timesteps only, and remembers the observation before; at the start of an episode that is the first one itself."""

    def __init__(self) -> None:
        self.before: Tensor | None = None

    def act(self, timestep: Timestep) -> dict[str, Tensor]:
        obs = timestep.obs["obs"]
        before = obs if self.before is None else torch.where(timestep.ended[:, None], obs, self.before)
        self.before = obs
        return self.decide(obs, before, timestep)

    def decide(self, obs: Tensor, before: Tensor, timestep: Timestep) -> dict[str, Tensor]:
        raise NotImplementedError


class RemembersTheCue(Solver):
    cue: Tensor | None = None

    def decide(self, obs, before, timestep):
        shown = obs[:, :-1]
        self.cue = shown if self.cue is None else torch.where(shown.any(1, keepdim=True), shown, self.cue)
        return {"action": self.cue.argmax(1)}


class TakesTheBestAllowed(Solver):
    def decide(self, obs, before, timestep):
        kind = obs[:, :3].argmax(1)
        allowed = timestep.masks["item"][torch.arange(len(kind)), kind]
        return {"kind": kind, "item": obs[:, 3:].masked_fill(~allowed, -1).argmax(1)}


class Balances(Solver):
    def decide(self, obs, before, timestep):
        position, angle = (obs * torch.tensor([2.4, ANGLE_LIMIT])).unbind(1)
        speed, spin = ((obs - before) / 0.02 * torch.tensor([2.4, ANGLE_LIMIT])).unbind(1)
        return {"action": (angle + 0.35 * spin + 0.05 * position + 0.1 * speed > 0).long()}


class SwingsUp(Solver):
    def decide(self, obs, before, timestep):
        angle, old = (torch.atan2(part[:, 1], part[:, 0]) for part in (obs, before))
        speed = (torch.remainder(angle - old + math.pi, 2 * math.pi) - math.pi) / 0.05
        energy = speed.square() / 2 + 15 * (angle.cos() - 1)  # 0 at rest on top
        pump = torch.where(speed * -energy >= 0, 1.0, -1.0)
        hold = -(15 * angle.sin() + 12 * angle + 5 * speed) / 3 / 2
        near = (angle.cos() > 0.9) & (energy.abs() < 4)
        return {"action": torch.where(near, hold, pump).clamp(-1, 1).unsqueeze(1)}


def mean_return(env: VecEnv, decide, episodes: int, seed: int = 3) -> float:
    """Mean return of the first `episodes` / N episodes of each row, so that short episodes do not count more."""
    timestep = env.reset(seed=seed)
    each = episodes // env.num_envs
    total, finished = torch.zeros(env.num_envs), torch.zeros(env.num_envs)
    while (finished < each).any():
        timestep = env.step(decide(timestep))
        total += timestep.reward * (finished < each)
        finished += timestep.ended
    return (total.sum() / (each * env.num_envs)).item()


def at_random(env: VecEnv):
    generator = torch.Generator().manual_seed(0)
    return lambda timestep: sample_actions(env.action_spec, timestep.masks, env.num_envs, generator)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "solver", "at_least", "random"),
    [
        ("cue", RemembersTheCue, 1.0, 0.25),
        ("conditional", TakesTheBestAllowed, 10.0, 1.972),
        ("cartpole-hidden", Balances, 500.0, 22.0),
        ("pendulum-hidden", SwingsUp, -165.0, -1200.0),
    ],
)
def test_a_script_reaches_the_stated_score_and_chance_does_not(name, solver, at_least, random):
    env = make(name, 256)
    assert mean_return(env, solver().act, 256) >= at_least
    assert mean_return(env, at_random(env), 1024) == pytest.approx(random, rel=0.12)


@pytest.mark.parametrize("name", BUILTIN)
def test_every_built_in_environment_keeps_the_contract_and_repeats_itself_once_loaded(name):
    env = short(name)
    assert isinstance(env, VecEnv)
    assert isinstance(env, Saveable)
    check_env(env, steps=60)


@pytest.mark.parametrize("name", BUILTIN)
def test_a_state_loaded_into_a_new_environment_goes_on_bit_for_bit(name):
    first, second = short(name), short(name, seed=99)
    generator = torch.Generator().manual_seed(1)
    timestep = first.reset(seed=5)
    for _ in range(13):
        timestep = first.step(sample_actions(first.action_spec, timestep.masks, 4, generator))
    second.load_state_dict(first.state_dict())
    for _ in range(60):
        actions = sample_actions(first.action_spec, timestep.masks, 4, generator)
        timestep, again = first.step(actions), second.step(actions)
        assert torch.equal(timestep.obs["obs"], again.obs["obs"])
        assert torch.equal(timestep.reward, again.reward)
        assert torch.equal(timestep.ended, again.ended)


@pytest.mark.parametrize("name", BUILTIN)
def test_the_seed_alone_decides_and_no_global_generator_is_touched(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, same, other = (short(name).reset(seed=seed).obs["obs"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other) or name == "cue"  # four cues can well be the same four
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_of_another_size_is_refused():
    env = make("cue", 4)
    env.reset()
    with pytest.raises(ValueError, match="3 environments"):
        make("cue", 3).load_state_dict(env.state_dict())


def test_stepping_before_reset_says_so():
    with pytest.raises(RuntimeError, match="reset"):
        make("cue", 2).step({"action": torch.zeros(2, dtype=torch.int64)})


def test_the_cue_is_shown_once_and_asked_for_after_the_delay():
    env = make("cue", 3, delay=5, choices=6)
    timestep = env.reset(seed=0)
    cue = timestep.obs["obs"][:, :6].argmax(1)
    assert timestep.obs["obs"].sum(1).tolist() == [1.0] * 3
    for step in range(1, 6):
        timestep = env.step({"action": cue})
        assert timestep.obs["obs"].sum(1).tolist() == [float(step == 5)] * 3
        assert timestep.obs["obs"][:, 6].tolist() == [float(step == 5)] * 3
        assert timestep.reward.tolist() == [0.0] * 3
    wrong_once = cue.clone()
    wrong_once[1] = (cue[1] + 1) % 6
    timestep = env.step({"action": wrong_once})
    assert timestep.reward.tolist() == [1.0, 0.0, 1.0]
    assert timestep.terminated.all()
    assert timestep.obs["obs"][:, :6].sum(1).tolist() == [1.0] * 3


def test_jitter_makes_episodes_of_every_length_between():
    env = make("cue", 32, delay=2, jitter=3)
    env.reset(seed=0)
    lengths, age = set(), torch.zeros(32, dtype=torch.int64)
    for _ in range(40):
        age += 1
        ended = env.step({"action": torch.zeros(32, dtype=torch.int64)}).ended
        lengths |= set(age[ended].tolist())
        age[ended] = 0
    assert lengths == {3, 4, 5, 6}


def test_a_masked_item_is_wrong_and_the_item_of_a_pass_is_ignored():
    env = make("conditional", 256)
    timestep = env.reset(seed=0)
    kind = timestep.obs["obs"][:, :3].argmax(1)
    most_valuable = timestep.obs["obs"][:, 3:].argmax(1)
    allowed = timestep.masks["item"][torch.arange(256), kind, most_valuable]
    reward = env.step({"kind": kind, "item": most_valuable}).reward
    assert torch.equal(reward.bool(), allowed | (kind == 0))
    assert (~allowed & (kind != 0)).any()


@pytest.mark.slow
def test_cartpole_moves_as_gymnasiums_does():
    env = make("cartpole-hidden", 1)
    env.reset(seed=0)
    reference = gymnasium.make("CartPole-v1").unwrapped
    reference.reset(seed=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        position, angle, speed, spin = env.state["motion"][:, 0].tolist()
        reference.state, reference.steps_beyond_terminated = (position, speed, angle, spin), None
        action = torch.randint(2, (1,), generator=generator)
        timestep = env.step({"action": action})
        expected, _, terminated, _, _ = reference.step(action.item())
        seen = timestep.final_obs if terminated else timestep.obs
        np.testing.assert_allclose(seen["obs"][0] * torch.tensor([2.4, ANGLE_LIMIT]), expected[[0, 2]], atol=1e-6)
        assert timestep.terminated.item() == terminated
        if not terminated:
            np.testing.assert_allclose(env.state["motion"][[2, 3], 0], expected[[1, 3]], atol=1e-5)


def test_pendulum_moves_and_pays_as_gymnasiums_does():
    env = make("pendulum-hidden", 1)
    env.reset(seed=0)
    reference = gymnasium.make("Pendulum-v1").unwrapped
    reference.reset(seed=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        reference.state = env.state["motion"][:, 0].astype(np.float64)
        action = torch.rand(1, 1, generator=generator) * 2 - 1
        timestep = env.step({"action": action})
        expected, reward, *_ = reference.step(action[0].numpy() * 2)
        np.testing.assert_allclose(timestep.obs["obs"][0], expected[:2], atol=1e-5)
        np.testing.assert_allclose(env.state["motion"][1, 0], expected[2], atol=1e-5)
        np.testing.assert_allclose(timestep.reward.item(), reward, rtol=1e-5, atol=1e-5)


def test_a_time_limit_truncates_and_keeps_the_final_observation():
    env = make("pendulum-hidden", 3, max_steps=5)
    env.reset(seed=0)
    for _ in range(5):
        angle, speed = torch.as_tensor(env.state["motion"])
        timestep = env.step({"action": torch.zeros(3, 1)})
    assert timestep.truncated.all()
    assert not timestep.terminated.any()
    angle = angle + 0.05 * (speed + 0.05 * 15 * angle.sin()).clamp(-8, 8)
    torch.testing.assert_close(timestep.final_obs["obs"], torch.stack((angle.cos(), angle.sin()), 1), atol=1e-5, rtol=0)
    assert not torch.allclose(timestep.final_obs["obs"], timestep.obs["obs"])


@pytest.mark.slow
def test_a_cartpole_that_never_terminates_stays_finite_and_lasts_to_the_limit():
    env = make("cartpole-hidden", 4, max_steps=300, never_terminate=True, reward_scale=0.5)
    env.reset(seed=0)
    for step in range(1, 601):
        timestep = env.step({"action": torch.tensor([0, 1, 1, step % 2])})
        assert not timestep.terminated.any()
        assert timestep.truncated.all() == (step % 300 == 0)
        assert timestep.reward.tolist() == [0.5] * 4
        assert timestep.obs["obs"].isfinite().all()
        assert timestep.obs["obs"][:, 0].abs().max() <= 1.001


def test_the_torch_path_gives_the_same_cartpole_and_pendulum_as_the_numpy_path(monkeypatch):
    for name in ("cartpole-hidden", "pendulum-hidden"):
        numpy_env = make(name, 5)
        monkeypatch.setattr(type(numpy_env), "numpy_on_cpu", False)
        torch_env = make(name, 5)
        assert not torch_env.in_numpy
        assert numpy_env.in_numpy
        numpy_env.reset(seed=1)
        torch_env.reset(seed=1)
        generator = torch.Generator().manual_seed(0)
        for _ in range(8):
            actions = sample_actions(numpy_env.action_spec, {}, 5, generator)
            one, other = numpy_env.step(actions), torch_env.step(actions)
            torch.testing.assert_close(one.obs, other.obs)
            torch.testing.assert_close(one.reward, other.reward)
            check_timestep(torch_env, other)


class Broken:
    """A conditional environment with one thing wrong with it."""

    def __init__(self, change) -> None:
        self.env = make("conditional", 8)
        self.change = change
        self.num_envs, self.device = 8, self.env.device
        self.observation_spec, self.action_spec = self.env.observation_spec, self.env.action_spec

    def reset(self, seed=None):
        return self.env.reset(seed)

    def step(self, actions):
        timestep = self.env.step(actions)
        parts = {name: getattr(timestep, name) for name in Timestep.__slots__}
        return Timestep(**parts | self.change(timestep))

    def close(self):
        self.env.close()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: {"masks": {"item": t.masks["item"][:, 0]}}, r"head 'item': mask has shape \(8, 5\), expected \(8, 3, 5\)"),
        (lambda t: {"masks": {"itm": t.masks["item"]}}, r"mask for 'itm', but the discrete heads are \['kind', 'item'\]"),
        (lambda t: {"masks": {"item": t.masks["item"].float()}}, "mask has dtype torch.float32, expected torch.bool"),
        (lambda t: {"masks": {"item": torch.zeros_like(t.masks["item"])}}, "head 'item': nothing is allowed in environments"),
        (lambda t: {"obs": {"obs": t.obs["obs"][:, :3]}}, r"observation 'obs' has shape \(8, 3\), expected \(8, 8\)"),
        (lambda t: {"obs": {}}, r"observation has the parts \[\], expected \['obs'\]"),
        (lambda t: {"obs": {"obs": t.obs["obs"] / 0}}, "not finite"),
        (lambda t: {"reward": t.reward.double()}, "reward has dtype torch.float64, expected torch.float32"),
        (lambda t: {"reward": 1.0}, "reward is a float, expected a tensor"),
        (lambda t: {"terminated": t.terminated[:, None]}, r"terminated has shape \(8, 1\), expected \(8,\)"),
        (lambda t: {"truncated": torch.ones_like(t.truncated), "final_obs": None}, "final_obs is None"),
        (lambda t: {"final_obs": {"obs": t.obs["obs"][:4]}}, r"final observation 'obs' has shape \(4, 8\)"),
    ],
)
def test_a_violation_of_the_contract_is_named_with_both_shapes(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_env(Broken(change))


def test_an_environment_that_overwrites_returned_tensors_is_detected():
    buffer = torch.zeros(8, 8)

    def reuse(timestep):
        return {"obs": {"obs": buffer.copy_(timestep.obs["obs"])}}

    with pytest.raises(ValueError, match="must own its memory"):
        check_env(Broken(reuse))
