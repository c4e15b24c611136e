"""Start weights of new units, random or by GradMax, in hosts whose layers all double after a tenth of the training.

    python benchmarks/growth_start.py --jobs 16
    python benchmarks/growth_start.py --cells teacher,digits/plain --seeds 2 --epochs 10

    random    random incoming, zero outgoing weights
    gradmax   zero incoming weights, outgoing ones that give them the largest gradient
    never     the host that never grows

    digits, digits-1d     the starved hosts of these tasks. They have batch norms, so GradMax is refused there and equals random
    digits/plain, ...     the same hosts without batch norms, with biases
    teacher               an MLP that learns the classes of a wider random MLP, from vectors

All grow the same seed in the same slot at the same time. Reported are the test scores and the validation loss shortly after the growth,
paired over seeds. Results of several cells are not put together: an option is kept if it wins in one of them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from esper.growth import Planned
from esper.growth.config import LifecycleConfig
from esper.growth.seeds.start import reason_against_gradmax
from esper.tasks import Split, Task
from growth_runs import Loop, Setting, add_options, compared, difference, earlier_runs, mean, print_table, run_all, setting_of, shown
from records import RESULTS, Output, Record

CELLS = ("digits", "digits/plain", "digits-1d", "digits-1d/plain", "teacher")
STARTS = ("random", "gradmax")
BLUEPRINT = "widen_100_chain"
GROWN_AT = 0.1  # part of the training after which the layers double
SOON = 3  # epochs after the growth at which the validation loss is compared


@dataclass(frozen=True)
class Cell(Setting):
    """A task and the kind of its host, as `task`: "digits", or "digits/plain" without batch norms."""

    def load(self) -> Task:
        return teacher_task() if self.task == "teacher" else Setting(self.task.partition("/")[0], self.data_dir).load()

    @property
    def slot(self) -> str:
        return "first" if self.task == "teacher" else "blocks.0"

    def host(self, seed: int) -> nn.Module:
        host = self.load().make_host("starved", seed=seed)
        if self.task.endswith("/plain"):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                without_norms(host)
        return host


def without_norms(host: nn.Module) -> None:
    """Replace the batch norms of a convolutional host by nothing, and give its convolutions biases."""
    for block in host.get_submodule("blocks").children():
        conv = block.get_submodule("conv")
        assert isinstance(conv, nn.Conv1d | nn.Conv2d)
        conv.bias = nn.Parameter(torch.zeros(conv.out_channels))
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        block.norm = nn.Identity()


class Student(nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        return output


@cache
def teacher_task(inputs: int = 16, classes: int = 10) -> Task:
    """Vectors [M, 16] of normal numbers, and the class that a random MLP with 64 hidden units gives them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, inputs, generator=generator)
    hidden = torch.relu(x @ torch.randn(inputs, 64, generator=generator) / inputs**0.5)
    logits = hidden @ torch.randn(64, classes, generator=generator)
    y = (logits - logits.mean(0)).argmax(1)
    parts = [Split(x[part], y[part]) for part in (slice(0, 2000), slice(2000, 2500), slice(2500, 3000))]
    hosts = {"starved": partial(Student, inputs, 8, classes)}
    return Task("teacher", "Classes of a random MLP", "made here", classes, *parts, hosts=hosts, batch_size=32)


def run_one(cell: Cell, start: str, seed: int) -> list[Record]:
    """One training."""
    epoch = max(round(GROWN_AT * cell.epochs), 1)
    life = LifecycleConfig(start_weights="random" if start == "never" else start)  # type: ignore[arg-type]
    plan = [] if start == "never" else [(epoch, cell.slot, BLUEPRINT)]
    loop = Loop(cell, cell.host(seed), Planned(plan), cell.config(seed, lifecycle=life, slots=(cell.slot,)), seed=seed)
    why_random = reason_against_gradmax(loop.slotted, cell.slot, BLUEPRINT) if start == "gradmax" else ""
    for _ in range(cell.epochs):
        loop.run_epoch()
    losses = loop.grower.history.val_losses
    soon = losses[min(epoch + SOON, len(losses)) - 1]
    return [{"start": start, **loop.finish(), "why_random": why_random, "val_loss_soon": soon, "val_losses": list(losses)}]


def summary(cell: Cell, runs: list[Record]) -> Record:
    by_start = {start: [run for run in runs if run["start"] == start] for start in ("never", *STARTS)}
    rows = []
    for start, some in by_start.items():
        if some:
            soon = difference(some, by_start["random"], "val_loss_soon")
            about = {"val_loss_soon": mean(some, "val_loss_soon"), "soon_difference": soon, "why_random": some[0]["why_random"]}
            rows.append({"start": start, **compared(some, by_start["random"]), **about})
    return {"what": "summary", **cell.about, "rows": rows}


def show(record: Record) -> None:
    soon = f"loss {SOON} epochs later − random"
    rows = [(record["task"], "parameters", "test accuracy", "test loss", "points − random", "loss − random", soon, "")]
    for about in record["rows"]:
        differences = (shown(about["accuracy_difference"]), shown(about["loss_difference"], 4), shown(about["soon_difference"], 4))
        scores = (f"{about['parameters']:,.0f}", f"{about['test_accuracy']:.2f} %", f"{about['test_loss']:.4f}")
        refused = f"refused: {about['why_random']}" if about["why_random"] else ""
        rows.append((about["start"], *scores, *(("", "", "") if about["start"] == "random" else differences), refused))
    print_table(rows)
    print()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, out=RESULTS / "growth_start.jsonl")
    parser.add_argument("--cells", default=",".join(CELLS), help="instead of --task")
    options = parser.parse_args(arguments)
    output = Output(options.out, resume=not options.fresh)
    shared = setting_of(options)
    cells = [Cell(**{**vars(shared), "task": name}) for name in options.cells.split(",")]
    wanted = [(cell, start, seed) for cell in cells for seed in range(options.seeds) for start in ("never", *STARTS)]
    runs = {cell: [run for run in earlier_runs(output, cell) if (cell, run["start"], run["seed"]) in wanted] for cell in cells}
    have = {(cell, run["start"], run["seed"]) for cell, some in runs.items() for run in some}
    jobs = [partial(run_one, *what) for what in wanted if what not in have]
    for run in run_all(jobs, processes=options.jobs, output=output):
        next(some for cell, some in runs.items() if cell.task == run["task"]).append(run)
    for cell, some in runs.items():
        record = summary(cell, some)
        output.write(record)
        show(record)


if __name__ == "__main__":
    main()
