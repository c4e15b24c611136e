"""Trained controllers: their file, and the controller for growth that decides by it.

A file holds an ensemble that improves on the heuristic (see `esper.controller.branches`), a policy (see `esper.controller.policy`), or
both: then the policy sees what the ensemble would do, and otherwise what the heuristic would. The file is in the safetensors format: the
weights, and in the header a JSON description (see `esper.controller.description`) and a sha256 of everything. Loading a file executes
nothing from it.
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
from esper.controller.config import GainsConfig
from esper.controller.description import HEADER, VERSIONS, WHAT_TO_DO, ControllerDescription, ControllerError, explained, parse_description
from esper.controller.features import VERSION
from esper.controller.policy import SIZES, StepController, StepEncoder, make_policy
from esper.files import FileError, read_in_run, write_in_run
from esper.growth.config import GrowthConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.lifecycle.stages import CompleteController, Decision, GrowthState
from esper.rl.policy import Policy
from esper.runs import load_module, plain_names, read_tensors
from esper.runs.tensors import encode_tensors

_POLICY = "policy."  # begins the names of the weights of a policy
_SMALL = 1024  # sizes up to this are not checked, since they may belong to optional parts without weights


def save_controller(
    path: Path | str,
    policy: Policy | None = None,
    info: Mapping[str, Any] | None = None,
    *,
    ensemble: Gains | None = None,
    gains: GainsConfig | None = None,
) -> None:
    """Write a policy, an ensemble or both to a file. An existing file is replaced atomically, unless its content is the same.

    `gains` says how the ensemble decides; a policy has its own settings.
    """
    assert policy is not None or ensemble is not None, "a controller file holds a policy, an ensemble or both"
    network = memory = None
    if policy is not None:
        if not isinstance(policy.encoder, StepEncoder):
            raise ControllerError(
                f"a controller's policy needs a StepEncoder, but this one has a {type(policy.encoder).__name__}; see make_policy"
            )
        network, memory = policy.encoder.config, policy.network
    if ensemble is not None:
        gains = msgspec.structs.replace(gains or GainsConfig(), members=ensemble.members, width=ensemble.width)
    weights = {
        prefix + name: weight.detach().cpu().contiguous()
        for prefix, part in ((_POLICY, policy), ("", ensemble))
        if part is not None
        for name, weight in plain_names(part.state_dict()).items()
    }
    description = ControllerDescription(
        version=VERSIONS.present,
        layout=VERSION,
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
    """Return the controller of a file. With a `seed` a policy draws its steps; otherwise it takes the likeliest ones.

    `config` has the rules of the heuristic; None: the usual ones.
    """
    weights, description = _read(Path(path))
    _check_sizes(Path(path), description, weights)
    try:
        return Learned(weights, description, seed=seed, config=config)
    except ValueError as error:
        raise ControllerError(f"the weights in {path} do not fit their own description; {WHAT_TO_DO} ({error})") from error


class Learned:
    """Controller that decides by a trained ensemble or policy. Both know what the heuristic would do, by the rules of `config`."""

    name = "learned"

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        description: ControllerDescription,
        *,
        seed: int | None = None,
        config: GrowthConfig | None = None,
    ) -> None:
        self.description, self._weights, self._config, self._seed = description, dict(weights), config or GrowthConfig(), seed
        network, memory, gains = description.network, description.memory, description.gains
        generator = torch.Generator().manual_seed(0)  # initial weights are overwritten
        of_policy = {name.removeprefix(_POLICY): weight for name, weight in weights.items() if name.startswith(_POLICY)}
        self.ensemble: Gains | None = None
        self.policy: Policy | None = None
        if gains is not None:
            self.ensemble = Gains(width=gains.width, members=gains.members, generator=generator)
            load_module(self.ensemble, {name: weight for name, weight in weights.items() if not name.startswith(_POLICY)})
        if network is not None and memory is not None:
            self.policy = make_policy(network, memory, SIZES, generator=generator)
            load_module(self.policy, of_policy)
        self.inner: CompleteController
        if self.policy is not None:
            self.inner = StepController(self.policy, self.advisor(self._config), seed=seed)
        else:
            self.inner = self._without_policy(self._config, tries=gains is not None and gains.tries)

    def advisor(self, config: GrowthConfig) -> CompleteController:
        """Return a new controller that advises a policy: the ensemble or, if there is none, the heuristic. It tries nothing in copies."""
        return self._without_policy(config, tries=False)

    def _without_policy(self, config: GrowthConfig, *, tries: bool) -> CompleteController:
        gains = self.description.gains
        if self.ensemble is None or gains is None:
            return Heuristic(config)
        return Improved(self.ensemble.eval(), config, caution=gains.caution, most=gains.most, tries=tries)

    def new_copy(self) -> Learned:
        """Return a new controller with the same weights and an empty memory."""
        return Learned(self._weights, self.description, seed=self._seed, config=self._config)

    @property
    def most_trials(self) -> int:
        """Number of trials that it asks for at once."""
        most: int = getattr(self.inner, "most_trials", 0)
        return most

    def decide(self, state: GrowthState) -> Decision:
        """Decide what grows, if anything does."""
        return self.inner.decide(state)

    def state_dict(self) -> dict[str, Any]:
        return {"sha256": self.description.sha256, "draws": self._seed is not None, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["sha256"] != self.description.sha256:
            raise ControllerError("the saved run was decided by another controller file; resume it with the same one")
        if state["draws"] != (self._seed is not None):
            now, then = ("takes the likeliest", "drew its") if state["draws"] else ("draws its", "took the likeliest")
            raise ControllerError(f"this controller {now} steps, but the saved one {then}; load it in the same way, with or without a seed")
        self.inner.load_state_dict(state["inner"])


def _read(path: Path) -> tuple[dict[str, Tensor], ControllerDescription]:
    """Read weights and description of a controller file, or raise ControllerError."""
    with explained(path):
        weights, metadata = read_tensors(path)
    description = parse_description(path, metadata, layouts=(VERSION,))
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
