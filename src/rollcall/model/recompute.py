"""Recomputes layers in the backward pass: only each layer's input is kept, on the GPU or in host memory.

``HostStore`` copies each input to pinned host memory during the computation, and copies it back one layer before it is needed. The GPU
keeps computing while the two newest inputs are copied. Before a third copy, it waits for the oldest, so that a slow bus slows
the GPU down instead of filling its memory. A store is used for one forward pass and its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

IN_FLIGHT = 2


@dataclass(slots=True)
class _Slot:
    host: Tensor
    on_card: Tensor | None
    copied: torch.cuda.Event  # recorded when the last copy, in either direction, is done


class HostStore:
    def __init__(self, device: torch.device):
        self._device, self._stream = device, _copy_stream(device)
        self._slots: list[_Slot] = []

    def put(self, tensor: Tensor) -> int:
        """Start copying the tensor to the host. Return the number to pass to ``take``."""
        tensor = tensor.detach()  # otherwise it would keep the whole graph alive
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._slots.append(_Slot(host, tensor, self._copy(host, tensor)))
        if len(self._slots) > IN_FLIGHT:
            oldest = self._slots[-1 - IN_FLIGHT]
            # Later computations may reuse this memory, so they must wait for the copy.
            torch.cuda.current_stream(self._device).wait_event(oldest.copied)
            oldest.on_card = None
        return len(self._slots) - 1

    def take(self, number: int) -> Tensor:
        """Return the tensor on the GPU. Also start copying the previous tensor back."""
        slot = self._slots[number]
        tensor = self._bring(slot)
        if number > 0:
            self._bring(self._slots[number - 1])
        torch.cuda.current_stream(self._device).wait_event(slot.copied)
        slot.on_card = None
        return tensor

    def _bring(self, slot: _Slot) -> Tensor:
        if slot.on_card is None:
            slot.on_card = torch.empty(slot.host.shape, dtype=slot.host.dtype, device=self._device)
            slot.copied = self._copy(slot.on_card, slot.host)
        return slot.on_card

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied.record()
        return copied


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def run_again(run: Callable[..., Tensor], x: Tensor, *args: object, store: HostStore | None) -> Tensor:
    """Call ``run(x, *args)`` and keep only x for the backward pass, in ``store`` if there is one."""
    # Inside ``run``, the checkpoint sets its own hooks, so our hooks see only its inputs.
    with nullcontext() if store is None else saved_tensors_hooks(store.put, store.take):
        return checkpoint(run, x, *args, use_reentrant=False)  # type: ignore[return-value]
