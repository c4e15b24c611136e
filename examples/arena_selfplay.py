"""Train a player of the arena by self-play, and let it fight a bot.

Two teams of walking machines fight over a zone. One policy drives every unit of its side. It learns against bots, its past selves and
itself, and past selves that do well stay in a league. Five updates of single combat show the calls and teach next to nothing; the
defaults of `ArenaTrainConfig` are 256 battles of five against five and 20 million steps. Needs pip install 'esper-grow[league]'.

    python examples/arena_selfplay.py

update 5  step  1440   64 lives ended  mean return -0.49
name         kind  step      rating  games  opponents            vs random              vs weak           vs middle  …  learner scores
update-2     best   576  24.9 ± 4.8     16          4   62.5 % [0.9, 99.7]   75.0 % [1.4, 99.8]   0.0 % [0.0, 98.8]  …          33.3 %
against the random bot: 2 won, 11 drawn, 3 lost
"""

import tempfile
from pathlib import Path

import torch

from esper.arena import ArenaConfig
from esper.league import ArenaTrainConfig, LeagueStore, SelfPlayConfig, load_player, play_against_bot, standings, train_arena
from esper.rl import PPO, Update


def show(ppo: PPO, update: Update) -> None:
    print(f"update {update.update}  step {update.step:>5}  {update.episodes:>3} lives ended  mean return {update.mean_return:+.2f}")


def main() -> None:
    torch.set_num_threads(1)
    config = ArenaTrainConfig(
        arena=ArenaConfig(battles=8, team_size=1, size=16, maps=8, seconds=6.0),
        selfplay=SelfPlayConfig(bots=("weak",), enter_every=2, entry_battles=4),
        total_steps=1_280,
        checkpoint_every=4,
        eval_battles=4,
        eval_against="weak",
        device="cpu",
        threads=1,
    )
    with tempfile.TemporaryDirectory() as folder:  # a run of your own would go to runs/NAME and could be resumed
        run = Path(folder) / "run"
        train_arena(config, run, callback=show)
        print(standings(LeagueStore(run / "league").load()))
        player, config = load_player(run)

    match = play_against_bot(player, config, "random", battles=16, seed=1)
    print(f"against the random bot: {match.record.wins} won, {match.record.draws} drawn, {match.record.losses} lost")


if __name__ == "__main__":
    main()
