"""Compares runs: the settings that differ, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollcall.config import public_dump
from rollcall.loop.resume import Change, differences
from rollcall.view.reader import RunReader


def compare(first: RunReader, second: RunReader) -> dict[str, Any]:
    """Return both runs' values for each setting that differs and for each result."""
    before, after = _numbers(first), _numbers(second)
    return {
        "runs": (str(first.dir), str(second.dir)),
        "settings": differing_settings([public_dump(run.read_config()) for run in (first, second)]),
        "numbers": {name: (value, after[name]) for name, value in before.items()},
    }


def differing_settings(dumps: Sequence[dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Return each key that differs, with its value in each run file. The value is None for a file that cannot be read. Names and folders
    of runs always differ, so they are left out."""
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


def _numbers(run: RunReader) -> dict[str, float | None]:
    summary, lengths = run.summary(), run.metrics.values("rollout/response_length_mean")
    accuracy, held_out, reward = summary["eval"]["accuracy"], summary["eval"]["reward_mean"], summary["reward_mean"]
    return {
        "steps": summary["steps"],
        **{f"held-out accuracy, {which}": accuracy[which] for which in ("first", "last", "best")},
        **{f"held-out reward, {which}": held_out[which] for which in ("last", "best")},
        **{f"training reward, {which}": reward[which] for which in ("first", "last")},
        "response length, first": lengths[0] if lengths else None,
        "response length, last": lengths[-1] if lengths else None,
        "step time (s)": summary["step_s"],
        "rollout tokens/s": summary["rollout_tokens_per_s"],
        "training tokens/s": summary["train_tokens_per_s"],
        "tokens generated": summary["tokens_generated"],
        "tokens trained": summary["tokens_trained"],
        "time (s)": summary["seconds"],
        "peak memory (GiB)": summary["peak_memory_gib"],
        "completions not scored": summary["reward_errors"],
    }
