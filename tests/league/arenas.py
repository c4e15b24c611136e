"""Self-play small enough for tests."""

from __future__ import annotations

from typing import Any

import torch

from esper.arena.config import ArenaConfig, ArenaRewardConfig
from esper.league.config import ArenaTrainConfig, SelfPlayConfig, UnitNetworkConfig
from esper.league.network import make_policy
from esper.league.selfplay import SelfPlay
from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.policy import Policy
from esper.runs import Event

UNIT = UnitNetworkConfig(entity_width=4, terrain_width=4, width=8, head_width=8, state_width=4)


def small_arena(**settings: Any) -> ArenaConfig:
    return ArenaConfig(**{"battles": 8, "team_size": 2, "size": 16, "maps": 2, "seconds": 2.0, "contacts": 2, "allies": 1, **settings})


def small_training(
    *, arena: dict[str, Any] | None = None, selfplay: dict[str, Any] | None = None, ppo: dict[str, Any] | None = None, **settings: Any
) -> ArenaTrainConfig:
    """Eight battles of two seconds: two against each of two bots, one in each of two opponent slots, two against oneself."""
    learner = {
        "num_steps": 8,
        "gamma": ArenaRewardConfig().gamma,
        "num_epochs": 1,
        "num_minibatches": 2,
        "bptt_length": 4,
        "normalize_observations": False,
    }
    return ArenaTrainConfig(
        arena=small_arena(**(arena or {})),
        selfplay=SelfPlayConfig(
            **{
                "bots": ("random", "middle"),
                "bot_share": 0.5,
                "past_share": 0.25,
                "opponent_slots": 2,
                "enter_every": 2,
                "entry_battles": 2,
                **(selfplay or {}),
            }
        ),
        unit=UNIT,
        ppo=PPOConfig(**{**learner, "network": NetworkConfig(hidden_size=8), **(ppo or {})}),
        **{"device": "cpu", "threads": 1, "eval_battles": 2, "eval_against": "random", **settings},
    )


def small_policy(config: ArenaTrainConfig, seed: int = 0) -> Policy:
    generator = torch.Generator().manual_seed(seed)
    return make_policy(config.unit, config.ppo.network, config.arena, generator=generator, device=torch.device("cpu"))


def attached(config: ArenaTrainConfig, *, seed: int = 0, events: list[Event] | None = None) -> SelfPlay:
    """Self-play with a learner that never learns."""
    env = SelfPlay(config, device=torch.device("cpu"), seed=seed, on_event=(events if events is not None else []).append)
    env.attach(small_policy(config))
    return env
