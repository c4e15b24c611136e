"""A trained controller: one file that holds it, and the controller for growth that acts from it.

The file is safetensors: the weights of the policy, and in its header, as JSON, what they are for, with a sha256 over everything. Nothing in
it is executed. In files from before, the sha256 is of the weights alone.
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
from esper.controller.layout import LAYOUT_VERSION, OPS, blueprint_names, decision, observe, spec
from esper.controller.network import SlotEncoder, make_policy
from esper.controller.network_config import SlotNetworkConfig
from esper.files import FileError, parse_json, reason_of, write_file
from esper.growth.lifecycle.stages import Decision, GrowthState
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.runs import load_module, plain_names, read_tensors
from esper.runs.folder import kind_of, name_of
from esper.runs.tensors import encode_tensors

_HEADER = "esper controller"  # the key of our part of the file's metadata
_SMALL = 1024  # sizes up to this one may belong to parts that a network does not have
_ANOTHER = "copy the file again, or train a controller anew"


class ControllerError(ValueError):
    """A file that no controller can be made of; the message says why and what to do."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says about its weights."""

    layout: str  # what it observes and can decide
    esper: str  # version that wrote it
    network: SlotNetworkConfig
    memory: NetworkConfig
    heads: tuple[str, ...]
    normalize_values: bool
    is_probing: bool  # it was trained with probes of all candidates wherever something could grow
    ops: tuple[str, ...] = OPS  # what it may decide
    actions: int = 1  # in one decision
    sha256: str  # of the weights
    info: dict[str, Any]  # what it was trained on, and whatever else there is to say


def save_controller(
    path: Path | str,
    policy: Policy,
    info: Mapping[str, Any] | None = None,
    *,
    is_probing: bool = False,
    ops: Sequence[str] = OPS,
    actions: int = 1,
) -> None:
    """Write the policy of a controller. A file that is there is replaced in one step, and left alone where it holds the same already."""
    encoder = policy.encoder
    if not isinstance(encoder, SlotEncoder):
        raise ControllerError(f"a controller's policy has a SlotEncoder, and this one a {type(encoder).__name__}; see make_parts")
    weights = {name: weight.detach().cpu().contiguous() for name, weight in plain_names(policy.state_dict()).items()}
    description = Description(
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
    """The controller of a file. With a seed it draws its actions, else it takes the likeliest."""
    weights, description = _read(Path(path))
    _check_sizes(Path(path), description, weights)
    try:
        return Learned(weights, description, seed=seed)
    except ValueError as error:
        raise ControllerError(f"the weights in {path} do not fit their own description; {_ANOTHER} ({error})") from error


class Learned:
    """Decides by a trained policy. What it remembers of the run is its state."""

    name = "learned"

    def __init__(self, weights: Mapping[str, Tensor], description: Description, *, seed: int | None = None) -> None:
        self.description = description
        self._weights = dict(weights)
        self._streams = None if seed is None else Streams(seed)
        self._memory: Tensor | None = None  # [1, S]
        self._room = (1, 1)  # slots and blueprints of the policy
        self._policy = self._build()

    def anew(self) -> Learned:
        """Another one of the same weights, which remembers nothing yet."""
        return Learned(self._weights, self.description, seed=None if self._streams is None else self._streams.seed)

    def _build(self) -> Policy:
        slots, blueprints = self._room
        policy = make_policy(
            self.description.network,
            self.description.memory,
            slots=slots,
            blueprints=blueprints,
            generator=torch.Generator().manual_seed(0),  # what it draws is replaced by the weights
            normalize_values=self.description.normalize_values,
        )
        load_module(policy, self._weights)
        return policy.eval()

    def _fit(self, state: GrowthState) -> None:
        """The policy for exactly as many slots and blueprints as there are; its weights are the same for any number.

        With room for the most that ever were, what it draws would depend on more than its state.
        """
        room = (max(len(state.slots), 1), max(len(blueprint_names(state)), 1))
        if room != self._room:
            self._room = room
            self._policy = self._build()

    def decide(self, state: GrowthState) -> Decision:
        self._fit(state)
        slots, blueprints = self._room
        generator = None if self._streams is None else self._streams.torch("actions")
        chosen: list[dict[str, int]] = []
        for _ in range(self.description.actions):  # all of them, for as many were seen when it was trained
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
            now, then = ("draws its actions", "took the likeliest") if streams is None else ("takes the likeliest actions", "drew them")
            raise ControllerError(f"this controller {now}, and the saved one {then}; load it the same way")
        if self._streams is not None:
            self._streams.load_state_dict(streams)
        self._memory = memory


def _read(path: Path) -> tuple[dict[str, Tensor], Description]:
    try:
        weights, metadata = read_tensors(path)
    except FileNotFoundError as error:
        raise ControllerError(f"there is no file {path}; give the path of a file that training a controller has written") from error
    except IsADirectoryError as error:
        raise ControllerError(f"{path} {_why_no_controller(path)}") from error
    except FileError as error:
        raise ControllerError(f"{error}; {_ANOTHER}") from error
    except OSError as error:
        raise ControllerError(f"no controller can be read: {reason_of(error)}") from error
    header = metadata.get(_HEADER)
    if header is None:
        raise ControllerError(f"{path} holds tensors, but no controller; give a file that training a controller has written")
    description = _describe(path, header)
    if _digest(weights) != description.sha256:
        raise ControllerError(f"{path} is damaged: its weights are not those that were written; {_ANOTHER}")
    return weights, description


def _why_no_controller(folder: Path) -> str:
    kind = kind_of(folder)
    if kind == "controller":
        return f"is a folder; give the controller of that run, {folder / 'controller.safetensors'}"
    what = "is a folder and no file" if kind is None else f"is {name_of(kind)} and not a controller"
    return f"{what}; give the file RUN/controller.safetensors of a controller run"


def _check_sizes(path: Path, description: Description, weights: Mapping[str, Tensor]) -> None:
    """Refuse a description of a network that its weights cannot fill, before memory is taken for it."""
    largest = max((size for weight in weights.values() for size in weight.shape), default=0)
    most = max(largest, len(weights), _SMALL)
    for part in (description.network, description.memory):
        for name, value in msgspec.to_builtins(part).items():
            sizes = value if isinstance(value, list | tuple) else [value]
            if len(sizes) > most or any(type(size) is int and size > most for size in sizes):
                raise ControllerError(f"{path} is damaged: its {name} is larger than its weights; {_ANOTHER}")


def _describe(path: Path, header: str) -> Description:
    try:
        raw = parse_json(header)
        found, writer = raw["layout"], raw["esper"]
        if found == LAYOUT_VERSION:
            description = msgspec.convert(raw, Description)
            if description.heads == tuple(head.name for head in spec(1, 1)[1].heads):
                return description
            found = f"{found} with the heads {', '.join(description.heads)}"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ControllerError(f"{path} is damaged: what it says about its weights cannot be understood; {_ANOTHER} ({error})") from error
    raise ControllerError(
        f"{path} observes and decides by layout {found}, and this esper {esper.__version__} by layout {LAYOUT_VERSION}; "
        f"use it with esper {writer}, or train a controller anew"
    )


def _digest(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].dtype} {tuple(weights[name].shape)}".encode())
        digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()
