"""The loss of a readout: low where the inputs tell the class, high where labels are wrong, and none where it makes no sense."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from esper.fleet.config import FleetConfig, HostConfig
from esper.fleet.fleet import Fleet
from esper.growth import grow
from esper.growth.lifecycle.stages import Decision, GrowthState
from esper.growth.measure.readout import MOST_INPUTS, MOST_SAMPLES, ReadoutSamples
from esper.tasks import load_task
from tests.fleet.builders import small_task


def drawn(samples: int = 800, *, noise: float = 0.0, shape: tuple[int, ...] = (3, 4)) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and the class that their first number tells, apart from a share of wrong labels."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, *shape, generator=generator)
    classes = torch.bucketize(inputs.flatten(1)[:, 0].contiguous(), torch.tensor([-0.5, 0.5]))
    is_wrong = torch.rand(samples, generator=generator) < noise
    return inputs, torch.where(is_wrong, torch.randint(3, (samples,), generator=generator), classes)


def loss_of(inputs: object, targets: object) -> float | None:
    samples = ReadoutSamples()
    samples.note(inputs, targets)
    return samples.loss()


def test_the_readout_is_the_worse_the_more_labels_are_wrong() -> None:
    losses = [loss_of(*drawn(noise=noise)) for noise in (0.0, 0.4, 1.0)]
    clean, noisy, random = (loss for loss in losses if loss is not None)
    assert clean < 0.55 < noisy < 0.95
    assert 0.97 < random < 1.1, "nothing can be learned"
    digits = load_task("digits").train
    assert loss_of(digits.inputs, digits.targets) == pytest.approx(0.2, abs=0.15)


def test_it_depends_neither_on_the_batches_nor_on_the_scale_nor_on_later_samples() -> None:
    inputs, targets = drawn(MOST_SAMPLES + 300)
    whole, parts = loss_of(inputs, targets), ReadoutSamples()
    for start in range(0, len(inputs), 64):
        parts.note(inputs[start : start + 64], targets[start : start + 64])
    assert parts.count == MOST_SAMPLES
    assert parts.loss() == whole
    assert loss_of(inputs[:MOST_SAMPLES], targets[:MOST_SAMPLES]) == whole
    assert loss_of(5 + 100 * inputs, targets) == pytest.approx(whole, rel=1e-3)
    before = torch.random.get_rng_state()
    loss_of(inputs, targets)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_of_large_inputs_some_numbers_are_used() -> None:
    inputs, targets = drawn(shape=(MOST_INPUTS + 500,))
    inputs[:, 1:] = inputs[:, :1] + inputs[:, 1:]  # every number tells something of the class
    loss = loss_of(inputs, targets)
    assert loss is not None
    assert loss < 0.8


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.zeros(100, 8, dtype=torch.int64), torch.arange(100) % 3),  # tokens
        (torch.randn(100, 8), torch.randn(100)),  # values to predict
        (torch.randn(100, 8), torch.arange(100).reshape(50, 2) % 3),  # many labels
        (torch.randn(100, 8), torch.zeros(100, dtype=torch.int64)),  # one class
        (torch.randn(40, 8), torch.arange(40) % 3),  # few samples
        (torch.full((100, 8), torch.nan), torch.arange(100) % 3),
        ({"pixels": torch.randn(100, 8)}, torch.arange(100) % 3),
        (torch.randn(100), torch.arange(100) % 3),
    ],
)
def test_there_is_none_where_it_makes_no_sense(inputs: object, targets: object) -> None:
    assert loss_of(inputs, targets) is None


def test_batches_of_different_sizes_have_none() -> None:
    samples = ReadoutSamples()
    samples.note(torch.randn(80, 8), torch.arange(80) % 3)
    samples.note(torch.randn(80, 9), torch.arange(80) % 3)
    assert samples.loss() is None


def test_samples_that_loss_functions_ignore_are_left_out() -> None:
    inputs, targets = drawn()
    some = torch.where(torch.arange(len(targets)) % 4 == 0, -100, targets)
    is_kept = some >= 0
    assert loss_of(inputs, some) == loss_of(inputs[is_kept], targets[is_kept])


class Seen:
    """Keeps the readouts that it was shown."""

    name = "seen"

    def __init__(self) -> None:
        self.readouts: list[float | None] = []

    def decide(self, state: GrowthState) -> Decision:
        self.readouts.append(None if state.scale is None else state.scale.readout)
        return Decision()


def test_a_controller_sees_the_same_readout_in_grow_and_in_a_fleet_and_after_a_resume() -> None:
    task, seen = small_task(others=100), Seen()
    grow(task.make_host("conv-2x2", seed=0).double(), task.train_loader(), task.val_loader(), cross_entropy, epochs=1, controller=seen)
    fleet = Fleet(task, task.maker("conv-2x2"), hosts=1, config=FleetConfig(batch_size=8, steps_per_decision=1))
    fleet.reset({0: HostConfig(seed=1, horizon=2)})
    expected = loss_of(task.validation.inputs, task.validation.targets)
    assert expected is not None
    assert [*seen.readouts, fleet.state(0).scale.readout] == pytest.approx([expected] * 3)  # type: ignore[union-attr]
    again = Fleet(task, task.maker("conv-2x2"), hosts=1, config=FleetConfig(batch_size=8, steps_per_decision=1))
    again.load_state_dict(fleet.state_dict())
    assert again.state(0).scale == fleet.state(0).scale
