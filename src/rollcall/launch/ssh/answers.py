"""What commands of Rollcall answer from another machine, in JSON: only what is needed of it, and only if it is that."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from rollcall.launch.errors import LaunchError
from rollcall.launch.ssh.shell import Outcome
from rollcall.launch.tool import Told


@dataclass(frozen=True, slots=True)
class _Alive:
    alive: bool


@dataclass(frozen=True, slots=True)
class _Status:
    """Of `rollcall status --json`."""

    num_nodes: int
    nodes: list[_Alive]


@dataclass(frozen=True, slots=True)
class _Joined:
    """Of `rollcall check --json`."""

    num_slots: int
    dashboard_url: str | None


OF_STATUS, OF_CHECK = TypeAdapter(_Status), TypeAdapter(_Joined)


def last_answer(outcome: Outcome, answer: TypeAdapter[Told]) -> Told | None:
    """What a command of Rollcall answered on its last line of JSON; None: it did not."""
    lines = [line for line in outcome.out.splitlines() if line.startswith("{")]
    if not outcome.is_good or not lines:
        return None
    try:
        return answer.validate_json(lines[-1], strict=True)
    except ValueError:
        raise LaunchError(
            f"{outcome.host}: answered {lines[-1][:200]!r}, which is not what Rollcall prints; look at that host's rollcall"
        ) from None
