"""Train PPO in an environment of your own, written for Gymnasium or as a batch of tensors.

A batched environment follows `esper.vecenv.VecEnv`: one call of `step` moves all of them. Needs pip install 'esper-grow[gym]'.

    python examples/own_environment.py

PointEnv: mean return -64.8 before the training, -3.7 after it
PointBatch: mean return -64.1 before the training, -4.2 after it
"""

import gymnasium
import numpy as np
import torch

from esper.rl import PPO, NetworkConfig, PPOConfig
from esper.vecenv import Actions, ActionSpec, Discrete, TensorSpec, Timestep, check_env

LIMIT, PUSH = 20, 0.1  # steps of an episode; change of the speed by one push


class PointEnv(gymnasium.Env):
    """One point. The actions 0, 1 and 2 push it left, not at all and right; the reward is minus its distance from 0."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)  # place, speed
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.point, self.steps = np.array([self.np_random.uniform(-1, 1), 0.0], np.float32), 0
        return self.point, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        speed = 0.9 * self.point[1] + PUSH * (int(action) - 1)
        self.point, self.steps = np.array([self.point[0] + speed, speed], np.float32), self.steps + 1
        return self.point, -abs(float(self.point[0])), False, self.steps == LIMIT, {}  # only the time limit ends an episode


class PointBatch:
    """N points as tensors. Where an episode ends, `obs` is already the start of the next one, and `final_obs` the end of the old."""

    observation_spec = {"obs": TensorSpec((2,))}
    action_spec = ActionSpec((Discrete("push", 3),))
    device = torch.device("cpu")

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.generator = num_envs, torch.Generator()

    def _start(self) -> torch.Tensor:
        return torch.stack((torch.rand(self.num_envs, generator=self.generator) * 2 - 1, torch.zeros(self.num_envs)), dim=1)  # [N, 2]

    def reset(self, seed: int | None = None) -> Timestep:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.points, self.steps = self._start(), torch.zeros(self.num_envs, dtype=torch.int64)
        never = self.steps > 0  # [N] bool, false
        return Timestep({"obs": self.points}, torch.zeros(self.num_envs), terminated=never, truncated=never)

    def step(self, actions: Actions) -> Timestep:
        speed = 0.9 * self.points[:, 1] + PUSH * (actions["push"] - 1)  # [N]
        moved = torch.stack((self.points[:, 0] + speed, speed), dim=1)  # [N, 2]
        truncated = self.steps + 1 == LIMIT
        self.points = torch.where(truncated.unsqueeze(1), self._start(), moved)
        self.steps = torch.where(truncated, 0, self.steps + 1)
        return Timestep({"obs": self.points}, -moved[:, 0].abs(), torch.zeros_like(truncated), truncated, final_obs={"obs": moved})

    def close(self) -> None: ...


def main() -> None:
    torch.set_num_threads(1)
    check_env(PointBatch(4))  # raises where a batched environment breaks the contract
    for env in (PointEnv, PointBatch):  # a class or function that takes num_envs makes a batch
        ppo = PPO(env, PPOConfig(num_steps=64, network=NetworkConfig(core="none")), num_envs=16)  # all is observed: no memory needed
        before = ppo.evaluate(env, episodes=64)
        after = ppo.learn(16_384).evaluate(env, episodes=64)
        print(f"{env.__name__}: mean return {before.mean_return:.1f} before the training, {after.mean_return:.1f} after it")


if __name__ == "__main__":
    main()
