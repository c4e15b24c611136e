"""The bed of a fleet: one slot of one host, whose seed is a row of stacked tensors."""

from __future__ import annotations

from typing import Any, Protocol

from esper.growth.bed import Bed, Life, SeedPlan
from esper.growth.place import Place
from esper.growth.seed import Blending
from esper.growth.state import GradientStats


class Ground(Protocol):
    """Where the seeds of one slot lie, those of all hosts."""

    def plant(self, row: int, plan: SeedPlan) -> None: ...


class RowBed(Bed):
    """What the host index and the tensors have to do with it stays in `ground`; here is what one host's bookkeeping asks for."""

    def __init__(self, place: Place, ground: Ground, row: int) -> None:
        super().__init__(place)
        self.row = row
        self.norms: list[float] = []  # of the seed's gradient in the last steps, as the fleet has read them
        self.skipped = 0  # of those steps, the ones that the host's gradient alone kept from being taken
        self._ground = ground
        self._has_seed = False
        self._is_connected = False
        self._alpha = 0.0

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    @property
    def alpha(self) -> float:
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._alpha = value

    def plant(self, plan: SeedPlan) -> None:
        self._ground.plant(self.row, plan)
        self._has_seed, self._is_connected, self._alpha = True, plan.is_connected, plan.alpha
        self.norms, self.skipped = [], 0

    def uproot(self) -> None:
        self._has_seed, self._is_connected, self._alpha = False, False, 0.0
        self.norms, self.skipped = [], 0

    def connect(self) -> None:
        self._is_connected = True

    def keep(self) -> None:
        pass  # a seed that is kept differs in its stage alone

    def gradients(self) -> GradientStats | None:
        if not self._has_seed:
            return None
        norms, skipped = self.norms, self.skipped
        self.norms, self.skipped = [], 0
        return GradientStats.of(norms, skipped=skipped, unit=self.loss_unit)

    def seed_state(self) -> dict[str, Any]:
        return {
            "has_seed": self._has_seed,
            "is_connected": self._is_connected,
            "alpha": self._alpha,
            "norms": list(self.norms),
            "skipped": self.skipped,
        }

    def load_seed_state(self, state: dict[str, Any], life: Life, blending: Blending) -> None:
        self._has_seed, self._is_connected, self._alpha = state["has_seed"], state["is_connected"], state["alpha"]
        self.norms = list(state["norms"])
        self.skipped = state.get("skipped", 0)  # not in files from before it was counted
