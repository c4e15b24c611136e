"""Settings of a controller's network: widths and initial biases. Imports no torch, so that the command line shows them quickly."""

from __future__ import annotations

from esper.config import Config, ConfigError, NonNegativeInt, PositiveInt, Width


class SlotNetworkConfig(Config):
    """Encoder and actor of the policy: the encoder of slots and candidates, and the pointers back to them."""

    width: Width = 32  # width of an encoded slot
    candidate_width: Width = 16  # width of an encoded candidate
    blocks: NonNegativeInt = 1  # number of attention blocks over the slots
    attention_heads: PositiveInt = 4  # in each block; must divide width
    summary_width: Width = 64  # width of the input of the core, a summary of the host and all its slots
    # Initial logits of these ops in a new policy; other ops have 0. At a high rent, pruning pays at once but keeping pays late. A policy
    # without a bias may therefore learn to prune before it has seen the gain of kept seeds, and then grow and prune in turn at any rent. It
    # also fills all slots within a few decisions, so that it hardly sees hosts that grow late or never.
    wait_bias: float = 0.0
    fossilize_bias: float = 0.0
    prune_bias: float = -3.0

    def check(self) -> None:
        if self.width % self.attention_heads:
            raise ConfigError("attention_heads", expected=f"a divisor of width ({self.width})", got=self.attention_heads)
