"""Check whether a recorded battle contradicts itself, its seed or the rules, without computing it. The result is the same on every device.

Every check returns the frame and what is wrong there, or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.feed import FeedWriter
from esper.arena.native import layout as at
from esper.arena.native.simulation import state_hash
from esper.arena.recorder import known_info, pictures
from esper.arena.replay_battle import Battle
from esper.arena.specs import PHYSICS
from esper.replay_file import UNIT_COLUMNS, FeedItem

Wrong = tuple[int, str] | None


def find_broken(battle: Battle) -> Wrong:
    """Return the first contradiction that a check finds, or None."""
    for check in (_wrong_info, _wrong_hashes, _wrong_start, _wrong_terrain, _wrong_pictures, _wrong_end):
        found = check(battle)
        if found is not None:
            return found
    return None


def wrong_feed(battle: Battle, feed_items: Mapping[int, Sequence[FeedItem]]) -> Wrong:
    """Compare the feed of the replay with `feed_items`, the feed items by frame as computed again."""
    feed_writer, ending = FeedWriter(battle.config, battle.info.teams), _ending(battle)
    alive = battle.frames["units"][-1, :, UNIT_COLUMNS.index("hit_points")] > 0
    end = feed_writer.end(battle.decisions, alive, battle.info.winner, is_by_time=bool(ending.by_time[-1]))
    expected, given = feed_writer.whole(feed_items, [int(holder) for holder in battle.frames["holder"]], end), battle.info.feed
    if given == expected:
        return None
    first = next((index for index, pair in enumerate(zip(given, expected, strict=False)) if pair[0] != pair[1]), None)
    item = (given[len(expected) :] or expected[len(given) :])[0] if first is None else expected[first]
    return item.frame, f"the feed is wrong at frame {item.frame}"


def _wrong_info(battle: Battle) -> Wrong:
    """Compare the info with the config, the rules and the first keyframe."""
    info = battle.info
    for name, value in known_info(battle.config).items():
        if getattr(info, name) != value:
            return 0, f"{name} is not that of the battle's config and rules"
    radius = float(battle.grids.zone_radius[int(battle.keyframes["status"][0, at.MAP])])
    if info.zone_radius != radius:
        return 0, f"zone_radius is {info.zone_radius}, and that of the map {radius}"
    return None


def _wrong_hashes(battle: Battle) -> Wrong:
    """Check that every keyframe and the last frame has a hash, and that those of the keyframes are right."""
    if battle.at[0] != 0 or battle.decisions not in battle.hashes:
        return 0, "the first keyframe or the last hash is missing"
    expected = sorted({*battle.at, battle.decisions})
    if [entry.frame for entry in battle.info.hashes] != expected:
        return 0, f"the hashes are not those of the keyframes and the last frame, which are {expected}"
    for index, frame in enumerate(battle.at):
        if battle.hashes[frame] != state_hash(battle.keyframes, index):
            return frame, f"the keyframe at frame {frame} does not have its recorded hash"
    return None


def _wrong_start(battle: Battle) -> Wrong:
    """Compare the first keyframe with the start that the seed gives."""
    for name, tensor in battle.keyframes.items():
        given, made = tensor[0], battle.start[name][0]
        if name == "number":  # a device rounds what units sense in its own way; `verify` checks it
            given, made = given[: at.SEEN], made[: at.SEEN]
        if name != "contact" and not torch.equal(given, made):
            return 0, f"the battle does not begin as seed {battle.info.seed} makes it: {name} differs"
    return None


def _wrong_terrain(battle: Battle) -> Wrong:
    """Compare the drawn terrain with the map at the start, and its destroyed columns with every keyframe."""
    terrain, which, side = battle.terrain, int(battle.start["status"][0, at.MAP]), battle.config.size
    for name, drawn, first in (
        ("height", terrain["height"], battle.grids.height),
        ("material", terrain["material"], battle.grids.material),
    ):
        if not torch.equal(drawn, first[which]):
            return 0, f"terrain/{name} is not that of the map that the battle began on"
    frame, *column = terrain["changes"].long().unbind(1)
    is_there = (frame >= 1) & (frame <= battle.decisions)
    for axis in column:
        is_there &= (axis >= 0) & (axis < side)
    if not bool(is_there.all()):
        return 0, "terrain/changes names frames or columns that are not there"
    for index, keyframe in enumerate(battle.at):
        is_gone, by_changes = battle.keyframes["worn"][index] == at.DESTROYED, torch.zeros(side * side, dtype=torch.bool)
        by_changes[(column[0] * side + column[1])[frame <= keyframe]] = True
        if not torch.equal(is_gone, by_changes):
            return keyframe, f"terrain/changes does not lead to the terrain of the keyframe at frame {keyframe}"
    return None


def _wrong_pictures(battle: Battle) -> Wrong:
    """Compare the drawn frames at the keyframes with the keyframes."""
    fired = torch.full((len(battle.at), battle.config.units, 2), -1, dtype=torch.int8)
    for name, drawn in pictures(battle.keyframes, fired).items():
        for index, frame in enumerate(battle.at):
            is_known = name != "shots" or frame == 0  # a keyframe does not hold the shots of the decision before it
            if is_known and not torch.equal(drawn[index], battle.frames[name][frame]):
                return frame, f"frames/{name} is not that of the keyframe at frame {frame}"
    return None


def _wrong_end(battle: Battle) -> Wrong:
    """Check that the battle ends at the last frame and not before, with the recorded winner."""
    ending, last = _ending(battle), battle.decisions
    over = [int(frame) for frame in ending.ended.nonzero().flatten()]
    if not over:
        return last, "the battle is not over at its last frame"
    if over[0] < last:
        return over[0], f"the battle is over at frame {over[0]} already"
    winner = int(ending.winner[last])
    if battle.info.winner != (None if winner < 0 else winner):
        return last, f"the winner is not {battle.info.winner}, but {'nobody' if winner < 0 else winner}"
    return None


class Ending(NamedTuple):
    """Whether and how a battle was over at every frame [F]."""

    ended: Tensor  # bool
    winner: Tensor  # team; -1: a draw
    by_time: Tensor  # bool


def _ending(battle: Battle) -> Ending:
    """Return whether and how the battle was over at every frame, as `esper.arena.native.battle.find_end` decides it."""
    score = battle.frames["score"]  # [F, 2]
    lives = (battle.frames["units"][..., UNIT_COLUMNS.index("hit_points")] > 0).view(len(score), 2, -1).any(2)  # [F, 2]
    wins = (score >= battle.config.seconds * PHYSICS.win_share - 1e-4) | (lives & ~lives.flip(1))
    is_decided = wins.any(1) | ~lives.any(1)
    wins = torch.where(is_decided.unsqueeze(1), wins, score > score.flip(1) + 1e-4)
    is_over = torch.arange(len(score)) >= battle.config.decisions
    winner = torch.where(wins[:, 0] == wins[:, 1], -1, torch.where(wins[:, 0], 0, 1))
    return Ending(is_decided | is_over, winner, is_over & ~is_decided)
