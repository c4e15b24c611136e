"""A test of masks and relevance: two heads, where the mask of the second depends on the choice of the first.

Each step asks for one of three kinds. Kind 0, "pass", is right with any item. For the other two, the item must be the most valuable one
that the mask of that kind allows. The masks are drawn again each step and are *not* part of the observation, so only a learner that
applies the mask of the chosen kind can be right, and a learner that credits the item of a pass learns from noise. The reward is 1 if the
action is right, else 0; a forbidden item is wrong. Episodes terminate after 10 steps.

The best mean return is 10. Uniform choices among allowed actions give 1.97 = 10 · 1/3 · (1/3 + 2/3 · E[1 / allowed items]).

Shapes: N = parallel environments.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from esper.vecenv.actions import ActionSpec, Discrete, Relevance
from esper.vecenv.builtin.base import BuiltinEnv, Outcome, State
from esper.vecenv.contract import Actions, Masks, Obs, TensorSpec

KINDS = 3
ITEMS = 5
PASS = 0
STEPS = 10


class Conditional(BuiltinEnv):
    """Observation: the wanted kind, one-hot (3), then the values of the items, a permutation of 0, 1/4, 1/2, 3/4, 1 (5)."""

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
        terminated = steps >= STEPS
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
