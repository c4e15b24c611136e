"""The growth benchmarks run, pair runs correctly, and give every control its budget. Nothing here measures anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import growth_runs
from benchmarks.growth import cells, digits, jumps, longer as growth_longer, probe, raise_modes, right_size, shadow_cost
from esper.growth import Planned, grow
from esper.growth.config import LifecycleConfig
from esper.growth.lifecycle.stages import Stage
from esper.growth.seeds.seed import Seed
from esper.tasks import Split, Task, load_task

PLAN = [(1, "blocks.0", "conv3x3"), (1, "blocks.1", "norm")]

pytestmark = [pytest.mark.slow, pytest.mark.extra()]  # benchmarks are checked by `make test-all`


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Task:
    """The digits, but few of them: four steps an epoch."""

    def first(split: Split, count: int) -> Split:
        return Split(split.inputs[:count], split.targets[:count])

    whole = load_task("digits")
    task = replace(
        whole,
        train=first(whole.train, 64),
        validation=first(whole.validation, 48),
        test=first(whole.test, 48),
        batch_size=16,
    )
    monkeypatch.setattr(growth_runs, "_loaded", lambda name, data_dir: task)
    monkeypatch.setattr(right_size, "_loaded", lambda name, data_dir: task)
    return task


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_instrumented_loop_trains_as_grow_does(small: Task) -> None:
    setting = growth_runs.Setting(epochs=6)
    by_grow = growth_runs.train(setting, small.make_host("starved", seed=3), Planned(PLAN), seed=3)
    loop = growth_runs.Loop(setting, small.make_host("starved", seed=3), Planned(PLAN), setting.config(3), seed=3)
    for _ in range(6):
        loop.run_epoch()
    by_hand = loop.finish()
    for name in ("test_loss", "test_accuracy", "parameters", "train_gflops"):
        assert by_hand[name] == by_grow[name]
    # The loop gives losses of batches and `grow` those of samples, so the means differ by rounding.
    gains = pytest.approx([seed.pop("gain") for seed in by_grow["seeds"]], rel=1e-4)
    assert [seed.pop("gain") for seed in by_hand["seeds"]] == gains
    assert by_hand["seeds"] == by_grow["seeds"]


def test_controls_cost_what_the_grown_run_cost(small: Task) -> None:
    setting = growth_runs.Setting(epochs=6)
    grown = growth_runs.train(setting, small.make_host("starved", seed=0), Planned(PLAN[:1]), seed=0)
    assert [seed["outcome"] for seed in grown["seeds"]] == ["kept"]
    made = digits.run_seed(setting, "starved", 0, ["heuristic", "never", "longer", "final"], {"heuristic": grown})
    never, longer, final = made
    assert [run["arm"] for run in made] == ["never", "longer", "final"]
    an_epoch = never["train_gflops"] / 6
    assert 0 <= longer["train_gflops"] - grown["train_gflops"] <= an_epoch * 1.001
    assert longer["parameters"] == never["parameters"]
    assert final["train_gflops"] <= grown["train_gflops"]
    assert final["epochs"] in (4, 5, 6)
    assert [(seed["slot"], seed["blueprint"], seed["born"]) for seed in final["seeds"]] == [("blocks.0", "conv3x3", 0)]


def test_runs_that_are_in_the_file_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "digits.jsonl"
    command = ["--arms", "never", "--epochs", "1", "--jobs", "1", "--out", str(path)]
    digits.main([*command, "--seeds", "2"])
    about, *runs, summary = lines(path)
    assert "command" in about
    assert [(run["arm"], run["seed"]) for run in runs] == [("never", 0), ("never", 1)]
    assert summary["arms"]["never"]["accuracy_difference"]["estimate"] == 0
    trained = []
    own = growth_runs.train
    monkeypatch.setattr(digits, "train", lambda *given, **named: trained.append(named["seed"]) or own(*given, **named))
    digits.main([*command, "--seeds", "3"])
    assert trained == [2]
    assert lines(path)[-1]["arms"]["never"]["runs"] == 3
    digits.main([*command, "--seeds", "1", "--recipe", "default"])
    assert trained == [2, 0]


@pytest.mark.filterwarnings("ignore:nothing can grow")
def test_arms_that_a_control_needs_are_run_with_it(tmp_path: Path) -> None:
    path = tmp_path / "digits.jsonl"
    digits.main(["--arms", "longer", "--seeds", "1", "--epochs", "2", "--jobs", "1", "--out", str(path)])
    assert [run["arm"] for run in lines(path)[1:-1]] == ["heuristic", "never", "longer"]


@pytest.mark.filterwarnings("ignore:nothing can grow")
@pytest.mark.parametrize(("best_by", "figure", "best_of"), [("loss", "val_loss", min), ("accuracy", "val_accuracy", max)])
def test_the_best_of_the_grid_is_chosen_by_validation_and_pays_for_all(
    best_by: str, figure: str, best_of: Callable[..., float], tmp_path: Path
) -> None:
    path = tmp_path / "sizes.jsonl"
    right_size.main(["--sizes", "1,4", "--seeds", "2", "--epochs", "3", "--jobs", "1", "--best-by", best_by, "--out", str(path)])
    _, *runs, summary = lines(path)
    setting = right_size.Setting("digits", right_size.WORKS["digits"], best_by=best_by)
    for seed in range(2):
        static = [run for run in runs if run["seed"] == seed and run["arm"] in ("x1", "x4")]
        best = right_size.best_of_grid(setting, static)
        assert best[figure] == best_of(run[figure] for run in static)
        assert best["gflops"] == pytest.approx(sum(run["gflops"] for run in static))
    rows = summary["rows"]
    assert sum(rows["grid"]["chosen"].values()) == 2
    assert rows["longer"]["gflops"] >= rows["grown"]["gflops"] >= rows["final"]["gflops"]


@pytest.mark.parametrize("best_by", ["loss", "accuracy"])
def test_a_static_run_keeps_its_best_validation_state(best_by: str, small: Task) -> None:
    setting = right_size.Setting("digits", right_size.WORKS["digits"], best_by=best_by)
    run = right_size.StaticRun(setting, small, small.make_host("starved", seed=0), seed=0, epochs=4)
    seen = []
    for _ in range(4):
        run.train(1)
        seen.append(small.evaluate(run.net, small.val_loader()))
    best = min(seen, key=lambda found: found.loss) if best_by == "loss" else max(seen, key=lambda found: (found.accuracy, -found.loss))
    result = run.result()
    assert (result["val_loss"], result["val_accuracy"]) == (best.loss, 100 * best.accuracy)
    assert small.evaluate(run.net, small.val_loader()) == best


@pytest.mark.parametrize("survivor", [1, 8])
def test_halving_spends_its_budget_whichever_net_survives(survivor: int, small: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {times: right_size.WORKS["digits"].sizes[times] for times in (1, 2, 4, 8)}
    setting = right_size.Setting("digits", replace(right_size.WORKS["digits"], sizes=sizes))
    nets = {times: setting.make(small, size, 0) for times, size in sizes.items()}
    epochs = {times: right_size.StaticRun(setting, small, net, seed=0, epochs=1).flops_per_epoch / 1e9 for times, net in nets.items()}
    wanted, budget = right_size._size(nets[survivor]), 20 * sum(epochs.values())
    monkeypatch.setattr(right_size.StaticRun, "rank", property(lambda run: (right_size._size(run.net) != wanted,)))
    monkeypatch.setattr(right_size.Setting, "rank", lambda setting, loss, accuracy: (-1,))  # every state replaces the one before
    record = right_size.halving(setting, small, 0, budget)
    assert record["times"] == survivor
    assert budget - epochs[survivor] < record["gflops"] <= budget


def test_every_seed_divides_the_digits_anew() -> None:
    whole = load_task("digits")
    parts = [right_size._split_again(whole, seed) for seed in (0, 0, 1)]
    assert [len(parts[0].train), len(parts[0].validation), len(parts[0].test)] == [1_000, 397, 400]
    assert torch.equal(parts[0].test.inputs, parts[1].test.inputs)
    assert not torch.equal(parts[0].test.inputs, parts[2].test.inputs)
    together = [torch.cat([part.inputs for part in (task.train, task.validation, task.test)]) for task in (whole, parts[2])]
    assert torch.equal(*(torch.sort(inputs.flatten(1).sum(1)).values for inputs in together))


def test_the_final_size_from_scratch_has_new_weights_and_seeds_that_change_nothing(small: Task) -> None:
    start = small.make_host("starved", seed=0)
    plan = Planned([(0, "blocks.0", "widen_100_chain"), (0, "blocks.1", "conv3x3")])
    grown = grow(
        small.make_host("starved", seed=0), small.train_loader(), small.val_loader(), small.loss_fn, epochs=6, controller=plan, keep="last"
    ).model
    net = right_size.from_scratch(grown, start, small, seed=1)
    assert [parameter.shape for parameter in net.parameters()] == [parameter.shape for parameter in grown.parameters()]
    for name, parameter in net.named_parameters():
        assert name.endswith(("norm.weight", "norm.bias")) or not torch.equal(parameter, grown.get_parameter(name)), name
    net.eval()
    before = net(small.example_input)
    for module in net.modules():
        if isinstance(module, Seed):
            module.alpha.zero_()
    assert torch.equal(net(small.example_input), before)


def test_the_plan_of_a_cell_is_chosen_on_its_other_nets() -> None:
    losses = {"never": {0: 1.0, 1: 1.0, 2: 1.0}, "wide": {0: 3.0, 1: 0.9, 2: 0.9}, "wider": dict.fromkeys(range(3), 2.0)}
    losses["both"] = losses["wider"]
    found, choices = cells._tuned(losses, [0, 1, 2])
    assert choices == ["wide", "never", "never"]
    assert found == [3.0, 1.0, 1.0]


def test_wrong_labels_are_in_all_parts_of_a_cell_and_the_inputs_do_not_depend_on_them() -> None:
    noisy, clean = (cells.Cell(250, noise, "starved").load() for noise in (0.3, 0.0))
    assert len(noisy.train) == cells.POOL * 250
    for part, other in ((noisy.train, clean.train), (noisy.validation, clean.validation), (noisy.test, clean.test)):
        assert torch.equal(part.inputs, other.inputs)
        assert 0.2 < float((part.targets != other.targets).double().mean()) < 0.35  # a tenth of the drawn labels is right


def test_the_arms_of_a_cell_differ_only_in_what_grows(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    options = ["--nets", "2", "--cells", "1", "--epochs", "10", "--jobs", "1", "--out", str(path)]
    cells.main(options)
    _, *runs, summary = lines(path)
    by_arm = {arm: [run for run in runs if run["arm"] == arm] for arm in cells.ARMS}
    assert all(len(some) == 2 for some in by_arm.values())
    assert [run["seeds"] for run in by_arm["never"]] == [[], []]
    assert {seed["blueprint"] for run in by_arm["wider"] for seed in run["seeds"]} == {"widen_300_chain"}
    (cell,) = summary["cells"]
    assert cell["nets"] == 2
    assert cell["never"] == pytest.approx(sum(run["test_loss"] for run in by_arm["never"]) / 2, abs=1e-4)
    assert cell["heuristic_minus_never"] == pytest.approx(cell["heuristic"] - cell["never"], abs=1e-4)
    cells.main(options)  # finds all runs in the file
    assert sum("arm" in line for line in lines(path)) == len(runs)


def test_germinating_in_the_shadow_causes_no_jump_of_the_loss(tmp_path: Path) -> None:
    path = tmp_path / "jumps.jsonl"
    timeline = ["--first", "1", "--gap", "2", "--window", "6"]
    jumps.main([*timeline, "--seeds", "2", "--jobs", "1", "--out", str(path)])
    _, *runs, summary = lines(path)
    for run in runs:
        assert run["rollbacks"] == (2 if run["raise"] == "joint" else 0)
        if run["event"] == "germinate":
            assert run["before"] == run["twin_before"]
            assert (run["jump"] == run["twin_jump"]) == (run["raise"] == "shadow")
    middle_of_epoch = {run["step"] for run in runs if run["event"] == "rollback, NaN in the host"}
    assert middle_of_epoch == {(1 + 4 * 2) * 4 + 2}
    assert len(summary["rows"]) == 2 * 8
    assert all((row["difference"]["low"] > 0) == row["is_above"] for row in summary["rows"])


def test_a_seed_with_truncated_records_is_not_counted() -> None:
    views = jumps.VIEWS
    whole = [
        {"seed": 0, "raise": mode, "event": event, "view": view}
        for mode, names in jumps.EVENTS.items()
        for event in names
        for view in views
    ]
    assert jumps.whole_seed(whole, 0) == whole
    assert jumps.whole_seed([*whole, whole[0]], 0) == whole
    assert jumps.whole_seed(whole[:-1], 0) == []


def test_a_straight_through_seed_learns_and_leaves_its_host_unchanged(small: Task) -> None:
    setting = growth_runs.Setting(epochs=8)
    loops = []
    for plan in ([], PLAN[:1]):
        life = LifecycleConfig(raise_mode="shadow")
        loop = growth_runs.Loop(
            setting, small.make_host("starved", seed=0), Planned(plan), setting.config(0, lifecycle=life, slots=("blocks.0",)), seed=0
        )
        loop.grower._steps.shadow = raise_modes.StraightThrough(loop.slotted)
        loop.optimizer.register_step_post_hook(loop.grower._steps.shadow.learn)
        for _ in range(3):
            loop.run_epoch()
        loops.append(loop)
    never, grown = loops
    assert grown.grower.lifecycles.slots["blocks.0"].stage is Stage.TRAINING
    assert raise_modes.relative_size(grown, grown.slotted.slot("blocks.0")) > 0
    mine, theirs = grown.slotted.host.state_dict(), never.slotted.host.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_all_ways_to_raise_a_seed_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "raise.jsonl"
    raise_modes.main(["--seeds", "1", "--epochs", "7", "--jobs", "1", "--out", str(path)])
    rows = {(row["way"], row["at"]): row for row in lines(path)[-1]["rows"]}
    assert set(rows) == {*((way, at) for way in raise_modes.WAYS for at in raise_modes.TIMES), ("never", None)}
    for (way, _), row in rows.items():
        assert way == "never" or all(size > 0 for size in row["relative_size"].values())
    assert rows["shadow", 0.1]["train_gflops"] > rows["straight_through", 0.1]["train_gflops"] > rows["never", None]["train_gflops"]


def shadow_options(*more: str) -> list[str]:
    return ["--blocks", "3", "--width", "4", "--size", "4", "--batch", "2", "--at", "1", "--rounds", "3", "--warmup", "1", *more]


def test_the_cost_of_the_shadow_is_measured_with_and_without_replay(tmp_path: Path) -> None:
    path = tmp_path / "cost.jsonl"
    shadow_cost.main(shadow_options("--out", str(path)))
    _, *records = lines(path)
    assert [record["is_replayed"] for record in records] == [True, False]
    assert all(record["behind"] == 1 and record["ratio"]["low"] > 0 for record in records)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_only_recorded_passes_are_replayed(is_recorded: bool) -> None:
    options = argparse.Namespace(blocks=3, width=4, size=4, batch=2, device="cpu", blueprint="conv3x3")
    side = shadow_cost.Side(options, 1)
    calls: list[int] = []
    side.model.blocks[0].layers.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        side.after_step(side.step(is_recorded=is_recorded))
    assert len(calls) == (2 if is_recorded else 4)


def test_longer_training_costs_what_growing_does_and_the_speed_is_the_one_that_the_heuristic_goes_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(growth_longer, "cells", lambda text: [growth_longer.Cell("digits", epochs=8, samples=48)])
    growth_longer.main(["--seeds", "2", "--jobs", "1", "--out", str(tmp_path / "longer.jsonl")])
    _, *runs, summary = lines(tmp_path / "longer.jsonl")
    assert [(run["arm"], run["seed"]) for run in runs] == [("grown", 0), ("longer", 0), ("grown", 1), ("longer", 1)]
    for grown, longer in zip(runs[::2], runs[1::2], strict=True):
        assert grown["seeds"]
        assert longer["epochs"] > 8
        assert longer["train_gflops"] == pytest.approx(grown["train_gflops"], rel=0.06)
    assert summary["steps"] == 24
    assert summary["speeds"] == sorted(run["speed"] for run in runs[::2])
    assert summary["grows"] == sum(speed >= 25 for speed in summary["speeds"])
    assert summary["loss_difference"]["pairs"] == 2
    assert "test loss, grown − longer" in capsys.readouterr().out


def test_promises_are_compared_with_the_gains_of_the_candidates(small: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "load_task", lambda *arguments, **named: small)
    monkeypatch.setattr(probe, "AFTER", (1,))
    monkeypatch.setattr(probe, "KINDS", (("sgd", 0.0, 0.05),))
    probe.main(["--seeds", "1", "--before", "2", "--samples", "64", "--out", str(tmp_path / "promise.jsonl")])
    _, *candidates, summary = lines(tmp_path / "promise.jsonl")
    assert len({(run["slot"], run["blueprint"]) for run in candidates}) == len(candidates) == 24
    assert all(run["promise"] > 0 and run["weight_factor"] >= 1 for run in candidates)
    assert len({run["falls"]["10"] for run in candidates}) == 24
    assert summary["plain_ratio_10"] >= summary["factor_ratio_10"] > 0
