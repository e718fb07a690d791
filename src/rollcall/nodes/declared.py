"""Selects the environment variables that workers get: some from their node's shell, and those that a run file declares.

From the shell that started `rollcall node`, workers inherit paths of programs, libraries and folders, and settings for the machine's
devices, threads and network, which may differ between nodes. They inherit no secrets and no other variables of that shell, because
raylets are started with these variables only.

A run file declares the remaining variables of a run: ``cluster.env`` (values), ``cluster.env_pass`` (names whose values come from the
submitter) and ``cluster.node_env`` (values for one node). If a name has several values, the node's value wins, then the run file's,
then the submitter's. A worker's other variables come from Rollcall or Ray.

Ray writes the variables of jobs and workers to its logs and shows them to anyone who asks its API (2.60: ``runtime_env_agent.log``,
``ray job list``). So secrets travel in one sealed variable. It consists of a salt, which is new each time, and a Fernet message, whose
key is derived from the cluster's token and the salt with PBKDF2. It is decrypted only where it is needed: by launch/jobs/driver.py for
a job's controller, and by ``SETUP_HOOK`` in Ray workers.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from cryptography.fernet import Fernet, InvalidToken

from rollcall.base.errors import ClusterError
from rollcall.base.process_table import environment_of
from rollcall.base.redact import REDACTED, guard_streams, hides, redact_env, remember
from rollcall.nodes.state import TOKEN

if TYPE_CHECKING:  # every worker process imports this module, and most do not need the run file's models
    from rollcall.config import ClusterSection

NODE_OWN = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
# Set by each worker's group.
GROUP_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_OURS = frozenset({
    *GROUP_VARIABLES, "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", TOKEN, "ROLLCALL_SEALED", "ROLLCALL_SUBMITTED",
    "RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT",
})  # fmt: skip
SEALED = "ROLLCALL_SEALED"  # contains the secrets; only the cluster's token decrypts it
SUBMITTED = "ROLLCALL_SUBMITTED"  # names of the variables that were submitted with the job
# runtime_env["worker_process_setup_hook"], for ray.init or a job
SETUP_HOOK = "rollcall.nodes.declared.open_sealed"
_ROUNDS = 20_000  # a generated token needs no extra rounds, but a token that a person chose does
# Variables that workers inherit from the shell of their node: names, and patterns of names.
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
# Variables that a run often needs but that workers do not inherit: model locations, accounts, proxies.
MATTERS = (
    "HF_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "VLLM_*", "WANDB_*", "MLFLOW_*", "COMET_*", "TENSORBOARD_*",
    "OPENAI_*", "ANTHROPIC_*", "AZURE_*", "AWS_*", "GOOGLE_*", "*_API_KEY", "*_TOKEN", "*_proxy", "*_PROXY",
)  # fmt: skip
UNDECLARED = "not declared"  # set by `ray start` itself, or Ray was started without `rollcall node`


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable declared for the workers of one node."""

    value: str
    source: str  # such as "cluster.env" or "cluster.env_pass NCCL_*"


def check_environment(section: ClusterSection) -> None:
    """Refuse variables that a run file may not set."""
    for where, names in (
        ("cluster.env", section.env),
        ("cluster.env_pass", section.env_pass),
        *((f"cluster.node_env.{rank}", values) for rank, values in section.node_env.items()),
    ):
        for name in names:
            _check_name(name, where)
    for rank, values in section.node_env.items():
        if secret := next((name for name, value in values.items() if hides(name, value)), None):
            raise ClusterError(
                f"cluster.node_env.{rank}.{secret} is a secret, but secrets must be the same on every node; list it in cluster.env_pass"
            )


def declared(section: ClusterSection | None, *, submitted: Mapping[str, str], node_rank: int) -> dict[str, Variable]:
    """Return the variables of a node's workers by name. ``submitted`` comes from ``submitted_env`` or from a job."""
    if section is None:
        return {}
    check_environment(section)
    found: dict[str, Variable] = {}
    for name, value in submitted.items():
        if name not in section.env:  # a secret in cluster.env is submitted with the passed variables
            by = next((one for one in section.env_pass if _is_pattern(one) and fnmatch.fnmatchcase(name, one)), "")
            found[name] = Variable(value=value, source=f"cluster.env_pass {by}".rstrip())
    for name, value in section.env.items():
        if value == REDACTED and name not in submitted:
            raise ClusterError(
                f"cluster.env.{name} was redacted when this run file was saved; write its value, or better, list it in cluster.env_pass"
            )
        found[name] = Variable(value=submitted[name] if value == REDACTED else value, source="cluster.env")
    for name, value in section.node_env.get(node_rank, {}).items():
        found[name] = Variable(value=value, source=f"cluster.node_env.{node_rank}")
    return found


def worker_env(section: ClusterSection | None, *, submitted: Mapping[str, str], node_rank: int) -> dict[str, str]:
    """Return the declared variables of a worker on this node, including secrets. Pass them to Ray through ``for_ray``."""
    variables = declared(section, submitted=submitted, node_rank=node_rank)
    return {name: variable.value for name, variable in variables.items()}


def submitted_env(section: ClusterSection | None) -> dict[str, str]:
    """Return the submitter's variables. In a job, they were submitted with it; otherwise, this process is the submitter."""
    if SUBMITTED in os.environ:
        return {name: os.environ[name] for name in os.environ[SUBMITTED].split(",") if name in os.environ}
    return passed(section, environ=os.environ)


def passed(section: ClusterSection | None, *, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``cluster.env_pass`` copies from ``environ``."""
    found: dict[str, str] = {}
    for pattern in section.env_pass if section is not None else ():
        names = sorted(fnmatch.filter(environ, pattern)) if _is_pattern(pattern) else [pattern]
        for name in names:
            _check_name(name, f"cluster.env_pass {pattern}" if name != pattern else "cluster.env_pass")
            found[name] = _value(name, environ, where="cluster.env_pass")
    return found


def job_env(
    section: ClusterSection | None,
    *,
    environ: Mapping[str, str],
    token: str | None,
    named: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, str]:
    """Return a job's variables in a form that Ray may show to anyone: the variables declared for every node, and those that rewards and
    the environment get by name from the job's driver (``named``, by key of the run file)."""
    asked: dict[str, str] = {}
    for where, name in ((where, name) for where, names in (named or {}).items() for name in names):
        if section is None or name not in section.env:  # otherwise, the run file contains its value
            _check_name(name, where)
            asked[name] = _value(name, environ, where=where)
    if section is None:
        return for_ray(asked, token=token)
    check_environment(section)
    submitted = passed(section, environ=environ)
    values = worker_env(section.model_copy(update={"node_env": {}}), submitted=submitted, node_rank=0)
    # The driver's run file does not contain the submitter's values, and its secrets are redacted. So pass both.
    names = [name for name, value in values.items() if name in submitted or hides(name, value)]
    # Set SUBMITTED even when it is empty, because the head's own variables are not the submitter's.
    return {**for_ray({**asked, **values}, token=token), SUBMITTED: ",".join(names)}


def _value(name: str, environ: Mapping[str, str], *, where: str) -> str:
    if name not in environ:
        raise ClusterError(
            f"{where} names {name}, which is not set in this shell; export {name}, or remove it from {where}"
        )
    return environ[name]


def for_ray(values: Mapping[str, str], *, token: str | None = None) -> dict[str, str]:
    """Return the variables in a form that Ray may log, for ``runtime_env["env_vars"]``, with the secrets in one sealed variable.

    ``token`` is the cluster's token; the default is the token that this process uses.
    """
    secrets = {name: value for name, value in values.items() if hides(name, value)}
    if not secrets:
        return dict(values)
    token = token or process_token()
    if token is None:
        raise ClusterError(
            f"{', '.join(secrets)} must not appear in Ray's logs, but this Ray cluster has no token to seal secrets with; start it with "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or set the secrets on each node before `ray start` and remove them from the run file"
        )
    remember(secrets.values())
    return {name: value for name, value in values.items() if name not in secrets} | {SEALED: seal(secrets, token)}


def open_sealed() -> None:
    """Decrypt this process's sealed variable, if it has one, into its environment, and redact the process's output."""
    values = sealed_values(os.environ, token=process_token())
    remember(values.values())
    os.environ.update(values)
    guard_streams()


def sealed_values(environ: Mapping[str, str], *, token: str | None) -> dict[str, str]:
    """Decrypt the secrets in these variables."""
    envelope = environ.get(SEALED)
    if envelope is None:
        return {}
    if token is None:
        raise ClusterError(
            f"{SEALED} is set, but the cluster's token is not (RAY_AUTH_TOKEN_PATH); was this job submitted with `rollcall submit`?"
        )
    return unseal(envelope, token)


def process_token(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the token that Ray uses in this process, looked up as Ray does."""
    environ = os.environ if environ is None else environ
    mode = environ.get("RAY_AUTH_MODE")
    if mode == "disabled":
        return None
    if environ.get("RAY_AUTH_TOKEN"):
        return environ["RAY_AUTH_TOKEN"].strip()
    home = f"{environ.get('HOME', '')}/.ray/auth_token" if mode == "token" else None
    path = environ.get("RAY_AUTH_TOKEN_PATH") or home
    return Path(path).read_text().strip() if path and Path(path).exists() else None


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables, and restore the old values at the end of the block."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


def seen_here() -> dict[str, tuple[str, str]]:
    """Return all variables of a worker on this node, each with its origin if no run file declares it. The worker calls this.
    Secret values do not leave the node."""
    open_sealed()
    found = origins(os.environ)
    return {name: (value, found[name]) for name, value in redact_env(os.environ).items()}


def _check_name(name: str, where: str) -> None:
    if name in NODE_OWN:
        raise ClusterError(
            f"{where} contains {name}, which must differ between nodes: a value that is right on one node may be wrong on another; "
            "set it in the shell that starts `rollcall node`"
        )
    if name in _OURS:
        raise ClusterError(f"{where} contains {name}, which Rollcall sets for each worker; remove it")
    if not name or "=" in name or "\0" in name or "," in name:
        raise ClusterError(f"{where} contains {name!r}, which is not a valid variable name")


def _is_pattern(text: str) -> bool:
    return any(character in text for character in "*?[")


def seal(values: Mapping[str, str], token: str) -> str:
    salt = token_hex(16)
    return f"{salt}.{_cipher(token, salt).encrypt(json.dumps(dict(values)).encode()).decode()}"


def unseal(envelope: str, token: str) -> dict[str, str]:
    salt, _, message = envelope.partition(".")
    try:
        return json.loads(_cipher(token, salt).decrypt(message))
    except (InvalidToken, ValueError):
        raise ClusterError(
            "the secrets of this job were sealed with a different token, or are damaged; submit the job again"
        ) from None


def _cipher(token: str, salt: str) -> Fernet:
    key = hashlib.pbkdf2_hmac("sha256", token.encode(), salt.encode(), _ROUNDS, dklen=32)
    return Fernet(base64.urlsafe_b64encode(key))


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
    """Return the variables that are set in this shell and that a run may need, but that workers do not see. ``given`` contains further
    variables that workers see."""
    ours = ("RAY_*", "ROLLCALL_*")
    return sorted(
        name
        for name in environ
        if _matches(name, MATTERS) and not _matches(name, ours) and name not in given and not is_nodes_own(name)
    )


def hint(names: Collection[str]) -> str:
    """Return a hint with the names of variables, without their values, because a value may be a secret."""
    return (
        f"set in this shell, but not visible to workers: {', '.join(names)}; if a run needs one of these, list it in "
        "cluster.env_pass of its run file"
    )


def origins(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the source of each variable of this worker that no run file declares."""
    inherited = environment_of(int(environ.get("RAY_RAYLET_PID", 0)))
    found = {}
    for name in environ:
        if _matches(name, ("ROLLCALL_*", "RAY_AUTH_*", "RAY_TLS_*", "RAY_USE_TLS")):
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
