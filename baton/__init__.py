"""Baton trains language models with reinforcement learning on whatever hardware its users have."""

__version__ = "0.1.0"
