"""Many battles as a Gymnasium `VectorEnv`: a sub-environment is one battle, and the learner's team is its one agent. Needs Gymnasium.

    env = ArenaVectorEnv("2v2-open-v1", opponent="strong-v1", num_envs=64)
    observations, infos = env.reset(seed=7)
    observations, rewards, terminations, truncations, infos = env.step(env.action_space.sample())

The same by name: `gymnasium.make_vec("esper/2v2-open-v1", num_envs=64, opponent="expert")`, after importing this module.

An observation is a dictionary, with units in the order of `ArenaConfig.pack`:
    observation   [T, width]      what each unit observes, see `esper.arena.observe`; zeros for the dead
    state         [state width]   a summary of the whole battle, for a centralised critic; STATE_LACKS of `observe` is not in it
    action_mask   [T, choices]    int8, allowed choices of all heads, one head after the other
    target_mask   [T, 8, C]       int8, allowed targets for each choice of the head `fire`

An action is a whole number for each head of each unit, [T, 7]; `heads` has their names and sizes. The flat mask of `target` allows what any
weapon may aim at, so an action that it allows can still be impossible for the chosen weapon; the unit then fires nothing. Orders of dead
units have no effect.

The reward is the mean of those of the team's units, which are in the infos (`unit_reward`). The learner is the red team in battles with an
even index and the blue one in the others; both observe the same. Battles end and begin in the same step (`AutoresetMode.SAME_STEP`): the
infos then have `final_obs`, and in `final_info` the learner's `score` (1 won, 0.5 drawn, 0 lost), the `decisions` that the battle took, and
whether it ended `by_time`. Units observe the clock, so a battle that ends by time terminates; nothing is truncated.

Shapes: N = battles, T = units in a team, C = contacts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

try:
    import gymnasium
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError as error:
    raise ImportError("esper.arena.gymnasium_vector needs Gymnasium: pip install 'esper-grow[league,gym]'") from error

from esper.arena.arena import ManualResetArena, StepResult
from esper.arena.config import BOTS, ArenaConfig
from esper.arena.observe import observation_width, state_width
from esper.arena.orders import FIRE, action_spec, as_motion
from esper.arena.scenarios import SCENARIOS, Scenario, find_scenario
from esper.rng import Streams
from esper.text_table import did_you_mean
from esper.vecenv import Actions

Array = np.ndarray[Any, np.dtype[Any]]
Observations = dict[str, Array]  # name -> [N, ...]
Opponent = Callable[[Observations], Array]  # from the opponent's observations to its actions [N, T, 7]


class ArenaVectorEnv(VectorEnv[Observations, Array, Array]):
    """N battles against an opponent: a bot, or a function from the observations of its team to its actions, which has the same spaces.

    `scenario` is the name of a scenario, or settings of one's own; `num_envs` replaces their `battles`. With `split="test"`, battles 2i and
    2i + 1 begin on test map i of the scenario, as in `esper arena leaderboard`; count the first battle of every sub-environment only.
    `reset(seed)` begins the first battles of a seed and makes its maps, which takes seconds; `reset()` begins the next battles. In a
    test, the seed is always that of the test maps.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}

    def __init__(
        self,
        scenario: str | Scenario | ArenaConfig = "2v2-open-v1",
        opponent: str | Opponent = "strong-v1",
        num_envs: int = 64,
        *,
        split: Literal["train", "test"] = "train",
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if isinstance(opponent, str) and opponent not in BOTS:
            hint = did_you_mean(opponent, BOTS, otherwise=f"there are {', '.join(BOTS)}")
            raise ValueError(f"there is no bot {opponent!r}; {hint}")
        if not isinstance(opponent, str) and not callable(opponent):
            raise ValueError(f"opponent must be the name of a bot, or a function from observations to actions; got {opponent!r}")
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1; got {num_envs}")
        if split not in ("train", "test"):
            raise ValueError(f"split must be 'train' or 'test'; got {split!r}")
        scenario = find_scenario(scenario) if isinstance(scenario, str) else scenario
        if not isinstance(scenario, Scenario | ArenaConfig):
            raise ValueError(f"scenario must be the name of a scenario, a Scenario or an ArenaConfig; got {scenario!r}")
        self.scenario = scenario if isinstance(scenario, Scenario) else None
        self.is_test = split == "test"
        if isinstance(scenario, ArenaConfig):
            if self.is_test:
                raise ValueError("only a scenario has test maps; give the name of one, or split='train'")
            config = scenario
        elif self.is_test:
            config, seed = scenario.test_arena(num_envs), scenario.test_seed
        else:
            scenario.check_training_seed(seed)
            config = scenario.arena
        self.config = msgspec.structs.replace(config, battles=num_envs, state_view=True)
        self.num_envs, self.opponent = num_envs, opponent
        self._battles = ManualResetArena(self.config, seed=seed, device=device)
        # Actions of all units, always in the same memory: on a GPU, the graph of the bots writes there.
        self._actions = {name: torch.zeros_like(value) for name, value in self._battles.simulation.actions.items()}
        self._now: StepResult | None = None  # what the next actions are chosen from; None before the first reset

        # Rows of the learner and of the opponent among all units [N, T], and the bots by team and battle [2, N]; -1 for the learner.
        team, battles = self.config.team_size, torch.arange(num_envs, device=self._battles.device)
        first = (2 * battles + battles % 2).unsqueeze(1) * team
        self._own = first + torch.arange(team, device=self._battles.device)
        self._other = self._own + torch.where(battles % 2 == 0, team, -team).unsqueeze(1)
        self._bots = torch.full((2, num_envs), -1, dtype=torch.int32, device=self._battles.device)
        if isinstance(opponent, str):
            self._bots[1 - battles % 2, battles] = BOTS.index(opponent)

        self.heads = {head.name: head.size for head in action_spec(self.config, is_categorical=True).discrete}
        self._sizes = np.array(list(self.heads.values()))
        parts: dict[str, spaces.Space[Any]] = {
            "observation": spaces.Box(-np.inf, np.inf, (team, observation_width(self.config)), np.float32),
            "state": spaces.Box(-np.inf, np.inf, (state_width(self.config),), np.float32),
            "action_mask": spaces.Box(0, 1, (team, int(self._sizes.sum())), np.int8),
            "target_mask": spaces.Box(0, 1, (team, len(FIRE), self.config.contacts), np.int8),
        }
        self.single_observation_space = spaces.Dict(parts)
        self.single_action_space = spaces.MultiDiscrete(np.tile(self._sizes, (team, 1)))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observations, dict[str, Any]]:
        if options:
            raise ValueError(f"this environment takes no reset options; got {options}")
        super().reset(seed=seed)
        if seed is not None and self.is_test:
            seed = self._battles.seed
        elif seed is not None and self.scenario is not None:
            self.scenario.check_training_seed(seed)
        self._now = self._battles.next() if seed is None and self._now is not None else self._battles.reset(seed)
        self._salt = Streams(self._battles.seed).spawn("match player 2").integer("bot")  # as in `esper.league.matches`
        return self._observe(self._now, self._own), self._infos(is_alive=self._battles.is_alive.flatten()[self._own])

    def step(self, actions: Array) -> tuple[Observations, Array, Array, Array, dict[str, Any]]:
        if self._now is None:
            raise ValueError("no battle is going on; begin with reset()")
        result = self._battles.step(self._joined(actions, self._now))
        reward = result.reward.flatten()[self._own]  # [N, T]
        takes_part = result.was_present.flatten()[self._own]
        infos: dict[str, Any] = {}
        self._now = result
        if bool(result.ended.any()):
            infos = self._final_infos(result)
            self._now = self._battles.replace(result.ended)
        infos |= self._infos(unit_reward=reward, is_alive=self._battles.is_alive.flatten()[self._own])
        team_reward = reward.sum(1) / takes_part.sum(1)
        never = np.zeros(self.num_envs, np.bool_)
        return self._observe(self._now, self._own), _array(team_reward), _array(result.ended), never, infos

    def close_extras(self, **kwargs: Any) -> None:
        self._battles.check()

    def _joined(self, actions: Array, now: StepResult) -> Actions:
        """Return the actions of all units: the learner's and the opponent's."""
        joined = self._actions
        both = [(self._own, actions)]
        if not isinstance(self.opponent, str):
            both.append((self._other, self.opponent(self._observe(now, self._other))))
        for rows, given in both:
            for name, value in self._checked(given).items():
                joined[name][rows.flatten()] = value
        if isinstance(self.opponent, str):
            self._battles.simulation.act(self._bots, salt=self._salt, into=joined)
        return joined

    def _checked(self, actions: Any) -> Actions:
        """Return actions of one team [N, T, 7] as those of its rows, or raise ValueError."""
        given = np.asarray(actions)
        if given.shape != self.action_space.shape or given.dtype.kind not in "iu":
            expected = f"whole numbers of shape {self.action_space.shape} (battle, unit, head)"
            raise ValueError(f"actions should be {expected}; got {given.dtype} of shape {given.shape}")
        wrong = (given < 0) | (given >= self._sizes)
        if wrong.any():
            battle, unit, head = np.argwhere(wrong)[0]
            name, value = list(self.heads)[head], given[battle, unit, head]
            raise ValueError(f"battle {battle}, unit {unit}: {name} is {value}, but must be from 0 to {self.heads[name] - 1}")
        rows = torch.from_numpy(given.astype(np.int64)).to(self._battles.device).flatten(0, 1)  # [N·T, 7]
        return as_motion({name: rows[:, head] for head, name in enumerate(self.heads)})

    def _observe(self, result: StepResult, rows: Tensor) -> Observations:
        """Return copies of the observations of one team, given its rows [N, T]."""
        assert result.whole is not None
        fire, target, vent = (result.masks[name][rows] for name in ("fire", "target", "vent"))  # [N, T, 8], [N, T, 8, C], [N, T, 2]
        # Targets that some weapon may aim at; without one, the choice that stands for no target.
        aimed = (target[:, :, 1:] & fire[:, :, 1:, None]).any(2)
        aimed = torch.where(aimed.any(2, keepdim=True), aimed, target[:, :, 0])
        known = torch.cat((fire, aimed, vent), 2)
        # All motion is allowed.
        free = torch.ones(*known.shape[:2], sum(self.heads.values()) - known.shape[2], dtype=torch.bool, device=known.device)
        return {
            "observation": _array(result.observation.flatten(0, 1)[rows]),
            "state": _array(result.whole.flatten(0, 1)[rows[:, 0]]),
            "action_mask": _array(torch.cat((known, free), 2).to(torch.int8)),
            "target_mask": _array(target.to(torch.int8)),
        }

    def _infos(self, **values: Tensor) -> dict[str, Any]:
        """Return values [N, ...] as infos, with the flags that Gymnasium adds for each key."""
        infos: dict[str, Any] = {name: _array(value) for name, value in values.items()}
        return infos | {f"_{name}": np.ones(self.num_envs, np.bool_) for name in values}

    def _final_infos(self, result: StepResult) -> dict[str, Any]:
        """Return the last observations and the results of the battles that have ended."""
        ended, winner = _array(result.ended), _array(result.winner)
        last = self._observe(result, self._own)
        final_obs = np.full(self.num_envs, None, dtype=object)
        for battle in np.flatnonzero(ended):
            final_obs[battle] = {name: value[battle] for name, value in last.items()}
        score = np.where(winner < 0, 0.5, winner == np.arange(self.num_envs) % 2)
        known = {"score": score, "decisions": _array(result.last[:, 0]).astype(np.int64), "by_time": _array(result.by_time)}
        final_info: dict[str, Any] = {name: np.where(ended, value, 0).astype(value.dtype) for name, value in known.items()}
        final_info |= {f"_{name}": ended.copy() for name in known}
        return {"final_obs": final_obs, "_final_obs": ended.copy(), "final_info": final_info, "_final_info": ended.copy()}


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.cpu().numpy()
    return array


for _name in SCENARIOS:
    gymnasium.register(f"esper/{_name}", vector_entry_point=f"{__name__}:ArenaVectorEnv", kwargs={"scenario": _name})
