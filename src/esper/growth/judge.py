"""Who judges a host at the end of an epoch: the governor, and what is known of rollbacks before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from esper.growth.config import GovernorConfig
from esper.growth.governor import Governor, Verdict
from esper.growth.state import LossScale


class Judge:
    def __init__(self, config: GovernorConfig, scale: LossScale | None = None) -> None:
        self.rollbacks = 0
        self.in_a_row = 0  # rollbacks without a healthy epoch between them
        self.governor = Governor(config, scale)

    def judge(self, train_losses: Sequence[float], val_loss: float, *, is_blameless: bool) -> Verdict:
        """`is_blameless` where no seed could have done it. A spike that comes back after a rollback is then the data's, and stays."""
        verdict = self.governor.judge(train_losses, val_loss)
        is_finite = all(map(math.isfinite, (*train_losses, val_loss)))
        if verdict.is_disaster and is_finite and is_blameless and self.in_a_row > 0:
            self.governor.forgive()
            return Verdict(is_healthy=True, is_disaster=False, reason=f"accepted, with no seed to blame: {verdict.reason}")
        return verdict

    def note_rollback(self) -> None:
        self.rollbacks += 1
        self.in_a_row += 1

    def state_dict(self) -> dict[str, Any]:
        return {"governor": self.governor.state_dict(), "rollbacks": self.rollbacks, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.governor.load_state_dict(state["governor"])
        self.rollbacks, self.in_a_row = state["rollbacks"], state["in_a_row"]
