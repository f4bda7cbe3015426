"""Turnwise: train language-model agents by reinforcement learning over many turns."""

from turnwise.hookspecs import Implementation, hookimpl

__all__ = ["Implementation", "__version__", "hookimpl"]
__version__ = "0.1.0"
