"""Names and colours of the stages of seeds and slots: one table for the report, the terminal and the browser. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class StageLook(NamedTuple):
    """How a stage is shown. The colours can be told apart with any colour vision."""

    word: str
    letter: str  # in a timeline of the terminal
    style: str  # in the terminal
    light: str  # colour on a light page
    dark: str


STAGES = {
    "DORMANT": StageLook("empty", " ", "dim", "#9aa4ae", "#6b7683"),
    "GERMINATED": StageLook("germinated", "g", "blue", "#0072b2", "#58a6ff"),
    "TRAINING": StageLook("learns in the shadow", "t", "cyan", "#56b4e9", "#7fc8f2"),
    "BLENDING": StageLook("blends", "b", "magenta", "#b3578c", "#cc79a7"),
    "HOLDING": StageLook("on probation", "h", "yellow", "#d18f00", "#e6b23c"),
    "FOSSILIZED": StageLook("kept", "K", "green", "#007d5b", "#2cc198"),
    "PRUNED": StageLook("pruned", "x", "red", "#c24e00", "#ff8a4c"),
    "EMBARGOED": StageLook("under embargo", "e", "dim", "#7a7a7a", "#8b949e"),
}


def stage_variables(theme: str) -> str:
    """Return the colours of a theme, "light" or "dark", as CSS variables that have the names of the stages: --holding."""
    return " ".join(f"--{name.lower()}: {getattr(look, theme)};" for name, look in STAGES.items())
