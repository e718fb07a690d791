"""The worker of one node when nodes share only a folder: it takes calls from its inbox and answers them one at a time.

It serves a master whose counter advances; the counter of an earlier run's master no longer changes. If the master begins a new
epoch, or a new master appears, the current work is abandoned, and the worker is created again at the next start. If the master's
counter stops, the worker waits, up to a deadline, until the counter advances again or a new master appears.

The main thread runs the calls. The presence thread advances the counter and watches the master. If nobody is waiting for the
main thread's call any longer, the presence thread interrupts the call with a signal.

``python -m rollcall.process.groups.folder.worker FOLDER RANK NUM_NODES`` is the worker of node 0, a child of the master. It is killed
when its standard input closes.
"""

from __future__ import annotations

import gc
import pickle
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rollcall.base.errors import ClusterError
from rollcall.base.stop import heeded_signals
from rollcall.base.wait import Wait, say
from rollcall.process.child import end_with
from rollcall.process.groups.folder import messages
from rollcall.process.groups.folder.messages import BEAT_S, SILENT_S, Inbox, Messages, Peer, Presence, Rhythm, State
from rollcall.process.groups.host import GROUP_MARK, Host, RemoteFailureError, end_group
from rollcall.process.groups.pulse import device_bytes

MASTER_WAIT_S = 1800.0  # how long to wait for a master that has not started yet, or was lost
END_S = 10.0  # for killed processes to exit


class _Abandoned(BaseException):
    """Nobody is waiting for this call any longer. Not an Exception, so that the code of a call does not catch it as its own error."""


class FolderWorker:
    def __init__(self, folder: Path, *, rank: int, num_nodes: int, options: Mapping[str, str] | None = None) -> None:
        self.folder = messages.own_folder(folder)
        self.rank = rank
        self.num_nodes = num_nodes
        self._options = {"--num-nodes": str(num_nodes), **(options or {})}
        self._messages = Messages(self.folder)
        self._own = self._messages.node(rank)
        self._calls = self._messages.inbox(rank)
        self._master = Peer(self._messages.master)
        self._presence = Presence(
            self._own,
            {**messages.about_this_process(), "state": State.HERE, "why": "", "rank": rank},
            each_beat=self._look,
            changing=lambda: {"memory_bytes": psutil.Process().memory_info().rss, "device_bytes": device_bytes()},
        )
        self._label = ""  # the label of the current conversation; empty: there is no conversation
        self._is_calling = False
        self._host: Host | None = None
        self._mark = ""  # the mark of its group
        self._inbox: Inbox | None = None
        self._why = "it was ended"  # why it left
        self._tells = rank > 0  # worker 0, the master's child, is quiet, because the master prints the same messages

    def run(self) -> None:
        """Serve until the master says that the run is over."""
        for path in (self._messages.root, self._own, self._calls, self._messages.answers):
            path.mkdir(mode=0o700, exist_ok=True)
        messages.refuse_second(self._own, who=f"worker {self.rank}")
        for path in (self._own, self._calls):
            messages.sweep(path)
        for name in messages.names(self._calls):  # for earlier workers: no master knows this one yet
            messages.remove(self._calls / name)
        for number in heeded_signals():
            signal.signal(number, self._terminate)
        signal.signal(signal.SIGUSR1, self._abandon)
        self._refuse_other_options()
        before = self._master.incarnation if self._master.facts.get("state") == State.ENDED else None
        self._presence.begin()
        try:
            self._say(f"worker {self.rank} of {self.num_nodes} nodes, in {self.folder}")
            self._serve(ended_before=before)
            self._why = "the run is over"
        except KeyboardInterrupt:
            self._why = "Ctrl-C"
            raise
        except Exception as error:
            self._why = str(error)
            raise
        finally:
            self._drop()
            self._presence.end(state=State.LEFT, why=self._why)

    def _refuse_other_options(self) -> None:
        """Compare options before the master can assign work to this worker. If the worker exited later, the run's attempt would fail."""
        end_s = time.monotonic() + 3 * BEAT_S
        self._master.look()
        while self._master.facts.get("state") == State.RUNNING and time.monotonic() < end_s:
            if self._master.is_alive:
                self._check_master()
                return
            time.sleep(0.1)
            self._master.look()

    def _serve(self, *, ended_before: str | None) -> None:
        rhythm = Rhythm()
        waiting: Wait | None = Wait(MASTER_WAIT_S, first_s=0, every_s=30)
        while True:
            state = self._master.facts.get("state")
            if state == State.ENDED and self._master.incarnation != ended_before:
                self._say(f"the run of the master on {self._master.facts['host']} has ended")
                return
            if not self._master.is_alive or state != State.RUNNING:
                waiting = waiting or Wait(MASTER_WAIT_S, first_s=0, every_s=30)
                self._wait_for_master(waiting)
                continue
            if waiting is not None:
                self._check_master()
                self._say(
                    f"serving the master on {self._master.facts['host']} (process {self._master.facts['pid']}), run "
                    f"{self._master.facts['run']}"
                )
                waiting = None
            self._attach()
            try:
                worked = self._work()
            except _Abandoned:
                continue
            rhythm.note(happened=worked)
            if not worked:
                time.sleep(rhythm.wait_s)

    def _wait_for_master(self, waiting: Wait) -> None:
        facts = self._master.facts
        if not facts or facts.get("state") == State.ENDED or not self._label:
            what = f"waiting for the master (`rollcall train ... --master`) to appear in {self.folder}"
        elif facts.get("state") == State.BROKE_OFF:
            what = f"the master on {facts['host']} stopped ({facts['why']}); waiting for it to be started again with the same command"
        elif self._master.beat.silent_s < SILENT_S:
            what = (
                f"the master on {facts['host']} (process {facts['pid']}) has appeared; waiting to see that it is alive"
            )
        else:
            what = (
                f"the master on {facts['host']} (process {facts['pid']}) has been silent for {self._master.beat.silent_s:.0f} s; "
                "waiting for it, or for the same command to be run there again"
            )
        if waiting.is_over:
            raise ClusterError(f"{what}; gave up after {waiting.waited_s:.0f} s, so worker {self.rank} stops")
        if self._tells:
            waiting.tell(what)
        time.sleep(0.2)

    def _check_master(self) -> None:
        facts = self._master.facts
        for name, own in self._options.items():
            if (masters := facts.get("options", {}).get(name)) != own:
                started = f"without {name}" if masters is None else f"with {name} {masters}"
                raise ClusterError(
                    f"the master on {facts['host']} was started {started}, but this worker with {name} {own}; use the same for both"
                )
        if facts["folder"] != str(self.folder):
            raise ClusterError(
                f"the master sees the shared folder as {facts['folder']}, but this node sees it as {self.folder}; the nodes "
                "exchange paths, so mount the folder at the same place on every node"
            )

    def _current_label(self) -> str:
        assert self._master.incarnation is not None
        return messages.label_of(
            master=self._master.incarnation, worker=self._presence.incarnation, epoch=self._master.facts["epoch"]
        )

    def _attach(self) -> None:
        """Join the master's current group. Calls from the group that this worker leaves are discarded and never answered."""
        if self._presence.incarnation in self._master.facts["dismissed"]:
            self._say(
                f"worker {self.rank} was silent for too long, so the master considered it dead; it is rejoining as a new worker"
            )
            self._presence.say(incarnation=messages.new_id())  # so that the master treats this process as a new worker
        if (label := self._current_label()) == self._label:
            return
        self._drop()
        for name in messages.names(self._calls):
            if messages.read_name(name)[0] == self._label:
                messages.remove(self._calls / name)
        self._label = label
        self._inbox, self._host = Inbox(self._calls, label=label), Host(f"worker {self.rank}")

    def _drop(self) -> None:
        """Stop the worker and the processes that it started."""
        if self._mark:
            end_group(self._mark, timeout_s=END_S)
        self._mark, self._host, self._inbox = "", None, None
        gc.collect()
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _work(self) -> bool:
        """Read the next call and answer it; return False if there is no call."""
        assert self._inbox is not None
        if (taken := self._inbox.take()) is None:
            return False
        number, data = taken
        messages.put(self._messages.answers / messages.message_name(self._label, number), self._outcome(data))
        return True

    def _outcome(self, data: bytes) -> bytes:
        try:
            result: Any = (self._call(*pickle.loads(data)),)
        except RemoteFailureError as error:
            result = error
        except Exception as error:  # a message that cannot be read here, for example because a module is missing
            result = RemoteFailureError.of(error)
        try:
            return pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # a result may contain anything, and pickling runs its code
            return pickle.dumps(RemoteFailureError.of(error))

    def _call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call this method on the host."""
        assert self._host is not None
        if method == "start":
            self._mark = args[0][GROUP_MARK]
        try:
            # The creation of the worker is not interrupted, because an interrupted import cannot be repeated.
            self._is_calling = method == "call"
            return getattr(self._host, method)(*args, **kwargs)
        finally:
            self._is_calling = False

    def _look(self) -> None:
        """Check the master. The presence thread calls this."""
        self._master.look()
        if not (self._is_calling and self._master.beat.has_moved):
            return
        if self._label != self._current_label() or self._presence.incarnation in self._master.facts["dismissed"]:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _abandon(self, number: int, frame: Any) -> None:
        if self._is_calling:
            self._is_calling = False
            raise _Abandoned

    def _terminate(self, number: int, frame: Any) -> None:
        self._why = signal.Signals(number).name
        raise SystemExit(128 + number)

    def _say(self, text: str) -> None:
        if self._tells:
            say(text)


def main() -> None:
    folder, rank, num_nodes = sys.argv[1:]
    end_with(0)
    FolderWorker(Path(folder), rank=int(rank), num_nodes=int(num_nodes)).run()


if __name__ == "__main__":
    main()
