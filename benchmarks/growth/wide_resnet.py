"""GradMax's protocol: a wide residual network whose blocks start with a quarter of their inner width and grow to the full one.

    python benchmarks/growth/wide_resnet.py --data-dir DIR --device cuda --jobs 15

The network is WRN-28-1 on CIFAR-10. Only the first convolution of each block is narrow, 0.25 of its width; the residual stream has its full
width. All arms train by SGD (Nesterov momentum 0.9, weight decay 2e-4) with a learning rate that rises to 0.1 in the first epoch and then
falls along a cosine, in batches of 128 with crops and flips, and report the test accuracy of their best validation checkpoint.

Arms, paired over seeds (same data order; all that start small have the same first weights):

    small      0.25 of the inner width, never grows
    big        the full inner width from the start
    equal      big, for as many epochs as the FLOPs of `random` pay for
    random     grows on schedule to the full inner width; new units have random incoming and zero outgoing weights
    heuristic  grows where, when and what the heuristic decides, in width and depth, up to the parameters of `big`

The paper (Evci et al., ICLR 2022) trains 200 epochs and adds a twelfth of the missing units in each of 12 steps between 13 % and 48 % of
the training. Here, there are fewer epochs (`--epochs`), and the units are doubled twice, after 19 % and 36 % of the training, when the
paper's width passes the middle of these steps. New units that contribute nothing are not kept. A tenth of the training images are for
validation. As in the paper's code, there is no norm within a block, and the ReLU between its convolutions has the gradient 1 at 0. GradMax
needs that: its new units have zero incoming weights. It was an arm too, was not better than `random`, and is gone; the results file keeps
its runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from esper.growth import BudgetConfig, Controller, Decision, Fossilize, Germinate, GrowthConfig, GrowthState, LifecycleConfig, Stage
from esper.growth.config import SeedOptimizerConfig
from esper.growth.lifecycle.stages import Action
from esper.rng import Streams
from esper.tasks import Task

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import Setting, add_options, compared, difference, earlier_runs, mean, print_table, run_all, shown, train
from benchmarks.records import RESULTS, Output, Record

ARMS = ("small", "big", "random", "heuristic")  # `equal` comes after them, with the FLOPs of `random`
GROWN_AFTER = (0.19, 0.36)  # parts of the training after which the inner width is doubled
CHANNELS, STRIDES = (16, 32, 64), (1, 2, 2)  # of the three groups of blocks
SMALL = 0.25  # inner width of a block, relative to that of WRN-28-1
BATCH, WEIGHT_DECAY = 128, 2e-4


class ReLUWithSlope(nn.Module):
    """ReLU with the gradient 1 at 0, where that of nn.ReLU is 0."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.clamp(min=0)


class WideBlock(nn.Module):
    """Norm, ReLU, convolution to `inner` channels, ReLU and convolution to `after` channels, beside a skip connection."""

    def __init__(self, before: int, inner: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(before)
        self.relu = nn.ReLU()
        self.first = nn.Conv2d(before, inner, 3, stride, padding=1, bias=False)
        self.inner_relu = ReLUWithSlope()
        self.second = nn.Conv2d(inner, after, 3, padding=1, bias=False)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        branch: Tensor = self.second(self.inner_relu(self.first(self.relu(self.norm(inputs)))))
        skipped: Tensor = self.skip(inputs)
        return skipped + branch


class WideResNet(nn.Module):
    """WRN-`depth`-1 whose blocks have `width` times their usual inner channels: images [B, 3, 32, 32] to logits [B, 10]."""

    def __init__(self, depth: int, width: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS[0], 3, padding=1, bias=False)
        before, blocks = CHANNELS[0], []
        for channels, stride in zip(CHANNELS, STRIDES, strict=True):
            for index in range((depth - 4) // 6):
                blocks.append(WideBlock(before, int(channels * width), channels, stride if index == 0 else 1))
                before = channels
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(before)
        self.head = nn.Linear(before, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.blocks(self.stem(images))))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


def make_host(depth: int, width: float, *, seed: int) -> WideResNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Streams(seed).integer(f"wide resnet {depth} {width}"))
        return WideResNet(depth, width)


@dataclass(frozen=True)
class WideSetting(Setting):
    """The paper's recipe."""

    task: str = "cifar10"
    learning_rate: float = 0.1
    augment: bool = True
    depth: int = 28

    def load(self) -> Task:
        return replace(super().load(), batch_size=BATCH)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=self.learning_rate, momentum=0.9, nesterov=True, weight_decay=WEIGHT_DECAY)

    def scheduler(self, epochs: int) -> Callable[[Optimizer], LRScheduler]:
        """Rise for one epoch, then fall along a cosine. `grow` steps this schedule after every step."""
        steps = -(-len(self.load().train) // BATCH)
        return partial(OneCycleLR, max_lr=self.learning_rate, total_steps=epochs * steps, pct_start=1 / (epochs + 1), cycle_momentum=False)

    @property
    def about(self) -> Record:
        return {**super().about, "depth": self.depth}


class Doublings:
    """Doubles the units of every slot after each of the given epochs, and keeps all new units that contribute anything."""

    name = "doublings"

    def __init__(self, epochs: tuple[int, ...]) -> None:
        self.epochs = epochs

    def decide(self, state: GrowthState) -> Decision:
        due = sum(epoch <= state.epoch for epoch in self.epochs)
        actions: list[Action] = []
        for slot in state.slots:
            name = slot.place.name
            if slot.stage is Stage.DORMANT and slot.place.earlier < due:
                actions.append(
                    Germinate(slot=name, reason=f"doubling {slot.place.earlier + 1} of {len(self.epochs)}", blueprint="widen_100")
                )
            elif slot.stage is Stage.HOLDING and slot.contribution is not None and slot.contribution.epoch == state.epoch:
                actions.append(Fossilize(slot=name, reason=slot.contribution.in_words()))
        return Decision(tuple(actions), "by the schedule")


def growth_epochs(epochs: int) -> tuple[int, int]:
    """Return the epochs after which the width is doubled. Two lie between them, in which the first new units are judged.

    >>> growth_epochs(12), growth_epochs(200)
    ((2, 4), (38, 72))
    """
    first = max(round(GROWN_AFTER[0] * epochs), 1)
    return first, max(round(GROWN_AFTER[1] * epochs), first + 2)


def on_schedule(setting: WideSetting, seed: int) -> GrowthConfig:
    """Return the config of the arms that grow on schedule: only width, without warm-up and clipping, judged as early as possible."""
    config = setting.config(seed, lifecycle=LifecycleConfig(holding_epochs=1), slots=("blocks.*.first",))
    return structs.replace(config, seed_optimizer=SeedOptimizerConfig(warmup_epochs=0.0, max_grad_norm=None))


def parameters(depth: int, width: float) -> int:
    return sum(parameter.numel() for parameter in WideResNet(depth, width).parameters())


def up_to_big(setting: WideSetting, seed: int) -> GrowthConfig:
    """Return the heuristic's config: all places and blueprints, as many parameters as `big` has."""
    small, big = parameters(setting.depth, SMALL), parameters(setting.depth, 1.0)
    return structs.replace(setting.config(seed), budget=BudgetConfig(max_parameters=big / small - 1))


def run_one(setting: WideSetting, arm: str, seed: int, epochs: int | None = None) -> list[Record]:
    torch.backends.cudnn.benchmark = True
    controller: Controller | str = "heuristic" if arm == "heuristic" else "never"
    config: GrowthConfig | None = up_to_big(setting, seed) if arm == "heuristic" else None
    if arm == "random":
        controller, config = Doublings(growth_epochs(setting.epochs)), on_schedule(setting, seed)
    host = make_host(setting.depth, 1.0 if arm in ("big", "equal") else SMALL, seed=seed)
    return [{"arm": arm, **train(setting, host, controller, seed=seed, epochs=epochs, config=config)}]


def equal_epochs(runs: list[Record], seed: int) -> int:
    """Return the epochs of `big` that cost the FLOPs of `random`, rounded to whole ones."""
    of_seed = {run["arm"]: run for run in runs if run["seed"] == seed}
    an_epoch = of_seed["big"]["train_gflops"] / of_seed["big"]["epochs"]
    return max(round(of_seed["random"]["train_gflops"] / an_epoch), 1)


def summary(setting: WideSetting, runs: list[Record]) -> Record:
    by_arm = {arm: [run for run in runs if run["arm"] == arm] for arm in (*ARMS, "equal")}
    return {
        "what": "summary",
        **setting.about,
        "arms": {
            arm: {
                **compared(of_arm, by_arm["equal"]),
                "seconds": mean(of_arm, "seconds"),
                "accuracy_ahead_of_random": difference(of_arm, by_arm["random"], "test_accuracy", scale=100),
            }
            for arm, of_arm in by_arm.items()
            if of_arm
        },
    }


def show(record: Record) -> None:
    rows = [("arm", "test accuracy", "test loss", "parameters", "epochs", "TFLOPs", "seconds", "points − equal", "points − random")]
    for arm, about in record["arms"].items():
        rows.append(
            (
                arm,
                f"{about['test_accuracy']:.2f} %",
                f"{about['test_loss']:.4f}",
                f"{about['parameters']:,.0f}",
                f"{about['epochs']:.1f}",
                f"{about['train_gflops'] / 1e3:,.1f}",
                f"{about['seconds']:.1f}",
                "" if arm == "equal" else shown(about["accuracy_difference"]),
                "" if arm == "random" else shown(about["accuracy_ahead_of_random"]),
            )
        )
    print_table(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, out=RESULTS / "growth_wide_resnet.jsonl", seeds=5, epochs=12, recipe=False)
    parser.add_argument("--depth", type=int, default=28, help="6n + 4, such as 10 for a quick trial")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="those to train now; earlier runs in the file stay")
    options = parser.parse_args(arguments)
    if options.epochs < 6:
        parser.error(f"growing on schedule takes 6 epochs or more; got {options.epochs}")
    setting = WideSetting(data_dir=options.data_dir, device=options.device, epochs=options.epochs, depth=options.depth)
    output = Output(options.out, resume=not options.fresh)
    runs = [run for run in earlier_runs(output, setting) if run["seed"] < options.seeds]
    have = {(run["arm"], run["seed"]) for run in runs}
    # The longest runs first, so that no worker ends long after the others.
    order = sorted(options.arms, key=("heuristic", "random", "big", "small").index)
    jobs = [partial(run_one, setting, arm, seed) for arm in order for seed in range(options.seeds) if (arm, seed) not in have]
    runs += run_all(jobs, processes=options.jobs, output=output)
    trained = {(run["arm"], run["seed"]) for run in runs}
    seeds = [seed for seed in range(options.seeds) if {("big", seed), ("random", seed)} <= trained and ("equal", seed) not in trained]
    jobs = [partial(run_one, setting, "equal", seed, equal_epochs(runs, seed)) for seed in seeds]
    runs += run_all(jobs, processes=options.jobs, output=output)
    if not {"random", "equal"} <= {run["arm"] for run in runs}:
        print("no comparison yet, which needs runs of big and random")
        return
    record = summary(setting, runs)
    output.write(record)
    show(record)


if __name__ == "__main__":
    main()
