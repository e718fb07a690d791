"""A low-rank adapter (LoRA) for a whole model.

Tensor names follow the decoder's scheme (``layers.3.q_proj_lora_A``); ``module_names`` converts them to the transformers names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcall.base.errors import ModelFilesError
from rollcall.config.lora import LoraSection
from rollcall.model.base import refuse_other_model
from rollcall.model.decoder import Decoder, module_names
from rollcall.model.low_rank import FIELDS, MODULES, LayerAdapter, a_of, b_of, fuse
from rollcall.model.peft_files import read_adapter
from rollcall.model.stored.find import ADAPTER_CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    section: LoraSection
    layers: list[dict[str, Tensor]]  # one dict per layer, keyed by ``a_of`` and ``b_of``
    rows: Mapping[str, tuple[int, ...]]  # for each fused product of a layer, the number of rows of each of its modules
    seed: int
    base: str  # the base model: a path or a hub name

    @classmethod
    def make(cls, decoder: Decoder, section: LoraSection, *, seed: int, device: torch.device, base: str) -> Adapter:
        """Load the adapter in ``section.path``, or initialise a new one as PEFT does: A uniform within 1/sqrt(inputs), B zero.
        ``decoder`` may be on the meta device."""
        rows = decoder.part_rows()
        draws = torch.Generator().manual_seed(seed)
        layers: list[dict[str, Tensor]] = []
        for layer in decoder.layers:
            layers.append({})
            for module in section.modules:
                field = FIELDS[module]
                inputs, outputs = getattr(layer, field).shape[1], rows[field][MODULES[field].index(module)]
                bound = 1 / math.sqrt(inputs)
                layers[-1][a_of(module)] = torch.empty(section.rank, inputs).uniform_(-bound, bound, generator=draws)
                layers[-1][b_of(module)] = torch.zeros(outputs, section.rank)
        adapter = cls(section=section, layers=layers, rows=rows, seed=seed, base=base)
        if section.path is not None:
            folder, where = Path(section.path).expanduser(), f"model.lora.path={section.path}"
            adapter.load(read_adapter(folder, section, adapter.named_tensors(), where=where))
        placed = [{name: tensor.to(device, decoder.dtype) for name, tensor in layer.items()} for layer in layers]
        return replace(adapter, layers=placed)

    def named_tensors(self) -> dict[str, Tensor]:
        return {
            f"layers.{index}.{name}": tensor
            for index, layer in enumerate(self.layers)
            for name, tensor in layer.items()
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self.named_tensors().items():
            tensor.copy_(tensors[name])

    def refuse_other_model(self, model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Refuse ``model`` unless the adapter in ``section.path`` was trained on it. ``tensors`` are the model's weights."""
        if (path := self.section.path) is None:
            return
        advice = f", or set model.path to the model of the adapter ({ADAPTER_CONFIG} names it)"
        folder, where = Path(path).expanduser(), f"model.lora.path={path}"
        refuse_other_model(folder, model, tensors, base=self.base, where=where, advice=advice)

    def on(self, decoder: Decoder) -> Decoder:
        """Return the decoder with this adapter attached. The two decoders share the model's weights."""
        return replace(decoder, adapter_of=self._of_layer)

    def _of_layer(self, index: int) -> LayerAdapter:
        return fuse(self.layers[index], rows=self.rows, gain=self.section.gain, dropout=self.section.dropout)


class Deltas:
    """An adapter's changes to a model's weights, keyed by transformers names. ``tensors`` are keyed by decoder names."""

    def __init__(self, tensors: Mapping[str, Tensor], *, gain: float) -> None:
        self._gain = gain
        self._pairs = {
            module_names(name)[0].replace(".lora_A.", "."): (a, tensors[name.removesuffix("_A") + "_B"])
            for name, a in tensors.items()
            if name.endswith("_lora_A")
        }

    @torch.no_grad()
    def added_to(self, weight: Tensor, name: str) -> Tensor:
        """Add the change in float32 and round once. Refuse a result that is not finite."""
        if name not in self._pairs:
            return weight
        a, b = (one.detach().to(weight.device).float() for one in self._pairs[name])
        added = torch.addmm(weight.float(), b, a, alpha=self._gain).to(weight.dtype)
        if not torch.stack(added.aminmax()).isfinite().all():  # both are NaN if any element is
            raise ModelFilesError(
                f"with the adapter added, {name} is not finite: the adapter's values or its alpha / rank ({self._gain:g}) are too large; "
                "use another adapter, such as one from an older checkpoint"
            )
        return added


@torch.no_grad()
def add_to_weights(model: Any, tensors: Mapping[str, Tensor], *, gain: float) -> None:
    """Add an adapter to the weights of ``model`` in place. ``tensors`` are keyed by decoder names."""
    deltas = Deltas(tensors, gain=gain)
    for name, parameter in model.named_parameters():
        if (added := deltas.added_to(parameter.data, name)) is not parameter.data:
            parameter.data.copy_(added)
