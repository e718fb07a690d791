"""Completions on held-out prompts. The journal does not have them; ``samples/val-STEP.jsonl`` has the first of each evaluation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rollcall.durable.append_file import parse_row
from rollcall.durable.group_record import NOT_A_GROUP
from rollcall.observe.transcript import said_in_row
from rollcall.view.groups import LONG

FOLDER = "samples"
_FILE = re.compile(r"val-(\d{6,12})\.jsonl")
MOST_ROWS = 200


def held_out_steps(root: Path) -> list[int]:
    return sorted(int(found[1]) for path in (root / FOLDER).glob("val-*") if (found := _FILE.fullmatch(path.name)))


def show_held_out(root: Path, *, step: int, needle: str) -> list[dict[str, Any]]:
    path, wanted, rows = root / FOLDER / f"val-{step:06d}.jsonl", needle.casefold(), []
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        row = parse_row(line) if line else None
        if row is None:
            continue
        texts = {name: _text(row.get(name)) for name in ("prompt_id", "prompt", "answer")}
        said = _said(row)
        if not any(wanted in text.casefold() for text in (*texts.values(), *(text for _, text in said))):
            continue
        numbers = {name: _number(row.get(name)) for name in ("reward", "num_tokens")}
        rows.append({**texts, **numbers, "finish": _text(row.get("finish")), "said": said})
        if len(rows) == MOST_ROWS:
            break
    return rows


def _said(row: dict[str, Any]) -> list[tuple[str, str]]:
    try:
        return [(who, _text(text)) for who, text in said_in_row(row)]
    except NOT_A_GROUP:  # no episode
        return [("", _text(row.get("completion")))]


def _text(value: Any) -> str:
    return value[:LONG] if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None
