"""Gymnasium wrappers that prepare images for convolutional policies: resize, convert to grey, stack frames.

    env = make("ALE/Pong-v5", 8, wrappers=[ResizeImage, StackFrames])  # pip install ale-py
    esper ppo train ALE/Pong-v5 --wrappers esper.vecenv.images:ResizeImage esper.vecenv.images:StackFrames

`ResizeImage` takes images of bytes [height, width, channels], `StackFrames` any arrays. To change the settings of a wrapper, give a
function: `wrappers=[lambda env: ResizeImage(env, size=(64, 64), grey=False)]`. They need Gymnasium, but neither OpenCV nor torchvision.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Array = np.ndarray[Any, np.dtype[Any]]
_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # brightness of red, green and blue (ITU-R BT.601)


class ResizeImage(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Resizes images to `size` (height, width); each pixel is the mean of its area. With `grey`, colours become one channel."""

    def __init__(self, env: gymnasium.Env[Any, Any], size: tuple[int, int] = (84, 84), grey: bool = True) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
            raise ValueError(f"ResizeImage takes images of bytes, [height, width] or [height, width, channels]; got {space}")
        shape = (*space.shape, 1)[:3]
        if shape[0] < shape[2]:
            raise ValueError(f"ResizeImage takes images with their channels last, [height, width, channels]; got the shape {space.shape}")
        self.grey = grey and shape[2] == 3
        self._rows, self._columns = _area_weights(shape[0], size[0]), _area_weights(shape[1], size[1]).T
        channels = 1 if self.grey else shape[2]
        self.observation_space = spaces.Box(0, 255, (*size, channels), np.uint8)

    def observation(self, observation: Array) -> Array:
        image = observation.reshape(*observation.shape[:2], -1).astype(np.float32)
        if self.grey:
            image = image @ _GREY[:, None]
        # Move channels first, [C, H, W], so that both products are ordinary matrix products.
        resized = self._rows @ image.transpose(2, 0, 1) @ self._columns
        result: Array = np.rint(resized).astype(np.uint8).transpose(1, 2, 0)
        return np.ascontiguousarray(result)


class StackFrames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Joins the last `count` observations, newest last. At the start of an episode, the first observation is repeated.

    Images are joined along their channels, other arrays along their last axis.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], count: int = 4) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or not space.shape:
            raise ValueError(f"StackFrames takes arrays; got {space}")
        if count < 1:
            raise ValueError(f"StackFrames needs a count of at least 1; got {count}")
        self.count = count
        self._axis = 0 if len(space.shape) == 3 and space.shape[0] < space.shape[2] else len(space.shape) - 1
        low, high = (np.concatenate([bound] * count, axis=self._axis) for bound in (space.low, space.high))
        self.observation_space = spaces.Box(low, high, dtype=space.dtype)
        self._frames: list[Array] = []

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        self._frames = [np.array(observation)] * self.count
        return np.concatenate(self._frames, axis=self._axis), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._frames = [*self._frames[1:], np.array(observation)]  # copy, because an environment may reuse its buffer
        return np.concatenate(self._frames, axis=self._axis), reward, terminated, truncated, info


def _area_weights(length: int, wanted: int) -> Array:
    """Return weights [wanted, length] that average a line of `length` pixels over `wanted` equal parts; each row sums to 1."""
    edges = np.arange(wanted + 1) * (length / wanted)
    pixels = np.arange(length)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    weights: Array = (np.clip(covered, 0.0, None) * (wanted / length)).astype(np.float32)
    return weights
