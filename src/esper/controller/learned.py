"""Trained controllers: their file, and the controller for growth that decides by it.

A file holds a value model, or a policy that was trained from one (see `esper.controller.network`). It is in the safetensors format: the
weights, and in the header a JSON description and a sha256 of everything. Loading a file executes nothing from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import esper
from esper.controller.config import MoveNetworkConfig
from esper.controller.layout import LAYOUT_VERSION, observe, policy_decision
from esper.controller.network import MoveEncoder, make_policy
from esper.controller.value import ValueController, ValueModel
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
    network: MoveNetworkConfig
    memory: NetworkConfig | None  # of the recurrent core of a policy; None: the file holds a value model
    sha256: str  # of the weights
    info: dict[str, Any]  # run, domain and results of its training, or anything else


def save_controller(
    path: Path | str, trained: Policy | ValueModel, info: Mapping[str, Any] | None = None, *, network: MoveNetworkConfig | None = None
) -> None:
    """Write a controller to a file. An existing file is replaced atomically, unless its content is the same.

    `network` gives the caution of a value model; a policy has its own.
    """
    memory = None
    if isinstance(trained, ValueModel):
        network = msgspec.structs.replace(network or MoveNetworkConfig(), members=trained.members, width=trained.width)
    elif isinstance(trained.encoder, MoveEncoder):
        network, memory = trained.encoder.config, trained.network
    else:
        raise ControllerError(
            f"a controller's policy needs a MoveEncoder, but this one has a {type(trained.encoder).__name__}; see make_parts"
        )
    weights = {name: weight.detach().cpu().contiguous() for name, weight in plain_names(trained.state_dict()).items()}
    description = ControllerDescription(
        layout=LAYOUT_VERSION,
        esper=esper.__version__,
        network=network,
        memory=memory,
        sha256=_digest(weights),
        info=dict(info or {}),
    )
    parts = encode_tensors(weights, {_HEADER: json.dumps(msgspec.to_builtins(description), allow_nan=False)})
    target = Path(path)
    if not target.is_file() or target.read_bytes() != b"".join(parts):
        write_file(target, *parts)


def load_controller(path: Path | str, *, seed: int | None = None) -> Learned:
    """Return the controller of a file. With a `seed` a policy samples its moves; otherwise it makes the most likely ones."""
    weights, description = _read(Path(path))
    _check_sizes(Path(path), description, weights)
    try:
        return Learned(weights, description, seed=seed)
    except ValueError as error:
        raise ControllerError(f"the weights in {path} do not fit their own description; {_WHAT_TO_DO} ({error})") from error


class Learned:
    """Controller that decides by a trained policy or value model. Its state is the memory of the policy and its random streams."""

    name = "learned"

    def __init__(self, weights: Mapping[str, Tensor], description: ControllerDescription, *, seed: int | None = None) -> None:
        self.description = description
        self._weights = dict(weights)
        self._streams = None if seed is None else Streams(seed)
        self._memory: Tensor | None = None  # [1, size of the recurrent state]
        self.trained = self._build()

    def new_copy(self) -> Learned:
        """Return a new controller with the same weights and an empty memory."""
        return Learned(self._weights, self.description, seed=None if self._streams is None else self._streams.seed)

    def _build(self) -> Policy | ValueModel:
        network, memory = self.description.network, self.description.memory
        generator = torch.Generator().manual_seed(0)  # initial weights are overwritten below
        if memory is None:
            model: Policy | ValueModel = ValueModel(width=network.width, members=network.members, generator=generator)
        else:
            model = make_policy(network, memory, generator=generator)
        load_module(model, self._weights)
        return model.eval()

    @property
    def value(self) -> ValueModel:
        """The value model, or the one that is a part of the policy."""
        if isinstance(self.trained, ValueModel):
            return self.trained
        assert isinstance(self.trained.encoder, MoveEncoder)
        return self.trained.encoder.value

    def decide(self, state: GrowthState) -> Decision:
        """Choose a move, or to grow nothing."""
        if isinstance(self.trained, ValueModel):
            return ValueController(self.trained, caution=self.description.network.caution).decide(state)
        obs, masks = observe([state])
        generator = None if self._streams is None else self._streams.torch("actions")
        actions, self._memory = self.trained.act(obs, self._memory, masks=masks, generator=generator)
        return policy_decision(state, int(actions["move"]))

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
        if memory is not None and isinstance(self.trained, Policy):
            self.trained.core.check_state(memory, 1)
        if (streams is None) != (self._streams is None):
            now, then = (
                ("samples its moves", "made the most likely ones") if streams is None else ("makes the most likely moves", "sampled them")
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
    for part in filter(None, (description.network, description.memory)):
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
            return msgspec.convert(raw, ControllerDescription)
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
