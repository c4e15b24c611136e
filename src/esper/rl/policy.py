"""The policy: normaliser, encoder, recurrent core, actor and critic.

An observation is normalised, encoded into one vector, passed through the core, which has the memory, and read by actor and critic. Acting
uses `step` and `decide`; learning uses `encode`, the core's `sequence` and `heads`. `act` and `predict` are for users.

Shapes: B = any number of rows, N = environments, I = core input width, S = state width, H = core output width, P = distribution parameters,
J = heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from esper.rl.checkpoints import POLICY, read_policy
from esper.rl.config import NetworkConfig
from esper.rl.distributions import ActionDistribution
from esper.rl.networks import Dense, Encoder, initialize, mlp
from esper.rl.normalize import ObservationNormalizer, ValueNormalizer
from esper.rl.recurrent import GRU, LSTM, ActorCriticCores, Bypass, Core, NoMemory
from esper.runs import load_module, plain_names, write_state
from esper.vecenv import Actions, ActionSpec, Masks, Obs, ObservationSpec
from esper.vecenv.info_masks import KEY as MASK_KEY, split_masks
from esper.vecenv.spaces import Spaces, action_part_for, first_of, observation_parts, read_observation, spaces_of_specs

_ACTOR_GAIN = 0.01  # small, so that the first actions are nearly uniform
_CRITIC_GAIN = 1.0
_HINT = ". Use predict for single observations and other types"


@runtime_checkable
class Sized(Protocol):
    """A custom encoder: a module from observations to [B, output_size], or with a `bypass_size` to [B, output_size + bypass_size]."""

    output_size: int


class Policy(nn.Module):
    """A recurrent policy. It acts on raw observations and holds everything that acting needs.

    Custom parts replace the built-in ones and keep their own initialisation:
    - `encoder` takes the normalised observation (a tensor if its only part is "obs", else a dictionary) and has an attribute `output_size`.
      With a `bypass_size` it returns that many further numbers, which go around the core: actor and critic see them after the core's
      output.
    - `actor` maps the core's output [B, core width + bypass_size] to the logits of the discrete heads and the means of the continuous
      heads, [B, `distribution.num_outputs`].
    - `critic` is an `nn.Sequential` on the same input that ends in an `nn.Linear` with one output.
    """

    def __init__(
        self,
        observation_spec: ObservationSpec,
        action_spec: ActionSpec,
        network: NetworkConfig,
        *,
        generator: torch.Generator,
        device: torch.device | None = None,
        encoder: nn.Module | None = None,
        actor: nn.Module | None = None,
        critic: nn.Sequential | None = None,
        normalize_observations: bool = True,
        normalize_values: bool = True,
        observation_momentum: float | None = None,
        spaces: Spaces | None = None,
    ) -> None:
        super().__init__()
        _check_parts(network, encoder, critic)
        self.observation_spec, self.action_spec, self.network = observation_spec, action_spec, network
        self.spaces = spaces or spaces_of_specs(observation_spec, action_spec)  # spaces of the observations and actions of `predict`
        self.distribution = ActionDistribution(action_spec)
        self.takes_tensor = encoder is not None and set(observation_spec) == {"obs"}
        # torch's layers draw their first weights from the global generator. Fork it, so that the caller's random numbers do not change;
        # `_initialize` then replaces the weights.
        with torch.random.fork_rng(devices=[]):
            device = device or torch.device("cpu")
            self.normalizer = (
                ObservationNormalizer(observation_spec, momentum=observation_momentum, device=device, with_bytes=encoder is None)
                if normalize_observations
                else None
            )
            self.value_normalizer = ValueNormalizer(device) if normalize_values else None
            built = encoder or Encoder(observation_spec, network.encoder_sizes, network.activation, network.image_encoder)
            assert isinstance(built, Sized)
            self.encoder: nn.Module = built
            self.core = _core(network, int(built.output_size), _bypass_size(encoder))
            self.norm_before = nn.LayerNorm(int(built.output_size)) if network.norm_before else nn.Identity()
            self.norm_after = nn.LayerNorm(self.core.output_size) if network.norm_after else nn.Identity()
            # Input width of actor and of critic: each sees all features, or the half of its own core.
            self.width = self.core.output_size // (2 if isinstance(self.core, ActorCriticCores) else 1)
            self.actor: nn.Module = self._head(self.distribution.num_outputs) if actor is None else actor
            self.critic = self._head(1) if critic is None else critic
        # One log standard deviation per continuous number. A head without bounds starts with a spread of at most 1.
        bounds = [head.is_bounded for head in action_spec.continuous for _ in range(head.size)]
        log_std = [network.log_std if is_bounded else min(network.log_std, 0.0) for is_bounded in bounds]
        self.log_std = nn.Parameter(torch.tensor(log_std, dtype=torch.get_default_dtype()))
        self._initialize(generator, given=(encoder, actor, critic))
        self.to(device)

    def _head(self, outputs: int) -> nn.Sequential:
        """Return a built-in actor or critic."""
        widths = [self.width, *self.network.head_sizes]
        return nn.Sequential(*mlp(widths, self.network.activation), Dense(widths[-1], outputs))

    def _initialize(self, generator: torch.Generator, *, given: tuple[nn.Module | None, ...]) -> None:
        """Draw the first weights of all parts that are not `given` by the user."""
        if self.encoder not in given:
            initialize(self.encoder, generator)
        for core in self.core.modules():
            if isinstance(core, LSTM):
                core.initialize(generator, forget_bias=self.network.forget_bias)
            elif isinstance(core, GRU):
                core.initialize(generator)
        for head, gain in ((self.actor, _ACTOR_GAIN), (self.critic, _CRITIC_GAIN)):
            if head not in given:
                assert isinstance(head, nn.Sequential)
                initialize(head[:-1], generator)
                initialize(head[-1], generator, gain=gain)

    @property
    def device(self) -> torch.device:
        return self.log_std.device

    @property
    def last_actor_layer(self) -> nn.Linear | None:
        """The last layer of the actor, whose rows belong to the heads; None if a custom actor does not end in a linear layer."""
        layer = self.actor[-1] if isinstance(self.actor, nn.Sequential) else None
        return layer if isinstance(layer, nn.Linear) else None

    @property
    def last_critic_layer(self) -> nn.Linear:
        layer = self.critic[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    def initial_state(self, num_envs: int) -> Tensor:
        return self.core.initial_state(num_envs, device=self.device)

    def normalize(self, obs: Obs) -> Obs:
        return obs if self.normalizer is None else self.normalizer(obs)

    def encode(self, obs: Obs) -> Tensor:
        """Return the core's input [B, I] for normalised observations."""
        features: Tensor = self.norm_before(self.encoder(obs["obs"] if self.takes_tensor else obs))
        return features

    def heads(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distribution parameters [B, P] and the critic's output [B], in its own units, for the core's output [B, H]."""
        features = self.norm_after(output)
        return self.decide(features), self.critic_output(features)

    def step(self, obs: Obs, state: Tensor) -> tuple[Tensor, Tensor]:
        """Take one step from normalised observations. Return the features that the heads see [N, H], and the next state [N, S]."""
        output, state = self.core.step(self.encode(obs), state)
        return self.norm_after(output), state

    def decide(self, features: Tensor) -> Tensor:
        """Return the parameters of the action distribution [B, P] for the features [B, H] of `step`."""
        outputs: Tensor = self.actor(self._share(features, slice(None, self.width)))
        if outputs.shape[-1] != self.distribution.num_outputs:
            raise ValueError(
                f"the actor {type(self.actor).__name__} must return {self.distribution.num_outputs} numbers, the logits of all discrete "
                f"heads and the means of all continuous ones; it returns {outputs.shape[-1]}"
            )
        return self.with_spread(outputs)

    def _share(self, features: Tensor, part: slice) -> Tensor:
        """Return the part of the features [B, H] that actor or critic sees."""
        # A slice of all columns would cost a copy in the backward pass.
        return features if features.shape[-1] == self.width else features[..., part]

    def with_spread(self, outputs: Tensor) -> Tensor:
        """Return the distribution parameters [B, P]: the actor's outputs and the log spreads, which do not depend on the observation."""
        if not self.distribution.num_continuous:
            return outputs
        return torch.cat((outputs, self.log_std.to(outputs.dtype).expand(*outputs.shape[:-1], -1)), dim=-1)

    def critic_output(self, features: Tensor) -> Tensor:
        """Return the critic's output [B], in its own units."""
        predicted: Tensor = self.critic(self._share(features, slice(-self.width, None))).squeeze(-1)
        return predicted

    def value(self, features: Tensor) -> Tensor:
        """Return the expected return [B], in units of the reward."""
        predicted = self.critic_output(features)
        return predicted if self.value_normalizer is None else self.value_normalizer.restore(predicted)

    def act(
        self,
        obs: Obs | Tensor,
        state: Tensor | None = None,
        *,
        masks: Masks | None = None,
        starts: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Actions, Tensor]:
        """Return actions for raw observations [N, ...], and the state to pass with the next ones.

        An episode begins where `starts` [N] is true, and everywhere without a state. With a generator the actions are drawn at random,
        without one they are the most likely ones. Observations and actions are tensors, as in the environments of `esper.vecenv`; `predict`
        takes observations of Gymnasium environments.
        """
        named = {"obs": obs} if isinstance(obs, Tensor) else obs
        rows = self._check_obs(named)
        with torch.inference_mode():
            if state is None:
                state = self.initial_state(rows)
            self.core.check_state(state, rows)
            if starts is not None:
                state = state.masked_fill(starts.unsqueeze(-1), 0.0)
            features, state = self.step(self.normalize(named), state)
            noise = None if generator is None else self.distribution.noise((rows,), generator)
            choice = self.distribution.choose(self.decide(features), masks or {}, noise)
            if masks:
                raise_on_empty_rows(self.distribution, self.distribution.empty_rows(masks, choice))
            actions = self.distribution.actions(choice)
        # Copy outside inference mode: the caller may write to the results, which is forbidden for tensors made in inference mode.
        return {head: action.clone() for head, action in actions.items()}, state.clone()

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Any, Any]:
        """Return actions in the form the environment takes, for one observation or a batch, and the memory to pass as the next `state`.

        Observations may be NumPy arrays, tensors, numbers, dictionaries and tuples of any type; the results are NumPy. The memory is an
        array [N, S], or None for a policy without memory; it is emptied where `episode_start` [N] is true. Actions are drawn at random
        unless `deterministic`, from `generator` or else from torch's global generator. `action_masks` [sizes] or [N, sizes] is true for
        allowed choices; without it, the entry `action_mask` of a Dict observation is used.
        """
        arrays, is_single = read_observation(observation_parts(self.spaces.observation), observation)
        rows = len(next(iter(arrays.values())))
        if action_masks is None and isinstance(observation, Mapping):
            action_masks = observation.get(MASK_KEY)
        masks = {} if action_masks is None else split_masks(self.action_spec, action_masks, rows)
        memory = None if state is None else torch.as_tensor(state, dtype=torch.float32, device=self.device).reshape(rows, -1)
        starts = None
        if episode_start is not None:
            starts = torch.from_numpy(np.broadcast_to(np.asarray(episode_start, dtype=np.bool_), (rows,)).copy()).to(self.device)
        was_training = self.training
        self.eval()
        try:
            actions, after = self.act(
                {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()},
                memory,
                masks={head: mask.to(self.device) for head, mask in masks.items()},
                starts=starts,
                generator=None if deterministic else generator or _global_generator(self.device),
            )
        finally:
            self.train(was_training)
        batch = action_part_for(self.spaces.action, self.action_spec).build({head: action.cpu() for head, action in actions.items()})
        return first_of(batch) if is_single else batch, after.cpu().numpy() if self.core.state_size else None

    def fit_spaces(self, spaces: Spaces) -> None:
        """Raise ValueError if the spaces of an environment do not fit the policy. Use them if the policy was saved without any."""
        action_part_for(spaces.action, self.action_spec)
        specs = {part.name: part.spec for part in observation_parts(spaces.observation)}
        if specs != self.observation_spec:
            raise ValueError(f"the environment observes {specs}, but this policy needs {self.observation_spec}")
        if self.spaces == spaces_of_specs(self.observation_spec, self.action_spec):
            self.spaces = spaces

    def exportable(self) -> nn.Module:
        """Return a module for `torch.export` that computes the most likely actions by head and the next state.

        Its inputs are raw observations, a tensor or a dictionary [N, ...], and the state [N, S]. It shares the weights of the policy, and
        its actions are those of `act` without masks.
        """
        return _ExportableStep(self)

    def save(self, path: Path | str) -> None:
        """Write everything that acting needs into one safetensors file, for `Policy.load`. Custom parts save only their weights."""
        about = {
            "observation_spec": self.observation_spec,
            "action_spec": self.action_spec,
            "spaces": self.spaces,
            "network": self.network,
            "normalize_observations": self.normalizer is not None,
            "normalize_values": self.value_normalizer is not None,
        }
        state = {**msgspec.to_builtins(about), "weights": plain_names(self.state_dict())}
        write_state(path, state, POLICY)

    @staticmethod
    def load(
        path: Path | str,
        *,
        encoder: nn.Module | None = None,
        actor: nn.Module | None = None,
        critic: nn.Sequential | None = None,
        device: torch.device | str = "cpu",
    ) -> Policy:
        """Return the policy of a file of `Policy.save` or `PPO.save`, or the best one of a run folder, ready to act without an environment.

        A policy that was trained with custom parts needs fresh instances of them. Reading the file executes no code.
        """
        return load_policy(path, encoder=encoder, actor=actor, critic=critic, device=device)

    @staticmethod
    def from_state(state: Mapping[str, Any], *, device: torch.device | str = "cpu", **parts: Any) -> Policy:
        """Return the policy whose `save` wrote this state. `parts` are the custom encoder, actor and critic."""
        policy = Policy(
            msgspec.convert(state["observation_spec"], ObservationSpec),
            msgspec.convert(state["action_spec"], ActionSpec),
            msgspec.convert(state["network"], NetworkConfig),
            generator=torch.Generator().manual_seed(0),  # any will do: the saved weights replace the drawn ones
            device=torch.device(device),
            normalize_observations=state["normalize_observations"],
            normalize_values=state["normalize_values"],
            spaces=None if state["spaces"] is None else msgspec.convert(state["spaces"], Spaces),
            **parts,
        )
        load_module(policy, state["weights"])
        return policy.eval()

    def training_state(self) -> dict[str, Any]:
        """Return the state that training needs beyond the weights: the moments of the normalisers."""
        observations = None if self.normalizer is None else self.normalizer.training_state()
        values = None if self.value_normalizer is None else self.value_normalizer.moments.state_dict()
        return {"observations": observations, "values": values}

    def load_training_state(self, state: dict[str, Any]) -> None:
        if self.normalizer is not None:
            self.normalizer.load_training_state(state["observations"])
        if self.value_normalizer is not None:
            self.value_normalizer.moments.load_state_dict(state["values"])

    def _check_obs(self, obs: Obs) -> int:
        """Raise ValueError unless the observations have the parts, shapes and types of this policy. Return the number of rows."""
        if not isinstance(obs, Mapping) or not all(isinstance(value, Tensor) for value in obs.values()):
            raise ValueError(f"act takes tensors [N, ...] by name; got a {type(obs).__name__}. Use predict for anything else")
        if set(obs) != set(self.observation_spec):
            raise ValueError(f"this policy observes {sorted(self.observation_spec)}; got {sorted(obs)}")
        rows = len(next(iter(obs.values())))
        for name, value in obs.items():
            expected = (rows, *self.observation_spec[name].shape)
            if tuple(value.shape) != expected:
                raise ValueError(f"observation {name!r} should have shape {expected}; got {tuple(value.shape)}{_HINT}")
            if value.dtype != self.observation_spec[name].torch_dtype:
                raise ValueError(f"observation {name!r} should be of type {self.observation_spec[name].dtype}; got {value.dtype}{_HINT}")
        return rows


def load_policy(
    source: Path | str,
    which: Literal["best", "latest"] = "best",
    encoder: nn.Module | None = None,
    *,
    actor: nn.Module | None = None,
    critic: nn.Sequential | None = None,
    device: torch.device | str = "cpu",
) -> Policy:
    """Return the policy of a run's folder, of a checkpoint's folder, or of a file of `Policy.save` or `PPO.save`, ready to act.

    `which` only matters for runs. A policy that was trained with custom parts needs fresh instances of them.
    """
    return Policy.from_state(read_policy(source, which), device=device, encoder=encoder, actor=actor, critic=critic)


class _ExportableStep(nn.Module):
    """One deterministic step of a policy as a function of tensors alone."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy.eval()

    def forward(self, obs: Obs | Tensor, state: Tensor) -> tuple[Actions, Tensor]:
        policy = self.policy
        features, state = policy.step(policy.normalize({"obs": obs} if isinstance(obs, Tensor) else obs), state)
        choice = policy.distribution.choose(policy.decide(features), {}, None)
        return policy.distribution.actions(choice), state


def _global_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def raise_on_empty_rows(distribution: ActionDistribution, empty: Tensor) -> None:
    """Raise ValueError if `empty` [N, J] bool is true anywhere, and name the first environment and head that allow no choice."""
    if bool(empty.any()):
        env, head = (int(number) for number in empty.nonzero()[0])
        raise ValueError(f"environment {env} allows nothing for head {distribution.head_names[head]!r}: its mask is all false")


def _check_parts(network: NetworkConfig, encoder: nn.Module | None, critic: nn.Module | None) -> None:
    """Raise ValueError where a custom part cannot work."""
    if encoder is not None and not isinstance(encoder, Sized):
        raise ValueError(f"the encoder {type(encoder).__name__} needs an attribute `output_size`, the width of its output")
    if _bypass_size(encoder) and (network.norm_before or network.norm_after):
        raise ValueError(
            f"the encoder {type(encoder).__name__} has a bypass_size, which norm_before and norm_after do not support; "
            "set both to false and normalise in the encoder"
        )
    if critic is None:
        return
    last = critic[-1] if isinstance(critic, nn.Sequential) and len(critic) else None
    if not isinstance(last, nn.Linear) or last.out_features != 1:
        raise ValueError(
            "a custom critic must be an nn.Sequential that ends in an nn.Linear with 1 output; "
            f"got a {type(critic).__name__} that ends in {last}"
        )


def _bypass_size(encoder: nn.Module | None) -> int:
    return int(getattr(encoder, "bypass_size", 0))


def _core(network: NetworkConfig, input_size: int, bypass_size: int) -> Core:
    """Build the core: one that actor and critic share, or one for each."""

    def single() -> Core:
        if network.core == "none":
            core: Core = NoMemory(input_size)
        else:
            core = (LSTM if network.core == "lstm" else GRU)(input_size, network.hidden_size)
        return Bypass(core, bypass_size) if bypass_size else core

    return single() if network.core == "none" or network.critic_memory == "shared" else ActorCriticCores(single(), single())
