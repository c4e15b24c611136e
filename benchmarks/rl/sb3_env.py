"""An Esper environment as a stable_baselines3 VecEnv, so that both learners step the very same environments.

What it answers is what DummyVecEnv over Monitor-wrapped environments would: every info says `TimeLimit.truncated`, those of ended
episodes also hold `terminal_observation` and `episode` (return, length). Nothing but the infos is a loop over environments.

Shapes: N = parallel environments.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv as Sb3VecEnvBase
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from esper.vecenv import Discrete, VecEnv


class Sb3VecEnv(Sb3VecEnvBase):
    """For environments on the CPU with one observation named "obs", one head and no masks."""

    def __init__(self, env: VecEnv) -> None:
        (self.head,) = env.action_spec.heads
        spec = env.observation_spec["obs"]
        action_space: spaces.Space[Any]
        if isinstance(self.head, Discrete):
            action_space = spaces.Discrete(self.head.size)
        else:
            action_space = spaces.Box(-1.0, 1.0, (self.head.size,), np.float32)
        self.env = env
        self.actions = np.empty(0)
        self.returns = np.zeros(env.num_envs)  # of the episodes under way
        self.lengths = np.zeros(env.num_envs, dtype=np.int64)
        self.began = time.time()
        super().__init__(env.num_envs, spaces.Box(-np.inf, np.inf, spec.shape, np.dtype(spec.dtype).type), action_space)

    def reset(self) -> Any:
        # One generator serves all environments, so the first of the seeds stands for all of them.
        timestep = self.env.reset(self._seeds[0])
        self._reset_seeds()
        self.returns[:] = 0
        self.lengths[:] = 0
        return np.array(timestep.obs["obs"].numpy(), order="C")

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        timestep = self.env.step({self.head.name: torch.from_numpy(self.actions)})
        rewards = timestep.reward.numpy().copy()  # the learner adds the value of cut episodes to it
        dones = timestep.ended.numpy()
        self.returns += rewards
        self.lengths += 1
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        ended = dones.nonzero()[0].tolist()
        if ended:
            assert timestep.final_obs is not None
            final, truncated = timestep.final_obs["obs"].numpy(), timestep.truncated.numpy()
            for index in ended:
                infos[index] = {
                    "TimeLimit.truncated": bool(truncated[index]),
                    "terminal_observation": final[index].copy(),
                    "episode": {"r": self.returns[index], "l": int(self.lengths[index]), "t": time.time() - self.began},
                }
            self.returns[dones] = 0
            self.lengths[dones] = 0
        return np.array(timestep.obs["obs"].numpy(), order="C"), rewards, dones, infos

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        if attr_name == "render_mode":
            return [None] * self.num_envs
        raise AttributeError(f"these environments are one batch; there is no {attr_name!r} of each")

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        raise AttributeError(f"these environments are one batch; {attr_name!r} of one cannot be set")

    def env_method(self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any) -> list[Any]:
        raise AttributeError(f"these environments are one batch; {method_name!r} of one cannot be called")

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        return [False] * self.num_envs
