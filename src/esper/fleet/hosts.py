"""The hosts of a fleet as Python objects: slots, snapshots and bookkeeping of each host. Their tensors are rows of stacked tensors.

- `RowBackend`: one slot of one host, as the lifecycle of the slot sees it. Its seed is a row of a `SeedStorage`.
- `RowSnapshots`: copies of all rows on the device. Taking a snapshot of some hosts, or going back to it, copies their rows.
- `RowRecovery`: the snapshots of one host, with the part of its state that is not tensors.
- `RowBestStates`: the states of one host that may turn out to be its best one, likewise.
- `PendingCopies`: the rows to copy, collected from all hosts and copied together.
- `Host`: setting, growth, recovery and costs of one host.

Shapes: N = hosts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.devices import upload
from esper.fleet.config import HostConfig
from esper.gradients import GradientStats
from esper.growth.host.layout import Place
from esper.growth.lifecycle.backend import SeedPlan, SlotBackend, SlotRecord
from esper.growth.lifecycle.decisions import carry_out
from esper.growth.lifecycle.ledger import Ledger
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.lifecycle.snapshots import BestStates, Snapshot, SnapshotHistory
from esper.growth.lifecycle.stages import Decision, Stage
from esper.growth.measure.contribution import Losses, contribution_of
from esper.growth.measure.promises import Key, Promises
from esper.growth.seeds.seed import WidePlan
from esper.growth.seeds.width import IN_SHADOW, kept_units, next_order, plan_in, why_not_removed


class SlotRows(Protocol):
    """The part of a `SeedStorage` that is used here. Its module imports this one."""

    def plant(self, row: int, plan: SeedPlan, wide: tuple[WidePlan, ...]) -> None: ...


OpenSlot = Callable[[Place], SlotRows]  # returns the storage of the slot at a place, which it makes if there is none


class RowBackend(SlotBackend):
    """One slot of one host of a fleet. The tensors of its seed are row `row` of a storage; the rest of its state is kept here.

    `beside` are all slots of the host, which the new one joins: the units that a width seed finds depend on the width seeds that are kept.
    `open_slot` returns the storage of a slot.
    """

    wide: tuple[WidePlan, ...] = ()

    def __init__(self, place: Place, open_slot: OpenSlot, row: int, beside: dict[str, RowBackend]) -> None:
        super().__init__(place)
        self.row, self._beside, self._open_slot = row, beside, open_slot
        beside[place.name] = self
        self.order = 0  # of a width seed: its units come behind those of the seeds with a smaller number
        self.norms: list[float] = []  # gradient norms of the seed since the last decision; the fleet writes them
        self.skipped = 0  # steps among these that the seed did not take only because its host did not
        self._storage = open_slot(place)
        self._has_seed = False
        self._is_connected = False
        self._alpha = 0.0

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    @property
    def alpha(self) -> float:
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._alpha = value

    def plant(self, plan: SeedPlan) -> None:
        wide = self.plan(plan.blueprint)
        self._storage.plant(self.row, plan, wide)
        self.wide, self.order = wide, 0
        if wide:
            self.order = self._next_order() + (0 if plan.is_connected else IN_SHADOW)
        self._has_seed, self._is_connected, self._alpha = True, plan.is_connected, plan.alpha
        self.norms, self.skipped = [], 0

    def uproot(self) -> None:
        self._has_seed, self._is_connected, self._alpha = False, False, 0.0
        self.wide, self.order = (), 0
        self.norms, self.skipped = [], 0

    def connect(self) -> None:
        self._is_connected = True
        if self.order >= IN_SHADOW:
            self.order = self._next_order()

    def keep(self) -> None:
        pass  # only the stage of a seed changes when it is kept

    def _next_order(self) -> int:
        return next_order(backend.order for backend in self._beside.values())

    def _kept_units(self) -> dict[str, tuple[int, int]]:
        """Return the inputs and outputs that kept width seeds have added to modules of the host."""
        connected = [backend for backend in self._beside.values() if backend.wide and backend.is_connected]
        connected.sort(key=lambda backend: backend.order)
        return kept_units((backend.wide, backend.stage is Stage.FOSSILIZED) for backend in connected)

    def place_now(self) -> Place:
        kept = self._kept_units()
        return replace(self.place, chain=tuple(units.beside(kept) for units in self.place.chain)) if kept else self.place

    def plan(self, blueprint: str) -> tuple[WidePlan, ...]:
        """Return the parts that a width seed of a blueprint would have here now; () for a seed of another kind."""
        return plan_in(self.place_now(), blueprint, self._kept_units())

    def open_again(self) -> RowBackend:
        return RowBackend(self.place.again(), self._open_slot, self.row, self._beside)

    def close(self) -> None:
        del self._beside[self.place.name]

    def why_not_removed(self) -> str:
        return why_not_removed(self.place.name, {name: (backend.order, backend.wide) for name, backend in self._beside.items()})

    def gradients(self) -> GradientStats | None:
        """Return the gradient statistics since the last call and forget them; None without a seed."""
        if not self._has_seed:
            return None
        norms, skipped = self.norms, self.skipped
        self.norms, self.skipped = [], 0
        return GradientStats.of(norms, skipped=skipped, unit=self.loss_unit)

    def seed_state(self) -> dict[str, Any]:
        return {
            "has_seed": self._has_seed,
            "is_connected": self._is_connected,
            "alpha": self._alpha,
            "norms": list(self.norms),
            "skipped": self.skipped,
            "wide": msgspec.to_builtins(self.wide),
            "order": self.order,
        }

    def state_if_kept(self) -> dict[str, Any]:
        if self._is_connected:
            return self.seed_state() | {"norms": [], "skipped": 0}
        return {"has_seed": False, "is_connected": False, "alpha": 0.0, "norms": [], "skipped": 0, "wide": [], "order": 0}

    def load_seed_state(self, state: dict[str, Any], record: SlotRecord) -> None:
        self._has_seed, self._is_connected, self._alpha = state["has_seed"], state["is_connected"], state["alpha"]
        self.norms = list(state["norms"])
        self.skipped = state["skipped"]
        self.wide, self.order = msgspec.convert(state["wide"], tuple[WidePlan, ...]), state["order"]


class RowSnapshots:
    """Numbered copies of the tensors that `live()` returns, [N, ...] each, allocated when first needed.

    The tensors may have become wider since a copy was made. A row then fits into the first columns.
    """

    def __init__(self, live: Callable[[], Mapping[str, Tensor]]) -> None:
        self.live = live
        self._copies: dict[int, dict[str, Tensor]] = {}

    def take(self, places: Mapping[int, int]) -> None:
        """Copy rows into snapshots: `places` maps a row to the number of the copy."""
        for number, rows in _by_copy(places):
            live, copy = self.live(), self._copies.get(number, {})
            self._copies[number] = {name: fitted(copy.get(name), tensor) for name, tensor in live.items()}
            self._move(live, self._copies[number], rows)

    def restore(self, places: Mapping[int, int]) -> None:
        """Copy rows back from snapshots: `places` maps a row to the number of the copy."""
        for number, rows in _by_copy(places):
            live, copy = self.live(), self._copies[number]
            self._move({name: fitted(copy.get(name), tensor) for name, tensor in live.items()}, live, rows)

    @torch.no_grad()
    def copy(self, rows: Mapping[int, int]) -> None:
        """Overwrite rows in all snapshots. `rows` maps a row to the one that is copied into it."""
        for tensors in self._copies.values():
            copy_rows(tensors, rows)

    @staticmethod
    @torch.no_grad()
    def _move(source: Mapping[str, Tensor], target: Mapping[str, Tensor], rows: list[int]) -> None:
        index = upload(rows, next(iter(source.values())).device)
        for name, tensor in source.items():
            target[name].index_copy_(0, index, tensor.index_select(0, index))

    def state_dict(self) -> dict[str, Any]:
        return {str(number): dict(copy) for number, copy in self._copies.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._copies = {}
        for number, copy in state.items():
            own = {name: tensor.to(live) for name, live in self.live().items() if (tensor := copy.get(name)) is not None}
            self._copies[int(number)] = {name: fitted(own.get(name), live).clone() for name, live in self.live().items()}


def copy_rows(tensors: Mapping[str, Tensor], rows: Mapping[int, int]) -> None:
    """Overwrite rows of all tensors [N, ...]. `rows` maps a row to the one that is copied into it."""
    device = next(iter(tensors.values())).device
    to, source = upload(list(rows), device), upload(list(rows.values()), device)
    for tensor in tensors.values():
        tensor.index_copy_(0, to, tensor.index_select(0, source))


def fitted(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Return the tensor [N, ...] with columns of zeros up to the width of another one; zeros if there is none."""
    if tensor is None:
        return torch.zeros_like(like)
    return tensor if tensor.shape == like.shape else F.pad(tensor, (0, like.shape[1] - tensor.shape[1]))


def _by_copy(places: Mapping[int, int]) -> Iterable[tuple[int, list[int]]]:
    """Yield each copy number with the rows that go into it."""
    for number in sorted(set(places.values())):
        yield number, [row for row, place in places.items() if place == number]


class RowRecovery(SnapshotHistory):
    """The snapshots of one host: which copy each uses, and its state that is not tensors.

    Copies on the device are only requested here, in `pending`; `PendingCopies.carry_out` makes them.
    """

    def __init__(self, row: int, lifecycles: Lifecycles[RowBackend], pending: PendingCopies) -> None:
        super().__init__(lifecycles.config.governor.keep)
        self.row, self.lifecycles, self.pending = row, lifecycles, pending
        self.is_finite = True  # whether all trained weights are finite; the fleet writes it
        self.clock = 0  # decisions counted by the learning-rate schedule; a rollback sets it back

    @property
    def has_begun(self) -> bool:
        """Whether there is a snapshot to go back to. A host has one from its first reset on."""
        return len(self) > 0

    def take_snapshot(self) -> None:
        """Take a snapshot, unless weights are not finite. Losses can look healthy even then, but a rollback to such weights is no use."""
        if self.is_finite:
            governor = self.lifecycles.governor.loss_state()
            state = {"slots": self.lifecycles.slots_state(), "governor": governor, "clock": self.clock}
            self.take(state, epoch=self.lifecycles.epoch)

    def _store(self, state: dict[str, Any], over: dict[str, Any] | None) -> dict[str, Any]:
        """Request a copy of the host's rows, in place of the copy of the replaced snapshot `over`, or else in a free one."""
        taken = {entry.state["copy"] for entry in self._entries}
        copy = over["copy"] if over else next(number for number in range(self.keep) if number not in taken)
        self.pending.snapshots[self.row] = copy
        return {**state, "copy": copy}

    def go_back(self, *, is_repeated: bool) -> int:
        """Return to the newest snapshot, or to the one before it where the rollback `is_repeated`. Return the epoch of the snapshot."""
        snapshot = self.to_restore(is_repeated=is_repeated)
        self.lifecycles.load_slots(snapshot.state["slots"])
        self.lifecycles.governor.load_loss_state(snapshot.state["governor"])
        self.clock = snapshot.state["clock"]
        self.pending.restores[self.row] = snapshot.state["copy"]
        self.drop_after(snapshot)
        return snapshot.epoch

    def state_dict(self) -> dict[str, Any]:
        entries = [{"epoch": entry.epoch, **entry.state} for entry in self._entries]
        return {"entries": entries, "clock": self.clock, "is_finite": self.is_finite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entries = [
            Snapshot(entry["epoch"], {name: value for name, value in entry.items() if name != "epoch"}) for entry in state["entries"]
        ]
        self.clock, self.is_finite = state["clock"], state["is_finite"]


class RowBestStates(BestStates):
    """The states of one host that may turn out to be its best one. Copies of its rows are requested in `pending`."""

    def __init__(self, row: int, ledger: Ledger, pending: PendingCopies) -> None:
        super().__init__(ledger)
        self.row, self.pending = row, pending

    def note(self, lifecycles: Lifecycles[RowBackend], val_loss: float) -> None:
        """Hold the present state if it may turn out to be the best one. Its weights must be finite."""
        new = self.candidate(lifecycles, val_loss, {})
        if new is not None:
            self.take(replace(new, state={"slots": lifecycles.slots_if_kept()}))

    def _store(self, state: dict[str, Any], over: dict[str, Any] | None) -> dict[str, Any]:
        taken = {one.state["copy"] for one in self._states}
        copy = over["copy"] if over else next(number for number in count() if number not in taken)
        self.pending.snapshots[self.row] = copy
        return {**state, "copy": copy}


class PendingCopies:
    """Snapshots and restores requested by the hosts, each row -> number of the copy, made together by `carry_out`."""

    def __init__(self) -> None:
        self.snapshots: dict[int, int] = {}
        self.restores: dict[int, int] = {}

    def carry_out(self, snapshots: RowSnapshots) -> None:
        """Make all requested copies, and forget the requests."""
        snapshots.restore(self.restores)
        snapshots.take(self.snapshots)
        self.restores.clear()
        self.snapshots.clear()


@dataclass
class Host:
    """One host of a fleet without its tensors."""

    setting: HostConfig
    lifecycles: Lifecycles[RowBackend]
    recovery: RowRecovery
    best_states: RowBestStates | None  # None: the result is the last state
    is_given_up: bool = False  # because the governor rolled it back too many times in a row
    wants_probe: bool = False  # whether candidates are probed before the next decision
    not_probed: frozenset[Key] = frozenset()  # those that are left out of this probe
    validation_flops: int = 0  # FLOPs of all measurements; `history.flops` includes them
    seed_flops: dict[int, int] = field(default_factory=dict)  # number of a seed -> FLOPs of its training so far

    @property
    def is_over(self) -> bool:
        """Whether it does not train: never reset, given up, at its horizon, or at a plateau."""
        has_ended = self.is_given_up or not self.recovery.has_begun or self.lifecycles.epoch >= self.setting.horizon
        return has_ended or self.lifecycles.is_stuck()

    @property
    def spent_flops(self) -> int:
        """FLOPs of training spent on seeds that were pruned or rolled back."""
        gone = {seed.number for seed in self.lifecycles.ledger.seeds if not seed.is_present}
        return sum(flops for number, flops in self.seed_flops.items() if number in gone)

    def rate(self, schedule: str) -> float:
        """Return the learning rate of the next steps."""
        if schedule == "cosine":
            return self.setting.learning_rate * (1 + math.cos(math.pi * self.recovery.clock / self.setting.horizon)) / 2
        return self.setting.learning_rate

    def decide(self, decision: Decision, *, by: str) -> None:
        """Carry out a decision, as far as the gates allow."""
        carry_out(self.lifecycles, decision, by=by)
        self.wants_probe = decision.probe and not self.lifecycles.is_over
        self.not_probed = decision.not_probed

    # Recording

    def note_steps(self, steps: int, *, samples: int, probe_flops: int) -> None:
        """Record training steps: `samples` is the number of samples in all steps, `probe_flops` the cost of probing in them."""
        lifecycles = self.lifecycles
        lifecycles.history.note_steps(steps, samples=samples, flops=samples * self._step_flops() + probe_flops)
        self.recovery.clock += 1
        for name, backend in lifecycles.occupied():
            assert backend.record.number is not None
            flops = 3 * samples * lifecycles.cost(name).flops  # forward and backward pass
            self.seed_flops[backend.record.number] = self.seed_flops.get(backend.record.number, 0) + flops

    def _step_flops(self) -> int:
        """Return the FLOPs of one training step per sample. A backward pass costs twice a forward pass."""
        lifecycles = self.lifecycles
        flops = 3 * (lifecycles.host.flops + lifecycles.connected().flops)
        in_shadow = [(name, backend) for name, backend in lifecycles.slots.items() if backend.stage is Stage.TRAINING]
        if in_shadow:
            # The second pass: forward through the whole host, backward as far as the first slot in the shadow, and the seeds themselves.
            behind = in_shadow[0][1].place.flops_behind
            flops += lifecycles.host.flops + 2 * behind + 3 * sum(lifecycles.cost(name).flops for name, _ in in_shadow)
        return flops

    def note_validation(self, *, samples: int, passes: int) -> None:
        """Record `passes` forward passes over `samples` validation samples."""
        lifecycles = self.lifecycles
        flops = passes * samples * (lifecycles.host.flops + lifecycles.connected().flops)
        self.lifecycles.history.flops += flops
        self.validation_flops += flops

    def end_epoch(self, chunks: list[float], validation: Losses, without: Mapping[str, Losses], promises: Promises | None) -> None:
        """End an epoch: record the measurements, advance the lifecycles, and roll back where the governor sees a disaster.

        `chunks` are mean training losses, `validation` the losses with all connected seeds, and `without` maps a slot with a seed on trial
        to the losses without that seed.
        """
        lifecycles = self.lifecycles
        measured = {}
        if validation.are_finite:
            confidences = lifecycles.on_trial()
            measured = {
                slot: contribution_of(losses, validation, lifecycles.epoch + 1, confidence=confidences[slot])
                for slot, losses in without.items()
            }
        verdict = lifecycles.verdict(chunks, validation.mean)
        lifecycles.end_epoch(chunks, validation.mean, measured, promises)
        self.wants_probe = False
        if verdict.is_disaster:
            lifecycles.go_back(verdict.reason, self.recovery)
            self.is_given_up = lifecycles.governor.rollbacks_in_a_row > lifecycles.config.governor.max_rollbacks
        else:
            lifecycles.settle(verdict, chunks, self.recovery)
            if self.best_states is not None and self.recovery.is_finite:
                self.best_states.note(lifecycles, validation.mean)

    def restore_best(self, last_loss: float) -> None:
        """Go back to the best state, unless the present one, with a validation loss of `last_loss`, is at least as good."""
        best = None if self.best_states is None else self.best_states.best()
        if self.best_states is None or best is None or last_loss <= best.val_loss:
            return
        self.lifecycles.load_slots(best.state["slots"])
        self.best_states.pending.restores[self.best_states.row] = best.state["copy"]
        why = self.best_states.why_left_out(best)
        self.lifecycles.note_restored(best.epoch, why, val_loss=best.val_loss, last_val_loss=last_loss)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        return {
            "setting": msgspec.to_builtins(self.setting),
            "lifecycles": self.lifecycles.state_dict(),
            "slots": self.lifecycles.slots_state(),
            "governor": self.lifecycles.governor.state_dict(),
            "recovery": self.recovery.state_dict(),
            "best_states": [] if self.best_states is None else self.best_states.state_dict(),
            "is_given_up": self.is_given_up,
            "wants_probe": self.wants_probe,
            "not_probed": sorted(map(list, self.not_probed)),
            "validation_flops": self.validation_flops,
            "seed_flops": [[number, flops] for number, flops in self.seed_flops.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lifecycles.load_state_dict(state["lifecycles"])
        self.lifecycles.load_slots(state["slots"])
        self.lifecycles.governor.load_state_dict(state["governor"])
        self.recovery.load_state_dict(state["recovery"])
        if self.best_states is not None:
            self.best_states.load_state_dict(state["best_states"])
        self.is_given_up, self.wants_probe = state["is_given_up"], state["wants_probe"]
        self.not_probed = frozenset((slot, blueprint) for slot, blueprint in state["not_probed"])
        self.validation_flops = state["validation_flops"]
        self.seed_flops = {number: flops for number, flops in state["seed_flops"]}
