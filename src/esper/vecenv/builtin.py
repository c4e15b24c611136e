"""Built-in environments: small, batched, on any device, saveable, and with a known best return. `BUILTIN`, at the end, lists them.

A subclass of `BuiltinEnv` defines three functions of its state: `start` draws a first state for every environment, `advance` computes the
next state, `observe` computes the observation. A state is a dictionary of tensors whose *last* dimension is the environment, so that each
quantity is contiguous in memory. States are replaced and never changed in place, so returned tensors do not change either. The base class
adds one random generator, the automatic reset in the same step, and saving.

With `numpy_on_cpu`, states on the CPU are NumPy arrays, because small operations are much cheaper than in torch. The three functions then
call `self.xp`, which is numpy or torch, and use only names that both have.

Shapes: N = parallel environments, K = choices of a cue.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from esper.vecenv.actions import ActionSpec, Continuous, Discrete, Relevance
from esper.vecenv.contract import Actions, Masks, Obs, ObservationSpec, TensorSpec, Timestep

Array = Any  # a tensor, or with `numpy_on_cpu` a numpy array
State = dict[str, Array]  # name -> [..., N]


class Outcome(NamedTuple):
    """Reward and ends of one step. `truncated` is false where `terminated` is true."""

    reward: Array  # [N] float32
    terminated: Array  # [N] bool
    truncated: Array  # [N] bool


class BuiltinEnv(ABC):
    """A saveable VecEnv on any device. `seed` seeds its generator; `reset(seed)` seeds it again."""

    observation_spec: ObservationSpec
    action_spec: ActionSpec
    numpy_on_cpu: bool = False

    def __init__(self, num_envs: int, *, device: str | torch.device = "cpu", seed: int = 0) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1; got {num_envs}")
        self.num_envs = num_envs
        self.device = torch.empty(0, device=device).device  # with its index: "cuda" becomes "cuda:0"
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(seed)
        self.in_numpy = self.numpy_on_cpu and self.device.type == "cpu"
        self.xp: Any = np if self.in_numpy else torch
        self.state: State = {}

    @abstractmethod
    def start(self) -> State:
        """Return a first state for every environment, drawn from `self.generator`."""

    @abstractmethod
    def advance(self, state: State, actions: Actions) -> tuple[State, Outcome]:
        """Return the state after one step, without any reset, and the outcome of the step."""

    @abstractmethod
    def observe(self, state: State) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the observation and the masks of a state, in new memory."""

    def array(self, tensor: Tensor) -> Array:
        """Return a tensor in the form that states use: as a NumPy array if `in_numpy`."""
        return tensor.numpy() if self.in_numpy else tensor

    def reset(self, seed: int | None = None) -> Timestep:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.state = self.start()
        nothing = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        reward = torch.zeros(self.num_envs, device=self.device)
        obs, masks = map(self._tensors, self.observe(self.state))
        return Timestep(obs, reward, nothing, nothing.clone(), masks)

    def step(self, actions: Actions) -> Timestep:
        if not self.state:
            raise RuntimeError("call reset() before step()")
        state, outcome = self.advance(self.state, actions)
        seen = self.observe(state)  # observation and masks
        ended = outcome.terminated | outcome.truncated
        # On the CPU, skip the reset if no episode ended. On other devices that check would wait for the device. So draw new states for all
        # environments and use them where an episode ended.
        if self.device.type == "cpu" and not ended.any():
            self.state = state
            return self._timestep(outcome, seen)
        fresh = self.start()
        self.state = {name: self.xp.where(ended, fresh[name], old) for name, old in state.items()}
        return self._timestep(outcome, self.observe(self.state), final_obs=self._tensors(seen[0]))

    def close(self) -> None:
        self.state = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self.generator.get_state(),
            "state": {name: torch.as_tensor(value).clone() for name, value in self.state.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["state"].items():
            if value.shape[-1] != self.num_envs:
                raise ValueError(f"saved state {name!r} has shape {tuple(value.shape)}, but this is {self.num_envs} environments")
        self.generator.set_state(state["generator"].cpu())
        self.state = {name: self.array(value.to(self.device, copy=True)) for name, value in state["state"].items()}

    def _timestep(self, outcome: Outcome, seen: tuple[dict[str, Array], dict[str, Array]], final_obs: Obs | None = None) -> Timestep:
        obs, masks = seen
        if not self.in_numpy:
            return Timestep(obs, *outcome, masks, final_obs)
        reward, terminated, truncated = map(torch.from_numpy, outcome)
        return Timestep(self._tensors(obs), reward, terminated, truncated, self._tensors(masks), final_obs)

    def _tensors(self, arrays: dict[str, Array]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in arrays.items()} if self.in_numpy else arrays


# Memory


class Cue(BuiltinEnv):
    """A test of memory: a cue is shown once and asked for after a delay. A policy without memory cannot solve it.

    The first observation shows one of `choices` cues. `delay` observations without a cue follow, and the last of them has the go flag. The
    action on that one must name the cue: the reward is 1 if it is right, else 0, and the episode terminates. No other action matters. With
    `jitter`, each episode waits up to that many steps longer. The best mean return is 1; guessing gives 1 / choices.

    Observation: the cue, one-hot (K, zeros after the first step), then the go flag (1). Action: one of K.
    """

    def __init__(
        self, num_envs: int, *, choices: int = 4, delay: int = 100, jitter: int = 0, device: str | torch.device = "cpu", seed: int = 0
    ) -> None:
        super().__init__(num_envs, device=device, seed=seed)
        if choices < 2 or delay < 1 or jitter < 0:
            raise ValueError(
                f"choices must be at least 2, delay at least 1, jitter not negative; got choices={choices}, delay={delay}, jitter={jitter}"
            )
        self.choices = choices
        self.delay = delay
        self.jitter = jitter
        self.observation_spec = {"obs": TensorSpec((choices + 1,))}
        self.action_spec = ActionSpec((Discrete("action", choices),))

    def start(self) -> State:
        def draw(high: int) -> torch.Tensor:
            return torch.randint(high, (self.num_envs,), generator=self.generator, device=self.device)

        cue = draw(self.choices)
        until_go = draw(self.jitter + 1) + self.delay
        return {"cue": cue, "until_go": until_go, "shown": torch.ones_like(cue, dtype=torch.bool)}

    def advance(self, state: State, actions: Actions) -> tuple[State, Outcome]:
        terminated = state["until_go"] == 0
        reward = (terminated & (actions["action"] == state["cue"])).float()
        after = {"cue": state["cue"], "until_go": state["until_go"] - 1, "shown": torch.zeros_like(state["shown"])}
        return after, Outcome(reward, terminated, torch.zeros_like(terminated))

    def observe(self, state: State) -> tuple[Obs, Masks]:
        cue = one_hot(state["cue"], self.choices) * state["shown"].unsqueeze(1)  # [N, K]
        go = (state["until_go"] == 0).unsqueeze(1)  # [N, 1]
        return {"obs": torch.cat((cue, go), 1).float()}, {}


# Masks and relevance

KINDS = 3
ITEMS = 5
PASS = 0  # the kind that is right with any item
QUESTIONS = 10  # steps of an episode


class Conditional(BuiltinEnv):
    """A test of masks and relevance: two heads, where the mask of the second depends on the choice of the first.

    Each step asks for one of three kinds. Kind 0, "pass", is right with any item. For the other two, the item must be the most valuable one
    that the mask of that kind allows. The masks are drawn again each step and are *not* part of the observation, so only a learner that
    applies the mask of the chosen kind can be right, and a learner that credits the item of a pass learns from noise. The reward is 1 if
    the action is right, else 0; a forbidden item is wrong. Episodes terminate after 10 steps.

    The best mean return is 10. Uniform choices among allowed actions give 1.97 = 10 · 1/3 · (1/3 + 2/3 · E[1 / allowed items]).

    Observation: the wanted kind, one-hot (3), then the values of the items, a permutation of 0, 1/4, 1/2, 3/4, 1 (5).
    """

    def __init__(self, num_envs: int, *, device: str | torch.device = "cpu", seed: int = 0) -> None:
        super().__init__(num_envs, device=device, seed=seed)
        self.observation_spec = {"obs": TensorSpec((KINDS + ITEMS,))}
        self.action_spec = ActionSpec(
            heads=(Discrete("kind", KINDS), Discrete("item", ITEMS, parent="kind")),
            relevance=(Relevance("item", given="kind", choices=tuple(kind for kind in range(KINDS) if kind != PASS)),),
        )

    def start(self) -> State:
        return {**self._question(), "steps": torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)}

    def advance(self, state: State, actions: Actions) -> tuple[State, Outcome]:
        kind, item = actions["kind"], actions["item"]
        row = torch.arange(self.num_envs, device=self.device)
        allowed = state["allowed"][kind, :, row]  # [N, 5]
        best = state["value"].T.masked_fill(~allowed, -1.0).argmax(1)  # [N]
        right = (kind == state["wanted"]) & ((kind == PASS) | (item == best))
        steps = state["steps"] + 1
        terminated = steps >= QUESTIONS
        return {**self._question(), "steps": steps}, Outcome(right.float(), terminated, torch.zeros_like(terminated))

    def observe(self, state: State) -> tuple[Obs, Masks]:
        wanted = one_hot(state["wanted"], KINDS)  # [N, 3]
        obs = torch.cat((wanted, state["value"].T), 1)
        return {"obs": obs}, {"item": state["allowed"].permute(2, 0, 1).clone()}

    def _question(self) -> State:
        """Draw a wanted kind, a permutation of values, and the allowed items of each kind: one at random, others with probability 1/2."""

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, self.num_envs, generator=self.generator, device=self.device)

        wanted = torch.randint(KINDS, (self.num_envs,), generator=self.generator, device=self.device)
        value = uniform(ITEMS).argsort(0) / (ITEMS - 1)  # [5, N] in 0..1
        priority = uniform(KINDS, ITEMS)  # [3, 5, N]
        allowed = (priority == priority.amax(1, keepdim=True)) | (uniform(KINDS, ITEMS) < 0.5)
        return {"wanted": wanted, "value": value, "allowed": allowed}


# Cart-pole

CART_GRAVITY = 9.8  # m/s²
POLE_MASS = 0.1  # kg
TOTAL_MASS = 1.1  # kg, cart and pole
HALF_LENGTH = 0.5  # m, half the length of the pole
POLE_SHARE = POLE_MASS * HALF_LENGTH / TOTAL_MASS  # m, moment of the pole over the total mass
FORCE = 10.0  # N
CART_STEP_S = 0.02
POSITION_LIMIT = 2.4  # m
ANGLE_LIMIT = math.radians(12)
START_RANGE = 0.05  # every number of the state starts within ± this
SPEED_LIMIT = 20.0  # m/s and rad/s, only with never_terminate, where nothing else limits speeds


class CartPoleHidden(BuiltinEnv):
    """CartPole-v1 without velocities: the policy must infer them from earlier observations.

    The dynamics are Gymnasium's (Euler, 0.02 s), batched. An episode terminates when the cart leaves ±2.4 m or the pole ±12 degrees, and is
    truncated after `max_steps`. The best return is `max_steps` · `reward_scale`; random actions balance for about 22 steps.

    With `never_terminate`, every episode lasts `max_steps` steps: the cart stops at the edge and the pole may swing round.

    Observation: position / 2.4 m, angle / 12 degrees (2). Action: push left or right. State: position, angle, speed, spin.
    """

    numpy_on_cpu = True

    def __init__(
        self,
        num_envs: int,
        *,
        max_steps: int = 500,
        reward_scale: float = 1.0,
        never_terminate: bool = False,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__(num_envs, device=device, seed=seed)
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1; got {max_steps}")
        self.max_steps = max_steps
        self.reward_scale = reward_scale
        self.never_terminate = never_terminate
        self.observation_spec = {"obs": TensorSpec((2,))}
        self.action_spec = ActionSpec((Discrete("action", 2),))
        self._limits = self.array(torch.tensor([[POSITION_LIMIT], [ANGLE_LIMIT]], device=self.device))
        self._pushes = self.array(torch.tensor([-FORCE / TOTAL_MASS, FORCE / TOTAL_MASS], device=self.device))
        self._reward = self.array(torch.full((num_envs,), reward_scale, device=self.device))

    def start(self) -> State:
        motion = torch.empty(4, self.num_envs, device=self.device).uniform_(-START_RANGE, START_RANGE, generator=self.generator)
        steps = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        return {"motion": self.array(motion), "steps": self.array(steps)}

    def advance(self, state: State, actions: Actions) -> tuple[State, Outcome]:
        motion = moved(self.xp, state["motion"], self._pushes[self.array(actions["action"])])
        steps = state["steps"] + 1
        truncated = steps >= self.max_steps
        if self.never_terminate:
            motion = _bounded(self.xp, motion)
            terminated = self.xp.zeros_like(truncated)
        else:
            terminated = (abs(motion[:2]) > self._limits).any(0)
            truncated = truncated & ~terminated
        reward = self._reward + 0  # a copy, written so that it works in numpy and torch
        return {"motion": motion, "steps": steps}, Outcome(reward, terminated, truncated)

    def observe(self, state: State) -> tuple[dict[str, Array], dict[str, Array]]:
        return {"obs": (state["motion"][:2] / self._limits).T}, {}


def moved(xp: Any, motion: Array, push: Array) -> Array:
    """Return `motion` [4, N] one Euler step later. `push` [N] is the force over the total mass, in m/s²."""
    _, angle, _, spin = motion
    sine, cosine = xp.sin(angle), xp.cos(angle)
    thrust = push + spin * spin * sine * POLE_SHARE
    spin_up = (sine * CART_GRAVITY - cosine * thrust) / (HALF_LENGTH * 4 / 3 - cosine * cosine * POLE_SHARE)
    change = xp.empty_like(motion)
    change[:2] = motion[2:]
    change[2] = thrust - spin_up * cosine * POLE_SHARE
    change[3] = spin_up
    return motion + change * CART_STEP_S


def _bounded(xp: Any, motion: Array) -> Array:
    """Limit every number of `motion` [4, N], so that it stays finite in long episodes."""
    position, angle, speed, spin = motion
    position = xp.clip(position, -POSITION_LIMIT, POSITION_LIMIT)
    angle = xp.remainder(angle + math.pi, 2 * math.pi) - math.pi
    return xp.stack((position, angle, xp.clip(speed, -SPEED_LIMIT, SPEED_LIMIT), xp.clip(spin, -SPEED_LIMIT, SPEED_LIMIT)))


# Pendulum

PENDULUM_GRAVITY = 10.0  # m/s², on a rod of 1 kg and 1 m
MAX_TORQUE = 2.0  # Nm
MAX_SPEED = 8.0  # rad/s
PENDULUM_STEP_S = 0.05


class PendulumHidden(BuiltinEnv):
    """Pendulum-v1 without velocity: swing up and hold. The policy must infer the angular speed from earlier angles.

    Dynamics and reward are Gymnasium's (0 is the best, about -16.3 the worst per step), batched. Episodes are truncated after `max_steps`.
    Random torques get about -1200 per episode; a scripted swing-up gets about -150, most of it on the way up.

    Observation: cosine and sine of the angle from upright (2). Action: torque / 2 Nm (1). State: angle, speed.
    """

    numpy_on_cpu = True

    def __init__(self, num_envs: int, *, max_steps: int = 200, device: str | torch.device = "cpu", seed: int = 0) -> None:
        super().__init__(num_envs, device=device, seed=seed)
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1; got {max_steps}")
        self.max_steps = max_steps
        self.observation_spec = {"obs": TensorSpec((2,))}
        self.action_spec = ActionSpec((Continuous("action", 1),))
        self._start_range = torch.tensor([[math.pi], [1.0]], device=self.device)

    def start(self) -> State:
        drawn = torch.rand(2, self.num_envs, generator=self.generator, device=self.device)
        steps = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        return {"motion": self.array((drawn * 2 - 1) * self._start_range), "steps": self.array(steps)}

    def advance(self, state: State, actions: Actions) -> tuple[State, Outcome]:
        xp = self.xp
        angle, speed = state["motion"]
        torque = xp.clip(self.array(actions["action"].detach())[:, 0], -1, 1) * MAX_TORQUE
        from_upright = xp.remainder(angle + math.pi, 2 * math.pi) - math.pi  # in [-π, π)
        cost = from_upright * from_upright + 0.1 * speed * speed + 0.001 * torque * torque
        speed = xp.clip(speed + (1.5 * PENDULUM_GRAVITY * xp.sin(angle) + 3.0 * torque) * PENDULUM_STEP_S, -MAX_SPEED, MAX_SPEED)
        angle = angle + speed * PENDULUM_STEP_S
        steps = state["steps"] + 1
        truncated = steps >= self.max_steps
        return {"motion": xp.stack((angle, speed)), "steps": steps}, Outcome(-cost, xp.zeros_like(truncated), truncated)

    def observe(self, state: State) -> tuple[dict[str, Array], dict[str, Array]]:
        angle = state["motion"][0]
        return {"obs": self.xp.stack((self.xp.cos(angle), self.xp.sin(angle)), 1)}, {}


# List of all built-in environments


class Builtin(NamedTuple):
    """A built-in environment and its description in the help of the command line."""

    factory: Callable[..., BuiltinEnv]  # called with (num_envs, *, device, seed) and the environment's own keywords
    help: str


BUILTIN: dict[str, Builtin] = {
    "cue": Builtin(Cue, "name the cue that was shown 100 steps ago; best 1, guessing 0.25"),
    "conditional": Builtin(Conditional, "two heads, the second masked by the first; best 10, random 1.97"),
    "cartpole-hidden": Builtin(CartPoleHidden, "CartPole-v1 without velocities; best 500, random about 22"),
    "pendulum-hidden": Builtin(PendulumHidden, "Pendulum-v1 without velocity; scripted about -150, random about -1200"),
}
