"""One decision: five ticks of all phases, in the order of `PHASES`.

Shapes: B = battles, U = units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.damage import strike, together
from esper.arena.fire import Aim, hit_at_once, launch, pull_triggers, take_aim
from esper.arena.map_columns import destroy
from esper.arena.motion import drive, fly, move, top_speed, turn
from esper.arena.orders import Orders
from esper.arena.shells import advance, explode, smoke, steer, terrain_hits
from esper.arena.specs import PHYSICS
from esper.arena.state import State
from esper.arena.tables import Tables
from esper.arena.upkeep import balance, clear_smoke, cool, count_down, endure
from esper.arena.zone import hold

PHASES = (
    ("count down", "timers of units and smoke lose a tick, venting begins or ends as ordered"),
    ("turn", "headings follow the yaw orders"),
    ("drive", "velocities over ground follow the orders, as fast as legs, ground, suppression and venting allow"),
    ("fly", "jets lift, gravity pulls, fuel is spent or regained"),
    ("move", "units move until terrain, edges or other units stop them; falls end"),
    ("endure", "the ground burns or cools, hard landings damage legs"),
    ("fire", "weapons that are ready, in reach and in arc go off; lasers, flamers and painters strike at once"),
    ("shells", "projectiles steer, fly and burst; smoke spreads"),
    ("strike", "everything that hit in this tick takes effect at once, so two units can kill each other"),
    ("cool", "units lose heat; overheated units shut down, cooled units start again"),
    ("balance", "units without stability fall; others regain stability"),
    ("zone", "the team with more tons in the zone scores"),
)
AFTER_TICKS = (
    ("terrain", "destroyed columns become open ground"),
    ("end", "battles end by score, elimination or time, and rewards are paid"),
    ("reset", "ended battles are replaced by new ones, on a map drawn from all maps"),
    ("sense", "units sense their enemies; what they know holds until the end of the next decision"),
)


class StepEvents(NamedTuple):
    """Events of a decision, for rewards, replays and feeds."""

    taken: Tensor  # [B, U, U] damage by attacker and victim, as a share of the victim's full hit points
    fired: Tensor  # [B, U] bool: the unit fired


# The type of `one_tick`.
Tick = Callable[[State, Aim, Tables], tuple[State, Tensor, Tensor, tuple[Tensor, Tensor]]]


def decide(state: State, orders: Orders, tables: Tables, *, tick: Tick | None = None) -> tuple[State, StepEvents]:
    """Return the battles after one decision, with the senses from before it, and its events. It does not decide winners.

    `tick` replaces `one_tick`, for example by its compiled form.
    """
    run = one_tick if tick is None else tick
    aim = take_aim(orders, state.units, tables)
    taken = torch.zeros_like(state.units.harm, dtype=torch.float32)
    fired = torch.zeros_like(orders.is_firing)
    terrain: list[tuple[Tensor, Tensor]] = []  # columns hit and their damage, by tick
    for _ in range(PHYSICS.ticks_per_decision):
        state, by_whom, shot, hits = run(state, aim, tables)
        taken, fired = taken + by_whom, fired | shot
        terrain.append(hits)
    column, damage = (torch.cat(parts, 1) for parts in zip(*terrain, strict=True))
    status = state.status._replace(decision=state.status.decision + 1)
    return state._replace(world=destroy(state.world, column, damage), status=status), StepEvents(taken, fired)


def one_tick(state: State, aim: Aim, tables: Tables) -> tuple[State, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return the state after a tick, damage by attacker [B, U, U], units that fired [B, U], and columns hit with damage [B, U·K]."""
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
    status = hold(state.status, units, world, tables)
    status = status._replace(overflow=status.overflow + overflow.sum(1))
    after = state._replace(units=units, shells=shells, clouds=clouds, status=status)
    return after, by_whom, shots.fired, terrain_hits(impact, tables, world.floor.shape[1])
