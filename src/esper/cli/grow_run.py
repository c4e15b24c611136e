"""A run of `esper grow` in its folder: the host, then its twin where one was asked for, then the model file, the test and the report.

runs/digits-starved-20260131-235959/
  grow.toml                what was asked for
  controller.safetensors   with a trained controller: a copy of its file, which the run goes on with
  model.safetensors        the grown model, for esper.load
  report.html
  twin/                    the same training without growth
  ...                      and what every run has
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import nn

from esper.cli.grow_arguments import SAVED
from esper.cli.grow_config import GrowTaskConfig
from esper.cli.grow_controller import COPY, controller_copy, make_controller
from esper.cli.grow_work import Score, Work, make_work
from esper.config import load_saved, saved_text
from esper.files import make_folder
from esper.growth.events import FinalTest, TwinCompared
from esper.growth.host.saving import load as load_grown
from esper.growth.report.html import REPORT, TWIN, write_report
from esper.growth.report.story import Story, read_story
from esper.growth.run import MODEL, open_run
from esper.runs import Sink, check_installed, sinks_in
from esper.runs.folder import CONFIG, EVENTS, RunError, default_folder, remove_empty
from esper.statistics import student_interval

MAY_CHANGE = {"epochs", "device", "threads", "twin", "tensorboard", "wandb"}  # when a run goes on

MakeSink = Callable[[str], Sink]  # from the title of what is trained


@dataclass(frozen=True)
class Result:
    folder: Path
    story: Story
    twin: Story | None
    report: Path
    status: str  # "finished", "stopped early", "stopped", or "had finished" where nothing was left to do


def grow_in(
    folder: Path,
    config: GrowTaskConfig,
    *,
    resume: bool,
    device: torch.device,
    make_sink: MakeSink,
    should_stop: Callable[[], bool],
) -> Result:
    if resume:
        _check_same(load_saved(GrowTaskConfig, folder / SAVED), config, folder)
    goes_on = resume and (folder / CONFIG).is_file()  # a run that was killed before it had one begins from the start
    was_over = goes_on and _all_complete(folder, config)
    _train(
        folder,
        config,
        resume=goes_on,
        controller_file=folder / COPY if resume else None,
        device=device,
        sink=partial(make_sink, config.title),
        should_stop=should_stop,
    )
    twin = None
    if config.twin and not should_stop():
        never = msgspec.structs.replace(config, controller="never", twin=False)
        has_begun = (folder / TWIN / CONFIG).exists()
        twin_sink = partial(make_sink, "its twin, which never grows")
        _train(folder / TWIN, never, resume=has_begun, device=device, sink=twin_sink, should_stop=should_stop, twin_of=folder / MODEL)
        twin = read_story(folder / TWIN)
    story = read_story(folder)
    status = "had finished" if was_over else "stopped"
    if not was_over and _all_complete(folder, config) and story.finished is not None:
        status = story.finished.why
    return Result(folder, story, twin, write_report(folder), status)


def _train(
    folder: Path,
    config: GrowTaskConfig,
    *,
    resume: bool,
    device: torch.device,
    sink: Callable[[], Sink],
    should_stop: Callable[[], bool],
    controller_file: Path | None = None,
    twin_of: Path | None = None,
) -> None:
    """Do what is left to do, which may be nothing.

    `controller_file` is the run's own copy of its controller's file; None where it has none yet. `twin_of` is the file of the grown model
    that a twin is held against.
    """
    if resume and _is_complete(folder, config):
        return
    check_installed(tensorboard=config.tensorboard, wandb=config.wandb)
    work = make_work(config, device)
    training = work.training(config)
    make_controller(config, controller_file)  # before anything is written
    files = {**controller_copy(config, folder, controller_file), SAVED: saved_text(config).encode()}
    with open_run(
        folder,
        resume=resume,
        config=work.growth,
        files=files,
        results=(MODEL, REPORT),
        sinks=lambda: [sink(), *_shown(folder, config, is_twin=twin_of is not None)],
        should_stop=should_stop,
    ) as run:
        controller = make_controller(config, folder / COPY)
        grown = training.run(controller, run)
        if grown.status == "stopped":
            return
        if work.score is not None:
            run.emit(_tested(work.score(work.model), work.score(grown.model)))
        compared = None if twin_of is None else _compared(work, twin_of, grown.model)
        if compared is not None:
            run.emit(compared)
        grown.save(folder / MODEL)


def _shown(folder: Path, config: GrowTaskConfig, *, is_twin: bool) -> list[Sink]:
    """Return the sinks that the run was asked for; its twin has its own, in its own folder."""
    name = f"{folder.parent.name}-{folder.name}" if is_twin else folder.name
    return sinks_in(folder, tensorboard=config.tensorboard, wandb=config.wandb, config=msgspec.to_builtins(config), run=name)


def _tested(before: Score, after: Score) -> FinalTest:
    return FinalTest(loss_before=before.loss, loss=after.loss, accuracy_before=before.accuracy, accuracy=after.accuracy)


def _compared(work: Work, grown: Path, twin: nn.Module) -> TwinCompared | None:
    """None where there is no test part, or no accuracy."""
    differences = None if work.compare is None else work.compare(load_grown(grown, model=copy.deepcopy(work.model)), twin)
    if differences is None or len(differences) < 2:
        return None
    interval = student_interval(differences.numpy())
    return TwinCompared(samples=len(differences), accuracy_difference=interval.estimate, low=interval.low, high=interval.high)


def _is_complete(folder: Path, config: GrowTaskConfig) -> bool:
    """Everything was done, and no more is asked for."""
    if not (folder / MODEL).exists() or not (folder / EVENTS).exists():
        return False
    story = read_story(folder)
    return story.is_over and story.started is not None and story.started.epochs == config.epochs


def _all_complete(folder: Path, config: GrowTaskConfig) -> bool:
    return _is_complete(folder, config) and (not config.twin or _is_complete(folder / TWIN, config))


def _check_same(saved: GrowTaskConfig, wanted: GrowTaskConfig, folder: Path) -> None:
    for name in GrowTaskConfig.__struct_fields__:
        before, now = getattr(saved, name), getattr(wanted, name)
        if before != now and name not in MAY_CHANGE:
            raise RunError(f"{name} is {before!r} in the run in {folder} and cannot become {now!r}; start a new run for that")
    if wanted.epochs != saved.epochs and saved.schedule != "none":
        raise RunError(f"the {saved.schedule} schedule of the run in {folder} is made for {saved.epochs} epochs; start a new run for more")
    if wanted.twin < saved.twin:
        raise RunError(f"the run in {folder} has a twin, and it stays")


@contextlib.contextmanager
def run_folder(config: GrowTaskConfig, wanted: Path | None) -> Iterator[Path]:
    """The folder to train in. One that is made here, and in which no training begins, is removed."""
    if wanted is not None:
        yield wanted  # made later, by the run that holds its lock
        return
    folder, made = _proposed(config), list[Path]()
    while folder not in (made := [*make_folder(folder), *made]):  # at once, so that nobody else can choose it
        folder = _proposed(config)
    try:
        yield folder
    except BaseException:
        remove_empty(made)
        raise


def _proposed(config: GrowTaskConfig) -> Path:
    return default_folder(f"{config.task}-{config.host}" if config.task is not None else str(config.model))


def has_begun(folder: Path) -> bool:
    return (folder / EVENTS).is_file() and read_story(folder).began is not None
