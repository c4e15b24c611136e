"""Train a recurrent PPO on a task that needs memory, beside a policy without memory.

The environment shows one of four cues, then nothing for five steps, then asks for the cue. Guessing is right in a quarter of the episodes,
and a policy that sees only the present cannot do better.

    python examples/ppo_memory.py

lstm  step  10240  right in training 0.82
lstm  step  20480  right in training 0.99
none  step  10240  right in training 0.21
none  step  20480  right in training 0.17
right answers in 400 fresh episodes: 100.0% with an LSTM, 25.5% without memory; guessing gives 25 %
"""

import torch

from esper.rl import PPO, NetworkConfig, PPOConfig
from esper.vecenv import make

STEPS = 20_480


def train(core: str) -> float:
    """Return the share of right answers in 400 fresh episodes, after a training with this memory between encoder and heads."""
    env = make("cue", num_envs=32, delay=5)
    config = PPOConfig(seed=0, num_steps=64, learning_rate_schedule="linear", network=NetworkConfig(core=core, hidden_size=64))
    ppo = PPO(env, config)
    for update in ppo.train(total_steps=STEPS):
        if update.update % 5 == 0:
            print(f"{core:>4}  step {update.step:>6}  right in training {update.mean_return:.2f}")
    return ppo.evaluate(make("cue", num_envs=32, delay=5, seed=1), episodes=400).mean_return


def main() -> None:
    torch.set_num_threads(1)
    right = {core: train(core) for core in ("lstm", "none")}
    print(f"right answers in 400 fresh episodes: {right['lstm']:.1%} with an LSTM, {right['none']:.1%} without memory; guessing gives 25 %")


if __name__ == "__main__":
    main()
