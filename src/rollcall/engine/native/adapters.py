"""Stores an engine's adapters in shared, fixed buffers, so that rows in one batch may use different adapters.

The buffers never move, because captured graphs read them; ``refresh`` copies new values into them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rollcall.base.types import Longs
from rollcall.model.adapter import Adapter
from rollcall.model.decoder import Decoder
from rollcall.model.low_rank import MODULES, LayerAdapter, LowRank, fuse_product

BASE = "base"  # this name means no adapter


class Served:
    """Adapters by name. A request that names no adapter uses the first one."""

    def __init__(self, decoder: Decoder, adapters: Mapping[str, Adapter]) -> None:
        assert adapters and BASE not in adapters
        self.adapters = dict(adapters)
        self._slots = {name: slot for slot, name in enumerate(adapters)}
        self._rank = max(adapter.section.rank for adapter in adapters.values())
        self._rows = decoder.part_rows()
        gains = [adapter.section.gain for adapter in adapters.values()]
        # One row [slots] per slot. The last row is all zeros and means no adapter.
        self._gains = torch.cat((torch.diag(torch.tensor(gains)), torch.zeros(1, len(gains)))).to(decoder.device)
        self._layers = [self._empty(decoder, index) for index in range(len(decoder.layers))]
        self.refresh()

    def slot(self, name: str | None) -> int:
        return 0 if name is None else -1 if name == BASE else self._slots[name]

    def adapter_of(self, index: int) -> LayerAdapter:
        return self._layers[index]

    def gain(self, slots: Longs | Tensor) -> Tensor:
        """Return ``LayerAdapter.gain`` for rows with these slots; slot -1 means no adapter."""
        if isinstance(slots, np.ndarray):
            slots = torch.from_numpy(slots)
        return self._gains[slots.to(self._gains.device)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the adapters' current values into the buffers."""
        for slot, adapter in enumerate(self.adapters.values()):
            for layer, tensors in zip(self._layers, adapter.layers, strict=True):
                for field, modules in MODULES.items():
                    all_of, own = getattr(layer, field), fuse_product(tensors, field, rows=self._rows[field])
                    if own is not None:  # otherwise this part of the buffer stays zero
                        start = slot * len(modules) * self._rank
                        all_of.a[start : start + len(own.a)] = own.a
                        all_of.b[:, start : start + len(own.a)] = own.b

    def _empty(self, decoder: Decoder, index: int) -> LayerAdapter:
        made: dict[str, LowRank] = {}
        for field, modules in MODULES.items():
            if not any(module in adapter.section.modules for adapter in self.adapters.values() for module in modules):
                continue
            outputs, inputs = getattr(decoder.layers[index], field).shape
            inner = len(self.adapters) * len(modules) * self._rank
            made[field] = LowRank(a=decoder.embed.new_zeros(inner, inputs), b=decoder.embed.new_zeros(outputs, inner))
        return LayerAdapter(**{field: made.get(field) for field in MODULES}, gain=1.0, dropout=0.0)
