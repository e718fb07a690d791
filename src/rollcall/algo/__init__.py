"""Advantages, losses and importance corrections: pure functions on arrays. Each cites its paper.

``recipe`` is the only place that maps the run file's algorithm to them; the learner and the controller call
nothing else. Importing this package imports neither numpy nor torch.
"""
