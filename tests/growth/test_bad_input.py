"""Mistakes of a user are explained with the value and advice, and nothing is left half done."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from esper.config import ConfigError
from esper.growth import GrowthConfig, GrowthError, Planned, Slotted, add_slots, grow
from esper.growth.config import BudgetConfig, LifecycleConfig
from esper.growth.lifecycle.governor import Diverged
from esper.runs.folder import EVENTS, RunError
from tests.growth.builders import SLOTS, Batch, Data, assert_same, config, make_data, make_host, make_loop

NAMED = {"slots": SLOTS}


def start(model: nn.Module | None = None, loss=cross_entropy, *, folder: Path | None = None, epochs=2, **options):
    """A run that would be fine but for what is given."""
    settings = {"controller": "never", "config": config(**NAMED), "run": folder, **options}
    train, val = settings.pop("train", make_data()), settings.pop("val", make_data(2))
    return grow(make_host() if model is None else model, train, val, loss, epochs=epochs, **settings)


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.host = make_host()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.host(x)}


def spoiled(data: Data) -> Data:
    data[1][0][2, 3] = math.nan
    return data


def frozen() -> nn.Module:
    return make_host().requires_grad_(False)


class Endless:
    """A loader that does not tell its length."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(make_data())


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.host = make_host()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.host(x * mask)


def changed(inputs=lambda x: x, targets=lambda y: y) -> Data:
    return [(inputs(x), targets(y)) for x, y in make_data(2)]


def in_the_words_of_torch_2_11(outputs: Tensor, targets: Tensor) -> Tensor:
    raise RuntimeError("expected scalar type Long but found Int")


def slotted() -> Slotted:
    return add_slots(make_host(), make_data(1)[0][0])


def dataset() -> TensorDataset:
    return TensorDataset(*make_data(1)[0])


TINY = BudgetConfig(max_parameters=1e-6)

CASES = {
    "no validation data": (
        lambda f: start(folder=f, val=None),
        GrowthError,
        "validation loader is None; seeds are judged by validation data, so pass a DataLoader or a list of batches",
    ),
    "no training data": (lambda f: start(folder=f, train=None), GrowthError, "training loader is None; pass a DataLoader or a list"),
    "a number as loader": (lambda f: start(folder=f, train=3), GrowthError, "training loader is an int; pass a DataLoader or a list"),
    "a data set as loader": (
        lambda f: start(folder=f, val=dataset()),
        GrowthError,
        r"validation loader is a TensorDataset, which gives single samples; wrap it: DataLoader\(dataset, batch_size=32\)",
    ),
    "a tensor as loader": (
        lambda f: start(folder=f, train=make_data(1)[0][0]),
        GrowthError,
        r"training loader is a tensor; pass a DataLoader or a list of batches: \[\(inputs, targets\), ...\]",
    ),
    "inputs and targets as loader": (
        lambda f: start(folder=f, val=make_data(1)[0]),
        GrowthError,
        r"validation loader is a tuple of tensors, each of which would be a batch; .* \[\(inputs, targets\), ...\]",
    ),
    "a loss class": (
        lambda f: start(folder=f, loss=nn.CrossEntropyLoss),
        GrowthError,
        r"loss_fn is the class CrossEntropyLoss; pass an instance: loss_fn=CrossEntropyLoss\(\)",
    ),
    "the name of a loss": (lambda f: start(folder=f, loss="mse"), GrowthError, "loss_fn is a str, and must be a function"),
    "targets of another type": (
        lambda f: start(folder=f, val=changed(targets=Tensor.int)),
        GrowthError,
        r"batch 1 of the validation loader: loss_fn fails, with outputs \[8, 3\] float32 and targets \[8\] int32: .*"
        r"targets.long\(\) if they are class numbers",
    ),
    "targets of another type for torch 2.11": (
        lambda f: start(folder=f, loss=in_the_words_of_torch_2_11),
        GrowthError,
        r"loss_fn fails, with outputs .*: expected scalar type Long but found Int; use targets.long\(\) if they are class numbers",
    ),
    "targets of another shape": (
        lambda f: start(folder=f, loss=lambda out, y: (out - y).square().mean()),
        GrowthError,
        r"batch 1 .* loss_fn fails, with outputs \[8, 3\] float32 and targets \[8\] int64: The size of tensor",
    ),
    "classes that the model does not have": (
        lambda f: start(folder=f, val=changed(targets=lambda y: y + 3)),
        GrowthError,
        r"Target \d is out of bounds.* the outputs need one column per class",
    ),
    "targets that are no tensors": (lambda f: start(folder=f, val=changed(targets=Tensor.numpy)), GrowthError, "targets a ndarray: "),
    "inputs of another width": (
        lambda f: start(folder=f, val=changed(inputs=lambda x: x[:, :3])),
        GrowthError,
        r"batch 1 of the validation loader: the model cannot run the inputs \(\[8, 3\] float32\): mat1 and mat2",
    ),
    "inputs of another type": (
        lambda f: start(folder=f, val=changed(inputs=Tensor.double)),
        GrowthError,
        r"batch 1 .*: the model cannot run the inputs \(\[8, 6\] float64\): .*convert them to float32, as the weights are",
    ),
    "a model with two inputs": (lambda f: start(TwoInputs(), folder=f), GrowthError, "'mask'.*pass step_loss=lambda model, batch"),
    "training data of another type": (
        lambda f: start(folder=f, train=changed(inputs=Tensor.double)),
        GrowthError,
        r"batch 1 of the training loader: the model cannot run the inputs \(\[8, 6\] float64\)",
    ),
    "a loss without a gradient": (
        lambda f: start(folder=f, loss=lambda out, y: cross_entropy(out, y).detach()),
        GrowthError,
        "the training loss has no gradient",
    ),
    "an optimiser without an argument": (
        lambda f: start(folder=f, optimizer=lambda: 3),
        GrowthError,
        "optimizer is called with the parameters, and raised TypeError: .*optimizer=lambda parameters: ",
    ),
    "an optimiser of the model that was passed": (
        lambda f: start(folder=f, optimizer=lambda parameters: torch.optim.SGD(make_host().parameters(), lr=0.1)),
        GrowthError,
        "the optimiser holds none of the parameters that grow trains, .* use the function's argument: optimizer=lambda parameters: ",
    ),
    "the class of a schedule": (
        lambda f: start(folder=f, scheduler=CosineAnnealingLR),
        GrowthError,
        "scheduler is called with the optimizer alone, and raised TypeError: .*'T_max'; write scheduler=lambda optimizer: "
        r"torch.optim.lr_scheduler.CosineAnnealingLR\(optimizer, ...\)",
    ),
    "a schedule that is none": (lambda f: start(folder=f, scheduler=lambda optimizer: 3), GrowthError, "scheduler made an int; it must"),
    "a schedule that is not returned": (lambda f: start(folder=f, scheduler=lambda optimizer: None), GrowthError, "scheduler made None;"),
    "a schedule of another optimiser": (
        lambda f: start(folder=f, scheduler=lambda optimizer: StepLR(torch.optim.SGD(make_host().parameters(), lr=0.1), 1)),
        GrowthError,
        "the schedule belongs to another optimiser; use the function's argument: scheduler=lambda optimizer: ",
    ),
    "a schedule that is too short": (
        lambda f: start(folder=f, scheduler=lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=2)),
        GrowthError,
        "OneCycleLR is stepped after every step, 8 times in all, and ends after 2; make it with total_steps=8, "
        'or pass step_schedule="epoch"',
    ),
    "a schedule that is too short for a loader of unknown length": (
        lambda f: start(folder=f, train=Endless(), scheduler=lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=2)),
        GrowthError,
        "the schedule failed at step 3 of the epoch: Tried to step 3 times",
    ),
    "a plateau by steps": (
        lambda f: start(folder=f, scheduler=ReduceLROnPlateau, step_schedule="step"),
        GrowthError,
        "ReduceLROnPlateau follows the validation loss, which is known once an epoch; leave step_schedule out",
    ),
    "an unknown precision": (
        lambda f: start(folder=f, precision="bf16"),
        GrowthError,
        "precision: expected one of 'bfloat16', 'float16', 'float32', got 'bf16'",
    ),
    "a precision of torch": (
        lambda f: start(folder=f, precision=torch.bfloat16),
        GrowthError,
        "precision: expected one of .* got torch.bfloat16",
    ),
    "half precision of a model in float64": (
        lambda f: start(make_host(dtype=torch.float64), folder=f, precision="bfloat16"),
        GrowthError,
        "precision 'bfloat16' needs a model in float32, and first.weight is float64; .*model.float()",
    ),
    "a loss scale for weights in float16": (
        lambda f: start(make_host(dtype=torch.float16), folder=f, precision="float16"),
        GrowthError,
        "precision 'float16' needs a model in float32, and first.weight is float16",
    ),
    "no accumulation": (lambda f: start(folder=f, accumulate=0), GrowthError, "accumulate: expected an int > 0, got 0"),
    "a limit of nothing": (lambda f: start(folder=f, max_grad_norm=0.0), GrowthError, "max_grad_norm: expected a float > 0"),
    "a strange time to step": (lambda f: start(folder=f, step_schedule="batch"), GrowthError, "step_schedule: expected one of 'auto', "),
    "a model with slots": (
        lambda f: start(slotted(), folder=f),
        GrowthError,
        "a Slotted; pass the model without slots, because grow adds them",
    ),
    "a model without values": (lambda f: start(make_host().to("meta"), folder=f), GrowthError, "on the meta device, so it has no values"),
    "a number as folder": (lambda f: start(folder=3), GrowthError, "run must be the path of a folder, and is 3"),
    "inference mode": (lambda f: torch.inference_mode()(start)(folder=f), GrowthError, "inference_mode"),
    "unknown slot": (lambda f: start(folder=f, config=config(slots=("frist",))), GrowthError, "frist"),
    "epochs 0": (lambda f: start(folder=f, epochs=0), GrowthError, "epochs must be a whole number from 1 on, and is 0"),
    "epochs True": (lambda f: start(folder=f, epochs=True), GrowthError, "epochs must be a whole number from 1 on, and is True"),
    "validation yields nothing": (lambda f: start(folder=f, val=[]), GrowthError, "validation loader yields nothing"),
    "an iterator": (lambda f: start(folder=f, train=iter(make_data())), GrowthError, "training loader is an iterator"),
    "NaN in validation data": (
        lambda f: start(folder=f, val=spoiled(make_data())),
        GrowthError,
        "batch 2 of the validation loader holds 1 ",
    ),
    "a dict of outputs": (lambda f: start(Dictionary(), folder=f), GrowthError, "returns a dict.*pass step_loss=lambda"),
    "budget too small": (
        lambda f: start(folder=f, config=config(budget=TINY, **NAMED)),
        GrowthError,
        "smaller than any blueprint.*Raise the",
    ),
    "all frozen": (lambda f: start(frozen(), folder=f), GrowthError, "all parameters of the model are frozen"),
    "unknown controller": (lambda f: start(folder=f, controller="clever"), GrowthError, "no controller is named 'clever'; there are"),
    "unknown blueprint": (lambda f: start(folder=f, config=config(blueprints=("mpl",), **NAMED)), ValueError, "did you mean 'mlp'"),
    "no fitting blueprint": (lambda f: start(folder=f, config=config(blueprints=("conv3x3",), **NAMED)), GrowthError, "fits into any slot"),
    "a loss that is a vector": (
        lambda f: start(folder=f, loss=lambda out, y: out),
        GrowthError,
        r"is a tensor of shape \[8, 3\]; take its mean, or return one loss for each of the 8 samples",
    ),
    "a loss that is a float": (lambda f: start(folder=f, loss=lambda out, y: 1.0), GrowthError, r"is a float; .* without .item\(\)"),
    "no loss": (lambda f: start(folder=f, loss=None), GrowthError, "pass either loss_fn, for batches of"),
    "batches of three": (lambda f: start(folder=f, val=[(*make_data(1)[0], 1)]), GrowthError, "a batch is a tuple of 3"),
    "batches that are dicts": (
        lambda f: start(folder=f, val=[{"pixels": x, "label": y} for x, y in make_data(2)]),
        GrowthError,
        r"a batch is a dict with pixels, label, .* step_loss=lambda model, batch: loss\(model\(batch\['pixels'\]\), batch\['label'\]\)",
    ),
    "a time to step without a schedule": (
        lambda f: start(folder=f, step_schedule="step"),
        GrowthError,
        "step_schedule='step' needs a schedule, and there is none; pass scheduler=lambda optimizer: ",
    ),
    "no gradients": (lambda f: torch.no_grad()(start)(folder=f), GrowthError, "the training loss has no gradient"),
    "an optimiser that is none": (
        lambda f: start(folder=f, optimizer=lambda parameters: 3),
        GrowthError,
        "must be a function that makes one",
    ),
    "an optimiser instead of a function": (
        lambda f: start(folder=f, optimizer=torch.optim.SGD(make_host().parameters(), lr=0.1)),
        GrowthError,
        "must be a function that makes one, and is an? SGD: optimizer=lambda parameters: ",
    ),
    "a schedule instead of a function": (
        lambda f: start(folder=f, scheduler=StepLR(torch.optim.SGD(make_host().parameters(), lr=0.1), 1)),
        GrowthError,
        "must be a function that makes one, and is a StepLR: scheduler=lambda optimizer: ",
    ),
    "LBFGS": (
        lambda f: start(folder=f, optimizer=torch.optim.LBFGS),
        GrowthError,
        "LBFGS computes the loss itself.*use another optimiser, or write your own loop with esper.Grower",
    ),
    "a dict of settings": (lambda f: start(folder=f, config={"patience": 3}), GrowthError, "must be a GrowthConfig, and is a dict"),
    "a function as model": (lambda f: start(cross_entropy, folder=f), GrowthError, "model must be an nn.Module, and is a function"),
    "a class as model": (lambda f: start(Dictionary, folder=f), GrowthError, "model must be an nn.Module, and is the class Dictionary"),
    "a controller's class": (lambda f: start(folder=f, controller=Planned), GrowthError, "the class Planned itself"),
    "training yields nothing": (lambda f: start(folder=f, train=[]), GrowthError, "^the training loader yields nothing; it needs at least"),
    "NaN in training data": (
        lambda f: start(folder=f, train=spoiled(make_data())),
        GrowthError,
        "batch 2 of the training loader holds 1 values that are NaN or infinite",
    ),
    "a batch of one with batch norm": (
        lambda f: start(folder=f, train=[(x[:1], y[:1]) for x, y in make_data()]),
        GrowthError,
        "training batch of 1 is too small for batch norm .*drop_last=True",
    ),
    "resume without a folder": (lambda f: start(resume=True), GrowthError, "resume needs the folder"),
    "resume of nothing": (lambda f: start(folder=f, resume=True), ValueError, "there is no run in"),
    "a wrong plan": (lambda f: start(folder=f, controller=Planned([(-1, "first", "mlp")])), GrowthError, "epochs from 0 on"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_explained_and_leaves_no_run_behind(case: str, tmp_path: Path) -> None:
    attempt, kind, words = CASES[case]
    with pytest.raises(kind, match=words):
        attempt(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["run", "a/b/run"])
def test_after_a_mistake_in_the_data_the_same_folder_can_be_used_again(folder: str, tmp_path: Path) -> None:
    with pytest.raises(GrowthError, match="NaN"):
        start(folder=tmp_path / folder, train=spoiled(make_data()))
    assert not list(tmp_path.iterdir())
    assert start(folder=tmp_path / folder).status == "finished"


@pytest.mark.slow
def test_an_existing_folder_keeps_its_files_after_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(GrowthError, match="NaN"):
        start(folder=tmp_path, train=spoiled(make_data()))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert start(folder=tmp_path).status == "finished"


class Worse:
    """A loader that fails in its second epoch."""

    def __init__(self) -> None:
        self.rounds = 0

    def __iter__(self) -> Iterator[Batch]:
        self.rounds += 1
        if self.rounds == 2:
            raise OSError("the disk is gone")
        return iter(make_data())


@pytest.mark.slow
def test_an_error_after_the_first_epoch_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk is gone"):
        start(folder=tmp_path / "run", train=Worse())
    with pytest.raises(RunError, match=r"already holds a run .* continue it with resume=True \(--resume on the command line\)"):
        start(folder=tmp_path / "run")
    assert start(folder=tmp_path / "run", resume=True).epochs == 2


def test_a_training_that_diverged_at_once_keeps_its_folder(tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = cross_entropy(outputs, targets)
        return value * math.nan if torch.is_grad_enabled() else value

    with pytest.raises(Diverged, match="fails again and again"):
        start(loss=loss, folder=tmp_path / "run", train=make_data(12))
    assert (tmp_path / "run" / EVENTS).is_file()


@pytest.mark.slow
def test_a_resumed_run_keeps_its_folder_after_an_error(tmp_path: Path) -> None:
    start(folder=tmp_path / "run", epochs=1)
    with pytest.raises(GrowthError, match="NaN"):
        start(folder=tmp_path / "run", resume=True, train=spoiled(make_data()))
    assert start(folder=tmp_path / "run", resume=True).epochs == 2


def test_an_error_of_the_loss_function_is_raised_and_leaves_no_hooks() -> None:
    host, calls, slotted = make_host(), [], []
    before = copy.deepcopy(host.state_dict())

    def fail(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(1)
        slotted[:] = [any(map(is_touched, model.modules())), model]
        if len(calls) == 7:
            raise KeyError("targets")
        return cross_entropy(model(batch[0]), batch[1])

    controller = Planned([(0, "first", "mlp"), (0, "second", "mlp")])
    with pytest.raises(KeyError, match="targets") as caught:
        grow(host, make_data(), make_data(2), step_loss=fail, epochs=3, config=config(**NAMED), controller=controller)
    assert caught.value.__cause__ is None
    assert_same(dict(host.state_dict()), dict(before))
    was_touched, copied = slotted
    assert was_touched
    assert not any(map(is_touched, [*host.modules(), *copied.modules()]))


def is_touched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def test_a_wrong_example_input_is_refused_and_leaves_no_hooks() -> None:
    host = make_host()
    with pytest.raises(GrowthError, match=r"cannot run the example input \(\[2, 7\] float32\)"):
        add_slots(host, torch.zeros(2, 7))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in host.modules())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GrowthConfig(slots=()), "slots"),
        (lambda: GrowthConfig(blueprints=("mlp", "mlp")), "blueprints"),
        (lambda: LifecycleConfig(raise_mode="alone"), "raise_mode"),
        (lambda: BudgetConfig(max_seeds=0), "max_seeds"),
    ],
)
def test_settings_are_checked_when_they_are_built(make, words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        make()


@pytest.mark.parametrize("given", [0.5, [0.5, 0.4], None], ids=["a loss", "losses", "nothing"])
def test_after_epoch_without_a_function_is_refused_and_changes_nothing(given: object) -> None:
    loop = make_loop()
    loop.step(*loop.data[0])
    with pytest.raises(GrowthError, match=r"after_epoch needs a function .* and got .*: grower.after_epoch\(evaluate\)"):
        loop.grower.after_epoch(given)
    assert loop.grower.epoch == 0
    assert loop.grower.after_epoch(loop.evaluate).epoch == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (0.5, r"evaluate\(\) gave a float; .* an item for every validation batch"),
        (None, r"evaluate\(\) gave None; "),
        ([torch.zeros(3, 2)], r"evaluate\(\) gave losses of shape \[3, 2\] for a batch"),
        ([torch.zeros(3), torch.tensor(1.0)], "losses of samples for one batch, and the loss of a whole batch for another"),
        ([(torch.zeros(3), ["a", "b"])], "3 losses of samples with 2 keys of their groups; give one key for each"),
        ([(torch.zeros(3), 4)], "3 losses of samples with 0 keys"),
        (["low"], r"evaluate\(\) gave a str for a batch"),
    ],
)
def test_an_evaluation_without_losses_is_refused_with_the_expected_result(answer: object, words: str) -> None:
    loop = make_loop()
    loop.step(*loop.data[0])
    with pytest.raises(GrowthError, match=words):
        loop.grower.after_epoch(lambda: answer)
    assert loop.grower.epoch == 0
    assert loop.grower.after_epoch(loop.evaluate).epoch == 1
