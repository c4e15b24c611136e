"""The card of a model that grew in a training loop of the user's own, without a run folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from esper.display import Card
from esper.growth.events import BestRestored
from esper.growth.lifecycle.ledger import LEDGER_HEADING, Ledger, ledger_rows
from esper.growth.lifecycle.stages import Stage
from esper.growth.report.story import metric_in_words
from esper.growth.report.summary import counted
from esper.text_table import figure


def model_card(
    ledger: Ledger,
    name: str,
    *,
    epoch: int,
    losses: Sequence[float],
    restored: BestRestored | None,
    metrics: Mapping[str, float],
    host: int,
    how: Sequence[tuple[str, str]],
) -> Card:
    """Return figures and seeds of a training. `losses` are the validation losses by epoch, `host` the parameters of the host."""
    # Baking removes the seeds that still live.
    seeds = [copy.copy(seed) for seed in ledger.seeds]
    for seed in seeds:
        if seed.outcome == "living":
            seed.stages = [*seed.stages]
            seed.enter(epoch, Stage.PRUNED, "not fossilized when the model was baked", "pruned")
    added = sum(seed.parameters for seed in seeds if seed.outcome == "kept")
    figures = [("epochs", str(epoch))]
    if losses:
        which, last = ("last", losses[-1]) if restored is None else ("best", restored.val_loss)
        figures.append((f"validation loss after the first and the {which} epoch", f"{figure(losses[0], 3)} → {figure(last, 3)}"))
    figures += [
        *((f"validation {name}", metric_in_words(name, value)) for name, value in metrics.items()),
        ("parameters", f"{host + added:,} ({added / max(host, 1):+.1%} by seeds)"),
        *how,
    ]
    title = f"{name}: kept {ledger.count('kept')} of {counted(len(seeds), 'seed')}"
    return Card(title, figures, LEDGER_HEADING, ledger_rows(seeds, is_short=True))
