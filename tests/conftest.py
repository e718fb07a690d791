"""What all tests share: one torch thread, and GPU tests that skip themselves where there is no GPU."""

from __future__ import annotations

import os

# Set before torch is imported: on a busy machine a second thread makes every small operation wait for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
