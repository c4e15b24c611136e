"""Replays: recorded battles are verified by computing them again, and changes are detected."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from esper.arena import replay as replays
from esper.arena.arena import Arena, StepResult, no_actions
from esper.arena.bots import Bot
from esper.arena.config import ArenaConfig
from esper.arena.recorder import advanced
from esper.arena.replay import Recorder, device_kind, load_battle, verify
from esper.arena.specs import RULES_VERSION, Material
from esper.arena.state import BattleStatus, Clouds, Senses, Shells, State, Units, World, cloned, named_tensors, state_hash
from esper.replay_file import UNIT_COLUMNS, FeedItem, ReplayError, ReplayFile, StateHash, read_replay, write_replay
from esper.vecenv import Actions
from tests.arena.worlds import build, flat_arena, make_actions, place, random_actions, select_battles
from tests.replays import WON

PLACE = 1
KEYFRAME_EVERY = 6
CONFIG = ArenaConfig(battles=3, team_size=2, size=24, maps=4, seconds=8.0, contacts=2, allies=1)
GROUPS: dict[str, Any] = {"world": World, "units": Units, "shells": Shells, "clouds": Clouds, "contest": BattleStatus, "senses": Senses}
COLUMN = {name: index for index, name in enumerate(UNIT_COLUMNS)}


class Fought:
    """A battle with its recorder, and what an onlooker saw of it beside: the state before every decision, and every scene."""

    def __init__(self, arena: Arena, *, bots: tuple[str, str] = ("strong", "random")) -> None:
        self.arena, self.states, self.actions, self.results = arena, [cloned(arena.state)], list[Actions](), list[StepResult]()
        players = [Bot(name, arena, seed=seed) for seed, name in enumerate(bots)]
        is_first = (torch.arange(arena.config.battles * arena.config.units) % arena.config.units) < arena.config.team_size
        self.recorder = Recorder(arena, PLACE, teams=("first", "second"), keyframe_every=KEYFRAME_EVERY)
        self.recorder.begin()
        while not self.recorder.is_over:
            one, other = (player.act() for player in players)
            actions = {name: torch.where(is_first.view(-1, *(1,) * (one[name].dim() - 1)), one[name], other[name]) for name in one}
            result = arena.step(actions)
            self.recorder.add(actions, result)
            self.states.append(cloned(arena.state))
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
    rows = torch.arange(battles * config.units).view(battles, -1)
    for step in range(12):
        actions = random_actions(arena, chance) if step % 4 == 0 else bot.act()
        before = cloned(arena.state)
        result = arena.step(actions)
        for battle in range(battles):
            if bool(result.ended[battle]):
                continue
            alone = select_battles(before, torch.tensor([battle]))
            after, _, _ = advanced(alone, {name: value[rows[battle]] for name, value in actions.items()}, arena.tables, config)
            together = dict(named_tensors(arena.state))
            for name, tensor in named_tensors(after):
                assert torch.equal(tensor[0], together[name][battle]), (name, step, battle)


def test_frames_show_the_state_of_the_arena(fought: Fought, path: Path) -> None:
    replay = read_replay(path)
    frames, units = replay.tensors["frames/units"], CONFIG.units
    assert replay.frames == len(fought.results) + 1
    for frame, state in enumerate(fought.states[:-1]):  # after the last decision the next battle has begun
        drawn, now = frames[frame], state.units
        assert torch.equal(drawn[:, :3], now.position[PLACE])
        for name in ("heading", "hit_points", "legs", "heat", "stability", "fuel"):
            assert torch.equal(drawn[:, COLUMN[name]], getattr(now, name)[PLACE])
        for name, flag in (("fallen", now.fallen > 0), ("venting", now.is_venting), ("painted", now.painted > 0)):
            assert torch.equal(drawn[:, COLUMN[name]] > 0, flag[PLACE])
        assert torch.equal(replay.tensors["frames/score"][frame], state.status.score[PLACE])
        assert int(replay.tensors["frames/holder"][frame]) == int(state.status.holder[PLACE])
        assert torch.equal(replay.tensors["frames/sensed"][frame] > 0, state.senses.sensed[PLACE])
        assert torch.equal(replay.tensors["frames/sensed"][frame] == 2, state.senses.seen[PLACE])
        flying = replay.tensors["frames/projectiles"][frame]
        assert torch.equal(flying[:, 0].view(units, -1) > 0, state.shells.life[PLACE] > 0)


def test_the_last_frame_is_of_the_battle_that_ended_and_not_of_the_next(fought: Fought, path: Path) -> None:
    replay, last = read_replay(path), fought.results[-1]
    decisions, *score = last.last[PLACE, :3].tolist()
    alive = replay.tensors["frames/units"][-1, :, COLUMN["hit_points"]] > 0
    assert replay.frames - 1 == decisions
    assert replay.tensors["frames/score"][-1].tolist() == score
    assert alive.view(2, -1).sum(1).tolist() == last.last[PLACE, 3:].tolist()
    assert replay.info.winner == (None if int(last.winner[PLACE]) < 0 else int(last.winner[PLACE]))
    assert fought.states[-1].status.decision[PLACE] == 0  # the arena is in the next


def test_the_feed_reports_every_death_once_and_ends_with_the_result(fought: Fought, path: Path) -> None:
    replay = read_replay(path)
    points = replay.tensors["frames/units"][..., COLUMN["hit_points"]]
    died = ((points[:-1] > 0) & (points[1:] <= 0)).nonzero()
    told = [(item.frame, item.unit) for item in replay.info.feed if item.kind == "kill"]
    assert sorted(told) == sorted((frame + 1, unit) for frame, unit in died.tolist())
    assert told
    for item in replay.info.feed:
        if item.kind == "kill" and item.by is not None:
            assert float(fought.results[item.frame - 1].step_events.taken[PLACE, item.by, item.unit]) > 0  # type: ignore[union-attr]
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
            is_aimed = bool(actions["fire"][rows][unit] > 0) and bool(state.senses.is_contact[PLACE, unit, slot])
            assert target == (int(state.senses.contacts[PLACE, unit, slot]) if is_aimed else -1)
            aimed += is_aimed
    assert aimed


def test_recorded_shots_have_weapon_and_target(fought: Fought, path: Path) -> None:
    tensors = read_replay(path).tensors
    shots = tensors["frames/shots"]
    assert (shots[0] == -1).all()
    for step, result in enumerate(fought.results):
        assert result.step_events is not None
        assert torch.equal(shots[step + 1, :, 0] >= 0, result.step_events.fired[PLACE])
        fired = result.step_events.fired[PLACE]
        assert torch.equal(shots[step + 1, fired, 0] + 1, tensors["actions/fire"][step, fired])
        assert torch.equal(shots[step + 1, fired, 1], tensors["actions/target"][step, fired])
    assert (shots >= 0).any()


@pytest.mark.slow
def test_destroyed_columns_are_recorded_with_their_time(tmp_path: Path) -> None:
    arena = flat_arena("medium", battles=2, seconds=3.0)
    place(arena, 0, -3.0, 0.5)
    place(arena, 1, 3.0, 0.5, heading=math.pi)
    build(arena, (0, 1), (-2, 3), Material.GLASS, height=2.0)
    arena.state = arena._sensed(arena.state)
    recorder = Recorder(arena, PLACE)
    recorder.begin()
    materials = [arena.state.world.material[PLACE].clone()]
    while not recorder.is_over:
        actions = make_actions(arena, {0: {"fire": "autocannon", "target": 1}})
        recorder.add(actions, arena.step(actions))
        materials.append(arena.state.world.material[PLACE].clone())
    tensors = read_replay(recorder.write(tmp_path / "glass.safetensors")).tensors
    changes, material = tensors["terrain/changes"].tolist(), tensors["terrain/material"].clone()
    assert changes
    for frame, seen in enumerate(materials[:-1]):
        for at, i, j in changes:
            if at == frame:
                assert material[i, j] == Material.GLASS
                material[i, j] = Material.OPEN
        assert torch.equal(material, seen)


@pytest.mark.slow
def test_the_next_battle_in_a_place_and_one_with_small_teams_are_verified_too(tmp_path: Path) -> None:
    arena = Arena(msgspec.structs.replace(CONFIG, seconds=2.0), seed=8)
    arena.set_largest_team(1)
    while int(arena.state.status.episode[PLACE]) < 1 or int(arena.state.status.decision[PLACE]):
        arena.step(no_actions(arena.config))
    fought = Fought(arena)
    path = fought.recorder.write(tmp_path / "second.safetensors")
    battle = load_battle(path)
    assert (battle.origin.episode, battle.origin.largest_team) == (1, 1)
    assert battle.keyframes.units.present[0].tolist() == [True, False, True, False]
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
    heat = replay.tensors["keyframes/units/heat"].clone()
    heat[1, 0] += 1.0
    keyframe = verify(changed(path, "keyframe.safetensors", tensors={"keyframes/units/heat": heat}, device="another"))
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
    tensors = {"keyframes/senses/seen": replay.tensors["keyframes/senses/seen"].clone()}
    tensors["keyframes/senses/seen"][0, 0, 2] ^= True
    keyframes = {name.removeprefix("keyframes/"): value for name, value in (replay.tensors | tensors).items()}
    groups: list[Any] = [kind(*(keyframes[f"{group}/{name}"] for name in kind._fields)) for group, kind in GROUPS.items()]
    hashes = [StateHash(frame=0, sha256=state_hash(State(*groups), 0)), *replay.info.hashes[1:]]
    sensed = replay.tensors["frames/sensed"].clone()
    sensed[0] = tensors["keyframes/senses/seen"][0].to(torch.uint8) + replay.tensors["keyframes/senses/sensed"][0].to(torch.uint8)
    return {"tensors": {**tensors, "frames/sensed": sensed}, "hashes": hashes}


TAMPERINGS: dict[str, tuple[Change, int | None, str]] = {  # how, first wrong frame (None: the last), what is told
    "units": (with_tensor("frames/units", lambda units: units[0].add_(1e-3)), 0, "frames/units is not that of the keyframe at frame 0"),
    "shots": (with_tensor("frames/shots", lambda shots: shots[0].fill_(1)), 0, "frames/shots is not that of the keyframe at frame 0"),
    "holder": (with_tensor("frames/holder", lambda held: held[6].add_(1)), 6, "frames/holder is not that of the keyframe at frame 6"),
    "clouds": (with_tensor("frames/clouds", lambda clouds: clouds[7].add_(1)), 7, "lead to (frames/clouds)"),
    "height": (with_tensor("terrain/height", lambda height: height[0].add_(1)), 0, "terrain/height is not that of the map"),
    "material": (with_tensor("terrain/material", lambda material: material[0].fill_(2)), 0, "terrain/material is not that of the map"),
    "open change": (with_change(3, Material.OPEN), 3, "lead to (terrain/changes)"),
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
        (
            with_keyframes("units/heat", lambda heat: heat[:, :-1]),
            r"keyframes/units/heat is torch.float32 \[K, 3\], not torch.float32 \[K, 4\]",
        ),
        (with_keyframes("units/heat", lambda heat: heat.double()), "keyframes/units/heat is torch.float64"),
        (with_keyframes("units/heat", lambda heat: heat / 0.0), "keyframes/units/heat is not everywhere a number"),
        (with_keyframes("world/material", lambda material: material[:, :-2]), "keyframes/world/material is torch.int8"),
        (with_keyframes("senses/contacts", lambda contacts: contacts + 4), "keyframes/senses/contacts is not everywhere from 0 to 3"),
        (with_keyframes("shells/weapon", lambda weapon: weapon - 1), "keyframes/shells/weapon is not everywhere from 0 to 6"),
        (with_keyframes("contest/map", lambda number: number + 4), "contest/map does not name one of its 4 maps"),
        (with_keyframes("contest/map", lambda number: number[:, None]), "contest/map does not name one of its 4 maps"),
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
def test_the_battle_in_the_documentation_verifies_with_the_current_rules() -> None:
    battle = load_battle(WON)
    found = verify(WON)
    assert found.device_matches == (device_kind("cpu") == battle.info.device)
    if found.device_matches:
        assert found.ok, found.message
    else:  # other processors round otherwise, or happen not to
        assert found.checked == battle.decisions + 1, found.message
        assert ("although it was recorded on another kind" if found.ok else "verified only there") in found.message


@pytest.mark.slow
def test_a_replay_of_another_device_is_played_and_its_deviation_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = changed(path, "elsewhere.safetensors", device="NVIDIA H200, torch 2.13.0")
    same_bits = verify(elsewhere)
    assert (same_bits.ok, same_bits.device_matches) == (True, False)
    assert "another kind (NVIDIA H200, torch 2.13.0)" in same_bits.message

    monkeypatch.setattr(replays, "advanced", rounding_otherwise(unless_battles=0))
    found = verify(elsewhere)
    assert (found.ok, found.device_matches) == (False, False)
    assert "it can be played here, and verified only there" in found.message
    assert "no unit is further than" in found.message


@pytest.mark.slow
def test_a_device_whose_rounding_depends_on_the_batch_verifies_in_a_batch_of_the_same_shape(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "advanced", rounding_otherwise(unless_battles=CONFIG.battles))
    assert len(load_battle(path).at) != CONFIG.battles  # at first it is tried in another shape
    assert verify(path).ok
    monkeypatch.setattr(replays, "advanced", rounding_otherwise(unless_battles=0))
    found = verify(path)
    assert (found.ok, found.first_wrong_frame) == (False, 1)


def rounding_otherwise(*, unless_battles: int) -> Any:
    """`advanced` with a heat that is off by a little in batches of any other size."""

    def nearly(before: State, *rest: Any) -> Any:
        after, orders, step_events = advanced(before, *rest)
        off = 0.0 if len(before.units.heat) == unless_battles else 1e-4
        return after._replace(units=after.units._replace(heat=after.units.heat + off)), orders, step_events

    return nearly


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
    compiled = copy.copy(arena)
    compiled.is_compiled = True
    with pytest.raises(ValueError, match="record in an arena without compile"):
        Recorder(compiled, 0)
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


def test_the_kind_of_a_device_names_processor_and_torch() -> None:
    assert device_kind("cpu").startswith("cpu ")
    assert torch.__version__ in device_kind(torch.device("cpu"))
