"""Trials of candidates for the league: one match against all anchors and the best member.

Before the first trial, the anchors meet one another, so that their ratings do not rest on one candidate. Every trial has its own maps: on
those of an earlier trial, the best member would have an advantage, because it was chosen by its results there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from esper.league.config import ArenaTrainConfig
from esper.league.league import League, TrialResult
from esper.league.matches import Contender, MatchArena
from esper.league.network import make_player
from esper.league.ratings import MATCH_BATTLES
from esper.league.record import WinRecord
from esper.parallel import ALONE, Group
from esper.rl.policy import Policy
from esper.rng import Streams


class Trials:
    """Runs the trials of one training run. The arena is made for the first trial and kept.

    With several ranks, each rank fights its share of the battles on its own maps, and rank 0 decides. All ranks must call each method.
    """

    def __init__(self, config: ArenaTrainConfig, *, seed: int, device: torch.device, group: Group = ALONE) -> None:
        self.config, self.seed, self.device, self.group = config, seed, device, group
        self._match_arena: MatchArena | None = None

    def enter(self, league: League, name: str, step: int, learner: Policy) -> tuple[League, TrialResult, dict[str, WinRecord]]:
        """Enter a copy of the learner as a candidate, play its trial, and settle it.

        Returns the league after rank 0's decision, the decision, and the candidate's record against each rival.
        """
        meetings = self.group.gather_objects(self.let_anchors_meet(league))
        league.enter(name, step, learner.state_dict())
        candidate = make_player(self.config, league.weights[name], device=self.device)
        rivals = [*league.anchors, *([league.best] if league.best is not None else [])]
        players = [
            rival if rival in league.anchors else make_player(self.config, league.weights[rival], device=self.device) for rival in rivals
        ]
        shares = self.group.gather_objects(self.play(candidate, players, trial=name))
        against = {rival: sum(records, WinRecord()) for rival, *records in zip(rivals, *shares, strict=True)}

        def decide() -> tuple[TrialResult, dict[str, Any]]:
            for anchor, other, record in itertools.chain(*meetings):
                league.record(anchor, other, record)
            for rival, record in against.items():
                league.record(name, rival, record)
            return league.settle(name), league.to_state()

        # Rank 0 decides; the other ranks rebuild their league from its state.
        result, state = self.group.first(decide)
        if self.group.rank:
            league = League.from_state(state, league.weights, config=league.config)
        return league, result, against

    def play(self, policy: Policy, rivals: Sequence[Contender], *, trial: str) -> list[WinRecord]:
        """Play this rank's share of the battles on the maps of this trial, and return the candidate's record against each rival.

        Policies sample their actions, as they do in training.
        """
        seed = Streams(self.seed).spawn("trials").integer(trial)
        # The first trial has one rival fewer, because there is no best member yet.
        if self._match_arena is None or self._match_arena.rivals != len(rivals):
            self._match_arena = self._arena(seed, self.config.selfplay.entry_battles, rivals=len(rivals))
        self._match_arena.use_maps(seed)
        return [result.record for result in self._match_arena.play_all(policy, rivals, sample=True)]

    def let_anchors_meet(self, league: League) -> list[tuple[str, str, WinRecord]]:
        """Play this rank's share of a match of every pair of anchors that have not met; return both names and the record of the first.

        A match has as many battles as a rating counts, or more if trials do.
        """
        pairs = [pair for pair in itertools.combinations(league.anchors, 2) if not league.table.between(*pair).battles]
        if not pairs:
            return []
        battles = max(MATCH_BATTLES, self.config.selfplay.entry_battles)
        arena = self._arena(Streams(self.seed).spawn("trials").integer("anchors"), battles)
        return [(anchor, other, arena.play(anchor, other).record) for anchor, other in pairs]

    def _arena(self, seed: int, battles: int, *, rivals: int = 1) -> MatchArena:
        """Make an arena for this rank's share of the battles against each rival."""
        pairs = -(-battles // (2 * self.group.world_size))
        arena = msgspec.structs.replace(self.config.arena, battles=2 * pairs, smallest_team=None)
        return MatchArena(arena, seed=seed, device=self.device, rivals=rivals)
