"""One stand-in for a rollout or actor process: it answers what such a process is asked, and sleeps instead of computing.

Imports no torch, so that many of them start quickly on a small machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollcall.base.types import Completion, FinishReason, Floats, Sample, Segment
from rollcall.checkpoint.store import Written
from rollcall.engine.protocol import Request
from rollcall.engine.ticker import Exchanged, exchange
from rollcall.engine.weights.protocol import Invitation

NAP_S = 0.02  # longest sleep of an engine between two looks at its clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a stand-in takes its time for."""

    request_s: float = 0.0  # of a group, whose completions end together
    places: int = 1  # groups that an engine works on at once
    num_tokens: int = 8  # of a completion
    update_s: float = 0.0
    shares_policy: bool = False  # the actor and the engine are in one process
    spread: float = 0.0  # requests take up to this share longer, by their seeds


class SleepEngine:
    """A core whose groups take a known time; their tokens come evenly over it, each from the version of its moment."""

    def __init__(self, pace: Pace) -> None:
        self.version = 0
        self.num_preemptions = 0
        self._pace = pace
        self._waiting: dict[str, dict[str, Request]] = {}  # by group
        self._running: dict[str, _Running] = {}
        self._groups: dict[str, str] = {}  # by request
        self._tokens = np.arange(pace.num_tokens, dtype=np.int32)
        self._logprobs = np.full(pace.num_tokens, -0.5, dtype=np.float32)
        self._mask = np.ones(pace.num_tokens, dtype=np.bool_)
        self._text = "word" * pace.num_tokens

    @property
    def num_unfinished(self) -> int:
        return len(self._groups)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def submit(self, request: Request) -> None:
        group = request.group or request.id
        self._groups[request.id] = group
        self._waiting.setdefault(group, {})[request.id] = request

    def step(self) -> dict[str, Completion]:
        while self._waiting and len(self._running) < self._pace.places:
            group = next(iter(self._waiting))
            requests = self._waiting.pop(group)
            longer = 1 + self._pace.spread * (next(iter(requests.values())).seed % 1000) / 1000
            start_s = time.monotonic()
            self._running[group] = _Running(requests, start_s, start_s + longer * self._pace.request_s)
        if self._running:
            first_s = min(running.end_s for running in self._running.values()) - time.monotonic()
            time.sleep(min(max(first_s, 0.0), NAP_S))
        ended: dict[str, Completion] = {}
        now = time.monotonic()
        for group in [group for group, running in self._running.items() if running.end_s <= now]:
            ended |= self._finish(self._running.pop(group))
        return ended

    def abort(self, request_id: str) -> None:
        group = self._groups.pop(request_id, "")
        if group in self._running:
            self._running[group].requests.pop(request_id, None)
        elif group in self._waiting:
            self._waiting[group].pop(request_id, None)
            if not self._waiting[group]:
                del self._waiting[group]

    def settle(self) -> None:
        """It sleeps only in a step."""

    def update_weights(self, version: int) -> None:
        now = time.monotonic()
        for running in self._running.values():
            running.note(self.version, now, self._pace.num_tokens)
        self.version = version

    def end_session(self, session: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""

    def _finish(self, running: _Running) -> dict[str, Completion]:
        running.note(self.version, running.end_s, self._pace.num_tokens)
        segments = tuple(Segment(version=version, num_tokens=count) for version, count in running.segments if count)
        for request_id in running.requests:
            del self._groups[request_id]
        return {
            request_id: Completion(
                token_ids=self._tokens,
                logprobs=self._logprobs,
                mask=self._mask,
                segments=segments,
                finish=FinishReason.LENGTH,
                seed=request.seed,
                text=self._text,
                episode=None,
            )
            for request_id, request in running.requests.items()
        }


class _Running:
    def __init__(self, requests: dict[str, Request], start_s: float, end_s: float) -> None:
        self.requests, self.start_s, self.end_s = requests, start_s, end_s
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
        self.num_trained = 0

    def set_pace(self, pace: Pace) -> None:
        self.pace = pace
        self.engine = SleepEngine(pace)

    def exchange(
        self, new: Sequence[Request], cancelled: Sequence[str], ended_sessions: Sequence[str], look_s: float
    ) -> Exchanged:
        return exchange(self.engine, new, cancelled, ended_sessions, look_s=look_s)

    def score(self, samples: Sequence[Sample]) -> list[Said]:
        zeros = [np.zeros(len(sample.response_ids), dtype=np.float32) for sample in samples]
        return [Said(logprobs=row, entropy=row, certainty=row) for row in zeros]

    def update(self, samples: Sequence[Sample]) -> tuple[dict[str, float], int]:
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

    def copy_parts(self) -> None:
        pass

    def write_parts(self, directory: Path, run: str | None) -> None:
        pass

    def parts_written(self) -> Written:
        return Written()
