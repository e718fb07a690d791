"""Scoring: reward functions, the processes that run them, and the scorer that adds up their scores.

This file imports nothing, because worker processes import it and have to start fast.
"""
