"""`rollcall launch kuberay`: creates a RayJob for the KubeRay operator. KubeRay starts Ray in pods and runs a job, which prepares
the nodes and then runs `rollcall train`.

The head pod is one of the run's nodes; the other nodes are pods of one worker group. The job gets the run file in an environment
variable. The file is encoded in base64 because KubeRay passes the job's variables through a shell, inside double quotes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

from rollcall.base.wait import Wait, say
from rollcall.config.launch import KuberaySection
from rollcall.launch.record import LaunchError, LaunchRecord
from rollcall.launch.rendered import RUN_FILE_VARIABLE, Command, Rendered, yaml_text
from rollcall.launch.target import IN_IMAGE, RUN_FILE, LaunchRequest, Seen, ToolTarget, ask, ask_json, run

MANIFEST = "rayjob.yaml"
KEEP_S = 600  # how long KubeRay keeps a run's pods after the run has ended
INVALID = "ValidationFailed"  # KubeRay does not start such a job
ENDED = ("Complete", "Failed", INVALID)
# The largest run file. KubeRay's submitter gets the file in base64 as one argument, and Linux limits an argument to 131,072 bytes.
MOST_BYTES = 90_000


class Kuberay(ToolTarget):
    name = "kuberay"
    title = "Kubernetes"
    look = "kubectl get rayjobs"
    image_key = "launch.kuberay.image"
    place_words = "kubectl's context"
    place_advice = "run `kubectl config use-context {}` first"

    def render(self, request: LaunchRequest) -> Rendered:
        section = request.section(KuberaySection)
        job = _job(request, section, name=self.tool_name(request.name))
        words = ("kubectl", "apply", "--namespace", section.namespace, "-f", str(request.folder / MANIFEST))
        lost = f"run.dir={request.config.run.dir} is deleted with the pods, {KEEP_S // 60} minutes after the run ends"
        note = f"{lost}; add a volume claim to launch.kuberay.claims, and put run.dir on it"
        return Rendered(
            files={RUN_FILE: request.run_file, MANIFEST: yaml_text(job)},
            commands=(Command(words=words, what="create the RayJob"),),
            notes=(*(() if section.claims or section.ray_cluster else (note,)), *request.left_here(advice=IN_IMAGE)),
        )

    def validate(self, rendered: Rendered) -> None:
        ask(*rendered.commands[0].words, "--dry-run=server", what="have Kubernetes check the manifest")

    def tool_name(self, name: str) -> str:
        """Return a valid Kubernetes name: lower case, with only letters, digits and hyphens.

        >>> Kuberay().tool_name("My_run")
        'my-run'
        """
        text = re.sub("_+", "-", name.lower())
        return text if text[0].isalpha() else f"run-{text}"

    def kind(self, request: LaunchRequest) -> str:
        return request.section(KuberaySection).namespace

    def place(self) -> str:
        """Return kubectl's context, or "" if kubectl runs in a pod of its own cluster."""
        return ask("kubectl", "config", "current-context", what="ask kubectl for its context", fine="").strip()

    def begin(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> str:
        if self.seen(record):  # the RayJob has ended and cannot run again
            self.end(record, ())
        run(*rendered.commands[0].words, what=rendered.commands[0].what)
        return ""

    def find(self, record: LaunchRecord) -> list[Seen]:
        found = self._rayjob(record)
        if found is None:
            return []
        status = found.get("status", {})
        words = [status.get(key) for key in ("jobDeploymentStatus", "jobStatus", "message")]
        id, state = found.get("metadata", {}).get("uid", ""), " ".join(filter(None, words)) or "new"
        return [Seen(id=id, state=state, is_busy=words[0] not in ENDED, stays=True)]

    def end(self, record: LaunchRecord, ids: Sequence[str]) -> None:
        words = ("delete", "rayjob", self.tool_name(record.name), "--ignore-not-found")
        run(*self._kubectl(record), *words, what="delete the RayJob")

    def log_command(self, record: LaunchRecord, *, follow: bool) -> tuple[str, ...]:
        # The submitter's Kubernetes job has the RayJob's name and prints the run's log.
        where: tuple[str, ...] = (f"job/{self.tool_name(record.name)}",)
        found = self._rayjob(record) or {}
        if found.get("spec", {}).get("submissionMode") == "SidecarMode":
            head = f"ray.io/cluster={found['status']['rayClusterName']},ray.io/node-type=head"
            where = ("--selector", head, "--container", "ray-job-submitter", "--tail", "-1")
        return (*self._kubectl(record), "logs", *where, *(["--follow"] if follow else []))

    def logs(self, record: LaunchRecord) -> None:
        self.require_started(record)
        if self._has_log(record):
            super().logs(record)

    def follow(self, record: LaunchRecord) -> int:
        self.require_started(record)
        if self._wait(record, until=("Running", *ENDED))["jobDeploymentStatus"] != INVALID and self._has_log(record):
            super().follow(record)
        if self._wait(record, until=ENDED).get("jobStatus") == "SUCCEEDED":
            return 0
        say(f"the RayJob is {self.status(record)}")
        return 1

    def _has_log(self, record: LaunchRecord) -> bool:
        if (self._rayjob(record) or {}).get("spec", {}).get("submissionMode") != "HTTPMode":
            return True
        say("KubeRay submits this job over HTTP, so Kubernetes has no log of it; see Ray's dashboard")
        return False

    def _wait(self, record: LaunchRecord, *, until: Sequence[str]) -> dict[str, Any]:
        """Wait until the RayJob is in one of these states and return its status."""
        wait = Wait(first_s=0.0, every_s=30.0)
        while (found := self._rayjob(record)) is not None:
            status = found.get("status", {})
            if status.get("jobDeploymentStatus") in until:
                return status
            state = status.get("jobDeploymentStatus") or "new"
            wait.again(f"waiting for the RayJob, which is {state}", after_s=5.0)
        raise LaunchError(f"the RayJob {self.tool_name(record.name)!r} was deleted before it ended")

    def _rayjob(self, record: LaunchRecord) -> Any:
        words = ("get", "rayjob", self.tool_name(record.name), "--ignore-not-found", "-o", "json")
        return ask_json(*self._kubectl(record), *words, what="look up the RayJob")

    def _kubectl(self, record: LaunchRecord) -> tuple[str, ...]:
        return ("kubectl", "--namespace", record.facts["kind"])


def _job(request: LaunchRequest, section: KuberaySection, *, name: str) -> dict[str, Any]:
    run_file = request.run_file.encode()
    if len(run_file) > MOST_BYTES:
        raise LaunchError(
            f"the run file has {len(run_file)} bytes, but KubeRay can pass at most {MOST_BYTES} to a job; shorten the file"
        )
    if section.ray_cluster is not None and section.pod:
        raise LaunchError(
            f"launch.kuberay.pod has no effect on the existing pods of ray_cluster={section.ray_cluster}; remove one of the two keys"
        )
    spec: dict[str, Any] = {
        "entrypoint": "python -m rollcall.launch.ready",
        "submissionMode": section.submission,
        "runtimeEnvYAML": yaml_text({"env_vars": {RUN_FILE_VARIABLE: base64.b64encode(run_file).decode()}}),
    }
    if section.ray_cluster is not None:
        spec["clusterSelector"] = {"ray.io/cluster": section.ray_cluster}
    else:
        spec["shutdownAfterJobFinishes"] = True
        spec["ttlSecondsAfterFinished"] = KEEP_S
        spec["rayClusterSpec"] = _cluster(request, section)
        # KubeRay's submitter pod needs the same registry keys and account as the other pods.
        given = {key: section.pod[key] for key in ("imagePullSecrets", "serviceAccountName") if key in section.pod}
        if given and section.submission == "K8sJobMode":
            small = {"requests": {"cpu": "500m", "memory": "200Mi"}, "limits": {"cpu": 1, "memory": "1Gi"}}
            container = {"name": "ray-job-submitter", "image": section.image, "resources": small}
            spec["submitterPodTemplate"] = {"spec": {**given, "restartPolicy": "Never", "containers": [container]}}
    metadata = {"name": name, "namespace": section.namespace, "labels": {"app": "rollcall", **section.labels}}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _cluster(request: LaunchRequest, section: KuberaySection) -> dict[str, Any]:
    num_slots = request.even_slots("KubeRay's pods have no order, so all nodes must have the same number of slots")
    if section.image is None:
        raise LaunchError("launch.kuberay.image is missing; name an image that contains Rollcall and Ray")
    # Logical slots are GPUs that Ray counts but the pods do not have.
    start = {"num-gpus": str(num_slots)} if request.cluster.accelerator == "cpu" else {}
    spec: dict[str, Any] = {
        "rayVersion": section.ray_version,
        # KubeRay creates the token; without a token, anyone who can reach a port can run code.
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {**start, "dashboard-host": "0.0.0.0"},
            "template": _pod(request, section, name="ray-head"),
        },
    }
    if others := request.cluster.num_nodes - 1:
        group = {
            "groupName": "workers",
            **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), others),
            "rayStartParams": start,
            "template": _pod(request, section, name="ray-worker"),
        }
        spec["workerGroupSpecs"] = [group]
    return spec


def _pod(request: LaunchRequest, section: KuberaySection, *, name: str) -> dict[str, Any]:
    gpus = {} if request.cluster.accelerator == "cpu" else {section.gpu_resource: request.cluster.num_gpus_per_node}
    resources = {"cpu": section.cpus, "memory": section.memory, **gpus}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": section.shm}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for index, (claim, path) in enumerate(section.claims.items()):
        volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{index}", "mountPath": path})
    container: dict[str, Any] = {
        "name": name,
        "image": section.image,
        "resources": {"limits": resources, "requests": resources},
        "env": [{"name": key, "value": _literal(value)} for key, value in {**request.node_env, **section.env}.items()],
        "envFrom": [{"secretRef": {"name": secret}} for secret in section.env_from_secrets],
        "volumeMounts": mounts,
    }
    if own := {"containers", "volumes"} & section.pod.keys():
        raise LaunchError(
            f"launch.kuberay.pod contains {', '.join(sorted(own))}, but Rollcall sets that itself; remove it"
        )
    containers = [{key: value for key, value in container.items() if value != []}]
    return {"spec": {**section.pod, "containers": containers, "volumes": volumes}}


def _literal(value: str) -> str:
    """Escape a variable's value: Kubernetes expands ``$(NAME)`` in it and reads ``$$`` as ``$``.

    >>> _literal("$(HOME) $x")
    '$$(HOME) $$x'
    """
    return value.replace("$", "$$")
