"""Everything that Esper hooks into a user's model: slots, and patches of `forward` and `zero_grad`.

A `Slot` is the place after a submodule of the host where a seed may grow. It patches the submodule's `forward` and applies the seed to the
output; an idle slot only calls the submodule. A seed in a slot is not registered in the host, so the user's optimiser, gradient clipping
and parameter counts do not see it. It is in the host's state dict, though: see `host/state_dict.py`.

Patches. `forward` is set on the instance, where `module(...)` finds it. A forward hook of torch would work too, but a module with a hook
takes a slower path in every call. A hook that does nothing costs 7 µs, a patch a tenth of that (docs/log.md).

Copies. A copy of the host has copies of its slots, and does not grow with the original. A copy that holds averaged weights warns if it is
used after the original has grown.
"""

from __future__ import annotations

import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from esper.growth.host.layout import Place
from esper.growth.host.own_draws import SplitDraws
from esper.growth.seeds.seed import Seed
from esper.torch_internals import version_of

Forward = Callable[..., Any]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a tree of mappings, tuples, lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for part in fields(value):
            yield from tensors_in(getattr(value, part.name))


def samples_in(arguments: Any) -> int:
    """Return the leading size of the first tensor that has one; 0 if there is none, because a model may be called without tensors."""
    return next((tensor.size(0) for tensor in tensors_in(arguments) if tensor.ndim > 0), 0)


def keep_running(module: nn.Module, arguments: Any) -> None:
    """Do nothing. If a submodule has this forward pre-hook, the modules around it do not replace the submodule by a fused kernel."""


class ForwardPatch:
    """Replacement of a module's forward, which calls the original one as `inner`.

    Its `forward` is a bound method, so that a copy of the module gets a copy of the patch.
    """

    module: nn.Module
    inner: Forward

    def attach(self, module: nn.Module) -> None:
        self.module, self.inner = module, module.forward
        self._was_replaced = "forward" in vars(module)  # by the user, on this instance
        vars(module)["forward"] = self.forward

    def detach(self) -> None:
        """Restore the module's original forward."""
        if self._was_replaced:
            vars(self.module)["forward"] = self.inner
        else:
            del vars(self.module)["forward"]

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.inner(*arguments, **named)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `inner` if it is the module's own method: pickle would look it up by name, and find the patch."""
        return {name: value for name, value in self.__dict__.items() if name != "inner" or self._was_replaced}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "module" in state and "inner" not in state:
            self.inner = types.MethodType(type(self.module).forward, self.module)


class WidePatch(ForwardPatch):
    """Forward of a module of the host that new units pass through. It only calls the module while no width seed is connected.

    Entries of `seeds` are a `WidthSeed`, and its plan and weights for this module; `esper.growth.seeds.width` has what is computed.
    """

    def __init__(self, *, is_fused: bool = False, drawn_in: nn.Module | None = None) -> None:
        self.seeds: list[tuple[Any, Any, Any]] = []  # in the order of their units
        self._drawn_in = drawn_in  # the module that contains all that the new units go through; only of their first producer
        self._draws: SplitDraws | None = None
        self._is_fused = is_fused  # a module around it computes it by a fused kernel in eval mode, unless it has a hook
        self._handle: RemovableHandle | None = None  # of that hook

    def attach(self, module: nn.Module) -> None:
        super().attach(module)
        self.set_seeds(self.seeds)

    def set_seeds(self, seeds: Sequence[tuple[Any, Any, Any]]) -> None:
        self.seeds = sorted(seeds, key=lambda entry: entry[0].spec.order)
        if self._is_fused and self.seeds and self._handle is None:
            self._handle = self.module.register_forward_pre_hook(keep_running)
        elif self._handle is not None and not self.seeds:
            self._handle.remove()
            self._handle = None
        # With other seeds, functions of the host may draw for new units where they did not before.
        self._end_draws()
        if self._drawn_in is not None and self.seeds:
            self._draws = SplitDraws(self._drawn_in)

    def _end_draws(self) -> None:
        if self._draws is not None:
            self._draws.remove()
            self._draws = None

    def detach(self) -> None:
        super().detach()
        self._end_draws()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def is_replaced(self) -> bool:
        """Whether `inner` is not the forward of the module's class: a slot or the user has replaced it."""
        return getattr(self.inner, "__func__", None) is not type(self.module).forward

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if not self.seeds:
            return self.inner(*arguments, **named)
        if self._draws is not None and self._draws.has_split:
            self._draws.check()
        return self.seeds[0][0].pass_through(self, *arguments)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out candidates of a probe, which change no output."""
        return {**super().__getstate__(), "seeds": [entry for entry in self.seeds if not entry[0].is_candidate]}


class BakedPatch(ForwardPatch):
    """Forward of a module with baked seeds while the module has slots. It applies the baked seeds, whose hooks are put aside.

    A seed in a slot comes behind the baked ones, as it will when it is baked itself. Hooks run after `forward`, so they would come behind
    the slot.
    """

    def attach(self, module: nn.Module) -> None:
        super().attach(module)
        self._hooks = {key: hook for key, hook in module._forward_hooks.items() if is_hook_of_seed(hook)}
        for key in self._hooks:
            del module._forward_hooks[key]
        self._handle = module.register_forward_pre_hook(keep_running)  # as the hooks did

    def detach(self) -> None:
        super().detach()
        self._handle.remove()
        self.module._forward_hooks.update(self._hooks)
        put_seeds_first(self.module)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        output = self.inner(*arguments, **named)
        for hook in self._hooks.values():
            output = hook(self.module, arguments, output)
        return output


def is_hook_of_seed(hook: Any) -> bool:
    """Return whether a forward hook is that of a baked seed."""
    return isinstance(getattr(hook, "__self__", None), Seed)


def put_seeds_first(module: nn.Module) -> None:
    """Let the hooks of baked seeds run before the user's own hooks on the module, as a slot does."""
    for key in [key for key, hook in reversed(module._forward_hooks.items()) if is_hook_of_seed(hook)]:
        module._forward_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]


class Follower(Protocol):
    """Watches the training of a model for a grower; see `esper.growth.seed_steps.OptimizerFollower`."""

    def watch_backward(self, output: Any) -> None: ...

    def stop(self) -> None: ...


class ModelPatch(ForwardPatch):
    """Patch of the forward of a whole model. It counts the samples of the calls with gradients, and lets a grower record and follow them.

    The patch object itself is set as `forward`, with the signature of the original: libraries read the signature of a model's forward to
    decide which inputs it takes. The patch in a copy of the model belongs to no grower.
    """

    def __init__(self) -> None:
        self.samples = 0  # in all calls with gradients since a grower last set it to 0
        self.recording: Callable[[], AbstractContextManager[None]] | None = None  # entered around every call with gradients
        self.follower: Follower | None = None  # of the active grower
        self._is_running = False  # a call of the model is under way

    def attach(self, module: nn.Module) -> None:
        super().attach(module)
        vars(module)["forward"] = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.run(self.forward, arguments, named)  # `recording` may replace `inner`

    def run(self, forward: Forward, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a forward pass. With gradients, count its samples, record it, and let the follower watch its backward pass."""
        # Skip calls inside a call, calls without gradients, and compilation: a counter in compiled code would recompile it for every value.
        if self._is_running or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*arguments, **named)
        # Most models get one tensor, or a tensor first, and looking through all arguments takes microseconds.
        first = arguments[0] if arguments else None
        self.samples += first.size(0) if isinstance(first, Tensor) and first.ndim > 0 else samples_in((arguments, named))
        self._is_running = True
        try:
            if self.recording is None:
                output = forward(*arguments, **named)
            else:
                with self.recording():
                    output = forward(*arguments, **named)
        finally:
            self._is_running = False
        if self.follower is not None:
            self.follower.watch_backward(output)
        return output

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out everything that belongs to the grower."""
        return {**super().__getstate__(), "recording": None, "follower": None, "samples": 0, "_is_running": False}


def around(module: nn.Module) -> ForwardPatch | None:
    """Return the patch of a module's forward, or None."""
    forward = vars(module).get("forward")
    owner = getattr(forward, "__self__", forward)
    return owner if isinstance(owner, ForwardPatch) else None


def own_forward(module: nn.Module) -> Forward:
    """Return the module's forward without a patch."""
    patch = _innermost(around(module))
    return module.forward if patch is None else patch.inner


def _innermost(patch: ForwardPatch | None) -> ForwardPatch | None:
    """Return the first of the patches of a submodule, whose `inner` is the submodule's own forward, given the last."""
    while patch is not None and isinstance(before := getattr(patch.inner, "__self__", None), ForwardPatch):
        patch = before
    return patch


@contextmanager
def forward_replaced(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Replace the module's own forward inside the `with` block. Its hooks and its patches, such as slots, still run."""
    patch = _innermost(around(module))
    if patch is not None:
        own = patch.inner
        patch.inner = forward
        try:
            yield
        finally:
            patch.inner = own
        return
    attributes = vars(module)
    before = attributes.get("forward")  # None unless the user has replaced it on this instance
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


class SeedHome(NamedTuple):
    """The module in which a seed is registered when it is baked.

    This is the module whose output the seed changes. If that module runs or counts its children, it is a layer inside it.
    """

    module: nn.Module
    path: str  # from the changed module to this one; empty if they are the same
    name: str  # of the seed in this module, such as esper_seed

    @property
    def levels_up(self) -> int:
        """Number of levels from this module up to the changed module."""
        return len(self.path.split(".")) if self.path else 0

    @property
    def baked_as(self) -> str:
        """Name of the seed relative to the changed module."""
        return f"{self.path}.{self.name}" if self.path else self.name


def on_load(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Call `hook` before a state dict is loaded into the module."""
    handle: RemovableHandle = module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
    return handle


class Observer(Protocol):
    """Function that sees the output of a slot's submodule, and returns it or an equal tensor."""

    def __call__(self, slot: Slot, output: Tensor) -> Tensor: ...


class Slot(ForwardPatch):
    """The place after one submodule of the host: holds at most one seed and applies it while it is connected."""

    home: SeedHome

    def __init__(self, place: Place, wide: Mapping[str, ForwardPatch] | None = None) -> None:
        self.place = place
        self.wide: Mapping[str, ForwardPatch] = wide or {}  # patches of the modules that new units of this slot pass through, by name
        self.seed: Seed | None = None
        self.is_connected = False  # the seed changes the host's output
        self.is_kept = False  # the seed is fossilized
        self.observer: Observer | None = None
        self.is_idle = True  # the forward pass skips everything but the submodule
        self.ignores_saves = False  # the host's state dict does not include the seed
        self.ignores_loads = False  # loading a state dict into the host does not change the seed
        self.plantings = 0  # number of times that a seed was put into the slot or removed
        self._alpha = 0.0  # the value of the seed's alpha buffer, readable without waiting for the device
        self._handles: list[RemovableHandle] = []
        # Only in a copy: the original slot, and its `plantings` at the time of copying.
        self._origin: weakref.ref[Slot] | None = None
        self._origin_plantings = 0

    def attach_to(self, module: nn.Module, home: SeedHome) -> None:
        """Patch the forward of `module`, and let the state dict of `home.module` include the seed."""
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
        return output if self.is_idle else self._apply(output)

    def _apply(self, output: Tensor) -> Tensor:
        """Pass the submodule's output through the observer and the connected seed."""
        if self._origin is not None and not torch.compiler.is_compiling():
            self._warn_if_outgrown()
        if self.observer is not None:
            output = self.observer(self, output)
        if self.is_connected and self.seed is not None:
            # Give the seed the submodule's mode, because a user's blueprint may have dropout. Compiled code must not change modules; there
            # `Slotted.train` sets the mode of the seed.
            if not torch.compiler.is_compiling() and self.seed.training != self.module.training:
                self.seed.train(self.module.training)
            output = self.seed(output)
        return output

    def plant(self, seed: Seed | None, *, connected: bool = False) -> None:
        """Put a seed into the slot; None empties the slot. The seed changes the host's output only if `connected`."""
        if seed is not None:
            seed.spec = msgspec.structs.replace(seed.spec, levels_up=self.home.levels_up)
        if self.seed is not None:
            self.seed.connect(self.wide, False)
        self.seed = seed
        self.is_kept = False
        self._alpha = 0.0
        self._origin = None
        self.plantings += 1
        self.connect(connected and seed is not None)

    def connect(self, connected: bool) -> None:
        """Switch the seed's effect on the host's output on or off."""
        self.is_connected = connected
        if self.seed is not None:
            self.seed.connect(self.wide, connected)
        self._update_is_idle()

    def observe(self, observer: Observer | None) -> None:
        """Call `observer` with the output of every forward pass; None ends it."""
        self.observer = observer
        self._update_is_idle()

    def _update_is_idle(self) -> None:
        is_applied = self.is_connected and self.seed is not None and not self.seed.spec.wide  # patches apply a width seed
        self.is_idle = not is_applied and self.observer is None and self._origin is None

    @property
    def begins_at(self) -> str:
        """Name of the first module whose output depends on the seed: the slot's own, or the first that a width seed widens."""
        return self.seed.spec.wide[0].module if self.seed is not None and self.seed.spec.wide else self.place.module

    @property
    def alpha(self) -> float:
        """The seed's alpha; 0 if the slot is empty."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        assert self.seed is not None
        self._alpha = value
        self.seed.alpha.fill_(value)

    @contextmanager
    def held_at(self, alpha: float) -> Iterator[None]:
        """Connect the seed with this alpha inside the `with` block, and restore both afterwards."""
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
        """Leave out the observer, the origin, which `__deepcopy__` sets, and the patches of other modules, which a `Slotted` sets."""
        is_applied = self.is_connected and self.seed is not None and not self.seed.spec.wide
        return {**super().__getstate__(), "observer": None, "_origin": None, "wide": {}, "is_idle": not is_applied}

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        """Copy the slot, and let the copy remember the original, so that it can warn when the original has grown."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__({name: deepcopy(value, memo) for name, value in self.__getstate__().items()})
        copied._origin, copied._origin_plantings = weakref.ref(self), self.plantings
        copied._update_is_idle()
        return copied

    def _weight_versions(self) -> int:
        """Return the number of in-place changes of the submodule's weights, summed over the weights; 0 in a new copy."""
        if "module" not in self.__dict__:
            return 0
        return sum(version_of(weight) or 0 for weight in self.module.parameters())

    def _warn_if_outgrown(self) -> None:
        """Warn once if the original has grown and the weights of this copy have changed since: it is probably an average of weights."""
        origin = self._origin() if self._origin is not None else None
        if origin is None:  # the original is gone, so there is nothing to compare with
            self._origin = None
            self._update_is_idle()
        elif origin.plantings != self._origin_plantings and self._weight_versions():
            self._origin = None
            self._update_is_idle()
            warnings.warn(
                f"the weights of this copy of a growing model have changed, as in an average of weights, but it lacks the seed that grew "
                f"after {self.place.name!r} in the original; use an average that grows too: slotted.averaged(decay=0.999)",
                RuntimeWarning,
                stacklevel=2,
            )


class _SaveSeed:
    """State dict hook of a seed's home: adds the seed's entries."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
        if self.slot.seed is not None and not self.slot.ignores_saves:
            self.slot.seed.state_dict(destination=state_dict, prefix=f"{prefix}{self.slot.home.name}.")


class _LoadSeed:
    """Hook before a state dict is loaded into a seed's home: loads the seed's entries into the seed in the slot."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def __call__(
        self, module: nn.Module, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        # Take the seed's entries out of the state dict; torch would report them as unexpected.
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
            slot.connect(slot.is_connected)  # the order of its units may be another


class ZeroGradPatch:
    """Patch of a model's or optimiser's `zero_grad`, which calls `after(set_to_none)` afterwards; torch has no hook for it.

    In a copy of the owner, `after` is None and only the original `zero_grad` is called.
    """

    def __init__(self, owner: nn.Module | Optimizer, after: Callable[[bool], None]) -> None:
        self.owner = owner
        self.after: Callable[[bool], None] | None = after
        drop_copied_zero_grad(owner)
        self._before = vars(owner).get("zero_grad")  # None unless the user has replaced it on this instance
        vars(owner)["zero_grad"] = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result = self._inner(*arguments, **named)
        if self.after is not None:
            self.after(bool(named.get("set_to_none", arguments[0] if arguments else True)))
        return result

    @property
    def _inner(self) -> Callable[..., Any]:
        inner: Callable[..., Any] = type(self.owner).zero_grad.__get__(self.owner) if self._before is None else self._before
        return inner

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._inner)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "after": None}

    def detach(self) -> None:
        """Restore the original `zero_grad`. If someone else has patched over this patch, it stays and only calls the original."""
        self.after = None
        if vars(self.owner).get("zero_grad") is self:
            if self._before is None:
                del vars(self.owner)["zero_grad"]
            else:
                vars(self.owner)["zero_grad"] = self._before


def drop_copied_zero_grad(owner: nn.Module | Optimizer) -> None:
    """Remove a patch that was copied with the owner and does nothing."""
    found = vars(owner).get("zero_grad")
    if isinstance(found, ZeroGradPatch) and found.after is None:
        found.detach()
