"""Grow the model of a LightningModule by a callback of the trainer.

The callback follows the trainer's optimiser, judges seeds by the validation loader after every epoch, and its state is part of
Lightning's checkpoints. Needs pip install 'esper-grow[lightning]'.

    python examples/lightning_callback.py

#  slot      blueprint     born     outcome  cost of removal             rent    parameters  why it ended so
1  block1.3  wide_conv3x3  epoch 2  kept     +1.3387 [+1.0655, +1.6118]  0.0201  588         removing it now would raise the loss …
2  block2.3  conv1x1       epoch 2  kept     +0.2340 [+0.2012, +0.2668]  0.0010  72          removing it now would raise the loss …
validation loss 0.196, parameters 450 -> 1,110
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from esper.growth import GrowthCallback
from esper.tasks import load_task

EPOCHS = 20


class DigitsModule(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.block2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.block2(self.block1(images)).mean(dim=(2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return step_loss(self, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", step_loss(self, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def step_loss(module: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch. The callback calls it to measure seeds, so it logs nothing."""
    images, labels = batch
    return F.cross_entropy(module(images), labels)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    digits = load_task("digits")
    train = DataLoader(TensorDataset(digits.train.inputs, digits.train.targets), batch_size=64, shuffle=True)
    validation = DataLoader(TensorDataset(digits.validation.inputs, digits.validation.targets), batch_size=64)

    module = DigitsModule()
    before = sum(parameter.numel() for parameter in module.parameters())
    growth = GrowthCallback(digits.example_input, step_loss)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[growth], **quiet)
    trainer.fit(module, train, validation)
    print(growth.grower.ledger.table())

    model = growth.bake()  # the module itself, with the kept seeds in it
    after = sum(parameter.numel() for parameter in model.parameters())
    print(f"validation loss {trainer.callback_metrics['val_loss']:.3f}, parameters {before:,} -> {after:,}")


if __name__ == "__main__":
    main()
