"""The grower: lives beside a training loop, lets the controller decide once an epoch, and lets the governor watch.

    slotted = add_slots(model, example_input=x[:2])
    grower = Grower(slotted, optimizer, epochs=30)
    for epoch in range(30):
        for x, y in loader:
            loss = loss_fn(slotted(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            grower.after_step(loss)
        grower.after_epoch(evaluate)            # evaluate() gives the validation loss of every batch, always in the same order
    model = slotted.bake()

Seeds learn in the steps of the user's optimiser and drop their gradients where it drops the host's; `after_step` notes the loss, moves
alphas and looks for losses that are not finite.

Everything that a training needs to go on is saved between two steps, and loaded into a new grower that was made in the same way:

    grower.save("checkpoints")
    grower = Grower(add_slots(Net(), example_input=x[:2]), optimizer, epochs=30)
    grower.load("checkpoints")

Under DistributedDataParallel every rank does the same, the seeds' gradients are averaged here, and rank 0 decides for all.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.devices import reading_waits
from esper.growth.arguments import check_alphas, check_evaluate, check_fit_together, check_ranks, one_number, players, ranks_of
from esper.growth.config import GrowthConfig, GrowthError
from esper.growth.controllers.baselines import as_controller
from esper.growth.events import EpochEnded
from esper.growth.host.isolation import unwrap
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.governor import Diverged
from esper.growth.lifecycle.host_growth import HostGrowth, epoch_ended
from esper.growth.lifecycle.module_backend import ModuleBackend, in_shadow, make_backends
from esper.growth.lifecycle.recovery import Recovery
from esper.growth.lifecycle.stages import Controller, Decision, GrowthState, LossScale
from esper.growth.measure.contribution import AlphaSearch, Evaluate, Measurement, search_alpha
from esper.growth.measure.probe import ProbeRunner
from esper.growth.seeds.optimizer import MakeOptimizer, OptimizerFollower
from esper.growth.seeds.shadow import Closure, Shadow
from esper.runs import CheckpointStore, Event
from esper.statistics import Interval

KIND = "grower"  # of its checkpoints
STEPS_PER_EPOCH = 1_000_000  # more than an epoch has, so that checkpoints are ordered by epoch and step


class Grower:
    """Owns the seeds' optimisers, their lives, the snapshots and the ledger.

    `optimizer`, `scaler` and `scheduler` are the user's, needed to follow learning rates and to go back after a disaster; `scheduler` is
    anything with a `state_dict`. Make the grower, or call `begin`, when weights and states are loaded: it goes back to them at first.
    `epochs` is how long the training is planned to be: a controller that knows it does not grow too late. Rents and thresholds are shares
    of the loss of a constant predictor: `config.governor.uninformed_loss`, or `scale` where somebody has measured it, or else the mean
    training loss of the first epoch.
    """

    def __init__(
        self,
        slotted: Slotted,
        optimizer: Optimizer,
        *,
        scaler: GradScaler | None = None,
        scheduler: Any = None,
        controller: Controller | str = "heuristic",
        config: GrowthConfig | None = None,
        epochs: int | None = None,
        scale: LossScale | None = None,
        seed_optimizer: MakeOptimizer | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        check_fit_together(slotted, optimizer, config)
        self.slotted, self.optimizer, self.scaler, self.epochs = slotted, optimizer, scaler, epochs
        self.config = config or GrowthConfig()
        self.controller = as_controller(controller, self.config)
        backends = make_backends(slotted, optimizer, self.config.seed_optimizer, seed_optimizer)
        self.host_growth: HostGrowth[ModuleBackend] = HostGrowth(
            backends, self.config, host=slotted.discovery.host, load=slotted.discovery.load, epochs=epochs, scale=scale
        )
        self.lifecycles, self.history, self.ledger = self.host_growth.lifecycles, self.host_growth.history, self.host_growth.ledger
        self._recovery = Recovery(
            slotted,
            optimizer,
            self.lifecycles,
            self.host_growth.governor,
            keep=self.config.governor.keep,
            scaler=scaler,
            scheduler=scheduler,
        )
        if not self._recovery.has_finite_weights():
            raise GrowthError("some of the model's weights are NaN or infinite before the training; begin with others")
        self._recovery.take_snapshot()
        self._prober = ProbeRunner(slotted, self.lifecycles, optimizer, seed_optimizer)
        self._group = ranks_of(slotted.model)
        self._measurement = Measurement(slotted, group=self._group)
        self._shadow = Shadow(slotted, alpha=self.config.lifecycle.alpha_target)
        self._on_event = on_event
        self._has_begun = False
        self._has_stepped = False  # the host, since the last after_step
        self._has_stepped_in_epoch = False
        self._has_warned = False  # of unknown samples
        # The loss scale after the last step. Reading it waits for the device, which is no matter before the training.
        self._scale_before: Tensor | float = scaler.get_scale() if scaler is not None else 1.0
        if slotted.follower is not None:  # of a grower that was made earlier
            slotted.follower.stop()
        models = [slotted.model, unwrap(slotted.model)]
        self._follower = OptimizerFollower(
            optimizer,
            models,
            before_step=self._recovery.hold_new,
            step=self._step_seeds,
            zero_grad=self._drop_gradients,
            is_pending=self._has_gradients,
        )
        slotted.recording, slotted.follower, slotted.samples = self._shadow.recording, self._follower, 0

    @property
    def epoch(self) -> int:
        """Finished so far."""
        return self.host_growth.epoch

    @property
    def rollbacks(self) -> int:
        return self.host_growth.governor.rollbacks

    # What the training loop calls

    def begin(self) -> None:
        """The first decision, before any training: a schedule may grow at once. Later calls do nothing."""
        self._check_is_at_work()
        if not self._has_begun:
            self._recovery.take_snapshot()  # again, for states may have been loaded since the grower was made
            self._begin()

    def _begin(self) -> None:
        """Once, at the latest after the first step. The state is then not what was there before the training."""
        if self._has_begun:
            return
        check_ranks(self.slotted.model, self._group)  # again, for processes may have joined since the grower was made
        self._has_begun = True
        self._decide()
        self._get_ready()
        self.history.lap()
        self._tell()

    def after_step(self, loss: Tensor | float, *, closure: Closure | None = None, samples: int | None = None) -> None:
        """Call it after every step of the optimiser. `closure` computes this step's loss again, for seeds that are raised in the shadow.

        FLOPs are counted by the samples of this step, which calls of the model tell; give `samples` where it was called otherwise.

        Called after every part of an accumulated batch it counts parts for steps: losses are those of parts, and alphas move by part and
        reach their targets in as many epochs. Seeds step with the optimiser in any case, those in the shadow by the closure of the first
        call after its step.
        """
        self._check_is_at_work()
        value = one_number(loss)
        if closure is None and self.config.lifecycle.raise_mode == "shadow":
            raise GrowthError(
                "seeds in the shadow learn by a second forward pass; pass after_step(loss, closure=lambda: loss_fn(slotted(x), y)), "
                "or raise them jointly"
            )
        samples = self.slotted.samples or None if samples is None else samples
        samples = None if samples is None else samples * self._group.world_size  # batches are as large on all ranks
        is_lost = self._is_lost(value)
        if not is_lost:
            self._begin()
        self.history.note_step(value, samples=samples, flops_per_sample=self._step_flops())
        probe_flops = self._prober.take_flops()
        if samples is not None:
            self.history.flops += probe_flops
        self._follower.forget_failed_steps()
        if is_lost:
            self._go_back(f"the training loss of step {self.history.steps} is {float(value)}")
            self._begin()  # not before: what is decided at the beginning is not to blame for the first step
        else:
            if self.epoch == 0 and self.history.steps == 1:
                self._recovery.hold_moving()
            self._learn_in_shadow(closure)
            self._tick()
        self._has_stepped = False
        self._get_ready()
        self._tell()

    def _is_lost(self, loss: Tensor) -> bool:
        """Elsewhere a look at every loss would wait for the device, or for the other ranks; there the end of the epoch shows it."""
        return not reading_waits(loss) and self._group.world_size == 1 and not math.isfinite(float(loss))

    def _learn_in_shadow(self, closure: Closure | None) -> None:
        """Where the host has stepped; seeds in its shadow step as often as it does."""
        learning = self._in_shadow()
        if learning and closure is not None and self._has_stepped:
            with self._prober.paused():
                self._shadow.step(learning, closure, scale=self._scale(), group=self._group)

    def _tick(self) -> None:
        is_skipped = self._has_overflowed()
        for backend in self.lifecycles.backends.values():
            if backend.learner is not None:
                backend.learner.tick(is_skipped=is_skipped)
        self.lifecycles.tick()

    # What follows the user's optimiser

    def _step_seeds(self) -> None:
        """The host has stepped. Connected seeds have got their gradients from the user's backward passes."""
        # A fused optimiser under a loss scale skips its step on the device, and holds this meanwhile.
        scale, found_inf = self._scale(), getattr(self._follower.optimizer, "found_inf", None)
        for backend in self.lifecycles.backends.values():
            if backend.learner is not None and backend.is_connected:
                backend.learner.step(scale=scale, found_inf=found_inf, group=self._group)
        self._prober.ask(scale=scale)
        self._has_stepped = self._has_stepped_in_epoch = True

    def _drop_gradients(self, set_to_none: bool) -> None:
        for backend in self.lifecycles.backends.values():
            if backend.learner is not None:
                backend.learner.zero_grad(set_to_none=set_to_none)
        self._prober.drop()

    def _has_gradients(self) -> bool:
        """Of backward passes, in seeds or in the probe."""
        return self._prober.has_caught or any(
            backend.learner is not None and backend.learner.has_gradients for backend in self.lifecycles.backends.values()
        )

    def _scale(self) -> Tensor | None:
        """The factor of the losses, on its device, because `get_scale` would wait for it; None where they are not scaled."""
        return self.scaler._get_scale_async() if self.scaler is not None and self.scaler.is_enabled() else None

    def _has_overflowed(self) -> Tensor | bool:
        """Return whether the scaler kept the host from a step, which shows in its scale: it has fallen.

        A tensor where there is a scale, since reading it would wait for the device.
        """
        before, scale = self._scale_before, self._scale()
        if scale is None:
            return False
        self._scale_before = scale.clone()
        return False if self._has_stepped else scale < before

    def recording(self) -> AbstractContextManager[None]:
        """Around a forward pass that is not a call of the slotted model: seeds in the shadow then need not compute all of it again."""
        return self._shadow.recording()

    def after_epoch(self, evaluate: Evaluate) -> EpochEnded:
        """Call it after every epoch. `evaluate()` gives the validation loss of every batch; it is called once more for each seed on trial.
        Batches of different sizes are best given as pairs of (loss, number of samples), so that every sample counts alike.

        It is the user's: it puts the model into eval mode and switches gradients off. The modes of all modules are put back after it.
        Until it has given everything that is needed nothing is changed, so an error in it leaves all as it was. On several ranks, each
        goes through as many batches, its own or the same, and the losses of all ranks count.
        """
        self._check_is_at_work()
        check_evaluate(evaluate)
        self._begin()
        self._rest()
        chunks = self._averaged(self.history.chunks())
        self._check_has_stepped()
        measured = self._measurement.measure(evaluate, self.host_growth.on_trial(), epoch=self.epoch + 1)
        val_loss = measured.losses.mean
        self.host_growth.find_scale(chunks, val_loss)
        verdict = self.host_growth.verdict(chunks, val_loss)  # the same on all ranks, as these numbers are
        self._has_stepped_in_epoch = False
        self.host_growth.end_epoch(chunks, val_loss, measured.contributions, self._agreed(self._prober.end_epoch(steps=self.history.steps)))
        self._warn_of_unknown_samples()
        if verdict.is_disaster:
            self._go_back(verdict.reason)
            decision = Decision(reason=f"went back to a healthy state: {verdict.reason}")
        else:
            self.host_growth.settle(verdict, chunks, self._recovery)
            decision = self._decide()
        self._get_ready()
        ended = epoch_ended(self.lifecycles, self.history, decision, learning_rate=self._learning_rate())
        self.host_growth.emit(ended)
        self._tell()
        return ended

    def bake(self) -> nn.Module:
        """The model with the fossilized seeds in it, and nothing else of ours. Where baking fails the grower goes on as before."""
        self._prober.discard()
        self._shadow.rest()
        model = self.slotted.bake()
        self.stop()
        return model

    def stop(self) -> None:
        """Nothing of ours is at work any more, in model or optimiser, but connected seeds, which learn no more."""
        self._prober.discard()
        self._shadow.rest()
        self._follower.stop()
        if self.slotted.follower is self._follower:
            self.slotted.recording = self.slotted.follower = None

    def _check_is_at_work(self) -> None:
        if not self.slotted.is_attached:
            raise GrowthError(
                "the slots have been taken out, by bake() or remove(), so nothing can grow any more; to grow further, call add_slots again "
                "and make a new Grower, with an optimiser that holds the parameters of the seeds that were kept"
            )
        if not self._follower.is_active:
            raise GrowthError(
                "this Grower is at work no more: stop() was called, or another Grower was made for the same slots; use that one"
            )

    def _check_has_stepped(self) -> None:
        may_skip = self.scaler is not None and self.scaler.is_enabled()  # at its first scale all steps of an epoch may overflow
        if (
            not self._has_stepped_in_epoch
            and not may_skip
            and any(backend.learner is not None for backend in self.lifecycles.backends.values())
        ):
            warnings.warn(
                "the optimiser that this Grower was given has not stepped in this epoch, so no seed has learned; make the Grower with the "
                "optimiser whose step() the training loop calls",
                RuntimeWarning,
                stacklevel=3,
            )

    def _warn_of_unknown_samples(self) -> None:
        """Once. Without them FLOPs are not counted, and the heuristic does not grow."""
        if self.history.samples is None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "nobody knows how many samples this epoch had, because no call of the model was seen (it may have been compiled after "
                "add_slots), so FLOPs are not counted and the heuristic will not grow; call slotted(x), or tell it: "
                "after_step(loss, samples=len(x))",
                RuntimeWarning,
                stacklevel=3,
            )

    def count_evaluation(self, samples: int) -> None:
        """Adds the FLOPs of a forward pass over so many samples, on every rank; `evaluate` may call it."""
        self.history.flops += samples * self._group.world_size * (self.slotted.discovery.host.flops + self.lifecycles.connected().flops)

    # Questions that cost evaluations

    def shapley(self, evaluate: Evaluate, slots: Sequence[str] | None = None) -> dict[str, Interval]:
        """How the gain of some living seeds together divides among them; `evaluate` is called 2^k times for k of them."""
        names = players(self.lifecycles, slots)
        with self._prober.paused():
            return self._measurement.shapley(evaluate, names)

    def search_alpha(self, slot: str, evaluate: Evaluate, *, alphas: Sequence[float] = (0.25, 0.5, 0.75, 1.0)) -> AlphaSearch:
        """Which of these alphas gives the lowest validation loss, for a `Retarget`. Nothing is changed; `evaluate` is called for each."""
        check_alphas(self.slotted, slot, alphas)
        with self._prober.paused():
            return search_alpha(self._measurement, slot, evaluate, alphas)

    # Deciding

    def state(self) -> GrowthState:
        """What a controller sees."""
        return self.host_growth.state(learning_rate=self._learning_rate())

    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _decide(self) -> Decision:
        decision = self._group.first(lambda: self.controller.decide(self.state()))
        for action in decision.actions:
            self.slotted.slot(action.slot)  # which names the slots there are, where this is none
        self.host_growth.carry_out(decision, by=self.controller.name)
        if decision.probe and not self.host_growth.is_over:
            self._prober.request()
        return decision

    # What happens around decisions

    def _go_back(self, reason: str) -> None:
        self._prober.discard()
        self._shadow.rest()
        self.host_growth.go_back(reason, self._recovery)
        try:
            self.host_growth.check_not_diverged(reason)
        except Diverged:
            self._tell()
            raise

    def _get_ready(self) -> None:
        """For the next forward pass."""
        self._prober.get_ready()
        self._shadow.prepare(self._in_shadow())
        self.slotted.samples = 0

    def _rest(self) -> None:
        """Nothing of ours is at work in the model but connected seeds, until the next training step."""
        self._prober.rest()
        self._shadow.rest()

    def _tell(self) -> None:
        self.host_growth.tell(self._on_event)

    def _averaged(self, chunks: list[float]) -> list[float]:
        """The training losses of all ranks, which go through as many batches each."""
        by_rank = self._group.gather_objects(chunks)
        return [fmean(values) for values in zip(*by_rank, strict=True)] if len({len(some) for some in by_rank}) == 1 else by_rank[0]

    def _agreed(self, value: Any) -> Any:
        """What rank 0 has found."""
        return self._group.first(lambda: value)

    def _step_flops(self) -> int:
        shadow = self._in_shadow() if self._has_stepped else []
        second = self._shadow.flops(shadow, [self.lifecycles.cost(backend.place.name) for backend in shadow])
        return 3 * (self.slotted.discovery.host.flops + self.lifecycles.connected().flops) + second

    def _in_shadow(self) -> list[ModuleBackend]:
        return in_shadow(list(self.lifecycles.backends.values()))

    # Resuming

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint into the folder, between two steps: host, seeds, both optimisers, loss scale, schedule, stages and ledger.

        The last three are kept. The position in the data and the random streams are the loop's.
        """
        step = self.epoch * STEPS_PER_EPOCH + self.history.steps
        CheckpointStore(folder, kind=KIND).save(step, self.state_dict(), note={"epoch": self.epoch})

    def load(self, folder: Path | str) -> None:
        """Go on from the latest checkpoint in the folder. Model, optimiser, schedule and controller are of the same kind as they were."""
        self.load_state_dict(CheckpointStore(folder, kind=KIND).load("latest").state)

    def state_dict(self) -> dict[str, Any]:
        """Everything, host, optimiser, schedule and loss scale included; between two steps."""
        return {
            "recovery": self._recovery.state_dict(),
            "controller": {"name": self.controller.name, "state": self.controller.state_dict()},
            "plot": self.host_growth.state_dict(),
            "has_begun": self._has_begun,
            "probe": self._prober.state_dict(),
            "measurement": self._measurement.state_dict(),
            "shadow": self._shadow.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["controller"]["name"]
        if saved != self.controller.name:
            raise GrowthError(
                f"the saved run was decided by {saved!r}, not by {self.controller.name!r}; resume it with the same controller"
            )
        self._prober.discard()
        self._shadow.rest()
        self._recovery.load_state_dict(state["recovery"])
        self.host_growth.load_state_dict(state["plot"])
        self.controller.load_state_dict(state["controller"]["state"])
        self._has_begun = state["has_begun"]
        self._has_stepped_in_epoch = self.history.steps > 0
        self._measurement.load_state_dict(state["measurement"])
        self._shadow.load_state_dict(state["shadow"])
        self._prober.load_state_dict(state["probe"])
        self._get_ready()
