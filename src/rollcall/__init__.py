"""Rollcall: reinforcement learning for language models. ``rollcall --help`` is the way in."""

__version__ = "0.1.0"
