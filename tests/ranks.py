"""Several torch processes on this machine, for tests of what a gang does together: gloo over loopback, no Ray.

The processes run one function after the other; each time they join a new gang. A gang whose learner was divided leaves about ten
threads of gloo, which wake up a hundred times a second: after a few runs new processes take over. A function that raises on one
rank ends the run of all: the others would wait for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from commands import fork_context

from rollcall.nodes.door import listen_at, new_secret
from rollcall.nodes.interfaces import interface_of
from rollcall.nodes.meeting import Place

DEADLINE_S = 600.0
RUNS = 8  # of a process


class Ranks:
    """The processes are started when they are first needed."""

    def __init__(self) -> None:
        self._members: list[tuple[Any, Any]] = []
        self._num_runs = 0

    def run(self, function: Callable[..., Any], *args: Any, size: int) -> list[Any]:
        """``function(gang, *args)`` on every rank of a gang; what each returned."""
        if self._num_runs % RUNS == 0:
            self.close()
        self._num_runs += 1
        while len(self._members) < size:
            context = fork_context()
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._members.append((process, here))
        secret = new_secret()
        members = [pipe for _, pipe in self._members[:size]]
        members[0].send((function, args, secret, 0, 0, size))
        port = members[0].recv()
        for rank, pipe in enumerate(members[1:], start=1):
            pipe.send((function, args, secret, port, rank, size))
        return [self._result(rank, function, size) for rank in range(size)]

    def _result(self, rank: int, function: Callable[..., Any], size: int) -> Any:
        pipe = self._members[rank][1]
        if not pipe.poll(DEADLINE_S):
            self.close()
            raise TimeoutError(f"rank {rank} of {size} did not return from {function.__name__} in {DEADLINE_S:.0f} s")
        try:
            error, value = pipe.recv()
        except EOFError:
            error, value = "the process died", None
        if error:
            self.close()
            raise AssertionError(f"rank {rank} of {size}: {error}")
        return value

    def close(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.join()
        self._members = []


def _serve(pipe: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from rollcall.learner.gang import Gang

    torch.set_num_threads(1)
    distributed_c10d._tensor_to_object = _refuse_pickles
    while True:
        try:
            function, args, secret, port, rank, size = pipe.recv()
        except EOFError:
            return
        gang = None
        try:
            listener = None
            if rank == 0:
                listener = listen_at("127.0.0.1")
                port = listener.getsockname()[1]
                pipe.send(port)
            place = Place(address="127.0.0.1", port=port, secret=secret)
            cpu = torch.device("cpu")
            gang = Gang.join(
                place, rank=rank, size=size, device=cpu, listener=listener, interface=interface_of("127.0.0.1")
            )
            value = function(gang, *args)
            pipe.send((None, value))
        except Exception:  # noqa: BLE001 - the test shows it
            pipe.send((traceback.format_exc(), None))
        finally:
            if gang is not None:
                gang.close()
            if dist.is_initialized():
                dist.destroy_process_group()


def _refuse_pickles(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("what another process sent was about to be unpickled")
