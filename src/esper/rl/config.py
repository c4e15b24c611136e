"""Settings of the learner: networks, PPO, thresholds of warnings. Imports no torch, so that the command line starts quickly."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from esper.config import Config, ConfigError, Count, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Width

Momentum = Annotated[float, Meta(gt=0, lt=1)]
LogStd = Annotated[float, Meta(ge=-5, le=2)]


class NetworkConfig(Config):
    """Encoder, recurrent core and heads of the policy."""

    core: Literal["lstm", "gru", "none"] = "lstm"  # memory between encoder and heads
    hidden_size: Width = 128  # width of the core
    critic_memory: Literal["shared", "own"] = "shared"  # own: a second core for the critic, at 1.2 to 1.6 times the work
    encoder_sizes: tuple[Width, ...] = (64,)  # widths of the encoder's layers; empty: vectors go straight into the core
    image_encoder: Literal["auto", "nature", "small"] = "auto"  # convolutions of images; auto: nature from 36 pixels on a side
    head_sizes: tuple[Width, ...] = (64,)  # widths of the layers between core and actor, and between core and critic
    activation: Literal["tanh", "relu", "silu"] = "tanh"  # between layers
    norm_before: bool = False  # layer norm before the core
    norm_after: bool = False  # layer norm after the core
    forget_bias: float = 1.0  # initial bias of the LSTM's forget gate
    log_std: LogStd = 0.5  # initial log standard deviation of continuous heads, before tanh; large, for exploration

    OTHER_NAMES: ClassVar = {  # of Stable-Baselines3 and sb3-contrib
        "net_arch": "encoder_sizes, before the memory, and head_sizes, after it",
        "lstm_hidden_size": "hidden_size",
        "activation_fn": "activation",
        "log_std_init": "log_std",
    }


class ThresholdsConfig(Config):
    """Limits of healthy training. An event of kind `anomaly` tells when a diagnostic crosses its limit, and when it is back."""

    ratio_explosion: PositiveFloat = 10.0  # anomaly above this largest probability ratio
    ratio_collapse: NonNegativeFloat = 1e-4  # anomaly if the largest probability ratio of updates stays this close to 1
    kl: PositiveFloat = 0.5  # anomaly above this mean KL of an update
    entropy_collapse: NonNegativeFloat = 0.02  # anomaly below this normalised entropy of a discrete head
    value_collapse: NonNegativeFloat = 0.01  # anomaly below this spread of the values relative to that of the returns
    low_explained_variance: float = -0.5  # anomaly below this share of the returns' variance explained by the values
    gradient_health: Fraction = 0.3  # anomaly below this health of a part's gradients: 1 healthy, 0.5 vanished, 0 exploded
    vanished_updates: PositiveInt = 5  # anomaly if the gradient of a part has vanished in this many updates in a row
    hidden_state: PositiveFloat = 10.0  # anomaly above this root mean square of the memory
    input_drift: PositiveFloat = 4.0  # anomaly above this size of observations, over that in training so far or, not normalised, at first
    plateau_updates: PositiveInt = 15  # anomaly if neither return nor critic is better than at first in this many updates
    degradation: Fraction = 0.5  # anomaly if this share of the best gain in return is lost again
    memory_growth: PositiveFloat = 8.0  # anomaly if every update adds memory, and this many MiB on average


class PPOConfig(Config):
    """Recurrent proximal policy optimisation."""

    seed: NonNegativeInt = 0  # seed of all random streams
    num_steps: Count = 128  # steps of each environment in one rollout
    num_epochs: PositiveInt = 8  # passes over a rollout
    num_minibatches: PositiveInt = 8  # gradient steps in one pass; fewer if a rollout has fewer sequences
    micro_batches: PositiveInt = 1  # pieces a minibatch is split into to save memory; the gradients are the same
    bptt_length: PositiveInt | None = None  # steps that gradients flow back through; None: the whole rollout

    learning_rate: PositiveFloat = 1e-3  # of Adam
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"  # how the learning rate falls to learning_rate_end
    learning_rate_end: NonNegativeFloat = 0.0  # learning rate at the last step; unused by a constant schedule
    learning_rate_warmup: Fraction = 0.0  # share of training at the start in which the learning rate rises from zero
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon
    max_grad_norm: PositiveFloat = 0.5  # gradients are scaled down to this global L2 norm

    gamma: Fraction = 0.99  # discount
    gae_lambda: Fraction = 0.95  # decay of the advantage estimate (GAE)
    time_limit_is_end: bool = False  # treat truncation as termination: for finite horizons that the policy observes

    clip_coef: PositiveFloat = 0.2  # the probability ratio is clipped to 1 ± this
    ratio: Literal["per_head", "joint"] = "per_head"  # clip each head's ratio, or that of the whole action
    target_kl: PositiveFloat | None = None  # an update stops once its KL exceeds 1.5 times this; None: never
    value_coef: NonNegativeFloat = 0.5  # weight of the value loss
    value_clip_coef: PositiveFloat | None = None  # how far a value may move in one update, in the critic's units; None: no limit
    normalize_advantages: bool = True  # centre each head's over the steps where it mattered, divide by the rollout's spread

    entropy_coef: NonNegativeFloat = 0.01  # weight of the normalised entropy of each head
    entropy_coef_end: NonNegativeFloat | None = 0.0  # its value at the last step, reached linearly; None: constant
    entropy_weights: dict[str, NonNegativeFloat] = {}  # factor per head; 1 where not given
    entropy_floor: Fraction = 0.0  # normalised entropy below which a head's entropy is pushed up; falls to 0 in training
    entropy_floor_coef: NonNegativeFloat = 0.1  # weight of that push
    entropy_floor_until: Fraction = 0.5  # share of training after which the floor is 0

    normalize_observations: bool = True  # by running mean and spread
    observation_momentum: Momentum | None = None  # share of the old moments that each rollout keeps; None: average all observations
    normalize_rewards: bool = True  # divide by the running spread of discounted returns
    normalize_values: bool = True  # let the critic predict returns in units of their running spread

    precision: Literal["float32", "bfloat16", "float16"] = "float32"  # of the networks in the update; float16 scales its loss
    compile: bool = False  # torch.compile encoder and heads; falls back with an event
    validate: bool = False  # raise errors at once on any device, at the cost of synchronisation
    max_skips: PositiveInt = 10  # training stops after this many non-finite gradient steps, or updates without a finite reward, in a row
    network: NetworkConfig = NetworkConfig()
    thresholds: ThresholdsConfig = ThresholdsConfig()

    OTHER_NAMES: ClassVar = {  # of Stable-Baselines3 and sb3-contrib
        "n_steps": "num_steps",
        "n_epochs": "num_epochs",
        "batch_size": "num_minibatches, the number of minibatches in one pass over a rollout",
        "clip_range": "clip_coef",
        "clip_range_vf": "value_clip_coef",
        "ent_coef": "entropy_coef",
        "vf_coef": "value_coef",
        "normalize_advantage": "normalize_advantages",
        "policy_kwargs": "network=NetworkConfig(...)",
        "n_envs": "num_envs of PPO(env, config, num_envs=...)",
        "total_timesteps": "the argument of PPO.learn",
    }

    def check(self) -> None:
        if self.bptt_length is not None and self.num_steps % self.bptt_length:
            raise ConfigError("bptt_length", expected=f"a divisor of num_steps ({self.num_steps})", got=self.bptt_length)

    @property
    def sequence_length(self) -> int:
        """Steps in one unit of a minibatch: 1 without memory, else the number of steps that gradients flow back through."""
        return self.sequence_length_of(self.num_steps)

    def sequence_length_of(self, steps: int) -> int:
        """Return the same for a rollout of this many steps."""
        return 1 if self.network.core == "none" else (self.bptt_length or steps)

    def minibatches_of(self, num_envs: int) -> int:
        """Return the number of gradient steps in one pass over a rollout of `num_envs` environments: each needs at least one sequence."""
        return min(self.num_minibatches, self.num_steps // self.sequence_length * num_envs)
