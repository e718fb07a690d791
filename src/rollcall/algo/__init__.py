"""Advantages, losses and importance corrections: pure functions of arrays, each citing its paper.

``recipe`` is the single place that maps an algorithm of the run file to them; the learner and the controller call
nothing else. Importing this package imports neither numpy nor torch.
"""
