"""Training by self-play: a PPO run of `esper.rl` in the arena, with a league of past selves.

    result = train_arena(ArenaTrainConfig(), "runs/arena")
    result = train_arena(None, "runs/arena", resume=True)                 # after a crash, or with a config of more steps
    policy, config = load_player("runs/arena")

The league is part of every checkpoint, and a resumed run reads it from there. The folder `league/` of the run is a copy for people and
other programs; it is written atomically after every checkpoint.

With several ranks, each rank fights its own battles, in training and in trials. All ranks hold the same league, and rank 0 decides on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Unpack

import msgspec
import torch

from esper.arena.arena import StepResult
from esper.arena.recorder import Recorder
from esper.config import load_saved
from esper.devices import determinism, find_device, threads
from esper.files import check_in_run, remove
from esper.league.config import ArenaTrainConfig
from esper.league.events import DECLARED
from esper.league.league import League
from esper.league.matches import MatchArena, MatchResult, seed_of_unseen_maps
from esper.league.network import make_parts, make_player
from esper.league.selfplay import SelfPlay
from esper.league.store import FOLDER, LeagueStore, read_weights
from esper.parallel import ALONE, Group
from esper.replay_file import FOLDER as REPLAYS, SUFFIX, find_replays
from esper.rl.checkpoints import open_store
from esper.rl.evaluate import EvaluationStopped, PolicyEvaluation
from esper.rl.policy import Policy
from esper.rl.ppo import PPO
from esper.rl.run_setup import Relay
from esper.rl.training import RunOptions, RunResult, Trainer, run_trainer
from esper.rng import Streams
from esper.runs import Checkpoint, CheckpointStore, load_module
from esper.runs.folder import CONFIG, RunError, check_holds_a_run

RECORDED = "evaluation-"  # prefix of the names of replays that evaluations record


def train_arena(
    config: ArenaTrainConfig | None, folder: Path | str | None = None, *, resume: bool = False, **options: Unpack[RunOptions]
) -> RunResult:
    """Train a player in a new run folder. With `resume`, continue the run in the folder, in the middle of its battles.

    A resumed run needs no `config`; a given one may ask for more steps. The run stops with a checkpoint after the update in which
    `should_stop()` becomes true.
    """
    # A resumed run without a checkpoint starts from the beginning, so it reads the file of its first weights again.
    has_begun = resume and folder is not None and open_store(folder).has_any()
    return run_trainer(_ARENA_RESUMED if has_begun else ARENA, config, folder, resume=resume, **options)


@contextlib.contextmanager
def prepare_arena(config: ArenaTrainConfig, group: Group = ALONE, *, begins: bool = True) -> Iterator[tuple[PPO, Relay]]:
    """Make the learner of a run and its self-play environment. Writes no files; a mistake in the config raises RunError.

    `config.start_from` is read only if the run `begins`: when a run is resumed, that file may be gone.
    """
    device, relay = group.place(find_device(config.device)), Relay()
    with threads(config.threads), determinism(config.deterministic):
        try:
            seed = Streams(config.ppo.seed).spawn(f"arena of rank {group.rank}").integer("maps") if group.rank else config.ppo.seed
            env = SelfPlay(config, device=device, seed=seed, on_event=relay, group=group)
            parts = make_parts(config.unit, config.ppo.network, config.arena, generator=Streams(config.ppo.seed).torch("unit"))
            ppo = PPO(
                env,
                config.ppo,
                parts.encoder,
                actor=parts.actor,
                critic=parts.critic,
                device=device,
                on_event=relay,
                group=group,
                counts_waiting=True,
            )
            ppo.monitor.compares_returns = False
            if begins and config.start_from is not None:
                load_module(ppo.policy, read_weights(Path(config.start_from)))
            env.attach(ppo.policy)
        except (ValueError, ImportError) as error:
            raise RunError(str(error)) from error
        yield ppo, relay


class BotEvaluator:
    """Scores policies in battles against a bot. A battle counts 1, 0.5 or 0 points; battles 2i and 2i + 1 share a map.

    Given the folder of a run, it records the first battle of each evaluation there, with the policy as the first team, and keeps the newest
    `config.eval_replays` of checkpoints and that of the best player at the end. Scores of one seed fight on the same maps, so the replays
    of checkpoints show how a player changes.

    There is one arena. It is made for the first score, gets other maps for another seed, and is kept until `close`: on a GPU, a second one
    would take more memory for its state and its captured step.
    """

    def __init__(self, config: ArenaTrainConfig, folder: Path | None = None) -> None:
        self.config, self.folder = config, folder
        self._arena: MatchArena | None = None

    def score(
        self, policy: Policy, seed: int, should_stop: Callable[[], bool] = lambda: False, *, name: str = "policy"
    ) -> PolicyEvaluation | None:
        config = self.config
        if not config.eval_battles:
            return None
        if self._arena is None:
            self._arena = evaluation_arena(config, config.eval_battles, seed, policy.device)
        arena, decisions = self._arena, 0
        arena.use_maps(_map_seed(seed))

        def stop_if_asked(result: StepResult) -> None:
            nonlocal decisions
            decisions += 1
            if should_stop():
                most = arena.arena.config.decisions
                raise EvaluationStopped(f"stopped after {decisions} of at most {most} decisions against {config.eval_against}")

        recorders = [Recorder(arena.arena, 0, teams=(name, config.eval_against))] if self.folder and config.eval_replays else []
        result = arena.play(policy, config.eval_against, recorders=recorders, on_step=stop_if_asked)
        for recorder in recorders:
            self._keep(recorder, f"{RECORDED}{name}")
        return PolicyEvaluation(list(result.points), [round(result.decisions)] * len(result.points))

    def _keep(self, recorder: Recorder, name: str) -> None:
        """Write a replay, and remove older ones: the newest of checkpoints stay, and one of the best player at the end of the run."""
        assert self.folder is not None
        check_in_run(self.folder / REPLAYS)
        recorder.write(self.folder / REPLAYS / f"{name}{SUFFIX}")
        replays = find_replays(self.folder)
        for start, count in ((f"{RECORDED}step-", self.config.eval_replays), (f"{RECORDED}best-", 1)):
            for path in [path for path in replays if path.name.startswith(start)][count:]:
                remove(path)

    def close(self) -> None:
        self._arena = None


def evaluation_arena(config: ArenaTrainConfig, battles: int, seed: int, device: torch.device) -> MatchArena:
    """Return an arena of full teams, on maps that no run trains on."""
    arena = msgspec.structs.replace(config.arena, battles=battles, smallest_team=None)
    return MatchArena(arena, seed=_map_seed(seed), device=device)


def _map_seed(seed: int) -> int:
    """Return the seed of the maps of an evaluation."""
    return seed_of_unseen_maps("evaluation", seed)


def play_against_bot(policy: Policy, config: ArenaTrainConfig, bot: str, *, battles: int, seed: int, sample: bool = False) -> MatchResult:
    """Play a match of full teams against a bot. The policy takes the likeliest actions, or samples them with `sample`."""
    return evaluation_arena(config, battles, seed, policy.device).play(policy, bot, sample=sample)


def write_league(folder: Path, config: ArenaTrainConfig, step: int, state: dict[str, Any]) -> None:
    """Write the league of a checkpoint to `league/` in the run's folder."""
    saved = state["ppo"]["environment"]
    if saved is not None:
        LeagueStore(folder / FOLDER).save(League.from_state(saved["league"], saved["members"]))


ARENA = Trainer(
    config=ArenaTrainConfig,
    title=lambda config: f"arena-{config.arena.team_size}v{config.arena.team_size}",
    prepare=lambda config, encoder, group: prepare_arena(config, group),
    # Not `eval_against`: scores against different bots cannot be compared, and they choose the best checkpoint.
    changeable=("total_steps", "minutes", "threads", "checkpoint_every", "keep", "eval_battles", "eval_replays"),
    is_evaluated=lambda config: config.eval_battles > 0,
    make_evaluator=BotEvaluator,
    declared=DECLARED,
    after_checkpoint=write_league,
)
_ARENA_RESUMED = dataclasses.replace(ARENA, prepare=lambda config, encoder, group: prepare_arena(config, group, begins=False))


def load_player(
    folder: Path | str, *, which: Literal["best", "latest"] = "best", device: torch.device | str = "cpu"
) -> tuple[Policy, ArenaTrainConfig]:
    """Return the policy of a run's best or latest checkpoint, ready to play, and the config of the run.

    If the latest checkpoint cannot be read, this raises: an older one would play under its name.
    """
    place = Path(folder)
    check_holds_a_run(place, "arena")
    config = load_saved(ArenaTrainConfig, place / CONFIG)
    store = open_store(place)
    if not store.has_any():
        raise RunError(f"{place} has no checkpoint yet; train it for longer")
    return make_player(config, load_checkpoint(store, which).state["ppo"]["policy"], device=torch.device(device)), config


def load_checkpoint(store: CheckpointStore, which: Literal["best", "latest"]) -> Checkpoint:
    """Load a checkpoint to play with. Raise RunError if the latest one cannot be read, instead of taking an older one."""
    checkpoint = store.load(which)
    if checkpoint.skipped:
        refused = checkpoint.skipped[0]
        problem = f"the latest checkpoint, {refused.path.name}, cannot be read: {refused.reason}"
        raise RunError(f"{problem}; resume the run, or take its best player")
    return checkpoint
