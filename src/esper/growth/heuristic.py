"""The heuristic controller."""

from __future__ import annotations

from typing import Any

from esper.growth.config import GrowthConfig
from esper.growth.decisions import Decision
from esper.growth.state import GrowthState


class Heuristic:
    name = "heuristic"

    def __init__(self, config: GrowthConfig) -> None:
        self.config = config

    def decide(self, state: GrowthState) -> Decision:
        return Decision(reason="nothing yet", probe=True)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
