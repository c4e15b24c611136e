"""The learner: collecting, the loss, schedules, warnings, and recovery from values that are not finite."""

import dataclasses
import math
import statistics

import pytest
import torch

from esper.controller.config import ControllerConfig
from esper.league.config import ArenaTrainConfig
from esper.rl.batch import pack, place, prepare, split
from esper.rl.collector import Staging
from esper.rl.config import NetworkConfig, PPOConfig, ThresholdsConfig
from esper.rl.distributions import ActionEvaluation
from esper.rl.events import Skipped
from esper.rl.learner import learning_rate_at
from esper.rl.loss import Coefficients, Counts, Samples, normalize_advantages, ppo_loss
from esper.rl.ppo import PPO, TrainingStopped
from esper.rl.run_config import TrainConfig
from esper.runs.anomalies import Anomaly
from esper.vecenv import ActionSpec, Continuous, Discrete, Relevance
from tests.rl.counting import Counting, weights

SMALL = NetworkConfig(hidden_size=8, encoder_sizes=(6,))
MIXED = ActionSpec((Discrete("op", 3), Discrete("slot", 2), Continuous("aim", 2)), (Relevance("slot", given="op", choices=(1,)),))


def config(**changes) -> PPOConfig:
    return PPOConfig(**{"num_steps": 16, "num_epochs": 4, "num_minibatches": 3, "network": SMALL, **changes})


def test_a_time_limit_bootstraps_from_the_final_observation_with_the_state_after_the_action():
    ppo = PPO(Counting(length=5), config(normalize_observations=False, normalize_values=False))
    rollout = ppo.collect()
    policy = ppo.policy
    with torch.no_grad():
        for env in range(3):
            state = policy.initial_state(1)
            for step in range(16):
                if rollout.starts[step, env]:
                    state = policy.initial_state(1)
                features, state = policy.step({"obs": rollout.obs["obs"][step, env : env + 1]}, state)
                assert torch.allclose(policy.value(features), rollout.values[step, env], atol=1e-6)
                if rollout.truncated[step, env]:
                    final = torch.tensor([[env + 1.0, 5.0]])
                    expected = policy.value(policy.step({"obs": final}, state)[0])
                    assert torch.allclose(expected, rollout.next_values[step, env], atol=1e-6)
                elif step < 15:
                    assert rollout.next_values[step, env] == rollout.values[step + 1, env]
    assert int(rollout.truncated.sum()) == 9


@pytest.mark.parametrize(("truncates", "time_limit_is_end"), [(False, False), (True, True)])
def test_no_value_follows_a_terminated_episode(truncates, time_limit_is_end):
    ppo = PPO(Counting(length=5, truncates=truncates), config(time_limit_is_end=time_limit_is_end))
    rollout = ppo.collect()
    assert bool(rollout.ended.any())
    assert (rollout.next_values[rollout.ended] == 0).all()
    assert (rollout.next_values[~rollout.ended] != 0).all()


def test_the_state_is_cleared_at_every_start_and_carried_over_between_rollouts():
    ppo = PPO(Counting(length=5), config(bptt_length=4))
    first = ppo.collect().starts.clone()
    second = ppo.collect()
    starts = torch.cat((first, second.starts))
    count = torch.zeros(3) + torch.tensor([0.0, 1.0, 2.0])
    for step in range(32):
        assert starts[step].tolist() == ((count == 0) | (step == 0)).tolist()
        count = (count + 1) % 5
    zero = (second.states == 0).all(-1)
    assert torch.equal(zero, second.starts[::4])


@pytest.mark.slow
def test_the_ratio_is_one_before_the_first_gradient_step():
    for core, memory in (("lstm", "shared"), ("lstm", "own"), ("gru", "own"), ("none", "shared")):
        network = NetworkConfig(core=core, critic_memory=memory, hidden_size=8, encoder_sizes=(6,))
        ppo = PPO(Counting(length=5, spec=MIXED), config(network=network, learning_rate=1e-12, num_epochs=1))
        for _ in range(2):
            outcome = ppo.update(ppo.collect())
        assert outcome.ratio_max == pytest.approx(1.0, abs=1e-4)
        assert outcome.total_kl < 1e-6


def test_the_memory_of_a_separate_critic_does_not_change_the_actors():
    network = NetworkConfig(hidden_size=8, encoder_sizes=(), critic_memory="own")
    ppo = PPO(Counting(length=5), config(network=network))
    rollout = ppo.collect()
    obs = rollout.obs["obs"].flatten(0, 1)
    features = ppo.policy.core.sequence(obs, ppo.policy.initial_state(len(obs)), [len(obs)])
    ppo.policy.critic_output(features).sum().backward()
    assert (ppo.policy.core.actor.weight_ih.grad == 0).all()
    assert (ppo.policy.core.critic.weight_ih.grad != 0).any()


def test_an_irrelevant_head_gets_no_gradient():
    spec = ActionSpec((Discrete("op", 2), Discrete("slot", 3)), (Relevance("slot", given="op", choices=(1,)),))
    masks = {"op": torch.tensor([[True, False]]).expand(3, 2)}  # op is always 0, so slot never matters
    ppo = PPO(Counting(spec=spec, masks=masks), config(num_epochs=1))
    rollout = ppo.collect()
    outcome = ppo.update(rollout)
    assert outcome.mattered == [True, False]
    assert outcome.gradient_norms["head slot"] == 0.0
    assert outcome.kl[1] == 0.0
    assert outcome.entropy[1] == 0.0


def gradient_of(config: PPOConfig) -> torch.Tensor:
    ppo = PPO(Counting(num_envs=6, length=5, spec=MIXED), config)
    batch = prepare(ppo.collect(), ppo.policy, config, None)
    placed = place([split(pack(batch.starts, torch.arange(6).numpy(), length=16), config.micro_batches)], ppo.device)
    ppo.learner._backward(batch, placed[0], batch.counts(placed)[0], ppo.learner._coefficients(batch, 0.0))
    return ppo.learner.gradient.clone()


@pytest.mark.parametrize("micro_batches", [2, 5])
@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_micro_batches_give_the_gradients_of_the_whole(micro_batches, ratio):
    whole = gradient_of(config(ratio=ratio))
    pieces = gradient_of(config(ratio=ratio, micro_batches=micro_batches))
    assert whole.abs().max() > 0
    assert torch.allclose(whole, pieces, atol=1e-6)


class Watching(Counting):
    """The last two of six environments are real, but their actions have no effect."""

    acts = torch.tensor([True, True, True, True, False, False])

    def step(self, actions):
        return dataclasses.replace(super().step(actions), acts=self.acts)


def test_rollouts_keep_which_actions_had_an_effect():
    ppo = PPO(Watching(6, length=5, spec=MIXED), config())
    assert torch.equal(ppo.collect().acts, Watching.acts.expand(16, 6))
    ppo.collector.env.acts = None
    assert ppo.collect().acts.all()  # the memory of the rollout is used again


def gradients_of(ratio, *, acts=True, choices=None, rewards=None):
    """Return the gradients of actor, critic and all weights, after some changes of the last two environments in a rollout."""
    settings = config(ratio=ratio, normalize_values=False)
    ppo = PPO(Watching(6, length=5, spec=MIXED), settings)
    rollout = ppo.collect()
    if not acts:
        rollout.acts.fill_(True)
    if choices is not None:  # other choices of all heads, with the log-probabilities that they had
        rollout.choice.picked[:, 4:] = (rollout.choice.picked[:, 4:] + choices) % 2
        rollout.choice.latent[:, 4:] += 0.3 * choices
    if rewards is not None:
        rollout.rewards[:, 4:] += rewards
    batch = prepare(rollout, ppo.policy, settings, None)
    placed = place([split(pack(batch.starts, torch.arange(6).numpy(), length=16), settings.micro_batches)], ppo.device)
    terms = ppo.learner._backward(batch, placed[0], batch.counts(placed)[0], ppo.learner._coefficients(batch, 0.0))
    assert terms.value_loss > 0
    actor, critic = (
        torch.cat([weight.grad.flatten().clone() for weight in part.parameters()]) for part in (ppo.policy.actor, ppo.policy.critic)
    )
    return actor, critic, ppo.learner.gradient.clone()


@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_actions_without_an_effect_have_no_part_in_the_gradient(ratio):
    """Their choices do not matter, bit for bit. Without the flag they do."""
    for flagged in (True, False):
        *_, before = gradients_of(ratio, acts=flagged)
        *_, after = gradients_of(ratio, acts=flagged, choices=1)
        assert before.abs().max() > 0
        assert torch.equal(before, after) == flagged


@pytest.mark.parametrize("ratio", ["per_head", "joint"])
def test_rewards_of_steps_without_an_effect_teach_the_critic_alone(ratio):
    for flagged in (True, False):
        actor, critic, _ = gradients_of(ratio, acts=flagged)
        other_actor, other_critic, _ = gradients_of(ratio, acts=flagged, rewards=3.0)
        assert actor.abs().max() > 0
        assert torch.equal(actor, other_actor) == flagged
        assert not torch.allclose(critic, other_critic)


def test_heads_matter_only_where_actions_have_an_effect():
    ppo = PPO(Watching(6, length=5, spec=MIXED), config(num_epochs=1))
    ppo.collector.env.acts = torch.zeros(6, dtype=torch.bool)
    before = [weight.detach().clone() for weight in ppo.policy.actor.parameters()]
    outcome = ppo.update(ppo.collect())
    assert outcome.mattered == [False, False, False]
    assert (outcome.policy_loss, outcome.total_kl) == (0.0, 0.0)
    assert outcome.value_loss > 0
    assert all(torch.equal(weight, old) for weight, old in zip(ppo.policy.actor.parameters(), before, strict=True))


@pytest.mark.slow
def test_a_joint_ratio_and_a_ratio_per_head_are_the_same_for_one_head():
    one = PPO(Counting(), config(ratio="joint"))
    other = PPO(Counting(), config(ratio="per_head"))
    for ppo in (one, other):
        for _ in range(2):
            ppo.update(ppo.collect())
    assert torch.allclose(weights(one), weights(other), atol=1e-6)


def samples(rows: int = 4, heads: int = 2) -> Samples:
    return Samples(
        advantages=torch.ones(rows, heads), old_log_prob=torch.zeros(rows, heads), weight=torch.ones(rows, heads),
        valid=torch.ones(rows), target=torch.zeros(rows), old_value=torch.zeros(rows),
    )  # fmt: skip


COEFFICIENTS = Coefficients(clip=0.2, value=0.5, value_clip=None, entropy=torch.zeros(2), joint_ratio=False)


def test_a_ratio_beyond_the_clip_has_no_gradient_where_the_advantage_is_positive():
    log_prob = torch.tensor([[0.5, 0.0]] * 4, requires_grad=True)
    terms = ppo_loss(
        ActionEvaluation(log_prob, torch.zeros(4, 2)),
        torch.zeros(4),
        samples(),
        Counts(torch.tensor(4.0), torch.tensor([4.0, 4.0])),
        COEFFICIENTS,
    )
    terms.loss.backward()
    assert log_prob.grad[:, 0].tolist() == [0.0] * 4
    assert log_prob.grad[:, 1].tolist() == [-0.25] * 4
    assert terms.clip_fraction.item() == 0.5


def test_invalid_steps_do_not_count():
    real = samples()
    ghost = torch.tensor([1.0, 1.0, 0.0, 0.0])
    masked = real._replace(
        advantages=real.advantages * ghost[:, None],
        weight=real.weight * ghost[:, None],
        valid=ghost,
        target=torch.tensor([1.0, 1.0, 99.0, 99.0]),
    )
    new = ActionEvaluation(torch.full((4, 2), 0.1), torch.full((4, 2), 0.7))
    all_terms = ppo_loss(new, torch.zeros(4), masked, Counts(torch.tensor(2.0), torch.tensor([2.0, 2.0])), COEFFICIENTS)
    half = Samples(*(part[:2] for part in masked))
    half_terms = ppo_loss(
        ActionEvaluation(*(part[:2] for part in new)),
        torch.zeros(2),
        half,
        Counts(torch.tensor(2.0), torch.tensor([2.0, 2.0])),
        COEFFICIENTS,
    )
    for one, other in zip(all_terms, half_terms, strict=True):
        assert torch.allclose(one, other)


def random_samples(rows: int = 6) -> tuple[Samples, Counts]:
    """Float64, with a step that was not real and one where a head did not matter."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    valid = torch.ones(rows, dtype=torch.float64)
    valid[1] = 0
    weight = valid.unsqueeze(1).repeat(1, 2)
    weight[3, 0] = 0
    given = Samples(draw(rows, 2) * weight, draw(rows, 2), weight, valid, draw(rows), draw(rows))
    return given, Counts(valid.sum(), weight.sum(0))


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("joint_ratio", [False, True])
def test_the_loss_passes_gradcheck_in_float64(joint_ratio, value_clip):
    given, counts = random_samples()
    coefficients = Coefficients(clip=0.2, value=0.5, value_clip=value_clip, entropy=torch.tensor([0.1, 0.3]), joint_ratio=joint_ratio)
    generator = torch.Generator().manual_seed(4)
    # Around the old log-probabilities, so that some ratios lie within the clip and others beyond it.
    log_prob = given.old_log_prob + 0.3 * torch.randn(6, 2, generator=generator, dtype=torch.float64)
    entropy = torch.rand(6, 2, generator=generator, dtype=torch.float64)
    predicted = torch.randn(6, generator=generator, dtype=torch.float64)
    inputs = [tensor.detach().requires_grad_() for tensor in (log_prob, entropy, predicted)]
    assert torch.autograd.gradcheck(
        lambda *new: ppo_loss(ActionEvaluation(new[0], new[1]), new[2], given, counts, coefficients).loss, inputs
    )


def test_the_loss_is_the_clipped_surrogate_with_the_value_loss_less_the_weighted_entropies():
    given, counts = random_samples()
    generator = torch.Generator().manual_seed(5)
    log_prob = given.old_log_prob + 0.3 * torch.randn(6, 2, generator=generator, dtype=torch.float64)
    entropy, predicted = (torch.rand(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 2), (6,)))
    coefficients = Coefficients(clip=0.2, value=0.5, value_clip=None, entropy=torch.tensor([0.1, 0.3]), joint_ratio=False)
    terms = ppo_loss(ActionEvaluation(log_prob, entropy), predicted, given, counts, coefficients)
    steps = [step for step in range(6) if given.valid[step]]
    surrogate, value, entropies = 0.0, 0.0, [0.0, 0.0]
    for step in steps:
        value += 0.5 * (predicted[step] - given.target[step]).item() ** 2 / len(steps)
        for head in range(2):
            if not given.weight[step, head]:
                continue
            ratio = math.exp((log_prob - given.old_log_prob)[step, head].item())
            advantage = given.advantages[step, head].item()
            surrogate += min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) / len(steps)
            entropies[head] += entropy[step, head].item() / int(given.weight[:, head].sum())
    assert terms.policy_loss.item() == pytest.approx(-surrogate)
    assert terms.value_loss.item() == pytest.approx(value)
    assert terms.entropy.tolist() == pytest.approx(entropies)
    bonus = sum((weight * entropy[given.weight[:, head] > 0, head].sum().item() for head, weight in enumerate((0.1, 0.3))), 0.0) / len(
        steps
    )
    assert terms.loss.item() == pytest.approx(-surrogate + 0.5 * value - bonus, rel=1e-6)


def test_the_weight_of_an_entropy_is_the_schedule_and_the_push_of_the_floor_times_the_heads_factor():
    settings = config(
        entropy_coef=0.04, entropy_coef_end=0.0, entropy_weights={"op": 2.0, "slot": 0.0}, entropy_floor=1.0, entropy_floor_coef=0.5,
        entropy_floor_until=0.5,
    )  # fmt: skip
    ppo = PPO(Counting(spec=MIXED), settings)
    batch = prepare(ppo.collect(), ppo.policy, settings, None)
    op, _, aim = batch.entropy.tolist()
    at_start, half_way, late = (ppo.learner._coefficients(batch, progress).entropy.tolist() for progress in (0.0, 0.25, 0.75))
    assert at_start == pytest.approx([2 * (0.04 + 0.5 * max(1 - op, 0)), 0.0, 0.04 + 0.5 * max(1 - aim, 0)], rel=1e-5)
    assert half_way == pytest.approx([2 * (0.03 + 0.5 * max(0.5 - op, 0)), 0.0, 0.03 + 0.5 * max(0.5 - aim, 0)], rel=1e-5)
    assert late == pytest.approx([2 * 0.01, 0.0, 0.01], rel=1e-5)


# Collecting


@pytest.mark.slow
def test_rollouts_reuse_the_same_memory():
    ppo = PPO(Counting(spec=MIXED), config())
    places = []
    for _ in range(2):
        rollout = ppo.collect()
        tensors = [
            *rollout.obs.values(),
            rollout.features,
            rollout.parameters,
            *rollout.choice,
            rollout.rewards,
            rollout.values,
            rollout.starts,
        ]
        places.append([tensor.data_ptr() for tensor in tensors])
        ppo.update(rollout)
    assert places[0] == places[1]


def test_an_update_learns_from_at_least_2048_steps_by_default():
    train, arena, controller = TrainConfig(env="cue"), ArenaTrainConfig(), ControllerConfig()
    assert train.num_envs * train.ppo.num_steps >= 2048
    assert arena.arena.battles * arena.arena.team_size * arena.ppo.num_steps >= 2048  # of one side alone
    assert controller.hosts * 15 >= 2048  # decisions of a life in the mean


def test_environments_on_another_device_cost_one_transfer_each_way_in_a_step(monkeypatch):
    ppo = PPO(Counting(spec=MIXED, masks={"op": torch.ones(3, 3, dtype=torch.bool)}), config())
    plain = PPO(Counting(spec=MIXED, masks={"op": torch.ones(3, 3, dtype=torch.bool)}), config())
    collector = ppo.collector
    collector._to_learner, collector._to_env = Staging(torch.device("cpu")), Staging(torch.device("cpu"))  # as if it were elsewhere
    moves = []
    move = Staging.move
    monkeypatch.setattr(Staging, "move", lambda self, tensors: (moves.append(self), move(self, tensors))[1])
    rollout, expected = ppo.collect(), plain.collect()
    assert moves.count(collector._to_learner) == 1 + 16  # one for the reset
    assert moves.count(collector._to_env) == 16
    assert torch.equal(rollout.obs["obs"], expected.obs["obs"])
    assert torch.equal(rollout.choice.picked, expected.choice.picked)


def test_value_clipping_takes_the_larger_error():
    given = samples()._replace(old_value=torch.full((4,), 2.0))
    clipped = Coefficients(clip=0.2, value=0.5, value_clip=0.5, entropy=torch.zeros(2), joint_ratio=False)
    counts = Counts(torch.tensor(4.0), torch.tensor([4.0, 4.0]))
    new = ActionEvaluation(torch.zeros(4, 2), torch.zeros(4, 2))
    # The prediction moved from 2 to the target 0, but only half a unit of that counts: the error is that of 1.5.
    assert ppo_loss(new, torch.zeros(4), given, counts, clipped).value_loss.item() == pytest.approx(0.5 * 1.5**2)


def test_advantages_are_centred_where_a_head_mattered_and_scaled_alike():
    advantages = torch.tensor([1.0, 3.0, 10.0, 50.0])
    valid = torch.tensor([1.0, 1.0, 1.0, 0.0])
    weight = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    normalized = normalize_advantages(advantages, weight, valid)
    spread = advantages[:3].std(correction=0)
    assert torch.allclose(normalized[:3, 0], (advantages[:3] - 14 / 3) / spread)
    assert torch.allclose(normalized[:, 1], torch.tensor([-1.0, 1.0, 0.0, 0.0]) / spread)


@pytest.mark.parametrize("rows", [0, 1])
def test_normalised_advantages_of_zero_or_one_step_are_zero(rows):
    normalized = normalize_advantages(torch.ones(rows), torch.ones(rows, 1), torch.ones(rows))
    assert normalized.shape == (rows, 1)
    assert (normalized == 0).all()


def test_a_large_kl_stops_the_update():
    ppo = PPO(Counting(), config(learning_rate=0.1, target_kl=1e-4, num_epochs=10))
    ppo.update(ppo.collect())
    before = ppo.learner.optimizer.state[ppo.learner.weights[0]]["step"].item()
    passes, backward = 0, ppo.learner._backward

    def counted(*given):
        nonlocal passes
        passes += 1
        return backward(*given)

    ppo.learner._backward = counted
    outcome = ppo.update(ppo.collect())
    taken = ppo.learner.optimizer.state[ppo.learner.weights[0]]["step"].item() - before
    assert 0 < outcome.steps_taken < 30
    assert passes == outcome.steps_taken + 1
    assert taken == outcome.steps_taken


def broken_advantages(rewards, *rest, **settings):
    return torch.full_like(rewards, math.nan)


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped_counted_and_reported_with_its_parts(monkeypatch):
    events = []
    ppo = PPO(Counting(), config(), on_event=events.append)
    updates = ppo.train(total_steps=10_000)
    next(updates)
    before = {name: value.clone() for name, value in ppo.policy.state_dict().items() if not name.startswith("normalizer")}
    monkeypatch.setattr("esper.rl.batch.gae", broken_advantages)
    update = next(updates)
    assert all(torch.equal(value, ppo.policy.state_dict()[name]) for name, value in before.items())
    assert update.skipped == 12
    assert update.gradient_steps == 0
    report = next(event for event in events if isinstance(event, Skipped))
    assert report.count == 12
    assert math.isnan(report.value_loss)
    with pytest.raises(TrainingStopped, match="12 gradient steps in a row"):
        next(updates)


@pytest.mark.slow
def test_one_bad_rollout_does_not_stop_training(monkeypatch):
    ppo = PPO(Counting(), config(max_skips=13))
    updates = ppo.train(total_steps=10_000)
    with monkeypatch.context() as patch:
        patch.setattr("esper.rl.batch.gae", broken_advantages)
        assert next(updates).skipped == 12
    assert next(updates).gradient_steps == 12
    assert torch.isfinite(weights(ppo)).all()


@pytest.mark.slow
def test_an_environment_whose_rewards_are_never_finite_leaves_the_others_learning():
    env = Counting()
    ppo = PPO(env, config(max_skips=13))
    updates = ppo.train(total_steps=10_000)
    next(updates)
    env.reward_of = lambda actions, count: torch.where(torch.arange(3) == 1, math.nan, count)
    assert next(updates).gradient_steps == 12
    env.reward_of = lambda actions, count: torch.full_like(count, math.nan)
    assert next(updates).gradient_steps == 12
    env.reward_of = lambda actions, count: count
    assert next(updates).gradient_steps == 12
    assert all(torch.isfinite(value).all() for value in ppo.policy.state_dict().values())
    assert torch.isfinite(ppo.learner.reward_normalizer.moments.std)


def test_an_environment_may_write_over_the_observation_it_gave():
    class Reusing(Counting):
        def _obs(self):
            fresh = super()._obs()["obs"]
            self.buffer = getattr(self, "buffer", fresh.clone())
            return {"obs": self.buffer.copy_(fresh)}

    network = NetworkConfig(core="none", encoder_sizes=())  # what the heads see is the observation itself
    rollout = PPO(Reusing(), config(network=network, normalize_observations=False)).collect()
    assert torch.equal(rollout.features, rollout.obs["obs"])
    assert rollout.features[:, 0, 1].unique().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_an_environment_that_answers_in_the_wrong_shape_is_refused_with_both_shapes():
    env = Counting()
    env.reward_of = lambda actions, count: count[:1]
    with pytest.raises(ValueError, match=r"\(1,\).*\(3,\)|\(3,\).*\(1,\)"):
        PPO(env, config()).collect()


def test_an_overflowing_probability_ratio_is_clipped():
    log_prob = torch.full((4, 2), 200.0, requires_grad=True)
    counts = Counts(torch.tensor(4.0), torch.tensor([4.0, 4.0]))
    terms = ppo_loss(ActionEvaluation(log_prob, torch.zeros(4, 2)), torch.zeros(4), samples(), counts, COEFFICIENTS)
    terms.loss.backward()
    assert torch.isfinite(terms.loss)
    assert (log_prob.grad == 0).all()


def test_an_observation_that_is_not_finite_is_an_error_before_anything_changes():
    env = Counting()
    ppo = PPO(env, config())
    ppo.update(ppo.collect())
    env.count[1] = math.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        ppo.collect()


def test_a_mask_that_allows_nothing_is_an_error_naming_environment_and_head():
    masks = {"action": torch.tensor([[True, True], [True, True], [False, False]])}
    with pytest.raises(ValueError, match="environment 2 allows nothing for head 'action'"):
        PPO(Counting(masks=masks), config()).collect()


# Diagnostics: each is provoked in a training, warned of, and not warned of where nothing is wrong.


def warned_by(ppo: PPO, updates: int = 1) -> dict[str, list[Anomaly]]:
    """The anomalies of a training by kind."""
    events: list[Anomaly] = []
    ppo.on_event = lambda event: events.append(event) if isinstance(event, Anomaly) else None
    for _ in ppo.train(total_steps=ppo.step + updates * ppo.steps_per_update):
        pass
    return {name: [event for event in events if event.what == name] for name in {event.what for event in events}}


def last_layer(module: torch.nn.Module) -> torch.nn.Linear:
    return [part for part in module.modules() if isinstance(part, torch.nn.Linear)][-1]


def test_a_healthy_update_warns_of_nothing():
    assert warned_by(PPO(Counting(), config())) == {}


def test_an_exploding_ratio_is_warned_of():
    env = Counting(spec=ActionSpec((Discrete("action", 40),)))  # where all are equally likely, a ratio can reach 40
    (warned,) = warned_by(PPO(env, config(learning_rate=3.0, num_epochs=4)))["ratio_explosion"]
    assert warned.value > warned.limit == ThresholdsConfig().ratio_explosion


def test_a_collapsed_entropy_is_warned_of_with_its_head():
    ppo = PPO(Counting(), config())
    with torch.no_grad():
        last_layer(ppo.policy.actor).bias.copy_(torch.tensor([20.0, -20.0]))
    (warned,) = warned_by(ppo)["entropy_collapse"]
    assert (warned.subject, warned.limit) == ("action", ThresholdsConfig().entropy_collapse)
    assert 0 <= warned.value < warned.limit


def test_values_that_are_all_the_same_are_a_collapse():
    ppo = PPO(Counting(), config())
    with torch.no_grad():
        last_layer(ppo.policy.critic).weight.zero_()
    last_layer(ppo.policy.critic).weight.register_hook(torch.zeros_like)
    (warned,) = warned_by(ppo, updates=3)["value_collapse"]
    assert warned.value == pytest.approx(0.0, abs=1e-6)


def test_values_that_are_worse_than_a_constant_explain_less_than_nothing():
    # Returns that end for real and are not mixed with values say nothing about a wild critic.
    ppo = PPO(Counting(truncates=False), config(gae_lambda=1.0, normalize_values=False))
    with torch.no_grad():
        last_layer(ppo.policy.critic).weight.mul_(100.0)
    (warned,) = warned_by(ppo, updates=5)["low_explained_variance"]
    assert warned.value < warned.limit == ThresholdsConfig().low_explained_variance


def test_exploding_gradients_are_warned_of_with_their_part_and_health():
    ppo = PPO(Counting(truncates=False), config(gae_lambda=1.0, normalize_values=False))
    with torch.no_grad():
        last_layer(ppo.policy.critic).weight.mul_(1e6)
    warned = {event.subject: event for event in warned_by(ppo)["gradient_health"]}
    assert "critic.0" in warned
    assert all(0 <= event.value < event.limit for event in warned.values())


def test_vanished_gradients_are_warned_of_where_the_threshold_asks_for_it():
    env = Counting()
    env.reward_of = lambda actions, count: torch.zeros_like(count)  # nothing to learn for the actor
    settings = {"entropy_coef": 0.0, "num_epochs": 1, "num_minibatches": 1}
    assert "gradient_health" not in warned_by(PPO(env, config(**settings)))
    ppo = PPO(Counting(), config(**settings, thresholds=ThresholdsConfig(gradient_health=0.6)))
    ppo.env.reward_of = env.reward_of
    with torch.no_grad():
        last_layer(ppo.policy.critic).weight.zero_()
        last_layer(ppo.policy.critic).bias.zero_()
    warned = {event.subject: event.value for event in warned_by(ppo)["gradient_health"]}
    assert warned["actor.0"] == 0.5


@pytest.mark.slow
def test_an_entropy_floor_keeps_the_entropy_of_a_head_up():
    def entropies(updates: int = 12, **changes) -> list[float]:
        env = Counting()
        env.reward_of = lambda actions, count: actions["action"].float()
        network = NetworkConfig(hidden_size=8, encoder_sizes=(6,), head_sizes=())  # with more layers it swings too widely
        ppo = PPO(env, config(learning_rate=0.02, entropy_coef=0.0, network=network, **changes))
        return [update.entropy["action"] for update in ppo.train(total_steps=16 * 3 * updates)]

    floor = {"entropy_floor": 0.8, "entropy_floor_coef": 20.0}
    free, floored = entropies(), entropies(**floor, entropy_floor_until=1.0)
    halfway = slice(4, 8)
    assert statistics.mean(floored[halfway]) > statistics.mean(free[halfway]) + 0.1
    assert floored[-1] < statistics.mean(floored[halfway]) - 0.1
    assert free[4] < 0.8, "a floor would have been felt by then"
    assert entropies(updates=6, **floor, entropy_floor_until=0.0) == free[:6]


@pytest.mark.slow
def test_the_learning_rate_falls_to_zero_where_it_is_asked_to():
    rates = [update.learning_rate for update in PPO(Counting(), config(learning_rate_schedule="linear")).train(total_steps=16 * 3 * 4)]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


TIMED = {"learning_rate": 1.0, "learning_rate_end": 0.2, "learning_rate_schedule": "linear"}


def rates(ppo, clock, *, seconds, total_steps=10**9, pause=0.0):
    """Train while the environment takes 10 s per rollout, and the caller `pause` after each update. Return the learning rates."""
    step = ppo.env.step
    ppo.env.step = lambda actions: (clock.sleep(10 / 16), step(actions))[1]
    found = []
    for update in ppo.train(total_steps, seconds=seconds):
        found.append(update.learning_rate)
        clock.sleep(pause)
    return found


def test_schedules_follow_the_time_and_training_ends_with_it(clock):
    ppo = PPO(Counting(), config(**TIMED))
    assert rates(ppo, clock, seconds=40.0) == pytest.approx([1.0, 0.8, 0.6, 0.4], abs=0.01)
    assert ppo.seconds == pytest.approx(40.0, rel=0.02)
    assert ppo.progress(10**9, 40.0) == 1.0
    assert learning_rate_at(ppo.config, ppo.progress(10**9, 40.0)) == TIMED["learning_rate_end"]
    assert list(ppo.train(10**9, seconds=40.0)) == []  # nothing is left of it


def test_time_that_the_caller_takes_between_updates_counts(clock):
    assert rates(PPO(Counting(), config(**TIMED)), clock, seconds=40.0, pause=10.0) == pytest.approx([1.0, 0.8, 0.4], abs=0.01)


def test_schedules_follow_steps_or_time_whichever_is_ahead(clock):
    ppo = PPO(Counting(), config(**TIMED))
    assert rates(ppo, clock, seconds=1000.0, total_steps=4 * 48) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert [ppo.progress(8 * 48, seconds) for seconds in (None, 1000.0)] == [0.5, 0.5]
    ppo.seconds = 900.0
    assert [ppo.progress(8 * 48, seconds) for seconds in (None, 1000.0, 100.0)] == [0.5, 0.9, 1.0]


def test_a_resumed_training_has_the_rest_of_its_time(clock):
    first = PPO(Counting(), config(**TIMED))
    assert rates(first, clock, seconds=20.0) == pytest.approx([1.0, 0.6], abs=0.01)
    second = PPO(Counting(), config(**TIMED))
    second.load_state_dict(first.state_dict())
    assert second.seconds == first.seconds
    assert rates(second, clock, seconds=40.0) == pytest.approx([0.6, 0.4], abs=0.01)


def test_a_learning_rate_rises_and_falls_as_its_schedule_says():
    options = {"learning_rate": 1.0, "learning_rate_end": 0.2}
    cosine = PPOConfig(learning_rate_schedule="cosine", **options)
    assert [round(learning_rate_at(cosine, done), 6) for done in (0.0, 0.5, 1.0)] == [1.0, 0.6, 0.2]
    linear = PPOConfig(learning_rate_schedule="linear", learning_rate_warmup=0.2, **options)
    assert [round(learning_rate_at(linear, done), 6) for done in (0.0, 0.1, 0.2, 0.6, 1.0)] == [0.0, 0.5, 1.0, 0.6, 0.2]
    assert learning_rate_at(PPOConfig(**options), 0.9) == 1.0


@pytest.mark.slow
def test_a_custom_schedule_gets_the_remaining_fraction_of_training():
    ppo = PPO(Counting(), config(), learning_rate=lambda left: 0.25 * left**2)
    assert [update.learning_rate for update in ppo.train(total_steps=16 * 3 * 4)] == [0.25, 0.25 * 0.75**2, 0.25 * 0.5**2, 0.25 * 0.25**2]
    with pytest.raises(ValueError, match=r"the schedule gave -1\.0 at 0\.0% of training"):
        next(PPO(Counting(), config(), learning_rate=lambda left: -left).train(48))


@pytest.mark.slow
def test_bfloat16_learns_nearly_the_same():
    full, half = PPO(Counting(), config()), PPO(Counting(), config(precision="bfloat16"))
    for ppo in (full, half):
        before = weights(ppo)
        ppo.update(ppo.collect())
        ppo.moved = weights(ppo) - before
    assert torch.nn.functional.cosine_similarity(full.moved, half.moved, dim=0) > 0.9


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_rollout_of_few_sequences_gives_one_minibatch_per_sequence(num_envs):
    ppo = PPO(Counting(num_envs=num_envs), config(num_epochs=2, num_minibatches=4))
    assert ppo.update(ppo.collect()).steps_taken == 2 * num_envs


def test_an_unknown_head_in_the_entropy_weights_is_refused():
    with pytest.raises(ValueError, match=r"\['jump'\]; the heads are \['action'\]"):
        PPO(Counting(), config(entropy_weights={"jump": 2.0}))


def test_training_never_touches_the_global_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    ppo = PPO(Counting(spec=MIXED), config())
    ppo.update(ppo.collect())
    assert torch.equal(before, torch.get_rng_state())
