"""Assertions about kernel arguments. They check only shapes, strides and dtypes, so they cost no device time."""

from __future__ import annotations

import torch


def same_dtype(*tensors: torch.Tensor | None) -> None:
    assert len({tensor.dtype for tensor in tensors if tensor is not None}) == 1


def rows(matrix: torch.Tensor) -> tuple[int, int]:
    """Return the shape of a matrix, and check that its rows are contiguous."""
    assert matrix.ndim == 2 and matrix.stride(1) == 1
    return matrix.shape[0], matrix.shape[1]


def cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Check the keys and values of a paged cache, [blocks, block_size, K, D] each."""
    assert (k_cache.shape, k_cache.dtype, k_cache.stride()) == (v_cache.shape, v_cache.dtype, v_cache.stride())
    assert k_cache.stride(3) == 1 and k_cache.shape[3] % 16 == 0
