"""Triton kernels for CUDA: the native engine's decode step (``decode``, ``attention``, ``sampling``) and the learner's
log-probs (``logprobs``). All of them can be captured in a CUDA graph, because none reads a device value on the host.

The package itself can be imported without Triton, but its modules cannot.
"""
