"""What a controller may decide, and the protocol that every controller follows.

A decision is a set of actions, at most one for a slot, with the reason in words. What a gate refuses does not happen, and the ledger
says why. A decision may also ask for a probe: the next one then knows what every candidate promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from esper.growth.state import GrowthState


@dataclass(frozen=True, slots=True)
class Action:
    slot: str
    reason: str


@dataclass(frozen=True, slots=True)
class Germinate(Action):
    """A new seed, raised as the configuration says."""

    blueprint: str


@dataclass(frozen=True, slots=True)
class Advance(Action):
    """From TRAINING to BLENDING."""


@dataclass(frozen=True, slots=True)
class Retarget(Action):
    """Alpha moves to another target: HOLDING or BLENDING."""

    alpha: float


@dataclass(frozen=True, slots=True)
class Fossilize(Action):
    """Keep it for good."""


@dataclass(frozen=True, slots=True)
class Prune(Action):
    """Take it out: at once where it is not connected, else after alpha has fallen."""


@dataclass(frozen=True, slots=True)
class Decision:
    actions: tuple[Action, ...] = ()
    reason: str = ""  # why nothing, or what the actions are for together
    probe: bool = False  # look during the next epoch at what each candidate would do for the loss


class Controller(Protocol):
    """Decides before the first epoch and after every one.

    It may also have a `name` (else it goes by that of its class), and `state_dict` with `load_state_dict` where it remembers something.
    """

    def decide(self, state: GrowthState) -> Decision: ...


@runtime_checkable
class CompleteController(Controller, Protocol):
    """With all that it may have. What it remembers is in its state."""

    @property
    def name(self) -> str: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: dict[str, object]) -> None: ...
