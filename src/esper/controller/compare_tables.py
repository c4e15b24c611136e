"""Tables of a comparison over cells, as text.

    results          a table for each price: all contestants in all cells, and the lead of the compared one over each
    groups           a table for each group of cells: the leads over the most important contestants, by price
    tuning           the share of the way from blind to tuned that contestants reach, by price
    longer           the leads over longer, in the lives where tuned is ahead of longer
    trainings        every training of a contestant alone against blind, if there are several
    bounds           simultaneous lower bounds against never, by price
    sizes            the mean size by training samples and label noise, a table for each price

`esper.controller.compare_results` says how results are joined and what intervals are over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esper.controller.compare_results import (
    ALL,
    LEAST_TUNING,
    NOISE_BINS,
    SAMPLE_BINS,
    Comparison,
    Lead,
    ResultRow,
    sizes_by_data,
)
from esper.intervals import Interval
from esper.text_table import aligned

IN_GROUPS = ("never", "random", "blind", "heuristic")  # contestants in the tables of groups
TOLERANCE = 0.02  # a contestant is not behind longer if its interval is above minus this
LEVEL = 0.05  # of tests


def tables(comparison: Comparison) -> str:
    """Return all tables and notes."""
    rows, leads = comparison.rows(), comparison.leads()
    parts = [
        *(result_table(comparison, price, rows, leads) for price in comparison.prices),
        *(group_table(comparison, group, rows, leads) for group in comparison.groups() if group != ALL),
        tuning_table(comparison, rows),
        longer_table(comparison),
        *(training_table(comparison, name) for name in comparison.joined),
        *(bounds_table(comparison, name, rows) for name in comparison.subjects),
        *(size_table(comparison, price) for price in comparison.prices),
    ]
    if comparison.joined:
        joined = "; ".join(f"{name}: {', '.join(trainings)}" for name, trainings in comparison.joined.items())
        first = f"joined trainings, with intervals over cells and trainings: {joined}"
        parts.insert(0, f"{first}\nrandom, longer, final and grid have the moves and FLOPs of {comparison.compared} alone")
    left_out = [
        f"{name}: left out for {count} hosts, whose network cannot grow at the start" for name, count in comparison.left_out().items()
    ]
    return "\n\n".join(part for part in (*parts, *left_out, *comparison.notes) if part)


def written(interval: Interval) -> str:
    return f"{interval.estimate:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def result_table(comparison: Comparison, price: float, rows: Sequence[ResultRow], leads: Sequence[Lead]) -> str:
    """Return the results of all contestants in all cells at one price."""
    rows = [row for row in rows if (row.group, row.price) == (ALL, price)]
    compared = comparison.subjects[0]
    ahead = {lead.over: lead for lead in leads if (lead.group, lead.price, lead.contestant) == (ALL, price, compared)}
    table = [("contestant", "mean", "worst cell", "size", "FLOPs", f"{compared} − this [95 %]", "Holm p", "of tuning", "plans", "bits")]
    for row in rows:
        name = f"blind ({comparison.blind[price]})" if row.contestant == "blind" else row.contestant
        name += f" ({row.trainings} trainings)" if row.trainings > 1 else ""
        lead = ahead.get(row.contestant)
        table.append(
            (
                name if row.cells == rows[0].cells else f"{name}, {row.cells} cells",
                f"{row.mean:+.4f}",
                f"{row.worst_cell:+.4f}",
                f"{row.size:.2f}",
                f"{row.flops:.2f}×",
                "" if lead is None else written(lead.ahead),
                "" if lead is None or lead.p_value is None else f"{lead.p_value:.3f}",
                "" if row.share is None else f"{row.share:.0%}",
                str(row.plans),
                f"{row.information[1]:.2f}",
            )
        )
    return f"{ALL} ({rows[0].cells}), price {price:g}: gain in test loss over never − price × size\n{aligned(table, numbers=True)}"


def group_table(comparison: Comparison, group: str, rows: Sequence[ResultRow], leads: Sequence[Lead]) -> str:
    """Return the leads of the subjects in a group of cells, by price."""
    ahead = {(lead.contestant, lead.price, lead.over): lead for lead in leads if lead.group == group}
    found = [row for row in rows if row.group == group and row.contestant in comparison.subjects]
    others = [name for name in IN_GROUPS if name in comparison.trainings]
    table = [("contestant", "price", "cells", "mean", *(f"− {name} [95 %]" for name in others), "of tuning")]
    for row in sorted(found, key=lambda row: comparison.subjects.index(row.contestant)):
        its = [ahead.get((row.contestant, row.price, name)) for name in others]
        texts = ["" if lead is None else written(lead.ahead) + ("*" if _is_significant(lead) else " ") for lead in its]
        share = "" if row.share is None else f"{row.share:.0%}"
        table.append((row.contestant, f"{row.price:g}", str(row.cells), f"{row.mean:+.4f}", *texts, share))
    title = f"cells of the group {group!r}: mean, and lead over others; * p below {LEVEL:g} after Holm's correction for all tests"
    return f"{title}\n{aligned(table, numbers=True)}"


def _is_significant(lead: Lead) -> bool:
    return lead.p_value is not None and lead.p_value < LEVEL


def tuning_table(comparison: Comparison, rows: Sequence[ResultRow]) -> str:
    """Return the share of the way from blind to tuned that the subjects reach, and at which prices there is one."""
    found = {(row.contestant, row.price): row for row in rows if row.group == ALL}
    ways = {price: found["tuned", price].mean - found["blind", price].mean for price in comparison.prices}
    table = [("price", "tuned − blind", *comparison.subjects)]
    for price, way in ways.items():
        shares = [found[name, price].share for name in comparison.subjects]
        table.append((f"{price:g}", f"{way:+.4f}", *("–" if share is None else f"{share:.0%}" for share in shares)))
    prices = ", ".join(f"{price:g}" for price, way in ways.items() if way >= LEAST_TUNING)
    where = f"tuned is at least {LEAST_TUNING:g} ahead of blind at {f'a price of {prices}' if prices else 'no price'}"
    return f"share of the way from blind to tuned; {where}\n{aligned(table, numbers=True)}"


def longer_table(comparison: Comparison) -> str:
    """Return the leads over longer in the lives where tuned is ahead of longer; an empty text if there are none."""
    table = [("contestant", "price", "lives", "number", "cells", "− longer [95 %]", f"not {TOLERANCE:g} behind")]
    for lead in comparison.leads_over_longer():
        is_near = "yes" if lead.ahead.low > -TOLERANCE else "no"
        table.append((lead.contestant, f"{lead.price:g}", lead.group, str(lead.hosts), str(lead.cells), written(lead.ahead), is_near))
    title = f"lead over longer, which has the FLOPs of {comparison.compared}, in lives where tuned is ahead of longer"
    return f"{title}\n{aligned(table, numbers=True)}" if len(table) > 1 else ""


def training_table(comparison: Comparison, name: str) -> str:
    """Return the lead of every training of a contestant over blind, by price, and how many of them are ahead."""
    found = {(lead.contestant, lead.price): lead.ahead for lead in comparison.leads_of_trainings()}
    table = [("training", *(f"price {price:g}" for price in comparison.prices))]
    for training in comparison.trainings[name]:
        its = [found.get((training, price)) for price in comparison.prices]
        table.append((training, *("" if ahead is None else written(ahead) for ahead in its)))
    counts = {"ahead of blind": lambda ahead: ahead.estimate > 0, "with an interval above 0": lambda ahead: ahead.low > 0}
    for what, holds in counts.items():
        trainings = [[found[one, price] for one in comparison.trainings[name] if (one, price) in found] for price in comparison.prices]
        table.append((what, *(f"{sum(map(holds, its))} of {len(its)}" for its in trainings)))
    return f"every training of {name} alone − blind [95 % over cells, not corrected]\n{aligned(table, numbers=True)}"


def bounds_table(comparison: Comparison, name: str, rows: Sequence[ResultRow]) -> str:
    """Return the worst result of a contestant in a cell and the lowest of its simultaneous bounds, by price."""
    found = {row.price: row for row in rows if (row.group, row.contestant) == (ALL, name)}
    has_several = name in comparison.joined
    table = [
        ("price", "worst cell", "lowest bound", "at least 0", *(("worst training", "lowest bound", "at least 0") if has_several else ()))
    ]
    for price in comparison.prices:
        bounds = {f"cell {cell}": bound for cell, bound in comparison.bounds(name, price).items()}
        line = [f"{found[price].worst_cell:+.4f}", *_lowest(bounds)]
        if has_several:
            of_trainings = comparison.bounds_of_trainings(name, price).items()
            bounds = {f"{one}, cell {cell}": bound for one, its in of_trainings for cell, bound in its.items()}
            line += [f"{found[price].worst_of_a_training:+.4f}", *_lowest(bounds)]
        table.append((f"{price:g}", *line))
    note = "; those of the mean over trainings, and of every training" if has_several else ""
    return f"95 % lower bounds of {name} against never, for all cells at once{note}\n{aligned(table, numbers=True)}"


def _lowest(bounds: dict[str, float]) -> tuple[str, str]:
    """Return the lowest bound with its name, and how many are at least 0."""
    lowest = min(bounds, key=bounds.__getitem__)
    return f"{bounds[lowest]:+.4f} ({lowest})", f"{sum(bound >= 0 for bound in bounds.values())} of {len(bounds)}"


def size_table(comparison: Comparison, price: float) -> str:
    """Return the mean size of the compared contestant by samples and label noise, beside that of tuned."""
    ours, theirs = (
        [record for hosts in comparison.hosts(name, price) for record in hosts.values()] for name in (comparison.subjects[0], "tuned")
    )
    samples = [record["training_samples"] for record in ours]
    edges = np.geomspace(min(samples), max(max(samples), min(samples) + 1), SAMPLE_BINS + 1).tolist()
    names = [name for _, name in NOISE_BINS]
    rows = [("samples", *names, *(f"tuned: {name}" for name in names))]
    for number, (own, other) in enumerate(zip(sizes_by_data(ours, edges), sizes_by_data(theirs, edges), strict=True)):
        sizes = ("–" if size is None else f"{size:.2f}" for size in (*own, *other))
        rows.append((f"{edges[number]:,.0f} to {edges[number + 1]:,.0f}", *sizes))
    return f"mean size at price {price:g} by training samples and label noise\n{aligned(rows, numbers=True)}"
