"""Trained controllers: their file, and the controller for growth that decides by it.

A file holds an ensemble that improves on the heuristic (see `esper.controller.branches`), a value model, or a policy that was trained from
one (see `esper.controller.network`). It is in the safetensors format: the weights, and in the header a JSON description (see
`esper.controller.description`) and a sha256 of everything. Loading a file executes nothing from it.
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
from esper.controller.branches import Gains, Improved
from esper.controller.config import GainsConfig, MoveNetworkConfig
from esper.controller.description import HEADER, VERSIONS, WHAT_TO_DO, ControllerDescription, ControllerError, explained, parse_description
from esper.controller.layout import LAYOUT_VERSION, observe, policy_decision
from esper.controller.network import MoveEncoder, make_policy
from esper.controller.tokens import VERSION
from esper.controller.value import ValueController, ValueModel
from esper.files import FileError, read_in_run, write_in_run
from esper.growth.config import GrowthConfig
from esper.growth.lifecycle.stages import Decision, GrowthState
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.runs import load_module, plain_names, read_tensors
from esper.runs.tensors import encode_tensors

Trained = Policy | ValueModel | Gains
_SMALL = 1024  # sizes up to this are not checked, since they may belong to optional parts without weights


def save_controller(
    path: Path | str,
    trained: Trained,
    info: Mapping[str, Any] | None = None,
    *,
    network: MoveNetworkConfig | None = None,
    gains: GainsConfig | None = None,
) -> None:
    """Write a controller to a file. An existing file is replaced atomically, unless its content is the same.

    `network` gives the caution of a value model, and `gains` that of an ensemble; a policy has its own.
    """
    memory = None
    if isinstance(trained, Gains):
        gains = msgspec.structs.replace(gains or GainsConfig(), members=trained.members, width=trained.width)
    elif isinstance(trained, ValueModel):
        network = msgspec.structs.replace(network or MoveNetworkConfig(), members=trained.members, width=trained.width)
    elif isinstance(trained.encoder, MoveEncoder):
        network, memory = trained.encoder.config, trained.network
    else:
        raise ControllerError(
            f"a controller's policy needs a MoveEncoder, but this one has a {type(trained.encoder).__name__}; see make_parts"
        )
    weights = {name: weight.detach().cpu().contiguous() for name, weight in plain_names(trained.state_dict()).items()}
    description = ControllerDescription(
        version=VERSIONS.present,
        layout=LAYOUT_VERSION if gains is None else VERSION,
        esper=esper.__version__,
        network=network,
        memory=memory,
        gains=gains,
        sha256=_digest(weights),
        info=dict(info or {}),
    )
    parts = encode_tensors(weights, {HEADER: json.dumps(msgspec.to_builtins(description), allow_nan=False)})
    target = Path(path)
    try:
        is_there = read_in_run(target, max_bytes=sum(map(len, parts))) == b"".join(parts)
    except (OSError, FileError):
        is_there = False
    if not is_there:
        write_in_run(target, *parts)


def load_controller(path: Path | str, *, seed: int | None = None, config: GrowthConfig | None = None) -> Learned:
    """Return the controller of a file. With a `seed` a policy samples its moves; otherwise it makes the most likely ones.

    `config` has the rules of the heuristic, for a controller that improves on it; None: the usual ones.
    """
    weights, description = _read(Path(path))
    _check_sizes(Path(path), description, weights)
    try:
        return Learned(weights, description, seed=seed, config=config)
    except ValueError as error:
        raise ControllerError(f"the weights in {path} do not fit their own description; {WHAT_TO_DO} ({error})") from error


class Learned:
    """Controller that decides by a trained ensemble, policy or value model. Its state is their memory and random streams.

    An ensemble improves on the heuristic with the rules of `config`; None: the usual ones.
    """

    name = "learned"

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        description: ControllerDescription,
        *,
        seed: int | None = None,
        config: GrowthConfig | None = None,
    ) -> None:
        self.description, self._config = description, config or GrowthConfig()
        self._weights = dict(weights)
        self._streams = None if seed is None else Streams(seed)
        self._memory: Tensor | None = None  # [1, size of the recurrent state]
        self.trained = self._build()
        self._improved = None if description.gains is None else self._improve(description.gains)

    def new_copy(self) -> Learned:
        """Return a new controller with the same weights and an empty memory."""
        seed = None if self._streams is None else self._streams.seed
        return Learned(self._weights, self.description, seed=seed, config=self._config)

    def _build(self) -> Trained:
        network, memory, gains = self.description.network, self.description.memory, self.description.gains
        generator = torch.Generator().manual_seed(0)  # initial weights are overwritten below
        if gains is not None:
            model: Trained = Gains(width=gains.width, members=gains.members, generator=generator)
        elif memory is None:
            assert network is not None
            model = ValueModel(width=network.width, members=network.members, generator=generator)
        else:
            assert network is not None
            model = make_policy(network, memory, generator=generator)
        load_module(model, self._weights)
        return model.eval()

    def _improve(self, gains: GainsConfig) -> Improved:
        assert isinstance(self.trained, Gains)
        return Improved(self.trained, self._config, caution=gains.caution, most=gains.most, tries=gains.tries)

    @property
    def most_trials(self) -> int:
        """Number of trials that it asks for at once."""
        return 0 if self._improved is None else self._improved.most_trials

    @property
    def value(self) -> ValueModel:
        """The value model, or the one that is a part of the policy. Raise ControllerError if there is none."""
        if isinstance(self.trained, ValueModel):
            return self.trained
        if isinstance(self.trained, Gains):
            raise ControllerError("this controller improves on the heuristic and has no value model; start from another file, or from none")
        assert isinstance(self.trained.encoder, MoveEncoder)
        return self.trained.encoder.value

    def decide(self, state: GrowthState) -> Decision:
        """Decide what grows, if anything does."""
        if self._improved is not None:
            return self._improved.decide(state)
        assert not isinstance(self.trained, Gains)
        assert self.description.network is not None
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
            "improved": None if self._improved is None else self._improved.state_dict(),
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
        if self._improved is not None:
            self._improved.load_state_dict(state["improved"])
        self._memory = memory


def _read(path: Path) -> tuple[dict[str, Tensor], ControllerDescription]:
    """Read weights and description of a controller file, or raise ControllerError."""
    with explained(path):
        weights, metadata = read_tensors(path)
    description = parse_description(path, metadata, layouts=(LAYOUT_VERSION, VERSION))
    if _digest(weights) != description.sha256:
        raise ControllerError(f"{path} is damaged: its weights do not match their sha256; {WHAT_TO_DO}")
    return weights, description


def _check_sizes(path: Path, description: ControllerDescription, weights: Mapping[str, Tensor]) -> None:
    """Raise ControllerError if the described network is larger than the weights, before memory is allocated for it."""
    largest = max((size for weight in weights.values() for size in weight.shape), default=0)
    most = max(largest, len(weights), _SMALL)
    for part in filter(None, (description.network, description.memory, description.gains)):
        for name, value in msgspec.to_builtins(part).items():
            sizes = value if isinstance(value, list | tuple) else [value]
            if len(sizes) > most or any(type(size) is int and size > most for size in sizes):
                raise ControllerError(f"{path} is damaged: its {name} is larger than its weights; {WHAT_TO_DO}")


def _digest(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names, dtypes, shapes and values of the weights."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].dtype} {tuple(weights[name].shape)}".encode())
        digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()
