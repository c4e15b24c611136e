"""`esper ppo eval` plays fresh episodes with the policy of a run; `esper ppo envs` lists the built-in environments."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from esper.cli.command import FAILED, CommandError, CommandResult
from esper.cli.parse import parse
from esper.config import Config, NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from esper.rl.policy import Policy
    from esper.rl.run_config import TrainConfig


MAX_VIDEO_STEPS = 1000  # steps of the episode in a video
DESCRIPTION = "Plays fresh episodes with the policy of a run, in the environment that it was trained in."


class PPOEvalArguments(Config):
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of the run"""
    episodes: PositiveInt = 100
    """episodes that are played"""
    checkpoint: Literal["best", "latest"] = "best"
    """which policy of the run"""
    stochastic: tyro.conf.FlagCreatePairsOff[bool] = False
    """draw actions instead of taking the likeliest"""
    seed: NonNegativeInt = 0
    """seed of the episodes, none of which chose the best checkpoint; the evaluation at the end of training uses 0"""
    max_steps: PositiveInt = 10_000
    """steps after which an episode is cut"""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """where the policy is computed; None: as the run was trained"""
    video: Path | None = None
    """also play one episode and write a video of it to this .gif, .webp or .png file; for Gymnasium environments"""


def run(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(PPOEvalArguments, argv, prog, description=DESCRIPTION)
    from esper.rl.evaluate import VideoError
    from esper.runs import CheckpointError
    from esper.runs.folder import RunError

    try:
        return _evaluate(arguments)
    except (RunError, VideoError) as error:
        raise CommandError(str(error)) from error
    except CheckpointError as error:
        raise CommandError(str(error), exit_code=FAILED) from error


def _evaluate(arguments: PPOEvalArguments) -> CommandResult:
    from esper.config import load_saved
    from esper.devices import find_device
    from esper.rl.checkpoints import load_checkpoint, policy_state
    from esper.rl.evaluate import check_video_path
    from esper.rl.policy import Policy
    from esper.rl.run_config import TrainConfig
    from esper.rl.run_setup import EpisodeEvaluator
    from esper.runs.folder import CONFIG, check_holds_a_run
    from esper.statistics import student_interval

    if arguments.video is not None:
        check_video_path(arguments.video)
    check_holds_a_run(arguments.run, "ppo")
    config = load_saved(TrainConfig, arguments.run / CONFIG)
    checkpoint = load_checkpoint(arguments.run, arguments.checkpoint)
    policy = Policy.from_state(policy_state(checkpoint), device=find_device(arguments.device or config.device))
    player = EpisodeEvaluator(config, episodes=arguments.episodes, deterministic=not arguments.stochastic, max_steps=arguments.max_steps)
    with contextlib.closing(player) as evaluator:
        evaluation = evaluator.score(policy, 1 + arguments.seed)  # the episodes of number 0 chose the best checkpoint
    assert evaluation is not None, "there is at least one episode"
    returns = evaluation.returns
    result = {
        "run": str(arguments.run),
        "checkpoint": arguments.checkpoint,
        "step": checkpoint.step,
        "episodes": len(returns),
        "mean_return": evaluation.mean_return,
        "interval": None,
        "min_return": min(returns),
        "max_return": max(returns),
        "mean_length": evaluation.mean_length,
        "cut": evaluation.cut,
    }
    spread = ""
    if len(returns) > 1:
        interval = student_interval(returns)
        result["interval"] = [interval.low, interval.high]
        spread = f" (95% interval {interval.low:.3f} to {interval.high:.3f})"
    print(f"{arguments.checkpoint} policy of {arguments.run}, step {checkpoint.step:,}, {len(returns)} episodes of {config.env}")
    print(f"mean return {evaluation.mean_return:.3f}{spread}, from {min(returns):.3f} to {max(returns):.3f}")
    print(f"mean length {evaluation.mean_length:.1f}")
    if (warning := evaluation.warning(arguments.max_steps)) is not None:
        print(f"{warning}; --max-steps sets the limit")
    if arguments.video is not None:
        result["video"] = _record(policy, config, arguments)
    return CommandResult(result)


def _record(policy: Policy, config: TrainConfig, arguments: PPOEvalArguments) -> str:
    """Write a video of one episode, and print its return."""
    from esper.rl.evaluate import VideoError, record_video

    assert arguments.video is not None
    keywords: dict[str, Any] = dict(config.env_args)
    try:
        (earned,) = record_video(
            policy,
            config.env,
            arguments.video,
            seed=arguments.seed,
            deterministic=not arguments.stochastic,
            max_steps=min(arguments.max_steps, MAX_VIDEO_STEPS),
            wrappers=config.wrappers,
            **keywords,
        )
    except VideoError:
        raise
    except Exception as error:  # an environment may raise anything when it is rendered; pygame may be missing
        raise VideoError(f"no video of {config.env}: {type(error).__name__}: {error}") from error
    print(f"video of an episode that earned {earned:.3f}  {arguments.video}")
    return str(arguments.video)


ENVS_DESCRIPTION = (
    "Lists the built-in environments. Where Gymnasium is installed, its ids work too, such as CartPole-v1, and those of packages: "
    "ALE/Pong-v5, MiniGrid-Empty-5x5-v0, package.module:id."
)


class EnvsArguments(Config):
    """This command has no options."""


def run_envs(argv: list[str], prog: str) -> CommandResult:
    parse(EnvsArguments, argv, prog, description=ENVS_DESCRIPTION)
    from esper.vecenv.builtin import BUILTIN

    width = max(map(len, BUILTIN))
    for name, builtin in BUILTIN.items():
        print(f"{name:<{width}}  {builtin.help}")
    return CommandResult({name: builtin.help for name, builtin in BUILTIN.items()})
