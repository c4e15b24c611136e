"""Train a model and grow it: `grow` is a whole training for a model, two data loaders and a loss.

grown = esper.grow(model, train_loader, val_loader, loss_fn=F.cross_entropy, epochs=30)
print(grown.report())
torch.save(grown.model.state_dict(), "model.pt")
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from esper.config import ConfigError
from esper.growth.arguments import MakeHostOptimizer, MakeScheduler
from esper.growth.batches import LossFunction, StepLoss, with_article
from esper.growth.config import GrowthConfig, GrowthError, TrainingConfig
from esper.growth.controllers.baselines import as_controller
from esper.growth.host.saving import save_in_run
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.governor import Diverged
from esper.growth.lifecycle.stages import Controller
from esper.growth.metrics import Metric
from esper.growth.report.html import REPORT, write_report
from esper.growth.report.summary import ProgressLines
from esper.growth.run import MODEL, Grown, GrowthRun, open_run
from esper.growth.telemetry import Callbacks, SinksWithoutLog, check_sinks
from esper.growth.training_loop import Training, objection, step_loss_of
from esper.profiling import profiling
from esper.runs import Sink, WandbMode, check_installed, sinks_in
from esper.runs.cards import write_card
from esper.runs.telemetry import Level


def default_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def grow(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    epochs: int,
    step_loss: StepLoss | None = None,
    optimizer: MakeHostOptimizer = default_optimizer,
    scheduler: MakeScheduler | None = None,
    step_schedule: Literal["auto", "epoch", "step"] = "auto",
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    keep: Literal["best", "last"] = "best",
    best_by: str | None = None,
    controller: Controller | str = "heuristic",
    config: GrowthConfig | None = None,
    metrics: Mapping[str, Metric] | None = None,
    run: Path | str | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    wandb: WandbMode | None = None,
    progress: bool | None = None,
    callbacks: Sequence[Any] = (),
    sinks: Sequence[Sink] = (),
    telemetry: Level = "normal",
    profile: int = 0,
) -> Grown:
    """Train a copy of the model, grow it where that pays, and return the result. The model itself is not changed.

    **Data and loss.** Either a batch is a pair (inputs, targets) and the loss is `loss_fn(outputs, targets)`, or a batch is anything and
    the loss is `step_loss(model, batch)`: one number, or better one per sample, of which the training takes the mean. Intervals of
    contributions rest on samples where the losses of samples are known, and otherwise on batches. Batches are moved to the model's device.

    **Optimiser.** `optimizer(parameters)` returns the optimiser, `scheduler(optimizer)` its schedule. `accumulate` batches make one step
    of the optimiser, with the mean loss over their samples; the batches left over at the end of an epoch make a step too. `max_grad_norm`
    clips the gradient of the host; `config.seed_optimizer` clips each seed separately.

    `step_schedule` says when the schedule is stepped: after every "epoch", after every "step" of the optimiser, or "auto". With "auto",
    OneCycleLR and CyclicLR are stepped after every step, all others after every epoch, and ReduceLROnPlateau with the validation loss.
    "auto" warns about a LambdaLR or a schedule class of your own, whose unit of time is unknown, and about schedules that would end long
    after the training.

    **Result.** With `keep="best"`, the model is returned as it was after the epoch with the lowest validation loss, with every controller.
    With `best_by`, the name of a metric, it is the epoch with the highest value of that metric; among equal values, the lowest loss
    decides. If lower is better, let the metric return the negative. An epoch counts only if all seeds that were connected in it are kept
    in the end. Seeds that were connected later are taken out, and the ledger says so; the losses of all epochs are kept. This holds for a
    training that ends early or by Ctrl-C too. "last" returns the state after the last epoch.

    **Growth.** `controller` decides what grows, where and when: a name ("heuristic", "lookahead", "learned", "never", "random", "schedule")
    or an object with a method `decide(state)`. `config` holds all other settings of growth, with every controller: a trained one makes only
    the moves that they allow.

    **Precision.** `precision` is the autocast precision of all forward passes; "float16" adds a GradScaler. The weights stay float32.

    **Metrics.** `metrics` maps names to functions of a batch, such as {"accuracy": fn}: `fn(outputs, targets)` beside a `loss_fn`,
    `fn(model, batch)` beside a `step_loss`. They are computed in the pass that computes the validation loss, and averaged over samples.
    The growth does not depend on them, and the result only if one of them is `best_by`.

    **Run folder.** `run` is a folder for events, checkpoints and results. `resume` continues from its last checkpoint: from the end of an
    epoch, or from the exact step if the training loader has a `state_dict`. At the end, the folder holds the returned model, for
    `esper.load(run, model=...)`, and report.html. Ctrl-C ends the training early with the status "stopped" and writes both for the model
    with the seeds fossilized so far. If the training diverges, both are written for the model that the governor restored. After any other
    error, resume from the last checkpoint.

    `tensorboard` and `wandb` ("offline" or "online") also write losses, slots and results into the run folder, in the formats of those
    tools.

    **Watching.** `progress` prints a line per epoch with the decision on stderr; None prints it only if stderr is a terminal. `callbacks`
    are functions that are called with every event, or objects with methods such as `on_epoch_ended(event)`; one that raises an error is
    switched off with a warning. `sinks` are objects with `write(record)` and `close()`, which get every event in a thread of their own.

    `telemetry` is the level of the events in the run folder: "off", "minimal", "normal" or "debug" (see `esper.runs.telemetry`). `profile`
    steps are profiled after a warm-up: the run folder gets a trace for Chrome, and stderr a table of the shares of time.
    """
    check_call(model, epochs=epochs, config=config, run=run)
    if (tensorboard or wandb or profile) and run is None:
        raise GrowthError("tensorboard, wandb and profile write into the folder of a run; pass the folder as run=...")
    if resume and run is None:
        raise GrowthError("resume needs the folder of the run: run=...")
    check_installed(tensorboard=tensorboard, wandb=wandb)
    own_callbacks, own_sinks = Callbacks(callbacks), check_sinks(sinks)
    config = config or GrowthConfig()
    controller = as_controller(controller, config)
    training = Training(
        copy.deepcopy(model),
        train_loader,
        val_loader,
        step_loss_of(loss_fn, step_loss),
        epochs=epochs,
        make_optimizer=optimizer,
        make_scheduler=scheduler,
        config=training_config(
            config,
            precision=precision,
            accumulate=accumulate,
            max_grad_norm=max_grad_norm,
            step_schedule=step_schedule,
            keep=keep,
            best_by=best_by,
            telemetry=telemetry,
        ),
        metrics=metrics,
    )
    if progress or (progress is None and sys.stderr is not None and sys.stderr.isatty()):
        training.listeners.append(ProgressLines(type(model).__name__))
    if callbacks:
        training.listeners.append(own_callbacks)
    grower = training.prepare(controller)
    if why := objection(grower):
        warnings.warn(why, stacklevel=2)

    if run is None:
        without_log = SinksWithoutLog(own_sinks, run=type(model).__name__)
        if own_sinks:
            training.listeners.append(without_log)
        try:
            return training.run(controller, may_interrupt=True)
        finally:
            without_log.close()

    def all_sinks() -> list[Sink]:
        return [*own_sinks, *sinks_in(Path(run), tensorboard=tensorboard, wandb=wandb, config=msgspec.to_builtins(training.config))]

    with open_run(run, resume=resume, config=training.config, results=(MODEL, REPORT), sinks=all_sinks) as opened:
        try:
            with profiling(profile, opened.folder, training.device) as training.profiler:
                grown = training.run(controller, opened, may_interrupt=True)
        except Diverged as error:
            _write_result(opened, error.model, otherwise="the model is the attribute `model` of the error that follows")
            raise
        if training.profiler is not None:
            print(training.profiler.table(), file=sys.stderr)
        _write_result(opened, grown.model, otherwise="save the model by grown.save(path)")
        return grown


def check_call(model: object, *, epochs: object, config: object, run: object) -> None:
    """Raise a GrowthError for a wrong model, number of epochs, config or run folder, or inside inference mode."""
    if isinstance(model, type) or not isinstance(model, nn.Module):
        what = (
            f"the class {model.__name__}; pass an instance, {model.__name__}()" if isinstance(model, type) else f"a {type(model).__name__}"
        )
        hint = "; pass the model without slots, because grow adds them" if isinstance(model, Slotted) else ""
        raise GrowthError(f"model must be an nn.Module, and is {what}{hint}")
    on_meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if on_meta is not None:
        raise GrowthError(f"{on_meta} is on the meta device, so it has no values; make the model on another device, or load its weights")
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise GrowthError(f"epochs must be a whole number from 1 on, and is {epochs!r}")
    if config is not None and not isinstance(config, GrowthConfig):
        raise GrowthError(
            f"config must be a GrowthConfig, and is {with_article(type(config).__name__)}; write config=esper.GrowthConfig(...)"
        )
    if run is not None and not isinstance(run, str | PathLike):
        raise GrowthError(f"run must be the path of a folder, and is {run!r}")
    if torch.is_inference_mode_enabled():
        raise GrowthError("grow was called inside torch.inference_mode, where nothing can be trained; call it outside")


def training_config(
    config: GrowthConfig | None = None,
    *,
    precision: str = "float32",
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    step_schedule: str = "auto",
    keep: str = "best",
    best_by: str | None = None,
    telemetry: str = "normal",
) -> TrainingConfig:
    """Return the settings of growth and of the training as one config, which is stored in the folder of the run."""
    growth = config or GrowthConfig()
    training: dict[str, Any] = {
        "precision": precision,
        "accumulate": accumulate,
        "max_grad_norm": max_grad_norm,
        "step_schedule": step_schedule,
        "keep": keep,
        "best_by": best_by,
        "telemetry": telemetry,
    }
    try:
        return TrainingConfig(**{name: getattr(growth, name) for name in GrowthConfig.__struct_fields__}, **training)
    except ConfigError as error:
        raise GrowthError(str(error)) from error


def _write_result(run: GrowthRun, model: object, *, otherwise: str) -> None:
    """Write the model and the report into the run folder. A failure only warns, so that the result of the training is not lost.

    `otherwise` is the end of the warning: where the model is if it could not be written.
    """
    try:
        if isinstance(model, nn.Module):
            save_in_run(model, run.folder)
        run.flush()  # the report is made from the events in the folder
        write_report(run.folder)
        write_card(run.folder)
    except Exception as error:
        warnings.warn(
            f"the model and the report could not be written into {run.folder}: {error}; {otherwise}",
            RuntimeWarning,
            stacklevel=3,
        )
