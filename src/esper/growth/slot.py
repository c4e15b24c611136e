"""A slot: the place behind a submodule of the host where a seed may grow. An idle slot does nothing at all.

A seed in a slot is not part of the host's module tree, so the user's optimiser, gradient clipping and parameter counts do not see it. It
is part of the host's state dict, under the name that it has when it is baked: `block.esper_seed.alpha`. So a model saved in the middle of
training holds its growth, and a state dict of another structure is refused.

A copy of the host has copies of its slots. A copy made to hold averaged weights does not grow with the original; it warns when it is used
after the original has grown.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growth.around import Around, keep_running
from esper.growth.place import Place
from esper.growth.seed import Seed


class Home(NamedTuple):
    """Where a seed is registered when it is baked: the module itself, or a layer inside a module that runs or counts its children."""

    module: nn.Module
    path: str  # of that module, below the module whose output the seed changes; empty where it is that one
    name: str  # of the seed in it, such as esper_seed

    @property
    def levels_up(self) -> int:
        return len(self.path.split(".")) if self.path else 0

    @property
    def baked_as(self) -> str:
        """The seed's name below the module whose output it changes."""
        return f"{self.path}.{self.name}" if self.path else self.name


def on_load(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Call `hook` before a state dict is loaded into the module."""
    handle: RemovableHandle = module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
    return handle


class Observer(Protocol):
    """Looks at what flows through a slot, and may pass on something that equals it."""

    def __call__(self, slot: Slot, output: Tensor) -> Tensor: ...


class Slot(Around):
    home: Home

    def __init__(self, place: Place) -> None:
        self.place = place
        self.seed: Seed | None = None
        self.is_connected = False  # the host's output goes through the seed
        self.is_kept = False  # the seed is fossilized
        self.observer: Observer | None = None
        self.is_idle = True
        self.ignores_loads = False  # a state dict that is loaded into the host leaves the seed as it is
        self.plantings = 0  # how often the content of the slot was exchanged
        self._alpha = 0.0  # what the seed's buffer holds, readable without waiting for the device
        self._handles: list[RemovableHandle] = []
        self._origin: weakref.ref[Slot] | None = None  # of a copy: the slot it was copied from
        self._origin_mark = (0, 0)  # of a copy: plantings of the origin and versions of the weights when it was made

    def attach_to(self, module: nn.Module, home: Home) -> None:
        """Stand behind `module`; save and load the seed with the state dict of `home.module`."""
        self.attach(module)
        self.home = home
        self._handles = [
            home.module.register_state_dict_post_hook(_SaveSeed(self)),  # type: ignore[no-untyped-call]
            on_load(home.module, _LoadSeed(self)),
        ]
        if self.place.is_fused:
            self._handles.append(module.register_forward_pre_hook(keep_running))

    def detach(self) -> None:
        super().detach()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forward(self, *arguments: Any, **named: Any) -> Any:
        output = self.inner(*arguments, **named)
        return output if self.is_idle else self._act(output)

    def _act(self, output: Tensor) -> Tensor:
        if self._origin is not None and not torch.compiler.is_compiling():
            self._warn_if_left_behind()
        if self.observer is not None:
            output = self.observer(self, output)
        if self.is_connected and self.seed is not None:
            # A user's own blueprint may have dropout. Compiled code must not change modules; there `Slotted.train` reaches the seed.
            if not torch.compiler.is_compiling() and self.seed.training != self.module.training:
                self.seed.train(self.module.training)
            output = self.seed(output)
        return output

    def plant(self, seed: Seed | None, *, connected: bool = False) -> None:
        """Put a seed in, outside the host unless `connected`; None empties the slot."""
        if seed is not None:
            seed.spec = msgspec.structs.replace(seed.spec, levels_up=self.home.levels_up)
        self.seed = seed
        self.is_kept = False
        self._alpha = 0.0
        self._origin = None
        self.plantings += 1
        self.connect(connected and seed is not None)

    def connect(self, connected: bool) -> None:
        self.is_connected = connected
        self._settle()

    def observe(self, observer: Observer | None) -> None:
        self.observer = observer
        self._settle()

    def _settle(self) -> None:
        self.is_idle = not self.is_connected and self.observer is None and self._origin is None

    @property
    def alpha(self) -> float:
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        assert self.seed is not None
        self._alpha = value
        self.seed.alpha.fill_(value)

    @contextlib.contextmanager
    def held_at(self, alpha: float) -> Iterator[None]:
        """Connect the seed with this alpha for a while."""
        was_connected, before = self.is_connected, self.alpha
        self.alpha = alpha
        self.connect(True)
        try:
            yield
        finally:
            self.alpha = before
            self.connect(was_connected)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the observer and the origin, which a copy does not have."""
        return {**super().__getstate__(), "observer": None, "_origin": None, "is_idle": not self.is_connected}

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__({name: deepcopy(value, memo) for name, value in self.__getstate__().items()})
        twin._origin, twin._origin_mark = weakref.ref(self), (self.plantings, twin._weight_versions())
        twin._settle()
        return twin

    def _weight_versions(self) -> int:
        """Count the changes in place of the module's weights."""
        if "module" not in self.__dict__:
            return 0
        return sum(weight._version for weight in self.module.parameters() if not weight.is_inference())

    def _warn_if_left_behind(self) -> None:
        """Warn once where the weights of a copy were changed after the original had grown: an average without what grew."""
        origin = self._origin() if self._origin is not None else None
        plantings, versions = self._origin_mark
        if origin is None:
            self._origin = None
            self._settle()
        elif origin.plantings != plantings and self._weight_versions() != versions:
            self._origin = None
            self._settle()
            warnings.warn(
                f"this copy of a growing model was changed since, as an average of weights is, and lacks what has grown after "
                f"{self.place.name!r} in the original; keep an average that grows with it: slotted.averaged(decay=0.999)",
                RuntimeWarning,
                stacklevel=2,
            )


class _SaveSeed:
    """The state dict hook of a seed's home: adds the seed."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
        if self.slot.seed is not None:
            self.slot.seed.state_dict(destination=state_dict, prefix=f"{prefix}{self.slot.home.name}.")


class _LoadSeed:
    """The hook before a state dict is loaded into a seed's home: loads the seed, where it is the one that is there."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def __call__(
        self, module: nn.Module, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        slot, start = self.slot, f"{prefix}{self.slot.home.name}."
        own = {key.removeprefix(start): state_dict.pop(key) for key in list(state_dict) if key.startswith(start)}
        if slot.ignores_loads or (slot.seed is None and not own):
            return
        if slot.seed is None or not own:
            where, other = ("state dict", "model") if slot.seed is None else ("model", "state dict")
            errors.append(f"the {where} has a seed after {slot.place.name!r}, and the {other} has none")
            return
        try:
            slot.seed.load_state_dict(own)
        except RuntimeError as error:
            errors.append(str(error))
        else:
            slot.alpha = float(slot.seed.alpha)
