"""Events of growth: small frozen records, each emitted where its fact becomes known.

A seed gets a number when it germinates, from 1 on. Every event about the seed has this number, so that `Ledger.take` need not guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from esper.runs import Event
from esper.runs.events import Figure, RunDeclared

if TYPE_CHECKING:
    from esper.intervals import Interval


DECLARED = RunDeclared(
    run_kind="growth",
    figures=[
        Figure("validation loss", "epoch_ended/val_loss", "growth_finished/val_loss", better="down"),
        Figure("test loss", final="final_test/loss", better="down"),
        Figure("test accuracy", final="final_test/accuracy", unit="share", better="up"),
        Figure("parameters", "epoch_ended/parameters", "growth_finished/parameters", better="down"),
        Figure("FLOPs", "epoch_ended/flops", "growth_finished/flops", better="down"),
        Figure("GFLOPs spent", "epoch_ended/total_gflops", "growth_finished/total_gflops", better="down"),
    ],
    unit="epochs",
    end="growth_finished",
)

# Name of a member of `lifecycle.legal_moves.Stage`. A line with another one does not fit its kind.
StageName = Annotated[str, msgspec.Meta(pattern="^(DORMANT|GERMINATED|TRAINING|BLENDING|HOLDING|FOSSILIZED|PRUNED|EMBARGOED)$")]
Outcome = Literal["living", "kept", "pruned", "rolled back"]
Unit = Literal["samples", "groups", "batches"]  # of validation losses that are compared; groups are samples that belong together


class GrowthStarted(Event, tag="growth_started"):
    """The training starts, or is resumed after `epoch` epochs."""

    epoch: int
    epochs: int | None
    controller: str
    raise_mode: str
    slots: list[str]
    parameters: int
    flops: int  # of the host's forward pass for one sample
    optimizer: str = ""
    title: str = ""  # of the task or model
    device: str = "cpu"
    note: str = ""  # remarks for the user, such as why nothing can grow
    uninformed_loss: float | None = None  # loss of a constant predictor, the unit of rents and thresholds; None: not known yet
    metrics: dict[str, float] = {}  # on the validation data before any training


class SlotView(msgspec.Struct, frozen=True):
    """The state of one slot at the end of an epoch; a part of `EpochEnded`."""

    slot: str
    number: int | None  # of the seed in it; None: it is empty
    stage: StageName
    blueprint: str | None
    alpha: float
    age: int  # epochs since the seed germinated
    health: float | None  # of the seed's gradients, in [0, 1]
    gain: float | None  # increase of the loss if the seed were removed, as measured last
    gain_low: float | None
    gain_high: float | None
    parameters: int
    rent: float
    grad_norm: float | None = None  # mean gradient norm of the seed over the epoch's steps, before clipping
    skipped: int = 0  # steps that the seed skipped because its gradient, or that of its host, was not finite
    flops: int | None = None  # of the seed's forward pass for one sample


class EpochEnded(Event, tag="epoch_ended"):
    """An epoch is over and the controller has decided."""

    epoch: int
    train_loss: float
    val_loss: float
    learning_rate: float
    decision: str  # the decision and its reasons, in words
    slots: list[SlotView]
    parameters: int  # of host and seeds
    flops: int  # of a forward pass for one sample, including seeds
    seconds: float = 0.0  # duration of the epoch, including the decision
    samples_per_second: float | None = None
    total_gflops: float | None = None  # used so far; None if batch sizes are unknown
    step_seconds: float | None = None  # mean duration of a training step, including the wait for data
    data_wait_seconds: float | None = None  # total wait for the training loader; this and step_seconds are None in a user's own loop
    resources: dict[str, float] = {}  # see `esper.runs.telemetry.ResourceMeter`
    skipped: int = 0
    """Steps that the host's optimiser skipped because a gradient overflowed under its GradScaler. Skipped steps of seeds are in `slots`."""
    metrics: dict[str, float] = {}  # name -> mean over the validation samples, such as accuracy

    def shown(self) -> Mapping[str, Any]:
        """Return the values to show, with slots under their names: slots/conv1/alpha."""
        slots = {view.slot: {name: getattr(view, name) for name in view.__struct_fields__ if name != "number"} for view in self.slots}
        return {**super().shown(), "slots": slots}


class Birth(msgspec.Struct, frozen=True):
    """What is known of a seed when it germinates and never changes; a part of `StageEntered`."""

    raise_mode: str
    parameters: int
    flops: int  # per forward pass of one sample
    after: int | None = None  # number of the kept seed at the same place behind which it grows


class StageEntered(Event, tag="stage_entered"):
    """A seed or an empty slot has entered a stage."""

    epoch: int
    slot: str
    number: int | None  # of the seed; None: an empty slot, whose embargo begins or ends
    blueprint: str  # of the seed, or of the last one in the empty slot
    stage: StageName
    reason: str
    birth: Birth | None = None  # of a seed that enters GERMINATED


class ActionRefused(Event, tag="action_refused"):
    """A gate has refused an action of the controller."""

    epoch: int
    slot: str
    number: int | None  # of the seed in the slot; None: it is empty
    action: str
    reason: str
    blueprint: str = ""  # of the seed in the slot, or of the one that was to germinate


class SeedBack(msgspec.Struct, frozen=True):
    """A seed that is in another stage than before, because an earlier state was restored; a part of `RolledBack` and `BestRestored`."""

    number: int
    slot: str
    stage: StageName  # that it has now
    outcome: Outcome  # that it has now: living or kept
    is_protected: bool = False  # its removal may have caused the disaster, so it may not be pruned for some epochs


class RolledBack(Event, tag="rolled_back"):
    """The governor has restored a healthy snapshot."""

    epoch: int
    to_epoch: int  # epoch of the snapshot
    reason: str
    embargoed: list[str]  # slots under embargo, because their seeds may have caused the disaster
    gone: list[int] = []  # numbers of the seeds that were removed: younger than the snapshot, or a possible cause of the disaster
    back: list[SeedBack] = []
    steps_lost: int | None = None  # training steps that it undid, without those that an earlier rollback did; None: not known
    seconds_lost: float | None = None  # the time of these steps, with evaluations; None after a resume


class Probed(Event, tag="probed"):
    """A probe has estimated how fast each candidate would lower the loss."""

    epoch: int
    promises: dict[str, dict[str, float]]  # slot -> blueprint -> estimated fall of the loss per step


class PassedOver(Event, tag="passed_over"):
    """The controller has read a probe and has left candidates out. A rule's text names the numbers that it compared."""

    epoch: int
    reasons: dict[str, dict[str, str]]  # slot -> blueprint -> the rule that rejected it


class TrialEnded(msgspec.Struct, frozen=True):
    """What came of one of the alternatives that were tried; a part of `TrialsCompared`."""

    name: str
    val_loss: float  # the lowest of its epochs; infinite if it came to a disaster
    rent: float  # of all seeds in it at its end
    epochs: int
    gflops: float

    @property
    def worth(self) -> float:
        """Return the loss with the rent: the lowest is the best."""
        return self.val_loss + self.rent


class TrialsCompared(Event, tag="trials_compared"):
    """Copies of the training have tried what the controller considered, and the best one goes on."""

    epoch: int  # at the end of the trials
    chosen: str  # name of the trial that goes on
    trials: list[TrialEnded]
    gflops_lost: float  # of all others
    seconds: float  # of all trials


class Widened(Event, tag="widened"):
    """A width seed has germinated: layers make more units."""

    epoch: int
    slot: str
    number: int  # of the seed
    blueprint: str
    units: dict[str, int]  # layer -> units that the seed adds
    before: dict[str, int] = {}  # layer -> units of the host and of kept seeds that were there


class Folded(Event, tag="folded"):
    """The units of kept width seeds have become rows and columns of the host's own layers."""

    epoch: int
    layers: dict[str, list[int]]  # layer -> inputs and outputs that it has now


class Shrunk(Event, tag="shrunk"):
    """Kept structure was removed, because the whole interval of what it contributes is below its rent."""

    what: str  # slot of a seed, or layer whose units were removed
    parameters: int
    flops: int
    gain: float  # increase of the loss by the removal
    gain_low: float
    gain_high: float
    rent: float  # that the removal saves
    units: int = 0  # 0: a whole seed
    number: int | None = None  # of the seed; None: units of a layer
    epoch: int | None = None  # None: outside of a training

    @classmethod
    def of(
        cls,
        what: str,
        gain: Interval,
        *,
        parameters: int,
        flops: int,
        rent: float,
        units: int = 0,
        number: int | None = None,
        epoch: int | None = None,
    ) -> Shrunk:
        return cls(
            what=what,
            parameters=parameters,
            flops=flops,
            gain=gain.estimate,
            gain_low=gain.low,
            gain_high=gain.high,
            rent=rent,
            units=units,
            number=number,
            epoch=epoch,
        )


class BestRestored(Event, tag="best_restored"):
    """The training is over and the state after an earlier epoch, which was the best, was restored as its result."""

    epoch: int  # epoch whose state was restored
    val_loss: float  # after that epoch
    last_epoch: int  # epochs that were trained
    last_val_loss: float  # of the state that it replaces, without the seeds on trial
    left_out: list[str] = []  # slots of seeds that are not in it, because they were not connected yet
    gone: list[int] = []  # the numbers of these seeds
    back: list[SeedBack] = []  # seeds that are in it in another stage than in the last state
    by: str = ""  # metric whose highest value was the best; "": the lowest loss decided
    value: float | None = None  # of that metric after that epoch
    last_value: float | None = None  # of that metric in the state that it replaces


class GrowthFinished(Event, tag="growth_finished"):
    """The run has ended."""

    epoch: int
    why: str  # "finished", "stopped early" or "stopped"
    tried: int  # seeds that germinated
    kept: int  # seeds that were fossilized
    rollbacks: int
    val_loss_before: float
    val_loss: float
    parameters: int
    parameters_added: int
    flops: int
    flops_added: int
    total_gflops: float | None
    seconds: float
    metrics: dict[str, float] = {}  # of the result, on the validation data
    best_epoch: int | None = None  # the result is the state after this epoch; None: the last state


class LoaderRestarted(Event, tag="loader_restarted"):
    """The run was resumed from the start of an epoch, because its loader cannot save its position within one."""

    epoch: int


class Measured(Event, tag="measured"):
    """The gain of a seed was measured on the validation data."""

    epoch: int
    slot: str
    number: int  # of the seed
    gain: float  # increase of the loss if the seed were removed
    gain_low: float
    gain_high: float
    rent: float
    unit: Unit = "batches"  # the interval rests on the paired losses of these: samples, groups or batches
    count: int = 0  # number of them; 0: unknown

    def shown(self) -> Mapping[str, Any]:
        """Return the values to show, under the name of the slot: conv1/gain."""
        return {self.slot: super().shown()}


class FinalTest(Event, tag="final_test"):
    """The result on test data, before and after the training. No decision uses these data; they are measured once, at the end."""

    loss_before: float
    loss: float
    accuracy_before: float | None = None  # None if the task is not a classification
    accuracy: float | None = None


class TwinCompared(Event, tag="twin_compared"):
    """The grown model was compared with its twin, which never grew, on the same test samples; emitted in the twin's run."""

    samples: int
    accuracy_difference: float  # accuracy of the grown model - accuracy of the twin, mean over samples
    low: float  # lower end of its 95 % interval over samples
    high: float  # upper end
