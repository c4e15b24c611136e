"""The arena as the learner meets it: a `vecenv` whose rows are the units that learn, with everybody else driven by opponents.

Battles are dealt to tables once. At one of them both sides are the learner. At the others it fights one opponent, from the first side in
even places and from the second in odd ones: a scripted bot, or whichever past self sits there for some rollouts. After every rollout the
results are read, the league hears of them, and where it is time past selves are drawn anew by how hard they are.

Of several ranks each fights battles of its own. All have the same league: it hears of the battles of all ranks, and rank 0 decides who
becomes a member.

Shapes: B = battles, U = units, N = rows that learn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.arena.arena import Arena, StepResult
from esper.arena.bots import BOTS, Bot
from esper.arena.env import ends, observation_spec, unit_rows
from esper.arena.rewards import Rewards
from esper.league.dealing import SELF, deal, is_seat
from esper.league.events import LeagueChanged, RoundFought
from esper.league.league import LEARNER, League
from esper.league.network import make_player
from esper.league.opponent_slots import OpponentSlot, OpponentSlots
from esper.league.players import BotPlayer, Player, PolicyPlayer, join, side_rows
from esper.league.record import Record
from esper.league.training_config import ArenaTrainConfig
from esper.league.trials import Trials
from esper.parallel import ALONE, Group
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.runs import Event
from esper.vecenv import Actions, Timestep


@dataclass
class OpponentGroup:
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
        group: Group = ALONE,
    ) -> None:
        self.config, self.on_event, self.group = config, on_event, group
        dealt = deal(config.selfplay, config.arena.battles)  # before the arena, whose maps take a while
        self.arena = Arena(config.arena, seed=seed, device=device, compile=config.compile)
        self.device = device = self.arena.device
        self.streams = Streams(seed).spawn("self-play")
        self.league = League(anchors=BOTS, config=config.league)
        self.trials = Trials(config, seed=self.streams.integer("ground"), device=device, group=group)
        self.observation_spec, self.action_spec = observation_spec(config.arena), self.arena.action_spec
        self.side = torch.arange(config.arena.battles, device=device) % 2  # of the learner, where it has only one
        self.learner: Policy | None = None
        places = torch.split(torch.arange(config.arena.battles, device=device), list(dealt.values()))
        self.tables = [OpponentGroup(name, place, self._opponent(name, place)) for name, place in zip(dealt, places, strict=True)]
        self.table_of = torch.cat([torch.full_like(table.battles, index) for index, table in enumerate(self.tables)])
        self.opponent_slots = self._placed_seats()
        self.rows = self._learning_rows()
        self.num_envs = len(self.rows)
        self.results = torch.zeros(len(self.tables), 3, dtype=torch.int64, device=device)  # won, drawn, lost
        self.decisions = 0  # that every row has taken
        self.updates = 0
        self.overflow = 0  # of all rounds that were told
        self.paid = torch.zeros(len(Rewards._fields), dtype=torch.float64, device=device)  # parts of the rewards, of all rows that learn
        self.result: StepResult | None = None
        self._set_team()

    # Who drives whom

    def _opponent(self, name: str, battles: Tensor) -> Player | None:
        if name == SELF:
            return None
        arena = self.config.arena
        rows = side_rows(battles, 1 - self.side[battles], team_size=arena.team_size)
        if not is_seat(name):
            return BotPlayer(Bot(name, self.arena, seed=self.streams.integer(name)), rows)
        device = torch.device(self.config.selfplay.opponent_device or self.device)
        policy = make_player(self.config, device=device)
        return PolicyPlayer(policy, rows, units=arena.units, generator=self.streams.torch(name, device))

    def _placed_seats(self) -> OpponentSlots:
        config = self.config
        rollouts = config.selfplay.seat_rollouts or -(-config.arena.decisions // config.ppo.num_steps)
        opponent_slots = {
            table.name: OpponentSlot(table.opponent, table.battles) for table in self.tables if isinstance(table.opponent, PolicyPlayer)
        }
        return OpponentSlots(opponent_slots, rollouts=rollouts, battles=config.arena.battles, device=self.device)

    def _learning_rows(self) -> Tensor:
        team_size = self.config.arena.team_size
        rows = []
        for table in self.tables:
            side = self.side[table.battles]
            rows.append(side_rows(table.battles, side, team_size=team_size))
            if table.opponent is None:
                rows.append(side_rows(table.battles, 1 - side, team_size=team_size))
        return torch.cat(rows)

    def attach(self, learner: Policy) -> None:
        self.learner = learner
        self._draw_opponents()

    def _draw_opponents(self) -> None:
        assert self.learner is not None
        self.opponent_slots.draw(self.league, self.learner, decision=self.decisions, update=self.updates, rng=self.streams.numpy("seats"))

    # The environment

    def reset(self, seed: int | None = None) -> Timestep:
        # The seed of the arena is that of the config: maps are dear, and a new seed would make new ones.
        return self._timestep(self.arena.reset())

    def step(self, actions: Actions) -> Timestep:
        assert self.result is not None, "reset first"
        if self.decisions and self.decisions % self.config.ppo.num_steps == 0:
            self._between_rollouts()
        said = [(self.rows, actions)]
        said += [(table.opponent.rows, table.opponent.act(self.result)) for table in self.tables if table.opponent is not None]
        result = self.arena.step(join(said, self.config.arena.battles * self.config.arena.units))
        self.decisions += 1
        self._count(result)
        assert result.parts is not None  # only a reset pays nothing
        self.paid += torch.stack([part.flatten()[self.rows].sum() for part in result.parts])
        return self._timestep(result)

    def _timestep(self, result: StepResult) -> Timestep:
        self.result = result
        rows = self.rows
        terminated = ends(result).flatten()[rows]
        return Timestep(
            obs={name: value[rows] for name, value in unit_rows(result).items()},
            reward=result.reward.flatten()[rows],
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            masks={name: mask[rows] for name, mask in result.masks.items()},
            valid=result.was_alive.flatten()[rows] if not result.is_first else None,
        )

    def _count(self, result: StepResult) -> None:
        outcome = torch.where(result.winner == -1, 1, torch.where(result.winner == self.side, 0, 2))
        counts = result.ended & self.opponent_slots.is_credited(result.last[:, 0], self.decisions)
        self.results.view(-1).scatter_add_(0, self.table_of * 3 + outcome, counts.long())

    def close(self) -> None:
        pass

    # Between rollouts

    def _between_rollouts(self) -> None:
        """The league hears of the battles; now and then the learner enters it; past selves are drawn. The device is waited for once."""
        self.updates += 1
        self.arena.check()
        parts = (self.paid / self.num_envs, self.arena.state.contest.overflow.sum().view(1), self.results.view(-1))
        numbers = torch.cat([part.double() for part in parts]).tolist()
        overflow, *counts = map(int, numbers[len(Rewards._fields) :])
        self.results.zero_()
        self.paid.zero_()
        told: dict[str, Record] = {}  # of this rank
        for index, table in enumerate(self.tables):
            name = (self.opponent_slots.name(table.name) or LEARNER) if is_seat(table.name) else table.name
            won, drawn, lost = counts[3 * index : 3 * index + 3]
            told[name] = told.get(name, Record()) + Record(won, drawn, lost)
        for name, (won, drawn, lost) in itertools.chain(*(rank.items() for rank in self.group.gather_objects(_plain(told)))):
            if name not in (SELF, LEARNER):
                self.league.record(LEARNER, name, Record(won, drawn, lost))
        self.on_event(
            RoundFought(
                update=self.updates,
                results=_plain(told),
                opponents=[name for name in self.opponent_slots.names if name is not None],
                team=self._set_team(),
                overflow=overflow - self.overflow,
                reward=dict(zip(Rewards._fields, numbers, strict=False)),
            )
        )
        self.overflow = overflow
        if self.updates % self.config.selfplay.enter_every == 0:
            self._enter()
        self._draw_opponents()

    def _set_team(self) -> int:
        """The curriculum: teams grow by one every so many updates."""
        first, most = self.config.selfplay.first_team, self.config.arena.team_size
        team = most if first is None else min(most, first + self.updates // self.config.selfplay.team_grows)
        self.arena.set_largest_team(team)
        return team

    def _enter(self) -> None:
        """The learner sends a copy of itself to the league."""
        assert self.learner is not None
        name = f"update-{self.updates}"
        step = self.decisions * self.num_envs * self.group.world_size  # as the learner counts them
        self.league, settled, against = self.trials.enter(self.league, name, step, self.learner)
        if self.group.rank:
            return  # rank 0 tells of it
        self.on_event(
            LeagueChanged(
                update=self.updates,
                name=name,
                is_promoted=settled.is_promoted,
                reason=settled.reason,
                retired=list(settled.retired),
                against=_plain(against),
            )
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """In memory of its own: what is counted and who is seated is written over. Only rank 0 saves the league."""
        assert self.result is not None, "reset first"
        is_first = self.group.rank == 0
        return {
            "arena": self.arena.state_dict(),
            "streams": self.streams.state_dict(),
            "league": self.league.to_state() if is_first else None,
            "members": self.league.weights if is_first else {},
            "seats": self.opponent_slots.state_dict(),
            "seated": [self._seat_state(table.opponent) for table in self.tables],
            "results": self.results.clone(),
            "paid": self.paid.clone(),
            "counters": {"steps": self.decisions, "updates": self.updates, "overflow": self.overflow},
            "ended": self.result.ended.clone(),
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
        state, members = self.group.first(lambda: (saved["league"], saved["members"]))
        self.league = League.from_state(state, members, config=self.config.league)
        self.opponent_slots.load_state_dict(saved["seats"])
        strangers = [name for name in self.opponent_slots.names if name is not None and name not in self.league.members]
        if self.group.any(bool(strangers)):
            raise ValueError(
                "it was saved when every rank had a league of its own, and past selves sit in seats that the league of rank 0 does not "
                f"know ({', '.join(strangers) or 'on another rank'}); train anew, from RUN/league/members with start_from"
            )
        for table, seated in zip(self.tables, saved["seated"], strict=True):
            if table.opponent is None or seated is None:
                continue
            if isinstance(table.opponent, PolicyPlayer):
                table.opponent.policy.load_state_dict(seated["policy"])
            table.opponent.load_state_dict(seated)
        self.results.copy_(saved["results"])
        if "paid" in saved:  # in files from before it was counted, the first round after them tells what was paid since
            self.paid.copy_(saved["paid"])
        counters = saved["counters"]
        self.decisions, self.updates, self.overflow = counters["steps"], counters["updates"], counters["overflow"]
        self._set_team()
        # Memories of past selves begin anew where a battle had just ended, and nowhere else.
        self.result = self.arena.look()._replace(ended=saved["ended"].to(self.device), is_first=False)


def _plain(records: dict[str, Record]) -> dict[str, tuple[int, int, int]]:
    """Won, drawn and lost, by opponent."""
    return {name: (record.wins, record.draws, record.losses) for name, record in records.items()}
