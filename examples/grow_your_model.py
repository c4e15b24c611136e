"""Grow a model of your own while it trains, with one call.

The network below is too small for its task, handwritten digits. `esper.grow` trains a copy of it, lets seeds germinate where the loss
promises to fall, and keeps the seeds that contribute more than their rent.

    python examples/grow_your_model.py

kept 2 of 2 seeds · validation loss 2.3330 → 0.0303 · 17.7× parameters · 18.2× FLOPs · best state, after epoch 23 of 25
#  slot        blueprint        born     outcome  cost of removal          rent    parameters  why
1  block1.3    widen_300_chain  epoch 2  kept     1.6178 [1.4848, 1.7503]  0.0148  4,776       its cost of removal is …
2  block1.3#2  widen_25_chain   epoch 6  kept     0.0446 [0.0272, 0.0726]  0.0025  2,744       its cost of removal is …
test accuracy 98.8%; parameters 450 -> 7,970
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
