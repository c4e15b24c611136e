"""The run of a `grow` call: its result (`Grown`), and its folder with events and checkpoints, from which it can be resumed.

A checkpoint is written before the first epoch and after every epoch. If the training loader has a `state_dict`, one is also written when
the run is stopped within an epoch. A checkpoint holds the weights, optimisers, schedule, lifecycles, ledger, snapshots, best states,
position in the data and the global random states. So a loader that shuffles by the global generator gives the same batches when an epoch
is repeated.

If an error ends a new run before its first epoch is over, nothing of the run is left. Only files made by this process are removed, while it
holds the lock of the folder, because another process may have chosen the same folder at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from esper.config import load_saved, save
from esper.display import Card, Displayed
from esper.files import remove, write_in_run
from esper.growth.config import GrowthConfig, GrowthError
from esper.growth.events import GrowthFinished, LoaderRestarted
from esper.growth.grower import KIND as KIND, STEPS_PER_EPOCH, Grower
from esper.growth.host.saving import MODEL as MODEL, save as save_model, why_foreign_model
from esper.growth.lifecycle.governor import Diverged
from esper.growth.lifecycle.ledger import LEDGER_HEADING, Ledger, ledger_rows
from esper.growth.lifecycle.stages import Cost
from esper.growth.report.story import metric_in_words
from esper.growth.report.summary import result_in_words
from esper.growth.trials import Stateful
from esper.profiling import TRACE
from esper.rng import global_state, set_global_state
from esper.runs import SINK_FOLDERS, Checkpoint, CheckpointRefused, CheckpointStore, Event, EventLog, Sink
from esper.runs.cards import write_model_card
from esper.runs.folder import CONFIG, EVENTS, check_holds_a_run, locked, new_folder
from esper.text_table import duration, figure

Status = Literal["finished", "stopped early", "stopped"]


@dataclass(frozen=True, slots=True)
class Grown(Displayed):
    """The result of `grow`: the model, its losses before and after, its cost, and the ledger of all seeds.

    `val_loss`, `added`, `metrics` and the seeds that count as kept are those of the model. `epochs`, the losses by epoch, `gflops` and
    `rollbacks` are those of the whole training.
    """

    model: nn.Module  # with the fossilized seeds built in
    status: Status
    epochs: int
    val_loss_before: float
    val_loss: float
    train_losses: tuple[float, ...]  # per epoch
    val_losses: tuple[float, ...]
    host: Cost
    added: Cost
    gflops: float  # of the whole training, including pruned seeds and measurements
    rollbacks: int
    ledger: Ledger
    controller: str
    optimizer: str
    seconds: float
    folder: Path | None = None
    had_finished: bool = False  # the run was resumed after its end, so nothing was trained
    note: str = ""  # reason why nothing could grow, if the controller knew it in advance
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the model on the validation data
    best_epoch: int | None = None  # the model is as it was after this epoch, which was the best; None: as it was last

    def report(self) -> str:
        """Return one line with the kept seeds, the losses and the costs."""
        kept, dot, figures = result_in_words(finished(self)).partition(" · ")
        finish = "had finished already" if self.had_finished else ""
        resume = f"go on with run='{self.folder}', resume=True" if self.status == "stopped" and self.folder is not None else ""
        return dot.join(filter(None, [kept, self.note, figures, self.optimizer, finish, resume]))

    def card(self) -> Card:
        """Return the result for notebooks: figures, the curve of the validation loss, and all seeds."""

        def sized(host: int, added: int) -> str:
            return f"{host + added:,} ({added / max(host, 1):+.1%} by seeds)"

        return Card(
            title=f"{type(self.model).__name__}: {result_in_words(finished(self)).partition(' · ')[0]}",
            figures=[
                ("status", f"{self.status}, {self.epochs} epochs, {duration(self.seconds)}"),
                *([] if self.best_epoch is None else [("state", f"after epoch {self.best_epoch}, which was the best")]),
                ("validation loss", f"{figure(self.val_loss_before, 3)} → {figure(self.val_loss, 3)}"),
                *((name, metric_in_words(name, value)) for name, value in self.metrics.items()),
                ("parameters", sized(self.host.parameters, self.added.parameters)),
                ("FLOPs per sample", sized(self.host.flops, self.added.flops)),
                ("rollbacks", str(self.rollbacks)),
                ("controller", self.controller),
                ("optimiser", self.optimizer),
                *([("folder", str(self.folder))] if self.folder is not None else []),
            ],
            heading=LEDGER_HEADING,
            rows=ledger_rows(self.ledger.seeds, is_short=True),
            curve=self.val_losses,
            curve_name="validation loss by epoch",
        )

    def save(self, path: Path | str, *, card: bool = True) -> None:
        """Write weights and seeds to a safetensors file, and a model card beside it, unless `card` is False.

        `esper.load(path, model=new_instance)` restores the grown model. The card has the name of the file and the suffix .md. A file
        of this name that is not a card is left alone.
        """
        save_model(self.model, path, card=False)
        if card:
            write_model_card(path, self.card(), made_by="`esper.grow(...)` in a Python program")


def finished(grown: Grown) -> GrowthFinished:
    """Return the event that ends a run."""
    return GrowthFinished(
        epoch=grown.epochs,
        why=grown.status,
        tried=len(grown.ledger.seeds),
        kept=grown.ledger.count("kept"),
        rollbacks=grown.rollbacks,
        val_loss_before=grown.val_loss_before,
        val_loss=grown.val_loss,
        parameters=grown.host.parameters + grown.added.parameters,
        parameters_added=grown.added.parameters,
        flops=grown.host.flops + grown.added.flops,
        flops_added=grown.added.flops,
        total_gflops=grown.gflops,
        seconds=grown.seconds,
        metrics=dict(grown.metrics),
        best_epoch=grown.best_epoch,
    )


class GrowthRun:
    """The folder of a run, which a training writes events and checkpoints to.

    `checkpoint` is the one to resume from, None for a new run. `should_stop()` is asked after every step.
    """

    def __init__(
        self, folder: Path, log: EventLog, checkpoint: Checkpoint | None, *, keep: int = 3, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.folder, self._model = folder, folder / MODEL
        self.is_resumed = checkpoint is not None
        self._log, self._checkpoint, self.should_stop = log, checkpoint, should_stop
        self._store = CheckpointStore.of_run(folder, kind=KIND, keep=keep)
        self._best = float("inf")
        self.epochs_saved = 0  # by this process

    def has_checkpoint(self) -> bool:
        """Return whether the folder holds a checkpoint. Looks at the files, because a signal may interrupt `save` after one is written."""
        return self._store.has_any()

    def emit(self, event: Event) -> None:
        self._log.emit(event)

    def flush(self) -> None:
        """Write all events that were emitted to the disk."""
        self._log.flush()

    def restore(self, grower: Grower, loader: Iterable[Any], val_loss_before: float) -> float:
        """Restore grower, loader and random states of a resumed run. Return the validation loss before all training."""
        if self._checkpoint is None:
            return val_loss_before
        state = self._checkpoint.state
        grower.load_state_dict(state["grower"])
        for refused in self._checkpoint.skipped:
            self.emit(CheckpointRefused(checkpoint=refused.path.name, reason=refused.reason))
        if state["loader"] is None:
            self.emit(LoaderRestarted(epoch=grower.epoch))
        elif isinstance(loader, Stateful):
            loader.load_state_dict(state["loader"])
        else:
            raise GrowthError(
                f"the checkpoint holds a position in the data, and this loader ({type(loader).__name__}) has no load_state_dict; "
                "resume with a loader of the same type"
            )
        set_global_state(state["random"])
        self._best = state["best"]
        self._checkpoint = None  # free the memory of a second copy of everything
        if foreign := why_foreign_model(self.folder):
            self.emit(CheckpointRefused(checkpoint=MODEL, reason=f"{self._model} {foreign}; this run writes its own in its place"))
        remove(self._model)  # the result of an earlier stop, which is out of date when the training continues
        before: float = state["val_loss_before"]
        return before

    def save(self, grower: Grower, loader: Iterable[Any], val_loss_before: float, *, at_end_of_epoch: bool) -> None:
        """Write a checkpoint between two steps. Within an epoch this needs a loader with a `state_dict`; without one nothing is written."""
        if not at_end_of_epoch and not isinstance(loader, Stateful):
            return
        losses = grower.history.val_losses
        is_best = at_end_of_epoch and bool(losses) and losses[-1] < self._best
        if is_best:
            self._best = losses[-1]
        state = {
            "grower": grower.state_dict(),
            "loader": loader.state_dict() if isinstance(loader, Stateful) else None,
            "random": global_state(),
            "val_loss_before": val_loss_before,
            "best": self._best,
            "events_offset": self._log.offset(),
        }
        step = grower.epoch * STEPS_PER_EPOCH + grower.history.steps  # orders the checkpoints
        self._store.save(step, state, is_best=is_best, note={"epoch": grower.epoch})
        self.epochs_saved += at_end_of_epoch and grower.epoch > 0


@contextlib.contextmanager
def open_run(
    folder: Path | str,
    *,
    resume: bool,
    config: GrowthConfig,
    files: Mapping[str, bytes] | None = None,
    results: Sequence[str] = (),
    sinks: Callable[[], Sequence[Sink]] = tuple,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[GrowthRun]:
    """Open a new or resumed run in a folder.

    `sinks()` opens further outputs of events; it is called when the folder exists and is locked. `files` (name -> content) are written
    before the config, as part of the run. `results` are the names of the files that a finished run leaves; a new run is refused in a folder
    that holds one of them.
    """
    place = Path(folder)
    if resume:
        check_holds_a_run(place, "growth")
        _check_same(load_saved(type(config), place / CONFIG), config, place)
        with locked(place):
            store = CheckpointStore.of_run(place, kind=KIND)
            latest = store.load if store.has_any() else lambda: None  # a function: a variable here would keep the checkpoint in memory
            with _opened(place, config, files or {}, latest(), sinks, should_stop) as resumed:
                yield resumed
        return
    with new_folder(place, results=results) as new:
        new.others |= {name for name in (*(files or {}), *SINK_FOLDERS, TRACE.parts[0]) if not (place / name).exists()}
        run: GrowthRun | None = None
        try:
            with _opened(place, config, files or {}, None, sinks, should_stop) as run:
                yield run
        except Diverged:
            raise  # keep the folder: its events show what happened
        except BaseException as error:
            # After an interrupt, keep a run that can be resumed from a checkpoint. After an error, keep it only if an epoch was finished:
            # an error in the data or the model would occur again.
            if run is None or not (run.epochs_saved if isinstance(error, Exception) else run.has_checkpoint()):
                new.discard()
            raise


@contextlib.contextmanager
def _opened(
    place: Path,
    config: GrowthConfig,
    files: Mapping[str, bytes],
    checkpoint: Checkpoint | None,
    sinks: Callable[[], Sequence[Sink]],
    should_stop: Callable[[], bool],
) -> Iterator[GrowthRun]:
    """Write the files and the config of a run, and open its event log."""
    opened = sinks()  # first, because it may fail, and the folder must then still be unused
    # Write the config last: a folder with a config is a complete run.
    for name, content in files.items():
        write_in_run(place / name, content)
    save(config, place / CONFIG)
    with _log(place, checkpoint, opened) as log:
        run = GrowthRun(place, log, checkpoint, should_stop=should_stop)
        del checkpoint  # so that `restore` can free its memory
        yield run


def _log(folder: Path, checkpoint: Checkpoint | None, sinks: Sequence[Sink]) -> EventLog:
    """Open a new event log, or that of a resumed run without the events after its checkpoint."""
    path = folder / EVENTS
    if checkpoint is None:
        remove(path)  # without a checkpoint, a resumed run starts again, and its events with it
        return EventLog(path, run=folder.name, sinks=sinks)
    return EventLog.resume(path, checkpoint.state["events_offset"], step=checkpoint.step // STEPS_PER_EPOCH, sinks=sinks)


def _check_same(saved: GrowthConfig, wanted: GrowthConfig, folder: Path) -> None:
    """Raise a GrowthError if a resumed run has other settings than it was started with."""
    fields = [name for name in type(wanted).__struct_fields__ if not name.startswith("telemetry")]  # the level may change
    different = [name for name in fields if getattr(saved, name) != getattr(wanted, name)]
    if different:
        name = different[0]
        raise GrowthError(
            f"the run in {folder} was started with {name} = {getattr(saved, name)!r} and cannot go on with {getattr(wanted, name)!r}; "
            "resume it with the same settings, or start a new run"
        )
