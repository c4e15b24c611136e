"""The report of a run: a summary of its events as one self-contained page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

from esper.config import save
from esper.growth import GrowthConfig, grow
from esper.growth.config import LifecycleConfig, RentConfig
from esper.growth.events import (
    ActionRefused,
    Birth,
    EpochEnded,
    FinalTest,
    GrowthFinished,
    GrowthStarted,
    Measured,
    PassedOver,
    Probed,
    RolledBack,
    SeedBack,
    SlotView,
    StageEntered,
    TwinCompared,
    Widened,
)
from esper.growth.lifecycle.ledger import ANALYTICS_HEADING, LEDGER_HEADING, analytics_rows, ledger_rows
from esper.growth.lifecycle.stages import OCCUPIED, Decision, Fossilize, Germinate, GrowthState, Prune, Stage
from esper.growth.report.html import render, width_drawing, write_report
from esper.growth.report.story import Story, read_story
from esper.growth.report.summary import (
    about_chance,
    about_rent,
    about_rollbacks,
    about_skipped,
    comparison,
    headline,
    probe_rows,
    result_in_words,
    rollback_rows,
)
from esper.runs import Event, EventLog
from esper.runs.folder import RunError
from esper.text_table import with_interval

pytestmark = pytest.mark.slow  # a model is trained, and a page is made by another process

NASTY = "<script>alert('x')</script> & $x^2$"


NUMBERS = {"a": 1, "b": 2}  # of the first seeds in these slots; the norm in b is 3


def number_of(slot: str, blueprint: str | None) -> int:
    return 3 if blueprint == "norm" else NUMBERS.get(slot, 1)


def view(slot: str, stage: str, blueprint: str | None = None, *, gain: float | None = None) -> SlotView:
    low, high = (None, None) if gain is None else (gain - 0.01, gain + 0.01)
    number = None if blueprint is None else number_of(slot, blueprint)
    return SlotView(slot, number, stage, blueprint, 1.0, 2, 1.0, gain, low, high, 300 if blueprint else 0, 0.01 if blueprint else 0.0)


def epoch(number: int, *views: SlotView, decision: str = "waits") -> EpochEnded:
    loss = 2.0 / number
    return EpochEnded(
        epoch=number, train_loss=loss, val_loss=loss + 0.1, learning_rate=0.1, decision=decision, slots=list(views), parameters=1_300,
        flops=9_000, seconds=0.5,
    )  # fmt: skip


def entered(number: int, slot: str, stage: str, reason: str = "a reason", blueprint: str = "conv3x3") -> StageEntered:
    birth = Birth("joint", 300, 1_000) if stage == "GERMINATED" else None
    seed = None if stage in ("EMBARGOED", "DORMANT") else number_of(slot, blueprint)
    return StageEntered(epoch=number, slot=slot, number=seed, blueprint=blueprint, stage=stage, reason=reason, birth=birth)


def eventful_run() -> list[Event]:
    """A run in which everything happens: one seed is kept, one pruned, one rolled back."""
    return [
        GrowthStarted(epoch=0, epochs=6, controller="heuristic", raise_mode="joint", slots=["a", "b"], parameters=1_000, flops=8_000),
        epoch(1, view("a", "DORMANT"), view("b", "DORMANT")),
        entered(2, "a", "GERMINATED", NASTY, NASTY),
        entered(2, "a", "HOLDING"),
        entered(2, "b", "GERMINATED"),
        entered(2, "b", "HOLDING"),
        epoch(2, view("a", "HOLDING", NASTY), view("b", "HOLDING", "conv3x3"), decision=f"germinate a: {NASTY}"),
        ActionRefused(epoch=3, slot="b", number=2, action="fossilize", reason="too early"),
        entered(3, "a", "FOSSILIZED", "its cost of removal is 0.05"),
        Measured(epoch=3, slot="a", number=1, gain=0.05, gain_low=0.04, gain_high=0.06, rent=0.01),
        epoch(3, view("a", "FOSSILIZED", NASTY, gain=0.05), view("b", "HOLDING", "conv3x3", gain=0.004)),
        Measured(epoch=4, slot="b", number=2, gain=0.005, gain_low=-0.005, gain_high=0.015, rent=0.01),
        entered(4, "b", "BLENDING", "it does not pay; alpha falls to 0"),
        epoch(4, view("a", "FOSSILIZED", NASTY, gain=0.05), view("b", "BLENDING", "conv3x3", gain=0.005)),
        entered(5, "b", "PRUNED", "it does not pay"),
        entered(5, "b", "EMBARGOED"),
        entered(5, "b", "DORMANT"),
        entered(5, "b", "GERMINATED", blueprint="norm"),
        entered(5, "b", "HOLDING", blueprint="norm"),
        epoch(5, view("a", "FOSSILIZED", NASTY, gain=0.05), view("b", "HOLDING", "norm")),
        RolledBack(epoch=6, to_epoch=5, reason="the training loss is nan", embargoed=["b"], gone=[3]),
        entered(6, "b", "EMBARGOED", blueprint="norm"),
        epoch(6, view("a", "FOSSILIZED", NASTY, gain=0.05), view("b", "EMBARGOED")),
        GrowthFinished(
            epoch=6, why="finished", tried=3, kept=1, rollbacks=1, val_loss_before=2.3, val_loss=0.4, parameters=1_300,
            parameters_added=300, flops=9_000, flops_added=1_000, total_gflops=1.5, seconds=4.0,
        ),
        FinalTest(loss_before=2.3, loss=0.5, accuracy_before=0.1, accuracy=0.9),
    ]  # fmt: skip


def summarise(events: list[Event]) -> Story:
    story = Story()
    for event in events:
        story.take(event)
    return story


def write_run(folder: Path, events: list[Event]) -> Path:
    with EventLog(folder / "events.jsonl", run=folder.name) as log:
        for event in events:
            log.emit(event)
    save(GrowthConfig(blueprints=("<b>bold</b>",)), folder / "config.toml")
    return folder


class Tags(HTMLParser):
    """Collect what a browser would see: the names of all elements, their links, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.targets: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.targets += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "data", "srcset")]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        self.text += data


# The fold


def test_every_seed_gets_its_outcome_and_its_reason() -> None:
    seeds = summarise(eventful_run()).seeds
    assert [(seed.slot, seed.outcome, seed.born, seed.ended) for seed in seeds] == [
        ("a", "kept", 2, 3),
        ("b", "pruned", 2, 5),
        ("b", "rolled back", 5, 6),
    ]
    assert seeds[1].why == "it does not pay"
    assert seeds[2].why == "the governor went back: the training loss is nan"
    assert (seeds[0].gain, seeds[1].gain, seeds[2].gain) == (0.05, 0.005, None)


def test_a_seed_that_a_rollback_brings_back_lives_on() -> None:
    events = [
        *eventful_run()[:6],
        epoch(2, view("a", "HOLDING", "conv3x3"), view("b", "HOLDING", "conv3x3")),
        entered(3, "a", "PRUNED"),
        RolledBack(epoch=3, to_epoch=2, reason="a spike", embargoed=["b"], gone=[2], back=[SeedBack(1, "a", "HOLDING", "living", True)]),
        epoch(3, view("a", "HOLDING", "conv3x3"), view("b", "EMBARGOED")),
    ]
    assert [seed.outcome for seed in summarise(events).seeds] == ["living", "rolled back"]


def test_a_remark_repeated_every_epoch_is_shown_once() -> None:
    story = summarise([epoch(number) for number in (1, 2, 3)])
    assert [(remark.first, remark.last, remark.text) for remark in story.remarks] == [(1, 3, "waits")]


class Once:
    """Grows in the first slots, keeps the first seed, prunes the second."""

    name = "once"

    def decide(self, state: GrowthState) -> Decision:
        first, second = (slot for slot in state.slots[:2])
        if state.epoch == 1:
            return Decision(
                tuple(Germinate(slot=slot.place.name, reason="try it", blueprint=slot.candidates[0].blueprint) for slot in (first, second))
            )
        if first.stage is Stage.HOLDING and first.contribution is not None:
            return Decision((Fossilize(slot=first.place.name, reason="keep it"), Prune(slot=second.place.name, reason="take it out")))
        return Decision()

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def test_the_summary_of_the_events_agrees_with_the_ledger(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 6, generator=generator)
    batches = [(part, part[:, :3].argmax(dim=1)) for part in inputs.split(16)]
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    config = GrowthConfig(lifecycle=LifecycleConfig(holding_epochs=1, withdraw_epochs=1))
    grown = grow(model, batches, batches, F.cross_entropy, epochs=6, controller=Once(), config=config, run=tmp_path / "run")
    seeds = read_story(tmp_path / "run").seeds
    assert {seed.outcome for seed in seeds} == {"kept", "pruned"}
    for seed, entry in zip(seeds, grown.ledger.seeds, strict=True):
        told_by_ledger = (entry.number, entry.slot, entry.blueprint, entry.born, entry.outcome, entry.ended, entry.parameters)
        assert (seed.number, seed.slot, seed.blueprint, seed.born, seed.outcome, seed.ended, seed.parameters) == told_by_ledger
        assert (seed.gain, seed.gain_low, seed.gain_high) == (entry.gain, entry.gain_low, entry.gain_high)
    assert ledger_rows(seeds) == ledger_rows(grown.ledger.seeds), "every cell of them, the reasons too"
    assert analytics_rows(seeds) == analytics_rows(grown.ledger.seeds)
    assert grown.report().startswith(headline(read_story(tmp_path / "run")))
    views = [slot for ended in read_story(tmp_path / "run").epochs for slot in ended.slots if Stage[slot.stage] in OCCUPIED and slot.age]
    assert views
    assert all(slot.grad_norm is not None and slot.grad_norm > 0 and slot.skipped == 0 for slot in views)
    assert write_report(tmp_path / "run").exists()


# Tables and sentences


def test_a_twin_that_has_not_finished_has_no_figures_in_the_comparison() -> None:
    story, twin = summarise(eventful_run()), summarise(eventful_run()[:2])
    heading, rows = comparison(story, twin)
    assert heading == ("", "grown", "its twin", "difference", "before")
    table = {row[0]: row[1:] for row in rows}
    assert table["parameters"] == ("1,300", "–", "–", "1,000"), "a twin that has not finished has no figures"
    assert table["test accuracy"] == ("90.00%", "–", "–", "10.00%")
    assert comparison(story)[0] == ("", "before", "after", "change")
    assert headline(story).startswith("kept 1 of 3 seeds · validation loss 2.3000 → 0.4000 · +30.0% parameters")


def test_the_report_compares_the_grown_model_with_its_twin() -> None:
    finished = GrowthFinished(
        epoch=6, why="finished", tried=0, kept=0, rollbacks=0, val_loss_before=2.3, val_loss=0.6, parameters=1_000,
        parameters_added=0, flops=8_000, flops_added=0, total_gflops=1.0, seconds=3.0,
    )  # fmt: skip
    tested = FinalTest(loss_before=2.3, loss=0.7, accuracy_before=0.1, accuracy=0.88)
    compared = TwinCompared(samples=360, accuracy_difference=0.02, low=0.005, high=0.035)
    story, twin = summarise(eventful_run()), summarise([*eventful_run()[:2], finished, tested, compared])
    table = {row[0]: row[1:4] for row in comparison(story, twin)[1]}
    assert table["validation loss"] == ("0.4000", "0.6000", "-0.2000")
    assert table["test accuracy"] == ("90.00%", "88.00%", "+2.00 ±1.50 points")
    assert table["parameters"] == ("1,300", "1,000", "+30.0%")
    first = "validation loss 0.2000 below its twin's: 0.4000 against 0.6000 · kept 1 of 3 seeds · "
    assert headline(story, twin).startswith(first), "what growing gained comes first"
    assert "360 test samples: a difference in test accuracy below 1.50 points may be chance" in about_chance(twin)[0]
    assert not about_chance(summarise(eventful_run()[:2])), "it has not finished"


def test_the_report_shows_the_best_candidate_of_every_slot_in_the_last_probe() -> None:
    first = Probed(epoch=1, promises={"a": {"norm": 0.5}, "b": {"norm": 0.25}})
    promises = {"norm": 0.001, "conv3x3": 0.02, "film": 0.003, "attention": 0.0001}
    story = summarise([first, Probed(epoch=2, promises={"a": promises})])
    assert probe_rows(story) == [
        ("2", "a", "conv3x3", "0.0200", ""),
        ("2", "a", "film", "0.0030", ""),
        ("2", "a", "norm", "0.0010", ""),
        ("1", "b", "norm", "0.2500", ""),
    ]
    assert "Results of the probe" in render(summarise([*eventful_run(), first]), None, title="run", rent=RentConfig())


def test_the_report_says_why_a_candidate_was_passed_over_and_which_one_grew() -> None:
    probed = Probed(epoch=1, promises={"a": {"norm": 0.04, "conv3x3": 0.03, "film": 0.02, "attention": 0.01}})
    passed = PassedOver(epoch=1, reasons={"a": {"norm": f"too dear {NASTY}", "attention": "norm promises more"}})
    events = [eventful_run()[0], probed, passed, entered(1, "a", "GERMINATED"), epoch(1, view("a", "HOLDING", "conv3x3"))]
    story = summarise(events)
    assert [row[2:] for row in probe_rows(story)] == [
        ("norm", "0.0400", f"passed over: too dear {NASTY}"),
        ("conv3x3", "0.0300", "grows"),
        ("film", "0.0200", ""),
    ]
    assert [row[2] for row in probe_rows(story, is_complete=True)] == ["norm", "conv3x3", "film", "attention"]
    page = render(story, None, title="run", rent=RentConfig())
    assert page.count("<script") == 1
    text = Tags(page).text
    assert "passed over: norm promises more" in text
    assert f"passed over: too dear {NASTY}" in text


def test_the_report_says_what_a_rollback_cost() -> None:
    lost = [
        RolledBack(epoch=6, to_epoch=5, reason="the training loss is nan", embargoed=["b"], steps_lost=37, seconds_lost=2.5),
        RolledBack(epoch=6, to_epoch=4, reason="a spike", embargoed=[], back=[SeedBack(1, "a", "HOLDING", "living", True)], steps_lost=3),
    ]
    story = summarise([*eventful_run()[:20], *lost])
    assert rollback_rows(story) == [
        ("6", "epoch 5", "37", "2.5 s", "the training loss is nan", "b", ""),
        ("6", "epoch 4", "3", "–", "a spike", "", "a"),
    ]
    assert about_rollbacks(story) == "2 rollbacks, which cost 40 steps and 2.5 s."
    assert "<p>2 rollbacks, which cost 40 steps and 2.5 s.</p>" in render(story, None, title="run", rent=RentConfig())
    unknown = summarise([*eventful_run()[:20], RolledBack(epoch=6, to_epoch=5, reason="a spike", embargoed=[])])
    assert about_rollbacks(unknown) == "1 rollback."


def test_the_report_separates_the_cost_of_removal_from_the_gain_of_growing() -> None:
    story = summarise(eventful_run())
    page = render(story, None, title="run", rent=RentConfig())
    table = next(part for part in re.findall(r"<table>.*?</table>", page, flags=re.DOTALL) if "cost of removal" in part)
    assert '<th class="number">cost of removal</th>' in table
    assert "more than the gain from growing it" in page
    for text in (page, " ".join(about_rent(story, RentConfig())), " ".join(LEDGER_HEADING), " ".join(ANALYTICS_HEADING)):
        assert not re.search(r"\bgives?\b|gain in nats|mean gain|\bnats\b", text)


def test_a_small_unit_of_the_loss_is_not_rounded_to_nothing() -> None:
    assert with_interval(3.2e-6, 1.1e-6, 5.3e-6) == "3.2e-06 [1.1e-06, 5.3e-06]"
    finished = msgspec.structs.replace(next(event for event in eventful_run() if isinstance(event, GrowthFinished)), val_loss=2.64e-5)
    assert "validation loss 2.3000 → 2.6e-05" in result_in_words(finished)


def test_the_report_counts_skipped_steps_of_a_seed() -> None:
    skipping = msgspec.structs.replace(view("a", "HOLDING", "conv3x3"), skipped=1, grad_norm=3.0)
    story = summarise([entered(1, "a", "GERMINATED"), epoch(1, skipping), epoch(2, skipping), epoch(3, view("a", "HOLDING", "conv3x3"))])
    assert about_skipped(story) == ["Seed 1, conv3x3 after a, skipped 2 steps, because its gradient or that of its host was not finite."]


def test_the_rent_that_would_have_changed_a_decision_is_named() -> None:
    kept, pruned = about_rent(summarise(eventful_run()), RentConfig(parameters=0.02, flops=0.04))
    assert "the lower end of its cost of removal, 0.0400, is 4 times its rent, 0.0100" in kept
    assert "At rent.parameters = 0.08 and rent.flops = 0.16 it would not have been kept" in kept
    assert "It would have paid at rent.parameters = 0.01 and rent.flops = 0.02" in pruned
    assert "There is no rent" in about_rent(summarise(eventful_run()), RentConfig(parameters=0.0, flops=0.0))[0]


# The page


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path, eventful_run())).read_text()
    tags = Tags(page)
    assert not {"link", "img", "iframe", "object", "embed"} & tags.names
    assert page.count("<script>") == page.count("<script") == 1, "only the one that shows the numbers of a chart"
    assert all(target.startswith("#") for target in tags.targets), "only what is in the page itself"
    assert {target[1:] for target in tags.targets} <= set(tags.ids)
    assert not re.search(r"https?://|@import", page)
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert page.count("<svg") == 6, "loss, two of gain, parameters, FLOPs and learning rate"


def test_names_given_by_users_are_escaped_in_the_page(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path, eventful_run())).read_text()
    tags = Tags(page)
    assert page.count("<script") == 1
    assert "b" not in tags.names
    assert tags.text.count(NASTY) >= 4, "in the chart, the ledger, the blueprints and the decisions"
    assert "<b>bold</b>" in tags.text


def test_drawings_take_their_colours_from_a_light_and_a_dark_theme(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path, eventful_run())).read_text()
    drawings = "".join(re.findall(r"<svg.*?</svg>|<ol.*?</ol>", page, flags=re.DOTALL))
    used = set(re.findall(r"var\(--(\w+)\)", drawings))
    assert {"ink", "validation", "fossilized", "trouble"} <= used
    light, _, dark = page.partition("prefers-color-scheme: dark")
    assert all(f"--{name}:" in light and f"--{name}:" in dark for name in used)
    assert not re.search(r"""(fill|stroke)(: |=")(#|rgb|[a-z]*[^nv"a-z(])""", drawings), "a chart has no colours of its own"


def test_equal_runs_give_equal_pages() -> None:
    pages = {render(summarise(eventful_run()), summarise(eventful_run()), title="run", rent=RentConfig()) for _ in range(2)}
    assert len(pages) == 1


@pytest.mark.parametrize("count", [1, 2, 7, 17, 23])
def test_a_run_that_was_killed_has_a_report_too(tmp_path: Path, count: int) -> None:
    page = write_report(write_run(tmp_path, eventful_run()[:count])).read_text()
    assert "</html>" in page
    assert "Before and after" not in page


def test_a_folder_without_a_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run"):
        write_report(tmp_path)
    with pytest.raises(RunError, match="has not begun"):
        write_report(write_run(tmp_path, []))


def charts_of(page: str) -> list[dict[str, Any]]:
    """Return the numbers that the page shows under the pointer, chart by chart."""
    return [json.loads(unescape(found)) for found in re.findall(r'data-chart="([^"]*)"', page)]


def with_metrics(events: list[Event], shift: float) -> list[Event]:
    """Return the events with an accuracy in every epoch."""
    return [replace(event, metrics={"accuracy": shift + 0.1 * event.epoch}) if isinstance(event, EpochEnded) else event for event in events]


def test_the_charts_hold_the_numbers_of_run_and_twin() -> None:
    story, twin = summarise(with_metrics(eventful_run(), 0.2)), summarise(with_metrics(eventful_run(), 0.1))
    loss, accuracy, *_ = charts_of(render(story, twin, title="run", rent=RentConfig()))
    assert [line["name"] for line in loss["lines"]] == ["training", "validation", "validation, twin"]
    assert loss["lines"][1]["y"] == pytest.approx([epoch.val_loss for epoch in story.epochs])
    assert {mark["name"].partition(":")[0] for mark in loss["marks"]} == {"germinated", "kept", "pruned", "rolled back to epoch 5"}
    assert accuracy["lines"][0]["y"] == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert accuracy["lines"][1]["y"] == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert accuracy["percent"] is True


def test_the_epoch_whose_state_was_kept_is_marked() -> None:
    events = [replace(event, best_epoch=4) if isinstance(event, GrowthFinished) else event for event in eventful_run()]
    loss, *_ = charts_of(render(summarise(events), None, title="run", rent=RentConfig()))
    assert [mark["x"] for mark in loss["marks"] if mark["name"] == "best state, after epoch 4"] == [4]


def test_gain_is_drawn_against_parameters_and_against_flops() -> None:
    events = eventful_run()
    grown = [replace(event, parameters=1_000 + event.epoch, flops=8_000 + event.epoch) if isinstance(event, EpochEnded) else event
             for event in events]  # fmt: skip
    better = [replace(event, val_loss=event.val_loss + 0.25) if isinstance(event, EpochEnded) else event for event in events]
    for twin, gains in ((summarise(better), [0.25] * 6), (None, [0.0, 1.0, 4 / 3, 1.5, 1.6, 5 / 3])):
        charts = charts_of(render(summarise(grown), twin, title="run", rent=RentConfig()))
        found = {chart["xName"]: chart["lines"][0] for chart in charts if chart["lines"][0]["name"] == "gain"}
        assert found["parameters"]["x"] == [1_001, 1_002, 1_003, 1_004, 1_005, 1_006]
        assert found["FLOPs"]["x"] == [8_001, 8_002, 8_003, 8_004, 8_005, 8_006]
        assert found["parameters"]["y"] == found["FLOPs"]["y"] == pytest.approx(gains, abs=1e-5)


def test_the_report_shows_every_stage_and_the_use_of_the_machine(tmp_path: Path) -> None:
    used = {"cpu_cores": 1.5, "memory_bytes": 300.0 * 2**20}
    events = [
        replace(event, samples_per_second=250.0, step_seconds=0.004, data_wait_seconds=0.5, resources=used)
        if isinstance(event, EpochEnded)
        else event
        for event in eventful_run()
    ]
    page = write_report(write_run(tmp_path, events)).read_text()
    figures = {name: value for value, name in re.findall(r"<strong>(.*?)</strong><span>(.*?)</span>", page)}
    assert (figures["samples per second"], figures["per step"], figures["wait for data"]) == ("250", "4 ms", "0.50 s")
    assert (figures["cores in use"], figures["memory"]) == ("1.50", "300 MiB")
    assert page.count("<figcaption>Seconds per step</figcaption>") == 1
    opened = re.search(r"<summary>Every stage.*?</details>", page, flags=re.DOTALL)
    assert opened is not None
    text = Tags(opened[0]).text
    assert "2: conv3x3 after b" in text
    assert "it does not pay; alpha falls to 0" in text
    assert "cost of removal 0.0050 [-0.0050, 0.0150], rent 0.0100" in text


def test_a_log_without_details_of_slots_does_not_claim_that_they_are_empty() -> None:
    page = render(summarise([eventful_run()[0], epoch(1)]), None, title="run", rent=RentConfig())
    assert "empty slot" not in page
    assert "The log has no details of slots. Train with --telemetry normal to see them." in page


def test_the_first_figure_is_the_difference_to_the_twin() -> None:
    events = eventful_run()
    twin = summarise(
        [*events[:-2], replace(events[-2], val_loss=0.5), TwinCompared(samples=400, accuracy_difference=0.02, low=0.01, high=0.03)]
    )
    page = render(summarise(events), twin, title="run", rent=RentConfig())
    figures = re.findall(r"<strong>(.*?)</strong><span>(.*?)</span>", page)
    assert figures[:2] == [("-0.1000", "validation loss against the twin"), ("+2.00 ±1.00 points", "test accuracy against the twin")]
    alone = render(summarise(events), None, title="run", rent=RentConfig())
    assert re.findall(r"<strong>(.*?)</strong>", alone)[0] == "0.4000"
    assert "it is unknown how much of the result is due to growth" in alone


def test_the_network_is_drawn_with_its_seeds_and_their_cost_of_removal() -> None:
    page = render(summarise(eventful_run()), None, title="run", rent=RentConfig())
    drawing = re.search(r'<ol[^>]*aria-label="the network and its slots".*?</ol>', page, flags=re.DOTALL)
    assert drawing is not None
    text = Tags(drawing[0]).text
    assert f"{NASTY}, kept, 2 epochs old" in text
    assert "cost of removal 0.0500 ±0.0100, rent 0.0100" in text
    assert "empty, last: norm, rolled back" in text


def test_a_network_of_many_slots_counts_the_empty_ones() -> None:
    names = [f"s{index}" for index in range(40)]
    started = GrowthStarted(epoch=0, epochs=2, controller="never", raise_mode="joint", slots=names, parameters=10, flops=10)
    views = [view(name, "HOLDING", "mlp") if name == "s20" else view(name, "DORMANT") for name in names]
    page = render(summarise([started, epoch(1, *views)]), None, title="run", rent=RentConfig())
    assert "20 empty slots" in page
    assert "19 empty slots" in page


def test_making_a_report_imports_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    write_run(tmp_path, eventful_run())
    code = f"""import sys
from esper.growth.report.html import write_report
write_report({str(tmp_path)!r})
print({{"torch", "matplotlib"}} & set(sys.modules))"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


def test_layers_that_became_wider_are_drawn_with_the_units_of_every_seed_that_is_there() -> None:
    story = Story()
    for number, (epoch, slot, stage) in enumerate(((4, "a", "FOSSILIZED"), (8, "a#2", "HOLDING"), (9, "b", "PRUNED")), start=1):
        before = {NASTY: 8 if epoch == 4 else 16, "head": 3}
        story.take(
            Widened(
                epoch=epoch,
                slot=slot,
                number=number,
                blueprint="widen_100",
                units={NASTY: 8, "head": 1} if epoch == 4 else {NASTY: 16},
                before=before,
            )
        )
        for entered in ("GERMINATED", "HOLDING", stage):
            story.take(StageEntered(epoch=epoch, slot=slot, number=number, blueprint="widen_100", stage=entered, reason="test"))
    drawing = width_drawing(story)
    assert NASTY not in drawing
    texts = [unescape(text) for text in re.findall(r"<span>(.*?)</span>", drawing)]
    assert texts == [f"{NASTY}: 8 + 8 + 16 units", "head: 3 + 1 units"]
    assert re.findall(r'background:var\(--(\w+)\)" title="([^"]*)', drawing) == [
        ("soft", "8 units at first"),
        ("fossilized", "8 units by widen_100 after epoch 4"),
        ("holding", "16 units by widen_100 after epoch 8"),
        ("soft", "3 units at first"),
        ("fossilized", "1 unit by widen_100 after epoch 4"),
    ]
