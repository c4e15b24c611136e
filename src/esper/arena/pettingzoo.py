"""One battle as a PettingZoo `ParallelEnv`, for training with other software. Needs PettingZoo.

    env = parallel_env(team_size=2, size=32)
    observations, infos = env.reset(seed=7)
    while env.agents:
        actions = {agent: env.action_space(agent).sample(observations[agent]["action_mask"]) for agent in env.agents}
        observations, rewards, terminations, truncations, infos = env.step(actions)

An agent is a unit, named by its team, its class and its number among the team's units of that class: "blue_scout_0" is the first scout of
the second team. Names and their order never change: a team's units are in the order of `ArenaConfig.pack`, the red team first. All agents
leave when the battle ends; the last observation is the end of the battle. A dead agent stays until then, because it is paid what its team
gets: its actions have no effect. If the dead are not paid (`ArenaRewardConfig.pays_dead`), an agent leaves when it dies. `state()` is a
summary of the whole battle, for a centralised critic. For many battles at once, use `esper.arena.gymnasium_vector` or
`esper.arena.env.ArenaEnv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

try:
    from gymnasium import spaces
    from pettingzoo import ParallelEnv
except ImportError as error:
    raise ImportError("esper.arena.pettingzoo needs PettingZoo: pip install 'esper-grow[league,gym]'") from error

from esper.arena.arena import ManualResetArena, StepResult, no_actions
from esper.arena.config import ArenaConfig
from esper.arena.observe import observation_width, state_width
from esper.arena.scenarios import Scenario, find_scenario
from esper.arena.specs import RULES_VERSION
from esper.config import from_mapping
from esper.vecenv import Actions, ActionSpec, Discrete, Head

TEAMS = ("red", "blue")  # first team, second team
MAPS = 16  # number of maps without a config or a scenario, smaller than usual, because a new seed makes all of them again
STATE_LIMIT = 2.0  # larger than the absolute value of every number of the state; the largest are shares of a heat cap, up to 1.5

Array = np.ndarray[Any, np.dtype[Any]]


def parallel_env(
    config: ArenaConfig | str | None = None, *, seed: int = 0, render_mode: str | None = None, **fields: Any
) -> ArenaParallelEnv:
    """Make an environment from a config, from fields of one (`team_size=2, landscapes=["city"]`), or from the name of a scenario."""
    if config is not None and fields:
        raise ValueError(f"give a config or fields of one, not both; got a config and {sorted(fields)}")
    if fields:
        config = from_mapping(ArenaConfig, {"maps": MAPS, **fields})
    if not isinstance(config, str):
        return ArenaParallelEnv(config, seed=seed, render_mode=render_mode)
    scenario = find_scenario(config)
    scenario.check_training_seed(seed)
    env = ArenaParallelEnv(scenario.arena, seed=seed, render_mode=render_mode)
    env.scenario = scenario
    return env


class ArenaParallelEnv(ParallelEnv[str, dict[str, Any], dict[str, Any]]):  # type: ignore[misc]  # PettingZoo has no types
    """One battle as a `ParallelEnv`; `battles` of the config is ignored.

    An observation is {"observation": the vector of `esper.arena.observe`, "action_mask": int8 by head}. The infos have the agent's team,
    whether it is alive and, at the end, the winner: "red", "blue" or "draw". `reset(seed)` begins the first battle of that seed, `reset()`
    the next one.
    """

    metadata: dict[str, Any] = {"name": f"esper_arena_v{RULES_VERSION}", "render_modes": [], "is_parallelizable": True}

    def __init__(self, config: ArenaConfig | None = None, *, seed: int = 0, render_mode: str | None = None) -> None:
        if render_mode is not None:
            raise ValueError(f"this environment cannot render, so render_mode must be None; got {render_mode!r}")
        self.config = msgspec.structs.replace(config or ArenaConfig(maps=MAPS), battles=1, state_view=True)
        self.render_mode = render_mode
        self._battle = ManualResetArena(self.config, seed=seed)
        self.scenario: Scenario | None = None  # whose test maps must not be used
        self._has_begun = False
        self.agents: list[str] = []
        self.possible_agents = agent_names(self.config)
        self._units = {agent: unit for unit, agent in enumerate(self.possible_agents)}
        # Each agent has its own spaces, so that each can be seeded.
        self.observation_spaces = {agent: _observation_space(self.config, self._battle.action_spec) for agent in self.possible_agents}
        self.action_spaces = {agent: OrderSpace(self._battle.action_spec) for agent in self.possible_agents}
        self.state_space = spaces.Box(-STATE_LIMIT, STATE_LIMIT, (state_width(self.config),), np.float32)

    def observation_space(self, agent: str) -> spaces.Dict:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> OrderSpace:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Begin the first battle of `seed`, or without a seed the next battle. `options` are ignored."""
        if seed is not None and self.scenario is not None:
            self.scenario.check_training_seed(seed)
        result = self._battle.next() if seed is None and self._has_begun else self._battle.reset(seed)
        self._has_begun = True
        present = self._battle.is_alive[0].tolist()
        self.agents = [agent for agent, unit in self._units.items() if present[unit]]
        return self._observed(result), {agent: self._info(agent) for agent in self.agents}

    def step(
        self, actions: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Take one decision of all agents. Wrong actions raise and change nothing."""
        if not self.agents:
            raise ValueError("no battle is going on; begin one with reset()")
        result = self._battle.step(self._gathered(actions))
        has_ended = bool(result.ended[0])
        reward, died = result.reward[0].tolist(), result.died[0].tolist()
        observations = self._observed(result)
        rewards = {agent: reward[self._units[agent]] for agent in self.agents}
        stays = self.config.reward.pays_dead
        terminations = {agent: has_ended or (died[self._units[agent]] and not stays) for agent in self.agents}
        truncations = dict.fromkeys(self.agents, False)  # agents observe the clock, so the time limit terminates the battle
        infos = {agent: self._info(agent, result if has_ended else None) for agent in self.agents}
        self.agents = [agent for agent in self.agents if not terminations[agent]]
        return observations, rewards, terminations, truncations, infos

    def state(self) -> Array:
        """Return a summary of the whole battle in the world frame of the first team: STATE_UNIT of `esper.arena.observe` for every unit,
        then STATE_BATTLE. It is not the full state: STATE_LACKS says what is missing, such as headings, velocities and terrain.
        """
        whole: Array = self._battle.simulation.views["whole"][0, 0].numpy().copy()
        return whole

    def render(self) -> None:
        """Nothing is drawn."""

    def close(self) -> None:
        pass

    def _observed(self, result: StepResult) -> dict[str, dict[str, Any]]:
        observation = result.observation[0].numpy().copy()  # the next step overwrites it
        masks = {name: mask.numpy().astype(np.int8) for name, mask in result.masks.items()}
        return {
            agent: {"observation": observation[unit], "action_mask": {name: mask[unit] for name, mask in masks.items()}}
            for agent, unit in self._units.items()
            if agent in self.agents
        }

    def _info(self, agent: str, ended: StepResult | None = None) -> dict[str, Any]:
        info = {"team": agent.split("_")[0], "is_alive": bool(self._battle.is_alive[0, self._units[agent]])}
        return info if ended is None else {**info, "winner": (*TEAMS, "draw")[int(ended.winner[0])]}

    def _gathered(self, actions: Mapping[str, Mapping[str, Any]]) -> Actions:
        """Check the actions and return those of all units [U, ...]. Units without an agent stand still."""
        unknown = [agent for agent in actions if agent not in self.agents]
        if unknown:
            raise ValueError(f"{unknown[0]!r} takes no part, or not any more; the agents are {self.agents}")
        missing = [agent for agent in self.agents if agent not in actions]
        if missing:
            raise ValueError(f"there is no action for {missing[0]!r}; give one for every agent in `agents`")
        spec = self._battle.action_spec
        names = [head.name for head in spec.heads]
        gathered = {name: tensor.numpy() for name, tensor in no_actions(self.config).items()}
        for agent, action in actions.items():
            if not isinstance(action, Mapping) or set(action) != set(names):
                got = sorted(action) if isinstance(action, Mapping) else type(action).__name__
                raise ValueError(f"{agent}: an action is a dictionary with the heads {names}; got {got}")
            for head in spec.heads:
                gathered[head.name][self._units[agent]] = _checked(agent, head, action[head.name])
        return {name: torch.from_numpy(values) for name, values in gathered.items()}


def agent_names(config: ArenaConfig) -> list[str]:
    """Return the names of all units in order.

    >>> agent_names(ArenaConfig(team_size=3, pack=("scout", "heavy")))
    ['red_scout_0', 'red_heavy_0', 'red_scout_1', 'blue_scout_0', 'blue_heavy_0', 'blue_scout_1']
    """
    team = config.unit_classes[: config.team_size]
    return [f"{color}_{name}_{team[:unit].count(name)}" for color in TEAMS for unit, name in enumerate(team)]


class OrderSpace(spaces.Dict):
    """The action space of an agent. `sample(mask)` with the observed mask draws an allowed action; the target depends on the weapon."""

    def __init__(self, spec: ActionSpec, seed: int | None = None) -> None:
        self.spec = spec
        super().__init__({head.name: _head_space(head) for head in spec.heads}, seed=seed)

    def sample(self, mask: dict[str, Any] | None = None, probability: dict[str, Any] | None = None) -> dict[str, Any]:
        if mask is None:
            return super().sample(probability=probability)
        drawn: dict[str, Any] = {}
        for head in self.spec.heads:
            allowed = mask.get(head.name)
            if allowed is not None and isinstance(head, Discrete) and head.parent is not None:
                allowed = allowed[drawn[head.parent]]
            drawn[head.name] = self.spaces[head.name].sample(mask=allowed)
        return drawn


def _head_space(head: Head) -> spaces.Space[Any]:
    return spaces.Discrete(head.size) if isinstance(head, Discrete) else spaces.Box(-1.0, 1.0, (head.size,), np.float32)


def _observation_space(config: ArenaConfig, spec: ActionSpec) -> spaces.Dict:
    masks: dict[str, spaces.Space[Any]] = {head.name: spaces.Box(0, 1, spec.mask_shape(head), np.int8) for head in spec.discrete}
    seen = spaces.Box(-np.inf, np.inf, (observation_width(config),), np.float32)
    return spaces.Dict({"observation": seen, "action_mask": spaces.Dict(masks)})


def _checked(agent: str, head: Head, value: Any) -> Any:
    """Return the value of one head, or raise an error that names the agent."""
    array = np.asarray(value)
    if isinstance(head, Discrete):
        if array.shape != () or array.dtype.kind not in "iu" or not 0 <= array < head.size:
            raise ValueError(f"{agent}: {head.name} must be a whole number from 0 to {head.size - 1}; got {value!r}")
        return array
    if array.shape != (head.size,) or array.dtype.kind not in "iuf" or not (np.abs(array) <= 1.0).all():
        raise ValueError(f"{agent}: {head.name} must be {head.size} numbers from -1 to 1; got {value!r}")
    return array
