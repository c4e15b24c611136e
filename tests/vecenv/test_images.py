"""Images are resized, made grey and stacked for the convolutions."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from esper.rl import PPO, NetworkConfig, PPOConfig
from esper.rl.networks import ImageEncoder
from esper.vecenv import check_env, make
from esper.vecenv.images import ResizeImage, StackFrames


class Film(gymnasium.Env):
    """Red pictures that grow brighter by 10 with every step. Episodes of 6 steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (210, 160, 3)) -> None:
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.picture = np.zeros(shape, np.uint8)

    def look(self):
        self.picture[..., 0] = 10 * self.count  # the same memory every time
        return self.picture

    def reset(self, *, seed=None, options=None):
        self.count = 1
        return self.look(), {}

    def step(self, action):
        self.count += 1
        return self.look(), 1.0, False, self.count == 7, {}


def test_a_resized_pixel_is_the_mean_of_its_area():
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    env = ResizeImage(Film((6, 8, 3)), size=(3, 2), grey=False)
    blocks = picture.reshape(3, 2, 2, 4, 3).mean(axis=(1, 3))
    np.testing.assert_array_equal(env.observation(picture), np.rint(blocks).astype(np.uint8))
    uneven = ResizeImage(Film((3, 3, 3)), size=(2, 2), grey=False)
    column = np.array([0, 60, 120], np.uint8)[:, None, None].repeat(3, 1).repeat(3, 2)
    assert uneven.observation(column)[:, 0, 0].tolist() == [20, 100]  # 2/3 of the first and 1/3 of the second
    whole = np.full((210, 160, 3), 200, np.uint8)
    assert np.unique(ResizeImage(Film()).observation(whole)).tolist() == [200]
    red = ResizeImage(Film()).observation(whole * np.array([1, 0, 0], np.uint8))
    assert (red.shape, red.dtype, red[0, 0, 0]) == ((84, 84, 1), np.uint8, 60)  # 0.299 · 200


def test_frames_are_stacked_newest_last_and_restart_with_an_episode():
    env = make(Film, 2, wrappers=[ResizeImage, StackFrames])
    assert env.observation_spec["obs"].shape == (84, 84, 4)
    assert env.reset().obs["obs"][0, 0, 0].tolist() == [3, 3, 3, 3]
    act = {"action": torch.zeros(2, dtype=torch.int64)}
    steps = [env.step(act) for _ in range(6)]
    assert steps[0].obs["obs"][0, 0, 0].tolist() == [3, 3, 3, 6]
    assert steps[4].obs["obs"][0, 0, 0].tolist() == [9, 12, 15, 18]
    assert steps[5].final_obs["obs"][0, 0, 0].tolist() == [12, 15, 18, 21]
    assert steps[5].obs["obs"][0, 0, 0].tolist() == [3, 3, 3, 3]
    check_env(env, steps=10)


def test_vectors_and_images_with_their_channels_first_are_stacked_too():
    assert make("CartPole-v1", 2, wrappers=[StackFrames]).observation_spec["obs"].shape == (16,)
    assert StackFrames(Film((3, 20, 30)), 2).observation_space.shape == (6, 20, 30)
    for wrap, env in ((ResizeImage, gymnasium.make("CartPole-v1")), (StackFrames, gymnasium.make("FrozenLake-v1"))):
        with pytest.raises(ValueError, match=f"{wrap.__name__} takes"):
            wrap(env)


@pytest.mark.parametrize(
    ("kind", "shape", "width"), [("auto", (84, 84, 4), 3136), ("auto", (35, 84, 4), 3520), ("small", (84, 84, 4), 7744)]
)
def test_large_images_go_through_the_convolutions_of_the_nature_paper(kind, shape, width):
    encoder = ImageEncoder(shape, kind)
    assert encoder.output_size == width
    images = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    first = ImageEncoder((shape[2], *shape[:2]), kind)
    first.load_state_dict(encoder.state_dict())
    assert torch.allclose(first(images.permute(0, 3, 1, 2)), encoder(images), atol=1e-6)
    with pytest.raises(ValueError, match="at least 36 pixels"):
        ImageEncoder((20, 84, 4), "nature")


@pytest.mark.slow
def test_a_policy_trains_on_stacked_images():
    network = NetworkConfig(core="none", encoder_sizes=(16,), activation="relu")
    env = make(Film, 2, wrappers=[ResizeImage, StackFrames])
    ppo = PPO(env, PPOConfig(num_steps=4, num_epochs=1, num_minibatches=2, network=network))
    update = next(ppo.train(8))
    assert update.gradient_steps == 2
    assert update.skipped == 0
    assert ppo.predict(np.zeros((84, 84, 4), np.uint8))[0] in (0, 1)
