"""The reward: its sum, and known exploits that must not pay.

Lives are simulated: a script of events becomes what a controller would see after each decision, and goes through the real functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from esper.controller.config import ControllerRewardConfig
from esper.controller.reward import TERMS, HostStanding, potential, rewards, standing_after
from esper.growth.config import RentConfig
from esper.growth.host.layout import Place
from esper.growth.lifecycle.stages import LIVING, Contribution, Cost, GrowthState, SlotState, Stage
from esper.growth.measure.contribution import rent_of, total
from esper.statistics import Interval
from tests.growth.builders import seed_record

HOST = Cost(parameters=1_000, flops=10_000)
SEED = Cost(parameters=500, flops=4_000)
RENT = RentConfig(parameters=0.05, flops=0.01)
HORIZON = 12
TWIN_LOSS = 1.0

DENSE = [ControllerRewardConfig(family=family, is_sparse=False, most=50) for family in ("loss", "contribution")]
ALL = [*DENSE, *(msgspec.structs.replace(config, is_sparse=True) for config in DENSE)]

few = settings(max_examples=20)
both_families = pytest.mark.parametrize("config", DENSE, ids=lambda config: config.family)
all_forms = pytest.mark.parametrize("config", ALL, ids=lambda config: f"{config.family}{' sparse' * config.is_sparse}")


# A simulated host


@dataclass(frozen=True)
class Grown:
    """A seed that is in the host: what it gives at alpha 1, in nats."""

    gain: float
    stage: Stage = Stage.HOLDING
    alpha: float = 1.0
    age: int = 0


@dataclass(frozen=True)
class Seen:
    """The state of a host after one decision."""

    state: GrowthState
    spent: float  # on pruned seeds, as a share of the host's training


class Life:
    """A host with three slots. It is as good as its twin, plus what its seeds give, minus what happened to it."""

    def __init__(self) -> None:
        self.slots: list[Grown | None] = [None] * 3
        self.harm = 0.0  # nats
        self.spent = 0.0
        self.rollbacks = 0
        self.seen: list[Seen] = []

    def germinate(self, slot: int, gain: float, *, alpha: float = 1.0) -> None:
        assert self.slots[slot] is None
        self.slots[slot] = Grown(gain, alpha=alpha)

    def move_alpha(self, slot: int, alpha: float) -> None:
        self.slots[slot] = replace(self._living(slot), alpha=alpha)

    def fossilize(self, slot: int) -> None:
        self.slots[slot] = replace(self._living(slot), stage=Stage.FOSSILIZED)

    def prune(self, slot: int) -> None:
        self.spent += self._living(slot).age * SEED.flops / HOST.flops / HORIZON
        self.slots[slot] = None

    def _living(self, slot: int) -> Grown:
        seed = self.slots[slot]
        assert seed is not None
        assert seed.stage in LIVING
        return seed

    def wait(self, decisions: int = 1) -> None:
        """Trains to the next decision, so many times."""
        for _ in range(decisions):
            self.slots = [seed and replace(seed, age=seed.age + 1) for seed in self.slots]
            self.seen.append(self._look())

    def end(self) -> Life:
        """Waits for the last decision; what is still living then is pruned before it is measured."""
        self.wait(HORIZON - len(self.seen))
        for slot, seed in enumerate(self.slots):
            if seed is not None and seed.stage in LIVING:
                self.prune(slot)
        self.seen[-1] = self._look()
        return self

    def _look(self) -> Seen:
        loss = TWIN_LOSS + self.harm - sum(seed.gain * seed.alpha for seed in self.slots if seed)
        slots = tuple(_slot_state(index, seed, epoch=len(self.seen)) for index, seed in enumerate(self.slots))
        state = GrowthState(
            epoch=len(self.seen) + 1,
            epochs=HORIZON,
            steps_per_epoch=10,
            train_losses=(loss,),
            val_losses=(TWIN_LOSS, loss),
            slots=slots,
            host_cost=HOST,
            added=total(slot.cost for slot in slots),
            parameters_left=None,
            flops_left=None,
            seeds_left=3,
            rollbacks=self.rollbacks,
            rent=RENT,
        )
        return Seen(state, self.spent)


def _slot_state(index: int, seed: Grown | None, *, epoch: int) -> SlotState:
    place = Place(f"blocks.{index}", "conv", (8, 4, 4))
    if seed is None:
        return SlotState(place)
    gain = seed.gain * seed.alpha
    contribution = Contribution(Interval(gain, gain - 0.01, gain + 0.01), epoch)
    return SlotState(place, seed.stage, seed_record("conv3x3"), SEED, alpha=seed.alpha, age=seed.age, contribution=contribution)


def standings(lives: Sequence[Life]) -> list[HostStanding]:
    """From the start to the end, of all these hosts."""
    found = [HostStanding.start(len(lives))]
    for moment in zip(*(life.seen for life in lives), strict=True):
        states, spent = [seen.state for seen in moment], [seen.spent for seen in moment]
        found.append(standing_after(states, twin_losses=[TWIN_LOSS] * len(lives), spent=spent))
    return found


def paid(*lives: Life, config: ControllerRewardConfig, gamma: float = 1.0) -> Tensor:
    """The reward of every decision [T, N]."""
    path = standings(lives)
    is_last = torch.arange(1, len(path)) == len(path) - 1
    return torch.stack([
        rewards(before, after, last.expand(len(lives)), config, gamma=gamma)
        for (before, after), last in zip(pairwise(path), is_last, strict=True)
    ])  # fmt: skip


def returned(life: Life, config: ControllerRewardConfig) -> float:
    return float(paid(life, config=config).sum())


def nothing() -> Life:
    return Life().end()


def rent_of_seeds(count: int) -> float:
    return rent_of(total([SEED] * count), HOST, RENT)


# The sum of rewards

nats = st.floats(-3, 3)


@st.composite
def any_lives(draw: st.DrawFn) -> Life:
    """Draw any course of a host."""
    life = Life()
    for _ in range(HORIZON):
        slot = draw(st.integers(0, 2))
        seed = life.slots[slot]
        event = draw(st.sampled_from(["wait", "live", "live", "alpha", "harm", "roll back"]))
        if event == "live" and seed is None:
            life.germinate(slot, draw(nats), alpha=draw(st.floats(0, 1)))
        elif event == "live" and seed is not None and seed.stage in LIVING:
            draw(st.sampled_from([life.fossilize, life.prune]))(slot)
        elif event == "alpha" and seed is not None and seed.stage in LIVING:
            life.move_alpha(slot, draw(st.floats(0, 1)))
        elif event == "harm":
            life.harm += draw(nats)
        elif event == "roll back":
            life.rollbacks += 1
        life.wait()
    return life.end()


@pytest.mark.slow
@all_forms
@few
@given(life=any_lives())
def test_the_return_equals_the_final_worth_for_any_path(config: ControllerRewardConfig, life: Life) -> None:
    end = potential(standings([life])[-1], config)
    assert returned(life, config) == pytest.approx(end.item(), abs=1e-9)


@pytest.mark.slow
@all_forms
@few
@given(life=any_lives(), gamma=st.floats(0.5, 1))
def test_with_the_learners_gamma_the_discounted_return_is_the_discounted_end(
    config: ControllerRewardConfig, life: Life, gamma: float
) -> None:
    discounts = gamma ** torch.arange(HORIZON, dtype=torch.float64)
    end = gamma**HORIZON * potential(standings([life])[-1], config).item()
    assert (discounts * paid(life, config=config, gamma=gamma)[:, 0]).sum().item() == pytest.approx(end, abs=1e-9)


@pytest.mark.slow
@few
@given(lives=st.lists(any_lives(), min_size=2, max_size=3))
def test_the_reward_of_a_host_does_not_depend_on_the_others(lives: list[Life]) -> None:
    for config in ALL:
        together = paid(*lives, config=config)
        for host, life in enumerate(lives):
            assert torch.equal(together[:, host], paid(life, config=config)[:, 0])


@all_forms
def test_a_host_that_never_grows_is_paid_nothing(config: ControllerRewardConfig) -> None:
    assert not paid(nothing(), config=config).any()


@pytest.mark.slow
@pytest.mark.parametrize("config", ALL[2:], ids=lambda config: config.family)
@few
@given(life=any_lives())
def test_the_sparse_form_pays_at_the_last_decision_only(config: ControllerRewardConfig, life: Life) -> None:
    assert not paid(life, config=config)[:-1].any()


def test_each_term_is_its_weight_times_its_number() -> None:
    numbers = {"gain": 0.5, "contributions": 0.7, "rent": 0.3, "spent": 0.2, "rollbacks": 3.0}
    standing = HostStanding(**{name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()})
    config = ControllerRewardConfig(gain=2, rent=3, spent=5, rollback=7, most=50)
    assert {name: term(standing, config).item() for name, term in TERMS.items()} == pytest.approx(
        {"gain": 1.0, "rent": -0.9, "spent": -1.0, "rollback": -21.0}
    )
    by_contribution = ControllerRewardConfig(family="contribution", gain=2, rent=3, spent=5, rollback=7, most=50)
    assert potential(standing, config).item() == pytest.approx(-22.9 + 1.0)
    assert potential(standing, by_contribution).item() == pytest.approx(-22.9 + 1.4)


def test_the_contributions_of_all_slots_count() -> None:
    life = Life()
    for slot, gain in enumerate((0.1, 0.2, 0.4)):
        life.germinate(slot, gain)
        life.fossilize(slot)
    assert standings([life.end()])[-1].contributions.item() == pytest.approx(0.7)


def test_the_loss_of_a_diverged_host_is_bounded() -> None:
    life = Life()
    life.harm = 1e6
    config = ControllerRewardConfig(most=2)
    assert returned(life.end(), config) == -2


# Exploits


@all_forms
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_germinating_and_pruning_repeatedly_earns_nothing(config: ControllerRewardConfig, rounds: int) -> None:
    life = Life()
    for _ in range(rounds):
        life.germinate(0, 0.5)  # a gain that is there at once and goes with the seed
        life.wait(2)
        life.prune(0)
        life.wait()
    farmed = returned(life.end(), config)
    assert farmed < returned(nothing(), config) == 0
    assert farmed == pytest.approx(-config.spent * rounds * 2 * 0.4 / HORIZON)


@pytest.mark.slow
@all_forms
@few
@given(harm=st.floats(0, 1), gain=st.floats(-0.5, 0.5))
def test_fossilizing_just_before_a_regression_pays_what_the_host_is_worth_after_it(
    config: ControllerRewardConfig, harm: float, gain: float
) -> None:
    def life(*, is_before: bool) -> Life:
        life = Life()
        life.germinate(1, gain)
        life.wait(5)
        if is_before:
            life.fossilize(1)
            life.wait()
        if config.family == "loss":
            life.harm = harm
        else:  # the seed itself has become that much worse
            seed = life.slots[1]
            assert seed is not None
            life.slots[1] = replace(seed, gain=gain - harm)
        life.wait()
        if not is_before:
            life.fossilize(1)
        return life.end()

    assert returned(life(is_before=True), config) == pytest.approx(gain - harm - rent_of_seeds(1), abs=1e-9)
    assert returned(life(is_before=True), config) == pytest.approx(returned(life(is_before=False), config), abs=1e-9)


@both_families
def test_fossilizing_alone_pays_nothing(config: ControllerRewardConfig) -> None:
    life = Life()
    life.germinate(0, 0.3)
    life.wait(4)
    life.fossilize(0)
    life.wait()
    assert paid(life, config=config)[-1].item() == 0


@pytest.mark.slow
@all_forms
@few
@given(alphas=st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_moving_alpha_up_and_down_earns_nothing(config: ControllerRewardConfig, alphas: list[float]) -> None:
    def life(path: list[float]) -> Life:
        life = Life()
        life.germinate(2, 0.4)
        life.wait()
        for alpha in path:
            life.move_alpha(2, alpha)
            life.wait()
        life.move_alpha(2, 1.0)
        life.wait()
        life.fossilize(2)
        return life.end()

    cycle = paid(life(alphas), config=config)[1 : len(alphas) + 2]
    assert cycle.sum().item() == pytest.approx(0, abs=1e-9)
    assert returned(life(alphas), config) == pytest.approx(returned(life([]), config), abs=1e-9)


def waiting(gain: float, *, until: int = HORIZON, then: str = "") -> Life:
    life = Life()
    life.germinate(0, gain)
    life.wait(until)
    if then == "fossilize":
        life.fossilize(0)
    elif then == "prune":
        life.prune(0)
    return life.end()


@pytest.mark.slow
@all_forms
@few
@given(gain=st.floats(-1, 1), moment=st.integers(1, HORIZON - 1))
def test_waiting_forever_is_never_better_than_pruning(config: ControllerRewardConfig, gain: float, moment: int) -> None:
    waited = returned(waiting(gain), config)
    assert waited == pytest.approx(-config.spent * 0.4), "the whole life of the seed is spent for nothing"
    assert waited < returned(waiting(gain, until=moment, then="prune"), config)


@pytest.mark.slow
@all_forms
@few
@given(gain=st.floats(0.05, 1), moment=st.integers(1, HORIZON - 1))
def test_waiting_forever_with_a_useful_seed_is_worse_than_keeping_it(config: ControllerRewardConfig, gain: float, moment: int) -> None:
    kept = returned(waiting(gain, until=moment, then="fossilize"), config)
    assert kept == pytest.approx(gain - rent_of_seeds(1), abs=1e-9)
    assert returned(waiting(gain), config) < 0 < kept


@both_families
@few
@given(gain=st.floats(0, 1))
def test_rent_is_paid_from_germination_on_connected_or_not(config: ControllerRewardConfig, gain: float) -> None:
    life = Life()
    life.germinate(0, gain, alpha=0.0)
    life.wait()
    assert paid(life, config=config)[0].item() == pytest.approx(-rent_of_seeds(1))
    life.move_alpha(0, 1.0)
    life.wait(6)
    assert paid(life, config=config).sum().item() == pytest.approx(gain - rent_of_seeds(1), abs=1e-9), "and for as long as it waits"


@both_families
def test_pruning_ends_the_rent_but_not_the_cost_of_training(config: ControllerRewardConfig) -> None:
    life = Life()
    life.germinate(0, 0.0)
    life.germinate(1, 0.0)
    life.wait(5)
    life.prune(0)
    life.wait()
    spent = 5 * 0.4 / HORIZON
    assert paid(life, config=config)[-1].item() == pytest.approx(rent_of_seeds(2) - rent_of_seeds(1) - config.spent * spent)


@all_forms
def test_a_rollback_has_a_lasting_cost(config: ControllerRewardConfig) -> None:
    life = Life()
    life.wait(3)
    life.rollbacks += 2
    assert returned(life.end(), config) == pytest.approx(-2 * config.rollback)


# Size, and reports


def test_the_loss_by_rent_is_bounded() -> None:
    worth = potential(
        HostStanding(*(torch.tensor([0.1, 0.1], dtype=torch.float64) * scale for scale in (1, 0, torch.tensor([5, 500.0]), 0, 0))),
        ControllerRewardConfig(most=0.3),
    )
    assert worth.tolist() == pytest.approx([-0.3, -0.3])
