"""Hosts: their shapes, parameter counts and seeds."""

from __future__ import annotations

import pytest
import torch

from esper.growth import add_slots
from esper.tasks import ConvHost, GPTHost, ResidualHost, TaskError, load_task
from esper.tasks.hosts import make_host


def count(host: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in host.parameters())


def test_three_blocks_from_eight_channels_on_colour_images_have_6418_parameters() -> None:
    assert count(ConvHost(3, 10, (8, 16, 32), pool=(True, True, True))) == 6_418


@pytest.mark.parametrize(("task", "counts"), [("digits", (1_702, 24_058, 210_394)), ("digits-1d", (244, 8_602, 32_554))])
def test_hosts_have_the_stated_parameters_starved_below_right_below_oversized(task: str, counts: tuple[int, ...]) -> None:
    loaded = load_task(task)
    assert tuple(loaded.num_parameters(size) for size in loaded.host_sizes) == counts == tuple(sorted(counts))


@pytest.mark.parametrize("task", ["digits", "digits-1d", "text"])
def test_a_host_depends_on_its_seed_alone_and_leaves_the_global_generator_alone(task: str) -> None:
    loaded = load_task(task)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = loaded.make_host("starved", seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    again, other = loaded.make_host("starved", seed=5), loaded.make_host("starved", seed=6)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_a_host_without_a_seed_has_that_of_the_task() -> None:
    implicit, explicit = load_task("digits", seed=9).make_host("starved"), load_task("digits").make_host("starved", seed=9)
    assert torch.equal(next(implicit.parameters()), next(explicit.parameters()))


@pytest.mark.parametrize("task", ["digits", "digits-1d"])
def test_every_block_of_a_convolutional_host_is_called_once(task: str) -> None:
    loaded = load_task(task)
    host = loaded.make_host("starved")
    assert isinstance(host, ConvHost)
    calls: list[int] = []
    for index, block in enumerate(host.blocks):
        block.register_forward_hook(lambda *_, index=index: calls.append(index))
    assert host(loaded.example_input).shape == (2, 10)
    assert calls == [0, 1, 2]


def test_pooling_halves_the_size_where_asked_for() -> None:
    host = ConvHost(1, 10, (2, 4, 8), pool=(True, True, False))
    assert host.blocks(torch.zeros(2, 1, 8, 8)).shape == (2, 8, 2, 2)
    series = ConvHost(1, 10, (2, 4, 8), pool=(True, True, True), spatial=1)
    assert series.blocks(torch.zeros(2, 1, 40)).shape == (2, 8, 5)


@pytest.mark.parametrize("wrong", [{"spatial": 3}, {"pool": (True,)}])
def test_an_impossible_convolutional_host_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ConvHost(1, 10, **wrong)  # type: ignore[arg-type]


def test_a_language_host_never_looks_ahead() -> None:
    host = load_task("text").make_host("starved")
    ids = torch.arange(64)[None] % 50
    changed = ids.clone()
    changed[0, 40:] = 7
    with torch.no_grad():
        before, after = host(ids), host(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


def test_a_tied_head_shares_the_weight_of_the_tokens() -> None:
    tied, free = (GPTHost(50, sequence_length=8, tie_head=tie_head) for tie_head in (True, False))
    assert tied.head.weight is tied.tokens.weight
    assert count(free) - count(tied) == 50 * 32


def test_a_sequence_that_is_too_long_is_refused_with_its_length() -> None:
    with pytest.raises(ValueError, match="up to 8 tokens; got 9"):
        GPTHost(50, sequence_length=8)(torch.zeros(1, 9, dtype=torch.int64))


# Families


@pytest.mark.parametrize("blocks", [1, 3, 8])
@pytest.mark.parametrize(
    ("family", "task"),
    [("conv", "digits"), ("residual", "digits"), ("mlp", "digits"), ("conv", "digits-1d"), ("residual", "digits-1d"), ("gpt", "text")],
)
def test_a_family_has_hosts_of_any_depth_which_can_grow(family: str, task: str, blocks: int) -> None:
    loaded = load_task(task)
    host = loaded.make_host(f"{family}-8x{blocks}", seed=0)
    inputs = loaded.example_input
    assert host(inputs).shape == (*loaded.train.targets[:2].shape, loaded.num_classes)
    slotted = add_slots(host, inputs)
    assert len(slotted.slots) >= blocks
    assert any(slotted.place(name).chain for name in slotted.slots)  # also in width


def test_a_convolutional_host_of_three_blocks_is_the_one_of_its_channels() -> None:
    task = load_task("digits")
    assert count(task.make_host("conv-4x3")) == count(task.make_host("4-8-16")) == 1_702


def test_a_residual_host_is_halved_between_its_blocks_and_keeps_two_positions() -> None:
    host = make_host("residual-4x6", torch.zeros(2, 3, 8, 8), 5)
    assert isinstance(host, ResidualHost)
    assert host.blocks(torch.zeros(2, 3, 8, 8)).shape == (2, 16, 2, 2)
    assert host.head.in_features == 16


@pytest.mark.parametrize(("task", "name"), [("digits", "gpt-8x2"), ("text", "conv-8x2"), ("text", "mlp-8x2")])
def test_a_family_that_cannot_read_the_inputs_is_refused(task: str, name: str) -> None:
    with pytest.raises(TaskError, match=f"no host {name!r} for {task}: a host of the family"):
        load_task(task).make_host(name)


@pytest.mark.parametrize("name", ["residual-8", "residual-0x2", "tree-8x2", "8x2"])
def test_a_name_of_no_host_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(TaskError, match=r"has starved, right, oversized, hosts by the channels .* hosts by family, width and blocks"):
        load_task("digits").make_host(name)
