"""Images as convolutional policies like them: small, grey, several frames at once. Needs Gymnasium; neither OpenCV nor torchvision.

    env = make("ALE/Pong-v5", 8, wrappers=[ResizeImage, StackFrames])
    esper ppo train ALE/Pong-v5 --wrappers esper.vecenv.images:ResizeImage esper.vecenv.images:StackFrames

Each goes around one Gymnasium environment whose observation is an image [height, width, channels] of bytes, or any array for `StackFrames`.
A wrapper with other settings is a function: `wrappers=[lambda env: ResizeImage(env, size=(64, 64), grey=False)]`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Array = np.ndarray[Any, np.dtype[Any]]
_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # how bright red, green and blue look (ITU-R BT.601)


class ResizeImage(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Images of `size`, [height, width, 1] where `grey` and else with their channels. A pixel is the mean of its area."""

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
        # Channels first, so that both products are those of whole matrices: [C, H, W].
        resized = self._rows @ image.transpose(2, 0, 1) @ self._columns
        result: Array = np.rint(resized).astype(np.uint8).transpose(1, 2, 0)
        return np.ascontiguousarray(result)


class StackFrames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The last `count` observations as one, the newest last. An episode begins with its first one `count` times.

    Images are joined along their channels, and so stay images; other arrays along their last axis.
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
        self._frames = [*self._frames[1:], np.array(observation)]  # copied: an environment may write over what it gave
        return np.concatenate(self._frames, axis=self._axis), reward, terminated, truncated, info


def _area_weights(length: int, wanted: int) -> Array:
    """[wanted, length]: how much of each of `length` pixels in a row lies in each of `wanted` equal parts of it; rows add up to 1."""
    edges = np.arange(wanted + 1) * (length / wanted)
    pixels = np.arange(length)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    weights: Array = (np.clip(covered, 0.0, None) * (wanted / length)).astype(np.float32)
    return weights
