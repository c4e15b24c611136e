"""Reuse the part of a forward pass that lies before a slot.

Everything that runs before a slot is the same with its seed on and off. So it is recorded once, and replayed:

    replay = PrefixCache(model, calls, "layer2.0")
    for batch in batches:
        with replay.recording():
            loss_with = evaluate(batch)
        with replay.replaying():
            loss_without = evaluate(batch)  # after the seed was switched off
        replay.clear()

Modules are replayed, not single operations: a computation of the model between two modules runs every time, on replayed inputs. The hooks
of replayed modules run too, and so does the slot. Hooks of modules inside a replayed one do not run; their effect is in the recording.
Nothing before the slot may change between recording and replay: no weights, no seeds, no batch.

Forward passes that cannot be replayed are computed. So a cache that is not usable, or whose recording was cut, costs time but gives correct
results.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.host.isolation import is_compiled, is_eager, unwrap
from esper.growth.host.layout import Call
from esper.growth.host.slots import Forward, forward_replaced, own_forward, tensors_in
from esper.torch_internals import version_of

MAX_BYTES = 256 * 1024**2
Shapes = tuple[torch.Size, ...]
Inputs = tuple[tuple[Tensor, int | None], ...]  # the tensors of a call of the model, and their versions


class PrefixCacheMismatch(RuntimeError):
    """A replayed forward pass differs from the recorded one."""


_IS_UNRECORDED: ContextVar[bool] = ContextVar("is_unrecorded", default=False)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Neither record nor replay forward passes inside the `with` block. They are no part of the evaluation, such as those of a metric."""
    token = _IS_UNRECORDED.set(True)
    try:
        yield
    finally:
        _IS_UNRECORDED.reset(token)


class PrefixCache:
    """Recording of the prefix of `slot`: the largest submodules that have ended when the slot's module ends, including that module.

    `calls` are those of one forward pass, with names as in the model without wrappers. `model` is the outermost module, the one that is
    called. A compiled model can be replayed only inside `isolation.eager`, because a replay would recompile it. Outputs are stored
    detached, up to `max_bytes`: the forward pass that would exceed the limit is not recorded, nor are those after it.
    """

    def __init__(self, model: nn.Module, calls: Sequence[Call], slot: str, *, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._model, self._host = model, unwrap(model)
        self._calls, self._slot = tuple(calls), slot
        self._unstorable: set[str] = set()  # modules whose output cannot be stored
        self._counts = _prefix(self._calls, slot, self._unstorable)  # modules of the prefix -> calls of each
        self._refusal = ""
        # Modules whose output is overwritten in place later, so that it must be copied. The slot's own is always copied: whether it is
        # overwritten may depend on its seed being on.
        self._overwritten = {slot}
        self._has_learned = False  # one pass was recorded, so `_overwritten` is known
        self._passes: list[_Pass] = []
        self._is_cut = False  # some forward passes were not recorded
        self._current: _Pass | None = None  # the forward pass that runs now
        self._is_inside = False  # a module of the prefix is computing

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that are replayed, in the order of their first calls."""
        return tuple(self._counts)

    @property
    def reason(self) -> str:
        """Reason why the cache is not usable; "" if it is usable."""
        if self._refusal or is_eager() or not is_compiled(self._model):
            return self._refusal
        return "the model is compiled, and compiled code can be replayed only inside isolation.eager()"

    @property
    def is_usable(self) -> bool:
        return not self.reason

    @property
    def is_complete(self) -> bool:
        """Whether all forward passes were recorded. Those that were not are computed instead of replayed."""
        return self.is_usable and not self._is_cut

    @property
    def nbytes(self) -> int:
        """Size of the recording in bytes."""
        return sum(this_pass.nbytes for this_pass in self._passes)

    def clear(self) -> None:
        """Delete the recording."""
        self._passes.clear()
        self._is_cut = False

    @contextmanager
    def recording(self, *, keep_last: bool = False) -> Iterator[None]:
        """Add the forward passes inside the `with` block to the recording. With `keep_last`, only the last one is kept."""
        if keep_last:
            self.clear()
        if not self.is_usable:
            self._is_cut = True
            yield
            return
        if not self._unstorable.isdisjoint(self._counts):
            self._counts = _prefix(self._calls, self._slot, self._unstorable)

        def run(forward: Forward, arguments: Any, named: Any) -> Any:
            if _IS_UNRECORDED.get():
                return forward(*arguments, **named)
            if keep_last:
                self.clear()
            if self._is_cut or self._refusal:
                return forward(*arguments, **named)
            with self._running(_Pass(inputs=_inputs(arguments, named) if keep_last else ())) as this_pass:
                output = forward(*arguments, **named)
                self._finish_recording(this_pass)
            return output

        with self._installed(run, self._recorded):
            yield

    @contextmanager
    def replaying(self, *, same_tensors: bool = False) -> Iterator[None]:
        """Replay the recording in the forward passes inside the `with` block, in the same order and from the first one on.

        With `same_tensors`, the model must be called with the same tensor objects, unchanged, as in a recording with `keep_last`; otherwise
        PrefixCacheMismatch is raised. Without it, only shapes are compared.
        """
        if not self.is_usable:
            yield
            return
        position = 0

        def run(forward: Forward, arguments: Any, named: Any) -> Any:
            nonlocal position
            if _IS_UNRECORDED.get():
                return forward(*arguments, **named)
            position += 1
            if position > len(self._passes):
                if self._is_cut or self._refusal:
                    return forward(*arguments, **named)
                raise PrefixCacheMismatch(
                    f"forward pass {position} cannot be replayed, only {len(self._passes)} were recorded; record it first"
                )
            if same_tensors and not _is_identical(_inputs(arguments, named), self._passes[position - 1].inputs):
                raise PrefixCacheMismatch(f"forward pass {position} has other inputs than the recorded one; replay the same batch")
            with self._running(self._passes[position - 1]) as this_pass:
                output = forward(*arguments, **named)
                self._check_counts(this_pass)
            return output

        with self._installed(run, self._replayed):
            yield

    def verify(self, run: Callable[[], Tensor]) -> bool:
        """Return whether `run()`, which calls the model, gives exactly the same result computed and replayed. If not, refuse further use.

        `run` must be deterministic. The check finds hidden state, control flow that depends on values that are not recorded, and modules
        that are called for their effect on their input. Deletes the recording.
        """
        if not self.is_usable:
            return False
        self.clear()
        computed = run()
        with self.recording():
            again = run()
        with self.replaying():
            replayed = run()
        self.clear()
        if not _is_same(computed, again):
            self._give_up("two passes over the same batch give different results")
        elif not _is_same(computed, replayed):
            self._give_up("a replayed pass gives another result than a computed one")
        return self.is_usable

    @contextmanager
    def _installed(self, run: Callable[[Forward, Any, Any], Any], wrap: Callable[[str, Forward], Forward]) -> Iterator[None]:
        """Wrap the forward of every module of the prefix by `wrap`, and that of the host by `run`."""
        with ExitStack() as stack:
            for name in self._counts:
                module = self._host.get_submodule(name)
                stack.enter_context(forward_replaced(module, wrap(name, own_forward(module))))
            forward = own_forward(self._host)  # already wrapped above if the slot is after the host itself
            stack.enter_context(forward_replaced(self._host, lambda *arguments, **named: run(forward, arguments, named)))
            yield

    @contextmanager
    def _running(self, this_pass: _Pass) -> Iterator[_Pass]:
        """Make this the forward pass that runs now, with its calls counted from 0."""
        this_pass.ran.clear()
        self._current = this_pass
        try:
            yield this_pass
        finally:
            self._current = None
            this_pass.watched.clear()

    def _recorded(self, name: str, forward: Forward) -> Forward:
        """Return a forward that computes the module and stores its output."""

        def record(*arguments: Any, **named: Any) -> Any:
            if not self._is_in_prefix(name):
                return forward(*arguments, **named)
            output = self._computed(forward, arguments, named)
            if self._current is not None:
                self._store(self._current, name, output, _shapes(arguments, named))
            return output

        return record

    def _replayed(self, name: str, forward: Forward) -> Forward:
        """Return a forward that returns the stored output instead of computing it."""

        def replay(*arguments: Any, **named: Any) -> Any:
            if self._current is None or not self._is_in_prefix(name):
                return forward(*arguments, **named)
            entry, shapes = self._current.take(name), _shapes(arguments, named)
            if shapes != entry.shapes:
                raise PrefixCacheMismatch(
                    f"the inputs of {name!r} have the shapes {[*map(tuple, shapes)]} and had {[*map(tuple, entry.shapes)]} when they were "
                    "recorded; replay the same forward passes in the same order"
                )
            if not entry.is_intact:  # the stored tensor was overwritten, so compute it; from now on copies are stored
                self._overwritten.add(name)
                return self._computed(forward, arguments, named)
            return _map(entry.value, torch.clone if name in self._overwritten else _detached)

        return replay

    def _is_in_prefix(self, name: str) -> bool:
        """Return whether this call belongs to the prefix: inside a forward pass, before the slot, and not inside another prefix module."""
        return self._current is not None and not self._is_inside and self._current.ran[name] < self._counts[name]

    def _computed(self, forward: Forward, arguments: Any, named: Any) -> Any:
        """Run a module of the prefix. Modules inside it are neither recorded nor replayed."""
        self._is_inside = True
        try:
            return forward(*arguments, **named)
        finally:
            self._is_inside = False

    def _store(self, this_pass: _Pass, name: str, output: Any, shapes: Shapes) -> None:
        """Add the output of a call to the recording. Tensors are copied if they are overwritten later, or if that is not known yet."""
        is_copied = name in self._overwritten or not self._has_learned

        def stored(tensor: Tensor) -> Tensor:
            plain = tensor.detach()
            if plain.is_inference():
                return plain.clone()  # it has no version, so overwriting could not be noticed
            this_pass.watched.append((name, plain, version_of(plain)))
            return plain.clone() if is_copied else plain

        try:
            this_pass.add(name, _map(output, stored), shapes)
        except _Unstorable as error:
            # From the next recording on, the modules inside this one are recorded in its place.
            self._unstorable.add(name)
            self._cut(this_pass)
            self._passes.clear()
            if name == self._slot:
                self._give_up(f"the module {name!r} returns a {error}, which cannot be stored")
        if self.nbytes + this_pass.nbytes > self.max_bytes:
            self._cut(this_pass)

    def _cut(self, this_pass: _Pass) -> None:
        """Drop the pass that is being recorded, and record no more."""
        self._is_cut = True
        self._current = None
        this_pass.clear()

    def _finish_recording(self, this_pass: _Pass) -> None:
        """Keep the pass, unless it was cut, and note which outputs were overwritten during it."""
        if self._current is None:
            return
        self._overwritten |= {name for name, tensor, version in this_pass.watched if version_of(tensor) != version}
        self._has_learned = True
        self._passes.append(this_pass)
        self._check_counts(this_pass)

    def _check_counts(self, this_pass: _Pass) -> None:
        """Refuse further use if a module was not called as often as in the forward pass of the discovery."""
        for name, count in self._counts.items():
            if this_pass.ran[name] != count:
                self._give_up(
                    f"{name!r} ran {this_pass.ran[name]} times before the slot, and {count} times in the forward pass of the discovery"
                )

    def _give_up(self, reason: str) -> None:
        """Refuse further use, for this reason."""
        self._refusal = reason
        self._passes.clear()


@dataclass(frozen=True, slots=True)
class _Entry:
    """Output of one call of a module."""

    value: Any
    shapes: Shapes  # of the inputs
    versions: tuple[tuple[Tensor, int | None], ...]  # the tensors in `value`, with their versions

    @property
    def is_intact(self) -> bool:
        return all(version_of(tensor) == version for tensor, version in self.versions)


@dataclass(slots=True)
class _Pass:
    """Recording of one forward pass."""

    inputs: Inputs = ()
    entries: dict[str, list[_Entry]] = field(default_factory=dict)  # by module, in the order of its calls
    ran: Counter[str] = field(default_factory=Counter)  # calls of each module so far
    watched: list[tuple[str, Tensor, int | None]] = field(default_factory=list)  # during the recording: (module, an output, its version)
    storages: dict[int, int] = field(default_factory=dict)  # address -> bytes; outputs may share storage, which is counted once
    nbytes: int = 0

    def add(self, name: str, value: Any, shapes: Shapes) -> None:
        """Add the output of a call."""
        tensors = _leaves(value)
        versions = tuple((tensor, version_of(tensor)) for tensor in tensors)
        self.entries.setdefault(name, []).append(_Entry(value, shapes, versions))
        self.ran[name] += 1
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self.nbytes += 0 if storage.data_ptr() in self.storages else storage.nbytes()
            self.storages[storage.data_ptr()] = storage.nbytes()

    def take(self, name: str) -> _Entry:
        """Return the output of the module's next call."""
        self.ran[name] += 1
        return self.entries[name][self.ran[name] - 1]

    def clear(self) -> None:
        self.entries.clear()
        self.watched.clear()
        self.inputs = ()
        self.nbytes = 0


class _Unstorable(TypeError):
    """An output holds an object that may change or cannot be copied. The text is the object's type."""


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same tree of tuples, lists and dicts with every tensor changed by `change`."""
    kind = type(value)
    if isinstance(value, Tensor):
        return change(value)
    if value is None or kind in (bool, int, float, complex, str):
        return value
    if kind in (tuple, list):
        return kind(_map(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(_map(item, change) for item in value))
    if kind in (dict, OrderedDict):
        return kind((key, _map(item, change)) for key, item in value.items())
    raise _Unstorable(f"{kind.__module__}.{kind.__qualname__}")


def _leaves(value: Any) -> list[Tensor]:
    """Return all tensors of a tree."""
    leaves: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        leaves.append(tensor)
        return tensor

    _map(value, collect)
    return leaves


def _detached(tensor: Tensor) -> Tensor:
    """Return a stored tensor for use in a replayed pass."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _inputs(arguments: tuple[Any, ...], named: dict[str, Any]) -> Inputs:
    return tuple((tensor, version_of(tensor)) for tensor in tensors_in((arguments, named)))


def _is_identical(one: Inputs, other: Inputs) -> bool:
    """Return whether the tensors are the same objects at the same versions; comparing values would wait for the device."""
    return len(one) == len(other) and all(
        left is right and version == before for (left, version), (right, before) in zip(one, other, strict=True)
    )


def _shapes(arguments: tuple[Any, ...], named: dict[str, Any]) -> Shapes:
    return tuple(part.shape for value in (*arguments, *named.values()) if isinstance(value, Tensor) for part in _dense(value))


def _dense(tensor: Tensor) -> Sequence[Tensor]:
    """Return the sequences of a nested tensor, which has no shape: torch's encoder makes one of a batch with padding. Else the tensor."""
    return tensor.unbind() if tensor.is_nested else (tensor,)


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.is_nested or other.is_nested:
        return len(_dense(one)) == len(_dense(other)) and all(map(_is_same, _dense(one), _dense(other)))
    if torch.equal(one, other):
        return True
    return one.shape == other.shape and one.is_floating_point() and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _prefix(calls: Sequence[Call], slot: str, unstorable: Collection[str]) -> Counter[str]:
    """Return the modules to replay, in the order of their first calls, and how often each is called before the slot's module ends."""
    own = [call for call in calls if call.name == slot]
    if len(own) != 1:
        raise ValueError(f"the module {slot!r} ran {len(own)} times in the forward pass; a slot needs a module that runs once")
    done = sorted((call for call in calls if call.end <= own[0].end and call.name not in unstorable), key=lambda call: call.start)
    counts: Counter[str] = Counter()
    end = -1
    for call in done:
        if call.end > end:  # else it lies inside the call before
            counts[call.name] += 1
            end = call.end
    return counts
