"""The first-order probe: how fast the loss would fall if a candidate grew in a slot.

A seed is zero at birth, so at first only its zeroed layer W learns, and the gradient there needs no seed in the host: with h the output at
the slot and g = ∂loss/∂h, it is the product of g with ∂branch(h)/∂W. So the probe catches h and g in the user's own training steps, which
stay what they are, and lets every candidate answer for itself, one at a time.

    mean     the mean of ∂loss/∂W over some steps
    signal   ‖E[∂loss/∂W]‖², from products of different steps, in which the noise of single batches has no part
    G        the mean, shortened to the length of the signal
    D        how far a seed's own optimiser moves W in a step when all of its gradients are G, clipped as those of seeds are
    promise  −⟨G, D⟩: the fall of the loss in a step, to first order

D is not derived but observed: an optimiser of the seed's kind makes some steps along G, and the last one counts. So the same rule gives
learning rate · ‖G‖² for SGD, ten times that for a momentum of 0.9, learning rate · ‖G‖₁ for Adam, and what is right for an optimiser that
nobody here knows. W is at zero before every such step, so weight decay has no part in it. Layers before W have no part in it either: they
learn when W has moved, which is of second order (docs/log.md has what was measured).

Shapes: h and g are [B, *place.shape].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from esper.gradients import unscaled
from esper.growth.blueprints import Blueprint, build_branch, cost_of, live_parameters
from esper.growth.seed_learner import SeedLearner
from esper.growth.slot import Slot
from esper.growth.slotted import Slotted

STEPS_ALONG = 32  # of the optimiser along the same gradient: enough for a momentum of 0.9 to be within 4 % of its end
MakeLearner = Callable[[str, nn.Module], SeedLearner]  # of what would grow in a slot
Promises = dict[tuple[str, str], float]  # (slot, blueprint) -> fall of the loss per step


@dataclass
class _Trial:
    """A candidate that is asked, with what its gradients sum up to."""

    branch: nn.Module
    live: list[nn.Parameter]  # those of the zeroed layer, which alone have a gradient
    sums: list[Tensor] = field(default_factory=list)
    squares: Tensor | None = None  # Σ‖gradient‖²
    steps: Tensor | None = None  # that counted, on the device: a step whose gradient overflowed does not


class Probe:
    """Looks at candidates in dormant slots for a number of training steps."""

    def __init__(self, slotted: Slotted, candidates: Mapping[str, Sequence[Blueprint]], *, random_seed: int) -> None:
        self._slots = {name: slotted.slot(name) for name in candidates}
        self._trials: dict[tuple[str, str], _Trial] = {}
        for name, some in candidates.items():
            place = slotted.place(name)
            for blueprint in some:
                branch = build_branch(blueprint, place, seed=random_seed)
                live = live_parameters(blueprint, place, branch)
                self._trials[name, blueprint.name] = _Trial(branch, [branch.get_parameter(own) for own in live])
        self._caught: dict[str, list[list[Tensor]]] = {}
        self.steps = 0
        self.is_watching = False
        self.is_paused = False  # what runs now is none of the user's training
        # A forward pass, and a backward pass through the last layer alone.
        self.flops = 2 * sum(cost_of(blueprint, slotted.slot(name).place).flops for name, some in candidates.items() for blueprint in some)

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
        total = [_zeros_like(parameter) for parameter in trial.live]
        for h, g in pairs:
            with torch.enable_grad():
                output = trial.branch(h.to(trial.live[0]))  # in its precision, and where it is
            gradients = torch.autograd.grad(output, trial.live, unscaled(g, scale).to(output), allow_unused=True)
            for sum_, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    sum_ += gradient
        square = squared_norm(total)
        counts = torch.isfinite(square)
        total = [torch.where(counts, part, torch.zeros_like(part)) for part in total]
        square = torch.where(counts, square, torch.zeros_like(square))
        trial.sums = [old + new for old, new in zip(trial.sums, total, strict=True)] if trial.sums else total
        trial.squares = square if trial.squares is None else trial.squares + square
        trial.steps = counts.double() if trial.steps is None else trial.steps + counts

    def promises(self, make_learner: MakeLearner) -> Promises:
        """Nats per step, at the learning rate that seeds have now, for every (slot, blueprint) that was asked at least twice."""
        falls = {key: fall for key, trial in self._trials.items() if (fall := _fall(trial, key[0], make_learner)) is not None}
        read = torch.stack(list(falls.values())).tolist() if falls else []
        return {key: fall for key, fall in zip(falls, read, strict=True) if not math.isnan(fall)}

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
            device = trial.live[0].device
            trial.sums = [part.to(device) for part in answer["sums"]]
            trial.squares, trial.steps = (None if part is None else part.to(device) for part in (answer["squares"], answer["steps"]))


def _zeros_like(parameter: nn.Parameter) -> Tensor:
    """In float32 at least: half precision has no digits for a sum."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)


def _fall(trial: _Trial, slot: str, make_learner: MakeLearner) -> Tensor | None:
    """What the loss would fall by in a step; None where nothing was asked, NaN where it was asked once."""
    if trial.squares is None or trial.steps is None:
        return None
    learner = make_learner(slot, nn.ParameterList([torch.zeros_like(parameter) for parameter in trial.live]))
    share = signal_scale(squared_norm(trial.sums), trial.squares, trial.steps)
    clip = clip_scale(trial.squares, trial.steps, learner.config.max_grad_norm)
    expected = [part * share.to(part.dtype) for part in trial.sums]
    return fall_in_a_step(learner, expected, clip)


def fall_in_a_step(learner: SeedLearner, gradients: Sequence[Tensor], clip: Tensor) -> Tensor:
    """The first-order fall of the loss in a step of a fresh seed whose gradients are these, at the learning rate of the host's group.

    `clip` is what clipping multiplies them by before the optimiser sees them.
    """
    weights, rate = learner.parameters, learner.rate
    seen = [(gradient * clip.to(gradient.dtype)).to(weight.dtype) for weight, gradient in zip(weights, gradients, strict=True)]
    for group in learner.optimizer.param_groups:
        group["lr"] = rate
    for _ in range(STEPS_ALONG):
        for weight, gradient in zip(weights, seen, strict=True):
            weight.detach().zero_()
            weight.grad = gradient.clone()  # an optimiser may write to it
        learner.optimizer.step()
    moved = zip(weights, gradients, strict=True)  # from zero, in the last step
    return -torch.stack([(weight.detach().double() * gradient.double()).sum() for weight, gradient in moved]).sum()


def squared_norm(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double().square().sum() for part in parts]).sum()


def signal_scale(together: Tensor, squares: Tensor, steps: Tensor) -> Tensor:
    """What the sum of some gradients is to be multiplied by to have the length of the expected one; NaN for less than two of them.

    `together` is the squared norm of the sum, `squares` the sum of squared norms, `steps` the number of gradients; all [...].
    """
    signal = (together - squares) / (steps * (steps - 1))  # ‖E gradient‖², without bias
    # A signal that drowns in the noise of few steps is not known to be zero; what it could be is what the noise leaves.
    share = torch.maximum(signal / (together / steps**2).clamp(min=1e-30), 1 / steps).clamp(max=1).sqrt()
    return torch.where(steps > 1, share / steps, math.nan)


def clip_scale(squares: Tensor, steps: Tensor, max_norm: float | None) -> Tensor:
    """What clipping multiplies gradients by, from the sum of their squared norms and their number [...]."""
    return torch.ones_like(squares) if max_norm is None else (max_norm / ((squares / steps).sqrt() + 1e-6)).clamp(max=1.0)


def capped(promises: Promises, *, loss: float | None, steps: int) -> Promises:
    """Promises that `steps` steps never take more than the whole loss. The order of the candidates stays.

    The fall slows down as the loss goes: the gradient that is left is taken as proportional to the loss that is left. `loss` is how far the
    loss can fall, None where nobody knows.
    """
    if loss is None or not 0 < loss < math.inf or steps < 1:
        return promises
    return {key: -math.expm1(-promise * steps / loss) * loss / steps for key, promise in promises.items()}
