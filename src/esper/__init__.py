"""Esper: neural networks that grow while they train, and the recurrent PPO that learns when to grow them.

    import esper

    grown = esper.grow(model, train_loader, val_loader, loss_fn=F.cross_entropy, epochs=30)

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.growth import Grower, Grown, GrowthConfig, GrowthError, add_slots, grow, load, register_blueprint, save

__version__ = "0.1.0"

__all__ = ["Grower", "Grown", "GrowthConfig", "GrowthError", "__version__", "add_slots", "grow", "load", "register_blueprint", "save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("esper.growth"), name)
    globals()[name] = value
    return value
