"""Growth as an environment: the contract, rewards that sum to the final worth, and exact resuming."""

from __future__ import annotations

import gc
import weakref

import msgspec
import pytest
import torch

from esper.controller import domain
from esper.controller.cells import draw_cell
from esper.controller.config import ControllerConfig, ControllerRewardConfig, DomainConfig, rent_level
from esper.controller.domain import FleetSetting
from esper.controller.env import GrowthEnv
from esper.controller.events import HostEnded, RoundEnded
from esper.controller.fleet_with_twins import FleetWithTwins, with_finite_losses
from esper.controller.layout import MOVE_NAMES
from esper.controller.reward import potential
from esper.fleet.config import FleetConfig
from esper.growth.config import GovernorConfig, GrowthConfig, LifecycleConfig
from esper.growth.events import StageEntered
from esper.growth.lifecycle.governor import LossRange
from esper.growth.lifecycle.stages import Cost, GrowthState, Stage
from esper.rl.collector import Staging
from esper.rl.distributions import ActionDistribution
from esper.runs import Event
from esper.runs.events import scalars
from esper.tasks import load_task
from esper.vecenv import Actions, Timestep, check_env

HORIZON = 4
SAMPLES = 16 * 2 * HORIZON  # of a whole training: two steps between decisions
CONFIG = ControllerConfig(
    hosts=6,
    fleets=2,
    hosts_per_twin=3,
    domain=DomainConfig(
        sources=("digits", "teacher"),
        families=("conv", "mlp"),
        width=(2, 3),
        blocks=(1, 2),
        batch_size=(16, 16),
        horizon=(HORIZON, HORIZON),
        samples_of_a_life=(SAMPLES, SAMPLES),
    ),
    fleet=FleetConfig(validation_samples=50, validation_batch=25),
    growth=GrowthConfig(
        blueprints=("norm", "double_conv3x3", "mlp", "widen_100"), lifecycle=LifecycleConfig(holding_epochs=1, embargo_epochs=1)
    ),
)
ONE_CELL = DomainConfig(
    sources=("digits",), families=("mlp",), width=(2, 2), blocks=(1, 1), batch_size=(16, 16), horizon=(4, 4), samples_of_a_life=(128, 128),
    samples=(400, 400), classes=(3, 3), clean_share=1.0, optimizers=("sgd",), schedules=("none",),
)  # fmt: skip


def make_env(config: ControllerConfig = CONFIG, seed: int = 0, **options: object) -> GrowthEnv:
    return GrowthEnv(config, load_task, seed=seed, **options)


class RandomPolicy:
    """Draws from what is allowed."""

    def __init__(self, env: GrowthEnv, seed: int = 0) -> None:
        self.distribution = ActionDistribution(env.action_spec)
        self.generator = torch.Generator().manual_seed(seed)
        self.hosts = env.num_envs

    def __call__(self, step: Timestep) -> Actions:
        parameters = torch.zeros(self.hosts, self.distribution.num_parameters)
        noise = self.distribution.noise((self.hosts,), self.generator)
        return self.distribution.actions(self.distribution.choose(parameters, step.masks, noise))


@pytest.mark.slow
def test_a_fleet_is_released_before_the_next_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them may not fit."""
    env = make_env(msgspec.structs.replace(CONFIG, fleets=1))
    env.reset(seed=0)
    old, make, alive = weakref.ref(env.twinned_fleets[0].fleet), env._build_fleet, []

    def watched(setting: FleetSetting, number: int) -> FleetWithTwins:
        alive.append(old() is not None)
        return make(setting, number)

    monkeypatch.setattr(env, "_build_fleet", watched)
    for _ in range(HORIZON + 1):
        env.step(wait_everywhere(env))
    assert alive == [False]


@pytest.mark.slow
def test_a_reused_fleet_equals_a_new_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet is reused where the next hosts are of the same cell."""
    cell = draw_cell(ONE_CELL, number=0, seed=0)
    monkeypatch.setattr(domain, "draw_cell", lambda *_, **__: cell)
    config = msgspec.structs.replace(CONFIG, fleets=1)

    def lives(is_new: bool) -> tuple[list[Timestep], list[object], list[Event]]:
        events: list[Event] = []
        env = make_env(config, on_event=events.append)
        steps, policy, fleets = [env.reset(seed=0)], RandomPolicy(env), [env.twinned_fleets[0].fleet]
        with monkeypatch.context() as patch:
            if is_new:
                patch.setattr(FleetWithTwins, "fits", lambda self, setting: False)
            for _ in range(2 * (HORIZON + 1) + 2):
                steps.append(env.step(policy(steps[-1])))
                if env.twinned_fleets[0].fleet is not fleets[-1]:
                    fleets.append(env.twinned_fleets[0].fleet)
        return steps, fleets, events

    (again, kept, told), (fresh, made, told_anew) = lives(is_new=False), lives(is_new=True)
    assert (len(kept), len(made)) == (1, 3)
    for one, other in zip(again, fresh, strict=True):
        assert torch.equal(one.reward, other.reward)
        assert all(torch.equal(value, other.obs[name]) for name, value in one.obs.items())
    clocks = {"step_seconds": None, "measure_seconds": None}
    told, told_anew = (
        [msgspec.structs.replace(event, **clocks) if isinstance(event, RoundEnded) else event for event in events]
        for events in (told, told_anew)
    )
    assert told == told_anew


@pytest.mark.slow
def test_a_closed_environment_holds_nothing_on_the_device() -> None:
    env = make_env()
    env.reset(seed=0)
    held = [weakref.ref(twinned.fleet) for twinned in env.twinned_fleets]
    env.close()
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


def wait_everywhere(env: GrowthEnv) -> Actions:
    return {head.name: torch.zeros(env.num_envs, dtype=torch.int64) for head in env.action_spec.discrete}


@pytest.mark.slow
def test_the_growth_environment_keeps_the_contract() -> None:
    check_env(make_env(), steps=HORIZON + 3)


@pytest.mark.slow
def test_one_transfer_sends_the_observations_unchanged() -> None:
    plain, sent = make_env(), make_env()
    sent._staging = Staging(torch.device("cpu"))
    policy, steps = RandomPolicy(plain), (plain.reset(3), sent.reset(3))
    for _ in range(HORIZON + 2):
        one, other = (_flat(step) for step in steps)
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) and value.dtype == other[name].dtype for name, value in one.items())
        actions = policy(steps[0])
        steps = (plain.step(actions), sent.step(actions))


def _flat(step: Timestep) -> dict[str, torch.Tensor]:
    parts = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated, **step.obs, **step.masks}
    return parts if step.valid is None else {**parts, "valid": step.valid}


@pytest.mark.slow
def test_an_episode_has_a_decision_before_every_segment_and_one_after_the_last() -> None:
    env = make_env()
    step = env.reset(0)
    policy = RandomPolicy(env)
    for _ in range(HORIZON):
        step = env.step(policy(step))
        assert not step.ended.any()
    step = env.step(policy(step))
    assert step.terminated.all()
    assert not step.truncated.any()


@pytest.mark.slow
def test_a_host_that_never_grows_earns_nothing_and_ends_as_its_twin() -> None:
    env = make_env()
    env.reset(0)
    total = torch.zeros(env.num_envs)
    for _ in range(HORIZON + 1):
        twinned_fleets = list(env.twinned_fleets)
        total += env.step(wait_everywhere(env)).reward
    assert total.abs().max() < 1e-4
    for twinned in twinned_fleets:
        losses = twinned.fleet.losses(twinned.task.test)
        assert torch.allclose(losses[twinned.twin_of], losses[: twinned.hosts], atol=1e-4)


@pytest.mark.parametrize("family", ["loss", pytest.param("contribution", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_sparse", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rewards_sum_to_the_final_worth_of_a_host(family: str, is_sparse: bool) -> None:
    env = make_env(msgspec.structs.replace(CONFIG, reward=ControllerRewardConfig(family=family, is_sparse=is_sparse)))
    step, policy = env.reset(1), RandomPolicy(env, seed=1)
    total = torch.zeros(env.num_envs, dtype=torch.float64)
    for number in range(HORIZON + 1):
        twinned_fleets = list(env.twinned_fleets)
        step = env.step(policy(step))
        total += step.reward.double()
        if number < HORIZON and is_sparse:
            assert not step.reward.any()
    worth = [potential(twinned.last_standing(), env.config.reward) for twinned in twinned_fleets]
    assert torch.allclose(total, torch.cat(worth), atol=1e-4)
    assert total.abs().max() > 0


@pytest.mark.slow
def test_hosts_with_the_same_training_share_a_twin() -> None:
    env = make_env()
    env.reset(0)
    for twinned in env.twinned_fleets:
        assert twinned.fleet.hosts == 3 + 1
        assert len(set(twinned.twin_of)) == 1
        states = [twinned.fleet.rows[row].setting for row in (0, twinned.twin_of[0])]
        assert states[0].seed == states[1].seed
        assert states[0].learning_rate == states[1].learning_rate


@pytest.mark.slow
def test_rent_is_observed_and_charged() -> None:
    env = make_env()
    env.reset(0)
    rents = [state.rent for twinned in env.twinned_fleets for state in twinned.states()]
    assert rents == [host.rent for twinned in env.twinned_fleets for host in twinned.setting.hosts]
    assert env.reset(0).obs["price"].flatten().tolist() == pytest.approx([rent.parameters for rent in rents])


@pytest.mark.slow
def test_new_hosts_are_drawn_when_all_hosts_of_a_fleet_have_ended() -> None:
    env, told = make_env(msgspec.structs.replace(CONFIG, host_events=False)), []
    env.on_event = told.append
    step, policy = env.reset(0), RandomPolicy(env)
    before = [twinned.setting for twinned in env.twinned_fleets]
    for _ in range(HORIZON + 1):
        step = env.step(policy(step))
    assert all(twinned.setting.cell != old.cell for twinned, old in zip(env.twinned_fleets, before, strict=True))
    assert [type(event) for event in told] == [RoundEnded, RoundEnded]
    assert all(twinned.fleet.rows[0].lifecycles.epoch == 0 for twinned in env.twinned_fleets)


@pytest.mark.slow
def test_the_environment_resumes_bit_for_bit_with_seeds_on_trial() -> None:
    env = make_env()
    step, policy = env.reset(0), RandomPolicy(env)
    for _ in range(2):
        step = env.step(policy(step))
    assert any(host.lifecycles.living() for twinned in env.twinned_fleets for host in twinned.fleet.rows)
    saved = env.state_dict()
    actions = [policy(step)]
    whole = [env.step(actions[0])]
    for _ in range(HORIZON + 1):
        actions.append(policy(whole[-1]))
        whole.append(env.step(actions[-1]))

    other = make_env()
    other.load_state_dict(saved)
    for action, expected in zip(actions, whole, strict=True):
        found = other.step(action)
        assert torch.equal(found.reward, expected.reward)
        assert all(torch.equal(found.obs[name], expected.obs[name]) for name in expected.obs)
        assert all(torch.equal(found.masks[name], expected.masks[name]) for name in expected.masks)


@pytest.mark.slow
def test_events_of_all_hosts_have_their_numbers() -> None:
    events: list[Event] = []
    env = make_env(on_event=events.append)
    step, policy = env.reset(seed=0), RandomPolicy(env)
    for _ in range(HORIZON + 1):
        step = env.step(policy(step))
    told = [event for event in events if isinstance(event, StageEntered)]
    ended = [event for event in events if isinstance(event, RoundEnded)]
    germinated = [event.env for event in told if event.stage == "GERMINATED"]
    assert len(germinated) == sum(end.grown for end in ended) > 0
    assert set(germinated) <= set(range(CONFIG.hosts))
    assert len({number // 3 for number in germinated}) == 2  # of both fleets, which have three hosts each
    stages = [event.stage for event in told]
    # Seeds that were kept after the best state of their host are pruned in the end.
    assert sum(end.kept for end in ended) == len(germinated) - stages.count("PRUNED") <= stages.count("FOSSILIZED")
    for blueprint in {event.blueprint for event in told}:
        counts = [end.blueprints[blueprint] for end in ended if blueprint in end.blueprints]
        of_it = [event.stage for event in told if event.blueprint == blueprint]
        assert sum(count.tried for count in counts) == of_it.count("GERMINATED")
        assert sum(count.pruned for count in counts) == of_it.count("PRUNED")
        assert all(count.tried == count.kept + count.pruned for count in counts)
        assert all(count.parameters > 0 for count in counts)
    shown = scalars(ended[0])
    assert sum(value for name, value in shown.items() if name.endswith("/tried")) == shown["round_ended/grown"]


@pytest.mark.slow
def test_the_end_of_every_host_is_told_with_its_losses_and_the_moves_of_its_round_are_counted() -> None:
    events: list[Event] = []
    env = make_env(on_event=events.append)
    step, policy, made = env.reset(seed=0), RandomPolicy(env), list[int]()
    for number in range(2 * (HORIZON + 1)):
        actions = policy(step)
        step = env.step(actions)
        made += actions["move"].tolist()
        if number == HORIZON + 1:  # a resume within a round forgets no choice
            saved = env.state_dict()
            env = make_env(on_event=events.append)
            env.load_state_dict(saved)
    hosts = [event for event in events if isinstance(event, HostEnded)]
    rounds = [event for event in events if isinstance(event, RoundEnded)]
    assert [(host.round, host.env) for host in hosts] == [(number, env) for number in (0, 1) for env in range(CONFIG.hosts)]
    assert sum(sum(end.decisions.values()) for end in rounds) == len(made) == 2 * (HORIZON + 1) * CONFIG.hosts
    assert sum(end.decisions["nothing"] for end in rounds) == made.count(0) < len(made)
    assert all(set(end.decisions) == set(MOVE_NAMES) for end in rounds), "a move that was never made counts 0"
    for end in rounds:
        own = [host for host in hosts if (host.round, host.fleet) == (end.round, end.fleet)]
        assert sum(host.utility for host in own) / len(own) == pytest.approx(end.utility)
        assert sum(host.kept for host in own) == end.kept
        assert all(len(host.val_losses) == len(host.twin_losses) == HORIZON for host in own)
        assert all(host.val_losses == host.twin_losses for host in own if not host.grown)
        assert all(host.rent_level == rent_level(host.rent_parameters) and host.samples > 0 for host in own)
        assert end.gflops > 0


@pytest.mark.slow
def test_a_host_that_is_given_up_ends_at_once_and_its_later_steps_are_invalid() -> None:
    growth = msgspec.structs.replace(CONFIG.growth, governor=GovernorConfig(max_rollbacks=0))
    env = make_env(msgspec.structs.replace(CONFIG, growth=growth))
    env.reset(0)
    step = env.step(wait_everywhere(env))
    with torch.no_grad():
        env.twinned_fleets[0].fleet.host.rows.parameters.flat[0].fill_(torch.nan)
    step = env.step(wait_everywhere(env))
    assert step.terminated.tolist() == [True] + [False] * 5
    assert step.valid is None
    assert torch.isfinite(step.reward).all()
    assert all(torch.isfinite(part).all() for part in step.obs.values())
    step = env.step(wait_everywhere(env))
    assert step.valid is not None
    assert step.valid.tolist() == [False] + [True] * 5
    assert not step.terminated.any()


def test_losses_that_are_not_finite_are_observed_as_the_last_finite_ones() -> None:
    state = GrowthState(
        3,
        5,
        1,
        (1.0, float("nan"), 0.5),
        (float("inf"), 2.0, float("nan")),
        (),
        Cost(1, 1),
        Cost(0, 0),
        None,
        None,
        0,
        scale=LossRange.of(2.3),
    )
    assert with_finite_losses(state).train_losses == (1.0, 1.0, 0.5)
    assert with_finite_losses(state).val_losses == (2.3, 2.0, 2.0)


@pytest.mark.slow
def test_the_gain_of_a_kept_seed_is_measured_at_the_end() -> None:
    """Otherwise a seed could be kept at its best moment, whatever becomes of it."""
    env = make_env(msgspec.structs.replace(CONFIG, reward=ControllerRewardConfig(family="contribution")))
    step, policy = env.reset(3), RandomPolicy(env, seed=3)
    for _ in range(HORIZON):
        step = env.step(policy(step))
    for twinned in env.twinned_fleets:
        for host in twinned.fleet.rows[: twinned.hosts]:
            for name in [name for name, backend in host.lifecycles.slots.items() if backend.stage is Stage.HOLDING]:
                host.lifecycles.fossilize(name, "for this test")
    kept = [
        (twinned, row)
        for twinned in env.twinned_fleets
        for row in range(twinned.hosts)
        if list(twinned.fleet.rows[row].lifecycles.occupied())
    ]
    assert kept
    with torch.no_grad():  # what they have learned is lost
        for twinned, _ in kept:
            for storage in twinned.fleet.seed_storages.values():
                storage.tensors["weights"].zero_()
    for twinned, row in kept:
        assert twinned.last_standing().contributions[row].abs() < 1e-6


@pytest.mark.slow
def test_seeds_that_are_not_kept_cost_their_training() -> None:
    slow = msgspec.structs.replace(CONFIG.growth, lifecycle=LifecycleConfig(holding_epochs=HORIZON, embargo_epochs=0))
    env = make_env(msgspec.structs.replace(CONFIG, growth=slow))
    step, total = env.reset(0), torch.zeros(env.num_envs, dtype=torch.float64)
    for number in range(HORIZON + 1):
        twinned_fleets = list(env.twinned_fleets)
        move = step.masks["move"].int()[:, 1:].argmax(1) + 1 if number == 2 else torch.zeros(env.num_envs, dtype=torch.int64)
        step = env.step({"move": move})
        total += step.reward.double()
    for number, twinned in enumerate(twinned_fleets):
        entries = [host.lifecycles.ledger.seeds for host in twinned.fleet.rows[: twinned.hosts]]
        assert all(entry.outcome == "pruned" for some in entries for entry in some)
        share = [sum(entry.flops for entry in some) * 2 / HORIZON / twinned.fleet.discovery.host.flops for some in entries]  # two segments
        assert min(share) > 0
        standing = twinned.last_standing()
        assert standing.spent.tolist() == pytest.approx(share)
        paid = standing.gain - env.config.reward.spent * standing.spent
        assert torch.allclose(total[3 * number : 3 * number + 3], paid, atol=1e-5)


@pytest.mark.slow
def test_a_host_counts_with_its_best_validation_state() -> None:
    """What is lost after the best state costs nothing, for the host and for its twin."""
    env = make_env()
    step, policy = env.reset(0), RandomPolicy(env)
    for _ in range(HORIZON):
        step = env.step(policy(step))
    twinned_fleets = list(env.twinned_fleets)
    best = [[min(row.lifecycles.history.val_losses) for row in twinned.fleet.rows] for twinned in twinned_fleets]
    with torch.no_grad():
        for twinned in twinned_fleets:
            twinned.fleet.host.rows.parameters.flat.add_(0.5)
    env.step(wait_everywhere(env))
    for twinned, expected in zip(twinned_fleets, best, strict=True):
        found = twinned.fleet.validation_losses().tolist()
        kept_nothing = [not list(row.lifecycles.occupied()) for row in twinned.fleet.rows]
        assert any(kept_nothing)
        for loss, lowest, is_plain in zip(found, expected, kept_nothing, strict=True):
            assert not is_plain or loss == pytest.approx(lowest, abs=1e-4)
