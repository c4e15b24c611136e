"""Trained controllers: their file, and the controller for growth that decides by the policy in it.

The file is in the safetensors format: the weights of the policy, and in the header a JSON description and a sha256 of everything. Files of
earlier versions only have the sha256 of the weights, which is in the description. Loading a file executes nothing from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import esper
from esper.controller.config import SlotNetworkConfig
from esper.controller.layout import LAYOUT_VERSION, OPS, blueprint_names, decision, in_depth, observe, spec
from esper.controller.network import SlotEncoder, make_policy
from esper.files import FileError, parse_json, reason_of, write_file
from esper.growth.lifecycle.stages import Decision, GrowthState
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.runs import load_module, plain_names, read_tensors
from esper.runs.folder import kind_of, name_of
from esper.runs.tensors import encode_tensors

_HEADER = "esper controller"  # key of the description in the file's metadata
_SMALL = 1024  # sizes up to this are not checked, since they may belong to optional parts without weights
_WHAT_TO_DO = "copy the file again, or train a new controller"


class ControllerError(ValueError):
    """A controller file or state that cannot be used; the message says why and what to do."""


class ControllerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the weights in a controller file."""

    layout: str  # version of the layout of observations and actions
    esper: str  # version that wrote the file
    network: SlotNetworkConfig
    memory: NetworkConfig  # of the recurrent core
    heads: tuple[str, ...]  # of an action, see `esper.controller.layout`
    normalize_values: bool
    is_probing: bool  # it was trained with a probe of all candidates before every decision
    ops: tuple[str, ...] = OPS  # allowed kinds of action
    actions: int = 1  # per decision
    sha256: str  # of the weights
    info: dict[str, Any]  # run, domain and results of its training, or anything else


def save_controller(
    path: Path | str,
    policy: Policy,
    info: Mapping[str, Any] | None = None,
    *,
    is_probing: bool = False,
    ops: Sequence[str] = OPS,
    actions: int = 1,
) -> None:
    """Write the policy of a controller to a file. An existing file is replaced atomically, unless its content is the same."""
    encoder = policy.encoder
    if not isinstance(encoder, SlotEncoder):
        raise ControllerError(f"a controller's policy needs a SlotEncoder, but this one has a {type(encoder).__name__}; see make_parts")
    weights = {name: weight.detach().cpu().contiguous() for name, weight in plain_names(policy.state_dict()).items()}
    description = ControllerDescription(
        layout=LAYOUT_VERSION,
        esper=esper.__version__,
        network=encoder.config,
        memory=policy.network,
        heads=policy.distribution.head_names,
        normalize_values=policy.value_normalizer is not None,
        is_probing=is_probing,
        ops=tuple(ops),
        actions=actions,
        sha256=_digest(weights),
        info=dict(info or {}),
    )
    parts = encode_tensors(weights, {_HEADER: json.dumps(msgspec.to_builtins(description), allow_nan=False)})
    target = Path(path)
    if not target.is_file() or target.read_bytes() != b"".join(parts):
        write_file(target, *parts)


def load_controller(path: Path | str, *, seed: int | None = None) -> Learned:
    """Return the controller of a file. With a `seed` it samples its actions; otherwise it takes the most likely ones."""
    weights, description = _read(Path(path))
    _check_sizes(Path(path), description, weights)
    try:
        return Learned(weights, description, seed=seed)
    except ValueError as error:
        raise ControllerError(f"the weights in {path} do not fit their own description; {_WHAT_TO_DO} ({error})") from error


class Learned:
    """Controller that decides by a trained policy. Its state is the memory of the policy and its random streams."""

    name = "learned"

    def __init__(self, weights: Mapping[str, Tensor], description: ControllerDescription, *, seed: int | None = None) -> None:
        self.description = description
        self._weights = dict(weights)
        self._streams = None if seed is None else Streams(seed)
        self._memory: Tensor | None = None  # [1, size of the recurrent state]
        self._room = (1, 1)  # number of slots and blueprints that the policy is built for
        self._policy = self._build()

    def new_copy(self) -> Learned:
        """Return a new controller with the same weights and an empty memory."""
        return Learned(self._weights, self.description, seed=None if self._streams is None else self._streams.seed)

    def _build(self) -> Policy:
        """Build the policy for the present number of slots and blueprints."""
        slots, blueprints = self._room
        policy = make_policy(
            self.description.network,
            self.description.memory,
            slots=slots,
            blueprints=blueprints,
            generator=torch.Generator().manual_seed(0),  # initial weights are overwritten below
            normalize_values=self.description.normalize_values,
        )
        load_module(policy, self._weights)
        return policy.eval()

    def _fit(self, state: GrowthState) -> None:
        """Rebuild the policy if the number of slots or blueprints has changed. Its weights do not depend on these numbers.

        The sizes must be exact: with padding for the largest numbers so far, the sampled actions would depend on more than the state.
        """
        room = (max(len(state.slots), 1), max(len(blueprint_names(state)), 1))
        if room != self._room:
            self._room = room
            self._policy = self._build()

    def decide(self, state: GrowthState) -> Decision:
        """Choose the actions of this decision one after another. Each observation shows the choices before it."""
        state = in_depth(state)
        self._fit(state)
        slots, blueprints = self._room
        generator = None if self._streams is None else self._streams.torch("actions")
        chosen: list[dict[str, int]] = []
        for _ in range(self.description.actions):  # also after a wait, because the memory saw as many steps in training
            obs, masks = observe([state], slots=slots, blueprints=blueprints, ops=self.description.ops, chosen=[chosen])
            actions, self._memory = self._policy.act(obs, self._memory, masks=masks, generator=generator)
            chosen.append({head: int(choice) for head, choice in actions.items()})
        probe = self.description.is_probing and any(slot.candidates for slot in state.slots)
        return decision(state, chosen, probe=probe)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sha256": self.description.sha256,
            "memory": None if self._memory is None else self._memory.clone(),
            "streams": None if self._streams is None else self._streams.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["sha256"] != self.description.sha256:
            raise ControllerError("the saved run was decided by another controller file; resume it with the same one")
        memory, streams = state["memory"], state["streams"]
        if memory is not None:
            self._policy.core.check_state(memory, 1)
        if (streams is None) != (self._streams is None):
            now, then = (
                ("samples its actions", "took the most likely ones")
                if streams is None
                else ("takes the most likely actions", "sampled them")
            )
            raise ControllerError(f"this controller {now}, but the saved one {then}; load it in the same way, with or without a seed")
        if self._streams is not None:
            self._streams.load_state_dict(streams)
        self._memory = memory


def _read(path: Path) -> tuple[dict[str, Tensor], ControllerDescription]:
    """Read weights and description of a controller file, or raise ControllerError."""
    try:
        weights, metadata = read_tensors(path)
    except FileNotFoundError as error:
        raise ControllerError(f"there is no file {path}; give the path of a controller file, such as RUN/controller.safetensors") from error
    except IsADirectoryError as error:
        raise ControllerError(f"{path} {_why_no_controller(path)}") from error
    except FileError as error:
        raise ControllerError(f"{error}; {_WHAT_TO_DO}") from error
    except OSError as error:
        raise ControllerError(f"no controller can be read: {reason_of(error)}") from error
    header = metadata.get(_HEADER)
    if header is None:
        raise ControllerError(f"{path} holds tensors, but no controller; give a controller file, such as RUN/controller.safetensors")
    description = _parse_description(path, header)
    if _digest(weights) != description.sha256:
        raise ControllerError(f"{path} is damaged: its weights do not match their sha256; {_WHAT_TO_DO}")
    return weights, description


def _why_no_controller(folder: Path) -> str:
    """Describe a folder that was given instead of a controller file."""
    kind = kind_of(folder)
    if kind == "controller":
        return f"is a folder; give the controller of that run, {folder / 'controller.safetensors'}"
    what = "is a folder and no file" if kind is None else f"is {name_of(kind)} and not a controller"
    return f"{what}; give the file RUN/controller.safetensors of a controller run"


def _check_sizes(path: Path, description: ControllerDescription, weights: Mapping[str, Tensor]) -> None:
    """Raise ControllerError if the described network is larger than the weights, before memory is allocated for it."""
    largest = max((size for weight in weights.values() for size in weight.shape), default=0)
    most = max(largest, len(weights), _SMALL)
    for part in (description.network, description.memory):
        for name, value in msgspec.to_builtins(part).items():
            sizes = value if isinstance(value, list | tuple) else [value]
            if len(sizes) > most or any(type(size) is int and size > most for size in sizes):
                raise ControllerError(f"{path} is damaged: its {name} is larger than its weights; {_WHAT_TO_DO}")


def _parse_description(path: Path, header: str) -> ControllerDescription:
    """Parse the description of a controller file, and check that its layout is the present one."""
    try:
        raw = parse_json(header)
        found, writer = raw["layout"], raw["esper"]
        if found == LAYOUT_VERSION:
            description = msgspec.convert(raw, ControllerDescription)
            if description.heads == tuple(head.name for head in spec(1, 1)[1].heads):
                return description
            found = f"{found} with the heads {', '.join(description.heads)}"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ControllerError(f"{path} is damaged: its description cannot be understood; {_WHAT_TO_DO} ({error})") from error
    raise ControllerError(
        f"{path} has layout {found} of observations and actions, but this esper {esper.__version__} has layout {LAYOUT_VERSION}; "
        f"use it with esper {writer}, or train a new controller"
    )


def _digest(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names, dtypes, shapes and values of the weights."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].dtype} {tuple(weights[name].shape)}".encode())
        digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()
