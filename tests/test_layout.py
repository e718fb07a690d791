"""Which blocks of a model's tensors a rank holds: all ranks together hold, and write, each number."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from tiny import make_model

from rollcall.learner.layout import WeightSplit, fused_rows
from rollcall.learner.tensor_parallel import cut_dim, split_order
from rollcall.model.decoder import Decoder, fuse_parameters, module_names
from rollcall.plan.mesh import ModelSplit

SPLITS = [*itertools.product((1,), (1, 3, 8), (1, 2, 4)), (2, 2, 1), (2, 2, 4)]


@cache
def decoder_of(architecture: str) -> Decoder:
    model = make_model(architecture).requires_grad_(False)
    fuse_parameters(model)
    return Decoder.of(model)


def layout_of(decoder: Decoder, name: str, split: ModelSplit) -> WeightSplit:
    """As ``Sharded`` makes it."""
    shape, field = decoder.named_tensors()[name].shape, name.rpartition(".")[2]
    heads: dict[str, Any] = dict(heads=decoder.shape.heads, kv_heads=decoder.shape.kv_heads)
    order = split_order(
        field,
        **heads,
        dim=decoder.shape.head_dim,
        intermediate=len(decoder.layers[0].gate_up) // 2,
        tensor=split.tensor,
    )
    return WeightSplit(
        name=name, shape=shape, rows=fused_rows(name, shape[0], **heads), split=split, dim=cut_dim(field), order=order,
        is_root="." not in name,
    )  # fmt: skip


@pytest.mark.parametrize("architecture", ["qwen3-untied", "llama-bias"])
@pytest.mark.parametrize(("replicate", "shard", "tensor"), SPLITS)
def test_all_ranks_write_every_number_once_and_read_their_parts_back(
    architecture: str, replicate: int, shard: int, tensor: int
) -> None:
    decoder = decoder_of(architecture)
    size = replicate * shard * tensor
    splits = [ModelSplit(replicate=replicate, shard=shard, tensor=tensor, rank=rank) for rank in range(size)]
    for name, fused in decoder.named_tensors().items():
        if name.startswith("layers.1"):
            continue  # as the first
        wholes = dict(zip(module_names(name), fused.split(layout_of(decoder, name, splits[0]).rows), strict=True))
        written = {part: torch.zeros(whole.shape) for part, whole in wholes.items()}
        counts = {part: torch.zeros(whole.shape) for part, whole in wholes.items()}
        for split in splits:
            layout = layout_of(decoder, name, split)
            local = layout.cut(fused)
            for block in layout.blocks(own=True):
                place = tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))
                assert block.whole == wholes[block.name].shape
                written[block.name][place] = block.of(local)
                counts[block.name][place] += 1
        for part, whole in wholes.items():
            assert torch.equal(counts[part], torch.ones_like(counts[part])), f"{part} is written once"
            assert torch.equal(written[part], whole), part
        for split in splits:
            layout = layout_of(decoder, name, split)
            read = torch.full_like(layout.cut(fused), torch.nan)
            for block in layout.blocks():
                place = tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))
                block.of(read).copy_(written[block.name][place])
            assert torch.equal(read, layout.cut(fused)), f"{name} on rank {split.rank}"
