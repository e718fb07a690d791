"""Reward functions in worker processes, so that code which hangs, raises or crashes costs one score and nothing more.

One thread owns a RewardPool and drives it by ``submit`` and ``poll``; nothing here blocks longer than asked. Rewards that
may do the same (confine.py) share worker processes, a crew; each crew has its queue.

    queue --chunks--> worker: item, item, item --results, in order--> done
                        |
                        +-- no result within the item's limit, or the process is gone:
                            that item is an error, the items behind it go back to the front of the queue,
                            the process is killed and replaced

The limit of an item runs from the worker's last sign of progress (a result read, bytes of a chunk taken), and never
includes a worker's start, which has a limit of its own. It is paused while somebody debugs the worker (debug/line.py).
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from rollcall.debug.here import POST_MORTEM
from rollcall.debug.line import DebugLine
from rollcall.observe.prints import ChildPrints
from rollcall.process.ending import how_it_ended, plain_stack
from rollcall.reward.confine import (
    Confinement,
    confinement_of,
    environment,
    make_folder,
    remove_folder,
    sweep_folders,
)
from rollcall.reward.functions import check_score
from rollcall.reward.user_function import RewardLoadError
from rollcall.reward.worker import (
    LENGTH,
    MAX_ANSWER_BYTES,
    STACK_SIGNAL,
    FailureKind,
    Item,
    NotReady,
    Ready,
    RewardResult,
    Said,
    Setup,
    frame,
)
from rollcall.words import visible

START_TIMEOUT_S = 120.0
_MAX_STARTS_LOST = 3  # in a row; then something is wrong with the machine, not with an item
_MAX_CHUNK = 32
_READ_BYTES = 1 << 16
_STACK_WAIT_S = 0.5
_KILL_WAIT_S = 10.0
_MAX_STACK_BYTES = 4000
_ROOT = Path(__file__).resolve().parents[2]
_SAID: TypeAdapter[Said] = TypeAdapter(Said, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    item: Item
    timeout_s: float
    owner: Any = None  # the caller's: the results come back with their task

    @property
    def num_results(self) -> int:
        completion = self.item.completion
        return len(completion) if isinstance(completion, list) else 1


@dataclass(slots=True, kw_only=True)
class _Crew:
    """The processes of rewards that may do the same, and what waits for them."""

    specs: dict[int, dict[str, Any]]
    confinement: Confinement
    told: Ready = Ready({}, {}, {}, {})  # by the worker that was ready last
    queue: deque[Task] = field(default_factory=deque)
    workers: list[_Worker] = field(default_factory=list)
    ever_ready: bool = False
    num_starts_lost: int = 0


class RewardPool(AbstractContextManager["RewardPool"]):
    """Worker processes for the rewards in ``specs`` (place in the run file's list -> fields).

    Making it waits for a worker of each crew, so a reward that cannot be loaded is refused here.
    """

    def __init__(
        self, specs: dict[int, dict[str, Any]], *, num_workers: int, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}; rewards need at least one worker process")
        self._start_timeout_s = start_timeout_s
        self._crews = _crews(specs)
        self._crew_of = {index: crew for crew in self._crews for index in crew.specs}
        self._selector = selectors.DefaultSelector()
        self._results: list[tuple[Task, list[RewardResult]]] = []
        self._num_pending = 0  # tasks whose results have not been returned
        self._num_started = 0
        self._prints = ChildPrints()
        sweep_folders()
        try:
            for crew in self._crews:
                for _ in range(num_workers):
                    self._start_worker(crew)
            while not all(crew.ever_ready for crew in self._crews):
                self._pump(self._start_timeout_s)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    @property
    def in_force(self) -> dict[int, dict[str, str]]:
        """What confines each reward's processes on this machine, by thing; by place in the run file's list."""
        return {index: crew.told.in_force for index, crew in self._crew_of.items()}

    @property
    def kinds(self) -> dict[int, str]:
        """Rewards that get all completions of a group at once, by place in the run file's list: "batched" or "async"."""
        return {index: crew.told.kinds[index] for index, crew in self._crew_of.items() if index in crew.told.kinds}

    @property
    def needs(self) -> dict[int, list[str]]:
        """Columns that the user's functions need, by place in the run file's list."""
        return {index: crew.told.needs.get(index, []) for index, crew in self._crew_of.items()}

    @property
    def trl(self) -> dict[int, list[str]]:
        """Rewards that are called as TRL calls them, with the arguments that they name."""
        return {index: crew.told.trl[index] for index, crew in self._crew_of.items() if index in crew.told.trl}

    @property
    def _workers(self) -> list[_Worker]:
        return [worker for crew in self._crews for worker in crew.workers]

    def submit(self, tasks: list[Task]) -> None:
        """Queue tasks; each comes back from ``poll`` with a result for each completion."""
        for task in tasks:
            self._crew_of[task.item.reward].queue.append(task)
        self._num_pending += len(tasks)
        self._dispatch()

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Task, list[RewardResult]]]:
        """The results so far; waits up to ``timeout_s`` for the first ones."""
        end_s = time.monotonic() + timeout_s
        while True:
            self._pump(max(0.0, end_s - time.monotonic()) if not self._results and self._num_pending else 0.0)
            if self._results or not self._num_pending or time.monotonic() >= end_s:
                results, self._results = self._results, []
                self._num_pending -= len(results)
                return results

    def close(self) -> None:
        """End all workers; what is pending is dropped."""
        for worker in self._workers:
            worker.hang_up(self._selector)
            worker.end()
        for crew in self._crews:
            crew.workers.clear()
        self._selector.close()
        self._prints.close()

    def _start_worker(self, crew: _Crew) -> None:
        worker = _Worker(crew, limit_s=self._start_timeout_s, output_fd=self._prints.fd, number=self._num_started)
        for fd in (worker.read_fd, worker.line.fd):
            self._selector.register(fd, selectors.EVENT_READ, worker)
        self._num_started += 1
        crew.workers.append(worker)
        worker.flush(self._selector)

    def _pump(self, wait_s: float) -> None:
        self._dispatch()
        deadlines = [each.deadline_s for each in self._workers if each.deadline_s is not None and not each.is_held]
        if deadlines:
            wait_s = min(wait_s, max(0.0, min(deadlines) - time.monotonic()))
        for key, events in self._selector.select(wait_s):
            worker: _Worker = key.data
            if worker not in worker.crew.workers:
                continue
            if key.fd == worker.line.fd:
                self._debug(worker)
                continue
            if events & selectors.EVENT_WRITE:
                worker.flush(self._selector)
            if events & selectors.EVENT_READ:
                self._read(worker)
        now_s = time.monotonic()
        late = [each for each in self._workers if each.deadline_s is not None and each.deadline_s <= now_s]
        for worker in [each for each in late if not each.is_held]:
            self._replace(worker, hung=True)
        self._dispatch()

    def _debug(self, worker: _Worker) -> None:
        """It has stopped in the debugger. A terminal of this process talks to it here and now, and all others wait."""
        self._selector.unregister(worker.line.fd)
        if worker.line.answer():
            self._selector.register(worker.line.fd, selectors.EVENT_READ, worker)
        for each in self._workers:
            each.restart_clock()  # of this one too: its porter says in a moment that it is held

    def _dispatch(self) -> None:
        """Hand queued items out in chunks: large when the queue is long, single ones near its end, so that a slow item
        holds few others up."""
        for crew in self._crews:
            free = [worker for worker in crew.workers if worker.ready and not worker.outbox]
            while crew.queue and free:
                worker = min(free, key=lambda each: len(each.in_flight))
                share = min(_MAX_CHUNK, -(-len(crew.queue) // (2 * len(crew.workers))))
                if len(worker.in_flight) >= share:
                    break
                chunk = [crew.queue.popleft() for _ in range(share)]
                worker.give(chunk, self._selector)
                if worker.outbox:
                    free.remove(worker)

    def _read(self, worker: _Worker) -> None:
        messages, ended = worker.receive()
        crew = worker.crew
        for message in messages:
            match message:
                case NotReady() if not worker.ready:
                    raise RewardLoadError(message.why)
                case Ready() if not worker.ready:
                    worker.ready, crew.ever_ready, crew.num_starts_lost = True, True, 0
                    crew.told = message
                case list() if worker.in_flight and len(message) == worker.in_flight[0].num_results:
                    self._finish(worker.in_flight.popleft(), message)
                case _:  # ready twice, a result for nothing, or not one for each completion: it is no longer ours
                    ended = True
                    break
        if messages:
            worker.restart_clock()
        if ended:
            self._replace(worker, hung=False)

    def _finish(self, task: Task, results: list[RewardResult]) -> None:
        limit_s = task.timeout_s
        for place, result in enumerate(results):
            if result.elapsed_s > limit_s:  # nobody polled in time to stop it; the rule is the same
                why = f"took {result.elapsed_s:.1f} s; its limit is timeout_s={limit_s:g}"
                results[place] = RewardResult(0.0, "hung", why)
        self._results.append((task, results))

    def _replace(self, worker: _Worker, *, hung: bool) -> None:
        """A worker is lost: the item it was at is an error, the others go back, a new process takes its place."""
        if hung:
            worker.ask_for_stack()
        worker.hang_up(self._selector)
        crew = worker.crew
        crew.workers.remove(worker)
        how_it_ended, stack = worker.end()
        at = f"\nit was at\n{stack}" if stack else ""
        if not worker.ready:
            crew.num_starts_lost += 1
            what = (
                f"was not ready within {self._start_timeout_s:g} s" if hung else f"ended at its start ({how_it_ended})"
            )
            if crew.num_starts_lost >= _MAX_STARTS_LOST or not crew.ever_ready:
                raise RuntimeError(f"a reward worker {what}{at}\ncheck what the reward's module does when imported")
        if worker.in_flight:
            task = worker.in_flight.popleft()
            hung = hung or worker.process.returncode == -signal.SIGXCPU
            why = f"no score within timeout_s={task.timeout_s:g}" if hung else f"its process died ({how_it_ended})"
            kind: FailureKind = "hung" if hung else "died"
            self._results.append((task, [RewardResult(0.0, kind, why + at)] * task.num_results))
            crew.queue.extendleft(reversed(worker.in_flight))
        self._start_worker(crew)


class _Worker:
    """One process, its pipes, and the items it has been given."""

    def __init__(self, crew: _Crew, *, limit_s: float, output_fd: int, number: int) -> None:
        self.crew = crew
        self.line = DebugLine(role="reward", number=number)
        self._folder = make_folder()
        to_worker, from_worker, lifeline = os.pipe(), os.pipe(), os.pipe()
        self.read_fd, self._write_fd, self._lifeline_fd = from_worker[0], to_worker[1], lifeline[1]
        self._crash_file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        child_fds = (
            to_worker[0], from_worker[1], lifeline[0], self._crash_file.fileno(), self.line.theirs.fileno(),
        )  # fmt: skip
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollcall.reward.worker", *map(str, child_fds)],
                pass_fds=child_fds,
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                env=environment(crew.confinement, folder=self._folder, environ=os.environ, root=_ROOT),
                cwd=self._folder if crew.confinement.own_files else None,
                start_new_session=True,  # Ctrl-C is for this process, and killing the group ends what user code started
            )
        finally:
            for fd in child_fds[:3]:
                os.close(fd)
            self.line.theirs.close()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        self.ready = False
        self.in_flight: deque[Task] = deque()
        setup = Setup(
            crew.specs, _sys_path(crew.confinement), crew.confinement, self._folder, bool(os.environ.get(POST_MORTEM))
        )
        self.outbox = bytearray(frame(setup))
        self._inbox = bytearray()
        self._start_limit_s = limit_s
        self.deadline_s: float | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Something moved: the current item, or the start, has its whole limit from now on."""
        limit_s = self._start_limit_s if not self.ready else self.in_flight[0].timeout_s if self.in_flight else None
        self.deadline_s = None if limit_s is None else time.monotonic() + limit_s

    @property
    def is_held(self) -> bool:
        """Whether somebody debugs it. Its limit then begins again."""
        if self.line.is_held:
            self.restart_clock()
        return self.line.is_held

    def give(self, chunk: list[Task], selector: selectors.BaseSelector) -> None:
        idle = not self.in_flight
        self.in_flight.extend(chunk)
        self.outbox += frame([(task.item, task.timeout_s) for task in chunk])
        if idle:
            self.restart_clock()
        self.flush(selector)

    def flush(self, selector: selectors.BaseSelector) -> None:
        """Write what the pipe takes; ask to be told when it takes more."""
        had = len(self.outbox)
        try:
            while self.outbox:
                del self.outbox[: os.write(self._write_fd, self.outbox)]
        except BlockingIOError:
            if len(self.outbox) < had:
                self.restart_clock()
        except BrokenPipeError:
            self.outbox.clear()  # it is gone; the read end says so too and is handled there
        watched = self._write_fd in selector.get_map()
        if self.outbox and not watched:
            selector.register(self._write_fd, selectors.EVENT_WRITE, self)
        elif not self.outbox and watched:
            selector.unregister(self._write_fd)

    def receive(self) -> tuple[list[Said], bool]:
        """The messages that have arrived whole, and whether no more can come, or none that can be trusted."""
        ended = False
        try:
            # The rest waits for the next turn: a worker that writes without end must not keep this process here.
            while len(self._inbox) <= _MAX_CHUNK * MAX_ANSWER_BYTES:
                data = os.read(self.read_fd, _READ_BYTES)
                if not data:
                    ended = True
                    break
                self._inbox += data
        except BlockingIOError:
            pass  # all that is there has been read
        messages: list[Said] = []
        while len(self._inbox) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._inbox)[0]
            if end > LENGTH.size + MAX_ANSWER_BYTES:
                return messages, True
            if len(self._inbox) < end:
                break
            try:
                messages.append(read_said(bytes(self._inbox[LENGTH.size : end])))
            except ValueError:  # no worker of ours writes this
                return messages, True
            del self._inbox[:end]
        return messages, ended

    def ask_for_stack(self) -> None:
        """Have a hanging process dump where it is, which works inside C code too; ``end`` returns it."""
        os.kill(self.process.pid, STACK_SIGNAL)  # not yet waited for, so the pid is still its own
        end_s, size = time.monotonic() + _STACK_WAIT_S, 0
        while time.monotonic() < end_s:
            time.sleep(0.01)
            before, size = size, os.fstat(self._crash_file.fileno()).st_size
            if size and size == before:
                return

    def hang_up(self, selector: selectors.BaseSelector) -> None:
        for fd in (self.read_fd, self._write_fd, self.line.fd):
            if fd >= 0 and fd in selector.get_map():  # a line may be closed already
                selector.unregister(fd)
        os.close(self._write_fd)

    def end(self) -> tuple[str, str]:
        """Kill the process and whatever it started; how it ended, and the stack it dumped, if it did."""
        try:
            # Its status is fixed before its pipes close, so this changes nothing for a process that has died.
            os.killpg(self.process.pid, signal.SIGKILL)
        except PermissionError:
            pass  # macOS says so of a group whose only member has died
        try:
            how = how_it_ended(self.process.wait(_KILL_WAIT_S))
        except subprocess.TimeoutExpired:  # stuck in the kernel (a dead network disk); it ends when the kernel lets go
            how = f"process {self.process.pid} is still there {_KILL_WAIT_S:g} s after SIGKILL"
        stack = os.pread(self._crash_file.fileno(), _MAX_STACK_BYTES, 0).decode(errors="replace")
        os.close(self.read_fd)
        os.close(self._lifeline_fd)
        self.line.close()
        self._crash_file.close()
        remove_folder(self._folder)
        return how, plain_stack(stack)


def read_said(body: bytes) -> Said:
    """A message of a worker; ValueError if it is not one."""
    said = _SAID.validate_json(body)
    if isinstance(said, NotReady):
        return NotReady(visible(said.why))
    if isinstance(said, Ready):
        return said
    return [
        replace(
            one, value=0.0 if one.kind else None if one.value is None else check_score(one.value), why=visible(one.why)
        )
        for one in said
    ]


def _crews(specs: dict[int, dict[str, Any]]) -> list[_Crew]:
    crews: dict[Confinement, _Crew] = {}
    for index, spec in specs.items():
        confinement = confinement_of(spec)
        if missing := [name for name in confinement.env if name not in os.environ]:
            raise RewardLoadError(
                f"reward.{index}.env names {', '.join(missing)}, which is not set where rewards run (here); export it, or "
                f"take it out of reward.{index}.env"
            )
        crews.setdefault(confinement, _Crew(specs={}, confinement=confinement)).specs[index] = spec
    return list(crews.values())


def _sys_path(confinement: Confinement) -> list[str]:
    """Where a worker finds modules. Built-in scorers have no business in the user's working directory."""
    here = os.getcwd()
    if confinement.own_files:
        return [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    return [here, *sys.path]
