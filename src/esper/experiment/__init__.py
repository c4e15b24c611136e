"""Experiments: grow a task's host, or a model of your own code, in a run folder, beside a twin that never grows.

    result = grow_task(GrowTaskConfig(task="digits", twin=True), "runs/digits")
    print(result.story.tested, result.twin.compared)

`esper grow` is this on the command line. Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import lazy_names

if TYPE_CHECKING:
    from esper.experiment.config import GrowTaskConfig as GrowTaskConfig
    from esper.experiment.training import ExperimentResult as ExperimentResult, grow_task as grow_task
    from esper.experiment.user_code import UserCodeError as UserCodeError

__getattr__, __dir__, __all__ = lazy_names(__name__)
