"""What a run leaves to read at its end: ``summary.json`` with whole-run numbers, and samples as text.

The numbers come from metrics.jsonl, so a run that was resumed counts its earlier processes too.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rollcall.durable.atomic import write_atomic
from rollcall.observe.headline import ACCURACY, REWARD, headline_of
from rollcall.observe.signal import ADVANTAGE
from rollcall.observe.sinks import read_rows
from rollcall.observe.transcript import episode_columns, transcript
from rollcall.types import Group, Prompt

GIB = 2**30


def build_summary(
    metrics_path: Path, *, seconds: float, resume_step: int | None, peak_gib: float = 0.0, **extra: Any
) -> dict[str, Any]:
    """``seconds`` and ``peak_gib`` are the wall time and memory of a process that trains; steps up to ``resume_step`` add what
    they took in earlier processes.

    ``extra`` joins the result as it is (run name, model directory, ...). A number that no row holds is None.
    """
    rows = read_rows(metrics_path)
    earlier = [row for row in rows if resume_step is not None and row["step"] <= resume_step]
    before_s = sum(sum(_values(earlier, name)) for name in ("time/step_s", "time/eval_s", "time/save_s"))
    # A replayed step generates little or nothing, so its speed says nothing.
    generated = [row for row in rows if not row.get("rollout/groups_from_journal")]
    errors = sum(row[name] or 0 for row in rows for name in row if name.startswith("reward_errors/"))
    rewards, advantages = _values(rows, "train/reward_mean"), _values(rows, ADVANTAGE)
    return {
        "steps": max((row["step"] for row in rows if "time/step_s" in row), default=0),
        "seconds": round(before_s + seconds, 3),
        "headline": headline_of(rows).metric,
        "eval": {one.key: _course(one.values(rows)) for one in (ACCURACY, REWARD)},
        "reward_mean": {"first": next(iter(rewards), None), "last": next(reversed(rewards), None)},
        "tokens_generated": int(sum(_values(rows, "rollout/tokens"))),
        "tokens_trained": int(sum(_values(rows, "train/tokens"))),
        "rollout_tokens_per_s": _middle(median, generated, "rollout/tokens_per_s"),
        "train_tokens_per_s": _middle(median, rows, "perf/train_tokens_per_s"),
        "step_s": _middle(median, generated, "time/step_s"),
        "logprob_mismatch": _middle(fmean, rows, "rollout/logprob_mismatch"),
        "logprob_mismatch_max": max(_values(rows, "rollout/logprob_mismatch_max"), default=None),
        "peak_memory_gib": round(max([*_values(rows, "perf/peak_memory_gib"), peak_gib]), 3),
        "reward_errors": int(errors),
        "no_signal": {"steps": advantages.count(0), "of": len(advantages)},
        **extra,
    }


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(summary, indent=2, default=str) + "\n")


def peak_memory_gib() -> float:
    """Most memory this process has held: by CUDA's allocator where a card is in use, else resident."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def write_samples(dir: Path, *, step: int, split: str, groups: Iterable[Group]) -> Path:
    """``samples/<split>-<step>.jsonl``: a line per completion, to read by eye."""
    dir.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "prompt_id": group.prompt.id,
                "prompt": group.prompt.text,
                "completion": completion.text,
                "answer": group.prompt.answer,
                "reward": score.value,
                "parts": score.parts,
                **({"errors": score.errors} if score.errors else {}),
                **({"notes": score.notes} if score.notes else {}),
                "num_tokens": len(completion.token_ids),
                "finish": completion.finish.value,
                **episode_columns(completion),
            },
            ensure_ascii=False,
        )
        for group in groups
        for completion, score in zip(group.completions, group.scores, strict=True)
    ]
    path = dir / f"{split}-{step:06d}.jsonl"
    text = "".join(line + "\n" for line in lines)
    # A completion cut inside a character may hold half a surrogate pair, which UTF-8 has no bytes for.
    write_atomic(path, text.encode("utf-8", errors="backslashreplace"))
    return path


def sample_rows(groups: Iterable[Group], *, limit: int) -> list[tuple[str, str, str, float]]:
    """(prompt, completion, answer, reward) of the first completion of the first groups, for the console."""
    rows = [
        (_asked(group.prompt), transcript(group.completions[0]), group.prompt.answer, group.scores[0].value)
        for group in groups
        if group.completions
    ]
    return rows[:limit]


def _asked(prompt: Prompt) -> str:
    """What the user says, without the chat template around it and without the system message."""
    said = [message["content"] for message in prompt.metadata.get("prompt_messages", ()) if message["role"] == "user"]
    return said[-1] if said else prompt.text


def _course(values: list[float]) -> dict[str, float | None]:
    return {
        "first": values[0] if values else None,
        "last": values[-1] if values else None,
        "best": max(values, default=None),
    }


def _values(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _middle(of: Callable[[list[float]], float], rows: list[dict[str, Any]], name: str) -> float | None:
    values = _values(rows, name)
    return of(values) if values else None
