"""`esper ppo train`: a new run, or a saved one that goes on."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from esper.cli.failures import failures, how_to_resume
from esper.cli.outcome import CommandError, Outcome
from esper.cli.parse import parse, settings_of
from esper.cli.ranks import in_group
from esper.cli.train_arguments import TrainArguments, defaults_for
from esper.config import describe
from esper.rl.run_config import TrainConfig
from esper.runs.signals import StopSignals

if TYPE_CHECKING:
    from esper.parallel import Group
    from esper.rl.training import RunResult

DESCRIPTION = """Trains a recurrent policy and keeps everything in a run folder.

Values come from the defaults, then from --config FILE.toml or --preset NAME, then from the command line. The path of an option may be left
out where its last name is unique: --seed for --ppo.seed, --hidden-size for --ppo.network.hidden-size.

Several processes, each with --num-envs environments and, where there are, a GPU of its own, train one policy together:
  torchrun --nproc-per-node 2 --no-python -- esper ppo train ENV_ID ..."""


def run(argv: list[str], prog: str) -> Outcome:
    arguments = parse(TrainArguments, argv, prog, default=defaults_for(argv), description=DESCRIPTION)
    if not arguments.env:
        raise CommandError(f"name an environment: {prog} ENV_ID (esper ppo envs lists them)")
    config = settings_of(arguments, TrainConfig)
    with in_group(config.device) as group:
        return _dry_run(config, group) if arguments.dry_run else _train(config, arguments, group)


def _dry_run(config: TrainConfig, group: Group) -> Outcome:
    from esper.rl.run_setup import count_parameters, prepare

    with prepare(config, group=group) as (ppo, _):
        plan = {
            "env": config.env,
            "device": str(ppo.device),
            "parameters": count_parameters(ppo.policy),
            "steps_per_update": ppo.steps_per_update,
            "updates": -(-config.total_steps // ppo.steps_per_update),
            "minibatch": _minibatch_shape(config),
        }
    rows = describe(config)
    width = max(len(name) for name, _, _ in rows)
    for name, value, _ in rows:
        print(f"{name:<{width}}  {value}")
    print()
    for name, value in plan.items():
        print(f"{name.replace('_', ' '):<{width}}  {value}")
    return Outcome({"plan": plan, "config": {name: value for name, value, _ in rows}})


def _minibatch_shape(config: TrainConfig) -> str:
    ppo = config.ppo
    sequences = ppo.num_steps // ppo.sequence_length * config.num_envs / ppo.minibatches_of(config.num_envs)
    return f"{sequences:g} sequences of {ppo.sequence_length} steps"


def _train(config: TrainConfig, arguments: TrainArguments, group: Group) -> Outcome:
    from esper.cli.ppo_progress import Progress
    from esper.cli.progress import progress_sink
    from esper.rl.training import train_run
    from esper.runs.folder import default_folder

    folder = group.first(lambda: arguments.run or default_folder(config.env))
    stop = StopSignals()
    options: dict[str, Any] = {
        "sinks": [progress_sink(Progress())],
        "should_stop": stop.was_asked,
        "group": group,
    }
    with failures(folder, "ppo train", FloatingPointError), stop:
        result = train_run(config, folder, resume=arguments.resume, **options)
    _print_summary(result)
    return Outcome(_as_json(result), stop.exit_code if result.status == "stopped" else 0)


def _print_summary(result: RunResult) -> None:
    folder = shlex.quote(str(result.folder))
    if result.status == "had finished":
        print(f"{folder} had already finished its {result.step:,} steps; ask for more with --total-steps")
        return
    print(f"{result.status} after {result.step:,} steps in {result.seconds:.1f} s")
    print(f"mean return of the last episodes  {result.mean_return:.3f}  ({min(result.episodes, 100)} episodes)")
    if result.evaluation is not None:
        print(f"best policy on fresh episodes     {result.evaluation.mean_return:.3f}  ({len(result.evaluation.returns)} episodes)")
    print(f"run folder                        {folder}")
    if result.status == "stopped":
        print(f"a checkpoint is saved; {how_to_resume('ppo train', result.folder)}")
    else:
        print(f"evaluate again with               esper ppo eval {folder}")


def _as_json(result: RunResult) -> dict[str, Any]:
    evaluation = result.evaluation
    return {
        "status": result.status,
        "run": str(result.folder),
        "step": result.step,
        "seconds": round(result.seconds, 3),
        "episodes": result.episodes,
        "mean_return": result.mean_return,
        "mean_length": result.mean_length,
        "evaluation": None
        if evaluation is None
        else {"episodes": len(evaluation.returns), "mean_return": evaluation.mean_return, "mean_length": evaluation.mean_length},
    }
