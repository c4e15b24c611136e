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

Candidates are asked in portions, so that the probe never needs more than the host itself does: the weights of a portion are at most as many
as the host's (or a million, in a smaller host), and a step of asking takes at most the FLOPs of a training step. A candidate that is larger
than the host is asked alone. A portion is built when its turn comes, asked at some steps, and gone when its promises are known. Candidates
answer to whole batches: behind a batch norm, the gradients of some of the samples are mostly noise that all of them together do not have.
So an epoch that is too short for two answers of each candidate asks more of them in a step, and takes more FLOPs, but not more weights.

Shapes: h and g are [B, *place.shape].

When the probe looks: at the last steps of the epoch after it was asked for, or at the first where the length of an epoch is unknown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.gradients import unscaled
from esper.growth.host.slots import Slot
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.module_backend import ModuleBackend
from esper.growth.lifecycle.slots import SlotLifecycles
from esper.growth.lifecycle.stages import Cost, Stage
from esper.growth.seeds.blueprints import build_branch, cost_of, get_blueprint, live_parameters
from esper.growth.seeds.optimizer import MakeOptimizer, SeedLearner, group_of

STEPS_ALONG = 32  # of the optimiser along the same gradient: enough for a momentum of 0.9 to be within 4 % of its end
LEAST_ANSWERS = 2  # without which signal and noise cannot be told apart
LEAST_PARAMETERS = 2**20  # that a portion may have however small the host is: 4 MB
Key = tuple[str, str]  # slot and blueprint
Promises = dict[Key, float]  # fall of the loss per step
MakeLearner = Callable[[str, nn.Module], SeedLearner]  # of what would grow in a slot


# Portions


@dataclass(frozen=True)
class Portion:
    """Candidates that are asked at the same steps."""

    candidates: tuple[Key, ...]
    steps: int


def portions(costs: Mapping[Key, Cost], host: Cost, *, probe_steps: int, length: int | None) -> list[Portion]:
    """What is asked when, portion after portion, in the order of `costs`.

    `length` is the number of steps in an epoch. Every portion is asked at `probe_steps` steps, or at fewer where the epoch is too short for
    that, but at two. Where that is too much as well, portions take more FLOPs than the host; where even that does not help, because of
    their weights, the largest candidates are left out. In an epoch of unknown length nothing is left out, and all portions together are
    asked at about `probe_steps` steps.
    """
    wanted, chosen = max(probe_steps, LEAST_ANSWERS), dict(costs)
    while length is not None and len(chosen) > 1 and LEAST_ANSWERS * len(_filled(chosen, host, math.inf)) > length:
        del chosen[max(chosen, key=lambda key: chosen[key].parameters)]
    available = wanted if length is None else length
    most = max(available // LEAST_ANSWERS, len(_filled(chosen, host, math.inf)))
    limits = (2.0**doublings for doublings in itertools.count())  # of FLOPs, relative to the host's
    filled = next(some for limit in limits if len(some := _filled(chosen, host, limit)) <= most)
    steps = min(max(available // max(len(filled), 1), LEAST_ANSWERS), wanted)
    return [Portion(keys, steps) for keys in filled]


def _filled(costs: Mapping[Key, Cost], host: Cost, limit: float) -> list[tuple[Key, ...]]:
    """Candidates put together as long as they stay within the host's weights, and within `limit` times the FLOPs of its training step."""
    found: list[list[Key]] = []
    parameters = flops = 0
    for key, cost in costs.items():
        parameters, flops = parameters + cost.parameters, flops + cost.flops
        is_too_much = parameters > max(host.parameters, LEAST_PARAMETERS) or flops_of_asking(flops) > limit * 3 * max(host.flops, 1)
        if not found or is_too_much:
            found.append([])
            parameters, flops = cost.parameters, cost.flops
        found[-1].append(key)
    return [tuple(keys) for keys in found]


def flops_of_asking(flops: int) -> int:
    """For one sample, of candidates that need so many in a forward pass: that, and a backward pass through the last layer alone."""
    return 2 * flops


# Asking


@dataclass
class _Trial:
    """A candidate that is asked, with what its gradients sum up to."""

    branch: nn.Module
    live: list[nn.Parameter]  # those of the zeroed layer, which alone have a gradient
    sums: list[Tensor] = field(default_factory=list)
    squares: Tensor | None = None  # Σ‖gradient‖²
    steps: Tensor | None = None  # that counted, on the device: a step whose gradient overflowed does not


@dataclass
class _Caught:
    """What was seen of one pass through a slot."""

    h: Tensor
    g: Tensor | None = None  # there when the backward pass has come by


class Probe:
    """Looks at candidates in dormant slots for a number of training steps. `host` is what the host costs.

    `make_learner` gives a seed's own learner for weights in a slot, whose optimiser is tried out.
    """

    def __init__(
        self, slotted: Slotted, candidates: Iterable[Key], host: Cost, make_learner: MakeLearner, *, random_seed: int, probe_steps: int
    ) -> None:
        self._slotted, self._host, self._make_learner = slotted, host, make_learner
        self._random_seed, self._probe_steps = random_seed, probe_steps
        self._costs = {key: cost_of(get_blueprint(key[1]), slotted.slot(key[0]).place) for key in candidates}
        self._portions: list[Portion] | None = None  # None: not planned yet
        self._length: int | None = None  # what they were planned for
        self._number = 0  # of the portion whose turn it is
        self._steps = 0  # at which it was asked so far
        self._trials: dict[Key, _Trial] = {}  # of that portion
        self._falls: dict[Key, Tensor] = {}  # of portions that are over, at a learning rate of 1
        self._caught: dict[str, list[_Caught]] = {}
        self.is_watching = False
        self.is_paused = False  # what runs now is none of the user's training
        self.flops = 0  # spent so far; whoever counts them sets it to zero

    def plan(self, *, length: int | None) -> None:
        """Decides what is asked when, before anything is watched. `length` is the number of steps in an epoch, None where it is unknown."""
        self._length = length
        self._portions = portions(self._costs, self._host, probe_steps=self._probe_steps, length=length)

    @property
    def is_planned(self) -> bool:
        return self._portions is not None

    @property
    def steps(self) -> int:
        """That all portions take together."""
        return sum(portion.steps for portion in self._portions or ())

    @property
    def is_over(self) -> bool:
        return self._portions is not None and self._number >= len(self._portions)

    @property
    def _portion(self) -> Portion | None:
        return None if self._portions is None or self.is_over else self._portions[self._number]

    def watch(self) -> None:
        """Catches h and g in the forward and backward passes from now on, in the slots that are asked about."""
        self.is_watching = True
        assert self._portion is not None
        asked = {slot for slot, _ in self._portion.candidates}
        for name in {slot for slot, _ in self._costs}:
            self._slotted.slot(name).observe(self._catch if name in asked else None)

    def stop(self) -> None:
        self.is_watching = False
        self._caught.clear()
        for name in {slot for slot, _ in self._costs}:
            self._slotted.slot(name).observe(None)

    def _catch(self, slot: Slot, output: Tensor) -> Tensor:
        if self.is_paused or not torch.is_grad_enabled():
            return output
        if not output.requires_grad:  # everything before the slot is frozen
            output = output.detach().requires_grad_().clone()  # a leaf could not be worked on in place
        elif output._is_view():
            output = output.clone()  # a view that is worked on in place forgets its hooks
        caught = _Caught(output.detach().clone())  # cloned, because the next layer may work in place
        self._caught.setdefault(slot.place.name, []).append(caught)

        def take(gradient: Tensor) -> None:
            caught.g = gradient.detach()

        output.register_hook(take)  # type: ignore[no-untyped-call]
        return output

    @property
    def has_caught(self) -> bool:
        """Whether it holds gradients of backward passes that no step has used yet."""
        return any(caught.g is not None for some in self._caught.values() for caught in some)

    def drop(self) -> None:
        """Forgets the gradients that were caught, but no forward pass whose gradient is still to come."""
        self._caught = {name: [caught for caught in some if caught.g is None] for name, some in self._caught.items()}

    def ask(self, *, scale: Tensor | None = None) -> None:
        """Lets the candidates of a portion answer to what was caught in this step. The caught gradients were multiplied by `scale`."""
        portion = self._portion
        assert portion is not None
        for key in portion.candidates:
            seen = [caught for caught in self._caught.get(key[0], ()) if caught.g is not None]
            if seen:
                self._ask_one(key, seen, scale)
        self._caught.clear()
        self._steps += 1
        if self._steps >= portion.steps:
            self._close()
            if not self.is_over:
                self.watch()

    def _ask_one(self, key: Key, seen: Iterable[_Caught], scale: Tensor | None) -> None:
        trial = self._trials[key] if key in self._trials else self._trials.setdefault(key, self._built(key))
        total = [_zeros_like(parameter) for parameter in trial.live]
        for caught in seen:
            with torch.enable_grad():
                output = trial.branch(caught.h.to(trial.live[0]))  # in its precision, and where it is
            assert caught.g is not None
            gradients = torch.autograd.grad(output, trial.live, unscaled(caught.g, scale).to(output), allow_unused=True)
            for sum_, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    sum_ += gradient
            self.flops += len(caught.h) * flops_of_asking(self._costs[key].flops)
        square = squared_norm(total)
        counts = torch.isfinite(square)
        total = [torch.where(counts, part, torch.zeros_like(part)) for part in total]
        square = torch.where(counts, square, torch.zeros_like(square))
        trial.sums = [old + new for old, new in zip(trial.sums, total, strict=True)] if trial.sums else total
        trial.squares = square if trial.squares is None else trial.squares + square
        trial.steps = counts.double() if trial.steps is None else trial.steps + counts

    def _built(self, key: Key) -> _Trial:
        blueprint, place = get_blueprint(key[1]), self._slotted.place(key[0])
        branch = build_branch(blueprint, place, seed=self._random_seed)
        return _Trial(branch, [branch.get_parameter(name) for name in live_parameters(blueprint, place, branch)])

    def _close(self) -> None:
        """Finds out what the candidates of a portion promise. Their branches are gone."""
        trials, self._trials = self._trials, {}
        for key in list(trials):
            fall = _fall(trials.pop(key), key[0], self._make_learner)
            if fall is not None:
                self._falls[key] = fall
        self._number, self._steps = self._number + 1, 0

    def promises(self, rates: Mapping[str, float]) -> Promises:
        """The fall of the loss in a step of every candidate that was asked at least twice; `rates` are learning rates of seeds, by slot."""
        if self._trials:
            self._close()
        read = torch.stack(list(self._falls.values())).tolist() if self._falls else []
        return {key: rates[key[0]] * fall for key, fall in zip(self._falls, read, strict=True) if not math.isnan(fall)}

    def state_dict(self) -> dict[str, Any]:
        """What the candidates have answered so far. Their weights come from the random seed and do not change."""
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
            trial = self._trials[key] = self._built(key)
            device = trial.live[0].device
            trial.sums = [part.to(device) for part in answer["sums"]]
            trial.squares, trial.steps = (None if part is None else part.to(device) for part in (answer["squares"], answer["steps"]))


# From gradients to promises


def _zeros_like(parameter: nn.Parameter) -> Tensor:
    """In float32 at least: half precision has no digits for a sum."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)


def _fall(trial: _Trial, slot: str, make_learner: MakeLearner) -> Tensor | None:
    """The fall of the loss in a step, at a learning rate of 1; None where nothing was asked, NaN where it was asked once."""
    if trial.squares is None or trial.steps is None:
        return None
    learner = make_learner(slot, nn.ParameterList([torch.zeros_like(parameter) for parameter in trial.live]))
    share = signal_scale(squared_norm(trial.sums), trial.squares, trial.steps)
    clip = clip_scale(trial.squares, trial.steps, learner.config.max_grad_norm)
    return fall_in_a_step(learner, [part * share.to(part.dtype) for part in trial.sums], clip)


def fall_in_a_step(learner: SeedLearner, gradients: Sequence[Tensor], clip: Tensor) -> Tensor:
    """The first-order fall of the loss in a step of a seed whose gradients are these, divided by its learning rate.

    `clip` is what clipping multiplies them by before the optimiser sees them.
    """
    weights, rate = learner.parameters, learner.rate or 1.0
    seen = [(gradient * clip.to(gradient.dtype)).to(weight.dtype) for weight, gradient in zip(weights, gradients, strict=True)]
    for group in learner.optimizer.param_groups:
        group["lr"] = rate
    for _ in range(STEPS_ALONG):
        for weight, gradient in zip(weights, seen, strict=True):
            weight.detach().zero_()
            weight.grad = gradient.clone()  # an optimiser may write to it
        learner.optimizer.step()
    moved = zip(weights, gradients, strict=True)  # from zero, in the last step
    return -torch.stack([(weight.detach().double() * gradient.double()).sum() for weight, gradient in moved]).sum() / rate


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


class ProbeRunner:
    """`make` gives the optimisers of seeds, where the user has a factory for them."""

    def __init__(
        self, slotted: Slotted, lifecycles: SlotLifecycles[ModuleBackend], optimizer: Optimizer, make: MakeOptimizer | None = None
    ) -> None:
        self.slotted, self.lifecycles, self.optimizer, self.make = slotted, lifecycles, optimizer, make
        self._probe: Probe | None = None
        self._steps = 0  # of the host's optimiser in this epoch, so far
        self._length: int | None = None  # the same in the last epoch

    def request(self) -> None:
        """For all that may grow now, in all slots that are free."""
        allowed = self.lifecycles.allowance()
        wanted = [
            (name, option.name)
            for name, options in self.lifecycles.options.items()
            if self.lifecycles.backends[name].life.stage is Stage.DORMANT
            for option in options
            if allowed.refusal(self.lifecycles.price(name, option.name)) is None
        ]
        config = self.lifecycles.config
        self._probe = (
            Probe(self.slotted, wanted, self.lifecycles.host, self._learner, random_seed=config.seed, probe_steps=config.probe_steps)
            if wanted
            else None
        )

    @property
    def is_watching(self) -> bool:
        return self._probe is not None and self._probe.is_watching

    def take_flops(self) -> int:
        """Those that were spent since the last call."""
        if self._probe is None:
            return 0
        flops, self._probe.flops = self._probe.flops, 0
        return flops

    @property
    def has_caught(self) -> bool:
        """Whether it holds gradients of backward passes that no step has used yet."""
        return self._probe is not None and self._probe.has_caught

    def drop(self) -> None:
        """Forgets the gradients of backward passes that no step has used."""
        if self._probe is not None:
            self._probe.drop()

    def ask(self, *, scale: Tensor | None) -> None:
        """The host's optimiser has stepped by the gradients that were caught, which were multiplied by `scale`."""
        self._steps += 1
        if self._probe is not None and self._probe.is_watching:
            self._probe.ask(scale=scale)

    def get_ready(self) -> None:
        """Before a forward pass."""
        probe = self._probe
        if probe is None:
            return
        if not probe.is_planned:
            probe.plan(length=self._length)
        is_due = self._length is None or self._steps >= self._length - probe.steps
        if probe.is_over:
            self.rest()
        elif is_due and not probe.is_watching:
            probe.watch()
            # What is watched runs in Python. Compiled code would be compiled anew for it, and back again.
            self.slotted.run_eagerly(True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is none of the user's training, and is not looked at."""
        probe = self._probe
        if probe is None:
            yield
            return
        probe.is_paused = True
        try:
            yield
        finally:
            probe.is_paused = False

    def rest(self) -> None:
        """Looks no more; what was found so far stays."""
        if self._probe is not None and self._probe.is_watching:
            self._probe.stop()
            self.slotted.run_eagerly(False)

    def discard(self) -> None:
        """Forgets what was asked for and what was found."""
        self.rest()
        self._probe = None

    def end_epoch(self, *, steps: int) -> Promises | None:
        """What was found; None where nothing was asked. The epoch was told to have so many `steps`; the host's optimiser may make fewer."""
        self._length, self._steps = self._steps, 0
        self.rest()
        probe, self._probe = self._probe, None
        if probe is None:
            return None
        groups = self.optimizer.param_groups
        factor = self.lifecycles.config.seed_optimizer.learning_rate_factor * self._length / max(steps, 1)
        return probe.promises({name: factor * float(groups[self._group(name)]["lr"]) for name in self.lifecycles.backends})

    def _group(self, slot: str) -> int:
        return group_of(self.optimizer, self.slotted.host.get_submodule(slot), self.slotted.host)

    def _learner(self, slot: str, weights: nn.Module) -> SeedLearner:
        return SeedLearner(weights, self.optimizer, self._group(slot), self.lifecycles.config.seed_optimizer, self.make)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "length": self._length, "probe": None if self._probe is None else self._probe.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.discard()
        self._steps, self._length = state["steps"], state["length"]
        if state["probe"] is not None:
            self.request()
            if self._probe is not None:
                self._probe.load_state_dict(state["probe"])
