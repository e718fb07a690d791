"""Our side of the vLLM process: a worker (process/worker.py) that runs ``server.py``, and memory that both see.

Calls wait in the thread that makes them. Every wait has a deadline; an error shows the last lines of the process's log.
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

START_S = 600.0  # imports take 10 to 60 s, loading and compiling a large model minutes
ANSWER_S = 300.0
QUIT_S = 10.0
LOG_LINES = 15
ALIGN = 64  # bytes
LONGEST_SOCKET_FOLDER = 60  # characters; a socket's path has at most 107, and vLLM's name for it 37
SERVER = Path(__file__).with_name("server.py")
# Of a gang of ours that this process may belong to: vLLM would take them for its own.
DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class VllmError(RuntimeError):
    """The vLLM process failed, ended or does not answer; the message has the end of its log."""


class Child:
    def __init__(self, python: str, *, num_threads: int):
        self.memory = SharedMemory()
        env = child_environment(num_threads=num_threads)
        link = LinkHere([python, str(SERVER)], env=env, fds=(self.memory.fd,))
        self.log_tail = link.log_tail
        # It is trusted, and its Python has no classes of ours.
        self._worker = Worker(link, name="vLLM", hears=JSON, answers=defaultdict(lambda: json.loads))
        self._start = self._last = self.begin("version", deadline_s=START_S)
        self._finalizer = weakref.finalize(self, self._worker.close)

    @property
    def pid(self) -> int:
        return self._worker.pid

    def wait_until_ready(self) -> str:
        """The version of vLLM, once it is imported."""
        return self.result_of(self._start)

    def ask(self, method: str, *, deadline_s: float = ANSWER_S, **what: Any) -> Any:
        return self.result_of(self.begin(method, deadline_s=deadline_s, **what))

    def begin(self, method: str, *, deadline_s: float = ANSWER_S, **what: Any) -> Call:
        """Calls are answered in the order in which they begin; the answer of one may be left where it is."""
        self._last = self._worker.begin(method, what, deadline_s=deadline_s)
        return self._last

    def result_of(self, call: Call) -> Any:
        """Wait for the answer. While vLLM starts and loads, it says from time to time what is being waited for."""

        def tell(waited_s: float) -> None:
            if call.method in ("version", "load"):
                doing = "start" if call.method == "version" else "load"
                say(f"vLLM: {doing} takes {waited_s:.0f} s so far; its log says: {self.log_tail(1)[:150]}")

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
        """Ask it to end, and kill it if it does not."""
        self._worker.close(grace_s=QUIT_S if self._last.is_done else 0.0)
        self.memory.close()


class SharedMemory:
    """A piece of memory without a name, which parent and child see: it is gone when both are, and needs no /dev/shm.

    It holds a few parts of an update. A part takes the first gap that is not being read, so the memory grows to what is read at once.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("rollcall-weights")
        self._map: mmap.mmap | None = None
        self._sizes: dict[int, int] = {}  # where a part begins -> its bytes, of the parts that were written last

    def write(self, tensors: Sequence[tuple[str, Tensor]], *, held: Collection[int] = ()) -> dict[str, Any]:
        """Lay a part out, away from the parts that begin at ``held``; the result is what the child needs to find and to check
        its tensors."""
        placed: list[tuple[str, Tensor, int, int]] = []  # with where each begins in the part, and its bytes
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

        # Copying and summing release Python's lock.
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
