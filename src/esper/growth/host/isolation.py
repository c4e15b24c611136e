"""Run forward passes through the host with no side effects: evaluations, the discovery, and the second pass of seeds in the shadow.

    loss = loss_fn(model(x), y)                        # the user's own step
    ...
    with isolation.guard():
        seed_loss = loss_fn(model(x), y)               # the same closure again, with the seed switched on
        gradients = torch.autograd.grad(seed_loss, seed_parameters)

Restored afterwards: all buffers, as the same tensors with the same values; the training mode of every module; torch's default generators of
the CPU and of the model's devices, Python's `random` and numpy's global generator. Use `torch.autograd.grad` for the seed's parameters: it
writes no `.grad` and does not run the hooks on the host's parameters, which `backward` would.

Not restored: plain attributes that a forward pass changes (a counter, a list of activations), the user's own generators, and parameters.

Compiled code runs eagerly inside, so nothing is recompiled. DistributedDataParallel is bypassed, because its forward also schedules the
exchange of gradients: with accumulated gradients, or before the host's own backward pass, a second forward would change the buffers and
even the gradients of later steps, also under `no_sync`. So ranks do not communicate inside and need not run in step, and inputs must
already be on the model's device. Compiled parts and wrappers are looked for in the given module, so pass the outermost one, which the
closure calls.

`unwrap`, `is_compiled` and `eager` deal with compiled and wrapped models in general.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from esper.growth.host.slots import forward_replaced
from esper.torch_internals import COMPILED_MODULE, copy_all, is_compiled_itself, version_of

SMALL_BYTES = 64 * 1024  # buffers up to this size, such as the statistics of norms, are always copied

_IS_EAGER: ContextVar[bool] = ContextVar("is_eager", default=False)


@contextmanager
def isolated(model: nn.Module, *, apart_from: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Restore the model's buffers and modes and the random streams after the `with` block. For many passes, an `Isolation` is cheaper.

    The buffers of modules in `apart_from`, such as a seed that learns, are not restored.
    """
    with Isolation(model).guard(apart_from=apart_from):
        yield


@contextmanager
def evaluated(model: nn.Module) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    """Isolate validation passes in eval mode, without gradients. Yields a context for the computation of each loss: inference mode.

    Loaders and metrics are no part of it, because they may keep their tensors. No gradient passes through a tensor that was made in
    inference mode, so those that the model's modules keep in their attributes, as caches do, are replaced by copies afterwards.
    """
    with isolated(model), torch.no_grad():
        model.eval()
        try:
            yield torch.inference_mode
        finally:
            for module in model.modules():
                _leave_inference(vars(module))


def _leave_inference(holder: dict[Any, Any] | list[Any], *, depth: int = 3) -> None:
    """Replace tensors that were made in inference mode by copies, in a dict or list and those in it."""
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        if isinstance(value, Tensor) and value.is_inference():
            holder[key] = value.clone()
        elif type(value) is tuple and any(isinstance(item, Tensor) and item.is_inference() for item in value):
            holder[key] = tuple(item.clone() if isinstance(item, Tensor) else item for item in value)
        elif type(value) in (dict, list) and depth:
            _leave_inference(value, depth=depth - 1)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute float32 layers on a GPU in full precision.

    With TF32, the same layer with more rows or columns gives results that differ in the fourth digit, so outputs cannot be compared.
    """
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


class Isolation:
    """Isolation of many passes, which learns which large buffers (masks, caches) never change and stops copying them.

    A large buffer is copied and compared in its module's first pass in training mode and in its first pass in eval mode. If it did not
    change there but changes in place later, a warning says so once. That change is not undone; from then on the buffer is copied too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._unchanged: set[tuple[str, str, bool]] = set()  # keys of large buffers that did not change in their first pass

    @contextmanager
    def guard(self, *, apart_from: Iterable[nn.Module] = (), and_of: Iterable[nn.Module] = ()) -> Iterator[None]:
        """Restore everything after the `with` block, as `isolated` does; also in modules `and_of` that the model does not contain."""
        modules = dict(self._model.named_modules())
        for number, module in enumerate(and_of):
            modules |= {f"seed {number}.{name}": part for name, part in module.named_modules()}
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
                self._note_change(buffer, copies.get(id(buffer.tensor)))
        finally:
            for module, table in tables:
                module._buffers.clear()
                module._buffers.update(table)
            _put_back(copies.values())

    def _copied(self, modules: dict[str, nn.Module]) -> tuple[_Copies, list[_Large]]:
        """Return copies of the buffers that may change, and records of the large ones. A shared buffer is copied once."""
        copies: _Copies = {}
        large: list[_Large] = []
        for name, module in modules.items():
            for own_name, tensor in module._buffers.items():
                if tensor is None or id(tensor) in copies or is_expanded(tensor):
                    continue
                if tensor.numel() * tensor.element_size() > SMALL_BYTES:
                    large.append(buffer := _Large(tensor, version_of(tensor), (name, own_name, module.training)))
                    if buffer.key in self._unchanged:
                        continue
                copies[id(tensor)] = tensor, tensor.detach().clone()
        return copies, large

    def _note_change(self, buffer: _Large, copy: tuple[Tensor, Tensor] | None) -> None:
        """Record after a pass whether a large buffer has changed. Warn if it was not copied and has changed."""
        has_changed = buffer.version is None or buffer.version != version_of(buffer.tensor)
        if copy is not None:
            if not has_changed and _is_same(*copy):
                self._unchanged.add(buffer.key)
        elif has_changed:
            self._unchanged.discard(buffer.key)
            module, name, _ = buffer.key
            warnings.warn(
                f"the buffer {name!r} of module {module!r} has changed, although it did not in the first isolated pass; this change is "
                "not undone, later ones are",
                RuntimeWarning,
                stacklevel=2,
            )


_Copies = dict[int, tuple[Tensor, Tensor]]  # id of a buffer -> (the buffer, a copy of its values)


@dataclass(frozen=True, slots=True)
class _Large:
    """Record of a large buffer before the pass."""

    tensor: Tensor
    version: int | None  # None for an inference tensor, which has no version
    key: tuple[str, str, bool]  # (name of the module, name of the buffer in it, whether the module is in training mode)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of torch.compile and DistributedDataParallel."""
    while True:
        inner = getattr(model, COMPILED_MODULE, None) or (model.module if isinstance(model, DistributedDataParallel) else None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it is compiled, by `torch.compile(module)` or in place by `module.compile()`."""
    return _is_any_compiled(model.modules())


def _is_any_compiled(modules: Iterable[nn.Module]) -> bool:
    return any(map(is_compiled_itself, modules))


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled code eagerly inside the `with` block, so that nothing is compiled."""
    token = _IS_EAGER.set(True)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _IS_EAGER.reset(token)


def is_eager() -> bool:
    """Return whether the caller runs inside `eager`; torch has no function for it."""
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
    # (torch's module for a kind of device, arguments of its functions); mps has a single generator, whose functions take no device.
    generators = [(torch.get_device_module(device), () if device.type == "mps" else (device,)) for device in devices]
    states = [module.get_rng_state(*device) for module, device in generators]
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for (module, device), state in zip(generators, states, strict=True):
            module.set_rng_state(state, *device)


def _devices(modules: Iterable[nn.Module]) -> set[torch.device]:
    """Return the devices of the model's tensors, apart from the CPU."""
    tensors = (tensor for module in modules for table in (module._parameters, module._buffers) for tensor in table.values())
    return {tensor.device for tensor in tensors if tensor is not None and tensor.device.type not in ("cpu", "meta")}


def _put_back(copies: Collection[tuple[Tensor, Tensor]]) -> None:
    # Write through .data, so that the tensors' versions do not change: a later backward pass would fail, although the values are the same.
    # The .data of a sparse tensor is another tensor, so sparse ones are written directly.
    tensors = [tensor.data if tensor.layout == torch.strided else tensor for tensor, _ in copies]
    if tensors:
        with torch.no_grad():
            copy_all(tensors, [copy for _, copy in copies])


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements share one memory location. Such a tensor cannot be written in place, so it needs no copy."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_same(tensor: Tensor, copy: Tensor) -> bool:
    """Compare values, because the version is not enough: the kernels of batch norm write their statistics without changing it."""
    return tensor.layout != torch.strided or torch.equal(tensor, copy)  # sparse tensors cannot be compared; no norm writes them
