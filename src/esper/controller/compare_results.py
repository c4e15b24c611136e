"""Statistics of a comparison over cells, made from its records alone. `esper.controller.compare_tables` writes them as text.

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

The result of a host at a price is gain - price × size. Choices, such as that of the tuned plan, are made by `val_gain`, so that the test
data are used for no choice.

Contestants whose names differ in a number at the end only, such as "learned 1" to "learned 5", are trainings of one kind of controller.
They are joined to one contestant, "learned", and their results are averaged. Means are over the hosts of a cell first, then over trainings,
then over cells. Intervals are over cells, and over trainings where there are several (`esper.intervals.crossed_interval`). Random moves and
the controls at equal FLOPs follow one training, `Comparison.compared`.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.controller.plans import CONSTANT_PLANS
from esper.intervals import Interval, crossed_interval, crossed_p_value, holm, student_interval

Record = dict[str, Any]
Host = tuple[int, int]  # cell, seed of the host
Hosts = dict[Host, Record]
Found = dict[tuple[str, float], Hosts]  # (contestant, price) -> its hosts
Trainings = Sequence[Hosts]  # the same hosts under each training of one contestant; most contestants have one
Matrix = NDArray[np.float64]

PLANS = tuple(plan.name for plan in CONSTANT_PLANS)
TESTED = ("never", "random", "blind", "heuristic", "longer")  # contestants that compared ones are tested against
ORDER = ("never", "early", "random", "blind", "tuned", "rule", "heuristic", "longer", "final", "grid")  # in tables; others follow
LEAST_TUNING = 0.03  # lead of tuned over blind from which the share of it is reported, in units
SAMPLE_BINS = 4  # rows of `sizes_by_data`
NOISE_BINS = ((0.0, "no noise"), (0.25, "up to 0.25"), (1.0, "above"))  # most label noise of each column
ALL = "all cells"
TUNED_AHEAD = {"gain": "tuned ahead by test loss", "val_gain": "tuned ahead by validation loss"}  # names of these groups of hosts


# Results of contestants


def worth(record: Record, price: float, gain: str = "gain") -> float:
    """Return the result of a host at a price, by test loss (gain) or by validation loss (val_gain)."""
    return float(record[gain] - price * record["size"])


def by_contestant(records: Iterable[Record], *, prices: Sequence[float], blind: Mapping[float, str]) -> Found:
    """Return the hosts of all contestants at all prices, among them those that are chosen from other hosts: blind, tuned and grid.

    `blind` holds the constant plan of every price. Constant plans are not contestants themselves, but for never.
    """
    found: Found = defaultdict(dict)
    plans: dict[str, Hosts] = defaultdict(dict)
    grid: dict[tuple[float, Host], list[Record]] = defaultdict(list)
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
        return max(plans, key=lambda name: fmean(worth(plans[name][host], price, "val_gain") for host in others))

    return {(cell, seed): plans[best_without(cell, seed)][cell, seed] for cell, seeds in cells.items() for seed in seeds}


def best_size(sizes: Sequence[Record], price: float) -> Record:
    """Return the static host that is best by validation loss and price, with the FLOPs of all of them."""
    best = max(sizes, key=lambda record: worth(record, price, "val_gain"))
    return {**best, "flops": sum(record["flops"] for record in sizes)}


def blind_plans(training: Sequence[Record], prices: Sequence[float]) -> dict[float, str]:
    """Return for every price the constant plan with the best mean over the training cells.

    A record of a training cell has "constant": name of the plan -> [gain in validation loss, size].
    """

    def mean(name: str, price: float) -> float:
        return fmean(gain - price * size for record in training for gain, size in [record["constant"][name]])

    return {price: max(PLANS, key=lambda name: mean(name, price)) for price in prices}


def kind_of(name: str) -> str:
    """Return the name of a contestant without the number at its end, which may be followed by the name of a controller file.

    >>> kind_of("learned 12"), kind_of("runs/value_1.safetensors"), kind_of("runs/training_1/controller.safetensors")
    ('learned', 'runs/value', 'runs/training')
    """
    return re.sub(r"(?<=[^\d\s_/-])[\s_/-]*\d+(/controller)?(\.safetensors)?$", "", name)


def join_trainings(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return contestant -> its trainings. Several of one kind are joined under its name, unless that is the name of another contestant.

    >>> join_trainings(["never", "learned 1", "learned 2", "value 1"])
    {'never': ('never',), 'learned': ('learned 1', 'learned 2'), 'value 1': ('value 1',)}
    """
    names = list(names)
    kinds = Counter(map(kind_of, names))
    joined: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kind = kind_of(name)
        joined[kind if kinds[kind] > 1 and kind not in (*names, *ORDER) else name].append(name)
    return {name: tuple(trainings) for name, trainings in joined.items()}


# Statistics


def in_common(*contestants: Trainings, only: Set[Host] | None = None) -> list[list[Hosts]]:
    """Return the trainings of each contestant with the hosts that all of them have, or with those among `only`."""
    shared = set.intersection(*(set(hosts) for trainings in contestants for hosts in trainings))
    kept = sorted(shared if only is None else shared & only)
    return [[{host: hosts[host] for host in kept} for hosts in trainings] for trainings in contestants]


def cell_means(hosts: Hosts, price: float) -> dict[int, float]:
    """Return cell -> mean result of its hosts."""
    by_cell = defaultdict(list)
    for (cell, _), record in sorted(hosts.items(), key=lambda item: item[0]):
        by_cell[cell].append(worth(record, price))
    return {cell: fmean(values) for cell, values in by_cell.items()}


def results(trainings: Trainings, price: float) -> Matrix:
    """Return the mean results [cells, trainings] of trainings that have the same hosts."""
    return np.array([list(cell_means(hosts, price).values()) for hosts in trainings]).T


def lower_bounds(trainings: Trainings, price: float, *, level: float = 0.05) -> dict[int, float]:
    """Return a lower bound for each cell of the mean result of these trainings. With a probability of 1 - level, all of these bounds hold.

    They are one-sided Student bounds over the hosts of a cell, with Bonferroni's correction for the number of cells.
    """
    by_cell = defaultdict(list)
    for host in sorted(trainings[0]):
        by_cell[host[0]].append(fmean(worth(hosts[host], price) for hosts in trainings))
    return {cell: student_interval(values, confidence=1 - 2 * level / len(by_cell)).low for cell, values in by_cell.items()}


def share_of_tuning(reached: float, *, blind: float, tuned: float, least: float = LEAST_TUNING) -> float | None:
    """Return the share of the way from blind to tuned that a mean result reaches; None where tuned is less than `least` ahead of blind."""
    return (reached - blind) / (tuned - blind) if tuned - blind >= least else None


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


def sizes_by_data(records: Iterable[Record], edges: Sequence[float]) -> list[list[float | None]]:
    """Return the mean size of hosts by training samples (rows, between the edges) and label noise (columns of NOISE_BINS).

    A bin without hosts has None.
    """
    bins: dict[tuple[int, int], list[float]] = defaultdict(list)
    for record in records:
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
    trainings: int
    cells: int
    mean: float  # result, over cells
    worst_cell: float  # mean over trainings
    worst_of_a_training: float  # in any cell
    size: float
    flops: float  # relative to the host that never grows
    share: float | None  # of the way from blind to tuned, where there is one
    plans: int  # different ones
    information: tuple[float, float]  # between plan and cell in bits: plug-in, and corrected


@dataclass(frozen=True)
class Lead:
    """Difference of the results of two contestants at one price, in one group of cells."""

    group: str
    price: float
    contestant: str
    over: str
    cells: int
    hosts: int
    ahead: Interval  # over cells, and over trainings where there are several
    p_value: float | None = None  # for the contestants in TESTED; after Holm's correction for all tests


@dataclass(frozen=True)
class Comparison:
    """Records of a comparison, and their statistics."""

    records: Sequence[Record]
    prices: Sequence[float]
    blind: Mapping[float, str]  # price -> name of the constant plan that is best on the training cells
    compared: str  # the single contestant that random moves and controls follow
    notes: Sequence[str] = ()

    @cached_property
    def found(self) -> Found:
        """Hosts of every contestant; several trainings of one kind are not joined here."""
        return by_contestant(self.records, prices=self.prices, blind=self.blind)

    @cached_property
    def trainings(self) -> dict[str, tuple[str, ...]]:
        """Contestant -> names of its trainings. The compared contestant is first, then those in ORDER."""
        joined = join_trainings(dict.fromkeys(name for name, _ in self.found))
        for name, trainings in list(joined.items()):
            if not all(in_common([self.found.get((one, price), {}) for one in trainings])[0][0] for price in self.prices):
                del joined[name]  # they were not compared on the same hosts
                joined |= {one: (one,) for one in trainings}
        first = next((name for name in joined if self.compared in joined[name]), None)
        if first is None:
            raise ValueError(f"there is no host of the compared contestant {self.compared!r}; there are hosts of: {', '.join(joined)}")
        order = [first, *ORDER, *joined]
        return {name: joined[name] for name in dict.fromkeys(order) if name in joined}

    @property
    def joined(self) -> dict[str, tuple[str, ...]]:
        """The contestants with several trainings."""
        return {name: trainings for name, trainings in self.trainings.items() if len(trainings) > 1}

    @property
    def subjects(self) -> list[str]:
        """Contestants that are compared with all others: the compared one, and those with several trainings."""
        return list(dict.fromkeys([next(iter(self.trainings)), *self.joined]))

    def groups(self) -> list[str]:
        """Return the groups of cells, and all of them together first."""
        names = list(dict.fromkeys(record["group"] for record in self.records))
        return [ALL, *(names if len(names) > 1 else [])]

    def hosts(self, name: str, price: float, group: str = ALL) -> list[Hosts]:
        """Return the hosts of every training of a contestant in a group of cells: those that all its trainings have."""
        found = [self.found.get((training, price), {}) for training in self.trainings.get(name, (name,))]
        return in_common([{host: one for host, one in hosts.items() if group in (ALL, one["group"])} for hosts in found])[0]

    def rows(self) -> list[ResultRow]:
        """Return the results of all contestants, in every group and at every price."""
        keys = [(group, price, name) for group in self.groups() for price in self.prices for name in self.trainings]
        return [self._row(*key) for key in keys if self.hosts(key[2], key[1], key[0])[0]]

    def _row(self, group: str, price: float, name: str) -> ResultRow:
        trainings, never = self.hosts(name, price, group), self.hosts("never", price, group)[0]
        found = results(trainings, price)  # [cells, trainings]
        _, *plans = in_common(trainings, self.hosts("blind", price, group), self.hosts("tuned", price, group))
        blind, tuned = (float(results(one, price).mean()) for one in plans)  # on the hosts of this contestant
        hosts = [(host, record) for hosts in trainings for host, record in hosts.items()]
        return ResultRow(
            group=group,
            price=price,
            contestant=name,
            trainings=len(trainings),
            cells=len(found),
            mean=float(found.mean()),
            worst_cell=float(found.mean(axis=1).min()),
            worst_of_a_training=float(found.min()),
            size=fmean(record["size"] for _, record in hosts),
            flops=fmean(record["flops"] / never[host]["flops"] for host, record in hosts),
            share=share_of_tuning(float(found.mean()), blind=blind, tuned=tuned) if name not in ("blind", "tuned") else None,
            plans=len({plan_key(record) for _, record in hosts}),
            information=mutual_information([(plan_key(record), host[0]) for host, record in hosts]),
        )

    def leads(self) -> list[Lead]:
        """Return how far the subjects are ahead of all others, in every group and at every price, with p-values corrected for all tests."""
        keys = [(group, price, name) for group in self.groups() for price in self.prices for name in self.subjects]
        found = [
            self._lead(price, name, other, group=group, is_test=other in TESTED)
            for group, price, name in keys
            for other in self.trainings
            if other != name
        ]
        leads = [lead for lead in found if lead is not None]
        corrected = iter(holm([lead.p_value for lead in leads if lead.p_value is not None]).tolist())
        return [lead if lead.p_value is None else replace(lead, p_value=next(corrected)) for lead in leads]

    def leads_of_trainings(self) -> list[Lead]:
        """Return how far every training alone is ahead of blind, in all cells. The intervals are over cells."""
        names = [name for trainings in self.joined.values() for name in trainings]
        found = [self._lead(price, name, "blind") for name in names for price in self.prices]
        return [lead for lead in found if lead is not None]

    def leads_over_longer(self) -> list[Lead]:
        """Return how far the subjects are ahead of longer, in the hosts where tuned is ahead of longer. There, growth can pay.

        Hosts chosen by test loss are partly those in which longer had bad luck, to the advantage of all others. So the leads in the hosts
        that are chosen by validation loss are returned too, see TUNED_AHEAD for the names of both.
        """
        found = []
        for gain, group in TUNED_AHEAD.items():
            for name in self.subjects:
                for price in self.prices:
                    (tuned,), (longer,) = in_common(self.hosts("tuned", price), self.hosts("longer", price))
                    lives = {host for host in longer if worth(tuned[host], price, gain) > worth(longer[host], price, gain)}
                    if lead := self._lead(price, name, "longer", lives=lives):
                        found.append(replace(lead, group=group))
        return found

    def _lead(
        self, price: float, name: str, over: str, *, group: str = ALL, lives: Set[Host] | None = None, is_test: bool = False
    ) -> Lead | None:
        """Return the lead in the hosts that both contestants have, or in those of `lives`; None if these are in fewer than two cells."""
        ours, theirs = in_common(self.hosts(name, price, group), self.hosts(over, price, group), only=lives)
        cells = len({cell for cell, _ in ours[0]})
        if cells < 2:
            return None
        both = results(ours, price), results(theirs, price)
        p_value = crossed_p_value(*both) if is_test else None
        return Lead(group, price, name, over, cells, len(ours[0]), crossed_interval(*both), p_value)

    def bounds(self, name: str, price: float) -> dict[int, float]:
        """Return simultaneous lower bounds of the mean result over trainings, see `lower_bounds`."""
        return lower_bounds(self.hosts(name, price), price)

    def bounds_of_trainings(self, name: str, price: float) -> dict[str, dict[int, float]]:
        """Return training -> its lower bounds. With a probability of 95 %, the bounds of all trainings in all cells hold."""
        names, hosts = self.trainings[name], self.hosts(name, price)
        return {one: lower_bounds([its], price, level=0.05 / len(names)) for one, its in zip(names, hosts, strict=True)}

    def left_out(self) -> Counter[str]:
        """Return control -> number of hosts for which it could not be trained."""
        return Counter(record["contestant"] for record in self.records if record["what"] == "left out")

    def to_builtins(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        return {
            "compared": self.compared,
            "trainings": {name: list(trainings) for name, trainings in self.joined.items()},
            "prices": list(self.prices),
            "blind": {f"{price:g}": name for price, name in self.blind.items()},
            "notes": list(self.notes),
            "left_out": dict(self.left_out()),
            "rows": [asdict(row) for row in self.rows()],
            "leads": [asdict(lead) for lead in (*self.leads(), *self.leads_of_trainings(), *self.leads_over_longer())],
            "lower_bounds": [
                {"contestant": one, "price": price, "cell": cell, "bound": bound}
                for name in self.subjects
                for price in self.prices
                for one, bounds in {name: self.bounds(name, price), **self.bounds_of_trainings(name, price)}.items()
                for cell, bound in bounds.items()
            ],
            "records": list(self.records),
        }
