"""Fixtures of the tests of controllers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from esper.controller import env
from esper.controller.config import ControllerConfig
from esper.tasks import Task

_sizes: dict[object, tuple[int, int]] = {}
_measure = env.most_slots_and_blueprints


def _measure_once(tasks: Mapping[str, Task], config: ControllerConfig) -> tuple[int, int]:
    shapes = tuple((name, task.example_input.shape) for name, task in tasks.items())
    key = shapes, config.domain.hosts, config.domain.held_out_hosts, repr(config.growth)
    if key not in _sizes:
        _sizes[key] = _measure(tasks, config)
    return _sizes[key]


@pytest.fixture(autouse=True)
def _domains_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find the slots of all hosts of a domain once, not for every environment: it takes a quarter of the time of these tests."""
    monkeypatch.setattr(env, "most_slots_and_blueprints", _measure_once)
