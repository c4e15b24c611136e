"""Named random streams: code that needs random numbers asks for its own stream by name instead of drawing from a global generator.

A stream depends only on the seed and on its name, so new streams and another order of calls never change the draws of existing ones. All
streams can be saved and continued exactly.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch as pytorch  # `torch` is a method of Streams
from numpy.random import PCG64, Generator as NumpyGenerator, SeedSequence
from torch import Generator as TorchGenerator


class Streams:
    """Independent random streams of one seed.

    The same name always returns the same generator object. Different names, kinds (torch, numpy) and devices give independent streams.
    `spawn` returns a separate family of streams, for example for one rank. Not thread-safe: use a stream in one thread only.

    >>> streams = Streams(seed=7)
    >>> streams.numpy("shuffle") is streams.numpy("shuffle")
    True
    >>> streams.integer("env") == Streams(seed=7).integer("env")
    True
    """

    def __init__(self, seed: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"a seed is an int >= 0; got {seed!r}")
        self.seed = seed
        self._key: tuple[int, ...] = ()  # key of this family of streams for numpy's SeedSequence; `spawn` extends it
        self._torch: dict[tuple[str, str], TorchGenerator] = {}  # (name, device) -> generator
        self._numpy: dict[str, NumpyGenerator] = {}
        self._children: dict[str, Streams] = {}

    def torch(self, name: str, device: str | pytorch.device = "cpu") -> TorchGenerator:
        """Return the torch generator of this name on this device."""
        place = _place(device)
        if (name, place) not in self._torch:
            generator = TorchGenerator(device=place)
            self._torch[name, place] = generator.manual_seed(self._torch_seed(name, place))
        return self._torch[name, place]

    def numpy(self, name: str) -> NumpyGenerator:
        """Return the numpy generator of this name."""
        if name not in self._numpy:
            self._numpy[name] = NumpyGenerator(PCG64(self._sequence("numpy", name)))
        return self._numpy[name]

    def integer(self, name: str) -> int:
        """Return a seed in 0 .. 2³¹ - 1 for something that makes its own generator. It is always the same for a name."""
        return int(self._sequence("integer", name).generate_state(1)[0]) >> 1

    def spawn(self, name: str) -> Streams:
        """Return the family of streams of this name. Its state is saved and loaded together with this one's."""
        if name not in self._children:
            child = Streams(self.seed)
            child._key = (*self._key, *_words("spawn", name))
            self._children[name] = child
        return self._children[name]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of every stream, as a tree of tensors, strings and small ints."""
        torch_states: dict[str, dict[str, Any]] = {}
        for (name, place), generator in self._torch.items():
            torch_states.setdefault(place, {})[name] = generator.get_state()
        return {
            "seed": str(self.seed),
            "torch": torch_states,
            "numpy": {name: _packed(generator) for name, generator in self._numpy.items()},
            "children": {name: child.state_dict() for name, child in self._children.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue every stream from its saved position. Streams that did not exist then start from the beginning."""
        _check_loadable(state, self.seed)
        self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        # Change the generators in place, because other objects hold references to them.
        for (name, place), torch_generator in self._torch.items():
            torch_generator.manual_seed(self._torch_seed(name, place))
        for name, numpy_generator in self._numpy.items():
            numpy_generator.bit_generator.state = PCG64(self._sequence("numpy", name)).state
        for place, named in state["torch"].items():
            for name, saved in named.items():
                self.torch(name, place).set_state(saved.cpu())
        for name, packed in state["numpy"].items():
            self.numpy(name).bit_generator.state = _unpacked(packed)
        for name in self._children.keys() | state["children"].keys():
            self.spawn(name)._load(state["children"].get(name, _NOTHING))

    def _sequence(self, kind: str, name: str) -> SeedSequence:
        return SeedSequence(self.seed, spawn_key=(*self._key, *_words(kind, name)))

    def _torch_seed(self, name: str, place: str) -> int:
        # CPU generators use only the lower 32 bits, so two names share their draws there with probability 2⁻³².
        return int(self._sequence(f"torch {place}", name).generate_state(1, np.uint64)[0])


_NOTHING: dict[str, Any] = {"torch": {}, "numpy": {}, "children": {}}  # state of a family that was not saved


def _check_loadable(state: dict[str, Any], seed: int) -> None:
    if int(state["seed"]) != seed:
        raise ValueError(f"the saved random streams belong to seed {state['seed']}, these to seed {seed}; use the saved seed")
    for place, named in state["torch"].items():
        kind, _, index = place.partition(":")
        if kind == "cuda" and int(index) >= pytorch.cuda.device_count():
            raise ValueError(
                f"the saved random streams {sorted(named)} are on {place}, but this machine has {pytorch.cuda.device_count()} cuda"
                " devices; resume on a machine that has that device"
            )
    for child in state["children"].values():
        _check_loadable(child, seed)


def _place(device: str | pytorch.device) -> str:
    """Return the device with its index, so that "cuda" and "cuda:0" are the same."""
    place = str(pytorch.device(device))
    return f"cuda:{pytorch.cuda.current_device()}" if place == "cuda" else place


def _words(kind: str, name: str) -> list[int]:
    """Return a stable hash of a name as a spawn key. Python's own hash differs between processes."""
    digest = hashlib.sha256(f"{kind}\0{name}".encode()).digest()
    return [int.from_bytes(digest[start : start + 4], "little") for start in range(0, 16, 4)]


def _packed(generator: NumpyGenerator) -> dict[str, Any]:
    state: Any = generator.bit_generator.state
    # Write its two 128-bit numbers as strings, because many JSON readers round or refuse them.
    return {**state, "state": {key: str(value) for key, value in state["state"].items()}}


def _unpacked(packed: dict[str, Any]) -> dict[str, Any]:
    return {**packed, "state": {key: int(value) for key, value in packed["state"].items()}}


def global_state() -> dict[str, Any]:
    """Return the states of the global random generators, which dropout and the loaders of users draw from."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "torch": pytorch.get_rng_state(),
        "cuda": pytorch.cuda.get_rng_state_all() if pytorch.cuda.is_available() else [],
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys), int(position), int(has_gauss), float(cached)],
    }


def set_global_state(state: dict[str, Any]) -> None:
    """Restore the states that `global_state` returned."""
    pytorch.set_rng_state(state["torch"])
    if pytorch.cuda.is_available() and state["cuda"]:
        pytorch.cuda.set_rng_state_all(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
