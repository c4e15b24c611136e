"""The state of N modules of one architecture, a row for each: what is done to some hosts is done to some rows.

All tensors of one kind lie side by side in one flat tensor, so that an optimiser step, a reset, a snapshot or a rollback is a handful of
operations on the device, however many parameters there are. Stacked layers see views of it.

Shapes: N = rows, M = some of them, P = numbers in a row. A parameter of shape S... is seen as [N, S...].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from esper.fleet.device import upload

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """Where in a row each tensor of a module lies."""

    shapes: dict[str, torch.Size]  # by dotted name, in the order in which they lie
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """That of a module's parameters, those that are trained."""
        parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        dtypes = {parameter.dtype for parameter in parameters.values()}
        if len(dtypes) > 1:
            raise ValueError(
                f"the trained parameters of one host need one dtype, got {sorted(map(str, dtypes))}; convert it by host.float()"
            )
        return cls.of_tensors(parameters, dtypes.pop() if dtypes else torch.get_default_dtype())

    @classmethod
    def of_tensors(cls, tensors: State, dtype: torch.dtype) -> Layout:
        return cls({name: tensor.shape for name, tensor in tensors.items() if tensor.dtype == dtype}, dtype)

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]

    @property
    def width(self) -> int:
        """P, the numbers in a row."""
        return sum(self.sizes)

    def flatten(self, tensors: State) -> Tensor:
        """[M, S...] of every name to [M, P]."""
        return torch.cat([tensors[name].reshape(len(tensors[name]), -1) for name in self.shapes], dim=1)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Views [M, S...] into [M, P]. One operation for autograd, whose backward is one concatenation."""
        parts = flat.split_with_sizes(self.sizes, dim=1)
        return {name: part.view(len(flat), *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


class Rows:
    """N rows of one layout in one tensor, `flat` [N, P]."""

    def __init__(self, layout: Layout, count: int, *, device: torch.device | str = "cpu", requires_grad: bool = False) -> None:
        self.layout = layout
        self.flat = torch.zeros(count, layout.width, dtype=layout.dtype, device=device, requires_grad=requires_grad)

    def __len__(self) -> int:
        return len(self.flat)

    def views(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """Every tensor as [N, S...], sharing storage with `flat` and handing its gradient to it; with `rows`, copies of these [M, S...]."""
        return self.layout.unflatten(self.flat if rows is None else self.flat.index_select(0, rows))

    @torch.no_grad()
    def read(self, rows: Tensor) -> Tensor:
        """A copy [M, P] of some rows, `rows` being their indices [M] on the same device."""
        return self.flat.index_select(0, rows)

    @torch.no_grad()
    def write(self, rows: Tensor, values: Tensor) -> None:
        """Puts [M, P] into these rows."""
        self.flat.index_copy_(0, rows, values)


class ModuleRows:
    """N rows of a module's whole state: `parameters`, the trained ones, and `constants`, all that no gradient reaches.

    The constants are buffers and frozen parameters, in one `Rows` for each dtype. A tensor that has several names, such as a tied
    weight, lies there once, under the first of them.
    """

    def __init__(self, module: nn.Module, count: int, *, device: torch.device | str = "cpu") -> None:
        trained = Layout.of(module)
        others = {name: tensor for name, tensor in _named_tensors(module).items() if name not in trained.shapes}
        layouts = [Layout.of_tensors(others, dtype) for dtype in dict.fromkeys(tensor.dtype for tensor in others.values())]
        self.parameters = Rows(trained, count, device=device, requires_grad=True)
        self.constants = tuple(Rows(layout, count, device=device) for layout in layouts)
        further = aliases(module)
        self._names_in_state = {name: further.get(name, name) for name in module.state_dict()}

    @classmethod
    def of(cls, modules: Sequence[nn.Module], *, device: torch.device | str = "cpu") -> ModuleRows:
        """One row for each of these."""
        rows = cls(modules[0], len(modules), device=device)
        rows.load(torch.arange(len(modules), device=device), modules)
        return rows

    def __len__(self) -> int:
        return len(self.parameters)

    @property
    def parts(self) -> tuple[Rows, ...]:
        return (self.parameters, *self.constants)

    def tensors(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """What a stacked module takes: all tensors by dotted name, as views [N, S...] or, with `rows`, as copies [M, S...].

        The gradients of copies reach the parameters too. What a training pass writes into copies of buffers does not.
        """
        return {name: view for part in self.parts for name, view in part.views(rows).items()}

    def read(self, rows: Tensor) -> list[Tensor]:
        """A copy of these rows, for `write`: a snapshot of some hosts."""
        return [part.read(rows) for part in self.parts]

    def write(self, rows: Tensor, values: Iterable[Tensor]) -> None:
        """Puts back what `read` gave, into as many rows, the same or others."""
        for part, value in zip(self.parts, values, strict=True):
            part.write(rows, value)

    def load(self, rows: Tensor, sources: Sequence[nn.Module | State]) -> None:
        """Fills a row from each module or state dict. A state dict has no buffers that are not persistent; those stay as they are."""
        if len(rows) != len(sources):
            raise ValueError(f"one row for each source; got {len(rows)} rows and {len(sources)} sources")
        states = [_named_tensors(source) if isinstance(source, nn.Module) else source for source in sources]
        shapes = {name: shape for part in self.parts for name, shape in part.layout.shapes.items()}
        for state in states:
            self._check(state, shapes)
        for part in self.parts:
            if part.layout.width:
                part.write(rows, self._gathered(part, rows, states))

    def _gathered(self, part: Rows, rows: Tensor, states: Sequence[State]) -> Tensor:
        """The rows [M, P] of these states, put together where the states are and sent in one piece."""
        names, dtype = part.layout.shapes, part.layout.dtype
        missing = [{name for name in names if name not in state} for state in states]
        kept = part.layout.unflatten(part.read(rows)) if any(missing) else {}
        whole = [
            torch.cat([(kept[name][number] if name in gone else state[name]).detach().to(dtype).flatten() for name in names])
            for number, (state, gone) in enumerate(zip(states, missing, strict=True))
        ]
        return upload(torch.stack(whole), part.flat.device)

    def _check(self, state: State, own: Mapping[str, torch.Size]) -> None:
        """Raises ValueError unless it is one of a host like ours."""
        for name in {**self._names_in_state, **state}:
            if name not in own and name not in self._names_in_state:
                raise ValueError(f"{name!r} is unknown to this fleet's hosts; load a host of the same architecture")
            if name in own and (name not in state or state[name].shape != own[name]):
                found = f"has shape {list(state[name].shape)}" if name in state else "is missing"
                raise ValueError(f"{name!r} {found}, this fleet's hosts have it as {list(own[name])}; load a host of the same architecture")

    @torch.no_grad()
    def state_dict_of(self, row: int) -> dict[str, Tensor]:
        """A copy of one row, as the module's own `load_state_dict` takes it."""
        own = {name: view[row] for name, view in self.tensors().items()}
        return {name: own[first].clone() for name, first in self._names_in_state.items()}


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def aliases(module: nn.Module) -> dict[str, str]:
    """Every further name of a tensor that a module holds more than once, such as a tied weight, and its first name."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {name: first[id(tensor)] for name, tensor in named if first.setdefault(id(tensor), name) != name}
