"""Decide with a controller of your own when, where and what to grow.

A controller has one method: `decide(state)` gets plain numbers (losses, slots, candidates, rents) before the first epoch and after every
epoch, and returns a decision with a reason. Gates check every action, and the ledger lists the seeds with the reasons.

    python examples/own_controller.py

one at a time: kept 1 of 2 seeds · validation loss 2.319 -> 0.335 · +469.4% parameters · +260.6% FLOPs · 0 rollbacks · AdamW, …
#  slot      blueprint     born     outcome  cost of removal             rent    parameters  why it ended so
1  blocks.2  wide_conv3x3  epoch 3  kept     +0.2190 [+0.1226, +0.3155]  0.0435  2,328       it contributes at least 0.1226, and …
2  blocks.1  conv3x3       epoch 8  pruned   +0.0649 [-0.0050, +0.1349]  0.0021  148         it contributes at least -0.0050, and …
never: nothing was grown · validation loss 2.319 -> 0.375 · +0.0% parameters · +0.0% FLOPs · 0 rollbacks · AdamW, …
"""

import torch
from torch.nn import functional as F

import esper
from esper.growth import Action, Decision, Fossilize, Germinate, GrowthState, Prune, SlotState, Stage
from esper.tasks import load_task

EPOCHS = 24


class OneAtATime:
    """Grow one seed at a time, the candidate that the probe likes best; keep it if it surely contributes more than its rent."""

    name = "one at a time"

    def decide(self, state: GrowthState) -> Decision:
        living = [slot for slot in state.slots if slot.stage in (Stage.GERMINATED, Stage.BLENDING, Stage.HOLDING)]
        if living:
            return Decision(tuple(self.judge(slot) for slot in living if self.is_ready(slot, state)), "waits for the seed")
        offers = [
            (candidate.promise, slot.place.name, candidate.blueprint)
            for slot in state.slots
            for candidate in slot.candidates
            if candidate.promise is not None and candidate.blueprint not in slot.tried
        ]
        if state.epoch < EPOCHS // 2 and offers:
            promise, slot, blueprint = max(offers)
            return Decision(
                (Germinate(slot=slot, reason=f"it promises most: the loss would fall by {promise:.4f} per step", blueprint=blueprint),)
            )
        # A probe measures in the next epoch how fast each candidate would lower the loss.
        return Decision(reason="looks for candidates", probe=2 <= state.epoch < EPOCHS // 2)

    def is_ready(self, slot: SlotState, state: GrowthState) -> bool:
        return slot.stage is Stage.HOLDING and slot.epochs_in_stage >= state.lifecycle.holding_epochs and not slot.is_withdrawing

    def judge(self, slot: SlotState) -> Action:
        assert slot.contribution is not None  # measured after every epoch on probation
        low = slot.contribution.gain.low
        action = Fossilize if low > slot.rent else Prune
        return action(slot=slot.place.name, reason=f"it contributes at least {low:.4f}, and its rent is {slot.rent:.4f}")


def main() -> None:
    torch.set_num_threads(1)
    digits = load_task("digits")
    for controller in (OneAtATime(), "never"):
        grown = esper.grow(
            digits.make_host("2-4-8", seed=0),
            digits.train_loader(seed=0),
            digits.val_loader(),
            F.cross_entropy,
            epochs=EPOCHS,
            controller=controller,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS),
        )
        print(f"{grown.controller}: {grown.report()}")
        print(grown.ledger.table())


if __name__ == "__main__":
    main()
