"""The first-order probe: how fast the loss would fall if a candidate grew in a slot.

A seed is zero at birth, so at first only its zeroed layer W learns, and the gradient there needs no seed in the host: with h the output at
the slot and g = ∂loss/∂h, it is the product of g with ∂branch(h)/∂W. So the probe catches h and g in the user's own training steps, which
stay what they are, and lets every candidate answer for itself, one at a time.

    signal   ‖E[∂loss/∂W]‖², from products of different steps, in which the noise of single batches has no part
    promise  learning rate · ‖∂loss/∂W‖₁ · share of signal · all weights / weights in W: nats per step, for an optimiser whose steps have
             the size of the learning rate. The last factor stands for the layers before W, which learn as soon as W has moved

Shapes: h and g are [B, *place.shape].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from esper.gradients import unscaled
from esper.growth.blueprints import Blueprint, build_branch, cost_of
from esper.growth.slot import Slot
from esper.growth.slotted import Slotted


@dataclass
class _Trial:
    """A candidate that is asked, with what its gradients sum up to."""

    branch: nn.Module
    sums: list[Tensor] = field(default_factory=list)
    squares: Tensor | None = None  # Σ‖gradient‖²
    steps: Tensor | None = None  # that counted, on the device: a step whose gradient overflowed does not


class Probe:
    """Looks at candidates in dormant slots for a number of training steps."""

    def __init__(self, slotted: Slotted, candidates: Mapping[str, Sequence[Blueprint]], *, random_seed: int) -> None:
        self._slots = {name: slotted.slot(name) for name in candidates}
        self._trials = {
            (name, blueprint.name): _Trial(build_branch(blueprint, slotted.place(name), seed=random_seed))
            for name, some in candidates.items()
            for blueprint in some
        }
        self._caught: dict[str, list[list[Tensor]]] = {}
        self.steps = 0
        self.is_watching = False
        self.is_paused = False  # what runs now is none of the user's training
        self.flops = 3 * sum(cost_of(blueprint, slotted.slot(name).place).flops for name, some in candidates.items() for blueprint in some)

    def watch(self) -> None:
        """Catches h and g in the forward and backward passes from now on."""
        self.is_watching = True
        for slot in self._slots.values():
            slot.observe(self._catch)

    def stop(self) -> None:
        self.is_watching = False
        self._caught.clear()
        for slot in self._slots.values():
            slot.observe(None)

    def _catch(self, slot: Slot, output: Tensor) -> Tensor:
        if self.is_paused or not torch.is_grad_enabled():
            return output
        if not output.requires_grad:  # everything before the slot is frozen
            output = output.detach().requires_grad_().clone()  # a leaf could not be worked on in place
        elif output._is_view():
            output = output.clone()  # a view that is worked on in place forgets its hooks
        pair = [output.detach().clone()]  # cloned, because the next layer may work in place
        self._caught.setdefault(slot.place.name, []).append(pair)
        output.register_hook(lambda gradient: pair.append(gradient.detach()))  # type: ignore[no-untyped-call]
        return output

    @property
    def has_caught(self) -> bool:
        """Whether it holds gradients of backward passes that no step has used yet."""
        return any(len(pair) == 2 for pairs in self._caught.values() for pair in pairs)

    def drop(self) -> None:
        """Forgets the gradients that were caught, but no forward pass whose gradient is still to come."""
        self._caught = {name: [pair for pair in pairs if len(pair) == 1] for name, pairs in self._caught.items()}

    def ask(self, *, scale: Tensor | None = None) -> None:
        """Lets every candidate answer to what was caught in this step. The caught gradients were multiplied by `scale`."""
        for (name, _), trial in self._trials.items():
            pairs = [pair for pair in self._caught.get(name, ()) if len(pair) == 2]
            if pairs:
                self._ask_one(trial, pairs, scale)
        self._caught.clear()
        self.steps += 1

    def _ask_one(self, trial: _Trial, pairs: Iterable[list[Tensor]], scale: Tensor | None) -> None:
        parameters = [parameter for parameter in trial.branch.parameters() if parameter.requires_grad]
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for h, g in pairs:
            with torch.enable_grad():
                output = trial.branch(h.to(parameters[0]))  # in its precision, and where it is
            gradients = torch.autograd.grad(output, parameters, unscaled(g, scale).to(output), allow_unused=True)
            for sum_, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    sum_ += gradient
        square = sum((part.double().square().sum() for part in total), torch.zeros((), dtype=torch.float64, device=total[0].device))
        counts = torch.isfinite(square)
        total = [torch.where(counts, part, torch.zeros_like(part)) for part in total]
        square = torch.where(counts, square, torch.zeros_like(square))
        trial.sums = [old + new for old, new in zip(trial.sums, total, strict=True)] if trial.sums else total
        trial.squares = square if trial.squares is None else trial.squares + square
        trial.steps = counts.double() if trial.steps is None else trial.steps + counts

    def promises(self, learning_rates: dict[str, float]) -> dict[tuple[str, str], float]:
        """Nats per step for every (slot, blueprint) that was asked at least twice."""
        found = {key: _promise(trial) for key, trial in self._trials.items()}
        return {key: promise * learning_rates[key[0]] for key, promise in found.items() if not math.isnan(promise)}

    def state_dict(self) -> dict[str, Any]:
        """What the candidates have answered so far. Their weights come from the random seed and do not change."""
        answers = [
            {"slot": slot, "blueprint": blueprint, "sums": list(trial.sums), "squares": trial.squares, "steps": trial.steps}
            for (slot, blueprint), trial in self._trials.items()
        ]
        return {"steps": self.steps, "answers": answers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for answer in state["answers"]:
            trial = self._trials[answer["slot"], answer["blueprint"]]
            device = next(trial.branch.parameters()).device
            trial.sums = [part.to(device) for part in answer["sums"]]
            trial.squares, trial.steps = (None if part is None else part.to(device) for part in (answer["squares"], answer["steps"]))


def _promise(trial: _Trial) -> float:
    """NaN where it was asked less than twice."""
    if trial.squares is None or trial.steps is None:
        return math.nan
    return float(promise_of(torch.cat([part.reshape(-1) for part in trial.sums]), trial.squares, trial.steps))


def promise_of(sums: Tensor, squares: Tensor, steps: Tensor) -> Tensor:
    """Nats per step at a learning rate of 1, from what the gradients of some steps sum up to; NaN where these are less than two.

    `sums` [..., P] are those of the gradients, `squares` [...] those of their squared norms, `steps` [...] is how many there were.
    """
    sums = sums.double()
    together, absolute = sums.square().sum(-1), sums.abs().sum(-1) / steps
    signal = (together - squares) / (steps * (steps - 1))  # ‖E gradient‖², without bias
    # A signal that drowns in the noise of few steps is not known to be zero; what it could be is what the noise leaves.
    share = torch.maximum(signal / (together / steps**2).clamp(min=1e-30), 1 / steps).clamp(max=1).sqrt()
    moving = torch.count_nonzero(sums, dim=-1).clamp(min=1)
    return torch.where(steps > 1, absolute * share * sums.shape[-1] / moving, math.nan)
