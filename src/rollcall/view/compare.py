"""Two runs side by side: the settings that differ, and what came of them. Read from their directories alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollcall.config import public_dump
from rollcall.loop.resume import differences
from rollcall.view.reader import RunReader

# What a run is called and where it lies always differs.
_NAMES = ("run.name", "run.dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedNumber:
    """One number of both runs."""

    name: str
    values: tuple[float | None, float | None]
    digits: int

    @property
    def ratio(self) -> float | None:
        """How much of the first run's number the second one's is."""
        first, second = self.values
        return None if first is None or second is None or first == 0 else second / first


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    runs: tuple[str, str]
    settings: dict[str, tuple[Any, Any]]  # key -> both values, where they differ
    lines: tuple[ComparedNumber, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "runs": list(self.runs),
            "settings": {key: list(pair) for key, pair in self.settings.items()},
            "numbers": {line.name: list(line.values) for line in self.lines},
        }


def compare(first: RunReader, second: RunReader) -> Comparison:
    before, after = public_dump(first.read_config()), public_dump(second.read_config())
    changes = differences("", before, after)
    numbers = [_numbers(run) for run in (first, second)]
    return Comparison(
        runs=(str(first.dir), str(second.dir)),
        settings={change.key: (change.before, change.after) for change in changes if change.key not in _NAMES},
        lines=tuple(
            ComparedNumber(name=name, values=(value, numbers[1][name][0]), digits=digits)
            for name, (value, digits) in numbers[0].items()
        ),
    )


def _numbers(run: RunReader) -> dict[str, tuple[float | None, int]]:
    """Name -> value and digits to show."""
    summary, lengths = run.summary(), run.metrics.values("rollout/response_length_mean")
    accuracy, reward = summary["eval"]["accuracy"], summary["reward_mean"]
    course: dict[str, tuple[float | None, int]] = {"steps": (summary["steps"], 0)}
    course |= {f"held-out accuracy, {which}": (accuracy[which], 3) for which in ("first", "last", "best")}
    course |= {f"held-out reward, {which}": (summary["eval"]["reward_mean"][which], 3) for which in ("last", "best")}
    course |= {f"training reward, {which}": (reward[which], 3) for which in ("first", "last")}
    return course | {
        "response length, first": (lengths[0] if lengths else None, 1),
        "response length, last": (lengths[-1] if lengths else None, 1),
        "step time (s)": (summary["step_s"], 2),
        "rollout tokens/s": (summary["rollout_tokens_per_s"], 0),
        "training tokens/s": (summary["train_tokens_per_s"], 0),
        "tokens generated": (summary["tokens_generated"], 0),
        "tokens trained": (summary["tokens_trained"], 0),
        "time (s)": (summary["seconds"], 1),
        "peak memory (GiB)": (summary["peak_memory_gib"], 2),
        "completions not scored": (summary["reward_errors"], 0),
    }
