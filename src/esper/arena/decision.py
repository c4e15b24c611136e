"""One decision: five ticks of all phases, in the order that docs/arena_rules.md states.

Shapes: B = battles, U = units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.damage import strike, together
from esper.arena.fire import Aim, hit_at_once, launch, pull_triggers, take_aim
from esper.arena.ground import destroy
from esper.arena.motion import drive, fly, move, top_speed, turn
from esper.arena.orders import Orders
from esper.arena.shells import advance, explode, smoke, steer, terrain_hits
from esper.arena.specs import PHYSICS
from esper.arena.state import State
from esper.arena.tables import Tables
from esper.arena.upkeep import balance, clear_smoke, cool, count_down, endure
from esper.arena.zone import hold

PHASES = (
    ("count down", "timers lose a tick, smoke thins, venting begins or ends as ordered"),
    ("turn", "headings follow the yaw orders"),
    ("drive", "velocities over ground follow the orders, as fast as legs, ground, suppression and venting allow"),
    ("fly", "jets lift, gravity pulls, fuel is spent or comes back"),
    ("move", "everybody goes on, and is stopped by terrain, edges and other units; falls end"),
    ("endure", "the ground burns or cools, hard landings hurt legs"),
    ("fire", "weapons that are ready, in reach and in arc go off; lasers, flamers and painters strike at once"),
    ("shells", "projectiles steer, fly and burst; smoke spreads"),
    ("strike", "everything that hit in this tick takes effect at once, so two units can kill each other"),
    ("cool", "heat leaves; the overheated shut down, the cooled start again"),
    ("balance", "who has lost all stability falls; others steady"),
    ("zone", "the team with more tons in the zone scores"),
)
AFTER_TICKS = (
    ("terrain", "columns that were shot to pieces become open ground"),
    ("judge", "battles end by score, elimination or time, and rewards are paid"),
    ("reset", "battles that ended begin anew, on a map drawn from all of them"),
    ("sense", "what everybody knows of their enemies until the next decision"),
)


class StepEvents(NamedTuple):
    """What happened in a decision, for rewards, replays and feeds."""

    taken: Tensor  # [B, U, U] share of the victim's full hit points, by attacker
    fired: Tensor  # [B, U] bool


Tick = Callable[[State, Aim, Tables], tuple[State, Tensor, Tensor, tuple[Tensor, Tensor]]]


def decide(state: State, orders: Orders, tables: Tables, *, tick: Tick | None = None) -> tuple[State, StepEvents]:
    """The battles after one decision, not yet judged, and with what was sensed before it. `tick` is `one_tick` in another form."""
    run = one_tick if tick is None else tick
    aim = take_aim(orders, state.units, tables)
    taken = torch.zeros_like(state.units.harm, dtype=torch.float32)
    fired = torch.zeros_like(orders.is_firing)
    rubble: list[tuple[Tensor, Tensor]] = []
    for _ in range(PHYSICS.ticks_per_decision):
        state, by_whom, shot, hits = run(state, aim, tables)
        taken, fired = taken + by_whom, fired | shot
        rubble.append(hits)
    column, damage = (torch.cat(parts, 1) for parts in zip(*rubble, strict=True))
    contest = state.contest._replace(decision=state.contest.decision + 1)
    return state._replace(world=destroy(state.world, column, damage), contest=contest), StepEvents(taken, fired)


def one_tick(state: State, aim: Aim, tables: Tables) -> tuple[State, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The state after a tick, damage by attacker [B, U, U], who fired [B, U], and what hit the terrain: columns and damage [B, U·K]."""
    world, orders = state.world, aim.orders
    units, clouds = count_down(state.units, orders), clear_smoke(state.clouds)
    units = turn(units, orders, tables)
    units = drive(units, orders, top_speed(units, world, tables), tables)
    units = fly(units, orders, tables)
    units, hard = move(units, world)
    units = endure(units, world, hard, tables)

    units, shots = pull_triggers(units, aim)
    shells, overflow = launch(units, state.shells, aim, shots)
    shells, impact = advance(steer(shells, units, tables), units, world)
    clouds = smoke(clouds, impact, tables)
    units, by_whom = strike(units, together(hit_at_once(units, aim, shots), explode(impact, units, tables)), tables)

    units = balance(cool(units, tables))
    contest = hold(state.contest, units, world, tables)
    contest = contest._replace(overflow=contest.overflow + overflow.sum(1))
    after = state._replace(units=units, shells=shells, clouds=clouds, contest=contest)
    return after, by_whom, shots.fired, terrain_hits(impact, tables, world.floor.shape[1])
