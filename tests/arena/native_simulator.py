"""Run battles in Numba's simulator of CUDA and interpreted on the CPU, and compare all arrays.

    NUMBA_ENABLE_CUDASIM=1 NUMBA_DISABLE_JIT=1 python tests/arena/native_simulator.py

Prints one line of JSON: the names of arrays that differ, the decisions, the episodes of the battles, and by which names the kernels are
stored on disk.
"""

from __future__ import annotations

import json

import torch

from esper.arena.config import BOTS, ArenaConfig
from esper.arena.native import cuda, layout as at
from esper.arena.native.battle import BEGIN_PHASES, DECIDE, ORDER_PHASES, RESULT_PHASES, TICK_PHASES, VIEW_PHASES
from esper.arena.native.cuda import CudaKernels, phase_kernel
from esper.arena.native.simulation import Simulation
from esper.arena.start import make_grids

DECISIONS = 5  # battles last four
THREADS = 3  # of a block, each of which is a thread of Python: 8 units need three blocks and leave a thread without work


def main() -> None:
    cuda.THREADS = THREADS
    config = ArenaConfig(battles=2, maps=2, size=16, team_size=2, smallest_team=1, seconds=1.0)
    grids = make_grids(config, seed=0)
    host, device = (Simulation(config, grids, battles=2, device=torch.device("cpu")) for _ in range(2))
    bots = torch.tensor([[BOTS.index("strong"), BOTS.index("expert")], [BOTS.index("random"), BOTS.index("weak")]], dtype=torch.int32)
    for simulation in (host, device):
        simulation.begin(seed=0, largest_team=2)
    device._cuda = CudaKernels(battles=2, units=4)
    for _ in range(DECISIONS):
        for simulation in (host, device):
            simulation.act(bots)
            simulation.run(DECIDE)
    differing = [
        name
        for one, other in ((host.state, device.state), (host.actions, device.actions), (host.views, device.views))
        for name in one
        if not torch.equal(one[name], other[name])
    ]
    phases = (*ORDER_PHASES, *TICK_PHASES, *RESULT_PHASES, *BEGIN_PHASES, *VIEW_PHASES)
    functions = [phase_kernel(phase).fn for phase in phases]
    stored = [function.__qualname__ for function in functions if function.__closure__ is None]
    episodes = device.status[at.EPISODE].tolist()
    print(json.dumps({"differing": differing, "decisions": DECISIONS, "episodes": episodes, "kernels": len(phases), "stored": stored}))


if __name__ == "__main__":
    main()
