"""Triton kernels for fleets on GPUs. Each module is imported when a GPU first needs it, because Triton may be missing elsewhere."""

from __future__ import annotations

import sys


def compiled_kernels() -> int:
    """Return the number of Triton kernels compiled in this process. It grows with the number of layer shapes, hardly with that of hosts."""
    modules = [module for name, module in sys.modules.items() if name.startswith("esper.fleet.kernels.")]
    caches = [cache for module in modules for value in vars(module).values() for cache in getattr(value, "device_caches", {}).values()]
    return sum(len(cache[0]) for cache in caches)
