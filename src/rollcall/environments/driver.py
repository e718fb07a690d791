"""An engine as an awaitable sampler, for `rollcall serve`: one task polls the engine, and wakes those who wait for a completion."""

from __future__ import annotations

import asyncio

from rollcall.engine.protocol import Engine, Request, Sampling
from rollcall.types import Completion, Ints


class EngineDriver:
    """Belongs to one event loop, in which ``pump`` runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._work = asyncio.Event()
        self._num_requests = 0
        self.num_tokens = 0

    async def sample(self, prompt_ids: Ints, *, seed: int, sampling: Sampling, session: str) -> Completion:
        request_id, self._num_requests = str(self._num_requests), self._num_requests + 1
        self._engine.submit(
            Request(id=request_id, prompt_ids=prompt_ids, seeds=(seed,), sampling=sampling, session=session)
        )
        done = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self._work.set()
        try:
            return await done
        finally:
            if self._waiting.pop(request_id, None) is not None:  # nobody waits for it any more
                self._engine.abort(request_id)
                self._work.set()

    async def pump(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._engine.num_unfinished:
                for finished in self._engine.poll():
                    self._hand_over(finished.request_id, finished.completions[0])
                await asyncio.sleep(0)

    def _hand_over(self, request_id: str, completion: Completion) -> None:
        self.num_tokens += len(completion.token_ids)
        done = self._waiting.pop(request_id, None)
        if done is not None and not done.done():
            done.set_result(completion)
