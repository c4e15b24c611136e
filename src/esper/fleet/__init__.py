"""N hosts of one architecture, trained as one tensor program, each with its own seeds.

Names are imported when they are first used, so that a command line can show its help at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import names_of

if TYPE_CHECKING:
    from esper.fleet.config import FleetConfig, HostSetting
    from esper.fleet.data import TaskTensors
    from esper.fleet.errors import FleetError
    from esper.fleet.fleet import Fleet
    from esper.fleet.memory import Memory

_MODULES = {
    "Fleet": "fleet",
    "FleetConfig": "config",
    "FleetError": "errors",
    "HostSetting": "config",
    "Memory": "memory",
    "TaskTensors": "data",
}

__all__ = ["Fleet", "FleetConfig", "FleetError", "HostSetting", "Memory", "TaskTensors"]


__getattr__, __dir__ = names_of(__name__, _MODULES)
