"""Scores in: reward functions, the processes that run them, and the scorer that adds them up.

This package file imports nothing: the worker process passes through it and has to start fast.
"""
