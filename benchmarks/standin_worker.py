"""One stand-in for a rollout or actor process: it answers what such a process is asked, and sleeps instead of computing.

Imports no torch, so that many of them start quickly on a small machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollcall.engine.protocol import Ended, Finished, Request
from rollcall.roles.engine_seat import Advance, EngineSeat
from rollcall.types import Completion, FinishReason, Floats, Sample, Segment
from rollcall.weights.protocol import Invitation

NAP_S = 0.02  # longest sleep of an engine between two looks at its clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a stand-in takes its time for."""

    request_s: float = 0.0
    places: int = 1  # requests that an engine works on at once
    num_tokens: int = 8  # of a completion
    update_s: float = 0.0
    shares_policy: bool = False  # the actor and the engine are in one process
    spread: float = 0.0  # requests take up to this share longer, by their seeds


class SleepEngine:
    """An engine whose requests take a known time; their tokens come evenly over it, each from the version of its moment."""

    def __init__(self, pace: Pace) -> None:
        self.version = 0
        self.num_preemptions = 0
        self._pace = pace
        self._waiting: list[Request] = []
        self._running: dict[str, _Running] = {}
        self._aborted: list[Finished] = []
        self._tokens = np.arange(pace.num_tokens, dtype=np.int32)
        self._logprobs = np.full(pace.num_tokens, -0.5, dtype=np.float32)
        self._mask = np.ones(pace.num_tokens, dtype=np.bool_)
        self._text = "word" * pace.num_tokens

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._aborted)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def poll(self) -> list[Finished]:
        while self._waiting and len(self._running) < self._pace.places:
            request = self._waiting.pop(0)
            longer = 1 + self._pace.spread * (request.seeds[0] % 1000) / 1000
            end_s = time.monotonic() + longer * self._pace.request_s
            self._running[request.id] = _Running(request, end_s - longer * self._pace.request_s, end_s)
        if self._running:
            first_s = min(running.end_s for running in self._running.values()) - time.monotonic()
            time.sleep(min(max(first_s, 0.0), NAP_S))
        finished, self._aborted = self._aborted, []
        now = time.monotonic()
        for running in [running for running in self._running.values() if running.end_s <= now]:
            del self._running[running.request.id]
            finished.append(self._finish(running))
        return finished

    def take_ended(self) -> list[Ended]:
        return []  # the completions of a request end together

    def abort(self, request_id: str) -> None:
        self._waiting = [request for request in self._waiting if request.id != request_id]
        self._running.pop(request_id, None)
        self._aborted.append(Finished(request_id=request_id, completions=()))

    def update_weights(self, version: int) -> None:
        now = time.monotonic()
        for running in self._running.values():
            running.note(self.version, now, self._pace.num_tokens)
        self.version = version

    def end_session(self, session: str) -> None:
        """Nothing is kept."""

    def _finish(self, running: _Running) -> Finished:
        running.note(self.version, running.end_s, self._pace.num_tokens)
        segments = tuple(Segment(version=version, num_tokens=count) for version, count in running.segments if count)
        completions = tuple(
            Completion(
                token_ids=self._tokens,
                logprobs=self._logprobs,
                mask=self._mask,
                segments=segments,
                finish=FinishReason.LENGTH,
                seed=seed,
                text=self._text,
                episode=None,
            )
            for seed in running.request.seeds
        )
        return Finished(request_id=running.request.id, completions=completions)


class _Running:
    def __init__(self, request: Request, start_s: float, end_s: float) -> None:
        self.request, self.start_s, self.end_s = request, start_s, end_s
        self.segments: list[tuple[int, int]] = []

    def note(self, version: int, now: float, num_tokens: int) -> None:
        """What was sampled up to now and not noted yet came from this version."""
        share = 1.0 if now >= self.end_s else (now - self.start_s) / (self.end_s - self.start_s)
        self.segments.append((version, int(share * num_tokens) - sum(count for _, count in self.segments)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """As ``TokenScores``, whose module imports torch."""

    logprobs: Floats
    entropy: Floats
    certainty: Floats


class StandIn:
    """A process with a rollout, an actor, or both."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.engine = SleepEngine(pace)
        self.seat = EngineSeat(self.engine, room=0)
        self.num_trained = 0

    def set_room(self, room: int) -> None:
        self.seat = EngineSeat(self.engine, room=room)

    def set_pace(self, pace: Pace) -> None:
        self.pace = pace
        self.engine = SleepEngine(pace)
        self.seat = EngineSeat(self.engine, room=0)

    def advance(
        self, requests: Sequence[Request], aborted: Sequence[str], ended: Sequence[str], give_back: int, look_s: float
    ) -> Advance:
        return self.seat.advance(requests, aborted, ended=ended, give_back=give_back, look_s=look_s)

    def score(self, samples: Sequence[Sample]) -> list[Said]:
        zeros = [np.zeros(len(sample.response_ids), dtype=np.float32) for sample in samples]
        return [Said(logprobs=row, entropy=row, certainty=row) for row in zeros]

    def update(self, samples: Sequence[Sample]) -> tuple[dict[str, float], int]:
        if self.pace.shares_policy:
            self.seat.hold()
        time.sleep(self.pace.update_s)
        self.num_trained += sum(len(sample.response_ids) for sample in samples)
        return {"loss": 0.0, "mismatch": 0.0, "mismatch_max": 0.0}, self.num_trained

    def invite(self, receivers: Mapping[str, bool], host: str) -> Mapping[str, Invitation]:
        nobody = Invitation(
            sender="a stand-in", carrying="shared_memory", host=host, port=0, local="nobody", secret="", timeout_s=1
        )  # fmt: skip
        return dict.fromkeys(receivers, nobody)

    def send_weights(self, version: int) -> None:
        self.engine.update_weights(version)

    def use_weights(self, version: int, name: str, invitation: Invitation) -> None:
        self.engine.update_weights(version)

    def write_whole(self, directory: Path) -> None:
        (directory / "model").mkdir(parents=True)
        (directory / "model" / "config.json").write_text(str(self.engine.version))
