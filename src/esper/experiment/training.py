"""Grows a model in a run folder: the host, then its twin if one was asked for, then the model file, the test and the report.

    result = grow_task(GrowTaskConfig(task="digits", twin=True), "runs/digits")
    result = grow_task(None, "runs/digits", resume=True)           # after a crash or Ctrl-C

    runs/digits/
        grow.toml                the settings
        controller.safetensors   with a trained controller: a copy of its file, which the run goes on with
        model.safetensors        the grown model, for esper.load
        report.html
        twin/                    the same training without growth
        ...                      and the files of every run

The file of a trained controller may be gone, or hold another controller, when the run goes on: training a controller replaces its file.
So the run keeps a copy, and goes on with that.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from esper.config import load_saved, saved_text
from esper.devices import determinism, find_device, threads
from esper.experiment.config import GrowTaskConfig
from esper.experiment.work import Work, make_work
from esper.files import MAX_FILE_BYTES, FileError, check_in_run, read_file, read_in_run
from esper.growth.batches import example_of
from esper.growth.config import GrowthError
from esper.growth.events import FinalTest, TwinCompared
from esper.growth.host.saving import load as load_grown, save_in_run, why_foreign_model
from esper.growth.host.slotted import add_slots
from esper.growth.lifecycle.stages import Controller
from esper.growth.report.html import REPORT, write_report
from esper.growth.report.story import Story, read_story
from esper.growth.run import MODEL, open_run
from esper.growth.training_loop import move
from esper.profiling import profiling
from esper.runs import Sink, check_installed, sinks_in
from esper.runs.cards import write_card
from esper.runs.folder import CONFIG, EVENTS, GROW, TWIN, RunError, chosen_folder
from esper.statistics import student_interval

COPY = "controller.safetensors"  # the run's own copy of the file of its controller
MAY_CHANGE = {
    "epochs",
    "device",
    "threads",
    "twin",
    "tensorboard",
    "wandb",
    "telemetry",
    "telemetry_escalation",
}  # settings that may change when a run goes on

MakeSink = Callable[[str], Sink]  # makes a sink, given the title of what is trained


@dataclass(frozen=True)
class ExperimentResult:
    """Result of `grow_task`."""

    folder: Path
    story: Story  # of the host
    twin: Story | None  # None: there is none, or the run stopped before its training
    report: Path
    status: str  # "finished", "stopped early", "stopped", or "had finished" if nothing was left to do
    profile: str | None = None  # table of the shares of time, if some steps were profiled


def grow_task(
    config: GrowTaskConfig | None,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    make_sink: MakeSink | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    profile: int = 0,
) -> ExperimentResult:
    """Grow the model of a task, or of the user's code, in the folder of a new run; with `resume`, go on with the run in the folder.

    A resumed run needs no `config`; a given one may differ in the settings of `MAY_CHANGE`. Without a `folder`, a new run gets one of its
    own under runs/. `make_sink(title)` makes a sink for the events of the host's training, and another one for those of its twin's. The run
    stops after the step in which `should_stop()` becomes true, with a checkpoint. `profile` steps of the host are profiled after a warm-up:
    the folder gets a trace, the result a table.
    """
    if resume:
        if folder is None:
            raise RunError("there is no folder to resume in; name that of the run")
        saved = load_saved(GrowTaskConfig, Path(folder) / GROW)
        config = config or saved
        check_same(saved, config, Path(folder))
    if config is None:
        raise RunError("a new run needs a config; with resume=True, the run in the folder goes on with its own")
    device = find_device(config.device)
    with (
        threads(config.threads),
        determinism(config.deterministic),
        run_folder(config, None if folder is None else Path(folder)) as place,
    ):
        return _grow_in(place, config, resume=resume, device=device, make_sink=make_sink, should_stop=should_stop, profile=profile)


def _grow_in(
    folder: Path,
    config: GrowTaskConfig,
    *,
    resume: bool,
    device: torch.device,
    make_sink: MakeSink | None,
    should_stop: Callable[[], bool],
    profile: int,
) -> ExperimentResult:
    """Train the host and its twin in a folder, as far as they are not trained yet, and write the report."""
    goes_on = resume and (folder / CONFIG).is_file()  # a run that was killed before it had one begins from the start
    was_over = goes_on and _all_complete(folder, config)
    shares = _train_in(
        folder,
        config,
        resume=goes_on,
        controller_file=folder / COPY if resume else None,
        device=device,
        sink=None if make_sink is None else partial(make_sink, config.title),
        should_stop=should_stop,
        profile=profile,
    )
    twin = None
    if config.twin and not should_stop():
        check_in_run(folder / TWIN)
        never = msgspec.structs.replace(config, controller="never", twin=False)
        twin_goes_on = (folder / TWIN / CONFIG).exists()
        twin_sink = None if make_sink is None else partial(make_sink, "its twin, which never grows")
        _train_in(folder / TWIN, never, resume=twin_goes_on, device=device, sink=twin_sink, should_stop=should_stop, twin_of=folder / MODEL)
        twin = read_story(folder / TWIN)
    story = read_story(folder)
    status = "had finished" if was_over else "stopped"
    if not was_over and _all_complete(folder, config) and story.finished is not None:
        status = story.finished.why
    for place in (folder, folder / TWIN):
        if (place / MODEL).is_file():
            write_card(place)
    return ExperimentResult(folder, story, twin, write_report(folder), status, shares)


def _train_in(
    folder: Path,
    config: GrowTaskConfig,
    *,
    resume: bool,
    device: torch.device,
    sink: Callable[[], Sink] | None,
    should_stop: Callable[[], bool],
    controller_file: Path | None = None,
    twin_of: Path | None = None,
    profile: int = 0,
) -> str | None:
    """Train one model as far as it is not trained yet, then test and save it. Return the shares of time if `profile` steps are profiled.

    `controller_file` is the run's own copy of its controller's file; None if it has none yet. `twin_of` is the file of the grown model
    that a twin is compared with.
    """
    if resume and _is_complete(folder, config):
        return None
    check_installed(tensorboard=config.tensorboard, wandb=config.wandb)
    work = make_work(config, device)
    training = work.training(config)
    make_controller(config, controller_file)  # raises if its file is wrong, before anything is written
    # The settings are written last: a folder that has them can be resumed, and needs the copy of the controller then.
    files = {**controller_copy(config, folder, controller_file), GROW: saved_text(config).encode()}
    with open_run(
        folder,
        resume=resume,
        config=work.growth,
        files=files,
        results=(MODEL, REPORT),
        sinks=lambda: [*([] if sink is None else [sink()]), *_sinks_of(folder, config, is_twin=twin_of is not None)],
        should_stop=should_stop,
    ) as run:
        controller = make_controller(config, folder / COPY)
        with profiling(profile, folder, device) as training.profiler:
            grown = training.run(controller, run)
        shares = None if training.profiler is None else training.profiler.table()
        if grown.status == "stopped":
            return shares
        if work.score is not None:
            before, after = work.score(work.model), work.score(grown.model)
            run.emit(FinalTest(loss_before=before.loss, loss=after.loss, accuracy_before=before.accuracy, accuracy=after.accuracy))
        compared = None if twin_of is None else _compared(work, twin_of, twin=grown.model)  # the model trained here is the twin
        if compared is not None:
            run.emit(compared)
        save_in_run(grown.model, folder)
        return shares


def make_controller(config: GrowTaskConfig, own_copy: Path | None) -> Controller | str:
    """Return the name of the controller or, if it is trained, load it: from the run's own copy of its file, if the run has one."""
    if config.controller_file is None:
        return config.controller
    from esper.controller.description import ControllerError
    from esper.controller.learned import load_controller

    try:
        return load_controller(own_copy or config.controller_file)
    except ControllerError as error:
        raise RunError(str(error)) from error


def controller_copy(config: GrowTaskConfig, folder: Path, own_copy: Path | None) -> dict[str, bytes]:
    """Return name -> content of the controller's file, to be copied into the folder; empty if there is none or the run has its copy."""
    if config.controller_file is None or own_copy is not None:
        return {}
    try:
        content = read_file(config.controller_file, max_bytes=MAX_FILE_BYTES)
        if os.path.lexists(folder / COPY) and read_in_run(folder / COPY, max_bytes=MAX_FILE_BYTES) != content:
            raise RunError(f"{folder} holds a {COPY}, which the run would replace; choose another folder")
    except (OSError, FileError) as error:
        raise RunError(f"the controller's file cannot be read: {error}") from error
    return {COPY: content}


def _sinks_of(folder: Path, config: GrowTaskConfig, *, is_twin: bool) -> list[Sink]:
    """Return the sinks named in the config. A twin has its own, in its own folder."""
    name = f"{folder.parent.name}-{folder.name}" if is_twin else folder.name
    return sinks_in(folder, tensorboard=config.tensorboard, wandb=config.wandb, config=msgspec.to_builtins(config), run=name)


def _compared(work: Work, grown: Path, *, twin: nn.Module) -> TwinCompared | None:
    """Compare the grown model with its twin sample by sample. Return None without a test part or an accuracy."""
    differences = None if work.compare is None else work.compare(load_grown(grown, model=copy.deepcopy(work.model)), twin)
    if differences is None or len(differences) < 2:
        return None
    interval = student_interval(differences.numpy())
    return TwinCompared(samples=len(differences), accuracy_difference=interval.estimate, low=interval.low, high=interval.high)


def _is_complete(folder: Path, config: GrowTaskConfig) -> bool:
    """Return whether the run in the folder has finished all epochs of the config and has written its model."""
    if not (folder / MODEL).exists() or not (folder / EVENTS).exists():
        return False
    story = read_story(folder)
    is_over = story.is_over and story.started is not None and story.started.epochs == config.epochs
    return is_over and why_foreign_model(folder) is None


def _all_complete(folder: Path, config: GrowTaskConfig) -> bool:
    return _is_complete(folder, config) and (not config.twin or _is_complete(folder / TWIN, config))


def check_same(saved: GrowTaskConfig, wanted: GrowTaskConfig, folder: Path) -> None:
    """Raise RunError if a run cannot go on with the wanted config."""
    for name in GrowTaskConfig.__struct_fields__:
        before, now = getattr(saved, name), getattr(wanted, name)
        if before != now and name not in MAY_CHANGE:
            raise RunError(f"{name} is {before!r} in the run in {folder} and cannot become {now!r}; start a new run for that")
    if wanted.epochs != saved.epochs and saved.schedule != "none":
        raise RunError(f"the {saved.schedule} schedule of the run in {folder} is made for {saved.epochs} epochs; start a new run for more")
    if wanted.twin < saved.twin:
        raise RunError(f"the run in {folder} has a twin, and it stays")


def run_folder(config: GrowTaskConfig, wanted: Path | None) -> contextlib.AbstractContextManager[Path]:
    """Return the context of the folder to train in; see `chosen_folder`."""
    return chosen_folder(wanted, f"{config.task}-{config.host}" if config.task is not None else str(config.model))


def has_begun(folder: Path) -> bool:
    """Return whether a training has begun in the folder."""
    return (folder / EVENTS).is_file() and read_story(folder).began is not None


def plan(config: GrowTaskConfig) -> tuple[dict[str, Any], str]:
    """Return the figures of the run that this config would start, and a table of the places where seeds could grow. Writes nothing."""
    device = find_device(config.device)
    work = make_work(config, device)
    make_controller(config, None)  # raises if its file is wrong
    batch = next(iter(work.val_loader), None)
    if batch is None:
        raise GrowthError("the validation loader yields nothing; it needs at least one batch")
    slotted = add_slots(work.model, example_of(move(batch, device)), slots=config.slots)
    figures = {
        "title": config.title,
        "device": str(device),
        "controller": config.controller,
        "epochs": config.epochs,
        "steps_per_epoch": len(work.train_loader) if isinstance(work.train_loader, Sized) else None,
        "parameters": slotted.discovery.host.parameters,
        "flops_per_sample": slotted.discovery.host.flops,
        "slots": list(slotted.slots),
        "test_part": work.score is not None,
    }
    return figures, slotted.describe()
