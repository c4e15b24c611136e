"""Verify replays: compute a recorded battle again and compare.

    verified = verify("runs/arena/replays/won.safetensors")
    print(verified.message)            # all 431 frames and 12 hashes are what this device computes from seed and actions

The start of the battle is made again from the seed. The segments between keyframes are then computed: every segment begins with the
recorded state and must lead, with the recorded actions and through the recorded frames, to the next keyframe, bit for bit. Another kind of
device rounds differently: it can play a replay, but not verify it. Contradictions within the file are found on any device
(`esper.arena.replay_checks`).

Shapes: K = keyframes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from esper.arena.feed import FeedWriter
from esper.arena.native.simulation import DECIDE_ONLY, Saved, Simulation, state_hash
from esper.arena.recorder import Recorder, destroyed, device_kind, pictures, shots, targets
from esper.arena.replay_battle import Battle, load_battle
from esper.arena.replay_checks import find_broken, wrong_feed
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
    found = _compute(battle, device)
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


def _compute(battle: Battle, device: torch.device) -> _Findings:
    """Compute all segments between keyframes at once, as battles of a simulation, and compare."""
    segments, feed_writer = range(len(battle.at)), FeedWriter(battle.config, battle.info.teams)
    ends = [*battle.at[1:], battle.decisions]
    simulation = Simulation(battle.config, battle.grids, battles=len(battle.at), device=device)
    simulation.load(battle.keyframes)
    state = simulation.saved(segments)
    wrong, feed_items, apart = _wrong_senses(battle, state), dict[int, list[FeedItem]](), 0.0
    first = torch.tensor(battle.at)
    for step in range(max(end - begin for begin, end in zip(battle.at, ends, strict=True))):
        decision = (first + step).clamp_max(battle.decisions - 1)  # shorter segments continue, but are not compared
        actions: Actions = {name: value[decision].flatten(0, 1) for name, value in battle.actions.items()}
        for name, value in actions.items():
            simulation.actions[name].copy_(value)
        simulation.run(DECIDE_ONLY)
        before, state = state, simulation.saved(segments)
        drawn, aims = pictures(state, shots(simulation).cpu()), targets(actions, before["contact"])
        taken = simulation.state["taken"].movedim(1, 0).cpu()
        for row, (begin, end) in enumerate(zip(battle.at, ends, strict=True)):
            frame = begin + step + 1
            if frame > end:
                continue
            feed_items[frame] = feed_writer.decision(frame, _one(before, row), _one(state, row), taken[row])
            names = [f"frames/{name}" for name, value in drawn.items() if not torch.equal(value[row], battle.frames[name][frame])]
            if not torch.equal(aims[row], battle.targets[frame - 1]):
                names.append("actions/target")
            gone = destroyed(before["worn"][row], state["worn"][row]).int()
            if not torch.equal(gone, battle.changes_at(frame)):
                names.append("terrain/changes")
            if frame == end and state_hash(state, row) != battle.hashes.get(frame):
                names.append("the hash")
            if names:
                wrong[frame] = names
                apart = max(apart, float((drawn["units"][row] - battle.frames["units"][frame])[:, :3].abs().max()))
    return _Findings(wrong, feed_items, apart)


def _wrong_senses(battle: Battle, state: Saved) -> dict[int, list[str]]:
    """Return the keyframes whose senses are not what their state gives. For the first keyframe, this is the only check of the senses."""
    pairs = [(state[name], battle.keyframes[name]) for name in ("number", "contact")]
    return {
        at: ["keyframes/senses"] for row, at in enumerate(battle.at) if not all(torch.equal(one[row], other[row]) for one, other in pairs)
    }


def _one(saved: Saved, row: int) -> Saved:
    return {name: tensor[row : row + 1] for name, tensor in saved.items()}


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
