"""Rows: the state of N modules, read, written and loaded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from esper.fleet.stacked.rows import Layout, ModuleRows, Rows
from esper.tasks.gpt_host import GPTHost
from esper.tasks.hosts import ConvHost


def conv_hosts(count: int) -> list[nn.Module]:
    hosts: list[nn.Module] = [ConvHost(1, 3, (2, 4), pool=(True, False)) for _ in range(count)]
    for host in hosts:  # so that every host has running statistics of its own
        host(torch.randn(4, 1, 4, 4))
    return hosts


def assert_same_state(found: dict[str, Tensor], host: nn.Module) -> None:
    expected = host.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_a_layout_names_every_number_of_a_row_once() -> None:
    layout = Layout.of(ConvHost(1, 3, (2, 4), pool=(True, False)))
    numbers = torch.arange(layout.width).unsqueeze(0)
    views = layout.unflatten(numbers)
    assert torch.equal(torch.cat([view.flatten() for view in views.values()]), numbers[0])
    assert views["blocks.0.norm.weight"].tolist() == [[18, 19]]  # behind 2·1·3·3 of the first convolution


def test_views_share_storage_and_gradients_with_the_flat_tensor() -> None:
    rows = Rows(Layout.of(nn.Linear(3, 2)), 4, requires_grad=True)
    views = rows.views()
    (views["bias"][1].sum() * 5).backward()  # type: ignore[no-untyped-call]
    assert rows.flat.grad is not None
    assert torch.equal(rows.flat.grad.nonzero(), torch.tensor([[1, 6], [1, 7]]))
    with torch.no_grad():
        views["weight"][2, 0, 1] = 7.0
    assert rows.flat[2, 1] == 7.0


def test_a_loaded_row_gives_back_the_state_of_its_host() -> None:
    hosts = conv_hosts(3)
    rows = ModuleRows.of(hosts)
    for row, host in enumerate(hosts):
        assert_same_state(rows.state_dict_of(row), host)


def test_loading_some_rows_leaves_the_others_as_they_were() -> None:
    hosts, (other, another) = conv_hosts(3), conv_hosts(2)
    rows = ModuleRows.of(hosts)
    rows.load(torch.tensor([2, 0]), [other, another.state_dict()])
    for row, host in enumerate([another, hosts[1], other]):
        assert_same_state(rows.state_dict_of(row), host)


def test_a_rollback_of_some_hosts_restores_their_rows_alone() -> None:
    rows = ModuleRows.of(conv_hosts(4))
    chosen = torch.tensor([1, 3])
    before = [part.flat.detach().clone() for part in rows.parts]
    snapshot = rows.read(chosen)
    with torch.no_grad():
        for part in rows.parts:
            part.flat += 1
    rows.write(chosen, snapshot)
    for part, old in zip(rows.parts, before, strict=True):
        assert torch.equal(part.flat[chosen], old[chosen])
        assert torch.equal(part.flat[[0, 2]], old[[0, 2]] + 1)


def test_gradients_of_copied_rows_reach_the_original_rows() -> None:
    rows = ModuleRows.of([nn.Linear(2, 1) for _ in range(3)])
    rows.tensors(torch.tensor([2]))["weight"].sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(rows.parameters.flat.grad, torch.tensor([[0.0, 0, 0], [0, 0, 0], [1, 1, 0]]))  # type: ignore[arg-type]


def test_a_tied_weight_lies_in_a_row_once_and_has_both_names_in_the_state() -> None:
    host = GPTHost(7, sequence_length=4, width=8, heads=1, layers=1, tie_head=True)
    rows = ModuleRows.of([host, host])
    assert "head.weight" not in rows.parameters.layout.shapes
    assert_same_state(rows.state_dict_of(1), host)


def test_frozen_parameters_are_not_among_the_trained_ones() -> None:
    host = nn.Linear(2, 2)
    host.bias.requires_grad_(False)
    rows = ModuleRows.of([host])
    assert list(rows.parameters.layout.shapes) == ["weight"]
    assert_same_state(rows.state_dict_of(0), host)


def test_a_buffer_that_no_state_dict_has_stays_when_one_is_loaded() -> None:
    host = nn.Linear(1, 1)
    host.register_buffer("scale", torch.tensor([3.0]), persistent=False)
    rows = ModuleRows.of([host, host])
    rows.load(torch.tensor([1]), [host.state_dict()])
    assert rows.tensors()["scale"].tolist() == [[3], [3]]
    assert_same_state(rows.state_dict_of(1), host)


def test_a_module_without_parameters_has_empty_rows() -> None:
    rows = ModuleRows.of([nn.ReLU(), nn.ReLU()])
    assert rows.parameters.flat.shape == (2, 0)
    assert rows.tensors() == {}


def test_a_host_of_another_architecture_is_refused_before_anything_is_written() -> None:
    hosts = conv_hosts(2)
    rows = ModuleRows.of(hosts)
    other = ConvHost(1, 4, (2, 4), pool=(True, False))  # the head alone is larger
    with pytest.raises(ValueError, match=r"'head.weight' has shape \[4, 4\], this fleet's hosts have it as \[3, 4\]"):
        rows.load(torch.tensor([0]), [other])
    with pytest.raises(ValueError, match=r"'head.bias' is missing"):
        rows.load(torch.tensor([0]), [{name: tensor for name, tensor in hosts[1].state_dict().items() if name != "head.bias"}])
    with pytest.raises(ValueError, match=r"'blocks.0.norm.running_mean' is missing"):
        rows.load(torch.tensor([0]), [{name: tensor for name, tensor in hosts[1].state_dict().items() if "running" not in name}])
    with pytest.raises(ValueError, match=r"'blocks.2.conv.weight' is unknown"):
        rows.load(torch.tensor([0]), [ConvHost(1, 3, (2, 4, 4), pool=(True, False, False))])
    with pytest.raises(ValueError, match="1 rows and 2 sources"):
        rows.load(torch.tensor([0]), hosts)
    assert_same_state(rows.state_dict_of(0), hosts[0])


def test_parameters_of_two_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one dtype, got \['torch.float32', 'torch.float64'\]"):
        Layout.of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double()))
