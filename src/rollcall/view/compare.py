"""Compares runs side by side: the settings that differ and the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rollcall.config import public_dump
from rollcall.loop.resume import Change, differences
from rollcall.view.reader import RunReader


class ComparedNumber(NamedTuple):
    name: str
    values: tuple[float | None, float | None]  # one value for each run
    digits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    runs: tuple[str, str]
    settings: dict[str, list[Any]]  # key -> both values, for keys that differ
    numbers: tuple[ComparedNumber, ...]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "numbers": {number.name: number.values for number in self.numbers}}


def compare(first: RunReader, second: RunReader) -> Comparison:
    before, after = _numbers(first), _numbers(second)
    return Comparison(
        runs=(str(first.dir), str(second.dir)),
        settings=differing_settings([public_dump(run.read_config()) for run in (first, second)]),
        numbers=tuple(
            ComparedNumber(name, (value, after[name][0]), digits) for name, (value, digits) in before.items()
        ),
    )


def differing_settings(dumps: Sequence[dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Return key -> its value in each run file, for keys that differ. None stands for a file that cannot be read. The runs' names
    and folders always differ, so they are left out."""
    first = next((dump for dump in dumps if dump is not None), {})
    changes = [{change.key: change for change in differences("", first, dump)} for dump in dumps if dump is not None]
    before = {key: change.before for own in changes for key, change in own.items() if key != "run.name"}

    def value(own: dict[str, Change], key: str) -> Any:
        if key in own:
            return own[key].after
        return None if any(key.startswith(f"{other}.") for other in own) else before[key]

    found: dict[str, list[Any]] = {}
    for key in before:
        values = iter([value(own, key) for own in changes])
        found[key] = [None if dump is None else next(values) for dump in dumps]
    return found


def _numbers(run: RunReader) -> dict[str, tuple[float | None, int]]:
    """Return name -> value and number of digits to show."""
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
