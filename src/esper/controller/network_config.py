"""Widths and first leanings of a controller's network. Imports no torch, so that a command line can show it at once."""

from __future__ import annotations

from esper.config import Config, ConfigError, NonNegativeInt, PositiveInt, Width


class SlotNetworkConfig(Config):
    """What lies around the core of the policy: the encoder of slots and candidates, and the pointers back to them."""

    width: Width = 32  # of what a slot is encoded to
    candidate_width: Width = 16  # of what a candidate is encoded to
    blocks: NonNegativeInt = 1  # of attention, in which slots see one another
    attention_heads: PositiveInt = 4  # in each block; divides width
    summary_width: Width = 64  # of what goes into the core: the host and all its slots
    # First leanings, as logits of a new policy, where all else has 0. To prune pays at once where the rent is high, and to keep pays late:
    # from an even start a policy may learn to prune before it has seen what kept seeds give, and then grow and prune in turn at any rent.
    # And it fills all slots within a few decisions, so that it hardly sees hosts that grow late or never.
    wait_bias: float = 0.0
    fossilize_bias: float = 0.0
    prune_bias: float = -3.0

    def check(self) -> None:
        if self.width % self.attention_heads:
            raise ConfigError("attention_heads", expected=f"a divisor of width ({self.width})", got=self.attention_heads)
