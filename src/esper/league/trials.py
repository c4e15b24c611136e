"""The trial of who wants to join the league: matches against all anchors and the best member, on ground that nobody trains on."""

from __future__ import annotations

import msgspec
import torch

from esper.league.league import League, Settled
from esper.league.matches import Contender, Ground
from esper.league.network import make_player
from esper.league.record import Record
from esper.league.training_config import ArenaTrainConfig
from esper.rl.policy import Policy


class Trials:
    """The ground is made for the first of them, and kept."""

    def __init__(self, config: ArenaTrainConfig, *, seed: int, device: torch.device) -> None:
        self.config, self.seed, self.device = config, seed, device
        self._ground: Ground | None = None

    def enter(self, league: League, name: str, step: int, learner: Policy) -> tuple[Settled, dict[str, Record]]:
        """A copy of the learner enters the league, fights, and stays if it beats the best member. Also says how it fared."""
        league.enter(name, step, learner.state_dict())
        candidate = make_player(self.config, league.weights[name], device=self.device)
        against: dict[str, Record] = {}
        for rival in (*league.anchors, *([league.best] if league.best is not None else [])):
            against[rival] = self.fight(candidate, self._player(league, rival))
            league.record(name, rival, against[rival])
        return league.settle(name), against

    def fight(self, policy: Policy, rival: Contender) -> Record:
        """Policies draw their actions, as they do when they sit opposite the learner."""
        if self._ground is None:
            arena = msgspec.structs.replace(self.config.arena, battles=self.config.selfplay.entry_battles, smallest_team=None)
            self._ground = Ground(arena, seed=self.seed, device=self.device)
        return self._ground.play(policy, rival, draws=True).record

    def _player(self, league: League, name: str) -> Contender:
        return name if name in league.anchors else make_player(self.config, league.weights[name], device=self.device)
