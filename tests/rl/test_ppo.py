"""The learner for its users: training, evaluation, deployment, saving."""

import functools
import json
import time

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from esper.devices import Stopwatch
from esper.rl.collector import Staging
from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.distributions import Noise
from esper.rl.events import CompileFailed, EpisodesRestarted
from esper.rl.ppo import PPO
from esper.rng import Streams
from esper.vecenv import ActionSpec, Discrete, TensorSpec, make
from esper.vecenv.builtin import BuiltinEnv, Outcome
from esper.vecenv.gymnasium import from_gymnasium
from tests.conftest import Clock
from tests.rl.counting import Counting

SMALL = NetworkConfig(hidden_size=8, encoder_sizes=(6,))


def config(**changes) -> PPOConfig:
    return PPOConfig(**{"num_steps": 16, "num_minibatches": 2, "network": SMALL, **changes})


def trained(ppo: PPO, updates: int) -> PPO:
    for _ in ppo.train(total_steps=ppo.step + updates * ppo.steps_per_update):
        pass
    return ppo


def assert_same_policy(one: PPO, other: PPO) -> None:
    for (name, left), right in zip(one.policy.state_dict().items(), other.policy.state_dict().values(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("env_id", ["cue", "conditional", "cartpole-hidden", "pendulum-hidden"])
@pytest.mark.parametrize("core", ["lstm", *(pytest.param(core, marks=pytest.mark.slow) for core in ("gru", "none"))])
def test_resuming_equals_never_having_stopped_bit_for_bit(env_id, core, tmp_path):
    from esper.runs import CheckpointStore

    settings = config(num_epochs=2, network=NetworkConfig(core=core, hidden_size=8, encoder_sizes=(6,)))
    whole = trained(PPO(make(env_id, 4), settings), 2)
    first = trained(PPO(make(env_id, 4), settings), 1)
    store = CheckpointStore(tmp_path, kind="ppo")
    store.save(first.step, first.state_dict())
    trained(first, 1)  # what came after the checkpoint must leave no trace in it
    second = PPO(make(env_id, 4), settings)
    second.load_state_dict(store.load().state)
    trained(second, 1)
    assert_same_policy(whole, second)
    assert list(whole.collector.recent_returns) == list(second.collector.recent_returns)
    assert whole.collector.episodes == second.collector.episodes


@pytest.mark.slow
def test_an_environment_that_cannot_be_saved_begins_new_episodes_and_says_so():
    events = []
    first = trained(PPO(Counting(num_envs=4), config()), 2)
    second = PPO(Counting(num_envs=4), config(), on_event=events.append)
    second.load_state_dict(first.state_dict())
    assert [event for event in events if isinstance(event, EpisodesRestarted)] == [EpisodesRestarted(step=128)]
    assert second.collector.starts.all()
    trained(second, 1)


def test_loading_a_policy_of_another_shape_names_both_shapes_and_changes_nothing():
    other = PPO(Counting(num_envs=4), config(network=NetworkConfig(hidden_size=12, encoder_sizes=(6,)))).state_dict()
    ppo = PPO(Counting(num_envs=4), config())
    before = {name: value.clone() for name, value in ppo.policy.state_dict().items()}
    with pytest.raises(ValueError, match=r"core\.weight_hh.*\((12, 48|8, 32)\).*\((12, 48|8, 32)\)"):
        ppo.load_state_dict(other)
    assert all(torch.equal(before[name], value) for name, value in ppo.policy.state_dict().items())


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    one, other, third = (trained(PPO(make("cue", 4, delay=3), config(seed=seed)), 2) for seed in (0, 0, 1))
    assert_same_policy(one, other)
    with pytest.raises(AssertionError):
        assert_same_policy(one, third)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))]
)
def test_a_truncated_episode_is_bootstrapped_alike_on_both_devices(device, monkeypatch):
    """Cut after 7 steps: the buffer that is filled without synchronisation holds just what the exact list of the CPU does."""
    exact, buffered = (
        PPO(make("pendulum-hidden", 4, max_steps=7), config(normalize_values=False), device=each) for each in ("cpu", device)
    )
    assert exact.collector.finals.exact
    buffered.collector.finals.exact = buffered.collector.checks_at_once = False
    noise, generator = exact.policy.distribution.noise, Streams(exact.config.seed).torch("actions")
    monkeypatch.setattr(
        buffered.policy.distribution, "noise", lambda shape, _: Noise(*(part.to(device) for part in noise(shape, generator)))
    )
    one, other = exact.collect(), buffered.collect()
    assert one.truncated.nonzero()[:, 0].tolist() == [6] * 4 + [13] * 4
    for name in ("rewards", "truncated", "values", "next_values"):
        torch.testing.assert_close(getattr(other, name).cpu(), getattr(one, name), atol=1e-4, rtol=1e-4, msg=name)
    for step in (6, 13):
        assert (one.next_values[step] != 0).all()
        assert not torch.equal(one.next_values[step], one.values[step + 1])


@pytest.mark.slow
@pytest.mark.parametrize("is_exact", [True, False])
def test_a_rollout_after_one_that_broke_off_has_no_final_observation_of_it(is_exact):
    """The rollout that breaks off has seen truncated episodes; the environments are reset after it."""

    class Failing(Counting):
        calls, fails_at = 0, 0

        def step(self, actions):
            self.calls += 1
            if self.calls == self.fails_at:
                raise OSError("the simulator has gone")
            return super().step(actions)

    def collector(fails_at: int):
        env = Failing(3, length=9)
        env.fails_at = fails_at
        ppo = PPO(env, config())
        ppo.collector.finals.exact = is_exact
        ppo.collector.reset(0)
        return ppo.collector

    broken, whole = collector(13), collector(0)
    with pytest.raises(OSError, match="the simulator has gone"):
        broken.collect(torch.Generator().manual_seed(0))
    broken.env.length = whole.env.length = 100  # no episode ends in the next rollout
    broken.reset(0)
    found, expected = (one.collect(torch.Generator().manual_seed(1)).next_values for one in (broken, whole))
    assert torch.equal(found, expected)


def test_evaluation_changes_no_state_and_gives_every_environment_its_share():
    ppo = trained(PPO(make("cue", 4, delay=3), config()), 1)
    before = json.dumps(ppo.policy.normalizer.training_state()["obs"]["mean"].tolist())
    result = ppo.evaluate(make("cue", 4, delay=3), episodes=10)
    assert len(result.returns) == len(result.lengths) == 10
    assert set(result.lengths) == {4}
    assert json.dumps(ppo.policy.normalizer.training_state()["obs"]["mean"].tolist()) == before
    assert ppo.evaluate(make("cue", 4, delay=3), episodes=10).returns == result.returns


@pytest.mark.slow
def test_training_goes_on_after_evaluating_in_the_training_environments():
    ppo = trained(PPO(make("cue", 4, delay=3), config()), 1)
    ppo.evaluate(episodes=4)
    trained(ppo, 1)
    assert ppo.step == 2 * ppo.steps_per_update


@pytest.mark.slow
def test_acting_step_by_step_equals_the_rollout():
    ppo = trained(PPO(Counting(num_envs=4), config()), 2)
    rollout = ppo.collect()
    state = ppo.policy.initial_state(4)
    started = False
    for step in range(16):
        starts = rollout.starts[step]
        actions, state = ppo.policy.act(rollout.obs["obs"][step], state, starts=starts)
        started |= bool(starts.all())
        likeliest = rollout.parameters[step].argmax(-1)
        known = torch.ones(4, dtype=torch.bool) if started else rollout.starts[: step + 1].any(0)
        assert torch.equal(actions["action"][known], likeliest[known])


def test_acting_refuses_observations_of_another_shape_with_both_shapes():
    policy = PPO(Counting(num_envs=4), config()).policy
    with pytest.raises(ValueError, match=r"should have shape \(2, 2\); got \(2, 3\)"):
        policy.act(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"shape \(2, 16\); got \(3, 16\)"):
        policy.act(torch.zeros(2, 2), policy.initial_state(3))
    with pytest.raises(ValueError, match=r"should be of type float32; got torch.float64"):
        policy.act(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"observes \['obs'\]; got \['picture'\]"):
        policy.act({"picture": torch.zeros(2, 2)})


class Doubling(nn.Module):
    output_size = 2

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs * 2


def test_a_custom_encoder_replaces_the_built_in_one():
    ppo = trained(PPO(Counting(num_envs=4), config(), encoder=Doubling()), 1)
    assert isinstance(ppo.policy.encoder, Doubling)


class Normed(nn.Module):
    output_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.norm(obs)


def test_evaluation_leaves_the_encoders_own_statistics_alone():
    ppo = trained(PPO(Counting(num_envs=4), config(), encoder=Normed()), 1)
    before = ppo.policy.encoder.norm.running_mean.clone()
    ppo.evaluate(Counting(num_envs=4), episodes=8)
    assert torch.equal(before, ppo.policy.encoder.norm.running_mean)
    assert not ppo.policy.training, "it acts as it is deployed, but in an update"


class InPlace(Counting):
    """Writes to its own state, as an environment may."""

    def step(self, actions):
        self.count.add_(0.0)
        actions["action"].mul_(1)
        return super().step(actions)


def test_an_environment_may_write_to_its_state_and_to_what_it_is_given():
    ppo = PPO(InPlace(num_envs=4), config())
    ppo.evaluate(episodes=4)
    trained(ppo, 1)


def test_an_encoder_without_a_width_is_refused():
    with pytest.raises(ValueError, match="Sequential needs an attribute `output_size`"):
        PPO(Counting(num_envs=4), config(), encoder=nn.Sequential(nn.Linear(2, 2)))


class Forked(nn.Module):
    """Half of what it sees goes into the core, all of it around."""

    output_size, bypass_size = 1, 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.cat((obs[:, :1], obs * self.scale), dim=1)


CORES = [("lstm", "shared"), ("lstm", "own"), ("gru", "own"), ("none", "shared")]


@pytest.mark.parametrize(("core", "memory"), CORES)
def test_features_that_bypass_the_core_reach_actor_and_critic_unchanged(core, memory):
    network = NetworkConfig(core=core, critic_memory=memory, hidden_size=8)
    policy = PPO(Counting(num_envs=4), config(network=network, normalize_observations=False), encoder=Forked()).policy
    seen = {}
    for name, head in (("actor", policy.actor), ("critic", policy.critic)):
        head.register_forward_pre_hook(lambda module, inputs, name=name: seen.update({name: inputs[0]}))
    obs = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    features, _ = policy.step({"obs": obs}, policy.initial_state(4))
    policy.decide(features), policy.critic_output(features)
    width = 1 if core == "none" else 8
    for inputs in seen.values():
        assert inputs.shape == (4, width + 2)
        assert torch.equal(inputs[:, width:], obs)
    assert torch.equal(seen["actor"], seen["critic"]) == (memory == "shared")


@pytest.mark.parametrize(("core", "memory"), CORES)
def test_the_ratio_is_one_before_the_first_gradient_step_with_a_bypass_of_the_core(core, memory):
    network = NetworkConfig(core=core, critic_memory=memory, hidden_size=8)
    ppo = PPO(Counting(num_envs=4), config(network=network, learning_rate=1e-12, num_epochs=1), encoder=Forked())
    for _ in range(2):
        outcome = ppo.update(ppo.collect())
    assert outcome.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert float(ppo.policy.encoder.scale.grad.abs().sum()) > 0


@pytest.mark.slow
def test_a_custom_actor_and_critic_keep_their_weights_and_are_trained():
    actor, critic = nn.Linear(8 + 2, 2), nn.Sequential(nn.Linear(8 + 2, 3), nn.Tanh(), nn.Linear(3, 1))
    before = [weight.detach().clone() for module in (actor, critic) for weight in module.parameters()]
    ppo = PPO(Counting(num_envs=4), config(network=NetworkConfig(hidden_size=8)), encoder=Forked(), actor=actor, critic=critic)
    assert ppo.policy.actor is actor
    assert ppo.policy.critic is critic
    weights = [weight for module in (actor, critic) for weight in module.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, weights, strict=True))
    trained(ppo, 2)
    assert not any(torch.equal(old, new) for old, new in zip(before, weights, strict=True))


@pytest.mark.parametrize(
    ("network", "parts", "message"),
    [
        (SMALL, {"actor": nn.Linear(8, 3)}, "Linear must return 2 numbers.* it returns 3"),
        (SMALL, {"critic": nn.Linear(8, 1)}, "an nn.Sequential that ends in an nn.Linear with 1 output; got a Linear"),
        (SMALL, {"critic": nn.Sequential(nn.Linear(8, 2))}, "with 1 output; got a Sequential that ends in Linear"),
        (
            NetworkConfig(norm_after=True),
            {"encoder": Forked()},
            "Forked has a bypass_size, which norm_before and norm_after do not support",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(network, parts, message):
    with pytest.raises(ValueError, match=message):
        PPO(Counting(num_envs=4), config(network=network), **parts).collect()


class Hint(BuiltinEnv):
    """The mask of "said" allows one choice, drawn anew and not observed; right is to answer with the same. Every step is an episode."""

    def __init__(self, num_envs: int, *, has_own_logits: bool) -> None:
        super().__init__(num_envs)
        self.observation_spec = {"obs": TensorSpec((1,))}
        self.action_spec = ActionSpec((Discrete("said", 3), Discrete("answer", 3, parent="said", has_own_logits=has_own_logits)))

    def start(self):
        return {"said": torch.randint(3, (self.num_envs,), generator=self.generator)}

    def advance(self, state, actions):
        right = (actions["answer"] == actions["said"]).float()
        return self.start(), Outcome(right, torch.ones(self.num_envs, dtype=torch.bool), torch.zeros(self.num_envs, dtype=torch.bool))

    def observe(self, state):
        return {"obs": torch.ones(self.num_envs, 1)}, {"said": nn.functional.one_hot(state["said"], 3).bool()}


@pytest.mark.slow
def test_a_task_whose_second_choice_must_depend_on_the_first_is_solved_with_own_logits_alone():
    def success(has_own_logits: bool) -> float:
        network = NetworkConfig(core="none", encoder_sizes=(8,))
        settings = PPOConfig(num_steps=16, num_minibatches=1, learning_rate=3e-2, network=network)
        ppo = trained(PPO(Hint(32, has_own_logits=has_own_logits), settings), 10)
        return ppo.evaluate(episodes=320).mean_return

    assert success(True) >= 0.99
    assert success(False) <= 0.45


class Pictures(gymnasium.Env):
    """A Dict of an image of bytes, a vector and a single choice."""

    observation_space = gymnasium.spaces.Dict(
        {
            "picture": gymnasium.spaces.Box(0, 255, (12, 12, 3), np.uint8),
            "vector": gymnasium.spaces.Box(-1, 1, (4,), np.float64),
            "mode": gymnasium.spaces.Discrete(3),
        }
    )
    action_space = gymnasium.spaces.Dict({"turn": gymnasium.spaces.Box(-2, 2, (2,), np.float32), "press": gymnasium.spaces.Discrete(3)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 6
        return self._look(), {}

    def _look(self):
        return {
            "picture": self.np_random.integers(0, 255, (12, 12, 3), dtype=np.uint8),
            "vector": self.np_random.uniform(-1, 1, 4),
            "mode": int(self.np_random.integers(3)),
        }

    def step(self, action):
        self.left -= 1
        return self._look(), float(action["press"] == 1), False, self.left == 0, {}


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(gymnasium.vector.AutoresetMode)[:2])
def test_images_vectors_and_mixed_actions_train_in_both_autoreset_modes(mode):
    env = from_gymnasium(gymnasium.vector.SyncVectorEnv([Pictures] * 4, autoreset_mode=mode))
    ppo = PPO(env, config())
    updates = list(ppo.train(total_steps=3 * ppo.steps_per_update))
    assert updates[-1].episodes > 0
    assert updates[-1].mean_length == 6.0
    assert ppo.collector._rollout.valid.all() == (mode is gymnasium.vector.AutoresetMode.SAME_STEP)


def _no_compiler(graph, inputs):
    raise RuntimeError("no compiler here")


def _no_backward(graph, inputs):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=_no_compiler)(graph, inputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler has some of its own
@pytest.mark.parametrize(("backend", "fails"), [("aot_eager", False), (_no_compiler, True), (_no_backward, True)])
def test_a_compiled_update_equals_the_plain_one_and_a_failed_compile_falls_back(monkeypatch, backend, fails):
    torch.compiler.reset()
    plain = trained(PPO(Counting(num_envs=4), config()), 2)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    events = []
    compiled = trained(PPO(Counting(num_envs=4), config(compile=True), on_event=events.append), 2)
    assert [isinstance(event, CompileFailed) for event in events].count(True) == fails
    assert compiled.learner.is_compiled == (not fails)
    for (name, left), right in zip(plain.policy.state_dict().items(), compiled.policy.state_dict().values(), strict=True):
        assert torch.allclose(left, right, atol=1e-5), name


def test_staging_moves_tensors_of_all_kinds_unchanged_in_one_buffer():
    staging = Staging(torch.device("cpu"))
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "numbers": torch.randn(3, 2, generator=torch.Generator()),
        "none": torch.empty(3, 0),
    }
    for _ in range(2):
        moved = staging.move(tensors)
        assert all(torch.equal(moved[name], tensor) for name, tensor in tensors.items())
    tensors["numbers"] = torch.arange(5)
    assert torch.equal(staging.move(tensors)["numbers"], torch.arange(5))


@pytest.mark.slow
def test_a_cue_is_recalled_by_a_recurrent_policy_and_not_by_a_feed_forward_one():
    def success(core: str) -> float:
        network = NetworkConfig(core=core, hidden_size=32, encoder_sizes=(32,))
        settings = PPOConfig(num_steps=48, num_epochs=4, num_minibatches=4, learning_rate=5e-3, gamma=0.99, network=network)
        ppo = PPO(make("cue", 64, delay=10), settings)
        for _ in ppo.train(total_steps=25_000):
            pass
        return ppo.evaluate(make("cue", 32, delay=10), episodes=320).mean_return

    assert success("lstm") >= 0.95
    assert success("none") <= 0.40


@pytest.mark.slow
def test_a_task_whose_second_mask_depends_on_the_first_choice_is_solved():
    network = NetworkConfig(core="none", encoder_sizes=(64, 64))
    settings = PPOConfig(num_steps=16, num_epochs=4, num_minibatches=4, learning_rate=5e-3, gamma=0.5, network=network)
    ppo = PPO(make("conditional", 128), settings)
    for _ in ppo.train(total_steps=45_000):
        pass
    assert ppo.evaluate(make("conditional", 32), episodes=320).mean_return >= 9.5


# Time


@pytest.mark.slow
def test_the_wait_for_environments_is_reported_as_part_of_collecting(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    class SlowCounting(Counting):
        def step(self, actions):
            clock.sleep(0.005)
            return super().step(actions)

    for env, seconds in ((SlowCounting(), 0.006), (Counting(), 0.001)):  # the clock advances by a millisecond with each reading
        ppo = PPO(env, config())
        choose = ppo.policy.distribution.choose
        monkeypatch.setattr(ppo.policy.distribution, "choose", lambda *given, choose=choose: (clock.sleep(0.5), choose(*given))[1])
        (update,) = ppo.train(total_steps=16 * 3)
        assert update.env_seconds == pytest.approx(16 * seconds)
        assert update.collect_seconds > 16 * (0.5 + seconds)


class FakeEvents:
    """CUDA's events and stream, whose device is at `now` milliseconds when an event is recorded."""

    def __init__(self) -> None:
        self.now, self.waited_for = 0.0, []

    def make(self, enable_timing: bool):
        assert enable_timing
        events = self

        class Event:
            def record(self, stream: str) -> None:
                assert stream == "stream of cuda:0"
                self.at = events.now

            def synchronize(self) -> None:
                events.waited_for.append(self)

            def elapsed_time(self, later) -> float:
                assert later in events.waited_for or events.waited_for, "read before the device has come there"
                return later.at - self.at

        return Event()


def test_time_on_a_gpu_is_measured_by_events_of_its_stream(monkeypatch: pytest.MonkeyPatch):
    events = FakeEvents()
    monkeypatch.setattr(torch.cuda, "Event", events.make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    watch = Stopwatch(torch.device("cuda:0"))
    for now in (0.0, 250.0, 1000.0):
        events.now = now
        watch.mark()
    assert not events.waited_for
    assert watch.seconds() == [0.25, 0.75]
    assert len(events.waited_for) == 1


def test_time_on_the_cpu_is_wall_clock_time():
    watch = Stopwatch(torch.device("cpu"))
    watch.mark()
    time.sleep(0.01)
    watch.mark()
    (seconds,) = watch.seconds()
    assert 0.01 <= seconds < 5


def test_values_of_steps_and_next_steps_are_computed_in_inference_mode(monkeypatch: pytest.MonkeyPatch):
    ppo, modes = PPO(Counting(), config()), []
    compute = ppo.policy.value
    monkeypatch.setattr(ppo.policy, "value", lambda features: (modes.append(torch.is_inference_mode_enabled()), compute(features))[1])
    rollout = ppo.collect()
    assert modes
    assert all(modes)
    assert not any(part.is_inference() for part in (rollout.values, rollout.next_values, rollout.features))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler has some of its own
def test_episodes_of_changing_lengths_cause_no_recompilation(monkeypatch: pytest.MonkeyPatch):
    torch.compiler.reset()
    compiled: list[object] = []

    def counting(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting))
    env, counts = Counting(num_envs=4), []
    ppo = PPO(env, config(compile=True))
    for length in (5, 3, 7, 4, 6, 2):
        env.length = length
        trained(ppo, 1)
        counts.append(len(compiled))
    assert counts[0] > 0
    assert len(set(counts[2:])) == 1, counts  # the third rollout has shown that sizes change
    torch.compiler.reset()
