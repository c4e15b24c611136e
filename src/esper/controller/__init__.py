"""Learned controllers: a policy for any host, its training by the lives of hosts, and what branches of lives teach.

    result = train_controller(ControllerConfig(rounds=50), "runs/controller")
    grown = esper.grow(model, ..., controller=load_controller("runs/controller/controller.safetensors"))

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import lazy_names

if TYPE_CHECKING:
    from esper.controller.config import (
        ControllerConfig as ControllerConfig,
        ControllerRewardConfig as ControllerRewardConfig,
        DomainConfig as DomainConfig,
    )
    from esper.controller.description import ControllerError as ControllerError
    from esper.controller.learned import (
        Learned as Learned,
        load_controller as load_controller,
        save_controller as save_controller,
    )
    from esper.controller.lives import Lives as Lives
    from esper.controller.training import train_controller as train_controller

__getattr__, __dir__, __all__ = lazy_names(__name__)
