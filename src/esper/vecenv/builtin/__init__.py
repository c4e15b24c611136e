"""Built-in environments: small, batched, on any device, saveable, and with a known best return."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from esper.vecenv.builtin.base import BuiltinEnv
from esper.vecenv.builtin.cartpole import CartPoleHidden
from esper.vecenv.builtin.conditional import Conditional
from esper.vecenv.builtin.cue import Cue
from esper.vecenv.builtin.pendulum import PendulumHidden


class Builtin(NamedTuple):
    """A built-in environment and its line in the command line's help."""

    factory: Callable[..., BuiltinEnv]  # called with (num_envs, *, device, seed) and the environment's own keywords
    help: str


BUILTIN: dict[str, Builtin] = {
    "cue": Builtin(Cue, "name the cue that was shown 100 steps ago; best 1, guessing 0.25"),
    "conditional": Builtin(Conditional, "two heads, the second masked by the first; best 10, random 1.97"),
    "cartpole-hidden": Builtin(CartPoleHidden, "CartPole-v1 without velocities; best 500, random about 22"),
    "pendulum-hidden": Builtin(PendulumHidden, "Pendulum-v1 without velocity; scripted about -150, random about -1200"),
}

__all__ = ["BUILTIN", "Builtin", "BuiltinEnv", "CartPoleHidden", "Conditional", "Cue", "PendulumHidden"]
