"""Episodes through the endpoint, for `benchmarks.episodes --way endpoint`: clients in a process of their own, HTTP between them and the
engine, token ids in and out."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.sides import Lengths
from rollcall.base.types import Completion, Ints
from rollcall.engine.protocol import Request, Sampling
from rollcall.engine.ticker import Ticker
from rollcall.environments.conversation import Conversations
from rollcall.environments.endpoint import Caller, Endpoint, EndpointServer, Open, in_loop
from rollcall.environments.histories import Histories

KEPT_TOKENS = 4_000_000
PATH = "/inference/v1/generate"


class EndpointSide:
    """A server and its clients, for as many rounds as wanted."""

    def __init__(self, engine: Any, *, running: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._ticker = Ticker(engine, max_running=running)
        self._numbers = itertools.count()
        self._callers: dict[str, Caller] = {}
        plain = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=1, stop_token_ids=(), stop_strings=())
        self._rules = Open(model="policy", default=plain)
        self._tokenizer = engine.tokenizer
        most = engine.max_positions
        app = Endpoint(self._callers, name="policy", max_model_len=most, vocabulary=1 << 30, tokenizer=self._tokenizer)
        self._server = EndpointServer(app)
        # In binary: its lines are long, and only their bytes count.
        self._clients = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.endpoint_clients"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def pids(self) -> list[int]:
        return [self._clients.pid]

    def round(self, plans: Sequence[Lengths], *, tag: str) -> int:
        """How many tokens were sampled."""
        histories = Histories(Conversations(self._tokenizer), name=tag, max_kept=KEPT_TOKENS)
        sample = in_loop(self._sample, self._loop)
        key = secrets.token_urlsafe(32)
        self._callers[key] = Caller(rules=self._rules, histories=histories, sample=sample)
        lengths = [
            {
                "prompt": one.prompt.tolist(),
                "sampled": one.sampled,
                "observed": [ids.tolist() for ids in one.observed],
            }
            for one in plans
        ]
        where = {"host": self._server.host, "port": self._server.port, "key": key, "path": PATH}
        count = self._loop.run_until_complete(self._play(json.dumps({**where, "episodes": lengths}).encode() + b"\n"))
        del self._callers[key]
        return count

    async def _sample(self, prompt_ids: Ints, *, session: str, **given: Any) -> Completion:
        order = (0, 0, int(session.partition("/")[2] or 1))  # as `rollcall serve`
        request = Request(
            id=f"turn-{next(self._numbers)}", prompt_ids=prompt_ids, session=session, order=order, **given
        )
        return (await self._ticker.generate(request)).completion

    async def _play(self, line: bytes) -> int:
        assert self._clients.stdin is not None and self._clients.stdout is not None
        self._clients.stdin.write(line)
        self._clients.stdin.flush()
        return int(await asyncio.to_thread(self._clients.stdout.readline))

    def close(self) -> None:
        assert self._clients.stdin is not None
        self._clients.stdin.close()
        self._clients.wait(60)
        self._server.close()
