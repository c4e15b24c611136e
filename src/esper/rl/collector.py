"""Many small tensors over the bus in one transfer.

Environments on the CPU and a learner on a GPU exchange a dozen tensors per step, and each transfer costs more than what it carries.
A `Staging` lays them side by side in one buffer, pinned on the CPU's side, and moves that.

The last observations of episodes that were cut, kept until the rollout ends and then valued in one go.

The value of what a cut episode would have gone on to is the critic's on its final observation, with the memory that belongs to it: the
state after the action that was cut.

Shapes: N = environments, S = state width, R = rows kept.

Acting: steps the environments with the policy and fills a rollout.

Per step only what the next step needs is computed: values, log-probabilities and episode returns of all steps come in one go afterwards.

Shapes: T = steps in the rollout, N = environments, S = state width.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from esper.rl.acting import Step, fused_step, plain_step
from esper.rl.batch import Rollout
from esper.rl.distributions import Choice, Noise
from esper.rl.gae import discounted_sums
from esper.rl.policy import Policy, raise_on_empty_rows
from esper.vecenv import Actions, Masks, Obs, Timestep, VecEnv
from esper.vecenv.check import check_masks, check_timestep

_ALIGNMENT = 16  # bytes; every dtype may start there


class Staging:
    """Moves dictionaries of tensors to `device`. The layout is made for the first one and again whenever shapes or types change.

    What `move` returns are views of a buffer that the next call overwrites, and a transfer from pinned memory may still be under way when
    `move` returns: whoever calls it again must have synchronised since. Acting does, by reading the actions.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._layout: dict[str, tuple[torch.Size, torch.dtype, int, int]] = {}
        self._source = self._target = torch.empty(0, dtype=torch.uint8)

    def move(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        layout = _lay_out(tensors)
        if layout != self._layout:
            self._allocate(layout, next(iter(tensors.values())).device)
        for name, tensor in tensors.items():
            _view(self._source, self._layout[name]).copy_(tensor)
        self._target.copy_(self._source, non_blocking=self.device.type != "cpu")
        return {name: _view(self._target, place) for name, place in self._layout.items()}

    def _allocate(self, layout: dict[str, tuple[torch.Size, torch.dtype, int, int]], source: torch.device) -> None:
        size = max((start + length for _, _, start, length in layout.values()), default=0)
        pin = torch.cuda.is_available() and source != self.device
        self._layout = layout
        self._source = torch.empty(size, dtype=torch.uint8, device=source, pin_memory=pin and source.type == "cpu")
        self._target = torch.empty(size, dtype=torch.uint8, device=self.device, pin_memory=pin and self.device.type == "cpu")


def _lay_out(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype, int, int]]:
    """Shape, type, first byte and length of each."""
    layout, start = {}, 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        layout[name] = (tensor.shape, tensor.dtype, start, length)
        start += -(-length // _ALIGNMENT) * _ALIGNMENT
    return layout


def _view(buffer: Tensor, place: tuple[torch.Size, torch.dtype, int, int]) -> Tensor:
    shape, dtype, start, length = place
    return buffer[start : start + length].view(dtype).view(shape)


_MISSING = "an episode was truncated but the environment gave no `final_obs`"


class Finals:
    """Gathers rows where `truncated`. On CPU exactly those; elsewhere into a fixed buffer without asking the device how many."""

    def __init__(self, num_steps: int, num_envs: int, device: torch.device) -> None:
        self.num_envs = num_envs
        self.capacity = num_steps * num_envs
        self.exact = device.type == "cpu"
        self.device = device
        self._rows: list[tuple[Obs, Tensor, Tensor]] = []  # final observations, states, positions in [T·N]
        self._buffer: tuple[Obs, Tensor, Tensor] | None = None
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._missing = torch.zeros((), dtype=torch.bool, device=device)  # was an episode cut without a final observation?

    def clear(self) -> None:
        self._rows.clear()
        self._count.zero_()
        self._missing.zero_()

    def add(self, step: int, final_obs: Obs | None, state: Tensor, truncated: Tensor) -> None:
        """Keeps the truncated rows of `final_obs` [N, ...], normalised as usual, and of `state` [N, S] after the action."""
        if self.exact:
            envs = truncated.nonzero().squeeze(1)
            if len(envs):
                if final_obs is None:
                    raise ValueError(_MISSING)
                self._rows.append(({name: value[envs] for name, value in final_obs.items()}, state[envs], envs + step * self.num_envs))
        elif final_obs is None:
            self._missing |= truncated.any()
        else:
            self._scatter(step, final_obs, state, truncated)

    def _scatter(self, step: int, final_obs: Obs, state: Tensor, truncated: Tensor) -> None:
        if self._buffer is None:
            rows = self.capacity + 1  # the last row takes what is not truncated
            obs = {name: value.new_zeros(rows, *value.shape[1:]) for name, value in final_obs.items()}
            self._buffer = (obs, state.new_zeros(rows, state.shape[1]), torch.zeros(rows, dtype=torch.int64, device=self.device))
        obs, states, positions = self._buffer
        place = self._count + torch.cumsum(truncated, 0) - 1
        place = torch.where(truncated, place, self.capacity)
        for name, value in final_obs.items():
            obs[name].index_copy_(0, place, value)
        states.index_copy_(0, place, state)
        positions.index_copy_(0, place, torch.arange(self.num_envs, device=self.device) + step * self.num_envs)
        self._count += truncated.sum()

    def values(self, policy: Policy) -> tuple[Tensor, Tensor] | None:
        """Positions in the flattened rollout [R] and the values there [R], or None where nothing was cut."""
        if self.exact:
            if not self._rows:
                return None
            obs = {name: torch.cat([row[0][name] for row in self._rows]) for name in self._rows[0][0]}
            states, positions = torch.cat([row[1] for row in self._rows]), torch.cat([row[2] for row in self._rows])
        else:
            if bool(self._missing):
                raise ValueError(_MISSING)
            count = int(self._count)
            if self._buffer is None or count == 0:
                return None
            obs = {name: value[:count] for name, value in self._buffer[0].items()}
            states, positions = self._buffer[1][:count], self._buffer[2][:count]
        features, _ = policy.step(policy.normalize(obs), states)
        return positions, policy.value(features)


RECENT_EPISODES = 100


class Collector:
    """Owns the environments' side of training: where each episode stands, and the memory that belongs to it."""

    def __init__(self, env: VecEnv, policy: Policy, *, num_steps: int, length: int, time_limit_is_end: bool, validate: bool) -> None:
        self.env, self.policy = env, policy
        self.num_steps, self.length = num_steps, length
        self.time_limit_is_end = time_limit_is_end
        self.device = policy.device
        self.checks_at_once = validate or self.device.type == "cpu"
        self.finals = Finals(num_steps, env.num_envs, self.device)
        self.timestep: Timestep | None = None
        self._forget()
        self.episodes = 0
        self.env_seconds = 0.0  # that the environments took for the last rollout, by the clock of this process
        self.bad_rewards = 0  # steps so far whose reward was not finite
        self.recent_returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.recent_lengths: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._has_stepped = False
        self._rollout: Rollout | None = None
        elsewhere = env.device != self.device
        self._to_learner = Staging(self.device) if elsewhere else None
        self._to_env = Staging(env.device) if elsewhere else None

    def reset(self, seed: int) -> None:
        """Begins new episodes everywhere."""
        timestep = self.env.reset(seed)
        check_timestep(self.env, timestep)
        self.timestep = self._here(timestep)
        self._forget()
        self._has_stepped = False

    def _forget(self) -> None:
        num_envs = self.env.num_envs
        self.state = self.policy.initial_state(num_envs)  # [N, S] before the next step
        self.starts = torch.ones(num_envs, dtype=torch.bool, device=self.device)
        self.running_return = torch.zeros(num_envs, device=self.device)
        self.running_length = torch.zeros(num_envs, device=self.device)

    def collect(self, generator: torch.Generator) -> Rollout:
        """The next `num_steps` steps of every environment. The rollout is overwritten by the next call."""
        assert self.timestep is not None, "reset first"
        rollout = self._allocate()
        self.env_seconds = 0.0
        with torch.no_grad():
            self._fill(rollout, generator)
            torch.logical_not(torch.isfinite(rollout.rewards), out=rollout.bad_rewards)
            rollout.rewards.masked_fill_(rollout.bad_rewards, 0.0)
            self._value(rollout)
            self._count_episodes(rollout)
        return rollout

    def _fill(self, rollout: Rollout, generator: torch.Generator) -> None:
        distribution = self.policy.distribution
        noise = distribution.noise((self.num_steps, self.env.num_envs), generator)
        problems = torch.zeros(self.env.num_envs, len(distribution.head_names), dtype=torch.bool, device=self.device)
        rollout.valid.fill_(True)
        act = fused_step(self.policy) or plain_step(self.policy)  # for this rollout: its weights are copied
        decisions = [self._step(rollout, step, Noise(*drawn), problems, act) for step, drawn in enumerate(zip(*noise, strict=True))]
        stores = (rollout.features, rollout.parameters, *rollout.choice)
        for store, steps in zip(stores, zip(*decisions, strict=True), strict=True):
            torch.stack(steps, out=store)
        if not self.checks_at_once:
            raise_on_empty_rows(distribution, problems)
            _raise_on_non_finite(rollout.parameters)

    def _allocate(self) -> Rollout:
        if self._rollout is None:
            self._rollout = Rollout.allocate(self.policy, num_steps=self.num_steps, num_envs=self.env.num_envs, length=self.length)
        return self._rollout

    def _step(self, rollout: Rollout, step: int, noise: Noise, problems: Tensor, act: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Acts once. Returns what the heads saw, the distribution's parameters and the two parts of the choice."""
        timestep, distribution = self.timestep, self.policy.distribution
        assert timestep is not None
        if step % self.length == 0:
            rollout.states[step // self.length] = self.state
        rollout.starts[step] = self.starts
        for name, value in timestep.obs.items():
            rollout.obs[name][step] = value
        masks = self._store_masks(rollout, step, timestep.masks)

        obs = {name: value[step] for name, value in rollout.obs.items()}  # the rollout's own: the environment may write over what it gave
        # Only the policy runs in inference mode: its tensors must not leak into environments, which may write to what they are given.
        with torch.inference_mode():
            features, parameters, state = act(obs, self.state)
            choice = distribution.choose(parameters, masks, noise)
        if self.checks_at_once:
            _raise_on_non_finite(parameters)
        if masks:
            empty = distribution.empty_rows(masks, choice)
            if self.checks_at_once:
                raise_on_empty_rows(distribution, empty)
            problems |= empty

        actions = distribution.actions(Choice(*(part.clone() for part in choice)))
        there = self._there(actions)
        began = time.perf_counter()
        answer = self.env.step(there)
        self.env_seconds += time.perf_counter() - began
        if not self._has_stepped:
            check_timestep(self.env, answer)
            self._has_stepped = True
        after = self._here(answer)
        self._store_outcome(rollout, step, after, state)
        self.timestep = after
        return features, parameters, *choice

    def _here(self, timestep: Timestep) -> Timestep:
        """A timestep on the learner's device, moved there in one transfer if it is elsewhere."""
        if self._to_learner is None:
            return timestep
        parts = {"reward": timestep.reward, "terminated": timestep.terminated, "truncated": timestep.truncated}
        if timestep.valid is not None:
            parts["valid"] = timestep.valid
        groups = {"obs/": timestep.obs, "masks/": timestep.masks, "final/": timestep.final_obs or {}}
        for prefix, group in groups.items():
            parts |= {prefix + name: value for name, value in group.items()}
        moved = self._to_learner.move(parts)
        obs, masks, final = ({name: moved[prefix + name] for name in group} for prefix, group in groups.items())
        return Timestep(
            obs=obs,
            reward=moved["reward"],
            terminated=moved["terminated"],
            truncated=moved["truncated"],
            masks=masks,
            final_obs=final or None,
            valid=moved.get("valid"),
        )

    def _there(self, actions: Actions) -> Actions:
        """Actions on the environment's device."""
        if self._to_env is None:
            return actions
        moved = self._to_env.move(actions)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return moved

    def _store_masks(self, rollout: Rollout, step: int, masks: Masks) -> Masks:
        """A head gets its place in the rollout with its first mask, and is free at the steps that have none."""
        for head in masks.keys() - rollout.masks.keys():
            check_masks(self.env, masks, self.device)
            rollout.masks[head] = torch.ones(self.num_steps, *masks[head].shape, dtype=torch.bool, device=self.device)
        for head, store in rollout.masks.items():
            store[step] = masks.get(head, True)
        return {head: store[step] for head, store in rollout.masks.items()}

    def _store_outcome(self, rollout: Rollout, step: int, after: Timestep, state: Tensor) -> None:
        """What the environments answered, and the memory with which the next step begins."""
        rollout.rewards[step], rollout.terminated[step], rollout.truncated[step] = after.reward, after.terminated, after.truncated
        terminated, truncated = rollout.terminated[step], rollout.truncated[step]
        starts = terminated | truncated
        if after.valid is not None:
            rollout.valid[step] = after.valid
            starts |= ~after.valid
        self.starts = starts
        if self.checks_at_once and not bool(starts.any()):
            self.state = state
            return
        if not self.time_limit_is_end:
            self.finals.add(step, after.final_obs, state, truncated & ~terminated)
        self.state = state.masked_fill(starts.unsqueeze(-1), 0.0)

    @torch.inference_mode()
    def _value(self, rollout: Rollout) -> None:
        """Values of all steps and of what followed them, written into the rollout: no tensor of inference mode leaves this method."""
        assert self.timestep is not None
        following, _ = self.policy.step(self.policy.normalize(self.timestep.obs), self.state)
        rollout.values.copy_(self.policy.value(rollout.features.flatten(0, 1)).view_as(rollout.values))
        rollout.next_values[:-1] = rollout.values[1:]
        rollout.next_values[-1] = self.policy.value(following)
        rollout.next_values.masked_fill_(rollout.ended, 0.0)
        cut = self.finals.values(self.policy)
        if cut is not None:
            positions, values = cut
            rollout.next_values.view(-1)[positions] = values
        self.finals.clear()

    def _count_episodes(self, rollout: Rollout) -> None:
        """An episode with a reward that was not finite has no return: it is nan until its end, and counted without it."""
        ended = rollout.ended
        is_bad = torch.isnan(self.running_return)
        returns = discounted_sums(rollout.rewards, ended, self.running_return.masked_fill(is_bad, 0.0), gamma=1.0)
        lengths = discounted_sums(rollout.valid.to(returns.dtype), ended, self.running_length, gamma=1.0)
        bad = discounted_sums(rollout.bad_rewards.to(returns.dtype), ended, is_bad.to(returns.dtype), gamma=1.0)
        returns.masked_fill_(bad > 0, math.nan)
        self.running_return = torch.where(ended[-1], 0.0, returns[-1])
        self.running_length = torch.where(ended[-1], 0.0, lengths[-1])
        finished = torch.stack((returns[ended], lengths[ended])).tolist()
        self.recent_returns.extend(value for value in finished[0] if not math.isnan(value))
        self.recent_lengths.extend(finished[1])
        self.episodes += len(finished[0])
        self.bad_rewards += int(rollout.bad_rewards.sum())

    def state_dict(self) -> dict[str, Any]:
        assert self.timestep is not None
        return {
            "obs": dict(self.timestep.obs),
            "masks": dict(self.timestep.masks),
            "state": self.state,
            "starts": self.starts,
            "running_return": self.running_return,
            "running_length": self.running_length,
            "episodes": self.episodes,
            "bad_rewards": self.bad_rewards,
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.core.check_state(state["state"], self.env.num_envs)
        for name in ("state", "starts", "running_return", "running_length"):
            setattr(self, name, state[name].to(self.device))
        nothing = torch.zeros(self.env.num_envs, device=self.device)
        obs, masks = ({name: value.to(self.device) for name, value in state[part].items()} for part in ("obs", "masks"))
        self.timestep = Timestep(obs=obs, masks=masks, reward=nothing, terminated=nothing.bool(), truncated=nothing.bool())
        self.episodes, self.bad_rewards = state["episodes"], state["bad_rewards"]
        self.recent_returns = deque(state["recent_returns"], maxlen=RECENT_EPISODES)
        self.recent_lengths = deque(state["recent_lengths"], maxlen=RECENT_EPISODES)


def _raise_on_non_finite(parameters: Tensor) -> None:
    """A single sum tells: it is finite only if every number is (or they are absurdly large, which is no better)."""
    if not math.isfinite(float(parameters.sum())):
        raise FloatingPointError("the policy put out numbers that are not finite; lower the learning rate or look at the observations")
