"""A test of memory: a cue is shown once and asked for after a delay. A policy without memory cannot solve it.

The first observation shows one of `choices` cues. Then follow `delay` observations without a cue, the last of which has the go flag. The
action on that one must name the cue: the reward is 1 if it is right, else 0, and the episode terminates. No other action matters. With
`jitter`, each episode waits up to that many steps longer. The best mean return is 1; guessing gives 1 / choices.

Shapes: N = parallel environments, K = choices.
"""

from __future__ import annotations

import torch
from torch.nn.functional import one_hot

from esper.vecenv.actions import ActionSpec, Discrete
from esper.vecenv.builtin.base import BuiltinEnv, Outcome, State
from esper.vecenv.contract import Actions, Masks, Obs, TensorSpec


class Cue(BuiltinEnv):
    """Observation: the cue, one-hot (K, zeros after the first step), then the go flag (1). Action: one of K."""

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
        moved = {"cue": state["cue"], "until_go": state["until_go"] - 1, "shown": torch.zeros_like(state["shown"])}
        return moved, Outcome(reward, terminated, torch.zeros_like(terminated))

    def observe(self, state: State) -> tuple[Obs, Masks]:
        cue = one_hot(state["cue"], self.choices) * state["shown"].unsqueeze(1)  # [N, K]
        go = (state["until_go"] == 0).unsqueeze(1)  # [N, 1]
        return {"obs": torch.cat((cue, go), 1).float()}, {}
