"""The health of a run: the diagnostics of a learner as traffic lights with advice, and all that went wrong. Imports no torch."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, NamedTuple

import msgspec

from esper.runs.anomalies import Anomaly
from esper.runs.index import EventIndex, without_stamp

LAST = 10  # updates whose mean is judged

Colour = Literal["green", "yellow", "red"]


class Diagnostic(NamedTuple):
    """A number of the updates, the range in which it is good, the one in which it is bearable, and advice for when it is neither."""

    name: str
    series: str
    good: tuple[float, float]
    bearable: tuple[float, float]
    advice: str


class Light(NamedTuple):
    """The state of one diagnostic."""

    name: str
    value: float
    colour: Colour
    advice: str


DIAGNOSTICS = (
    Diagnostic(
        "KL divergence",
        "update/total_kl",
        (0.0, 0.03),
        (0.0, 0.1),
        "the policy changes too much per update; lower learning_rate or num_epochs",
    ),
    Diagnostic(
        "clipped share", "update/clip_fraction", (0.0, 0.3), (0.0, 0.5), "many ratios are clipped; lower learning_rate or num_epochs"
    ),
    Diagnostic(
        "largest ratio",
        "update/ratio_max",
        (0.0, 10.0),
        (0.0, 100.0),
        "single actions change too much; lower learning_rate or max_grad_norm",
    ),
    Diagnostic(
        "explained variance",
        "update/explained_variance",
        (0.2, 1.01),
        (-0.5, 1.01),
        "the critic explains little of the returns; train longer, or give it more updates or a larger network",
    ),
    Diagnostic(
        "gradient norm",
        "update/grad_norm",
        (1e-6, 50.0),
        (1e-9, 1e4),
        "gradients vanish or explode; check the scale of the rewards and learning_rate",
    ),
    Diagnostic(
        "skipped steps", "update/skipped", (0.0, 0.5), (0.0, 5.5), "gradients were not finite; look for NaN in observations and rewards"
    ),
)


def lights(index: EventIndex) -> list[Light]:
    """Return a light for each diagnostic that the run has, from the mean of its last ten updates."""
    wanted = list(DIAGNOSTICS)
    for name in index.names():
        if name.startswith("update/entropy/"):
            head = name.removeprefix("update/entropy/")
            advice = f"the head {head} has stopped exploring; raise entropy_coef, if it did not learn the task"
            wanted.append(Diagnostic(f"entropy of {head}", name, (0.02, 10.0), (0.001, 10.0), advice))
    found = [(diagnostic, index.series(diagnostic.series).values[-LAST:]) for diagnostic in wanted]
    # The entropy of a head whose masks leave no choice is exactly 0, which is no collapse.
    left = [(diagnostic, values) for diagnostic, values in found if values.any() or not diagnostic.series.startswith("update/entropy/")]
    return [_light(diagnostic, float(values.mean())) for diagnostic, values in left if len(values)]


def _light(diagnostic: Diagnostic, value: float) -> Light:
    if diagnostic.good[0] <= value <= diagnostic.good[1]:
        return Light(diagnostic.name, value, "green", "in its usual range")
    colour: Colour = "yellow" if diagnostic.bearable[0] <= value <= diagnostic.bearable[1] else "red"
    return Light(diagnostic.name, value, colour, diagnostic.advice)


# Events that tell of something that went wrong.
PROBLEMS = ("anomaly", "skipped", "rewards_not_finite", "rolled_back", "sink_failed", "checkpoint_refused", "compile_failed")


def problems(index: EventIndex) -> list[dict[str, Any]]:
    """Return what went wrong in a run, newest first. An anomaly has `words`; other events have their fields."""
    found = []
    for kind in PROBLEMS:
        for event in index.events(kind)[-20:]:
            problem = {"kind": kind, **without_stamp(event), "time": event["time"]}
            if kind == "anomaly":
                with contextlib.suppress(msgspec.ValidationError):  # written by another version; its fields are shown instead
                    problem["words"] = msgspec.convert(event, Anomaly, strict=False).in_words()
            found.append(problem)
    return sorted(found, key=lambda problem: -problem["time"])[:40]


def problem_in_words(problem: dict[str, Any]) -> str:
    """Return one problem as a line of text."""
    if "words" in problem:
        return f"step {problem['step']:,}: {problem['words']}"
    said = {name: value for name, value in problem.items() if name not in ("kind", "time", "step") and isinstance(value, str | int | float)}
    return " · ".join(f"{name.replace('_', ' ')} {value}" for name, value in said.items() if value != "")
