"""Train a controller on the lives of small hosts, then let it decide about a host of another kind.

A controller is a policy that decides when and how a host grows. It begins as the heuristic, tries other steps now and then, and PPO makes
those likelier that end better. The return of a life is how much lower its loss and rent are than those of the same host under the
heuristic, in nats. With drawn steps it begins behind the heuristic, and within 16 short rounds it is level with it or ahead.

    python examples/train_a_controller.py

round  1/16   32 lives so far  mean return -0.186 nats
round 16/16  512 lives so far  mean return +0.060 nats
learned on a host of 4-8-16 channels: kept 1 of 1 seed · validation loss 2.3165 → 0.0679 · …
"""

import tempfile
from pathlib import Path

import msgspec
import torch

import esper
from esper.controller import load_controller, train_controller
from esper.controller.config import QUICK
from esper.rl import PPO, Update
from esper.tasks import load_task


def show(ppo: PPO, update: Update) -> None:
    print(
        f"round {update.update:>2}/{QUICK.rounds}  {update.episodes:>3} lives so far  mean return {update.mean_return:+.3f} nats",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    config = msgspec.structs.replace(QUICK, device="cpu", threads=1)
    with tempfile.TemporaryDirectory() as folder:  # a run of your own would go to runs/NAME and could be resumed
        run = Path(folder) / "run"
        train_controller(config, run, callback=show)
        controller = load_controller(run / "controller.safetensors")

    digits = load_task("digits")
    grown = esper.grow(
        digits.make_host("4-8-16", seed=0),
        digits.train_loader(seed=0),
        digits.val_loader(),
        digits.loss_fn,
        epochs=8,
        controller=controller,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    )
    print(f"{grown.controller} on a host of 4-8-16 channels: {grown.report()}")
    print(grown.ledger.table())


if __name__ == "__main__":
    main()
