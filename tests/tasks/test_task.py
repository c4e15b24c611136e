"""Tasks without files: their splits, their losses, and a check that they can be learned."""

from __future__ import annotations

import hashlib
import math
from importlib.resources import files

import numpy as np
import pytest
import torch
from torch import nn

from esper.tasks import TASKS, Split, Task, TaskError, load_task
from esper.tasks.images import crop_and_flip, stratified_parts
from esper.tasks.teacher import make_teacher_task

BALANCED = ("digits", "digits-1d")
OWN_DATA = (*BALANCED, "teacher")


def parts_of(task: Task) -> tuple[Split, Split, Split]:
    return task.train, task.validation, task.test


@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [
        ("digits", (1_000, 397, 400), (1, 8, 8)),
        ("digits-1d", (4_000, 1_000, 1_000), (1, 40)),
        ("teacher", (4_000, 1_000, 1_000), (1, 8, 8)),
    ],
)
def test_parts_have_the_stated_sizes_and_shapes(name: str, sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    task = load_task(name)
    assert tuple(len(part) for part in parts_of(task)) == sizes
    assert all(part.inputs.shape[1:] == shape and part.inputs.dtype == torch.float32 for part in parts_of(task))
    assert task.example_input.shape == (2, *shape)


@pytest.mark.parametrize("name", OWN_DATA)
def test_no_sample_is_in_two_parts_or_twice_in_one(name: str) -> None:
    rows = [row.numpy().tobytes() for part in parts_of(load_task(name)) for row in part.inputs]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("name", BALANCED)
def test_every_class_has_its_share_of_every_part(name: str) -> None:
    parts = parts_of(load_task(name))
    totals = sum(part.targets.bincount(minlength=10) for part in parts)
    for part in parts:
        expected = totals * len(part) / sum(len(other) for other in parts)
        assert (part.targets.bincount(minlength=10) - expected).abs().max() <= 1


@pytest.mark.parametrize("name", OWN_DATA)
def test_training_inputs_have_about_mean_zero_and_spread_one(name: str) -> None:
    inputs = load_task(name).train.inputs
    assert abs(inputs.mean()) < 0.01
    assert abs(inputs.std() - 1) < 0.01


@pytest.mark.parametrize("name", OWN_DATA)
def test_the_parts_do_not_depend_on_the_seed_of_the_run(name: str) -> None:
    for one, other in zip(parts_of(load_task(name, seed=1)), parts_of(load_task(name, seed=2)), strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)


def test_the_splits_of_the_digits_have_a_fixed_digest() -> None:
    labels = load_digit_labels()
    parts = stratified_parts(labels, (1_000, 397, 400), seed=1_797)
    digests = [hashlib.sha256(part.astype("<i8").tobytes()).hexdigest()[:12] for part in parts]
    assert digests == ["633972e2d602", "82dfd81ecdf5", "a99edbd1a495"]


def load_digit_labels() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    with (files("esper.tasks") / "data" / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as archive:
        return archive["labels"]  # type: ignore[no-any-return]


def test_the_digits_take_less_than_60_kilobytes_and_name_their_licence() -> None:
    folder = files("esper.tasks") / "data"
    assert len((folder / "digits.npz").read_bytes()) < 60_000
    assert "CC BY 4.0" in (folder / "digits-LICENSE.txt").read_text()
    assert "CC BY 4.0" in load_task("digits").describe()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OWN_DATA, "text"])
def test_loading_and_using_a_task_leaves_all_global_generators_alone(name: str) -> None:
    before_torch, before_numpy = torch.get_rng_state(), np.random.get_state(legacy=False)  # noqa: NPY002
    task = load_task(name)
    next(iter(task.train_loader()))
    task.describe()
    task.make_host("right")
    after_numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before_torch)
    assert np.array_equal(before_numpy["state"]["key"], after_numpy["state"]["key"])
    assert before_numpy["state"]["pos"] == after_numpy["state"]["pos"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "default"), [("digits", 64), ("digits-1d", 100), ("teacher", 64), ("text", 32)])
def test_the_batch_size_is_what_the_user_set_on_every_task(name: str, default: int) -> None:
    assert load_task(name).train_loader().batch_size == default
    task = load_task(name, batch_size=17)
    for loader in (task.train_loader(), task.val_loader(), task.test_loader()):
        assert loader.batch_size == len(next(iter(loader))[0]) == 17


def test_the_training_loader_covers_the_whole_training_part() -> None:
    task = load_task("digits")
    assert sum(len(inputs) for inputs, _ in task.train_loader(seed=1)) == 1_000
    assert len(task.train_loader()) == 16
    assert len(task.train_loader(drop_last=True)) == 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "text"])
def test_the_uninformed_loss_is_that_of_the_best_constant_scores(name: str) -> None:
    task = load_task(name)
    targets = task.validation.targets
    counts = torch.bincount(targets.flatten(), minlength=task.num_classes).double()
    scores = (counts.clamp(min=1e-9) / counts.sum()).log().expand(*targets.shape, -1)
    assert task.loss_fn(scores, targets).item() == pytest.approx(task.uninformed_loss)
    assert task.uninformed_loss < math.log(task.num_classes), "equal scores are worse"
    other = scores + torch.randn(task.num_classes, generator=torch.Generator().manual_seed(0)).double() * 0.1
    assert task.loss_fn(other, targets).item() > task.uninformed_loss


def test_accuracy_is_the_share_of_targets_with_the_highest_score() -> None:
    task = load_task("digits")
    scores = torch.eye(10)[:4]
    assert task.accuracy(scores, torch.tensor([0, 1, 2, 9])).item() == 0.75
    assert task.accuracy(scores.view(2, 2, 10), torch.tensor([[0, 1], [9, 9]])).item() == 0.5


def test_evaluation_weights_batches_by_their_size_and_keeps_their_losses() -> None:
    task = load_task("digits")
    host = task.make_host("starved")
    loader = task.val_loader()
    found = task.evaluate(host, loader)
    host.eval()
    with torch.no_grad():
        outputs = host(task.validation.inputs)
    assert found.loss == pytest.approx(task.loss_fn(outputs, task.validation.targets).item(), abs=1e-5)
    assert found.accuracy == pytest.approx(task.accuracy(outputs, task.validation.targets).item(), abs=1e-6)
    assert len(found.losses) == len(loader)


def test_evaluation_changes_neither_buffers_nor_the_mode_of_any_module() -> None:
    task = load_task("digits")
    host = task.make_host("starved")
    frozen = host.get_submodule("blocks.1.norm")
    frozen.eval()
    before = {name: value.clone() for name, value in host.state_dict().items()}
    task.evaluate(host, task.val_loader())
    assert {name for name, module in host.named_modules() if not module.training} == {"blocks.1.norm"}
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())


def test_evaluation_on_nothing_is_refused() -> None:
    with pytest.raises(TaskError, match="no batch"):
        load_task("digits").evaluate(nn.Identity(), [])


@pytest.mark.slow
def test_a_starved_host_learns_the_digits_far_beyond_guessing_in_five_epochs() -> None:
    task = load_task("digits")
    host = task.make_host("starved", seed=0)
    optimizer = torch.optim.AdamW(host.parameters(), lr=3e-3)
    loader = task.train_loader(seed=0)
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            task.loss_fn(host(inputs), targets).backward()
            optimizer.step()
    assert task.evaluate(host, task.val_loader()).accuracy > 0.6


def test_a_name_that_is_no_task_is_refused_with_the_nearest() -> None:
    with pytest.raises(TaskError, match="did you mean 'digits-1d'"):
        load_task("Digits1d")
    with pytest.raises(TaskError, match="there are digits, digits-1d"):
        load_task("xyz")


@pytest.mark.parametrize("name", OWN_DATA)
def test_an_option_that_a_task_would_ignore_is_refused(name: str) -> None:
    with pytest.raises(TaskError, match="leave out --data-dir"):
        load_task(name, data_dir="somewhere")
    with pytest.raises(TaskError, match="sequence length"):
        load_task(name, sequence_length=8)
    with pytest.raises(TaskError, match="no augmentation"):
        load_task(name).train_loader(augment=True)
    with pytest.raises(TaskError, match="starved, right, oversized"):
        load_task(name).make_host("huge")


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 2.5}, {"seed": -1}, {"seed": True}])
def test_an_impossible_option_is_refused_before_anything_is_read(options: dict[str, int]) -> None:
    with pytest.raises(TaskError, match="is an int"):
        load_task("digits", **options)  # type: ignore[arg-type]


def test_the_list_of_tasks_has_the_titles_of_the_tasks() -> None:
    assert all(TASKS[name].title == load_task(name).title for name in OWN_DATA)


# Changed tasks


def test_a_harder_teacher_leaves_a_small_host_with_a_higher_loss() -> None:
    losses = []
    for teacher in ("conv-2x1", "conv-8x3"):
        task = make_teacher_task(teacher, samples=(1_000, 500, 10))
        host = task.make_host("conv-4x2", seed=0)
        optimizer = torch.optim.AdamW(host.parameters(), lr=0.01)
        for _ in range(4):
            for inputs, targets in task.train_loader():
                optimizer.zero_grad()
                task.loss_fn(host(inputs), targets).backward()
                optimizer.step()
        losses.append(task.evaluate(host, task.val_loader()).loss / task.uninformed_loss)
    assert losses[0] + 0.1 < losses[1] < 1


def test_teachers_of_other_seeds_label_other_images() -> None:
    one, other = (make_teacher_task(samples=(50, 10, 10), data_seed=seed) for seed in (1, 2))
    assert not torch.equal(one.train.inputs, other.train.inputs)
    assert not torch.equal(one.train.targets, other.train.targets)


def test_some_classes_of_a_task_are_numbered_from_0_and_the_same_in_all_parts() -> None:
    task = load_task("digits")
    some = task.with_classes(3, seed=1)
    assert some.num_classes == 3
    assert some.uninformed_loss == pytest.approx(math.log(3), abs=0.01)
    labels = {
        image.numpy().tobytes(): int(label) for part in parts_of(task) for image, label in zip(part.inputs, part.targets, strict=True)
    }
    renamed = {
        (labels[image.numpy().tobytes()], int(label))
        for part in parts_of(some)
        for image, label in zip(part.inputs, part.targets, strict=True)
    }
    assert [new for _, new in sorted(renamed)] == [0, 1, 2]  # each class has one new number, in the old order
    kept = [old for old, _ in renamed]
    assert [len(part) for part in parts_of(some)] == [int(torch.isin(part.targets, torch.tensor(kept)).sum()) for part in parts_of(task)]
    assert some.make_host("conv-4x2")(some.example_input).shape == (2, 3)
    with pytest.raises(TaskError, match="digits has hosts by family"):
        some.make_host("starved")


@pytest.mark.parametrize(("name", "count"), [("digits", 1), ("digits", 11), ("text", 2)])
def test_too_few_or_too_many_classes_and_classes_of_tokens_are_refused(name: str, count: int) -> None:
    with pytest.raises(TaskError, match="classes"):
        load_task(name).with_classes(count, seed=0)


def test_label_noise_replaces_its_share_of_the_labels_in_every_part() -> None:
    task = load_task("digits-1d")
    noisy = task.with_label_noise(0.3, seed=4)
    for before, after in zip(parts_of(task), parts_of(noisy), strict=True):
        assert (before.targets != after.targets).float().mean().item() == pytest.approx(0.3, abs=0.05)
        assert torch.equal(before.inputs, after.inputs)
        assert set(after.targets.tolist()) == set(range(10))
    assert torch.equal(task.with_label_noise(0.3, seed=4).train.targets, noisy.train.targets)
    with pytest.raises(TaskError, match="less than 1"):
        task.with_label_noise(1.0, seed=0)


def test_crop_and_flip_moves_whole_images_and_repeats_with_its_generator() -> None:
    images = torch.rand(64, 3, 8, 8) + 1  # no pixel is 0, as the border is
    changed = crop_and_flip(images, torch.Generator().manual_seed(0))
    assert torch.equal(changed, crop_and_flip(images, torch.Generator().manual_seed(0)))
    assert not torch.equal(changed, images)
    for before, after in zip(images, changed, strict=True):
        assert set(after.flatten().tolist()) <= {*before.flatten().tolist(), 0.0}
        rows, columns = (after[0] != 0).any(1).sum(), (after[0] != 0).any(0).sum()
        assert (after[0] != 0).sum() == rows * columns >= 16  # one rectangle, moved by four pixels at most
