"""Measure how the source is cut: sizes of functions and files, comments, and the files that training passes through.

    python benchmarks/code_shape.py                             # this checkout
    python benchmarks/code_shape.py --commits a4338a6 HEAD      # two commits, side by side

Blank lines are not counted. A line with nothing but a comment counts as one line of comments, a comment behind code as half a line.
"Files of a step" are the modules of esper that run between two batches of a training of `esper.grow`, "files of an epoch's end" those that
run between the last batch of an epoch and the first of the next one. Both are medians over a training by the default controller in which
seeds grow after a tenth of the epochs and are kept, counted from the first seed on. The largest numbers are given as well: in epochs
in which the contribution of a seed is measured and decided about, more files take part.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

# Runs in a process of its own, on the sources of the tree that is measured.
CROSSED = """
import json, statistics, sys
from pathlib import Path
import torch, esper
from torch import nn
from torch.nn import functional as F
from esper.growth import BudgetConfig, GrowthConfig

torch.set_num_threads(1)
home = str(Path(esper.__file__).parent)
seen = set()

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(home):
        seen.add(frame.f_code.co_filename)

steps, ends = [], []

class Loader:
    def __init__(self, batches):
        self.batches, self.has_run = batches, False
    def __len__(self):
        return len(self.batches)
    def __iter__(self):
        if self.has_run:
            ends.append(set(seen))
        self.has_run = True
        for batch in self.batches:
            seen.clear()
            yield batch
            steps.append(set(seen))
        seen.clear()

# A random teacher labels the data; the host is too narrow for it.
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
for parameter in teacher.parameters():
    parameter.data *= 3
inputs = torch.randn(768, 6)
targets = teacher(inputs).argmax(1)
batches = [(inputs[i : i + 32], targets[i : i + 32]) for i in range(0, 768, 32)]
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
epochs = 40
sys.setprofile(note)
grown = esper.grow(
    model, Loader(batches[:16]), batches[16:], loss_fn=F.cross_entropy, epochs=epochs, progress=False,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    config=GrowthConfig(budget=BudgetConfig(max_seeds=2)),  # one step of growth, so that most epochs have no seed on trial
)
sys.setprofile(None)
assert grown.ledger.count("kept"), grown.report()
seeds = grown.ledger.seeds if hasattr(grown.ledger, "seeds") else grown.ledger.entries  # older commits call them so
first = min(seed.born for seed in seeds)
names = lambda files: sorted(str(Path(file).relative_to(home)) for file in files)
later = lambda found: found[first * len(found) // epochs :]
typical = lambda found: min(later(found), key=lambda files: abs(len(files) - statistics.median(map(len, later(found)))))
print(json.dumps({
    "step": statistics.median(map(len, later(steps))), "end": statistics.median(map(len, later(ends))),
    "most_step": max(map(len, later(steps))), "most_end": max(map(len, later(ends))),
    "step_files": names(typical(steps)), "end_files": names(typical(ends)),
}))
"""


def lines_in(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip())


def files_crossed(tree: Path) -> dict[str, Any]:
    """Train a small model with the sources of a tree, and return how many files a step and the end of an epoch pass, and which."""
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, "-c", CROSSED],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tree / "src"), os.environ.get("PYTHONPATH")]))},
        )
    crossed: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return crossed


def measure(tree: Path) -> dict[str, float | list[str]]:
    files = sorted((tree / "src" / "esper").rglob("*.py"))
    sizes, functions, comments, headers, total = [], [], 0.0, 0, 0
    for path in files:
        source = path.read_text()
        size = lines_in(source)
        sizes.append(size)
        total += size
        parsed = ast.parse(source)
        nodes = [node for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        functions += [lines_in("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])) for node in nodes]
        headers += sum(
            (node.end_lineno or node.lineno) - node.lineno + 1 for node in parsed.body if isinstance(node, ast.Import | ast.ImportFrom)
        )
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments += 1.0 if token.line.strip().startswith("#") else 0.5
    crossed = files_crossed(tree)
    return {
        "files": len(files),
        "lines": total,
        "functions per 1,000 lines": round(1000 * len(functions) / total, 1),
        "median function, lines": statistics.median(functions),
        "median file, lines": statistics.median(sizes),
        "files of fewer than 60 lines": sum(size < 60 for size in sizes),
        "imports, % of lines": round(100 * headers / total, 1),
        "comments, % of lines": round(100 * comments / total, 1),
        "files of a step of grow": crossed["step"],
        "files of an epoch's end": crossed["end"],
        "  the most, of a step": crossed["most_step"],
        "  the most, of an epoch's end": crossed["most_end"],
        "step": crossed["step_files"],
        "end": crossed["end_files"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commits", nargs="+", default=[], help="commits to measure; without them, this checkout")
    parser.add_argument("--names", action="store_true", help="name the files, too")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for commit in arguments.commits:
            tree = Path(place) / commit.replace("/", "-")
            subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
            try:
                found[commit] = measure(tree)
            finally:
                subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
    if not found:
        found["this checkout"] = measure(ROOT)
    first = next(iter(found.values()))
    width = max(map(len, first))
    print(" " * width, *(f"{name:>14}" for name in found))
    for name, value in first.items():
        if not isinstance(value, list):
            print(f"{name:<{width}}", *(f"{measured[name]!s:>14}" for measured in found.values()))
    if arguments.names:
        for commit, measured in found.items():
            for what in ("step", "end"):
                print(f"\n{commit}, {what}:", *measured[what], sep="\n  ")  # type: ignore[misc]


if __name__ == "__main__":
    main()
