"""The policy of a controller: recurrent, with a head for each part of a step, over sets of targets and options of any size.

Every option and every target becomes a vector. A target also sees what is best and what is usual among its options, and the host sees the
same of its targets. The host's vector is the input of the core, which remembers the steps and turns before. Heads:

    op           by the core and the host
    target       a pointer: a score for every target and operation, by the target, the core and the host
    blueprint    a pointer: a score for every option of every target, by the option, its target, the core and the host

The mask of a target depends on the operation and that of a blueprint on the target, so no step is drawn that is not legal. The target
matters for all operations but wait and look, the blueprint only where something germinates. Weights do not depend on the numbers of targets
and options; `sizes` is what a batch is padded to.

A policy begins as another controller, mostly the heuristic: it sees what that one advises, and the advised choice of every head has a head
start, its trust, which is learned like all other weights. The rest of its logits is near 0 at first. Where a host is far from all that it
was trained with, it does as it is advised.

Shapes: N = turns, T = targets, B = options of a target, W = width of a vector, P = operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.controller.config import StepNetworkConfig
from esper.controller.features import ADVICE, HOST_WIDTH, OPTION, TARGET, Observation, observe, stacked
from esper.controller.turn import OPS, WAIT, Step, Turn, steps_of
from esper.growth.lifecycle.stages import CompleteController, Decision, GrowthState
from esper.parallel import Group
from esper.rl.config import NetworkConfig
from esper.rl.networks import Dense, initialize
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.vecenv import ActionSpec, Discrete, Masks, Obs, ObservationSpec, Relevance, TensorSpec

_LOWEST = -1e4  # less than any vector holds
_SMALL = 0.01  # gain of the last layers


class Sizes(NamedTuple):
    """Numbers of targets and of options of a target that a batch is padded to."""

    targets: int
    options: int


FAR = 0.99  # share of the hosts in training that are not far
LEAST_DEVIATION = 0.05  # of a feature that hardly varied
LATEST = 0.1  # weight of the latest round in the distance of nearly all hosts
SIZES = Sizes(targets=24, options=20)  # that policies are trained with


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
    """Encodes an observation as [N, W + bypass]: the host for the core; again the host, all targets and options, and what is advised."""

    sums: Tensor
    limit: Tensor

    def __init__(self, config: StepNetworkConfig, sizes: Sizes) -> None:
        super().__init__()
        self.config, self.sizes, width = config, sizes, config.width
        self.output_size = width
        places = sizes.targets + sizes.targets * sizes.options
        self.bypass_size = width * (1 + places) + len(OPS) + places
        self.option = _two_layers(OPTION.width, width)
        self.target = _two_layers(TARGET.width + 2 * width, width)
        self.host = _two_layers(HOST_WIDTH + 2 * width, width)
        # Hosts seen in training: their number, sum and sum of squares, and the distance beyond which a host is far.
        self.register_buffer("sums", torch.zeros(3, HOST_WIDTH, dtype=torch.float64))
        self.register_buffer("limit", torch.tensor(math.inf))

    @torch.no_grad()
    def note(self, hosts: Tensor, group: Group) -> None:
        """Note the hosts [M, H] of a round of all ranks: the moments of all so far, and how far nearly all of this round are from them."""
        self.sums += group.sum_(torch.stack((torch.ones_like(hosts), hosts, hosts.square())).double().sum(1))
        own = torch.stack((self.distance(hosts).quantile(FAR), torch.ones(()))) if len(hosts) else torch.zeros(2)
        limit, ranks = group.sum_(own)
        if ranks:
            latest = 1.0 if self.limit.isinf() else LATEST
            self.limit.copy_((1 - latest) * self.limit.nan_to_num(posinf=0.0) + latest * limit / ranks)

    def distance(self, hosts: Tensor) -> Tensor:
        """Return how far hosts [M, H] are from the mean of those in training: the mean square, in standard deviations [M]."""
        count, total, squares = self.sums
        mean = total / count.clamp(min=1)
        deviation = (squares / count.clamp(min=1) - mean.square()).clamp(min=LEAST_DEVIATION**2).sqrt()
        away: Tensor = ((hosts - mean) / deviation).square().mean(1)
        return away.float()

    def forward(self, obs: Obs) -> Tensor:
        is_option, is_target = obs["options"][..., OPTION.column("is_option")] > 0.5, (obs["targets"] != 0).any(-1)
        options = obs["options"].new_zeros(*is_option.shape, self.config.width)
        options[is_option] = self.option(obs["options"][is_option])
        seen = torch.cat((obs["targets"], _pooled(options, is_option)), dim=-1)
        targets = seen.new_zeros(*is_target.shape, self.config.width)
        targets[is_target] = self.target(seen[is_target])
        host: Tensor = self.host(torch.cat((obs["host"], _pooled(targets, is_target)), dim=-1))
        advised = (obs[part][..., columns].flatten(1) for part, columns in ADVICE.items())
        return torch.cat((host, host, targets.flatten(1), options.flatten(1), *advised), dim=1)


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
        self.trust = nn.Parameter(torch.full((3,), config.trust))  # in the advised operation, target and blueprint
        self.heads_of_layers = {  # heads that a layer affects; other layers affect all
            **dict.fromkeys(("front_to_target", "target", "target_scores"), ("target",)),
            **dict.fromkeys(("front_to_option", "option", "target_to_option", "option_scores"), ("blueprint",)),
        }

    def begin(self, generator: torch.Generator) -> None:
        """Draw first weights. All logits are small, but for the trust in what is advised."""
        initialize(self, generator, gain=1.0)
        for last in (self.op[-1], self.target_scores, self.option_scores):
            initialize(last, generator, gain=_SMALL)

    def forward(self, features: Tensor) -> Tensor:
        (targets_in, options_in), width = self.sizes, self.option.in_features
        widths = [self.front, width * targets_in, width * targets_in * options_in, len(OPS), targets_in, targets_in * options_in]
        front, *sets, op_advised, target_advised, option_advised = features.split_with_sizes(widths, dim=1)
        targets, options = sets[0].view(-1, targets_in, width), sets[1].view(-1, targets_in, options_in, width)
        of_targets = self.target(targets) + self.front_to_target(front).unsqueeze(1)
        scores = self.target_scores(nn.functional.silu(of_targets)).transpose(1, 2)  # [N, P, T]
        beside = self.target_to_option(targets) + self.front_to_option(front).unsqueeze(1)
        of_options = self.option_scores(nn.functional.silu(self.option(options) + beside.unsqueeze(2)))  # [N, T, B, 1]
        # What is advised counts for the pointers whatever was chosen before: a target that is advised for one operation is none for others.
        op = self.op(front) + self.trust[0] * op_advised
        scores = scores + self.trust[1] * target_advised.unsqueeze(1)
        return torch.cat((op, scores.flatten(1), of_options.flatten(1) + self.trust[2] * option_advised), dim=1)


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
    for part in (encoder, critic):
        initialize(part, generator, gain=1.0)
    initialize(critic[-1], generator, gain=_SMALL)
    actor.begin(generator)
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


class Taken(NamedTuple):
    """A step in a life: what was seen, and the numbers of operation, target and blueprint."""

    seen: Observation
    numbers: tuple[int, int, int]


class StepController:
    """Decides by a policy, which sees what its `advisor` would do: the heuristic, or what branches have made of it (`Improved`).

    With a `seed` it draws its steps; otherwise it takes the likeliest ones. A step is only asked for where there is a choice. To learn from
    a life, `life` keeps its first `records` steps; from then on, and in turns that are larger than the policy was built for, such a life is
    decided as it is advised. A controller that records nothing builds its policy again for more targets and options, with the same weights.
    """

    name = "policy"

    def __init__(self, policy: Policy, advisor: CompleteController, *, seed: int | None = None, records: int = 0) -> None:
        self.policy, self.advisor = policy, advisor
        self._streams = None if seed is None else Streams(seed)
        self._memory: Tensor | None = None  # [1, size of the recurrent state]
        self._looked_at: int | None = None
        self.records, self.life = records, list[Taken]()
        self.others = list[str]()  # steps that were not the advised ones, in words
        self.turns = self.far = 0  # turns with a choice, and those of them in which the host was far from all that was learned from

    def decide(self, state: GrowthState) -> Decision:
        advice, before = self.advisor.decide(state), len(self.others)
        turn, was_far = Turn(state, steps_of(advice, state), self._looked_at), self.far
        self.turns += len(turn.legal()) > 1
        while not turn.is_over:
            step = self._step(turn) if len(turn.legal()) > 1 else WAIT
            if step != turn.advised:
                self.others.append(f"{step.in_words()} instead of {turn.advised.in_words()}")
            turn = turn.after(step)
        self.far = min(self.far, was_far + 1)  # a turn counts once
        others = self.others[before:]
        decision = turn.decision("; ".join(others)) if others else replace(advice, not_probed=frozenset())
        if decision.probe:
            self._looked_at = state.epoch
        return decision

    def _step(self, turn: Turn) -> Step:
        """Return the next step of a turn with a choice."""
        seen, encoder = observe(turn), self.policy.encoder
        assert isinstance(encoder, StepEncoder)
        sizes, (targets, options) = sizes_for(self.policy), seen.which.shape
        if self.records and (targets > sizes.targets or options > sizes.options or len(self.life) == self.records):
            return turn.advised
        if not self.records and float(encoder.distance(torch.from_numpy(seen.host)[None])) > float(encoder.limit):
            self.far += 1
            return turn.advised
        if targets > sizes.targets or options > sizes.options:
            larger = Sizes(max(targets, sizes.targets), max(options, sizes.options))
            given = encoder.config, self.policy.network, larger
            self.policy = make_policy(*given, generator=torch.Generator(), weights=self.policy.state_dict()).eval()
        obs, masks = batch([seen], sizes_for(self.policy))
        generator = None if self._streams is None else self._streams.torch("steps")
        actions, self._memory = self.policy.act(obs, self._memory, masks=masks, generator=generator)
        numbers = int(actions["op"]), int(actions["target"]), int(actions["blueprint"])
        if self.records:
            self.life.append(Taken(seen, numbers))
        return seen.step_of(*numbers)

    def state_dict(self) -> dict[str, Any]:
        return {
            "advisor": self.advisor.state_dict(),
            "looked_at": self._looked_at,
            "memory": None if self._memory is None else self._memory.clone(),
            "streams": None if self._streams is None else self._streams.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.advisor.load_state_dict(state["advisor"])
        self._looked_at, self._memory = state["looked_at"], state["memory"]
        if self._memory is not None:
            self.policy.core.check_state(self._memory, 1)
        if self._streams is not None:
            self._streams.load_state_dict(state["streams"])
