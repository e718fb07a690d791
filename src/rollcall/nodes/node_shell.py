"""Which variables workers keep from the shell that started `rollcall node`.

Paths of programs, libraries and folders, and settings for the machine's devices, threads and network belong to the node
and may differ between nodes. Nothing else from that shell reaches a worker, and no secret does; if a run needs more,
its run file declares it (declared.py). Raylets are started with these variables, so a worker cannot see more.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping

from rollcall.base.process_table import environment_of
from rollcall.base.redact import hides

TOKEN = "ROLLCALL_TOKEN"  # the variable of a token that the user chooses; a secret, so no worker sees it
NAMES = frozenset({
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX",
    "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "XDG_CACHE_HOME", "HOSTNAME", "TZ", "LANG", "LANGUAGE",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE",
    "ROLLCALL_STATE_DIR", "ROLLCALL_CLUSTER", "ROLLCALL_VLLM_PYTHON",
})  # fmt: skip
PATTERNS = (
    "LC_*", "PYTHON*", "MALLOC_*", "RAY_*", "GRPC_*",
    "CUDA_*", "NVIDIA_*", "HIP_*", "ROCR_*", "ROCM_*", "HSA_*", "TORCH_*", "TORCHINDUCTOR_*", "PYTORCH_*", "TRITON_*",
    "OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*", "DNNL_*", "ONEDNN_*", "ATEN_*",
    "NCCL_*", "RCCL_*", "GLOO_*", "UCX_*", "FI_*", "IBV_*", "RDMAV_*", "MLX4_*", "MLX5_*",
)  # fmt: skip
# Variables that a user is likely to miss: model locations, accounts, proxies.
MATTERS = (
    "HF_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "VLLM_*", "WANDB_*", "MLFLOW_*", "COMET_*", "TENSORBOARD_*",
    "OPENAI_*", "ANTHROPIC_*", "AZURE_*", "AWS_*", "GOOGLE_*", "*_API_KEY", "*_TOKEN", "*_proxy", "*_PROXY",
)  # fmt: skip
UNDECLARED = "not declared"  # set by `ray start` itself, or Ray was started without `rollcall node`
OF_ROLLCALL = ("ROLLCALL_*", "RAY_AUTH_*", "RAY_TLS_*", "RAY_USE_TLS")


def is_nodes_own(name: str) -> bool:
    """
    >>> [is_nodes_own(name) for name in ("PATH", "NCCL_DEBUG", "HF_TOKEN", "HF_HOME", "SLURM_JOB_ID")]
    [True, True, False, False, False]
    """
    return name in NAMES or _matches(name, PATTERNS)


def nodes_own(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that workers would see on a node started from this shell."""
    return {name: value for name, value in environ.items() if is_nodes_own(name) and not hides(name, value)}


def missed(environ: Mapping[str, str], *, given: Collection[str] = ()) -> list[str]:
    """Return variables set here that workers do not see but a run may need; ``given`` lists those that they do see."""
    ours = ("RAY_*", "ROLLCALL_*")
    return sorted(
        name
        for name in environ
        if _matches(name, MATTERS) and not _matches(name, ours) and name not in given and not is_nodes_own(name)
    )


def hint(names: Collection[str]) -> str:
    """Hint at variables by name only, since a value may be a secret."""
    return (
        f"set here, and not seen by workers: {', '.join(names)}; if a run needs one of these, name it in cluster.env_pass of "
        "its run file"
    )


def origins(environ: Mapping[str, str]) -> dict[str, str]:
    """Return where each variable of this worker comes from if no run file declares it."""
    inherited = environment_of(int(environ.get("RAY_RAYLET_PID", 0)))
    found = {}
    for name in environ:
        if _matches(name, OF_ROLLCALL):
            found[name] = "rollcall"
        elif inherited is not None and name not in inherited:
            found[name] = "Ray"
        elif is_nodes_own(name) or name == "DASHBOARD_METRIC_PORT":
            found[name] = "the node's own"
        else:
            found[name] = UNDECLARED
    return found


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
