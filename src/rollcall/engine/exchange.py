"""One call to a process with a core: it delivers new requests and returns completions that have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollcall.base.types import Completion
from rollcall.engine.protocol import Core, Refused, Request


@dataclass(slots=True, kw_only=True)
class Exchanged:
    ended: dict[str, Completion] = field(default_factory=dict)  # by request
    refused: dict[str, str] = field(default_factory=dict)  # request -> why
    num_waiting: int = 0  # requests that the core has not started
    num_preemptions: int = 0  # since the core was created


def exchange(
    core: Core, new: Sequence[Request], cancelled: Sequence[str], ended_sessions: Sequence[str], *, look_s: float
) -> Exchanged:
    """Submit the new requests, then decode until a request has ended or ``look_s`` has passed."""
    answer = Exchanged()
    for request_id in cancelled:
        core.abort(request_id)
    for session in ended_sessions:
        core.end_session(session)
    for request in new:
        try:
            core.submit(request)
        except Refused as error:
            answer.refused[request.id] = str(error)
    until = time.monotonic() + look_s
    while core.num_unfinished and not answer.ended and time.monotonic() < until:
        answer.ended = core.step()
    answer.num_waiting, answer.num_preemptions = core.num_waiting, core.num_preemptions
    return answer
