"""What a grower tells at the end of an epoch."""

from __future__ import annotations

from esper.growth.chronicle import Chronicle
from esper.growth.decisions import Decision
from esper.growth.events import EpochEnded, Probed, SlotView
from esper.growth.garden import AnyBed, Garden
from esper.growth.promise import Promises


def epoch_ended(garden: Garden[AnyBed], chronicle: Chronicle, decision: Decision, *, learning_rate: float) -> EpochEnded:
    host = garden.host
    seconds, samples = chronicle.lap()
    actions = [f"{type(action).__name__.lower()} {action.slot}: {action.reason}" for action in decision.actions]
    return EpochEnded(
        epoch=garden.epoch,
        train_loss=chronicle.train_losses[-1],
        val_loss=chronicle.val_losses[-1],
        learning_rate=learning_rate,
        decision="; ".join(filter(None, [*actions, decision.reason])),
        slots=[_slot_view(garden, name) for name in garden.beds],
        parameters=host.parameters + garden.added().parameters,
        flops=host.flops + garden.connected().flops,
        seconds=seconds,
        samples_per_second=samples / seconds if samples else None,
        total_gflops=chronicle.flops / 1e9 if chronicle.flops else None,
        step_seconds=chronicle.step_seconds(),
        data_wait_seconds=chronicle.data_wait,
        skipped=chronicle.take_skipped(),
    )


def _slot_view(garden: Garden[AnyBed], name: str) -> SlotView:
    slot = garden.view(name, {})
    gain = slot.contribution.gain if slot.contribution is not None else None
    gradients = slot.gradients
    return SlotView(
        slot=name,
        stage=slot.stage.name,
        blueprint=slot.blueprint,
        alpha=slot.alpha,
        age=slot.age,
        health=None if gradients is None else gradients.health,
        gain=None if gain is None else gain.estimate,
        gain_low=None if gain is None else gain.low,
        gain_high=None if gain is None else gain.high,
        parameters=slot.cost.parameters,
        rent=slot.rent,
        grad_norm=None if gradients is None else gradients.mean_norm,
        skipped=0 if gradients is None else gradients.skipped,
    )


def probed(epoch: int, promises: Promises) -> Probed:
    nested: dict[str, dict[str, float]] = {}
    for (slot, blueprint), promise in promises.items():
        nested.setdefault(slot, {})[blueprint] = promise
    return Probed(epoch=epoch, promises=nested)
