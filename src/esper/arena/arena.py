"""Arena: a batch of battles that are stepped together, one decision at a time. A battle that ends is replaced by a new one.

    arena = Arena(ArenaConfig(battles=64, team_size=5), seed=0)
    result = arena.reset()
    result = arena.step(actions)                  # actions of all units, [B·U, ...]

A step writes into memory that was allocated once: it overwrites the result of the step before. On a CUDA device, a step copies the actions
and replays a CUDA graph; a caller may also record steps in a graph of its own. The rules are compiled when they are used for the first time
on a machine, which takes some tens of seconds.

Shapes: B = battles, U = units, C = contacts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.native import layout as at
from esper.arena.native.simulation import BATTLE_DIMENSIONS, BEGIN, DECIDE, DECIDE_ONLY, LOOK, Simulation, check_ranges
from esper.arena.orders import FIRST_WRONG, MOTION, action_spec, check_actions, first_wrong, raise_on_wrong_values
from esper.arena.specs import PHYSICS
from esper.arena.start import Grids, make_grids
from esper.devices import GraphedCall
from esper.vecenv import Actions, Masks

_LAST = slice(at.LAST_DECISION, at.LAST_LIVING_2 + 1)
_NOW = [at.DECISION, at.HELD, at.HELD_2]


class Rewards(NamedTuple):
    """Weighted parts of the reward [B, U], before sharing within the team."""

    zone: Tensor
    damage: Tensor
    hurt: Tensor
    kill: Tensor
    assist: Tensor
    death: Tensor
    outcome: Tensor
    approach: Tensor


class StepResult(NamedTuple):
    """Result of one decision. If a battle ended, its observation, whole and masks are those of the next battle."""

    observation: Tensor  # [B, U, width]; zeros for units that are dead
    whole: Tensor | None  # [B, U, state width] view of a centralised critic, if the config asks for it
    masks: Masks  # [B·U, ...] allowed choices of the next decision
    reward: Tensor  # [B, U]
    parts: Rewards | None  # parts of the reward; None after a reset
    was_alive: Tensor  # [B, U] bool: the unit was alive when it made the decision
    was_present: Tensor  # [B, U] bool: the unit took part in the battle, alive or not
    died: Tensor  # [B, U] bool: the unit died in this decision
    ended: Tensor  # [B] bool: the battle ended
    winner: Tensor  # [B] int64: 0, 1, or -1 for a draw; meaningful where the battle ended
    by_time: Tensor  # [B] bool: the battle ended because its time was up
    last: Tensor  # [B, 5] after the decision: decisions taken, score of each team, living units of each team
    is_first: bool = False  # whether this is the result of a reset


class Arena:
    """B battles. `simulation` holds their whole state; after changing it, call `look` for the new observations.

    `grids` are maps of one's own. Without them, the seed makes the maps.
    """

    task = DECIDE  # of `step`: it also replaces battles that ended

    def __init__(
        self,
        config: ArenaConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        grids: Grids | None = None,
    ) -> None:
        self.config = config or ArenaConfig()
        self.device = _checked_device(device)
        self.action_spec = action_spec(self.config)
        self.seed, self.largest_team = seed, self.config.team_size
        self.makes_maps = grids is None
        self.grids = make_grids(self.config, seed=seed) if grids is None else grids
        self.simulation = Simulation(self.config, self.grids, battles=self.config.battles, device=self.device)
        self._scales = torch.tensor([1.0, PHYSICS.tick_s, PHYSICS.tick_s, 1.0, 1.0], device=self.device).unsqueeze(1)
        self._decision = GraphedCall[StepResult](self.device)
        self._checks_later = self.device.type != "cpu"  # because an error at once would have to wait for the device
        # First wrong action since the reset, if it is not reported at once: its row, -1 if there is none, and its values.
        self._problem = torch.full((1 + len(FIRST_WRONG),), -1.0, dtype=torch.float64, device=self.device)
        self._begin()

    def _begin(self) -> None:
        self._problem.fill_(-1.0)
        self.simulation.begin(seed=self.seed, largest_team=self.largest_team)

    def _change_seed(self, seed: int) -> None:
        """Change the seed, and make its maps."""
        self.seed = seed
        if self.makes_maps:
            self.grids = make_grids(self.config, seed=seed)
            self.simulation.set_maps(self.grids)

    def reset(self, seed: int | None = None) -> StepResult:
        """Begin new battles everywhere: the first ones of `seed` if it is given, else the first ones of the current seed."""
        if seed is not None and seed != self.seed:
            self._change_seed(seed)
        self._begin()
        return self._first()

    def look(self) -> StepResult:
        """Return the battles as they are, without a step: rewards are 0 and nothing has ended."""
        self.simulation.run(LOOK)
        return self._first()

    def step(self, actions: Actions) -> StepResult:
        """Take one decision of all units in all battles. Wrong actions raise and change nothing.

        On a GPU, wrong values are replaced by the nearest valid ones, and the next `check` raises.
        """
        self._order(actions)
        return self._decision(self._decide)

    def _order(self, actions: Actions) -> None:
        """Check actions as far as this need not wait for the device, and copy them to where the simulation reads them."""
        check_actions(actions, self.config)
        if not self._checks_later:
            self._raise_on(first_wrong(actions, self.config))
        for name, value in actions.items():
            self.simulation.actions[name].copy_(value)

    def _decide(self) -> StepResult:
        """Take the decision of `simulation.actions`. It does not read from the device, so that it can be recorded in a CUDA graph."""
        if self._checks_later:
            found = first_wrong(self.simulation.actions, self.config)
            self._problem.copy_(torch.where(self._problem[0] >= 0, self._problem, found))
            _make_valid(self.simulation.actions, self.config)
        self.simulation.run(self.task)
        return self._result()

    def check(self) -> None:
        """Raise if an action since the last reset had a wrong value that was not reported at once. Waits for the device."""
        self._raise_on(self._problem)

    def _raise_on(self, found: Tensor) -> None:
        """Raise if there is a first wrong row, as `first_wrong` returns it."""
        row, *values = found.tolist()
        if row >= 0:
            raise_on_wrong_values(int(row), dict(zip(FIRST_WRONG, values, strict=True)), self.config)

    def set_largest_team(self, size: int) -> None:
        """Limit the team size of battles that begin from now on. Units beyond it do not take part."""
        if not 1 <= size <= self.config.team_size:
            raise ValueError(f"the largest team must have 1 to {self.config.team_size} units; got {size}")
        self.largest_team = size
        self.simulation.status[at.LARGEST_TEAM] = size

    @property
    def is_alive(self) -> Tensor:
        """The units that are alive now, [B, U] bool."""
        return self.simulation.unit[at.HIT_POINTS] > 0

    @property
    def overflow(self) -> Tensor:
        """Shots that found no free projectile slot since the reset, [B]."""
        return self.simulation.status[at.OVERFLOW]

    def _views(self) -> tuple[Tensor, Tensor | None, Masks]:
        views = self.simulation.views
        masks = {name: views[name] for name in ("fire", "target", "vent")}
        return views["observation"], views["whole"] if self.config.state_view else None, masks

    def _first(self) -> StepResult:
        alive, status = self.is_alive, self.simulation.status
        nobody, none = torch.zeros_like(alive), torch.zeros(self.config.battles, dtype=torch.bool, device=self.device)
        living = alive.view(self.config.battles, 2, -1).sum(2).T
        last = torch.cat((status[_NOW].float(), living.float())) * self._scales
        winner = torch.full((self.config.battles,), -1, device=self.device)
        return StepResult(*self._views(), nobody.float(), None, nobody, nobody, nobody, none, winner, none, last.T, is_first=True)

    def _result(self) -> StepResult:
        number, status, reward = (self.simulation.state[name] for name in ("number", "status", "reward"))
        return StepResult(
            *self._views(),
            reward=reward[at.PAID],
            parts=Rewards(*reward[: at.PAID]),
            was_alive=number[at.WAS_ALIVE] != 0,
            was_present=number[at.WAS_PRESENT] != 0,
            died=number[at.HAS_DIED] != 0,
            ended=status[at.HAS_ENDED] != 0,
            winner=status[at.WINNER].long(),
            by_time=status[at.IS_BY_TIME] != 0,
            last=(status[_LAST].float() * self._scales).T,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state."""
        state = {name: tensor.clone() for name, tensor in self.simulation.state.items()}
        return {"seed": self.seed, "state": state, "largest_team": self.largest_team}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a `state_dict` of an arena of the same config. A state that does not fit raises and changes nothing."""
        own, given = self.simulation.state, saved["state"]
        if set(given) != set(own):
            missing, unknown = sorted(set(own) - set(given)), sorted(set(given) - set(own))
            problem = f"missing: {missing}, unknown: {unknown}"
            raise ValueError(f"a state has the tensors {sorted(own)}; {problem}")
        for name, tensor in own.items():
            other = given[name]
            if other.shape != tensor.shape or other.dtype != tensor.dtype:
                wanted = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"{name} should be {wanted}; got {other.dtype} {tuple(other.shape)}")
        check_ranges(lambda name, row: given[name] if row is None else given[name][row], self.config)
        teams, limit = given["status"][at.LARGEST_TEAM], self.config.team_size
        if not bool(((teams >= 1) & (teams <= limit)).all()):
            raise ValueError(f"the largest team should be from 1 to {limit}; got {teams.unique().tolist()}")
        if saved["seed"] != self.seed:
            self._change_seed(int(saved["seed"]))
        for name, tensor in own.items():
            tensor.copy_(given[name])
        self.largest_team = int(saved["largest_team"])
        self._problem.fill_(-1.0)
        self.simulation.run(LOOK)


class ManualResetArena(Arena):
    """An arena whose `step` begins no battles; `next` and `replace` do. The battles are the same as those of an `Arena`.

    The views of a battle that has ended show its end, and its units go on deciding until it is replaced.
    """

    task = DECIDE_ONLY

    def next(self) -> StepResult:
        """Begin the next battle everywhere."""
        self.simulation.status[at.EPISODE] += 1
        self.simulation.run(BEGIN)
        return self._first()

    def replace(self, ended: Tensor) -> StepResult:
        """Begin the next battle where one has ended, [B] bool."""
        simulation, kept = self.simulation, (~ended).nonzero().squeeze(1)
        tensors = [(simulation.state[name], dimension) for name, dimension in BATTLE_DIMENSIONS.items()]
        tensors += [(view.view(self.config.battles, -1), 0) for view in simulation.views.values() if view.numel()]
        # BEGIN begins all battles: save those that go on, begin all, and restore these.
        saved = [tensor.index_select(dimension, kept) for tensor, dimension in tensors]
        simulation.status[at.EPISODE] += ended
        simulation.run(BEGIN)
        for (tensor, dimension), value in zip(tensors, saved, strict=True):
            tensor.index_copy_(dimension, kept, value)
        return self._first()


def _make_valid(actions: Actions, config: ArenaConfig) -> None:
    """Replace wrong values by the nearest valid ones, and NaN and infinity by 0, so that no index leads outside of its table."""
    for head in action_spec(config).discrete:
        actions[head.name].clamp_(0, head.size - 1)
    motion = actions["motion"]
    motion.masked_fill_(~motion.isfinite(), 0.0).clamp_(-1.0, 1.0)


def _checked_device(device: torch.device | str) -> torch.device:
    """Return the device with its index, because "cuda" and "cuda:0" are not equal. Raise an error if the arena cannot run there."""
    if str(device).partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"an arena runs on 'cpu' or 'cuda'; got {str(device)!r}")
    device = torch.device(device)
    if device.type == "cuda":
        from esper.arena.native.cuda import require_cuda

        require_cuda()
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def no_actions(config: ArenaConfig, device: torch.device | str = "cpu") -> Actions:
    """Return actions with which all units stand still and do nothing."""
    rows = config.battles * config.units
    spec = action_spec(config)
    still = {head.name: torch.zeros(rows, dtype=torch.int64, device=device) for head in spec.discrete}
    return {**still, "motion": torch.zeros(rows, len(MOTION), device=device)}
