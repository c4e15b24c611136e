"""Check that an environment follows the interface in `esper.vecenv.contract`.

`check_timestep` checks shapes, types and devices; it is so cheap that every run checks its first step. `check_env` plays random steps and
checks everything.

Shapes: N = parallel environments.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from esper.vecenv.actions import ActionSpec, Discrete
from esper.vecenv.contract import Actions, Masks, Obs, ObservationSpec, Saveable, Timestep, VecEnv


class HasSpecs(Protocol):
    """The attributes of an environment that `check_timestep` needs."""

    @property
    def num_envs(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def observation_spec(self) -> ObservationSpec: ...
    @property
    def action_spec(self) -> ActionSpec: ...


def check_timestep(env: HasSpecs, timestep: Timestep) -> None:
    """Raise ValueError if a tensor of `timestep` does not match the specs of `env`."""
    count = (env.num_envs,)
    _check_obs(env, "observation", timestep.obs)
    _check_tensor(env.device, "reward", timestep.reward, count, torch.float32)
    _check_tensor(env.device, "terminated", timestep.terminated, count, torch.bool)
    _check_tensor(env.device, "truncated", timestep.truncated, count, torch.bool)
    for name in ("valid", "acts"):
        if (flags := getattr(timestep, name)) is not None:
            _check_tensor(env.device, name, flags, count, torch.bool)
    check_masks(env, timestep.masks, env.device)
    if timestep.final_obs is not None:
        _check_obs(env, "final observation", timestep.final_obs)
    elif timestep.truncated.any():
        raise ValueError("an episode was truncated, but final_obs is None; give its last observation, which bootstrapping needs")


def check_masks(env: HasSpecs, masks: Masks, device: torch.device) -> None:
    """Raise ValueError if a mask does not belong to a discrete head of `env`, or has a wrong shape, type or device."""
    heads = {head.name: head for head in env.action_spec.discrete}
    for name, mask in masks.items():
        if name not in heads:
            raise ValueError(f"there is a mask for {name!r}, but the discrete heads are {list(heads)}")
        shape = (env.num_envs, *env.action_spec.mask_shape(heads[name]))
        _check_tensor(device, f"head {name!r}: mask", mask, shape, torch.bool)


def check_env(env: VecEnv, steps: int = 100, generator: torch.Generator | None = None) -> None:
    """Play `steps` random steps and raise ValueError at the first violation of the interface. Leaves the environment reset.

    Besides `check_timestep`, it checks that numbers are finite, that returned tensors do not change later, that every relevant head has an
    allowed choice, and that a saveable environment repeats the same steps exactly after it is loaded.
    """
    generator = generator or torch.Generator().manual_seed(0)
    timestep = env.reset(seed=0)
    check_timestep(env, timestep)
    if timestep.reward.any() or timestep.ended.any() or timestep.valid is not None or timestep.acts is not None:
        raise ValueError("after reset the reward must be 0, terminated and truncated must be false, valid and acts must be None")
    for _ in range(steps):
        before = _flat(timestep)
        kept = {name: value.clone() for name, value in before.items()}
        actions = sample_actions(env.action_spec, timestep.masks, env.num_envs, generator, device=env.device)
        timestep = env.step(actions)
        check_timestep(env, timestep)
        _check_finite(timestep)
        _check_unchanged(before, kept, "changed when the environment was stepped: it must own its memory")
    if isinstance(env, Saveable):
        _check_saving(env, env, timestep.masks, generator)  # given twice: as a VecEnv and as a Saveable
    env.reset(seed=0)


def sample_actions(
    spec: ActionSpec, masks: Masks, num_envs: int, generator: torch.Generator, *, device: torch.device | str = "cpu"
) -> Actions:
    """Return uniformly random allowed actions. Raise ValueError if a relevant head has no allowed choice."""
    actions: Actions = {}
    matters: dict[str, Tensor] = {}
    rules = {rule.head: rule for rule in spec.relevance}
    row = torch.arange(num_envs, device=device)
    for head in spec.heads:
        # [N]: whether this head is relevant, given the choices of the heads before it
        matters[head.name] = torch.ones(num_envs, dtype=torch.bool, device=device)
        if rule := rules.get(head.name):
            chosen = torch.isin(actions[rule.given], torch.tensor(rule.choices, device=device))
            matters[head.name] = matters[rule.given] & chosen
        if not isinstance(head, Discrete):
            draw = torch.rand if head.is_bounded else torch.randn
            drawn = draw(num_envs, head.size, generator=generator, device=generator.device)
            actions[head.name] = (drawn * 2 - 1 if head.is_bounded else drawn).to(device)
            continue
        mask = masks.get(head.name)
        if mask is None:
            mask = torch.ones(num_envs, head.size, dtype=torch.bool, device=device)
        elif head.parent is not None:
            mask = mask[row, actions[head.parent]]
        # An irrelevant head may have an empty mask; draw any choice then.
        empty = ~mask.any(1)  # [N]
        if (empty & matters[head.name]).any():
            where = (empty & matters[head.name]).nonzero()[:, 0].tolist()
            raise ValueError(f"head {head.name!r}: nothing is allowed in environments {where}, though the head matters there")
        weights = (mask | empty.unsqueeze(1)).float().to(generator.device)
        actions[head.name] = torch.multinomial(weights, 1, generator=generator)[:, 0].to(device)
    return actions


def _check_obs(env: HasSpecs, what: str, obs: Obs) -> None:
    if obs.keys() != env.observation_spec.keys():
        raise ValueError(f"{what} has the parts {sorted(obs)}, expected {sorted(env.observation_spec)}")
    for name, spec in env.observation_spec.items():
        _check_tensor(env.device, f"{what} {name!r}", obs[name], (env.num_envs, *spec.shape), spec.torch_dtype)


def _check_tensor(device: torch.device, what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{what} is a {type(tensor).__name__}, expected a tensor")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{what} has shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.dtype != dtype:
        raise ValueError(f"{what} has dtype {tensor.dtype}, expected {dtype}")
    if tensor.device != device:
        raise ValueError(f"{what} is on {tensor.device}, expected {device}")


def _check_finite(timestep: Timestep) -> None:
    for name, tensor in _flat(timestep).items():
        rows = timestep.ended if name.startswith("final_obs") else slice(None)
        if tensor.is_floating_point() and not tensor[rows].isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite: {tensor}")


def _check_unchanged(values: dict[str, Tensor], kept: dict[str, Tensor], complaint: str) -> None:
    if values.keys() != kept.keys():
        raise ValueError(f"{sorted(values.keys() ^ kept.keys())} {complaint}")
    for name, value in values.items():
        if not torch.equal(value, kept[name]):
            raise ValueError(f"{name} {complaint}")


def _check_saving(env: VecEnv, saveable: Saveable, masks: Masks, generator: torch.Generator, steps: int = 10) -> None:
    """Save, play some steps, load, play the same actions again, and compare the results."""
    saved = saveable.state_dict()
    played: list[tuple[Actions, dict[str, Tensor]]] = []
    for _ in range(steps):
        actions = sample_actions(env.action_spec, masks, env.num_envs, generator, device=env.device)
        timestep = env.step(actions)
        masks = timestep.masks
        played.append((actions, _flat(timestep)))
    saveable.load_state_dict(saved)
    for actions, expected in played:
        _check_unchanged(_flat(env.step(actions)), expected, "differs when the same steps are taken after load_state_dict")


def _flat(timestep: Timestep) -> dict[str, Tensor]:
    """Return every tensor of a timestep, by a name for error messages."""
    values = {"reward": timestep.reward, "terminated": timestep.terminated, "truncated": timestep.truncated}
    for name in ("valid", "acts"):
        if (flags := getattr(timestep, name)) is not None:
            values[name] = flags
    values |= {f"obs[{name!r}]": value for name, value in timestep.obs.items()}
    values |= {f"masks[{name!r}]": value for name, value in timestep.masks.items()}
    values |= {f"final_obs[{name!r}]": value for name, value in (timestep.final_obs or {}).items()}
    return values
