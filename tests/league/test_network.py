"""The network of a unit, and the distribution of its actions."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from esper.arena.arena import Arena
from esper.arena.config import ArenaConfig
from esper.arena.env import observation_spec, unit_rows
from esper.arena.observe import parts
from esper.arena.orders import FIRE, MOTION_CHOICES, action_spec, as_motion
from esper.league.config import UnitNetworkConfig
from esper.league.network import UnitActor, make_policy
from esper.rl.config import NetworkConfig
from esper.rl.distributions import ActionDistribution
from esper.rl.policy import Policy
from esper.vecenv import Actions, Masks, Obs
from tests.league.arenas import UNIT, small_arena


def policy_of(arena: ArenaConfig, *, seed: int = 0, unit: UnitNetworkConfig = UNIT, **network: object) -> Policy:
    settings = NetworkConfig(**{"hidden_size": 8, **network})  # type: ignore[arg-type]
    return make_policy(unit, settings, arena, generator=torch.Generator().manual_seed(seed), device=torch.device("cpu"))


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
@pytest.mark.parametrize(("motion", "points"), [("categorical", True), ("gaussian", True), ("categorical", False)])
def test_a_policy_acts_on_what_units_of_any_arena_see(settings: dict[str, int], core: str, motion: str, points: bool) -> None:
    arena = small_arena(battles=2, **settings)
    obs, masks = seen_in(arena)
    policy = policy_of(arena, core=core, unit=msgspec.structs.replace(UNIT, motion=motion, points=points))
    actions, _ = policy.act(obs, masks=masks, generator=torch.Generator().manual_seed(0))
    assert set(actions) == {"fire", "target", "vent", *(MOTION_CHOICES if motion == "categorical" else ("motion",))}
    assert as_motion(actions)["motion"].shape == (2 * arena.units, 4)
    assert masks["fire"].gather(1, actions["fire"].unsqueeze(1)).all()
    assert masks["target"].flatten(1).shape[1] == len(FIRE) * arena.contacts
    Arena(arena, seed=0).step(as_motion(actions))  # it refuses wrong actions


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


def target_of(policy: Policy, outputs: Tensor) -> Tensor:
    """Return the logits of the targets."""
    return outputs[:, policy.distribution.output_slices["target"]]


def test_the_logits_of_targets_follow_the_encoded_contacts_when_these_are_permuted() -> None:
    arena = small_arena(team_size=4, contacts=4, allies=3, state_view=True)
    policy = policy_of(arena)
    actor = policy.actor
    assert isinstance(actor, UnitActor)
    assert actor.query is not None
    with torch.no_grad():
        actor.query.weight.mul_(100.0)  # the first weights give nearly equal logits
    features, _ = policy.step(noise_like(arena, 5), policy.initial_state(5))
    order = torch.tensor([2, 0, 3, 1])
    where = slice(actor.width, actor.width + 4 * actor.entity)
    permuted = features.clone()
    permuted[:, where] = features[:, where].unflatten(1, (4, -1))[:, order].flatten(1)
    before, after = (policy.decide(some)[:, : policy.distribution.num_outputs] for some in (features, permuted))
    assert target_of(policy, before).std(dim=1).min() > 0.01
    torch.testing.assert_close(target_of(policy, after), target_of(policy, before)[:, order])
    others = torch.ones(before.shape[1], dtype=torch.bool)
    others[policy.distribution.output_slices["target"]] = False
    assert torch.equal(before[:, others], after[:, others])


def test_a_contact_changes_the_logit_of_its_own_target_beyond_what_it_changes_by_the_unit() -> None:
    """The features that bypass the core hold the encoded contacts: each reaches the logit of its own place only."""
    arena = small_arena(contacts=2)
    policy = policy_of(arena)
    actor = policy.actor
    assert isinstance(actor, UnitActor)
    features, _ = policy.step(noise_like(arena, 6), policy.initial_state(6))
    features = features.detach().requires_grad_()
    for place in range(2):
        (gradient,) = torch.autograd.grad(target_of(policy, policy.decide(features))[:, place].sum(), features)
        by_contact = gradient[:, actor.width : actor.width + 2 * actor.entity].unflatten(1, (2, -1))
        assert by_contact[:, place].any()
        assert not by_contact[:, 1 - place].any()


def test_without_a_pointer_the_logits_of_targets_depend_on_the_units_features_alone() -> None:
    arena = small_arena(contacts=2)
    policy = policy_of(arena, unit=msgspec.structs.replace(UNIT, points=False))
    actor = policy.actor
    assert isinstance(actor, UnitActor)
    features, _ = policy.step(noise_like(arena, 6), policy.initial_state(6))
    changed = features.clone()
    changed[:, actor.width :] += 1.0
    assert torch.equal(policy.decide(changed), policy.decide(features))


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
