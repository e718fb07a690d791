"""What nodes need for the GPUs of each make."""

from __future__ import annotations

from rollcall.config.launch import LaunchSection
from rollcall.config.sections import ClusterSection


def gpu_variables(launch: LaunchSection, cluster: ClusterSection) -> dict[str, str]:
    """What Ray and torch need to find the GPUs of that make. CUDA needs none."""
    if launch.gpu != "rocm" or cluster.accelerator == "cpu":
        return {}
    # Ray hands out AMD cards by HIP_VISIBLE_DEVICES, and refuses to start where ROCR_VISIBLE_DEVICES is set.
    visible = ",".join(str(index) for index in range(cluster.num_gpus_per_node))
    return {"HIP_VISIBLE_DEVICES": visible, "HSA_NO_SCRATCH_RECLAIM": "1"}
