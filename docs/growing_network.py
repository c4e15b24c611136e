"""Draw a network while it grows: docs/images/growing_network.gif.

    python docs/growing_network.py

Trains a real model on handwritten digits, once with growth and once without (its twin), and draws one frame per epoch from the events in
the run folder: the network with its slots and seeds on the left, the validation losses on the right. Takes about two minutes on one core.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from PIL import Image

import esper
from esper.growth import GrowthConfig, LifecycleConfig
from esper.tasks import load_task

OUTPUT = Path(__file__).parent / "images" / "growing_network.gif"
EPOCHS = 40
CHANNELS = (4, 8, 16)  # of the host "starved"
FRAME_MS, MOVING_MS, LAST_MS = 120, 450, 4000

# Light lines on a dark card: readable on light and dark pages alike.
PAPER, INK, SOFT, GRID, HOST = "#12161d", "#e8edf3", "#8b97a5", "#2a323d", "#3b4754"
STAGES = {
    "DORMANT": "#566270",
    "GERMINATED": "#bc8cff",
    "TRAINING": "#bc8cff",
    "BLENDING": "#e3b341",
    "HOLDING": "#58a6ff",
    "FOSSILIZED": "#3fb950",
    "PRUNED": "#f0883e",
    "EMBARGOED": "#f0883e",
}
SAYS = {
    "DORMANT": "empty slot",
    "TRAINING": "learns beside the host",
    "BLENDING": "alpha rises",
    "HOLDING": "on probation",
    "FOSSILIZED": "kept for good",
}

Epoch = dict[str, Any]  # the event `epoch_ended` of one epoch


def train(controller: str, epochs: int) -> list[Epoch]:
    """Train the small host on digits and return the event of every epoch. The first weights and the data order are always the same."""
    task = load_task("digits")
    with tempfile.TemporaryDirectory() as folder:
        esper.grow(
            task.make_host("starved", seed=0),
            task.train_loader(seed=0),
            task.val_loader(),
            task.loss_fn,
            epochs=epochs,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
            controller=controller,
            config=GrowthConfig(lifecycle=LifecycleConfig(raise_mode="shadow")),
            run=Path(folder) / "run",
        )
        events = [json.loads(line) for line in (Path(folder) / "run" / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "epoch_ended"]


def frame(grown: list[Epoch], twin: list[Epoch], shown: int) -> Image.Image:
    """Draw the state after epoch number `shown`."""
    figure = Figure(figsize=(8.4, 3.5), dpi=100, facecolor=PAPER)
    draw_network(figure.add_axes((0.01, 0.0, 0.6, 1.0)), grown[shown - 1], epochs=len(grown))
    draw_losses(figure.add_axes((0.675, 0.17, 0.305, 0.66)), grown, twin, shown)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return Image.open(picture).convert("RGB")


def draw_network(axes: Axes, epoch: Epoch, *, epochs: int) -> None:
    """Draw blocks from left to right. A seed is a branch above the line: it reads a block's output and adds to it at the plus sign."""
    axes.set(xlim=(0, 10), ylim=(0, 6.6))
    axes.axis("off")
    line_y = 2.1
    axes.plot((0.55, 9.6), (line_y, line_y), color=SOFT, linewidth=1.6, zorder=1)
    axes.text(
        0.5, line_y, "digit", color=INK, ha="center", va="center", fontsize=9, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 2}
    )
    for index, (slot, channels) in enumerate(zip(epoch["slots"], CHANNELS, strict=True)):
        left = 1.15 + 2.65 * index
        height = 0.9 + 0.09 * channels
        axes.add_patch(_box(left, line_y - height / 2, 0.85, height, face=HOST, edge=SOFT))
        axes.text(left + 0.425, line_y, f"block {index}", color=INK, ha="center", va="center", fontsize=8, rotation=90, zorder=4)
        axes.text(left + 0.425, line_y - height / 2 - 0.12, f"{channels} channels", color=SOFT, ha="center", va="top", fontsize=7)
        draw_slot(axes, slot, read=left + 1.05, add=left + 2.35, line_y=line_y)
    axes.add_patch(_box(9.1, line_y - 0.45, 0.6, 0.9, face=HOST, edge=SOFT))
    axes.text(9.4, line_y, "head", color=INK, ha="center", va="center", fontsize=8, rotation=90, zorder=4)
    axes.text(0.1, 6.1, f"epoch {epoch['epoch']} of {epochs}", color=INK, fontsize=12, fontweight="bold", va="center")
    axes.text(9.75, 6.1, f"{epoch['parameters']:,} parameters", color=INK, fontsize=10, ha="right", va="center")


def draw_slot(axes: Axes, slot: dict[str, Any], *, read: float, add: float, line_y: float) -> None:
    stage, alpha = slot["stage"], slot["alpha"]
    colour, middle, top = STAGES[stage], (read + add) / 2, line_y + 2.0
    is_empty = slot["blueprint"] is None
    axes.add_patch(Circle((add, line_y), 0.17, facecolor=PAPER, edgecolor=colour if alpha else SOFT, linewidth=1.4, zorder=5))
    axes.text(add, line_y, "+", color=colour if alpha else SOFT, ha="center", va="center_baseline", fontsize=10, zorder=6)
    style = {"arrowstyle": "-|>,head_length=4,head_width=2", "shrinkA": 0, "shrinkB": 0, "color": colour, "zorder": 3}
    if not is_empty:
        axes.add_patch(
            FancyArrowPatch((read, line_y), (middle - 0.35, top - 0.32), connectionstyle="arc3,rad=-0.25", linewidth=1.4, **style)
        )
        width = 1.0 + 2.6 * alpha
        dashes = "-" if alpha else (0, (2, 2))
        down = {"connectionstyle": "arc3,rad=-0.3", "linewidth": width, "linestyle": dashes}
        axes.add_patch(FancyArrowPatch((middle + 0.35, top - 0.32), (add, line_y + 0.2), **down, **style))
    axes.add_patch(_box(middle - 0.88, top - 0.32, 1.76, 0.64, face=PAPER if is_empty else colour, edge=colour, dashed=is_empty))
    name = "" if is_empty else slot["blueprint"]
    axes.text(middle, top, name, color="#0b0e13", ha="center", va="center", fontsize=7.5, fontweight="bold", zorder=4)
    words = [stage] if is_empty else [stage, f"alpha {alpha:.1f}"]
    axes.text(middle, top + 0.86, " · ".join(words), color=INK if not is_empty else SOFT, ha="center", va="center", fontsize=7.5)
    axes.text(middle, top + 0.53, SAYS.get(stage, ""), color=colour if not is_empty else SOFT, ha="center", va="center", fontsize=7.5)


def _box(x: float, y: float, width: float, height: float, *, face: str, edge: str, dashed: bool = False) -> FancyBboxPatch:
    line = (0, (3, 2)) if dashed else "-"
    shape = "round,pad=0,rounding_size=0.1"
    return FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=face, edgecolor=edge, linestyle=line, linewidth=1.2, zorder=3)


def draw_losses(axes: Axes, grown: list[Epoch], twin: list[Epoch], shown: int) -> None:
    axes.set_facecolor(PAPER)
    numbers = range(1, shown + 1)
    axes.plot(numbers, [epoch["val_loss"] for epoch in twin[:shown]], color=SOFT, linewidth=1.5, label="twin, never grows")
    axes.plot(numbers, [epoch["val_loss"] for epoch in grown[:shown]], color="#58a6ff", linewidth=2, label="growing")
    losses = [epoch["val_loss"] for epoch in (*grown, *twin)]
    axes.set(xlim=(0, len(grown) + 1), ylim=(min(losses) * 0.8, max(losses) * 1.2), yscale="log", xlabel="epoch")
    axes.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.set_title("validation loss", color=INK, fontsize=10, loc="left")
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(colors=SOFT, labelsize=8, length=0)
    axes.xaxis.label.set(color=SOFT, fontsize=8)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    axes.legend(loc="upper right", fontsize=8, facecolor=PAPER, edgecolor=GRID, labelcolor=INK)


def write_gif(frames: list[Image.Image], durations: list[int], path: Path) -> None:
    """Write an animation with one palette for all frames, which keeps the file small and the colours still."""
    strip = Image.new("RGB", (frames[0].width, frames[0].height * len(frames)))
    for row, picture in enumerate(frames):
        strip.paste(picture, (0, row * picture.height))
    palette = strip.quantize(128, method=Image.Quantize.MAXCOVERAGE)
    first, *others = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    grown, twin = train("heuristic", options.epochs), train("never", options.epochs)
    frames = [frame(grown, twin, number) for number in range(1, options.epochs + 1)]
    # Stay longer at epochs in which the stage of a slot changes.
    stages = [[slot["stage"] for slot in epoch["slots"]] for epoch in grown]
    durations = [FRAME_MS if now == before else MOVING_MS for before, now in zip([stages[0], *stages], stages, strict=False)]
    write_gif(frames, [*durations[:-1], LAST_MS], options.output)
    print(f"{options.output}: {len(frames)} frames, {options.output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
