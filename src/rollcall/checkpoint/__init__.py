"""Checkpoints that are written atomically (``store``), and model directories that other programs can open (``export``)."""
