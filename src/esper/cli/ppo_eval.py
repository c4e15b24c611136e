"""`esper ppo eval`: fresh episodes with the policy of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Literal

import tyro

from esper.cli.outcome import FAILED, CommandError, Outcome
from esper.cli.parse import parse
from esper.config import Config, NonNegativeInt, PositiveInt

DESCRIPTION = "Plays fresh episodes with the policy of a run, in the environment that it was trained in."


class EvalArguments(Config):
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of the run"""
    episodes: PositiveInt = 100
    """how many"""
    checkpoint: Literal["best", "latest"] = "best"
    """which of its policies"""
    stochastic: tyro.conf.FlagCreatePairsOff[bool] = False
    """draw actions instead of taking the likeliest"""
    seed: NonNegativeInt = 0
    """of the episodes, none of which chose the best checkpoint; the evaluation at the end of training uses 0"""
    max_steps: PositiveInt = 10_000
    """an episode is cut after so many steps"""


def run(argv: list[str], prog: str) -> Outcome:
    arguments = parse(EvalArguments, argv, prog, description=DESCRIPTION)
    from esper.checkpoint import CheckpointError
    from esper.run_folder import RunError

    try:
        return _evaluate(arguments)
    except RunError as error:
        raise CommandError(str(error)) from error
    except CheckpointError as error:
        raise CommandError(str(error), exit_code=FAILED) from error


def _evaluate(arguments: EvalArguments) -> Outcome:
    from esper.config import load_saved
    from esper.devices import find_device
    from esper.rl.checkpoints import load_checkpoint, policy_from
    from esper.rl.run_config import TrainConfig
    from esper.rl.run_setup import EpisodeEvaluator
    from esper.run_folder import CONFIG, check_holds_a_run
    from esper.statistics import student_interval

    check_holds_a_run(arguments.run, "ppo")
    config = load_saved(TrainConfig, arguments.run / CONFIG)
    checkpoint = load_checkpoint(arguments.run, arguments.checkpoint)
    policy = policy_from(checkpoint, device=find_device(config.device))
    player = EpisodeEvaluator(config, episodes=arguments.episodes, deterministic=not arguments.stochastic, max_steps=arguments.max_steps)
    with contextlib.closing(player) as evaluator:
        evaluation = evaluator.score(policy, 1 + arguments.seed)  # 0 are the episodes that the best checkpoint was chosen by
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
    return Outcome(result)
