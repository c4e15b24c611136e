"""Going back: what makes up the state of a growing model, snapshots of it while it is healthy, and the way back to one."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.growth.errors import GrowthError
from esper.growth.garden import Garden
from esper.growth.judge import Judge
from esper.growth.model_bed import ModelBed
from esper.growth.slotted import Slotted
from esper.growth.snapshots import Snapshots


class Recovery:
    """Host, both kinds of optimiser, loss scale, schedule and the garden, together."""

    def __init__(
        self,
        slotted: Slotted,
        optimizer: Optimizer,
        garden: Garden[ModelBed],
        judge: Judge,
        *,
        keep: int,
        scaler: GradScaler | None,
        scheduler: Any,
    ) -> None:
        self.host, self.optimizer, self.garden, self.judge = slotted.host, optimizer, garden, judge
        self.scaler, self.scheduler = scaler, scheduler
        self._snapshots = Snapshots(keep)

    def take_snapshot(self) -> None:
        """Nothing is taken where a weight is not finite: losses that look healthy do not tell, and there would be no way back."""
        if self.has_finite_weights():
            if self._snapshots.epochs[-1:] == (self.garden.epoch,):
                self._snapshots.drop_latest()  # an epoch has one state to go back to, its last
            self._snapshots.take({"now": self.now(), "governor": self.judge.governor.state_dict()}, epoch=self.garden.epoch)

    def has_finite_weights(self) -> bool:
        """Those that learn, of the host and of the seeds that it sees."""
        seeds = [bed.slot.seed for bed in self.garden.beds.values() if bed.slot.is_connected and bed.slot.seed is not None]
        weights = [parameter for module in (self.host, *seeds) for parameter in module.parameters() if parameter.requires_grad]
        with torch.no_grad():
            answers = [torch.isfinite(weight).all() for weight in weights]
        return not answers or bool(torch.stack([answer.to(answers[0].device) for answer in answers]).all())

    def go_back(self, *, is_repeated: bool) -> int:
        """Restores the latest snapshot, or the one before it where the latest has led to disaster again. Gives its epoch."""
        if is_repeated and len(self._snapshots) > 1:
            self._snapshots.drop_latest()
        snapshot = self._snapshots.latest()
        assert snapshot is not None
        self.restore(snapshot.state["now"])
        self.judge.governor.load_state_dict(snapshot.state["governor"])
        return snapshot.epoch

    def now(self) -> dict[str, Any]:
        """The state of this moment; its tensors are the live ones."""
        return {
            "parameters": {name: parameter.detach() for name, parameter in self.host.named_parameters(remove_duplicate=False)},
            "buffers": dict(self.host.named_buffers(remove_duplicate=False)),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "garden": self.garden.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.host.named_parameters(remove_duplicate=False):
                parameter.copy_(state["parameters"][name])
                parameter.grad = None
            for name, buffer in self.host.named_buffers(remove_duplicate=False):
                buffer.copy_(state["buffers"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.garden.load_state_dict(state["garden"])

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": type(self.optimizer).__name__,
            "now": self.now(),
            "judge": self.judge.state_dict(),
            "snapshots": self._snapshots.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """That of another run of the same model, optimiser and schedule; otherwise nothing is changed."""
        self._check_fits(state["optimizer"], state["now"])
        self.restore(state["now"])
        self.judge.load_state_dict(state["judge"])
        self._snapshots.load_state_dict(state["snapshots"])

    def _check_fits(self, optimizer: str, state: dict[str, Any]) -> None:
        own, saved = _shapes(self.now()), _shapes(state)
        for name in sorted(own.keys() | saved.keys()):
            if own.get(name) != saved.get(name):
                there, here = (shapes.get(name, "not there") for shapes in (saved, own))
                raise GrowthError(f"the saved run is of another model: {name} is {there} in it and {here} here")
        kind = type(self.optimizer).__name__
        if optimizer != kind:
            raise GrowthError(f"the saved run was trained by {optimizer}, and this one has {kind}; use the same optimiser")
        sizes = [[len(group["params"]) for group in groups] for groups in (state["optimizer"]["param_groups"], self.optimizer.param_groups)]
        if sizes[0] != sizes[1]:
            raise GrowthError(f"the saved run's optimiser had groups of {sizes[0]} parameters, this one has {sizes[1]}")
        for what, mine in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            if (state[what] is None) != (mine is None):
                had, has = ("no", "one") if state[what] is None else ("a", "none")
                raise GrowthError(f"the saved run had {had} {what}, and this one has {has}; resume it as it was started")
        if state["garden"].keys() != self.garden.beds.keys():
            raise GrowthError(f"the saved run had the slots {', '.join(state['garden'])}, this one has {', '.join(self.garden.beds)}")


def _shapes(state: dict[str, Any]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for kind in ("parameters", "buffers") for name, tensor in state[kind].items()}
