"""Which workers are alive, stopped or stuck, judged from what the nodes report. Pure: looks in, losses out.

A node that does not answer for ``SILENT_S`` is lost, with all its workers. Silence is counted in looks, not by the clock, so
that a pause of this process does not count against a node. A worker is lost when its process is gone, when it is stopped at
two looks in a row, or when one of its calls takes longer than ``patience_s`` allows: ten times the longest call of that
method by a worker of its kind so far, and at least a minute. While a debugger holds any process of the run, the time of every call stands
still: the others may wait for the one that is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from rollcall.groups.pulse import Seen

LOOK_EVERY_S = 1.0
ANSWER_S = 1.0  # for a node, at each look
SILENT_S = 8.0
FIRST_ANSWER_S = 120.0  # for the process that looks to be started
FIRST_CALL_S = 1800.0
LEAST_S, FACTOR = 60.0, 10.0
STOPPED_LOOKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A worker that is to be treated as dead."""

    rank: int
    why: str
    still_runs: bool  # its stacks can be read, and it has to be ended


class Watch:
    """``looks`` has, by node, what it reports of its workers by rank; None: it has not answered this time."""

    def __init__(self) -> None:
        self._silent: dict[str, int] = {}  # looks in a row without an answer
        self._has_answered: set[str] = set()
        self._stopped: dict[int, int] = {}  # looks in a row, by rank
        self._longest_s: dict[tuple[str, str], float] = {}  # by kind of worker and method
        self._lost: set[int] = set()
        self._held: dict[
            int, tuple[int, float]
        ] = {}  # by rank: a call, and how long it had taken when it was last held

    def forgive(self, rank: int) -> None:
        """A new process has this rank."""
        self._lost.discard(rank)
        self._stopped.pop(rank, None)

    def judge(
        self,
        looks: Mapping[str, Mapping[int, Seen] | None],
        *,
        seats: Mapping[str, list[int]],
        gone: set[str],
        kinds: Mapping[int, str],
        is_held: bool = False,
    ) -> list[Loss]:
        """The losses since the last time. ``seats`` has the ranks on each node, ``gone`` the nodes that Ray knows are dead,
        ``kinds`` the roles of each rank: an actor loads its model in seconds, and an engine may compile for minutes.
        ``is_held``: a debugger holds some process of the run."""
        found: list[Loss] = []
        for node, ranks in seats.items():
            seen = looks.get(node)
            self._silent[node] = 0 if seen is not None else self._silent.get(node, 0) + 1
            if seen is not None:
                self._has_answered.add(node)
            silent_s = self._silent[node] * (LOOK_EVERY_S + ANSWER_S)
            allowed_s = SILENT_S if node in self._has_answered else FIRST_ANSWER_S
            if node in gone or silent_s >= allowed_s:
                why = (
                    "its node has left the cluster"
                    if node in gone
                    else f"its node has been silent for {silent_s:.0f} s"
                )
                found += [Loss(rank=rank, why=why, still_runs=False) for rank in ranks]
            for rank, one in (seen or {}).items():
                if is_held:
                    self._held[rank] = (one.num_done, one.busy_s)
                if (loss := self._judge(rank, one, kinds.get(rank, ""))) is not None:
                    found.append(loss)
        new = [loss for loss in found if loss.rank not in self._lost]
        self._lost |= {loss.rank for loss in new}
        return new

    def patience_s(self, kind: str, method: str) -> float:
        longest_s = self._longest_s.get((kind, method))
        return FIRST_CALL_S if longest_s is None else max(LEAST_S, FACTOR * longest_s)

    def _judge(self, rank: int, seen: Seen, kind: str) -> Loss | None:
        if not seen.is_alive:
            return Loss(rank=rank, why="its process is gone", still_runs=False)
        for method, took_s in (seen.longest_s or {}).items():
            self._longest_s[kind, method] = max(self._longest_s.get((kind, method), 0.0), took_s)
        self._stopped[rank] = self._stopped.get(rank, 0) + 1 if seen.state == psutil.STATUS_STOPPED else 0
        if self._stopped[rank] >= STOPPED_LOOKS:
            during = f" during {seen.doing}" if seen.doing else ""
            return Loss(rank=rank, why=f"its process is stopped (state T){during}", still_runs=True)
        call, held_s = self._held.get(rank, (-1, 0.0))
        busy_s = seen.busy_s - (held_s if call == seen.num_done else 0.0)
        allowed_s = self.patience_s(kind, seen.doing)
        if seen.doing and busy_s > allowed_s:
            why = f"no progress in {seen.doing} for {busy_s:.0f} s, with {allowed_s:.0f} s allowed"
            return Loss(rank=rank, why=why, still_runs=True)
        return None
