"""A fleet: N hosts of one architecture that train as one tensor program, each with its own weights, data, seeds and life.

    fleet = Fleet(task, make_host, hosts=32, growth=GrowthConfig(), config=FleetConfig())
    fleet.reset({row: HostSetting(seed=row) for row in range(32)})
    rows = fleet.training()
    while rows:
        fleet.decide({row: controllers[row].decide(fleet.state(row)) for row in rows})
        rows = fleet.advance()                         # training, validation, contributions; the device is read once
    fleet.finish(range(32))
    losses = fleet.losses(task.test)                   # of the hosts as they are now

Lives, gates, governor and ledger are those of `esper.growth`: every host has a `HostGrowth`. Tensors have the host first. The hosts that
`advance` gives include those whose horizon has just ended: they have a last decision, what to keep. From then on they are frozen and cost
nothing until they are reset. Where the growth config has a `patience`, a host ends when its validation loss has come to a plateau
and no seed is on its way after the decision.

Shapes: N = hosts, A = those that train, T = steps until the next decision, V = validation batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from esper.fleet.config import FleetConfig, FleetError, HostSetting, check_state
from esper.fleet.data import FleetData, TaskTensors, placed_inputs, rounded_inputs
from esper.fleet.device import Reading, Repeater, on_gpu, upload
from esper.fleet.hosts import Host, PendingCopies, RowBackend, RowRecovery, RowSnapshots
from esper.fleet.measure import Samples, are_finite, contributions, losses_of, losses_without, mean_losses, probes_of
from esper.fleet.memory import Memory, check_fits, explained, free_bytes, seed_bytes, state_bytes, step_bytes
from esper.fleet.optimizers import SGD, AdamW
from esper.fleet.seed_groups import (
    AllLifecycles,
    MakeRowOptimizer,
    SeedKinds,
    SeedStorage,
    seed_batches_of,
    seed_kinds_for,
    stacked_seeds_of,
)
from esper.fleet.stacked.lowering import recomputed
from esper.fleet.stacked_model import HostStorage, StackedModel
from esper.fleet.train_segment import Plan, TrainSegment
from esper.growth.config import GrowthConfig
from esper.growth.events import Probed
from esper.growth.host.slotted import add_slots
from esper.growth.lifecycle.history import chunk_means
from esper.growth.lifecycle.host_growth import HostGrowth
from esper.growth.lifecycle.stages import Decision, GrowthState, LossScale, Stage
from esper.growth.measure.contribution import Losses
from esper.growth.measure.probe import Promises
from esper.runs import Event
from esper.tasks import Split, Task

# A pass without gradients keeps nothing: on a GPU it takes so many times the samples of a training step. The caches of a CPU are small.
_SAMPLES_AT_ONCE = 4
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # of activations, where weights are in float32


class Fleet:
    """`make_host(seed)` gives a fresh host on the CPU; all of them are of one architecture.

    `on_event` hears what happens to every host: stages, measurements, refusals and rollbacks, each with the host's row as its `env`. What
    probes found is left out: it would be most of the file.
    """

    def __init__(
        self,
        task: Task,
        make_host: Callable[[int], nn.Module],
        *,
        hosts: int,
        growth: GrowthConfig | None = None,
        config: FleetConfig | None = None,
        device: torch.device | str = "cpu",
        tensors: TaskTensors | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        if hosts < 1:
            raise FleetError(f"a fleet has at least one host; got {hosts}")
        self.task, self.make_host, self.hosts, self.on_event = task, make_host, hosts, on_event
        self.growth, self.config = growth or GrowthConfig(), config or FleetConfig()
        self.device = torch.empty(0, device=device).device
        self.dtype = torch.float64 if self.config.precision == "float64" else torch.float32
        self._precision = _HALVES.get(self.config.precision)
        self._has_scales = self.config.precision == "float16"
        self._part_size = self.config.batch_size // self.config.accumulate
        self._repeat = Repeater(self.device, records=self.config.graphs)
        tensors = tensors or TaskTensors.of(task, device=self.device, dtype=self.dtype)
        template = make_host(0).to(self.device, self.dtype)
        slotted = add_slots(template, tensors.inputs[:2], slots=self.growth.slots)
        self.discovery, self.places = slotted.discovery, {name: slotted.place(name) for name in slotted.slots}
        slotted.remove()
        make, seed_kind = _optimizer(self.config), seed_kinds_for(self.places, self.growth)
        self._room = free_bytes(self.device)
        with self._here():
            self._memory = self._least_memory(template, seed_kind, make, tensors)
        check_fits(hosts, self._memory.least, room=self._room, device=self.device)
        self.data = FleetData(tensors, hosts=hosts, precision=self._precision)
        self.host = HostStorage(
            template, list(self.places), hosts=hosts, make=make, device=self.device, dtype=self.dtype, scales=self._has_scales
        )
        self.banks = {name: SeedStorage(self.places[name], some, hosts=hosts, make=make) for name, some in seed_kind.items()}
        self._snapshots = RowSnapshots(self.tensors(), self.growth.governor.keep)
        self._wishes = PendingCopies()
        self.samples = self._samples(tensors.validation, self.config.validation_samples)
        self.rows: list[Host] = [self._host(row, HostSetting()) for row in range(hosts)]
        self.samples_trained = 0  # by all hosts together

    # What it is made of

    def tensors(self) -> dict[str, Tensor]:
        """All that hosts are made of: name -> [N, ...]."""
        parts = {f"host {name}": tensor for name, tensor in self.host.tensors.items()}
        for slot, bank in self.banks.items():
            parts |= {f"{slot} {name}": tensor for name, tensor in bank.tensors.items()}
        return parts

    @property
    def steps_per_decision(self) -> int:
        return self.config.steps_for(len(self.task.train))

    @property
    def skipped_steps(self) -> Tensor:
        """Of every host, because its gradients overflowed in float16 [N]."""
        return self.host.scales.skipped

    @property
    def recordings(self) -> int:
        """How many times so far steps were recorded, to be replayed."""
        return self._repeat.recordings

    def _here(self) -> AbstractContextManager[Any]:
        """Where hosts compute."""
        return on_gpu(self.device) if self.device.type == "cuda" else nullcontext()

    def _samples(self, split: Split, count: int | None = None) -> Samples:
        inputs = placed_inputs(split.inputs[:count], self.device, self.dtype)
        if self._precision is not None:
            inputs = rounded_inputs(inputs, self._precision)
        targets, batch = split.targets[:count].to(self.device), self.config.validation_batch
        at_once = batch if self.device.type == "cpu" else max(_SAMPLES_AT_ONCE * self._part_size // batch, 1) * batch
        return Samples(inputs, targets, batch, at_once)

    def _least_memory(self, template: nn.Module, seed_kind: SeedKinds, make: MakeRowOptimizer, tensors: TaskTensors) -> Memory:
        """Without what seeds keep for a backward pass."""
        copies = 2 + self.growth.governor.keep  # the hosts as they are, as they train, and the snapshots
        chosen = torch.arange(self._part_size, device=self.device) % len(tensors)
        inputs, targets = tensors.inputs[chosen], tensors.targets[chosen]
        step = step_bytes(template, inputs, targets, self._precision, slots=self.places, recomputes=self.config.checkpoint)
        if self._repeat.records(self.steps_per_decision):
            step *= 2  # what the step before a recording has taken is not there for the recording
        return Memory(copies * state_bytes(template, seed_kind, make, scales=self._has_scales), step, seeds=0)

    def memory_per_host(self) -> Memory:
        """In bytes."""
        with self._here():
            largest = [
                max(seed_bytes(seed_kind, self._part_size, self._precision) for seed_kind in bank.seed_kind.values())
                for bank in self.banks.values()
            ]
        return Memory(self._memory.state, self._memory.step, sum(largest))

    # Beginning

    def reset(self, settings: Mapping[int, HostSetting]) -> None:
        """These hosts begin a new life. Before its first one, a host does not take part in anything."""
        self._check_rows(settings)
        if self.data.tensors.labels.ndim > 1 and any(setting.classes_share < 1 or setting.label_noise for setting in settings.values()):
            raise FleetError(
                f"the samples of {self.task.name!r} are of many classes each, so no host can see some of them, or have some of them wrong; "
                "leave classes_share at 1 and label_noise at 0"
            )
        if not settings:
            return
        made = {seed: self.make_host(seed).to(self.dtype) for seed in sorted({setting.seed for setting in settings.values()})}
        self.host.load(list(settings), [made[setting.seed] for setting in settings.values()])
        for row, setting in settings.items():
            self.data.reset(row, setting)
            self.rows[row] = self._host(row, setting)
            self.rows[row].recovery.take_snapshot()
        self._wishes.carry_out(self._snapshots)

    def _host(self, row: int, setting: HostSetting) -> Host:
        backends = {name: RowBackend(self.places[name], bank, row) for name, bank in self.banks.items()}
        growth = msgspec.structs.replace(self.growth, rent=setting.rent, seed=setting.growth_seed)
        scale = LossScale.of(self.task.uninformed_loss, loss_range=growth.loss_range)
        host_growth = HostGrowth(backends, growth, host=self.discovery.host, load=self.discovery.load, epochs=setting.horizon, scale=scale)
        recovery = RowRecovery(row, host_growth.lifecycles, host_growth.governor, self._wishes, self.growth.governor.keep)
        return Host(setting, host_growth, recovery)

    # Deciding

    def training(self) -> list[int]:
        """Hosts whose horizon is not over, and that have not come to a plateau."""
        return [row for row, host in enumerate(self.rows) if not host.is_over]

    def state(self, row: int) -> GrowthState:
        """What a controller sees of a host."""
        return self.rows[row].host_growth.state(learning_rate=self.rows[row].rate(self.config.schedule))

    def decide(self, decisions: Mapping[int, Decision], *, by: str = "controller") -> None:
        """What the gates of a host refuse does not happen, and its ledger says why. A probe looks until the next decision."""
        self._check_rows(decisions)
        for decision in decisions.values():
            for action in decision.actions:
                if action.slot not in self.banks:
                    raise FleetError(f"no slot named {action.slot!r} where something could grow; these hosts have {', '.join(self.banks)}")
        for row, decision in decisions.items():
            self.rows[row].decide(decision, by=by)
        self._tell(decisions)

    def _tell(self, rows: Iterable[int]) -> None:
        for row in rows:
            events: list[Event] = []
            self.rows[row].host_growth.tell(events.append)
            for event in events:
                if not isinstance(event, Probed):
                    self.on_event(msgspec.structs.replace(event, env=row))

    def _check_rows(self, rows: Iterable[int]) -> None:
        unknown = [row for row in rows if not 0 <= row < self.hosts]
        if unknown:
            raise FleetError(f"no host {unknown[0]}; a fleet of {self.hosts} has the hosts 0 to {self.hosts - 1}")

    def finish(self, rows: Iterable[int]) -> None:
        """The training of these hosts is over: what has not been kept is taken out."""
        over = list(rows)
        for row in over:
            lifecycles = self.rows[row].host_growth.lifecycles
            for name in lifecycles.living():
                lifecycles.prune(name, "the training is over and it has not earned its place")
        self._tell(over)

    # Training

    def advance(self) -> list[int]:
        """Trains every host that is not over up to its next decision. Gives their rows."""
        rows = self.training()
        if not rows:
            return []
        with self._here(), explained(self.hosts, self.memory_per_host, self._memory.least, room=self._room, device=self.device):
            plan, reading = self.plan(rows), Reading()
            self._train(plan, reading)
            trials = self._measure(rows, reading)
            found = reading.read()
        for name, seeds in plan.seed_batches.items():
            for slot, position, norms, skipped in seeds.by_seed(found[f"norms of {name}"], found[f"skipped of {name}"]):
                backend = self.rows[rows[position]].host_growth.lifecycles.backends[slot]
                backend.norms, backend.skipped = norms, skipped
        self._end_epoch(rows, found, trials, self._promises(plan, found))
        self._tell(rows)
        return rows

    def plan(self, rows: list[int]) -> Plan:
        """What these hosts will do until their next decision."""
        rates = upload([self.rows[row].rate(self.config.schedule) for row in rows], self.device, self.dtype)
        asking = {position: self.rows[row].host_growth for position, row in enumerate(rows) if self.rows[row].wants_probe}
        probes = probes_of(self.banks, asking, self.steps_per_decision)
        connected, in_shadow = seed_batches_of(self.banks, self._gardens(rows), self.steps_per_decision)
        recompute = recomputed if self.config.checkpoint else None
        alpha = self.growth.lifecycle.alpha_target
        return Plan(rows, rates, connected, in_shadow, alpha, self._precision, probes, self.config.accumulate, recompute)

    def segment(self, plan: Plan) -> TrainSegment:
        """The training up to the next decision, once."""
        settings = self.growth.seed_optimizer
        if settings.max_grad_norm is not None:  # all hosts have the same loss, and so the same unit of it
            unit = self.rows[plan.rows[0]].host_growth.lifecycles.unit
            settings = msgspec.structs.replace(settings, max_grad_norm=settings.max_grad_norm * unit)
        return TrainSegment(self.host, self.data, plan, settings, self._repeat)

    def _train(self, plan: Plan, reading: Reading) -> None:
        steps, batch_size = self.steps_per_decision, self.config.batch_size
        reading.add("losses", self.segment(plan).run(self.data.batches(steps, batch_size, rows=plan.rows)))
        for name, seeds in plan.seed_batches.items():
            reading.add(f"norms of {name}", seeds.norms)
            reading.add(f"skipped of {name}", seeds.skipped)
        for number, probe in enumerate(plan.probes):
            reading.add(f"promises {number}", probe.promises())
        self.samples_trained += steps * batch_size * len(plan.rows)
        for position, row in enumerate(plan.rows):
            probed = sum(len(probe.window) * batch_size * probe.flops.get(position, 0) for probe in plan.probes)
            self.rows[row].note_steps(steps, samples=steps * batch_size, probe_flops=probed)

    def _promises(self, plan: Plan, found: Mapping[str, Tensor]) -> dict[int, Promises]:
        """By position, of the hosts that asked, at the learning rate that a seed would begin with."""
        promises: dict[int, Promises] = defaultdict(dict)
        for number, probe in enumerate(plan.probes):
            for position, some in probe.by_position(found[f"promises {number}"].tolist()).items():
                host = self.rows[plan.rows[position]]
                rate = host.rate(self.config.schedule) * self.growth.seed_optimizer.learning_rate_factor
                promises[position] |= {key: rate * promise for key, promise in some.items()}
        return promises

    # Measuring

    def stacked_model(self, rows: Sequence[int], *, only_kept: bool = False) -> StackedModel:
        """These hosts as one network, with the seeds that they see now."""
        stacked_seeds = stacked_seeds_of(self.banks, self._gardens(rows), only_kept=only_kept)
        with torch.no_grad():
            tensors = {name: tensor.detach() for name, tensor in self.host.rows.tensors(upload(rows, self.device)).items()}
        return StackedModel(self.host.stacked, tensors, stacked_seeds, self._precision)

    def _gardens(self, rows: Sequence[int]) -> AllLifecycles:
        return [(row, self.rows[row].host_growth.lifecycles) for row in rows]

    def losses(self, split: Split) -> Tensor:
        """Mean loss of every host, in nats, on a part of the data [N], on the CPU; seeds that are not kept yet are left out."""
        return self._kept_losses(self._samples(split))

    def validation_losses(self) -> Tensor:
        """The same on the samples that hosts are validated on."""
        return self._kept_losses(self.samples)

    def kept_contributions(self) -> Tensor:
        """What the seeds that are kept give together, each measured against the host without it [N], in nats, on the CPU."""
        kept: dict[str, list[int]] = defaultdict(list)
        for row, host in enumerate(self.rows):
            for slot, backend in host.host_growth.lifecycles.occupied():
                if backend.life.stage is Stage.FOSSILIZED:
                    kept[slot].append(row)
        with self._here():
            return contributions(self.stacked_model(range(self.hosts), only_kept=True), self.samples, kept)

    def _kept_losses(self, samples: Samples) -> Tensor:
        with self._here():
            return mean_losses(self.stacked_model(range(self.hosts), only_kept=True), samples)

    def _measure(self, rows: list[int], reading: Reading) -> dict[str, list[int]]:
        """Gives the seeds on trial: slot -> positions of their hosts."""
        stacked_model = self.stacked_model(rows)
        trials: dict[str, list[int]] = defaultdict(list)
        for position, row in enumerate(rows):
            on_trial = self.rows[row].host_growth.on_trial()
            for slot in on_trial:
                trials[slot].append(position)
            self.rows[row].note_validation(samples=len(self.samples), passes=1 + len(on_trial))
        reading.add("validation", losses_of(stacked_model, self.samples))
        for slot, losses in losses_without(stacked_model, self.samples, trials).items():
            reading.add(f"without {slot}", losses)
        reading.add("finite", are_finite(stacked_model, self.host.rows.parameters.layout.shapes, len(rows)))
        return trials

    def _end_epoch(
        self, rows: list[int], found: Mapping[str, Tensor], trials: Mapping[str, list[int]], promises: Mapping[int, Promises]
    ) -> None:
        sizes = [float(size) for size in self.samples.sizes]
        validation = found["validation"].T.tolist()
        without: dict[int, dict[str, Losses]] = defaultdict(dict)
        for slot, positions in trials.items():
            for position, values in zip(positions, found[f"without {slot}"].T.tolist(), strict=True):
                without[position][slot] = Losses(values, sizes)
        chunks = chunk_means(found["losses"], self.growth.governor.checks_per_epoch).T.tolist()
        is_finite = found["finite"].tolist()
        for position, row in enumerate(rows):
            host = self.rows[row]
            host.recovery.is_finite = bool(is_finite[position])
            host.end_epoch(chunks[position], Losses(validation[position], sizes), without[position], promises.get(position))
        self._wishes.carry_out(self._snapshots)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Everything, with seeds alive; the tensors are the live ones. Dropout draws from torch's own generator, which is not in it."""
        return {
            "tensors": self.tensors(),
            "snapshots": self._snapshots.state_dict(),
            "rows": [host.state_dict() for host in self.rows],
            "data": self.data.state_dict(),
            "samples_trained": self.samples_trained,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """That of a fleet of the same architecture, size and configuration; otherwise nothing is changed."""
        check_state(state, self.tensors(), hosts=self.hosts, keep=self.growth.governor.keep)
        for row, saved in enumerate(state["rows"]):
            setting = msgspec.convert(saved["setting"], HostSetting)
            self.data.reset(row, setting)
            self.rows[row] = self._host(row, setting)
            self.rows[row].load_state_dict(saved)
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(state["tensors"][name])
        self._snapshots.load_state_dict(state["snapshots"])
        self.data.load_state_dict(state["data"])
        self.samples_trained = state["samples_trained"]


def _optimizer(config: FleetConfig) -> MakeRowOptimizer:
    if config.optimizer == "sgd":
        return lambda flat: SGD(flat, lr=0.0, momentum=config.momentum, weight_decay=config.weight_decay)
    return lambda flat: AdamW(flat, lr=0.0, weight_decay=config.weight_decay)
