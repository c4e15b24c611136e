"""Esper: neural networks that grow while they train, and the recurrent PPO that learns when to grow them.

    import esper

    grown = esper.grow(model, train_loader, val_loader, loss_fn=F.cross_entropy, epochs=30)

Names and subpackages are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import lazy_names

if TYPE_CHECKING:
    from esper import (
        arena as arena,
        controller as controller,
        experiment as experiment,
        fleet as fleet,
        growth as growth,
        league as league,
        rl as rl,
        runs as runs,
        tasks as tasks,
        vecenv as vecenv,
    )
    from esper.growth import (
        Grower as Grower,
        Grown as Grown,
        GrowthConfig as GrowthConfig,
        GrowthError as GrowthError,
        add_slots as add_slots,
        analyse as analyse,
        grow as grow,
        load as load,
        register_blueprint as register_blueprint,
        save as save,
        shrink as shrink,
    )

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__)
