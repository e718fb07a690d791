"""A run file's `launch:`, `prepare:` and `finish:`: where the nodes come from, what each node needs, and what happens after the run.

Each target of `rollcall launch` has a section; a run file may have several. Keys that all targets share are in ``launch`` itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue

from rollcall.base.words import parse_size
from rollcall.config.base import OptionalCount, Section, field
from rollcall.config.checks import check_variable_names, check_variables

Names = Annotated[list[str], AfterValidator(check_variable_names)]
Variables = Annotated[dict[str, str], AfterValidator(check_variables)]


class PrepareSection(Section):
    once: list[str] = field(
        [], "Shell commands that the first node executes before the run starts, such as one that prepares the data."
    )
    each_node: list[str] = field([], "Shell commands that every node executes before the run starts.")
    timeout_s: float = field(
        86_400.0,
        "Time limit in seconds for each list of commands on a node. If they take longer, they are stopped and the run does not start.",
        gt=0,
    )
    fetch_model: bool = field(
        True,
        "Before the run starts, download the model and the reward models once on each node, if the run file gives hub names for them.",
    )


class ContainerSection(Section):
    runtime: Literal["docker", "podman", "apptainer", "enroot"] = field(
        "docker", "What runs the container. `enroot` works only with slurm, through Slurm's pyxis plugin."
    )
    image: str = Field(description="Image to run.")
    build: Path | None = field(None, "Folder with a Dockerfile. Nodes that lack the image build it from there.")
    mounts: list[str] = field(
        [], "Folders on the node to mount in the container: `/data`, `/data:/inside` or `/data:/inside:ro`."
    )
    shm: str = field("16g", "Size of /dev/shm.")
    devices: list[str] = field([], "Additional devices for the container, such as `/dev/infiniband`.")


class TargetSection(Section):
    """The base class for sections that say where nodes come from."""


class _OnNodes(TargetSection):
    """The keys of targets that run `rollcall node` directly on machines."""

    activate: Path | None = field(None, "The `activate` script of the Python environment on the nodes.")
    env: Variables = field({}, "Environment variables for `rollcall node`. Those for workers are in `cluster.env`.")


class SshSection(_OnNodes):
    hosts: list[str] | Path = Field(
        description="The machines in the order of their ranks, such as `[node0, node1]`, or a file with one machine per line. A launch "
        "uses the first hosts in the file that no other launch is using."
    )
    user: str | None = field(None, "User name on the hosts; `null`: from ssh's configuration.")
    port: int | None = field(None, "Port of sshd; `null`: from ssh's configuration.", ge=1, le=65535)
    key: Path | None = field(None, "Private key; `null`: from ssh's configuration.")
    temp_dir: Path | None = field(
        None, "Ray's folder for sockets and logs on the hosts. Its path must be short and local."
    )
    interface: str | None = field(None, "Network interface that the nodes use; `null`: the one that reaches the head.")


class SlurmSection(_OnNodes):
    partition: str | None = field(None, "Partition; `null`: Slurm's default.")
    account: str | None = field(None, "Account to charge.")
    time: str | None = field(None, "Time limit, such as `04:00:00`.")
    gpus_per_node: str | None = field(
        None, "GPUs to request, such as `8` or `h100:8`; `null`: `cluster.num_gpus_per_node` if slots are GPUs."
    )
    cpus_per_task: OptionalCount = field(None, "CPUs to request on each node.")
    mem: str | None = field(None, "Memory to request on each node, such as `200G` (`0`: all of it).")
    constraint: str | None = field(None, "Features that a node must have, such as `nvlink`.")
    nodelist: str | None = field(None, "Nodes to use, such as `node[01-04]`.")
    interface: str | None = field(
        None,
        "Network interface that the nodes use; `null`: on the head, that of the default route; on other nodes, the one that reaches "
        "the head.",
    )
    modules: list[str] = field([], "Modules to load.")
    lines: list[str] = field([], "Additional lines for the script, which run before the nodes start.")
    options: list[str] = field([], "Additional options for sbatch, such as `--exclusive`.")
    signal_s: int = field(
        120, "How many seconds before the time limit the run saves and the job requeues itself.", ge=10, le=65535
    )
    attach: OptionalCount = field(None, "Id of an existing allocation in which to start the nodes.")


class SkypilotSection(_OnNodes):
    resources: dict[str, JsonValue] = field(
        {}, "Resources to request from SkyPilot, such as `{accelerators: 'H100:8', infra: aws}`."
    )
    workdir: Path | None = field(None, "Folder that SkyPilot copies to the nodes.")
    file_mounts: dict[str, str | dict[str, JsonValue]] = field(
        {},
        "Files and buckets for the nodes. Each key is a path on the nodes. A string value is a source that is copied to each node. "
        "`{source: s3://my-bucket, mode: MOUNT_CACHED}` mounts a bucket, which keeps what the nodes write there.",
    )
    secrets: Names = field([], "Names of variables whose values SkyPilot takes from this shell.")
    setup: list[str] = field([], "Shell commands that install what the nodes need, once on each.")
    managed: bool = field(True, "Start a managed job: after a preemption, the job starts again and the run resumes.")


class DstackSection(_OnNodes):
    image: str | None = field(None, "Container image.")
    resources: dict[str, JsonValue] = field(
        {}, "Resources to request from dstack, such as `{gpu: 'H100:8', shm_size: 64GB}`."
    )
    secrets: Names = field([], "Names of variables whose values dstack takes from this shell.")
    setup: list[str] = field([], "Shell commands that install what the nodes need, once on each.")
    volumes: list[str] = field([], "Volumes: `NAME:/path`, or `/on/the/instance:/path`.")
    ports: list[int] = field([], "Ports to forward to the machine that attaches to the run.")


class KuberaySection(TargetSection):
    namespace: str = field("default", "Kubernetes namespace of the RayJob.")
    image: str | None = field(None, "Container image that contains Rollcall. Required unless `ray_cluster` is set.")
    ray_version: str = field("2.60.0", "Version of Ray in the image.")
    cpus: int = field(8, "CPUs of each pod.", ge=1)
    memory: str = field("64Gi", "Memory of each pod.")
    shm: str = field("16Gi", "Size of /dev/shm.")
    gpu_resource: str = field("nvidia.com/gpu", "Kubernetes' name for a GPU (`amd.com/gpu` with ROCm).")
    env: Variables = field({}, "Environment variables of the pods.")
    env_from_secrets: list[str] = field([], "Kubernetes secrets whose keys become environment variables.")
    pod: dict[str, JsonValue] = field(
        {},
        "Additional fields for the spec of every pod, in Kubernetes' format, such as `{tolerations: [{operator: Exists}], "
        "nodeSelector: {gpu: h100}, imagePullSecrets: [{name: mine}]}`.",
    )
    labels: dict[str, str] = field({}, "Labels for the RayJob, such as Kueue's `kueue.x-k8s.io/queue-name`.")
    claims: dict[str, str] = field(
        {}, "Volume claims that every pod mounts, as a map from each claim's name to its path."
    )
    submission: Literal["K8sJobMode", "HTTPMode", "SidecarMode"] = field("K8sJobMode", "How KubeRay submits the job.")
    ray_cluster: str | None = field(None, "Name of an existing RayCluster on which to run the job.")


class LaunchSection(Section):
    rendezvous: Path | None = field(
        None,
        "Shared folder in which nodes find the head (ssh and slurm). `null`: with ssh, they are told the head's address; "
        "with slurm, they find the head in the launch's folder.",
    )
    gpu: Literal["cuda", "rocm"] = field(
        "cuda", "Platform of the GPUs, which determines the variables and devices that a node needs."
    )
    profile: Path | None = field(
        None, "File of `NAME=VALUE` lines with network variables (`NCCL_*`, `GLOO_*`, `RCCL_*`) for nodes and workers."
    )
    container: ContainerSection | None = field(None, "Run the nodes in containers (ssh and slurm only).")
    ssh: SshSection | None = field(None, "Machines that you can reach with ssh.")
    slurm: SlurmSection | None = field(None, "A Slurm cluster.")
    skypilot: SkypilotSection | None = field(None, "Clouds and clusters through SkyPilot.")
    dstack: DstackSection | None = field(None, "Machines through dstack.")
    kuberay: KuberaySection | None = field(None, "Pods in Kubernetes, through the KubeRay operator.")


def check_repo(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise ValueError(f"{name[:80]!r} is not a repository name; write OWNER/NAME")
    return name


def _check_size(text: str) -> str:
    parse_size(text)
    return text


class UploadSection(Section):
    repo: Annotated[str, AfterValidator(check_repo)] = Field(
        description="Model repository on the hub, `OWNER/NAME`; created if it does not exist."
    )
    private: bool = field(False, "Make the repository private, and refuse an existing one that everyone can read.")
    revision: str | None = field(None, "Branch to upload to; `null`: the main one.")


class FinishSection(Section):
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = field(
        "keep", "Precision of the merged model; `keep`: the precision it was trained in."
    )
    max_shard_size: Annotated[str, AfterValidator(_check_size)] = field(
        "5GB", "Largest weight file, such as `5GB` or `512MiB`."
    )
    upload: UploadSection | None = field(
        None, "Where to upload the verified model. The token is `HF_TOKEN`, or the one from `hf auth login`."
    )


def describe_targets() -> dict[str, str]:
    """Return each target with a phrase that says where it gets nodes.

    >>> describe_targets()["ssh"]
    'machines that you can reach with ssh'
    """
    fields = LaunchSection.model_fields
    texts = {name: str(fields[name].description) for name in ("ssh", "slurm", "skypilot", "dstack", "kuberay")}
    return {name: text[0].lower() + text[1:].removesuffix(".") for name, text in texts.items()}
