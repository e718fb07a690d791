"""Hostile inputs from a seed, and the judge of what becomes of them.

A case is a number: the same seed and number give the same input everywhere. ``judge.py`` says what counts as a failure;
``run_files.py``, ``data_files.py`` and ``directories.py`` make the inputs.
"""
