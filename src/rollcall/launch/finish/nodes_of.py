"""Reaches nodes that may have parts of a checkpoint: this node and the cluster's nodes, or hosts over ssh if the cluster is down."""

from __future__ import annotations

import json
import os
import select
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rollcall.base.errors import ClusterError
from rollcall.base.words import visible
from rollcall.launch.finish import node_files
from rollcall.launch.finish.node_files import CHUNK_BYTES, NodeFiles
from rollcall.launch.record import all_records
from rollcall.launch.ssh.machines import SITE, Site, checked_hosts
from rollcall.launch.ssh.shell import NO_FORWARDS, Login, end_ssh, start_ssh
from rollcall.process.ray.connect import connect
from rollcall.process.ray.each_node import NoAnswerError, Pinned, answer_of
from rollcall.process.ray.members import ranked_nodes

ANSWER_S = 120.0  # to wait for an answer or the next bytes
Asked = Mapping[str, Any]  # a part, with at least its name, place, run and size


class NodeError(ClusterError):
    """A node did not answer, or its answer was wrong; the message names the node and the reason."""


class ThisNode(NodeFiles):
    where: str = "this node"  # its name in messages

    def chunks(self, part: Asked, *, offset: int) -> Iterator[bytes]:
        """Yield a part's bytes from ``offset`` on."""
        try:
            while data := self.read(dict(part), offset, CHUNK_BYTES):
                yield data
                offset += len(data)
        except (OSError, ValueError) as error:
            raise NodeError(f"{self.where}: {error}") from error


class RayNodeFiles:
    """A node of the cluster. An actor on the node reads the parts; a few chunks are in flight at any time."""

    def __init__(self, node_id: str, *, where: str) -> None:
        self.where = where
        self._there = Pinned(node_id, NodeFiles, by_value=(node_files,))

    def present(self, parts: Sequence[Asked]) -> list[str]:
        return self._answer(self._there.call("present", list(parts)))

    def chunks(self, part: Asked, *, offset: int) -> Iterator[bytes]:
        starts = range(offset, part["size"], CHUNK_BYTES)
        calls = (self._there.call("read", dict(part), start, CHUNK_BYTES) for start in starts)
        waiting = list(islice(calls, 2))  # chunks that are requested before they are needed
        while waiting:
            data = self._answer(waiting.pop(0))
            waiting += islice(calls, 1)
            yield data

    def remove(self, parts: Sequence[Asked]) -> None:
        self._answer(self._there.call("remove", list(parts)))

    def _answer(self, call: Any) -> Any:
        try:
            return answer_of(call, timeout_s=ANSWER_S)
        except (NoAnswerError, OSError, ValueError) as error:
            lines = str(error.__cause__ or error).strip().splitlines()  # the last line has the node's exception
            raise NodeError(f"{self.where}: {visible(lines[-1])}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SshNode:
    """A host that is reached over ssh. Each request starts its own ssh process; a part's bytes are sent as fast as they are read."""

    host: str
    login: Login
    inside: tuple[str, ...] = ()  # the command for a shell in the node's container

    def present(self, parts: Sequence[Asked]) -> list[str]:
        return self._ask("present", parts)

    def remove(self, parts: Sequence[Asked]) -> None:
        self._ask("remove", parts)

    def _ask(self, do: str, parts: Sequence[Asked]) -> list[str]:
        out = b"".join(self._answer(do=do, parts=list(parts)))
        try:
            return [str(name) for name in json.loads(out)]
        except (ValueError, TypeError):
            printed = visible(out.decode(errors="replace").strip()[:100])
            raise NodeError(
                f"{self.host}: its shell prints {printed!r} before it runs a command; check its .bashrc"
            ) from None

    def chunks(self, part: Asked, *, offset: int) -> Iterator[bytes]:
        return self._answer(do="read", part=dict(part), offset=offset)

    def _answer(self, **question: Any) -> Iterator[bytes]:
        """Yield the host's output as it arrives. If the command fails, raise an error with the host's stderr."""
        entry = f"exec {shlex.join(self.inside)}\n" if self.inside else ""
        code = Path(node_files.__file__).read_text()
        with TemporaryFile() as script, TemporaryFile() as complaints:
            # python reads the request from the next line: bash reads no further than the line that it runs.
            script.write(f"{entry}exec python3 -c {shlex.quote(code)}\n{json.dumps(question)}\n".encode())
            script.seek(0)
            process = start_ssh(self.login.words(self.host, *NO_FORWARDS), stdin=script, stderr=complaints)
            assert process.stdout is not None
            try:
                while select.select([process.stdout], [], [], ANSWER_S)[0]:
                    if not (data := os.read(process.stdout.fileno(), CHUNK_BYTES)):
                        break
                    yield data
                else:
                    raise NodeError(f"{self.host}: no data arrived for {ANSWER_S:g} s")
                status = process.wait()
            finally:
                end_ssh(process)
                process.communicate()
            complaints.seek(0)
            lines = visible(complaints.read().decode(errors="replace")).strip().splitlines()[-1:]
            if status == 1 and lines:  # the exception on the host
                raise NodeError(f"{self.host}: {lines[0]}")
            if status:
                raise NodeError(": ".join([f"{self.host}: ssh ended early with status {status}", *lines]))


Node = ThisNode | RayNodeFiles | SshNode


def find_nodes(run_dir: Path, *, hosts: Sequence[str]) -> list[Node]:
    """Return the nodes to ask: ``hosts`` if set, else the cluster's nodes, else the hosts of the run's launch."""
    if hosts:
        return [ThisNode(), *(SshNode(host=host, login=Login()) for host in checked_hosts(hosts, key="--hosts"))]
    try:
        connect(log_to_driver=False)
    except ClusterError as error:
        for record in all_records():
            if SITE in record.facts and Path(record.run_dir).resolve() == run_dir.resolve():
                site = Site.of_record(record)
                return [ThisNode(), *(SshNode(host=host, login=site.login, inside=site.inside) for host in site.hosts)]
        raise ClusterError(
            f"cannot reach the nodes of {run_dir}: {error}. Run this on a node of the cluster, or name the hosts that have "
            "the parts: --hosts HOST,HOST"
        ) from error
    there = [RayNodeFiles(node.node_id, where=f"node {node.rank} ({node.address})") for node in ranked_nodes()]
    return [ThisNode(), *there]
