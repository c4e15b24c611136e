"""Register a blueprint of your own: a kind of structure that may grow.

A blueprint is a function from a place in the host to a branch. The branch keeps the shape, is zero at birth and learns from the first
step, so its last layer starts at zero. This one multiplies features, and the target is a sum of products.

    python examples/own_blueprint.py

mlp: kept 2 of 2 seeds · validation loss 2.1541 → 0.2150 · 5.4× parameters · 5.4× FLOPs · best state, after epoch 18 of 20 · …
product: kept 2 of 2 seeds · validation loss 2.1541 → 0.0656 · 4.2× parameters · 4.3× FLOPs · …
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth import GrowthConfig, Place


class Product(nn.Module):
    """Branch for features [B, D]: the product of two linear maps, mixed by a third."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right, self.last = (nn.Linear(width, width) for _ in range(3))
        nn.init.zeros_(self.last.weight)  # zero at birth: germinating does not change the host's output
        nn.init.zeros_(self.last.bias)

    def forward(self, h: Tensor) -> Tensor:
        return self.last(self.left(h) * self.right(h))


@esper.register_blueprint("product", kinds=["dense"])
def product(place: Place) -> nn.Module:
    """Products of features."""
    return Product(place.width)


def make_loader(samples: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))  # [samples, 4]
    return DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2] + x[:, 2:3] * x[:, 3:]), batch_size=64)  # targets [samples, 1]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    host = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    for blueprint in ("mlp", "product"):
        grown = esper.grow(
            host,
            make_loader(2048, seed=1),
            make_loader(512, seed=2),
            F.mse_loss,
            epochs=20,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            controller="schedule",  # grows in every slot after a tenth of the training, and keeps what contributes
            config=GrowthConfig(blueprints=(blueprint,)),
        )
        print(f"{blueprint}: {grown.report()}")
        print(grown.ledger.table())


if __name__ == "__main__":
    main()
