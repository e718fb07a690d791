"""Worker classes of the worker-group tests; imported in the workers by name."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any


class Echo:
    """Answers with what it was given and who it is."""

    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.rank_when_made = os.environ["RANK"]

    def train(self, data: Any, loss_fn: Any = None) -> dict[str, Any]:
        return {"loss": 1.5 if loss_fn is None else loss_fn(data), "rank": int(os.environ["RANK"]), "data": data}

    def prepare_for_training(self) -> int:
        return int(os.environ["RANK"]) + self.base

    def size(self, data: Any) -> int:
        return len(data)

    def env(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    async def waits(self) -> str:
        return f"awaited {os.environ['RANK']}"

    def fail(self) -> None:
        raise KeyError(f"no such row on {os.environ['RANK']}")

    def fail_on(self, rank: int) -> str:
        if int(os.environ["RANK"]) == rank:
            raise Stubborn(rank, "cannot be pickled and read back")
        return "fine"

    def die_on(self, rank: int) -> None:
        if int(os.environ["RANK"]) == rank:
            os._exit(3)
        time.sleep(600)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def spawn(self) -> tuple[int, int]:
        """A child that has left the worker's session, and this process."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid, os.getpid()

    def meet(self, ranks: list[int]) -> str:
        """They meet at MASTER_ADDR:MASTER_PORT."""
        from torch.distributed import TCPStore

        rank = int(os.environ["RANK"])
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), len(ranks), rank == 0)
        self.store = store  # the others may still ask rank 0's when it has returned
        store.set(f"rank {rank}", str(rank))
        return "".join(store.get(f"rank {other}").decode() for other in ranks)


class Stubborn(Exception):
    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"{text} (rank {rank})")


class Broken:
    """Rank 1 cannot be made; rank 0 has by then started a child, in a process of its own, and noted it."""

    def __init__(self, folder: Path) -> None:
        if os.environ["RANK"] == "1":
            while "ROLLCALL_GROUP" in os.environ and not list(folder.iterdir()):
                time.sleep(0.05)
            raise ValueError("no model in this folder")
        if "ROLLCALL_GROUP" in os.environ:
            (folder / str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)).touch()


class Stops:
    """Rank 1 is stopped while it is made."""

    def __init__(self) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)  # telling its stacks lets it go on
