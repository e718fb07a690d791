"""Sends weights from the learner to engines in other processes: versioned, with checksums, over several transports.

``transports`` opens the two ends; ``protocol`` defines their contract.
"""
