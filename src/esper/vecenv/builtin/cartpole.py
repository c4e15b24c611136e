"""CartPole-v1 without velocities: the policy must infer them from earlier observations.

The dynamics are Gymnasium's (Euler, 0.02 s), batched. An episode terminates when the cart leaves ±2.4 m or the pole ±12 degrees, and is
truncated after `max_steps`. The best return is `max_steps` · `reward_scale`; random actions balance for about 22 steps.

With `never_terminate`, every episode lasts `max_steps` steps: the cart stops at the edge and the pole may swing round.

Shapes: N = parallel environments.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from esper.vecenv.actions import ActionSpec, Discrete
from esper.vecenv.builtin.base import Array, BuiltinEnv, Outcome, State
from esper.vecenv.contract import Actions, TensorSpec

GRAVITY = 9.8  # m/s²
POLE_MASS = 0.1  # kg
TOTAL_MASS = 1.1  # kg, cart and pole
HALF_LENGTH = 0.5  # m, half the length of the pole
POLE_SHARE = POLE_MASS * HALF_LENGTH / TOTAL_MASS  # m, moment of the pole over the total mass
FORCE = 10.0  # N
STEP_S = 0.02
POSITION_LIMIT = 2.4  # m
ANGLE_LIMIT = math.radians(12)
START_RANGE = 0.05  # every number of the state starts within ± this
SPEED_LIMIT = 20.0  # m/s and rad/s, only with never_terminate, where nothing else limits speeds


class CartPoleHidden(BuiltinEnv):
    """Observation: position / 2.4 m, angle / 12 degrees (2). Action: push left or right. State: position, angle, speed, spin."""

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
    spin_up = (sine * GRAVITY - cosine * thrust) / (HALF_LENGTH * 4 / 3 - cosine * cosine * POLE_SHARE)
    change = xp.empty_like(motion)
    change[:2] = motion[2:]
    change[2] = thrust - spin_up * cosine * POLE_SHARE
    change[3] = spin_up
    return motion + change * STEP_S


def _bounded(xp: Any, motion: Array) -> Array:
    """Limit every number of `motion` [4, N], so that it stays finite in long episodes."""
    position, angle, speed, spin = motion
    position = xp.clip(position, -POSITION_LIMIT, POSITION_LIMIT)
    angle = xp.remainder(angle + math.pi, 2 * math.pi) - math.pi
    return xp.stack((position, angle, xp.clip(speed, -SPEED_LIMIT, SPEED_LIMIT), xp.clip(spin, -SPEED_LIMIT, SPEED_LIMIT)))
