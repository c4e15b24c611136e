"""Pendulum-v1 without velocity: swing up and hold. The policy must infer the angular speed from earlier angles.

Dynamics and reward are Gymnasium's (0 is the best, about -16.3 the worst per step), batched. Episodes are truncated after `max_steps`.
Random torques get about -1200 per episode; a scripted swing-up gets about -150, most of it on the way up.

Shapes: N = parallel environments.
"""

from __future__ import annotations

import math

import torch

from esper.vecenv.actions import ActionSpec, Continuous
from esper.vecenv.builtin.base import Array, BuiltinEnv, Outcome, State
from esper.vecenv.contract import Actions, TensorSpec

GRAVITY = 10.0  # m/s², on a rod of 1 kg and 1 m
MAX_TORQUE = 2.0  # Nm
MAX_SPEED = 8.0  # rad/s
STEP_S = 0.05


class PendulumHidden(BuiltinEnv):
    """Observation: cosine and sine of the angle from upright (2). Action: torque / 2 Nm (1). State: angle, speed."""

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
        speed = xp.clip(speed + (1.5 * GRAVITY * xp.sin(angle) + 3.0 * torque) * STEP_S, -MAX_SPEED, MAX_SPEED)
        angle = angle + speed * STEP_S
        steps = state["steps"] + 1
        truncated = steps >= self.max_steps
        return {"motion": xp.stack((angle, speed)), "steps": steps}, Outcome(-cost, xp.zeros_like(truncated), truncated)

    def observe(self, state: State) -> tuple[dict[str, Array], dict[str, Array]]:
        angle = state["motion"][0]
        return {"obs": self.xp.stack((self.xp.cos(angle), self.xp.sin(angle)), 1)}, {}
