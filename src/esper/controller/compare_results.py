"""Statistics and tables of a comparison over cells, made from its records alone.

A record is a plain dictionary of one host, as `esper.controller.compare` makes it and JSON keeps it:

    what             "host"; "left out" for a control that could not be trained, which has no result; "cell" after the last one of a cell
    cell, group      number of the cell, and the group that it is reported in
    ...              the fields of the cell, see `esper.controller.cells.Cell`
    training_samples number of samples that its hosts see
    contestant       name of the contestant, of the control, or of the constant plan
    price            price of rent that it saw; None if it makes no difference
    host_seed        the host; hosts of one seed start alike
    gain, val_gain   gain in test or validation loss over the host that never grows, in units of the loss scale
    size             rent of the network at a price of 1
    flops            of the whole training
    decisions        length of the training
    plan             [decision, name of the move] of all moves

The result of a host at a price is gain - price × size. Means are over the hosts of a cell first and then over cells, and intervals are over
cells. Choices, such as that of the tuned plan, are made by `val_gain`, so that the test data are used for no choice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from esper.controller.plans import CONSTANT_PLANS
from esper.intervals import Interval, holm, student_interval, student_p_value
from esper.text_table import aligned

Record = dict[str, Any]
Hosts = dict[tuple[int, int], Record]  # (cell, seed of the host) -> record
Found = dict[tuple[str, float], Hosts]  # (contestant, price) -> its hosts

PLANS = tuple(plan.name for plan in CONSTANT_PLANS)
TESTED = ("never", "random", "blind", "heuristic", "longer")  # contestants that the compared one is tested against
ORDER = ("never", "early", "random", "blind", "tuned", "rule", "heuristic", "longer", "final", "grid")  # in tables; others follow
LEAST_TUNING = 0.03  # lead of tuned over blind from which the share of it is reported, in units
SAMPLE_BINS = 4
NOISE_BINS = ((0.0, "no noise"), (0.25, "up to 0.25"), (1.0, "above"))  # most label noise of each column
ALL = "all cells"


# Results of contestants


def worth(record: Record, price: float) -> float:
    """Return the result of a host at a price."""
    return float(record["gain"] - price * record["size"])


def by_contestant(records: Iterable[Record], *, prices: Sequence[float], blind: Mapping[float, str]) -> Found:
    """Return the hosts of all contestants at all prices, among them those that are chosen from other hosts: blind, tuned and grid.

    `blind` holds the constant plan of every price. Constant plans are not contestants themselves, but for never.
    """
    found: Found = defaultdict(dict)
    plans: dict[str, Hosts] = defaultdict(dict)
    grid: dict[tuple[float, tuple[int, int]], list[Record]] = defaultdict(list)
    for record in records:
        if record["what"] != "host":
            continue
        name, host = record["contestant"], (record["cell"], record["host_seed"])
        if name in PLANS:
            plans[name][host] = record
        elif name.startswith("grid "):
            grid[record["price"], host].append(record)
        else:
            for price in prices if record["price"] is None else [record["price"]]:
                found[name, price][host] = record
    for price in prices:
        found["never", price] = plans["never"]
        found["blind", price] = plans[blind[price]]
        found["tuned", price] = tuned(plans, price)
    for (price, host), sizes in grid.items():
        found["grid", price][host] = best_size(sizes, price)
    return dict(found)


def of_whole_cells(records: Iterable[Record]) -> list[Record]:
    """Return the records of complete cells. The file of a comparison that was killed may end within a cell."""
    parts: dict[int, list[Record]] = defaultdict(list)
    whole: dict[int, list[Record]] = {}
    for record in records:
        if record.get("what") in ("host", "left out"):
            parts[record["cell"]].append(record)
        elif record.get("what") == "cell":
            whole[record["cell"]] = [*parts.pop(record["cell"])[-record["records"] :], record]
    return [record for cell in whole.values() for record in cell]


def tuned(plans: Mapping[str, Hosts], price: float) -> Hosts:
    """Return for every host the record of the constant plan that is best on the other hosts of its cell, by validation loss and price."""
    cells: dict[int, list[int]] = defaultdict(list)
    for cell, seed in plans["never"]:
        cells[cell].append(seed)

    def best_without(cell: int, left_out: int) -> str:
        others = [(cell, seed) for seed in cells[cell] if seed != left_out]
        return max(plans, key=lambda name: fmean(_worth_by_validation(plans[name][host], price) for host in others))

    return {(cell, seed): plans[best_without(cell, seed)][cell, seed] for cell, seeds in cells.items() for seed in seeds}


def best_size(sizes: Sequence[Record], price: float) -> Record:
    """Return the static host that is best by validation loss and price, with the FLOPs of all of them."""
    best = max(sizes, key=lambda record: _worth_by_validation(record, price))
    return {**best, "flops": sum(record["flops"] for record in sizes)}


def _worth_by_validation(record: Record, price: float) -> float:
    return float(record["val_gain"] - price * record["size"])


def blind_plans(training: Sequence[Record], prices: Sequence[float]) -> dict[float, str]:
    """Return for every price the constant plan with the best mean over the training cells.

    A record of a training cell has "constant": name of the plan -> [gain in validation loss, size].
    """

    def mean(name: str, price: float) -> float:
        return fmean(gain - price * size for record in training for gain, size in [record["constant"][name]])

    return {price: max(PLANS, key=lambda name: mean(name, price)) for price in prices}


# Statistics


def cell_means(hosts: Hosts, price: float) -> dict[int, float]:
    """Return cell -> mean result of its hosts."""
    by_cell = defaultdict(list)
    for (cell, _), record in sorted(hosts.items(), key=lambda item: item[0]):
        by_cell[cell].append(worth(record, price))
    return {cell: fmean(values) for cell, values in by_cell.items()}


def differences(ours: Hosts, theirs: Hosts, price: float) -> dict[int, float]:
    """Return cell -> mean difference of the results of the hosts that both have."""
    both = ours.keys() & theirs.keys()
    first, second = (cell_means({host: hosts[host] for host in both}, price) for hosts in (ours, theirs))
    return {cell: first[cell] - second[cell] for cell in first}


def lower_bounds(hosts: Hosts, price: float, *, level: float = 0.05) -> dict[int, float]:
    """Return a lower bound of the mean result of each cell. With a probability of 1 - level, all of these bounds hold.

    They are one-sided Student bounds over the hosts of a cell, with Bonferroni's correction for the number of cells.
    """
    by_cell = defaultdict(list)
    for (cell, _), record in hosts.items():
        by_cell[cell].append(worth(record, price))
    return {cell: student_interval(values, confidence=1 - 2 * level / len(by_cell)).low for cell, values in sorted(by_cell.items())}


def share_of_tuning(found: Found, name: str, price: float, *, least: float = LEAST_TUNING) -> float | None:
    """Return the share of the way from blind to tuned that a contestant reaches; None where tuned is less than `least` ahead of blind."""
    mean = {one: fmean(cell_means(found[one, price], price).values()) for one in (name, "blind", "tuned")}
    way = mean["tuned"] - mean["blind"]
    return (mean[name] - mean["blind"]) / way if way >= least else None


def plan_key(record: Record) -> tuple[tuple[int, str], ...]:
    """Return the plan of a host as a key: the decisions and names of its moves."""
    return tuple((int(decision), str(name)) for decision, name in record["plan"])


def mutual_information(pairs: Sequence[tuple[Hashable, Hashable]]) -> tuple[float, float]:
    """Return the mutual information of two discrete variables in bits: the plug-in estimate, and with the Miller-Madow correction.

    The plug-in estimate takes the observed shares as probabilities, and is too high for few pairs. Miller and Madow add (values - 1) / 2N
    nats to each of the three entropies. The corrected estimate may be below 0.
    """
    corrected = estimate = 0.0
    for sign, values in ((1, [a for a, _ in pairs]), (1, [b for _, b in pairs]), (-1, pairs)):
        counts = Counter(values)
        entropy = -sum(count / len(pairs) * math.log2(count / len(pairs)) for count in counts.values())
        estimate += sign * entropy
        corrected += sign * (entropy + (len(counts) - 1) / (2 * len(pairs) * math.log(2)))
    return estimate, corrected


def sizes_by_data(hosts: Hosts, edges: Sequence[float]) -> list[list[float | None]]:
    """Return the mean size of a contestant's hosts by training samples (rows, between the edges) and label noise (columns of NOISE_BINS).

    A bin without hosts has None.
    """
    bins: dict[tuple[int, int], list[float]] = defaultdict(list)
    for record in hosts.values():
        row = min(max(int(np.searchsorted(edges, record["training_samples"], side="right")) - 1, 0), len(edges) - 2)
        column = next(number for number, (most, _) in enumerate(NOISE_BINS) if record["label_noise"] <= most)
        bins[row, column].append(record["size"])
    return [[fmean(bins[row, column]) if bins[row, column] else None for column in range(len(NOISE_BINS))] for row in range(len(edges) - 1)]


# The whole comparison


@dataclass(frozen=True)
class ResultRow:
    """A contestant at one price, in one group of cells."""

    group: str
    price: float
    contestant: str
    cells: int
    mean: float  # result, over cells
    worst_cell: float
    size: float
    flops: float  # relative to the host that never grows
    ahead: Interval | None  # of the compared contestant, over cells; None for itself, and for a single cell
    p_value: float | None = None  # of Student's test, for the contestants in TESTED; after Holm's correction for all tests
    share: float | None = None  # of the way from blind to tuned, where there is one
    plans: int = 0  # different ones
    information: tuple[float, float] = (0.0, 0.0)  # between plan and cell in bits: plug-in, and corrected


@dataclass(frozen=True)
class Comparison:
    """Records of a comparison, with their statistics and tables."""

    records: Sequence[Record]
    prices: Sequence[float]
    blind: Mapping[float, str]  # price -> name of the constant plan that is best on the training cells
    compared: str
    notes: Sequence[str] = ()
    found: Found = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "found", by_contestant(self.records, prices=self.prices, blind=self.blind))

    def groups(self) -> list[str]:
        """Return the groups of cells, and all of them together first."""
        names = list(dict.fromkeys(record["group"] for record in self.records))
        return [ALL, *(names if len(names) > 1 else [])]

    def contestants(self) -> list[str]:
        """Return the compared contestant, then the others."""
        names = list(dict.fromkeys(name for name, _ in self.found))
        others = [*(name for name in ORDER if name in names), *(name for name in names if name not in ORDER)]
        return [self.compared, *(name for name in others if name != self.compared)]

    def hosts(self, name: str, price: float, group: str = ALL) -> Hosts:
        """Return the hosts of a contestant in a group of cells."""
        found = self.found.get((name, price), {})
        return {host: record for host, record in found.items() if group in (ALL, record["group"])}

    def rows(self) -> list[ResultRow]:
        """Return the results of all contestants, at every price and in every group, with p-values that are corrected for all tests."""
        rows = [
            self._row(group, price, name)
            for group in self.groups()
            for price in self.prices
            for name in self.contestants()
            if self.hosts(name, price, group)
        ]
        corrected = iter(holm([row.p_value for row in rows if row.p_value is not None]).tolist())
        return [row if row.p_value is None else ResultRow(**{**vars(row), "p_value": next(corrected)}) for row in rows]

    def _row(self, group: str, price: float, name: str) -> ResultRow:
        hosts, never = self.hosts(name, price, group), self.hosts("never", price, group)
        means = list(cell_means(hosts, price).values())
        lead = list(differences(self.hosts(self.compared, price, group), hosts, price).values())
        has_test = len(lead) > 1 and name != self.compared
        in_group = {(one, price): self.hosts(one, price, group) for one in (name, "blind", "tuned")}
        return ResultRow(
            group=group,
            price=price,
            contestant=name,
            cells=len(means),
            mean=fmean(means),
            worst_cell=min(means),
            size=fmean(record["size"] for record in hosts.values()),
            flops=fmean(record["flops"] / never[host]["flops"] for host, record in hosts.items()),
            ahead=student_interval(lead) if has_test else None,
            p_value=student_p_value(lead) if has_test and name in TESTED else None,
            share=share_of_tuning(in_group, name, price) if name not in ("blind", "tuned") else None,
            plans=len({plan_key(record) for record in hosts.values()}),
            information=mutual_information([(plan_key(record), cell) for (cell, _), record in hosts.items()]),
        )

    def left_out(self) -> Counter[str]:
        """Return control -> number of hosts for which it could not be trained."""
        return Counter(record["contestant"] for record in self.records if record["what"] == "left out")

    def tables(self) -> str:
        """Return all tables and notes as text."""
        rows = self.rows()
        parts = [
            self._result_table(group, price, [row for row in rows if (row.group, row.price) == (group, price)])
            for group in self.groups()
            for price in self.prices
        ]
        parts += [self._bounds_text(), *(self._size_table(price) for price in self.prices)]
        counts = [f"{name}: left out for {count} hosts, whose network cannot grow at the start" for name, count in self.left_out().items()]
        return "\n\n".join([*parts, *counts, *self.notes])

    def _result_table(self, group: str, price: float, rows: Sequence[ResultRow]) -> str:
        lead = f"{self.compared} − this [95 %]"
        table = [("contestant", "mean", "worst cell", "size", "FLOPs", lead, "Holm p", "of tuning", "plans", "bits")]
        for row in rows:
            name = f"blind ({self.blind[price]})" if row.contestant == "blind" else row.contestant
            table.append(
                (
                    name if row.cells == rows[0].cells else f"{name}, {row.cells} cells",
                    f"{row.mean:+.4f}",
                    f"{row.worst_cell:+.4f}",
                    f"{row.size:.2f}",
                    f"{row.flops:.2f}×",
                    "" if row.ahead is None else f"{row.ahead.estimate:+.4f} [{row.ahead.low:+.4f}, {row.ahead.high:+.4f}]",
                    "" if row.p_value is None else f"{row.p_value:.3f}",
                    "" if row.share is None else f"{row.share:.0%}",
                    str(row.plans),
                    f"{row.information[1]:.2f}",
                )
            )
        return f"{group} ({rows[0].cells}), price {price:g}: gain in test loss over never − price × size\n{aligned(table, numbers=True)}"

    def _bounds_text(self) -> str:
        """Return the lowest of the simultaneous bounds at each price."""
        lines = []
        for price in self.prices:
            bounds = lower_bounds(self.hosts(self.compared, price), price)
            worst = min(bounds, key=bounds.__getitem__)
            above = sum(bound >= 0 for bound in bounds.values())
            lines.append(f"price {price:g}: lowest {bounds[worst]:+.4f} (cell {worst}); at least 0 in {above} of {len(bounds)} cells")
        return "\n".join([f"95 % lower bounds of {self.compared} against never, for all cells at once", *lines])

    def _size_table(self, price: float) -> str:
        """Return the mean size of the compared contestant by samples and label noise, beside that of tuned."""
        ours, theirs = self.hosts(self.compared, price), self.hosts("tuned", price)
        samples = [record["training_samples"] for record in ours.values()]
        edges = np.geomspace(min(samples), max(max(samples), min(samples) + 1), SAMPLE_BINS + 1).tolist()
        names = [name for _, name in NOISE_BINS]
        rows = [("samples", *names, *(f"tuned: {name}" for name in names))]
        for number, (own, other) in enumerate(zip(sizes_by_data(ours, edges), sizes_by_data(theirs, edges), strict=True)):
            sizes = ("–" if size is None else f"{size:.2f}" for size in (*own, *other))
            rows.append((f"{edges[number]:,.0f} to {edges[number + 1]:,.0f}", *sizes))
        return f"mean size at price {price:g} by training samples and label noise\n{aligned(rows, numbers=True)}"

    def to_builtins(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        return {
            "compared": self.compared,
            "prices": list(self.prices),
            "blind": {f"{price:g}": name for price, name in self.blind.items()},
            "notes": list(self.notes),
            "left_out": dict(self.left_out()),
            "rows": [asdict(row) for row in self.rows()],
            "lower_bounds": {
                f"{price:g}": {str(cell): bound for cell, bound in lower_bounds(self.hosts(self.compared, price), price).items()}
                for price in self.prices
            },
            "records": list(self.records),
        }
