"""The environments that come with Esper: small, batched, on any device, saveable, and each provably solvable."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from esper.vecenv.builtin.base import BuiltinEnv
from esper.vecenv.builtin.cartpole import CartPoleHidden
from esper.vecenv.builtin.conditional import Conditional
from esper.vecenv.builtin.cue import Cue
from esper.vecenv.builtin.pendulum import PendulumHidden


class Builtin(NamedTuple):
    factory: Callable[..., BuiltinEnv]  # (num_envs, *, device, seed, and its own keywords)
    help: str


BUILTIN: dict[str, Builtin] = {
    "cue": Builtin(Cue, "name the cue that was shown 100 steps ago; best 1, guessing 0.25"),
    "conditional": Builtin(Conditional, "two heads, the second masked by the first; best 10, random 1.97"),
    "cartpole-hidden": Builtin(CartPoleHidden, "CartPole-v1 without velocities; best 500, random about 22"),
    "pendulum-hidden": Builtin(PendulumHidden, "Pendulum-v1 without velocity; scripted about -150, random about -1200"),
}

__all__ = ["BUILTIN", "Builtin", "BuiltinEnv", "CartPoleHidden", "Conditional", "Cue", "PendulumHidden"]
