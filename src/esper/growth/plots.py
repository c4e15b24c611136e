"""Plots of a run as SVG text to put into a page: no colours of their own, but the page's CSS variables, so that they suit light and dark.

Equal stories give equal text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from esper.growth.lifecycle import Stage
from esper.growth.story import Story

# matplotlib wants colours; these stand for CSS variables and are replaced in its output.
_VARIABLES = (
    "ink",
    "grid",
    "train",
    "validation",
    "twin",
    "germinated",
    "training",
    "blending",
    "holding",
    "fossilized",
    "pruned",
    "trouble",
)
_PLACEHOLDERS = {name: f"#0a0b{index:02x}" for index, name in enumerate(_VARIABLES)}

_WIDTH = 9.0  # inches of 72 points
_MARKS = {"germinated": "^", "fossilized": "o", "pruned": "X", "trouble": "v"}
_MARK_LABELS = {"germinated": "germinated", "fossilized": "kept", "pruned": "pruned", "trouble": "rolled back"}


def loss_plot(story: Story, twin: Story | None = None) -> str:
    """Training and validation loss by epoch, with marks where seeds came and went."""
    with _drawing(3.6) as (figure, finish):
        axes = figure.subplots()
        epochs = [epoch.epoch for epoch in story.epochs]
        axes.plot(epochs, [epoch.train_loss for epoch in story.epochs], color=_PLACEHOLDERS["train"], label="training")
        axes.plot(epochs, [epoch.val_loss for epoch in story.epochs], color=_PLACEHOLDERS["validation"], label="validation", linewidth=2)
        if twin is not None:
            losses = [epoch.val_loss for epoch in twin.epochs]
            twin_epochs = [epoch.epoch for epoch in twin.epochs]
            axes.plot(twin_epochs, losses, color=_PLACEHOLDERS["twin"], label="validation, never grown", linestyle="--")
        _use_log_scale(axes, story)
        _mark_events(axes, story)
        axes.set_ylabel("loss")
        _finish_epochs(axes, story)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=_PLACEHOLDERS["ink"])
        return finish()


def lives_plot(story: Story) -> str:
    """A line of life for every seed, coloured by its stages."""
    with _drawing(0.9 + 0.32 * max(len(story.seeds), 1)) as (figure, finish):
        axes = figure.subplots()
        end = story.epochs[-1].epoch if story.epochs else 0
        used = set()
        for row, seed in enumerate(story.seeds):
            for (start, stage), (stop, _) in zip(seed.stages, [*seed.stages[1:], (end, "")], strict=True):
                last = end if stage == Stage.FOSSILIZED.name else stop
                if stage == Stage.PRUNED.name:
                    marker = "trouble" if seed.outcome == "rolled back" else "pruned"
                    axes.plot([start], [row], _MARKS[marker], color=_PLACEHOLDERS[marker], markersize=7, clip_on=False, zorder=3)
                elif last > start:
                    label = "" if stage in used else stage.lower()
                    axes.barh(row, last - start, left=start, height=0.55, color=_PLACEHOLDERS[stage.lower()], label=label)
                    used.add(stage)
        axes.set_yticks(range(len(story.seeds)), [f"{seed.number}  {seed.blueprint} after {seed.slot}" for seed in story.seeds])
        axes.set_ylim(len(story.seeds) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        _finish_epochs(axes, story)
        if used:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=_PLACEHOLDERS["ink"])
        return finish()


def parameters_plot(story: Story) -> str:
    """Parameters of host and seeds by epoch, above those of the host alone."""
    with _drawing(2.4) as (figure, finish):
        axes = figure.subplots()
        host = story.began.parameters if story.began is not None else 0
        epochs = [0, *(epoch.epoch for epoch in story.epochs)]
        counts = [host, *(epoch.parameters for epoch in story.epochs)]
        axes.step(epochs, counts, where="post", color=_PLACEHOLDERS["validation"], linewidth=2, label="with seeds")
        axes.axhline(host, color=_PLACEHOLDERS["twin"], linestyle="--", label="host")
        axes.set_ylim(0, 1.1 * max(counts))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ylabel("parameters")
        _finish_epochs(axes, story)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=_PLACEHOLDERS["ink"])
        return finish()


def _use_log_scale(axes: Any, story: Story) -> None:
    """A loss that falls by more than a few times is a flat line at the end on any other scale."""
    from matplotlib.ticker import LogLocator, NullLocator

    losses = [loss for epoch in story.epochs for loss in (epoch.train_loss, epoch.val_loss) if loss > 0]
    if losses and max(losses) > 5 * min(losses):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())


def _mark_events(axes: Any, story: Story) -> None:
    events: dict[str, list[int | None]] = {
        "germinated": [seed.born for seed in story.seeds],
        "fossilized": [seed.ended for seed in story.seeds if seed.outcome == "kept"],
        "pruned": [seed.ended for seed in story.seeds if seed.outcome == "pruned"],
        "trouble": [rollback.epoch for rollback in story.rollbacks],
    }
    for level, (name, epochs) in enumerate(events.items()):
        for epoch in sorted({epoch for epoch in epochs if epoch is not None}):
            axes.axvline(epoch, color=_PLACEHOLDERS[name], linewidth=0.8, linestyle=":")
        if epochs:
            # In a row of their own above the curves, so that one epoch may have several.
            height = [1.03 + 0.05 * level] * len(epochs)
            axes.plot(epochs, height, _MARKS[name], color=_PLACEHOLDERS[name], label=_MARK_LABELS[name],
                      transform=axes.get_xaxis_transform(), clip_on=False, markersize=6)  # fmt: skip


def _finish_epochs(axes: Any, story: Story) -> None:
    from matplotlib.ticker import MaxNLocator

    planned = story.started.epochs if story.started is not None else None
    axes.set_xlim(0, max(planned or 0, story.epochs[-1].epoch if story.epochs else 0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epochs")


@contextmanager
def _drawing(height: float) -> Iterator[tuple[Any, Callable[[], str]]]:
    """A figure in the page's colours, and what turns it into text."""
    import matplotlib
    from matplotlib.figure import Figure

    ink, grid = _PLACEHOLDERS["ink"], _PLACEHOLDERS["grid"]
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "esper",
        "text.parse_math": False,  # a slot may have any name
        "font.size": 9,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": grid,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "xtick.color": ink,
        "ytick.color": ink,
        "ytick.minor.size": 0,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user has set for plots of their own
        matplotlib.rcParams.update(style)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        yield figure, lambda: _svg_of(figure)


def _svg_of(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")  # a page knows SVG without these
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # numbered in every plot anew; nothing refers to them
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    for name, colour in _PLACEHOLDERS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg.strip()
