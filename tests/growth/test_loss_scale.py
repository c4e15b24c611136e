"""The scale of losses: no decision depends on the unit of a loss, and a loss without a scale is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, gaussian_nll_loss, l1_loss, mse_loss

from esper.growth import GrowthError, grow
from esper.growth.batches import ConstantPredictor, LossFunction
from esper.growth.config import HeuristicConfig, SeedOptimizerConfig
from esper.growth.events import Probed
from esper.growth.report.story import read_story
from esper.growth.run import Grown
from esper.runs import Event
from tests.growth.builders import QUICK, Batch, Data, Script, config, make_data, make_host, make_loop


class Interactions(nn.Module):
    """Too narrow for sums of products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.head = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        return output


def regression(batches: int = 20, *, factor: float = 1.0) -> Data:
    x = torch.randn(batches, 20, 6, generator=torch.Generator().manual_seed(0))
    y = torch.sin(2 * x[..., :1]) * x[..., 1:2] + x[..., 2:3] * x[..., 3:4]
    return list(zip(x, factor * y, strict=True))


def seeds(grown: Grown) -> list[tuple[str, str, int, str]]:
    return [(entry.slot, entry.blueprint, entry.born, entry.outcome) for entry in grown.ledger.seeds]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2.0**-8, 2.0**10])
def test_a_loss_in_another_unit_gives_the_same_model(factor: float) -> None:
    """Adam with an eps in proportion makes the very same steps, so everything decided must be the same too."""

    def run(factor: float) -> Grown:
        data = regression(10)
        return grow(
            Interactions(),
            data[:8],
            data[8:],
            lambda outputs, targets: factor * mse_loss(outputs, targets),
            epochs=8,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05, eps=1e-8 * factor),
            config=config(QUICK, heuristic=HeuristicConfig(evidence=0.01, evidence_at_the_end=0.01, plateau_epochs=2, longer_training=0.1)),
        )

    here, there = run(1.0), run(factor)
    assert seeds(here)
    assert seeds(there) == seeds(here)
    assert [entry.rent * factor for entry in here.ledger.seeds] == pytest.approx([entry.rent for entry in there.ledger.seeds])
    torch.testing.assert_close(dict(there.model.state_dict()), dict(here.model.state_dict()), rtol=0, atol=0.01)


@pytest.mark.parametrize("max_grad_norm", [0.02, 1.0])
def test_the_promises_of_a_loss_in_another_unit_are_the_same_share_of_it(max_grad_norm: float) -> None:
    """SGD with a rate in inverse proportion makes the very same steps. With the lower limit the gradients of candidates are clipped."""

    def promises(factor: float) -> dict[tuple[str, str], float]:
        data, events = regression(6), list[Event]()
        grow(
            Interactions(),
            data[:4],
            data[4:],
            lambda outputs, targets: factor * mse_loss(outputs, targets),
            epochs=2,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1 / factor),
            controller=Script(probes=[1]),
            config=config(seed_optimizer=SeedOptimizerConfig(max_grad_norm=max_grad_norm)),
            callbacks=[events.append],
        )
        probed = next(event for event in events if isinstance(event, Probed))
        return {(slot, name): found / factor for slot, some in probed.promises.items() for name, found in some.items()}

    expected = promises(1.0)
    assert expected
    assert promises(100.0) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.01, 1.0])
def test_a_regression_grows_whatever_the_unit_of_its_targets(factor: float) -> None:
    data = regression(factor=factor)
    grown = grow(
        Interactions(),
        data[:16],
        data[16:],
        mse_loss,
        epochs=10,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        config=config(QUICK, heuristic=HeuristicConfig(evidence=0.1, evidence_at_the_end=0.1, longer_training=0.1)),
    )
    assert grown.ledger.seeds


def gaussian_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Below 0 for targets this small."""
    return gaussian_nll_loss(outputs[:, :1], targets, outputs[:, 1:].exp(), full=True)


@pytest.mark.slow
def test_a_loss_that_can_be_negative_is_refused_until_its_range_is_given() -> None:
    host, data = Interactions(), regression(factor=0.01)
    host.head = nn.Linear(4, 2)

    def start(**settings: float) -> Grown:
        chosen = config(QUICK, heuristic=HeuristicConfig(evidence=0.1, evidence_at_the_end=0.1, longer_training=0.1), **settings)
        return grow(host, data[:16], data[16:], gaussian_loss, epochs=8, optimizer=fast, config=chosen)

    with pytest.raises(GrowthError, match=r"a constant predictor has a loss of -\d.*GrowthConfig\(loss_range="):
        start()
    assert start(loss_range=3.0).ledger.seeds


def fast(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.slow
def test_the_loss_before_training_is_the_scale_where_outputs_are_unknown_and_the_run_says_so(tmp_path: Path) -> None:
    def step_loss(model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    settings = {"epochs": 1, "controller": "never"}
    blind = grow(make_host(), make_data(), make_data(2), step_loss=step_loss, run=tmp_path / "blind", **settings)
    started = read_story(tmp_path / "blind").started
    assert started is not None
    assert started.uninformed_loss == pytest.approx(blind.val_loss_before)
    assert "the validation loss before the training" in started.note
    grow(make_host(), make_data(), make_data(2), cross_entropy, run=tmp_path / "seeing", **settings)
    seeing = read_story(tmp_path / "seeing").started
    assert seeing is not None
    shares = torch.bincount(torch.cat([y for _, y in make_data(2)]), minlength=3) / 16
    assert seeing.uninformed_loss == pytest.approx(float(torch.special.entr(shares).sum()))
    assert seeing.note == ""


@pytest.mark.parametrize(
    ("outputs", "targets", "loss_fn", "expected"),
    [
        (torch.randn(40, 2), torch.randn(40, 2) * 0.1 + 3.0, mse_loss, lambda y: (y - y.mean(0)).square().mean()),
        (torch.randn(40, 1), torch.rand(40, 1), l1_loss, lambda y: (y - y.median()).abs().mean()),
        (torch.randn(40), torch.arange(40) % 4 == 0, lambda x, y: binary_cross_entropy_with_logits(x, y.float()), lambda y: 0.5623),
        (torch.randn(40, 3, 5), torch.ones(40, 5, dtype=torch.int64), cross_entropy, lambda y: 0.0),
        (torch.randn(8, 5, 3), torch.arange(40).reshape(8, 5) % 2, lambda x, y: cross_entropy(x.mT, y), lambda y: math.log(2)),
    ],
)
def test_the_uninformed_loss_is_that_of_the_best_constant_predictor(
    outputs: Tensor, targets: Tensor, loss_fn: LossFunction, expected
) -> None:
    predictor = ConstantPredictor(loss_fn)
    for part, some in zip(outputs.split(8), targets.split(8), strict=True):
        predictor.note(part, some)
    assert predictor.loss() == pytest.approx(float(expected(targets)), abs=1e-3)


def test_a_loop_with_a_negative_loss_is_refused_after_its_first_epoch_and_left_unchanged() -> None:
    loop = make_loop(Script(), config(QUICK), epochs=6)
    for x, y in loop.data:
        (cross_entropy(loop.slotted(x), y) - 5.0).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.grower.after_step(torch.tensor(-4.0))
    with pytest.raises(GrowthError, match=r"the training began with a loss of -4\..*loss_range"):
        loop.grower.after_epoch(loop.evaluate)
    assert loop.grower.epoch == 0
    assert loop.grower.lifecycles.scale is None


def test_the_first_epoch_sets_the_loss_scale_of_a_loop_and_a_resumed_loop_keeps_it() -> None:
    whole = make_loop(Script(), config(QUICK), epochs=6)
    whole.epoch()
    first = whole.grower.lifecycles.scale
    assert first is not None
    assert first.is_guess
    assert first.uninformed == pytest.approx(sum(whole.losses) / len(whole.losses))
    whole.epoch()
    assert whole.grower.lifecycles.scale == first
    again = make_loop(Script(), config(QUICK), epochs=6)
    again.grower.load_state_dict(whole.grower.state_dict())
    assert again.grower.lifecycles.scale == first
    assert again.grower.lifecycles.unit == pytest.approx(first.uninformed / math.log(10))
