"""States as files: split a tree of values into JSON and named tensors, and write tensors as safetensors files with a digest.

A state is a tree of dicts (with string or integer keys), lists and tuples; its leaves are tensors, numpy arrays, numbers, strings, booleans
and None. `split` and `join` restore it exactly, with three exceptions: tensors come back on the CPU, detached and contiguous; an
OrderedDict comes back as a dict; tensors that shared memory come back separate. A value of any other type raises an error that names its
place; this includes subclasses such as enums, named tuples and numpy scalars.

In the JSON, every object is one of `{"dict": {...}}` (string keys), `{"items": [[key, value], ...]}` (other keys), `{"tuple": [...]}`,
`{"float": "nan" | "inf" | "-inf"}`, `{"tensor": name}` and `{"array": name}` (numpy), so the encoding is unambiguous.

Tensors are written as ordinary safetensors files that any program can read:

    write_tensors("model.safetensors", model.state_dict(), {"about": "a model"})
    tensors, metadata = read_tensors("model.safetensors")

The metadata have `format: pt`, like those of Hugging Face, and two entries of esper: `esper`, the version of the digest's rules, and
`sha256`, the digest of the metadata and of the name, type, shape and bytes of each tensor. A file with neither entry comes from another
program or from an early esper and is read without a check. A file with only one of them is damaged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.files import (
    DIGEST,
    MAX_FILE_BYTES,
    TENSORS_FORMAT,
    TENSORS_FORMAT_KEY,
    UNREADABLE,
    FileError,
    NotTensorsError,
    check_safetensors,
    digest_of_tensors,
    parse_json,
    read_file,
    safetensors_header,
    split_safetensors,
    write_file,
)
from esper.runs.versions import VersionError, Versions

Tree = Any  # not typed further: leaves have many types, and the caller knows which

_PLAIN = (bool, int, str, type(None))
# fmt: off
_DTYPES = frozenset({  # types that safetensors can both write and read
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
})
# fmt: on


def split(state: Tree) -> tuple[Any, dict[str, Tensor]]:
    """Return the JSON part of a state, and its tensors on the CPU by unique readable names."""
    writer = _Splitter()
    return writer.encode(state, ()), writer.tensors


def join(structure: Any, tensors: dict[str, Tensor]) -> Tree:
    """Return the state of which `split` made `structure` and `tensors`. Anything else raises an error such as KeyError or ValueError."""
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
    """Encodes one state; collects its tensors in `tensors`."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._memories: set[int] = set()  # addresses of the tensors' storages

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
            raise TypeError(f"{_place(path)} has the key {wrong[0]!r}; a checkpoint can hold only strings and integers as keys")
        items = {key: self.encode(item, (*path, key)) for key, item in value.items()}
        if all(type(key) is str for key in items):
            return {"dict": items}
        return {"items": [[key, item] for key, item in items.items()]}

    def _add(self, tensor: Tensor, path: tuple[object, ...]) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype not in _DTYPES:
            what = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
            raise TypeError(f"{_place(path)} is a tensor that a checkpoint cannot hold ({what}); convert it before saving")
        # Resolve lazy negation: it is a flag of the tensor that its bytes do not show.
        plain = tensor.detach().cpu().resolve_neg().contiguous()
        if plain.untyped_storage().data_ptr() in self._memories:
            plain = plain.clone()  # safetensors refuses tensors that share memory
        self._memories.add(plain.untyped_storage().data_ptr())
        name = self._free_name("/".join(map(str, path)))
        self.tensors[name] = plain
        return name

    def _free_name(self, wanted: str) -> str:
        """Return `wanted`, with a number added if it is taken: the key "a/b" gives the same name as "b" in "a", and 0 the same as "0"."""
        name, count = wanted, 1
        while name in self.tensors or name in ("", "__metadata__"):  # safetensors reserves the last one
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


# Safetensors files

_OURS = ("format", TENSORS_FORMAT_KEY, DIGEST)  # metadata entries that esper writes itself


def write_tensors(path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically. Tensors may be on any device, share memory or be non-contiguous."""
    write_file(path, *encode_tensors(tensors, metadata))


def read_tensors(path: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, on the CPU, and the caller's metadata.

    Raises FileError if the file is damaged, NotTensorsError if it is not a safetensors file, and OSError if it cannot be read.
    """
    return decode_tensors(read_file(path, max_bytes=MAX_FILE_BYTES), path)


def write_state(path: Path | str, state: Tree, kind: Versions) -> None:
    """Write a state as one safetensors file, with its JSON part in the metadata."""
    structure, tensors = split(state)
    metadata = {"kind": kind.kind, "schema": str(kind.present), "state": json.dumps(structure, allow_nan=False)}
    write_tensors(path, tensors, metadata)


def read_state_file(path: Path | str, *kinds: Versions) -> tuple[Versions, Tree]:
    """Return the kind of a file that `write_state` has written, one of `kinds`, and its state in the present version.

    Raises FileError if the file holds no such state.
    """
    tensors, metadata = read_tensors(path)
    try:
        name, version = metadata["kind"], int(metadata["schema"])
        state = join(parse_json(metadata["state"]), tensors)
    except UNREADABLE as error:
        raise FileError(f"{path} is a safetensors file that holds no state of esper ({type(error).__name__}: {error})") from error
    kind = next((kind for kind in kinds if kind.kind == name), None)
    if kind is None:
        raise FileError(f"{path} holds a state of the kind {name!r}, not {' or '.join(kind.kind for kind in kinds)}")
    try:
        return kind, kind.migrated(state, version)
    except VersionError as error:
        raise FileError(f"{path} {error}") from error


def encode_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, memoryview]:
    """Return the content of a safetensors file in two parts, header and data. Equal tensors and metadata give equal bytes."""
    from safetensors import SafetensorError
    from safetensors.torch import save

    taken = sorted({*(metadata or {})} & {*_OURS})
    if taken:
        raise ValueError(f"the metadata of a file of tensors must not have entries named {', '.join(taken)}; esper writes those itself")
    try:
        content = save(_plain(tensors))
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"the tensors cannot be written to a safetensors file: {error}") from error
    # Write the header again: safetensors writes metadata entries in varying order, so equal content would give different bytes.
    header, _, data = split_safetensors(content)
    entries = {**(metadata or {}), "format": "pt", TENSORS_FORMAT_KEY: str(TENSORS_FORMAT)}
    return safetensors_header(header, {**entries, DIGEST: digest_of_tensors(header, entries, data)}), data


def decode_tensors(content: bytes, source: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what `encode_tensors` was given; `source` names the file in errors."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    _, metadata, _ = check_safetensors(content, source)
    try:
        # Clone into memory allocated by torch, which is aligned and resizable like that of any other tensor.
        tensors = {name: tensor.clone() for name, tensor in load(content).items()}
    except (SafetensorError, *UNREADABLE) as error:
        raise NotTensorsError(f"{source} cannot be read as a safetensors file ({' '.join(str(error).split())})") from error
    return tensors, {name: value for name, value in metadata.items() if name not in _OURS}


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached, contiguous tensors on the CPU that share no memory, as safetensors needs them."""
    plain: dict[str, Tensor] = {}
    memories: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().resolve_neg().contiguous()
        memory = own.untyped_storage().data_ptr()
        plain[name] = own.clone(memory_format=torch.contiguous_format) if memory in memories else own
        memories.add(memory)
    return plain
