"""A state as JSON with placeholders, and the tensors beside it.

A state is a tree: dicts (keys are strings or integers), lists and tuples of tensors, numpy arrays, numbers, strings, booleans and None.
It comes back as it was, or is refused: values of other types, subclasses such as enums, named tuples and numpy scalars among them, are
named in the error with their place. Three things change: tensors come back on the CPU, detached and contiguous; an OrderedDict comes back
as a dict; two names for one memory come back as two.

In the JSON every object is one of `{"dict": {...}}` (string keys), `{"items": [[key, value], ...]}` (other keys), `{"tuple": [...]}`,
`{"float": "nan" | "inf" | "-inf"}`, `{"tensor": name}` and `{"array": name}` (numpy), so nothing can be mistaken for something else.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tree = Any  # a type checker cannot say more: the leaves are of many types, and who loads knows which

_PLAIN = (bool, int, str, type(None))
# fmt: off
_DTYPES = frozenset({  # those that safetensors both writes and reads
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
})
# fmt: on


def split(state: Tree) -> tuple[Any, dict[str, Tensor]]:
    """The JSON part of a state, and its tensors on the CPU under readable unique names."""
    writer = _Splitter()
    return writer.encode(state, ()), writer.tensors


def join(structure: Any, tensors: dict[str, Tensor]) -> Tree:
    """The inverse of `split`. Structures that `split` did not make, or not with these tensors, raise ordinary errors."""
    if isinstance(structure, list):
        return [join(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    ((tag, value),) = structure.items()
    match tag:
        case "dict":
            return {key: join(item, tensors) for key, item in value.items()}
        case "items":
            return {key: join(item, tensors) for key, item in value}
        case "tuple":
            return tuple(join(item, tensors) for item in value)
        case "float":
            return float(value)
        case "tensor":
            return tensors[value]
        case "array":
            return tensors[value].numpy()
    raise ValueError(f"unknown placeholder {tag!r}")


class _Splitter:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._memories: set[int] = set()  # where the storages of the tensors lie

    def encode(self, value: Any, path: tuple[object, ...]) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is list:
            return [self.encode(item, (*path, index)) for index, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.encode(item, (*path, index)) for index, item in enumerate(value)]}
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        if isinstance(value, Tensor):
            return {"tensor": self._add(value, path)}
        if kind is np.ndarray:
            return {"array": self._add(_from_numpy(value, path), path)}
        raise TypeError(
            f"{_place(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; convert it before saving"
        )

    def _encode_dict(self, value: dict[Any, Any], path: tuple[object, ...]) -> dict[str, Any]:
        wrong = [key for key in value if type(key) not in (str, int)]
        if wrong:
            raise TypeError(f"{_place(path)} has the key {wrong[0]!r}; a checkpoint can hold keys that are strings or integers")
        items = {key: self.encode(item, (*path, key)) for key, item in value.items()}
        if all(type(key) is str for key in items):
            return {"dict": items}
        return {"items": [[key, item] for key, item in items.items()]}

    def _add(self, tensor: Tensor, path: tuple[object, ...]) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype not in _DTYPES:
            what = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
            raise TypeError(f"{_place(path)} is a tensor that a checkpoint cannot hold ({what}); convert it before saving")
        # A lazily negated tensor carries that as a flag, which its bytes do not show.
        plain = tensor.detach().cpu().resolve_neg().contiguous()
        if plain.untyped_storage().data_ptr() in self._memories:
            plain = plain.clone()  # safetensors refuses two names for one memory
        self._memories.add(plain.untyped_storage().data_ptr())
        name = self._free_name("/".join(map(str, path)))
        self.tensors[name] = plain
        return name

    def _free_name(self, wanted: str) -> str:
        """`wanted`, or with a number where that is taken: the keys "a/b" and "a" then "b" look alike, as do 0 and "0"."""
        name, count = wanted, 1
        while name in self.tensors or name in ("", "__metadata__"):  # the last is safetensors' own
            count += 1
            name = f"{wanted}#{count}"
        return name


def _from_numpy(array: np.ndarray[Any, Any], path: tuple[object, ...]) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C", copy=True))
    except TypeError as error:
        raise TypeError(
            f"{_place(path)} is a numpy array of {array.dtype}, which a checkpoint cannot hold; convert it before saving"
        ) from error


def _place(path: tuple[object, ...]) -> str:
    return "state" + "".join(f"[{part!r}]" for part in path)
