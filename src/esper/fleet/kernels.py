"""How many kernels of our own have been compiled: some for each shape of a layer, and few more when the number of hosts changes."""

from __future__ import annotations

import sys

_MODULES = ("esper.fleet.tiled", "esper.fleet.norm_pool", "esper.fleet.host_rows")  # imported where a GPU needs them


def compiled_kernels() -> int:
    """By Triton, in this process so far."""
    functions = [value for name in _MODULES if name in sys.modules for value in vars(sys.modules[name]).values()]
    caches = [cache for function in functions for cache in getattr(function, "device_caches", {}).values()]
    return sum(len(cache[0]) for cache in caches)
