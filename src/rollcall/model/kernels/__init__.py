"""Triton kernels for CUDA: the native engine's decode step (``decode``, ``attention``, ``sampling``) and the learner's
log-probs (``logprobs``). Each can be captured in a CUDA graph: nothing here reads a device value on the host.

This package imports without Triton; its modules do not.
"""
