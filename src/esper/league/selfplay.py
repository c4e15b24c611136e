"""The arena as the learner meets it: a `vecenv` whose rows are the units that learn, with everybody else driven by opponents.

Battles are dealt to tables once. At the first, both sides are the learner. At the others it fights one opponent, from the first side in
even places and from the second in odd ones: a scripted bot, or whichever past self sits there for this rollout. After every rollout
the results are read once, the league hears of them, and past selves are drawn anew by how hard they are.

Shapes: B = battles, U = units, N = rows that learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from esper.arena.arena import Arena, Scene
from esper.arena.bots import Bot
from esper.arena.env import observation_spec, unit_rows
from esper.events import Event
from esper.league.events import LeagueChanged, RoundFought
from esper.league.league import LEARNER, League
from esper.league.matches import Ground
from esper.league.network import make_policy
from esper.league.players import BotPlayer, Player, PolicyPlayer, join, side_rows
from esper.league.record import Record
from esper.league.training_config import ArenaTrainConfig
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.vecenv import Actions, Timestep

SELF = "self"


@dataclass
class Table:
    """Some battles, and who the learner fights there. `opponent` is None where both sides are the learner."""

    name: str  # of a bot, "self", or of a seat for past selves
    battles: Tensor  # [n]
    opponent: Player | None


class SelfPlay:
    """N rows that learn. `attach` gives it the policy that learns, which it copies into seats and sends to the league."""

    def __init__(
        self,
        config: ArenaTrainConfig,
        *,
        device: torch.device,
        seed: int,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.config, self.on_event = config, on_event
        self.arena = Arena(config.arena, seed=seed, device=device, compile=config.compile)
        self.device = device = self.arena.device
        self.streams = Streams(seed).spawn("self-play")
        self.league = League(anchors=("random", "weak", "middle", "strong"), config=config.league)
        self.observation_spec, self.action_spec = observation_spec(config.arena), self.arena.action_spec
        self.side = torch.arange(config.arena.battles, device=device) % 2  # of the learner, where it has only one
        self.seats: list[str | None] = [None] * config.selfplay.past_seats  # who sits there; None: the learner's own copy of today
        self.learner: Policy | None = None
        self.tables = self._laid()
        self.rows = self._learning_rows()
        self.num_envs = len(self.rows)
        self.table_of = torch.zeros(config.arena.battles, dtype=torch.int64, device=device)
        for index, table in enumerate(self.tables):
            self.table_of[table.battles] = index
        self.results = torch.zeros(len(self.tables), 3, dtype=torch.int64, device=device)  # won, drawn, lost
        self.steps = 0  # of every row
        self.updates = 0
        self.scene: Scene | None = None
        self.ground: Ground | None = None
        self._set_team()

    # Seats

    def _laid(self) -> list[Table]:
        selfplay, battles = self.config.selfplay, self.config.arena.battles
        names: list[str] = list(dict.fromkeys(selfplay.bots)) if selfplay.bot_share else []
        bots: list[str] = list(selfplay.bots)
        counts = [round(battles * selfplay.bot_share * bots.count(name) / len(bots)) for name in names]
        if selfplay.past_share:
            names += [f"seat {index}" for index in range(selfplay.past_seats)]
            counts += [round(battles * selfplay.past_share / selfplay.past_seats)] * selfplay.past_seats
        names.append(SELF)
        counts.append(battles - sum(counts))
        if min(counts) < 0 or max(counts[:-1], default=0) == 0 < len(counts) - 1:
            raise ValueError(f"{battles} battles cannot be dealt to {dict(zip(names, counts, strict=True))}; use more battles")
        order = torch.split(torch.arange(battles, device=self.device), counts)
        return [Table(name, place, self._opponent(name, place)) for name, place in zip(names, order, strict=True) if len(place)]

    def _opponent(self, name: str, battles: Tensor) -> Player | None:
        if name == SELF:
            return None
        arena = self.config.arena
        rows = side_rows(battles, 1 - self.side[battles], teams=arena.teams)
        if not name.startswith("seat"):
            return BotPlayer(Bot(name, self.arena, seed=self.streams.integer(name)), rows)
        device = torch.device(self.config.selfplay.opponent_device or self.device)
        return PolicyPlayer(self._fresh_policy(device), rows, units=arena.units, generator=self.streams.torch(name, device))

    def _fresh_policy(self, device: torch.device) -> Policy:
        config = self.config
        generator = Streams(config.ppo.seed).torch("policy of a seat")
        policy = make_policy(
            config.unit, config.ppo.network, config.arena, generator=generator, device=device, normalize_values=config.ppo.normalize_values
        )
        return policy.eval().requires_grad_(False)

    def _learning_rows(self) -> Tensor:
        teams = self.config.arena.teams
        rows = []
        for table in self.tables:
            side = self.side[table.battles]
            rows.append(side_rows(table.battles, side, teams=teams))
            if table.opponent is None:
                rows.append(side_rows(table.battles, 1 - side, teams=teams))
        return torch.cat(rows)

    def attach(self, learner: Policy) -> None:
        self.learner = learner
        self._seat_players()

    def _seat_players(self) -> None:
        """Past selves are drawn for the seats; while there are none, today's learner sits there."""
        chances = self.league.opponents()
        rng = self.streams.numpy("seats")
        for index in range(len(self.seats)):
            name = str(rng.choice(list(chances), p=list(chances.values()))) if chances else None
            self._fill_seat(index, name)

    def _fill_seat(self, index: int, name: str | None) -> None:
        """Who sits down in the middle of battles does not take over the memories of who sat there before."""
        assert self.learner is not None
        player = next((table.opponent for table in self.tables if table.name == f"seat {index}"), None)
        if isinstance(player, PolicyPlayer):
            player.policy.load_state_dict(self.learner.state_dict() if name is None else self.league.weights[name])
            if name != self.seats[index]:
                player.forget()
        self.seats[index] = name

    # The environment

    def reset(self, seed: int | None = None) -> Timestep:
        # The seed of the arena is that of the config: maps are dear, and a new seed would make new ones.
        return self._timestep(self.arena.reset())

    def step(self, actions: Actions) -> Timestep:
        assert self.scene is not None, "reset first"
        if self.steps and self.steps % self.config.ppo.num_steps == 0:
            self._between_rollouts()
        said = [(self.rows, actions)]
        said += [(table.opponent.rows, table.opponent.act(self.scene)) for table in self.tables if table.opponent is not None]
        scene = self.arena.step(join(said, self.config.arena.battles * self.config.arena.units))
        self._count(scene)
        self.steps += 1
        return self._timestep(scene)

    def _timestep(self, scene: Scene) -> Timestep:
        self.scene = scene
        rows = self.rows
        ended = scene.was_alive & (scene.died | scene.ended.unsqueeze(1))
        terminated = ended.flatten()[rows]
        return Timestep(
            obs={name: value[rows] for name, value in unit_rows(scene).items()},
            reward=scene.reward.flatten()[rows],
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            masks={name: mask[rows] for name, mask in scene.masks.items()},
            valid=scene.was_alive.flatten()[rows] if not scene.is_first else None,
        )

    def _count(self, scene: Scene) -> None:
        outcome = torch.where(scene.winner == -1, 1, torch.where(scene.winner == self.side, 0, 2))
        place = self.table_of * 3 + outcome
        self.results.view(-1).scatter_add_(0, place, scene.ended.long())

    def close(self) -> None:
        pass

    # Between rollouts

    def _between_rollouts(self) -> None:
        """The league hears of the battles; now and then the learner enters it; past selves are drawn anew. The device is read once."""
        self.updates += 1
        self.arena.check()
        counts = self.results.tolist()
        self.results.zero_()
        told: dict[str, tuple[int, int, int]] = {}
        for table, (won, drawn, lost) in zip(self.tables, counts, strict=True):
            name = self._opponent_name(table)
            if name not in (SELF, LEARNER):
                self.league.record(LEARNER, name, Record(won, drawn, lost))
            before = told.get(name, (0, 0, 0))
            told[name] = (before[0] + won, before[1] + drawn, before[2] + lost)
        overflow = int(self.arena.state.contest.overflow.sum())
        team = self._set_team()
        seated = [name for name in self.seats if name is not None]
        self.on_event(RoundFought(update=self.updates, results=told, opponents=seated, team=team, overflow=overflow))
        if self.updates % self.config.selfplay.enter_every == 0:
            self._enter()
        self._seat_players()

    def _opponent_name(self, table: Table) -> str:
        if not table.name.startswith("seat"):
            return table.name
        return self.seats[int(table.name.removeprefix("seat "))] or LEARNER

    def _set_team(self) -> int:
        """The curriculum: teams grow by one every so many updates."""
        first, most = self.config.selfplay.first_team, self.config.arena.teams
        team = most if first is None else min(most, first + self.updates // self.config.selfplay.team_grows)
        self.arena.set_largest_team(team)
        return team

    def _enter(self) -> None:
        """The learner sends a copy of itself to the league, where it fights the anchors and the best member, and stays if it beats that."""
        assert self.learner is not None
        name = f"update-{self.updates}"
        self.league.enter(name, self.steps * self.num_envs, self.learner.state_dict())
        candidate = self._fresh_policy(self.device)
        candidate.load_state_dict(self.learner.state_dict())
        against: dict[str, tuple[int, int, int]] = {}
        rivals = ["middle", "strong"] + ([self.league.best] if self.league.best is not None else [])
        for rival in rivals:
            record = self.fight(candidate, rival)
            self.league.record(name, rival, record)
            against[rival] = (record.wins, record.draws, record.losses)
        settled = self.league.settle(name)
        self.on_event(
            LeagueChanged(
                update=self.updates,
                name=name,
                is_promoted=settled.is_promoted,
                reason=settled.reason,
                retired=list(settled.retired),
                against=against,
            )
        )

    def fight(self, policy: Policy, rival: str) -> Record:
        """A match on ground that no training battle is fought on."""
        if self.ground is None:
            config = self.config
            arena = msgspec.structs.replace(config.arena, battles=config.selfplay.entry_battles, smallest_team=None)
            self.ground = Ground(arena, seed=self.streams.integer("ground"), device=self.device)
        if rival in self.league.anchors:
            return self.ground.play(policy, rival).record
        other = self._fresh_policy(self.device)
        other.load_state_dict(self.league.weights[rival])
        return self.ground.play(policy, other).record

    # State

    def state_dict(self) -> dict[str, Any]:
        """In memory of its own: what is counted and who is seated is written over."""
        assert self.scene is not None, "reset first"
        return {
            "arena": self.arena.state_dict(),
            "streams": self.streams.state_dict(),
            "league": self.league.to_state(),
            "members": self.league.weights,
            "seats": [name or "" for name in self.seats],
            "seated": [self._seat_state(table.opponent) for table in self.tables],
            "results": self.results.clone(),
            "counters": {"steps": self.steps, "updates": self.updates},
            "ended": self.scene.ended.clone(),
        }

    def _seat_state(self, player: Player | None) -> dict[str, Any] | None:
        if player is None:
            return None
        if not isinstance(player, PolicyPlayer):
            return player.state_dict()
        return {**player.state_dict(), "policy": {name: value.clone() for name, value in player.policy.state_dict().items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.arena.load_state_dict(saved["arena"])
        self.streams.load_state_dict(saved["streams"])
        self.league = League.from_state(saved["league"], saved["members"], config=self.config.league)
        self.seats = [name or None for name in saved["seats"]]
        for table, seated in zip(self.tables, saved["seated"], strict=True):
            if table.opponent is None or seated is None:
                continue
            if isinstance(table.opponent, PolicyPlayer):
                table.opponent.policy.load_state_dict(seated["policy"])
            table.opponent.load_state_dict(seated)
        self.results.copy_(saved["results"])
        self.steps, self.updates = saved["counters"]["steps"], saved["counters"]["updates"]
        self._set_team()
        # Memories of past selves begin anew where a battle had just ended, and nowhere else.
        self.scene = self.arena.look()._replace(ended=saved["ended"].to(self.device), is_first=False)
