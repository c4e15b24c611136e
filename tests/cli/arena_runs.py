"""The smallest training in the arena, and the options that make it."""

from __future__ import annotations

from pathlib import Path

from esper.cli.main import main

LEARNING_UNITS, NUM_STEPS = 10, 4
UPDATE_STEPS = LEARNING_UNITS * NUM_STEPS
ARENA = ["--team-size", "1", "--battles", "8", "--size", "16", "--maps", "2", "--seconds", "1"]
OPTIONS = [
    *ARENA, "--device", "cpu", "--threads", "1", "--num-steps", str(NUM_STEPS), "--bptt-length", str(NUM_STEPS), "--num-epochs", "1",
    "--num-minibatches", "2", "--hidden-size", "8", "--width", "8", "--terrain-width", "8", "--entity-width", "4", "--head-width", "8",
    "--eval-battles", "2", "--entry-battles", "2", "--enter-every", "1", "--checkpoint-every", "1",
    "--bot-share", "0.5", "--past-share", "0.25", "--core", "lstm",
]  # fmt: skip


def train(folder: str | Path, updates: int, *more: str) -> int:
    return main(["arena", "train", *OPTIONS, "--total-steps", str(updates * UPDATE_STEPS), "--run", str(folder), *more])
