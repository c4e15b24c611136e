"""The state after the epoch with the lowest validation loss is the result of a training, if all its seeds were kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import MultiplicativeLR

from esper.dashboard.data import growth_story
from esper.growth import Grown, GrowthConfig, GrowthError, Planned, grow, load
from esper.growth.config import BudgetConfig, GovernorConfig, LifecycleConfig
from esper.growth.events import BestRestored, EpochEnded, GrowthFinished, StageEntered
from esper.growth.lifecycle.stages import Action, Advance, Fossilize, Germinate, Prune, Stage
from esper.growth.report.html import network_drawing
from esper.growth.report.story import Story, read_story, restored_in_words
from esper.runs.catalog import Run
from esper.runs.tensors import join, split
from tests.growth.builders import QUICK, QUICK_SHADOW, SLOTS, Data, Loop, Script, assert_same, config, make_data, make_host, make_loop

LOW = -3.0  # added to the validation losses of the epoch that is to be the best
INPUTS = make_data(1, seed=9, size=16)[0][0]


class Course:
    """A loop whose validation losses are the real ones, and lower in some epochs. `low` maps an epoch to what is added to its losses.

    A seed that is switched off costs a loss of 1, so that every seed pays. The outputs of the model after each epoch are kept.
    """

    def __init__(
        self, actions: Mapping[int, Sequence[Action]], low: Mapping[int, float], lifecycle: LifecycleConfig = QUICK, **options: Any
    ) -> None:
        governor = GovernorConfig(spike_sigmas=1e6, uninformed_loss=100.0)
        settings = GrowthConfig(lifecycle=lifecycle, governor=governor, budget=BudgetConfig(max_parameters=None))
        self.loop: Loop = make_loop(Script(actions), settings, host=make_host(dropout=0.0), **options)
        self.grower, self.low = self.loop.grower, dict(low)
        self.outputs: dict[int, Tensor] = {}
        self.evaluations = 0
        self.grower.begin()

    def train(self, epochs: int, accuracies: Mapping[int, float] | None = None) -> None:
        for _ in range(epochs):
            for x, y in self.loop.data:
                self.loop.step(x, y)
            epoch = self.grower.epoch + 1
            self.outputs[epoch] = self.output(self.loop.slotted)
            self.grower.after_epoch(self.evaluate, metrics=None if accuracies is None else {"accuracy": accuracies[epoch]})

    def output(self, model: Any) -> Tensor:
        model.eval()
        with torch.no_grad():
            output: Tensor = model(INPUTS)
        model.train()
        return output

    def evaluate(self) -> list[Tensor]:
        self.evaluations += 1
        off = sum(slot.is_connected and slot.alpha == 0 for slot in self.loop.slotted.slots.values())
        return [loss + self.low.get(self.grower.epoch + 1, 0.0) + off for loss in self.loop.evaluate()]

    def outcomes(self) -> list[str]:
        return [entry.outcome for entry in self.grower.ledger.seeds]


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


GROW_AND_KEEP = {2: [Germinate(slot="first", reason="test", blueprint="mlp")], 6: [Fossilize(slot="first", reason="test")]}


def test_the_epoch_with_the_lowest_validation_loss_is_restored_bit_for_bit() -> None:
    course = Course({}, {3: LOW})
    course.train(3)
    expected = copy.deepcopy(dict(course.loop.host.state_dict()))
    course.train(4)
    restored = course.grower.restore_best(course.evaluate)
    assert restored is not None
    assert (restored.epoch, restored.val_loss, restored.last_epoch, restored.left_out) == (3, min(course.grower.history.val_losses), 7, [])
    assert restored.last_val_loss > restored.val_loss
    assert course.loop.events[-1] == restored
    assert len(course.grower.history.val_losses) == 7
    assert_same(dict(course.grower.bake().state_dict()), expected)


def test_nothing_is_evaluated_or_restored_if_the_last_epoch_is_the_best() -> None:
    course = Course({}, {5: LOW})
    course.train(5)
    evaluations, state = course.evaluations, copy.deepcopy(dict(course.loop.host.state_dict()))
    assert course.grower.restore_best(course.evaluate) is None
    assert course.evaluations == evaluations
    assert_same(dict(course.loop.host.state_dict()), state)


def test_a_state_in_the_middle_of_an_epoch_is_compared_with_the_best_one() -> None:
    course = Course({}, {3: LOW})
    course.train(3)
    course.loop.step(*course.loop.data[0])
    course.low[4] = 2 * LOW
    assert course.grower.restore_best(course.evaluate) is None
    course.low[4] = math.nan
    restored = course.grower.restore_best(course.evaluate)
    assert restored is not None
    assert restored.epoch == 3
    assert torch.equal(course.output(course.grower.bake()), course.outputs[3])


@pytest.mark.parametrize("blueprint", ["mlp", "widen_50", "widen_50_chain"])
def test_a_seed_that_was_on_trial_in_the_best_epoch_and_kept_later_is_kept_as_it_was_then(blueprint: str) -> None:
    course = Course({**GROW_AND_KEEP, 2: [Germinate(slot="first", reason="test", blueprint=blueprint)]}, {4: LOW})
    course.train(8)
    assert course.outcomes() == ["kept"]
    restored = course.grower.restore_best(course.evaluate)
    assert restored is not None
    assert (restored.epoch, restored.left_out, course.outcomes()) == (4, [], ["kept"])
    assert torch.equal(course.output(course.loop.slotted), course.outputs[4])
    model = course.grower.bake()
    torch.testing.assert_close(course.output(model), course.outputs[4])
    assert parameters_of(model) == parameters_of(make_host()) + course.grower.ledger.seeds[0].parameters


def test_an_epoch_with_a_seed_that_is_pruned_later_does_not_count() -> None:
    course = Course(
        {2: [Germinate(slot="first", reason="test", blueprint="mlp")], 5: [Prune(slot="first", reason="test")]}, {2: 0.5 * LOW, 4: LOW}
    )
    course.train(9)
    assert course.outcomes() == ["pruned"]
    restored = course.grower.restore_best(course.evaluate)
    assert restored is not None
    assert restored.epoch == 2
    assert torch.equal(course.output(course.grower.bake()), course.outputs[2])


def test_a_seed_that_is_still_on_trial_at_the_end_does_not_count_and_is_not_evaluated() -> None:
    course = Course({2: [Germinate(slot="first", reason="test", blueprint="mlp")]}, {2: 0.5 * LOW, 4: LOW, 6: 0.75 * LOW})
    course.train(5)
    restored = course.grower.restore_best(course.evaluate)  # the present state would be better with the seed, which is not kept
    assert restored is not None
    assert restored.epoch == 2
    assert restored.last_val_loss - 1 < restored.val_loss < restored.last_val_loss


def test_a_seed_that_was_connected_after_the_best_epoch_is_taken_out_with_a_reason() -> None:
    course = Course(GROW_AND_KEEP, {2: LOW})
    course.train(8)
    assert course.outcomes() == ["kept"]
    restored = course.grower.restore_best(course.evaluate)
    assert restored is not None
    assert (restored.epoch, restored.left_out) == (2, ["first"])
    (entry,) = course.grower.ledger.seeds
    assert (entry.outcome, entry.ended) == ("pruned", 8)
    assert "lowest, " in entry.why
    assert "after epoch 2, when it was not connected" in entry.why
    model = course.grower.bake()
    assert torch.equal(course.output(model), course.outputs[2])
    assert parameters_of(model) == parameters_of(make_host())


def test_the_story_of_the_events_has_the_outcomes_of_the_ledger() -> None:
    course = Course(GROW_AND_KEEP, {2: LOW})
    course.train(8)
    course.grower.restore_best(course.evaluate)
    story = Story()
    for event in course.loop.events:
        story.take(event)
    assert [(seed.outcome, seed.ended, seed.why) for seed in story.seeds] == [
        (entry.outcome, entry.ended, entry.why) for entry in course.grower.ledger.seeds
    ]
    assert story.remarks[-1].text.startswith("the result is the state after epoch 2: validation loss ")
    assert story.remarks[-1].text.endswith("; taken out: first")


SHADOW = {
    1: [Germinate(slot="first", reason="test", blueprint="mlp")],
    2: [Advance(slot="first", reason="test")],
    6: [Fossilize(slot="first", reason="test")],
}


def test_an_epoch_in_which_a_seed_is_blending_does_not_count() -> None:
    rules = LifecycleConfig(raise_mode="shadow", training_epochs=1, blend_epochs=2, holding_epochs=1)
    course = Course(SHADOW, {3: 2 * LOW, 5: LOW}, rules)
    course.train(8)
    alphas = [view.slots[0].alpha for view in course.loop.events if isinstance(view, EpochEnded)]
    assert (alphas[1], alphas[2], alphas[3]) == (0.0, 0.5, 1.0)
    restored = course.grower.restore_best(course.evaluate)
    assert restored is not None
    assert (restored.epoch, course.outcomes()) == (5, ["kept"])
    assert torch.equal(course.output(course.loop.slotted), course.outputs[5])


def test_a_seed_that_was_in_the_shadow_in_the_best_epoch_is_taken_out() -> None:
    course = Course(SHADOW, {2: LOW}, QUICK_SHADOW)
    course.train(8)
    assert course.outcomes() == ["kept"]
    restored = course.grower.restore_best(course.evaluate)
    assert restored is not None
    assert (restored.left_out, course.outcomes()) == (["first"], ["pruned"])
    model = course.grower.bake()
    assert torch.equal(course.output(model), course.outputs[2])
    assert parameters_of(model) == parameters_of(make_host())


TWO = {
    1: [Germinate(slot="first", reason="test", blueprint="mlp")],
    3: [Germinate(slot="second", reason="test", blueprint="mlp")],
    6: [Fossilize(slot="first", reason="test"), Prune(slot="second", reason="test")],
}


@pytest.mark.parametrize("is_second_kept", [True, False])
def test_of_two_seeds_on_trial_each_epoch_waits_for_its_own(is_second_kept: bool) -> None:
    """Epoch 5 is better and has both seeds, epoch 3 has the first one only."""
    last = [
        Fossilize(slot="first", reason="test"),
        Fossilize(slot="second", reason="test") if is_second_kept else Prune(slot="second", reason="test"),
    ]
    course = Course({**TWO, 6: last}, {1: 0.25 * LOW, 3: 0.5 * LOW, 5: LOW})
    course.train(5)
    assert len(course.grower._recovery.best_states.state_dict()) == 3
    course.train(4)
    assert course.outcomes() == ["kept", "kept" if is_second_kept else "pruned"]
    restored = course.grower.restore_best(course.evaluate)
    assert restored is not None
    assert restored.epoch == (5 if is_second_kept else 3)
    assert torch.equal(course.output(course.loop.slotted), course.outputs[restored.epoch])


@pytest.mark.parametrize(("low", "left_out"), [(4, ["first#2"]), (8, [])])
def test_a_place_that_grew_again_is_restored_as_it_was(low: int, left_out: list[str]) -> None:
    again = {7: [Germinate(slot="first#2", reason="test", blueprint="widen_50")], 10: [Fossilize(slot="first#2", reason="test")]}
    course = Course({**GROW_AND_KEEP, 2: [Germinate(slot="first", reason="test", blueprint="widen_50")], **again}, {low: LOW})
    course.train(12)
    assert course.outcomes() == ["kept", "kept"]
    restored = course.grower.restore_best(course.evaluate)
    assert restored is not None
    assert (restored.epoch, restored.left_out) == (low, left_out)
    assert torch.equal(course.output(course.loop.slotted), course.outputs[low])
    torch.testing.assert_close(course.output(course.grower.bake()), course.outputs[low])
    assert course.outcomes() == ["kept", "pruned" if left_out else "kept"]


def test_an_epoch_with_a_kept_seed_that_was_shrunk_later_does_not_count() -> None:
    course = Course(GROW_AND_KEEP, {2: 0.5 * LOW, 4: LOW})
    course.train(7)
    seed = course.loop.slotted.slots["first"].seed
    assert seed is not None
    for parameter in seed.parameters():
        parameter.data.zero_()
    assert course.grower.shrink(course.loop.evaluate) == ["first"]
    course.train(2)
    restored = course.grower.restore_best(course.evaluate)
    assert restored is not None
    assert (restored.epoch, course.outcomes()) == (2, ["pruned"])
    assert torch.equal(course.output(course.grower.bake()), course.outputs[2])


def test_a_rollback_of_a_seed_drops_the_epochs_with_it() -> None:
    course = Course({2: [Germinate(slot="first", reason="test", blueprint="mlp")]}, {2: 0.5 * LOW, 4: LOW})
    course.train(4)
    seed = course.loop.slotted.slots["first"].seed
    assert seed is not None
    with torch.no_grad():
        next(seed.parameters()).fill_(math.nan)
    course.loop.step(*course.loop.data[0])
    assert course.outcomes() == ["rolled back"]
    course.train(3)
    restored = course.grower.restore_best(course.evaluate)
    assert restored is not None
    assert restored.epoch == 2
    assert torch.equal(course.output(course.grower.bake()), course.outputs[2])


def test_a_parameter_that_was_frozen_in_the_best_epoch_gets_its_value_of_then() -> None:
    course = Course({}, {2: LOW})
    head = course.loop.host.get_submodule("head")
    head.requires_grad_(False)
    course.train(2)
    head.requires_grad_(True)
    frozen = copy.deepcopy(dict(head.state_dict()))
    course.train(3)
    assert not torch.equal(frozen["weight"], head.weight)  # type: ignore[arg-type]
    course.grower.restore_best(course.evaluate)
    assert_same(dict(head.state_dict()), frozen)
    assert torch.equal(course.output(course.grower.bake()), course.outputs[2])


def test_an_epoch_that_is_not_the_best_is_not_copied_and_a_better_one_reuses_the_memory() -> None:
    course = Course({}, {2: 0.5 * LOW, 4: LOW})

    def places() -> set[int]:
        return {tensor.data_ptr() for one in states.state_dict() for tensor in one["state"]["parameters"].values()}

    states = course.grower._recovery.best_states
    course.train(2)
    held, memory = copy.deepcopy(states.state_dict()), places()
    course.train(1)
    assert_same(states.state_dict(), held)
    course.train(1)
    assert [one["epoch"] for one in states.state_dict()] == [4]
    assert places() == memory
    trained = sum(tensor.nbytes for tensor in course.loop.host.state_dict().values())
    assert states.nbytes == trained  # no optimiser, whose momentum is as large as the weights


def test_a_saved_grower_restores_the_same_best_state() -> None:
    def fresh() -> Course:
        return Course(GROW_AND_KEEP, {4: LOW})

    whole, first, second = fresh(), fresh(), fresh()
    whole.train(8)
    first.train(5)
    second.grower.load_state_dict(copy.deepcopy(join(*split(first.grower.state_dict()))))  # as a checkpoint would hold it
    second.train(3)
    assert second.grower.restore_best(second.evaluate) == whole.grower.restore_best(whole.evaluate)
    assert second.grower.ledger == whole.grower.ledger
    assert_same(dict(second.grower.bake().state_dict()), dict(whole.grower.bake().state_dict()))


def test_a_grower_that_keeps_the_last_state_holds_no_other() -> None:
    course = Course({}, {2: LOW}, keep="last")
    course.train(4)
    assert course.grower._recovery.best_states.nbytes == 0
    with pytest.raises(GrowthError, match=r'make it with keep="best"'):
        course.grower.restore_best(course.evaluate)
    with pytest.raises(GrowthError, match='keep must be "best" or "last", and is \'first\''):
        make_loop(keep="first")


# `grow`


def overfit(val: Data | None = None, **options: Any) -> Grown:
    """Train on few samples with a high learning rate, so that the validation loss falls and rises again."""
    given: dict[str, Any] = {
        "epochs": 14,
        "controller": "never",
        "config": config(slots=SLOTS),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.03),
        **options,
    }
    torch.manual_seed(3)
    return grow(make_host(), make_data(2), val or make_data(3, seed=5), cross_entropy, **given)


def loss_of(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float(torch.stack([cross_entropy(model(x), y) for x, y in make_data(3, seed=5)]).mean())


def test_grow_returns_the_best_state_and_says_so() -> None:
    events: list[Any] = []
    best, last = overfit(callbacks=[events.append]), overfit(keep="last")
    assert best.val_losses == last.val_losses
    assert best.best_epoch == 1 + best.val_losses.index(min(best.val_losses)) < 14
    assert loss_of(best.model) == pytest.approx(best.val_loss, abs=1e-6)
    assert best.val_loss == pytest.approx(min(best.val_losses), abs=1e-6)
    assert last.val_loss == pytest.approx(last.val_losses[-1], abs=1e-6)
    assert last.best_epoch is None
    assert f"best state, after epoch {best.best_epoch} of 14" in best.report()
    assert "best state" not in last.report()
    restored, finished = (next(event for event in events if isinstance(event, kind)) for kind in (BestRestored, GrowthFinished))
    assert (restored.epoch, finished.best_epoch, finished.epoch) == (best.best_epoch, best.best_epoch, 14)
    assert finished.val_loss == best.val_loss


def test_the_result_counts_the_parameters_of_the_best_state_and_all_views_show_it(tmp_path: Path) -> None:
    """High learning rates ruin the host after epoch 6. A seed that germinates then is kept, and is not in the best state."""
    events: list[Any] = []
    script = Script(
        {
            8: [Germinate(slot="first", reason="test", blueprint="mlp")],
            **{epoch: [Fossilize(slot="first", reason="test")] for epoch in range(10, 15)},
        }
    )
    grown = overfit(
        make_data(2),
        controller=script,
        callbacks=[events.append],
        run=tmp_path / "run",
        config=config(slots=SLOTS, governor=GovernorConfig(spike_sigmas=1e6, uninformed_loss=100.0)),
        step_schedule="epoch",
        scheduler=lambda optimizer: MultiplicativeLR(optimizer, lambda epoch: {6: 30.0, 8: 1 / 30}.get(epoch, 1.0)),
    )
    stages = [event.stage for event in events if isinstance(event, StageEntered) and event.slot == "first"]
    assert Stage.FOSSILIZED.name in stages, "the seed has to be kept at first"
    assert grown.best_epoch is not None
    assert grown.best_epoch <= 8
    assert parameters_of(grown.model) == grown.host.parameters
    assert grown.added.parameters == 0
    assert grown.ledger.count("kept") == 0
    assert grown.report().startswith("nothing was worth keeping (1 seed tried) · ")
    # The report draws no seed, neither does the dashboard, and the card lists none.
    drawn = network_drawing(read_story(grown.folder or tmp_path))
    assert drawn.count('class="empty"') == 3  # with the slot behind the seed, which opened when it was kept
    assert "empty, last: mlp, pruned" in drawn
    run = Run(tmp_path / "run", "growth")
    run.refresh()
    assert [slot["stage"] for slot in growth_story(run)["slots"] if slot["slot"] == "first"] == ["DORMANT"]
    card = (tmp_path / "run" / "model.md").read_text()
    assert "No seed was kept." in card
    assert f"- state: after epoch {grown.best_epoch} of 14, which was the best" in card
    assert_same(dict(load(tmp_path / "run", model=make_host()).state_dict()), dict(grown.model.state_dict()))


def test_early_stopping_returns_the_best_state() -> None:
    grown = overfit(config=config(slots=SLOTS, patience=2), epochs=40)
    assert grown.status == "stopped early"
    assert grown.best_epoch == grown.epochs - 2
    assert grown.val_loss == pytest.approx(min(grown.val_losses), abs=1e-6)


def test_ctrl_c_returns_the_best_state_so_far() -> None:
    class Impatient(list[Any]):
        epoch = 0

        def __iter__(self) -> Any:
            self.epoch += 1
            yield self[0]
            if self.epoch == 13:
                raise KeyboardInterrupt
            yield self[1]

    torch.manual_seed(3)
    grown = grow(
        make_host(),
        Impatient(make_data(2)),
        make_data(3, seed=5),
        cross_entropy,
        epochs=14,
        controller="never",
        config=config(slots=SLOTS),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.03),
    )
    assert (grown.status, grown.epochs) == ("stopped", 12)
    assert grown.val_loss == pytest.approx(min(grown.val_losses), abs=1e-6)
    assert_same(dict(grown.model.state_dict()), dict(overfit().model.state_dict()))


def test_a_planned_seed_is_kept_with_the_best_state_of_its_trial() -> None:
    grown = overfit(controller=Planned([(0, "first", "mlp")]), epochs=30)
    real = parameters_of(grown.model)
    assert real == grown.host.parameters + grown.added.parameters
    assert grown.val_loss == pytest.approx(loss_of(grown.model), abs=1e-6)
    assert grown.ledger.count("kept") == (1 if grown.added.parameters else 0)


def test_the_epoch_with_the_highest_metric_is_restored_and_the_loss_decides_between_equal_ones() -> None:
    course = Course({}, {2: 2 * LOW, 5: LOW}, best_by="accuracy")
    accuracies = {1: 0.5, 2: 0.7, 3: 0.9, 4: 0.9, 5: 0.9, 6: 0.8}
    course.train(6, accuracies)
    restored = course.grower.restore_best(course.evaluate, metrics={"accuracy": lambda: 0.8})
    assert restored is not None
    assert (restored.epoch, restored.by, restored.value, restored.last_value) == (5, "accuracy", 0.9, 0.8)
    assert "after epoch 5: validation accuracy 90.00%, against 80.00% at the end" in restored_in_words(restored)
    assert torch.equal(course.output(course.grower.bake()), course.outputs[5])


def test_the_present_state_stays_if_its_metric_is_the_highest() -> None:
    course = Course({}, {2: LOW}, best_by="accuracy")
    course.train(3, {1: 0.5, 2: 0.7, 3: 0.6})
    course.loop.step(*course.loop.data[0])
    assert course.grower.restore_best(course.evaluate, metrics={"accuracy": 0.8}) is None


def test_a_seed_that_was_connected_after_the_epoch_with_the_highest_metric_is_taken_out_with_a_reason() -> None:
    course = Course(GROW_AND_KEEP, {}, best_by="accuracy")
    course.train(8, {epoch: 0.9 if epoch == 2 else 0.5 for epoch in range(1, 9)})
    assert course.grower.restore_best(course.evaluate, metrics={"accuracy": 0.5}) is not None
    reason = course.grower.ledger.seeds[0].stages[-1].reason
    assert reason == "taken out: the validation accuracy was highest, 0.9000, after epoch 2, when it was not connected"


def test_a_missing_metric_and_a_metric_beside_keep_last_are_refused() -> None:
    course, missing = Course({}, {}, best_by="accuracy"), "the best epoch is chosen by the metric 'accuracy', which is missing"
    with pytest.raises(GrowthError, match=missing):
        course.train(1)
    course = Course({}, {}, best_by="accuracy")
    course.train(1, {1: 0.5})
    with pytest.raises(GrowthError, match=missing):
        course.grower.restore_best(course.evaluate)
    with pytest.raises(GrowthError, match='keep="last" returns the last one'):
        Course({}, {}, best_by="accuracy", keep="last")
    with pytest.raises(GrowthError, match="which returns the last state"):
        grow(make_host(), make_data(1), make_data(1), cross_entropy, epochs=1, keep="last", best_by="accuracy")


def test_a_metric_that_is_never_finite_leaves_the_last_state_with_a_warning() -> None:
    course = Course({}, {2: LOW}, best_by="accuracy")
    course.train(3, dict.fromkeys(range(1, 4), math.nan))
    with pytest.warns(RuntimeWarning, match="no epoch with a finite accuracy counts, so the last state is the result"):
        assert course.grower.restore_best(course.evaluate, metrics={"accuracy": math.nan}) is None


def test_a_saved_grower_is_loaded_with_the_metric_by_which_it_chose() -> None:
    accuracies = {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.6}
    course, resumed = (Course({}, {3: LOW}, best_by="accuracy") for _ in range(2))
    course.train(3, accuracies)
    resumed.grower.load_state_dict(course.grower.state_dict())
    resumed.train(1, accuracies)
    restored = resumed.grower.restore_best(resumed.evaluate, metrics={"accuracy": 0.6})
    assert restored is not None
    assert (restored.epoch, restored.value) == (2, 0.9)
    with pytest.raises(GrowthError, match="of a run with best_by='accuracy', not None"):
        Course({}, {}).grower.load_state_dict(course.grower.state_dict())


def test_grow_keeps_the_epoch_with_the_highest_metric() -> None:
    # Of the untrained model, after three epochs, of the last state, and of the restored one.
    data, values = make_data(4), iter([0.1, 0.3, 0.2, 0.2, 0.2, 0.3])

    def fraction(outputs: Tensor, targets: Tensor) -> float:
        return next(values)

    options: dict[str, Any] = {"loss_fn": cross_entropy, "epochs": 3, "controller": "never", "best_by": "fraction"}
    grown = grow(make_host(), data, make_data(1, seed=1), metrics={"fraction": fraction}, **options)
    assert (grown.best_epoch, grown.metrics) == (1, {"fraction": pytest.approx(0.3)})
    with pytest.raises(GrowthError, match="best_by='fraction' is not a metric of this training; did you mean 'fractions'"):
        grow(make_host(), data, make_data(1, seed=1), metrics={"fractions": fraction}, **options)
