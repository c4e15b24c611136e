"""An arena in which ended battles stay until they are replaced, so that their last observations can be read.

Shapes: B = battles, U = units.
"""

from __future__ import annotations

from torch import Tensor

from esper.arena.arena import Arena, StepResult
from esper.arena.native import layout as at
from esper.arena.native.simulation import BATTLE_DIMENSIONS, BEGIN, DECIDE_ONLY


class ManualResetArena(Arena):
    """An arena whose `step` begins no battles; `next` and `replace` do. The battles are the same as those of an `Arena`.

    Where a battle ends, the views are of its end, and its units go on deciding until it is replaced.
    """

    task = DECIDE_ONLY

    def next(self) -> StepResult:
        """Begin the next battle everywhere."""
        self.simulation.status[at.EPISODE] += 1
        self.simulation.run(BEGIN)
        return self._first()

    def replace(self, ended: Tensor) -> StepResult:
        """Begin the next battle where one has ended, [B] bool."""
        simulation, kept = self.simulation, (~ended).nonzero().squeeze(1)
        tensors = [(simulation.state[name], dimension) for name, dimension in BATTLE_DIMENSIONS.items()]
        tensors += [(view.view(self.config.battles, -1), 0) for view in simulation.views.values() if view.numel()]
        # Only all battles can begin at the same time: begin them, and put the others back.
        saved = [tensor.index_select(dimension, kept) for tensor, dimension in tensors]
        simulation.status[at.EPISODE] += ended
        simulation.run(BEGIN)
        for (tensor, dimension), value in zip(tensors, saved, strict=True):
            tensor.index_copy_(dimension, kept, value)
        return self._first()
