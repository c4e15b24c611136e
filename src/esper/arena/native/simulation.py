"""Battles on a device: their memory, and the compiled functions that change it.

    simulation = Simulation(config, make_grids(config, seed=0), battles=64, device=torch.device("cpu"))
    simulation.begin(seed=0)
    simulation.act(bots)              # let bots choose actions
    simulation.run(DECIDE)            # reads simulation.actions, changes simulation.state, writes simulation.views

All memory is allocated once. Torch sees it as tensors, compiled functions as arrays. On a CUDA device, `act` and `run` replay a CUDA graph
from their second call on; a caller may also record them in a graph of its own.

Shapes: B = battles, U = units, K = saved battles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.maps import spawn_points
from esper.arena.native import layout as at
from esper.arena.native.battle import BEGIN, DECIDE, DECIDE_ONLY, LOOK, step_battles
from esper.arena.native.bots import act_bots
from esper.arena.native.layout import (
    Battles,
    Choices,
    Maps,
    Tables,
    Views,
    make_actions,
    make_battles,
    make_maps,
    make_rules,
    make_tables,
    make_views,
)
from esper.arena.specs import WEAPONS
from esper.arena.start import Grids, first_of
from esper.devices import GraphedCall

__all__ = ["BATTLE_DIMENSIONS", "BEGIN", "DECIDE", "DECIDE_ONLY", "LOOK", "Saved", "Simulation", "check_ranges", "state_hash"]

Saved = dict[str, Tensor]  # states of battles [K, ...] by field of `Battles`

# The dimension of the battle in every field of the state, and how many of its first rows belong to the state: all, or those before the
# ones about the last decision and the next battle. Fields that are missing are about the last decision only.
BATTLE_DIMENSIONS = {
    "unit": 1, "number": 1, "cooldown": 1, "harm": 1, "shell": 1, "shell_count": 1, "cloud": 1, "cloud_left": 0, "contact": 1,
    "worn": 0, "status": 1, "seed": 0,
}  # fmt: skip
LARGEST_NUMBER = 1e6  # of a state; the rules stay far below it, and products of such numbers are finite
MOST_GRAPHS = 64  # of `Simulation.act`, one for each memory of bots and their actions
_ROWS = {"number": at.HAS_FIRED, "shell_count": at.SHELL_IMPACT, "status": at.LARGEST_TEAM}


class Simulation:
    """B battles of a config. `config.battles` matters only for the maps of battles that share them."""

    def __init__(self, config: ArenaConfig, grids: Grids, *, battles: int, device: torch.device) -> None:
        self.config, self.device, self.battles = config, device, battles
        _check_grids(grids, config)
        spawns = spawn_points(config.team_size, size=config.size).flatten(0, 1).numpy()
        self.state, self.actions, self.views = (
            _tensors(make(config, battles), device) for make in (make_battles, make_actions, make_views)
        )
        self.maps: Any = Maps(*_tensors(_maps(grids), device).values())  # type: ignore[arg-type]
        self.tables: Any = Tables(*_tensors(make_tables(config, spawns), device).values())  # type: ignore[arg-type]
        self.rules: Any = make_rules(config)
        self.status, self.number, self.unit = (self.state[name] for name in ("status", "number", "unit"))
        self._cuda: Any = None
        self._runs = {task: GraphedCall[None](device) for task in (BEGIN, DECIDE, DECIDE_ONLY, LOOK)}
        self._acts: dict[tuple[int, ...], tuple[GraphedCall[None], Any, Any]] = {}  # by memory; the arrays of actions and bots
        self._salt = torch.zeros(1, dtype=torch.int64, device=device)
        if device.type == "cuda":
            from esper.arena.native.cuda import CudaKernels, rules_on_device

            self._cuda = CudaKernels(battles=battles, units=config.units)
            self.rules = rules_on_device(self.rules, device)
        fixed = _arrays(Maps, self.maps._asdict()), _arrays(Tables, self.tables._asdict()), self.rules
        self._arguments: Any = (_arrays(Battles, self.state), *fixed, _arrays(Choices, self.actions), _arrays(Views, self.views))
        (self._salts,) = _arrays(tuple, {"salt": self._salt})
        if self._cuda is not None:
            bots = torch.zeros(2, battles, dtype=torch.int32, device=device)
            self._cuda.compile(self._arguments, *_arrays(tuple, {"bots": bots}), self._salts)
        else:
            act_bots.compile_beside(compile_bots)  # while this process compiles `step_battles`

    def set_maps(self, grids: Grids) -> None:
        """Replace the maps by others of the same number and size."""
        for tensor, new in zip(self.maps, _maps(grids), strict=True):
            tensor.copy_(torch.from_numpy(new))

    def begin(self, *, seed: int, largest_team: int | None = None, places: Sequence[int] | None = None, episode: int = 0) -> None:
        """Begin the battles of a seed at these places; 0 to B - 1 without them. Without a largest team it is that of the config."""
        where = torch.arange(self.battles, device=self.device) if places is None else torch.tensor(places, device=self.device)
        self.status.zero_()
        self.status[at.PLACE], self.status[at.EPISODE] = where, episode
        self.status[at.LARGEST_TEAM] = self.config.team_size if largest_team is None else largest_team
        self.state["seed"][:] = first_of(seed) + where
        self.run(BEGIN)

    def run(self, task: int) -> None:
        """Do a task of `esper.arena.native.battle` with all battles."""
        if self._cuda is not None:
            self._runs[task](lambda: self._cuda.run(self._arguments, task))
        else:
            state, maps, tables, rules, actions, views = self._arguments
            step_battles(state, maps, tables, rules, actions, views, task)

    def act(self, bots: Tensor, *, salt: int = 0, into: dict[str, Tensor] | None = None) -> None:
        """Write the actions of bots, by default into `actions`.

        `bots` [2, B] int32 are their indices by team and battle; -1 leaves the actions of a team as they are. `salt` is added to the seeds
        of their random numbers. On a CUDA device, all calls with the same memory replay one graph, also if bots or salt change;
        a graph that the caller records keeps the salt.
        """
        if bots.dtype != torch.int32 or bots.shape != (2, self.battles) or bots.device != self.device or not bots.is_contiguous():
            found = f"{bots.dtype} {tuple(bots.shape)} on {bots.device}" + ("" if bots.is_contiguous() else ", not contiguous")
            raise ValueError(f"bots should be contiguous {torch.int32} {(2, self.battles)} on {self.device}; got {found}")
        given = self.actions if into is None else {name: into[name] for name in self.actions}
        self._salt.fill_(salt)
        if self._cuda is not None:
            # The arrays of a graph keep its memory alive, so that no other tensors get the same key.
            key = tuple(tensor.data_ptr() for tensor in (bots, *given.values()))
            if key not in self._acts:
                if len(self._acts) == MOST_GRAPHS:
                    del self._acts[next(iter(self._acts))]  # the oldest one
                self._acts[key] = GraphedCall(self.device), _arrays(Choices, given), *_arrays(tuple, {"bots": bots})
            act, actions, indices = self._acts[key]
            act(lambda: self._cuda.act(self._arguments, actions, indices, self._salts))
        else:
            state, maps, tables, rules, _, views = self._arguments
            act_bots(state, maps, tables, rules, views, _arrays(Choices, given), bots.numpy(), self._salts)

    def saved(self, battles: Sequence[int]) -> Saved:
        """Return copies of the states of some battles [K, ...], on the CPU."""
        index = torch.tensor(list(battles), device=self.device)
        return {
            name: self.state[name][: _ROWS.get(name)].index_select(dimension, index).movedim(dimension, 0).contiguous().cpu()
            for name, dimension in BATTLE_DIMENSIONS.items()
        }

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Replace the states of all battles by saved ones [B, ...], and write their views."""
        for name, dimension in BATTLE_DIMENSIONS.items():
            self.state[name][: _ROWS.get(name)].copy_(saved[name].movedim(0, dimension))
        self.run(LOOK)


def check_ranges(part: Callable[[str, int | None], Tensor], config: ArenaConfig) -> None:
    """Raise ValueError if a state has an index outside of its table, or numbers that are too large to compute with.

    `part` returns a field of the state, or one row of it, of all battles.
    """
    units, kinds = config.units, len(WEAPONS)
    for name, row, first, end in (
        ("contact", None, -1, units),
        ("number", at.TARGET, -1, units),
        ("number", at.WEAPON, 0, kinds),
        ("shell_count", at.SHELL_TARGET, -1, units),
        ("shell_count", at.SHELL_WEAPON, 0, kinds),
        ("status", at.MAP, 0, config.maps),
    ):
        indices = part(name, row)
        if not bool(((indices >= first) & (indices < end)).all()):
            raise ValueError(f"{name} is not everywhere from {first} to {end - 1}")
    for name in ("unit", "shell", "cloud"):
        if not bool((part(name, None).abs() <= LARGEST_NUMBER).all()):  # false for NaN
            raise ValueError(f"{name} is not everywhere a number from {-LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}")


def _check_grids(grids: Grids, config: ArenaConfig) -> None:
    """Raise ValueError if maps do not have the number and the size of the config."""
    for name, grid in grids._asdict().items():
        shape = (config.maps,) if name == "zone_radius" else (config.maps, config.size, config.size)
        if grid.shape != shape:
            raise ValueError(f"{name} of the maps should be {shape}, by maps and size of the config; got {tuple(grid.shape)}")


def compile_bots() -> None:
    """Compile `act_bots` for a battle that is never fought. The types of the arrays are the same for all configs."""
    config = ArenaConfig(battles=1, maps=1, size=16, team_size=1)
    floats, bytes_ = np.zeros((1, 16, 16), np.float32), np.zeros((1, 16, 16), np.int8)
    maps = make_maps(floats, bytes_, bytes_, floats, np.ones(1, np.float32))
    tables = make_tables(config, spawn_points(1, size=16).flatten(0, 1).numpy())
    actions, views = make_actions(config, 1), make_views(config, 1)
    bots, salts = np.zeros((2, 1), np.int32), np.zeros(1, np.int64)
    act_bots.compile(make_battles(config, 1), maps, tables, make_rules(config), views, actions, bots, salts)


def state_hash(saved: Saved, index: int) -> str:
    """Return the SHA-256 of one saved battle."""
    digest = hashlib.sha256()
    for name, tensor in saved.items():
        digest.update(name.encode())
        digest.update(tensor[index].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _maps(grids: Grids) -> Maps:
    return make_maps(*(grid.numpy() for grid in (grids.height, grids.material, grids.way, grids.route_m, grids.zone_radius)))


def _tensors(arrays: Battles | Maps | Tables | Choices | Views, device: torch.device) -> dict[str, Tensor]:
    """Return arrays as tensors by name, on a CPU of the same memory. Bytes of views are flags."""
    found = {name: torch.from_numpy(array).to(device) for name, array in zip(arrays._fields, arrays, strict=True)}
    if isinstance(arrays, Views):
        found |= {name: tensor.view(torch.bool) for name, tensor in found.items() if tensor.dtype == torch.uint8}
    return found


def _arrays(kind: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the memory of tensors as a named tuple of arrays for compiled functions."""
    plain = [tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor in tensors.values()]
    if plain[0].device.type == "cpu":
        arrays = [tensor.numpy() for tensor in plain]
    else:
        from esper.arena.native.cuda import on_device

        arrays = on_device(plain)
    return kind(arrays) if kind is tuple else kind(*arrays)
