"""A fleet: N hosts of one architecture that train as one tensor program, each with its own weights, data and seeds.

    fleet = Fleet(task, make_host, hosts=32, growth=GrowthConfig(), config=FleetConfig())
    fleet.reset({row: HostConfig(seed=row) for row in range(32)})
    rows = fleet.training()
    while rows:
        fleet.decide({row: controllers[row].decide(fleet.state(row)) for row in rows})
        rows = fleet.advance()                         # training, validation, contributions; the device is read once
    fleet.finish(range(32))
    losses = fleet.losses(task.test)                   # of every host, with the seeds it has kept

Every host has a `Lifecycles` of `esper.growth`, with the same lifecycles, gates, governor and ledger as a model grown alone. Its tensors
are rows of stacked tensors. The rows that `advance` returns include hosts whose horizon has just ended: these get one last decision, about
the seeds to keep. After it a host is frozen and costs nothing until it is reset. With a `patience` in the growth config, a host also ends
when its validation loss has reached a plateau and no seed is growing after the decision.

A fleet can be used again for other hosts of its architecture, on other data: see `Fleet.begin`, and `esper.fleet.pool`.

Shapes: N = hosts, A = hosts that train, T = steps until the next decision, V = validation batches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec
import torch
from torch import Tensor, nn

from esper.devices import Stopwatch, upload
from esper.fleet.config import FleetConfig, FleetError, HostConfig, check_state
from esper.fleet.data import FleetData, TaskTensors, placed_inputs, rounded_inputs
from esper.fleet.device import Reading, Repeater, on_gpu
from esper.fleet.hosts import Host, PendingCopies, RowBackend, RowBestStates, RowRecovery, RowSnapshots, copy_rows, fitted
from esper.fleet.measure import Samples, are_finite, contributions, losses_of, losses_without, mean_losses, probes_of
from esper.fleet.memory import Memory, check_fits, explained, free_bytes, seed_bytes, state_bytes, step_bytes, width_bytes
from esper.fleet.optimizers import SGD, AdamW
from esper.fleet.seed_groups import (
    AllLifecycles,
    MakeRowOptimizer,
    SeedKind,
    SeedStorage,
    seed_batches_of,
    seed_kinds_for,
    stacked_seeds_of,
)
from esper.fleet.stacked.lowering import recomputed
from esper.fleet.stacked_model import Arrangement, HostStorage, StackedModel
from esper.fleet.train_segment import Plan, TrainSegment
from esper.fleet.width import Formations, WidthKind
from esper.growth.config import GrowthConfig, RentConfig
from esper.growth.events import Probed
from esper.growth.host.layout import Place
from esper.growth.host.slotted import add_slots
from esper.growth.lifecycle.decisions import growth_state
from esper.growth.lifecycle.governor import LossRange
from esper.growth.lifecycle.history import chunk_means
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.lifecycle.stages import Decision, GrowthState, Stage
from esper.growth.measure.contribution import Losses
from esper.growth.measure.promises import Promises
from esper.growth.measure.readout import ReadoutSamples
from esper.runs import Event
from esper.tasks import Split, Task

# On a GPU, a pass without gradients has the samples of this many training steps, because it keeps no activations. On a CPU it has one
# validation batch, because the caches are small.
_STEPS_PER_PASS = 4
_HALF_PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # of activations; the weights stay in float32
# Weights of all wider hosts whose formations are kept for the next hosts of a fleet, about 40 bytes each. There may be thousands of them.
_MOST_KEPT = 1_000_000


@dataclass(frozen=True, slots=True)
class FleetTimes:
    """Time that a fleet took, measured by events of the device where it has any."""

    steps: int = 0  # training steps, of all hosts together
    train_seconds: float = 0.0
    measure_seconds: float = 0.0  # validation, contributions and checks between two decisions

    @property
    def step_seconds(self) -> float | None:
        """Mean duration of a training step of all hosts; None before the first."""
        return self.train_seconds / self.steps if self.steps else None

    def plus(self, steps: int, train_seconds: float, measure_seconds: float) -> FleetTimes:
        return FleetTimes(self.steps + steps, self.train_seconds + train_seconds, self.measure_seconds + measure_seconds)


@dataclass(frozen=True, slots=True)
class FleetShape:
    """What a fleet keeps when it begins again with other hosts, apart from their architecture and how they grow."""

    inputs: torch.Size  # of a sample
    targets: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype]  # of inputs and targets
    num_classes: int
    config: FleetConfig  # with the free fields at their defaults

    @classmethod
    def of(cls, task: Task, config: FleetConfig) -> Self:
        """Return the shape of a fleet for a task. Its schedule and its steps per decision are free."""
        inputs, targets = task.train.inputs, task.train.targets
        fixed = msgspec.structs.replace(config, schedule="cosine", steps_per_decision=None)
        return cls(inputs.shape[1:], targets.shape[1:], (inputs.dtype, targets.dtype), task.num_classes, fixed)


class Fleet:
    """N hosts that train together. `make_host(seed)` returns a fresh host on the CPU; all hosts have one architecture.

    `on_event` is called with the events of every host (stages, measurements, refusals and rollbacks), with the host's row as `env`. Events
    of probes are left out, because they would be most of the events.
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
            raise FleetError(f"a fleet needs at least one host; got {hosts}")
        self.task, self.make_host, self.hosts, self.on_event = task, make_host, hosts, on_event
        self.growth, self.config = growth or GrowthConfig(), config or FleetConfig()
        self.shape = FleetShape.of(task, self.config)
        self.device = torch.empty(0, device=device).device
        self.dtype = torch.float64 if self.config.precision == "float64" else torch.float32
        self._precision = _HALF_PRECISIONS.get(self.config.precision)
        self._has_scales = self.config.precision == "float16"
        self._part_size = self.config.batch_size // self.config.accumulate  # samples whose activations are in memory at once
        self._repeat = Repeater(self.device, records=self.config.graphs)
        tensors = tensors or TaskTensors.of(task, device=self.device, dtype=self.dtype)

        # Find the slots of the architecture on a template, and the kinds of seeds that fit them.
        template = make_host(0).to(self.device, self.dtype)
        slotted = add_slots(template, tensors.inputs[:2], slots=self.growth.slots)
        self.discovery, self.places = slotted.discovery, {name: slotted.place(name) for name in slotted.slots}
        slotted.remove()
        work = 3 * self._part_size * self.discovery.host.flops / max(self.discovery.host.parameters, 1)
        formations = Formations(template, list(self.places), self.device, work_per_weight=work)
        make, seed_kinds = _optimizer(self.config), seed_kinds_for(self.places, self.growth, formations.modules)

        # Check that all hosts fit into memory before anything large is allocated.
        self._room = free_bytes(self.device)
        self._state_bytes = self._copies * state_bytes(template, seed_kinds, make, scales=self._has_scales)
        with self._on_device():
            self._bytes_of_step = self._step_bytes(template, tensors)
        check_fits(hosts, self._memory.least, room=self._room, device=self.device)
        self._largest_seeds: dict[tuple[str, int], int] = {}  # cache of `memory_per_host`

        self.host = HostStorage(
            template,
            list(self.places),
            hosts=hosts,
            make=make,
            device=self.device,
            dtype=self.dtype,
            formations=formations,
            scales=self._has_scales,
        )
        self.seed_storages = {
            name: SeedStorage(self.places[name], kinds, formations.modules, hosts=hosts, make=make) for name, kinds in seed_kinds.items()
        }  # in the order in which the slots run, those that open behind kept seeds included
        self.forget()
        self._begin(tensors)

    def begin(
        self,
        task: Task,
        make_host: Callable[[int], nn.Module],
        *,
        config: FleetConfig | None = None,
        tensors: TaskTensors | None = None,
    ) -> None:
        """Forget all hosts, and go on as a new fleet for this task. No row trains until it is reset.

        Hosts, samples, classes and the config must have the shape of those before; the schedule and the steps per decision may be others.
        The hosts must be of the same architecture: `reset` fails where their weights have other shapes, but layers without weights are not
        compared. What was found out about the architecture is kept, and so are the largest tensors: those of hosts and seeds.
        """
        config = config or self.config
        shape = FleetShape.of(task, config)
        if shape != self.shape:
            raise FleetError(f"a fleet can begin again only with the shape that it has, {self.shape}, not with {shape}; make another one")
        self.forget()
        self.task, self.make_host, self.config = task, make_host, config
        self._begin(tensors or TaskTensors.of(task, device=self.device, dtype=self.dtype))

    def forget(self) -> None:
        """Forget all hosts and free what belongs to them alone, their snapshots above all. The fleet is of no use until it begins again."""
        self.rows: list[Host] = []
        self._snapshots, self._pending = RowSnapshots(self.tensors), PendingCopies()
        self._best, self._pending_best = RowSnapshots(self._trained_tensors), PendingCopies()  # with FleetConfig(keep="best")
        # A slot that has opened behind a kept seed is closed, so that the next hosts are measured and reported as those of a new fleet.
        self.seed_storages = {slot: storage for slot, storage in self.seed_storages.items() if not storage.place.earlier}
        if self.host.formations.weights > _MOST_KEPT:
            self.host.formations.forget()
            for storage in self.seed_storages.values():
                storage.forget_kinds()

    def _begin(self, tensors: TaskTensors) -> None:
        """Begin with the present task and config, of which these are the tensors, and with rows of which none was reset."""
        self.data = FleetData(tensors, hosts=self.hosts, precision=self._precision)
        self.samples = self._samples(tensors.validation, self.config.validation_samples)
        readout = ReadoutSamples()
        readout.note(tensors.validation.inputs, tensors.validation.targets)
        self._readout = readout.loss()  # loss of a readout of the validation inputs, the same for all hosts
        self.rows = [self._new_host(row, HostConfig()) for row in range(self.hosts)]
        self.host.scales.reset_(torch.arange(self.hosts, device=self.device))
        self.samples_trained = 0  # by all hosts together
        self.times = FleetTimes()  # of the training in this process
        self._repeat.recordings = 0

    # State and memory

    def tensors(self) -> dict[str, Tensor]:
        """Return all state of hosts and seeds, name -> [N, ...]. The tensors are the live ones."""
        parts = {f"host {name}": tensor for name, tensor in self.host.tensors.items()}
        for slot, storage in self.seed_storages.items():
            parts |= {f"{slot} {name}": tensor for name, tensor in storage.tensors.items()}
        return parts

    def _trained_tensors(self) -> dict[str, Tensor]:
        """Return the weights and buffers of hosts and seeds, the part of the state on which losses depend."""
        kinds = ("weights", "constants", "buffers")  # second words of the names
        return {name: tensor for name, tensor in self.tensors().items() if name.split()[1] in kinds}

    @property
    def steps_per_decision(self) -> int:
        return self.config.steps_for(len(self.task.train))

    @property
    def skipped_steps(self) -> Tensor:
        """Steps that each host has skipped because its gradients overflowed in float16 [N]."""
        return self.host.scales.skipped

    @property
    def recordings(self) -> int:
        """Number of CUDA graphs recorded so far."""
        return self._repeat.recordings

    def _on_device(self) -> AbstractContextManager[Any]:
        """Return the context in which hosts compute."""
        return on_gpu(self.device) if self.device.type == "cuda" else nullcontext()

    def _samples(self, split: Split, count: int | None = None) -> Samples:
        """Return the first `count` samples of a split (None: all) on the device, to measure on."""
        inputs = placed_inputs(split.inputs[:count], self.device, self.dtype)
        if self._precision is not None:
            inputs = rounded_inputs(inputs, self._precision)
        targets, batch = split.targets[:count].to(self.device), self.config.validation_batch
        at_once = batch if self.device.type == "cpu" else max(_STEPS_PER_PASS * self._part_size // batch, 1) * batch
        return Samples(inputs, targets, batch, at_once)

    @property
    def _memory(self) -> Memory:
        """The memory of a host, with `seeds` at 0: the activations of seeds do not count."""
        return Memory(self._state_bytes, self._steps_held * self._bytes_of_step, seeds=0)

    @property
    def _steps_held(self) -> int:
        """Number of training steps in memory at a time: a recording does not reuse the memory of the first step, which runs before it."""
        return 2 if self._repeat.records(self.steps_per_decision) else 1

    @property
    def _copies(self) -> int:
        """Number of copies of a host's state: the storage, the compact copy that trains, the snapshots, and all best states together.

        There is mostly one best state, rarely more than three. They have no moments, which are two thirds of a state.
        """
        return 2 + self.growth.governor.keep + (self.config.keep == "best")

    def _step_bytes(self, template: nn.Module, tensors: TaskTensors, *, wider: tuple[Formations, WidthKind] | None = None) -> int:
        """Return the bytes of a training step of one host, with a width seed where one is given."""
        chosen = torch.arange(self._part_size, device=self.device) % len(tensors)
        inputs, targets, recomputes = tensors.inputs[chosen], tensors.targets[chosen], self.config.checkpoint
        return step_bytes(template, inputs, targets, self._precision, slots=self.places, recomputes=recomputes, wider=wider)

    def memory_per_host(self) -> Memory:
        """Return the bytes that a host takes, with the largest seed in every slot."""
        largest = []
        for storage in self.seed_storages.values():
            key = storage.place.module, self._steps_held  # a slot behind a kept seed has the kinds of the first one
            if key not in self._largest_seeds:
                with torch.inference_mode(False), self._on_device():  # formations that are found here are trained later
                    self._largest_seeds[key] = max(self._seed_bytes(storage))
            largest.append(self._largest_seeds[key])
        return Memory(self._memory.state, self._memory.step, sum(largest))

    def _seed_bytes(self, storage: SeedStorage) -> Iterator[int]:
        """Yield the bytes that a seed in one slot adds: of every kind in depth, and of the widest width seed."""
        wide = [kind for kind in storage.seed_kinds.values() if isinstance(kind, WidthKind)]
        if wide:
            widest = max(wide, key=lambda kind: kind.layout.width)
            template = self.make_host(0).to(self.device, self.dtype)
            step = self._step_bytes(template, self.data.tensors, wider=(self.host.formations, widest))
            added = self._steps_held * (step - self._bytes_of_step)
            yield added + self._copies * width_bytes(widest, storage.seed_kinds, storage.make)
        for kind in storage.seed_kinds.values():
            if isinstance(kind, SeedKind):
                yield seed_bytes(kind, self._part_size, self._precision)

    # Resetting

    def reset(self, settings: Mapping[int, HostConfig]) -> None:
        """Start new hosts in these rows. A row that was never reset is not trained."""
        self._check_rows(settings)
        if self.data.tensors.labels.ndim > 1 and any(setting.classes_share < 1 or setting.label_noise for setting in settings.values()):
            raise FleetError(
                f"each sample of {self.task.name!r} has many labels, so a host cannot be given only some classes or wrong labels; "
                "leave classes_share at 1 and label_noise at 0"
            )
        if not settings:
            return
        # Hosts with the same seed start from the same weights, so build each once.
        made = {seed: self.make_host(seed).to(self.dtype) for seed in sorted({setting.seed for setting in settings.values()})}
        self.host.load(list(settings), [made[setting.seed] for setting in settings.values()])
        for row, setting in settings.items():
            self.data.reset(row, setting)
            self.rows[row] = self._new_host(row, setting)
            self.rows[row].recovery.take_snapshot()
        self._pending.carry_out(self._snapshots)

    @torch.no_grad()
    def copy(self, rows: Mapping[int, int]) -> None:
        """Overwrite hosts with copies of others, to grow them in another way. `rows` maps a row to the one that is copied into it."""
        self._check_rows((*rows, *rows.values()))
        if not rows:
            return
        for row, source in rows.items():
            host = self.rows[source]
            self.data.copy(row, source)
            self.rows[row] = self._new_host(row, host.setting)
            self.rows[row].load_state_dict(deepcopy(host.state_dict()))
        copy_rows(self.tensors(), rows)
        for snapshots in (self._snapshots, self._best):
            snapshots.copy(rows)

    def set_rent(self, row: int, rent: RentConfig) -> None:
        """Change the rent of a host from now on."""
        host = self.rows[row]
        host.setting = msgspec.structs.replace(host.setting, rent=rent)
        host.lifecycles.set_rent(rent)

    def _new_host(self, row: int, setting: HostConfig) -> Host:
        """Make the Python object of a new host. Its tensors are not touched."""
        backends: dict[str, RowBackend] = {}
        for storage in self.seed_storages.values():
            if not storage.place.earlier:
                RowBackend(storage.place, self._open_slot, row, backends)
        growth = msgspec.structs.replace(self.growth, rent=setting.rent, seed=setting.growth_seed)
        lifecycles = Lifecycles(
            backends,
            growth,
            host=self.discovery.host,
            load=self.discovery.load,
            epochs=setting.horizon,
            samples=self._samples_unless_one_pass(row),
            scale=LossRange.of(self.task.uninformed_loss, loss_range=growth.loss_range, readout=self._readout),
        )
        recovery = RowRecovery(row, lifecycles, self._pending)
        best_states = RowBestStates(row, lifecycles.ledger, self._pending_best) if self.config.keep == "best" else None
        return Host(setting, lifecycles, recovery, best_states)

    def _samples_unless_one_pass(self, row: int) -> int | None:
        """Return the number of training samples of a host; None if it sees each of them once between two decisions."""
        samples = len(self.data.orders[row].chosen)
        return None if self.steps_per_decision == max(samples // self.config.batch_size, 1) else samples

    def _open_slot(self, place: Place) -> SeedStorage:
        """Return the storage of the slot at a place. Make it if it is the first slot of any host that opens there behind a kept seed."""
        if place.name not in self.seed_storages:
            first = self.seed_storages[place.module]
            opened = SeedStorage(place, first.seed_kinds, first.modules, hosts=self.hosts, make=first.make)
            order = list(self.places)
            storages = sorted([*self.seed_storages.values(), opened], key=lambda one: (order.index(one.place.module), one.place.earlier))
            self.seed_storages = {storage.place.name: storage for storage in storages}
        return self.seed_storages[place.name]

    # Deciding

    def training(self) -> list[int]:
        """Return the rows of the hosts that still train: not given up, before their horizon, and not at a plateau."""
        return [row for row, host in enumerate(self.rows) if not host.is_over]

    def state(self, row: int) -> GrowthState:
        """Return the state of a host as a controller sees it."""
        return growth_state(self.rows[row].lifecycles, learning_rate=self.rows[row].rate(self.config.schedule))

    def decide(self, decisions: Mapping[int, Decision], *, by: str = "controller") -> None:
        """Carry out a decision for each of these rows.

        Actions that the gates of a host refuse are not carried out; its ledger records why. A probe that a decision asks for runs in the
        training up to the next decision.
        """
        self._check_rows(decisions)
        for row, decision in decisions.items():
            slots = self.rows[row].lifecycles.slots
            for action in decision.actions:
                if action.slot not in slots:
                    raise FleetError(f"no slot named {action.slot!r} where something could grow; these hosts have {', '.join(slots)}")
        for row, decision in decisions.items():
            self.rows[row].decide(decision, by=by)
        self._emit_events(decisions)

    def _emit_events(self, rows: Iterable[int]) -> None:
        """Pass the new events of these hosts to `on_event`, apart from those of probes."""
        for row in rows:
            events: list[Event] = []
            self.rows[row].lifecycles.tell(events.append)
            for event in events:
                if not isinstance(event, Probed):
                    self.on_event(msgspec.structs.replace(event, env=row))

    def _check_rows(self, rows: Iterable[int]) -> None:
        unknown = [row for row in rows if not 0 <= row < self.hosts]
        if unknown:
            raise FleetError(f"no host {unknown[0]}; a fleet of {self.hosts} has the hosts 0 to {self.hosts - 1}")

    def finish(self, rows: Iterable[int]) -> None:
        """End the training of these hosts: prune all seeds that were not kept, and restore the best states with `keep="best"`."""
        over = list(rows)
        for row in over:
            lifecycles = self.rows[row].lifecycles
            for name in lifecycles.living():
                lifecycles.prune(name, "the training is over and it has not earned its place")
        if self.config.keep == "best":
            self._restore_best([row for row in over if self.rows[row].recovery.has_begun])
        self._emit_events(over)

    def _restore_best(self, rows: list[int]) -> None:
        """Evaluate these hosts without the seeds that were just pruned, and go back to their best states where these are better."""
        last_losses = self.validation_losses().tolist()
        for row in rows:
            self.rows[row].note_validation(samples=len(self.samples), passes=1)
            self.rows[row].restore_best(last_losses[row])
        self._pending_best.carry_out(self._best)

    # Training

    def advance(self) -> list[int]:
        """Train every host that is not over up to its next decision, and measure it. Return the rows of these hosts."""
        rows = self.training()
        if not rows:
            return []
        with self._on_device(), explained(self.hosts, self.memory_per_host, self._memory.least, room=self._room, device=self.device):
            watch, plan, reading = Stopwatch(self.device), self.plan(rows), Reading()
            watch.mark()
            self._train(plan, reading)
            watch.mark()
            trials = self._measure(rows, reading)
            watch.mark()
            found = reading.read()  # the only wait for the device
        self.times = self.times.plus(self.steps_per_decision, *watch.seconds())
        for name, seeds in plan.seed_batches.items():
            for slot, position, norms, skipped in seeds.by_seed(found[f"norms of {name}"], found[f"skipped of {name}"]):
                backend = self.rows[rows[position]].lifecycles.slots[slot]
                backend.norms, backend.skipped = norms, skipped
        self._end_epoch(rows, found, trials, self._promises(plan, found))
        self._emit_events(rows)
        return rows

    def plan(self, rows: list[int]) -> Plan:
        """Return the plan of the training of these hosts until their next decision. Advances the blending of their seeds up to it."""
        rates = upload([self.rows[row].rate(self.config.schedule) for row in rows], self.device, self.dtype)
        asking = {position: self.rows[row] for position, row in enumerate(rows) if self.rows[row].wants_probe}
        probes = probes_of(self.seed_storages, asking, self.steps_per_decision)
        connected, in_shadow = seed_batches_of(self.seed_storages, self._lifecycles(rows), self.steps_per_decision)
        recompute = recomputed if self.config.checkpoint else None
        alpha = self.growth.lifecycle.alpha_target
        return Plan(rows, rates, connected, in_shadow, alpha, self._precision, probes, self.config.accumulate, recompute)

    def segment(self, plan: Plan) -> TrainSegment:
        """Return the training of a plan, ready to run once."""
        settings = self.growth.seed_optimizer
        if settings.max_grad_norm is not None:
            # The limit is given in units of the loss. All hosts have the same task, and so the same unit.
            unit = self.rows[plan.rows[0]].lifecycles.unit
            settings = msgspec.structs.replace(settings, max_grad_norm=settings.max_grad_norm * unit)
        return TrainSegment(self.host, self.data, plan, settings, self._repeat)

    def _train(self, plan: Plan, reading: Reading) -> None:
        """Run the training of a plan and add its losses, gradient norms and probe results to the reading."""
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
        """Return the probes' estimates, by the position of the host, at the learning rate that a seed would start with."""
        promises: dict[int, Promises] = defaultdict(dict)
        for number, probe in enumerate(plan.probes):
            for position, estimates in probe.by_position(found[f"promises {number}"].tolist()).items():
                host = self.rows[plan.rows[position]]
                rate = host.rate(self.config.schedule) * self.growth.seed_optimizer.learning_rate_factor
                promises[position] |= {key: rate * estimate for key, estimate in estimates.items()}
        return promises

    # Measuring

    def stacked_model(self, rows: Sequence[int], *, only_kept: bool = False) -> StackedModel:
        """Return these hosts as one network, with their connected seeds; `only_kept` leaves out seeds that are not fossilized."""
        stacked_seeds = stacked_seeds_of(self.seed_storages, self._lifecycles(rows), only_kept=only_kept)
        with torch.no_grad():
            tensors = {name: tensor.detach() for name, tensor in self.host.rows.tensors(upload(rows, self.device)).items()}
        arrangement = Arrangement.of(self.host.formations, stacked_seeds, len(rows))
        return StackedModel(self.host.stacked, tensors, stacked_seeds, self._precision, arrangement=arrangement)

    def _lifecycles(self, rows: Sequence[int]) -> AllLifecycles:
        return [(row, self.rows[row].lifecycles) for row in rows]

    def losses(self, split: Split) -> Tensor:
        """Return the mean loss of every host on a split [N], in nats, on the CPU. Seeds that are not kept are left out.

        It is nan for a row that was never reset.
        """
        return self._kept_losses(self._samples(split))

    def validation_losses(self) -> Tensor:
        """Return the mean loss of every host on its validation samples [N], as `losses` does."""
        return self._kept_losses(self.samples)

    def kept_contributions(self) -> Tensor:
        """Return the sum of the contributions of the kept seeds of every host [N], in nats, on the CPU.

        Each contribution is measured alone, as the loss without that seed minus the loss with all.
        """
        kept: dict[str, list[int]] = defaultdict(list)
        for row, host in enumerate(self.rows):
            for slot, backend in host.lifecycles.occupied():
                if backend.stage is Stage.FOSSILIZED:
                    kept[slot].append(row)
        with self._on_device():
            return contributions(self.stacked_model(range(self.hosts), only_kept=True), self.samples, kept)

    def _kept_losses(self, samples: Samples) -> Tensor:
        losses = torch.full((self.hosts,), math.nan, dtype=torch.float64)
        if begun := [row for row, host in enumerate(self.rows) if host.recovery.has_begun]:
            with self._on_device():
                losses[begun] = mean_losses(self.stacked_model(begun, only_kept=True), samples)
        return losses

    def _measure(self, rows: list[int], reading: Reading) -> dict[str, list[int]]:
        """Add validation losses, with and without each seed on trial, to the reading. Return slot -> positions of hosts with a trial."""
        stacked_model = self.stacked_model(rows)
        trials: dict[str, list[int]] = defaultdict(list)
        for position, row in enumerate(rows):
            on_trial = self.rows[row].lifecycles.on_trial()
            for slot in on_trial:
                trials[slot].append(position)
            self.rows[row].note_validation(samples=len(self.samples), passes=1 + len(on_trial))
        found = losses_of(stacked_model, self.samples, by_sample=sorted({one for positions in trials.values() for one in positions}))
        reading.add("validation", found.of_batches)
        reading.add("on trial", found.of_samples)
        for slot, losses in losses_without(stacked_model, self.samples, trials).items():
            reading.add(f"without {slot}", losses.of_samples)
        reading.add("finite", are_finite(stacked_model, self.host.rows.parameters.layout.shapes, len(rows)))
        return trials

    def _end_epoch(
        self, rows: list[int], found: Mapping[str, Tensor], trials: Mapping[str, list[int]], promises: Mapping[int, Promises]
    ) -> None:
        """End the epoch of every host with the measurements as read from the device."""
        # Hosts with a seed on trial are measured by sample, as by `grow`, and all others by batch.
        sizes, batches = [float(size) for size in self.samples.sizes], self.samples.sizes

        def by_sample(values: list[float]) -> Losses:
            return Losses(values, [1.0] * len(values), "samples", batches=batches)

        validation = [Losses(values, sizes) for values in found["validation"].T.tolist()]  # of A hosts
        on_trial = sorted({one for positions in trials.values() for one in positions})
        for position, values in zip(on_trial, found["on trial"].T.tolist(), strict=True):
            validation[position] = by_sample(values)
        without: dict[int, dict[str, Losses]] = defaultdict(dict)
        for slot, positions in trials.items():
            for position, values in zip(positions, found[f"without {slot}"].T.tolist(), strict=True):
                without[position][slot] = by_sample(values)
        chunks = chunk_means(found["losses"], self.growth.governor.checks_per_epoch).T.tolist()  # [A, checks]
        is_finite = found["finite"].tolist()
        for position, row in enumerate(rows):
            host = self.rows[row]
            host.recovery.is_finite = bool(is_finite[position])
            host.end_epoch(chunks[position], validation[position], without[position], promises.get(position))
        self._pending.carry_out(self._snapshots)
        self._pending_best.carry_out(self._best)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, living seeds included. The tensors are the live ones.

        The state of torch's random generator, which dropout uses, is not part of it.
        """
        return {
            "tensors": self.tensors(),
            "snapshots": self._snapshots.state_dict(),
            "best": self._best.state_dict(),
            "rows": [host.state_dict() for host in self.rows],
            "data": self.data.state_dict(),
            "samples_trained": self.samples_trained,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a fleet of the same architecture, size and configuration. Raise FleetError, and change nothing, for another."""
        before = self.seed_storages
        try:
            shapes = self._shapes_for(state["tensors"])
            check_state(state, shapes, hosts=self.hosts, keep=self.growth.governor.keep)
        except FleetError:
            self.seed_storages = before
            raise
        for slot, storage in self.seed_storages.items():
            storage.make_room(*(shapes.get(f"{slot} {name}", [0])[-1] for name in ("weights", "buffers")))
        for row, saved in enumerate(state["rows"]):
            setting = msgspec.convert(saved["setting"], HostConfig)
            self.data.reset(row, setting)
            self.rows[row] = self._new_host(row, setting)
            self.rows[row].load_state_dict(saved)
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                saved_tensor = state["tensors"].get(name)
                tensor.copy_(fitted(None if saved_tensor is None else saved_tensor.to(tensor), tensor))
        self._snapshots.load_state_dict(state["snapshots"])
        self._best.load_state_dict(state["best"])
        self.data.load_state_dict(state["data"])
        self.samples_trained = state["samples_trained"]

    def _shapes_for(self, saved: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Open the slots of a saved state that are behind kept seeds, drop others of that kind, and return the shapes that then fit."""
        slots = {name.removesuffix(" weights") for name in saved if name.endswith(" weights")}
        for slot in sorted(slots - self.seed_storages.keys()):
            module, _, number = slot.rpartition("#")
            if module in self.seed_storages:
                self._open_slot(replace(self.places[module], name=slot, earlier=int(number) - 1))
        self.seed_storages = {slot: one for slot, one in self.seed_storages.items() if slot in slots or not one.place.earlier}
        shapes = {f"host {name}": list(tensor.shape) for name, tensor in self.host.tensors.items()}
        for slot, storage in self.seed_storages.items():
            shapes |= {f"{slot} {name}": shape for name, shape in storage.shapes_for(slot, saved).items()}
        return shapes


def _optimizer(config: FleetConfig) -> MakeRowOptimizer:
    """Return the function that builds the optimiser of some rows; learning rates are set later, row by row."""
    if config.optimizer == "sgd":
        return lambda flat: SGD(flat, lr=0.0, momentum=config.momentum, weight_decay=config.weight_decay)
    return lambda flat: AdamW(flat, lr=0.0, weight_decay=config.weight_decay)
