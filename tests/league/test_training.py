"""Training by self-play as a run: resuming, several ranks, evaluation, and memory over many updates."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from esper.arena.native import layout as at
from esper.arena.replay import verify
from esper.league import training
from esper.league.config import ArenaTrainConfig
from esper.league.events import LeagueChanged, RoundFought
from esper.league.league import League
from esper.league.matches import MatchArena, seed_of_unseen_maps
from esper.league.store import FOLDER, LeagueStore
from esper.league.training import load_player, play_against_bot, prepare_arena, train_arena
from esper.parallel import Ranks
from esper.replay_file import find_replays, read_replay
from esper.rl.checkpoints import open_store
from esper.rl.evaluate import EvaluationStopped
from esper.rl.events import Update
from esper.rl.run_setup import CheckpointEvaluated, Evaluated, RunEnded, RunStarted
from esper.runs import Event, Resumed, RunDeclared, read
from esper.runs.folder import EVENTS, RunError
from tests.commands import assert_same_state
from tests.league.arenas import small_policy, small_training
from tests.processes import spawn

RANKS = 2
OF_SESSIONS = (RunDeclared, RunStarted, RunEnded, Resumed, CheckpointEvaluated)  # events that a resumed run has more of
UPDATES = 4
STEPS = 4  # of a rollout; battles take 6
ROWS = 6 * 2 + 2 * 4  # that learn, in eight battles of two against two


def config_for(updates: int = UPDATES, **settings: Any) -> ArenaTrainConfig:
    """A member enters the league after every update and fills both slots from then on."""
    given = {
        "arena": {"seconds": 1.5},
        "selfplay": {"enter_every": 1, "entry_battles": 2},
        "ppo": {"num_steps": STEPS},
        "checkpoint_every": 2,
        "keep": 3,
        "total_steps": updates * STEPS * ROWS,
    }
    return small_training(**{**given, **settings})


class _Killed(BaseException):
    """Nothing in a run catches it."""


def killed_after(updates: int) -> Callable[[], bool]:
    """For `should_stop`: the run dies right after an update, with no chance to save anything."""
    count = iter(range(1, updates + 1))

    def asked() -> bool:
        if next(count) == updates:
            raise _Killed
        return False

    return asked


def reported(folder: Path) -> list[Event]:
    """Everything but times, and the starts and ends of sessions."""
    events = [record.event for record in read(folder / EVENTS)]
    clocks = ("steps_per_second", "collect_seconds", "update_seconds", "other_seconds", "env_seconds")
    timeless: dict[str, Any] = {**dict.fromkeys(clocks, 0.0), "resources": {}}
    kept = [event for event in events if not isinstance(event, OF_SESSIONS)]
    return [msgspec.structs.replace(event, **timeless) if isinstance(event, Update) else event for event in kept]


def assert_same_run(one: Path, other: Path) -> None:
    """The last checkpoints, bit for bit, and what was told."""
    assert_same_state(*(open_store(folder).load("latest").state["ppo"] for folder in (one, other)))
    left, right = reported(one), reported(other)
    assert len(left) == len(right)
    for before, after in zip(left, right, strict=True):
        assert msgspec.json.encode(before) == msgspec.json.encode(after)


@pytest.mark.slow
def test_self_play_that_was_killed_and_resumed_equals_one_that_was_not_bit_for_bit(tmp_path: Path) -> None:
    config = config_for()
    train_arena(config, tmp_path / "whole")
    with pytest.raises(_Killed):
        train_arena(config, tmp_path / "killed", should_stop=killed_after(3))
    saved = open_store(tmp_path / "killed").load("latest").state["ppo"]
    environment = saved["environment"]
    assert saved["counters"]["updates"] == 2
    assert [opponent_slot["name"] for opponent_slot in environment["slots"]] == [
        "update-1",
        "update-1",
    ]  # a past self sits there, in the middle of battles
    assert any(
        opponent_slot is not None and "state" in opponent_slot and bool(opponent_slot["state"].any())
        for opponent_slot in environment["past"]
    )
    assert (environment["arena"]["state"]["status"][at.DECISION] > 0).any()
    result = train_arena(None, tmp_path / "killed", resume=True)
    assert (result.status, result.step) == ("finished", UPDATES * STEPS * ROWS)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    rounds = [event for event in reported(tmp_path / "killed") if isinstance(event, RoundFought)]
    changes = [event for event in reported(tmp_path / "killed") if isinstance(event, LeagueChanged)]
    assert [event.update for event in rounds] == [event.update for event in changes] == [1, 2, 3]  # the last is told with the next step


@pytest.mark.slow
def test_a_run_writes_its_league_and_its_player(tmp_path: Path) -> None:
    config = config_for(2)
    result = train_arena(config, tmp_path / "run")
    assert result.status == "finished"
    assert result.evaluation is not None
    assert len(result.evaluation.returns) == config.eval_battles
    assert set(result.evaluation.returns) <= {0.0, 0.5, 1.0}

    environment = open_store(tmp_path / "run").load("latest").state["ppo"]["environment"]
    league = LeagueStore(tmp_path / "run" / FOLDER).load()
    assert league.to_state() == League.from_state(environment["league"], environment["members"]).to_state()
    assert "update-1" in league.members
    assert all(torch.equal(value, environment["members"]["update-1"][name]) for name, value in league.weights["update-1"].items())
    promoted = [event.name for event in reported(tmp_path / "run") if isinstance(event, LeagueChanged) and event.is_promoted]
    assert promoted == list(league.members)  # nobody was retired in so short a time

    policy, saved = load_player(tmp_path / "run", which="latest")
    assert saved == config
    assert play_against_bot(policy, config, "random", battles=2, seed=5).record.battles == 2


@pytest.mark.slow
def test_a_run_whose_time_is_up_had_finished_and_goes_on_with_more_time(tmp_path: Path) -> None:
    def seconds() -> float:
        found: float = open_store(tmp_path / "run").load("latest").state["ppo"]["counters"]["seconds"]
        return found

    config = config_for(100_000, minutes=1e-6, eval_battles=2)
    first = train_arena(config, tmp_path / "run")
    assert (first.status, first.step) == ("finished", STEPS * ROWS)  # the first update takes longer than that
    assert first.evaluation is not None
    taken = seconds()
    assert taken > 60e-6
    again = train_arena(None, tmp_path / "run", resume=True)
    assert (again.status, again.step) == ("had finished", STEPS * ROWS)
    assert seconds() == taken
    longer = msgspec.structs.replace(config, minutes=(taken + 0.01) / 60)
    more = train_arena(longer, tmp_path / "run", resume=True)
    assert more.status == "finished"
    assert more.step > STEPS * ROWS
    assert seconds() > taken + 0.01  # the time before counts too


def test_mistakes_in_a_config_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"1 battles cannot be divided into .*use at least 5 battles"):
        train_arena(config_for(arena={"battles": 1}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError):
        load_player(tmp_path / "run")


@pytest.mark.slow
def test_a_training_may_start_from_the_weights_of_another(tmp_path: Path) -> None:
    config = small_training()
    weights = {name: value.clone() for name, value in small_policy(config, seed=5).state_dict().items()}
    save_file(weights, tmp_path / "player.safetensors")
    with prepare_arena(small_training(start_from=str(tmp_path / "player.safetensors"))) as (ppo, _):
        assert all(torch.equal(value, weights[name]) for name, value in ppo.policy.state_dict().items())


@pytest.mark.slow
def test_a_run_goes_on_when_the_weights_that_it_started_from_are_gone(tmp_path: Path) -> None:
    start = tmp_path / "player.safetensors"
    save_file({name: value.clone() for name, value in small_policy(small_training(), seed=5).state_dict().items()}, start)
    config = config_for(2, start_from=str(start), checkpoint_every=1, eval_battles=0)
    train_arena(config, tmp_path / "run", should_stop=lambda: True)
    start.unlink()
    assert train_arena(None, tmp_path / "run", resume=True).status == "finished"
    with pytest.raises(RunError, match="there are no weights"):
        train_arena(config, tmp_path / "another")


@pytest.mark.slow
def test_evaluations_of_a_run_are_fought_in_one_arena_whose_maps_no_small_seed_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_training(eval_battles=2)
    policy = small_policy(config)
    made = []
    monkeypatch.setattr(training, "MatchArena", lambda *given, **named: made.append(MatchArena(*given, **named)) or made[-1])
    evaluator = training.BotEvaluator(config)
    first, other, again = (evaluator.score(policy, seed) for seed in (0, 1, 0))
    assert len(made) == 1, "a second one would take memory beside the first"
    assert first == again
    assert other == training.BotEvaluator(config).score(policy, 1), "other maps in the same arena are those of a new arena"
    assert {arena.seed for arena in made} == {seed_of_unseen_maps("evaluation", seed) for seed in (0, 1)}
    seeds = {seed_of_unseen_maps(purpose, seed) for purpose in ("evaluation", "commands") for seed in range(100)}
    assert len(seeds) == 200
    assert min(seeds) > 100_000


@pytest.mark.slow
def test_a_stop_request_ends_an_evaluation_in_the_middle_of_its_battles() -> None:
    config = config_for(eval_battles=2)
    evaluator, policy = training.BotEvaluator(config), small_policy(config)
    asked: list[bool] = []
    with pytest.raises(EvaluationStopped, match="3 of at most 6 decisions"):
        evaluator.score(policy, 0, lambda: asked.append(True) or len(asked) == 3)
    assert len(asked) == 3
    assert evaluator.score(policy, 0) == training.BotEvaluator(config).score(policy, 0), "the arena that was left is used again"


@pytest.mark.slow
def test_the_arena_of_the_evaluations_is_released_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[MatchArena]] = []

    def watched(*given: Any, **named: Any) -> MatchArena:
        arena = MatchArena(*given, **named)
        made.append(weakref.ref(arena))
        return arena

    monkeypatch.setattr(training, "MatchArena", watched)
    train_arena(config_for(1, eval_battles=2), tmp_path / "run")
    gc.collect()
    assert made
    assert all(arena() is None for arena in made)


@pytest.mark.slow
def test_missing_or_unfitting_weights_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match=r"no weights at .*nothing\.safetensors"),
        prepare_arena(small_training(start_from="nothing.safetensors")),
    ):
        pass
    (tmp_path / "text.safetensors").write_text("no weights")
    with (
        pytest.raises(RunError, match="cannot be read as a safetensors file"),
        prepare_arena(small_training(start_from=str(tmp_path / "text.safetensors"))),
    ):
        pass
    save_file({"actor": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(RunError, match="do not fit"), prepare_arena(small_training(start_from=str(tmp_path / "other.safetensors"))):
        pass


@pytest.mark.slow
def test_training_updates_a_centralised_critic(tmp_path: Path) -> None:
    config = config_for(arena={"state_view": True}, eval_battles=0)
    with prepare_arena(config) as (ppo, _):
        battle = ppo.policy.encoder.battle
        assert isinstance(battle, torch.nn.Module)
        before = [parameter.detach().clone() for parameter in battle.parameters()]
        updates = list(ppo.train(2 * ppo.steps_per_update))
        assert len(updates) == 2
        assert any(not torch.equal(was, now) for was, now in zip(before, battle.parameters(), strict=True))  # the critic learned with it


# Several ranks


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    try:
        config = config_for(2 * RANKS, eval_battles=0, selfplay={"enter_every": 1, "entry_battles": 4})
        with prepare_arena(config, Ranks()) as (ppo, _):
            updates = list(ppo.train(2 * ppo.steps_per_update))
            found = {
                "policy": ppo.policy.state_dict(),
                "maps": ppo.env.arena.grids.height.clone(),  # type: ignore[attr-defined]
                "seed": ppo.env.arena.seed,  # type: ignore[attr-defined]
                "step": updates[-1].step,
                "league": ppo.env.league.to_state(),  # type: ignore[attr-defined]
                "saved": ppo.state_dict(),
            }
            torch.save(found, folder / f"results {rank}")
        train_arena(config, folder / "whole", group=Ranks())
        counts = iter(range(10))
        train_arena(config, folder / "stopped", should_stop=lambda: next(counts) == 0, group=Ranks())
        train_arena(None, folder / "stopped", resume=True, group=Ranks())
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_fight_battles_of_their_own_agree_on_the_weights_and_can_be_stopped_and_resumed(tmp_path: Path) -> None:
    spawn(run_rank, (tmp_path,), RANKS)
    one, other = (torch.load(tmp_path / f"results {rank}", weights_only=False) for rank in range(RANKS))
    assert one["step"] == other["step"] == 2 * RANKS * STEPS * ROWS
    assert all(torch.equal(value, other["policy"][name]) for name, value in one["policy"].items())
    assert one["seed"] != other["seed"]
    assert not torch.equal(one["maps"], other["maps"])
    assert one["league"] == other["league"], "rank 0 decides, and all ranks play in one league"
    [entry] = [entry for entry in one["league"]["entries"] if entry["name"] == "update-1"]
    assert entry["step"] == RANKS * STEPS * ROWS, "it counts what the learner counts, over all ranks"
    [row] = [row for row in one["league"]["table"] if (row["first"], row["second"]) == ("random", "update-1")]
    assert sum(row["record"][name] for name in ("wins", "draws", "losses")) == 4, "each rank fights its share of the trial"
    assert [part["environment"]["league"] for part in one["saved"]["other_ranks"]] == [None], "it is saved once"
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert len(open_store(tmp_path / "whole").load("latest").state["ppo"]["other_ranks"]) == RANKS - 1
    fought = [record for record in read(tmp_path / "whole/events.jsonl") if isinstance(record.event, RoundFought)]
    assert {record.rank for record in fought} == set(range(RANKS))
    for rank in range(RANKS):
        assert [record.step for record in fought if record.rank == rank] == [RANKS * STEPS * ROWS]  # the second round was not told


# Memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident sizes are read from /proc")
def test_memory_does_not_grow_over_many_updates() -> None:
    config = config_for(
        arena={"battles": 4, "team_size": 1, "seconds": 1.0},
        selfplay={"bots": ("middle",), "enter_every": 10, "entry_battles": 2, "opponent_slots": 1},
        ppo={"num_steps": 2, "num_minibatches": 1, "bptt_length": 2},
    )
    sizes = []
    with prepare_arena(config) as (ppo, _):
        for update in ppo.train(40 * ppo.steps_per_update):
            if update.update % 10 == 0:
                gc.collect()
                sizes.append(resident_bytes())
    # If states were kept by mistake, each rollout would add a megabyte. Other work of this process may raise one of the readings.
    assert min(sizes[2:]) - sizes[0] < 8 * 2**20, sizes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident sizes are read from /proc")
def test_the_memory_benchmark_reports_held_memory_and_its_growth(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("benchmarks.arena.memory").main(["--updates", "4", "--every", "2", "--battles", "8"])
    output = capsys.readouterr().out
    *lines, last = (json.loads(line) for line in output.splitlines())
    assert [line["update"] for line in lines] == [2, 4]
    first, second = (line["resident_bytes"] for line in lines)
    assert 2**26 < first < 2**33, "torch alone takes more than 64 MiB"
    assert last.pop("resident_bytes_per_update") == pytest.approx((second - first) / 2, abs=1e-3)
    assert last == {"device": "cpu", "updates": 4, "battles": 8}


# Replays of evaluations


@pytest.mark.slow
def test_recording_evaluations_changes_neither_their_results_nor_the_training(tmp_path: Path) -> None:
    for name, count in (("recorded", 2), ("plain", 0)):
        train_arena(config_for(2, checkpoint_every=1, eval_battles=4, eval_replays=count), tmp_path / name)
    assert_same_run(tmp_path / "recorded", tmp_path / "plain")
    scores = [
        [msgspec.json.encode(record.event) for record in read(folder / EVENTS) if isinstance(record.event, CheckpointEvaluated | Evaluated)]
        for folder in (tmp_path / "recorded", tmp_path / "plain")
    ]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2 + 1
    assert not (tmp_path / "plain" / "replays").exists()


@pytest.mark.slow
def test_the_newest_evaluation_battles_are_kept_and_can_be_verified(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    own = folder / "replays" / "own.safetensors"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"not recorded by an evaluation")
    os.utime(own, (0, 0))
    train_arena(config_for(2, checkpoint_every=1, eval_replays=1), folder)
    newest, before, oldest = find_replays(folder)
    assert (before.stem, oldest) == (f"evaluation-step-{2 * STEPS * ROWS}", own)
    assert newest.stem.startswith("evaluation-best-step-")
    replay = read_replay(before)
    assert replay.info.teams == (f"step-{2 * STEPS * ROWS}", "random")
    assert verify(before).ok
    assert verify(newest).ok, "it was fought on other maps, in the same arena"
