"""Matches count every battle once, from both sides, and can be recorded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from esper.arena.config import ArenaConfig
from esper.arena.native import layout as at
from esper.arena.replay import Recorder, verify
from esper.league import matches
from esper.league.matches import MatchArena, Tally, play_and_record
from esper.league.network import UnitActor
from esper.replay_file import read_replay
from esper.rl.policy import Policy
from tests.league.arenas import small_arena, small_policy, small_training

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def match_arena(**settings: object) -> MatchArena:
    return MatchArena(small_arena(**{"battles": 4, "seconds": 8.0, **settings}), seed=1, device="cpu")


@pytest.mark.slow
def test_every_battle_is_counted_once_and_both_sides_are_played() -> None:
    seen = []
    result = match_arena().play("strong", "random", on_step=lambda result: seen.append(result.ended.clone()))
    assert result.record.battles == 4
    assert [record.battles for record in result.by_side] == [2, 2]
    assert sum(record.wins for record in result.by_side) == result.record.wins == len(result.won)
    firsts = [int(torch.stack(seen)[:, battle].int().argmax()) + 1 for battle in range(4)]
    assert result.decisions == pytest.approx(sum(firsts) / 4)


@pytest.mark.slow
def test_every_pair_of_battles_has_a_map_of_its_own_and_swapped_sides() -> None:
    place = match_arena(battles=6, maps=2, seconds=0.5)
    maps = []
    place.play("weak", "middle", on_step=lambda result: maps.append(place.arena.simulation.status[at.MAP].clone()))
    assert maps[0].tolist() == [0, 0, 1, 1, 2, 2]
    heights = place.arena.grids.height
    assert all(not torch.equal(heights[one], heights[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


def marching_policy(arena: ArenaConfig, forward: int) -> Policy:
    """Return a policy that always makes the same choice for the way forward, and moves in no other way."""
    policy = small_policy(small_training(arena=msgspec.structs.asdict(arena)))
    actor = policy.actor
    assert isinstance(actor, UnitActor)
    place_of = policy.distribution.output_slices
    pointed = place_of["target"].stop - place_of["target"].start  # outputs that are not those of `plain`
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.zero_()
        for head, choice in {"forward": forward, "strafe": 1, "yaw": 2, "jets": 0}.items():
            actor.plain.bias[place_of[head].start - pointed + choice] = 1.0
    return policy


@pytest.mark.slow
def test_every_rival_in_a_match_meets_the_player_on_the_same_maps_as_alone() -> None:
    """Players whose choices do not depend on their index in the batch, as the coins of bots do, have the same results."""
    config = small_arena(battles=4, seconds=8.0)
    player, standing = (marching_policy(config, forward) for forward in (2, 1))
    together = MatchArena(config, seed=1, device="cpu", rivals=2)
    results = together.play_all(player, [standing, player])
    alone = MatchArena(config, seed=1, device="cpu")
    expected = [alone.play(player, rival) for rival in (standing, player)]
    for one, other in zip(results, expected, strict=True):
        assert (one.points, one.by_side, one.decisions, one.by_time) == (other.points, other.by_side, other.decisions, other.by_time)
    assert results[0].points != results[1].points
    assert set(results[0].won) <= {0, 1, 4, 5}  # battles of the second rival lie between those of the first
    assert results[0].won
    assert set(results[1].won) <= {2, 3, 6, 7}


@pytest.mark.slow
def test_battles_with_all_rivals_begin_alike_on_the_same_maps() -> None:
    config = small_arena(battles=4)
    together, alone = (MatchArena(config, seed=1, device="cpu", rivals=rivals).arena for rivals in (2, 1))
    first, second = together.reset().observation, alone.reset().observation
    for battles in ([0, 1, 4, 5], [2, 3, 6, 7]):
        assert torch.equal(first[battles], second)
    assert not torch.equal(second[:2], second[2:])  # another map


@pytest.mark.slow
def test_other_maps_make_another_match_on_the_same_ground() -> None:
    place = match_arena(battles=2, seconds=0.5)
    first = place.arena.grids.height.clone()
    place.use_maps(7)
    assert not torch.equal(place.arena.grids.height, first)
    assert place.play("weak", "random") == MatchArena(place.config, seed=7, device="cpu").play("weak", "random")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_matches_of_one_arena_are_those_of_new_ones_and_share_the_memory_of_their_bots(device: str) -> None:
    config, kept = small_arena(battles=4), MatchArena(small_arena(battles=4), seed=0, device=device, rivals=2)
    rivals = ["weak", "strong"], ["random", "weak"], ["expert", "strong"], ["weak", "strong"]
    for seed, bots in enumerate(rivals):
        kept.use_maps(seed)
        assert kept.play_all("middle", bots) == MatchArena(config, seed=seed, device=device, rivals=2).play_all("middle", bots)
    assert len(kept._bots) == 3
    assert len(kept.arena.simulation._acts) == (3 if device == "cuda" else 0)


def test_battles_that_cannot_be_paired_are_refused() -> None:
    with pytest.raises(ValueError, match="battles of a match come in pairs, one map for both sides; got 3, use 4"):
        match_arena(battles=3)


@pytest.mark.slow
def test_the_same_match_is_the_same_again_and_the_other_way_round_its_mirror() -> None:
    place = match_arena()
    once, again = (place.play("strong", "random") for _ in range(2))
    assert once == again
    assert once.record.wins > once.record.losses
    turned = place.play("random", "strong")
    assert turned.record.losses > turned.record.wins


@pytest.mark.slow
def test_a_match_does_not_change_a_policy() -> None:
    config = small_training(arena={"seconds": 4.0})
    policy = small_policy(config)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    result = MatchArena(config.arena, seed=0, device="cpu").play(policy, "random")
    assert result.record.battles == 8
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert result == MatchArena(config.arena, seed=0, device="cpu").play(policy, "random")


def test_a_tally_counts_the_first_battle_in_every_place() -> None:
    place = match_arena()
    result, side = place.arena.reset(), torch.tensor([0, 1, 0, 1])
    tally = Tally(4, place.arena.device)

    def told(ended: list[bool], winner: list[int], *, by_time: list[bool], length: float) -> None:
        last = torch.full_like(result.last, length)
        tally.add(result._replace(ended=torch.tensor(ended), winner=torch.tensor(winner), by_time=torch.tensor(by_time), last=last), side)

    told([True, True, False, False], [0, 0, 1, 1], by_time=[False, True, True, True], length=10.0)  # won, lost by time
    assert not tally.is_over()
    told(
        [True, True, True, False], [1, 1, -1, 0], by_time=[True, False, True, False], length=20.0
    )  # a draw by time; others are second ones
    told([False, False, False, True], [0, 0, 0, 1], by_time=[False] * 4, length=40.0)  # won
    assert tally.is_over()
    [result] = tally.results(1)
    assert result.points == (1.0, 0.0, 0.5, 1.0)
    assert (result.record.wins, result.record.draws, result.record.losses) == (2, 1, 1)
    assert [(record.wins, record.draws, record.losses) for record in result.by_side] == [(1, 1, 0), (1, 0, 1)]
    assert (result.won, result.by_time, result.decisions) == ((0, 3), 2, 20.0)


# Recording


CONFIG: ArenaConfig = small_arena(battles=2, seconds=4.0)


@pytest.mark.slow
@pytest.mark.parametrize(("battle", "teams"), [(0, ("strong", "random")), (1, ("random", "strong"))])
def test_the_replay_of_a_place_names_the_players_by_their_side(battle: int, teams: tuple[str, str], tmp_path: Path) -> None:
    kept = play_and_record(CONFIG, "strong", "random", seed=2, battle=battle, path=tmp_path / "one.safetensors")
    assert kept.path is not None
    info = read_replay(kept.path).info
    assert info.teams == teams
    assert (kept.battle, kept.winner) == (battle, info.winner)
    assert kept.result == MatchArena(CONFIG, seed=2, device="cpu").play("strong", "random")  # who watches changes nothing
    assert (battle in kept.result.won) == (info.winner == battle % 2)


@pytest.mark.slow
@pytest.mark.parametrize("watched", [8, 0])
def test_the_replay_of_a_match_is_a_battle_that_was_won(watched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matches, "_RECORDED", watched)  # none: the match is played once more
    kept = play_and_record(CONFIG, "strong", "random", seed=2, path=tmp_path / "won.safetensors", names=("learner", "bot"))
    assert kept.path is not None
    assert kept.battle in kept.result.won
    info = read_replay(kept.path).info
    assert info.winner is not None
    assert info.teams[info.winner] == "learner"
    assert verify(kept.path).ok


@pytest.mark.slow
def test_the_first_battle_is_recorded_where_none_was_won(tmp_path: Path) -> None:
    kept = play_and_record(small_arena(battles=2, seconds=0.5), "random", "random", seed=2, path=tmp_path / "won.safetensors")
    assert kept.result.won == ()
    assert (kept.path, kept.battle, kept.winner) == (tmp_path / "won.safetensors", 0, None)
    assert verify(tmp_path / "won.safetensors").ok


@pytest.mark.slow
def test_recorders_of_a_match_see_their_whole_battles() -> None:
    place = match_arena(seconds=3.0)
    recorders = [Recorder(place.arena, battle) for battle in (0, 3)]
    place.play("weak", "weak", recorders=recorders)
    assert all(recorder.is_over for recorder in recorders)
