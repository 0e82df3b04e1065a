"""The command ``trio-rollout``: the only room that reads argv, the environment and names of functions."""

from ._entry import main as main

__all__ = ["main"]
