"""Settings for all tests: properties may take their time, and torch computes on one thread so that results are the same everywhere."""

from __future__ import annotations

import os

# Before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("esper", deadline=None)
settings.load_profile("esper")
