"""A run in a few tables and sentences: before, after and cost, the ledger, the blueprints, and what the rent has to do with it.

Cells are text for a person; the terminal and the report only draw them.
"""

from __future__ import annotations

from collections.abc import Sequence

from esper.growth.config import Rent
from esper.growth.events import FinalTest
from esper.growth.story import SeedStory, Story

Row = tuple[str, ...]
NONE = "–"

LEDGER_HEADING = ("#", "slot", "blueprint", "epochs", "outcome", "gain in nats", "rent", "parameters", "why")
ANALYTICS_HEADING = ("blueprint", "tried", "kept", "pruned", "rolled back", "mean gain of kept", "mean parameters")


def headline(story: Story) -> str:
    """Such as "kept 2 of 5 seeds · validation loss 0.412 -> 0.371 · +8.3 % parameters"."""
    began, finished = story.began, story.finished
    if began is None or not story.epochs:
        return "nothing was trained yet"
    kept, tried = len(story.kept()), len(story.seeds)
    nothing = f"nothing was worth keeping ({tried} seeds tried)" if tried else "nothing was grown"
    if finished is None:
        last = story.epochs[-1]
        return f"not finished: epoch {last.epoch} of {began.epochs} · validation loss {last.val_loss:.3f} · {tried} seeds so far"
    parts = [
        f"kept {kept} of {tried} seeds" if kept else nothing,
        f"validation loss {finished.val_loss_before:.3f} -> {finished.val_loss:.3f}",
        f"{_share(finished.parameters_added, began.parameters)} parameters",
        f"{_share(finished.flops_added, began.flops)} FLOPs",
        f"{finished.rollbacks} {'rollback' if finished.rollbacks == 1 else 'rollbacks'}",
    ]
    if finished.why != "finished":
        parts.append(f"{finished.why} after epoch {finished.epoch}")
    return " · ".join(parts)


def comparison(story: Story, twin: Story | None = None) -> tuple[Row, list[Row]]:
    """Before, after and cost: heading and rows; with a twin, what came of it without growth."""
    rows = _figures(story)
    if twin is None:
        return ("", "before", "after", "change"), rows
    others = {row[0]: row[2] for row in _figures(twin)}
    return ("", "before", "after", "change", "never grown"), [(*row, others.get(row[0], NONE)) for row in rows]


def _figures(story: Story) -> list[Row]:
    began, finished = story.began, story.finished
    if began is None or finished is None or not story.epochs:
        return []
    before, after = finished.val_loss_before, finished.val_loss
    return [
        ("validation loss", f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}"),
        *_test_rows(story.tested),
        ("parameters", f"{began.parameters:,}", f"{finished.parameters:,}", _share(finished.parameters_added, began.parameters)),
        ("FLOPs per sample", f"{began.flops:,}", f"{finished.flops:,}", _share(finished.flops_added, began.flops)),
        ("training GFLOPs", NONE, NONE if finished.total_gflops is None else f"{finished.total_gflops:,.1f}", NONE),
        ("seconds", NONE, f"{story.seconds:.1f}", NONE),
    ]


def _test_rows(tested: FinalTest | None) -> list[Row]:
    if tested is None:
        return []
    change = f"{tested.loss - tested.loss_before:+.4f}"
    rows: list[Row] = [("test loss", f"{tested.loss_before:.4f}", f"{tested.loss:.4f}", change)]
    if tested.accuracy is not None and tested.accuracy_before is not None:
        points = 100 * (tested.accuracy - tested.accuracy_before)
        rows.append(("test accuracy", f"{tested.accuracy_before:.2%}", f"{tested.accuracy:.2%}", f"{points:+.2f} points"))
    return rows


def _share(added: int, whole: int) -> str:
    return f"{added / max(whole, 1):+.1%}"


def ledger(story: Story, *, is_short: bool = False) -> list[Row]:
    """One row for a seed."""
    return [
        (
            str(seed.number),
            seed.slot,
            seed.blueprint,
            f"{seed.born}–{'' if seed.ended is None else seed.ended}",
            seed.outcome,
            gain(seed, is_short=is_short),
            f"{seed.rent:.4f}",
            f"{seed.parameters:,}",
            seed.why,
        )
        for seed in story.seeds
    ]


def gain(seed: SeedStory, *, is_short: bool = False) -> str:
    if seed.gain is None or seed.gain_low is None or seed.gain_high is None:
        return "not measured"
    if is_short:
        return f"{seed.gain:+.4f} ±{(seed.gain_high - seed.gain_low) / 2:.4f}"
    return f"{seed.gain:+.4f} [{seed.gain_low:+.4f}, {seed.gain_high:+.4f}]"


def analytics(story: Story) -> list[Row]:
    """One row for a blueprint."""
    rows: list[Row] = []
    for name in dict.fromkeys(seed.blueprint for seed in story.seeds):
        some = [seed for seed in story.seeds if seed.blueprint == name]
        gains = [seed.gain for seed in some if seed.outcome == "kept" and seed.gain is not None]
        counts = [str(sum(seed.outcome == outcome for seed in some)) for outcome in ("kept", "pruned", "rolled back")]
        mean_gain = f"{sum(gains) / len(gains):+.4f}" if gains else NONE
        rows.append((name, str(len(some)), *counts, mean_gain, f"{sum(seed.parameters for seed in some) / len(some):,.0f}"))
    return rows


def about_rent(story: Story, rent: Rent) -> list[str]:
    """Which rent would have made a difference, in a sentence or two. A seed pays where it gives more nats than its rent."""
    if rent.parameters == 0 and rent.flops == 0:
        return ["There is no rent, so whatever gives anything pays; set rent.parameters and rent.flops to charge for size."]
    measured = [seed for seed in story.seeds if seed.gain is not None and seed.rent > 0 and seed.outcome != "rolled back"]
    kept = [seed for seed in measured if seed.outcome == "kept"]
    sentences = []
    if kept:
        sentences.append(_about_kept(min(kept, key=_sure_ratio), rent))
    almost = [seed for seed in measured if seed.outcome == "pruned" and 0 < _ratio(seed) < 1]
    if almost:
        sentences.append(_about_pruned(max(almost, key=_ratio), rent))
    if not sentences and story.seeds:
        sentences.append("No seed gave anything that a lower rent would have made worth keeping.")
    return sentences


def _about_kept(seed: SeedStory, rent: Rent) -> str:
    gives = f"{seed.blueprint} after {seed.slot} gives {seed.gain:.4f} nats, surely {seed.gain_low:.4f}, for a rent of {seed.rent:.4f}"
    if _sure_ratio(seed) > 1:
        return f"Of what was kept, {gives}, the least per rent; above {_scaled(rent, _sure_ratio(seed))} it would not surely have paid."
    if _ratio(seed) > 1:
        return f"Of what was kept, {gives}; above {_scaled(rent, _ratio(seed))} it would not have paid."
    return f"{gives[0].upper()}{gives[1:]}: it does not pay for itself, and was kept all the same."


def _about_pruned(seed: SeedStory, rent: Rent) -> str:
    return (
        f"Of what was pruned, {seed.blueprint} after {seed.slot} came nearest: {seed.gain:.4f} nats for a rent of {seed.rent:.4f}; "
        f"below {_scaled(rent, _ratio(seed))} it would have paid."
    )


def _ratio(seed: SeedStory) -> float:
    assert seed.gain is not None
    return seed.gain / seed.rent


def _sure_ratio(seed: SeedStory) -> float:
    """By the lower end of the interval, which a careful controller goes by."""
    assert seed.gain_low is not None
    return seed.gain_low / seed.rent


def _scaled(rent: Rent, factor: float) -> str:
    """Rents so many times as high, as they are set."""
    given: Sequence[tuple[str, float]] = [("rent.parameters", rent.parameters), ("rent.flops", rent.flops)]
    return " and ".join(f"{name} {value * factor:.2g}" for name, value in given if value > 0)
