"""The roles of a run as the controller sees them: all in this process (``roles/local.py``), or on a cluster
(``roles/remote.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rollcall.checkpoint.saving import Saving
from rollcall.data.load import PromptSet
from rollcall.engine.protocol import Engine
from rollcall.environments.protocol import Environments
from rollcall.learner.learner import TokenScores
from rollcall.loop.samples import ScoreSamples
from rollcall.observe.live import Look
from rollcall.reward.scorer import Scorer
from rollcall.types import Floats, Sample


class Trainable(Protocol):
    """The policy's learner, or the critic."""

    def update(self, samples: Sequence[Sample]) -> dict[str, float]: ...


class Policy(Trainable, Protocol):
    num_tokens_trained: int

    def score(self, samples: Sequence[Sample]) -> list[TokenScores]: ...


class ValueFunction(Trainable, Protocol):
    def values(self, samples: Sequence[Sample]) -> list[Floats]: ...


class Repairs(Protocol):
    """Processes that take the place of lost ones, and nodes that come back."""

    @property
    def is_due(self) -> bool:
        """A new rollout process waits for the current weights."""
        ...

    @property
    def regrow(self) -> str | None:
        """Why a new attempt could use more nodes than this one; None: it could not."""
        ...

    async def admit(self) -> None:
        """Give the current weights, which the actor holds, to the new processes, and let them serve."""
        ...


class Workers(Protocol):
    """What the controller drives."""

    @property
    def is_remote(self) -> bool:
        """Calls only wait for other processes, so they may run in threads beside the loop."""
        ...

    @property
    def shares_policy(self) -> bool:
        """Some engine reads the learner's own parameters, so an update changes what it samples from."""
        ...

    @property
    def repairs(self) -> Repairs | None:
        """None: nothing here can be replaced."""
        ...

    @property
    def tokenizer(self) -> Any: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def learner(self) -> Policy: ...
    @property
    def critic(self) -> ValueFunction | None: ...
    @property
    def reference(self) -> ScoreSamples | None: ...
    @property
    def scorer(self) -> Scorer: ...
    @property
    def eval_scorer(self) -> Scorer: ...
    @property
    def environments(self) -> Environments | None:
        """None: a completion is one turn."""
        ...

    @property
    def train(self) -> PromptSet: ...
    @property
    def val(self) -> PromptSet | None: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def saving(self) -> Saving: ...
    def export(self, directory: Path) -> None: ...
    def look(self, *, last: bool = False) -> Look:
        """What their processes do, without asking them, unless this is the ``last`` look."""
        ...

    def close(self) -> None: ...
