"""Self-play: the arena as a `vecenv` whose rows are the units that learn, while opponents drive all other units.

The battles are divided into opponent groups once, at the start. In one group the learner plays both sides. In every other group it fights
one opponent: a scripted bot, or a past self that fills an opponent slot for some rollouts. The learner is the first side in battles with
an even index and the second side in the others. After every rollout the results go to the league, and past selves whose time is up are
replaced by others, drawn by how hard they are for the learner.

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

from esper.arena.arena import Arena, StepResult
from esper.arena.bots import BOTS, Bot
from esper.arena.env import ends, observation_spec, unit_rows
from esper.arena.rewards import Rewards
from esper.league.config import ArenaTrainConfig
from esper.league.events import LeagueChanged, RoundFought
from esper.league.league import LEARNER, League
from esper.league.network import make_player
from esper.league.opponents import SELF, OpponentGroup, OpponentSlot, OpponentSlots, divide_battles, is_slot
from esper.league.players import BotPlayer, Player, PolicyPlayer, join_actions, side_rows
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
        self.arena = Arena(config.arena, seed=seed, device=device, compile=config.compile)
        self.device = device = self.arena.device
        self.streams = Streams(seed).spawn("self-play")
        self.league = League(anchors=BOTS, config=config.league)
        self.trials = Trials(config, seed=self.streams.integer("ground"), device=device, group=group)
        self.observation_spec, self.action_spec = observation_spec(config.arena), self.arena.action_spec
        self.side = torch.arange(config.arena.battles, device=device) % 2  # [B] side of the learner in battles against an opponent
        self.learner: Policy | None = None
        # Each opponent group gets a range of neighbouring battles.
        ranges = torch.split(torch.arange(config.arena.battles, device=device), list(counts.values()))
        self.opponent_groups = [
            OpponentGroup(name, battles, self._make_opponent(name, battles)) for name, battles in zip(counts, ranges, strict=True)
        ]
        self.group_of = torch.cat([torch.full_like(battles, index) for index, battles in enumerate(ranges)])  # [B] group index
        self.opponent_slots = self._make_opponent_slots()
        self.rows = self._learning_rows()  # [N] indices into the B·U units
        self.num_envs = len(self.rows)
        # Per group: battles won, drawn and lost since the last round.
        self.results = torch.zeros(len(self.opponent_groups), 3, dtype=torch.int64, device=device)
        self.decisions = 0  # taken by every row so far
        self.updates = 0
        self.overflow = 0  # projectile overflow that events have reported so far
        self.paid = torch.zeros(len(Rewards._fields), dtype=torch.float64, device=device)  # parts of the reward, summed over rows and steps
        self.result: StepResult | None = None
        self._set_team()

    # Players and their units

    def _make_opponent(self, name: str, battles: Tensor) -> Player | None:
        if name == SELF:
            return None
        arena = self.config.arena
        rows = side_rows(battles, 1 - self.side[battles], team_size=arena.team_size)
        if not is_slot(name):
            return BotPlayer(Bot(name, self.arena, seed=self.streams.integer(name)), rows)
        device = torch.device(self.config.selfplay.opponent_device or self.device)
        policy = make_player(self.config, device=device)
        label = name.replace("slot", "seat")  # random streams keep the labels of earlier versions, so that their runs can be resumed
        return PolicyPlayer(policy, rows, units=arena.units, generator=self.streams.torch(label, device))

    def _make_opponent_slots(self) -> OpponentSlots:
        config = self.config
        # By default a past self stays as long as the longest battle, rounded up to whole rollouts.
        rollouts = config.selfplay.slot_rollouts or -(-config.arena.decisions // config.ppo.num_steps)
        slots = {
            group.name: OpponentSlot(group.opponent, group.battles)
            for group in self.opponent_groups
            if isinstance(group.opponent, PolicyPlayer)
        }
        return OpponentSlots(slots, rollouts=rollouts, battles=config.arena.battles, device=self.device)

    def _learning_rows(self) -> Tensor:
        """Return the units that the learner drives [N]: one side of most battles, both sides where it plays itself."""
        team_size = self.config.arena.team_size
        rows = []
        for group in self.opponent_groups:
            side = self.side[group.battles]
            rows.append(side_rows(group.battles, side, team_size=team_size))
            if group.opponent is None:
                rows.append(side_rows(group.battles, 1 - side, team_size=team_size))
        return torch.cat(rows)

    def attach(self, learner: Policy) -> None:
        """Set the policy that learns, and fill the opponent slots."""
        self.learner = learner
        self._draw_opponents()

    def _draw_opponents(self) -> None:
        assert self.learner is not None
        self.opponent_slots.draw(self.league, self.learner, decision=self.decisions, update=self.updates, rng=self.streams.numpy("seats"))

    # The environment

    def reset(self, seed: int | None = None) -> Timestep:
        # Ignore `seed`: the arena keeps the seed it was made with, because a new seed would make new maps, which takes long.
        return self._timestep(self.arena.reset())

    def step(self, actions: Actions) -> Timestep:
        assert self.result is not None, "reset first"
        if self.decisions and self.decisions % self.config.ppo.num_steps == 0:
            self._between_rollouts()
        # Join the learner's actions with those of all opponents, so that every unit gets an action.
        chosen = [(self.rows, actions)]
        chosen += [(group.opponent.rows, group.opponent.act(self.result)) for group in self.opponent_groups if group.opponent is not None]
        result = self.arena.step(join_actions(chosen, self.config.arena.battles * self.config.arena.units))
        self.decisions += 1
        self._count(result)
        assert result.parts is not None  # it is None only after a reset
        self.paid += torch.stack([part.flatten()[self.rows].sum() for part in result.parts])
        return self._timestep(result)

    def _timestep(self, result: StepResult) -> Timestep:
        """Keep the result for the opponents' next decision, and return the learning rows of it."""
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
        """Add the battles that ended in this step to `results`, on the device."""
        outcome = torch.where(result.winner == -1, 1, torch.where(result.winner == self.side, 0, 2))  # [B] 0 won, 1 drawn, 2 lost
        counts = result.ended & self.opponent_slots.is_credited(result.last[:, 0], self.decisions)
        self.results.view(-1).scatter_add_(0, self.group_of * 3 + outcome, counts.long())

    def close(self) -> None:
        pass

    # Between rollouts

    def _between_rollouts(self) -> None:
        """Record the results in the league, enter the learner into it every `enter_every` updates, and draw new past selves.

        Synchronises with the device once.
        """
        self.updates += 1
        self.arena.check()
        # Read all numbers in one transfer: parts of the reward, overflow, and won / drawn / lost of every group.
        parts = (self.paid / self.num_envs, self.arena.state.status.overflow.sum().view(1), self.results.view(-1))
        numbers = torch.cat([part.double() for part in parts]).tolist()
        overflow, *counts = map(int, numbers[len(Rewards._fields) :])
        self.results.zero_()
        self.paid.zero_()
        # Results of this rank by opponent. A past self may fill several slots; an empty slot is filled by a copy of the learner.
        records: dict[str, WinRecord] = {}
        for index, group in enumerate(self.opponent_groups):
            name = (self.opponent_slots.name(group.name) or LEARNER) if is_slot(group.name) else group.name
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
            "seats": self.opponent_slots.state_dict(),
            "seated": [self._opponent_state(group.opponent) for group in self.opponent_groups],
            "results": self.results.clone(),
            "paid": self.paid.clone(),
            "counters": {"steps": self.decisions, "updates": self.updates, "overflow": self.overflow},
            "ended": self.result.ended.clone(),
        }

    def _opponent_state(self, player: Player | None) -> dict[str, Any] | None:
        if player is None:
            return None
        if not isinstance(player, PolicyPlayer):
            return player.state_dict()
        return {**player.state_dict(), "policy": {name: value.clone() for name, value in player.policy.state_dict().items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.arena.load_state_dict(saved["arena"])
        self.streams.load_state_dict(saved["streams"])
        league, members = self.group.first(lambda: (saved["league"], saved["members"]))
        self.league = League.from_state(league, members, config=self.config.league)
        self.opponent_slots.load_state_dict(saved["seats"])
        unknown = [name for name in self.opponent_slots.names if name is not None and name not in self.league.members]
        if self.group.any(bool(unknown)):
            raise ValueError(
                "the checkpoint is from a version in which every rank had its own league: opponents of this run "
                f"({', '.join(unknown) or 'on another rank'}) are not members of rank 0's league; start a new run, with start_from set to "
                "a file in RUN/league/members"
            )
        for group, state in zip(self.opponent_groups, saved["seated"], strict=True):
            if group.opponent is None or state is None:
                continue
            if isinstance(group.opponent, PolicyPlayer):
                group.opponent.policy.load_state_dict(state["policy"])
            group.opponent.load_state_dict(state)
        self.results.copy_(saved["results"])
        if "paid" in saved:  # older files lack it; the next event then reports only the rewards since the resume
            self.paid.copy_(saved["paid"])
        counters = saved["counters"]
        self.decisions, self.updates, self.overflow = counters["steps"], counters["updates"], counters["overflow"]
        self._set_team()
        # Opponents reset their memory only in battles that had just ended when the state was saved.
        self.result = self.arena.look()._replace(ended=saved["ended"].to(self.device), is_first=False)


def _plain(records: dict[str, WinRecord]) -> dict[str, tuple[int, int, int]]:
    """Return (won, drawn, lost) by opponent."""
    return {name: (record.wins, record.draws, record.losses) for name, record in records.items()}
