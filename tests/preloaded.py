"""Load what takes long, once, in the process that `tests.processes` forks others from. Nothing here may start a thread."""

import atexit
import gc
import importlib

import torch

from esper.rl import PPO
from esper.vecenv import make

COMMANDS = ("arena_progress", "controller_progress", "grow_progress", "ppo_progress")
for name in ("torch._dynamo", "torch.distributed.run", "esper.controller.training", "esper.experiment.training", "esper.league.training"):
    importlib.import_module(name)
for name in COMMANDS:
    importlib.import_module(f"esper.cli.{name}")

torch.set_num_threads(1)
PPO(make("cue", 1)).collect()  # loads compiled kernels
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # otherwise, libraries find their objects alive at exit and report leaks
