"""Brings weights from the learner to engines in other processes: versioned, checked, over several transports.

``transports`` opens the two ends; ``protocol`` says what both promise.
"""
