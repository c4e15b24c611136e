"""Learning to grow: growth as an environment, a policy for any host, its training, and the comparison that tells what it is worth.

    result = train_controller(ControllerConfig(rounds=50), "runs/controller")
    grown = esper.grow(model, ..., controller=load_controller("runs/controller/controller.safetensors"))

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import names_of

if TYPE_CHECKING:
    from esper.controller.compare import compare
    from esper.controller.compare_config import CompareConfig
    from esper.controller.comparison import Comparison
    from esper.controller.config import RENT_LEVELS, ControllerConfig, DomainConfig, RewardConfig
    from esper.controller.env import GrowthEnv
    from esper.controller.learned import ControllerError, Learned, load_controller, save_controller
    from esper.controller.training import resume_controller, train_controller

_MODULES = {
    "RENT_LEVELS": "config",
    "CompareConfig": "compare_config",
    "Comparison": "comparison",
    "ControllerConfig": "config",
    "ControllerError": "learned",
    "DomainConfig": "config",
    "GrowthEnv": "env",
    "Learned": "learned",
    "RewardConfig": "config",
    "compare": "compare",
    "load_controller": "learned",
    "resume_controller": "training",
    "save_controller": "learned",
    "train_controller": "training",
}

__all__ = [
    "RENT_LEVELS", "CompareConfig", "Comparison", "ControllerConfig", "ControllerError", "DomainConfig", "GrowthEnv", "Learned",
    "RewardConfig", "compare", "load_controller", "resume_controller", "save_controller", "train_controller",
]  # fmt: skip

__getattr__, __dir__ = names_of(__name__, _MODULES)
