"""Check that a change of the code leaves every result as it was.

    python benchmarks/same_results.py --base main~3
    python benchmarks/same_results.py --base main~3 --renames renames.json --only ppo,arena

Trains fixed seeds of `grow`, `ppo train`, `controller train` and `arena train` by the code of the base commit and by the code of this
checkout, on this machine, and compares all events, and all tensors and values of the checkpoints that are kept. The base runs twice: values
that differ between its two runs, such as times and speeds, depend on the clock and are left out. Nothing is stored between two calls.

`--renames` names a JSON file of the names that have changed, for a comparison over a commit that renames things:

    {"options": {"--teams": "--team-size"}, "names": {"garden": "slots"}}

`options` are those of the command line, old name to new name; the commands below have the new ones. `names` are parts of the path of a
value, such as ppo/environment/garden/alpha; kinds and fields of events are such parts, too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
_SMALL_PPO = "--num-minibatches 2 --num-epochs 2 --hidden-size 8"
_ARENA = (
    "--team-size 1 --battles 8 --size 16 --maps 2 --seconds 1 --num-steps 8 --bptt-length 8 --width 8 --terrain-width 8 --entity-width 4"
)
COMMANDS = {
    "grow": "grow --task digits --host starved --controller heuristic --twin --seed 0 --epochs 12 --learning-rate 0.01 --threads 1",
    "ppo": f"ppo train cue --seed 3 --num-envs 4 --num-steps 32 {_SMALL_PPO} --total-steps 1024 --checkpoint-every 2 --threads 1",
    "controller": "controller train --source digits --families conv --domain.width 2 3 --blocks 1 2 --hosts 4 --horizon 3 4 --fleets 2 "
    f"--samples-of-a-life 500 900 {_SMALL_PPO} --network.width 8 --checkpoint-every 1 --rounds 3",
    "arena": f"arena train {_ARENA} {_SMALL_PPO} --head-width 8 --eval-battles 2 --entry-battles 2 --enter-every 1 --checkpoint-every 1 "
    "--total-steps 512",
}

# A length in bytes of an event log. It depends on how many digits its times have, which can be as many in both runs of the base by chance.
_LENGTH = "events_offset"

Values = dict[str, Any]  # path of a value -> the value; a tensor is a NumPy array


def train(tree: Path, command: list[str], folder: Path) -> Values:
    """Run a command by the code in `tree`, and return everything that it wrote to its run folder."""
    folder.parent.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    given = [sys.executable, "-m", "esper.cli.main", *command, "--device", "cpu", "--run", str(folder)]
    done = subprocess.run(given, env=environment, cwd=folder.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed in {tree}:\n{done.stderr or done.stdout}")
    return values_of(folder)


def values_of(run: Path) -> Values:
    """Return everything in a run folder: events, and the tensors and values of checkpoints and models."""
    return {path: value for path, value in _values(run) if not path.endswith(_LENGTH)}


def _values(run: Path) -> Iterator[tuple[str, Any]]:
    for log in sorted(run.rglob("events.jsonl")):
        for number, line in enumerate(log.read_text().splitlines()):
            event = json.loads(line)
            yield from _flat(f"{log.relative_to(run)}/{number}/{event['kind']}", event)
    for state in sorted(run.rglob("state.json")):
        yield from _flat(str(state.relative_to(run)), json.loads(state.read_text()))
    for tensors in sorted(run.rglob("*.safetensors")):
        for name, tensor in load_file(tensors).items():
            yield f"{tensors.relative_to(run)}/{name}", tensor


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flat(f"{path}/{name}", part)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _flat(f"{path}/{number}", part)
    else:
        yield path, value


def renamed(values: Values, names: Mapping[str, str]) -> Values:
    return {"/".join(names.get(part, part) for part in path.split("/")): value for path, value in values.items()}


def is_same(one: Any, other: Any) -> bool:
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    both_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return type(one) is type(other) and (both_nan or bool(one == other))


def differences(base: Values, again: Values, head: Values) -> tuple[list[str], int]:
    """Return the differences that the head makes, and how many values are the same. `base` and `again` are two runs of the base."""
    compared = [path for path in base.keys() & again.keys() & head.keys() if is_same(base[path], again[path])]
    changed = sorted(path for path in compared if not is_same(base[path], head[path]))
    found = [f"missing: {path}" for path in sorted(base.keys() - head.keys())]
    found += [f"new: {path}" for path in sorted(head.keys() - base.keys() - again.keys())]
    found += [f"{path}: {_short(base[path])} became {_short(head[path])}" for path in changed]
    return found, len(compared) - len(changed)


def _short(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)} {value.reshape(-1)[:3].tolist()}" if hasattr(value, "dtype") else repr(value)[:60]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="a commit")
    parser.add_argument("--renames", type=Path, help="JSON file of names that have changed since the base")
    parser.add_argument("--only", default=",".join(COMMANDS), help="which trainings to run")
    parser.add_argument("--show", type=int, default=20, help="how many differences of a training to print")
    arguments = parser.parse_args()
    renames = json.loads(arguments.renames.read_text()) if arguments.renames else {}
    has_changed = False
    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "base"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(base), arguments.base], check=True)
        try:
            for name in arguments.only.split(","):
                command = COMMANDS[name].split()
                old_names = {new: old for old, new in renames.get("options", {}).items()}
                old = [old_names.get(word, word) for word in command]
                twice = [train(base, old, Path(place) / f"{name}-{number}" / "run") for number in (1, 2)]
                head = train(ROOT, command, Path(place) / f"{name}-head" / "run")
                found, same = differences(*(renamed(values, renames.get("names", {})) for values in twice), head)
                print(f"{name}: {same} values are the same, {len(found)} differ")
                for line in found[: arguments.show]:
                    print(f"  {line}")
                has_changed |= bool(found)
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(base)], check=True)
    return int(has_changed)


if __name__ == "__main__":
    sys.exit(main())
