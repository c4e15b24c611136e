"""A training run as a folder: it can be stopped or killed at any time and resumed as if it had never stopped.

    result = train_run(TrainConfig(env="cue"), "runs/first")
    result = train_run(None, "runs/first", resume=True)             # after a crash, or with a config of more total_steps
    policy = load_policy("runs/first")

A checkpoint holds the whole learner and the length of the event log; resuming cuts the events after it. So a run that was killed and
resumed equals one that was not, bit for bit on the CPU with the same number of threads, if its environment can be saved; others begin new
episodes. A resumed run also makes up for everything that the
killed one had not finished: the files that are written after a checkpoint, its evaluation, and the evaluation at the end.

On several ranks all of them call these functions with the same arguments and a `group`. Only rank 0 touches the folder; it writes the
events of the others after every update, with their ranks.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypedDict, TypeVar, Unpack

import msgspec
from torch import nn

from esper.config import describe, load_saved, save
from esper.display import Card, Displayed
from esper.files import make_folder, remove
from esper.parallel import ALONE, Group
from esper.profiling import TELEMETRY, Profiler
from esper.rl.checkpoints import open_store
from esper.rl.collector import RECENT_EPISODES
from esper.rl.evaluate import EvaluationStopped, PolicyEvaluation
from esper.rl.events import DECLARED, OF_ALL_RANKS, Update
from esper.rl.policy import Policy
from esper.rl.ppo import PPO, Callback, TrainingStopped
from esper.rl.run_config import ShownConfig, TrainConfig
from esper.rl.run_setup import CheckpointEvaluated, EpisodeEvaluator, Evaluated, Relay, RunEnded, RunStarted, count_parameters, prepare
from esper.runs import (
    Checkpoint,
    CheckpointRefused,
    Event,
    EventError,
    EventLog,
    Refused,
    Sink,
    WandbMode,
    check_installed,
    load_module,
    read,
    sinks_in,
)
from esper.runs.cards import write_card
from esper.runs.events import RunDeclared
from esper.runs.folder import CONFIG, EVENTS, RunError, check_holds_a_run, check_is_free, chosen_folder, locked
from esper.runs.telemetry import Level
from esper.statistics import student_interval
from esper.text_table import duration
from esper.vecenv import EnvSource
from esper.vecenv.registry import named

_CHOOSING, _AT_THE_END = 0, 1  # seeds of the episodes that choose the best checkpoint, and of the final evaluation
_EVALUATION = "evaluation"  # key in the note of a checkpoint


class RunConfig(Protocol):
    """Settings that the config of every trainer has."""

    @property
    def total_steps(self) -> int: ...

    @property
    def checkpoint_every(self) -> int: ...

    @property
    def keep(self) -> int: ...

    @property
    def tensorboard(self) -> bool: ...

    @property
    def wandb(self) -> WandbMode | None: ...

    @property
    def telemetry(self) -> Level: ...

    @property
    def telemetry_escalation(self) -> int: ...


AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


class Evaluator(Protocol):
    """Scores policies by fresh episodes. Keeps its environments until it is closed."""

    def score(self, policy: Policy, seed: int, should_stop: Callable[[], bool], *, name: str) -> PolicyEvaluation | None:
        """Score a policy on the episodes of a `seed`. Raise EvaluationStopped if `should_stop()` becomes true meanwhile.

        `name` names the policy in files that the evaluator writes, such as step-5120.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class Trainer(Generic[AnyConfig]):
    """A kind of training run: how its learner is made, and how a policy is scored."""

    config: type[AnyConfig]
    title: Callable[[AnyConfig], str]  # name of the environment, also used for the default folder
    prepare: Callable[[AnyConfig, nn.Module | None, Group], AbstractContextManager[tuple[PPO, Relay]]]
    changeable: tuple[str, ...]  # settings that may change when resuming
    is_evaluated: Callable[[AnyConfig], bool] = lambda config: False  # whether policies are scored at all
    make_evaluator: Callable[[AnyConfig, Path], Evaluator] | None = None  # scores policies of a run folder; needed where `is_evaluated`
    # Share of the environments' steps that evaluations at checkpoints may take.
    eval_share: Callable[[AnyConfig], float] = lambda config: 1.0
    declared: RunDeclared = DECLARED  # kind and figures of its runs
    steps_of_all_ranks: bool = True  # whether total_steps counts the steps of all ranks, or those of each
    after_checkpoint: Callable[[Path, AnyConfig, int, dict[str, Any]], None] | None = None  # writes further files of a checkpoint

    def total_steps(self, config: AnyConfig, group: Group) -> int:
        """Return the steps of all environments of all ranks."""
        return config.total_steps * (1 if self.steps_of_all_ranks else group.world_size)


ENVIRONMENT = Trainer(
    config=TrainConfig,
    title=lambda config: config.env,
    prepare=lambda config, encoder, group: prepare(config, encoder=encoder, group=group),
    changeable=("total_steps", "threads", "checkpoint_every", "keep", "eval_episodes", "eval_max_steps", "eval_share"),
    is_evaluated=lambda config: config.eval_episodes > 0,
    make_evaluator=lambda config, folder: EpisodeEvaluator(config),
    eval_share=lambda config: config.eval_share,
)


@dataclass(frozen=True, slots=True)
class RunResult(Displayed):
    """Result of a run. `seconds` counts all its sessions; means are over the last 100 training episodes, nan if there were none.

    The status is "had finished" if nothing was left to do, not even the evaluation at the end.
    """

    folder: Path
    status: Literal["finished", "stopped", "had finished"]
    step: int
    seconds: float
    episodes: int
    mean_return: float
    mean_length: float
    evaluation: PolicyEvaluation | None = None  # of the best policy on fresh episodes
    profile: str | None = None  # table of the shares of time, if some updates were profiled

    def card(self) -> Card:
        """Return the result for notebooks."""
        figures = [
            ("status", f"{self.status}, {self.step:,} steps, {duration(self.seconds)}"),
            ("episodes", f"{self.episodes:,}"),
            ("return in training", f"{self.mean_return:.3f}, mean length {self.mean_length:.1f}" if self.episodes else "no episode ended"),
        ]
        if self.evaluation is not None:
            interval = student_interval(self.evaluation.returns) if len(self.evaluation.returns) > 1 else None
            reach = "" if interval is None else f" [{interval.low:.3f}, {interval.high:.3f}]"
            figures.append(("return in evaluation", f"{self.evaluation.mean_return:.3f}{reach}, {len(self.evaluation.returns)} episodes"))
        return Card(f"Run {self.folder.name}", [*figures, ("folder", str(self.folder))])


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a session that are not saved with the run."""

    encoder: nn.Module | None
    sinks: tuple[Sink, ...]
    should_stop: Callable[[], bool]
    group: Group
    trainer: Trainer[Any]
    callback: Callback | None = None
    profile: int = 0


class RunOptions(TypedDict, total=False):
    """Options of every trainer, for functions that pass them on."""

    sinks: Iterable[Sink]
    tensorboard: bool | None
    wandb: WandbMode | None
    should_stop: Callable[[], bool]
    group: Group
    profile: int


def _never() -> bool:
    return False


def train_run(
    config: TrainConfig | None,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    encoder: nn.Module | None = None,
    env: EnvSource | None = None,
    callback: Callback | None = None,
    **options: Unpack[RunOptions],
) -> RunResult:
    """Train PPO in the folder of a new run; with `resume`, continue the run in the folder.

    A resumed run continues from its latest checkpoint, or from the start if there is none. `config` may then be None, or ask for more steps
    than the saved one. Without a `folder`, a new run gets one of its own under runs/.

    `env` is a function that makes one environment, or a Gymnasium environment; the name in the config then stands for it. Give it again
    when resuming. `callback(ppo, update)` is called after every update; if it returns False, the run stops.

    The options `tensorboard` and `wandb` replace those of the config unless they are None. The run stops with a checkpoint after the update
    in which `should_stop()` becomes true. `profile` updates are profiled after a warm-up: the run folder gets a trace, the result a table.
    """
    return run_trainer(ENVIRONMENT, config, folder, resume=resume, encoder=encoder, env=env, callback=callback, **options)


def run_trainer(
    trainer: Trainer[Any],
    config: RunConfig | None,
    folder: Path | str | None,
    *,
    resume: bool,
    encoder: nn.Module | None = None,
    env: EnvSource | None = None,
    callback: Callback | None = None,
    sinks: Iterable[Sink] = (),
    tensorboard: bool | None = None,
    wandb: WandbMode | None = None,
    should_stop: Callable[[], bool] = _never,
    group: Group = ALONE,
    profile: int = 0,
) -> RunResult:
    """Train as any kind of run; see `train_run`."""
    options = Options(encoder, tuple(sinks), should_stop, group, trainer, callback, profile)
    if resume:
        if folder is None:
            raise RunError("there is no folder to resume in; give the folder of the run")
        place = Path(folder)
        resumed = _with_sinks(group.first(lambda: _resumed_config(place, config, trainer)), tensorboard, wandb)
        check_installed(tensorboard=resumed.tensorboard, wandb=resumed.wandb)
        with named(trainer.title(resumed), env), group.only_first(lambda: locked(place)):
            return _with_card(_resume(resumed, place, options), group)
    if config is None:
        raise RunError("a new run needs a config; with resume=True, the run in the folder continues with its own")
    return _with_card(_begin(_with_sinks(config, tensorboard, wandb), folder, env, options), group)


def check_start(trainer: Trainer[Any], config: RunConfig, folder: Path | None, *, resume: bool) -> None:
    """Raise RunError if `run_trainer` would not begin or resume a run in this folder."""
    if resume and folder is not None:
        _resumed_config(folder, config, trainer)
    elif folder is not None:
        check_is_free(folder)


def _with_card(result: RunResult, group: Group) -> RunResult:
    """Write the card of the result into its folder, from the events that are on disk now. A failure only warns."""
    if group.rank == 0:
        try:
            write_card(result.folder)
        except OSError as error:
            warnings.warn(f"the model card could not be written into {result.folder}: {error}", RuntimeWarning, stacklevel=4)
    return result


def _resumed_config(folder: Path, wanted: RunConfig | None, trainer: Trainer[Any]) -> Any:
    """Return the wanted config, or the saved one if none is given. Raise RunError if a resumed run must not change to it."""
    check_holds_a_run(folder, trainer.declared.run_kind)
    saved = load_saved(trainer.config, folder / CONFIG)
    check_changes(saved, wanted or saved, trainer.changeable)
    return wanted or saved


def check_changes(saved: Any, wanted: Any, changeable: Sequence[str]) -> None:
    """Raise RunError if a resumed run would change a setting that concerns the learner."""
    for (name, before, _), (_, after, _) in zip(describe(saved), describe(wanted), strict=True):
        may_change = name in (*changeable, *ShownConfig.__struct_fields__) or name.startswith("ppo.thresholds.")
        if before != after and not may_change:
            raise RunError(
                f"{name} is {before!r} in the saved run and cannot become {after!r} now; a resumed run "
                f"may change {', '.join(changeable)}. Start a new run for the rest"
            )


def _with_sinks(config: Any, tensorboard: bool | None, wandb: WandbMode | None) -> Any:
    """Return the config with these two settings replaced, unless they are None."""
    given = {"tensorboard": tensorboard, "wandb": wandb}
    return msgspec.structs.replace(config, **{name: value for name, value in given.items() if value is not None})


def _begin(config: Any, folder: Path | str | None, env: EnvSource | None, options: Options) -> RunResult:
    """Train in a new folder. Everything is built and checked before the folder is made."""
    trainer, group = options.trainer, options.group
    check_installed(tensorboard=config.tensorboard, wandb=config.wandb)
    with (
        shared_folder(None if folder is None else Path(folder), trainer.title(config), group, must_be_free=True) as place,
        named(trainer.title(config), env),
        trainer.prepare(config, options.encoder, group) as (ppo, relay),
        group.only_first(lambda: _new_log(config, place, options)) as log,
        _Session(config, place, ppo, relay, log, options) as session,
    ):
        return session.run()


@contextlib.contextmanager
def shared_folder(wanted: Path | None, title: str, group: Group, *, must_be_free: bool = False) -> Iterator[Path]:
    """Yield the folder in which all processes of a group train; see `chosen_folder`."""
    with group.only_first(lambda: chosen_folder(wanted, title)) as own:
        place = Path(group.first(lambda: str(own)))
        if must_be_free:
            group.first(lambda: check_is_free(place))
        yield place


@contextlib.contextmanager
def _new_log(config: Any, folder: Path, options: Options) -> Iterator[EventLog]:
    """Make the folder of a new run, hold its lock, save the config and open the log."""
    make_folder(folder)
    with locked(folder):
        check_is_free(folder)
        sinks = _all_sinks(config, folder, options)  # may fail; the folder must still be free then
        save(config, folder / CONFIG)
        with EventLog(folder / EVENTS, run=folder.name, sinks=sinks) as log:
            yield log


def _all_sinks(config: Any, folder: Path, options: Options) -> tuple[Sink, ...]:
    """Return the caller's sinks, and open those that the config asks for."""
    shown = sinks_in(folder, tensorboard=config.tensorboard, wandb=config.wandb, config=msgspec.to_builtins(config))
    return *options.sinks, *shown


def _resume(config: Any, folder: Path, options: Options) -> RunResult:
    """Continue the run in a folder from its latest checkpoint, or from the start if it has none. The caller holds its lock."""
    trainer, group = options.trainer, options.group
    checkpoint = group.first(lambda: _latest(folder))
    is_trained = checkpoint is not None and _is_trained(checkpoint, trainer.total_steps(config, group), _seconds_of(config))
    # A run that was killed after its last checkpoint goes on: its evaluation, its end or both are missing in the log.
    if checkpoint is not None and is_trained and group.first(lambda: _has_ended(folder)):
        group.first(lambda: _write_further_files(trainer, folder, config, checkpoint))
        return _result_of(checkpoint, folder)
    with trainer.prepare(config, options.encoder, group) as (ppo, relay):
        _load(ppo, checkpoint)  # before anything is changed, because it may not fit
        group.first(lambda: _write_further_files(trainer, folder, config, checkpoint))
        before = None if checkpoint is None else _ResumePoint.of(checkpoint)
        checkpoint = None  # free its memory: the learner has a copy of everything
        with (
            group.only_first(lambda: _reopened_log(config, folder, before, options)) as log,
            _Session(config, folder, ppo, relay, log, options) as session,
        ):
            return session.run() if before is None else session.continue_from(before, is_trained=is_trained)


def _seconds_of(config: Any) -> float | None:
    """Return the seconds after which training ends; None if the config has no time limit."""
    minutes: float | None = getattr(config, "minutes", None)
    return None if minutes is None else 60.0 * minutes


def _is_trained(checkpoint: Checkpoint, total_steps: int, seconds: float | None) -> bool:
    """Return whether training had ended with this checkpoint."""
    taken = checkpoint.state["ppo"]["counters"]["seconds"]
    return checkpoint.step >= total_steps or (seconds is not None and taken >= seconds)


def _latest(folder: Path) -> Checkpoint | None:
    store = open_store(folder)
    return store.load("latest") if store.has_any() else None


def _has_ended(folder: Path) -> bool:
    """Return whether the log says that the training has finished. An earlier end, with fewer steps, was cut when the run was resumed."""
    try:
        return any(isinstance(record.event, RunEnded) and record.event.status == "finished" for record in read(folder / EVENTS))
    except (OSError, EventError):
        return False


def _write_further_files(trainer: Trainer[Any], folder: Path, config: Any, checkpoint: Checkpoint | None) -> None:
    """Write the further files of a checkpoint, in case the process was killed before it wrote them, or an older checkpoint is used."""
    if checkpoint is not None and trainer.after_checkpoint is not None:
        trainer.after_checkpoint(folder, config, checkpoint.step, checkpoint.state)


def _result_of(checkpoint: Checkpoint, folder: Path) -> RunResult:
    seconds: float = checkpoint.state["seconds"]
    return RunResult(folder, "had finished", checkpoint.step, seconds, **checkpoint.state["summary"])


def _load(ppo: PPO, checkpoint: Checkpoint | None) -> None:
    if checkpoint is None:
        return
    try:
        ppo.load_state_dict(checkpoint.state["ppo"])
    except ValueError as error:
        raise RunError(f"cannot continue from {checkpoint.path}: {error}") from error


@dataclass(frozen=True, slots=True)
class _ResumePoint:
    """The checkpoint that a session continues from, without the learner's state, which takes much memory."""

    step: int
    best: tuple[bool, float]  # see `_Session.best`
    seconds: float  # time that all sessions before took
    events_offset: int
    summary: dict[str, Any]
    eval_steps: int
    awaits_evaluation: bool
    evaluation: dict[str, Any] | None  # event of its evaluation, if that was finished
    skipped: tuple[Refused, ...]  # newer checkpoints that could not be loaded

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _ResumePoint:
        names = ("best", "seconds", "events_offset", "summary", "eval_steps", "awaits_evaluation")
        kept = {name: checkpoint.state[name] for name in names}
        return cls(step=checkpoint.step, skipped=checkpoint.skipped, evaluation=(checkpoint.note or {}).get(_EVALUATION), **kept)


def _reopened_log(config: Any, folder: Path, before: _ResumePoint | None, options: Options) -> EventLog:
    """Save the config, cut the log after the checkpoint, and open it again."""
    path, sinks = folder / EVENTS, _all_sinks(config, folder, options)
    save(config, folder / CONFIG)
    if before is None:
        remove(path)  # everything in it happens again
        return EventLog(path, run=folder.name, sinks=sinks)
    return EventLog.resume(path, before.events_offset, step=before.step, sinks=sinks)


class _Session:
    """One process of a run, from its start or resumption to its end. Only rank 0 has the log and writes files."""

    def __init__(self, config: RunConfig, folder: Path, ppo: PPO, relay: Relay, log: EventLog | None, options: Options) -> None:
        self.config, self.folder, self.ppo, self.log, self.options = config, folder, ppo, log, options
        self.store = open_store(folder, keep=config.keep)
        make_evaluator = options.trainer.make_evaluator
        self.evaluator = None if make_evaluator is None else make_evaluator(config, folder)
        self.best = (False, -math.inf)  # of the best checkpoint: (True, its score), or (False, its step) if it has no score
        self.eval_steps = 0  # calls of `env.step` by evaluations at checkpoints, each of which steps all environments
        self.awaits_evaluation = False  # whether the checkpoint just saved still has to be evaluated
        self.began = time.perf_counter()
        ppo.telemetry.configured, ppo.telemetry.escalation = config.telemetry, config.telemetry_escalation
        self.profiler = Profiler(options.profile, folder, ppo.device, unit="update") if options.profile and log is not None else None
        self._kept_events: list[tuple[float, int, Event]] = []  # time, step and event; rank 0 writes them after every update
        if log is not None:
            log.clock = lambda: ppo.step
        relay.connect(self._keep_for_first if log is None else self.emit)
        self._latest: dict[str, Any] = {"episodes": 0, "mean_return": math.nan, "mean_length": math.nan}  # summary of the latest update
        self._has_ended = False

    def emit(self, event: Event, **where: Any) -> None:
        """Write an event, if this is rank 0 and its level of telemetry shows it."""
        shown = self.ppo.telemetry.shown(event)
        if self.log is not None and shown is not None:
            self.log.emit(shown, **where)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # The second signal stops a run in the middle of an update or an evaluation; a resumed run goes on from its latest checkpoint.
        if isinstance(error, KeyboardInterrupt) and not self._has_ended:
            self.emit(RunEnded(step=self.ppo.step, status="stopped", seconds=self._seconds()))
        if self.profiler is not None:
            self.profiler.close()
        if self.evaluator is not None:
            self.evaluator.close()

    def continue_from(self, before: _ResumePoint, *, is_trained: bool) -> RunResult:
        """Finish the pending evaluation of the checkpoint, then train on unless all steps were done."""
        self.best, self.eval_steps, self.awaits_evaluation = before.best, before.eval_steps, before.awaits_evaluation
        self._latest = before.summary
        self.began -= before.seconds
        for refused in before.skipped:
            self.emit(CheckpointRefused(checkpoint=refused.path.name, reason=refused.reason))
        if before.evaluation is not None:
            evaluated = CheckpointEvaluated(**before.evaluation)
            self.options.group.first(lambda: self._take_score(evaluated, before.summary))
        elif not self._evaluate_checkpoint(before.step, before.summary):
            return RunResult(self.folder, "stopped", before.step, self._seconds(), **before.summary)
        if not is_trained:
            return self.run()
        self._start()
        return self._finish(before.step, before.summary)

    def run(self) -> RunResult:
        """Train until the last step, or until a user stops the run. Save and evaluate checkpoints on the way."""
        ppo, config, group = self.ppo, self.config, self.options.group
        total_steps, seconds = self._start(), _seconds_of(config)
        try:
            for update in ppo.train(total_steps, seconds=seconds):
                with TELEMETRY:
                    self._write_events_of_others()
                if self.profiler is not None:
                    self.profiler.step()
                was_asked, callback = self.options.should_stop(), self.options.callback
                is_ended_by_callback = callback is not None and callback(ppo, update) is False
                stops = group.any(was_asked or is_ended_by_callback)
                is_last = ppo.progress(total_steps, seconds) == 1.0
                is_due = is_last or update.update % config.checkpoint_every == 0
                if stops or is_due:
                    self._save(update, is_due=is_due, is_last=is_last)
                # A user who stops the run does not wait for an evaluation; a resumed run catches up on it.
                if is_due and not stops:
                    stops = not self._evaluate_checkpoint(update.step, _summary(update))
                if stops:
                    break
        except TrainingStopped:
            self._save(update, is_due=False)
            self.emit(RunEnded(step=update.step, status="stopped", seconds=self._seconds()))
            raise
        if is_last and not stops:
            return self._finish(update.step, _summary(update))
        return self._end("stopped", update.step, _summary(update))

    def _start(self) -> int:
        """Emit the start of the session. Return the number of steps after which training ends."""
        ppo, group = self.ppo, self.options.group
        total_steps = self.options.trainer.total_steps(self.config, group)
        self.emit(msgspec.structs.replace(self.options.trainer.declared, total=total_steps))
        self.emit(
            RunStarted(
                step=ppo.step,
                total_steps=total_steps,
                steps_per_update=ppo.steps_per_update,
                env_id=self.options.trainer.title(self.config),
                num_envs=ppo.env.num_envs * group.world_size,
                device=str(ppo.device),
                parameters=count_parameters(ppo.policy),
                seconds=_seconds_of(self.config),
                seconds_taken=ppo.seconds,
            )
        )
        return total_steps

    def _keep_for_first(self, event: Event) -> None:
        """Keep an event of this rank for rank 0, except those that rank 0 emits for all ranks."""
        if not isinstance(event, OF_ALL_RANKS):
            self._kept_events.append((time.time(), self.ppo.step, event))

    def _write_events_of_others(self) -> None:
        """Write the events of the other ranks since the previous update."""
        if self.options.group.world_size == 1:
            return
        events_by_rank = self.options.group.gather_objects(self._kept_events)
        self._kept_events = []
        if self.log is not None:
            for rank, events in enumerate(events_by_rank):
                for at, step, event in events:
                    self.emit(event, rank=rank, time=at, step=step)

    def _save(self, update: Update, *, is_due: bool, is_last: bool = False) -> None:
        """Write a checkpoint after an update, and decide whether it is evaluated afterwards. All ranks must call it."""
        trainer, self._latest = self.options.trainer, _summary(update)
        is_evaluated = trainer.is_evaluated(self.config)
        steps = update.step / (self.ppo.env.num_envs * self.options.group.world_size)  # calls of `env.step` in training
        has_share = is_last or self.eval_steps <= trainer.eval_share(self.config) * steps
        self.awaits_evaluation = is_due and is_evaluated and has_share
        # Until its evaluation is done, a checkpoint has no score, and the latest one counts as the best of these.
        score = (False, float(update.step)) if is_evaluated else _score_in_training(update)
        is_best = score >= self.best
        self.best = max(score, self.best)
        self._write_checkpoint(update.step, is_best=is_best)

    def _write_checkpoint(self, step: int, *, is_best: bool) -> None:
        """Write a checkpoint of the present state. All ranks must call it."""
        ppo, trainer = self.ppo.state_dict(), self.options.trainer  # the state of all ranks, so all of them take part
        if self.log is None:
            return
        state = {
            "ppo": ppo,
            "events_offset": self.log.offset(),
            "best": self.best,
            "eval_steps": self.eval_steps,
            "awaits_evaluation": self.awaits_evaluation,
            "seconds": self._seconds(),
            "summary": self._latest,
        }
        self.store.save(step, state, is_best=is_best, note=self._latest)
        if trainer.after_checkpoint is not None:
            trainer.after_checkpoint(self.folder, self.config, step, state)

    def _evaluate_checkpoint(self, step: int, summary: dict[str, Any]) -> bool:
        """Score the policy of the checkpoint just saved or loaded. Return False if the evaluation was stopped.

        All checkpoints play the same episodes. Returns seen in training belong to the policies before the update, so they choose the best
        checkpoint only if no evaluation is configured.
        """

        def evaluate() -> bool:
            try:
                assert self.evaluator is not None
                evaluation = self.evaluator.score(self.ppo.policy, _CHOOSING, self.options.should_stop, name=f"step-{step}")
            except EvaluationStopped:
                return False
            if evaluation is not None:
                self._take_score(CheckpointEvaluated(step=step, steps=evaluation.steps, **_means(evaluation)), summary)
            return True

        group = self.options.group
        return group.first(lambda: evaluate() if self.awaits_evaluation else True)

    def _take_score(self, event: CheckpointEvaluated, summary: dict[str, Any]) -> None:
        """Emit the score of a checkpoint and store it with the checkpoint. A score that is not finite never becomes the best."""
        self.emit(event)
        score = (True, event.mean_return)
        is_best = math.isfinite(event.mean_return) and score >= self.best
        self.best = score if is_best else self.best
        self.eval_steps += event.steps
        self.store.annotate(event.step, {**summary, _EVALUATION: msgspec.structs.asdict(event)}, is_best=is_best)

    def _finish(self, step: int, summary: dict[str, Any]) -> RunResult:
        evaluation, has_stopped = self.options.group.first(self._evaluate_best)
        status: Literal["finished", "stopped"] = "stopped" if has_stopped else "finished"
        return self._end(status, step, summary, evaluation)

    def _end(
        self, status: Literal["finished", "stopped"], step: int, summary: dict[str, Any], evaluation: PolicyEvaluation | None = None
    ) -> RunResult:
        """Emit the end of the session and return its result."""
        seconds = self._seconds()
        self.emit(RunEnded(step=step, status=status, seconds=seconds))
        self._has_ended = True
        if self.profiler is not None:
            self.profiler.close()
        profile = None if self.profiler is None else self.profiler.table()
        return RunResult(self.folder, status, step, seconds, **summary, evaluation=evaluation, profile=profile)

    def _evaluate_best(self) -> tuple[PolicyEvaluation | None, bool]:
        """Evaluate the best policy on episodes that did not choose it; return the result and whether this was stopped."""
        if not self.options.trainer.is_evaluated(self.config):
            return None, False
        best = self.store.load("best")
        policy = copy.deepcopy(self.ppo.policy).eval()
        load_module(policy, best.state["ppo"]["policy"])
        try:
            assert self.evaluator is not None
            evaluation = self.evaluator.score(policy, _AT_THE_END, self.options.should_stop, name=f"best-step-{best.step}")
        except EvaluationStopped:
            return None, True
        if evaluation is not None:
            self.emit(Evaluated(step=best.step, **_means(evaluation)))
        return evaluation, False

    def _seconds(self) -> float:
        return time.perf_counter() - self.began


def _means(evaluation: PolicyEvaluation) -> dict[str, Any]:
    """Return the fields that both events of an evaluation have."""
    return {
        "episodes": len(evaluation.returns),
        "mean_return": evaluation.mean_return,
        "mean_length": evaluation.mean_length,
        "cut": evaluation.cut,
    }


def _score_in_training(update: Update) -> tuple[bool, float]:
    """Return the mean return once it is over enough episodes; before that, later checkpoints count as better."""
    if update.episodes < RECENT_EPISODES or math.isnan(update.mean_return):
        return False, float(update.step)
    return True, update.mean_return


def _summary(update: Update) -> dict[str, Any]:
    return {"episodes": update.episodes, "mean_return": update.mean_return, "mean_length": update.mean_length}
