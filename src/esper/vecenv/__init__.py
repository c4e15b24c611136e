"""Batched environments: their interface, built-in environments, and adapters from and to Gymnasium (`esper.vecenv.gymnasium`)."""

from esper.vecenv.actions import ActionSpec, Continuous, Discrete, Head, Relevance
from esper.vecenv.check import check_env, check_timestep, sample_actions
from esper.vecenv.contract import Actions, Masks, Obs, ObservationSpec, Saveable, TensorSpec, Timestep, VecEnv
from esper.vecenv.registry import EnvSource, make
from esper.vecenv.spaces import Spaces

__all__ = [
    "ActionSpec",
    "Actions",
    "Continuous",
    "Discrete",
    "EnvSource",
    "Head",
    "Masks",
    "Obs",
    "ObservationSpec",
    "Relevance",
    "Saveable",
    "Spaces",
    "TensorSpec",
    "Timestep",
    "VecEnv",
    "check_env",
    "check_timestep",
    "make",
    "sample_actions",
]
