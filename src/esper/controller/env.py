"""Growth as a batch of environments: one step is one decision for every host, and the training up to the next one.

Where a decision may have several actions, each of them is a step, and the training comes after the last; who waits is done until then.

An episode is the life of a host. It ends for real at its horizon, which is observed. All hosts of a squad end together; then the squad is
drawn anew, in the same step. A host that was given up, because it failed again and again, ends at once; until its squad ends, its steps
are not real.

Shapes: N = hosts of all squads together, S = slots, K = blueprints; both are the most that any host has.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

import msgspec
import torch
from torch import Tensor

from esper.controller.config import ControllerConfig
from esper.controller.domain import FleetSetting, draw_round
from esper.controller.events import BlueprintCount, RoundEnded
from esper.controller.fleet_with_twins import FleetWithTwins
from esper.controller.layout import decision, observe, spec
from esper.controller.reward import TERMS, HostStanding, potential, rewards
from esper.fleet.data import TaskTensors
from esper.fleet.kernels import compiled_kernels
from esper.growth.host.slotted import add_slots
from esper.growth.lifecycle.ledger import Entry
from esper.growth.lifecycle.slots import options_for
from esper.rl.collector import Staging
from esper.runs import Event
from esper.runs.tensors import Tree
from esper.tasks import Task
from esper.vecenv import Actions, Masks, Obs, Timestep

LoadTask = Callable[[str], Task]


def _ignore(event: Event) -> None:
    pass


class GrowthEnv:
    """`seed` makes the hosts that are drawn; `load` gives the tasks by name."""

    def __init__(
        self,
        config: ControllerConfig,
        load: LoadTask,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        on_event: Callable[[Event], None] = _ignore,
    ) -> None:
        self.config, self.device, self.on_event = config, torch.empty(0, device=device).device, on_event
        self.num_envs = config.hosts
        self._seed = seed
        self._tasks = {name: load(name) for name in config.domain.tasks}
        dtype = torch.float64 if config.fleet.precision == "float64" else torch.float32
        self._tensors = {name: TaskTensors.of(task, device=self.device, dtype=dtype) for name, task in self._tasks.items()}
        self.slots, self.blueprints = most_slots_and_blueprints(self._tasks, config)
        self.observation_spec, self.action_spec = spec(self.slots, self.blueprints)
        self.twinned_fleets: list[FleetWithTwins] = []
        self._rounds: list[int] = []  # that each squad has begun
        self._standings: list[HostStanding] = []
        # Its buffers are used again in the next step, which begins with reading the actions: by then they have arrived.
        self._staging = Staging(self.device) if self.device.type == "cuda" else None
        self._chosen: list[list[list[dict[str, int]]]] = []  # of every squad and host: the actions of this decision, so far

    # The contract

    # Hosts learn in here, whatever the caller does about gradients.

    @torch.inference_mode(False)
    @torch.enable_grad()
    def reset(self, seed: int | None = None) -> Timestep:
        """`seed` draws other hosts; with None, those of the seed before come again, from the first round on."""
        if seed is not None:
            self._seed = seed
        fleets = draw_round(self.config.domain, round_number=0, hosts=self.num_envs, seed=self._seed)
        self._rounds = [0] * len(fleets)
        self.twinned_fleets = []
        for setting in fleets:
            self.twinned_fleets.append(self._squad(setting, len(self.twinned_fleets)))
        self._standings = [HostStanding.start(twinned.hosts) for twinned in self.twinned_fleets]
        self._chosen = [[[] for _ in range(twinned.hosts)] for twinned in self.twinned_fleets]
        zeros = torch.zeros(self.num_envs)
        return self._timestep(zeros, ended=zeros.bool(), valid=torch.ones_like(zeros).bool())

    @torch.inference_mode(False)
    @torch.enable_grad()
    def step(self, actions: Actions) -> Timestep:
        chosen = dict(zip(actions, torch.stack(list(actions.values())).tolist(), strict=True))
        parts = [self._step_squad(number, rows, chosen) for number, rows in enumerate(self._rows())]
        reward, ended, valid = (torch.cat(values) for values in zip(*parts, strict=True))
        return self._timestep(reward.float(), ended=ended, valid=valid)

    def _timestep(self, reward: Tensor, *, ended: Tensor, valid: Tensor) -> Timestep:
        """On the device, with what is observed now. All of it goes there at once, and nobody waits for it."""
        obs, masks = self._observe()
        parts = {"reward": reward, "ended": ended, "truncated": torch.zeros_like(ended), "valid": valid}
        parts |= {f"obs {name}": part for name, part in obs.items()} | {f"mask {head}": mask for head, mask in masks.items()}
        there = parts if self._staging is None else self._staging.move(parts)
        return Timestep(
            {name: there[f"obs {name}"] for name in obs},
            there["reward"],
            terminated=there["ended"],
            truncated=there["truncated"],
            masks={head: there[f"mask {head}"] for head in masks},
            valid=None if bool(valid.all()) else there["valid"],
        )

    def close(self) -> None:
        """Drop the fleets, and the tasks' data on the device."""
        self.twinned_fleets, self._tensors = [], {}

    # Squads

    def _rows(self) -> list[range]:
        """Which of all hosts every squad has."""
        ends = list(accumulate((twinned.hosts for twinned in self.twinned_fleets), initial=0))
        return [range(start, end) for start, end in pairwise(ends)]

    def _step_squad(self, number: int, rows: range, chosen: Mapping[str, list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Reward, whether the life has ended, and whether the step was real, for each of its hosts."""
        twinned, chosen_so_far = self.twinned_fleets[number], self._chosen[number]
        was_alive, is_last = twinned.alive(), twinned.is_last
        valid = torch.tensor(was_alive)
        for place, row in enumerate(rows):
            chosen_so_far[place].append({name: values[row] for name, values in chosen.items()})
        if len(chosen_so_far[0]) < self.config.actions:
            return torch.zeros(twinned.hosts, dtype=torch.float64), torch.zeros_like(valid), valid
        states = twinned.states()
        twinned.decide({place: decision(states[place], chosen_so_far[place]) for place in range(twinned.hosts) if was_alive[place]})
        self._chosen[number] = [[] for _ in range(twinned.hosts)]
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
            self._tell(twinned, standing)
            del twinned
            self._begin_next(number)
        return reward, ended, valid

    def _begin_next(self, number: int) -> None:
        self._rounds[number] += 1
        setting = self._drawn(number)
        if self.twinned_fleets[number].fits(setting):
            self.twinned_fleets[number].begin(setting)
        else:
            del self.twinned_fleets[number]  # before there is another, which needs the room
            gc.collect()  # torch's count of FLOPs leaves it in a cycle
            self.twinned_fleets.insert(number, self._squad(setting, number))
        self._standings[number] = HostStanding.start(self.twinned_fleets[number].hosts)

    def _drawn(self, number: int) -> FleetSetting:
        return draw_round(self.config.domain, round_number=self._rounds[number], hosts=self.num_envs, seed=self._seed)[number]

    def _squad(self, setting: FleetSetting, number: int) -> FleetWithTwins:
        def tell(event: Event) -> None:
            if self.config.host_events:
                before = sum(twinned.hosts for twinned in self.twinned_fleets[:number])
                self.on_event(msgspec.structs.replace(event, env=before + (event.env or 0)))

        return FleetWithTwins(
            setting, self.config, self._tasks[setting.task], self._tensors[setting.task], device=self.device, on_event=tell
        )

    def _tell(self, twinned: FleetWithTwins, standing: HostStanding) -> None:
        entries = [entry for host in twinned.fleet.rows[: twinned.hosts] for entry in host.host_growth.ledger.entries]
        self.on_event(
            RoundEnded(
                task=twinned.setting.task,
                host=twinned.setting.host,
                horizon=twinned.setting.horizon,
                hosts=twinned.hosts,
                gain=float(standing.gain.mean()),
                rent=float(standing.rent.mean()),
                utility=float((standing.gain - standing.rent).mean()),
                worth=float(potential(standing, self.config.reward).mean()),
                reward={name: float(term(standing, self.config.reward).mean()) for name, term in TERMS.items()},
                grown=len(entries),
                kept=sum(entry.outcome == "kept" for entry in entries),
                rollbacks=int(standing.rollbacks.sum()),
                samples=twinned.fleet.samples_trained,
                steps=twinned.hosts * (twinned.setting.horizon + 1) * self.config.actions,
                memory_per_host=twinned.fleet.memory_per_host().most,
                recordings=twinned.recordings,
                kernels=compiled_kernels(),
                blueprints=count_blueprints(entries),
                skipped=int(twinned.fleet.skipped_steps[: twinned.hosts].sum()),
            )
        )

    def _observe(self) -> tuple[Obs, Masks]:
        """On the CPU, where they are made."""
        states = [state for twinned in self.twinned_fleets for state in twinned.states()]
        chosen = [choices for twinned in self._chosen for choices in twinned]
        return observe(states, slots=self.slots, blueprints=self.blueprints, ops=self.config.ops, chosen=chosen)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """A copy: what happens later does not change it."""
        return {
            "seed": self._seed,
            "rounds": list(self._rounds),
            "squads": [_copied(twinned.state_dict()) for twinned in self.twinned_fleets],
            "standings": [list(standing.values()) for standing in self._standings],
            "chosen": [[[dict(choice) for choice in choices] for choices in twinned] for twinned in self._chosen],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed, self._rounds = state["seed"], list(state["rounds"])
        self.twinned_fleets = [self._squad(self._drawn(number), number) for number in range(len(self._rounds))]
        for twinned, saved in zip(self.twinned_fleets, state["squads"], strict=True):
            twinned.load_state_dict(saved)
        self._standings = [HostStanding(*values) for values in state["standings"]]
        self._chosen = [[[dict(choice) for choice in choices] for choices in twinned] for twinned in state["chosen"]]


def _copied(tree: Tree) -> Tree:
    if isinstance(tree, dict):
        return {name: _copied(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_copied(value) for value in tree]
    return tree.detach().clone() if isinstance(tree, Tensor) else tree


def most_slots_and_blueprints(tasks: Mapping[str, Task], config: ControllerConfig) -> tuple[int, int]:
    """Of any host of the domain, those that are held out included."""
    slots, blueprints, growth = 0, 0, config.growth
    for task in tasks.values():
        for host in (*config.domain.hosts, *config.domain.held_out_hosts):
            slotted = add_slots(task.make_host(host, seed=0), task.example_input, slots=growth.slots)
            names = [{option.name for option in options_for(slotted.place(name), growth)} for name in slotted.slots]
            slots, blueprints = max(slots, len(slotted.slots)), max(blueprints, len(set().union(*names)))
    return slots, blueprints


def count_blueprints(entries: Sequence[Entry]) -> dict[str, BlueprintCount]:
    """What became of the seeds in these ledgers, by blueprint."""
    found: dict[str, BlueprintCount] = {}
    for name in sorted({entry.blueprint for entry in entries}):
        some = [entry for entry in entries if entry.blueprint == name]
        gains = [entry.gain for entry in some if entry.gain is not None]
        found[name] = BlueprintCount(
            tried=len(some),
            kept=sum(entry.outcome == "kept" for entry in some),
            pruned=sum(entry.outcome in ("pruned", "rolled back") for entry in some),
            parameters=sum(entry.parameters for entry in some),
            gain=fmean(gains) if gains else None,
        )
    return found
