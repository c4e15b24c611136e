"""`esper arena eval`, `match`, `league` and `bench`: players, results and mistakes."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from esper.arena.config import BOTS
from esper.cli.main import main
from esper.config import load_saved, save
from esper.league.config import ArenaTrainConfig
from tests.cli.arena_runs import train
from tests.commands import assert_explains, last_line

SMALL = ["--team-size", "1", "--size", "16", "--battles", "2", "--device", "cpu"]
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


# Mistakes


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["eval"], "RUN"),
        (["eval", "nowhere"], "there is no player 'nowhere'; give a bot"),
        (["eval", "empty"], "there is no run in empty: it has no config.toml"),
        (["eval", "other"], "other is a ppo run and not an arena run; use it with: esper ppo train --resume --run other"),
        (["eval", "young"], "young has no checkpoint yet; train it for longer"),
        (["eval", "young", "--against", "storng"], "strong"),
        (["eval", "weak", "--checkpoint", "best"], "--checkpoint best chooses a player of a run, and weak is not the folder of one"),
        (["match", "strong"], "B"),
        (["match", "storng", "weak"], "there is no player 'storng'; did you mean 'strong'?"),
        (["match", "nowhere", "weak"], f"there is no player 'nowhere'; give a bot ({', '.join(BOTS)}), a player of esper"),
        (["match", "other/config.toml", "weak"], "other/config.toml is a file; give the folder of a run, or a player file"),
        (["match", "strong", "weak", "--team-size", "17"], "--team-size"),
        (["match", "young:update-1", "weak"], "there is no league in young/league"),
        (["league", "nowhere"], "there is no folder nowhere"),
        (["league", "young"], "young has no league yet"),
        (["match", "strong", "weak", "--battles", "3"], "--battles: expected"),
        (["bench", "--battles", "0"], "--battles: expected an int > 0 and <= 1048576, got 0"),
    ],
)
def test_a_mistake_is_explained(argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("empty", "other", "young"):
        (tmp_path / name).mkdir()
    (tmp_path / "other/config.toml").write_text('env = "cue"\n')
    save(ArenaTrainConfig(), tmp_path / "young/config.toml")
    assert_explains(["arena", *argv], message, capsys)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_without_numba_cuda")
@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(
    "words",
    ["match strong weak", "eval strong --against weak", "leaderboard strong", "bench", "train --run run", "train --run run --dry-run"],
)
def test_a_gpu_without_numba_cuda_is_answered_with_what_to_install(
    words: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["arena", *words.split(), "--device", device]) != 0
    assert "the arena on CUDA needs numba-cuda, which is not installed: pip install 'esper-grow[cuda]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_unknown_player_of_a_league_is_refused_with_the_nearest_one(arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "match", f"{arena_run}:update-2", "weak"]) == 2
    assert "has no member 'update-2'; did you mean 'update-1'?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("field", "value"), [("contacts", "3"), ("allies", "2")])
def test_players_with_different_observations_cannot_meet(
    field: str, value: str, arena_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("other", 1, "--enter-every", "9", "--eval-battles", "0", f"--{field}", value) == 0
    capsys.readouterr()
    assert main(["arena", "match", str(arena_run), "other", *SMALL]) == 2
    error = capsys.readouterr().err
    assert f"other cannot fight here: it was trained with arena.{field} {value}" in error
    assert "choose players with the same contacts, allies" in error


@pytest.mark.slow
def test_players_with_and_without_a_view_of_the_whole_battle_can_meet(arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    views = []
    for name, flag in (("with", "--arena.state-view"), ("without", "--arena.no-state-view")):
        assert train(name, 1, "--enter-every", "9", "--eval-battles", "0", flag) == 0
        views.append(load_saved(ArenaTrainConfig, Path(name) / "config.toml").arena.state_view)
    assert views == [True, False]
    assert main(["arena", "match", "with", "without", *SMALL]) == 0


# Battles


@pytest.mark.slow
def test_an_evaluation_counts_every_battle_once_from_both_sides(arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "eval", str(arena_run), "--against", "weak", "--battles", "4", "--device", "cpu", "--json"]) == 0
    shown = capsys.readouterr().out
    result = last_line(shown)
    assert (result["against"], result["checkpoint"], result["battles"], result["team_size"]) == ("weak", "best", 4, 1)
    assert [side["battles"] for side in result["by_side"]] == [2, 2]
    assert sum(side["wins"] for side in result["by_side"]) == result["wins"]
    assert result["maps"] == 2
    assert result["score"] == pytest.approx((result["wins"] + result["draws"] / 2) / 4)
    assert result["interval"][0] <= result["score"] <= result["interval"][1]
    assert result["by_time_share"] == result["by_time"] / 4
    assert 0 < result["mean_seconds"] == result["mean_decisions"] / 4
    assert f"best player of {arena_run} against weak: 1 against 1 on maps of 16 × 16, on cpu" in shown
    assert result["actions"] == "likeliest"
    assert "the likeliest ones; --draw draws them" in shown
    assert "draws half (95 % sure:" in shown
    assert "as second team" in shown


@pytest.mark.slow
def test_policies_draw_their_actions_in_matches_and_in_evaluations_on_request(
    arena_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    for argv, actions in (
        (["eval", str(arena_run), "--against", "random", "--draw"], "drawn"),
        (["match", "random", str(arena_run)], "drawn"),
        (["match", "random", str(arena_run), "--no-draw"], "likeliest"),
        (["match", "strong", "weak", "--team-size", "1", "--size", "16"], None),
    ):
        assert main(["arena", *argv, "--battles", "2", "--device", "cpu", "--json"]) == 0
        shown = capsys.readouterr().out
        assert last_line(shown)["actions"] == actions
        assert ("\nactions  " in shown) == (actions is not None)
        assert "both players are the same" not in shown


@pytest.mark.slow
def test_a_player_that_draws_nothing_mirrors_itself_and_the_match_says_so(arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["match", str(arena_run), f"{arena_run}:best", "--battles", "4", "--device", "cpu", "--json"]
    assert main(["arena", *argv, "--no-draw"]) == 0
    shown = capsys.readouterr().out
    assert last_line(shown)["draws"] == 4
    assert "both players are the same and draw nothing, so each battle is its own mirror image: a draw" in shown
    assert main(["arena", *argv]) == 0
    assert "both players are the same" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_seed_gives_the_same_battles_and_another_one_others(capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for seed in ("3", "3", "4"):
        assert main(["arena", "match", "strong", "weak", *SMALL, "--seed", seed, "--json"]) == 0
        results.append(last_line(capsys.readouterr().out))
    assert results[0] == results[1] != results[2]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["{run}", "{run}:latest", "{run}:best", "{run}:update-1", "{run}/league/members/update-1.safetensors"])
def test_a_player_is_given_as_a_run_its_last_checkpoint_or_a_player_of_its_league(
    who: str, arena_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = who.format(run=arena_run)
    assert main(["arena", "match", "random", name, "--battles", "2", "--device", "cpu", "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    assert (result["first"], result["second"], result["battles"]) == ("random", name, 2)
    assert result["team_size"] == 1, "it is fought in the arena of the run"


@pytest.mark.slow
def test_players_may_meet_in_larger_teams_than_they_were_trained_in(arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["strong", "--team-size", "2", "--size", "24", "--battles", "2", "--device", "cpu", "--json"]
    assert main(["arena", "match", str(arena_run), *options]) == 0
    shown = capsys.readouterr().out
    assert "2 against 2 on maps of 24 × 24" in shown
    assert last_line(shown)["team_size"] == 2


@pytest.mark.slow
def test_a_damaged_file_of_a_player_is_explained(arena_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(arena_run, tmp_path / "copy")
    path = copy / "league/members/update-1.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert main(["arena", "match", str(path.relative_to(tmp_path)), "weak", *SMALL]) == 2
    assert "copy/league/members/update-1.safetensors is no player" in capsys.readouterr().err
    assert main(["arena", "match", "copy:update-1", "weak", *SMALL]) == 2
    assert "are not those that were saved" in capsys.readouterr().err


# The league


@pytest.mark.slow
def test_standings_name_past_selves_and_anchors(arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "league", str(arena_run), "--json"]) == 0
    shown = capsys.readouterr().out
    result = last_line(shown)
    assert result["best"] == "update-1"
    assert {row["name"] for row in result["standings"]} == {"random", "weak", "middle", "strong-v1", "update-1"}
    assert "vs strong" in shown
    names = ["middle", "random", "strong-v1", "update-1", "weak"]
    assert [(pair["first"], pair["second"]) for pair in result["pairs"]] == list(itertools.combinations(names, 2)), "anchors have met too"


@pytest.mark.slow
def test_a_round_robin_lets_all_pairs_meet_and_changes_no_file(arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (arena_run / "league/league.json").read_bytes()
    assert main(["arena", "league", str(arena_run), "--battles", "2", "--device", "cpu", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "5 players, 10 matches of 2 battles on cpu" in shown
    pairs = last_line(shown)["pairs"]
    assert len(pairs) == 10
    in_training = [32 if "update-1" not in (pair["first"], pair["second"]) else 2 for pair in pairs]  # anchors met before the trial
    assert [pair["battles"] for pair in pairs] == [battles + 2 for battles in in_training]
    assert (arena_run / "league/league.json").read_bytes() == before


# Speed


@pytest.mark.slow
def test_the_bench_reports_training_steps_steps_of_living_units_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--battles", "2", "--team-size", "1", "--decisions", "2", "--warm-up", "1", "--device", "cpu", "--threads", "1", "--json"]
    assert main(["arena", "bench", *argv]) == 0
    shown = capsys.readouterr().out
    result = last_line(shown)
    assert (result["battles"], result["units"], result["device"]) == (2, 2, "cpu")
    assert result["steps_per_s"] == pytest.approx(2 * 2 * 1e3 / result["ms_per_decision"], rel=0.05)
    assert result["agent_steps_per_s"] == pytest.approx(2 * 2 * result["living_share"] * 1e3 / result["ms_per_decision"], rel=0.05)
    assert result["peak_memory"] > 10**7
    assert f"{result['steps_per_s']:,} steps/s, {result['agent_steps_per_s']:,} agent-steps/s" in shown
