"""What `grow` gives back: the model, what was done to it, and what that gave and cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from esper.growth.baked import save
from esper.growth.events import GrowthFinished
from esper.growth.ledger import Ledger
from esper.growth.state import Cost
from esper.growth.summary import result_in_words

MODEL = "model.safetensors"  # in the folder of a run
Status = Literal["finished", "stopped early", "stopped"]


@dataclass(frozen=True, slots=True)
class Grown:
    model: nn.Module  # with the kept seeds in it
    status: Status
    epochs: int
    val_loss_before: float
    val_loss: float
    train_losses: tuple[float, ...]  # per epoch
    val_losses: tuple[float, ...]
    host: Cost
    added: Cost
    gflops: float  # of the whole training, pruned seeds and measurements included
    rollbacks: int
    ledger: Ledger
    controller: str
    optimizer: str
    seconds: float
    folder: Path | None = None
    had_finished: bool = False  # it was resumed, and there was nothing left to do
    note: str = ""  # why nothing could grow, where that was known before it began

    def report(self) -> str:
        """One line: what was kept, what it gave, what it cost."""
        kept, dot, figures = result_in_words(finished(self)).partition(" · ")
        finish = "had finished already" if self.had_finished else ""
        resume = f"go on with run='{self.folder}', resume=True" if self.status == "stopped" and self.folder is not None else ""
        return dot.join(filter(None, [kept, self.note, figures, self.optimizer, finish, resume]))

    def save(self, path: Path | str) -> None:
        """Writes weights and structure as safetensors; `esper.load(path, model=fresh_instance)` gives the grown model back."""
        save(self.model, path)


def finished(grown: Grown) -> GrowthFinished:
    return GrowthFinished(
        epoch=grown.epochs,
        why=grown.status,
        tried=len(grown.ledger.entries),
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
    )
