"""Checkpoints that are whole or not there (``store``), and the model directory that others open (``export``)."""

from rollcall.checkpoint.store import Checkpoint, CheckpointStore
from rollcall.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "CheckpointStore"]
