"""The vLLM process as seen from here: started, asked, told the weights, ended.

We wait for it and it waits for us, one message at a time. Every wait has a deadline; an error shows the last lines of its
log. It ends with this process, however this process ends.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcall.engine.vllm.server import checksum
from rollcall.wait import say

START_S = 600.0  # imports alone take 10 to 60 s, loading and compiling a large model minutes
ANSWER_S = 300.0
QUIT_S = 10.0
SAY_EVERY_S = 10.0
LOG_LINES, LOG_BYTES = 15, 1 << 16
ALIGN = 64  # bytes
LONGEST_SOCKET_FOLDER = 60  # characters; a socket's path has at most 107, and vLLM's name for it 37
SERVER = Path(__file__).with_name("server.py")
# Of a gang of ours that this process may belong to: vLLM would take them for its own.
DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class VllmError(RuntimeError):
    """The vLLM process failed, ended or does not answer; the message has the end of its log."""


class UpdateRefused(VllmError):
    """The weights were stale or did not arrive whole; the engine still has the ones before."""


class Child:
    def __init__(self, python: str, *, num_threads: int):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - without a name, so that a kill leaves nothing behind
        self.memory = SharedMemory()
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(ANSWER_S), 0))
        command = [python, str(SERVER), str(theirs.fileno()), str(self.memory.fd), str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(), self.memory.fd),
            start_new_session=True,  # its helpers can then be ended with it
            env=child_environment(num_threads=num_threads),
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._waiting_for = "start"
        # At the end of this interpreter too; a starter that is killed is noticed by the child itself.
        self._finalizer = weakref.finalize(self, _end, self.process)

    def wait_until_ready(self) -> str:
        """The version of vLLM, once it is imported."""
        return self.receive(deadline_s=START_S)["vllm"]

    def ask(self, do: str, *, deadline_s: float = ANSWER_S, **what: Any) -> Any:
        self.send(do, **what)
        return self.receive(deadline_s=deadline_s)

    def send(self, do: str, **what: Any) -> None:
        assert not self._waiting_for, f"{self._waiting_for} is not answered yet"
        try:
            self._connection.send_bytes(json.dumps({"do": do, **what}).encode())
        except BlockingIOError:
            raise self._failure(f"has not taken `{do}` within {ANSWER_S:.0f} s") from None
        except OSError:
            raise self._failure("ended") from None
        self._waiting_for = do

    def receive(self, *, deadline_s: float = ANSWER_S) -> Any:
        """The answer to what was sent last. While vLLM starts and loads, it says from time to time what is being waited for."""
        started = time.monotonic()
        while not self._connection.poll(min(SAY_EVERY_S, deadline_s)):
            waited = time.monotonic() - started
            if waited >= deadline_s:
                raise self._failure(f"has not answered `{self._waiting_for}` within {waited:.0f} s")
            if self._waiting_for in ("start", "load"):
                say(f"vLLM: {self._waiting_for} takes {waited:.0f} s so far; its log says: {self.log_tail(1)[:150]}")
        try:
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._failure("ended") from None
        done, self._waiting_for = self._waiting_for, ""
        if "refused" in answer:
            raise UpdateRefused(f"vLLM refused the weights: {answer['refused']}")
        if "error" in answer:
            raise VllmError(f"vLLM failed in `{done}`: {answer['error']}\n{self.log_tail(LOG_LINES)}")
        return answer

    def log_tail(self, count: int) -> str:
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), LOG_BYTES, max(0, size - LOG_BYTES))
        return "\n".join(data.decode(errors="replace").splitlines()[-count:])

    def close(self) -> None:
        """Ask it to end, and end it if it does not."""
        if self._finalizer.alive and not self._waiting_for:
            try:
                self.send("quit")
                self.process.wait(QUIT_S)
            except (VllmError, subprocess.TimeoutExpired):
                pass  # ended below
        self._finalizer()
        self._connection.close()
        self.memory.close()
        self._log.close()

    def _failure(self, what: str) -> VllmError:
        if what == "ended" and self._finalizer.alive:  # its socket is closed; the status follows
            _wait_for_exit(self.process.pid)
        self._finalizer()  # what it would answer later belongs to nothing
        status = f" with status {self.process.returncode}" if what == "ended" else ""
        return VllmError(f"the vLLM process {what}{status}; the end of its log:\n{self.log_tail(LOG_LINES)}")


class SharedMemory:
    """A piece of memory without a name, which parent and child see: it is gone when both are, and needs no /dev/shm.

    It holds a few parts of an update. A part takes the first room that nobody reads, so the memory grows to what is read at once.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("rollcall-weights")
        self._map: mmap.mmap | None = None
        self._sizes: dict[int, int] = {}  # where a part begins -> its bytes, of the parts that were written last

    def write(self, tensors: Sequence[tuple[str, Tensor]], *, held: Collection[int] = ()) -> dict[str, Any]:
        """Lay a part out, away from the parts that begin at ``held``; the result is what the child needs to find and to check
        its tensors."""
        placed: list[tuple[str, Tensor, int, int]] = []
        size = 0
        for name, tensor in tensors:
            length = tensor.numel() * tensor.element_size()
            placed.append((name, tensor.detach(), size, length))
            size += -(-length // ALIGN) * ALIGN
        self._sizes = {begin: length for begin, length in self._sizes.items() if begin in held}
        offset = self._room_for(size)
        self._sizes[offset] = size
        return self._lay_out(placed, offset=offset, size=size)

    def write_again(self, tensors: Sequence[tuple[str, Tensor]], written: Mapping[str, Any]) -> None:
        """The same tensors to the same place."""
        places = [
            (*pair, begin, length) for pair, (*_, begin, length, _) in zip(tensors, written["tensors"], strict=True)
        ]
        self._lay_out(places, offset=written["offset"], size=written["size"])

    def _lay_out(self, placed: Sequence[tuple[str, Tensor, int, int]], *, offset: int, size: int) -> dict[str, Any]:
        memory = self._of_size(offset + size)

        def put(name: str, tensor: Tensor, begin: int, length: int) -> list[Any]:
            at = offset + begin
            target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at)
            target.view(tensor.shape).copy_(tensor)
            with memoryview(memory) as view, view[at : at + length] as part:
                check = checksum(part)
            return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), begin, length, check]

        # Copying and summing leave Python's lock alone.
        with ThreadPoolExecutor(max_workers=min(8, torch.get_num_threads())) as pool:
            return {"offset": offset, "size": size, "tensors": list(pool.map(lambda one: put(*one), placed))}

    def _room_for(self, size: int) -> int:
        """Where the first gap of this many bytes begins, at a page."""
        page, free = mmap.ALLOCATIONGRANULARITY, 0
        for begin, length in sorted(self._sizes.items()):
            if free + size <= begin:
                break
            free = max(free, -(-(begin + length) // page) * page)
        return free

    def _of_size(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        return self._map

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def child_environment(*, num_threads: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
    if len(tempfile.gettempdir()) > LONGEST_SOCKET_FOLDER:
        kept.setdefault("VLLM_RPC_BASE_PATH", "/tmp")  # where its processes have their sockets
    return kept | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the child itself: we are its only client
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # everything it needs comes from here
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines of one host must not bind to the same cores
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it gives no log-probs after top-k and top-p, and may want a compiler
    }


def _wait_for_exit(pid: int) -> None:
    """Without taking note of it: until then the number stays its own, and so does the group of its helpers."""
    until = time.monotonic() + QUIT_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < until:
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and its helpers. Once waited for, its number may be another's."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
