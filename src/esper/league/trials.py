"""The trial of who wants to join the league: one match against all anchors and the best member, on maps that nobody has seen.

Every trial has maps of its own. On those of an earlier one the best member would meet a candidate where it was found to be the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from esper.league.league import League, Settled
from esper.league.matches import Contender, MatchArena
from esper.league.network import make_player
from esper.league.record import Record
from esper.league.training_config import ArenaTrainConfig
from esper.parallel import ALONE, Group
from esper.rl.policy import Policy
from esper.rng import Streams


class Trials:
    """All trials of a training. The arena is made for the first of them, and kept.

    Of several ranks each fights its share of the battles, on maps of its own, and rank 0 decides. All call the methods together.
    """

    def __init__(self, config: ArenaTrainConfig, *, seed: int, device: torch.device, group: Group = ALONE) -> None:
        self.config, self.seed, self.device, self.group = config, seed, device, group
        self._match_arena: MatchArena | None = None

    def enter(self, league: League, name: str, step: int, learner: Policy) -> tuple[League, Settled, dict[str, Record]]:
        """A copy of the learner enters the league, fights, and stays if it beats the best member. Returns the league as rank 0 has it
        then, what became of the candidate, and how it fared."""
        league.enter(name, step, learner.state_dict())
        candidate = make_player(self.config, league.weights[name], device=self.device)
        rivals = [*league.anchors, *([league.best] if league.best is not None else [])]
        shares = self.group.gather_objects(self.fight(candidate, [self._player(league, rival) for rival in rivals], trial=name))
        against = {rival: sum(records, Record()) for rival, *records in zip(rivals, *shares, strict=True)}

        def decide() -> tuple[Settled, dict[str, Any]]:
            for rival, record in against.items():
                league.record(name, rival, record)
            return league.settle(name), league.to_state()

        settled, state = self.group.first(decide)
        if self.group.rank:
            league = League.from_state(state, league.weights, config=league.config)
        return league, settled, against

    def fight(self, policy: Policy, rivals: Sequence[Contender], *, trial: str) -> list[Record]:
        """The candidate's results in this rank's share of the battles, on maps of this trial alone. Policies draw their actions, as they
        do when they sit opposite the learner."""
        seed = Streams(self.seed).spawn("trials").integer(trial)
        if self._match_arena is None or self._match_arena.rivals != len(rivals):  # the first trial has no best member to beat
            pairs = -(-self.config.selfplay.entry_battles // (2 * self.group.world_size))
            arena = msgspec.structs.replace(self.config.arena, battles=2 * pairs, smallest_team=None)
            self._match_arena = MatchArena(arena, seed=seed, device=self.device, rivals=len(rivals))
        self._match_arena.open(seed)
        return [result.record for result in self._match_arena.play_all(policy, rivals, draws=True)]

    def _player(self, league: League, name: str) -> Contender:
        return name if name in league.anchors else make_player(self.config, league.weights[name], device=self.device)
