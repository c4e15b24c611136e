"""Arena: a batch of battles that are stepped together, one decision at a time. A battle that ends is replaced by a new one.

    arena = Arena(ArenaConfig(battles=64, team_size=5), seed=0)
    result = arena.reset()
    result = arena.step(actions)                  # actions of all units, [B·U, ...]

On a GPU, the first decision is captured as a CUDA graph and replayed from then on, because it consists of thousands of small kernels. The
next call of `step` then overwrites the result of the last one. With `compile`, torch's compiler fuses the phases: the first step takes a
minute or two, later steps are about twice as fast on a CPU. Results then differ from those of a plain arena by rounding.

Shapes: B = battles, U = units, C = contacts.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.decision import StepEvents, decide, one_tick
from esper.arena.observe import Observer
from esper.arena.orders import (
    FIRST_WRONG,
    MOTION,
    action_masks,
    action_spec,
    check_actions,
    first_wrong,
    raise_on_wrong_values,
    read_orders,
)  # fmt: skip
from esper.arena.rewards import Rewards, has_died, pay, shared
from esper.arena.sensing import sense
from esper.arena.start import fresh, make_atlas, within_bits
from esper.arena.state import BattleStatus, State, cloned, copy_into, from_named, named_tensors, replace_rows, select
from esper.arena.tables import make_tables
from esper.arena.zone import Ending, find_ended
from esper.devices import GraphRecorder
from esper.vecenv import Actions, Masks


class StepResult(NamedTuple):
    """Result of one decision. If a battle ended, its observation, whole and masks are those of the next battle."""

    observation: Tensor  # [B, U, width]
    whole: Tensor | None  # [B, U, state width] view of a centralised critic, if the config asks for it
    masks: Masks  # [B·U, ...] allowed choices of the next decision
    reward: Tensor  # [B, U]
    parts: Rewards | None  # parts of the reward; None after a reset
    was_alive: Tensor  # [B, U] bool: the unit was alive when it made the decision
    died: Tensor  # [B, U] bool: the unit died in this decision
    ended: Tensor  # [B] bool: the battle ended
    winner: Tensor  # [B] int64: 0, 1, or -1 for a draw; meaningful where the battle ended
    by_time: Tensor  # [B] bool: the battle ended because its time was up
    step_events: StepEvents | None
    last: Tensor  # [B, 5] after the decision: decisions taken, score of each team, living units of each team
    is_first: bool = False  # whether this is the result of a reset


class Arena:
    """B battles. `state` is their whole state; after changing it, call `look` for the new observations.

    `record` captures the decision as a CUDA graph (None: on a GPU), and `compile` fuses it by torch's compiler; see above. A step may
    overwrite the memory of the state before it. Clone a state to keep it.
    """

    def __init__(
        self,
        config: ArenaConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        record: bool | None = None,
        compile: bool = False,
    ) -> None:
        self.config = config or ArenaConfig()
        self.device = _indexed(torch.device(device))
        self.is_recorded = self.device.type == "cuda" if record is None else record
        self.tables = make_tables(self.config, self.device)
        self.observer = Observer(self.config, self.tables, self.device)
        self.action_spec = action_spec(self.config)
        self.is_compiled = compile
        fuse: Any = _Fused if compile else _as_is
        self._tick, self._observe, self._sense = fuse(one_tick), fuse(self.observer.observe), fuse(sense)
        self.checks_at_once = self.device.type == "cpu"
        self.largest_team = torch.full((), self.config.team_size, device=self.device)
        # First wrong action since the reset, found on a GPU: its row, -1 if there is none, and its values.
        self._problem = torch.full((1 + len(FIRST_WRONG),), -1.0, dtype=torch.float64, device=self.device)
        self._recording: _Recording | None = None
        self.seed = seed
        self._seed_word = torch.full((), within_bits(seed), dtype=torch.int64, device=self.device)
        self.atlas = make_atlas(self.config, self.tables, seed=seed, device=self.device)
        self.place = torch.arange(self.config.battles, device=self.device)
        self.state = self._sensed(self._fresh(self.place, torch.zeros_like(self.place)))

    def _change_seed(self, seed: int) -> None:
        """Begin the first battles of another seed. Its maps overwrite the old ones, because a captured step reads the same memory."""
        self.seed = seed
        self._seed_word.fill_(within_bits(seed))
        for old, new in zip(self.atlas.worlds, make_atlas(self.config, self.tables, seed=seed, device=self.device).worlds, strict=True):
            old.copy_(new)
        self.state = self._sensed(self._fresh(self.place, torch.zeros_like(self.place)))

    def reset(self, seed: int | None = None) -> StepResult:
        """Begin new battles everywhere: the first ones of `seed` if it is given, else the first ones of the current seed."""
        if seed is not None and seed != self.seed:
            self._change_seed(seed)
        else:
            self.state = self._sensed(self._fresh(self.place, torch.zeros_like(self.place)))
        self._problem.fill_(-1.0)
        return self.look()

    def look(self) -> StepResult:
        """Return the battles as they are, without a step: rewards are 0 and nothing has ended."""
        alive = self.state.units.is_alive
        none = torch.zeros(self.config.battles, dtype=torch.bool, device=self.device)
        nobody = torch.zeros_like(alive)
        views = self._views(self.state)
        winner = torch.full_like(self.place, -1)
        nothing, last = torch.zeros_like(self.state.units.heat), self._last(self.state)
        return StepResult(*views, nothing, None, nobody, nobody, none, winner, none, None, last, is_first=True)

    def step(self, actions: Actions) -> StepResult:
        """Take one decision of all units in all battles. Wrong actions raise and change nothing.

        On a GPU, wrong values are replaced by the nearest valid ones, and the next `check` raises.
        """
        check_actions(actions, self.config)
        if self.checks_at_once:
            row, *values = first_wrong(actions, self.config).tolist()
            if row >= 0:
                raise_on_wrong_values(int(row), dict(zip(FIRST_WRONG, values, strict=True)), self.config)
        if not self.is_recorded:
            self.state, result = self._advance(self.state, actions)
            return result
        with torch.cuda.device(self.device):
            if self._recording is None:
                self._recording = _Recording(self, actions)
            return self._recording.replay(self, actions)

    def set_largest_team(self, size: int) -> None:
        """Limit the team size of battles that begin from now on. Units beyond it do not take part."""
        if not 1 <= size <= self.config.team_size:
            raise ValueError(f"the largest team must have 1 to {self.config.team_size} units; got {size}")
        self.largest_team.fill_(size)

    def check(self) -> None:
        """Raise if an action since the last reset had a wrong value. Waits for the device."""
        row, *values = self._problem.tolist()
        if row >= 0:
            raise_on_wrong_values(int(row), dict(zip(FIRST_WRONG, values, strict=True)), self.config)

    def _fresh(self, place: Tensor, episode: Tensor) -> State:
        return fresh(place, episode, self.config, self.tables, self.atlas, seed=self._seed_word, largest_team=self.largest_team)

    def _sensed(self, state: State) -> State:
        senses = self._sense(state.units, state.world, state.clouds, self.tables, contacts=self.config.contacts)
        return state._replace(senses=senses)

    def _advance(self, before: State, actions: Actions) -> tuple[State, StepResult]:
        """Return the next state and the result of one decision. On a GPU, note wrong actions in `_problem`."""
        config, tables = self.config, self.tables
        if not self.checks_at_once:
            self._problem.copy_(torch.where(self._problem[0] >= 0, self._problem, first_wrong(actions, config)))
            actions = _with_valid_values(actions, config)
        orders = read_orders(actions, before.senses, before.units, tables, battles=config.battles)
        after, step_events = decide(before, orders, tables, tick=self._tick)
        ending = find_ended(after.status, after.units, config)
        parts = pay(before, after, step_events, ending, tables, config)
        reward = shared(parts, before.units, config)
        died = has_died(before.units, after.units)
        last = self._last(after)
        state = self._sensed(self._begun_anew(after, ending))
        result = StepResult(*self._views(state), reward, parts, before.units.is_alive, died, *ending, step_events, last)
        return state, result

    def _begun_anew(self, after: State, ending: Ending) -> State:
        """Replace ended battles by the next ones. On the CPU only those are made, in place; a captured step makes all and selects."""
        if self.is_recorded or self.device.type != "cpu":
            return select(ending.ended, self._next(self.place, after.status), after)
        if not bool(ending.ended.any()):
            return after
        rows = torch.nonzero(ending.ended).squeeze(1)
        status = BattleStatus(*(part[rows] for part in after.status))
        return replace_rows(after, rows, self._next(rows, status))

    def _next(self, place: Tensor, status: BattleStatus) -> State:
        """Return the battles that follow those of `status` at the same indices. The counter of lost shots goes on."""
        begun = self._fresh(place, status.episode + 1)
        return begun._replace(status=begun.status._replace(overflow=status.overflow))

    def _views(self, state: State) -> tuple[Tensor, Tensor | None, Masks]:
        """Return observations, the view of the whole battle if the config asks for it, and masks."""
        whole = self.observer.whole_battle(state) if self.config.state_view else None
        return self._observe(state), whole, action_masks(state.senses, state.units, self.tables)

    def _last(self, state: State) -> Tensor:
        """Return `StepResult.last` [B, 5]."""
        alive = state.units.is_alive.view(self.config.battles, 2, -1).sum(2)
        return torch.cat((state.status.decision.unsqueeze(1).float(), state.status.score, alive.float()), 1)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, because a captured step overwrites the old one."""
        state = dict(named_tensors(cloned(self.state)))
        return {"seed": self.seed, "state": state, "problem": self._problem.clone(), "largest_team": self.largest_team.clone()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a `state_dict` of an arena of the same config. A state that does not fit raises and changes nothing."""
        state = from_named(saved["state"], like=self.state)
        for name, own in (("problem", self._problem), ("largest_team", self.largest_team)):
            if saved[name].shape != own.shape:
                raise ValueError(f"{name} should be {own.dtype} {tuple(own.shape)}; got {saved[name].dtype} {tuple(saved[name].shape)}")
        if saved["seed"] != self.seed:
            self._change_seed(int(saved["seed"]))
        if self._recording is None:
            self.state = cloned(state)
        else:
            copy_into(self.state, state)
        self._problem.copy_(saved["problem"])
        self.largest_team.copy_(saved["largest_team"])


class _Fused:
    """A part of the step, compiled by torch. If the compiler fails, the part runs uncompiled, with a warning.

    The compiled function returns a flat list of tensors: torch 2.11 returns broken named tuples from compiled code.
    """

    def __init__(self, part: Callable[..., Any]) -> None:
        self.part = part
        self.structure: Any = None  # of the part's result: its tuples, with None for every tensor
        self.run: Callable[..., list[Tensor]] | None = torch.compile(
            lambda *arguments, **keywords: _tensors_in(part(*arguments, **keywords)), dynamic=False
        )

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.run is None:
            return self.part(*arguments, **keywords)
        if self.structure is None:
            self.structure = _rebuilt(self.part(*arguments, **keywords), itertools.repeat(None))
        try:
            return _rebuilt(self.structure, iter(self.run(*arguments, **keywords)))
        except Exception as error:
            # An error that is not the compiler's is raised again by the uncompiled part, so nothing is hidden.
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            warnings.warn(f"torch's compiler failed ({reason}); the arena runs uncompiled, more slowly", RuntimeWarning, stacklevel=2)
            self.run = None
            return self.part(*arguments, **keywords)


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of nested tuples, in order."""
    return [value] if isinstance(value, Tensor) else [tensor for part in value for tensor in _tensors_in(part)]


def _rebuilt(structure: Any, tensors: Iterator[Tensor | None]) -> Any:
    """Return tuples like those of `structure`, with these tensors in the place of its own."""
    if not isinstance(structure, tuple):
        return next(tensors)
    parts = [_rebuilt(part, tensors) for part in structure]
    return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)


def _as_is(part: Any) -> Any:
    return part


def _with_valid_values(actions: Actions, config: ArenaConfig) -> Actions:
    """Replace wrong values by the nearest valid ones, and NaN and infinity by 0, so that no index leads outside of its table."""
    choices = {head.name: actions[head.name].clamp(0, head.size - 1) for head in action_spec(config).discrete}
    motion = actions["motion"]
    return {**choices, "motion": torch.where(motion.isfinite(), motion, 0.0).clamp(-1.0, 1.0)}


def _indexed(device: torch.device) -> torch.device:
    """Return the device with its index, because "cuda" and "cuda:0" are not equal."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


class _Recording:
    """A decision as a CUDA graph. It reads actions and state from fixed memory, and writes the new state over the old one."""

    def __init__(self, arena: Arena, actions: Actions) -> None:
        self.actions = {name: value.clone() for name, value in actions.items()}
        self.state = cloned(arena.state)
        problem = arena._problem.clone()
        recorder = GraphRecorder(arena.device)
        with recorder.stream():
            arena._advance(self.state, self.actions)  # run once before the recording, to load kernels and make workspaces
            arena._problem.copy_(problem)
            torch.cuda.empty_cache()  # the recording has memory of its own: give back that of the first run
            self.graph, self.result = recorder.record(lambda: self._advance(arena))
        arena.state = self.state

    def _advance(self, arena: Arena) -> StepResult:
        state, result = arena._advance(self.state, self.actions)
        copy_into(self.state, state)
        return result

    def replay(self, arena: Arena, actions: Actions) -> StepResult:
        if arena.state is not self.state:  # the caller has set another state
            copy_into(self.state, arena.state)
            arena.state = self.state
        for name, value in actions.items():
            self.actions[name].copy_(value)
        self.graph.replay()
        return self.result


def no_actions(config: ArenaConfig, device: torch.device | str = "cpu") -> Actions:
    """Return actions with which all units stand still and do nothing."""
    rows = config.battles * config.units
    spec = action_spec(config)
    still = {head.name: torch.zeros(rows, dtype=torch.int64, device=device) for head in spec.discrete}
    return {**still, "motion": torch.zeros(rows, len(MOTION), device=device)}
