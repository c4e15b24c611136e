"""Forward passes that do not compute again what lies before a slot.

With a seed on and with it off, everything that ran before its slot is the same. So it is recorded once, and replayed:

    replay = PrefixCache(model, calls, "layer2.0")
    for batch in batches:
        with replay.recording():
            loss_with = evaluate(batch)
        with replay.replaying():
            loss_without = evaluate(batch)  # after the seed was switched off
        replay.clear()

Modules are replayed, not single operations: what a model computes between them runs every time, on replayed inputs. Hooks of the
replayed modules run too, the slot's own among them; those of modules inside do not, and their effect is in the recording. So nothing
before the slot may change between recording and replay: no weights, no seeds, no batch.

Where something cannot be replayed it is computed: a replay that is not usable, or whose recording was cut, is slow and not wrong.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.host.causality import tensors_in
from esper.growth.host.forward_patch import Forward, forward_replaced, own_forward
from esper.growth.host.isolation import is_compiled, is_eager, unwrap
from esper.growth.host.layout import Call

MAX_BYTES = 256 * 1024**2
Shapes = tuple[torch.Size, ...]
Inputs = tuple[tuple[Tensor, int | None], ...]  # tensors that a model is called with, and their versions


class PrefixCacheMismatch(RuntimeError):
    """A forward pass is not the one that was recorded."""


class PrefixCache:
    """Records and replays the prefix of `slot`: the largest submodules that were done when the slot's module was, itself included.

    `calls` are those of one forward pass, with names as in the model under all wrappers. `model` is the outermost module, the one that is
    called; a compiled one can be replayed only inside `isolation.eager`, because it would be compiled anew. Outputs are stored detached,
    up to `max_bytes`: the forward pass that would exceed them is not recorded, and none after it.
    """

    def __init__(self, model: nn.Module, calls: Sequence[Call], slot: str, *, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._model, self._host = model, unwrap(model)
        self._calls, self._slot = tuple(calls), slot
        self._unstorable: set[str] = set()  # modules whose output cannot be stored
        self._counts = _prefix(self._calls, slot, self._unstorable)
        self._refusal = ""
        # Modules whose output somebody overwrites, so that it must be copied. Whether the slot's is may depend on its seed being on.
        self._overwritten = {slot}
        self._has_learned = False
        self._passes: list[_Pass] = []
        self._is_cut = False
        self._current: _Pass | None = None  # the forward pass that runs now
        self._is_inside = False  # a module of the prefix is computing

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that are replayed, in the order of their first calls."""
        return tuple(self._counts)

    @property
    def reason(self) -> str:
        """Why it is not usable; empty where it is."""
        if self._refusal or is_eager() or not is_compiled(self._model):
            return self._refusal
        return "the model is compiled, and compiled code can be replayed only where it is made to run eagerly"

    @property
    def is_usable(self) -> bool:
        return not self.reason

    @property
    def is_complete(self) -> bool:
        """Whether no forward pass was left out of the recording. Those that were are computed instead of replayed."""
        return self.is_usable and not self._is_cut

    @property
    def nbytes(self) -> int:
        """Size of the recording."""
        return sum(one.nbytes for one in self._passes)

    def clear(self) -> None:
        """Forgets the recording."""
        self._passes.clear()
        self._is_cut = False

    @contextmanager
    def recording(self, *, keep_last: bool = False) -> Iterator[None]:
        """Forward passes inside are added to the recording. With `keep_last` each takes the place of all before it."""
        if keep_last:
            self.clear()
        if not self.is_usable:
            self._is_cut = True
            yield
            return
        if not self._unstorable.isdisjoint(self._counts):
            self._counts = _prefix(self._calls, self._slot, self._unstorable)

        def run(forward: Forward, arguments: Any, named: Any) -> Any:
            if keep_last:
                self.clear()
            if self._is_cut or self._refusal:
                return forward(*arguments, **named)
            with self._running(_Pass(inputs=_inputs(arguments, named) if keep_last else ())) as one:
                output = forward(*arguments, **named)
                self._finish_recording(one)
            return output

        with self._installed(run, self._recorded):
            yield

    @contextmanager
    def replaying(self, *, same_tensors: bool = False) -> Iterator[None]:
        """Forward passes inside are those of the recording, in the same order and from its first one on.

        With `same_tensors`, the model must be called with the very tensors of a recording with `keep_last`, unchanged since. Otherwise that
        is taken for granted, and only shapes are compared.
        """
        if not self.is_usable:
            yield
            return
        position = 0

        def run(forward: Forward, arguments: Any, named: Any) -> Any:
            nonlocal position
            position += 1
            if position > len(self._passes):
                if self._is_cut or self._refusal:
                    return forward(*arguments, **named)
                raise PrefixCacheMismatch(
                    f"forward pass {position} cannot be replayed, only {len(self._passes)} were recorded; record it first"
                )
            if same_tensors and not _is_identical(_inputs(arguments, named), self._passes[position - 1].inputs):
                raise PrefixCacheMismatch(f"forward pass {position} has other inputs than the recorded one; replay the same batch")
            with self._running(self._passes[position - 1]) as one:
                output = forward(*arguments, **named)
                self._check_counts(one)
            return output

        with self._installed(run, self._replayed):
            yield

    def verify(self, run: Callable[[], Tensor]) -> bool:
        """Whether `run()`, which calls the model, gives the same bits computed and replayed; if not, this is not usable any more.

        `run` must be deterministic. Found are hidden state, control flow that depends on what is not recorded, and modules that are used
        for what they do to their input. Forgets the recording.
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
        with ExitStack() as stack:
            for name in self._counts:
                module = self._host.get_submodule(name)
                stack.enter_context(forward_replaced(module, wrap(name, own_forward(module))))
            forward = own_forward(self._host)  # wrapped already, where the slot is the host itself
            stack.enter_context(forward_replaced(self._host, lambda *arguments, **named: run(forward, arguments, named)))
            yield

    @contextmanager
    def _running(self, one: _Pass) -> Iterator[_Pass]:
        one.ran.clear()
        self._current = one
        try:
            yield one
        finally:
            self._current = None
            one.watched.clear()

    def _recorded(self, name: str, forward: Forward) -> Forward:
        def record(*arguments: Any, **named: Any) -> Any:
            if not self._is_in_prefix(name):
                return forward(*arguments, **named)
            output = self._computed(forward, arguments, named)
            if self._current is not None:
                self._store(self._current, name, output, _shapes(arguments, named))
            return output

        return record

    def _replayed(self, name: str, forward: Forward) -> Forward:
        def replay(*arguments: Any, **named: Any) -> Any:
            if self._current is None or not self._is_in_prefix(name):
                return forward(*arguments, **named)
            entry, shapes = self._current.take(name), _shapes(arguments, named)
            if shapes != entry.shapes:
                raise PrefixCacheMismatch(
                    f"the inputs of {name!r} have the shapes {[*map(tuple, shapes)]} and had {[*map(tuple, entry.shapes)]} when they were "
                    "recorded; replay the same forward passes in the same order"
                )
            if not entry.is_intact:
                self._overwritten.add(name)
                return self._computed(forward, arguments, named)
            return _map(entry.value, torch.clone if name in self._overwritten else _handed_out)

        return replay

    def _is_in_prefix(self, name: str) -> bool:
        """Whether this call is: not one after the slot, not one inside another module of the prefix, not one outside a forward pass."""
        return self._current is not None and not self._is_inside and self._current.ran[name] < self._counts[name]

    def _computed(self, forward: Forward, arguments: Any, named: Any) -> Any:
        self._is_inside = True
        try:
            return forward(*arguments, **named)
        finally:
            self._is_inside = False

    def _store(self, one: _Pass, name: str, output: Any, shapes: Shapes) -> None:
        is_copied = name in self._overwritten or not self._has_learned

        def stored(tensor: Tensor) -> Tensor:
            plain = tensor.detach()
            if plain.is_inference():
                return plain.clone()  # it has no version that would tell whether it is overwritten
            one.watched.append((name, plain, plain._version))
            return plain.clone() if is_copied else plain

        try:
            one.add(name, _map(output, stored), shapes)
        except _Unstorable as error:
            # What is inside the module takes its place, from the next recording on.
            self._unstorable.add(name)
            self._cut(one)
            self._passes.clear()
            if name == self._slot:
                self._give_up(f"the module {name!r} returns a {error}, which cannot be stored")
        if self.nbytes + one.nbytes > self.max_bytes:
            self._cut(one)

    def _cut(self, one: _Pass) -> None:
        self._is_cut = True
        self._current = None
        one.clear()

    def _finish_recording(self, one: _Pass) -> None:
        if self._current is None:
            return
        self._overwritten |= {name for name, tensor, version in one.watched if tensor._version != version}
        self._has_learned = True
        self._passes.append(one)
        self._check_counts(one)

    def _check_counts(self, one: _Pass) -> None:
        for name, count in self._counts.items():
            if one.ran[name] != count:
                self._give_up(f"{name!r} ran {one.ran[name]} times before the slot, and {count} times in the pass that the calls are from")

    def _give_up(self, reason: str) -> None:
        self._refusal = reason
        self._passes.clear()


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one call of a module gave."""

    value: Any
    shapes: Shapes  # of the inputs
    versions: tuple[tuple[Tensor, int], ...]  # of the tensors in it

    @property
    def is_intact(self) -> bool:
        return all(tensor._version == version for tensor, version in self.versions)


@dataclass(slots=True)
class _Pass:
    """One forward pass."""

    inputs: Inputs = ()
    entries: dict[str, list[_Entry]] = field(default_factory=dict)  # by module, in the order of its calls
    ran: Counter[str] = field(default_factory=Counter)  # calls of each module so far
    watched: list[tuple[str, Tensor, int]] = field(default_factory=list)  # while it is recorded: module, an output, its version
    storages: dict[int, int] = field(default_factory=dict)  # address -> bytes, because outputs may share them
    nbytes: int = 0

    def add(self, name: str, value: Any, shapes: Shapes) -> None:
        tensors = _leaves(value)
        versions = tuple((tensor, tensor._version) for tensor in tensors if not tensor.is_inference())
        self.entries.setdefault(name, []).append(_Entry(value, shapes, versions))
        self.ran[name] += 1
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self.nbytes += 0 if storage.data_ptr() in self.storages else storage.nbytes()
            self.storages[storage.data_ptr()] = storage.nbytes()

    def take(self, name: str) -> _Entry:
        self.ran[name] += 1
        return self.entries[name][self.ran[name] - 1]

    def clear(self) -> None:
        self.entries.clear()
        self.watched.clear()
        self.inputs = ()
        self.nbytes = 0


class _Unstorable(TypeError):
    """An output holds something that may change, or cannot be copied. The text is its type."""


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tree of tuples, lists and dicts with other tensors in it."""
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
    leaves: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        leaves.append(tensor)
        return tensor

    _map(value, collect)
    return leaves


def _handed_out(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _inputs(arguments: tuple[Any, ...], named: dict[str, Any]) -> Inputs:
    return tuple((tensor, None if tensor.is_inference() else tensor._version) for tensor in tensors_in((arguments, named)))


def _is_identical(one: Inputs, other: Inputs) -> bool:
    """The same objects, at the same versions; a comparison of values would wait for the device."""
    return len(one) == len(other) and all(
        left is right and version == before for (left, version), (right, before) in zip(one, other, strict=True)
    )


def _shapes(arguments: tuple[Any, ...], named: dict[str, Any]) -> Shapes:
    return tuple(value.shape for value in (*arguments, *named.values()) if isinstance(value, Tensor))


def _is_same(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return one.shape == other.shape and one.is_floating_point() and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _prefix(calls: Sequence[Call], slot: str, unstorable: Collection[str]) -> Counter[str]:
    """The modules to replay, in the order of their first calls, and how often each is called before the slot's module is done."""
    own = [call for call in calls if call.name == slot]
    if len(own) != 1:
        raise ValueError(f"the module {slot!r} ran {len(own)} times in the forward pass; a slot belongs to one that runs once")
    done = sorted((call for call in calls if call.end <= own[0].end and call.name not in unstorable), key=lambda call: call.start)
    counts: Counter[str] = Counter()
    end = -1
    for call in done:
        if call.end > end:  # else it lies inside the one before
            counts[call.name] += 1
            end = call.end
    return counts
