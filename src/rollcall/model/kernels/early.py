# Triton is absent on most machines.
# pyright: reportMissingImports=false
"""Early launch: on Hopper and later a kernel may start while the one before it ends, and waits there for its results.

A decode step is some two hundred short kernels, and a tenth of its time is the way from one to the next. A kernel takes
``EARLY`` as a constant and calls ``wait_for_inputs`` before it reads or writes anything; its launch gets ``**launch(tensor)``.
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
    """All that was launched before has ended. The next kernel may start, up to its own wait."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def launch(tensor: torch.Tensor) -> dict[str, Any]:
    """The arguments of a launch on the tensor's device."""
    return {"EARLY": True, "launch_pdl": True} if _can(tensor.device) else {"EARLY": False}


@cache
def _can(device: torch.device) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type == "cuda" and not interpreted and torch.cuda.get_device_capability(device) >= (9, 0)
