"""Comparison of controllers in many cells, on the same hosts and at several prices of rent.

    never        nothing grows
    early        one random move after the first training segment
    random       random moves, in each cell and at each price as many as the compared contestant made
    blind        the constant plan that is best on training cells at that price
    tuned        the constant plan that is best on the other hosts of the same cell: about what a controller could gain by its observations
    rule         one move if one of its features is above or below a threshold after the first segment; chosen on training cells, by price
    heuristic    the heuristic controller of growth
    ...          any given controllers, such as those of files

Controls have the FLOPs that the compared contestant used for a host, including its measurements and probes:

    longer       the host without growth; it makes more decisions, with as many training steps between them
    final        the final network of the compared contestant, present from the start
    grid         static hosts of 1, 2, 4 and 8 times the width, each with a quarter of the FLOPs; the best by validation loss and price

Hosts of one seed have the same first weights and data order under every contestant, and every host keeps its best validation state. All
contestants make moves at the same two times (see `esper.controller.plans.looks`), except the heuristic, and random if it has to make more
than two. The FLOPs of validation are counted, but for those of the grid. The test data are used for no decision and no choice.
`esper.controller.compare_results` describes the records and computes the statistics.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from esper.controller.cells import Cell, draw_cell
from esper.controller.compare_results import ORDER, PLANS, Comparison, Record, blind_plans
from esper.controller.config import BRANCHES, HELD_OUT_SEEDS, MOVES, CompareConfig, ControllerConfig, rent_at
from esper.controller.evaluation import EvalCase, EvalRun, EvalSetting, run_cases
from esper.controller.layout import FEATURES, size_of
from esper.controller.learned import Learned, load_controller
from esper.controller.plans import CONSTANT_PLANS, ConstantPlan, RandomMoves, looks, make_move, move_named
from esper.controller.trained import file_of
from esper.controller.value import Recorder, describe
from esper.devices import find_device, threads
from esper.fleet.data import TaskTensors
from esper.growth.config import GrowthConfig
from esper.growth.controllers.baselines import Never, Planned
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.controllers.moves import NOTHING
from esper.growth.host.discover import discover
from esper.growth.lifecycle.stages import Controller, Cost, Decision, GrowthState
from esper.rng import Streams
from esper.tasks import Task

OnProgress = Callable[[str, int], Any]  # (present part of the comparison, number of decisions just made)
Load = Callable[[str], Task]  # returns a task by its name
Matrix = NDArray[np.float64]

GROWTH, FLEET = ControllerConfig().growth, ControllerConfig().fleet  # as controllers are trained
WIDTHS = (1, 2, 4, 8)  # of the static hosts, times that of the cell's host


def _ignore(what: str, decisions: int) -> None:
    pass


# The rule of one feature


class Rule(msgspec.Struct, frozen=True):
    """One move if one feature (see FEATURES) is above or below a threshold after the first training segment."""

    move: str | None = None  # None: grow nothing
    feature: str = ""
    is_above: bool = True
    threshold: float = 0.0  # of the scaled feature

    def applies(self, features: Sequence[float]) -> bool:
        """Return whether the move is made; `features` are those of the move."""
        return (features[FEATURES.index(self.feature)] > self.threshold) == self.is_above


@dataclass(frozen=True)
class RuleController:
    """Decides by a rule."""

    rule: Rule
    name: str = "rule"

    def decide(self, state: GrowthState) -> Decision:
        move, reason = NOTHING, ""
        if self.rule.move is not None and state.epoch == 1:
            its = move_named(self.rule.move, state)
            if self.rule.applies(describe(state, [its])[0].tolist()):
                side = "above" if self.rule.is_above else "below"
                move, reason = its, f"{self.rule.feature} is {side} {self.rule.threshold:.3g}"
        return make_move(state, move, reason, about=self.name, probe=self.rule.move is not None and state.epoch == 0)


def choose_rule(features: Mapping[str, Matrix], worths: Mapping[str, Matrix]) -> Rule:
    """Return the rule with the highest mean result on the hosts that it is chosen on. To grow nothing is worth 0.

    For each move, `features` [hosts, F] describe it after the first training segment, and `worths` [hosts] are the results of the constant
    plan that makes it then.
    """
    best, best_mean = Rule(), 0.0
    for move, rows in features.items():
        for column, feature in enumerate(FEATURES):
            # Hosts in the order of the feature; a threshold may be before the first or between two that differ.
            order = np.argsort(rows[:, column], kind="stable")
            values, below = rows[order, column], np.concatenate([[0.0], np.cumsum(worths[move][order])])
            thresholds = np.concatenate([[values[0] - 1.0], (values[1:] + values[:-1]) / 2])
            is_between = np.concatenate([[True], values[1:] > values[:-1]])
            for is_above, totals in ((True, below[-1] - below[:-1]), (False, below[:-1])):
                place = int(np.argmax(np.where(is_between, totals, -np.inf)))
                if (mean := float(totals[place]) / len(values)) > best_mean + 1e-12:
                    best, best_mean = Rule(move, feature, is_above, float(thresholds[place])), mean
    return best


def choose_rules(training: Sequence[Record], prices: Sequence[float]) -> dict[float, Rule]:
    """Return the best rule on training cells for every price. A record has "constant" and "first", see `plan_results`."""
    known = [record for record in training if len(record.get("first", {})) == len(MOVES)]
    if not known:
        return {price: Rule() for price in prices}
    features = {move: np.array([record["first"][move] for record in known]) for move in MOVES}
    results = {move: np.array([record["constant"][ConstantPlan(move).name] for record in known]) for move in MOVES}  # [hosts, (gain, size)]
    return {price: choose_rule(features, {move: of[:, 0] - price * of[:, 1] for move, of in results.items()}) for price in prices}


# Contestants


@dataclass(frozen=True)
class Known:
    """What a contestant may know besides the host: its cell, and what was chosen for it on other hosts."""

    cell: Cell
    streams: Streams
    rules: Mapping[float, Rule] = field(default_factory=dict)  # price -> rule
    moves: Mapping[tuple[int, float], int] = field(default_factory=dict)  # (seed of the host, price) -> random moves to make


Contestant = Callable[[int, float, Known], Controller]  # (seed of the host, price, what is known) -> its controller


def make_early(seed: int, price: float, known: Known) -> Controller:
    return RandomMoves(known.streams.integer(f"early {seed}"), (1,), "early")


def make_random(seed: int, price: float, known: Known) -> Controller:
    rng, horizon = known.streams.numpy(f"times {seed} {price}"), known.cell.horizon
    # The looks in random order, then other early decisions, for contestants that make more moves.
    others = [time for time in range(1, math.ceil(0.6 * horizon)) if time not in looks(horizon)]
    order = [*rng.permutation(looks(horizon)).tolist(), *rng.permutation(others).tolist()]
    return RandomMoves(known.streams.integer(f"random {seed} {price}"), tuple(map(int, order[: known.moves[seed, price]])))


def make_rule(seed: int, price: float, known: Known) -> Controller:
    return RuleController(known.rules[price])


def make_heuristic(seed: int, price: float, known: Known) -> Controller:
    return Heuristic(GROWTH)


def spread(total: int, hosts: Sequence[int], rng: np.random.Generator) -> dict[int, int]:
    """Return host -> its part of the total, as even as possible. The hosts that get one more are drawn."""
    each, rest = divmod(total, len(hosts))
    with_one_more = set(rng.permutation(len(hosts))[:rest].tolist())
    return {host: each + (place in with_one_more) for place, host in enumerate(hosts)}


def plan_of(trace: Sequence[str]) -> list[tuple[int, str]]:
    """Return (decision, name of the move) of all moves, from one text per seed: "epoch slot blueprint outcome".

    A move is named by its blueprints, all branches by "deep".

    >>> plan_of(["1 blocks.0 widen_300 kept", "1 blocks.1 mlp pruned", "4 blocks.1 norm kept"])
    [(1, 'widen_300 and deep'), (4, 'norm')]
    """
    names: dict[int, set[str]] = {}
    for text in trace:
        epoch, _, blueprint, _ = text.split(" ", 3)
        names.setdefault(int(epoch), set()).add("deep" if blueprint in BRANCHES else blueprint)
    return [(epoch, " and ".join(sorted(names[epoch], key=lambda name: (name == "deep", name)))) for epoch in sorted(names)]


# Training the hosts of a cell


@dataclass(frozen=True)
class CompareSetting:
    """Prices, hosts and resources of a comparison."""

    prices: Sequence[float]
    host_seeds: Sequence[int]
    compared: str = "heuristic"  # the contestant that random and the controls follow
    rules: Mapping[float, Rule] = field(default_factory=dict)  # price -> rule; without them, there is no contestant of this name
    controls: int | None = None  # number of hosts in a cell that have controls at equal FLOPs; None: all
    rows: int = 256  # hosts trained at once, at most
    memory: int | None = None  # bytes for these hosts; fewer are trained at once if all would take more; None: no limit
    device: str | torch.device = "cpu"
    seed: int = 0  # of random moves


def eval_setting(cell: Cell, task: Task, *, device: torch.device, rows: int, memory: int | None = None) -> EvalSetting:
    """Return the setting in which the hosts of a cell are trained; `task` is the cell's."""
    tensors = TaskTensors.of(task, device=device, dtype=torch.float32)
    return EvalSetting(task, cell.host, tensors, cell.fleet(FLEET), GROWTH, device, rows, memory)


def make_case(cell: Cell, task: Task, name: str, seed: int, price: float | None, controller: Controller) -> EvalCase:
    """Return a host of a cell to train. Without a price, the rent is 0."""
    setting = cell.host_config(seed, len(task.train), rent=rent_at(price or 0.0))
    return EvalCase(name, setting, controller, price)


def gains(runs: Sequence[EvalRun], part: str) -> list[float]:
    """Return the gain of every host over the one of its seed that never grows, in units, by its loss on a part of the data."""
    losses = [getattr(run, f"{part}_loss") for run in runs]
    never = {run.seed: loss for run, loss in zip(runs, losses, strict=True) if run.controller == "never"}
    return [(never[run.seed] - loss) / run.unit for run, loss in zip(runs, losses, strict=True)]


def size(run: EvalRun, never: EvalRun | None = None) -> float:
    """Return the size of what a network has more than its host, or than that of `never`; a smaller one has a size of 0."""
    host = never or run
    parameters = run.parameters + run.added_parameters - host.parameters
    flops = run.flops_per_sample + run.added_flops - host.flops_per_sample
    return size_of(Cost(max(parameters, 0), max(flops, 0)), Cost(host.parameters, host.flops_per_sample))


def compare_cell(
    setting: CompareSetting,
    cell: Cell,
    load: Load,
    controllers: Mapping[str, Callable[[float], Controller]],
    *,
    number: int,
    group: str = "",
    on_progress: OnProgress = _ignore,
) -> list[Record]:
    """Train the hosts of all contestants and controls in one cell. Return a record of each host, and a last record of the cell.

    `controllers` holds the given contestants: name -> function that makes a new controller for a host, given the price. The records depend
    on nothing outside this cell, so the cells of a comparison can be split over processes.
    """
    task = cell.task(load)
    evaluation = eval_setting(cell, task, device=torch.device(setting.device), rows=setting.rows, memory=setting.memory)
    known = Known(cell, Streams(setting.seed).spawn(f"cell {number}"), setting.rules)
    contestants: dict[str, Contestant] = {name: _given(make) for name, make in controllers.items()}
    contestants |= {"heuristic": make_heuristic, **({"rule": make_rule} if setting.rules else {})}
    _check_names(setting, controllers, contestants)
    where = f"cell {number}, {cell.source} {cell.host}"
    case = partial(make_case, cell, task)

    cases: list[EvalCase] = []
    for seed in setting.host_seeds:
        cases += [case(plan.name, seed, None, plan) for plan in CONSTANT_PLANS]
        cases.append(case("early", seed, None, make_early(seed, 0.0, known)))
        cases += [case(name, seed, price, make(seed, price, known)) for price in setting.prices for name, make in contestants.items()]
    runs = run_cases(evaluation, cases, partial(on_progress, f"{where}: contestants"))

    ours = [run for run in runs if run.controller == setting.compared]
    never = {run.seed: run for run in runs if run.controller == "never"}
    known = replace(known, moves=_moves_to_match(ours, setting, known.streams))
    cases = [case("random", seed, price, make_random(seed, price, known)) for seed, price in known.moves]
    # Controls are made for the runs of the first hosts.
    wanted = {(run.seed, run.price): run for run in ours if run.seed in setting.host_seeds[: setting.controls]}
    cases += [_final(run, never[run.seed], case) for run in wanted.values() if not any("#" in slot for slot, _ in run.kept)]
    found = run_cases(evaluation, cases, partial(on_progress, f"{where}: random moves and final networks"))
    # Leave out final networks that cannot grow at the start: those with slots that opened again, and those that came out otherwise.
    found = [run for run in found if run.controller != "final" or _is_same_network(run, wanted[run.seed, run.price])]
    trained = {(run.seed, run.price) for run in found if run.controller == "final"}
    left_out = [run for key, run in wanted.items() if key not in trained]
    if wanted:
        static = [*_longer(wanted.values(), never, case, cell), *_grid(wanted.values(), case, cell, evaluation.task)]
        found += _train_static(evaluation, static, partial(on_progress, f"{where}: hosts that do not grow"))

    samples = len(task.train) if cell.samples is None else min(cell.samples, len(task.train))
    about = {"cell": number, "group": group, **msgspec.to_builtins(cell), "training_samples": samples}
    records = [{"what": "host", **about, **_result(run, never[run.seed])} for run in (*runs, *found)]
    records += [{"what": "left out", **about, **_name(run), "contestant": "final"} for run in left_out]
    return [*records, {"what": "cell", **about, "records": len(records)}]


def _check_names(setting: CompareSetting, given: Iterable[str], contestants: Iterable[str]) -> None:
    """Raise ValueError if a given controller has the name of another contestant, or the compared one does not exist."""
    taken = [name for name in given if name in (*ORDER, *PLANS) or name.startswith("grid ")]
    if taken:
        raise ValueError(f"{taken[0]!r} is the name of a contestant that takes part anyway; give the controller another name")
    if setting.compared not in contestants:
        raise ValueError(f"no contestant is named {setting.compared!r}; one of these can be compared: {', '.join(contestants)}")


def _given(make: Callable[[float], Controller]) -> Contestant:
    """Return the contestant of a given controller."""
    return lambda seed, price, known: make(price)


def _name(run: EvalRun) -> Record:
    return {"contestant": run.controller, "price": run.price, "host_seed": run.seed}


def _result(run: EvalRun, never: EvalRun) -> Record:
    """Return the part of a record about one host, relative to the host of its seed that never grows.

    A host that grew nothing in the same training is that host: fleets of other sizes only round differently, so its gain is 0.
    """
    is_never = not run.grown and (run.host, run.horizon, run.steps) == (never.host, never.horizon, never.steps)
    return {
        **_name(run),
        "gain": 0.0 if is_never else (never.test_loss - run.test_loss) / never.unit,
        "val_gain": 0.0 if is_never else (never.val_loss - run.val_loss) / never.unit,
        "size": size(run, never),
        "flops": run.total_flops,
        "decisions": run.horizon,
        "plan": [list(move) for move in plan_of(run.trace)],
    }


def _moves_to_match(ours: Sequence[EvalRun], setting: CompareSetting, streams: Streams) -> dict[tuple[int, float], int]:
    """Return (seed, price) -> random moves: at each price in total as many as in the runs of the compared contestant."""
    moves: dict[tuple[int, float], int] = {}
    for price in setting.prices:
        total = sum(len(plan_of(run.trace)) for run in ours if run.price == price)
        parts = spread(total, setting.host_seeds, streams.numpy(f"spread {price}"))
        moves |= {(seed, price): count for seed, count in parts.items()}
    return moves


# Controls at equal FLOPs


def _with_horizon(case: EvalCase, decisions: int) -> EvalCase:
    return replace(case, setting=msgspec.structs.replace(case.setting, horizon=decisions))


@dataclass(frozen=True)
class StaticCase:
    """A host that grows nothing, with a network and a number of steps between decisions of its own."""

    host: str
    steps_per_decision: int
    case: EvalCase


def _segment_steps(steps: float, cell: Cell) -> int:
    """Return the number of steps between two decisions in a training of that many steps: at most as many as in the cell.

    A control that is validated less often misses its best state, if that comes early. Shorter trainings have as many decisions as the cell,
    or up to twice as many; with a power of 2, so that hosts whose trainings differ in length share a fleet.
    """
    return min(1 << max(math.floor(math.log2(max(steps, 1) / cell.horizon)), 0), cell.steps_per_decision)


def _longer(ours: Iterable[EvalRun], never: Mapping[int, EvalRun], case: Callable[..., EvalCase], cell: Cell) -> Iterator[StaticCase]:
    """Yield for every run its host without growth, trained for as many FLOPs, those of validation included."""
    for run in ours:
        decisions = math.ceil(run.total_flops * never[run.seed].horizon / never[run.seed].total_flops)
        one = _with_horizon(case("longer", run.seed, run.price, Never()), decisions)
        yield StaticCase(cell.host, cell.steps_per_decision, one)


def _final(run: EvalRun, never: EvalRun, case: Callable[..., EvalCase]) -> EvalCase:
    """Return the final network of a run from the start, trained for as many FLOPs."""
    plan = Planned([(0, slot, blueprint) for slot, blueprint in run.kept])
    one = replace(case("final", run.seed, run.price, plan), is_static=True)
    times = 1 + run.added_flops / run.flops_per_sample
    return _with_horizon(one, math.ceil(run.total_flops * never.horizon / (times * never.total_flops)))


def _is_same_network(run: EvalRun, other: EvalRun) -> bool:
    return sorted(run.kept) == sorted(other.kept) and run.added_parameters == other.added_parameters


def widened_name(host: str, factor: int) -> str:
    """Return the name of a host that is `factor` times as wide.

    >>> widened_name("conv-4x2", 2)
    'conv-8x2'
    """
    family, width, blocks = re.fullmatch(r"(\w+)-(\d+)x(\d+)", host).groups()  # type: ignore[union-attr]
    return f"{family}-{int(width) * factor}x{blocks}"


def _grid(ours: Iterable[EvalRun], case: Callable[..., EvalCase], cell: Cell, task: Task) -> Iterator[StaticCase]:
    """Yield hosts of all widths for every run, each with an equal part of its FLOPs. If that is less than a step, the host is left out."""
    for factor in WIDTHS:
        name = widened_name(cell.host, factor)
        cost = discover(task.make_host(name, seed=0), task.example_input).host
        for run in ours:
            steps = run.total_flops / len(WIDTHS) / (3 * cost.flops * cell.batch_size)
            between = _segment_steps(steps, cell)
            if decisions := int(steps / between):
                one = _with_horizon(case(f"grid {factor}", run.seed, run.price, Never()), decisions)
                yield StaticCase(name, between, replace(one, is_measured=False))


def _train_static(evaluation: EvalSetting, static: Iterable[StaticCase], on_progress: Callable[[int], Any]) -> list[EvalRun]:
    """Train hosts that grow nothing. Those with the same network and as many steps between decisions share a fleet."""
    fleets: dict[tuple[str, int], list[EvalCase]] = defaultdict(list)
    for one in static:
        fleets[one.host, one.steps_per_decision].append(one.case)
    runs: list[EvalRun] = []
    for (host, steps), cases in fleets.items():
        fleet = msgspec.structs.replace(evaluation.fleet, steps_per_decision=steps)
        # The fleet need not prepare all kinds of seeds, and needs little memory.
        alone = replace(evaluation, host=host, fleet=fleet, growth=GrowthConfig(blueprints=("norm",)), memory=None)
        runs += run_cases(alone, cases, on_progress)
    return runs


# Training cells


def recorded_plans() -> list[ConstantPlan]:
    """Return the constant plans, each with a Recorder of its move."""
    return [replace(plan, record=Recorder()) for plan in CONSTANT_PLANS]


def plan_results(runs: Sequence[EvalRun], plans: Sequence[ConstantPlan]) -> Record:
    """Return what blind plans and rules are chosen from, given the runs of the plans of `recorded_plans` on one host.

    "constant": name of the plan -> [gain in validation loss, size]; "first": move -> its features after the first training segment.
    """
    constant = {run.controller: [gain, size(run)] for run, gain in zip(runs, gains(runs, "val"), strict=True)}
    recorders = {plan.move: plan.record for plan in plans if plan.move is not None and plan.at == 0}
    first = {move: one.features[0].tolist() for move, one in recorders.items() if isinstance(one, Recorder) and one.features}
    return {"constant": constant, "first": first}


def train_plans(cell: Cell, load: Load, *, host_seed: int, rows: int, device: torch.device, on_progress: Callable[[int], Any]) -> Record:
    """Train a host of a training cell under every constant plan; return `plan_results`."""
    task, plans = cell.task(load), recorded_plans()
    cases = [make_case(cell, task, plan.name, host_seed, None, plan) for plan in plans]
    return plan_results(run_cases(eval_setting(cell, task, device=device, rows=rows), cases, on_progress), plans)


# The comparison of a config


def cells_of(config: CompareConfig) -> list[Cell]:
    """Return the cells in which controllers are compared."""
    return [draw_cell(config.domain, number=number, seed=config.seed) for number in range(config.cells)]


def training_cells_of(config: CompareConfig) -> list[Cell]:
    """Return the cells on which blind plans and rules are chosen."""
    seed = Streams(config.seed).integer("training cells")
    return [draw_cell(config.domain, number=number, seed=seed) for number in range(config.training_cells)]


def blind_in_file(info: Mapping[str, Any], prices: Sequence[float]) -> dict[float, str] | None:
    """Return the blind plans in the info of a controller file, by the text of their price; None if one is missing."""
    given = info.get("blind", {})
    found = {price: given.get(f"{price:g}") for price in prices}
    return {price: str(name) for price, name in found.items()} if all(name in PLANS for name in found.values()) else None


def compare(config: CompareConfig, load: Load, *, on_progress: OnProgress = _ignore) -> Comparison:
    """Compare the controllers of a config."""
    files = {name: load_controller(file_of(name)) for name in config.controllers}
    compared = next(iter(files), "heuristic")
    blind = blind_in_file(files[compared].description.info, config.prices) if files else None
    device, rules, notes = find_device(config.device), dict[float, Rule](), list[str]()
    with threads(config.threads):
        if blind is None:
            training = [
                train_plans(
                    cell,
                    load,
                    host_seed=HELD_OUT_SEEDS + number,
                    rows=config.rows,
                    device=device,
                    on_progress=partial(on_progress, f"training cell {number}, {cell.source} {cell.host}: constant plans"),
                )
                for number, cell in enumerate(training_cells_of(config))
            ]
            blind, rules = blind_plans(training, config.prices), choose_rules(training, config.prices)
            notes += [f"rule at price {price:g}: {rule_text(rule)}" for price, rule in rules.items()]
        else:
            notes.append(f"blind plans are those in {compared}; there is no rule, because there were no training cells")
        setting = CompareSetting(
            prices=config.prices,
            host_seeds=range(config.hosts),
            compared=compared,
            rules=rules,
            controls=None if config.controls else 0,
            rows=config.rows,
            device=device,
            seed=config.seed,
        )
        controllers = {name: partial(new_copy, file) for name, file in files.items()}
        records = [
            record
            for number, cell in enumerate(cells_of(config))
            for record in compare_cell(setting, cell, load, controllers, number=number, group="drawn", on_progress=on_progress)
        ]
    return Comparison(records, config.prices, blind, compared, notes)


def new_copy(controller: Learned, price: float) -> Controller:
    """Return the controller for a new host. It sees the price in the state."""
    return controller.new_copy()


def rule_text(rule: Rule) -> str:
    if rule.move is None:
        return "grow nothing"
    return f"{rule.move} if its {rule.feature} is {'above' if rule.is_above else 'below'} {rule.threshold:.3g} (scaled)"
