"""The first-order probe: estimates how fast the loss would fall if a candidate grew in a slot.

Gradient of a candidate. A seed starts with a zeroed last layer W, so at first only W learns. Its gradient can be computed without a seed in
the host: with h the output at the slot and g = ∂loss/∂h, it is the product of g with ∂branch(h)/∂W. The probe captures h and g in the
user's own training steps, without changing them, and computes this product for one candidate after another.

    mean     mean of ∂loss/∂W over some steps
    signal   ‖E[∂loss/∂W]‖², from products of different steps, so that the noise of single batches cancels
    G        the mean, shortened to the length of the signal
    D        movement of W in one step of a seed's own optimiser whose gradients are all G, clipped like those of seeds
    promise  −⟨G, D⟩: the estimated fall of the loss in one step, to first order

Width. The gradient of a width candidate needs the inputs of several layers, so the candidate itself takes part in the user's steps: its
new units are in the host's tensors, and `back`, which reads them, is zero. So the steps do not change, and `back` gets its gradient.

Step of the optimiser. D is observed, not derived: an optimiser of the seed's kind makes some steps along G, and the last one counts. The
same rule therefore gives learning rate · ‖G‖² for SGD, ten times that for a momentum of 0.9, learning rate · ‖G‖₁ for Adam, and the right
value for any other optimiser. W is zero before every such step, so weight decay has no effect. The layers before W are left out, because
they only learn after W has moved, which is of second order (measurements in docs/log.md).

Portions. Candidates are evaluated in portions, so that the probe needs no more resources than the host itself. A portion has at most as
many weights as the host (or four million, if the host is smaller), and evaluating it takes at most the FLOPs of a training step. A
candidate larger than the host gets a portion of its own; one that is many times as large is not evaluated. A portion is built when its turn
comes, evaluated at some steps, and deleted once its estimates are known. Candidates are evaluated on whole batches, because behind a batch
norm the gradient of part of a batch is mostly noise that cancels over the whole batch. An epoch that is too short for two steps per
candidate therefore gets larger portions, which take more FLOPs per step but not more weights.

Schedule. `ProbeRunner` runs the probe at the last steps of the epoch after the request, or at the first steps if the length of an epoch is
unknown.

Shapes: B = batch; h and g are [B, *place.shape].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.gradients import unscaled
from esper.growth.host.slots import Slot
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.stages import Cost, Stage
from esper.growth.measure.promises import Key, Promises
from esper.growth.seeds.blueprints import build_branch, cost_of, get_blueprint, live_parameters
from esper.growth.seeds.learner import MakeOptimizer, Routes, SeedLearner, routes_of
from esper.growth.seeds.width import CANDIDATE, WidthSeed

if TYPE_CHECKING:  # it imports this module
    from esper.growth.lifecycle.backend import ModuleBackend
    from esper.growth.lifecycle.lifecycles import Lifecycles

STEPS_ALONG = 32  # optimiser steps along the same gradient; a momentum of 0.9 is then within 4 % of its limit
LEAST_ANSWERS = 2  # least number of steps per candidate; with one, signal and noise cannot be separated
MOST_TIMES_THE_HOST = 4  # a candidate with more weights than this many hosts is not evaluated, unless it is small, see below
LEAST_PARAMETERS = 2**22  # a portion may have this many parameters (16 MB) even if the host is smaller
MakeLearner = Callable[[str, nn.Module], SeedLearner]  # (slot, weights) -> learner as a seed in that slot would have


# Portions


@dataclass(frozen=True)
class Portion:
    """Candidates that are evaluated at the same steps, and the number of those steps."""

    candidates: tuple[Key, ...]
    steps: int


def evaluated(costs: Mapping[Key, Cost], host: Cost) -> dict[Key, Cost]:
    """Return the candidates that are not many times as large as the host."""
    most = max(MOST_TIMES_THE_HOST * host.parameters, LEAST_PARAMETERS)
    return {key: cost for key, cost in costs.items() if cost.parameters <= most}


def portions(costs: Mapping[Key, Cost], host: Cost, *, probe_steps: int, length: int | None) -> list[Portion]:
    """Plan the portions, in the order of `costs`. `length` is the number of steps in an epoch; None if unknown.

    Every portion gets `probe_steps` steps. If the epoch is too short for that, each of these measures is tried in turn:
    1. fewer steps per portion, but at least two;
    2. larger portions, which take more FLOPs per step than the host does;
    3. leaving out the largest candidates.
    If the length is unknown, nothing is left out, and all portions together get about `probe_steps` steps.
    """
    wanted, chosen = max(probe_steps, LEAST_ANSWERS), dict(costs)
    # Leave out candidates only if the epoch is too short even without a limit on FLOPs.
    while length is not None and len(chosen) > 1 and LEAST_ANSWERS * len(_filled(chosen, host, math.inf)) > length:
        del chosen[max(chosen, key=lambda key: chosen[key].parameters)]
    # Find the lowest limit on FLOPs (1, 2, 4, ... times those of the host) with few enough portions.
    available = wanted if length is None else length
    most = max(available // LEAST_ANSWERS, len(_filled(chosen, host, math.inf)))
    limits = (2.0**doublings for doublings in itertools.count())
    filled = next(some for limit in limits if len(some := _filled(chosen, host, limit)) <= most)
    steps = min(max(available // max(len(filled), 1), LEAST_ANSWERS), wanted)
    return [Portion(keys, steps) for keys in filled]


def _filled(costs: Mapping[Key, Cost], host: Cost, limit: float) -> list[tuple[Key, ...]]:
    """Fill portions in order. Each stays within the weights of the host and `limit` times the FLOPs of its training step."""
    found: list[list[Key]] = []
    parameters = flops = 0
    for key, cost in costs.items():
        parameters, flops = parameters + cost.parameters, flops + cost.flops
        # A training step of the host takes 3 times the FLOPs of a forward pass.
        is_too_much = parameters > max(host.parameters, LEAST_PARAMETERS) or flops_of_asking(flops) > limit * 3 * max(host.flops, 1)
        if not found or is_too_much:
            found.append([])
            parameters, flops = cost.parameters, cost.flops
        found[-1].append(key)
    return [tuple(keys) for keys in found]


def flops_of_asking(flops: int) -> int:
    """Return the FLOPs per sample of evaluating candidates with `flops` per forward pass: forward, and backward through the last layer."""
    return 2 * flops


# Gradients of the candidates


@dataclass
class Trial:
    """A candidate under evaluation, with sums over the steps so far."""

    branch: nn.Module  # of a width candidate, the whole seed
    live: list[nn.Parameter]  # parameters of the zeroed layers, the only ones with a gradient
    sums: list[Tensor] = field(default_factory=list)  # Σ gradient, one tensor per live parameter
    squares: Tensor | None = None  # Σ‖gradient‖²
    steps: Tensor | None = None  # number of steps with a finite gradient, on the device

    def add(self, gradients: list[Tensor]) -> None:
        """Add the gradient of one step to the sums."""
        # A step whose gradient is not finite (an overflow under a loss scale) does not count. The device decides that; nothing is read.
        square = squared_norm(gradients)
        counts = torch.isfinite(square)
        gradients = [torch.where(counts, part, torch.zeros_like(part)) for part in gradients]
        square = torch.where(counts, square, torch.zeros_like(square))
        self.sums = [old + new for old, new in zip(self.sums, gradients, strict=True)] if self.sums else gradients
        self.squares = square if self.squares is None else self.squares + square
        self.steps = counts.double() if self.steps is None else self.steps + counts


@dataclass
class _Caught:
    """Output of one forward pass through a slot, and its gradient."""

    h: Tensor
    g: Tensor | None = None  # None until the backward pass has reached the slot


class Probe:
    """Evaluates candidates in dormant slots over a number of training steps. `host` is the cost of the host.

    `make_learner(slot, weights)` builds the learner that a seed would have; its optimiser makes the trial steps.
    """

    def __init__(
        self, slotted: Slotted, candidates: Iterable[Key], host: Cost, make_learner: MakeLearner, *, random_seed: int, probe_steps: int
    ) -> None:
        self._slotted, self._host, self._make_learner = slotted, host, make_learner
        self._random_seed, self._probe_steps = random_seed, probe_steps
        self._costs = evaluated({key: cost_of(get_blueprint(key[1]), slotted.place(key[0])) for key in candidates}, host)
        self._portions: list[Portion] | None = None  # None: not planned yet
        self._length: int | None = None  # length of the epoch that they were planned for
        self._number = 0  # index of the current portion
        self._steps = 0  # steps at which it was evaluated so far
        self._trials: dict[Key, Trial] = {}  # candidates of the current portion
        self._falls: dict[Key, Tensor] = {}  # results of finished portions, at a learning rate of 1
        self._caught: dict[str, list[_Caught]] = {}  # by slot
        self._counted: str | None = None  # slot at which samples are counted for the width candidates of the present portion
        self._samples = 0  # counted since the last step
        self.is_watching = False
        self.is_paused = False  # forward passes are not captured, because they are not part of the user's training
        self.flops = 0  # spent since the caller last set it to 0

    def plan(self, *, length: int | None) -> None:
        """Plan the portions. Call it before `watch`. `length` is the number of steps in an epoch; None if unknown."""
        self._length = length
        self._portions = portions(self._costs, self._host, probe_steps=self._probe_steps, length=length)

    @property
    def is_planned(self) -> bool:
        return self._portions is not None

    @property
    def steps(self) -> int:
        """Number of steps of all portions together."""
        return sum(portion.steps for portion in self._portions or ())

    @property
    def is_over(self) -> bool:
        return self._portions is not None and self._number >= len(self._portions)

    @property
    def _portion(self) -> Portion | None:
        return None if self._portions is None or self.is_over else self._portions[self._number]

    def watch(self) -> None:
        """Start to capture h and g in the forward and backward passes, in the slots of the current portion."""
        self.is_watching = True
        assert self._portion is not None
        # Seeds of width candidates take part; for the others, h and g are captured.
        for key in self._portion.candidates:
            if _is_wide(key) and key not in self._trials:
                self._trials[key] = self._build_trial(key)
        self._connect(True)
        asked = {key[0] for key in self._portion.candidates if not _is_wide(key)}
        self._counted = next((key[0] for key in self._portion.candidates if _is_wide(key)), None)
        for name in {slot for slot, _ in self._costs}:
            self._slotted.slot(name).observe(self._catch if name in asked else self._count if name == self._counted else None)

    def _connect(self, is_connected: bool) -> None:
        """Let the width candidates of the portion take part in the forward passes, or not."""
        for key, trial in self._trials.items():
            if isinstance(trial.branch, WidthSeed):
                trial.branch.connect(self._slotted.wide, is_connected and self._portion is not None and key in self._portion.candidates)

    def _count(self, slot: Slot, output: Tensor) -> Tensor:
        """Count the samples of a forward pass."""
        if not self.is_paused and torch.is_grad_enabled():
            self._samples += output.shape[slot.place.batch_axis]
        return output

    def stop(self) -> None:
        """Stop capturing; keep the results so far."""
        self.is_watching = False
        self._caught.clear()
        self._drop_gradients()
        self._connect(False)
        for name in {slot for slot, _ in self._costs}:
            self._slotted.slot(name).observe(None)

    def _catch(self, slot: Slot, output: Tensor) -> Tensor:
        """Store the output at a slot, and register a hook that stores its gradient. Called by the slot in every forward pass."""
        if self.is_paused or not torch.is_grad_enabled():
            return output
        if slot.place.name == self._counted:
            self._count(slot, output)
        if not output.requires_grad:  # everything before the slot is frozen
            output = output.detach().requires_grad_().clone()  # cloned, because a leaf cannot be changed in place
        elif output._is_view():
            output = output.clone()  # a view that is changed in place loses its hooks
        caught = _Caught(slot.place.own_units(output).detach().clone())  # cloned, because the next layer may change it in place
        self._caught.setdefault(slot.place.name, []).append(caught)

        def take(gradient: Tensor) -> None:
            caught.g = slot.place.own_units(gradient).detach()

        output.register_hook(take)  # type: ignore[no-untyped-call]
        return output

    @property
    def has_caught(self) -> bool:
        """Whether there are captured gradients that no optimiser step has used yet."""
        is_caught = any(caught.g is not None for some in self._caught.values() for caught in some)
        return is_caught or any(
            parameter.grad is not None for key, trial in self._trials.items() if _is_wide(key) for parameter in trial.live
        )

    def _drop_gradients(self) -> None:
        for trial in self._trials.values():
            for parameter in trial.live:
                parameter.grad = None

    def drop(self) -> None:
        """Discard the captured gradients, but keep forward passes whose backward pass is still to come."""
        self._drop_gradients()
        self._caught = {name: [caught for caught in some if caught.g is None] for name, some in self._caught.items()}

    def ask(self, *, scale: Tensor | None = None) -> None:
        """Evaluate the current portion on the passes captured in this step. `scale` is the loss scale of the captured gradients."""
        portion = self._portion
        assert portion is not None
        for key in portion.candidates:
            if _is_wide(key):
                self._add_own_gradient(key, scale)
                continue
            seen = [caught for caught in self._caught.get(key[0], ()) if caught.g is not None]
            if seen:
                self._add_gradient(key, seen, scale)
        self._caught.clear()
        self._samples = 0
        self._steps += 1
        if self._steps >= portion.steps:
            self._close()
            if not self.is_over:
                self.watch()

    def _add_gradient(self, key: Key, seen: Iterable[_Caught], scale: Tensor | None) -> None:
        """Add the gradient of one candidate, over all captured passes of this step, to its sums."""
        if key not in self._trials:
            self._trials[key] = self._build_trial(key)
        trial = self._trials[key]
        total = [_zeros_like(parameter) for parameter in trial.live]
        for caught in seen:
            with torch.enable_grad():
                output = trial.branch(caught.h.to(trial.live[0]))  # in the dtype and on the device of the candidate
            assert caught.g is not None
            gradients = torch.autograd.grad(output, trial.live, unscaled(caught.g, scale).to(output), allow_unused=True)
            for part, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    part += gradient
            self.flops += len(caught.h) * flops_of_asking(self._costs[key].flops)
        trial.add(total)

    def _add_own_gradient(self, key: Key, scale: Tensor | None) -> None:
        """Add the gradient that a width candidate has got in the user's backward passes of this step to its sums."""
        trial = self._trials[key]
        gradients = [parameter.grad for parameter in trial.live]
        if all(gradient is None for gradient in gradients):
            return
        total = [
            _zeros_like(parameter) if gradient is None else unscaled(gradient, scale).to(_zeros_like(parameter).dtype)
            for parameter, gradient in zip(trial.live, gradients, strict=True)
        ]
        for parameter in trial.live:
            parameter.grad = None
        self.flops += self._samples * flops_of_asking(self._costs[key].flops)
        trial.add(total)

    def _build_trial(self, key: Key) -> Trial:
        """Build the branch of a candidate and find its live parameters."""
        blueprint, place = get_blueprint(key[1]), self._slotted.place(key[0])
        if blueprint.share is not None:
            seed = self._slotted.new_seed(*key, random_seed=self._random_seed)
            assert isinstance(seed, WidthSeed)
            seed.alpha.fill_(1.0)
            seed.is_candidate = True
            seed.spec = msgspec.structs.replace(seed.spec, order=seed.spec.order + CANDIDATE)
            live = [parameter for part in seed.parts if part.back is not None for parameter in part.back.parameters()]
            for parameter in seed.parameters():
                parameter.requires_grad_(any(parameter is own for own in live))
            return Trial(seed, live)
        branch = build_branch(blueprint, place, seed=self._random_seed)
        return Trial(branch, [branch.get_parameter(name) for name in live_parameters(blueprint, place, branch)])

    def _close(self) -> None:
        """Compute the results of the current portion, delete its branches, and move on to the next portion."""
        self._connect(False)
        trials, self._trials = self._trials, {}
        for key in list(trials):
            fall = fall_of(trials.pop(key), key[0], self._make_learner)
            if fall is not None:
                self._falls[key] = fall
        self._number, self._steps = self._number + 1, 0

    def promises(self, rates: Mapping[str, float]) -> Promises:
        """Return the estimated fall of the loss per step for every candidate with at least two steps.

        `rates` holds the learning rate of a seed in each slot.
        """
        if self._trials:
            self._close()
        read = torch.stack(list(self._falls.values())).tolist() if self._falls else []  # one read of the device
        return {key: rates[key[0]] * fall for key, fall in zip(self._falls, read, strict=True) if not math.isnan(fall)}

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the sums so far. The candidates' weights are not saved: they follow from the random seed."""
        answers = [
            {"slot": slot, "blueprint": blueprint, "sums": list(trial.sums), "squares": trial.squares, "steps": trial.steps}
            for (slot, blueprint), trial in self._trials.items()
        ]
        falls = [{"slot": slot, "blueprint": blueprint, "fall": fall} for (slot, blueprint), fall in self._falls.items()]
        plan = {"is_planned": self.is_planned, "length": self._length, "portion": self._number, "steps": self._steps}
        return {**plan, "answers": answers, "falls": falls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["is_planned"]:
            self.plan(length=state["length"])
        self._number, self._steps = state["portion"], state["steps"]
        self._falls = {(found["slot"], found["blueprint"]): found["fall"] for found in state["falls"]}
        for answer in state["answers"]:
            key = answer["slot"], answer["blueprint"]
            trial = self._trials[key] = self._build_trial(key)
            device = trial.live[0].device
            trial.sums = [part.to(device) for part in answer["sums"]]
            trial.squares, trial.steps = (None if part is None else part.to(device) for part in (answer["squares"], answer["steps"]))


def _is_wide(key: Key) -> bool:
    return get_blueprint(key[1]).share is not None


# From gradients to estimates


def _zeros_like(parameter: nn.Parameter) -> Tensor:
    """Return zeros for a sum of gradients, at least in float32, because half precision is too coarse for sums."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)


def fall_of(trial: Trial, slot: str, make_learner: MakeLearner) -> Tensor | None:
    """Return the fall of the loss in one step at a learning rate of 1: None without any step, NaN after a single one."""
    if trial.squares is None or trial.steps is None:
        return None
    learner = make_learner(slot, nn.ParameterList([torch.zeros_like(parameter) for parameter in trial.live]))
    share = signal_scale(squared_norm(trial.sums), trial.squares, trial.steps)
    clip = clip_scale(trial.squares, trial.steps, learner.config.max_grad_norm, unit=learner.loss_unit)
    return fall_in_a_step(learner, [part * share.to(part.dtype) for part in trial.sums], clip)


def fall_in_a_step(learner: SeedLearner, gradients: Sequence[Tensor], clip: Tensor) -> Tensor:
    """Return the first-order fall of the loss in one step of a seed with these gradients, divided by its learning rate.

    The optimiser sees the gradients multiplied by `clip`.
    """
    weights, rate = learner.parameters, learner.rate
    seen = [(gradient * clip.to(gradient.dtype)).to(weight.dtype) for weight, gradient in zip(weights, gradients, strict=True)]
    learner.set_rates(1.0)
    if rate == 0:  # a schedule may begin with it
        rate = 1.0
        for group in (group for optimizer in learner.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
    for _ in range(STEPS_ALONG):
        for weight, gradient in zip(weights, seen, strict=True):
            weight.detach().zero_()
            weight.grad = gradient.clone()  # an optimiser may write to it
        for optimizer in learner.optimizers:
            optimizer.step()
    # The weights were zero before the last step, so they are its movement now.
    moved = zip(weights, gradients, strict=True)
    return -torch.stack([(weight.detach().double() * gradient.double()).sum() for weight, gradient in moved]).sum() / rate


def squared_norm(parts: Sequence[Tensor]) -> Tensor:
    """Return the squared L2 norm of several tensors together, in float64."""
    return torch.stack([part.double().square().sum() for part in parts]).sum()


def signal_scale(together: Tensor, squares: Tensor, steps: Tensor) -> Tensor:
    """Return the factor that scales the sum of some gradients to the length of their expectation; NaN for fewer than two gradients.

    `together` is the squared norm of the sum, `squares` the sum of squared norms, `steps` the number of gradients; all [...].
    """
    signal = (together - squares) / (steps * (steps - 1))  # unbiased estimate of ‖E gradient‖²
    # A signal below the noise of few steps need not be zero, so its share of the squared mean is at least 1 / steps.
    share = torch.maximum(signal / (together / steps**2).clamp(min=1e-30), 1 / steps).clamp(max=1).sqrt()
    return torch.where(steps > 1, share / steps, math.nan)


def clip_scale(squares: Tensor, steps: Tensor, max_norm: float | None, *, unit: float) -> Tensor:
    """Return the factor of gradient clipping, from the sum of the squared norms and the number of gradients; all [...].

    `max_norm` is given in units of the loss, as for seeds; `unit` is that unit.
    """
    return torch.ones_like(squares) if max_norm is None else (max_norm * unit / ((squares / steps).sqrt() + 1e-6)).clamp(max=1.0)


class ProbeRunner:
    """Runs probes during training: builds one on request, starts and stops it at the right steps, and returns its results.

    `make` is the user's factory for the optimisers of seeds, if there is one.
    """

    def __init__(
        self,
        slotted: Slotted,
        lifecycles: Lifecycles[ModuleBackend],
        optimizers: Sequence[Optimizer],
        make: MakeOptimizer | None = None,
    ) -> None:
        self.slotted, self.lifecycles, self.optimizers, self.make = slotted, lifecycles, optimizers, make
        self.probe: Probe | None = None  # None unless one was requested for this epoch

    def request(self, *, without: Collection[Key] = ()) -> None:
        """Request a probe of all candidates that fit a dormant slot and the rest of the budget, apart from those in `without`."""
        allowed = self.lifecycles.allowance()
        wanted = [
            (name, option.name)
            for name, options in self.lifecycles.options.items()
            if self.lifecycles.slots[name].stage is Stage.DORMANT
            for option in options
            if (name, option.name) not in without and allowed.refusal(self.lifecycles.price(name, option.name)) is None
        ]
        config = self.lifecycles.config
        self.probe = (
            Probe(self.slotted, wanted, self.lifecycles.host, self._make_learner, random_seed=config.seed, probe_steps=config.probe_steps)
            if wanted
            else None
        )

    def take_flops(self) -> int:
        """Return the FLOPs spent since the last call."""
        if self.probe is None:
            return 0
        flops, self.probe.flops = self.probe.flops, 0
        return flops

    @property
    def has_caught(self) -> bool:
        """Whether there are captured gradients that no optimiser step has used yet."""
        return self.probe is not None and self.probe.has_caught

    def drop(self) -> None:
        """Discard captured gradients that no optimiser step has used."""
        if self.probe is not None:
            self.probe.drop()

    def ask(self, *, scale: Tensor | None) -> None:
        """Evaluate candidates after a step of the host's optimiser. `scale` is the loss scale of the captured gradients."""
        if self.probe is not None and self.probe.is_watching:
            self.probe.ask(scale=scale)

    def get_ready(self, steps: int, length: int | None) -> None:
        """Start or stop the probe if that is due. Call it before a forward pass.

        `steps` is the number of steps of the host's optimiser in this epoch so far, `length` that in the last epoch; None if unknown.
        """
        probe = self.probe
        if probe is None:
            return
        if not probe.is_planned:
            probe.plan(length=length)
        is_due = length is None or steps >= length - probe.steps
        if probe.is_over:
            self.rest()
        elif is_due and not probe.is_watching:
            probe.watch()
            # Capturing needs Python hooks. Compiled code would be recompiled when they come and again when they go.
            self.slotted.run_eagerly(True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not capture forward passes inside this context, because they are not part of the user's training."""
        probe = self.probe
        if probe is None:
            yield
            return
        probe.is_paused = True
        try:
            yield
        finally:
            probe.is_paused = False

    def rest(self) -> None:
        """Stop the probe; keep the results so far."""
        if self.probe is not None and self.probe.is_watching:
            self.probe.stop()
            self.slotted.run_eagerly(False)

    def discard(self) -> None:
        """Stop the probe and drop the request and the results."""
        self.rest()
        self.probe = None

    def end_epoch(self, *, steps: int, reported: int) -> Promises | None:
        """Return the estimates of the probe; None if none was requested.

        `steps` is the number of steps of the host's optimiser in the epoch, `reported` the number of training steps that the user reported.
        With accumulation there are more of these, so estimates per optimiser step are converted to estimates per reported step.
        """
        self.rest()
        probe, self.probe = self.probe, None
        if probe is None:
            return None
        factor = self.lifecycles.config.seed_optimizer.learning_rate_factor * steps / max(reported, 1)
        no_weights = nn.ParameterList()
        rates = {name: self._routes(name, no_weights).of_slot.learning_rate for name in self.lifecycles.slots}
        return probe.promises({name: factor * rate for name, rate in rates.items()})

    def _routes(self, slot: str, weights: nn.Module) -> Routes:
        return routes_of(weights, self.optimizers, self.slotted.slot(slot).place.module, self.slotted.host)

    def _make_learner(self, slot: str, weights: nn.Module) -> SeedLearner:
        learner = SeedLearner(weights, self._routes(slot, weights), self.lifecycles.config.seed_optimizer, self.make)
        learner.loss_unit = self.lifecycles.unit
        return learner

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.probe is None else self.probe.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self.discard()
        if state is not None:
            self.request()
            if self.probe is not None:
                self.probe.load_state_dict(state)
