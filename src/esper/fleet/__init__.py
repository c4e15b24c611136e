"""Train N hosts of one architecture as one tensor program, each with its own seeds.

Names are imported when they are first used, so that a command line can show its help at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import lazy_names

if TYPE_CHECKING:
    from esper.fleet.config import FleetConfig as FleetConfig, FleetError as FleetError, HostConfig as HostConfig
    from esper.fleet.data import TaskTensors as TaskTensors
    from esper.fleet.fleet import Fleet as Fleet
    from esper.fleet.memory import Memory as Memory

__getattr__, __dir__, __all__ = lazy_names(__name__)
