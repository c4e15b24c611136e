"""Settings of the scripted players, which `esper.arena.bots` describes."""

from __future__ import annotations

from typing import NamedTuple


class Tactics(NamedTuple):
    """Settings of the strong bot."""

    focus: float = 1.0  # additional preference for a target that is nearly dead over one with full hit points
    caution: float = 0.95  # share of the heat cap that it does not exceed by firing
    idle_vents_at: float = 0.5  # share of the heat cap above which it vents without contacts
    spacing: float = 1.0  # factor on the preferred distance of its class
    liked_scout_m: float = 7.0  # preferred distance to enemies
    liked_light_m: float = 4.0
    liked_medium_m: float = 7.0
    liked_heavy_m: float = 8.0
    retreat_m: float = 3.0  # additional distance when it is damaged or hot
    sway: float = 1.0  # speed sideways to the line of fire
    pull: float = 0.5  # weight of the way to the zone while it fights


class Expertise(NamedTuple):
    """Settings of the expert. Damage is what a weapon does in one decision if it hits."""

    # What to shoot at, and with which weapon
    focus: float = 0.77  # additional preference for a target that is nearly dead over one with full hit points
    team_focus: float = 0.34  # additional preference for every ally near the target
    helpless: float = 1.06  # additional preference for a target that has fallen or is shut down
    heating: float = 0.21  # damage that one unit of heat added to the target is worth
    unseen: float = 0.15  # factor on the value of shots at a target that is sensed but not seen
    heat_price: float = 0.67  # damage that one unit of own heat is worth when the unit is as hot as its cap
    paint: float = 5.7  # damage that painting a target is worth
    # Heat, as shares of the heat cap
    caution: float = 0.92  # not exceeded by firing
    vents_at: float = 0.9  # above it, it vents in any case
    free_vents_at: float = 0.21  # above it, it vents in decisions without a shot
    idle_vents_at: float = 0.31  # above it, it vents without contacts
    # Motion near enemies
    liked_scout_m: float = 6.5  # preferred distance to its opponent, the contact that it moves around
    liked_light_m: float = 4.7
    liked_medium_m: float = 7.3
    liked_heavy_m: float = 4.3
    slant_scout: float = 1.04  # tangent of the angle between heading and opponent; forwards, a unit is faster than sideways
    slant_light: float = 0.39
    slant_medium: float = 0.58
    slant_heavy: float = 0.1
    hurt_share: float = 0.38  # share of the hit points below which it retreats
    retreat_m: float = 3.1  # additional distance when it is hurt or hot
    hot_share: float = 0.4  # share of the heat cap above which it keeps the additional distance
    sway: float = 1.69  # weight of going around the opponent
    flip_decisions: float = 15.0  # decisions between two random changes of that direction
    pull: float = 0.11  # weight of the way to the zone
    spread: float = 0.25  # weight of the way from allies within 2.5 m
    # Its team
    lead_m: float = 7.3  # waits if it is nearer to the zone than its last ally by more than this
    outnumbered: float = 1.28  # hit points of near enemies over those of near allies above which it goes to its allies
    regroup: float = 0.7  # weight of the way to its allies then
    # Smoke and jets
    smoke_at: float = 0.33  # share of the hit points below which it fires smoke at a near enemy that it sees
    fly_m: float = 9.6  # distance to an enemy below which it flies
    crosses: float = 1.0  # 1: flies over obstacles between it and its opponent


class Skill(NamedTuple):
    """Settings that distinguish the strengths."""

    keeps_moving: bool = False  # whether it moves while it shoots
    picks_weapon: bool = False  # whether it picks the weapon with the most damage per time instead of the first that reaches a contact
    vents_at: float = 2.0  # share of the heat cap above which it vents; above 1: never
    paint: float = 0.9  # damage per tick that painting a target is worth
    tactics: Tactics | None = None
    roams: float = 0.0  # share of the seconds in which it goes on or aside instead of standing
    expertise: Expertise | None = None


SKILLS = {
    "weak": Skill(roams=0.2),
    "middle": Skill(keeps_moving=True, picks_weapon=True, vents_at=0.9, roams=0.2),
    "strong": Skill(keeps_moving=True, picks_weapon=True, vents_at=0.85, tactics=Tactics()),
    "expert": Skill(expertise=Expertise()),
}
# Frozen bots. Before a bot without a version changes, write the settings of its frozen one out here.
SKILLS |= {f"{name}-v1": SKILLS[name] for name in ("middle", "strong", "expert")}
