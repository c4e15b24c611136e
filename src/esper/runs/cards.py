"""Model cards: a Markdown file beside every model, controller, player and policy that a run writes. Imports no torch.

    write_card("runs/digits")           # runs/digits/model.md beside model.safetensors

A card says what the file is, how it was made, its figures with their limits, and how to load it. Everything comes from the folder of the
run. A file of the same name that was not written here is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path

import esper
from esper.display import Card
from esper.files import FileError, open_file, open_in_run, printable, write_file, write_in_run
from esper.runs.analysis import ledger_of
from esper.runs.catalog import Run, open_run, settings_of
from esper.runs.folder import CONFIG, EVENTS, GROW, TWIN, RunError, has_twin, name_of
from esper.text_table import duration, figure, points

MARK = "<!-- model card written by esper -->"
# Kind of run -> the name of its card without suffix, and the file that it is about, if there is one.
CARDS: dict[str, tuple[str, str | None]] = {
    "growth": ("model", "model.safetensors"),
    "controller": ("controller", "controller.safetensors"),
    "arena": ("player", None),
    "ppo": ("policy", None),
}


def write_card(folder: Path | str) -> Path | None:
    """Write the card of a run into its folder, and return its path; None if a file of the user has its name.

    The events are read for it, so this is also the time to leave the run's line of a list, which may be missing.
    """
    folder = Path(folder)
    run = open_run(folder)
    with contextlib.suppress(OSError):
        run.leave_summary()
    if run.kind not in CARDS:
        raise RunError(f"{folder} is {name_of(run.kind)}, which has no card; write its report with: esper report {folder}")
    path = folder / f"{CARDS[run.kind][0]}.md"
    if _is_of_user(path):
        return None
    write_in_run(path, printable(card_of(run)).encode())
    return path


def card_of(run: Run) -> str:
    """Return the card as Markdown."""
    describe = {"growth": _growth, "controller": _controller, "arena": _arena, "ppo": _ppo}[run.kind]
    what, figures, limits, load = describe(run)
    parts = [
        MARK,
        f"# {_plain(run.name)}",
        what,
        "## Figures",
        _list(figures) if figures else "The run has no figures yet.",
        limits,
        "## How it was made",
        _list(_making(run)),
        "## How to load it",
        f"```python\n{load}\n```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def write_model_card(file: Path | str, card: Card, *, made_by: str = "") -> Path | None:
    """Write the card of a model that was saved outside of a run, beside its file; None if a file of the user has its name.

    `card` has the figures of the model and its seeds, `made_by` is the call that made it, if that is known.
    """
    file = Path(file)
    path = file.with_suffix(".md")
    if _is_of_user(path):
        return None
    lines = [[_plain(cell) for cell in card.heading], ["---"] * len(card.heading), *([_plain(cell) for cell in row] for row in card.rows)]
    parts = [
        MARK,
        f"# {_plain(card.title)}",
        "A network that grew while it was trained." if card.rows else "A network that was trained; nothing grew.",
        "## Figures",
        _list([(_plain(name), _plain(value)) for name, value in card.figures]),
        "Another random seed gives other figures. There is no twin, so it is unknown how much of this is due to growth.",
        *(["## Seeds", "\n".join(f"| {' | '.join(line)} |" for line in lines)] if card.rows else []),
        "## How it was made",
        _list([*([("made by", made_by)] if made_by else []), ("versions", ", ".join(_versions(esper.__version__))), _file(file)]),
        "## How to load it",
        f'```python\nimport esper\n\nmodel = ...  # a new, ungrown instance\nmodel = esper.load("{file.name}", model=model)\n```',
    ]
    write_file(path, printable("\n\n".join(parts) + "\n").encode())
    return path


def _is_of_user(path: Path) -> bool:
    """Return whether something that is no card has this path."""
    try:
        with open_in_run(path) as file:
            return file.read(len(MARK)) != MARK.encode()
    except FileNotFoundError:
        return False
    except (OSError, FileError):
        return True


def _file(path: Path) -> tuple[str, str]:
    """Return size and digest of a file as a line of a card."""
    with open_file(path) as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]  # a BinaryIO has what it needs
    return "file", f"[{path.name}]({path.name}), {path.stat().st_size:,} bytes, sha256 {found}"


def _making(run: Run) -> list[tuple[str, str]]:
    """Return the command or call, the seed, the versions and the files of a run."""
    settings = settings_of(run.config())
    seeds = [(name, value) for name, value in settings.items() if name in ("seed", "ppo.seed")]
    header, started = run.index.events("header")[:1], run.index.events("growth_started" if run.kind == "growth" else "run_started")[-1:]
    ended = run.index.events("growth_finished" if run.kind == "growth" else "run_ended")[-1:]
    saved = GROW if (run.folder / GROW).is_file() else CONFIG
    file = CARDS[run.kind][1]
    rows = [
        ("made by", f"`{_how(run)}`"),
        ("settings", f"all of them are in [{saved}]({saved})"),
        *((name, str(value)) for name, value in seeds),
        ("device", str(started[0].get("device", "")) if started else ""),
        (
            "state",
            f"{ended[0].get('why', ended[0].get('status', ''))}, {duration(ended[0]['seconds'])} of training" if ended else "not finished",
        ),
        ("versions", ", ".join(_versions(header[0]["esper"] if header else ""))),
        ("events", f"[{EVENTS}]({EVENTS})"),
    ]
    if file is not None and (run.folder / file).is_file() and not (run.folder / file).is_symlink():
        rows.append(_file(run.folder / file))
    return [(name, value) for name, value in rows if value]


def _how(run: Run) -> str:
    """Return the command that starts such a run again, or the call in Python."""
    if run.kind == "growth" and not (run.folder / GROW).is_file():
        return f"esper.grow(model, train_loader, val_loader, ..., run={run.folder.name!r})".replace("`", "'")
    words = {"growth": "grow", "controller": "controller train", "arena": "arena train", "ppo": "ppo train"}[run.kind]
    config = run.config()
    env = f" {shlex.quote(str(config['env']))}" if run.kind == "ppo" and "env" in config else ""
    return f"esper {words}{env} --config {GROW if run.kind == 'growth' else CONFIG}".replace("`", "'")


def _versions(own: str) -> list[str]:
    versions = [f"esper {own}"] if own else []
    for package in ("torch", "numpy"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return [*versions, f"Python {platform.python_version()}"]


Described = tuple[str, list[tuple[str, str]], str, str]  # what it is, figures, limits of the figures, how to load it


def _growth(run: Run) -> Described:
    """Describe a grown model: what was kept, and the difference to the twin first."""
    config = run.config()
    started, finished = run.index.events("growth_started")[:1], run.index.events("growth_finished")[-1:]
    title = f"the {config['host']} host of the task {config['task']}" if config.get("task") else ""
    title = title or (f"the model of {_code(str(config['model']))}" if config.get("model") else "a model of a Python program")
    size = f", {finished[0]['parameters']:,} parameters, {finished[0]['parameters_added']:,} of them in seeds" if finished else ""
    seeds = [
        f"- {_code(seed.blueprint)} after {_code(seed.slot)}, kept in epoch {seed.ended}: {_plain(seed.why)}"
        for seed in ledger_of(run.index).seeds
        if seed.outcome == "kept"
    ]
    controller = f", decided by the controller {_plain(str(started[0]['controller']))}" if started else ""
    is_twin = bool(started) and started[0]["controller"] == "never"
    origin = "A network that was trained without growth" if is_twin else "A network that grew while it was trained"
    rest = "\n".join(seeds) or ("" if is_twin else "No seed was kept.")
    what = f"{origin}: {title}{size}{'' if is_twin else controller}.\n\n{rest}".strip()
    figures: list[tuple[str, str]] = []
    limits = "Another random seed gives other figures."
    twin = Run(run.folder / TWIN, "growth") if has_twin(run.folder) else None
    if twin is not None:
        twin.refresh()
        ends, compared = twin.index.events("growth_finished")[-1:], twin.index.events("twin_compared")[-1:]
        if ends and finished:
            figures.append(("validation loss against the twin", figure(finished[0]["val_loss"] - ends[0]["val_loss"], sign="+")))
        if compared:
            difference = points(*(compared[0][name] for name in ("accuracy_difference", "low", "high")))
            figures.append(("test accuracy against the twin", f"{difference}, 95 % interval over {compared[0]['samples']:,} samples"))
    elif not is_twin:
        limits = f"There is no twin, so it is unknown how much of this is due to growth. {limits}"
    if finished:
        figures.append(
            ("validation loss", f"{figure(finished[0]['val_loss'])}, before the training {figure(finished[0]['val_loss_before'])}")
        )
        figures += [
            (f"validation {_plain(name)}", f"{value:.2%}" if "accuracy" in name else figure(value))
            for name, value in finished[0].get("metrics", {}).items()
        ]
        if finished[0].get("best_epoch") is not None:
            figures.append(("state", f"after epoch {finished[0]['best_epoch']} of {finished[0]['epoch']}, which was the best"))
        figures.append(("seeds", f"kept {finished[0]['kept']} of {finished[0]['tried']}; {finished[0]['rollbacks']} rollbacks"))
    if tested := run.index.events("final_test")[-1:]:
        figures.append(("test loss", figure(tested[0]["loss"])))
        if tested[0].get("accuracy") is not None:
            figures.append(("test accuracy", f"{tested[0]['accuracy']:.2%}"))
    make = "model = ...  # a new instance of the ungrown network"
    if config.get("task"):
        make = f"task = esper.tasks.load_task({config['task']!r})\nmodel = task.make_host({config['host']!r})"
    imports = "import esper\nimport esper.tasks" if config.get("task") else "import esper"
    return what, figures, limits, f'{imports}\n\n{make}\nmodel = esper.load("model.safetensors", model=model)'


def _controller(run: Run) -> Described:
    rounds = run.index.events("round_ended")
    recent = rounds[-10:]
    tasks = (
        ", ".join(dict.fromkeys(f"{event['task']} with {str(event['host']).partition('-')[0]} hosts" for event in rounds)) or "no round yet"
    )
    what = f"A controller, which decides where and when a network grows. It was trained by PPO on the lives of hosts: {_plain(tasks)}."
    figures = []
    if recent:
        utility, gain, rent = (sum(event[name] for event in recent) / len(recent) for name in ("utility", "gain", "rent"))
        words = f"{figure(utility, sign='+')} (gain {figure(gain, sign='+')}, rent {figure(rent, sign='+')})"
        figures = [("fleets", f"{len(rounds):,}"), (f"mean utility over the twins, last {len(recent)} fleets", words)]
    limits = (
        "The figures are of the training itself, in comparison with twins: the same hosts, decided for as the policy is advised, by the "
        "heuristic or an ensemble. A trained controller counts as one sample."
    )
    load = 'import esper\nfrom esper.controller import load_controller\n\ncontroller = load_controller("controller.safetensors")'
    return what, figures, limits, f"{load}\ngrown = esper.grow(model, train_loader, val_loader, loss_fn, epochs=30, controller=controller)"


def _arena(run: Run) -> Described:
    config = run.config()
    arena = config.get("arena", {})
    what = (
        f"A player for team battles of {arena.get('team_size', '?')} units a side, trained by self-play with a league of its past selves."
    )
    limits = (
        f"Win rates are against the bot {_code(str(config.get('eval_against', '')))} on maps that no run trains on; a draw is half a win."
    )
    load = f'from esper.league import load_player\n\npolicy, config = load_player("{_path(run)}")'
    return what, _evaluated(run, "win rate", "battles"), limits, load


def _ppo(run: Run) -> Described:
    config = run.config()
    what = f"A recurrent policy for the environment {_code(str(config.get('env', '')))}, trained by PPO."
    limits = "Evaluations are on fresh episodes. A trained policy counts as one sample; train several seeds before you compare settings."
    return (
        what,
        _evaluated(run, "mean return", "episodes"),
        limits,
        f'from esper.rl import load_policy\n\npolicy = load_policy("{_path(run)}")',
    )


def _evaluated(run: Run, name: str, unit: str) -> list[tuple[str, str]]:
    """Return steps, the return in training and the evaluation of the best checkpoint."""
    found = [("steps", f"{run.step():,}")]
    returns = run.index.series("update/mean_return").values
    if len(returns):
        found.append(("return in training, last 100 episodes", figure(float(returns[-1]), 3)))
    for event in run.index.events("evaluated")[-1:]:
        mean = float(event["mean_return"])  # raw events hold "nan" as a text
        value = f"{mean:.1%}" if name == "win rate" else figure(mean, 3)
        found.append((f"{name} of the best checkpoint", f"{value} in {event['episodes']:,} {unit}"))
    return found


# Text


def _list(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in rows)


def _plain(text: str) -> str:
    """Return a text on one line that Markdown does not interpret.

    >>> _plain("a<b>*c*")
    'a\\\\<b\\\\>\\\\*c\\\\*'
    """
    return "".join(f"\\{character}" if character in "\\`*_<>[]#|" else character for character in " ".join(text.split()))


def _code(text: str) -> str:
    """Return a text as code on one line."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def _path(run: Run) -> str:
    return str(run.folder).replace("\\", "\\\\").replace('"', '\\"')
