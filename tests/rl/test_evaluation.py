"""Evaluation: its episodes, its limits, and the state it leaves unchanged."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path

import msgspec
import pytest
import torch

from esper.cli.main import main
from esper.rl import TrainConfig, run_setup, train_run
from esper.rl.checkpoints import open_store
from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.evaluate import PolicyEvaluation
from esper.rl.events import Update
from esper.rl.ppo import PPO
from esper.runs import open_run, read
from esper.runs.signals import StoppedAtOnce
from esper.vecenv import make
from tests.commands import events_of, last_line
from tests.conftest import Clock
from tests.faults import _without_syncs  # noqa: F401 — a fixture
from tests.rl.counting import Counting

SMALL = PPOConfig(num_steps=8, num_minibatches=1, num_epochs=1, network=NetworkConfig(hidden_size=4, encoder_sizes=(4,)))
CONFIG = TrainConfig(
    env="conditional",
    num_envs=4,
    total_steps=3 * 32,
    device="cpu",
    threads=1,
    checkpoint_every=1,
    eval_episodes=4,
    eval_share=1.0,
    ppo=SMALL,
)
pytestmark = pytest.mark.usefixtures("_without_syncs")


class Uneven(Counting):
    """Environment i of N plays episodes of N - i steps, each step worth 1: the last one finishes first."""

    def reset(self, seed=None):
        timestep = super().reset(seed)
        self.count = torch.zeros(self.num_envs)
        self.length = torch.arange(float(self.num_envs), 0.0, -1.0)
        self.reward_of = lambda actions, count: torch.ones_like(count)
        return timestep


@pytest.mark.parametrize(("episodes", "shares"), [(3, [1, 1, 1, 0]), (4, [1, 1, 1, 1]), (6, [2, 2, 1, 1]), (8, [2, 2, 2, 2])])
def test_every_environment_gives_its_share_of_episodes_however_long_they_are(episodes, shares):
    result = PPO(Uneven(num_envs=4), SMALL).evaluate(episodes=episodes)
    assert [result.lengths.count(length) for length in (4, 3, 2, 1)] == shares
    assert result.returns == [float(length) for length in result.lengths]


def test_the_policy_acts_in_inference_mode_and_the_environment_steps_outside_of_it():
    modes, env = [], Uneven(num_envs=4)
    ppo, step = PPO(env, SMALL), env.step
    env.step = lambda actions: (modes.append(("step", torch.is_inference_mode_enabled())), step(actions))[1]
    act = ppo.policy.act
    ppo.policy.act = lambda *given, **named: (modes.append(("act", torch.is_inference_mode_enabled())), act(*given, **named))[1]
    ppo.evaluate(episodes=4)
    assert set(modes) == {("act", True), ("step", False)}


def test_an_endless_episode_is_cut_at_the_step_limit_and_counted_with_a_warning():
    class Endless(Uneven):
        def reset(self, seed=None):
            timestep = super().reset(seed)
            self.length[0] = 10**9
            return timestep

    ppo = PPO(Endless(num_envs=3), SMALL)
    with pytest.warns(UserWarning, match=r"2 of 6 episodes had not ended after 50 steps.*max_steps"):
        result = ppo.evaluate(episodes=6, max_steps=50)
    assert sorted(result.lengths) == [1, 1, 2, 2, 50, 50]
    assert result.cut == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PPO(Uneven(num_envs=3), SMALL).evaluate(episodes=3, max_steps=3).cut == 0


def test_an_evaluation_closes_the_environments_that_it_makes_and_no_others():
    closed: list[Counting] = []

    class Closing(Counting):
        def close(self) -> None:
            closed.append(self)

    def make_env(num_envs: int) -> Counting:
        return Closing(num_envs)

    ppo = PPO(Closing(2), SMALL)
    given = Closing(2)
    ppo.evaluate(given, episodes=2)
    ppo.evaluate(episodes=2)
    assert not closed
    ppo.evaluate(make_env, episodes=2)
    assert len(closed) == 1
    with pytest.raises(ValueError, match="episodes must be at least 1"):
        ppo.evaluate(make_env, episodes=0)
    assert len(closed) == 2
    assert not {id(env) for env in closed} & {id(given), id(ppo.env)}


@pytest.mark.slow
def test_a_run_in_an_endless_environment_comes_to_its_end_and_says_that_episodes_were_cut(tmp_path: Path, capsys) -> None:
    pytest.importorskip("gymnasium")
    config = msgspec.structs.replace(CONFIG, env="CliffWalking-v1", eval_max_steps=20)
    result = train_run(config, tmp_path / "run")
    assert result.evaluation is not None
    assert result.evaluation.lengths == [20] * 4
    assert main(["ppo", "eval", str(tmp_path / "run"), "--episodes", "2", "--max-steps", "5"]) == 0
    assert "2 of 2 episodes had not ended after 5 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_the_checkpoint_is_on_the_disk_before_its_policy_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*given, **settings):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("esper.rl.run_setup.evaluate", killed)
        with pytest.raises(Killed):
            train_run(CONFIG, tmp_path / "run")
    assert open_store(tmp_path / "run").load("latest").step == 32
    whole = train_run(CONFIG, tmp_path / "whole")
    resumed = train_run(None, tmp_path / "run", resume=True)
    assert resumed.evaluation == whole.evaluation
    assert open_store(tmp_path / "run").load("best").step == open_store(tmp_path / "whole").load("best").step


@pytest.mark.slow
def test_eval_plays_other_episodes_than_the_selection_of_the_best_checkpoint(tmp_path: Path, capsys) -> None:
    seeds = []
    evaluate = run_setup.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_setup, "evaluate", lambda *given, **settings: (seeds.append(settings["seed"]), evaluate(*given, **settings))[1])
        result = train_run(CONFIG, tmp_path / "run")
        chosen_by, at_the_end = seeds[0], seeds[-1]
        assert seeds == [chosen_by] * 3 + [at_the_end]
        for seed in range(3):
            assert main(["ppo", "eval", str(tmp_path / "run"), "--episodes", "4", "--seed", str(seed), "--json"]) == 0
            mean = last_line(capsys.readouterr().out)["mean_return"]
            assert (mean == result.evaluation.mean_return) or seed > 0
    assert len({chosen_by, *seeds[4:]}) == 4
    assert seeds[4] == at_the_end


@pytest.mark.slow
def test_evaluations_at_checkpoints_keep_to_their_share_of_the_steps(tmp_path: Path) -> None:
    """An episode takes 10 steps and an update 8, so that one evaluation in thirteen checkpoints is a tenth of all steps."""
    config = msgspec.structs.replace(CONFIG, total_steps=15 * 32, eval_share=0.1)
    train_run(config, tmp_path / "run")
    evaluated = [record.event.step // 32 for record in read(tmp_path / "run/events.jsonl") if record.kind == "checkpoint_evaluated"]
    assert evaluated == [1, 13, 15], "the first, whenever the share allows it, and the last"
    assert TrainConfig(env="cue").eval_share <= 0.1
    assert TrainConfig(env="cue").eval_episodes <= 20


def test_the_time_of_evaluations_counts_in_the_steps_per_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    def slow(*given, **settings):
        clock.sleep(0.2)
        return PolicyEvaluation([1.0], [1])

    monkeypatch.setattr("esper.rl.run_setup.evaluate", slow)
    train_run(CONFIG, tmp_path / "run")
    updates = [record.event for record in read(tmp_path / "run/events.jsonl") if isinstance(record.event, Update)]
    assert updates[0].other_seconds < 0.1
    assert all(update.other_seconds >= 0.2 for update in updates[1:])
    assert all(update.steps_per_second < 32 / 0.2 for update in updates[1:])


def test_a_first_score_that_is_not_a_number_does_not_block_the_next_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([float("nan"), 0.5, 0.25, 0.0])
    monkeypatch.setattr("esper.rl.run_setup.evaluate", lambda *given, **settings: PolicyEvaluation([next(scores)], [1]))
    train_run(CONFIG, tmp_path / "run")
    assert open_store(tmp_path / "run").load("best").step == 2 * 32


@pytest.mark.slow
def test_a_stop_request_skips_the_evaluation_until_the_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train_run(CONFIG, tmp_path / "whole")
    evaluate, calls = run_setup.evaluate, []
    monkeypatch.setattr(run_setup, "evaluate", lambda *given, **settings: (calls.append(None), evaluate(*given, **settings))[1])
    asked = iter([False, True])
    stopped = train_run(CONFIG, tmp_path / "run", should_stop=lambda: next(asked))
    assert (stopped.status, stopped.step, len(calls)) == ("stopped", 64, 1)
    assert open_store(tmp_path / "run").load("latest").step == 64
    assert train_run(None, tmp_path / "run", resume=True).evaluation == whole.evaluation
    assert events_of(tmp_path / "run") == events_of(tmp_path / "whole")


def test_a_stop_request_ends_a_long_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.setattr("esper.rl.evaluate._ASK_EVERY_S", -1.0)  # at every step
    endless = msgspec.structs.replace(CONFIG, env="CliffWalking-v1", eval_max_steps=10**9)
    asked = iter([False, False, False, True])  # after the update, then within the evaluation
    stopped = train_run(endless, tmp_path / "run", should_stop=lambda: next(asked))
    assert (stopped.status, stopped.step) == ("stopped", 32)
    assert open_store(tmp_path / "run").load("latest").state["awaits_evaluation"]


@pytest.mark.parametrize("call", [0, 3])  # at a checkpoint, and at the end
def test_a_second_signal_in_an_evaluation_stops_the_run_and_a_resumed_one_ends_it(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*given: object, **settings: object) -> PolicyEvaluation:
        calls.append(None)
        if len(calls) == call + 1:
            raise StoppedAtOnce(signal.SIGINT)
        return really_evaluate(*given, **settings)  # type: ignore[arg-type]

    really_evaluate, calls = run_setup.evaluate, list[None]()
    monkeypatch.setattr(run_setup, "evaluate", evaluate)
    with pytest.raises(StoppedAtOnce):
        train_run(CONFIG, tmp_path / "run")
    assert open_run(tmp_path / "run").state() == "stopped"
    train_run(None, tmp_path / "run", resume=True)
    assert open_run(tmp_path / "run").state() == "finished"


@pytest.mark.slow
def test_a_run_makes_its_environments_for_evaluation_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_env, made = run_setup.make_env, []
    monkeypatch.setattr(run_setup, "make_env", lambda *given: made.append(make_env(*given)) or made[-1])
    closed = []
    monkeypatch.setattr("esper.vecenv.builtin.BuiltinEnv.close", lambda env: closed.append(env))
    train_run(CONFIG, tmp_path / "run")
    assert len(made) == 2, "one to train in, and one for three checkpoints and the end"
    assert sorted(map(id, closed)) == sorted(map(id, made))


@pytest.mark.slow
def test_tensorboard_shows_everything_once_after_a_crash(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Crash(BaseException):
        pass

    def crash_after(updates: int):
        asked = iter(range(updates))

        def crash() -> bool:
            if next(asked, None) is None:
                raise Crash
            return False

        return crash

    config = msgspec.structs.replace(CONFIG, tensorboard=True, checkpoint_every=2, total_steps=5 * 32)
    with pytest.raises(Crash):
        train_run(config, tmp_path / "run", should_stop=crash_after(2))
    with pytest.raises(Crash):
        train_run(None, tmp_path / "run", resume=True, should_stop=crash_after(0))
    train_run(msgspec.structs.replace(config, total_steps=3 * 32), tmp_path / "run", resume=True)
    train_run(config, tmp_path / "run", resume=True)
    shown = EventAccumulator(str(tmp_path / "run/tensorboard"))
    shown.Reload()
    records = list(read(tmp_path / "run/events.jsonl"))
    for tag in ("update/episodes", "checkpoint_evaluated/mean_return", "evaluated/mean_return"):
        kind, field = tag.split("/")
        logged = [(record.step, pytest.approx(getattr(record.event, field))) for record in records if record.kind == kind]
        assert [(event.step, event.value) for event in shown.Scalars(tag)] == logged, tag
    assert [record.event.step for record in records if record.kind == "checkpoint_evaluated"] == [64, 96, 128, 160]


@pytest.mark.slow
def test_training_after_an_evaluation_in_its_own_environments_starts_from_other_states_each_time():
    ppo = PPO(make("cartpole-hidden", 4), SMALL)
    firsts = []
    for _ in range(3):
        rollout = ppo.collect()
        firsts.append(rollout.obs["obs"][0].clone())
        ppo.update(rollout)
        ppo.evaluate(episodes=4)
    assert not torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[1], firsts[2])
