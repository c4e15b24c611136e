"""`esper ppo envs`: the built-in environments."""

from __future__ import annotations

from esper.cli.outcome import Outcome
from esper.cli.parse import parse
from esper.config import Config

DESCRIPTION = "Lists the built-in environments. Any Gymnasium id, such as CartPole-v1, works too where Gymnasium is installed."


class EnvsArguments(Config):
    """Nothing to set."""


def run(argv: list[str], prog: str) -> Outcome:
    parse(EnvsArguments, argv, prog, description=DESCRIPTION)
    from esper.vecenv.builtin import BUILTIN

    width = max(map(len, BUILTIN))
    for name, builtin in BUILTIN.items():
        print(f"{name:<{width}}  {builtin.help}")
    return Outcome({name: builtin.help for name, builtin in BUILTIN.items()})
