"""Training through the command line: files of a run, stopping, and exact resuming."""

from __future__ import annotations

import gc
import io
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from esper.cli.main import main
from esper.cli.ppo_progress import PPOProgress
from esper.cli.progress import LiveView, PlainLines
from esper.config import load
from esper.rl import RunError, TrainConfig, load_policy, train_run, training
from esper.rl.checkpoints import open_store
from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.evaluate import PolicyEvaluation
from esper.rl.events import Update
from esper.rl.run_setup import Evaluated
from esper.runs import Checkpoint, CheckpointRefused, EventRecord, SinkFailed, read
from esper.runs.anomalies import Anomaly
from esper.runs.catalog import open_run
from esper.runs.folder import CHECKPOINTS, chosen_folder
from esper.vecenv import make
from tests.commands import (
    Terminal,
    assert_refuses_to_overwrite,
    assert_same_state,
    events_of,
    last_line,
    show,
    shown_in_tensorboard,
    signal_at_checkpoint,
    wait_for,
)
from tests.processes import start

UPDATE_STEPS = 4 * 16
CONFIG = TrainConfig(
    env="cue",
    env_args={"delay": 3},
    num_envs=4,
    total_steps=10 * UPDATE_STEPS,
    device="cpu",
    threads=1,
    checkpoint_every=3,
    eval_episodes=8,
    ppo=PPOConfig(num_steps=16, num_minibatches=2, num_epochs=2, network=NetworkConfig(hidden_size=8, encoder_sizes=(8,))),
)
OPTIONS = [
    "--env-args", "delay=3", "--num-envs", "4", "--device", "cpu", "--threads", "1", "--checkpoint-every", "3", "--eval-episodes", "8",
    "--num-steps", "16", "--num-minibatches", "2", "--num-epochs", "2", "--hidden-size", "8", "--encoder-sizes", "8",
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of CONFIG that was never interrupted. Tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    train_run(CONFIG, folder)
    return folder


def train(folder: str | Path, updates: int, *more: str) -> int:
    return main(["ppo", "train", "cue", *OPTIONS, "--total-steps", str(updates * UPDATE_STEPS), "--run", str(folder), *more])


def assert_same_learner(one: Path, other: Path) -> None:
    assert_same_state(*(open_store(folder).load("latest").state["ppo"] for folder in (one, other)))


def after_update(count: int) -> Callable[[], bool]:
    calls = iter(range(1, count + 1))
    return lambda: next(calls, count) == count


# Files of a run


@pytest.mark.slow
def test_a_run_is_trained_evaluated_and_evaluated_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert train("run", 10, "--json") == 0
    output = capsys.readouterr().out
    result = last_line(output)
    assert (result["status"], result["step"], result["evaluation"]["episodes"]) == ("finished", 10 * UPDATE_STEPS, 8)
    assert "esper ppo eval run" in output
    assert load(TrainConfig, tmp_path / "run/config.toml") == CONFIG
    kinds = [record.kind for record in read(tmp_path / "run/events.jsonl")]
    assert kinds[:3] == ["header", "run_declared", "run_started"]
    assert kinds.count("update") == 10
    assert kinds[-2:] == ["evaluated", "run_ended"]

    assert main(["ppo", "eval", "run", "--episodes", "8", "--json"]) == 0
    again = last_line(capsys.readouterr().out)
    assert again["mean_return"] == result["evaluation"]["mean_return"]
    assert main(["ppo", "eval", "run", "--episodes", "1", "--checkpoint", "latest", "--stochastic"]) == 0


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_overwritten_by_a_new_training(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refuses_to_overwrite(finished, lambda: train(finished, 10), capsys)


def test_a_run_without_a_folder_gets_one_of_its_own(tmp_path: Path) -> None:
    small = msgspec.structs.replace(CONFIG, total_steps=1, eval_episodes=0)
    folders = {train_run(small).folder for _ in range(2)}
    assert len(folders) == 2
    assert all(folder.parent == Path("runs") and folder.name.startswith("cue-") for folder in folders)


@pytest.mark.slow
def test_a_resumed_run_keeps_no_second_copy_of_the_loaded_checkpoint(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    loaded: list[weakref.ref[torch.Tensor]] = []
    latest = training._latest

    def watched(folder: Path) -> Checkpoint | None:
        checkpoint = latest(folder)
        assert checkpoint is not None
        loaded.extend(weakref.ref(tensor) for tensor in checkpoint.state["ppo"]["policy"].values())
        return checkpoint

    def alive_after_an_update() -> bool:
        gc.collect()
        alive.append(sum(tensor() is not None for tensor in loaded))
        return True

    alive: list[int] = []
    monkeypatch.setattr(training, "_latest", watched)
    train_run(msgspec.structs.replace(CONFIG, total_steps=20 * UPDATE_STEPS), copy, resume=True, should_stop=alive_after_an_update)
    assert len(loaded) > 5
    assert alive[0] == 0


def test_a_folder_in_use_by_another_process_is_refused(finished: Path, tmp_path: Path) -> None:
    from esper.runs.folder import locked

    copy = shutil.copytree(finished, tmp_path / "copy")
    with locked(copy), pytest.raises(RunError, match="another process is training"):
        train_run(None, copy, resume=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers too large
def test_training_that_diverges_ends_with_1_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", 10, "--learning-rate", "1e30", "--json") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: training failed")
    assert "Traceback" not in captured.err
    assert "not finite" in last_line(captured.out)["error"]


@pytest.mark.slow
def test_training_that_stops_itself_writes_a_checkpoint_and_prints_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("esper.rl.batch.gae", lambda rewards, *rest, **settings: torch.full_like(rewards, math.nan))
    assert train("run", 10) == 1
    assert "gradient steps in a row were not finite" in (message := capsys.readouterr().err)
    assert f"a checkpoint is in {Path('run/checkpoints')}" in message
    assert open_store(tmp_path / "run").load("latest").step > 0


@pytest.mark.slow
def test_tensorboard_gets_the_updates_and_every_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert train("run", 4, "--tensorboard") == 0
    shown = shown_in_tensorboard(tmp_path / "run")
    events = [record.event for record in read(tmp_path / "run/events.jsonl")]
    updates = [event for event in events if isinstance(event, Update)]
    assert shown["update/policy_loss"] == [(update.step, pytest.approx(update.policy_loss)) for update in updates]
    # After the third and the last update, and once more at the end.
    assert [step for step, _ in shown["checkpoint_evaluated/mean_return"]] == [3 * UPDATE_STEPS, 4 * UPDATE_STEPS]
    assert shown["checkpoint_evaluated/episodes"][0][1] == 8
    (evaluated,) = (event for event in events if isinstance(event, Evaluated))
    assert shown["evaluated/mean_return"] == [(evaluated.step, pytest.approx(evaluated.mean_return))]


@pytest.mark.slow
def test_warning_thresholds_come_from_the_command_line_or_a_file_and_may_change_on_resume(tmp_path: Path) -> None:
    (tmp_path / "alarms.toml").write_text("[ppo.thresholds]\nratio_explosion = 0.5\n")
    assert train("run", 3, "--config", "alarms.toml", "--value-collapse", "1e9") == 0
    warned = {record.event.what: record.event for record in read("run/events.jsonl") if isinstance(record.event, Anomaly)}
    assert warned["ratio_explosion"].limit == 0.5 < warned["ratio_explosion"].value
    assert warned["value_collapse"].limit == 1e9
    resume = ["ppo", "train", "--resume", "--run", "run", "--total-steps", str(6 * UPDATE_STEPS)]
    assert main([*resume, "--ratio-explosion", "10", "--value-collapse", "0"]) == 0
    ended = {record.event.what for record in read("run/events.jsonl") if isinstance(record.event, Anomaly) and record.event.has_ended}
    assert ended == {"ratio_explosion", "value_collapse"}


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_run_is_deterministic_on_request_and_otherwise_uses_cudnn_benchmarks(is_asked: bool) -> None:
    seen = []

    def look() -> bool:
        cudnn = torch.backends.cudnn
        seen.append((torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark))
        return False

    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    changes = {"deterministic": is_asked, "total_steps": UPDATE_STEPS, "eval_episodes": 0}
    train_run(msgspec.structs.replace(CONFIG, **changes), "run", should_stop=look)
    assert set(seen) == {(is_asked, is_asked, not is_asked)}
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == before
    if is_asked:
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")


def steps_in_tensorboard(folder: Path) -> list[int]:
    """Steps of the updates that TensorBoard shows of a run, from all its sessions."""
    return [step for step, _ in shown_in_tensorboard(folder)["update/value_loss"]]


@pytest.mark.slow
def test_a_resumed_run_keeps_writing_for_tensorboard_unless_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    assert train("run", 2, "--tensorboard") == 0
    resume = ["ppo", "train", "--resume", "--run", "run", "--total-steps"]
    assert main([*resume, str(4 * UPDATE_STEPS)]) == 0
    assert steps_in_tensorboard(tmp_path / "run") == [count * UPDATE_STEPS for count in range(1, 5)]
    assert load(TrainConfig, tmp_path / "run/config.toml").tensorboard
    assert train_run(msgspec.structs.replace(CONFIG, total_steps=5 * UPDATE_STEPS, tensorboard=True), tmp_path / "run", resume=True).step
    assert steps_in_tensorboard(tmp_path / "run")[-1] == 5 * UPDATE_STEPS

    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        assert main([*resume, str(6 * UPDATE_STEPS)]) == 2
        assert "or run without it: --no-tensorboard on the command line" in capsys.readouterr().err
    assert main([*resume, str(6 * UPDATE_STEPS), "--no-tensorboard"]) == 0
    assert main([*resume, str(7 * UPDATE_STEPS)]) == 0
    assert steps_in_tensorboard(tmp_path / "run")[-1] == 5 * UPDATE_STEPS


@pytest.mark.slow
def test_a_run_resumed_with_tensorboard_writes_all_earlier_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train_run(msgspec.structs.replace(CONFIG, total_steps=UPDATE_STEPS), tmp_path / "run")
    train_run(msgspec.structs.replace(CONFIG, total_steps=2 * UPDATE_STEPS), tmp_path / "run", resume=True, tensorboard=True)
    assert main(["ppo", "train", "--resume", "--run", "run", "--total-steps", str(3 * UPDATE_STEPS)]) == 0
    assert steps_in_tensorboard(tmp_path / "run") == [UPDATE_STEPS, 2 * UPDATE_STEPS, 3 * UPDATE_STEPS]


def test_a_missing_tensorboard_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert train("run", 1, "--tensorboard") == 2
    assert "pip install 'esper-grow[tensorboard]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# Policies from runs


def test_a_policy_is_loaded_without_an_environment(finished: Path) -> None:
    policy = load_policy(finished, "latest")
    obs = make("cue", 3, delay=3).reset(seed=1).obs
    actions, state = policy.act(obs)
    assert actions["action"].shape == (3,)
    assert state.shape == (3, 16)
    newest = open_store(finished).list()[-1]
    same = load_policy(newest)
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in policy.state_dict().items())


@pytest.mark.slow
def test_a_policy_with_a_custom_encoder_is_trained_resumed_and_loaded(tmp_path: Path) -> None:
    class Wide(torch.nn.Module):
        output_size = 12

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(5, 12)

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.layer(obs))

    train_run(CONFIG, tmp_path / "run", encoder=Wide(), should_stop=after_update(4))
    result = train_run(None, tmp_path / "run", resume=True, encoder=Wide())
    assert result.status == "finished"
    assert load_policy(tmp_path / "run", encoder=Wide()).encoder.layer.weight.shape == (12, 5)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="encoder"):
        load_policy(tmp_path / "run")


@pytest.mark.slow
def test_the_best_checkpoint_is_the_one_whose_policy_does_best_on_fresh_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.25, 1.0, 0.5, 0.75, 0.0, 0.0])
    monkeypatch.setattr("esper.rl.run_setup.evaluate", lambda *given, **settings: PolicyEvaluation([next(scores)], [1]))
    every = msgspec.structs.replace(CONFIG, checkpoint_every=1, total_steps=5 * UPDATE_STEPS, eval_episodes=1)
    train_run(every, tmp_path / "run")
    assert open_store(tmp_path / "run").load("best").step == 2 * UPDATE_STEPS


def test_without_evaluation_the_best_checkpoint_is_that_of_the_highest_return_once_there_are_enough_episodes() -> None:
    from esper.rl.training import _score_in_training as _score

    def update(step: int, episodes: int, mean_return: float) -> Update:
        numbers = {name: 0 for name in Update.__struct_fields__ if name not in ("entropy", "kl", "env")}
        return Update(**(numbers | {"entropy": {}, "kl": {}, "step": step, "episodes": episodes, "mean_return": mean_return}))

    lucky, unknown, poor, good = update(1, 2, 1.0), update(2, 99, float("nan")), update(3, 100, 0.2), update(4, 200, 0.9)
    assert _score(lucky) < _score(unknown) < _score(poor) < _score(good)


# Going on


@pytest.mark.slow
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_run(finished: Path, tmp_path: Path) -> None:
    stopped = train_run(CONFIG, tmp_path / "run", should_stop=after_update(4))
    assert (stopped.status, stopped.step) == ("stopped", 4 * UPDATE_STEPS)
    assert train_run(None, tmp_path / "run", resume=True).status == "finished"
    assert events_of(tmp_path / "run") == events_of(finished)
    assert_same_learner(tmp_path / "run", finished)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_over(finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    shutil.rmtree(copy / CHECKPOINTS)
    train_run(None, copy, resume=True)
    assert events_of(copy) == events_of(finished)
    assert_same_learner(copy, finished)


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    newest = open_store(copy).list()[-1]
    (newest / "tensors.safetensors").write_bytes(b"")
    train_run(None, copy, resume=True)
    refused = [record.event for record in read(copy / "events.jsonl") if isinstance(record.event, CheckpointRefused)]
    assert [event.checkpoint for event in refused] == [newest.name]
    assert events_of(copy) == events_of(finished)
    assert_same_learner(copy, finished)


@pytest.mark.slow
def test_a_run_that_lost_its_events_fails_with_their_name(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, damage in {"lost": Path.unlink, "torn": lambda path: os.truncate(path, 10)}.items():
        copy = shutil.copytree(finished, tmp_path / name)
        damage(copy / "events.jsonl")
        assert main(["ppo", "train", "--resume", "--run", name, "--total-steps", str(12 * UPDATE_STEPS)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: the run in {name} cannot go on")
        assert f"{name}/events.jsonl" in error


def test_resuming_a_finished_run_changes_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "events.jsonl").read_bytes()
    assert main(["ppo", "train", "--resume", "--run", str(finished)]) == 0
    assert "had already finished" in capsys.readouterr().out
    assert (finished / "events.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_resumed_run_may_get_more_steps_but_no_other_learner(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    assert main(["ppo", "train", "--resume", "--run", str(copy), "--hidden-size", "9"]) == 2
    assert "ppo.network.hidden_size is 8 in the saved run and cannot become 9" in capsys.readouterr().err
    assert main(["ppo", "train", "--resume", "--run", str(copy), "--total-steps", str(12 * UPDATE_STEPS)]) == 0
    assert load(TrainConfig, copy / "config.toml").total_steps == 12 * UPDATE_STEPS
    assert open_store(copy).load().step == 12 * UPDATE_STEPS


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    class Encoder(torch.nn.Linear):
        output_size = 12

    train_run(CONFIG, tmp_path / "run", encoder=Encoder(5, 12), should_stop=after_update(4))
    before = (tmp_path / "run/events.jsonl").read_bytes()
    with pytest.raises(RunError, match="cannot continue from"):
        train_run(None, tmp_path / "run", resume=True)
    assert (tmp_path / "run/events.jsonl").read_bytes() == before


@pytest.mark.slow
def test_an_environment_that_cannot_be_saved_begins_new_episodes_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    config = msgspec.structs.replace(CONFIG, env="CartPole-v1", env_args={})
    train_run(config, tmp_path / "run", should_stop=after_update(4))
    assert train_run(None, tmp_path / "run", resume=True).status == "finished"
    kinds = [record.kind for record in read(tmp_path / "run/events.jsonl")]
    assert kinds.count("update") == 11  # rows that only reset an environment are no steps, so ten rollouts are not enough
    assert kinds.count("episodes_restarted") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_the_update_with_a_checkpoint(
    number: signal.Signals, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with signal_at_checkpoint(number, tmp_path / "run"):
        assert train("run", 100_000, "--json") == code
    captured = capsys.readouterr()
    assert "esper ppo train --resume --run run" in captured.out
    result = last_line(captured.out)
    assert result["status"] == "stopped"
    assert open_store(tmp_path / "run").load("latest").step == result["step"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_run_killed_at_any_moment_and_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    updates = 60
    assert train(tmp_path / "whole", updates) == 0
    process = start("ppo", "train", "cue", *OPTIONS, "--total-steps", str(updates * UPDATE_STEPS), "--run", "killed")
    wait_for(tmp_path / "killed" / CHECKPOINTS / "latest")
    time.sleep(random.SystemRandom().uniform(0.0, 0.3))
    process.kill()
    assert process.wait(timeout=90) == -signal.SIGKILL, "it finished before it could be killed"
    reached = open_store(tmp_path / "killed").load("latest").step
    assert 0 < reached < updates * UPDATE_STEPS

    assert main(["ppo", "train", "--resume", "--run", str(tmp_path / "killed")]) == 0
    assert events_of(tmp_path / "killed") == events_of(tmp_path / "whole")
    assert_same_learner(tmp_path / "killed", tmp_path / "whole")


# Progress


def test_plain_progress_has_a_start_lines_at_intervals_and_an_end(finished: Path) -> None:
    stream = io.StringIO()
    show(finished, PlainLines(PPOProgress(), stream, every_s=1e9))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "cue: 4 environments on cpu" in lines[0]
    assert "done        100%  step 640  return" in lines[1]

    often = io.StringIO()
    progress = PlainLines(PPOProgress(), often, every_s=0.0)
    for record in read(finished / "events.jsonl"):
        progress.write(record)
    assert len(often.getvalue().splitlines()) == 1 + 10
    assert "training     90%" in often.getvalue()
    assert "evaluating  100%" in often.getvalue()


def test_plain_progress_reports_a_sink_that_was_switched_off() -> None:
    stream = io.StringIO()
    event = SinkFailed(sink="WandbSink", error="no route to host")
    PlainLines(PPOProgress(), stream).write(EventRecord(time=0.0, run="run", rank=0, event=event))
    assert "WandbSink failed and was switched off, training goes on: no route to host" in stream.getvalue()


def test_live_progress_shows_each_head_and_ends_with_the_last_state(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    stream = Terminal()
    progress = LiveView(PPOProgress(), stream)
    for record in read(finished / "events.jsonl"):
        if isinstance(record.event, Update):
            record = msgspec.structs.replace(record, event=msgspec.structs.replace(record.event, entropy={"kind": 0.25, "item": 0.5}))
        progress.write(record)
    progress.close()
    shown = stream.getvalue()
    assert "kind 0.25 item 0.50" in shown
    assert "640" in shown.splitlines()[-2]


BROKEN = """
import gymnasium

class Broken(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float("nan"), False, True, {}
"""


@pytest.mark.slow
def test_a_run_in_which_no_reward_was_finite_fails_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_env.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--num-envs", "2", "--num-steps", "8", "--num-minibatches", "1", "--total-steps", "48", "--device", "cpu", "--run", "run"]
    assert main(["ppo", "train", "broken_env:Broken", *options]) == 1
    shown = capsys.readouterr().err
    assert "no reward was finite in the last 3 updates" in shown
    assert "a checkpoint is in run/checkpoints" in shown
    assert open_run("run").summary().state == "stopped"


@pytest.mark.slow
def test_a_run_that_died_between_its_last_checkpoint_and_its_end_gets_an_end_when_it_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Died(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(training._Session, "_end", die)
        with pytest.raises(Died):
            train("run", 2, "--eval-episodes", "0")
    Path("run/checkpoints/.tmp-step-000000000001").mkdir()
    Path("run/.tmp-999999999-a").touch()
    assert open_run("run").state() == "running"
    assert main(["ppo", "train", "--resume", "--run", "run"]) == 0
    assert open_run("run").state() == "finished"
    assert list(Path("run").rglob(".tmp-*")) == []
    before = Path("run/events.jsonl").read_bytes()
    assert main(["ppo", "train", "--resume", "--run", "run"]) == 0
    assert Path("run/events.jsonl").read_bytes() == before, "resuming a finished run changes nothing"


@pytest.mark.slow
def test_two_trainings_begun_in_the_same_second_take_two_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260131-235959")
    chosen: list[Path] = []

    def begin(*_: object, **__: object) -> None:
        """Choose a folder while another training has one without any file in it."""
        with chosen_folder(None, "cue") as folder:
            chosen.append(folder)
            if len(chosen) < 3:
                begin()

    begin()
    assert [folder.name for folder in chosen] == ["cue-20260131-235959", "cue-20260131-235959-2", "cue-20260131-235959-3"]
    assert main(["ppo", "train", "cue", *OPTIONS, "--total-steps", str(UPDATE_STEPS)]) == 0
    assert Path("runs/cue-20260131-235959-4/events.jsonl").is_file()


def test_a_training_that_does_not_begin_leaves_no_folder() -> None:
    assert main(["ppo", "train", "nothing-of-this-name"]) == 2
    assert not Path("runs").exists()


def test_the_module_is_the_command() -> None:
    assert subprocess.run([sys.executable, "-m", "esper", "--version"], check=True, capture_output=True).stdout.startswith(b"esper ")
