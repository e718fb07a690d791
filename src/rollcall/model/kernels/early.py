# Triton is not installed on most machines.
# pyright: reportMissingImports=false
"""Early launch: on Hopper and later, a kernel may start while the previous one finishes, and then wait for its results.

A decode step runs about two hundred short kernels and spends a tenth of its time between them. A kernel takes ``EARLY`` as
a constant and calls ``wait_for_inputs`` before it reads or writes anything. It is launched with ``**launch(tensor)``.
"""

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait until all earlier kernels have finished, then allow the next one to start and run up to its own wait."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def launch(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the extra launch arguments for the tensor's device."""
    return {"EARLY": True, "launch_pdl": True} if _can(tensor.device) else {"EARLY": False}


@cache
def _can(device: torch.device) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type == "cuda" and not interpreted and torch.cuda.get_device_capability(device) >= (9, 0)
