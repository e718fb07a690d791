"""The nodes that may have parts of a checkpoint: this one, those of the cluster (Ray), or hosts over ssh when it is down."""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from rollcall.errors import ClusterError
from rollcall.finish import node_files
from rollcall.finish.node_files import CHUNK_BYTES, NodeFiles
from rollcall.launch.record import all_records
from rollcall.launch.ssh.shell import NO_FORWARDS, Login, close_pipes, start_ssh
from rollcall.launch.ssh.site import SITE, Site, checked_hosts
from rollcall.on_ray.connect import connect
from rollcall.on_ray.each_node import NoAnswerError, Pinned, answer_of
from rollcall.on_ray.members import ranked_nodes
from rollcall.words import visible

ANSWER_S = 120.0  # for an answer, or the next bytes
LONGEST_ANSWER = 1 << 24  # bytes
AHEAD = 2  # chunks that are asked for before they are needed
Asked = Mapping[str, Any]  # a part: name, place, run, size


class NodeError(ClusterError):
    """A node does not answer, or not as it should; the message names it and says why."""


class Node(Protocol):
    @property
    def where(self) -> str:
        """For messages."""
        ...

    def present(self, parts: Sequence[Asked]) -> list[str]:
        """The names of the parts that it has."""
        ...

    def chunks(self, part: Asked, *, offset: int) -> Iterator[bytes]:
        """The bytes of a part from ``offset`` on."""
        ...

    def remove(self, parts: Sequence[Asked]) -> None: ...


class ThisNode:
    where: str = "this node"

    def present(self, parts: Sequence[Asked]) -> list[str]:
        return NodeFiles().present(list(parts))

    def chunks(self, part: Asked, *, offset: int) -> Iterator[bytes]:
        try:
            while data := NodeFiles().read(dict(part), offset, CHUNK_BYTES):
                yield data
                offset += len(data)
        except (OSError, ValueError) as error:
            raise NodeError(f"{self.where}: {error}") from error

    def remove(self, parts: Sequence[Asked]) -> None:
        NodeFiles().remove(list(parts))


class RayNodeFiles:
    """A node of the cluster. A process there reads; a few chunks are on their way at any time."""

    def __init__(self, node_id: str, *, where: str) -> None:
        self.where = where
        self._there = Pinned(node_id, NodeFiles, by_value=(node_files,))

    def present(self, parts: Sequence[Asked]) -> list[str]:
        return self._answer(self._there.call("present", list(parts)))

    def chunks(self, part: Asked, *, offset: int) -> Iterator[bytes]:
        starts = iter(range(offset, part["size"], CHUNK_BYTES))
        waiting = [self._ask(part, start) for start in islice(starts, AHEAD)]
        while waiting:
            data = self._answer(waiting.pop(0))
            if (start := next(starts, None)) is not None:
                waiting.append(self._ask(part, start))
            yield data

    def _ask(self, part: Asked, start: int) -> Any:
        return self._there.call("read", dict(part), start, CHUNK_BYTES)

    def remove(self, parts: Sequence[Asked]) -> None:
        self._answer(self._there.call("remove", list(parts)))

    def _answer(self, call: Any) -> Any:
        try:
            return answer_of(call, timeout_s=ANSWER_S)
        except (NoAnswerError, OSError, ValueError) as error:
            said = str(error.__cause__ or error).strip().splitlines()  # of what the node raised, the last line says it
            raise NodeError(f"{self.where}: {visible(said[-1])}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SshNode:
    """A host. Each question is an ssh of its own; a part comes as fast as it is taken."""

    host: str
    login: Login
    inside: tuple[str, ...] = ()  # the shell in the node's container

    @property
    def where(self) -> str:
        return self.host

    def present(self, parts: Sequence[Asked]) -> list[str]:
        with self._asked({"do": "present", "parts": list(parts)}) as (answer, _):
            if not isinstance(answer, list) or not all(isinstance(name, str) for name in answer):
                raise NodeError(f"{self.host}: its answer is not a list of names")
            return answer

    def remove(self, parts: Sequence[Asked]) -> None:
        with self._asked({"do": "remove", "parts": list(parts)}):
            return

    def chunks(self, part: Asked, *, offset: int) -> Iterator[bytes]:
        with self._asked({"do": "read", "part": dict(part), "offset": offset}) as (_, process):
            left = part["size"] - offset
            while left:
                data = self._read(process, min(left, CHUNK_BYTES))
                left -= len(data)
                yield data

    @contextmanager
    def _asked(self, question: dict[str, Any]) -> Iterator[tuple[Any, subprocess.Popen[bytes]]]:
        """The first line of its answer, and the ssh that brings what follows."""
        entry = f"exec {shlex.join(self.inside)}\n" if self.inside else ""
        code = Path(node_files.__file__).read_text()
        # What follows the line in stdin is the question: bash reads no further than it has to.
        script = f"{entry}exec python3 -c {shlex.quote(code)}\n{json.dumps(question)}\n"
        # What is buffered here would be hidden from select.
        process = start_ssh(self.login.words(self.host, *NO_FORWARDS), bufsize=0)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            try:
                self._write(process.stdin, script.encode())
                process.stdin.close()
            except BrokenPipeError:
                raise NodeError(f"{self.host}: {self._last_words(process)}") from None
            yield self._first_line(process), process
        finally:
            process.kill()
            process.wait()
            close_pipes(process)

    def _write(self, pipe: IO[bytes], data: bytes) -> None:
        """A host that does not read takes no more than the pipe holds."""
        os.set_blocking(pipe.fileno(), False)
        give_up = time.monotonic() + ANSWER_S
        while data:
            if select.select([], [pipe], [], min(ANSWER_S, 1.0))[1]:
                data = data[os.write(pipe.fileno(), data) :]
            elif time.monotonic() >= give_up:
                raise NodeError(f"{self.host}: it has not read what it was asked for {ANSWER_S:.0f} s")

    def _first_line(self, process: subprocess.Popen[bytes]) -> Any:
        line = bytearray()
        give_up = time.monotonic() + ANSWER_S
        while not line.endswith(b"\n"):
            line += self._read(process, 1)  # no more: bytes of a part may follow
            if len(line) > LONGEST_ANSWER or time.monotonic() >= give_up:
                raise NodeError(f"{self.host}: its answer has no end")
        try:
            answer = json.loads(line)
            if "error" in answer:
                raise NodeError(f"{self.host}: {visible(str(answer['error']))}")
            return answer["ok"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise NodeError(
                f"{self.host}: its shell prints {visible(line.decode(errors='replace').strip()[:100])!r} before it runs a command; "
                "see its .bashrc"
            ) from None

    def _read(self, process: subprocess.Popen[bytes], most: int) -> bytes:
        """What has arrived, up to ``most`` bytes."""
        out = process.stdout
        assert out is not None
        give_up = time.monotonic() + ANSWER_S
        while not select.select([out], [], [], 1.0)[0]:
            if time.monotonic() >= give_up:
                raise NodeError(f"{self.host}: nothing came for {ANSWER_S:.0f} s")
        if not (data := out.read(most)):
            raise NodeError(f"{self.host}: {self._last_words(process)}")
        return data

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        """Why it ended, from what it printed on stderr."""
        try:
            status = process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            return "the connection ended early"
        pipe = process.stderr
        assert pipe is not None
        said = pipe.read(1 << 16) if select.select([pipe], [], [], 1.0)[0] else b""
        lines = visible(said.decode(errors="replace")).strip().splitlines()
        return f"ssh ended early with status {status}{f': {lines[-1]}' if lines else ''}"


def find_nodes(run_dir: Path, *, hosts: Sequence[str]) -> list[Node]:
    """Those that can be asked: ``hosts`` if there are any, else the nodes of the cluster, else the hosts of the run's launch."""
    if hosts:
        return [ThisNode(), *(SshNode(host=host, login=Login()) for host in checked_hosts(hosts, key="--hosts"))]
    try:
        connect(log_to_driver=False)
    except ClusterError as error:
        launched = _launched(run_dir)
        if not launched:
            raise ClusterError(
                f"the nodes of {run_dir} cannot be asked: {error}. Run this on a node of the cluster, or name the hosts that have "
                "the parts: --hosts HOST,HOST"
            ) from error
        return [ThisNode(), *launched]
    there = [RayNodeFiles(node.node_id, where=f"node {node.rank} ({node.address})") for node in ranked_nodes()]
    return [ThisNode(), *there]


def _launched(run_dir: Path) -> list[Node]:
    """The hosts of the ssh launch of this run from this machine."""
    for record in all_records():
        if SITE in record.facts and Path(record.run_dir).resolve() == run_dir.resolve():
            site = Site.of_record(record)
            return [SshNode(host=host, login=site.login, inside=site.inside) for host in site.hosts]
    return []
