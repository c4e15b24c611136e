"""Read action masks from the observations, infos or methods of Gymnasium environments.

Shapes: N = parallel environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from esper.vecenv.actions import ActionSpec
from esper.vecenv.contract import Masks

Array = np.ndarray[Any, np.dtype[Any]]
KEY = "action_mask"


def split_masks(spec: ActionSpec, mask: Any, num_envs: int) -> Masks:
    """Return masks by head from one mask, or from a dictionary of masks by head.

    One mask is [num_envs, sum of the sizes of all discrete heads]; for a single environment, the first dimension may be missing.
    """
    if isinstance(mask, Mapping):
        shapes = {head.name: spec.mask_shape(head) for head in spec.discrete}
        given = {name: np.asarray(value, dtype=np.bool_).reshape(num_envs, *shapes[name]) for name, value in mask.items()}
        return {name: torch.from_numpy(value.copy()) for name, value in given.items()}
    flat = np.asarray(mask, dtype=np.bool_)
    reader = MaskReader(spec, num_envs, in_obs=True)
    return reader.read({KEY: flat[None] if flat.ndim == 1 and num_envs == 1 else flat}, {})


class MaskReader:
    """Reads `action_mask` from observations (`in_obs`) or infos, or one `action_mask/<head>` per head from infos.

    If the infos hold none, `ask()` returns the flat masks of all environments, like the method `action_masks` of sb3-contrib.
    """

    def __init__(self, spec: ActionSpec, num_envs: int, *, in_obs: bool, ask: Callable[[], Sequence[Any] | Array] | None = None) -> None:
        self.num_envs = num_envs
        self.in_obs = in_obs
        self._ask = ask
        self._shapes = {head.name: spec.mask_shape(head) for head in spec.discrete}
        self._keys = {f"{KEY}/{name}": name for name in self._shapes}
        # A flat mask concatenates the masks of all heads. A head with a parent has a matrix as its mask, so it cannot be part of it.
        self._widths = {head.name: head.size for head in spec.discrete if head.parent is None}
        self._is_flat = len(self._widths) == len(self._shapes)

    def read(self, obs: Any, infos: Mapping[str, Any]) -> Masks:
        """Return bool masks by head, `[N, size]` or `[N, parent size, size]`."""
        if self.in_obs:
            return self._split(obs)
        if KEY in infos:
            return self._split(infos)
        found = {name: torch.from_numpy(self._rows(infos, key, self._shapes[name])) for key, name in self._keys.items() if key in infos}
        if found or self._ask is None:
            return found
        return self._split({KEY: [_flat(mask) for mask in self._ask()]})

    def _split(self, source: Mapping[str, Any]) -> Masks:
        """Return the masks by head from `source[KEY]`, which is a flat mask or a dictionary by head."""
        by_head = source[KEY]
        if isinstance(by_head, Mapping):
            return {
                name: torch.from_numpy(self._rows(by_head, name, shape))
                for name, shape in self._shapes.items()
                if by_head.get(name) is not None
            }
        if not self._is_flat:
            raise ValueError(
                f"a flat {KEY!r} cannot hold the mask of a head that depends on another head; give these in the infos: {list(self._keys)}"
            )
        flat = torch.from_numpy(self._rows(source, KEY, (sum(self._widths.values()),)))
        return dict(zip(self._widths, torch.split_with_sizes(flat, list(self._widths.values()), 1), strict=True))

    def _rows(self, source: Mapping[str, Any], key: str, shape: tuple[int, ...]) -> Array:
        """Return the mask under `key` as new bool `[N, *shape]`; true where an environment gave none."""
        values = np.asarray(source[key])
        present = source.get(f"_{key}")
        if values.dtype != object:
            if values.shape != (self.num_envs, *shape):
                raise ValueError(f"{key!r} has shape {values.shape}, expected {(self.num_envs, *shape)}")
            given: Array = values.astype(np.bool_)
            if present is not None and not present.all():
                given[~present] = True
            return given
        rows = np.ones((self.num_envs, *shape), dtype=np.bool_)
        for row, value in enumerate(values):
            if value is None or (present is not None and not present[row]):
                continue
            mask = _flat(value) if isinstance(value, list | tuple) else np.asarray(value)
            if mask.shape != shape:
                raise ValueError(f"{key!r} of environment {row} has shape {mask.shape}, expected {shape}")
            rows[row] = mask
        return rows


def _flat(mask: Any) -> Array:
    """Return one environment's mask as a vector, given one array or one array per head."""
    flat: Array = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, list | tuple) else np.ravel(mask)
    return flat
