"""Distributions over actions: masks, log-probabilities, entropies and gradients."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from esper.rl.distributions import (
    ActionDistribution,
    Choice,
    entropy_of_squashed_gaussian,
    latent_of_action,
    log_derivative_of_tanh,
    log_prob_of_gaussian,
    masked_logits,
)
from esper.rl.policy import raise_on_empty_rows
from esper.vecenv import ActionSpec, Continuous, Discrete, Relevance

MIXED = ActionSpec(
    heads=(Discrete("op", 3), Continuous("aim", 2), Discrete("slot", 4, parent="op"), Discrete("speed", 2)),
    relevance=(Relevance("slot", given="op", choices=(1, 2)), Relevance("speed", given="slot", choices=(0,))),
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_masks(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """At least one choice is allowed in every row."""
    draw = torch.rand(rows, 3, 4, generator=generator(seed))
    slot = (draw < 0.4) | (draw == draw.amax(-1, keepdim=True))
    op = torch.rand(rows, 3, generator=generator(seed + 1))
    return {"slot": slot, "op": (op < 0.3) | (op == op.amax(-1, keepdim=True))}


def draw(distribution: ActionDistribution, rows: int, seed: int = 0):
    parameters = torch.randn(rows, distribution.num_parameters, generator=generator(seed)) * 3
    masks = random_masks(rows, seed + 10)
    return parameters, masks, distribution.choose(parameters, masks, distribution.noise((rows,), generator(seed + 20)))


@pytest.mark.slow
def test_no_masked_action_is_ever_drawn():
    distribution = ActionDistribution(MIXED)
    for seed in range(4):
        _, masks, choice = draw(distribution, 50_000, seed)
        op, slot, _ = choice.picked.unbind(-1)
        rows = torch.arange(len(op))
        assert masks["op"][rows, op].all()
        assert masks["slot"][rows, op, slot].all()


def test_the_likeliest_choice_respects_the_mask():
    distribution = ActionDistribution(ActionSpec((Discrete("a", 3),)))
    choice = distribution.choose(torch.tensor([[5.0, 1.0, 0.0]]), {"a": torch.tensor([[False, True, True]])}, None)
    assert choice.picked.item() == 1


def test_draws_follow_the_probabilities():
    distribution = ActionDistribution(ActionSpec((Discrete("a", 3),)))
    logits = torch.tensor([0.0, 1.0, -1.0])
    picked = distribution.choose(logits.expand(100_000, 3), {}, distribution.noise((100_000,), generator())).picked.flatten()
    assert torch.allclose(torch.bincount(picked, minlength=3) / 100_000, logits.softmax(0), atol=0.006)


def test_discrete_log_probabilities_equal_torchs_categorical():
    distribution = ActionDistribution(ActionSpec((Discrete("a", 5),)))
    parameters = torch.randn(64, 5, generator=generator())
    choice = distribution.choose(parameters, {}, distribution.noise((64,), generator(1)))
    evaluation = distribution.evaluate(parameters, choice, {})
    reference = Categorical(logits=parameters)
    assert torch.allclose(evaluation.log_prob[:, 0], reference.log_prob(choice.picked[:, 0]), atol=1e-6)
    assert torch.allclose(evaluation.entropy[:, 0] * math.log(5), reference.entropy(), atol=1e-6)


def test_continuous_log_probabilities_equal_torchs_squashed_normal():
    distribution = ActionDistribution(ActionSpec((Continuous("a", 3),)))
    parameters = torch.randn(64, 6, generator=generator(), dtype=torch.float64)
    latent = parameters[:, :3] + 0.3
    choice = Choice(torch.empty(64, 0, dtype=torch.int64), latent)
    reference = TransformedDistribution(Normal(parameters[:, :3], parameters[:, 3:].clamp(-5, 2).exp()), TanhTransform())
    expected = reference.log_prob(torch.tanh(latent)).sum(-1)
    assert torch.allclose(distribution.evaluate(parameters, choice, {}).log_prob[:, 0], expected, atol=1e-8)


def test_a_head_without_bounds_is_a_plain_gaussian_beside_one_that_has_them():
    spec = ActionSpec((Continuous("free", 2, is_bounded=False), Continuous("aim", 1)))
    distribution = ActionDistribution(spec)
    parameters = torch.randn(64, 6, generator=generator(), dtype=torch.float64)
    choice = distribution.choose(parameters, {}, distribution.noise((64,), generator(1)))
    actions = distribution.actions(choice)
    assert torch.equal(actions["free"], choice.latent[:, :2])
    assert torch.equal(actions["aim"], choice.latent[:, 2:].tanh())
    assert torch.allclose(distribution.choice(actions).latent, choice.latent)
    evaluation = distribution.evaluate(parameters, choice, {})
    free = Normal(parameters[:, :2], parameters[:, 3:5].clamp(-5, 2).exp())
    assert torch.allclose(evaluation.log_prob[:, 0], free.log_prob(actions["free"]).sum(-1))
    unit = Normal(torch.zeros(2, dtype=torch.float64), 1.0).entropy()
    assert torch.allclose(evaluation.entropy[:, 0], (free.entropy() / unit).mean(-1))
    alone = ActionDistribution(ActionSpec((Continuous("aim", 1),)))
    bounded = alone.evaluate(parameters[:, [2, 5]], Choice(choice.picked, choice.latent[:, 2:]), {})
    assert torch.allclose(evaluation.log_prob[:, 1], bounded.log_prob[:, 0])


@pytest.mark.parametrize("edge", [-1.0, 1.0])
def test_log_probability_and_gradients_are_finite_at_the_very_edge_and_agree_with_float64(edge: float):
    distribution = ActionDistribution(ActionSpec((Continuous("a", 1),)))
    results = []
    for dtype in (torch.float32, torch.float64):
        parameters = torch.tensor([[0.3, -0.5]], dtype=dtype, requires_grad=True)
        # Both take the edge for the same number, so that only the arithmetic differs.
        latent = latent_of_action(torch.tensor([[edge]])).to(dtype)
        log_prob = distribution.evaluate(parameters, Choice(torch.empty(1, 0, dtype=torch.int64), latent), {}).log_prob.sum()
        (gradient,) = torch.autograd.grad(log_prob, parameters)
        assert torch.isfinite(log_prob)
        assert torch.isfinite(gradient).all()
        results.append((log_prob.double(), gradient.double()))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-5)


def test_the_derivative_of_tanh_is_exact_far_beyond_saturation():
    latent = torch.tensor([0.0, 5.0, 20.0, 80.0, -80.0])
    exact = -2 * torch.log(torch.cosh(latent.double()))
    assert torch.allclose(log_derivative_of_tanh(latent).double(), exact, rtol=1e-5)


def test_unsquashing_an_action_restores_the_choice():
    distribution = ActionDistribution(MIXED)
    _, _, choice = draw(distribution, 100)
    again = distribution.choice(distribution.actions(choice))
    assert torch.equal(again.picked, choice.picked)
    small = choice.latent.abs() < 3
    assert torch.allclose(again.latent[small], choice.latent[small], atol=1e-3)


@pytest.mark.parametrize("spec", [ActionSpec((Discrete("op", 3), Discrete("slot", 2))), ActionSpec((Continuous("push", 2),))])
def test_a_choice_has_the_same_shapes_for_actions_in_any_order(spec: ActionSpec):
    distribution = ActionDistribution(spec)
    parameters = torch.randn(5, distribution.num_parameters, generator=generator())
    choice = distribution.choose(parameters, {}, distribution.noise((5,), generator(1)))
    actions = distribution.actions(choice)
    for order in (list(actions), list(reversed(actions))):
        found = distribution.choice({name: actions[name] for name in order})
        assert torch.equal(found.picked, choice.picked)
        assert found.latent.shape == choice.latent.shape


def test_the_entropy_of_a_squashed_gaussian_equals_monte_carlo():
    mean, log_std = torch.tensor([0.0, 0.5, 1.5], dtype=torch.float64), torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64)
    latent = mean + log_std.exp() * torch.randn(400_000, 3, generator=generator(), dtype=torch.float64)
    sampled = -(log_prob_of_gaussian(latent, mean, log_std) - log_derivative_of_tanh(latent)).mean(0)
    assert torch.allclose(entropy_of_squashed_gaussian(mean, log_std), sampled, atol=0.02)


def test_a_head_with_one_allowed_choice_has_entropy_zero_and_a_finite_gradient():
    distribution = ActionDistribution(ActionSpec((Discrete("a", 3),)))
    parameters = torch.randn(2, 3, generator=generator()).requires_grad_()
    masks = {"a": torch.tensor([[False, True, False], [True, True, False]])}
    evaluation = distribution.evaluate(parameters, distribution.choose(parameters, masks, None), masks)
    evaluation.entropy.sum().backward()
    assert evaluation.entropy[0].item() == 0.0
    assert evaluation.entropy[1].item() > 0.0
    assert torch.isfinite(parameters.grad).all()
    assert (parameters.grad[0] == 0).all()


def test_masked_logits_stay_finite_in_half_precision():
    logits = torch.tensor([[1.0, 2.0]], dtype=torch.float16)
    masked = masked_logits(logits, torch.tensor([[True, False]]))
    assert torch.isfinite(masked).all()
    assert torch.log_softmax(masked.float(), -1)[0, 0].item() == 0.0


def test_a_dependent_mask_is_the_row_of_the_parents_choice():
    distribution = ActionDistribution(ActionSpec((Discrete("kind", 2), Discrete("item", 2, parent="kind"))))
    masks = {"item": torch.tensor([[[True, False], [False, True]]])}
    for kind, logits in ((0, [9.0, 0.0, 0.0, 5.0]), (1, [0.0, 9.0, 5.0, 0.0])):
        choice = distribution.choose(torch.tensor([logits]), masks, None)
        assert choice.picked.tolist() == [[kind, kind]]


def test_relevance_follows_the_table_through_several_heads():
    distribution = ActionDistribution(MIXED)
    picked = torch.tensor([[0, 0, 1], [1, 0, 1], [2, 3, 1]])  # op, slot, speed
    relevance = distribution.relevance(Choice(picked, torch.zeros(3, 2)))
    #                                op    aim   slot  speed
    assert relevance.tolist() == [[True, True, False, False], [True, True, True, True], [True, True, True, False]]


def test_a_row_with_nothing_allowed_is_an_error_that_names_environment_and_head():
    distribution = ActionDistribution(MIXED)
    masks = {"slot": torch.ones(5, 3, 4, dtype=torch.bool)}
    masks["slot"][3, 1] = False
    choice = Choice(torch.tensor([[1, 0, 0]] * 5), torch.zeros(5, 2))
    with pytest.raises(ValueError, match=r"environment 3 allows nothing for head 'slot'"):
        raise_on_empty_rows(distribution, distribution.empty_rows(masks, choice))


def test_an_empty_mask_row_of_an_irrelevant_head_is_no_error():
    distribution = ActionDistribution(MIXED)
    masks = {"slot": torch.zeros(1, 3, 4, dtype=torch.bool)}
    choice = Choice(torch.tensor([[0, 0, 0]]), torch.zeros(1, 2))
    raise_on_empty_rows(distribution, distribution.empty_rows(masks, choice))


@pytest.mark.slow
def test_gradients_of_log_probability_and_entropy_pass_gradcheck():
    distribution = ActionDistribution(MIXED)
    parameters, masks, choice = draw(distribution, 6)
    parameters = parameters.double().requires_grad_()
    choice = Choice(choice.picked, choice.latent.double())
    assert torch.autograd.gradcheck(lambda p: tuple(distribution.evaluate(p, choice, masks)), (parameters,))


CHAIN = ActionSpec(
    heads=(
        Discrete("op", 3),
        Continuous("aim", 2),
        Discrete("slot", 4, parent="op", has_own_logits=True),
        Discrete("speed", 2),
        Discrete("part", 5, parent="slot", has_own_logits=True),
    )
)


def tables(distribution: ActionDistribution, parameters: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits of each discrete head, as the specification shapes them."""
    shapes = {head.name: distribution.spec.logits_shape(head) for head in distribution.spec.discrete}
    return {name: parameters[:, distribution.output_slices[name]].reshape(-1, *shape) for name, shape in shapes.items()}


def row_logits(distribution: ActionDistribution, parameters: torch.Tensor, picked: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the row of each head of CHAIN, picked by plain indexing."""
    op, slot, _, _ = picked.unbind(-1)
    rows = torch.arange(len(op))
    logits = tables(distribution, parameters)
    return {"op": logits["op"], "slot": logits["slot"][rows, op], "speed": logits["speed"], "part": logits["part"][rows, slot]}


def test_a_head_with_own_logits_takes_its_parents_size_times_its_own_numbers_and_noise_for_one_row():
    distribution = ActionDistribution(CHAIN)
    assert distribution.num_logits == 3 + 3 * 4 + 2 + 4 * 5
    assert distribution.num_outputs == distribution.num_logits + 2
    assert distribution.num_parameters == distribution.num_logits + 4
    assert distribution.noise((7,), generator()).gumbel.shape == (7, 3 + 4 + 2 + 5)


def test_log_probabilities_and_entropies_of_own_logits_equal_torchs_categorical_of_the_row_that_held():
    distribution = ActionDistribution(CHAIN)
    parameters = torch.randn(500, distribution.num_parameters, generator=generator())
    choice = distribution.choose(parameters, {}, distribution.noise((500,), generator(1)))
    evaluation = distribution.evaluate(parameters, choice, {})
    for column, (name, logits) in enumerate(row_logits(distribution, parameters, choice.picked).items()):
        reference, head = Categorical(logits=logits), distribution.head_names.index(name)
        assert torch.allclose(evaluation.log_prob[:, head], reference.log_prob(choice.picked[:, column]), atol=1e-5), name
        assert torch.allclose(evaluation.entropy[:, head] * math.log(logits.shape[1]), reference.entropy(), atol=1e-5), name


def test_the_likeliest_choice_takes_the_row_of_the_likeliest_parent():
    distribution = ActionDistribution(CHAIN)
    parameters = torch.randn(200, distribution.num_parameters, generator=generator())
    picked = distribution.choose(parameters, {}, None).picked
    for column, logits in enumerate(row_logits(distribution, parameters, picked).values()):
        assert torch.equal(picked[:, column], logits.argmax(-1))


def test_draws_of_own_logits_follow_the_joint_probabilities():
    distribution = ActionDistribution(ActionSpec((Discrete("a", 2), Discrete("b", 3, parent="a", has_own_logits=True))))
    parameters = torch.tensor([[0.5, -0.5, 0.0, 1.0, -1.0, 2.0, 0.0, -2.0]])
    picked = distribution.choose(parameters.expand(200_000, -1), {}, distribution.noise((200_000,), generator())).picked
    logits = tables(distribution, parameters)
    joint = logits["a"][0].softmax(0).unsqueeze(1) * logits["b"][0].softmax(1)
    counts = torch.bincount(picked[:, 0] * 3 + picked[:, 1], minlength=6).view(2, 3)
    assert torch.allclose(counts / 200_000, joint, atol=0.005)


def test_no_masked_choice_of_a_head_with_own_logits_is_ever_drawn():
    distribution = ActionDistribution(CHAIN)
    masks = {"slot": random_masks(50_000, 3)["slot"], "part": torch.rand(50_000, 4, 5, generator=generator(4)) < 0.3}
    masks["part"][:, :, 2] |= ~masks["part"].any(-1)
    parameters = torch.randn(50_000, distribution.num_parameters, generator=generator(5)) * 3
    op, slot, _, part = distribution.choose(parameters, masks, distribution.noise((50_000,), generator(6))).picked.unbind(-1)
    rows = torch.arange(50_000)
    assert masks["slot"][rows, op, slot].all()
    assert masks["part"][rows, slot, part].all()


@pytest.mark.slow
def test_gradients_of_own_logits_pass_gradcheck_and_reach_only_the_row_that_held():
    distribution = ActionDistribution(CHAIN)
    parameters = torch.randn(4, distribution.num_parameters, generator=generator(), dtype=torch.float64).requires_grad_()
    choice = distribution.choose(parameters.detach(), {}, distribution.noise((4,), generator(1)))
    choice = Choice(choice.picked, choice.latent.double())
    assert torch.autograd.gradcheck(lambda p: tuple(distribution.evaluate(p, choice, {})), (parameters,))
    distribution.evaluate(parameters, choice, {}).log_prob.sum().backward()
    gradient = tables(distribution, parameters.grad)["slot"]  # [4, 3, 4]
    held = torch.nn.functional.one_hot(choice.picked[:, 0], 3).bool()
    assert (gradient[~held] == 0).all()
    assert (gradient[held] != 0).all()


@pytest.mark.parametrize(
    ("heads", "relevance", "message"),
    [
        ((), (), "at least one head"),
        ((Discrete("a", 0),), (), "at least 1"),
        ((Discrete("a", 2), Discrete("a", 2)), (), "must differ"),
        ((Discrete("b", 2, parent="a"), Discrete("a", 2)), (), "listed before it"),
        ((Discrete("a", 2), Discrete("b", 2)), (Relevance("b", given="a", choices=(2,)),), r"0\.\.1"),
    ],
)
def test_an_inconsistent_action_specification_is_refused(heads, relevance, message):
    with pytest.raises(ValueError, match=message):
        ActionSpec(heads, relevance)


def test_the_nodes_of_the_entropy_are_computed_once_and_serve_gradients_after_inference(monkeypatch):
    calls = []
    original = np.polynomial.hermite_e.hermegauss
    monkeypatch.setattr(np.polynomial.hermite_e, "hermegauss", lambda count: calls.append(count) or original(count))
    mean, log_std = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True), torch.zeros(3)  # a type that no other test asks for
    with torch.inference_mode():
        entropy_of_squashed_gaussian(mean, log_std)
    entropy_of_squashed_gaussian(mean, log_std).sum().backward()
    assert len(calls) == 1
