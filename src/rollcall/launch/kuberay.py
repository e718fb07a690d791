"""`rollcall launch kuberay`: a RayJob for the KubeRay operator. KubeRay starts Ray in pods; the run is `rollcall train` there.

The head pod is a node of the run, the others are workers of one group. The run file travels in a variable of the job, in
base64: KubeRay passes the job's variables through a shell, inside double quotes.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from rollcall.config.launch import KuberaySection
from rollcall.launch.errors import LaunchError
from rollcall.launch.from_variable import VARIABLE
from rollcall.launch.record import LaunchRecord, Part
from rollcall.launch.rendered import Command, Rendered, RenderedFile, yaml_text
from rollcall.launch.target import Request
from rollcall.launch.tool import ask, need_tool, run, watch

MANIFEST = "rayjob.yaml"
ENTRYPOINT = "python -m rollcall.launch.from_variable"
KEEP_S = 600  # how long KubeRay keeps the pods of a run that has ended
INSTALL = "install Kubernetes' command line"


class Kuberay:
    name = "kuberay"

    def render(self, request: Request) -> Rendered:
        section = _section(request)
        words = ("kubectl", "apply", "--namespace", section.namespace, "-f", str(request.folder / MANIFEST))
        return Rendered(
            files=(request.run_file, RenderedFile(name=MANIFEST, text=yaml_text(_job(request, section)))),
            commands=(Command(words=words, what="create the RayJob"),),
        )

    def validate(self, rendered: Rendered, folder: Path) -> str:
        need_tool("kubectl", install=INSTALL)
        words = (*rendered.commands[0].words[:-2], "--dry-run=server", "-f", str(folder / MANIFEST))
        ask(Command(words=words, what="let Kubernetes check the manifest"))
        return "Kubernetes accepts the manifest"

    def start(self, request: Request, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        namespace, name = _section(request).namespace, _name(request.name)
        record.facts.update(namespace=namespace)
        record = record.with_part(Part(kind="rayjob", where=namespace)).save()
        run(rendered.commands[0])  # the same manifest again changes nothing
        return record.with_part(Part(kind="rayjob", where=namespace, id=name)).save()

    def follow(self, record: LaunchRecord) -> int:
        return watch(Command(words=(*_logs(record), "--follow"), what="follow the log"))

    def logs(self, record: LaunchRecord) -> None:
        watch(Command(words=_logs(record), what="read the log"))

    def status(self, record: LaunchRecord) -> str:
        path = "jsonpath={.status.jobDeploymentStatus} {.status.jobStatus} {.status.message}"
        words = (*_kubectl(record), "get", "rayjob", _name(record.name), "-o", path)
        return (
            ask(Command(words=words, what="ask for the RayJob"), may_fail=True).strip()
            or "Kubernetes has no such RayJob"
        )

    def stop(self, record: LaunchRecord) -> None:
        words = (*_kubectl(record), "delete", "rayjob", _name(record.name), "--ignore-not-found")
        run(Command(words=words, what="delete the RayJob"))


def _section(request: Request) -> KuberaySection:
    assert request.launch.kuberay is not None  # make_request refuses a run file without it
    return request.launch.kuberay


def _name(name: str) -> str:
    """A name that Kubernetes takes: lower case, and short enough for what KubeRay adds to it.

    >>> _name("My_run")
    'my-run'
    """
    text = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    return text if text[0].isalpha() else f"run-{text}"


def _kubectl(record: LaunchRecord) -> tuple[str, ...]:
    return ("kubectl", "--namespace", record.facts["namespace"])


def _logs(record: LaunchRecord) -> tuple[str, ...]:
    """KubeRay's submitter is a job of the same name, and prints the log of the run."""
    return (*_kubectl(record), "logs", f"job/{_name(record.name)}")


def _job(request: Request, section: KuberaySection) -> dict[str, Any]:
    text = base64.b64encode(request.run_file.text.encode()).decode()
    spec: dict[str, Any] = {
        "entrypoint": ENTRYPOINT,
        "submissionMode": section.submission,
        "runtimeEnvYAML": yaml_text({"env_vars": {VARIABLE: text}}),
    }
    if section.ray_cluster is not None:
        spec["clusterSelector"] = {"ray.io/cluster": section.ray_cluster}
    else:
        spec["shutdownAfterJobFinishes"] = True
        spec["ttlSecondsAfterFinished"] = KEEP_S
        spec["rayClusterSpec"] = _cluster(request, section)
    metadata = {"name": _name(request.name), "namespace": section.namespace, "labels": {"app": "rollcall"}}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _cluster(request: Request, section: KuberaySection) -> dict[str, Any]:
    sizes = sorted(set(request.cluster.slots_per_node))
    if len(sizes) > 1:
        raise LaunchError(
            f"cluster.nodes has nodes of {' and '.join(map(str, sizes))} slots; KubeRay's pods have no order, so all nodes of a "
            "run must be of one size: give num_nodes and num_gpus_per_node"
        )
    if section.image is None:
        raise LaunchError("launch.kuberay.image is missing: name an image that has Rollcall and Ray in it")
    # With logical slots, Ray is told of GPUs that the pods do not have.
    start = {"num-gpus": str(sizes[0])} if request.cluster.accelerator == "cpu" else {}
    spec: dict[str, Any] = {
        "rayVersion": section.ray_version,
        "headGroupSpec": {
            "rayStartParams": {**start, "dashboard-host": "0.0.0.0"},
            "template": _pod(request, section, name="ray-head"),
        },
    }
    if others := request.cluster.num_nodes - 1:
        group = {
            "groupName": "workers",
            "replicas": others,
            "minReplicas": others,
            "maxReplicas": others,
            "rayStartParams": start,
            "template": _pod(request, section, name="ray-worker"),
        }
        spec["workerGroupSpecs"] = [group]
    return spec


def _pod(request: Request, section: KuberaySection, *, name: str) -> dict[str, Any]:
    gpus = {} if request.cluster.accelerator == "cpu" else {section.gpu_resource: request.cluster.num_gpus_per_node}
    resources = {"cpu": section.cpus, "memory": section.memory, **gpus}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": section.shm}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for index, (claim, path) in enumerate(section.claims.items()):
        volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{index}", "mountPath": path})
    variables = {**request.node_env, **section.env}
    container: dict[str, Any] = {
        "name": name,
        "image": section.image,
        "resources": {"limits": resources, "requests": resources},
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "envFrom": [{"secretRef": {"name": secret}} for secret in section.env_from_secrets],
        "volumeMounts": mounts,
    }
    return {
        "spec": {"containers": [{key: value for key, value in container.items() if value != []}], "volumes": volumes}
    }
