"""Environments as users write them: good ones, and ones that hang, die, eat memory or answer rubbish."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any, Literal

from rollcall import Observation, StepResult


class Secret:
    """The model asks for a number, then answers with it."""

    def __init__(self) -> None:
        self.num_resets = 0

    def reset(self, answer: str = "", **columns: Any) -> str | None:
        self.num_resets += 1
        self.secret, self.num_asked = answer, 0
        return f"reset {self.num_resets}: {' '.join(sorted(columns))}"

    def ask(self, times: int = 1) -> str:
        """Ask for the number.

        Args:
            times: How often to say it.
        """
        self.num_asked += 1
        return self.secret * times

    async def ask_later(self, unit: Literal["s", "ms"] = "s") -> dict[str, Any]:
        """Ask for the number, in a moment.

        Args:
            unit: Of time.
        """
        await asyncio.sleep(0)
        return {"secret": self.secret, "unit": unit}

    def refuse(self) -> str:
        """Never works."""
        raise ValueError("not today")

    def get_reward(self) -> float:
        return self.num_asked / 2

    def _hidden(self) -> None:
        pass


class Plain:
    """Its reset takes two columns; it has no reward."""

    def reset(self, prompt: str, answer: str) -> None:
        self.seen = f"{prompt} {answer}"

    def look(self) -> str:
        """What was given."""
        return self.seen


class Hostile:
    """Each tool does what an environment must not do."""

    def reset(self, how: str = "", **columns: Any) -> Any:
        if how == "raise":
            raise KeyError("no such row")
        return 7 if how == "number" else None

    def hang(self) -> str:
        """Never returns."""
        while True:
            time.sleep(0.01)

    def eat(self) -> str:
        """Takes all memory."""
        held = []
        while True:
            held.append(bytearray(16 << 20))

    def die(self) -> str:
        """Kills its process."""
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def exit(self) -> str:
        """Ends its process."""
        sys.exit(3)

    def fork(self) -> str:
        """Comes back twice."""
        return "child" if os.fork() == 0 else "parent"

    def start(self) -> str:
        """Starts two programs, one in a session of its own."""
        programs = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
        return " ".join(str(program.pid) for program in programs)

    def shout(self) -> str:
        """Prints a lot."""
        for _ in range(200):
            print("x" * 10_000)
        return "done"

    def flood(self) -> str:
        """Returns 100 MB."""
        return "x" * 100_000_000

    def write(self) -> str:
        """Writes rubbish to every file descriptor that it finds, and then goes on."""
        for fd in range(3, 20):
            try:
                os.write(fd, b"\xff" * 64)
            except OSError:
                continue
        return "done"

    def close(self) -> str:
        """Closes what is not its own."""
        os.closerange(3, 100)
        time.sleep(600)
        return "done"

    def stop_here(self) -> str:
        """Stops in the debugger."""
        breakpoint()
        return "done"

    def get_reward(self) -> float:
        return float("nan")


class Guess:
    """Step by step."""

    async def reset(self, row: dict[str, Any]) -> Observation:
        self.number = row["answer"]
        return Observation("Guess.")

    async def step(self, text: str, token_ids: list[int]) -> StepResult:
        if text == self.number:
            return StepResult(reward=1.0, done=True, metrics={"tokens": len(token_ids)})
        return StepResult(Observation("No.", role="tool", name="judge"), reward=-0.5)


class GuessPlainly:
    """The same with plain methods and tuples."""

    def reset(self, row: dict[str, Any]) -> str:
        self.number = row["answer"]
        return "Guess."

    def step(self, text: str, token_ids: list[int]) -> Any:
        return {"right": ("", 1, True), "wrong": "No.", "nan": ("", float("nan"), True), "none": None}[text]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def ask(times: int) -> str:
    """Has the name of a method.

    Args:
        times: How often.
    """
    return "" * times


def untold(a: int) -> int:
    return a


class NoReset:
    pass


class Needs:
    def __init__(self, address: str) -> None:
        self.address = address

    def reset(self) -> None:
        pass


class Countdown:
    """Made with an argument."""

    def __init__(self, start: int = 1) -> None:
        self.start = self.left = start

    def reset(self, row: dict[str, Any]) -> str:
        self.left = self.start
        return str(self.left)

    def step(self, text: str, token_ids: list[int]) -> StepResult:
        self.left -= 1
        is_base = float(sys.prefix == sys.base_prefix)  # this Python is no virtual environment
        return StepResult(str(self.left), done=self.left == 0, metrics={"is_base": is_base})
