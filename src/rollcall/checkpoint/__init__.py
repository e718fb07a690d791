"""Checkpoints that are whole or not there (``store``), and the model directory that others open (``export``)."""

from rollcall.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore

__all__ = ["Checkpoint", "CheckpointError", "CheckpointStore"]
