"""A second pass through the host that leaves no trace, so that a seed can learn in the shadow of a host that does not change.

    loss = loss_fn(model(x), y)                        # the user's own step
    ...
    with isolation.guard():
        seed_loss = loss_fn(model(x), y)               # the same closure again, with the seed switched on
        gradients = torch.autograd.grad(seed_loss, seed_parameters)

Put back are: all buffers, with value and identity; which module is in training mode; torch's default generators of the CPU and of the
devices that the model is on, Python's `random` and numpy's global generator. `torch.autograd.grad` for the seed's parameters writes no
`.grad` and wakes neither the hooks on the host's parameters nor those that run after accumulation; `backward` would.

Not seen, and so not put back: plain attributes that a forward pass changes (a counter, a list of activations), generators of the user's
own, parameters.

Compiled code runs eagerly inside, which compiles nothing anew. DistributedDataParallel is passed by, since its forward also schedules its
exchange: with accumulated gradients, or before the host's own backward, a second one changes the buffers and even the gradients of
later steps, under `no_sync` too. So ranks do not talk inside and need not be in step, and inputs must be on the model's device already.
All of this is found by looking at the module that is given here, so give the outermost one, which the closure calls.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from esper.growth.host.forward_patch import forward_replaced

SMALL_BYTES = 64 * 1024  # buffers up to here, such as the statistics of norms, are cheaper to copy than to think about

_IS_EAGER: ContextVar[bool] = ContextVar("is_eager", default=False)


@contextmanager
def isolated(model: nn.Module, *, apart_from: Iterable[nn.Module] = ()) -> Iterator[None]:
    """What runs inside leaves no trace in the model or in the random streams. For many passes keep an Isolation, which is cheaper.

    Modules in `apart_from`, such as a seed that learns, keep what their buffers became.
    """
    with Isolation(model).guard(apart_from=apart_from):
        yield


class Isolation:
    """The same for many passes: learns which large buffers (masks, caches) never change, and stops copying them.

    A large buffer is copied and compared in its module's first pass in training mode, and in its first in evaluation mode. One that was
    still then and changes in place later is warned of, once: that change stays, and from then on it is copied too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._still: set[tuple[str, str, bool]] = set()  # keys of large buffers

    @contextmanager
    def guard(self, *, apart_from: Iterable[nn.Module] = ()) -> Iterator[None]:
        """What runs inside leaves no trace."""
        modules = dict(self._model.named_modules())
        with ExitStack() as stack:
            if _is_any_compiled(modules.values()):
                stack.enter_context(eager())
            for module in modules.values():
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(forward_replaced(module, module.module.__call__))
            stack.enter_context(_random_streams_kept(_devices(modules.values())))
            stack.enter_context(_training_flags_kept(modules.values()))
            apart = {part for module in apart_from for part in module.modules()}
            stack.enter_context(self._buffers_kept({name: module for name, module in modules.items() if module not in apart}))
            yield

    @contextmanager
    def _buffers_kept(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        tables = [(module, module._buffers.copy()) for module in modules.values()]
        copies, large = self._copied(modules)
        try:
            yield
            for buffer in large:
                self._learn(buffer, copies.get(id(buffer.tensor)))
        finally:
            for module, table in tables:
                module._buffers.clear()
                module._buffers.update(table)
            _put_back(copies.values())

    def _copied(self, modules: dict[str, nn.Module]) -> tuple[_Copies, list[_Large]]:
        """Copies of the buffers that may change, and what is known of the large ones. Each once, also where modules share it."""
        copies: _Copies = {}
        large: list[_Large] = []
        for name, module in modules.items():
            for own_name, tensor in module._buffers.items():
                if tensor is None or id(tensor) in copies or is_expanded(tensor):
                    continue
                if tensor.numel() * tensor.element_size() > SMALL_BYTES:
                    large.append(buffer := _Large(tensor, _version(tensor), (name, own_name, module.training)))
                    if buffer.key in self._still:
                        continue
                copies[id(tensor)] = tensor, tensor.detach().clone()
        return copies, large

    def _learn(self, buffer: _Large, copy: tuple[Tensor, Tensor] | None) -> None:
        has_moved = buffer.version is None or buffer.version != _version(buffer.tensor)
        if copy is not None:
            if not has_moved and _is_same(*copy):
                self._still.add(buffer.key)
        elif has_moved:
            self._still.discard(buffer.key)
            module, name, _ = buffer.key
            warnings.warn(
                f"the buffer {name!r} of module {module!r} changed, as it did not in the first isolated pass; it keeps this change, and is "
                "put back from now on",
                RuntimeWarning,
                stacklevel=2,
            )


_Copies = dict[int, tuple[Tensor, Tensor]]  # id of a buffer -> the buffer, what it held


@dataclass(frozen=True, slots=True)
class _Large:
    """A large buffer before the pass."""

    tensor: Tensor
    version: int | None  # None: an inference tensor, which counts none
    key: tuple[str, str, bool]  # the module, its own name, whether the module is in training mode


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without torch.compile and DistributedDataParallel around it."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (model.module if isinstance(model, DistributedDataParallel) else None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile got hold of the model or a part of it: of the wrapper it returns, or in place by `module.compile()`."""
    return _is_any_compiled(model.modules())


def _is_any_compiled(modules: Iterable[nn.Module]) -> bool:
    return any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in modules)


@contextmanager
def eager() -> Iterator[None]:
    """Compiled code inside runs as it was written, and nothing is compiled anew."""
    token = _IS_EAGER.set(True)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _IS_EAGER.reset(token)


def is_eager() -> bool:
    """Whether this runs inside `eager`; torch does not tell."""
    return _IS_EAGER.get()


@contextmanager
def _training_flags_kept(modules: Collection[nn.Module]) -> Iterator[None]:
    flags = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, flag in flags:
            if module.training is not flag:
                module.training = flag


@contextmanager
def _random_streams_kept(devices: Collection[torch.device]) -> Iterator[None]:
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = np.random.get_state()  # noqa: NPY002, the user's code may draw from it
    # The generator of mps is the only one of its kind, and takes no device.
    places = [(torch.get_device_module(device), () if device.type == "mps" else (device,)) for device in devices]
    states = [place.get_rng_state(*device) for place, device in places]
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for (place, device), state in zip(places, states, strict=True):
            place.set_rng_state(state, *device)


def _devices(modules: Iterable[nn.Module]) -> set[torch.device]:
    """Where the model is, apart from the CPU."""
    tensors = (tensor for module in modules for table in (module._parameters, module._buffers) for tensor in table.values())
    return {tensor.device for tensor in tensors if tensor is not None and tensor.device.type not in ("cpu", "meta")}


def _put_back(copies: Collection[tuple[Tensor, Tensor]]) -> None:
    # Through .data, because a version that moves would stop a backward that is still to come, although the values are the same.
    # Of a sparse tensor .data is another one, which cannot be written through.
    tensors = [tensor.data if tensor.layout == torch.strided else tensor for tensor, _ in copies]
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(tensors, [copy for _, copy in copies])


def is_expanded(tensor: Tensor) -> bool:
    """Several elements lie in one place of the memory: nobody can write into it, and nobody has to."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_same(tensor: Tensor, copy: Tensor) -> bool:
    """Values count, not the version alone: the kernels of batch norm write their statistics without moving it."""
    return tensor.layout != torch.strided or torch.equal(tensor, copy)  # sparse ones cannot be compared, and no norm writes them


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
