"""Rollouts that are whole lives of hosts under a policy, each paid by how it ends beside the same life under the policy's advisor.

    lives = Lives(config, Heuristic, load_task, policy, device=torch.device("cpu"))
    lives.reset(seed=0)
    rollout = lives.collect(generator)       # one round: other cells, other hosts

A round draws cells, and hosts with data, learning rates and rents of their own. Each host lives once under the advisor, which is the
heuristic or what branches have made of it, and several times under the policy, which draws its steps. Lives that have been decided alike so
far are one row of a fleet (see `evaluation.run_cases`).

A life is paid at its end, by the validation losses of the best states, in units of the loss (nats for ten classes):

    reward = (loss + rent under the advisor) - (loss + rent) - leaving * (steps that it would not have taken)

So a policy that does what is advised gets 0. The price of leaving falls to 0 in the course of the training. All of a reward is paid by the
last step, because a gain that is lost again is none. Steps without a choice are no part of a life.

Shapes: T = steps of the longest life, N = lives, M = steps of all lives.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.controller.cells import DrawnHost, FleetSetting, draw_round
from esper.controller.config import ControllerConfig, rent_level
from esper.controller.evaluation import EvalCase, EvalRun, EvalSetting, Rows, run_cases
from esper.controller.events import BlueprintCount, HostEnded, RoundEnded
from esper.controller.policy import StepController, StepEncoder, batch, sizes_for
from esper.controller.turn import OPS
from esper.fleet.data import TaskTensors
from esper.fleet.fleet import Fleet
from esper.fleet.hosts import RowBackend
from esper.fleet.kernels import compiled_kernels
from esper.fleet.pool import FleetPool
from esper.growth.config import GrowthConfig
from esper.growth.events import ActionRefused
from esper.growth.lifecycle.ledger import SeedRecord
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.lifecycle.stages import CompleteController, Cost
from esper.growth.measure.contribution import rent_of
from esper.parallel import ALONE, Group
from esper.rl.batch import LOOKS, Rollout, pack
from esper.rl.collector import RECENT_EPISODES
from esper.rl.distributions import Choice
from esper.rl.events import Collected
from esper.rl.policy import Policy
from esper.runs import Event
from esper.tasks import Task
from esper.text_table import without_numbers
from esper.vecenv import Masks, Obs


@dataclass(frozen=True)
class Life:
    """A life under the policy that has ended, beside that of its twin, the same host under the advisor."""

    host: DrawnHost
    controller: StepController
    run: EvalRun
    twin: EvalRun
    lifecycles: Lifecycles[RowBackend]
    of_twin: Lifecycles[RowBackend]
    leaving: float  # cost of the steps that were not the advised ones

    @property
    def gain(self) -> float:
        """How much lower the loss is than that of the twin, in units of the loss."""
        return (self.twin.val_loss - self.run.val_loss) / self.run.unit

    @property
    def rent(self) -> float:
        """How much higher the rent is than that of the twin."""
        return self._rent_of(self.run) - self._rent_of(self.twin)

    def _rent_of(self, run: EvalRun) -> float:
        return rent_of(Cost(run.added_parameters, run.added_flops), Cost(run.parameters, run.flops_per_sample), self.host.rent)

    def reward(self, most: float) -> float:
        """Return the reward, limited to ± `most`: at a high rent, a bad seed may cost a hundred times the gain of a good one elsewhere."""
        whole = self.gain - self.rent - self.leaving
        return whole if math.isnan(whole) else min(max(whole, -most), most)


class Lives:
    """Collects rollouts for PPO, see `esper.rl.collector.RolloutSource`. What is drawn depends only on the seed and the round."""

    def __init__(
        self,
        config: ControllerConfig,
        advisor: Callable[[GrowthConfig], CompleteController],
        load: Callable[[str], Task],
        policy: Policy,
        *,
        device: torch.device,
        on_event: Callable[[Event], None] = lambda event: None,
        group: Group = ALONE,
    ) -> None:
        self.config, self.advisor, self.policy = config, advisor, policy
        self.device, self.on_event, self.group = device, on_event, group
        self.pool = FleetPool(config.resident)
        self._load = cache(load)
        for source in config.domain.sources:  # a missing one is found before anything is trained
            if source != "teacher":
                self._load(source)
        self.seed = self.round = 0
        self.episodes = self.bad_rewards = self.steps = 0
        self.has_reward, self.env_seconds = True, 0.0
        self.recent_returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.recent_lengths: deque[float] = deque(maxlen=RECENT_EPISODES)

    def reset(self, seed: int) -> None:
        """Begin with the first round of a seed."""
        self.seed, self.round = seed, 0

    def collect(self, generator: torch.Generator) -> Rollout:
        """Let the hosts of the next round live, and return their lives as a rollout."""
        began, lives = time.perf_counter(), list[Life]()
        for number, setting in enumerate(draw_round(self.config, round_number=self.round, seed=self.seed)):
            built = self.pool.built
            fleet, some = self._live(setting, generator)
            self._report(number, setting, fleet, some, before=len(lives), reused=self.pool.built == built)
            lives += some
            done = self.round * self.config.hosts + len(lives)
            self.on_event(Collected(step=done * self.group.world_size, done=len(lives), of=self.config.hosts))
        self.round += 1
        self.env_seconds = time.perf_counter() - began
        return self._rollout(lives)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _live(self, setting: FleetSetting, generator: torch.Generator) -> tuple[Fleet, list[Life]]:
        """Let the hosts of one fleet live, each under the policy, and once for all that are the same under the advisor."""
        config, task = self.config, setting.cell.task(self._load)
        twins = {host: EvalCase("advisor", host.config(len(task.train)), self.advisor(config.growth)) for host in setting.hosts}
        seeds = torch.randint(2**31, (len(setting.hosts),), generator=generator, device=generator.device).tolist()
        controllers = [StepController(self.policy, self.advisor(config.growth), seed=seed, records=config.longest_life) for seed in seeds]
        own = [EvalCase("policy", twins[host].setting, one) for host, one in zip(setting.hosts, controllers, strict=True)]
        cases = [*twins.values(), *own]
        resources = EvalSetting(
            task,
            setting.cell.host,
            TaskTensors.of(task, device=self.device, dtype=torch.float64 if config.fleet.precision == "float64" else torch.float32),
            setting.cell.fleet(config.fleet),
            config.growth,
            self.device,
            rows=len(cases),
        )
        ended = list[tuple[Fleet, Rows]]()
        results = run_cases(resources, cases, on_end=lambda *fleet: ended.append(fleet), pool=self.pool)
        runs = dict(zip(map(id, cases), results, strict=True))
        ((fleet, rows),) = ended
        lifecycles = {id(case): fleet.rows[row].lifecycles for row, some in rows.items() for case in some}

        price = config.reward.leaving * max(0.0, 1 - self.round / config.rounds)
        lives = []
        for host, case, controller in zip(setting.hosts, own, controllers, strict=True):
            mine, twin = id(case), id(twins[host])
            both = runs[mine], runs[twin], lifecycles[mine], lifecycles[twin]
            lives.append(Life(host, controller, *both, leaving=price * len(controller.others)))
        return fleet, lives

    @torch.no_grad()
    def _rollout(self, lives: Sequence[Life]) -> Rollout:
        """Return lives as a rollout, with what the policy that drew their steps says of each. Behind its end, a life is not valid."""
        policy, taken = self.policy, [life.controller.life for life in lives]
        count, longest = len(lives), max(self.group.gather_objects(max(1, *map(len, taken))))
        is_recurrent = policy.network.core != "none"

        # Put the steps of all lives side by side [T · N, ...]. Behind the end of a life there are zeros, and masks allow everything.
        places = torch.tensor([at * count + number for number, life in enumerate(taken) for at in range(len(life))], dtype=torch.int64)
        steps = [one for life in taken for one in life]
        observed, allowed = batch([one.seen for one in steps], sizes_for(policy)) if steps else _nothing(policy)
        assert isinstance(policy.encoder, StepEncoder)
        policy.encoder.note(observed["host"], self.group)
        obs = {name: _spread(part, places, longest * count, fill=False) for name, part in observed.items()}
        masks = {name: _spread(part, places, longest * count, fill=True) for name, part in allowed.items()}
        picked = _spread(torch.tensor([one.numbers for one in steps], dtype=torch.int64).view(-1, 3), places, longest * count, fill=False)
        valid = torch.zeros(longest * count, dtype=torch.bool).index_fill_(0, places, True)

        # Ask the policy, life by life: every life begins with an empty memory.
        starts = ~valid.view(longest, count)
        starts[0] = True
        length = longest if is_recurrent else 1
        units = np.arange(longest // length * count)
        fragments = pack(starts.numpy(), units, length=length, valid=valid.view(longest, count).numpy())
        rows = torch.from_numpy(fragments.rows)
        features = policy.encode(policy.normalize({name: part[rows] for name, part in obs.items()}))
        output = policy.norm_after(policy.core.sequence(features, policy.initial_state(len(fragments.states)), fragments.sizes))
        parameters = _spread(policy.decide(output), rows, longest * count, fill=False)
        values = _spread(policy.value(output), rows, longest * count, fill=False).view(longest, count)

        # Pay every life with its last step. One with a loss that is not finite teaches nothing.
        lengths = torch.tensor([len(life) for life in taken])
        rewards, terminated = torch.zeros(longest, count), torch.zeros(longest, count, dtype=torch.bool)
        paid = torch.tensor([life.reward(self.config.reward.most) for life in lives])
        lived = lengths.nonzero().squeeze(1)
        rewards[lengths[lived] - 1, lived], terminated[lengths[lived] - 1, lived] = paid[lived], True
        bad = ~torch.isfinite(rewards)
        next_values = torch.cat((values[1:], torch.zeros(1, count))).masked_fill(terminated, 0.0)
        self._count(paid.tolist(), lengths.tolist())

        def in_time(part: Tensor) -> Tensor:
            return part.view(longest, count, *part.shape[1:])

        return Rollout(
            obs={name: in_time(part) for name, part in obs.items()},
            masks={name: in_time(part) for name, part in masks.items()},
            choice=Choice(in_time(picked), torch.zeros(longest, count, 0)),
            parameters=in_time(parameters),
            features=torch.zeros(longest, count, 0),
            states=torch.zeros(longest // length, count, policy.core.state_size),
            starts=starts,
            rewards=rewards.masked_fill(bad, 0.0),
            bad_rewards=bad,
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            valid=valid.view(longest, count) & torch.isfinite(paid),
            acts=torch.ones_like(terminated),
            values=values,
            next_values=next_values,
            hidden_squares=torch.full((LOOKS, count), math.nan),
        )

    def _count(self, rewards: Sequence[float], lengths: Sequence[int]) -> None:
        """Note returns and lengths of the lives of a round."""
        finite = [reward for reward in rewards if math.isfinite(reward)]
        self.episodes, self.steps, self.has_reward = self.episodes + len(rewards), sum(lengths), bool(finite)
        self.bad_rewards += len(rewards) - len(finite)
        self.recent_returns.extend(finite)
        self.recent_lengths.extend(map(float, lengths))

    # Events

    def _report(self, number: int, setting: FleetSetting, fleet: Fleet, lives: Sequence[Life], *, before: int, reused: bool) -> None:
        """Emit the summary of a fleet whose hosts have ended, and of each life if the config asks for it."""
        own = [life.lifecycles for life in lives]
        seeds = [seed for one in own for seed in one.ledger.seeds]
        taken = Counter(OPS[step.numbers[0]] for life in lives for step in life.controller.life)
        parts = {
            "gain": fmean(life.gain for life in lives),
            "rent": -fmean(life.rent for life in lives),
            "leaving": -fmean(life.leaving for life in lives),
        }
        cell = setting.cell
        about: dict[str, Any] = {"task": cell.source, "host": cell.host, "horizon": cell.horizon, "round": self.round, "fleet": number}
        for place, life in enumerate(lives if self.config.host_events else ()):
            self.on_event(
                HostEnded(
                    **about,
                    env=before + place,
                    seed=life.host.seed,
                    rent_level=rent_level(life.host.rent.parameters),
                    rent_parameters=life.host.rent.parameters,
                    gain=life.gain,
                    rent=life.rent,
                    utility=life.gain - life.rent,
                    grown=life.run.grown,
                    kept=len(life.run.kept),
                    rollbacks=life.run.rollbacks,
                    val_losses=[float(f"{loss:.5g}") for loss in life.lifecycles.history.val_losses],
                    twin_losses=[float(f"{loss:.5g}") for loss in life.of_twin.history.val_losses],
                    samples=life.host.cell.samples or 0,
                    label_noise=cell.label_noise,
                    seeds=[seed.as_dict() for seed in life.lifecycles.ledger.seeds],
                    others=life.controller.others,
                )
            )
        self.on_event(
            RoundEnded(
                **about,
                hosts=len(lives),
                gain=parts["gain"],
                rent=-parts["rent"],
                utility=parts["gain"] + parts["rent"],
                worth=fmean(life.reward(self.config.reward.most) for life in lives),
                reward=parts,
                grown=len(seeds),
                kept=sum(len(life.run.kept) for life in lives),
                rollbacks=sum(life.run.rollbacks for life in lives),
                samples=fleet.samples_trained,
                steps=taken.total(),
                alike=fmean(not life.controller.others for life in lives),
                memory_per_host=fleet.memory_per_host().most,
                recordings=fleet.recordings,
                kernels=compiled_kernels(),
                blueprints=count_blueprints(seeds, [one for some in own for one in some.ledger.refused]),
                skipped=int(fleet.skipped_steps.sum()),
                decisions={str(op): taken[op] for op in OPS},
                step_seconds=fleet.times.step_seconds,
                measure_seconds=fleet.times.measure_seconds,
                gflops=sum(row.lifecycles.history.flops for row in fleet.rows) / 1e9,
                reused=reused,
            )
        )

    # Saving

    def state_dict(self, *, with_episodes: bool) -> dict[str, Any]:
        """Return what the next rounds depend on, and the statistics so far."""
        return {
            "seed": self.seed,
            "round": self.round,
            "episodes": self.episodes,
            "bad_rewards": self.bad_rewards,
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue from a `state_dict`. Return whether the next round can be collected without a reset, which it always can."""
        for name in ("seed", "round", "episodes", "bad_rewards"):
            setattr(self, name, state[name])
        self.recent_returns = deque(state["recent_returns"], maxlen=RECENT_EPISODES)
        self.recent_lengths = deque(state["recent_lengths"], maxlen=RECENT_EPISODES)
        return True


def _nothing(policy: Policy) -> tuple[Obs, Masks]:
    """Return the observations and masks of no step at all [0, ...]."""
    heads = policy.action_spec.discrete
    return (
        {name: torch.zeros(0, *part.shape) for name, part in policy.observation_spec.items()},
        {head.name: torch.zeros(0, *policy.action_spec.mask_shape(head), dtype=torch.bool) for head in heads},
    )


def _spread(part: Tensor, places: Tensor, rows: int, *, fill: bool) -> Tensor:
    """Return a tensor of this many rows [rows, ...] with those of `part` at their places."""
    return part.new_full((rows, *part.shape[1:]), fill).index_copy_(0, places, part)


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
