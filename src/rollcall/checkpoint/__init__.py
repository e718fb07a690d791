"""Checkpoints that are whole or not there (``store``), and the model directory that others open (``export``)."""
