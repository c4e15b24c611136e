"""Grow a transformer in the training loop of the Hugging Face Trainer.

Nothing is downloaded: the model is built from a configuration, and the sequences are made here. `GrowthTrainer` is a Trainer that tells
the callback its losses. Needs pip install 'esper-grow[transformers]'.

    python examples/huggingface_trainer.py

loss before 2.117
loss after  0.214
1  transformer.h.0  mlp       epoch 2  kept     +0.2601 [+0.1071, +0.4132]  0.0050  1,104       removing it now would raise the loss …
2  transformer.h.1  low_rank  epoch 2  kept     +0.0403 [+0.0251, +0.0555]  0.0012  280         removing it now would raise the loss …
parameters 2,984 -> 4,368
"""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, TrainingArguments, set_seed
from transformers.utils import logging

from esper.growth import GrowthTrainer, GrowthTrainerCallback


class Chains(Dataset[dict[str, Tensor]]):
    """Sequences of 12 tokens: a table of 10 × 10 entries gives each token by the two before it. The model has to learn the table."""

    def __init__(self, samples: int, seed: int) -> None:
        table = torch.randint(10, (10, 10), generator=torch.Generator().manual_seed(0))
        rows = torch.randint(10, (samples, 12), generator=torch.Generator().manual_seed(seed))  # [samples, 12]
        for t in range(2, 12):
            rows[:, t] = table[rows[:, t - 2], rows[:, t - 1]]
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    set_seed(0)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    shape = GPT2Config(
        vocab_size=10, n_positions=12, n_embd=16, n_layer=2, n_head=2, n_inner=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = GPT2LMHeadModel(shape)
    before = model.num_parameters()
    growth = GrowthTrainerCallback()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=20,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=64,
            learning_rate=0.01,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
        )
        trainer = GrowthTrainer(model, arguments, train_dataset=Chains(1024, seed=1), eval_dataset=Chains(256, seed=2), growth=growth)
        trainer.remove_callback(PrinterCallback)
        print(f"loss before {trainer.evaluate()['eval_loss']:.3f}")
        trainer.train()
        print(f"loss after  {trainer.evaluate()['eval_loss']:.3f}")
    print(growth.grower.ledger.table())
    model = growth.bake()  # the same model, with the kept seeds in it
    print(f"parameters {before:,} -> {model.num_parameters():,}")


if __name__ == "__main__":
    main()
