"""Growing any PyTorch model while it trains: slots, seeds, their lives, a governor and controllers.

Names are imported when they are first used, so that a command line can show its help at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import lazy_names

if TYPE_CHECKING:
    from esper.growth.analysis import analyse as analyse
    from esper.growth.config import (
        BudgetConfig as BudgetConfig,
        GovernorConfig as GovernorConfig,
        GrowthConfig as GrowthConfig,
        GrowthError as GrowthError,
        LifecycleConfig as LifecycleConfig,
        RentConfig as RentConfig,
    )
    from esper.growth.controllers.baselines import Never as Never, Planned as Planned, Random as Random, Schedule as Schedule
    from esper.growth.controllers.heuristic import Heuristic as Heuristic
    from esper.growth.grower import Grower as Grower
    from esper.growth.host.layout import Place as Place
    from esper.growth.host.saving import load as load, save as save
    from esper.growth.host.slotted import Slotted as Slotted, add_slots as add_slots
    from esper.growth.integrations.huggingface import GrowthTrainer as GrowthTrainer, GrowthTrainerCallback as GrowthTrainerCallback
    from esper.growth.integrations.lightning import GrowthCallback as GrowthCallback
    from esper.growth.lifecycle.governor import Diverged as Diverged
    from esper.growth.lifecycle.stages import (
        Action as Action,
        Advance as Advance,
        Candidate as Candidate,
        Contribution as Contribution,
        Controller as Controller,
        Cost as Cost,
        Decision as Decision,
        Fossilize as Fossilize,
        Germinate as Germinate,
        GrowthState as GrowthState,
        Prune as Prune,
        Retarget as Retarget,
        Shrink as Shrink,
        SlotState as SlotState,
        Stage as Stage,
    )
    from esper.growth.run import Grown as Grown
    from esper.growth.seeds.blueprints import register_blueprint as register_blueprint
    from esper.growth.shrink import shrink as shrink
    from esper.growth.training import grow as grow

__getattr__, __dir__, __all__ = lazy_names(__name__, need_extras=("GrowthCallback", "GrowthTrainer", "GrowthTrainerCallback"))
