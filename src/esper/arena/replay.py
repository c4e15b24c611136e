"""Verify replays: compute a recorded battle again and compare.

    verified = verify("runs/arena/replays/won.safetensors")
    print(verified.message)            # all 431 frames and 12 hashes are what this device computes from seed and actions

The start of the battle is made again from the seed. The segments between keyframes are then computed: every segment begins with the
recorded state and must lead, with the recorded actions and through the recorded frames, to the next keyframe, bit for bit. Another kind of
device rounds differently: it can play a replay, but not verify it. Contradictions within the file are found on any device
(`esper.arena.replay_checks`).

Shapes: K = keyframes, B = battles that are computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from esper.arena.decision import StepEvents
from esper.arena.feed import FeedWriter
from esper.arena.recorder import Recorder, advanced, destroyed, device_kind, each, pictures, shots, targets
from esper.arena.replay_battle import Battle, load_battle
from esper.arena.replay_checks import find_broken, wrong_feed
from esper.arena.sensing import sense
from esper.arena.state import State, Units, state_hash
from esper.arena.tables import Tables, make_tables
from esper.replay_file import FeedItem
from esper.vecenv import Actions

__all__ = ["Battle", "Recorder", "VerifyResult", "device_kind", "load_battle", "verify"]


@dataclass(frozen=True)
class VerifyResult:
    """Result of `verify`. If `ok` is false and the device is of another kind, the replay may still be correct."""

    ok: bool  # the computed battle equals the recorded one, bit for bit
    checked: int  # number of frames; 0 if the file contradicts itself
    first_wrong_frame: int | None
    device_matches: bool
    message: str


def verify(path: Path | str, device: torch.device | str = "cpu") -> VerifyResult:
    """Compute a recorded battle again and compare it with the replay. Raise ReplayError for a replay of other rules."""
    battle, device = load_battle(path), torch.device(device)
    kind = device_kind(device)
    matches = kind == battle.info.device
    broken = find_broken(battle)
    if broken is not None:
        return _changed(*broken, device_matches=matches)
    segments = range(len(battle.at))
    # Compute all segments at once.
    found = _compute(battle, segments, dict(enumerate(segments)), device)
    if found.wrong and matches:
        # The result of a device may depend on the size of the batch and on the index in it: try again with those of the recording.
        alike = [_compute(battle, [segment] * battle.config.battles, {battle.origin.place: segment}, device) for segment in segments]
        found = _together(alike)
    broken = None if found.wrong else wrong_feed(battle, found.feed_items)
    return _result(battle, found, kind) if broken is None else _changed(*broken, device_matches=matches)


def _changed(frame: int, what: str, *, device_matches: bool) -> VerifyResult:
    """Return the result for a file that contradicts itself."""
    return VerifyResult(False, 0, frame, device_matches, f"{what}; the file was changed or damaged after it was recorded")


@dataclass(frozen=True)
class _Findings:
    """Differences between the computed and the recorded battle."""

    wrong: dict[int, list[str]] = field(default_factory=dict)  # frame -> names of the tensors that differ
    feed_items: dict[int, list[FeedItem]] = field(default_factory=dict)  # frame -> feed items of the decision before it, as computed
    apart_m: float = 0.0  # largest distance of a unit from its recorded position


def _compute(battle: Battle, segments: Sequence[int], compared: dict[int, int], device: torch.device) -> _Findings:
    """Compute these segments [B] at once, as a batch, and compare those in `compared`, index in the batch -> segment."""
    config, tables, feed_writer = battle.config, make_tables(battle.config, device), FeedWriter(battle.config, battle.info.teams)
    ends = [*battle.at[1:], battle.decisions]
    state = each(battle.keyframes, lambda tensor: tensor[list(segments)].to(device))
    wrong, feed_items, apart = _wrong_senses(battle, state, compared, tables), dict[int, list[FeedItem]](), 0.0
    first = torch.tensor([battle.at[segment] for segment in segments])
    for step in range(max(ends[segment] - battle.at[segment] for segment in segments)):
        decision = (first + step).clamp_max(battle.decisions - 1)  # shorter segments continue, but are not compared
        actions: Actions = {name: value[decision].flatten(0, 1).to(device) for name, value in battle.actions.items()}
        before = state
        state, orders, step_events = advanced(before, actions, tables, config)
        drawn = {name: value.cpu() for name, value in pictures(state, shots(orders, step_events)).items()}
        aims = targets(actions, before.senses).cpu()
        for row, segment in compared.items():
            frame = battle.at[segment] + step + 1
            if frame > ends[segment]:
                continue
            feed_items[frame] = feed_writer.decision(frame, _units_of(before, row), _units_of(state, row), _events_of(step_events, row))
            names = [f"frames/{name}" for name, value in drawn.items() if not torch.equal(value[row], battle.frames[name][frame])]
            if not torch.equal(aims[row], battle.targets[frame - 1]):
                names.append("actions/target")
            gone = destroyed(before.world.material[row], state.world.material[row]).cpu().int()
            if not torch.equal(gone, battle.changes_at(frame)):
                names.append("terrain/changes")
            if frame == ends[segment] and state_hash(state, row) != battle.hashes.get(frame):
                names.append("the hash")
            if names:
                wrong[frame] = names
                apart = max(apart, float((drawn["units"][row] - battle.frames["units"][frame])[:, :3].abs().max()))
    return _Findings(wrong, feed_items, apart)


def _wrong_senses(battle: Battle, state: State, compared: dict[int, int], tables: Tables) -> dict[int, list[str]]:
    """Return the keyframes whose senses are not what their state gives. For the first keyframe, this is the only check of the senses."""
    senses = sense(state.units, state.world, state.clouds, tables, contacts=battle.config.contacts)
    pairs = list(zip(senses, state.senses, strict=True))
    is_same = {segment: all(torch.equal(one[row], other[row]) for one, other in pairs) for row, segment in compared.items()}
    return {battle.at[segment]: ["keyframes/senses"] for segment, same in is_same.items() if not same}


def _units_of(state: State, row: int) -> Units:
    return Units(*(part[row : row + 1].cpu() for part in state.units))


def _events_of(step_events: StepEvents, row: int) -> StepEvents:
    return StepEvents(*(part[row : row + 1].cpu() for part in step_events))


def _together(findings: Sequence[_Findings]) -> _Findings:
    """Combine the findings of all segments. A frame between two segments may have findings in both."""
    together = _Findings(apart_m=max(found.apart_m for found in findings))
    for found in findings:
        together.feed_items.update(found.feed_items)
        for frame, names in found.wrong.items():
            together.wrong[frame] = together.wrong.get(frame, []) + names
    return together


def _result(battle: Battle, found: _Findings, kind: str) -> VerifyResult:
    """Return the result with its message."""
    frames, matches = battle.decisions + 1, kind == battle.info.device
    first = min(found.wrong, default=None)
    if first is None:
        where = "" if matches else f", although it was recorded on another kind ({battle.info.device})"
        message = f"all {frames} frames and {len(battle.hashes)} hashes are what this device computes from seed and actions{where}"
    elif matches:
        what = ", ".join(found.wrong[first])
        message = f"frame {first} is not what seed and actions lead to ({what}); the file or the rules were changed"
    else:
        message = (
            f"it was recorded on {battle.info.device} and this is {kind}, which rounds otherwise: it can be played here, and verified only "
            f"there. Computed here from keyframe to keyframe, no unit is further than {found.apart_m:.3g} m from its recorded position"
        )
    return VerifyResult(first is None, frames, first, matches, message)
