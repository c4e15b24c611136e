"""Esper: neural networks that grow while they train, and the recurrent PPO that learns when to grow them."""

__version__ = "0.1.0"
