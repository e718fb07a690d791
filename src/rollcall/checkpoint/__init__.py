"""Atomic checkpoints (``store``), and model directories that other programs can open (``export``)."""
