"""The network of a controller. It works for any number of slots and blueprints, in any order.

Encoder: all candidates are encoded by the same weights, and so are all slots, each together with its pooled candidates and the host. Slots
attend to one another. The host and the pooled slots make a summary, which is the input of the recurrent core of the policy. The encoded
slots and candidates bypass the core.

Actor: a pointer network. The logit of a slot for an op is the dot product of a query for that op with the encoded slot; the logit of a
blueprint in a slot is the dot product of a query for that slot with the encoded candidate.

Shapes: B = any leading dimension (hosts, or packed steps), S = slots, K = blueprints, D = width of a slot, C = width of a candidate,
E = width of the summary, H = width of the core.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from esper.controller.config import SlotNetworkConfig
from esper.controller.features import CANDIDATE, HOST, SLOT
from esper.controller.layout import ALPHA_TARGETS, Op, spec
from esper.rl.config import NetworkConfig
from esper.rl.networks import Dense, initialize, mlp
from esper.rl.policy import Policy
from esper.vecenv import Obs

_NEARLY_UNIFORM = 0.01  # initial gain of the layers before the logits, for a nearly uniform policy
_ACTIVATION = "relu"


def apply_to_rows(module: nn.Module, values: Tensor) -> Tensor:
    """Apply a module for rows [B, F] to values [..., F]. Matrix products are fastest on plain rows."""
    rows: Tensor = module(values.flatten(0, -2))
    return rows.view(*values.shape[:-1], rows.shape[-1])


def pool(values: Tensor, exists: Tensor) -> Tensor:
    """Return mean and maximum over the existing items: ([..., M, F], [..., M]) -> [..., 2F]; zeros if none exists."""
    mask = exists.unsqueeze(-1)
    mean = (values * mask).sum(-2) / mask.sum(-2).clamp_min(1)
    maximum = values.masked_fill(~mask, torch.finfo(values.dtype).min).amax(-2)
    return torch.cat((mean, maximum.masked_fill(~mask.any(-2), 0.0)), dim=-1)


def pointer_logits(queries: Tensor, keys: Tensor) -> Tensor:
    """Return logits [...]: the scaled dot products of queries [..., F] with keys [..., F]."""
    # A batched matrix product would be slower: torch goes through the batch one by one for products this small.
    return (queries * keys).sum(-1) / math.sqrt(keys.shape[-1])


class SlotAttention(nn.Module):
    """Transformer block over the slots: self-attention, then an MLP per slot, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.looks = Dense(width, 3 * width)  # query, key and value
        self.mix = Dense(width, width)
        self.layers = nn.Sequential(nn.LayerNorm(width), *mlp((width, 2 * width), _ACTIVATION), Dense(2 * width, width))

    def forward(self, slots: Tensor, exists: Tensor) -> Tensor:
        """([B, S, D], [B, S]) -> [B, S, D]."""
        count, places, _ = slots.shape
        joint = apply_to_rows(self.looks, self.norm(slots)).view(count, places, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = joint.unbind(0)  # [B, heads, S, D / heads]
        # Attend to existing slots only. In a host without slots, padding attends to padding, so that no row is NaN.
        visible = exists | ~exists.any(1, keepdim=True)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None, None, :])
        slots = slots + apply_to_rows(self.mix, mixed.transpose(1, 2).flatten(2))
        return slots + apply_to_rows(self.layers, slots)


class SlotEncoder(nn.Module):
    """Encodes an observation as [B, E + bypass]: the summary for the core, then the part that bypasses it.

    The bypass holds the summary again, all encoded slots and all encoded candidates.
    """

    def __init__(self, config: SlotNetworkConfig, *, slots: int, blueprints: int) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.output_size = config.summary_width
        self.bypass_size = config.summary_width + slots * (width + blueprints * config.candidate_width)
        self.host = mlp((HOST.width, width), _ACTIVATION)
        self.candidate = mlp((CANDIDATE.width, 2 * config.candidate_width, config.candidate_width), _ACTIVATION)
        self.slot = mlp((SLOT.width + 2 * config.candidate_width + width, width, width), _ACTIVATION)
        self.attention = nn.ModuleList(SlotAttention(width, config.attention_heads) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(width)
        self.summary = mlp((3 * width, config.summary_width), _ACTIVATION)

    def forward(self, obs: Obs) -> Tensor:
        exists = obs["slots"][..., SLOT.column("exists")] > 0.5  # [B, S]
        host = self.host(obs["host"])  # [B, D]
        candidates = apply_to_rows(self.candidate, obs["candidates"])  # [B, S, K, C]
        options = pool(candidates, obs["candidates"][..., CANDIDATE.column("exists")] > 0.5)  # [B, S, 2C]
        host_of_slots = host.unsqueeze(1).expand(-1, exists.shape[1], -1)  # [B, S, D]
        slots = apply_to_rows(self.slot, torch.cat((obs["slots"], options, host_of_slots), dim=-1))  # [B, S, D]
        for block in self.attention:
            slots = block(slots, exists)
        slots = self.norm(slots)
        summary = self.summary(torch.cat((host, pool(slots, exists)), dim=1))  # [B, E]
        return torch.cat((summary, summary, slots.flatten(1), candidates.flatten(1)), dim=1)


class PointerActor(nn.Module):
    """Computes the logits of all heads from [B, H + E + S·D + S·K·C]: core output, summary, slots, candidates."""

    # Layers that serve some heads only. Without `retarget` among the ops, alpha never matters, and its layer has no gradient.
    heads_of_layers: ClassVar[dict[str, tuple[str, ...]]] = {
        "wanted_slots": ("slot",),
        "context.0": ("blueprint", "alpha"),
        "wanted_candidates": ("blueprint",),
        "alpha": ("alpha",),
    }

    def __init__(self, config: SlotNetworkConfig, *, core_width: int, slots: int, blueprints: int) -> None:
        super().__init__()
        width, candidate_width = config.width, config.candidate_width
        front = core_width + config.summary_width
        self.sizes = [front, slots * width, slots * blueprints * candidate_width]
        self.slots, self.blueprints = slots, blueprints
        self.trunk = mlp((front, width), _ACTIVATION)
        self.op = Dense(width, len(Op))
        self.wanted_slots = Dense(width, len(Op) * width)  # a query for each op
        self.context = mlp((2 * width, width), _ACTIVATION)
        self.wanted_candidates = Dense(width, candidate_width)  # a query for each slot
        self.alpha = Dense(width, len(ALPHA_TARGETS))

    def forward(self, features: Tensor) -> Tensor:
        count = len(features)
        front, slots, candidates = features.split_with_sizes(self.sizes, dim=1)
        slots = slots.reshape(count, self.slots, -1)  # [B, S, D]
        candidates = candidates.reshape(count, self.slots, self.blueprints, -1)  # [B, S, K, C]

        # Queries for slots come from core and summary; queries for candidates and the logits of alpha also see their slot.
        trunk = self.trunk(front)  # [B, D]
        queries = self.wanted_slots(trunk).view(count, len(Op), -1)  # [B, ops, D]
        slot_logits = pointer_logits(queries.unsqueeze(2), slots.unsqueeze(1))  # [B, ops, S]
        context = apply_to_rows(self.context, torch.cat((trunk.unsqueeze(1).expand_as(slots), slots), dim=2))  # [B, S, D]
        candidate_logits = pointer_logits(apply_to_rows(self.wanted_candidates, context).unsqueeze(2), candidates)  # [B, S, K]
        alpha_logits = apply_to_rows(self.alpha, context)  # [B, S, alphas]
        return torch.cat([part.flatten(1) for part in (self.op(trunk), slot_logits, candidate_logits, alpha_logits)], dim=1)


class FirstColumns(nn.Module):
    """Returns the first `width` columns: core output and summary, the input of the critic, which does not need single slots."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, features: Tensor) -> Tensor:
        return features[:, : self.width]


class ControllerNetworkParts(NamedTuple):
    """Custom parts of a controller's policy: `PPO(env, config, parts.encoder, actor=parts.actor, critic=parts.critic)`."""

    encoder: SlotEncoder
    actor: PointerActor
    critic: nn.Sequential


def make_parts(
    config: SlotNetworkConfig, memory: NetworkConfig, *, slots: int, blueprints: int, generator: torch.Generator
) -> ControllerNetworkParts:
    """Build encoder, actor and critic for at most `slots` slots and `blueprints` blueprints. The weights do not depend on these numbers."""
    # torch's layers draw initial weights from the global generator. Fork it, so that it stays as it is; `initialize` overwrites them.
    with torch.random.fork_rng(devices=[]):
        encoder = SlotEncoder(config, slots=slots, blueprints=blueprints)
        core_width = encoder.output_size if memory.core == "none" else memory.hidden_size
        actor = PointerActor(config, core_width=core_width, slots=slots, blueprints=blueprints)
        front = actor.sizes[0]
        critic = nn.Sequential(FirstColumns(front), *mlp((front, config.width), _ACTIVATION), Dense(config.width, 1))
    # Start with a nearly uniform policy, except for the biases of the config.
    for part in (encoder, actor, critic):
        initialize(part, generator)
    for layer in (actor.op, actor.wanted_slots, actor.wanted_candidates, actor.alpha):
        initialize(layer, generator, gain=_NEARLY_UNIFORM)
    with torch.no_grad():
        for op, bias in ((Op.WAIT, config.wait_bias), (Op.FOSSILIZE, config.fossilize_bias), (Op.PRUNE, config.prune_bias)):
            actor.op.bias[op] = bias
    initialize(critic[-1], generator, gain=1.0)
    return ControllerNetworkParts(encoder, actor, critic)


def make_policy(
    config: SlotNetworkConfig,
    memory: NetworkConfig,
    *,
    slots: int,
    blueprints: int,
    generator: torch.Generator,
    normalize_values: bool = True,
) -> Policy:
    """Build a new policy for at most `slots` slots and `blueprints` blueprints, in the same way as training does."""
    parts = make_parts(config, memory, slots=slots, blueprints=blueprints, generator=generator)
    return Policy(
        *spec(slots, blueprints),
        memory,
        generator=generator,
        encoder=parts.encoder,
        actor=parts.actor,
        critic=parts.critic,
        normalize_observations=False,
        normalize_values=normalize_values,
    )
