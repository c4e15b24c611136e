"""Copies of a training try what a controller considers; the best goes on as if nothing else had been tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import esper.growth.trials
from esper.growth import Grown, GrowthConfig, GrowthError, grow
from esper.growth.config import LookaheadConfig
from esper.growth.events import StageEntered, TrialEnded, TrialsCompared
from esper.growth.lifecycle.stages import Action, Fossilize, Germinate, Trial
from esper.growth.run import open_run
from esper.growth.training import training_config
from esper.growth.training_loop import Training
from esper.growth.trials import best_of
from esper.runs import Event
from tests.growth.builders import (
    QUICK,
    QUICK_SHADOW,
    SLOTS,
    LifecycleConfig,
    Loop,
    Script,
    assert_same,
    config,
    make_data,
    make_host,
    make_loop,
)


def germinate(slot: str, blueprint: str) -> Germinate:
    return Germinate(slot=slot, reason="test", blueprint=blueprint)


TRIALS = {
    "deep": [germinate("first", "mlp"), germinate("second", "low_rank")],
    "nothing": [],
    "wide": [germinate("second", "widen_100")],
    "norm": [germinate("second", "norm")],
}
KEPT = {4: [Fossilize(slot="first", reason="test")], 5: [Fossilize(slot="second", reason="test")]}
EPOCHS = 6


def settings(lifecycle: LifecycleConfig = QUICK, *, length: int = 1) -> GrowthConfig:
    return config(lifecycle, slots=SLOTS, lookahead=LookaheadConfig(epochs=length))


def shuffled() -> DataLoader[Any]:
    x, y = make_data(1, size=40)[0]
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


def trained(
    controller: Script, growth: GrowthConfig | None = None, *, events: list[Event] | None = None, **options: Any
) -> tuple[Grown, list[Event]]:
    found: list[Event] = [] if events is None else events
    torch.manual_seed(5)
    grown = grow(
        make_host(),
        shuffled(),
        make_data(3, seed=2),
        cross_entropy,
        epochs=EPOCHS,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        scheduler=lambda optimizer: OneCycleLR(optimizer, 0.02, total_steps=5 * EPOCHS),
        controller=controller,
        config=growth or settings(),
        keep="last",
        callbacks=[found.append],
        **options,
    )
    return grown, found


def only(events: Sequence[Event]) -> TrialsCompared:
    (compared,) = (event for event in events if isinstance(event, TrialsCompared))
    return compared


def as_trials(names: Sequence[str]) -> list[Trial]:
    return [Trial(name, tuple(TRIALS[name])) for name in names]


@pytest.fixture
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(esper.growth.trials, "MARGIN", 0.0)


@pytest.mark.usefixtures("no_margin")
@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
@pytest.mark.parametrize("length", [1, 3])
def test_the_training_goes_on_as_if_only_the_best_had_been_tried(lifecycle: LifecycleConfig, length: int) -> None:
    growth = settings(lifecycle, length=length)
    names = ["deep", "nothing", "wide", "norm"]
    if lifecycle is QUICK_SHADOW:
        names = ["deep", "nothing"]
    grown, events = trained(Script(KEPT, trials={2: as_trials(names)}), growth)
    compared = only(events)
    assert [trial.name for trial in compared.trials] == names
    assert {trial.epochs for trial in compared.trials} == {length}
    assert compared.epoch == 2 + length
    direct, without = trained(Script({**KEPT, 2: TRIALS[compared.chosen]}), growth)
    assert grown.val_losses == direct.val_losses
    assert grown.train_losses == direct.train_losses
    assert_same(grown.model.state_dict(), direct.model.state_dict())
    assert [event for event in events if isinstance(event, StageEntered)] == [event for event in without if isinstance(event, StageEntered)]
    # Everything that was tried is paid for, and nothing twice.
    (chosen,) = (trial for trial in compared.trials if trial.name == compared.chosen)
    others = sum(trial.gflops for trial in compared.trials) - chosen.gflops
    assert compared.gflops_lost == pytest.approx(others)
    assert grown.gflops == pytest.approx(direct.gflops + others)


@pytest.mark.parametrize(
    ("losses", "rents", "chosen"),
    [
        ([0.5, 0.4, 0.3], [0.0, 0.0, 0.0], "c"),
        ([0.5, 0.41, 0.49], [0.0, 0.0, 0.0], "a"),  # no lead above the margin
        ([0.6, 0.4, 0.42], [0.0, 0.05, 0.01], "c"),  # the rent decides
        ([0.5, math.inf, math.inf], [0.0, 0.0, 0.0], "a"),
        ([math.inf, 0.5, 0.6], [0.0, 0.0, 0.0], "b"),
        ([math.inf, math.inf, math.inf], [0.0, 0.0, 0.0], "a"),
    ],
)
def test_the_best_is_the_first_unless_another_is_well_ahead(losses: list[float], rents: list[float], chosen: str) -> None:
    ended = [TrialEnded(name, loss, rent, epochs=1, gflops=1.0) for name, loss, rent in zip("abc", losses, rents, strict=True)]
    assert best_of(ended, unit=1.0).name == chosen


@pytest.mark.usefixtures("no_margin")
@pytest.mark.parametrize("order", [("wide", "nothing", "norm"), ("norm", "wide", "nothing"), ("nothing", "norm", "wide")])
def test_the_order_of_the_trials_does_not_matter(order: Sequence[str]) -> None:
    grown, events = trained(Script(trials={1: as_trials(order), 3: []}))
    expected, first = trained(Script(trials={1: as_trials(["nothing", "wide", "norm"])}))
    assert {trial.name: trial.val_loss for trial in only(events).trials} == {trial.name: trial.val_loss for trial in only(first).trials}
    assert grown.val_losses == expected.val_losses
    assert_same(grown.model.state_dict(), expected.model.state_dict())


def test_a_trial_whose_loss_is_not_finite_is_lost_and_nothing_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    began = Training._train_loss

    def broken(self: Training, batch: Any, grower: Any, where: str) -> torch.Tensor:
        loss = began(self, batch, grower, where)
        return loss * math.nan if self.is_wide() else loss  # type: ignore[attr-defined]

    monkeypatch.setattr(Training, "_train_loss", broken)
    monkeypatch.setattr(
        Training, "is_wide", lambda self: "widen_100" in [seed.blueprint for seed in self._prepared[0].ledger.seeds], raising=False
    )
    grown, events = trained(Script(trials={1: as_trials(["wide", "nothing"])}))
    compared = only(events)
    assert compared.chosen == "nothing"
    assert [math.isinf(trial.val_loss) for trial in compared.trials] == [True, False]
    assert (grown.rollbacks, len(grown.ledger.seeds)) == (0, 0)


@pytest.mark.parametrize("wrong", [KeyboardInterrupt, ValueError])
def test_an_error_in_a_trial_restores_the_state_before_the_trials(wrong: type[BaseException]) -> None:
    loop = make_loop(Script(trials={1: as_trials(["wide", "nothing", "norm"])}), settings())
    loop.epoch()
    before = {name: tensor.clone() for name, tensor in loop.host.state_dict().items()}
    calls: list[int] = []

    def train() -> None:
        loop.epoch()
        calls.append(1)
        if len(calls) == 2:
            raise wrong("in the second trial")

    with pytest.raises(wrong):
        loop.grower.try_out(train)
    assert_same(dict(loop.host.state_dict()), before)
    assert (loop.grower.ledger.seeds, loop.grower.epoch, len(loop.grower.trials)) == ([], 1, 3)
    assert not any(isinstance(event, StageEntered) for event in loop.events)
    loop.grower.try_out(loop.epoch)
    assert loop.grower.epoch == 2


def test_a_loop_that_tries_nothing_gets_the_first_trial_and_is_told() -> None:
    loop = make_loop(Script(trials={1: as_trials(["wide", "nothing"])}), settings())
    loop.epoch()
    with pytest.warns(RuntimeWarning, match=r"wants to try wide, nothing.*call grower.try_out"):
        loop.epoch()
    assert [seed.blueprint for seed in loop.grower.ledger.seeds] == ["widen_100"]


def test_averages_go_on_with_the_best_copy() -> None:
    def looped(controller: Script) -> tuple[Loop, nn.Module]:
        torch.manual_seed(1)
        host = make_host(norm=False)
        average = AveragedModel(host, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return make_loop(controller, settings(), host=host, averages=[average]), average

    def epoch_of(loop: Loop, average: Any) -> Callable[[], None]:
        def epoch() -> None:
            for x, y in loop.data:
                loop.step(x, y)
                average.update_parameters(loop.host)
            loop.grower.after_epoch(loop.evaluate)

        return epoch

    tried, its_average = looped(Script(trials={1: as_trials(["deep", "nothing", "norm"])}))
    epoch_of(tried, its_average)()
    tried.grower.try_out(epoch_of(tried, its_average))
    direct, average = looped(Script({1: TRIALS[only(tried.events).chosen]}))
    for _ in range(2):
        epoch_of(direct, average)()
    x = tried.val[0][0]
    assert torch.equal(its_average.eval()(x), average.eval()(x))


def test_a_run_that_was_stopped_before_its_trials_makes_them_when_it_is_resumed(tmp_path: Path) -> None:
    def run(folder: Path, *, resume: bool, stop_at: int | None) -> tuple[Grown, list[Event]]:
        controller, events = Script(KEPT, trials={2: as_trials(["deep", "nothing", "wide"])}), list[Event]()
        torch.manual_seed(5)
        training = Training(
            make_host(),
            shuffled(),
            make_data(3, seed=2),
            _pair_loss(),
            epochs=EPOCHS,
            make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            make_scheduler=None,
            config=training_config(settings(), keep="last"),
        )
        training.listeners.append(events.append)
        steps = iter(range(1000))
        with open_run(
            folder, resume=resume, config=training.config, should_stop=lambda: stop_at is not None and next(steps) >= stop_at
        ) as opened:
            return training.run(controller, opened), events

    whole, events = run(tmp_path / "whole", resume=False, stop_at=None)
    compared = only(events)
    for stop_at in (13, 20):  # at the end of the second epoch, and within a trial
        stopped, _ = run(tmp_path / f"part {stop_at}", resume=False, stop_at=stop_at)
        assert (stopped.status, stopped.epochs) == ("stopped", 2)
        resumed, later = run(tmp_path / f"part {stop_at}", resume=True, stop_at=None)
        assert [trial.val_loss for trial in only(later).trials] == [trial.val_loss for trial in compared.trials]
        assert resumed.val_losses == whole.val_losses
        assert resumed.gflops == whole.gflops
        assert_same(resumed.model.state_dict(), whole.model.state_dict())


def _pair_loss() -> Any:
    from esper.growth.training_loop import step_loss_of

    return step_loss_of(cross_entropy, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": [1]}, "asks for trials and for a probe"),
        ({"names": ["wide", "wide"]}, "two trials of a decision have one name"),
        ({"slot": "third"}, "third"),
    ],
)
def test_wrong_trials_are_refused(options: dict[str, Any], message: str) -> None:
    trials = as_trials(options.get("names", ["nothing", "wide"]))
    if "slot" in options:
        actions: tuple[Action, ...] = (germinate(options["slot"], "mlp"),)
        trials = [Trial("there", actions), Trial("nothing")]
    loop = make_loop(Script(probes=options.get("probes", ()), trials={1: trials}), settings())
    with pytest.raises(GrowthError, match=message):
        loop.epoch()
