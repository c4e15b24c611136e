"""What `esper grow --dry-run` says: the configuration, the host, and where something could grow in it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch

from esper.cli.grow_config import GrowTaskConfig
from esper.cli.grow_controller import make_controller
from esper.cli.grow_work import make_work
from esper.config import describe
from esper.growth.batches import example_of, move
from esper.growth.config import GrowthError
from esper.growth.host.slotted import add_slots


def plan(config: GrowTaskConfig, device: torch.device) -> tuple[dict[str, Any], str]:
    """Figures, and a table of places."""
    work = make_work(config, device)
    make_controller(config, None)  # whose file may be wrong
    batch = next(iter(work.val_loader), None)
    if batch is None:
        raise GrowthError("the validation loader yields nothing; it needs at least one batch")
    slotted = add_slots(work.model, example_of(move(batch, device)), slots=config.slots)
    figures = {
        "title": config.title,
        "device": str(device),
        "controller": config.controller,
        "epochs": config.epochs,
        "steps_per_epoch": len(work.train_loader) if isinstance(work.train_loader, Sized) else None,
        "parameters": slotted.discovery.host.parameters,
        "flops_per_sample": slotted.discovery.host.flops,
        "slots": list(slotted.slots),
        "test_part": work.score is not None,
    }
    return figures, slotted.describe()


def print_plan(config: GrowTaskConfig, figures: dict[str, Any], places: str) -> None:
    rows = describe(config)
    width = max(len(name) for name, _, _ in rows)
    for name, value, _ in rows:
        print(f"{name:<{width}}  {value}")
    print()
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):<{width}}  {_in_words(value)}")
    print(f"\n{places}")


def _in_words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    return "unknown" if value is None else str(value)
