"""Scoring: reward functions, the processes that run them, and the scorer that adds them up.

This file imports nothing, because worker processes import it and have to start fast.
"""
