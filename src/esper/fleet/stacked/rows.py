"""The state of N modules of one architecture as rows of a few flat tensors, one row per module.

All tensors of one kind are side by side in one flat tensor [N, P]. So an optimiser step, a reset, a snapshot or a rollback of some hosts
takes a handful of operations on the device, however many parameters there are. Stacked layers see views of it.

Shapes: N = rows, M = some of them, P = numbers in a row. A parameter of shape S... is seen as [N, S...].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from esper.devices import upload

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """The place of each tensor of a module in a row."""

    shapes: dict[str, torch.Size]  # dotted name -> shape, in the order of the row
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Return the layout of a module's trained parameters."""
        parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        dtypes = {parameter.dtype for parameter in parameters.values()}
        if len(dtypes) > 1:
            raise ValueError(
                f"the trained parameters of one host need one dtype, got {sorted(map(str, dtypes))}; convert the host by host.float()"
            )
        return cls.of_tensors(parameters, dtypes.pop() if dtypes else torch.get_default_dtype())

    @classmethod
    def of_tensors(cls, tensors: State, dtype: torch.dtype) -> Layout:
        """Return the layout of those tensors that have this dtype."""
        return cls({name: tensor.shape for name, tensor in tensors.items() if tensor.dtype == dtype}, dtype)

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]

    @property
    def width(self) -> int:
        """P, the number of numbers in a row."""
        return sum(self.sizes)

    def flatten(self, tensors: State) -> Tensor:
        """Return the tensors, name -> [M, S...], as rows [M, P]."""
        return torch.cat([tensors[name].reshape(len(tensors[name]), -1) for name in self.shapes], dim=1)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views, name -> [M, S...], of rows [M, P]. For autograd it is one operation; its backward is one concatenation.

        The rows may be longer; the rest is ignored.
        """
        rest = flat.shape[1] - self.width
        parts = flat.split_with_sizes([*self.sizes, *([rest] if rest else [])], dim=1)
        return {name: part.view(len(flat), *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=False)}


class Rows:
    """N rows of one layout in one tensor, `flat` [N, P]."""

    def __init__(self, layout: Layout, count: int, *, device: torch.device | str = "cpu", requires_grad: bool = False) -> None:
        self.layout = layout
        self.flat = torch.zeros(count, layout.width, dtype=layout.dtype, device=device, requires_grad=requires_grad)

    def __len__(self) -> int:
        return len(self.flat)

    def views(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """Return every tensor as a view [N, S...] of `flat`; with `rows`, as a copy [M, S...] of these rows. Gradients reach `flat`."""
        return self.layout.unflatten(self.flat if rows is None else self.flat.index_select(0, rows))

    @torch.no_grad()
    def read(self, rows: Tensor) -> Tensor:
        """Return a copy [M, P] of some rows, given by their indices [M] on the same device."""
        return self.flat.index_select(0, rows)

    @torch.no_grad()
    def write(self, rows: Tensor, values: Tensor) -> None:
        """Write values [M, P] into these rows."""
        self.flat.index_copy_(0, rows, values)


class ModuleRows:
    """N rows of a module's whole state.

    `parameters` are the trained ones. `constants` are buffers and frozen parameters, in one `Rows` for each dtype. A tensor with several
    names, such as a tied weight, is stored once, under its first name.
    """

    def __init__(self, module: nn.Module, count: int, *, device: torch.device | str = "cpu") -> None:
        trained = Layout.of(module)
        others = {name: tensor for name, tensor in _named_tensors(module).items() if name not in trained.shapes}
        layouts = [Layout.of_tensors(others, dtype) for dtype in dict.fromkeys(tensor.dtype for tensor in others.values())]
        self.parameters = Rows(trained, count, device=device, requires_grad=True)
        self.constants = tuple(Rows(layout, count, device=device) for layout in layouts)
        first_names = aliases(module)
        self._names_in_state = {name: first_names.get(name, name) for name in module.state_dict()}  # name in a state dict -> name here

    @classmethod
    def of(cls, modules: Sequence[nn.Module], *, device: torch.device | str = "cpu") -> ModuleRows:
        """Return rows with the state of these modules, one row for each."""
        rows = cls(modules[0], len(modules), device=device)
        rows.load(torch.arange(len(modules), device=device), modules)
        return rows

    def __len__(self) -> int:
        return len(self.parameters)

    @property
    def parts(self) -> tuple[Rows, ...]:
        return (self.parameters, *self.constants)

    def tensors(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """Return all tensors by dotted name, as a stacked module takes them: views [N, S...] or, with `rows`, copies [M, S...].

        Gradients of copies reach the parameters too. Updates that a training pass makes to copies of buffers do not reach the buffers.
        """
        return {name: view for part in self.parts for name, view in part.views(rows).items()}

    def read(self, rows: Tensor) -> list[Tensor]:
        """Return a copy of these rows, to be given to `write`."""
        return [part.read(rows) for part in self.parts]

    def write(self, rows: Tensor, values: Iterable[Tensor]) -> None:
        """Write the result of `read` into as many rows, the same or others."""
        for part, value in zip(self.parts, values, strict=True):
            part.write(rows, value)

    def load(self, rows: Tensor, sources: Sequence[nn.Module | State]) -> None:
        """Fill one row from each module or state dict. Buffers that are not persistent are not in a state dict and stay as they are."""
        if len(rows) != len(sources):
            raise ValueError(f"load needs one row for each source; got {len(rows)} rows and {len(sources)} sources")
        states = [_named_tensors(source) if isinstance(source, nn.Module) else source for source in sources]
        shapes = {name: shape for part in self.parts for name, shape in part.layout.shapes.items()}
        for state in states:
            self._check(state, shapes)
        for part in self.parts:
            if part.layout.width:
                part.write(rows, self._gathered(part, rows, states))

    def _gathered(self, part: Rows, rows: Tensor, states: Sequence[State]) -> Tensor:
        """Return these states as rows [M, P] on the device. They are put together where the states are and sent in one piece."""
        names, dtype = part.layout.shapes, part.layout.dtype
        # Tensors that a state does not have, such as buffers that are not persistent, keep their present values.
        missing = [{name for name in names if name not in state} for state in states]
        kept = part.layout.unflatten(part.read(rows)) if any(missing) else {}
        whole = [
            torch.cat([(kept[name][number] if name in gone else state[name]).detach().to(dtype).flatten() for name in names])
            for number, (state, gone) in enumerate(zip(states, missing, strict=True))
        ]
        return upload(torch.stack(whole), part.flat.device)

    def _check(self, state: State, own: Mapping[str, torch.Size]) -> None:
        """Raise ValueError unless the names and shapes of the state are those of these rows."""
        for name in {**self._names_in_state, **state}:
            if name not in own and name not in self._names_in_state:
                raise ValueError(f"{name!r} is unknown to this fleet's hosts; load a host of the same architecture")
            if name in own and (name not in state or state[name].shape != own[name]):
                found = f"has shape {list(state[name].shape)}" if name in state else "is missing"
                raise ValueError(f"{name!r} {found}, this fleet's hosts have it as {list(own[name])}; load a host of the same architecture")

    @torch.no_grad()
    def state_dict_of(self, row: int) -> dict[str, Tensor]:
        """Return a copy of one row, as the module's own `load_state_dict` takes it."""
        own = {name: view[row] for name, view in self.tensors().items()}
        return {name: own[first].clone() for name, first in self._names_in_state.items()}


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def aliases(module: nn.Module) -> dict[str, str]:
    """Return the further names of tensors that a module holds more than once, such as tied weights: further name -> first name."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {name: first[id(tensor)] for name, tensor in named if first.setdefault(id(tensor), name) != name}
