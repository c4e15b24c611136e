"""The PPO update: several passes of gradient steps over one rollout.

The device is read twice per update: before the first gradient step, for the positions where episodes start, and after the last, for all
statistics. The device itself decides whether a step is skipped (loss or gradient not finite) and whether the update has stopped (KL too
large), and the optimiser obeys there. On a CPU, where reading is free, a stopped update also ends at once.

With several ranks, each has a part of every minibatch. Gradients and terms are summed over the ranks, so all of them take the same steps.

Shapes: J = heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.gradients import LossScales, NoLossScales
from esper.parallel import ALONE, Group
from esper.profiling import BACKWARD, FORWARD, OPTIMIZER
from esper.rl.batch import Batch, Indices, Minibatch, Rollout, minibatches, place, prepare, split
from esper.rl.config import PPOConfig
from esper.rl.loss import Coefficients, Counts, Terms, add_up, ppo_loss
from esper.rl.normalize import RewardNormalizer
from esper.rl.policy import Policy
from esper.torch_internals import BatchNormBase
from esper.vecenv import Obs

KL_SLACK = 1.5  # an update stops when its KL exceeds the target times this
_HALF_PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class InvalidUpdate(NamedTuple):
    """The losses and the gradient norm of a gradient step that was skipped because it was not finite."""

    policy_loss: float
    value_loss: float
    entropy: float  # sum over heads
    grad_norm: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The statistics of an update, read from the device at once. Means are over the gradient steps taken."""

    policy_loss: float
    value_loss: float
    entropy: list[float]  # per head
    kl: list[float]  # per head
    total_kl: float
    clip_fraction: float
    ratio_max: float
    grad_norm: float
    steps_taken: int
    skipped: int  # steps that were not finite
    skipped_in_a_row: int  # up to now, counted across updates
    first_skipped: InvalidUpdate | None
    overflows: int  # steps not taken because the loss scale of float16 was too large
    gradient_norms: dict[str, float]  # of the last minibatch before clipping, by layer and head
    explained_variance: float
    value_spread: float
    return_spread: float
    mattered: list[bool]  # per head: whether it mattered in any step of the rollout
    calibration: NDArray[Any]  # [bins, 4] of this rank, see `esper.rl.batch.calibration`
    hidden_state: float  # root mean square of the memory of this rank at its largest; nan without a memory
    inputs: dict[str, tuple[float, float]]  # floating-point observation of this rank -> size (root mean square) and spread


class Learner:
    """Trains a policy on rollouts. It owns the optimiser, the reward normaliser, the loss scale and the gradient buffer."""

    def __init__(
        self,
        policy: Policy,
        config: PPOConfig,
        *,
        num_envs: int,
        rng: np.random.Generator,
        on_compile_failure: Callable[[Exception], None],
        group: Group = ALONE,
        schedule: Callable[[float], float] | None = None,
    ) -> None:
        self.policy, self.config, self.rng, self.group = policy, config, rng, group
        self.schedule = schedule  # replaces the learning rate of the config; a function of the share of training that is left
        self.num_minibatches = config.minibatches_of(num_envs)
        self.device = policy.device
        self.reward_normalizer = RewardNormalizer(num_envs, gamma=config.gamma, device=self.device) if config.normalize_rewards else None
        self.weights = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.gradient = _flat_gradients(self.weights)  # every gradient is a view of this
        self.optimizer = torch.optim.Adam(self.weights, lr=config.learning_rate, eps=config.adam_eps, fused=True)
        none_skipped = torch.zeros((), dtype=torch.int64, device=self.device)
        self.loss_scale = LossScales.fresh(None, self.device) if config.precision == "float16" else NoLossScales(none_skipped)
        self.clip = torch.ones((), device=self.device)  # the factor by which the last gradient was clipped
        self.in_a_row = torch.zeros((), device=self.device)  # broken steps in a row up to now
        self.batch_norms = [module for module in policy.modules() if isinstance(module, BatchNormBase)]
        self.on_compile_failure = on_compile_failure
        self.is_compiled = config.compile
        self.encode: Callable[[Obs], Tensor] = torch.compile(policy.encode) if config.compile else policy.encode
        self.heads: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.compile(policy.heads) if config.compile else policy.heads
        names = policy.distribution.head_names
        unknown = set(config.entropy_weights) - set(names)
        if unknown:
            raise ValueError(f"entropy_weights has unknown heads {sorted(unknown)}; the heads are {list(names)}")
        self.entropy_weights = torch.tensor([config.entropy_weights.get(name, 1.0) for name in names], device=self.device)

    def update(self, rollout: Rollout, *, progress: float) -> Outcome:
        """Learn from a rollout. `progress`, the share of training that is done, drives the schedules."""
        batch = prepare(rollout, self.policy, self.config, self.reward_normalizer, self.group)
        # Batch norms keep their running statistics during the update, see `_update_batch_norms`.
        self.policy.train()
        for norm in self.batch_norms:
            norm.eval()
        try:
            outcome = self._learn(batch, progress=progress)
            if self.batch_norms:
                self._update_batch_norms(batch, rollout)
        finally:
            self.policy.eval()
        return outcome

    def _learn(self, batch: Batch, *, progress: float) -> Outcome:
        """Take the gradient steps of all epochs and minibatches."""
        config = self.config
        coefficients = self._coefficients(batch, progress)
        self._set_learning_rate(progress)
        log = _Log(config.num_epochs * self.num_minibatches, len(self.entropy_weights), self.device)
        stopped = torch.zeros((), dtype=torch.bool, device=self.device)
        for _ in range(config.num_epochs):
            length, parts = config.sequence_length_of(len(batch.starts)), self.num_minibatches
            dealt = minibatches(batch.starts, length=length, parts=parts, rng=self.rng, valid=batch.valid)
            placed = place([split(fragments, config.micro_batches) for fragments in dealt], self.device)
            for pieces, counts in zip(placed, batch.counts(placed, self.group), strict=True):
                terms = self._backward(batch, pieces, counts, coefficients)
                with OPTIMIZER:
                    stopped = self._step(terms, stopped, log)
                if self.device.type == "cpu" and bool(stopped):
                    return self._read(batch, log)
        return self._read(batch, log)

    def _coefficients(self, batch: Batch, progress: float) -> Coefficients:
        """Return the coefficients of the loss. The weight of a head's entropy rises with the distance of that entropy below the floor."""
        config = self.config
        end = config.entropy_coef if config.entropy_coef_end is None else config.entropy_coef_end
        base = config.entropy_coef + (end - config.entropy_coef) * progress
        floor = config.entropy_floor * max(0.0, 1.0 - progress / config.entropy_floor_until) if config.entropy_floor_until else 0.0
        shortfall = (floor - batch.entropy).clamp_min(0.0)
        return Coefficients(
            clip=config.clip_coef,
            value=config.value_coef,
            value_clip=config.value_clip_coef,
            entropy=self.entropy_weights * (base + config.entropy_floor_coef * shortfall),
            joint_ratio=config.ratio == "joint",
        )

    def _set_learning_rate(self, progress: float) -> None:
        rate = learning_rate_at(self.config, progress) if self.schedule is None else float(self.schedule(1.0 - progress))
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"the learning rate must be finite and at least 0; the schedule gave {rate} at {progress:.1%} of training")
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _backward(self, batch: Batch, pieces: Sequence[Indices], counts: Counts, coef: Coefficients) -> Terms:
        """Fill the gradient buffer from one minibatch, summed over all ranks. Return the terms of the loss."""
        try:
            own = self._own_backward(batch, pieces, counts, coef)
        except Exception as error:
            if not self.is_compiled:
                raise
            # Try again without the compiler. An error with another cause occurs again in the plain networks, so nothing is hidden.
            self.is_compiled, self.encode, self.heads = False, self.policy.encode, self.policy.heads
            self.on_compile_failure(error)
            own = self._own_backward(batch, pieces, counts, coef)
        self.group.sum_(self.gradient)
        self.loss_scale.divide_(self.gradient)
        return add_up([Terms(*terms) for terms in self.group.gather(own)])

    def _own_backward(self, batch: Batch, pieces: Sequence[Indices], counts: Counts, coef: Coefficients) -> Terms:
        """Fill the gradient buffer from this rank's part of a minibatch, one micro-batch after another. Return its terms."""
        self.gradient.zero_()
        return add_up([self._piece(batch.gather(piece), counts, coef) for piece in pieces])

    def _piece(self, minibatch: Minibatch, counts: Counts, coef: Coefficients) -> Terms:
        """Add the gradient of one micro-batch to the buffer. Return its terms."""
        policy = self.policy
        half = _HALF_PRECISIONS.get(self.config.precision)
        with FORWARD:
            with torch.autocast(self.device.type, dtype=half, enabled=half is not None):
                inputs = self.encode(minibatch.obs)
                parameters, predicted = self.heads(policy.core.sequence(inputs, minibatch.states, minibatch.sizes))
            new = policy.distribution.evaluate(parameters, minibatch.choice, minibatch.masks)
            terms = ppo_loss(new, predicted.to(new.log_prob.dtype), minibatch.samples, counts, coef)
        with BACKWARD, np.errstate(over="ignore", invalid="ignore"):  # `_step` handles gradients that are not finite
            self.loss_scale.scaled(terms.loss).backward()  # type: ignore[no-untyped-call]
        return Terms(*(term.detach() for term in terms))

    def _step(self, terms: Terms, stopped: Tensor, log: _Log) -> Tensor:
        """Take one step of the optimiser, or skip it, by tensors that stay on the device. Return whether the update has stopped."""
        norm = torch.linalg.vector_norm(self.gradient)
        if self.config.target_kl is not None:
            stopped = stopped | (terms.total_kl > KL_SLACK * self.config.target_kl)
        # A step is skipped after a stop, or if it is not finite: then either the loss scale overflowed, which is normal in float16, or the
        # step is broken.
        skip = ~torch.isfinite(terms.loss + norm) | stopped
        overflowed = self.loss_scale.overflowed(terms.loss, norm) & ~stopped
        broken = skip & ~stopped & ~overflowed
        log.write(terms, norm, broken=broken, taken=~skip, overflowed=overflowed)
        self.loss_scale.update_(~skip, overflowed)
        # Count broken steps in a row: a good step sets the count to 0, a stopped or overflowed one leaves it as it is.
        self.in_a_row = torch.where(stopped | overflowed, self.in_a_row, (self.in_a_row + 1) * broken)
        self.clip = (self.config.max_grad_norm / (norm + 1e-6)).clamp_max(1.0)
        self.gradient.mul_(self.clip)
        # The fused optimiser skips its step on the device where `found_inf` is 1; torch's GradScaler does it the same way.
        self.optimizer.grad_scale, self.optimizer.found_inf = None, skip.float()  # type: ignore[attr-defined]
        self.optimizer.step()
        return stopped

    @torch.no_grad()
    def _read(self, batch: Batch, log: _Log) -> Outcome:
        """Read the statistics of an update from the device in one transfer."""
        norms = {part: norm / self.clip for part, norm in gradient_norms(self.policy).items()}  # undo the clipping
        # Join all numbers into one tensor: log, calibration, one flag per head, scalars, and norms. Then cut the list apart again.
        seen = [number for pair in batch.inputs.values() for number in pair]
        scalars = (batch.explained_variance, batch.value_spread, batch.return_spread, self.in_a_row, batch.hidden_state, *seen)
        parts = [log.rows.flatten(), batch.calibration.flatten(), batch.mattered]
        parts.append(torch.stack([*(s.to(torch.float32) for s in scalars), *norms.values()]))
        numbers = torch.cat([part.to(torch.float32) for part in parts]).tolist()
        size, bins, heads = log.rows.numel(), batch.calibration.numel(), len(self.entropy_weights)
        rows = np.array(numbers[:size]).reshape(log.rows.shape)
        calibration = np.array(numbers[size : size + bins]).reshape(batch.calibration.shape)
        rest = numbers[size + bins :]
        variance, value_spread, return_spread, in_a_row, hidden_state = rest[heads : heads + 5]
        sizes_and_spreads, norm_values = rest[heads + 5 : heads + len(scalars)], rest[heads + len(scalars) :]
        return log.summarise(
            rows,
            skipped_in_a_row=int(in_a_row),
            gradient_norms=dict(zip(norms, norm_values, strict=True)),
            explained_variance=variance,
            value_spread=value_spread,
            return_spread=return_spread,
            mattered=[bool(flag) for flag in rest[:heads]],
            calibration=calibration,
            hidden_state=hidden_state,
            inputs=dict(zip(batch.inputs, zip(sizes_and_spreads[::2], sizes_and_spreads[1::2], strict=True), strict=True)),
        )

    @torch.no_grad()
    def _update_batch_norms(self, batch: Batch, rollout: Rollout) -> None:
        """Add a rollout to the running statistics of batch norms, once, after the gradient steps.

        So acting and learning use the same statistics, and the probability ratio is 1 before the first gradient step. With the statistics
        of minibatches, the policy would be another one in each.
        """
        for norm in self.batch_norms:
            norm.train()
        parts = self.config.num_minibatches
        by_name = {name: value.chunk(parts) for name, value in batch.obs.items()}
        for index in range(len(next(iter(by_name.values())))):
            self.policy.encode({name: chunks[index] for name, chunks in by_name.items()})
        for features in rollout.features.flatten(0, 1).chunk(parts):
            self.policy.decide(features)
            self.policy.critic_output(features)
        statistics = [value for norm in self.batch_norms for value in (norm.running_mean, norm.running_var) if value is not None]
        for value in statistics:
            self.group.sum_(value).div_(self.group.world_size)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def forget_episodes(self) -> None:
        """Forget the returns of unfinished episodes, because all environments begin new ones."""
        if self.reward_normalizer is not None:
            self.reward_normalizer.forget_episodes()

    def state_dict(self) -> dict[str, Any]:
        rewards = None if self.reward_normalizer is None else self.reward_normalizer.state_dict()
        return {
            "optimizer": self.optimizer.state_dict(),
            "reward_normalizer": rewards,
            "in_a_row": self.in_a_row,
            "loss_scale": self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self.reward_normalizer is not None:
            self.reward_normalizer.load_state_dict(state["reward_normalizer"])
        self.in_a_row.copy_(state["in_a_row"])
        self.loss_scale.load_state_dict(state.get("loss_scale"))


def learning_rate_at(config: PPOConfig, progress: float) -> float:
    """Return the learning rate of the config at `progress`, the share of training that is done."""
    warmup, start, end = config.learning_rate_warmup, config.learning_rate, config.learning_rate_end
    if progress < warmup:
        return start * progress / warmup
    done = (progress - warmup) / (1.0 - warmup) if warmup < 1.0 else 1.0
    match config.learning_rate_schedule:
        case "linear":
            left = 1.0 - done
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            return start
    return end + (start - end) * left


def _flat_gradients(weights: list[nn.Parameter]) -> Tensor:
    """Make all gradients views of one buffer, so that zeroing, norm and clipping are one operation each. Return the buffer."""
    flat = torch.zeros(sum(weight.numel() for weight in weights), device=weights[0].device, dtype=weights[0].dtype)
    offset = 0
    for weight in weights:
        weight.grad = flat[offset : offset + weight.numel()].view_as(weight)
        offset += weight.numel()
    return flat


def gradient_norms(policy: Policy) -> dict[str, Tensor]:
    """Return the L2 norm of the gradients of each layer and, where the actor ends in a linear layer, of each head's rows of it."""
    norms: dict[str, Tensor] = {}
    for name, module in policy.named_modules():
        gradients = [weight.grad for weight in module.parameters(recurse=False) if weight.grad is not None]
        if gradients and name:
            norms[name] = torch.nn.utils.get_total_norm(gradients)
    last = policy.last_actor_layer
    if last is not None:
        assert last.weight.grad is not None
        for head, rows in policy.distribution.output_slices.items():
            norms[f"head {head}"] = torch.linalg.vector_norm(last.weight.grad[rows])
    return norms


class _Log:
    """A table on the device with one row per gradient step: flags, losses and other terms, and the entropy and KL of each head."""

    COLUMNS = ("broken", "taken", "overflowed", "policy_loss", "value_loss", "total_kl", "clip_fraction", "ratio_max", "grad_norm")

    def __init__(self, capacity: int, heads: int, device: torch.device) -> None:
        self.heads = heads
        self.rows = torch.zeros(capacity, len(self.COLUMNS) + 2 * heads, device=device)
        self.next = 0

    def write(self, terms: Terms, norm: Tensor, *, broken: Tensor, taken: Tensor, overflowed: Tensor) -> None:
        singles = torch.stack((terms.policy_loss, terms.value_loss, terms.total_kl, terms.clip_fraction, terms.ratio_max, norm))
        flags = torch.stack((broken, taken, overflowed)).to(singles.dtype)
        torch.cat((flags, singles, terms.entropy, terms.kl), out=self.rows[self.next])
        self.next += 1

    def summarise(self, rows: NDArray[Any], **rest: Any) -> Outcome:
        """Return the outcome of an update, given the table as read from the device."""
        column = dict(zip(self.COLUMNS, rows.T[: len(self.COLUMNS)], strict=True))
        entropy, kl = np.split(rows[:, len(self.COLUMNS) :], 2, axis=1)  # [steps, J] each
        broken, taken = column["broken"] > 0, column["taken"] > 0

        def mean(values: NDArray[Any]) -> Any:
            return values[taken].mean(0).tolist() if taken.any() else np.full(values.shape[1:], np.nan).tolist()

        first = int(np.argmax(broken))
        losses = ("policy_loss", "value_loss", "grad_norm")
        return Outcome(
            **{name: mean(column[name]) for name in (*losses, "total_kl", "clip_fraction")},
            entropy=mean(entropy),
            kl=mean(kl),
            ratio_max=float(column["ratio_max"][taken].max()) if taken.any() else math.nan,
            steps_taken=int(taken.sum()),
            skipped=int(broken.sum()),
            overflows=int(column["overflowed"].sum()),
            first_skipped=InvalidUpdate(**{name: float(column[name][first]) for name in losses}, entropy=float(entropy[first].sum()))
            if broken.any()
            else None,
            **rest,
        )
