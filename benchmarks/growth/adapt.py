"""Adapt a trained GPT to another text: by growing it, and by LoRA (peft) at the same added parameters and at the same FLOPs.

    python benchmarks/growth/adapt.py --jobs 15                              from code to prose, both from Python's own sources
    python benchmarks/growth/adapt.py --data-dir DIR --jobs 15               from Python's own sources to the text DIR/input.txt
    python benchmarks/growth/adapt.py --data-dir DIR --device cuda --jobs 15

A small GPT learns the source text. Each arm then trains it on the target text, from the same weights and with the same order of the data:

    grown_frozen     the heuristic grows the host, whose own weights are frozen
    grown_trained    the heuristic grows the host, whose own weights go on learning
    lora_parameters  LoRA in all linear layers of the blocks, with the rank that adds as many parameters as `grown_frozen` has added
    lora_flops       the same rank, for as many epochs as the FLOPs of `grown_frozen` pay for
    lora_8           LoRA with the rank 8, as it is mostly used
    full             all weights of the host go on learning, and nothing is added

Without a folder, the source is the code of the text task's Python modules, and the target is their docstrings and comments. With one, the
source is those modules as they are. Both texts share one alphabet.

"Frozen" leaves the layer norm before the head trained in all three frozen arms, because `grow` refuses a model without trained weights.
FLOPs are three forward passes for each sample of a step, with probes and measurements. A frozen host needs less than that; this is the same
for growing and for LoRA. Every arm runs at every learning rate (AdamW, cosine). The table shows each arm at the rate of its best mean
validation loss. All keep their best validation checkpoint. Needs peft, of the extra `interop`.
"""

from __future__ import annotations

import argparse
import copy
import io
import string
import sys
import textwrap
import tokenize
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from esper.growth import grow
from esper.rng import Streams
from esper.tasks import Split, Task
from esper.tasks.gpt_host import GPTHost
from esper.tasks.options import TaskOptions
from esper.tasks.text import python_sources, read_text, text_task

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import (
    Setting,
    add_options,
    best_rate,
    compared,
    difference,
    earlier_runs,
    mean,
    print_table,
    run_all,
    shown,
    train,
)
from benchmarks.records import RESULTS, Output, Record

ARMS = ("grown_frozen", "grown_trained", "lora_parameters", "lora_flops", "lora_8", "full")
LAST_NORM = "norm"  # trained even where the host is frozen
LORA_LAYERS = ("attention.query_key_value", "attention.out", "mlp.0", "mlp.2")  # all linear layers of a block
SOURCE_EPOCHS, SOURCE_RATE = 8, 3e-3
SAMPLES = {"source": 8192, "target": 4096}  # training sequences
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


# Texts


def code_and_prose(source: str) -> tuple[str, str]:
    """Separate Python code from its docstrings and comments.

    >>> code_and_prose('x = 1  # one\\ndef f():\\n    "Do it."\\n    return "x"\\n')
    ('x = 1  \\ndef f():\\n    \\n    return "x"\\n', 'one\\nDo it.\\n')
    """
    lines, prose, spans = source.splitlines(keepends=True), [], []
    before = tokenize.NEWLINE  # type of the token before; a string at the start of a statement is a docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if is_docstring or token.type == tokenize.COMMENT:
            words = token.string.lstrip("rRuU").strip("\"'") if is_docstring else token.string.lstrip("#")
            prose.append(textwrap.dedent(words).strip())
            spans.append((token.start, token.end))
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type
    for (first, start), (last, end) in reversed(spans):  # from the end, so that the positions of the others stay valid
        lines[first - 1 : last] = [lines[first - 1][:start] + lines[last - 1][end:]]
    return "".join(lines), "\n".join(filter(None, prose)) + "\n"


@cache
def texts(data_dir: Path | None) -> dict[str, Task]:
    """Return the source and the target task, with one alphabet and limited training parts."""
    python, origin = python_sources()
    if data_dir is None:
        code, prose = code_and_prose(python)
        found = {"source": (code, f"code of {origin}"), "target": (prose, f"docstrings and comments of {origin}")}
    else:
        found = {"source": (python, origin), "target": read_text(data_dir)}
    options = TaskOptions(None, seed=0, batch_size=None, sequence_length=None)
    tasks = {name: text_task(*text, options, alphabet=string.printable) for name, text in found.items()}
    return {name: replace(task, train=_first(task.train, SAMPLES[name])) for name, task in tasks.items()}


def _first(split: Split, count: int) -> Split:
    return Split(split.inputs[:count], split.targets[:count])


# Models


@dataclass(frozen=True)
class AdaptSetting(Setting):
    """What all arms share at one learning rate; the task is the target text."""

    task: str = "text"
    width: int = 64
    layers: int = 2

    def load(self) -> Task:
        return texts(self.data_dir)["target"]

    @property
    def about(self) -> Record:
        target = "docstrings" if self.data_dir is None else self.data_dir.name
        return {**super().about, "target": target, "width": self.width, "layers": self.layers}


def trained_on_source(setting: AdaptSetting, seed: int) -> tuple[nn.Module, float]:
    """Return a GPT that was trained on the source text, and its validation loss there. It depends on nothing but the seed and its size."""
    task = texts(setting.data_dir)["source"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Streams(seed).integer("host to adapt"))
        length = task.train.inputs.shape[1]
        host = GPTHost(task.num_classes, sequence_length=length, width=setting.width, layers=setting.layers, heads=setting.width // 16)
    recipe = replace(setting, epochs=SOURCE_EPOCHS, learning_rate=SOURCE_RATE)
    grown = grow(
        host.to(setting.device),
        task.train_loader(seed=seed, device=setting.device),
        task.val_loader(device=setting.device),
        loss_fn=task.loss_fn,
        epochs=SOURCE_EPOCHS,
        optimizer=recipe.optimizer,
        scheduler=recipe.scheduler(SOURCE_EPOCHS),
        controller="never",
    )
    return grown.model, grown.val_loss


def lora_rank(host: nn.Module, parameters: int) -> int:
    """Return the rank at which LoRA adds about this many parameters; at least 1."""
    layers = [module for name, module in host.named_modules() if isinstance(module, nn.Linear) and name.endswith(LORA_LAYERS)]
    return max(round(parameters / sum(layer.in_features + layer.out_features for layer in layers)), 1)


def with_lora(host: nn.Module, rank: int, *, seed: int) -> nn.Module:
    """Return the host, frozen, with LoRA in its linear layers. Changes the host."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Streams(seed).integer("LoRA"))
        wrapped = get_peft_model(host, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LORA_LAYERS)))
    wrapped.get_submodule(f"base_model.model.{LAST_NORM}").requires_grad_(True)
    return wrapped


# Runs


def run_seed(setting: AdaptSetting, seed: int) -> list[Record]:
    """Train the host on the source, and adapt a copy of it by each arm."""
    host, source_loss = trained_on_source(setting, seed)
    runs: dict[str, Record] = {}
    for arm in ARMS:
        runs[arm] = {"arm": arm, "source_val_loss": source_loss, **run_arm(setting, copy.deepcopy(host), arm, seed, runs)}
    return list(runs.values())


def run_arm(setting: AdaptSetting, host: nn.Module, arm: str, seed: int, runs: dict[str, Record]) -> Record:
    if arm in ("grown_trained", "full"):
        return train(setting, host, "never" if arm == "full" else "heuristic", seed=seed)
    if arm == "grown_frozen":
        host.requires_grad_(False).get_submodule(LAST_NORM).requires_grad_(True)
        return train(setting, host, "heuristic", seed=seed)
    before, grown, epochs = sum(parameter.numel() for parameter in host.parameters()), runs["grown_frozen"], None
    rank = 8 if arm == "lora_8" else lora_rank(host, grown["parameters_added"])
    if arm == "lora_flops":
        equal = runs["lora_parameters"]
        epochs = max(round(grown["train_gflops"] / equal["train_gflops"] * equal["epochs"]), 1)
    record = train(setting, with_lora(host, rank, seed=seed), "never", seed=seed, epochs=epochs)
    return {**record, "rank": rank, "parameters_added": record["parameters"] - before}


# Summary


def summary(setting: AdaptSetting, runs: list[Record]) -> Record:
    by_arm = {arm: best_rate([run for run in runs if run["arm"] == arm]) for arm in ARMS}
    frozen, trained = by_arm["grown_frozen"], by_arm["grown_trained"]
    about = {name: value for name, value in setting.about.items() if name != "learning_rate"}
    return {
        "what": "summary",
        **about,
        "source_val_loss": mean(frozen, "source_val_loss"),
        "arms": {
            arm: {
                **compared(of_arm, by_arm["full"]),
                "learning_rate": of_arm[0]["learning_rate"],
                "parameters_added": mean(of_arm, "parameters_added"),
                "seconds": mean(of_arm, "seconds"),
                "grown_frozen_loss_ahead": difference(frozen, of_arm, "test_loss"),
                "grown_trained_loss_ahead": difference(trained, of_arm, "test_loss"),
            }
            for arm, of_arm in by_arm.items()
        },
    }


def show(record: Record) -> None:
    rows = [("arm", "test loss", "accuracy", "added", "epochs", "TFLOPs", "seconds", "rate", "grown frozen − this", "grown trained − this")]
    for arm, about in record["arms"].items():
        rows.append(
            (
                arm,
                f"{about['test_loss']:.4f}",
                f"{about['test_accuracy']:.2f} %",
                f"{about['parameters_added']:,.0f}",
                f"{about['epochs']:.1f}",
                f"{about['train_gflops'] / 1e3:.2f}",
                f"{about['seconds']:.1f}",
                f"{about['learning_rate']:g}",
                "" if arm == "grown_frozen" else shown(about["grown_frozen_loss_ahead"], 4),
                "" if arm == "grown_trained" else shown(about["grown_trained_loss_ahead"], 4),
            )
        )
    print_table(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, out=RESULTS / "growth_adapt.jsonl", seeds=5, epochs=12, recipe=False)
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES), help="learning rates, separated by commas")
    parser.add_argument("--width", type=int, default=64, help="of the GPT, a multiple of 16")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args(arguments)
    if find_spec("peft") is None:
        parser.error("peft is not installed, which makes the LoRA arms: pip install 'esper-grow[interop]'")
    sizes = {"width": options.width, "layers": options.layers}
    shared = AdaptSetting(data_dir=options.data_dir, device=options.device, epochs=options.epochs, **sizes)
    settings = [replace(shared, learning_rate=float(rate)) for rate in options.rates.split(",")]
    output = Output(options.out, resume=not options.fresh)
    runs, jobs = [], []
    for setting in settings:
        for seed in range(options.seeds):
            have = [run for run in earlier_runs(output, setting) if run["seed"] == seed]
            if {run["arm"] for run in have} >= set(ARMS):
                runs += have
            else:  # the arms depend on one another, so a seed whose records are not complete is run again
                jobs.append(partial(run_seed, setting, seed))
    runs += run_all(jobs, processes=options.jobs, output=output)
    record = summary(shared, runs)
    output.write(record)
    show(record)


if __name__ == "__main__":
    main()
