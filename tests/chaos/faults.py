"""Faults: what each does to a run, how it is mended where a person would mend it, and how the run shows that it noticed.

Each is a context: it strikes on entry, and on exit does what a person would do. Two at once are two contexts.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from chaos.arena import PHASE_S, Run
from chaos.workers import rank_of, workers_on

CUT_S, SHORT_CUT_S = 60.0, 15.0
WRITES_WAIT_S = 3.0  # for which a disk stays as it is once the run has complained of it
SIGNALS = {"worker killed": signal.SIGKILL, "worker stopped": signal.SIGSTOP}
FOLDERS = ("", "journal", "checkpoints", "samples")  # of a run directory


@contextmanager
def kill_worker(run: Run) -> Iterator[None]:
    os.kill(some_worker(run), SIGNALS["worker killed"])
    yield


@contextmanager
def stop_worker(run: Run) -> Iterator[None]:
    os.kill(some_worker(run), SIGNALS["worker stopped"])
    yield


@contextmanager
def lose_node(run: Run) -> Iterator[None]:
    host = run.arena.hosts[1]
    host.power_off()
    yield
    time.sleep(2)
    host.restart()
    run.arena.join(1)


@contextmanager
def lose_node_for_good(run: Run) -> Iterator[None]:
    run.arena.hosts[1].power_off()
    yield


@contextmanager
def cut(run: Run, *, seconds: float) -> Iterator[None]:
    host = run.arena.hosts[1]
    host.cut()
    yield
    time.sleep(seconds)
    host.heal()
    run.arena.join(1)


@contextmanager
def cut_for_good(run: Run) -> Iterator[None]:
    run.arena.hosts[1].cut()
    yield


@contextmanager
def kill_controller(run: Run) -> Iterator[None]:
    run.command.kill()
    yield
    run.start()


@contextmanager
def kill_head(run: Run) -> Iterator[None]:
    """The head's host loses its power, and with it the controller; its launcher starts it again, then the command."""
    run.arena.hosts[0].power_off()
    yield
    run.arena.hosts[0].restart()
    run.arena.join(0, 1)
    run.start()


@contextmanager
def fill_disk(run: Run) -> Iterator[None]:
    ballast, since = run.arena.disk / "ballast", len(run.said)
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * (1 << 20))
        except OSError:
            pass  # full
    yield
    wait_for_words(run, "No space left on device", since=since)
    ballast.unlink()


@contextmanager
def forbid_writes(run: Run) -> Iterator[None]:
    """The run's processes are without the privilege by which root ignores modes."""
    folders = [run.dir / name for name in FOLDERS if (run.dir / name).is_dir()]
    since = len(run.said)
    for folder in folders:
        folder.chmod(0o555)
    yield
    try:
        wait_for_words(run, "Permission denied", since=since)
    finally:
        for folder in folders:
            folder.chmod(0o755)


def cut_60(run: Run) -> AbstractContextManager[None]:
    return cut(run, seconds=CUT_S)


def cut_15(run: Run) -> AbstractContextManager[None]:
    return cut(run, seconds=SHORT_CUT_S)


FAULTS: dict[str, Callable[[Run], AbstractContextManager[None]]] = {
    "worker killed": kill_worker,
    "worker stopped": stop_worker,
    "node lost and back": lose_node,
    "node gone": lose_node_for_good,
    "network cut for 60 s": cut_60,
    "network cut for 15 s": cut_15,
    "network cut for good": cut_for_good,
    "controller killed": kill_controller,
    "head killed": kill_head,
    "disk full": fill_disk,
    "folder unwritable": forbid_writes,
}

# What the run says of each: a fault that nobody took notice of was none.
LOST = r"is lost; the other workers take over its work|continues from the newest checkpoint"
NOTICED = {
    "worker killed": LOST,
    "worker stopped": r"(?s)is stopped \(state T\).*Thread \d",
    "node lost and back": LOST,
    "node gone": LOST,
    "network cut for 60 s": LOST,
    "network cut for 15 s": LOST,
    "network cut for good": LOST,
    "controller killed": r"resuming ",
    "head killed": r"resuming ",
    "disk full": r"No space left on device",
    "folder unwritable": r"Permission denied",
}


def strike(run: Run, *faults: str, phase: str, step: int) -> None:
    """All of them at once, when the phase begins; then what people would do, the last one's first."""
    run.wait_for(phase, step=step)
    since = len(run.said)
    run.struck.append((" and ".join(faults), phase))
    print(f"{time.strftime('%H:%M:%S')} {run.mode}: {run.struck[-1][0]} in {phase} of step {step} or later", flush=True)
    with ExitStack() as struck:
        for fault in faults:
            struck.enter_context(FAULTS[fault](run))
    # A loss that meets the controller's own has nobody left to notice it: the next controller builds all workers anew.
    alone = not {"controller killed", "head killed"} & {*faults}
    run.to_notice += [(fault, NOTICED[fault], since) for fault in faults if alone or NOTICED[fault] != LOST]


def strike_held(run: Run, fault: str, *, point: str, phase: str, step: int) -> None:
    """Strike in the middle of this point of a worker's work, which it reaches after this phase has begun."""
    shared, of_node = run.arena.lab.shared, fault not in SIGNALS
    run.wait_for(phase, step=step)
    scratch = shared / "hold"
    scratch.write_text("1" if of_node else "")
    scratch.rename(shared / f"hold-{point}")
    give_up = time.monotonic() + PHASE_S
    while not (held := shared / f"held-{point}").exists():
        assert run.command.poll() is None, f"the run ended before {point}:\n{run.said}"
        assert time.monotonic() < give_up, f"nobody came to {point}:\n{run.said}"
        time.sleep(0.01)
    node, rank = map(int, held.read_text().split())
    (pid,) = [pid for pid in workers_on(run.arena.hosts[node]) if rank_of(pid) == rank]
    for path in (shared / f"hold-{point}", held, *shared.glob(f"held-{point}-*")):
        path.unlink()
    since = len(run.said)
    run.struck.append((fault, point))
    if of_node:
        with FAULTS[fault](run):
            pass
    else:
        os.kill(pid, SIGNALS[fault])
    run.to_notice.append((fault, NOTICED[fault], since))


def wait_for_words(run: Run, words: str, *, since: int) -> None:
    """Until the run has said them, and a while longer; it goes on meanwhile."""
    give_up = time.monotonic() + PHASE_S
    while not re.search(words, run.said[since:]):
        assert run.command.poll() is None, f"the run ended without saying {words!r}:\n{run.said}"
        assert time.monotonic() < give_up, f"the run has not said {words!r}:\n{run.said}"
        time.sleep(0.1)
    time.sleep(WRITES_WAIT_S)
    assert run.command.poll() is None, f"{words} ended the run:\n{run.said}"


def some_worker(run: Run) -> int:
    """A worker of node 1 that holds a role, by its number here."""
    give_up = time.monotonic() + PHASE_S
    while not (found := [pid for pid in workers_on(run.arena.hosts[1]) if rank_of(pid) is not None]):
        assert run.command.poll() is None, f"the run ended before a worker was found:\n{run.said}"
        assert time.monotonic() < give_up, f"no worker on node 1:\n{run.said}"
        time.sleep(0.05)
    return random.Random(0).choice(sorted(found))
