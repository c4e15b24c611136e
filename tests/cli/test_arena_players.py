"""`esper arena export`, `card`, `leaderboard` and `watch --demo`: player files, shipped players, and scores on frozen scenarios."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from esper.arena.config import ArenaConfig
from esper.arena.scenarios import FIRST_TEST_SEED, Scenario
from esper.cli.main import main
from esper.config import load_saved, save
from esper.league import trained
from esper.league.config import ArenaTrainConfig
from esper.league.player_file import read_player_description
from esper.replay_file import read_replay
from esper.rl.checkpoints import open_store
from esper.runs import write_tensors
from tests.commands import assert_explains, last_line

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
# Contacts and allies of the first scenario are those of `arena_run`.
SMALL = [
    Scenario("duel-v1", "1 against 1", ArenaConfig(team_size=1, size=16, seconds=5.0), FIRST_TEST_SEED, ("random", "weak")),
    Scenario("other-v1", "", ArenaConfig(team_size=1, size=16, seconds=5.0, contacts=1), FIRST_TEST_SEED, ("random", "strong")),
]


@pytest.fixture
def small_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios whose battles take no time."""
    monkeypatch.setattr("esper.arena.scenarios.SCENARIOS", {scenario.name: scenario for scenario in SMALL})
    monkeypatch.setattr("esper.cli.arena_leaderboard.SCENARIOS", {scenario.name: scenario for scenario in SMALL})


@pytest.fixture(scope="module")
def player(arena_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The best player of a run as a file."""
    path = tmp_path_factory.mktemp("players") / "player.safetensors"
    assert main(["arena", "export", str(arena_run), str(path)]) == 0
    return path


@pytest.fixture
def shipped(player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package ships the player `player-1v1`."""
    (tmp_path / "package").mkdir()
    shutil.copy(player, tmp_path / "package/player-1v1.safetensors")
    monkeypatch.setattr(trained, "FOLDER", tmp_path / "package")


# Mistakes


@pytest.mark.slow
def test_a_damaged_latest_checkpoint_is_not_replaced_by_an_older_one(
    arena_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    shutil.copytree(arena_run, tmp_path / "copy")
    latest = open_store(Path("copy")).load("latest").path
    (latest / "tensors.safetensors").write_bytes((latest / "tensors.safetensors").read_bytes()[:100])
    for words in ("eval copy --checkpoint latest", "match copy:latest weak", "export copy p --checkpoint latest"):
        assert main(["arena", *words.split()]) == 2
        assert f"the latest checkpoint, {latest.name}, cannot be read" in capsys.readouterr().err
    assert not Path("p.safetensors").exists()


@pytest.mark.slow
def test_an_evaluation_takes_player_files_and_players_of_the_package(
    player: Path, shipped: None, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    for name in (str(player), "player-1v1"):
        assert main(["arena", "eval", name, "--battles", "2", "--against", "random", "--device", "cpu", "--json"]) == 0
        shown = capsys.readouterr().out
        assert f"{name} against random" in shown
        assert last_line(shown)["checkpoint"] is None


@pytest.mark.slow
def test_training_does_not_start_from_a_player_file(player: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "train", "--start-from", str(player), "--battles", "8", "--maps", "2", "--dry-run"]) == 2
    assert "is a player file, which has no critic to go on learning with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["export", "nowhere", "player"], "there is no folder nowhere; give that of a run of esper arena train"),
        (["export", "young"], "FILE"),
        (["export", "young", "player"], "young has no checkpoint yet; train it for longer"),
        (["card", "nowhere"], "there is no file nowhere; write one with: esper arena export RUN FILE"),
        (["card", "text"], "text cannot be read as a safetensors file"),
        (["match", "text", "weak"], "text is a file; give the folder of a run, or a player file"),
        (["match", "others.safetensors", "weak"], "others.safetensors holds tensors, but no player"),
        (["match", "player-9v9", "weak"], "there is no player 'player-9v9'; did you mean 'player-5v5'?"),
        (["leaderboard"], "--players: expected at least one player"),
        (["leaderboard", "exprt"], "there is no player 'exprt'; did you mean 'expert'?"),
        (["leaderboard", "expert", "--scenarios", "2v2"], "there is no scenario '2v2'; there are 2v2-open-v1, 5v5-city-v1"),
        (["leaderboard", "expert", "--battles", "3"], "--battles: expected"),
        (["leaderboard", "expert", "--battles", "1026"], "--battles: expected at most 1024, two on each of 512 test maps, got 1026"),
        (["train", "--scenario", "2v2-opne-v1"], "there is no scenario '2v2-opne-v1'; did you mean '2v2-open-v1'?"),
        (["train", "--scenario", "2v2-open-v1", "--resume", "--run", "young"], "--scenario and --resume both set the arena; leave one out"),
        (["train", "--scenario=2v2-open-v1", "--config=a.toml"], "--scenario and --config both set the arena; leave one out"),
        (["train", "--scenario", "2v2-open-v1", "--seed", str(FIRST_TEST_SEED + 201)], "makes the test maps of 2v2-open-v1"),
        (["watch"], "give a replay or a run, or --demo"),
        (["watch", "young", "--demo"], "--demo plays a battle of its own; leave the file out"),
    ],
)
def test_a_mistake_is_explained(argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "young").mkdir()
    save(ArenaTrainConfig(), tmp_path / "young/config.toml")
    (tmp_path / "text").write_text("a player")
    write_tensors(tmp_path / "others.safetensors", {})
    assert_explains(["arena", *argv], message, capsys)


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_explained(arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "export", str(arena_run), "/dev/null/player.safetensors"]) == 1
    assert "no player can be written to /dev/null/player.safetensors" in capsys.readouterr().err


# Export and card


@pytest.mark.slow
def test_an_exported_player_tells_what_it_was_trained_on(arena_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "export", str(arena_run), "player", "--checkpoint", "latest", "--note", "A note.", "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    assert (result["file"], result["checkpoint"], result["step"]) == ("player.safetensors", "latest", 80)
    assert result["bytes"] == (tmp_path / "player.safetensors").stat().st_size
    first, second, last = result["card"].split("\n")
    assert first.startswith("Trained 1 against 1 on maps of 16 × 16 of city, forest, river, ridges, ruins, for 80 steps, seed 0.")
    assert "of 2 battles against strong" in second
    assert last == "A note."
    assert main(["arena", "card", "player.safetensors", "--json"]) == 0
    shown = capsys.readouterr().out
    assert result["card"] in shown
    assert "5 contacts and 4 allies" in shown
    assert last_line(shown)["card"] == read_player_description(tmp_path / "player.safetensors").card == result["card"]


@pytest.mark.slow
def test_the_card_counts_the_battles_of_the_score_that_it_gives(
    arena_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(arena_run, tmp_path / "copy")
    saved = load_saved(ArenaTrainConfig, copy / "config.toml")
    save(msgspec.structs.replace(saved, eval_battles=64), copy / "config.toml")  # as a resumed run may, until its next checkpoint
    assert main(["arena", "export", "copy", "player"]) == 0
    assert "of 2 battles against strong" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["best", "latest"])
def test_an_exported_player_fights_as_the_run(checkpoint: str, arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "export", str(arena_run), "player", "--checkpoint", checkpoint]) == 0
    results = []
    for player in (f"{arena_run}:{checkpoint}", "player.safetensors"):
        capsys.readouterr()
        assert main(["arena", "match", player, "random", "--battles", "8", "--device", "cpu", "--json"]) == 0
        results.append(last_line(capsys.readouterr().out))
    assert results[1]["first"] == "player.safetensors"
    assert {**results[0], "first": ""} == {**results[1], "first": ""}


@pytest.mark.slow
@pytest.mark.usefixtures("shipped")
def test_a_shipped_player_is_found_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "match", "player-1v1", "random", "--battles", "2", "--device", "cpu", "--json"]) == 0
    assert last_line(capsys.readouterr().out)["first"] == "player-1v1"
    assert main(["arena", "card", "player-1v1"]) == 0
    assert "player-1v1.safetensors" in capsys.readouterr().out
    assert main(["arena", "match", "player-1v2", "random"]) == 2
    assert "there is no player 'player-1v2'; did you mean 'player-1v1'?" in capsys.readouterr().err


# The leaderboard


@pytest.mark.slow
@pytest.mark.usefixtures("small_scenarios")
def test_players_are_scored_in_the_scenarios_that_they_fit(player: Path, arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["arena", "leaderboard", str(player), str(arena_run), "strong", "--battles", "8", "--device", "cpu", "--json"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    results = last_line(shown)["results"]
    assert [(row["scenario"], row["player"]) for row in results] == [
        (scenario, name) for scenario in ("duel-v1", "other-v1") for name in (str(player), str(arena_run), "strong")
    ]
    reason = "it was trained with arena.contacts 5, and this arena has 1"
    assert [row["problem"] for row in results] == [None, None, None, reason, reason, None]
    assert [list(row["opponents"]) for row in results] == [["random", "weak"]] * 3 + [[], [], ["random", "strong"]]
    assert results[0]["opponents"] == results[1]["opponents"], "the file holds the best player of the run"
    for row in results:
        for score in row["opponents"].values():
            assert (score["battles"], score["maps"]) == (8, 4)
            assert score["interval"][0] <= score["score"] <= score["interval"][1]
    assert results[2]["opponents"]["random"]["score"] > results[0]["opponents"]["random"]["score"]
    lines = shown.splitlines()
    assert lines[0].split() == ["scenario", "player", "random", "weak", "strong"]
    assert lines[4].endswith(f"does not fit: {reason}")
    assert lines[7] == "score of 8 battles against each opponent, draws half [95 % interval over 4 maps], on cpu"
    assert main(argv) == 0
    assert last_line(capsys.readouterr().out)["results"] == results, "on the same maps"


@pytest.mark.slow
@pytest.mark.usefixtures("small_scenarios")
def test_one_scenario_can_be_chosen_and_may_fit_nobody(player: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "leaderboard", str(player), "--scenarios", "other-v1", "--battles", "2", "--device", "cpu", "--json"]) == 0
    (row,) = last_line(capsys.readouterr().out)["results"]
    assert (row["scenario"], row["opponents"]) == ("other-v1", {})


@pytest.mark.slow
def test_a_scenario_gives_a_training_its_arena_and_leaves_the_rest_to_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "train", "--scenario", "2v2-open-v1", "--maps", "2", "--device", "cpu", "--dry-run", "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    config, plan = result["config"], result["plan"]
    assert [config[f"arena.{name}"] for name in ("team_size", "contacts", "allies", "battles")] == [2, 2, 1, 256]
    assert (plan["battles_against"], plan["parameters"]) == ({"bots": 192, "past selves": 32, "self": 32}, 45_368)
    assert "forest" in config["arena.landscapes"]
    assert "city" not in config["arena.landscapes"]


# The demo


def watched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[str, tuple[str, str], Path]:
    """Run the demo without a browser. Return what it prints, the teams of the battle that it shows, and its file."""
    shown: list[tuple[Path, tuple[str, str]]] = []

    def serve(path: Path, **options: object) -> None:
        shown.append((path, read_replay(path).info.teams))
        options["announce"]("http://127.0.0.1:1/")  # type: ignore[operator]

    monkeypatch.setattr("esper.dashboard.watch.serve", serve)
    assert main(["arena", "watch", "--demo", "--no-show"]) == 0
    ((path, teams),) = shown
    return capsys.readouterr().out, teams, path


@pytest.mark.slow
@pytest.mark.usefixtures("small_scenarios", "shipped")
def test_the_demo_shows_a_battle_of_a_shipped_player_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nicegui")
    printed, teams, path = watched(monkeypatch, capsys)
    assert sorted(teams) == ["expert", "player-1v1"]
    assert "player-1v1 fights expert on duel-v1: 1 against 1" in printed
    assert "no trained player" not in printed
    assert f"http://127.0.0.1:1/ plays {path}; Ctrl-C ends it" in printed
    assert not path.parent.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("small_scenarios")
def test_a_bot_plays_in_the_demo_if_no_player_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nicegui")
    monkeypatch.setattr(trained, "FOLDER", tmp_path)
    printed, teams, _ = watched(monkeypatch, capsys)
    assert sorted(teams) == ["expert", "strong-v1"]
    assert "no trained player comes with this version of esper yet, so the bot strong-v1 plays" in printed


def test_the_demo_says_what_is_missing_before_it_plays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_explains(["arena", "watch", "--demo"], "pip install 'esper-grow[dashboard]'", capsys)
