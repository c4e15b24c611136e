"""Collect rollouts: act in the environments with the policy.

- `Collector` steps the environments and fills a `Rollout`. In each step it computes only what the next step needs; values and episode
  returns of all steps are computed together at the end.
- `Finals` keeps the final observations of truncated episodes until the end of the rollout. The value after a truncated step is the critic's
  value of the final observation, with the state of the core after that step.
- `RolloutSource` is what a learner needs of a collector; an environment in which the policy does not act step by step brings its own.
- `Staging` moves many small tensors in one transfer. Environments on the CPU and a learner on a GPU exchange a dozen tensors per step, and
  each transfer has a fixed cost. So they are put side by side in one buffer, pinned on the CPU.

Shapes: T = steps in the rollout, N = environments, S = state width, R = rows of truncated episodes, J = heads.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.profiling import DATA_WAIT, ENVIRONMENT, FORWARD
from esper.rl.acting import Step, fused_step, plain_step
from esper.rl.batch import LOOKS, Rollout
from esper.rl.distributions import Choice, Noise
from esper.rl.gae import discounted_sums
from esper.rl.policy import Policy, raise_on_empty_rows
from esper.vecenv import Actions, Masks, Obs, Timestep, VecEnv
from esper.vecenv.check import check_masks, check_timestep

_ALIGNMENT = 16  # bytes; a tensor of any dtype may start at a multiple of it


class Staging:
    """Moves dictionaries of tensors to `device` in one transfer. The layout is computed again when shapes or types change.

    `move` returns views of a buffer that the next call overwrites. A transfer from pinned memory may still be running when `move` returns,
    so synchronise before the next call. Acting does so by reading the actions.
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
    """Return shape, type, first byte and length in bytes of each tensor in the buffer."""
    layout, start = {}, 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        layout[name] = (tensor.shape, tensor.dtype, start, length)
        start += -(-length // _ALIGNMENT) * _ALIGNMENT
    return layout


def _view(buffer: Tensor, place: tuple[torch.Size, torch.dtype, int, int]) -> Tensor:
    shape, dtype, start, length = place
    return buffer[start : start + length].view(dtype).view(shape)


_MISSING = "an episode was truncated, but the timestep of the environment has no `final_obs`; set it where `truncated` is true"


class Finals:
    """The final observations and states of truncated episodes of one rollout.

    On the CPU exactly these rows are kept. On a GPU they go into a buffer of fixed size, so that their number need not be read.
    """

    def __init__(self, num_steps: int, num_envs: int, device: torch.device) -> None:
        self.num_envs = num_envs
        self.capacity = num_steps * num_envs
        self.exact = device.type == "cpu"
        self.device = device
        self._rows: list[tuple[Obs, Tensor, Tensor]] = []  # final observations, states, positions in [T·N]
        self._buffer: tuple[Obs, Tensor, Tensor] | None = None
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._missing = torch.zeros((), dtype=torch.bool, device=device)  # whether an episode was truncated without a final observation

    def clear(self) -> None:
        self._rows.clear()
        self._count.zero_()
        self._missing.zero_()

    def add(self, step: int, final_obs: Obs | None, state: Tensor, truncated: Tensor) -> None:
        """Keep the truncated rows of raw `final_obs` [N, ...] and of `state` [N, S] after the step."""
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
        """Append the truncated rows to the buffer; all others are written to its last row, which is never read."""
        if self._buffer is None:
            rows = self.capacity + 1
            obs = {name: value.new_zeros(rows, *value.shape[1:]) for name, value in final_obs.items()}
            self._buffer = (obs, state.new_zeros(rows, state.shape[1]), torch.zeros(rows, dtype=torch.int64, device=self.device))
        obs, states, positions = self._buffer
        place = self._count + torch.cumsum(truncated, 0) - 1  # [N] next free rows of the buffer
        place = torch.where(truncated, place, self.capacity)
        for name, value in final_obs.items():
            obs[name].index_copy_(0, place, value)
        states.index_copy_(0, place, state)
        positions.index_copy_(0, place, torch.arange(self.num_envs, device=self.device) + step * self.num_envs)
        self._count += truncated.sum()

    def values(self, policy: Policy) -> tuple[Tensor, Tensor] | None:
        """Return positions in the flattened rollout [R] and the values of the final observations [R]; None if no episode was truncated."""
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


_OF_EPISODES = ("state", "starts", "running_return", "running_length")  # attributes of the collector about unfinished episodes
RECENT_EPISODES = 100  # finished episodes that mean returns and lengths are over


class RolloutSource(Protocol):
    """Collects rollouts, which may have any number of steps, and counts their episodes."""

    episodes: int  # finished so far
    env_seconds: float  # time in the environments during the last rollout
    steps: int  # of the last rollout, real ones
    bad_rewards: int  # steps so far whose reward was not finite
    has_reward: bool  # whether any reward of the last rollout was finite
    recent_returns: deque[float]
    recent_lengths: deque[float]

    def reset(self, seed: int) -> None: ...

    def collect(self, generator: torch.Generator) -> Rollout: ...

    def state_dict(self, *, with_episodes: bool) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue from a `state_dict`. Return whether it has the state of unfinished episodes; otherwise new ones must begin."""


class Collector:
    """Acts in the environments. It owns the last timestep, the states of the core and the statistics of episodes."""

    def __init__(self, env: VecEnv, policy: Policy, *, num_steps: int, length: int, time_limit_is_end: bool, validate: bool) -> None:
        self.env, self.policy = env, policy
        self.num_steps, self.length = num_steps, length
        self.time_limit_is_end = time_limit_is_end
        self.device = policy.device
        self.checks_at_once = validate or self.device.type == "cpu"  # else errors are raised at the end of the rollout
        self.finals = Finals(num_steps, env.num_envs, self.device)
        self.timestep: Timestep | None = None
        self._forget_episodes()
        self.episodes = 0  # finished so far
        self.env_seconds = 0.0  # time in the environments during the last rollout, measured in this process
        self.steps = 0  # of the last rollout, without those that only reset an environment
        self.bad_rewards = 0  # steps so far whose reward was not finite
        self.has_reward = True  # whether any reward of the last rollout was finite
        self.recent_returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.recent_lengths: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._has_stepped = False
        self._rollout: Rollout | None = None
        # The size of the memory is noted after the last step and after earlier ones, evenly spaced: step -> row of `hidden_squares`.
        self._looks = {num_steps - 1 - row * max(1, num_steps // LOOKS): row for row in range(LOOKS)}
        elsewhere = env.device != self.device  # then observations and actions are moved in every step
        self._to_learner = Staging(self.device) if elsewhere else None
        self._to_env = Staging(env.device) if elsewhere else None

    def reset(self, seed: int) -> None:
        """Begin new episodes in all environments."""
        timestep = self.env.reset(seed)
        check_timestep(self.env, timestep)
        self.timestep = self._to_learner_device(timestep)
        self._forget_episodes()
        self._has_stepped = False

    def _forget_episodes(self) -> None:
        num_envs = self.env.num_envs
        self.state = self.policy.initial_state(num_envs)  # [N, S] before the next step
        self.starts = torch.ones(num_envs, dtype=torch.bool, device=self.device)
        self.running_return = torch.zeros(num_envs, device=self.device)
        self.running_length = torch.zeros(num_envs, device=self.device)

    def collect(self, generator: torch.Generator) -> Rollout:
        """Return the next `num_steps` steps of every environment. The next call overwrites the rollout."""
        assert self.timestep is not None, "reset first"
        if self._rollout is None:
            self._rollout = Rollout.allocate(self.policy, num_steps=self.num_steps, num_envs=self.env.num_envs, length=self.length)
        rollout = self._rollout
        self.env_seconds = 0.0
        with torch.no_grad():
            self._take_steps(rollout, generator)
            torch.logical_not(torch.isfinite(rollout.rewards), out=rollout.bad_rewards)
            rollout.rewards.masked_fill_(rollout.bad_rewards, 0.0)
            self._fill_values(rollout)
            self._count_episodes(rollout)
        return rollout

    def _take_steps(self, rollout: Rollout, generator: torch.Generator) -> None:
        """Take all steps of a rollout, in the place of those of the last one, or of one that an error has broken off."""
        self.finals.clear()
        rollout.valid.fill_(True)
        rollout.acts.fill_(True)
        distribution = self.policy.distribution
        drawn = distribution.noise((self.num_steps, self.env.num_envs), generator)  # of all steps
        empty_masks = torch.zeros(self.env.num_envs, len(distribution.head_names), dtype=torch.bool, device=self.device)
        act = fused_step(self.policy) or plain_step(self.policy)  # made for each rollout, because it copies the weights
        decisions = [self._step(rollout, step, Noise(*(part[step] for part in drawn)), empty_masks, act) for step in range(self.num_steps)]
        # Copy the decisions of all steps at once: one stack per tensor instead of one copy per step.
        stores = (rollout.features, rollout.parameters, *rollout.choice)
        for store, steps in zip(stores, zip(*decisions, strict=True), strict=True):
            torch.stack(steps, out=store)
        if not self.checks_at_once:
            raise_on_empty_rows(distribution, empty_masks)
            self._raise_on_non_finite(rollout.parameters, rollout.obs)

    def _step(self, rollout: Rollout, step: int, noise: Noise, empty_masks: Tensor, act: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take one step. Return the features that the heads saw, the distribution parameters and the two parts of the choice."""
        timestep, distribution = self.timestep, self.policy.distribution
        assert timestep is not None
        if step % self.length == 0:
            rollout.states[step // self.length] = self.state
        rollout.starts[step] = self.starts
        for name, value in timestep.obs.items():
            rollout.obs[name][step] = value
        masks = self._store_masks(rollout, step, timestep.masks)

        # Use the copy in the rollout: the environment may overwrite the tensors that it returned.
        obs = {name: value[step] for name, value in rollout.obs.items()}
        # Only the policy runs in inference mode. Its tensors must not reach the environments, which may write to the actions they get.
        with FORWARD, torch.inference_mode():
            features, parameters, state = act(obs, self.state)
            choice = distribution.choose(parameters, masks, noise)
        if self.checks_at_once:
            self._raise_on_non_finite(parameters, obs)
        if masks:
            empty = distribution.empty_rows(masks, choice)
            if self.checks_at_once:
                raise_on_empty_rows(distribution, empty)
            empty_masks |= empty

        actions = distribution.actions(Choice(*(part.clone() for part in choice)))
        actions = self._to_env_device(actions)
        began = time.perf_counter()
        with ENVIRONMENT:
            answer = self.env.step(actions)
        self.env_seconds += time.perf_counter() - began
        if not self._has_stepped:  # check the first timestep only
            check_timestep(self.env, answer)
            self._has_stepped = True
        after = self._to_learner_device(answer)
        if step in self._looks:
            torch.mean(state.square(), dim=1, out=rollout.hidden_squares[self._looks[step]])
        self._store_outcome(rollout, step, after, state)
        self.timestep = after
        return features, parameters, *choice

    def _raise_on_non_finite(self, parameters: Tensor, obs: Obs) -> None:
        """Raise FloatingPointError unless all parameters [..., P] are finite, and name the observation [..., *shape] that may be the cause.

        The sum of the parameters is finite only if each is, unless they are absurdly large.
        """
        if math.isfinite(float(parameters.sum())):
            return
        for name, value in obs.items():
            bad = ~torch.isfinite(value.reshape(*parameters.shape[:-1], -1)).all(-1)  # [N] or [T, N]
            if bool(bad.any()):
                rows = bad.reshape(-1, self.env.num_envs).any(0).nonzero().flatten().tolist()
                raise FloatingPointError(
                    f"{_name_of(self.env)}: the observation {name!r} is not finite (NaN or infinity) in the environments {rows}"
                )
        raise FloatingPointError("the output of the policy is not finite; lower the learning rate")

    def _to_learner_device(self, timestep: Timestep) -> Timestep:
        """Return a timestep on the learner's device, moved in one transfer if it is elsewhere."""
        if self._to_learner is None:
            return timestep
        parts = {"reward": timestep.reward, "terminated": timestep.terminated, "truncated": timestep.truncated}
        for name in ("valid", "acts"):
            if (flags := getattr(timestep, name)) is not None:
                parts[name] = flags
        groups = {"obs/": timestep.obs, "masks/": timestep.masks, "final/": timestep.final_obs or {}}
        for prefix, group in groups.items():
            parts |= {prefix + name: value for name, value in group.items()}
        with DATA_WAIT:
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
            acts=moved.get("acts"),
        )

    def _to_env_device(self, actions: Actions) -> Actions:
        """Return the actions on the environment's device."""
        if self._to_env is None:
            return actions
        with DATA_WAIT:
            moved = self._to_env.move(actions)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        return moved

    def _store_masks(self, rollout: Rollout, step: int, masks: Masks) -> Masks:
        """Store the masks of a step and return those of all heads masked so far. Without a mask at this step, a head allows everything."""
        for head in masks.keys() - rollout.masks.keys():
            check_masks(self.env, masks, self.device)
            rollout.masks[head] = torch.ones(self.num_steps, *masks[head].shape, dtype=torch.bool, device=self.device)
        for head, store in rollout.masks.items():
            store[step] = masks.get(head, True)
        return {head: store[step] for head, store in rollout.masks.items()}

    def _store_outcome(self, rollout: Rollout, step: int, after: Timestep, state: Tensor) -> None:
        """Store the result of a step, and set the state of the core before the next step: zero where an episode begins."""
        rollout.rewards[step], rollout.terminated[step], rollout.truncated[step] = after.reward, after.terminated, after.truncated
        terminated, truncated = rollout.terminated[step], rollout.truncated[step]
        starts = terminated | truncated
        if after.valid is not None:
            rollout.valid[step] = after.valid
            starts |= ~after.valid
        if after.acts is not None:
            rollout.acts[step] = after.acts
        self.starts = starts
        if self.checks_at_once and not bool(starts.any()):  # the usual case, where reading the device is free
            self.state = state
            return
        if not self.time_limit_is_end:
            self.finals.add(step, after.final_obs, state, truncated & ~terminated)
        self.state = state.masked_fill(starts.unsqueeze(-1), 0.0)

    @torch.inference_mode()
    def _fill_values(self, rollout: Rollout) -> None:
        """Compute the values of all steps and of the states after them, and copy them into the rollout."""
        assert self.timestep is not None
        following, _ = self.policy.step(self.policy.normalize(self.timestep.obs), self.state)
        rollout.values.copy_(self.policy.value(rollout.features.flatten(0, 1)).view_as(rollout.values))
        rollout.next_values[:-1] = rollout.values[1:]
        rollout.next_values[-1] = self.policy.value(following)
        rollout.next_values.masked_fill_(rollout.ended, 0.0)
        # Truncated episodes have the value of their final observation.
        finals = self.finals.values(self.policy)
        if finals is not None:
            positions, values = finals
            if not math.isfinite(float(values.sum())):
                raise FloatingPointError(
                    f"{_name_of(self.env)}: a final observation of a truncated episode is not finite (NaN or infinity)"
                )
            rollout.next_values.view(-1)[positions] = values

    def _count_episodes(self, rollout: Rollout) -> None:
        """Record returns and lengths of the finished episodes.

        An episode with a reward that was not finite has no return: `running_return` is nan until its end, and `recent_returns` leaves it
        out.
        """
        ended = rollout.ended
        # Sum over each episode's steps so far: rewards, lengths and the number of bad rewards. An episode that was bad before this rollout
        # starts with a count of 1.
        is_bad = torch.isnan(self.running_return)  # [N]
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
        count, self.steps = torch.stack((rollout.bad_rewards.sum(), rollout.valid.sum())).tolist()
        self.bad_rewards += count
        self.has_reward = count == 0 or bool((rollout.valid & ~rollout.bad_rewards).any())

    def state_dict(self, *, with_episodes: bool) -> dict[str, Any]:
        """Return the statistics so far and, `with_episodes`, the state of the unfinished episodes."""
        return {
            "episodes": self.episodes,
            "bad_rewards": self.bad_rewards,
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
            "episodes_now": self._episodes_now() if with_episodes else None,
        }

    def _episodes_now(self) -> dict[str, Any]:
        assert self.timestep is not None
        running = {name: getattr(self, name) for name in _OF_EPISODES}
        return {"obs": dict(self.timestep.obs), "masks": dict(self.timestep.masks), **running}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue from a `state_dict`. Return whether it has the state of unfinished episodes; otherwise new ones must begin."""
        self.episodes, self.bad_rewards = state["episodes"], state["bad_rewards"]
        self.recent_returns = deque(state["recent_returns"], maxlen=RECENT_EPISODES)
        self.recent_lengths = deque(state["recent_lengths"], maxlen=RECENT_EPISODES)
        now = state["episodes_now"]
        if now is None:
            return False
        self.policy.core.check_state(now["state"], self.env.num_envs)
        for name in _OF_EPISODES:
            setattr(self, name, now[name].to(self.device))
        nothing = torch.zeros(self.env.num_envs, device=self.device)
        obs, masks = ({name: value.to(self.device) for name, value in now[part].items()} for part in ("obs", "masks"))
        self.timestep = Timestep(obs=obs, masks=masks, reward=nothing, terminated=nothing.bool(), truncated=nothing.bool())
        return True


def _name_of(env: VecEnv) -> str:
    name: str = getattr(env, "name", type(env).__name__)
    return name
