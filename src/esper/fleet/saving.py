"""Whether the saved state of a fleet can be loaded into another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from esper.fleet.errors import FleetError


def check_state(state: Mapping[str, Any], tensors: Mapping[str, Tensor], *, hosts: int, keep: int) -> None:
    """Raises FleetError unless it is that of a fleet of as many hosts, with tensors of these names and shapes and no more snapshots."""
    if len(state["rows"]) != hosts:
        raise FleetError(f"the saved fleet has {len(state['rows'])} hosts, and this one {hosts}; make one of the same size")
    if len(state["snapshots"]) > keep:
        raise FleetError(
            f"the saved fleet has {len(state['snapshots'])} snapshots of every host, and this one keeps {keep}; "
            "make one with the same governor.keep"
        )
    own, saved = ({name: list(tensor.shape) for name, tensor in some.items()} for some in (tensors, state["tensors"]))
    for name in sorted(own.keys() | saved.keys()):
        if own.get(name) != saved.get(name):
            there, here = (shapes.get(name, "not there") for shapes in (saved, own))
            raise FleetError(f"the saved fleet is of other hosts: {name!r} is {there} in it and {here} here; make one of the same hosts")
