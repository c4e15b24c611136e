"""A tiny environment with known observations and rewards, for tests of the learner."""

import torch

from esper.rl import PPO
from esper.vecenv import ActionSpec, Discrete, TensorSpec, Timestep


class Counting:
    """Each environment counts its steps; the observation is (environment + 1, step). Episodes end after `length` steps, for real or cut."""

    def __init__(self, num_envs: int = 3, *, length: int = 5, truncates: bool = True, spec: ActionSpec | None = None, masks=None) -> None:
        self.num_envs, self.length, self.truncates = num_envs, length, truncates
        self.device = torch.device("cpu")
        self.observation_spec = {"obs": TensorSpec((2,))}
        self.action_spec = spec or ActionSpec((Discrete("action", 2),))
        self.masks = masks or {}
        self.count = torch.zeros(num_envs)
        self.reward_of = lambda actions, count: count

    def _obs(self):
        return {"obs": torch.stack((torch.arange(1.0, self.num_envs + 1), self.count), dim=1)}

    def reset(self, seed=None):
        self.count = torch.arange(self.num_envs, dtype=torch.float32) % self.length
        nothing = torch.zeros(self.num_envs)
        return Timestep(self._obs(), nothing, nothing.bool(), nothing.bool(), dict(self.masks))

    def step(self, actions):
        self.count = self.count + 1
        ended = self.count >= self.length
        reward, final = self.reward_of(actions, self.count), self._obs()
        self.count = torch.where(ended, 0.0, self.count)
        nothing = torch.zeros_like(ended)
        terminated, truncated = (nothing, ended) if self.truncates else (ended, nothing)
        return Timestep(self._obs(), reward, terminated, truncated, dict(self.masks), final)

    def close(self):
        pass


def weights(ppo: PPO) -> torch.Tensor:
    """Return all weights of a learner as one vector."""
    return torch.cat([weight.detach().flatten() for weight in ppo.learner.weights])
