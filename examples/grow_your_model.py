"""Grow a model of your own while it trains, with one call.

The network below is too small for its task, handwritten digits. `esper.grow` trains a copy of it, lets seeds germinate where the loss
promises to fall, and keeps the seeds that contribute more than their rent.

    python examples/grow_your_model.py

kept 2 of 2 seeds · validation loss 2.333 -> 0.117 · +146.7% parameters · +135.5% FLOPs · 0 rollbacks · AdamW, learning rate 0.01
#  slot      blueprint     born     outcome  cost of removal             rent    parameters  why it ended so
1  block1.3  wide_conv3x3  epoch 2  kept     +1.3903 [+0.9978, +1.7828]  0.0207  588         removing it now would raise the loss …
2  block2.3  conv1x1       epoch 2  kept     +0.0578 [+0.0057, +0.1099]  0.0010  72          removing it now would raise the loss …
test accuracy 95.2%; parameters 450 -> 1,110
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.tasks import load_task

EPOCHS = 25


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.block2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.block2(self.block1(images)).mean(dim=(2, 3)))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_task("digits")  # 1,797 images that come with esper; bring your own loaders here
    train = DataLoader(TensorDataset(digits.train.inputs, digits.train.targets), batch_size=64, shuffle=True)
    validation = DataLoader(TensorDataset(digits.validation.inputs, digits.validation.targets), batch_size=64)

    model = Net()
    grown = esper.grow(
        model,  # stays as it is
        train,
        validation,
        F.cross_entropy,
        epochs=EPOCHS,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS),
    )
    print(grown.report())
    print(grown.ledger.table())

    with torch.no_grad():
        accuracy = (grown.model.eval()(digits.test.inputs).argmax(dim=1) == digits.test.targets).float().mean()
    print(f"test accuracy {accuracy:.1%}; parameters {grown.host.parameters:,} -> {grown.host.parameters + grown.added.parameters:,}")

    with tempfile.TemporaryDirectory() as folder:
        grown.save(f"{folder}/grown.safetensors")
        again = esper.load(f"{folder}/grown.safetensors", model=Net())  # a fresh instance gets the structure and the weights
    with torch.no_grad():
        print("loaded again, it is the same:", torch.equal(again.eval()(digits.test.inputs), grown.model(digits.test.inputs)))


if __name__ == "__main__":
    main()
