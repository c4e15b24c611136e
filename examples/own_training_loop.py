"""Grow a model inside a training loop of your own: four calls beside the ones that you have.

`esper.add_slots` gives the model slots, in place and reversibly. The optimiser, the loss and the order of the steps stay yours.
`after_step` and `after_epoch` tell the grower how the training goes, and `bake` leaves a plain module.

    python examples/own_training_loop.py

epoch  2  validation loss 0.212  337 parameters  germinate hidden1.1: an epoch of it would lower the loss by about 0.0434, and its rent is…
epoch  5  validation loss 0.025  337 parameters  fossilize hidden1.1: its cost of removal is 0.2123 [0.1947, 0.2299] (8 batches), and its …
epoch  6  validation loss 0.011  501 parameters  germinate hidden1.1#2: an epoch of it would lower the loss by about 0.0136, and its rent …
epoch 40  validation loss 0.003  751 parameters
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.growth import GovernorConfig, GrowthConfig

EPOCHS, BATCH = 40, 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden1 = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
        self.hidden2 = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden2(self.hidden1(x)))


def make_data(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(samples, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1  # [samples, 2] in [-1, 1]
    return x, torch.sin(3 * x[:, :1]) * torch.cos(3 * x[:, 1:])  # [samples, 1] in [-1, 1]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    (x, y), (x_val, y_val) = make_data(2048, seed=1), make_data(512, seed=2)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

    slotted = esper.add_slots(model, example_input=x[:2])
    print(slotted.describe())
    # Rents and thresholds are shares of the loss of a constant prediction: for a mean squared error, the variance of the targets.
    config = GrowthConfig(governor=GovernorConfig(uninformed_loss=float(y.var())))
    grower = esper.Grower(slotted, optimizer, scheduler=scheduler, epochs=EPOCHS, config=config)

    def evaluate() -> list[tuple[Tensor, int]]:
        """Return (loss, samples) of every validation batch, always in the same order."""
        model.eval()
        with torch.no_grad():
            return [(F.mse_loss(model(a), b), len(a)) for a, b in zip(x_val.split(BATCH), y_val.split(BATCH), strict=True)]

    for _ in range(EPOCHS):
        model.train()
        for batch in torch.randperm(len(x)).split(BATCH):
            loss = F.mse_loss(model(x[batch]), y[batch])  # [] mean over the batch
            loss.backward()
            optimizer.step()  # seeds step with it
            optimizer.zero_grad()
            grower.after_step(loss)
        ended = grower.after_epoch(evaluate)
        scheduler.step()
        if ended.decision or ended.epoch == EPOCHS:
            print(f"epoch {ended.epoch:>2}  validation loss {ended.val_loss:.3f}  {ended.parameters} parameters  {ended.decision}")

    model = slotted.bake()  # a plain module with the kept seeds in it
    print(grower.ledger.table())
    print(f"after bake(): {sum(parameter.numel() for parameter in model.parameters())} parameters")


if __name__ == "__main__":
    main()
