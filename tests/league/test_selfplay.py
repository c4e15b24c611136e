"""Self-play: rows of the learner, opponents, and changes between rollouts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.arena.arena import Arena, Rewards, StepResult
from esper.arena.bots import Bot
from esper.arena.config import BOTS, ArenaRewardConfig
from esper.arena.native import layout as at
from esper.arena.native.simulation import BEGIN, DECIDE
from esper.arena.orders import as_motion
from esper.config import ConfigError
from esper.league.config import RATED, LeagueConfig, SelfPlayConfig
from esper.league.events import LeagueChanged, RoundFought
from esper.league.league import LEARNER
from esper.league.opponents import SCRIPTED, SELF, BotOpponents, divide_battles
from esper.league.players import side_rows
from esper.league.record import WinRecord
from esper.league.selfplay import SelfPlay
from esper.runs import Event
from esper.runs.events import scalars
from esper.vecenv import Actions, Timestep
from esper.vecenv.check import check_env, sample_actions
from tests.league.arenas import attached, small_arena, small_policy, small_training


def steps(env: SelfPlay, timestep: Timestep, count: int, *, seed: int = 0) -> Iterator[Timestep]:
    """Steps with random actions of the rows that learn."""
    chance = torch.Generator().manual_seed(seed)
    for _ in range(count):
        timestep = env.step(sample_actions(env.action_spec, timestep.masks, env.num_envs, chance))
        yield timestep


def drive(env: SelfPlay, timestep: Timestep, count: int, *, seed: int = 0) -> Timestep:
    """Take some steps and return the last result."""
    return list(steps(env, timestep, count, seed=seed))[-1]


def bot_rows(env: SelfPlay) -> Tensor:
    """Return the rows of the units that bots drive."""
    sides, battles = torch.nonzero(env.bots.bots >= 0, as_tuple=True)
    return side_rows(battles, sides, team_size=env.config.arena.team_size)


def test_the_learner_has_one_side_by_parity_and_both_sides_in_self_play() -> None:
    env = attached(small_training())
    teams, units = env.config.arena.team_size, env.config.arena.units
    expected = []
    for name, battles in env.groups.items():
        for battle in battles.tolist():
            sides = (0, 1) if name == SELF else (battle % 2,)
            expected += [battle * units + side * teams + unit for side in sides for unit in range(teams)]
    assert sorted(env.rows.tolist()) == sorted(expected)
    assert {name: len(battles) for name, battles in env.groups.items()} == {SCRIPTED: 4, "slot 0": 1, "slot 1": 1, SELF: 2}
    assert env.num_envs == len(expected) == 6 * teams + 2 * units


def test_every_unit_is_driven_by_exactly_one_player() -> None:
    env = attached(small_training())
    theirs = [row for rows in (bot_rows(env), *(player.rows for player in env.past.values())) for row in rows.tolist()]
    everybody = Counter(theirs + env.rows.tolist())
    assert everybody == Counter(range(env.config.arena.battles * env.config.arena.units))


@pytest.mark.slow
def test_actions_of_the_learner_reach_its_own_rows_and_bots_act_in_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    env = attached(small_training(selfplay={"bots": ("middle",), "bot_share": 0.5, "past_share": 0.0}))
    heard: list[Actions] = []
    step = env.arena.step
    monkeypatch.setattr(env.arena, "step", lambda actions: (heard.append(actions), step(actions))[1])
    timestep = env.reset()
    bot, theirs = Bot("middle", env.arena, seed=env.bots.seed), bot_rows(env)
    for seed in range(4):
        expected = {name: value.clone() for name, value in bot.act().items()}
        given = sample_actions(env.action_spec, timestep.masks, env.num_envs, torch.Generator().manual_seed(seed))
        timestep = env.step(given)
        assert heard[-1].keys() == expected.keys()
        for name, value in as_motion(given).items():
            assert torch.equal(heard[-1][name][env.rows], value)
            assert torch.equal(heard[-1][name][theirs], expected[name][theirs])


# Bots


def ended(arena: Arena, *battles: int) -> StepResult:
    """Return a result in which these battles have ended."""
    flags = torch.zeros(arena.config.battles, dtype=torch.bool)
    flags[list(battles)] = True
    return arena.reset()._replace(ended=flags, is_first=False)


def test_a_battle_keeps_its_bot_until_it_ends() -> None:
    arena = Arena(small_arena(battles=4))
    bots = BotOpponents(arena, torch.tensor([0, 1, 2]), torch.tensor([1, 0, 1]), seed=0)
    weak, strong, expert = (BOTS.index(name) for name in ("weak", "strong", "expert"))
    rng = np.random.default_rng(0)
    bots.draw({"weak": 1.0}, rng)
    bots.begin()
    first = [[-1, weak, -1, -1], [weak, -1, weak, -1]]  # by side; no bot in the last battle
    assert bots.bots.tolist() == first
    bots.draw({"strong": 1.0}, rng)
    bots.follow(ended(arena))
    assert bots.bots.tolist() == first
    bots.follow(ended(arena, 1, 3))
    assert bots.bots.tolist() == [[-1, strong, -1, -1], [weak, -1, weak, -1]]
    saved = bots.state_dict()
    bots.draw({"expert": 1.0}, rng)
    bots.follow(ended(arena, 0))
    assert bots.bots.tolist() == [[-1, strong, -1, -1], [expert, -1, weak, -1]]
    bots.load_state_dict(saved)
    bots.follow(ended(arena, 2))
    assert bots.bots.tolist() == [[-1, strong, -1, -1], [weak, -1, strong, -1]]  # the saved draw


def test_bots_are_drawn_by_the_given_chances() -> None:
    arena = Arena(small_arena(battles=20, team_size=1, maps=1))
    everywhere, rng, drawn = torch.arange(20), np.random.default_rng(0), list[Tensor]()
    bots = BotOpponents(arena, everywhere, everywhere % 2, seed=0)
    for _ in range(100):
        bots.draw({"weak": 0.1, "middle": 0.6, "expert": 0.3}, rng)
        bots.begin()
        drawn.append(bots.bots.amax(0))
    shares = {BOTS[bot]: count / 2000 for bot, count in Counter(torch.cat(drawn).tolist()).items()}
    assert shares == pytest.approx({"weak": 0.1, "middle": 0.6, "expert": 0.3}, abs=0.04)  # four standard errors


@pytest.mark.slow
@pytest.mark.parametrize("draw", ["difficulty", "even"])
def test_chances_of_bots_follow_the_hardness_in_the_league_or_are_all_the_same(draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = attached(small_training(selfplay={"bots": ("random", "middle", "expert"), "bot_draw": draw, "enter_every": 1000}))
    given: list[Mapping[str, float]] = []
    monkeypatch.setattr(env.bots, "draw", lambda chances, rng: given.append(dict(chances)))
    env.league.record(LEARNER, "random", WinRecord(wins=90, losses=10))
    env.league.record(LEARNER, "expert", WinRecord(wins=10, losses=90))
    drive(env, env.reset(), 9)  # a rollout, and a step after which the bots of the next one are drawn
    (chances,) = given
    assert sum(chances.values()) == pytest.approx(1.0)
    assert chances.keys() == {"random", "middle", "expert"}
    if draw == "even":
        assert chances == dict.fromkeys(chances, 1 / 3)
    else:
        assert chances["random"] < chances["middle"] <= chances["expert"]


@pytest.mark.slow
def test_bots_change_only_where_a_battle_has_ended() -> None:
    """Battles of 6 decisions, rollouts of 4: bots are drawn in the middle of battles."""
    selfplay = {"enter_every": 1000, "bot_draw": "even"}
    env = attached(small_training(arena={"battles": 16, "seconds": 1.5}, selfplay=selfplay, ppo={"num_steps": 4}))
    timestep, changes, found = env.reset(), 0, set[int]()
    before = env.bots.bots.clone()
    assert (before >= 0).sum() == len(env.groups[SCRIPTED])
    for _ in steps(env, timestep, 24):
        assert env.result is not None
        has_changed = (env.bots.bots != before).any(0)
        assert not has_changed[~env.result.ended].any()
        changes += int(has_changed.sum())
        before = env.bots.bots.clone()
        found |= set(before.flatten().tolist())
    assert changes
    assert found == {-1, BOTS.index("random"), BOTS.index("middle")}


@pytest.mark.slow
@pytest.mark.parametrize("pays_dead", [True, False])
def test_rows_are_the_units_of_the_arena_and_dead_ones_do_not_act(pays_dead: bool) -> None:
    """If the dead are not paid, their rows are neither paid nor valid."""
    reward = ArenaRewardConfig(pays_dead=pays_dead)
    env = attached(small_training(arena={"seconds": 30.0, "reward": reward}, selfplay={"bots": ("strong",), "enter_every": 1000}))
    dead = paid = 0
    for timestep in steps(env, env.reset(), 30):
        result = env.result
        assert result is not None
        assert torch.equal(timestep.obs["obs"], result.observation.flatten(0, 1)[env.rows])
        assert torch.equal(timestep.reward, result.reward.flatten()[env.rows])
        assert timestep.valid is not None
        assert timestep.acts is not None
        assert torch.equal(timestep.acts, result.was_alive.flatten()[env.rows])
        assert torch.equal(timestep.valid, torch.ones_like(timestep.acts) if pays_dead else timestep.acts)
        dead += int((~timestep.acts).sum())
        paid += int(timestep.reward[~timestep.acts].count_nonzero())
        has_ended = result.ended.repeat_interleave(env.config.arena.units)[env.rows]
        died = result.died.flatten()[env.rows]
        assert torch.equal(timestep.terminated, has_ended if pays_dead else timestep.acts & (has_ended | died))
    assert dead
    assert bool(paid) == pays_dead


@pytest.mark.slow
def test_each_observation_is_built_once_for_learner_bots_and_past_selves_together(monkeypatch: pytest.MonkeyPatch) -> None:
    env = with_members(attached(small_training(arena={"state_view": True}, selfplay={"enter_every": 1000})), "one")
    tasks: list[int] = []
    run = env.arena.simulation.run
    monkeypatch.setattr(env.arena.simulation, "run", lambda task: (tasks.append(task), run(task))[1])
    timestep = env.reset()
    drive(env, timestep, 10)  # beyond a rollout, where past selves sit down, and the end of battles
    assert env.opponent_slots.names == ["one", "one"]
    assert tasks == [BEGIN] + [DECIDE] * 10


@pytest.mark.slow
def test_self_play_keeps_the_contract_of_environments_and_repeats_itself_once_it_is_loaded() -> None:
    check_env(attached(small_training()), steps=12)


@pytest.mark.slow
def test_another_self_play_goes_on_where_the_first_was_saved() -> None:
    config = small_training(selfplay={"enter_every": 1, "entry_battles": 2})
    one, other = attached(config), attached(config)
    last = drive(one, one.reset(), 11)  # a league member fills the slots, and battles have ended
    assert None not in one.opponent_slots.names
    other.load_state_dict(one.state_dict())
    assert other.opponent_slots.state_dict() == one.opponent_slots.state_dict()
    assert torch.equal(other.opponent_slots.since, one.opponent_slots.since)
    assert torch.equal(other.bots.bots, one.bots.bots)
    assert torch.equal(other.bots.next, one.bots.next)
    assert (other.updates, other.decisions, other.overflow) == (one.updates, one.decisions, one.overflow)
    for left, right in zip(steps(one, last, 8, seed=1), steps(other, last, 8, seed=1), strict=True):
        assert torch.equal(left.obs["obs"], right.obs["obs"])
        assert torch.equal(left.reward, right.reward)
    assert one.league.to_state() == other.league.to_state()
    assert torch.equal(one.results, other.results)


@pytest.mark.slow
def test_counted_results_equal_those_of_an_independent_count() -> None:
    events: list[Event] = []
    env = attached(small_training(), events=events)
    counted: dict[str, list[int]] = {name: [0, 0, 0] for name in ("random", "middle", "slot 0", "slot 1", SELF)}
    timestep = env.reset()
    bots = env.bots.bots.amax(0).tolist()
    opponents: dict[int, str | None] = {}  # past self that has begun each battle in a slot
    for number, _ in enumerate(steps(env, timestep, 3 * 8 + 1)):
        if number == 3 * 8:
            break  # with this step the last round was told
        result = env.result
        assert result is not None
        for name, battles in env.groups.items():
            for battle in battles.tolist():
                now = env.opponent_slots.name(name) if name in env.past else None
                is_whole = opponents.setdefault(battle, now) == now
                if bool(result.ended[battle]):
                    winner = int(result.winner[battle])
                    opponent = BOTS[bots[battle]] if name == SCRIPTED else name
                    counted[opponent][1 if winner < 0 else 0 if winner == battle % 2 else 2] += is_whole
                    del opponents[battle]
        bots = env.bots.bots.amax(0).tolist()  # of the battles that go on or have just begun
    rounds = [event for event in events if isinstance(event, RoundFought)]
    assert [event.update for event in rounds] == [1, 2, 3]
    for name in ("random", "middle", SELF):
        told = [sum(event.results[name][which] for event in rounds) for which in range(3)]
        assert told == counted[name]
    others = [counts for event in rounds for name, counts in event.results.items() if name not in ("random", "middle", SELF)]
    in_slots = [sum(counts[which] for counts in others) for which in range(3)]
    assert in_slots == [counted["slot 0"][which] + counted["slot 1"][which] for which in range(3)]
    assert sum(counted["random"]) + sum(counted["middle"]) == 4 * 3  # battles of 8 decisions at most, of which 24 were taken
    assert all(sum(counted[name]) for name in ("random", "middle"))


@pytest.mark.slow
def test_reported_parts_of_the_reward_sum_to_the_learners_reward_without_zero_sum() -> None:
    events: list[Event] = []
    config = small_training(arena={"reward": ArenaRewardConfig(zero_sum=0.0)})
    env = attached(config, events=events)
    paid, parts = torch.zeros(env.num_envs), dict.fromkeys(Rewards._fields, 0.0)
    for timestep in steps(env, env.reset(), 8):
        assert env.result is not None
        assert env.result.parts is not None
        paid += timestep.reward
        for name, part in env.result.parts._asdict().items():
            parts[name] += float(part.flatten()[env.rows].sum()) / env.num_envs
    drive(env, timestep, 1)
    (told,) = (event for event in events if isinstance(event, RoundFought))
    assert told.reward == pytest.approx(parts, abs=1e-6)
    # Shared rewards stay in the team; where both sides or no side of a battle learn, they stay in the rows.
    assert sum(told.reward.values()) == pytest.approx(float(paid.mean()), abs=1e-5)
    assert any(told.reward.values())


def test_win_rates_by_opponent_are_shown() -> None:
    results = {"strong": (3, 2, 5), "self": (0, 0, 0)}
    fought = RoundFought(update=3, results=results, opponents=[], team=2, overflow=0, agent_steps=40, reward={"kill": 0.5})
    assert scalars(fought) == {
        "round_fought/update": 3,
        "round_fought/team": 2,
        "round_fought/overflow": 0,
        "round_fought/agent_steps": 40,
        "round_fought/reward/kill": 0.5,
        "round_fought/battles/strong": 10,
        "round_fought/win_rate/strong": 0.4,
    }


@pytest.mark.slow
def test_teams_grow_with_the_updates() -> None:
    events: list[Event] = []
    selfplay = {"first_team": 1, "team_grows": 2, "enter_every": 1000}
    config = small_training(arena={"team_size": 3, "seconds": 1.0}, selfplay=selfplay, ppo={"num_steps": 4})
    env = attached(config, events=events)
    timestep = env.reset()
    sizes = [int(env.arena.simulation.number[at.IS_PRESENT, 0, :3].sum())]
    for _ in range(6):
        timestep = drive(env, timestep, 4)
        sizes.append(int(env.arena.simulation.number[at.IS_PRESENT, 0, :3].sum()))
    told = [event.team for event in events if isinstance(event, RoundFought)]
    assert told == [1, 2, 2, 3, 3]
    assert sizes == [1, 1, 1, 2, 2, 3, 3]  # battles of 4 decisions begin with the rollouts, and take the size of that moment


@pytest.mark.slow
def test_the_first_to_enter_is_promoted_and_fills_a_slot_without_the_memories_of_its_last_player() -> None:
    events: list[Event] = []
    env = attached(small_training(), events=events)
    timestep = drive(env, env.reset(), 16)  # two rollouts; the second is told with the next step
    player = env.past["slot 0"]
    assert env.opponent_slots.names == [None, None]
    assert player.state.any()
    memories: list[Any] = []
    reset_memory = player.reset_memory
    player.reset_memory = lambda: (reset_memory(), memories.append(player.state.clone()))[0]  # type: ignore[method-assign]
    drive(env, timestep, 1)
    changes = [event for event in events if isinstance(event, LeagueChanged)]
    assert [(event.name, event.is_promoted) for event in changes] == [("update-2", True)]
    assert set(changes[0].against) == set(RATED)
    assert all(sum(counts) == env.config.selfplay.entry_battles for counts in changes[0].against.values())
    assert env.opponent_slots.names == ["update-2", "update-2"]
    assert all(torch.equal(value, env.league.weights["update-2"][name]) for name, value in player.policy.state_dict().items())
    assert len(memories) == 1
    assert not memories[0].any()
    timestep = drive(env, timestep, 8)
    assert len(memories) == 1  # it stays, and so do its memories


@pytest.mark.slow
def test_the_anchors_meet_one_another_once_before_the_first_trial() -> None:
    env = attached(small_training(selfplay={"enter_every": 1, "entry_battles": 4}))
    drive(env, env.reset(), 17)  # two candidates
    pairs = list(itertools.combinations(env.league.anchors, 2))
    assert len(pairs) == 6
    assert [env.league.table.between(*pair).battles for pair in pairs] == [32] * 6, "as many battles as a rating counts"


@pytest.mark.slow
def test_a_slot_without_a_past_self_holds_the_learner_of_today() -> None:
    env = attached(small_training())
    timestep = drive(env, env.reset(), 8)
    assert env.learner is not None
    with torch.no_grad():
        for parameter in env.learner.parameters():
            parameter.add_(0.01)
    player = env.past["slot 1"]
    before = {name: value.clone() for name, value in player.policy.state_dict().items()}
    drive(env, timestep, 1)
    today = env.learner.state_dict()
    assert all(torch.equal(value, today[name]) for name, value in player.policy.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in today.items())


@pytest.mark.slow
def test_only_battles_against_players_of_the_league_are_recorded_in_it() -> None:
    env = attached(small_training(selfplay={"enter_every": 1000}))
    drive(env, env.reset(), 17)
    assert env.league.learner_score("random") is not None
    assert env.league.learner_score("middle") is not None
    assert env.league.learner_score("weak") is None
    assert not list(env.league.table)  # the learner is another after every update, and no entry of the table


def with_members(env: SelfPlay, *names: str) -> SelfPlay:
    """Past selves have joined the league."""
    for number, name in enumerate(names):
        best = env.league.best
        env.league.enter(name, number, small_policy(env.config, seed=number).state_dict())
        if best is not None:
            env.league.record(name, best, WinRecord(wins=9))
        assert env.league.settle(name).is_promoted
    return env


@pytest.mark.slow
def test_a_past_self_stays_in_its_slot_until_a_battle_can_be_over() -> None:
    rollouts_of_4 = {"num_steps": 4}
    config = small_training(arena={"seconds": 2.5}, selfplay={"enter_every": 1000, "opponent_slots": 1}, ppo=rollouts_of_4)  # 10 decisions
    env = with_members(attached(config), "one", "two", "three", "four")
    assert env.opponent_slots.rollouts == 3
    timestep, names, draws = env.reset(), [], []
    for rollout in range(13):
        timestep = drive(env, timestep, 4, seed=rollout)
        names.append(env.opponent_slots.names[0])
        draws.append(env.opponent_slots.state_dict()[0]["drawn"])
    assert names[0] is None  # nobody had joined when it began
    assert draws == [0, 1, 1, 1, 4, 4, 4, 7, 7, 7, 10, 10, 10]
    assert len(set(names[1:])) > 1
    assert attached(small_training(selfplay={"slot_rollouts": 5})).opponent_slots.rollouts == 5


@pytest.mark.slow
def test_a_player_that_leaves_the_league_leaves_its_slot() -> None:
    selfplay = {"enter_every": 1000, "slot_rollouts": 100, "opponent_slots": 1}
    env = with_members(attached(small_training(selfplay=selfplay, league=LeagueConfig(size=1))), "one")
    timestep = drive(env, env.reset(), 9)
    assert env.opponent_slots.names == ["one"]
    with_members(env, "two")
    assert env.league.entry("one").kind == "retired"
    env._draw_opponents()
    assert env.opponent_slots.names == ["two"]
    drive(env, timestep, 8)  # and battles of "two" alone are told


@pytest.mark.slow
def test_only_battles_that_a_past_self_began_are_credited_to_it() -> None:
    """Battles of 6 decisions, rollouts of 4, and somebody sits down after the first of them."""
    events: list[Event] = []
    selfplay = {"enter_every": 1000, "slot_rollouts": 100, "opponent_slots": 1}
    config = small_training(arena={"seconds": 1.5}, selfplay=selfplay, ppo={"num_steps": 4})
    env = with_members(attached(config, events=events), "one")
    place = env.groups["slot 0"].tolist()
    whole, cut = 0, 0
    began = dict.fromkeys(place, 0)
    for number, _ in enumerate(steps(env, env.reset(), 5 * 4 + 1)):
        result = env.result
        assert result is not None
        for battle in place:
            if bool(result.ended[battle]) and number < 5 * 4:
                if number >= 4:
                    whole, cut = (whole + 1, cut) if began[battle] >= 4 else (whole, cut + 1)
                began[battle] = number + 1
    credited = [sum(event.results["one"]) for event in events if isinstance(event, RoundFought) and "one" in event.results]
    assert sum(credited) == whole > 0
    assert cut > 0


@pytest.mark.slow
def test_shots_without_a_free_slot_are_reported_once() -> None:
    events: list[Event] = []
    env = attached(small_training(selfplay={"enter_every": 1000}, ppo={"num_steps": 4}), events=events)
    timestep = env.reset()
    env.arena.overflow[2] += 3
    drive(env, timestep, 4 * 3 + 1)
    assert [event.overflow for event in events if isinstance(event, RoundFought)] == [3, 0, 0]


def test_the_anchors_of_a_config_are_all_existing_bots() -> None:
    assert set(attached(small_training()).league.anchors) <= set(BOTS)


def test_bots_of_the_training_that_are_not_rated_are_anchors_too() -> None:
    assert "expert" not in RATED
    anchors = attached(small_training(selfplay={"bots": ("expert", "weak", "expert")})).league.anchors
    assert sorted(anchors) == sorted({*RATED, "expert"})


def test_a_config_that_deals_more_than_all_battles_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"past_share: expected at most 1 - bot_share \(0.3\), got 0.5"):
        SelfPlayConfig(bot_share=0.7, past_share=0.5)
    with pytest.raises(ConfigError, match="at least one bot, or bot_share 0"):
        SelfPlayConfig(bots=(), bot_share=0.5)
    with pytest.raises(ConfigError, match=r"selfplay.first_team: expected at most arena.team_size \(2\), got 3"):
        small_training(selfplay={"first_team": 3})
    with pytest.raises(ConfigError, match=r"arena.reward.gamma"):
        small_training(ppo={"gamma": 0.5})
    with pytest.raises(ConfigError, match=r"ppo.normalize_observations"):
        small_training(ppo={"normalize_observations": True})


def test_too_few_battles_for_the_opponents_are_an_error_that_names_them() -> None:
    with pytest.raises(ValueError, match=r"1 battles cannot be divided into .*'bots': 0.*use at least 5 battles"):
        attached(small_training(arena={"battles": 1}))
    with pytest.raises(ValueError, match=r"3 battles cannot be divided into .*'slot 0': 0.*use at least 6 battles"):
        attached(small_training(arena={"battles": 3}, selfplay={"bot_share": 0.9, "past_share": 0.1, "opponent_slots": 1}))


def test_battles_too_few_for_all_opponents_are_refused_with_the_number_needed() -> None:
    config = SelfPlayConfig(bots=("weak", "strong"), bot_share=0.6, past_share=0.1, opponent_slots=2)
    with pytest.raises(ValueError, match=r"'slot 0': 0.*at least one for each opponent; use at least 11 battles"):
        divide_battles(config, 8)
    for battles in range(11, 40):
        divided = divide_battles(config, battles)
        assert sum(divided.values()) == battles
        assert {SCRIPTED, "slot 0", "slot 1"} <= set(divided)


def test_all_units_learn_without_bots_and_past_selves() -> None:
    env = attached(small_training(selfplay={"bot_share": 0.0, "past_share": 0.0}))
    assert env.num_envs == 8 * 4
    assert list(env.groups) == [SELF]
    assert (env.bots.bots == -1).all()


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_past_selves_may_be_on_another_device() -> None:
    """The arena on the GPU, its past selves on the CPU."""
    config = small_training(selfplay={"opponent_device": "cpu", "enter_every": 1, "entry_battles": 2})
    env = SelfPlay(config, device=torch.device("cuda"), seed=0)
    env.attach(small_policy(config).to("cuda"))
    timestep = env.reset()
    chance = torch.Generator(device="cuda").manual_seed(0)
    for _ in range(20):
        timestep = env.step(sample_actions(env.action_spec, timestep.masks, env.num_envs, chance, device="cuda"))
    player = env.past["slot 0"]
    assert (player.policy.device.type, player.rows.device.type) == ("cpu", "cuda")
    assert None not in env.opponent_slots.names
    assert player.state.any()
