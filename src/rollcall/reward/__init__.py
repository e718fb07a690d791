"""Scoring: reward functions, the processes that run them, and the scorer that adds them up.

This file imports nothing, because the worker process imports it and has to start fast.
"""
