"""An isolated second pass leaves the host unchanged."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from esper.growth.host.isolation import Isolation, eager, is_compiled, is_eager, isolated
from tests.processes import spawn

LARGE = (200, 200)  # of floats: more than is always copied


class Noisy(nn.Module):
    """Draws from every global generator that a user's code may draw from."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (1 + 0.01 * random.random() + 0.01 * np.random.rand()) + 0.01 * torch.randn_like(x)  # noqa: NPY002


class Host(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), Noisy())
        self.head = nn.Linear(8, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        output: Tensor = self.head(self.stem(x))
        return output


class Mask(nn.Module):
    """Has a large buffer, and does with it what `touch` says."""

    def __init__(self, touch: Callable[[Mask], None] = lambda mask: None) -> None:
        super().__init__()
        self.touch = touch
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(LARGE))
        self.register_buffer("view", torch.ones(3).expand(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.touch(self)
        return x * self.mask[0, 0]


def seeded_host() -> Host:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    return Host()


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)) for _ in range(count)]


def train(host: Host, second_pass: Callable[[Tensor, Tensor], None] | None) -> list[Tensor]:
    """Losses, parameters, buffers and gradients after some steps, and the next number of each generator."""
    optimizer = torch.optim.SGD(host.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches(6):
        optimizer.zero_grad()
        loss = cross_entropy(host(x), y)
        if second_pass is not None:
            second_pass(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        if second_pass is not None:
            second_pass(x, y)
        optimizer.step()
        losses.append(loss.detach())
    state = [*host.parameters(), *host.buffers(), *(parameter.grad for parameter in host.parameters() if parameter.grad is not None)]
    draws = torch.tensor([random.random(), np.random.rand()], dtype=torch.float64)  # noqa: NPY002
    return [*losses, *state, draws, torch.rand(4)]


def test_training_with_isolated_second_passes_is_the_same_to_the_last_bit() -> None:
    alone = train(seeded_host(), None)
    host = seeded_host()
    seed, generator = nn.Linear(8, 8), torch.Generator().manual_seed(0)
    for parameter in seed.parameters():
        parameter.data.normal_(generator=generator)
    isolation = Isolation(host)
    is_on = False
    host.stem.register_forward_hook(lambda module, inputs, output: output + seed(output) if is_on else None)
    norms = []

    def shadow(x: Tensor, y: Tensor) -> None:
        nonlocal is_on
        is_on = True
        with isolation.guard():
            gradients = torch.autograd.grad(cross_entropy(host(x), y), list(seed.parameters()))
        is_on = False
        norms.append(float(gradients[0].norm()))

    seeded_host()  # to start where the other began: the seed drew from the generators when it was made
    beside = train(host, shadow)
    assert len(beside) == len(alone)
    assert all(torch.equal(one, other) for one, other in zip(alone, beside, strict=True))
    assert len(norms) == 12
    assert min(norms) > 0


def test_without_isolation_the_second_pass_changes_the_training() -> None:
    host = seeded_host()

    def second(x: Tensor, y: Tensor) -> None:
        host(x)

    assert not all(torch.equal(*pair) for pair in zip(train(seeded_host(), None), train(host, second), strict=True))


def test_the_seed_gets_its_gradient_without_calling_the_hooks_of_the_host() -> None:
    host, seed = Host(), nn.Linear(8, 8)
    host.stem.register_forward_hook(lambda module, inputs, output: output + seed(output))
    woken = []
    for parameter in host.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: woken.append("accumulated"))
        parameter.register_hook(lambda gradient: woken.append("gradient"))
    (x, y), *_ = batches(1)
    with isolated(host):
        torch.autograd.grad(cross_entropy(host(x), y), list(seed.parameters()))
    assert woken == []
    assert all(parameter.grad is None for parameter in host.parameters())


def test_an_exception_inside_an_isolated_pass_restores_the_host() -> None:
    host = seeded_host()
    before, state = copy.deepcopy(host.state_dict()), torch.get_rng_state()

    def fail() -> None:
        with isolated(host):
            host(batches(1)[0][0])
            host.eval()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(torch.equal(before[name], value) for name, value in host.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in host.modules())


def test_each_module_keeps_its_own_training_flag() -> None:
    host = Host()
    host.stem[1].eval()
    flags = [module.training for module in host.modules()]
    with isolated(host):
        host.eval()
    with isolated(host):
        host.train()
    assert [module.training for module in host.modules()] == flags


def test_a_replaced_buffer_is_restored_with_its_identity_and_value() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small: Tensor
            self.register_buffer("small", torch.zeros(3))
            self.register_buffer("large", torch.zeros(LARGE))

        def forward(self, x: Tensor) -> Tensor:
            self.small += 1
            self.small = self.small + x.sum()
            self.large = torch.ones(LARGE)
            self.register_buffer("new", torch.ones(3))
            return x

    host = Replacing()
    isolation, small, large = Isolation(host), host.small, host.large
    for _ in range(3):
        with isolation.guard():
            host(torch.ones(2))
        assert host.small is small
        assert host.large is large
        assert small.tolist() == [0, 0, 0]
        assert not large.any()
        assert dict(host.named_buffers()).keys() == {"small", "large"}


def test_a_large_buffer_that_never_changes_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Mask())
    isolation, copied = Isolation(host), []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda tensor: copied.append(tensor.numel()) or clone(tensor))
    sizes = []
    for is_training in (True, True, True, False, False):
        host.train(is_training)
        copied.clear()
        with isolation.guard():
            host(torch.ones(4, 6))
        sizes.append(max(copied))
    assert sizes == [40_000, 6, 6, 40_000, 6]


def test_a_large_buffer_that_changes_is_put_back_every_time() -> None:
    host = Mask(lambda mask: mask.mask.mul_(2))
    isolation = Isolation(host)
    for _ in range(3):
        with isolation.guard():
            host(torch.ones(2))
        assert float(host.mask.min()) == float(host.mask.max()) == 1


def test_large_statistics_of_batch_norm_are_put_back_although_their_version_never_moves() -> None:
    width = 20_000
    host = nn.BatchNorm1d(width)
    isolation = Isolation(host)
    for _ in range(3):
        with isolation.guard():
            host(torch.randn(2, width, generator=torch.Generator().manual_seed(0)))
        assert not host.running_mean.any()  # type: ignore[union-attr]


def test_a_large_buffer_that_changes_late_is_warned_of_once_and_then_put_back() -> None:
    host = Mask()
    isolation = Isolation(host)
    with isolation.guard():
        host(torch.ones(2))
    host.touch = lambda mask: mask.mask.mul_(2)
    with pytest.warns(RuntimeWarning, match="'mask'"), isolation.guard():
        host(torch.ones(2))
    assert float(host.mask[0, 0]) == 2
    for _ in range(2):
        with isolation.guard():
            host(torch.ones(2))
        assert float(host.mask[0, 0]) == 2


def test_an_isolated_pass_does_not_disturb_a_pending_backward_pass() -> None:
    host = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).eval()  # the norm saves its statistics for backward
    loss = host(torch.ones(2, 6)).sum()
    with isolated(host):
        host.train()
        host(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    loss.backward()


def test_buffers_made_in_inference_mode_shared_and_sparse_ones_are_put_back() -> None:
    host = nn.Module()
    with torch.inference_mode():
        host.register_buffer("inference", torch.zeros(3))
    host.register_buffer("sparse", torch.eye(300).to_sparse())
    host.part = nn.Module()
    host.part.register_buffer("shared", host.sparse)
    isolation = Isolation(host)
    for _ in range(2):
        with isolation.guard():
            host.sparse.mul_(2)
            with torch.inference_mode():
                host.inference.add_(1)
        assert not host.inference.any()
        assert float(host.sparse.sum()) == 300
        assert host.part.shared is host.sparse


def test_an_excluded_module_keeps_the_new_values_of_its_buffers() -> None:
    host = Host()
    with isolated(host, apart_from=[host.stem]):
        host(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    assert host.stem[1].num_batches_tracked == 1
    assert host.steps == 0


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_compiled_model_runs_eagerly_and_is_not_compiled_anew(is_in_place: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    host = Mask().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if is_in_place:
            host.compile(backend=backend)
        model = host if is_in_place else torch.compile(host, backend=backend)
        assert is_compiled(model)
        model(torch.ones(2))
        compiled = len(graphs)
        seen = []
        with isolated(model):
            assert is_eager()
            host.touch = lambda mask: seen.append(mask)
            model(torch.ones(7))
        host.touch = Mask().touch
        assert not is_eager()
    assert compiled == 1
    assert len(graphs) == compiled
    assert seen == [host]


def test_a_plain_model_is_not_compiled_and_eager_is_left_again_after_an_exception() -> None:
    assert not is_compiled(Host())
    with pytest.raises(ZeroDivisionError), eager():
        raise ZeroDivisionError
    assert not is_eager()


@contextmanager
def process_group(rank: int, ranks: int, folder: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{folder / 'meeting'}")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def train_wrapped(rank: int, *, has_second_passes: bool, is_static: bool) -> dict[str, Tensor]:
    """Two batches per step, of which only the last exchanges gradients."""
    host = seeded_host()
    torch.manual_seed(rank)
    model = DistributedDataParallel(host, static_graph=is_static)
    optimizer = torch.optim.SGD(host.parameters(), lr=0.1)
    isolation = Isolation(model)
    for position, (x, y) in enumerate(batches(6, seed=rank)):
        is_last = is_static or position % 2 == 1
        with nullcontext() if is_last else model.no_sync():
            loss = cross_entropy(model(x), y)
            for when in ("before", "after"):
                if has_second_passes:
                    with isolation.guard():
                        model(x)
                if when == "before":
                    loss.backward()  # type: ignore[no-untyped-call]
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return host.state_dict()


def compare_wrapped(rank: int, ranks: int, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with process_group(rank, ranks, folder):
            for is_static in (False, True):
                alone = train_wrapped(rank, has_second_passes=False, is_static=is_static)
                beside = train_wrapped(rank, has_second_passes=True, is_static=is_static)
                assert all(torch.equal(value, beside[name]) for name, value in alone.items()), (rank, is_static)


@pytest.mark.slow
def test_second_passes_through_ddp_leave_the_gradient_exchange_unchanged(tmp_path: Path) -> None:
    spawn(compare_wrapped, (2, tmp_path), 2)


def test_a_second_pass_through_ddp_does_not_talk_to_other_ranks(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with process_group(0, 1, tmp_path):
            model = DistributedDataParallel(Host())
        (x, _), *_ = batches(1)  # the group is gone: nobody can be talked to
        with isolated(model):
            assert model(x).shape == (16, 3)
        assert "forward" not in vars(model)
