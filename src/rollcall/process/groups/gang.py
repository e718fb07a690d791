"""Manages the running workers of one group: calls them, waits for them, replaces lost ones and stops them. A Carrier (backend.py)
delivers the calls.

Who waits for whom: ``gather`` waits for answers and checks in short intervals whether the carrier has lost a worker. If
a worker is lost, every wait for that worker fails; ``replace`` puts a new process in its seat. A group that cannot continue without
some of its workers declares which others it may lose; if a worker that it needs is lost, every wait fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from rollcall.base.errors import PeerLostError, WorkerDiedError, WorkerError, WorkerTimeoutError
from rollcall.base.wait import Wait
from rollcall.process.debug.board import BOARD
from rollcall.process.groups.backend import Call, Carrier, Member, Recipe, WorkerSpec, whom
from rollcall.process.groups.dispatch import Drop
from rollcall.process.groups.host import RemoteFailureError, is_about_a_peer
from rollcall.process.groups.sightings import Lookout, Sightings

# When a worker dies in a collective, the others raise errors moments later, perhaps before its death is known.
STUMBLE_S = 0.5
TURN_S = 0.5  # between two checks of what the carrier has seen
STOP_DEADLINE_S = 30.0


class Gang:
    def __init__(self, specs: Sequence[WorkerSpec], recipe: Recipe, carrier: Carrier) -> None:
        self.members: list[Member] = []  # by rank
        self.lookout = Lookout()
        self.share = carrier.share  # makes a value cheap to send to several workers
        self._specs = specs
        self._recipe = recipe
        self._carrier = carrier
        carrier.lookout, carrier.lose = self.lookout, self.lose
        self._shared: tuple[list[Any], dict[str, Any]] = [], {}  # what each worker is created from
        self._master_port = 0
        self._tolerated: frozenset[int] = frozenset(range(len(specs)))
        self._end: WorkerDiedError | None = None  # what every wait raises
        self._waited_for: dict[int, Sequence[Call]] = {}  # by waiting thread

    def start(self, *, timeout_s: float) -> None:
        """Create every worker."""
        wait, recipe = Wait(timeout_s), self._recipe
        for spec in self._specs:
            self.members.append(self._carrier.launch(spec, lost=None, wait=wait))
        self._shared = (
            [self.share(value) for value in (recipe.target, *recipe.args)],
            {name: self.share(value) for name, value in recipe.kwargs.items()},
        )
        self._begin(self.members, wait=wait)

    def _begin(self, members: Sequence[Member], *, wait: Wait) -> None:
        greetings = [self._send(member, "greet", [member.spec.rank == 0], {}) for member in members]
        for member, (pid, port) in zip(members, self.gather(greetings, wait=wait), strict=True):
            member.pid, self._master_port = pid, port or self._master_port
            self._carrier.watch(member)  # before the worker is created, because that may hang
            self.lookout.regain(member.spec.rank, f"process {pid} on node {member.spec.node.node_rank}")
        master = {"master_address": self.members[0].spec.node.address, "master_port": self._master_port}
        args, kwargs = self._shared
        envs = [{**self._carrier.start_env(one.spec), **one.spec.group_env(**master)} for one in members]
        starts = [self._send(one, "start", [env, *args], kwargs) for one, env in zip(members, envs, strict=True)]
        self.gather(starts, wait=wait)

    def call(self, rank: int, method: str, drop: Drop, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        purpose = self._recipe.purposes.get(method, f"to return from {method}").format(*args)
        return self._send(self.members[rank], "call", [method, drop, *args], kwargs, purpose=purpose)

    def _send(
        self, member: Member, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, purpose: str = ""
    ) -> Call:
        call = Call(member, purpose)
        self._carrier.send(call, method, args, kwargs)
        return call

    def gather(self, calls: Sequence[Call], *, wait: Wait) -> list[Any]:
        """Wait for the results, in order. Raises as soon as one call fails, a needed worker is lost, or the time is up."""
        waited_for = self._waited_for[threading.get_ident()] = list(dict.fromkeys(calls))
        try:
            while missing := [call for call in waited_for if not call.is_done]:
                self._check(missing)
                began_s = time.monotonic()
                self._carrier.settle(missing, timeout_s=min(wait.until_word_s, TURN_S))
                missing = [call for call in missing if not call.is_done]
                if any(call.error is not None for call in waited_for):
                    break
                if BOARD.is_held:
                    wait.excuse(time.monotonic() - began_s)
                if missing and (wait.is_over or wait.is_word_due):
                    self._tell(missing, wait=wait, total=len(calls))
            if any(call.error is not None for call in waited_for):
                self._explain(waited_for)
            return [call.value for call in calls]
        finally:
            del self._waited_for[threading.get_ident()]

    def _tell(self, missing: Sequence[Call], *, wait: Wait, total: int) -> None:
        # `settle` may collect no answer until all have arrived.
        answered = self._carrier.answered(missing, timeout_s=0)
        specs = [call.member.spec for call in missing if call not in answered]
        if not specs:
            return
        if wait.is_over:
            text = f"no answer after {wait.timeout_s:g} s from {len(specs)} of {total} workers: {listed(specs)}"
            raise WorkerTimeoutError(text, **whom(specs))
        wait.tell(f"waiting for {listed(specs)}")

    def ready(self, calls: Sequence[Call], *, timeout_s: float) -> list[Call]:
        """Wait at most ``timeout_s`` for the first answer or failure; return all calls that have one."""
        if self._end is not None:
            raise self._end
        settled = {call for call in calls if call.is_done or call.member.death}
        waiting = [call for call in calls if call not in settled]
        if waiting:
            settled |= {*self._carrier.answered(waiting, timeout_s=0 if settled else timeout_s)}
        return [call for call in calls if call in settled]

    def _check(self, missing: Sequence[Call]) -> None:
        """Raise if the gang cannot continue, or if a worker that has not answered one of these calls is lost."""
        if self._end is not None:
            raise self._end
        if owed := [call for call in missing if call.member.death]:
            self._carrier.settle(owed, timeout_s=0, through_failures=True)  # it may have answered before it died
            if lost := list(dict.fromkeys(call.member for call in owed if not call.is_done)):
                raise self._died(lost)

    def is_alive(self, rank: int) -> bool:
        member = self.members[rank]
        return not member.death and self._carrier.is_alive(member)

    def tolerate(self, ranks: Collection[int]) -> None:
        """Let the group continue without these workers. If any other worker is lost, every wait fails, even waits for living workers.

        Until this is called, a gang tolerates the loss of any worker: only waits for the lost worker fail.
        """
        self._tolerated = frozenset(ranks)

    def lose(self, losses: Mapping[Member, str]) -> None:
        """Record that members are lost, and why. Any thread may call it; reporting the same member again has no effect."""
        new = [member for member in losses if not member.death]
        for member in new:
            member.death = losses[member]
        # A member that has been replaced in the meantime is not missing.
        current = [member for member in new if member in self.members]
        for member in current:
            self.lookout.lose(member.spec.rank, member.death)
        fatal = [member for member in current if member.spec.rank not in self._tolerated]
        if fatal and self._end is None:
            self._end = self._died(fatal)

    def replace(self, rank: int, *, timeout_s: float) -> WorkerSpec:
        """Put a new process into the seat of a lost worker; return the spec of the new process."""
        if self._end is not None:
            raise self._end
        wait, lost = Wait(timeout_s, first_s=30, every_s=300), self.members[rank]
        member = self.members[rank] = self._carrier.launch(lost.spec, lost=lost, wait=wait)
        self._begin([member], wait=wait)
        return member.spec

    def sightings(self, *, last: bool = False) -> Sightings:
        """Return what the workers are doing, and what they have done since this was last called."""
        silent = self._carrier.look(self.members, last=last)
        return self.lookout.take([member.pid for member in self.members], silent=silent)

    def stop(self, *, timeout_s: float) -> None:
        """Stop every process of the gang, and every process that they started."""
        self._end = self._end or WorkerDiedError(f"{self._specs[0].role} has been shut down", **whom(self._specs))
        self._carrier.stop(self.members, timeout_s=timeout_s)

    def _died(self, members: Sequence[Member]) -> WorkerDiedError:
        specs = [member.spec for member in members]
        others = f"\nAlso lost: {listed(specs[1:])}" if len(specs) > 1 else ""
        return died(specs, f"{members[0].death}{self._waits()}{others}")

    def _waits(self) -> str:
        """Return the end of a sentence that says what the threads are waiting for."""
        waiting = [call for calls in list(self._waited_for.values()) for call in calls if not call.is_done]
        answered = self._carrier.answered(waiting, timeout_s=0) if waiting else ()
        found: dict[str, list[WorkerSpec]] = {}
        for call in waiting:
            if call.purpose and (call.member.death or call not in answered):
                found.setdefault(call.purpose, []).append(call.member.spec)
        words = waits_words(found)
        return f"; {words}" if words else ""

    def _explain(self, calls: Sequence[Call]) -> NoReturn:
        """Raise the error that explains the failed calls. A dead worker takes precedence over workers that failed because of it."""
        self._carrier.settle(calls, timeout_s=STUMBLE_S, through_failures=True)
        failed = [call for call in calls if call.error is not None]
        self._look_for_dead(failed)
        first = next((call for call in failed if call.member.death), failed[0])
        others = [call.member.spec for call in failed if call is not first]
        also = f"\nAlso failed: {listed(others)}" if others else ""
        spec, error = first.member.spec, first.error
        named = whom([spec, *others])
        if first.member.death:
            raise died([spec, *others], f"{first.member.death}{self._waits()}{also}") from error
        if not isinstance(error, RemoteFailureError):
            raise WorkerError(f"{spec.where} returned no result: {error}{also}", **named) from error
        if self._carrier.peer_s and is_about_a_peer(error.original, error.text):
            self._blame(calls, f"{spec.where} raised\n{error}{also}")
            raise PeerLostError(f"{spec.where} lost its peer:\n{error}{also}", **named) from error.original
        raise WorkerError(f"{spec.where} raised\n{error}{also}", **named) from error.original

    def _blame(self, calls: Sequence[Call], complaint: str) -> None:
        """Wait for a short time until the death of a called worker is known, and raise an error for it; return if none is dead."""
        deadline = time.monotonic() + self._carrier.peer_s
        while time.monotonic() < deadline:
            self._check([call for call in calls if not call.is_done])
            self._look_for_dead(calls)
            if dead := list(dict.fromkeys(call.member for call in calls if call.member.death)):
                raise died([member.spec for member in dead], f"{dead[0].death}{self._waits()}\n{complaint}")
            time.sleep(0.25)

    def _look_for_dead(self, calls: Sequence[Call]) -> None:
        members = {call.member for call in calls if not call.member.death}
        self.lose({member: "its process is gone" for member in members if not self._carrier.is_alive(member)})


def listed(specs: Sequence[WorkerSpec], *, most: int = 8) -> str:
    more = f" and {len(specs) - most} more" if len(specs) > most else ""
    return ", ".join(spec.where for spec in specs[:most]) + more


def waits_words(waits: Mapping[str, Sequence[WorkerSpec]]) -> str:
    """Return a text that says which workers the run waited for, and for what."""
    parts = [f"{listed(specs, most=3)} {purpose}" for purpose, specs in waits.items()]
    return f"the run waited for {', and for '.join(parts)}" if parts else ""


def died(specs: Sequence[WorkerSpec], why: str) -> WorkerDiedError:
    return WorkerDiedError(f"{specs[0].where} is dead: {why}", **whom(specs))
