"""Layers that run again in the backward pass: only the input of each is kept, on the card or in host memory.

``HostStore`` copies each input to pinned host memory during the computation, and back one layer before it is needed. The card
computes on while the newest two are copied; before a third, it waits for the oldest, so a slow bus holds the card up and does
not fill it. One store serves one forward pass and its backward.
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
    copied: torch.cuda.Event  # to where it was going last


class HostStore:
    def __init__(self, device: torch.device):
        self._device, self._stream = device, _copy_stream(device)
        self._slots: list[_Slot] = []

    def put(self, tensor: Tensor) -> int:
        """Start to copy the tensor; returns the number for ``take``."""
        tensor = tensor.detach()  # with its history it would keep the whole graph alive
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._slots.append(_Slot(host, tensor, self._copy(host, tensor)))
        if len(self._slots) > IN_FLIGHT:
            oldest = self._slots[-1 - IN_FLIGHT]
            # What is computed from here on may use its memory, so it comes after the copy.
            torch.cuda.current_stream(self._device).wait_event(oldest.copied)
            oldest.on_card = None
        return len(self._slots) - 1

    def take(self, number: int) -> Tensor:
        """The tensor on the card again, and the one before it on its way."""
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
    """``run(x, *args)``, of which only x is kept; in ``store`` if there is one."""
    # Inside ``run`` the checkpoint sets its own hooks: these get only its inputs.
    with nullcontext() if store is None else saved_tensors_hooks(store.put, store.take):
        return checkpoint(run, x, *args, use_reentrant=False)  # type: ignore[return-value]
