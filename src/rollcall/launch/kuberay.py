"""`rollcall launch kuberay`: a RayJob for the KubeRay operator. KubeRay starts Ray in pods; a job there
makes the nodes ready and becomes `rollcall train`.

The head pod is a node of the run, the others are workers of one group. The run file travels in a variable of the job, in
base64: KubeRay passes the job's variables through a shell, inside double quotes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rollcall.config.launch import KuberaySection
from rollcall.launch.errors import ElsewhereError, LaunchError
from rollcall.launch.from_variable import VARIABLE
from rollcall.launch.record import LaunchRecord, Part
from rollcall.launch.rendered import Command, Rendered, RenderedFile, yaml_text
from rollcall.launch.target import LaunchRequest
from rollcall.launch.tool import (
    ask,
    ask_json,
    check_for_tool,
    is_own,
    leave_others,
    need_tool,
    refuse_others,
    run,
    watch,
)
from rollcall.wait import Wait, say

MANIFEST = "rayjob.yaml"
ENTRYPOINT = "python -m rollcall.launch.from_variable"
KEEP_S = 600  # how long KubeRay keeps the pods of a run that has ended
INVALID = "ValidationFailed"  # KubeRay does not begin such a one
ENDED = ("Complete", "Failed", INVALID)
SUBMITTERS = ("imagePullSecrets", "serviceAccountName")  # of a pod's spec, what KubeRay's submitter needs too
MOST_BYTES = (
    90_000  # of a run file: KubeRay's submitter gets it, in base64, as one word, and Linux has 131,072 bytes for that
)
LOOK_EVERY_S = 5.0
CONTEXT = "context"  # the fact that names kubectl's
INSTALL = "install Kubernetes' command line"


class Kuberay:
    name = "kuberay"

    def check(self, request: LaunchRequest) -> None:
        check_for_tool(request, target=self.name, image_key="launch.kuberay.image")

    def render(self, request: LaunchRequest) -> Rendered:
        section = request.section(KuberaySection)
        words = ("kubectl", "apply", "--namespace", section.namespace, "-f", str(request.folder / MANIFEST))
        return Rendered(
            files=(request.run_file, RenderedFile(name=MANIFEST, text=yaml_text(_job(request, section)))),
            commands=(Command(words=words, what="create the RayJob"),),
            notes=_notes(request, section),
        )

    def validate(self, rendered: Rendered, folder: Path) -> str:
        need_tool("kubectl", install=INSTALL)
        words = (*rendered.commands[0].words[:-2], "--dry-run=server", "-f", str(folder / MANIFEST))
        ask(Command(words=words, what="let Kubernetes check the manifest"))
        return "Kubernetes accepts the manifest"

    def in_use(self, record: LaunchRecord, names: Sequence[str]) -> Sequence[str]:
        namespace, name = _place(record)
        found = _get(namespace, name)
        own = found is not None and is_own(record.parts[-1], name=name, id=found.metadata.uid)
        return names if found is not None and own and found.state not in ENDED else ()

    def start(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        namespace, name = request.section(KuberaySection).namespace, _name(request.name)
        if found := _get(namespace, name):
            refuse_others(name, tool="Kubernetes", record=record, where=namespace, id=found.metadata.uid)
        record = replace(record, facts={**record.facts, CONTEXT: _context()})
        record = record.with_part(Part(kind="rayjob", where=namespace)).save()
        if found and found.state in ENDED:  # a RayJob runs once
            _delete(namespace, name)
        run(rendered.commands[0])  # of one that runs, the same manifest changes nothing
        made = _get(namespace, name)
        return record.with_part(
            Part(kind="rayjob", where=namespace, id=(made.metadata.uid if made else "") or name)
        ).save()

    def follow(self, record: LaunchRecord) -> int:
        begun = self._wait(record, until=("Running", *ENDED))
        if begun.state != INVALID:
            self.logs(record, "--follow")
        ended = self._wait(record, until=ENDED)
        if ended.status.jobStatus == "SUCCEEDED":
            return 0
        say(f"the RayJob is {ended.told}")
        return 1

    def logs(self, record: LaunchRecord, *options: str) -> None:
        namespace, name = _place(record)
        found = _get(namespace, name) or _RayJob()
        mode = found.spec.submissionMode
        if mode == "HTTPMode":
            say(
                "KubeRay submits this job over HTTP, so Kubernetes has no log of it; look at the job in Ray's dashboard"
            )
            return
        where = (f"job/{name}",)  # KubeRay's submitter has the RayJob's name, and prints the log of the run
        if mode == "SidecarMode":
            head = f"ray.io/cluster={found.status.rayClusterName},ray.io/node-type=head"
            where = ("--selector", head, "--container", "ray-job-submitter", "--tail", "-1")
        watch(Command(words=(*_kubectl(namespace), "logs", *where, *options), what="read the log"))

    def status(self, record: LaunchRecord) -> str:
        found = _get(*_place(record))
        if found is None:
            return "Kubernetes has no such RayJob"
        return found.told

    def stop(self, record: LaunchRecord) -> None:
        name = _name(record.name)
        _refuse_other_context(record)
        for part in record.parts:
            found = _get(part.where, name)
            if found is not None and not is_own(part, name=name, id=found.metadata.uid):
                leave_others(name, tool="Kubernetes")
            elif found is not None:
                _delete(part.where, name)

    def _wait(self, record: LaunchRecord, *, until: Sequence[str]) -> _RayJob:
        """The RayJob once it is in one of these states."""
        wait = Wait(first_s=0.0, every_s=30.0)
        while True:
            found = _get(*_place(record))
            if found is None:
                raise LaunchError(f"the RayJob {_name(record.name)!r} was deleted while its end was waited for")
            if found.state in until:
                return found
            wait.again(f"waiting for the RayJob, which is {found.state or 'new'}", after_s=LOOK_EVERY_S)


def _notes(request: LaunchRequest, section: KuberaySection) -> tuple[str, ...]:
    if section.claims or section.ray_cluster:
        return ()
    lost = f"run.dir={request.config.run.dir} is lost with the pods, {KEEP_S // 60} minutes after the end"
    return (f"{lost}: name a volume claim in launch.kuberay.claims, and put run.dir on it",)


def _name(name: str) -> str:
    """A name that Kubernetes takes: lower case, and short enough for what KubeRay adds to it.

    >>> _name("My_run")
    'my-run'
    """
    text = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    return text if text[0].isalpha() else f"run-{text}"


def _kubectl(namespace: str) -> tuple[str, ...]:
    return ("kubectl", "--namespace", namespace)


def _place(record: LaunchRecord) -> tuple[str, str]:
    if not record.parts:
        raise LaunchError(f"{record.name!r} has started nothing yet; run the same `rollcall launch` again")
    _refuse_other_context(record)
    return record.parts[-1].where, _name(record.name)


def _context() -> str:
    """Which cluster kubectl speaks with; empty: it is in a pod of one."""
    words = ("kubectl", "config", "current-context")
    return ask(Command(words=words, what="ask kubectl for its context"), may_fail=True).strip()


def _refuse_other_context(record: LaunchRecord) -> None:
    """Another cluster has no such RayJob, which would be taken for its end."""
    then = record.facts.get(CONTEXT)
    if then and (now := _context()) not in ("", then):
        raise ElsewhereError(
            f"{record.name!r} was launched in kubectl's context {then!r}, and now it has {now!r}; run "
            f"`kubectl config use-context {then}` first"
        )


@dataclass(frozen=True, slots=True)
class _Metadata:
    uid: str = ""


@dataclass(frozen=True, slots=True)
class _Spec:
    submissionMode: str | None = None  # noqa: N815 - Kubernetes' names


@dataclass(frozen=True, slots=True)
class _Status:
    jobDeploymentStatus: str | None = None  # noqa: N815
    jobStatus: str | None = None  # noqa: N815
    message: str | None = None
    rayClusterName: str | None = None  # noqa: N815


@dataclass(frozen=True, slots=True)
class _RayJob:
    metadata: _Metadata = _Metadata()
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def state(self) -> str:
        """Of the deployment: Initializing, Running, Complete, Failed and others."""
        return self.status.jobDeploymentStatus or ""

    @property
    def told(self) -> str:
        """In KubeRay's words."""
        told = self.status
        return " ".join(filter(None, (told.jobDeploymentStatus, told.jobStatus, told.message))) or "new"


_RAYJOB = TypeAdapter(_RayJob)


def _get(namespace: str, name: str) -> _RayJob | None:
    words = (*_kubectl(namespace), "get", "rayjob", name, "--ignore-not-found", "-o", "json")
    return ask_json(Command(words=words, what="ask for the RayJob"), _RAYJOB)


def _delete(namespace: str, name: str) -> None:
    words = (*_kubectl(namespace), "delete", "rayjob", name, "--ignore-not-found")
    run(Command(words=words, what="delete the RayJob"))


def _job(request: LaunchRequest, section: KuberaySection) -> dict[str, Any]:
    run_file = request.run_file.text.encode()
    if len(run_file) > MOST_BYTES:
        raise LaunchError(
            f"the run file has {len(run_file)} bytes, and KubeRay can pass on {MOST_BYTES} at most; make it shorter"
        )
    if section.ray_cluster is not None and section.pod:
        raise LaunchError(
            f"launch.kuberay.pod is for pods that this launch makes, and those of ray_cluster={section.ray_cluster} exist; leave it out"
        )
    text = base64.b64encode(run_file).decode()
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
        if submitter := _submitter(section):
            spec["submitterPodTemplate"] = submitter
    labels = {"app": "rollcall", **section.labels}
    metadata = {"name": _name(request.name), "namespace": section.namespace, "labels": labels}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _cluster(request: LaunchRequest, section: KuberaySection) -> dict[str, Any]:
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
        "authOptions": {
            "mode": "token"
        },  # KubeRay makes the token; without one, anyone who reaches a port can run code
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


def _submitter(section: KuberaySection) -> dict[str, Any] | None:
    """KubeRay's own pod has the image too, and would not get it from a registry that wants a key. None: its own will do."""
    given = {key: section.pod[key] for key in SUBMITTERS if key in section.pod}
    if not given or section.submission != "K8sJobMode":
        return None
    small = {"requests": {"cpu": "500m", "memory": "200Mi"}, "limits": {"cpu": 1, "memory": "1Gi"}}
    container = {"name": "ray-job-submitter", "image": section.image, "resources": small}
    return {"spec": {**given, "restartPolicy": "Never", "containers": [container]}}


def _pod(request: LaunchRequest, section: KuberaySection, *, name: str) -> dict[str, Any]:
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
        "env": [{"name": key, "value": _literal(value)} for key, value in variables.items()],
        "envFrom": [{"secretRef": {"name": secret}} for secret in section.env_from_secrets],
        "volumeMounts": mounts,
    }
    if own := {"containers", "volumes"} & section.pod.keys():
        raise LaunchError(
            f"launch.kuberay.pod has {', '.join(sorted(own))}, which the launch makes itself; leave it out"
        )
    containers = [{key: value for key, value in container.items() if value != []}]
    return {"spec": {**section.pod, "containers": containers, "volumes": volumes}}


def _literal(value: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in the value of a variable, and reads ``$$`` as ``$``.

    >>> _literal("$(HOME) $x")
    '$$(HOME) $$x'
    """
    return value.replace("$", "$$")
