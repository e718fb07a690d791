"""This process's side of vLLM: a worker (process/worker.py) that runs ``server.py``, and memory that both sides share.

Calls block the calling thread. Every wait has a deadline; an error shows the last lines of the process's log.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import weakref
import zlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcall.base.wait import say
from rollcall.nodes.framing import JSON
from rollcall.process.here import LinkHere
from rollcall.process.worker import Call, Lost, Raised, Worker

START_S = 600.0  # imports take 10 to 60 s; loading and compiling a large model takes minutes
ANSWER_S = 300.0
QUIT_S = 10.0
LOG_LINES = 15
ALIGN = 64  # bytes
SERVER = Path(__file__).with_name("server.py")
# These may be set for one of our own gangs, but vLLM would use them for its own processes.
DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class VllmError(RuntimeError):
    """The vLLM process failed, exited or does not answer; the message contains the end of its log."""


class Child:
    def __init__(self, python: str, *, num_threads: int):
        self.memory = SharedMemory()
        link = LinkHere([python, str(SERVER)], env=child_environment(num_threads=num_threads), fds=(self.memory.fd,))
        self.log_tail, self.pid = link.log_tail, link.pid
        # Use JSON, because the child's Python does not have our classes. Its answers are trusted.
        self._worker = Worker(link, name="vLLM", hears=JSON, answers=defaultdict(lambda: json.loads))
        self._start = self._last = self.begin("version", deadline_s=START_S)
        self._finalizer = weakref.finalize(self, self._worker.close)

    def wait_until_ready(self) -> str:
        """Wait until vLLM has been imported, and return its version."""
        return self.result_of(self._start)

    def ask(self, method: str, *args: Any, deadline_s: float = ANSWER_S) -> Any:
        return self.result_of(self.begin(method, *args, deadline_s=deadline_s))

    def begin(self, method: str, *args: Any, deadline_s: float = ANSWER_S) -> Call:
        """Start a call. Calls are answered in the order in which they were started. The caller need not read the answer."""
        self._last = self._worker.begin(method, *args, deadline_s=deadline_s)
        return self._last

    def result_of(self, call: Call) -> Any:
        """Wait for the answer. While vLLM starts or loads, report the wait from time to time."""

        def tell(waited_s: float) -> None:
            if call.method in ("version", "load"):
                doing = "starting" if call.method == "version" else "loading"
                say(f"vLLM: {doing} has taken {waited_s:.0f} s so far; its log says: {self.log_tail(1)[:150]}")

        try:
            return self._worker.wait(call, meanwhile=tell)
        except Raised as error:
            raise VllmError(
                f"vLLM failed in `{call.method}`: {error.kind}: {error.message}\n{self.log_tail(LOG_LINES)}\n{error.trace}"
            ) from None
        except Lost as lost:
            at = f"\nit was at\n{lost.stack}" if lost.stack else ""
            raise VllmError(
                f"the vLLM process {lost.why}; the end of its log:\n{self.log_tail(LOG_LINES)}{at}"
            ) from None

    def close(self) -> None:
        """Ask the process to exit, and kill it if it does not."""
        self._worker.close(grace_s=QUIT_S if self._last.is_done else 0.0)
        self.memory.close()


class SharedMemory:
    """Anonymous memory that parent and child share. It is freed when both processes have exited, and does not need /dev/shm.

    It contains a few parts of an update. A new part fills the first gap that is not being read, so the memory stays small."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("rollcall-weights")
        self._map: mmap.mmap | None = None
        self._sizes: dict[int, int] = {}  # offset of a part -> its size in bytes, for the parts still in use

    def write(self, tensors: Sequence[tuple[str, Tensor]], *, held: Collection[int] = ()) -> dict[str, Any]:
        """Write a part, but leave the parts that begin at ``held`` unchanged. Return what the child needs to find and check the
        tensors."""
        placed: list[tuple[str, Tensor, int, int]] = []  # name, tensor, where it begins in the part, number of bytes
        size = 0
        for name, tensor in tensors:
            length = tensor.numel() * tensor.element_size()
            placed.append((name, tensor.detach(), size, length))
            size += -(-length // ALIGN) * ALIGN
        self._sizes = {begin: length for begin, length in self._sizes.items() if begin in held}
        offset = self._room_for(size)
        self._sizes[offset] = size
        if self._map is None or len(self._map) < offset + size:
            os.ftruncate(self.fd, offset + size)
            self._map = mmap.mmap(self.fd, offset + size)
        memory = self._map

        def put(name: str, tensor: Tensor, begin: int, length: int) -> list[Any]:
            at = offset + begin
            target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at)
            target.view(tensor.shape).copy_(tensor)
            with memoryview(memory) as view, view[at : at + length] as part:
                check = zlib.crc32(part)
            return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), begin, length, check]

        # Copying and computing checksums release the GIL.
        with ThreadPoolExecutor(max_workers=min(8, torch.get_num_threads())) as pool:
            return {"offset": offset, "size": size, "tensors": list(pool.map(lambda one: put(*one), placed))}

    def _room_for(self, size: int) -> int:
        """Return the offset of the first gap of this many bytes, on a page boundary."""
        page, free = mmap.ALLOCATIONGRANULARITY, 0
        for begin, length in sorted(self._sizes.items()):
            if free + size <= begin:
                break
            free = max(free, -(-(begin + length) // page) * page)
        return free

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def child_environment(*, num_threads: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
    if len(tempfile.gettempdir()) > 60:  # a socket path may have 107 characters, and vLLM's file name takes 37
        kept.setdefault("VLLM_RPC_BASE_PATH", "/tmp")  # where vLLM's processes put their sockets
    return {
        **kept,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in the child itself, because it has only one client
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # everything that vLLM needs comes from this process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines on one host must not bind to the same cores
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it does not compute log-probs after top-k and top-p, and may need a compiler
    }
