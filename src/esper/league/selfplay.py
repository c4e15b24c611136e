"""Self-play: the arena as a `vecenv` whose rows are the units that learn, while opponents drive all other units.

The battles are divided into groups once, at the start. In one group the learner plays both sides, in another it fights scripted bots, and
in every other one a past self that fills an opponent slot for some rollouts. The learner is the first side in battles with an even index
and the second side in the others. After every rollout the results go to the league. Bots, and past selves whose time is up, are then
drawn by how hard they are for the learner.

With several ranks, each rank fights its own battles. All ranks hold the same league: it records the battles of all ranks, and rank 0
decides which candidates become members.

Shapes: B = battles, U = units in a battle, N = rows that learn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from esper.arena.arena import Arena, Rewards, StepResult
from esper.arena.config import BOTS
from esper.arena.env import observation_spec, timestep_of
from esper.arena.orders import as_motion
from esper.league.config import RATED, ArenaTrainConfig
from esper.league.events import LeagueChanged, RoundFought
from esper.league.league import LEARNER, League
from esper.league.network import make_player, player_spec
from esper.league.opponents import SCRIPTED, SELF, BotOpponents, OpponentSlot, OpponentSlots, divide_battles, is_slot
from esper.league.players import PolicyPlayer, side_rows
from esper.league.record import WinRecord
from esper.league.trials import Trials
from esper.parallel import ALONE, Group
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.runs import Event
from esper.vecenv import Actions, Timestep


class SelfPlay:
    """A `vecenv` of N learning units in battles against bots, past selves and the learner itself.

    Call `attach` with the learning policy before the first step: copies of it fill opponent slots and enter the league.
    """

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
        # Divide the battles first: that may raise, and the arena takes a while to make its maps.
        counts = divide_battles(config.selfplay, config.arena.battles)
        self.arena = Arena(config.arena, seed=seed, device=device)
        self.device = device = self.arena.device
        self.streams = Streams(seed).spawn("self-play")
        self.league = League(anchors=tuple(dict.fromkeys((*RATED, *config.selfplay.bots))), config=config.league)
        self.trials = Trials(config, seed=self.streams.integer("ground"), device=device, group=group)
        self.observation_spec, self.action_spec = observation_spec(config.arena), player_spec(config.unit, config.arena)
        self.side = torch.arange(config.arena.battles, device=device) % 2  # [B] side of the learner in battles against an opponent
        self.learner: Policy | None = None
        # Each group gets a range of neighbouring battles.
        ranges = torch.split(torch.arange(config.arena.battles, device=device), list(counts.values()))
        self.groups = dict(zip(counts, ranges, strict=True))
        scripted = self.groups.get(SCRIPTED, ranges[0][:0])
        self.bots = BotOpponents(self.arena, scripted, 1 - self.side[scripted], seed=self.streams.integer("bots"))
        self.past = {name: self._make_past_self(name, battles) for name, battles in self.groups.items() if is_slot(name)}
        self.opponent_slots = self._make_opponent_slots()
        self.rows = self._learning_rows()  # [N] indices into the B·U units
        self.num_envs = len(self.rows)
        self.actions = {name: torch.zeros_like(value) for name, value in self.arena.simulation.actions.items()}  # of all B·U units
        # Battles won, drawn and lost since the last round, by opponent: all bots, the slots, the learner itself.
        self.opponents = [*BOTS, *self.past, SELF]
        self.results = torch.zeros(len(self.opponents), 3, dtype=torch.int64, device=device)
        self.opponent_of = torch.full((config.arena.battles,), self.opponents.index(SELF), device=device)  # [B]; for bots, see `_count`
        for name in self.past:
            self.opponent_of[self.groups[name]] = self.opponents.index(name)
        self.decisions = 0  # taken by every row so far
        self.updates = 0
        self.overflow = 0  # projectile overflow that events have reported so far
        self.paid = torch.zeros(len(Rewards._fields), dtype=torch.float64, device=device)  # parts of the reward, summed over rows and steps
        self.lived = torch.zeros((), dtype=torch.int64, device=device)  # decisions of living rows since the last round
        self.result: StepResult | None = None
        self._set_team()

    # Players and their units

    def _make_past_self(self, name: str, battles: Tensor) -> PolicyPlayer:
        arena = self.config.arena
        rows = side_rows(battles, 1 - self.side[battles], team_size=arena.team_size)
        device = torch.device(self.config.selfplay.opponent_device or self.device)
        policy = make_player(self.config, device=device)
        return PolicyPlayer(policy, rows, units=arena.units, generator=self.streams.torch(name, device))

    def _make_opponent_slots(self) -> OpponentSlots:
        config = self.config
        # By default a past self stays as long as the longest battle, rounded up to whole rollouts.
        rollouts = config.selfplay.slot_rollouts or -(-config.arena.decisions // config.ppo.num_steps)
        slots = {name: OpponentSlot(player, self.groups[name]) for name, player in self.past.items()}
        return OpponentSlots(slots, rollouts=rollouts, battles=config.arena.battles, device=self.device)

    def _learning_rows(self) -> Tensor:
        """Return the units that the learner drives [N]: one side of most battles, both sides where it plays itself."""
        team_size = self.config.arena.team_size
        rows = []
        for name, battles in self.groups.items():
            side = self.side[battles]
            rows.append(side_rows(battles, side, team_size=team_size))
            if name == SELF:
                rows.append(side_rows(battles, 1 - side, team_size=team_size))
        return torch.cat(rows)

    def attach(self, learner: Policy) -> None:
        """Set the policy that learns, and draw the first opponents."""
        self.learner = learner
        self._draw_opponents()
        self.bots.begin()

    def _draw_opponents(self) -> None:
        assert self.learner is not None
        self.opponent_slots.draw(self.league, self.learner, decision=self.decisions, update=self.updates, rng=self.streams.numpy("slots"))
        if SCRIPTED in self.groups:
            names = sorted(set(self.config.selfplay.bots))
            is_even = self.config.selfplay.bot_draw == "even"
            self.bots.draw(dict.fromkeys(names, 1 / len(names)) if is_even else self.league.opponents(names), self.streams.numpy("bots"))

    # The environment

    def reset(self, seed: int | None = None) -> Timestep:
        # Ignore `seed`: the arena keeps the seed it was made with, because a new seed would make new maps, which takes long.
        self.bots.begin()
        return self._timestep(self.arena.reset())

    def step(self, actions: Actions) -> Timestep:
        assert self.result is not None, "reset first"
        if self.decisions and self.decisions % self.config.ppo.num_steps == 0:
            self._between_rollouts()
        self.bots.act(self.actions)
        for rows, chosen in [(self.rows, as_motion(actions)), *((player.rows, player.act(self.result)) for player in self.past.values())]:
            for name, value in chosen.items():
                self.actions[name].index_copy_(0, rows, value)
        result = self.arena.step(self.actions)
        self.decisions += 1
        self._count(result)
        self.bots.follow(result)
        assert result.parts is not None  # it is None only after a reset
        self.paid += torch.stack([part.flatten()[self.rows].sum() for part in result.parts])
        timestep = self._timestep(result)
        assert timestep.acts is not None
        self.lived += timestep.acts.sum()
        return timestep

    def _timestep(self, result: StepResult) -> Timestep:
        """Keep the result for the opponents' next decision, and return the learning rows of it."""
        self.result = result
        return timestep_of(result, self.config.arena, self.rows)

    def _count(self, result: StepResult) -> None:
        """Add the battles that ended in this step to `results`, on the device."""
        outcome = torch.where(result.winner == -1, 1, torch.where(result.winner == self.side, 0, 2))  # [B] 0 won, 1 drawn, 2 lost
        counts = result.ended & self.opponent_slots.is_credited(result.last[:, 0], self.decisions)
        bots = self.bots.bots.amax(0).long()  # [B]; -1 in battles without a bot
        opponents = torch.where(bots >= 0, bots, self.opponent_of)
        self.results.view(-1).scatter_add_(0, opponents * 3 + outcome, counts.long())

    def close(self) -> None:
        pass

    # Between rollouts

    def _between_rollouts(self) -> None:
        """Record the results in the league, enter the learner into it every `enter_every` updates, and draw new past selves.

        Synchronises with the device once.
        """
        self.updates += 1
        self.arena.check()
        # Read all numbers in one transfer: parts of the reward, overflow, and won / drawn / lost against every opponent.
        parts = (self.paid / self.num_envs, self.arena.overflow.sum().view(1), self.lived.view(1), self.results.view(-1))
        numbers = torch.cat([part.double() for part in parts]).tolist()
        overflow, lived, *counts = map(int, numbers[len(Rewards._fields) :])
        for total in (self.results, self.paid, self.lived):
            total.zero_()
        # Results of this rank by opponent. A past self may fill several slots; an empty slot is filled by a copy of the learner.
        records: dict[str, WinRecord] = {}
        fought = {*self.config.selfplay.bots, *self.groups} - {SCRIPTED}
        for index, opponent in enumerate(self.opponents):
            if opponent in fought:
                name = (self.opponent_slots.name(opponent) or LEARNER) if is_slot(opponent) else opponent
                won, drawn, lost = counts[3 * index : 3 * index + 3]
                records[name] = records.get(name, WinRecord()) + WinRecord(won, drawn, lost)
        # Every rank records the results of all ranks. Battles of the learner against itself say nothing.
        for name, (won, drawn, lost) in itertools.chain(*(rank.items() for rank in self.group.gather_objects(_plain(records)))):
            if name not in (SELF, LEARNER):
                self.league.record(LEARNER, name, WinRecord(won, drawn, lost))
        self.on_event(
            RoundFought(
                update=self.updates,
                results=_plain(records),
                opponents=[name for name in self.opponent_slots.names if name is not None],
                team=self._set_team(),
                overflow=overflow - self.overflow,
                agent_steps=lived,
                reward=dict(zip(Rewards._fields, numbers, strict=False)),  # the parts of the reward are the first numbers
            )
        )
        self.overflow = overflow
        if self.updates % self.config.selfplay.enter_every == 0:
            self._enter()
        self._draw_opponents()

    def _set_team(self) -> int:
        """Set the largest team size of the curriculum, which grows by one every `team_grows` updates, and return it."""
        first, most = self.config.selfplay.first_team, self.config.arena.team_size
        team = most if first is None else min(most, first + self.updates // self.config.selfplay.team_grows)
        self.arena.set_largest_team(team)
        return team

    def _enter(self) -> None:
        """Enter a copy of the learner into the league, and let its trial decide whether it stays."""
        assert self.learner is not None
        name = f"update-{self.updates}"
        step = self.decisions * self.num_envs * self.group.world_size  # counted as the learner counts steps
        self.league, result, against = self.trials.enter(self.league, name, step, self.learner)
        if self.group.rank:
            return  # only rank 0 reports it
        players = [entry.name for entry in self.league.entries if entry.kind != "retired"]
        self.on_event(
            LeagueChanged(
                update=self.updates,
                name=name,
                is_promoted=result.is_promoted,
                reason=result.reason,
                retired=list(result.retired),
                against=_plain(against),
                ratings={player: (rating.mu, rating.sigma) for player in players if (rating := self.league.rating(player)) is not None},
                anchors=list(self.league.anchors),
            )
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, without the learner. Counters and opponents' weights are copies. Only rank 0 saves the league."""
        assert self.result is not None, "reset first"
        is_first = self.group.rank == 0
        return {
            "arena": self.arena.state_dict(),
            "streams": self.streams.state_dict(),
            "league": self.league.to_state() if is_first else None,
            "members": self.league.weights if is_first else {},
            "slots": self.opponent_slots.state_dict(),
            "bots": self.bots.state_dict(),
            "past": [_state_of(player) for player in self.past.values()],
            "results": self.results.clone(),
            "paid": self.paid.clone(),
            "lived": self.lived.clone(),
            "counters": {"steps": self.decisions, "updates": self.updates, "overflow": self.overflow},
            "ended": self.result.ended.clone(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.arena.load_state_dict(saved["arena"])
        self.streams.load_state_dict(saved["streams"])
        league, members = self.group.first(lambda: (saved["league"], saved["members"]))
        self.league = League.from_state(league, members, config=self.config.league)
        self.opponent_slots.load_state_dict(saved["slots"])
        self.bots.load_state_dict(saved["bots"])
        for player, state in zip(self.past.values(), saved["past"], strict=True):
            player.policy.load_state_dict(state["policy"])
            player.load_state_dict(state)
        self.results.copy_(saved["results"])
        self.paid.copy_(saved["paid"])
        self.lived.copy_(saved["lived"])
        counters = saved["counters"]
        self.decisions, self.updates, self.overflow = counters["steps"], counters["updates"], counters["overflow"]
        self._set_team()
        # Opponents reset their memory only in battles that had just ended when the state was saved.
        self.result = self.arena.look()._replace(ended=saved["ended"].to(self.device), is_first=False)


def _state_of(player: PolicyPlayer) -> dict[str, Any]:
    """Return copies of the weights and the memory of a past self."""
    return {**player.state_dict(), "policy": {name: value.clone() for name, value in player.policy.state_dict().items()}}


def _plain(records: dict[str, WinRecord]) -> dict[str, tuple[int, int, int]]:
    """Return (won, drawn, lost) by opponent."""
    return {name: (record.wins, record.draws, record.losses) for name, record in records.items()}
