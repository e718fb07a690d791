"""Arrays of the host on their way to a card."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array there. From pinned memory, so that the host does not wait until a card has done what it was given before."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
