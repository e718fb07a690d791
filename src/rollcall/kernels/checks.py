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
