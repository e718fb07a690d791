"""What nodes need for the GPUs of each make."""

from __future__ import annotations

import re

from rollcall.config.launch import LaunchSection
from rollcall.config.sections import ClusterSection


def gpu_variables(launch: LaunchSection, cluster: ClusterSection) -> dict[str, str]:
    """What Ray and torch need to find the GPUs of that make. CUDA needs none."""
    if launch.gpu != "rocm" or cluster.accelerator == "cpu":
        return {}
    # Ray hands out AMD cards by HIP_VISIBLE_DEVICES, and refuses to start where ROCR_VISIBLE_DEVICES is set.
    visible = ",".join(str(index) for index in range(cluster.num_gpus_per_node))
    return {"HIP_VISIBLE_DEVICES": visible, "HSA_NO_SCRATCH_RECLAIM": "1"}


def unlike_slots(asked: object, cluster: ClusterSection, *, key: str) -> tuple[str, ...]:
    """A note, where a number of GPUs such as ``H100:8`` is not the number of slots of each node."""
    found = re.search(r"(?:^|:)(\d+)$", str(asked))
    if cluster.accelerator != "gpu" or found is None or set(cluster.slots_per_node) == {int(found[1])}:
        return ()
    slots = ", ".join(map(str, sorted(set(cluster.slots_per_node))))
    return (
        f"{key}={asked} gives each node {found[1]} GPUs, and the run file has {slots} slots on each; make them the same",
    )
