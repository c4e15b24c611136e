"""What the lowering of a module sees in one pass, and the table of lowerings.

A lowering computes for N hosts what a module's `forward` computes for one. It is a function of the module (its settings, not its weights),
a scope and the input; one for modules of your own is registered in the same way as ours:

    @lowers(Doubled)
    def doubled(module: Doubled, scope: Scope, x: Tensor) -> Tensor:
        return 2 * scope.child("layer", x)

Shapes: B = samples of each host, N = hosts. Activations are [B, N, ...], weights and buffers [N, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

Convolution = Literal["grouped", "unfolded", "tiled"]


@dataclass(frozen=True, slots=True)
class Scope:
    """One submodule in one pass."""

    name: str  # in the host; of the host itself it is empty
    tensors: Mapping[str, Tensor]  # of the whole host
    training: bool
    convolution: Convolution | None  # how to convolve; None: as suits device and size
    run: Callable[[str, Tensor], Tensor]  # the submodule of this full name
    slots: frozenset[str] = frozenset()  # full names of the submodules whose outputs somebody wants to see

    def full_name(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def tensor(self, name: str) -> Tensor:
        """[N, ...] by the name that it has in this submodule."""
        return self.tensors[self.full_name(name)]

    def get(self, name: str) -> Tensor | None:
        """None where the submodule has no such tensor, such as a layer without bias."""
        return self.tensors.get(self.full_name(name))

    def child(self, name: str, x: Tensor) -> Tensor:
        """What the submodule of this name makes of x, with what grows behind it."""
        return self.run(self.full_name(name), x)

    def inside(self, name: str) -> Scope:
        """That of a submodule, for who computes several of them as one."""
        return replace(self, name=self.full_name(name))

    def has_slots_inside(self) -> bool:
        return any(slot.startswith(self.full_name("")) for slot in self.slots)


Lowering = Callable[[Any, Scope, Tensor], Tensor]
Fits = Callable[[Any, bool], bool]


def _always(module: nn.Module, training: bool) -> bool:
    return True


_lowerings: dict[type[nn.Module], tuple[Lowering, Fits]] = {}


def lowers(*kinds: type[nn.Module], fits: Fits = _always) -> Callable[[Lowering], Lowering]:
    """Makes the decorated function the lowering of these classes, not of those derived from them, which may compute something else.

    `fits(module, training)` may refuse settings that the lowering cannot honour; such modules run through vmap.
    """

    def register(lowering: Lowering) -> Lowering:
        _lowerings.update(dict.fromkeys(kinds, (lowering, fits)))
        return lowering

    return register


def lowering_of(module: nn.Module, *, training: bool) -> Lowering | None:
    """None for a module that has none, or whose hooks a lowering would pass by."""
    lowering, fits = _lowerings.get(type(module), (None, _always))
    has_hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return lowering if not has_hooks and fits(module, training) else None
