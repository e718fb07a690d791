"""Triton kernels for CUDA: the native engine's decode step (``decode``, ``sampling``) and the learner's log-probs
(``logprobs``). Each can be captured in a CUDA graph: nothing here reads a device value on the host.

This package imports without Triton; its modules do not. Ask ``available()`` before importing one.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch


def available() -> bool:
    """Whether the kernels can run: Triton is installed and torch sees a CUDA device."""
    return find_spec("triton") is not None and torch.cuda.is_available()
