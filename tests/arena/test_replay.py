"""Replays: recorded battles are verified by computing them again, and changes are detected."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numba
import pytest
import torch
from torch import Tensor

from esper.arena import replay as replays
from esper.arena.arena import Arena, StepResult, no_actions
from esper.arena.bots import Bot
from esper.arena.config import ArenaConfig
from esper.arena.native import layout as at
from esper.arena.native.simulation import BATTLE_DIMENSIONS, DECIDE_ONLY, Saved, Simulation, state_hash
from esper.arena.replay import Recorder, device_kind, load_battle, verify
from esper.arena.specs import PHYSICS, RULES_VERSION, Material
from esper.replay_file import UNIT_COLUMNS, FeedItem, ReplayError, ReplayFile, StateHash, read_replay, write_replay
from esper.vecenv import Actions
from tests.arena.worlds import build, flat_arena, make_actions, place, random_actions, saved, select_battles
from tests.replays import WON

OF_RULES_1 = Path(__file__).parent / "data" / "replay_of_rules_1.safetensors"  # the first frames of one, without maps at keyframes
PLACE = 1
KEYFRAME_EVERY = 6
CONFIG = ArenaConfig(battles=3, team_size=2, size=24, maps=4, seconds=8.0, contacts=2, allies=1)
COLUMN = {name: index for index, name in enumerate(UNIT_COLUMNS)}


class Fought:
    """A battle with its recorder, and what an onlooker saw of it beside: the state before every decision, and every result."""

    def __init__(self, arena: Arena, *, bots: tuple[str, str] = ("strong", "random")) -> None:
        self.arena, self.states, self.actions, self.results = arena, [saved(arena)], list[Actions](), list[StepResult]()
        self.taken, self.fired = list[Tensor](), list[Tensor]()  # [U, U] damage, and [U] whether units fired, in every decision
        players = [Bot(name, arena, seed=seed) for seed, name in enumerate(bots)]
        is_first = (torch.arange(arena.config.battles * arena.config.units) % arena.config.units) < arena.config.team_size
        self.recorder = Recorder(arena, PLACE, teams=("first", "second"), keyframe_every=KEYFRAME_EVERY)
        self.recorder.begin()
        while not self.recorder.is_over:
            one, other = (player.act() for player in players)
            actions = {name: torch.where(is_first.view(-1, *(1,) * (one[name].dim() - 1)), one[name], other[name]) for name in one}
            result = arena.step(actions)
            self.recorder.add(actions, result)
            self.states.append(saved(arena))
            self.taken.append(arena.simulation.state["taken"][:, PLACE].clone())
            self.fired.append(arena.simulation.number[at.FIRED_ONCE, PLACE] != 0)
            self.actions.append(actions)
            self.results.append(result)


@pytest.fixture(scope="module")
def fought() -> Fought:
    return Fought(Arena(CONFIG, seed=1))


@pytest.fixture(scope="module")
def path(fought: Fought, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fought.recorder.write(tmp_path_factory.mktemp("replays") / "battle.safetensors")


def changed(path: Path, name: str, *, tensors: dict[str, Tensor] | None = None, **info: Any) -> Path:
    """The replay with something else in it."""
    found = read_replay(path)
    return write_replay(path.with_name(name), found.tensors | (tensors or {}), msgspec.structs.replace(found.info, **info))


@pytest.mark.slow
def test_a_recorded_battle_is_verified_on_the_device_that_fought_it(path: Path) -> None:
    found = verify(path)
    assert found.ok, found.message
    assert (found.first_wrong_frame, found.device_matches) == (None, True)
    assert found.checked == read_replay(path).frames > 3 * KEYFRAME_EVERY  # several keyframe intervals


@pytest.mark.slow
@pytest.mark.parametrize(("battles", "team_size"), [(3, 1), (2, 3)])
def test_a_battle_alone_is_the_same_as_in_a_batch_bit_for_bit(battles: int, team_size: int) -> None:
    config = ArenaConfig(battles=battles, team_size=team_size, size=16, maps=2, seconds=60.0)
    arena, chance = Arena(config, seed=1), torch.Generator().manual_seed(0)
    bot = Bot("strong", arena)
    alone = Simulation(config, arena.grids, battles=1, device=arena.device)
    rows = torch.arange(battles * config.units).view(battles, -1)
    for step in range(12):
        actions = random_actions(arena, chance) if step % 4 == 0 else bot.act()
        before = saved(arena)
        result = arena.step(actions)
        for battle in range(battles):
            if bool(result.ended[battle]):
                continue
            alone.load(select_battles(before, torch.tensor([battle])))
            for name, value in actions.items():
                alone.actions[name].copy_(value[rows[battle]])
            alone.run(DECIDE_ONLY)
            for name, tensor in alone.saved([0]).items():
                assert torch.equal(tensor[0], saved(arena)[name][battle]), (name, step, battle)


def test_frames_show_the_state_of_the_arena(fought: Fought, path: Path) -> None:
    replay = read_replay(path)
    frames, units = replay.tensors["frames/units"], CONFIG.units
    assert replay.frames == len(fought.results) + 1
    for frame, state in enumerate(fought.states[:-1]):  # after the last decision the next battle has begun
        drawn, unit, number, status = frames[frame], state["unit"][PLACE], state["number"][PLACE], state["status"][PLACE]
        assert torch.equal(drawn[:, :3], unit[: at.Z + 1].T)
        assert torch.allclose(drawn[:, COLUMN["heading"]].cos(), unit[at.COS], atol=1e-6)
        assert torch.allclose(drawn[:, COLUMN["heading"]].sin(), unit[at.SIN], atol=1e-6)
        for name in ("hit_points", "legs", "heat", "stability", "fuel"):
            assert torch.equal(drawn[:, COLUMN[name]], unit[getattr(at, name.upper())])
        for name, field in (("fallen", at.FALLEN), ("venting", at.IS_VENTING), ("painted", at.PAINTED)):
            assert torch.equal(drawn[:, COLUMN[name]] > 0, number[field] > 0)
        assert torch.equal(replay.tensors["frames/score"][frame], status[: at.HELD_2 + 1] * torch.tensor(PHYSICS.tick_s))
        assert int(replay.tensors["frames/holder"][frame]) == int(status[at.HOLDER])
        for one in range(units):
            for other in range(units):
                how = int(replay.tensors["frames/sensed"][frame, one, other])
                enemy, is_enemy = other % CONFIG.team_size, (one < CONFIG.team_size) != (other < CONFIG.team_size)
                assert (how > 0) == (is_enemy and bool(number[at.SENSED, one] >> enemy & 1))
                assert (how == 2) == (is_enemy and bool(number[at.SEEN, one] >> enemy & 1))
        flying = replay.tensors["frames/projectiles"][frame]
        assert torch.equal(flying[:, 0].view(units, -1) > 0, state["shell_count"][PLACE, at.SHELL_LIFE] > 0)


def test_the_last_frame_is_of_the_battle_that_ended_and_not_of_the_next(fought: Fought, path: Path) -> None:
    replay, last = read_replay(path), fought.results[-1]
    decisions, *score = last.last[PLACE, :3].tolist()
    alive = replay.tensors["frames/units"][-1, :, COLUMN["hit_points"]] > 0
    assert replay.frames - 1 == decisions
    assert replay.tensors["frames/score"][-1].tolist() == score
    assert alive.view(2, -1).sum(1).tolist() == last.last[PLACE, 3:].tolist()
    assert replay.info.winner == (None if int(last.winner[PLACE]) < 0 else int(last.winner[PLACE]))
    assert fought.states[-1]["status"][PLACE, at.DECISION] == 0  # the arena is in the next


def test_the_feed_reports_every_death_once_and_ends_with_the_result(fought: Fought, path: Path) -> None:
    replay = read_replay(path)
    points = replay.tensors["frames/units"][..., COLUMN["hit_points"]]
    died = ((points[:-1] > 0) & (points[1:] <= 0)).nonzero()
    told = [(item.frame, item.unit) for item in replay.info.feed if item.kind == "kill"]
    assert sorted(told) == sorted((frame + 1, unit) for frame, unit in died.tolist())
    assert told
    for item in replay.info.feed:
        if item.kind == "kill" and item.by is not None:
            assert float(fought.taken[item.frame - 1][item.by, item.unit]) > 0
            assert "destroys" in item.text
    assert replay.info.feed[-1].kind == "end"
    assert [item.kind for item in replay.info.feed].count("end") == 1


def test_recorded_actions_equal_the_chosen_ones_and_targets_are_units(fought: Fought, path: Path) -> None:
    tensors = read_replay(path).tensors
    rows = slice(PLACE * CONFIG.units, (PLACE + 1) * CONFIG.units)
    aimed = 0
    for step, (actions, state) in enumerate(zip(fought.actions, fought.states, strict=False)):
        for name, kept in (("motion", "motion"), ("fire", "fire"), ("vent", "vent"), ("target", "contact")):
            assert torch.equal(tensors[f"actions/{kept}"][step].to(actions[name].dtype), actions[name][rows])
        for unit in range(CONFIG.units):
            slot, target = int(actions["target"][rows][unit]), int(tensors["actions/target"][step, unit])
            contact = int(state["contact"][PLACE, slot, unit])
            is_aimed = bool(actions["fire"][rows][unit] > 0) and contact >= 0
            assert target == (contact if is_aimed else -1)
            aimed += is_aimed
    assert aimed


def test_recorded_shots_have_weapon_and_target(fought: Fought, path: Path) -> None:
    tensors = read_replay(path).tensors
    shots = tensors["frames/shots"]
    assert (shots[0] == -1).all()
    for step, fired in enumerate(fought.fired):
        assert torch.equal(shots[step + 1, :, 0] >= 0, fired)
        assert torch.equal(shots[step + 1, fired, 0] + 1, tensors["actions/fire"][step, fired])
        assert torch.equal(shots[step + 1, fired, 1], tensors["actions/target"][step, fired])
    assert (shots >= 0).any()


@pytest.mark.slow
def test_destroyed_columns_are_recorded_with_their_time(tmp_path: Path) -> None:
    arena = flat_arena("medium", battles=2, seconds=3.0)
    place(arena, 0, -3.0, 0.5)
    place(arena, 1, 3.0, 0.5, heading=math.pi)
    build(arena, (0, 1), (-2, 3), Material.GLASS, height=2.0)
    arena.look()
    recorder = Recorder(arena, PLACE)
    recorder.begin()
    worn = arena.simulation.state["worn"].view(2, 24, 24)
    gone = [worn[PLACE] == at.DESTROYED]
    while not recorder.is_over:
        actions = make_actions(arena, {0: {"fire": "autocannon", "target": 1}})
        recorder.add(actions, arena.step(actions))
        gone.append(worn[PLACE] == at.DESTROYED)
    tensors = read_replay(recorder.write(tmp_path / "glass.safetensors")).tensors
    changes, told = tensors["terrain/changes"].tolist(), torch.zeros(24, 24, dtype=torch.bool)
    assert changes
    for frame, seen in enumerate(gone[:-1]):
        for when, i, j in changes:
            if when == frame:
                assert tensors["terrain/material"][i, j] == Material.GLASS
                told[i, j] = True
        assert torch.equal(told, seen)


@pytest.mark.slow
def test_the_next_battle_in_a_place_and_one_with_small_teams_are_verified_too(tmp_path: Path) -> None:
    arena = Arena(msgspec.structs.replace(CONFIG, seconds=2.0), seed=8)
    arena.set_largest_team(1)
    status = arena.simulation.status
    while int(status[at.EPISODE, PLACE]) < 1 or int(status[at.DECISION, PLACE]):
        arena.step(no_actions(arena.config))
    fought = Fought(arena)
    path = fought.recorder.write(tmp_path / "second.safetensors")
    battle = load_battle(path)
    assert (battle.origin.episode, battle.origin.largest_team) == (1, 1)
    assert battle.keyframes["number"][0, at.IS_PRESENT].tolist() == [1, 0, 1, 0]
    assert verify(path).ok


@pytest.mark.slow
@pytest.mark.parametrize("frame", [0, 7])
def test_a_changed_action_is_detected_where_it_matters(path: Path, frame: int) -> None:
    motion = read_replay(path).tensors["actions/motion"].clone()
    alive = read_replay(path).tensors["frames/units"][frame, :, COLUMN["hit_points"]] > 0
    unit = int(alive.int().argmax())
    motion[frame, unit] = torch.where(motion[frame, unit] > 0, -1.0, 1.0)
    found = verify(changed(path, "action.safetensors", tensors={"actions/motion": motion}))
    assert not found.ok
    assert found.first_wrong_frame == frame + 1
    assert f"frame {frame + 1} is not what seed and actions lead to" in found.message


@pytest.mark.slow
def test_a_changed_frame_is_detected(path: Path) -> None:
    units = read_replay(path).tensors["frames/units"].clone()
    units[9, 0, 0] += 1e-3
    found = verify(changed(path, "picture.safetensors", tensors={"frames/units": units}))
    assert (found.ok, found.first_wrong_frame) == (False, 9)


@pytest.mark.slow
def test_a_changed_keyframe_seed_or_place_is_detected_on_any_device(path: Path) -> None:
    replay = read_replay(path)
    unit = replay.tensors["keyframes/unit"].clone()
    unit[1, at.HEAT, 0] += 1.0
    keyframe = verify(changed(path, "keyframe.safetensors", tensors={"keyframes/unit": unit}, device="another"))
    assert (keyframe.ok, keyframe.first_wrong_frame) == (False, KEYFRAME_EVERY)
    assert f"keyframe at frame {KEYFRAME_EVERY}" in keyframe.message
    seed = verify(changed(path, "seed.safetensors", seed=4))
    assert (seed.ok, seed.first_wrong_frame) == (False, 0)
    assert "does not begin as seed 4 makes it" in seed.message
    assert replay.info.origin is not None
    episode = verify(changed(path, "place.safetensors", origin=msgspec.structs.replace(replay.info.origin, episode=1)))
    assert (episode.ok, episode.first_wrong_frame) == (False, 0)


Change = Callable[[ReplayFile], dict[str, Any]]  # what `changed` is given


def with_tensor(name: str, change: Callable[[Tensor], object]) -> Change:
    """`change` alters a copy of it in place."""

    def made(replay: ReplayFile) -> dict[str, Any]:
        tensor = replay.tensors[name].clone()
        change(tensor)
        return {"tensors": {name: tensor}}

    return made


def with_info(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda replay: {name: change(getattr(replay.info, name))}


def with_change(frame: int, material: Material | None = None) -> Change:
    """One more column that is said to have been destroyed: the first of a material, or one that is not there."""

    def made(replay: ReplayFile) -> dict[str, Any]:
        columns = (replay.tensors["terrain/material"] == material).nonzero() if material is not None else torch.tensor([[99, 0]])
        changes = torch.cat((torch.tensor([[frame, *columns[0].tolist()]]), replay.tensors["terrain/changes"]))
        return {"tensors": {"terrain/changes": changes.int()}}

    return made


def with_senses(replay: ReplayFile) -> dict[str, Any]:
    """Another first keyframe, with its right hash."""
    number = replay.tensors["keyframes/number"].clone()
    number[0, at.SEEN, 0] ^= 1
    number[0, at.SENSED, 0] |= 1
    loaded: Saved = {name: (replay.tensors | {"keyframes/number": number})[f"keyframes/{name}"] for name in BATTLE_DIMENSIONS}
    hashes = [StateHash(frame=0, sha256=state_hash(loaded, 0)), *replay.info.hashes[1:]]
    sensed = replay.tensors["frames/sensed"].clone()
    sensed[0, 0, CONFIG.team_size] = 1 + int(number[0, at.SEEN, 0] & 1)
    return {"tensors": {"keyframes/number": number, "frames/sensed": sensed}, "hashes": hashes}


TAMPERINGS: dict[str, tuple[Change, int | None, str]] = {  # how, first wrong frame (None: the last), what is told
    "units": (with_tensor("frames/units", lambda units: units[0].add_(1e-3)), 0, "frames/units is not that of the keyframe at frame 0"),
    "shots": (with_tensor("frames/shots", lambda shots: shots[0].fill_(1)), 0, "frames/shots is not that of the keyframe at frame 0"),
    "holder": (with_tensor("frames/holder", lambda held: held[6].add_(1)), 6, "frames/holder is not that of the keyframe at frame 6"),
    "clouds": (with_tensor("frames/clouds", lambda clouds: clouds[7].add_(1)), 7, "lead to (frames/clouds)"),
    "height": (with_tensor("terrain/height", lambda height: height[0].add_(1)), 0, "terrain/height is not that of the map"),
    "material": (with_tensor("terrain/material", lambda material: material[0].fill_(2)), 0, "terrain/material is not that of the map"),
    "open change": (with_change(3, Material.OPEN), 6, "terrain/changes does not lead to the terrain of the keyframe at frame 6"),
    "solid change": (with_change(3, Material.SOLID), 6, "terrain/changes does not lead to the terrain of the keyframe at frame 6"),
    "late change": (with_change(999, Material.SOLID), 0, "terrain/changes names frames or columns that are not there"),
    "outer change": (with_change(3), 0, "terrain/changes names frames or columns that are not there"),
    "target": (with_tensor("actions/target", lambda target: target[8].fill_(3)), 9, "lead to (actions/target)"),
    "senses": (with_senses, 0, "lead to (keyframes/senses)"),
    "classes": (with_info("unit_classes", lambda names: ["heavy", *names[1:]]), 0, "unit_classes is not that of"),
    "class table": (with_info("class_table", lambda table: {**table, "scout": {}}), 0, "class_table is not that of"),
    "weapons": (with_info("weapons", lambda names: names[::-1]), 0, "weapons is not that of"),
    "columns": (with_info("unit_columns", lambda names: names[::-1]), 0, "unit_columns is not that of"),
    "seconds": (with_info("seconds", lambda seconds: seconds + 1), 0, "seconds is not that of"),
    "zone radius": (with_info("zone_radius", lambda radius: radius + 1), 0, "zone_radius is"),
    "winner": (with_info("winner", lambda winner: 1 if winner is None else None), None, "the winner is not"),
    "hashes": (with_info("hashes", lambda hashes: [*hashes, hashes[0]]), 0, "the hashes are not those of the keyframes"),
    "team names": (with_info("teams", lambda _: ("other", "names")), None, "the feed is wrong at frame"),
    "feed": (
        with_info("feed", lambda feed: [FeedItem(frame=1, kind="fall", unit=0, text="it falls"), *feed]),
        None,
        "the feed is wrong at frame",
    ),
    "no feed": (with_info("feed", lambda _: []), None, "the feed is wrong at frame"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_change_of_any_computed_tensor_is_detected(path: Path, name: str) -> None:
    change, frame, told = TAMPERINGS[name]
    replay = read_replay(path)
    found = verify(changed(path, "tampered.safetensors", **change(replay)))
    assert not found.ok
    assert told in found.message
    if frame is not None:
        assert found.first_wrong_frame == frame
    elif name == "winner":
        assert found.first_wrong_frame == replay.frames - 1


def test_a_truncated_battle_is_reported(path: Path) -> None:
    replay = read_replay(path)
    last = 2 * KEYFRAME_EVERY
    lengths = {"frames": last + 1, "actions": last, "keyframes": 3}
    tensors = {name: value[: lengths.get(name.split("/")[0])] for name, value in replay.tensors.items()}
    changes = replay.tensors["terrain/changes"]
    tensors["terrain/changes"] = changes[changes[:, 0] <= last]
    feed = [item for item in replay.info.feed if item.frame <= last]
    info = msgspec.structs.replace(replay.info, feed=feed, hashes=replay.info.hashes[:3])
    found = verify(write_replay(path.with_name("cut.safetensors"), tensors, info))
    assert (found.ok, found.first_wrong_frame) == (False, last)
    assert "the battle is not over at its last frame" in found.message


def with_origin(**changes: Any) -> Change:
    return with_info("origin", lambda origin: msgspec.structs.replace(origin, **changes))


def with_keyframes(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda replay: {"tensors": {f"keyframes/{name}": change(replay.tensors[f"keyframes/{name}"])}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (with_keyframes("seed", lambda seed: seed[:, None]), r"keyframes/seed is torch.int64 \[K, 1\], not torch.int64 \[K\]"),
        (with_keyframes("unit", lambda unit: unit.double()), "keyframes/unit is torch.float64"),
        (with_keyframes("unit", lambda unit: unit / 0.0), "unit is not everywhere a number"),
        (with_keyframes("unit", lambda unit: unit * 0.0 + 3e38), "unit is not everywhere a number from -1e\\+06 to 1e\\+06"),
        (with_keyframes("worn", lambda worn: worn[:, :-2]), "keyframes/worn is torch.uint8"),
        (with_keyframes("contact", lambda contact: contact + 5), "contact is not everywhere from -1 to 3"),
        (with_keyframes("shell_count", lambda count: count - 1), "shell_count is not everywhere from "),
        (with_keyframes("status", lambda status: status + 4), "keyframes/status does not name one of its 4 maps"),
        (with_keyframes("status", lambda status: status[:, 0]), "keyframes/status does not name one of its 4 maps"),
        (with_keyframes("status", lambda status: status[:, :3]), "keyframes/status does not name one of its 4 maps"),
        (with_keyframes("at", lambda at: at.flip(0)), "keyframes are at frames"),
        (with_keyframes("at", lambda at: at + 1000), "keyframes are at frames"),
        (with_tensor("actions/contact", lambda contact: contact.add_(100)), "actions with impossible values"),
        (
            lambda replay: {"tensors": {"actions/contact": replay.tensors["actions/contact"].float()}},
            "actions/contact is missing, or not one",
        ),
        (with_origin(place=3), "its place at the start is 3, but must be from 0 to 2"),
        (with_origin(place=-1), "its place at the start is -1"),
        (with_origin(episode=10**30), "its episode at the start is"),
        (with_origin(episode=2**35), "its episode at the start is"),
        (with_origin(largest_team=0), "its largest_team at the start is 0, but must be from 1 to 2"),
        (with_origin(config={"team_size": 3}), "it has 4 units, but its config has 6"),
        (with_origin(config={"team_size": "many"}), "team_size: expected an int >= 1 and <= 16, got 'many'"),
    ],
)
def test_a_replay_with_impossible_values_is_refused_by_name(path: Path, change: Change, told: str) -> None:
    damaged = changed(path, "damaged.safetensors", **change(read_replay(path)))
    with pytest.raises(ReplayError, match=rf"damaged\.safetensors cannot be computed again: .*{told}.*; it was changed or damaged"):
        verify(damaged)


@pytest.mark.slow
@pytest.mark.parametrize("decision", [None, 3])
def test_a_replay_verifies_although_the_teams_of_later_battles_were_limited(decision: int | None, tmp_path: Path) -> None:
    arena = Arena(msgspec.structs.replace(CONFIG, seconds=2.0), seed=1)
    if decision is None:
        arena.set_largest_team(1)
    recorder, bot = Recorder(arena, PLACE, keyframe_every=KEYFRAME_EVERY), Bot("strong", arena)
    recorder.begin()
    for step in range(arena.config.decisions):
        if step == decision:
            arena.set_largest_team(1)
        actions = bot.act()
        recorder.add(actions, arena.step(actions))
    assert arena.simulation.number[at.IS_PRESENT, PLACE].tolist() == [1, 0, 1, 0]
    found = verify(recorder.write(tmp_path / "limited.safetensors"))
    assert found.ok, found.message


@pytest.mark.slow
def test_a_replay_on_maps_of_ones_own_can_only_be_watched(tmp_path: Path) -> None:
    arena = flat_arena(seconds=1.0)
    recorder, actions = Recorder(arena, 0), no_actions(arena.config)
    recorder.begin()
    while not recorder.is_over:
        recorder.add(actions, arena.step(actions))
    with pytest.raises(ReplayError, match="does not hold the start of the battle; it can be watched"):
        verify(recorder.write(tmp_path / "own.safetensors"))


@pytest.mark.slow
def test_the_battle_in_the_documentation_is_won_by_a_trained_player_and_can_be_verified() -> None:
    found, info = verify(WON), read_replay(WON).info
    assert found.ok or (found.checked and not found.device_matches), found.message
    assert info.winner is not None
    assert info.teams[info.winner] == "player-5v5"


def test_a_replay_of_earlier_rules_can_be_watched_but_not_verified() -> None:
    with pytest.raises(ReplayError, match=r"is a battle of rules version 1, .* it can be watched here"):
        verify(OF_RULES_1)
    assert read_replay(OF_RULES_1).frames == 8


@pytest.mark.slow
def test_a_replay_of_another_device_is_played_and_its_deviation_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = changed(path, "elsewhere.safetensors", device="NVIDIA H200, torch 2.13.0")
    same_bits = verify(elsewhere)
    assert (same_bits.ok, same_bits.device_matches) == (True, False)
    assert "another kind (NVIDIA H200, torch 2.13.0)" in same_bits.message

    monkeypatch.setattr(replays, "Simulation", RoundingOtherwise)
    found = verify(elsewhere)
    assert (found.ok, found.device_matches) == (False, False)
    assert "it can be played here, and verified only there" in found.message
    assert "no unit is further than" in found.message
    found = verify(path)
    assert (found.ok, found.first_wrong_frame) == (False, 1)


class RoundingOtherwise(Simulation):
    """Battles in which heat is off by a little after every decision."""

    def run(self, task: int) -> None:
        super().run(task)
        if task == DECIDE_ONLY:
            self.unit[at.HEAT] += 1e-4


def test_a_replay_of_other_rules_is_an_error_that_names_both_versions(path: Path) -> None:
    old = changed(path, "old.safetensors", rules_version=RULES_VERSION + 6, esper_version="9.9")
    with pytest.raises(ReplayError, match=rf"rules version {RULES_VERSION + 6}, recorded by esper 9\.9; .* version {RULES_VERSION}"):
        verify(old)
    assert read_replay(old).frames  # and it can be watched


def test_a_replay_without_an_origin_or_with_impossible_actions_is_an_error(path: Path) -> None:
    with pytest.raises(ReplayError, match="can be watched, but not computed again"):
        verify(changed(path, "no_origin.safetensors", origin=None))
    fire = read_replay(path).tensors["actions/fire"].clone()
    fire[3, 0] = 100
    with pytest.raises(ReplayError, match="actions with impossible values"):
        verify(changed(path, "impossible.safetensors", tensors={"actions/fire": fire}))


@pytest.mark.slow
def test_wrong_use_of_a_recorder_is_refused(tmp_path: Path) -> None:
    arena = Arena(CONFIG, seed=3)
    with pytest.raises(ValueError, match="battles 0 to 2"):
        Recorder(arena, 3)
    recorder = Recorder(arena, 0)
    actions = no_actions(CONFIG)
    result = arena.step(actions)
    with pytest.raises(ValueError, match=r"call begin\(\)"):
        recorder.add(actions, result)
    with pytest.raises(ValueError, match="has had 1 decisions already"):
        recorder.begin()
    arena.reset()
    recorder.begin()
    with pytest.raises(ReplayError, match="has not ended"):
        recorder.write(tmp_path / "early.safetensors")
    with pytest.raises(ValueError, match="has begun"):
        recorder.begin()


def test_the_kind_of_a_device_names_processor_and_compiler() -> None:
    assert device_kind("cpu").startswith("cpu ")
    assert numba.__version__ in device_kind(torch.device("cpu"))
