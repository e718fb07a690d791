"""Checks of what the kernels are given. They look at shapes and dtypes only, so they cost no device time."""

from __future__ import annotations

import torch


def need(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def same_dtype(**tensors: torch.Tensor | None) -> None:
    given = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    need(len(set(given.values())) == 1, f"{given} differ in dtype; give all of them the model's")


def rows(matrix: torch.Tensor, *, name: str) -> tuple[int, int]:
    """Both sizes of a matrix whose rows the kernels can read: neighbouring columns lie next to each other."""
    need(
        matrix.ndim == 2 and matrix.stride(1) == 1,
        f"{name} is {tuple(matrix.shape)} with strides {matrix.stride()}; it needs two axes and contiguous rows",
    )
    return matrix.shape[0], matrix.shape[1]


def cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """The keys and values of a paged cache, [blocks, block_size, K, D] each."""
    head_dim = k_cache.shape[3]
    need(
        k_cache.shape == v_cache.shape
        and k_cache.dtype == v_cache.dtype
        and k_cache.stride() == v_cache.stride()
        and k_cache.stride(3) == 1,
        f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} need one shape and dtype, the same strides and "
        "contiguous heads",
    )
    need(head_dim % 16 == 0, f"heads of {head_dim} are not a multiple of 16; decode this model without kernels")
