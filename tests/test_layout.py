"""Which blocks of a model's tensors a rank holds: all ranks together hold, and write, each number."""

from __future__ import annotations

import itertools

import pytest
import torch
from learners import decoder_of, layout_of

from rollcall.model.decoder import module_names
from rollcall.plan.mesh import ModelSplit

SPLITS = [*itertools.product((1,), (1, 3, 8), (1, 2, 4)), (2, 2, 1), (2, 2, 4)]


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
