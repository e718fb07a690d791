"""A run's roles as the controller uses them, whether they are all in this process (``run/local.py``) or on a cluster
(``run/on_cluster.py``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollcall.observe.live import Look

if TYPE_CHECKING:  # a job's driver imports this module, and importing transformers would take seconds
    from rollcall.base.types import Floats, Sample
    from rollcall.checkpoint.saving import Saving
    from rollcall.engine.protocol import Engine
    from rollcall.environments.protocol import Environments
    from rollcall.learner.learner import TokenScores
    from rollcall.loop.data.load import PromptSet
    from rollcall.loop.samples import ScoreSamples
    from rollcall.reward.scorer import Scorer


class Policy(Protocol):
    num_tokens_trained: int

    def update(self, samples: Sequence[Sample]) -> dict[str, float]: ...

    def score(self, samples: Sequence[Sample]) -> list[TokenScores]: ...


class ValueFunction(Protocol):
    def update(self, samples: Sequence[Sample]) -> dict[str, float]: ...

    def values(self, samples: Sequence[Sample]) -> list[Floats]: ...


@dataclass(slots=True, kw_only=True)
class Workers:
    tokenizer: Any
    engine: Engine
    learner: Policy
    critic: ValueFunction | None = None
    reference: ScoreSamples | None = None  # log-probs from the frozen reference
    scorer: Scorer
    eval_scorer: Scorer
    environments: Environments | None = None  # without environments, a completion is one turn
    train: PromptSet
    val: PromptSet | None = None
    stop_token_ids: tuple[int, ...]
    max_positions: int
    shares_policy: bool  # an engine reads the learner's own parameters, so an update also changes the engine's
    saving: Saving
    export: Callable[[Path], object]
    owned: ExitStack  # closes the processes that were started for the roles
    is_closed: bool = False
    # On a cluster:
    is_remote: bool = False  # calls only wait for other processes, so they may run in threads while the loop continues
    # Returns what the processes are doing. Does not query them, except for the ``last`` look.
    look: Callable[..., Look] = lambda **_: Look()
    # Sends the actor's current weights to new rollout processes, which replace lost ones, and lets them serve.
    admit: Callable[[], Awaitable[None]] | None = None
    regrow: Callable[[], str | None] = lambda: None  # returns the reason why a new attempt could use more nodes, if any

    async def aclose(self) -> None:
        """Close the engine and the environments, which run in the event loop. A second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            try:
                await self.engine.close()
            finally:
                if self.environments is not None:
                    await self.environments.aclose()

    def close(self) -> None:
        with self.owned:
            asyncio.run(self.aclose())
