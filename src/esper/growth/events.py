"""What happens while a model grows. Small records, emitted where the fact is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from esper.runs import Event


class GrowthStarted(Event, tag="growth_started"):
    """Training begins, or goes on, after `epoch` epochs."""

    epoch: int
    epochs: int | None
    controller: str
    raise_mode: str
    slots: list[str]
    parameters: int
    flops: int  # of a forward pass for one sample
    optimizer: str = ""
    title: str = ""  # of the task or model
    device: str = "cpu"
    note: str = ""  # what a person should know before it begins
    uninformed_loss: float | None = None  # of a constant predictor: rents and thresholds are shares of it; None: not known yet


class SlotView(msgspec.Struct, frozen=True):
    """One slot at the end of an epoch; a part of `EpochEnded`."""

    slot: str
    stage: str
    blueprint: str | None
    alpha: float
    age: int
    health: float | None
    gain: float | None
    gain_low: float | None
    gain_high: float | None
    parameters: int
    rent: float
    grad_norm: float | None = None  # of the seed: mean over the epoch's steps, before clipping
    skipped: int = 0  # steps that the seed did not take because its gradient was not finite


class EpochEnded(Event, tag="epoch_ended"):
    """An epoch is over and the controller has decided."""

    epoch: int
    train_loss: float
    val_loss: float
    learning_rate: float
    decision: str  # what was decided and why, in words
    slots: list[SlotView]
    parameters: int  # of host and seeds
    flops: int  # of a forward pass for one sample, seeds included
    seconds: float = 0.0  # of the epoch, decisions included
    samples_per_second: float | None = None
    total_gflops: float | None = None  # spent so far, where the size of batches is known
    step_seconds: float | None = None  # of one training step, data wait included: mean over the epoch, by the device's clock
    data_wait_seconds: float | None = None  # of the epoch, waiting for the training loader; both None where the loop is the user's own
    skipped: int = 0
    """Steps that the host's optimiser did not take because a gradient overflowed under its loss scale; those of seeds are in `slots`. Not
    counted: a fused optimiser, which skips on the device, and a loop of the user's own."""

    def shown(self) -> Mapping[str, Any]:
        """Show slots under their names: slots/conv1/alpha."""
        slots = {view.slot: {name: getattr(view, name) for name in view.__struct_fields__} for view in self.slots}
        return {**super().shown(), "slots": slots}


class StageEntered(Event, tag="stage_entered"):
    """A seed, or its slot, entered a stage."""

    epoch: int
    slot: str
    blueprint: str
    stage: str
    reason: str


class ActionRefused(Event, tag="action_refused"):
    """A gate did not let pass what the controller wanted."""

    epoch: int
    slot: str
    action: str
    reason: str


class RolledBack(Event, tag="rolled_back"):
    """The governor went back to a healthy snapshot."""

    epoch: int
    to_epoch: int
    reason: str
    embargoed: list[str]  # slots whose seeds were taken out


class Probed(Event, tag="probed"):
    """What candidates promised when they were looked at."""

    epoch: int
    promises: dict[str, dict[str, float]]  # slot -> blueprint -> fall of the loss per step


class GrowthFinished(Event, tag="growth_finished"):
    """The run is over."""

    epoch: int
    why: str  # "finished", "stopped early" or "stopped"
    tried: int
    kept: int
    rollbacks: int
    val_loss_before: float
    val_loss: float
    parameters: int
    parameters_added: int
    flops: int
    flops_added: int
    total_gflops: float | None
    seconds: float


class LoaderRestarted(Event, tag="loader_restarted"):
    """The loader cannot be saved in the middle of an epoch, so the run went on from the start of one."""

    epoch: int


class Measured(Event, tag="measured"):
    """What removing a seed on trial would cost, by the epoch's validation batches."""

    epoch: int
    slot: str
    gain: float  # in the unit of the loss
    gain_low: float
    gain_high: float
    rent: float

    def shown(self) -> Mapping[str, Any]:
        """Show seeds under the names of their slots: conv1/gain."""
        return {self.slot: super().shown()}


class FinalTest(Event, tag="final_test"):
    """The result on data that nobody who decides has seen, before and after; measured once, when everything is over."""

    loss_before: float
    loss: float
    accuracy_before: float | None = None  # None: the loss is not one of a classifier
    accuracy: float | None = None


class TwinCompared(Event, tag="twin_compared"):
    """The grown model against its twin, which never grew, on the same test samples; a part of the twin's run."""

    samples: int
    accuracy_difference: float  # grown - never grown, mean over samples
    low: float  # ends of its 95 % interval, over samples
    high: float
