"""The policy of a controller: recurrent, with a head for each part of a step, over sets of targets and options of any size.

Every option and every target becomes a vector. A target also sees what is best and what is usual among its options, and the host sees the
same of its targets. The host's vector is the input of the core, which remembers the steps and turns before. Heads:

    op           by the core and the host
    target       a pointer: a score for every target and operation, by the target, the core and the host
    blueprint    a pointer: a score for every option of every target, by the option, its target, the core and the host

The mask of a target depends on the operation and that of a blueprint on the target, so no step is drawn that is not legal. The target
matters for all operations but wait and look, the blueprint only where something germinates. Weights do not depend on the numbers of targets
and options; `sizes` is what a batch is padded to.

Shapes: N = turns, T = targets, B = options of a target, W = width of a vector, P = operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.controller.config import StepNetworkConfig
from esper.controller.tokens import HOST_WIDTH, OPTION, TARGET, Observation, observe, stacked
from esper.controller.turn import OPS, Step, Turn, steps_of
from esper.growth.config import GrowthConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.lifecycle.stages import Decision, GrowthState
from esper.rl.config import NetworkConfig
from esper.rl.networks import Dense, initialize
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.vecenv import ActionSpec, Discrete, Masks, Obs, ObservationSpec, Relevance, TensorSpec

_LOWEST = -1e4  # less than any vector holds


class Sizes(NamedTuple):
    """Numbers of targets and of options of a target that a batch is padded to."""

    targets: int
    options: int


def spec(sizes: Sizes) -> tuple[ObservationSpec, ActionSpec]:
    """Return the specifications of observations and actions."""
    observation = {
        "host": TensorSpec((HOST_WIDTH,)),
        "targets": TensorSpec((sizes.targets, TARGET.width)),
        "options": TensorSpec((sizes.targets, sizes.options, OPTION.width)),
    }
    heads = (
        Discrete("op", len(OPS)),
        Discrete("target", sizes.targets, parent="op", has_own_logits=True),
        Discrete("blueprint", sizes.options, parent="target", has_own_logits=True),
    )
    relevance = (
        Relevance("target", given="op", choices=tuple(range(2, len(OPS)))),
        Relevance("blueprint", given="op", choices=(OPS.index("germinate"),)),
    )
    return observation, ActionSpec(heads, relevance)


def batch(some: Sequence[Observation], sizes: Sizes) -> tuple[Obs, Masks]:
    """Return the observations and masks of several turns as tensors, padded to these sizes."""
    parts = {name: torch.from_numpy(part) for name, part in stacked(some, *sizes).items()}
    observed = {name: parts[name] for name in ("host", "targets", "options")}
    return observed, {"op": parts["may"], "target": parts["where"], "blueprint": parts["which"]}


class StepEncoder(nn.Module):
    """Encodes an observation as [N, W + bypass]: the host for the core; again the host, and all targets and options."""

    def __init__(self, config: StepNetworkConfig, sizes: Sizes) -> None:
        super().__init__()
        self.config, self.sizes, width = config, sizes, config.width
        self.output_size = width
        self.bypass_size = width * (1 + sizes.targets + sizes.targets * sizes.options)
        self.option = _two_layers(OPTION.width, width)
        self.target = _two_layers(TARGET.width + 2 * width, width)
        self.host = _two_layers(HOST_WIDTH + 2 * width, width)

    def forward(self, obs: Obs) -> Tensor:
        is_option, is_target = obs["options"][..., OPTION.column("is_option")] > 0.5, (obs["targets"] != 0).any(-1)
        options = obs["options"].new_zeros(*is_option.shape, self.config.width)
        options[is_option] = self.option(obs["options"][is_option])
        seen = torch.cat((obs["targets"], _pooled(options, is_option)), dim=-1)
        targets = seen.new_zeros(*is_target.shape, self.config.width)
        targets[is_target] = self.target(seen[is_target])
        host: Tensor = self.host(torch.cat((obs["host"], _pooled(targets, is_target)), dim=-1))
        return torch.cat((host, host, targets.flatten(1), options.flatten(1)), dim=1)


class StepActor(nn.Module):
    """Computes the logits of all heads [N, P + P·T + T·B]."""

    def __init__(self, config: StepNetworkConfig, sizes: Sizes, *, core_width: int) -> None:
        super().__init__()
        self.sizes, self.front, width = sizes, core_width + config.width, config.width
        self.op = nn.Sequential(Dense(self.front, width), nn.SiLU(), Dense(width, len(OPS)))
        self.front_to_target, self.target = nn.Linear(self.front, width), nn.Linear(width, width, bias=False)
        self.target_scores = nn.Linear(width, len(OPS))
        self.front_to_option, self.option = nn.Linear(self.front, width), nn.Linear(width, width, bias=False)
        self.target_to_option, self.option_scores = nn.Linear(width, width, bias=False), nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        count, width = len(features), self.option.in_features
        front, rest = features[:, : self.front], features[:, self.front :]
        targets = rest[:, : width * self.sizes.targets].view(count, self.sizes.targets, width)
        options = rest[:, width * self.sizes.targets :].view(count, self.sizes.targets, self.sizes.options, width)
        of_targets = self.target(targets) + self.front_to_target(front).unsqueeze(1)
        scores = self.target_scores(nn.functional.silu(of_targets)).transpose(1, 2)  # [N, P, T]
        beside = self.target_to_option(targets) + self.front_to_option(front).unsqueeze(1)
        of_options = self.option_scores(nn.functional.silu(self.option(options) + beside.unsqueeze(2)))  # [N, T, B, 1]
        return torch.cat((self.op(front), scores.flatten(1), of_options.flatten(1)), dim=1)


class _Front(nn.Module):
    """Returns core output and host, without targets and options."""

    def __init__(self, front: int) -> None:
        super().__init__()
        self.front = front

    def forward(self, features: Tensor) -> Tensor:
        return features[:, : self.front]


def make_policy(
    config: StepNetworkConfig,
    memory: NetworkConfig,
    sizes: Sizes,
    *,
    generator: torch.Generator,
    weights: Mapping[str, Tensor] | None = None,
) -> Policy:
    """Build a policy, with new weights or with those of one for other sizes."""
    with torch.random.fork_rng(devices=[]):  # torch's layers draw from the global generator; `initialize` draws again
        encoder = StepEncoder(config, sizes)
        actor = StepActor(config, sizes, core_width=config.width if memory.core == "none" else memory.hidden_size)
        critic = nn.Sequential(_Front(actor.front), Dense(actor.front, config.width), nn.SiLU(), Dense(config.width, 1))
    for part in (encoder, actor, critic):
        initialize(part, generator, gain=1.0)
    policy = Policy(
        *spec(sizes),
        memory,
        generator=generator,
        encoder=encoder,
        actor=actor,
        critic=critic,
        normalize_observations=False,
        normalize_values=False,
    )
    if weights is not None:
        policy.load_state_dict(weights)
    return policy


def sizes_for(policy: Policy) -> Sizes:
    """Return the sizes that a policy was built for."""
    assert isinstance(policy.encoder, StepEncoder)
    return policy.encoder.sizes


def _two_layers(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())


def _pooled(vectors: Tensor, exists: Tensor) -> Tensor:
    """Return the largest and the mean numbers of the vectors [..., S, W] that exist [..., S], as [..., 2 W]; 0 where there are none."""
    there = exists.unsqueeze(-1)
    largest = vectors.masked_fill(~there, _LOWEST).amax(-2)
    largest = torch.where(exists.any(-1, keepdim=True), largest, 0.0)
    return torch.cat((largest, vectors.sum(-2) / there.sum(-2).clamp(min=1)), dim=-1)


# Deciding


class StepController:
    """Decides by a policy, which sees what the heuristic would do.

    With a `seed` it draws its steps; otherwise it takes the likeliest ones.
    """

    name = "policy"

    def __init__(self, policy: Policy, config: GrowthConfig, *, seed: int | None = None) -> None:
        self.policy, self.heuristic = policy.eval(), Heuristic(config)
        self._streams = None if seed is None else Streams(seed)
        self._memory: Tensor | None = None  # [1, size of the recurrent state]
        self._looked_at: int | None = None

    def decide(self, state: GrowthState) -> Decision:
        self.heuristic.lifecycle = state.lifecycle  # that of the run
        advice = self.heuristic.decide(state)
        turn = Turn(state, steps_of(advice, state), self._looked_at)
        others = list[str]()
        while not turn.is_over:
            step = self._step(turn)
            if step != turn.advised:
                others.append(f"{step.in_words()} instead of {turn.advised.in_words()}")
            turn = turn.after(step)
        if turn.looks:
            self._looked_at = state.epoch
        if not others:
            return replace(advice, not_probed=frozenset())
        return turn.decision("; ".join(others))

    def _step(self, turn: Turn) -> Step:
        seen = observe(turn)
        self._make_room(*seen.which.shape)
        obs, masks = batch([seen], sizes_for(self.policy))
        generator = None if self._streams is None else self._streams.torch("steps")
        actions, self._memory = self.policy.act(obs, self._memory, masks=masks, generator=generator)
        return seen.step_of(*(int(actions[head]) for head in ("op", "target", "blueprint")))

    def _make_room(self, targets: int, options: int) -> None:
        """Build the policy for more targets or options, if it has too few, with the same weights."""
        sizes = sizes_for(self.policy)
        if targets > sizes.targets or options > sizes.options:
            assert isinstance(self.policy.encoder, StepEncoder)
            larger = Sizes(max(targets, sizes.targets), max(options, sizes.options))
            given = self.policy.encoder.config, self.policy.network, larger
            self.policy = make_policy(*given, generator=torch.Generator(), weights=self.policy.state_dict()).eval()

    def state_dict(self) -> dict[str, Any]:
        return {
            "heuristic": self.heuristic.state_dict(),
            "looked_at": self._looked_at,
            "memory": None if self._memory is None else self._memory.clone(),
            "streams": None if self._streams is None else self._streams.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heuristic.load_state_dict(state["heuristic"])
        self._looked_at, self._memory = state["looked_at"], state["memory"]
        if self._streams is not None:
            self._streams.load_state_dict(state["streams"])
