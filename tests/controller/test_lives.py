"""Rollouts of whole lives: what acted is what is learned from, rewards are against the advisor's twin, and PPO learns by them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any

import msgspec
import pytest
import torch

from esper.controller import lives
from esper.controller.branches import Improved
from esper.controller.cells import DrawnHost, draw_round
from esper.controller.config import ControllerConfig, ControllerRewardConfig, DomainConfig
from esper.controller.evaluation import EvalCase, EvalRun, EvalSetting, run_cases
from esper.controller.events import HostEnded, RoundEnded
from esper.controller.features import observe
from esper.controller.lives import Life, Lives, count_blueprints
from esper.controller.policy import SIZES, Sizes, Taken, batch, sizes_for
from esper.controller.training import make_learner
from esper.controller.turn import OPS, WAIT, Turn
from esper.fleet.config import FleetConfig
from esper.fleet.data import TaskTensors
from esper.fleet.fleet import Fleet
from esper.growth.config import GrowthConfig, HeuristicConfig, LifecycleConfig, RentConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.lifecycle.stages import Decision, GrowthState
from esper.rl import PPO
from esper.rl.batch import Rollout
from esper.rl.config import NetworkConfig
from esper.rl.distributions import Choice
from esper.rl.events import Collected
from esper.rl.policy import Policy
from esper.runs import Event
from esper.tasks import load_task
from tests.controller.hosts import seed_on_trial
from tests.controller.policies import MEMORY, NETWORK, new_policy, trained_policy
from tests.controller.test_branches import gains_of

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
load = cache(load_task)
CONFIG = ControllerConfig(
    hosts=8,
    rounds=4,
    device="cpu",
    threads=1,
    fleets=2,
    hosts_per_twin=2,
    domain=DomainConfig(
        sources=("digits",),
        families=("mlp",),
        width=(2, 3),
        blocks=(1, 1),
        label_noise=(0.0, 0.0),
        classes=(10, 10),
        batch_size=(16, 16),
        horizon=(6, 7),
        samples_of_a_life=(1_200, 1_600),
        price=(0.01, 0.1),
    ),
    fleet=FleetConfig(validation_samples=64),
    growth=GrowthConfig(
        blueprints=("norm", "widen_100", "low_rank", "mlp"),
        lifecycle=LifecycleConfig(holding_epochs=1),
        heuristic=HeuristicConfig(few_steps=0),  # it leaves some hosts alone, although their lives are short
    ),
    network=NETWORK,
    ppo=msgspec.structs.replace(ControllerConfig().ppo, num_minibatches=2, num_epochs=2, network=MEMORY),
)
ONE_FLEET = msgspec.structs.replace(CONFIG, hosts=4, fleets=1)
TWO_BLOCKS = msgspec.structs.replace(ONE_FLEET, domain=msgspec.structs.replace(CONFIG.domain, blocks=(2, 2)))  # always several targets


@dataclass
class Collecting:
    """Lives that keep their events, every life, and the cases in each row of every fleet."""

    lives: Lives
    events: list[Event] = field(default_factory=list)
    found: list[Life] = field(default_factory=list)
    rows: list[list[list[str]]] = field(default_factory=list)

    def collect(self, seed: int = 1) -> Rollout:
        """Collect the next round alone: what was kept of the one before is dropped."""
        for kept in (self.events, self.found, self.rows):
            kept.clear()
        return self.lives.collect(torch.Generator().manual_seed(seed))


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes lives under a policy, beginning with the first round of a seed."""
    made: list[Collecting] = []

    def make(policy: Policy, config: ControllerConfig = CONFIG, *, advisor: Any = Heuristic, seed: int = 0) -> Collecting:
        events: list[Event] = []
        own = Collecting(Lives(config, advisor, load, policy, device=CPU, on_event=events.append), events)
        own.lives.reset(seed)
        made.append(own)
        live = own.lives._live

        def watched(*given: Any) -> tuple[Fleet, list[Life]]:
            fleet, some = live(*given)
            own.found.extend(some)
            return fleet, some

        monkeypatch.setattr(own.lives, "_live", watched)
        return own

    def run(setting: EvalSetting, cases: list[EvalCase], on_end: Any, **options: Any) -> list[EvalRun]:
        def both(fleet: Fleet, rows: dict[int, list[EvalCase]]) -> None:
            made[-1].rows.append([[case.name for case in some] for some in rows.values()])
            on_end(fleet, rows)

        return run_cases(setting, cases, on_end=both, **options)

    monkeypatch.setattr(lives, "run_cases", run)
    return make


def rent_of(run: EvalRun, rent: RentConfig) -> float:
    larger = math.log((run.parameters + run.added_parameters) / run.parameters)
    slower = math.log((run.flops_per_sample + run.added_flops) / run.flops_per_sample)
    return rent.parameters * larger + rent.flops * slower


class Replayed:
    """Takes the recorded steps of a life again, without the policy."""

    def __init__(self, taken: Iterable[Taken]) -> None:
        self.taken, self._looked_at = iter(taken), None

    def decide(self, state: GrowthState) -> Decision:
        turn = Turn(state, (), self._looked_at)
        while not turn.is_over:
            turn = turn.after(WAIT if len(turn.legal()) == 1 else observe(turn).step_of(*next(self.taken).numbers))
        if turn.looks:
            self._looked_at = state.epoch
        return turn.decision()


def lengths_of(rollout: Rollout) -> list[int]:
    lengths: list[int] = rollout.valid.sum(0).tolist()
    return lengths


# As advised


@pytest.mark.parametrize(
    "advisor", [Heuristic, lambda config: Improved(gains_of(-0.01), config, caution=1.0, most=1)], ids=["plain", "improved"]
)
def test_a_policy_with_much_trust_lives_as_its_advisor_in_one_row_for_each_host(collecting: Any, advisor: Any) -> None:
    made = collecting(new_policy(trust=50.0), advisor=advisor)
    for _ in range(2):
        rollout = made.collect()
        assert rollout.valid.any()
        assert not rollout.rewards.any()
        assert not rollout.bad_rewards.any()
        assert all(life.controller.others == [] and life.run.trace == life.twin.trace for life in made.found)
        assert sum(life.run.grown for life in made.found) > 0, "or there is nothing to do alike"
        # Four lives of a fleet are two hosts, each with a twin that shares its row.
        assert [[sorted(names) for names in rows] for rows in made.rows] == [[["advisor", "policy", "policy"]] * 2] * 2
        ends = [event for event in made.events if isinstance(event, RoundEnded)]
        assert [end.alike for end in ends] == [1.0, 1.0]
        assert all(end.utility == end.worth == 0 for end in ends)


def test_lives_that_go_other_ways_have_rows_of_their_own(collecting: Any) -> None:
    made = collecting(new_policy(trust=1.0))
    made.collect()
    assert sum(map(len, made.rows)) > 4
    assert sum(len(names) for rows in made.rows for names in rows) == 8 + 4
    different = [life for life in made.found if life.run.trace != life.twin.trace]
    assert different
    assert all(life.controller.others for life in different)


# What acted


@pytest.mark.parametrize(
    "memory", [MEMORY, NetworkConfig(core="none"), NetworkConfig(core="gru", hidden_size=7)], ids=["lstm", "none", "gru"]
)
def test_the_rollout_has_the_steps_and_probabilities_of_acting_and_every_life_begins_with_an_empty_memory(
    collecting: Any, memory: NetworkConfig
) -> None:
    policy = trained_policy(memory)
    config = msgspec.structs.replace(CONFIG, ppo=msgspec.structs.replace(CONFIG.ppo, network=memory))
    made = collecting(policy, config)
    rollout = made.collect()
    distribution, lengths = policy.distribution, lengths_of(rollout)
    assert lengths == [len(life.controller.life) for life in made.found]
    assert len(set(lengths)) > 1, "or no life ends before another"
    for number, life in enumerate(made.found):
        memory_now = None
        for at, taken in enumerate(life.controller.life):
            obs, masks = batch([taken.seen], SIZES)
            for name, part in obs.items():
                assert torch.equal(rollout.obs[name][at, number], part[0])
            for name, mask in masks.items():
                assert torch.equal(rollout.masks[name][at, number], mask[0])
            assert rollout.choice.picked[at, number].tolist() == list(taken.numbers)
            with torch.no_grad():
                state = policy.initial_state(1) if memory_now is None else memory_now
                features, _ = policy.step(policy.normalize(obs), state)
                parameters = policy.decide(features)
            _, memory_now = policy.act(obs, memory_now, masks=masks)
            choice = Choice(torch.tensor([taken.numbers]), torch.zeros(1, 0))
            acted = distribution.evaluate(parameters, choice, masks).log_prob
            learned = distribution.evaluate(rollout.parameters[at, number][None], choice, masks).log_prob
            torch.testing.assert_close(learned, acted, rtol=0, atol=1e-5)
            torch.testing.assert_close(rollout.values[at, number], policy.value(features)[0].detach(), rtol=0, atol=1e-5)


def test_steps_behind_the_end_of_a_life_are_not_valid_and_its_last_step_has_the_reward(collecting: Any) -> None:
    made = collecting(new_policy(trust=1.0))
    rollout = made.collect()
    times, lengths = torch.arange(len(rollout.valid)).unsqueeze(1), torch.tensor(lengths_of(rollout))
    assert torch.equal(rollout.valid, times < lengths)
    assert torch.equal(rollout.starts, (times == 0) | (times >= lengths))
    assert torch.equal(rollout.terminated, times == lengths - 1)
    assert not rollout.truncated.any()
    assert not rollout.states.any()
    assert not rollout.rewards[~rollout.terminated].any()
    assert rollout.rewards.sum(0).tolist() == pytest.approx([life.reward(CONFIG.reward.most) for life in made.found])
    assert not rollout.next_values[rollout.terminated].any()
    follows = rollout.valid[:-1] & ~rollout.terminated[:-1]
    assert torch.equal(rollout.next_values[:-1][follows], rollout.values[1:][follows])
    for name, part in rollout.obs.items():
        assert not part[~rollout.valid].any(), name
    assert all(mask[~rollout.valid].all() for mask in rollout.masks.values())


# Rewards


@pytest.mark.parametrize("most", [1.0, 0.004])
def test_a_reward_is_how_much_better_a_life_ends_than_its_twin_without_the_price_of_leaving(collecting: Any, most: float) -> None:
    config = msgspec.structs.replace(CONFIG, reward=ControllerRewardConfig(leaving=0.02, most=most))
    made, clipped, rents = collecting(new_policy(trust=1.0), config), 0, set()
    for number in range(2):
        rollout = made.collect(seed=number)
        paid, found = rollout.rewards.sum(0).tolist(), iter(made.found)
        for setting in draw_round(config, round_number=number, seed=0):
            task = setting.cell.task(load)
            own = list(itertools.islice(found, len(setting.hosts)))
            assert [life.host for life in own] == list(setting.hosts)
            # Live again: the steps of every life as they were recorded, and once more the heuristic for every host.
            tensors = TaskTensors.of(task, device=CPU, dtype=torch.float32)
            resources = EvalSetting(task, setting.cell.host, tensors, setting.cell.fleet(config.fleet), config.growth, CPU, rows=64)
            again = [EvalCase("again", life.host.config(len(task.train)), Replayed(life.controller.life)) for life in own]
            plain = [EvalCase("plain", life.host.config(len(task.train)), Heuristic(config.growth)) for life in own]
            runs = run_cases(resources, [*again, *plain])
            for life, run, twin in zip(own, runs[: len(own)], runs[len(own) :], strict=True):
                assert run.trace == life.run.trace
                better = (twin.val_loss + run.unit * rent_of(twin, life.host.rent)) - (
                    run.val_loss + run.unit * rent_of(run, life.host.rent)
                )
                whole = better / run.unit - 0.02 * (1 - number / 4) * len(life.controller.others)
                assert paid.pop(0) == pytest.approx(min(max(whole, -most), most), abs=2e-4)
                clipped += abs(whole) > most
                rents.add(life.host.rent)
    assert len(rents) > 2
    assert most == 1.0 or clipped > 0


def test_the_price_of_leaving_falls_linearly_to_nothing(collecting: Any) -> None:
    config = msgspec.structs.replace(ONE_FLEET, rounds=3, reward=ControllerRewardConfig(leaving=0.3))
    made = collecting(new_policy(trust=0.0), config)
    for expected in (0.3, 0.2, 0.1, 0.0):
        made.collect()
        assert any(life.controller.others for life in made.found)
        for life in made.found:
            assert life.leaving == pytest.approx(expected * len(life.controller.others))


def test_a_loss_that_is_not_finite_is_a_bad_reward_and_its_life_teaches_nothing(collecting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, reward, number = collecting(new_policy(trust=1.0)), Life.reward, iter(itertools.count())
    monkeypatch.setattr(Life, "reward", lambda self, most: math.nan if next(number) % 8 == 3 else reward(self, most))
    monkeypatch.setattr(Lives, "_report", lambda *_, **__: None)  # it asks for the rewards, too
    rollout = made.collect()
    assert rollout.bad_rewards.sum(0).tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert not rollout.valid[:, 3].any()
    assert rollout.rewards.isfinite().all()
    assert (made.lives.bad_rewards, made.lives.episodes, made.lives.has_reward) == (1, 8, True)
    assert len(made.lives.recent_returns) == 7

    def learned(change: float) -> dict[str, torch.Tensor]:
        ppo = learner_of(CONFIG)
        for name in ("values", "next_values", "parameters"):
            part = getattr(rollout, name).clone()
            part[:, 3] += change
            setattr(rollout, name, part)
        ppo.update(rollout)
        return {name: weight.clone() for name, weight in ppo.policy.state_dict().items()}

    one, other = learned(0.0), learned(0.7)
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def learner_of(config: ControllerConfig, *, trust: float = 1.0, collector: Any = None) -> PPO:
    """Build a learner as the training of controllers does."""
    first = new_policy(trust=trust, memory=config.ppo.network)
    return make_learner(config, first, collector or (lambda policy: Lives(config, Heuristic, load, policy, device=CPU)))


# What is drawn


def same(one: Rollout, other: Rollout) -> bool:
    parts = ("rewards", "valid", "parameters", "values", "starts")
    tables = [(a.obs | a.masks | {"picked": a.choice.picked} | {name: getattr(a, name) for name in parts}) for a in (one, other)]
    return all(torch.equal(part, tables[1][name]) for name, part in tables[0].items())


def test_lives_depend_on_the_seed_the_round_and_the_generator_alone(collecting: Any) -> None:
    policy = new_policy(trust=1.0)
    first, again, other = (collecting(policy, ONE_FLEET, seed=seed) for seed in (3, 3, 4))
    rollouts = [first.collect(seed) for seed in (1, 2)]
    assert not same(*rollouts)
    for seed, rollout in zip((1, 2), rollouts, strict=True):
        assert same(rollout, again.collect(seed))
    assert not same(rollouts[0], other.collect(1))
    first.lives.reset(3)
    assert same(first.collect(1), rollouts[0])
    first.lives.reset(3)
    assert not same(first.collect(2), rollouts[0]), "the same hosts, but other steps"


def test_restored_lives_go_on_as_the_first_ones(collecting: Any) -> None:
    policy = new_policy(trust=1.0)
    whole, first, second = (collecting(policy, ONE_FLEET, seed=5) for _ in range(3))
    rollouts = [whole.collect(seed) for seed in (1, 2)]
    first.collect(1)
    second.lives.reset(77)
    assert second.lives.load_state_dict(msgspec.json.decode(msgspec.json.encode(first.lives.state_dict(with_episodes=True))))
    assert same(second.collect(2), rollouts[1])
    assert second.lives.state_dict(with_episodes=True) == whole.lives.state_dict(with_episodes=True)
    assert (second.lives.episodes, len(second.lives.recent_returns), second.lives.round) == (8, 8, 2)


# Limits


def test_a_life_is_learned_from_as_long_as_is_allowed_and_left_to_its_advisor_then(collecting: Any) -> None:
    config = msgspec.structs.replace(ONE_FLEET, longest_life=2)
    made = collecting(new_policy(trust=0.0), config)
    rollout = made.collect()
    assert rollout.valid.shape == (2, 4)
    assert lengths_of(rollout) == [2] * 4
    assert all(len(life.controller.others) <= 2 for life in made.found)
    longer = collecting(new_policy(trust=0.0), ONE_FLEET)
    longer.collect()
    assert any(len(life.controller.others) > 2 for life in longer.found)
    assert rollout.rewards[1].any()


def test_hosts_that_are_too_large_for_the_policy_are_decided_as_advised_and_teach_nothing(collecting: Any) -> None:
    made = collecting(new_policy(trust=0.0, sizes=Sizes(1, 1)), TWO_BLOCKS)
    rollout = made.collect()
    assert sizes_for(made.lives.policy) == Sizes(1, 1), "its weights are being learned"
    assert all(life.controller.others == life.controller.life == [] for life in made.found)
    assert all(life.run.trace == life.twin.trace for life in made.found)
    assert not rollout.valid.any()
    assert rollout.obs.keys() == {"host", "targets", "options"}
    assert rollout.masks.keys() == {"op", "target", "blueprint"}
    assert not rollout.rewards.any()


def test_a_round_without_a_single_choice_changes_nothing(collecting: Any) -> None:
    policy = new_policy(sizes=Sizes(1, 1))
    ppo = make_learner(TWO_BLOCKS, policy, lambda own: collecting(own, TWO_BLOCKS).lives)
    before = {name: weight.clone() for name, weight in ppo.policy.state_dict().items()}
    outcome = ppo.update(ppo.collect())
    assert outcome.skipped == 0
    assert all(torch.equal(weight, before[name]) for name, weight in ppo.policy.state_dict().items())


# Events


def test_events_tell_what_became_of_the_lives(collecting: Any) -> None:
    made = collecting(new_policy(trust=1.0), msgspec.structs.replace(CONFIG, reward=ControllerRewardConfig(most=1e3)))
    made.collect()
    for _ in range(2):
        made.collect()
    hosts = [event for event in made.events if isinstance(event, HostEnded)]
    assert [host.env for host in hosts] == list(range(8))
    for host, life in zip(hosts, made.found, strict=True):
        drawn: DrawnHost = life.host
        assert (host.seed, host.horizon, host.host, host.samples) == (drawn.seed, drawn.cell.horizon, drawn.cell.host, drawn.cell.samples)
        assert (host.gain, host.rent, host.utility) == (life.gain, life.rent, life.gain - life.rent)
        assert host.rent == pytest.approx(rent_of(life.run, drawn.rent) - rent_of(life.twin, drawn.rent))
        assert host.rent_parameters == drawn.rent.parameters
        assert (host.grown, host.kept, host.rollbacks) == (life.run.grown, len(life.run.kept), life.run.rollbacks)
        assert [f"{seed['slot']} {seed['blueprint']} {seed['outcome']}" for seed in host.seeds] == [
            line.partition(" ")[2] for line in life.run.trace
        ]
        assert host.others == life.controller.others
        assert len(host.val_losses) == len(host.twin_losses) == host.horizon
        assert host.val_losses == pytest.approx(list(life.lifecycles.history.val_losses), rel=1e-4)
        assert host.twin_losses == pytest.approx(list(life.of_twin.history.val_losses), rel=1e-4)
    assert any(host.others for host in hosts)

    ends = [event for event in made.events if isinstance(event, RoundEnded)]
    assert [(end.round, end.fleet, end.hosts) for end in ends] == [(2, 0, 4), (2, 1, 4)]
    for number, end in enumerate(ends):
        own, some = hosts[4 * number : 4 * number + 4], made.found[4 * number : 4 * number + 4]
        assert {(host.task, host.host, host.round, host.fleet) for host in own} == {(end.task, end.host, end.round, end.fleet)}
        for name in ("gain", "rent", "utility"):
            assert getattr(end, name) == pytest.approx(fmean(getattr(host, name) for host in own))
        for name in ("grown", "kept", "rollbacks"):
            assert getattr(end, name) == sum(getattr(host, name) for host in own)
        assert end.worth == pytest.approx(fmean(life.reward(1e3) for life in some))
        assert list(end.reward) == ["gain", "rent", "leaving"]
        assert sum(end.reward.values()) == pytest.approx(end.worth)
        assert end.reward["leaving"] == pytest.approx(-0.005 * 0.5 * fmean(len(host.others) for host in own))
        assert end.alike == fmean(not host.others for host in own)
        steps = Counter(OPS[taken.numbers[0]] for life in some for taken in life.controller.life)
        assert end.decisions == {op: steps[op] for op in OPS}
        assert end.steps == steps.total()
        assert sum(count.tried for count in end.blueprints.values()) == end.grown
        assert end.samples > 0
    told = [event for event in made.events if isinstance(event, Collected)]
    assert [(event.step, event.done, event.of) for event in told] == [(20, 4, 8), (24, 8, 8)]


def test_lives_are_not_told_one_by_one_if_that_is_not_wanted(collecting: Any) -> None:
    made = collecting(new_policy(trust=1.0), msgspec.structs.replace(CONFIG, host_events=False))
    made.collect()
    assert [type(event) for event in made.events] == [RoundEnded, Collected] * 2


def test_outcomes_are_counted_by_blueprint() -> None:
    seeds = [one.seed for one in (seed_on_trial("a"), seed_on_trial("b", blueprint="norm"))]
    found = count_blueprints([seed for seed in seeds if seed is not None])
    assert {name: (count.tried, count.kept, count.pruned) for name, count in found.items()} == {"conv1x1": (1, 0, 0), "norm": (1, 0, 0)}


# Learning


def test_ppo_learns_from_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward is made up: the number of seeds that germinate."""
    monkeypatch.setattr(Life, "reward", lambda self, most: float(sum(OPS[one.numbers[0]] == "germinate" for one in self.controller.life)))
    config = msgspec.structs.replace(
        ONE_FLEET,
        hosts=16,
        hosts_per_twin=8,
        domain=msgspec.structs.replace(CONFIG.domain, horizon=(5, 5), samples_of_a_life=(400, 400)),
        ppo=msgspec.structs.replace(CONFIG.ppo, learning_rate=3e-3, target_kl=None, num_epochs=4, seed=1),
    )
    ppo, returns = learner_of(config, trust=2.0), []
    for _ in range(8):
        rollout = ppo.collect()
        returns.append(float(rollout.rewards.sum(0).mean()))
        ppo.update(rollout)
    assert fmean(returns[-2:]) > 1.5 * fmean(returns[:2]) > 0, returns
