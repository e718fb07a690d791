"""What the processes of test_process.py run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from rollcall.nodes.framing import HEAD, frame
from rollcall.process.child import cut


class Own:
    def add(self, one: Any, other: Any) -> Any:
        return one + other

    def pid(self) -> int:
        return os.getpid()

    def raises(self, text: str) -> None:
        raise KeyError(text)

    def loses_its_service(self) -> None:
        raise ConnectionResetError("the service is away")

    def leaves(self) -> None:
        sys.exit(4)

    def dies(self, status: int) -> None:
        os._exit(status)

    def crashes(self) -> None:
        os.abort()

    def hangs(self, seconds: float = 600.0) -> str:
        time.sleep(seconds)
        return "awake"

    def counts(self, most: int, pause_s: float) -> Iterator[int]:
        for number in range(most):
            time.sleep(pause_s)
            yield number
        return "counted"

    def floods(self, lines: int) -> str:
        for number in range(lines):
            print(f"line {number} {'x' * 200}")
        return "done"

    def starts(self, *, leaves_the_group: bool = False) -> int:
        return subprocess.Popen(["sleep", "600"], start_new_session=leaves_the_group).pid

    def starts_another_session(self) -> int:
        return self.starts(leaves_the_group=True)

    def forks(self) -> int:
        """Both come back from here; only one of them is asked."""
        return os.fork()

    def returns_no_json(self) -> Any:
        return float("nan")

    def forges(self, what: str) -> None:
        import pickle

        class Evil:
            def __reduce__(self) -> Any:
                return (os.system, ("touch evil",))

        said = {
            "a pickle": frame(HEAD.pack(1, 2) + pickle.dumps(Evil())),
            "a raised pickle": frame(HEAD.pack(1, 3) + pickle.dumps(Evil())),
            "another call's": frame(HEAD.pack(77, 2) + b"1"),
            "no head": frame(b"x"),
            "no kind": frame(HEAD.pack(1, 9) + b"1"),
            "another type": frame(HEAD.pack(1, 2) + b'"text"'),
            "too much": b"\xff" * 64,
            "deep": frame(HEAD.pack(1, 3) + b"[" * 100_000),
        }  # fmt: skip
        os.write(int(sys.argv[2]), said[what])
        time.sleep(600)


class NotMade:
    def __init__(self) -> None:
        print(cut("cannot be made"))
        raise RuntimeError("no such device")
