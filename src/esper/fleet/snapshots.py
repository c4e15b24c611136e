"""Healthy states of the hosts of a fleet, on the device: a snapshot of some hosts is a copy of some rows, and so is the way back.

Shapes: N = hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from esper.fleet.row_bed import RowBed
from esper.fleet.upload import upload
from esper.growth.garden import Garden
from esper.growth.judge import Judge


class RowSnapshots:
    """`keep` copies of all rows of `live`, [N, ...] each; made when first needed."""

    def __init__(self, live: Mapping[str, Tensor], keep: int) -> None:
        self.live, self.keep = live, keep
        self._copies: list[dict[str, Tensor] | None] = [None] * keep

    def take(self, places: Mapping[int, int]) -> None:
        """row -> which of the copies its state goes into."""
        for number, rows in _by_copy(places):
            copy = self._copies[number]
            if copy is None:
                copy = self._copies[number] = {name: torch.zeros_like(tensor) for name, tensor in self.live.items()}
            self._move(self.live, copy, rows)

    def restore(self, places: Mapping[int, int]) -> None:
        for number, rows in _by_copy(places):
            copy = self._copies[number]
            assert copy is not None
            self._move(copy, self.live, rows)

    @staticmethod
    @torch.no_grad()
    def _move(source: Mapping[str, Tensor], target: Mapping[str, Tensor], rows: list[int]) -> None:
        index = upload(rows, next(iter(source.values())).device)
        for name, tensor in source.items():
            target[name].index_copy_(0, index, tensor.index_select(0, index))

    def state_dict(self) -> dict[str, Any]:
        return {str(number): dict(copy) for number, copy in enumerate(self._copies) if copy is not None}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._copies = [None] * self.keep
        for number, copy in state.items():
            self._copies[int(number)] = {name: copy[name].to(tensor).clone() for name, tensor in self.live.items()}


def _by_copy(places: Mapping[int, int]) -> Iterable[tuple[int, list[int]]]:
    for number in sorted(set(places.values())):
        yield number, [row for row, place in places.items() if place == number]


class RowRecovery:
    """Which snapshots one host has, and what of them is not tensors. What is to be copied on the device is gathered in `wishes`."""

    def __init__(self, row: int, garden: Garden[RowBed], judge: Judge, wishes: Wishes, keep: int) -> None:
        self.row, self.garden, self.judge, self.wishes, self.keep = row, garden, judge, wishes, keep
        self.is_finite = True  # every weight that learns, as the fleet has read it
        self.clock = 0  # decisions that the schedule of the learning rate has seen
        self._entries: list[dict[str, Any]] = []  # oldest first

    @property
    def has_begun(self) -> bool:
        """There is a state to go back to, the first one at least."""
        return bool(self._entries)

    def take_snapshot(self) -> None:
        if not self.is_finite:  # losses that look healthy do not tell, and there would be no way back
            return
        if self._entries and self._entries[-1]["epoch"] == self.garden.epoch:
            self._entries.pop()  # an epoch has one state to go back to, its last
        oldest = self._entries.pop(0) if len(self._entries) == self.keep else None
        taken = {entry["copy"] for entry in self._entries}
        copy = oldest["copy"] if oldest else next(number for number in range(self.keep) if number not in taken)
        self._entries.append(
            {
                "copy": copy,
                "epoch": self.garden.epoch,
                "garden": self.garden.state_dict(),
                "governor": self.judge.governor.state_dict(),
                "clock": self.clock,
            }
        )
        self.wishes.snapshots[self.row] = copy

    def go_back(self, *, is_repeated: bool) -> int:
        if is_repeated and len(self._entries) > 1:
            self._entries.pop()
        entry = self._entries[-1]
        self.garden.load_state_dict(entry["garden"])
        self.judge.governor.load_state_dict(entry["governor"])
        self.clock = entry["clock"]
        self.wishes.restores[self.row] = entry["copy"]
        return int(entry["epoch"])

    def state_dict(self) -> dict[str, Any]:
        return {"entries": list(self._entries), "clock": self.clock, "is_finite": self.is_finite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entries = [dict(entry) for entry in state["entries"]]
        self.clock, self.is_finite = state["clock"], state["is_finite"]


class Wishes:
    """Rows to copy, row -> number of the copy. They are carried out together."""

    def __init__(self) -> None:
        self.snapshots: dict[int, int] = {}
        self.restores: dict[int, int] = {}

    def carry_out(self, snapshots: RowSnapshots) -> None:
        snapshots.restore(self.restores)
        snapshots.take(self.snapshots)
        self.restores.clear()
        self.snapshots.clear()
