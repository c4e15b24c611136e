"""Growth as a batch of environments: one step is one decision for every host, followed by the training up to the next decision.

An episode is the whole training of a host. It terminates at the horizon, which is part of the observation. All hosts of a fleet end
together, and in the same step a new cell and new hosts are drawn. A host that the governor has given up ends at once; its steps until the
end of its fleet are marked as not valid.

Shapes: N = hosts of all fleets together.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

import msgspec
import torch
from torch import Tensor

from esper.controller.config import ControllerConfig, rent_level
from esper.controller.domain import FleetSetting, draw_round
from esper.controller.events import BlueprintCount, HostEnded, RoundEnded
from esper.controller.fleet_with_twins import FleetWithTwins
from esper.controller.layout import MOVE_NAMES, observe, policy_decision, spec
from esper.controller.reward import TERMS, HostStanding, potential, rewards
from esper.fleet.data import TaskTensors
from esper.fleet.kernels import compiled_kernels
from esper.growth.events import ActionRefused
from esper.growth.lifecycle.ledger import SeedRecord
from esper.growth.lifecycle.stages import Decision
from esper.rl.collector import Staging
from esper.runs import Event
from esper.runs.tensors import Tree
from esper.tasks import Task
from esper.text_table import without_numbers
from esper.vecenv import Actions, Masks, Obs, Timestep

LoadTask = Callable[[str], Task]


class GrowthEnv:
    """Batch of environments (see `esper.vecenv`) whose agents decide about growing hosts.

    `load` returns a task by name, `seed` determines the hosts that are drawn, and `on_event` gets the events of the hosts and a
    `RoundEnded` per fleet.
    """

    def __init__(
        self,
        config: ControllerConfig,
        load: LoadTask,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.config, self.device, self.on_event = config, torch.empty(0, device=device).device, on_event
        self.num_envs = config.hosts
        self._seed = seed
        self._load = cache(load)
        for source in config.domain.sources:  # a missing one is found before anything is trained
            if source != "teacher":
                self._load(source)
        self.observation_spec, self.action_spec = spec()
        self.twinned_fleets: list[FleetWithTwins] = []
        self._rounds: list[int] = []  # number of the present round, by fleet
        self._standings: list[HostStanding] = []  # of the hosts after the last decision, by fleet
        # The next step overwrites the staging buffers. It reads the actions from the device first, so the copies have finished by then.
        self._staging = Staging(self.device) if self.device.type == "cuda" else None
        self._move_counts: list[Counter[str]] = []  # by fleet: how often the policy made each move in this round

    # The contract of vecenv. The decorators enable gradients, because the hosts train inside, even if the caller has disabled them.

    @torch.inference_mode(False)
    @torch.enable_grad()
    def reset(self, seed: int | None = None) -> Timestep:
        """Start from the first round. A `seed` draws other hosts; None repeats those of the previous seed."""
        if seed is not None:
            self._seed = seed
        fleets = draw_round(self.config, round_number=0, seed=self._seed)
        self._rounds = [0] * len(fleets)
        self.twinned_fleets = []
        for number, setting in enumerate(fleets):
            self.twinned_fleets.append(self._build_fleet(setting, number))
        self._standings = [HostStanding.start(twinned.hosts) for twinned in self.twinned_fleets]
        self._move_counts = [Counter() for _ in self.twinned_fleets]
        zeros = torch.zeros(self.num_envs)
        return self._timestep(zeros, ended=zeros.bool(), valid=torch.ones_like(zeros).bool())

    @torch.inference_mode(False)
    @torch.enable_grad()
    def step(self, actions: Actions) -> Timestep:
        """Make one move [N] for every host, and train all fleets up to the next decision."""
        chosen = actions["move"].tolist()
        parts = [self._step_fleet(number, chosen[rows.start : rows.stop]) for number, rows in enumerate(self._rows())]
        reward, ended, valid = (torch.cat(values) for values in zip(*parts, strict=True))
        return self._timestep(reward.float(), ended=ended, valid=valid)

    def _timestep(self, reward: Tensor, *, ended: Tensor, valid: Tensor) -> Timestep:
        """Build the timestep on the device, with the present observations. Everything is copied at once and asynchronously."""
        obs, masks = self._observe()
        parts = {"reward": reward, "ended": ended, "truncated": torch.zeros_like(ended), "valid": valid}
        parts |= {f"obs {name}": part for name, part in obs.items()} | {f"mask {head}": mask for head, mask in masks.items()}
        on_device = parts if self._staging is None else self._staging.move(parts)
        return Timestep(
            {name: on_device[f"obs {name}"] for name in obs},
            on_device["reward"],
            terminated=on_device["ended"],
            truncated=on_device["truncated"],
            masks={head: on_device[f"mask {head}"] for head in masks},
            valid=None if bool(valid.all()) else on_device["valid"],
        )

    def close(self) -> None:
        """Drop the fleets, with their data on the device."""
        self.twinned_fleets = []

    # Fleets

    def _rows(self) -> list[range]:
        """Return the indices of the hosts of every fleet within the batch."""
        ends = list(accumulate((twinned.hosts for twinned in self.twinned_fleets), initial=0))
        return [range(start, end) for start, end in pairwise(ends)]

    def _step_fleet(self, number: int, chosen: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each host of a fleet: reward, whether its episode has ended, and whether the step was valid."""
        twinned = self.twinned_fleets[number]
        was_alive, is_last = twinned.alive(), twinned.is_last
        valid = torch.tensor(was_alive)
        decisions: dict[int, Decision] = {}
        for row, (state, choice) in enumerate(zip(twinned.states(), chosen, strict=True)):
            if was_alive[row]:
                decisions[row] = policy_decision(state, choice)
                self._move_counts[number][MOVE_NAMES[choice]] += 1
        twinned.decide(decisions)

        # Train up to the next decision, or finish the hosts after the last one, and pay the change of their standing.
        if is_last:
            twinned.finish()
            standing = twinned.last_standing()
        else:
            twinned.advance()
            standing = twinned.standing()
        ended = valid & (torch.ones_like(valid) if is_last else ~torch.tensor(twinned.alive()))
        reward = rewards(self._standings[number], standing, ended, self.config.reward, gamma=self.config.ppo.gamma)
        reward = torch.where(valid, reward, torch.zeros_like(reward))
        self._standings[number] = standing
        if is_last:
            self._report_round(number, twinned, standing)
            del twinned  # so that `_begin_next` can free the fleet
            self._begin_next(number)
        return reward, ended, valid

    def _begin_next(self, number: int) -> None:
        """Draw new hosts for a fleet. Reuse the fleet if the architecture stays the same."""
        self._rounds[number] += 1
        setting = self._draw_setting(number)
        if self.twinned_fleets[number].fits(setting):
            self.twinned_fleets[number].begin(setting)
        else:
            del self.twinned_fleets[number]  # free its memory before the next fleet is built
            gc.collect()  # torch's FLOP counter leaves it in a reference cycle
            self.twinned_fleets.insert(number, self._build_fleet(setting, number))
        self._standings[number] = HostStanding.start(self.twinned_fleets[number].hosts)

    def _draw_setting(self, number: int) -> FleetSetting:
        return draw_round(self.config, round_number=self._rounds[number], seed=self._seed)[number]

    def _build_fleet(self, setting: FleetSetting, number: int) -> FleetWithTwins:
        """Build the fleet with this number. Its events carry the index of the host in the batch."""

        def emit(event: Event) -> None:
            if self.config.host_events:
                before = sum(twinned.hosts for twinned in self.twinned_fleets[:number])
                self.on_event(msgspec.structs.replace(event, env=before + (event.env or 0)))

        task = setting.cell.task(self._load)
        dtype = torch.float64 if self.config.fleet.precision == "float64" else torch.float32
        tensors = TaskTensors.of(task, device=self.device, dtype=dtype)
        return FleetWithTwins(setting, self.config, task, tensors, device=self.device, on_event=emit)

    def _report_round(self, number: int, twinned: FleetWithTwins, standing: HostStanding) -> None:
        """Emit the summary of a fleet whose hosts have ended, and of each host if the events of hosts are wanted."""
        if self.config.host_events:
            self._report_hosts(number, twinned, standing)
        ledgers = [host.lifecycles.ledger for host in twinned.fleet.rows[: twinned.hosts]]
        seeds = [seed for ledger in ledgers for seed in ledger.seeds]
        self.on_event(
            RoundEnded(
                task=twinned.setting.cell.source,
                host=twinned.setting.cell.host,
                horizon=twinned.setting.horizon,
                hosts=twinned.hosts,
                gain=float(standing.gain.mean()),
                rent=float(standing.rent.mean()),
                utility=float((standing.gain - standing.rent).mean()),
                worth=float(potential(standing, self.config.reward).mean()),
                reward={name: float(term(standing, self.config.reward).mean()) for name, term in TERMS.items()},
                grown=len(seeds),
                kept=sum(ledger.count("kept") for ledger in ledgers),
                rollbacks=int(standing.rollbacks.sum()),
                samples=twinned.fleet.samples_trained,
                steps=twinned.hosts * (twinned.setting.horizon + 1),
                memory_per_host=twinned.fleet.memory_per_host().most,
                recordings=twinned.recordings,
                kernels=compiled_kernels(),
                blueprints=count_blueprints(seeds, [one for ledger in ledgers for one in ledger.refused]),
                skipped=int(twinned.fleet.skipped_steps[: twinned.hosts].sum()),
                decisions={name: self._move_counts[number][name] for name in MOVE_NAMES},
                step_seconds=twinned.fleet.times.step_seconds,
                measure_seconds=twinned.fleet.times.measure_seconds,
                gflops=sum(row.lifecycles.history.flops for row in twinned.fleet.rows) / 1e9,
                round=self._rounds[number],
                fleet=number,
            )
        )
        self._move_counts[number] = Counter()

    def _report_hosts(self, number: int, twinned: FleetWithTwins, standing: HostStanding) -> None:
        """Emit the end of every host of a fleet, with the losses of its life beside those of its twin."""
        before = sum(other.hosts for other in self.twinned_fleets[:number])
        gains, rents = standing.gain.tolist(), standing.rent.tolist()
        for row, setting in enumerate(twinned.host_configs):
            growth, twin = (twinned.fleet.rows[place].lifecycles for place in (row, twinned.twin_of[row]))
            self.on_event(
                HostEnded(
                    env=before + row,
                    fleet=number,
                    round=self._rounds[number],
                    task=twinned.setting.cell.source,
                    host=twinned.setting.cell.host,
                    seed=setting.seed,
                    horizon=setting.horizon,
                    rent_level=rent_level(setting.rent.parameters),
                    rent_parameters=setting.rent.parameters,
                    samples=round(setting.data_share * len(twinned.task.train)),
                    label_noise=twinned.setting.cell.label_noise,
                    gain=gains[row],
                    rent=rents[row],
                    utility=gains[row] - rents[row],
                    grown=len(growth.ledger.seeds),
                    kept=growth.ledger.count("kept"),
                    rollbacks=growth.governor.rollbacks,
                    val_losses=[float(f"{loss:.5g}") for loss in growth.history.val_losses],
                    twin_losses=[float(f"{loss:.5g}") for loss in twin.history.val_losses],
                )
            )

    def _observe(self) -> tuple[Obs, Masks]:
        """Return observations and masks on the CPU."""
        return observe([state for twinned in self.twinned_fleets for state in twinned.states()])

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, which later steps do not change."""
        return {
            "seed": self._seed,
            "rounds": list(self._rounds),
            "fleets": [_copied(twinned.state_dict()) for twinned in self.twinned_fleets],
            "standings": [list(standing.values()) for standing in self._standings],
            "move_counts": [dict(counts) for counts in self._move_counts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed, self._rounds = state["seed"], list(state["rounds"])
        self.twinned_fleets = [self._build_fleet(self._draw_setting(number), number) for number in range(len(self._rounds))]
        for twinned, saved in zip(self.twinned_fleets, state["fleets"], strict=True):
            twinned.load_state_dict(saved)
        self._standings = [HostStanding(*values) for values in state["standings"]]
        self._move_counts = [Counter(counts) for counts in state["move_counts"]]


def _copied(tree: Tree) -> Tree:
    """Return nested dicts and lists with copies of all tensors."""
    if isinstance(tree, dict):
        return {name: _copied(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_copied(value) for value in tree]
    return tree.detach().clone() if isinstance(tree, Tensor) else tree


def count_blueprints(seeds: Sequence[SeedRecord], refused: Sequence[ActionRefused] = ()) -> dict[str, BlueprintCount]:
    """Count the outcomes of the seeds in these ledgers and the refused actions, by blueprint. Only blueprints that were tried count."""
    found: dict[str, BlueprintCount] = {}
    for name in sorted({seed.blueprint for seed in seeds}):
        some = [seed for seed in seeds if seed.blueprint == name]
        ended = [seed for seed in some if not seed.is_present]
        gains = [seed.gain for seed in some if seed.gain is not None]
        found[name] = BlueprintCount(
            tried=len(some),
            kept=sum(seed.outcome == "kept" for seed in some),
            pruned=len(ended),
            parameters=sum(seed.parameters for seed in some),
            gain=fmean(gains) if gains else None,
            measured=len(gains),
            rolled_back=sum(seed.outcome == "rolled back" for seed in some),
            flops=sum(seed.flops for seed in some),
            reasons=Counter(without_numbers(seed.why) for seed in ended),
            refused=Counter(f"{one.action}: {without_numbers(one.reason)}" for one in refused if one.blueprint == name),
        )
    return found
