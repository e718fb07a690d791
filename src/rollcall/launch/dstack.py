"""`rollcall launch dstack`: starts a dstack task with several nodes. dstack finds the machines and runs the commands on each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from rollcall.config.launch import DstackSection
from rollcall.launch.record import LaunchRecord
from rollcall.launch.rendered import Command, Rendered, yaml_text
from rollcall.launch.target import IN_IMAGE, RUN_FILE, LaunchRequest, Seen, ToolTarget, ask_json, run
from rollcall.nodes.state import TOKEN

TASK = "task.dstack.yml"
THERE = "/tmp/rollcall-run/run.yaml"  # path in the container
ENDED = ("terminated", "failed", "done")


class Dstack(ToolTarget):
    name = "dstack"
    title = "dstack"
    look = "dstack ps"
    image_key = "launch.dstack.image"
    place_words = "dstack's project"
    place_advice = "run `dstack project set-default {}` first, or set DSTACK_PROJECT"

    def render(self, request: LaunchRequest) -> Rendered:
        section = request.section(DstackSection)
        task = _task(request, section, name=self.tool_name(request.name))
        words = ("dstack", "apply", "--yes", "--detach", "--force", "-f", str(request.folder / TASK))
        lost = (
            f"run.dir={request.config.run.dir} is deleted with the machines; add a volume to launch.dstack.volumes, and put run.dir "
            "on it"
        )
        return Rendered(
            files={RUN_FILE: request.run_file, TASK: yaml_text(task)},
            commands=(Command(words=words, what="start the task"),),
            notes=(
                *request.unlike_slots(section.resources.get("gpu"), key="launch.dstack.resources.gpu"),
                *([] if section.volumes else [lost]),
                *request.left_here(advice=IN_IMAGE),
            ),
        )

    def tool_name(self, name: str) -> str:
        """Return a valid dstack name: lower case, at least two characters, starting with a letter.

        >>> [Dstack().tool_name(name) for name in ("My_run", "7", "a")]
        ['my-run', 'run-7', 'run-a']
        """
        text = name.lower().replace("_", "-")
        return text if text[0].isalpha() and len(text) > 1 else f"run-{text}"

    def place(self) -> str:
        return _listed().get("project", "")

    def find(self, record: LaunchRecord) -> list[Seen]:
        """Return the run if it is active or was the last one to finish."""
        name = self.tool_name(record.name)
        return [
            Seen(
                id=each.get("id", ""),
                state=f"{each['status']} {each.get('status_message') or ''}".strip(),
                is_busy=each["status"] not in ENDED,
            )
            for each in _listed().get("runs", [])
            if each["run_spec"]["run_name"] == name
        ]

    def log_command(self, record: LaunchRecord, *, follow: bool) -> tuple[str, ...]:
        return ("dstack", *(("attach", "--logs") if follow else ("logs",)), self.tool_name(record.name))

    def end(self, record: LaunchRecord, ids: Sequence[str]) -> None:
        run("dstack", "stop", "--yes", self.tool_name(record.name), what="end the task")


def _listed() -> dict[str, Any]:
    return ask_json("dstack", "ps", "--json", what="list dstack's runs") or {}


def _task(request: LaunchRequest, section: DstackSection, *, name: str) -> dict[str, Any]:
    lines = request.node_lines(
        section,
        run_file=shlex.quote(THERE),
        head='"$DSTACK_MASTER_NODE_IP"' if request.cluster.num_nodes > 1 else "127.0.0.1",
        more='--rank "$DSTACK_NODE_RANK" --num-nodes "$DSTACK_NODES_NUM"',  # takes precedence over another launcher's variables
        before=section.setup,
        guard=_guard,
    )
    task: dict[str, Any] = {
        "type": "task",
        "name": name,
        "nodes": request.cluster.num_nodes,
        "image": section.image,
        "env": [TOKEN, *section.secrets],
        "files": [{"local_path": str(request.folder / RUN_FILE), "path": THERE}],
        "commands": ["\n".join(lines) + "\n"],
        "ports": [str(port) for port in section.ports],
        "resources": dict(section.resources),
        "volumes": list(section.volumes),
        # The first node's status is the run's status. The other nodes have nothing to do after the first node exits.
        "stop_criteria": "master-done" if request.cluster.num_nodes > 1 else None,
    }
    return {key: value for key, value in task.items() if value not in (None, {}, [])}


def _guard(line: str) -> str:
    """Quote ``$`` in ``$$`` and ``${{ ... }}``, which dstack would expand itself, so that it reaches the shell.

    >>> _guard("export A='$$ ${{x}}'")
    "export A='$''$ $''{{x}}'"
    """
    return re.sub(r"\$(?=\$|\{\{)", "$''", line)
