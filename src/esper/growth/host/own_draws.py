"""Split functions of the host that draw random numbers, `dropout` and attention with a dropout, between the host's units and new ones.

Without this, a wide tensor in such a function would draw other numbers for the host's own units than the host's tensor does. So the
function is computed twice, for the host's units with the host's random numbers, and for those of each seed with numbers that nobody else
uses up. A dropout that is a module is split by its `WidePatch`.

Shapes: B = batch, T = positions in a sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from esper.torch_internals import backward_number

_DROPOUTS = (torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_MARK = "_esper_new_units"  # attribute of a tensor: the features that a layer made of host and seeds together, and those of each seed


def mark(tensor: Tensor, sizes: Sequence[int], axis: int) -> Tensor:
    """Remember that the last features of a layer's output belong to seeds; only `OwnDraws` asks for it. Return the tensor."""
    setattr(tensor, _MARK, (tensor.shape[axis], tuple(sizes)) if sizes else None)
    return tensor


class OwnDraws(TorchFunctionMode):
    """Context in which functions that draw random numbers for tensors with new units are split. `has_split` says if there was one."""

    active = 0  # contexts that are open

    def __init__(self) -> None:
        super().__init__()
        self.has_split = False

    def __enter__(self) -> OwnDraws:
        super().__enter__()  # type: ignore[no-untyped-call]
        OwnDraws.active += 1
        return self

    def __exit__(self, *error: Any) -> None:
        OwnDraws.active -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        given = [tensor for tensor in (*arguments, *named.values()) if isinstance(tensor, Tensor)]
        found = next((made for tensor in given if (made := getattr(tensor, _MARK, None)) is not None), None)
        if found is None:
            return function(*arguments, **named)
        if function is F.scaled_dot_product_attention:
            result = self._attention(found, arguments, named)
        elif function in _DROPOUTS:
            result = self._dropout(function, found, arguments, named)
        else:
            result = function(*arguments, **named)
        results: list[Any] = list(result) if type(result) in (tuple, list) else [result]
        for tensor in results:
            if isinstance(tensor, Tensor):
                setattr(tensor, _MARK, found)
        return result

    def _dropout(self, function: Any, made: tuple[int, tuple[int, ...]], arguments: Any, named: Any) -> Any:
        """Split the only tensor of a dropout along its units: features, or heads in [B, heads, T, T]."""
        x = arguments[0] if arguments else named["input"]
        others = {key: value for key, value in named.items() if key != "input"}
        axis = next((axis for axis in (-1, 1) if x.ndim > 1 and x.shape[axis] == made[0]), 1 if x.ndim == 4 else None)
        sizes = [] if axis is None else _sizes(x.shape[axis], made)
        if axis is None or not sizes:
            return function(*arguments, **named)
        self.has_split = True
        return _apart(lambda part: function(part, *arguments[1:], **others), list(x.split(sizes, axis)), axis)

    def _attention(self, made: tuple[int, tuple[int, ...]], arguments: Any, named: Any) -> Any:
        """Split queries, keys and values [..., heads, T, size] by heads. Keys may have fewer heads than queries."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, arguments, strict=False)), **named}
        inputs = [given.pop(name) for name in names[:3]]
        sizes = [_sizes(tensor.shape[-3], made) if tensor.ndim > 3 else [] for tensor in inputs]
        mask = given.get("attn_mask")
        if not all(sizes) or not given.get("dropout_p") or (mask is not None and mask.ndim > 2 and mask.shape[-3] > 1):
            return F.scaled_dot_product_attention(*inputs, **given)
        self.has_split = True
        parts = zip(*(tensor.split(some, -3) for tensor, some in zip(inputs, sizes, strict=True)), strict=True)
        return _apart(lambda part: F.scaled_dot_product_attention(*part, **given), list(parts), -3)


def _sizes(size: int, made: tuple[int, tuple[int, ...]]) -> list[int]:
    """Return the parts of a dimension that belong to the host and to each seed; [] if the dimension does not hold whole units."""
    total, new = made
    if any(size * count % total for count in new):
        return []
    parts = [size * count // total for count in new]
    return [size - sum(parts), *parts]


def _apart(function: Any, parts: list[Any], axis: int) -> Tensor:
    """Compute a function of each part, the first with the random numbers of the host, and put the results together."""
    own = function(parts[0])
    with torch.random.fork_rng([own.device] if own.is_cuda else []):
        return torch.cat([own, *map(function, parts[1:])], axis)


class SplitDraws:
    """Opens `OwnDraws` around the calls of a module in training mode, by hooks, until a call has shown that it is not needed."""

    def __init__(self, module: nn.Module) -> None:
        self._open: list[OwnDraws] = []
        self.has_split = False  # a call so far
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self.before),
            module.register_forward_hook(self.after, always_call=True),
        ]

    def before(self, module: nn.Module, arguments: Any) -> None:
        if module.training and not torch.compiler.is_compiling() and not OwnDraws.active:
            self._open.append(OwnDraws().__enter__())

    def after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._open and not torch.compiler.is_compiling():
            draws = self._open.pop()
            draws.__exit__(None, None, None)
            self.has_split = self.has_split or draws.has_split
            if not self.has_split and output is not None:  # None after an error
                self.remove()

    def check(self) -> None:
        """Warn and end if a part of the call is computed again in the backward pass, where the context is not open."""
        if self.has_split and not OwnDraws.active and backward_number() >= 0:
            self.remove()
            warnings.warn(
                "the model computes a part of itself again in the backward pass (checkpoint), in this step with other random numbers in "
                "its dropout; from now on, new units change the random numbers of the model's own dropout",
                RuntimeWarning,
                stacklevel=2,
            )

    def remove(self) -> None:
        """Split nothing any more."""
        for handle in self._handles:
            handle.remove()
