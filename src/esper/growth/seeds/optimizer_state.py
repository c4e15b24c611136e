"""State of optimisers for parameters that become larger or smaller. One rule holds for all optimisers:

- A tensor of the parameter's shape, such as a moment, changes with the parameter. New rows and columns get what the optimiser of their seed
  holds for them.
- A factored second moment, as Adafactor keeps it for rows and columns, is multiplied out, changed like a tensor of the parameter's shape,
  and factored again.
- Scalars, such as the number of steps, are kept.
- With any other state, the state of this parameter begins anew, and a warning says so. A `Grower` refuses optimisers of 8 bits.

Elementwise optimisers (SGD, Adam, Adagrad, ...) go on exactly as host and seed would have, if alpha is 1 and the seed is as old as the
optimiser's state. A younger seed has another bias correction: its moments are converted so that the next step is the same, and the
correction fades with the steps. Muon and Adafactor compute a step from the whole matrix, so their next steps are those of the larger matrix
and not those that its parts would have made.

A full state is a dict with tensors of the parameter's shape only: elementwise tensors under their key, factored ones under their two keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Key = str | tuple[str, str]
_FACTORED = (("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col"))  # keys of torch's and transformers' Adafactor
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "variance", "exp_inf", *_FACTORED)

# A weight that is multiplied by a factor has a gradient divided by it. A statistic is divided by this power of the factor.
_POWERS: dict[Key, int] = {
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "variance", *_FACTORED), 2),
    **{"acc_delta": -2, "step_size": -1, "ax": -1},
}


class Block(NamedTuple):
    """A parameter of a seed that becomes a part of a parameter of the host."""

    source: Tensor
    factor: float | Tensor  # multiplies the values
    where: tuple[slice, ...]  # in the parameter of the host


class States:
    """The states of some optimisers by parameter. `problems` collects what could not go on, for a warning."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.problems: dict[str, None] = {}

    def of(self, parameter: Tensor) -> list[tuple[Optimizer, dict[str, Any], Mapping[str, Any]]]:
        """Return the optimisers that hold a state of the parameter, each with that state and the settings of its group."""
        found: list[tuple[Optimizer, dict[str, Any], Mapping[str, Any]]] = []
        for optimizer in self.optimizers:
            if isinstance(parameter, nn.Parameter) and optimizer.state.get(parameter):
                group = next(group for group in optimizer.param_groups if any(one is parameter for one in group["params"]))
                found.append((optimizer, optimizer.state[parameter], group))
        return found

    def saved(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Return a function that restores the present states of these parameters."""
        before = [(one, optimizer, state, dict(state)) for one in parameters for optimizer, state, _ in self.of(one)]

        def restore() -> None:
            for parameter, optimizer, state, values in before:
                state.clear()
                state.update(values)
                optimizer.state[parameter] = state

        return restore

    def warn(self) -> None:
        """Warn of all states that could not go on."""
        if self.problems:
            warnings.warn(
                f"these states have a layout that cannot be widened or cut, and begin anew: {'; '.join(self.problems)}",
                RuntimeWarning,
                stacklevel=4,
            )

    def widen(self, name: str, parameter: Tensor, shape: Sequence[int], blocks: Sequence[Block], seeds: States) -> None:
        """Give the states of a parameter the shape that it is about to get. `seeds` has the states of the blocks."""
        own = tuple(slice(0, size) for size in parameter.shape)
        for optimizer, state, group in self.of(parameter):

            def wider(key: Key, value: Tensor, kind: str = type(optimizer).__name__, group: Any = group, host: Any = state) -> Tensor:
                # A new element without a state gets an average second moment: with 0, its first steps would be too large.
                fresh = float(value.mean()) if key in _SQUARES else float(group["lr"]) if key == "step_size" else 0.0
                wide = value.new_full(tuple(shape), fresh)
                wide[own] = value
                for block in blocks:
                    for its_optimizer, given, its_group in seeds.of(block.source):
                        full = _full(given, block.source.shape)
                        if full is None or key not in full:
                            self.problems[
                                f"the state of {kind} for the new part of {name}, which {type(its_optimizer).__name__} trained"
                            ] = None
                        else:
                            wide[block.where] = _converted(key, full[key], given, host, its_group, float(block.factor))
                return wide

            self._change(name, parameter, optimizer, wider)

    def cut(self, name: str, parameter: Tensor, select: Callable[[Tensor], Tensor]) -> None:
        """Keep those elements of the states of a parameter that `select` keeps of a tensor of its shape."""
        for optimizer, _, _ in self.of(parameter):
            self._change(name, parameter, optimizer, lambda key, value: select(value))

    def _change(self, name: str, parameter: Tensor, optimizer: Optimizer, change: Callable[[Key, Tensor], Tensor]) -> None:
        """Replace the full state of a parameter by what `change` makes of it, and drop a state that has none."""
        state = optimizer.state[parameter]
        full = _full(state, parameter.shape)
        if full is None:
            del optimizer.state[parameter]
            self.problems[f"the state of {type(optimizer).__name__} for {name}"] = None
            return
        for key, value in full.items():
            changed = change(key, value)
            if isinstance(key, str):
                state[key] = changed
            else:
                keeps = state[key[0]].ndim == value.ndim
                state[key[0]], state[key[1]] = (changed.mean(axis, keepdim=keeps) for axis in (-1, -2))


def _full(state: Mapping[str, Any], shape: Sequence[int]) -> dict[Key, Tensor] | None:
    """Return the full state; None if it has a tensor that is neither elementwise nor factored nor a scalar."""
    found: dict[Key, Tensor] = {}
    for keys in _FACTORED:
        row, column = (state.get(key) for key in keys)
        if isinstance(row, Tensor) and isinstance(column, Tensor) and len(shape) > 1:
            row, column = row.reshape(*shape[:-1], 1), column.reshape(*shape[:-2], 1, shape[-1])
            found[keys] = row * column / row.mean(-2, keepdim=True).clamp(min=torch.finfo(row.dtype).tiny)
    factored = {part for keys in found for part in keys}
    for key, value in state.items():
        if not isinstance(value, Tensor) or key in factored:
            continue
        if value.shape == torch.Size(shape) and value.is_floating_point() and type(value) in (Tensor, nn.Parameter):
            found[key] = value
        elif value.numel() > 1:
            return None
    return found


def _converted(
    key: Key, value: Tensor, given: Mapping[str, Any], host: Mapping[str, Any], group: Mapping[str, Any], factor: float
) -> Tensor:
    """Return a statistic of a block in the unit and with the bias correction of the host's.

    Adam and its relatives divide their averages by 1 − beta^steps. A seed has made fewer steps than the host, so its averages are
    multiplied by the ratio of both.
    """
    power = -1 if key == "momentum_buffer" and "square_avg" in given else _POWERS.get(key, 1)  # RMSprop's momentum is one of weights
    value = value / factor**power if factor else torch.zeros_like(value)
    index = {"exp_avg": 0, "exp_avg_sq": 1, "max_exp_avg_sq": 1}.get(key) if isinstance(key, str) else None
    if index is None or "betas" not in group or "step" not in given:
        return value
    if index == 0 and "mu_product" in given:  # NAdam
        return value * float((1 - host["mu_product"]) / (1 - given["mu_product"]))
    beta = float(group["betas"][index])
    ratio: float = (1 - beta ** float(host["step"])) / (1 - beta ** float(given["step"]))
    return value * ratio
