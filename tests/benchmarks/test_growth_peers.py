"""The comparisons with other systems run, and give every arm its size and its budget. Nothing here measures anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import growth_runs
from benchmarks.growth import adapt, peers, wide_resnet
from esper.tasks import Split, Task, load_task
from esper.tasks.gpt_host import GPTHost

pytestmark = [pytest.mark.slow, pytest.mark.extra()]  # benchmarks are checked by `make test-all`


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def first(split: Split, count: int) -> Split:
    return Split(split.inputs[:count], split.targets[:count])


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Task:
    """The digits in large batches: four steps an epoch, but enough data for a network that may grow."""
    task = replace(load_task("digits"), batch_size=250)
    monkeypatch.setattr(growth_runs, "_loaded", lambda name, data_dir: task)
    return task


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Peers


def test_static_networks_have_the_size_and_the_flops_of_the_grown_one(
    digits: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda package: None)  # as if no peer was installed
    path = tmp_path / "peers.jsonl"
    command = ["--epochs", "30", "--seeds", "1", "--rates", "0.03", "--jobs", "1", "--out", str(path)]
    peers.main(command)
    _, *runs, summary = lines(path)
    esper, small, as_esper = runs
    assert [run["arm"] for run in runs] == list(summary["arms"]) == ["esper", "small", "as_esper"]
    assert esper["parameters"] > small["parameters"] == 610
    assert as_esper["parameters"] == pytest.approx(esper["parameters"], abs=38)  # half of a hidden unit
    for run, hidden in ((small, 8), (as_esper, peers.hidden_for(esper["parameters"]))):
        an_epoch = peers.epoch_flops(digits, hidden) / 1e9
        a_validation = peers.forward_flops(hidden) * len(digits.validation) / 1e9  # of the last state, if it is not the best
        more = run["train_gflops"] - run["epochs"] * an_epoch  # as `grow` counts
        assert more == pytest.approx(0, abs=1e-5) or more == pytest.approx(a_validation, rel=0.05)
        # A last validation comes on top of the epochs that the FLOPs allow.
        assert -1.05 * a_validation <= esper["train_gflops"] - run["train_gflops"] < an_epoch
    before = len(lines(path))
    peers.main(command)
    assert len(lines(path)) == before + 1  # only another summary


@pytest.mark.extra("gromo")
def test_gromo_starts_with_our_network_grows_and_stays_within_its_flops(digits: Task) -> None:
    setting = growth_runs.Setting(epochs=20)
    untrained = peers.run_gromo(replace(setting, learning_rate=0.0), 3, 1.01 * peers.epoch_flops(digits, 8))
    host = peers.make_host(8, seed=3)
    assert untrained["epochs"] == 1
    assert untrained["val_loss"] == pytest.approx(digits.evaluate(host, digits.val_loader()).loss, rel=1e-5)
    budget = 40 * peers.epoch_flops(digits, 8)
    grown = peers.run_gromo(setting, 3, budget)
    assert grown["parameters"] > untrained["parameters"] == 610
    assert 0.5 * budget < 1e9 * grown["train_gflops"] <= budget


# Adapting


def test_code_and_prose_are_separated() -> None:
    source = '"""What it is."""\nx = "#"  # a comment\n\n\ndef f():\n    r"""Do it.\n\n    Twice.\n    """\n    return """not prose"""\n'
    code, prose = adapt.code_and_prose(source)
    assert prose == "What it is.\na comment\nDo it.\n\n    Twice.\n"
    assert code == '\nx = "#"  \n\n\ndef f():\n    \n    return """not prose"""\n'


def test_source_and_target_share_their_ids(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("a letter, and another\n" * 400)
    tasks = adapt.texts(tmp_path)
    assert tasks["source"].num_classes == tasks["target"].num_classes == 101
    letters = tasks["target"].train.inputs[0, :3]
    in_source = tasks["source"].train.inputs.flatten().unfold(0, 3, 1)
    assert (in_source == letters).all(dim=1).any()  # "a l" is in Python's sources too


def test_the_learning_rate_is_chosen_by_validation() -> None:
    losses = [(0.1, 1.0, 5.0), (0.1, 1.2, 5.0), (0.3, 0.9, 9.0), (0.3, 1.0, 9.0)]
    runs = [{"learning_rate": rate, "val_loss": val, "test_loss": test} for rate, val, test in losses]
    assert growth_runs.best_rate(runs) == runs[2:]


@pytest.mark.extra("peft", "transformers", "accelerate")
def test_lora_has_about_the_parameters_that_it_was_asked_for_and_freezes_the_rest() -> None:
    host = GPTHost(20, sequence_length=8, width=32, layers=2, heads=2)
    before = sum(parameter.numel() for parameter in host.parameters())
    rank = adapt.lora_rank(host, 10_000)
    model = adapt.with_lora(host, rank, seed=0)
    added = sum(parameter.numel() for parameter in model.parameters()) - before
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert added == pytest.approx(10_000, abs=added / rank / 2)
    assert trained == added + 2 * 32  # and the last norm


@pytest.mark.extra("peft", "transformers", "accelerate")
def test_all_ways_to_adapt_start_with_the_same_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapt, "SAMPLES", {"source": 256, "target": 128})
    monkeypatch.setattr(adapt, "SOURCE_EPOCHS", 1)
    whole = adapt.texts.__wrapped__(None)
    short = {name: replace(task, validation=first(task.validation, 96), test=first(task.test, 64)) for name, task in whole.items()}
    monkeypatch.setattr(adapt, "texts", lambda data_dir: short)
    path = tmp_path / "adapt.jsonl"
    adapt.main(["--epochs", "8", "--seeds", "1", "--rates", "0.01", "--width", "16", "--jobs", "1", "--out", str(path)])
    _, *runs, summary = lines(path)
    by_arm = {run["arm"]: run for run in runs}
    assert list(by_arm) == list(summary["arms"]) == list(adapt.ARMS)
    grown, lora = by_arm["grown_frozen"], by_arm["lora_flops"]
    assert grown["parameters_added"] > 0
    assert lora["parameters_added"] == by_arm["lora_parameters"]["parameters_added"]
    assert lora["train_gflops"] == pytest.approx(grown["train_gflops"], rel=0.5 / lora["epochs"] + 0.01)
    assert len({run["source_val_loss"] for run in runs}) == 1


# Wide residual networks


@pytest.fixture
def patterns(monkeypatch: pytest.MonkeyPatch) -> Task:
    """Small images of ten patterns with noise, in small batches."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(10, 3, 8, 8, generator=generator)

    def split(count: int) -> Split:
        targets = torch.arange(count) % 10
        return Split(means[targets] + torch.randn(count, 3, 8, 8, generator=generator), targets)

    hosts = {"starved": lambda: nn.Identity()}
    task = Task("cifar10", "", "", 10, split(512), split(256), split(64), hosts, 32, augmentation=lambda images, generator: images)
    monkeypatch.setattr(growth_runs, "_loaded", lambda name, data_dir: task)
    monkeypatch.setattr(wide_resnet, "BATCH", 32)
    return task


def test_two_doublings_make_the_big_network_of_the_small_one(patterns: Task) -> None:
    setting = wide_resnet.WideSetting(epochs=6, depth=10)
    (run,) = wide_resnet.run_one(setting, "random", 0)
    kept = {(seed["slot"], seed["born"]) for seed in run["seeds"] if seed["outcome"] == "kept"}
    assert kept == {(f"blocks.{block}.first{again}", born) for block in range(3) for again, born in (("", 1), ("#2", 3))}
    assert run["parameters"] == wide_resnet.parameters(10, 1.0)


def test_the_big_network_gets_the_epochs_that_growing_pays_for() -> None:
    runs = [
        {"arm": "big", "seed": 0, "train_gflops": 100.0, "epochs": 10},
        {"arm": "random", "seed": 0, "train_gflops": 68.0, "epochs": 10},
        {"arm": "random", "seed": 1, "train_gflops": 1.0, "epochs": 10},
    ]
    assert wide_resnet.equal_epochs(runs, 0) == 7


def test_units_with_zero_incoming_weights_can_learn() -> None:
    zero = torch.zeros(3, requires_grad=True)
    wide_resnet.ReLUWithSlope()(zero).sum().backward()
    assert zero.grad is not None
    assert zero.grad.tolist() == [1.0, 1.0, 1.0]


def test_the_heuristic_may_grow_up_to_the_big_network() -> None:
    setting = wide_resnet.WideSetting(depth=10)
    small, big = (wide_resnet.parameters(10, width) for width in (0.25, 1.0))
    limit = wide_resnet.up_to_big(replace(setting, task="digits"), 0).budget.max_parameters
    assert small * (1 + limit) == pytest.approx(big)
