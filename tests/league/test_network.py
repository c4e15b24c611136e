"""The network of a unit, and the distribution of its actions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.arena.arena import Arena
from esper.arena.config import ArenaConfig
from esper.arena.env import observation_spec, unit_rows
from esper.arena.observe import parts
from esper.arena.orders import FIRE, action_spec
from esper.league.network import make_policy
from esper.rl.config import NetworkConfig
from esper.rl.distributions import ActionDistribution
from esper.rl.policy import Policy
from esper.vecenv import Actions, Masks, Obs
from tests.league.arenas import UNIT, small_arena


def policy_of(arena: ArenaConfig, *, seed: int = 0, **network: object) -> Policy:
    settings = NetworkConfig(**{"hidden_size": 8, **network})  # type: ignore[arg-type]
    return make_policy(UNIT, settings, arena, generator=torch.Generator().manual_seed(seed), device=torch.device("cpu"))


def seen_in(arena: ArenaConfig) -> tuple[Obs, Masks]:
    result = Arena(arena, seed=0).reset()
    return unit_rows(result), result.masks


def noise_like(arena: ArenaConfig, rows: int, *, requires_grad: bool = False) -> Obs:
    chance = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(rows, *part.shape, generator=chance).requires_grad_(requires_grad)
        for name, part in observation_spec(arena).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"allies": 0}, {"team_size": 1}, {"state_view": True}, {"contacts": 3, "allies": 3}])
@pytest.mark.parametrize("core", ["lstm", "none"])
def test_a_policy_acts_on_what_units_of_any_arena_see(settings: dict[str, int], core: str) -> None:
    arena = small_arena(battles=2, **settings)
    obs, masks = seen_in(arena)
    actions, _ = policy_of(arena, core=core).act(obs, masks=masks, generator=torch.Generator().manual_seed(0))
    assert actions["motion"].shape == (2 * arena.units, 4)
    assert masks["fire"].gather(1, actions["fire"].unsqueeze(1)).all()


def test_only_the_critic_sees_the_whole_battle() -> None:
    arena = small_arena(state_view=True)
    policy = policy_of(arena)
    obs = noise_like(arena, 6, requires_grad=True)
    features, state = policy.step(obs, policy.initial_state(6))
    chosen = policy.decide(features)
    of_choice = torch.autograd.grad(chosen.sum(), [obs["obs"], obs["state"]], retain_graph=True, allow_unused=True, materialize_grads=True)
    assert of_choice[0].any()
    assert not of_choice[1].any()
    of_memory = torch.autograd.grad(state.sum(), [obs["state"]], retain_graph=True, allow_unused=True, materialize_grads=True)
    assert not of_memory[0].any()
    of_value = torch.autograd.grad(policy.critic_output(features).sum(), [obs["obs"], obs["state"]])
    assert of_value[0].any()
    assert of_value[1].any()


def block(arena: ArenaConfig, name: str) -> tuple[slice, int]:
    """Where a part of the observation lies, and how many things it is about."""
    start = 0
    for part in parts(arena):
        if part.name == name:
            return slice(start, start + part.width), part.times
        start += part.width
    raise AssertionError(name)


def reversed_block(obs: Tensor, arena: ArenaConfig, name: str) -> Tensor:
    where, times = block(arena, name)
    changed = obs.clone()
    changed[:, where] = obs[:, where].view(len(obs), times, -1).flip(1).flatten(1)
    return changed


def test_the_order_of_allies_does_not_matter_and_that_of_contacts_gives_the_targets() -> None:
    arena = small_arena(team_size=4, contacts=3, allies=3)
    policy = policy_of(arena)
    obs = noise_like(arena, 5)["obs"]
    encoded = policy.encoder(obs)
    torch.testing.assert_close(policy.encoder(reversed_block(obs, arena, "allies")), encoded)
    assert not torch.allclose(policy.encoder(reversed_block(obs, arena, "contacts")), encoded)


def test_the_initial_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = policy_of(small_arena()).state_dict()
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's chances were drawn
    torch.manual_seed(2)
    same, other = policy_of(small_arena()).state_dict(), policy_of(small_arena(), seed=1).state_dict()
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not all(torch.equal(value, other[name]) for name, value in one.items())


def test_first_choices_are_nearly_uniform() -> None:
    arena = small_arena(battles=2)
    policy = policy_of(arena)
    obs, _ = seen_in(arena)
    features, _ = policy.step(obs, policy.initial_state(len(obs["obs"])))
    assert policy.decide(features)[:, : policy.distribution.num_outputs].abs().max() < 0.1


# Actions at the very edge

ROWS = 50_000


def edge_actions(chance: torch.Generator, dtype: torch.dtype, spec_contacts: int) -> Actions:
    """Every motion is exactly -1 or 1."""
    return {
        "fire": torch.randint(len(FIRE), (ROWS,), generator=chance),
        "target": torch.randint(spec_contacts, (ROWS,), generator=chance),
        "vent": torch.randint(2, (ROWS,), generator=chance),
        "motion": (torch.randint(2, (ROWS, 4), generator=chance) * 2 - 1).to(dtype),
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quarter_of_a_million_motions_at_exactly_plus_and_minus_one_have_finite_log_probabilities_and_gradients(
    dtype: torch.dtype,
) -> None:
    arena = ArenaConfig()
    distribution = ActionDistribution(action_spec(arena))
    chance = torch.Generator().manual_seed(0)
    for _ in range(250_000 // ROWS):
        spread = torch.randn(ROWS, distribution.num_parameters, generator=chance) * 3
        parameters = spread.to(dtype).requires_grad_()
        choice = distribution.choice(edge_actions(chance, dtype, arena.contacts))
        evaluation = distribution.evaluate(parameters, choice, {})
        (gradient,) = torch.autograd.grad(evaluation.log_prob.sum() + evaluation.entropy.sum(), parameters)
        assert evaluation.log_prob.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient.any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quarter_of_a_million_draws_of_a_saturated_policy_are_at_the_edge_and_have_finite_log_probabilities_and_gradients(
    dtype: torch.dtype,
) -> None:
    distribution = ActionDistribution(action_spec(ArenaConfig()))
    chance = torch.Generator().manual_seed(0)
    means = slice(distribution.num_logits, distribution.num_outputs)
    for _ in range(250_000 // ROWS):
        spread = torch.randn(ROWS, distribution.num_parameters, generator=chance)
        spread[:, means] = spread[:, means].sign() * 30.0  # tanh of it is 1 in any precision
        parameters = spread.to(dtype).requires_grad_()
        with torch.no_grad():
            choice = distribution.choose(parameters, {}, distribution.noise((ROWS,), chance))
        assert (distribution.actions(choice)["motion"].abs() == 1).float().mean() > 0.99
        evaluation = distribution.evaluate(parameters, choice, {})
        (gradient,) = torch.autograd.grad(evaluation.log_prob.sum() + evaluation.entropy.sum(), parameters)
        assert evaluation.log_prob.isfinite().all()
        assert gradient.isfinite().all()
