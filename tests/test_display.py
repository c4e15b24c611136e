"""Results in notebooks and terminals: short, escaped, without colours of their own."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from esper.display import MAX_ROWS, Card, Displayed
from esper.growth import add_slots
from esper.rl.evaluate import PolicyEvaluation
from esper.rl.training import RunResult
from tests.growth.builders import SLOTS, grow_small, make_data, make_host


class Balanced(HTMLParser):
    """Collects the text, and fails for tags that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def text_of(shown: Displayed) -> str:
    """Return the text of the HTML, after checks that hold for every result."""
    html = shown._repr_html_()
    parser = Balanced()
    parser.feed(html)
    assert not parser.open
    assert len(html) < 20_000
    assert not re.search(r"(?:color|background):\s*(?!inherit|none)[#a-z]", html)
    return " | ".join(parser.texts)


def in_terminal(shown: Displayed) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_grown_model_shows_its_losses_metrics_size_and_seeds() -> None:
    grown = grow_small()
    for text in (text_of(grown), in_terminal(grown)):
        assert f"{grown.val_loss_before:.3f} → {grown.val_loss:.3f}" in text
        assert f"{grown.metrics['accuracy']:.2%}" in text
        assert f"{grown.host.parameters + grown.added.parameters:,}" in text
        assert "mlp" in text
    assert "mlp" in text_of(grown.ledger)
    assert "Ledger of 1 seeds" in in_terminal(grown.ledger)


def test_a_slotted_model_shows_its_slots() -> None:
    slotted = add_slots(make_host(), make_data()[0][0][:2], slots=list(SLOTS))
    for text in (text_of(slotted), in_terminal(slotted)):
        assert "Host with 2 slots" in text
        assert "second" in text
    slotted.remove()
    assert "removed" in text_of(slotted)


def test_a_run_shows_the_interval_of_its_evaluation() -> None:
    evaluation = PolicyEvaluation(returns=[1.0, 2.0, 3.0], lengths=[5, 5, 5])
    result = RunResult(Path("runs/<first>"), "finished", 5000, 12.0, 9, 1.5, 5.0, evaluation)
    assert "2.000 [-0.484, 4.484], 3 episodes" in text_of(result)
    assert "Run <first>" in text_of(result)
    assert "<first>" not in result._repr_html_()
    assert "5,000 steps" in in_terminal(result)


class Many(Displayed):
    def card(self) -> Card:
        return Card("[bold]many[/bold]", heading=("n",), rows=[(str(n),) for n in range(MAX_ROWS + 30)], curve=[1.0, float("nan"), 0.5])


def test_a_long_table_is_cut_and_markup_is_shown_as_text() -> None:
    assert text_of(Many()).endswith("and 30 more")
    assert "[bold]many" in in_terminal(Many())
    assert "and 30 more" in in_terminal(Many())


def test_a_module_with_a_hostile_name_is_escaped() -> None:
    hostile = type("<script>alert(1)</script>", (nn.Linear,), {})
    slotted = add_slots(nn.Sequential(hostile(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 4), slots=["0"])
    slotted.host.__class__ = type("<i>Net</i>", (nn.Sequential,), {})
    assert "<i>" not in slotted._repr_html_()
