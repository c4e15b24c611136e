"""`make release-check`: what a user gets. Builds the wheel and uses it in empty environments outside the checkout.

    python -m tests.release_check                     # all of them
    python -m tests.release_check lowest 3.13         # some

    3.11, 3.12 and 3.13   the versions of constraints.txt with each Python that is on the PATH or in ~/.pyenv
    lowest                this Python with the lowest versions that pyproject.toml declares; those of torch, and of packages for which it
                          declares none, are those of constraints.txt

In each, the wheel is installed with the extras `gym` and `league`; then `pip check`, the command of `make demo`, a report of its run, a
training of PPO and an example run in an empty folder. Where the only build of torch for a Python is one for CUDA, which takes gigabytes,
torch is left out, and only what does without it is tried: compiling all modules, help, and the list of runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("gym", "league")
PYTHONS = ("3.11", "3.12", "3.13")
EXAMPLE = "own_training_loop.py"
PINNED = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


class Failed(Exception):
    """A step of an environment did not work. The message has its last lines."""


def ran(*command: str | Path, folder: Path) -> str:
    """Run a command with nothing of this process's Python, and return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        lines = "\n    ".join(done.stdout.splitlines()[-15:])
        raise Failed(f"{' '.join(map(str, command))[:200]}\n    exit code {done.returncode}\n    {lines}")
    return done.stdout


def find_python(version: str) -> str | None:
    """Return the path of an interpreter of this version, from the PATH or pyenv; None if there is none that starts."""
    candidates = [
        sys.executable,
        shutil.which(f"python{version}") or "",
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    for path in filter(None, candidates):
        found = subprocess.run([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip() == version:
            return path
    return None


def lowest_versions() -> str:
    """Return constraints with the lowest declared versions; those of torch and of what declares none stay those of constraints.txt.

    >>> "msgspec==0." in lowest_versions()
    True
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    pinned = {name.lower(): version for name, version in PINNED.findall((ROOT / "constraints.txt").read_text())}
    lines = {}
    for requirement in declared:
        name = re.match(r"[\w.-]+", requirement)[0].lower()  # type: ignore[index]
        lowest = re.search(r">=([\w.]+)", requirement)
        version = pinned[name] if lowest is None or name == "torch" else lowest[1]
        lines[name] = f"{name}=={version}\n"
    return "".join(lines.values())


def needs_cuda(pip: list[str | Path], folder: Path) -> bool:
    """Return whether the torch that pip would install brings the libraries of CUDA."""
    ran(*pip, "install", "-q", "--dry-run", "--no-deps", "--report", "torch.json", "-c", ROOT / "constraints.txt", "torch", folder=folder)
    (found,) = json.loads((folder / "torch.json").read_text())["install"]
    return any(re.match("nvidia|cuda", one) for one in found["metadata"].get("requires_dist", []))


def check(name: str, python: str, wheel: Path, demo: list[str], folder: Path) -> str:
    """Install the wheel in an empty environment and use it. Return what was tried, in words."""
    constraints = ROOT / "constraints.txt"
    if name == "lowest":
        constraints = folder / "lowest.txt"
        constraints.write_text(lowest_versions())
    ran(python, "-m", "venv", folder / "venv", folder=folder)
    own = folder / "venv/bin"
    pip: list[str | Path] = [own / "python", "-m", "pip", "--disable-pip-version-check"]
    has_torch = not needs_cuda(pip, folder)
    if has_torch:
        ran(*pip, "install", "-q", "-c", constraints, f"{wheel}[{','.join(EXTRAS)}]", folder=folder)
        ran(*pip, "check", folder=folder)
    else:
        others = [line.split("==")[0] for line in lowest_versions().splitlines() if not line.startswith("torch==")]
        ran(*pip, "install", "-q", "-c", constraints, *others, folder=folder)
        ran(*pip, "install", "-q", "--no-deps", wheel, folder=folder)

    work = folder / "work"
    work.mkdir()
    place = ran(own / "python", "-c", "import esper; print(esper.__file__)", folder=work).strip()
    if not Path(place).is_relative_to(folder):
        raise Failed(f"esper was imported from {place}, not from the environment")
    ran(own / "python", "-m", "compileall", "-q", Path(place).parent, folder=work)
    for words in (["--version"], ["--help"], ["ppo", "train", "--help"], ["grow", "--help"], ["runs", "ls", "."]):
        ran(own / "esper", *words, folder=work)
    if not has_torch:
        return "without torch, whose build for this Python needs CUDA: all modules compile, help and lists of runs work"
    ran(own / "esper", "grow", *demo, "--run", "demo", folder=work)
    ran(own / "esper", "report", "demo", folder=work)
    cartpole = ["--total-steps", "2048", "--num-envs", "4", "--eval-episodes", "2", "--device", "cpu", "--threads", "1"]
    ran(own / "esper", "ppo", "train", "CartPole-v1", *cartpole, "--run", "cartpole", folder=work)
    shutil.copy(ROOT / "examples" / EXAMPLE, work)
    ran(own / "python", EXAMPLE, folder=work)
    return f"pip check, demo, report, PPO on CartPole and {EXAMPLE} work"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help=f"some of {', '.join(PYTHONS)} and lowest; all if none is named")
    parser.add_argument("--demo", default="--task digits --host starved --epochs 5 --threads 1 --device cpu", help="options of the demo")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="esper-release-") as temporary:
        root = Path(temporary)
        ran(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", root, ROOT, folder=root)
        (wheel,) = root.glob("*.whl")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        for name in options.only or [*PYTHONS, "lowest"]:
            begin, python = time.monotonic(), sys.executable if name == "lowest" else find_python(name)
            if python is None:
                print(f"{name}: skipped, there is no Python {name} here", flush=True)
                continue
            folder = root / name
            folder.mkdir()
            try:
                result = check(name, python, wheel, options.demo.split(), folder)
            except Failed as error:
                failed, result = True, f"FAILED: {error}"
            print(f"{name}: {result} ({time.monotonic() - begin:.0f} s)", flush=True)
            shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
