"""Hostile model and run directories: files of whole ones replaced, damaged or torn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

RUBBISH: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b"0", b'"x"', b"\xff\xfe\x00", b"{}", b"\x00" * 64, b"[" * 100_000, b'{"a": ' * 2000 + b"1" + b"}" * 2000,
    b"a: &a [*a]", b"- " * 3000, b"{x: !!int ''}", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", b"\xff" * 8 + b"{}", b"text\n" * 5,
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 3, 7, 1_000_000, 2**31, 2**70, -(2**40), 1.5, float("nan"), float("inf"), "2", "x", None, [], [1], {}, {"a": 1}, True,
)  # fmt: skip


def hurt_model(folder: Path, random: Random) -> str:
    """Spoil a copy of a model directory; which file, for the message."""
    names = sorted(path.name for path in folder.iterdir())
    name = random.choice(
        [*names, "config.json", "config.json", "config.json", "tokenizer.json", "tokenizer_config.json"]
    )
    _hurt_file(folder / name, random, edit=name.endswith(".json"))
    return name


def hurt_run(folder: Path, random: Random) -> str:
    """Tear a file of a copy of a run directory, as a crash may, or remove what a user may."""
    name = random.choice(("run.yaml", "metrics.jsonl", "events.jsonl", "journal", "checkpoints"))
    path = folder / name
    if random.random() < 0.2:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if random.random() < 0.5:
            path.mkdir() if random.random() < 0.5 and name != "journal" else path.write_bytes(b"x")
        return name
    path = random.choice(sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size))
    data = path.read_bytes()
    zeros = bytes(random.randrange(100)) if random.random() < 0.3 else b""
    path.write_bytes(data[: random.randrange(len(data))] + zeros)
    return path.relative_to(folder).as_posix()


def hurt_lease(run_dir: Path, random: Random) -> str:
    path = run_dir.parent / f".{run_dir.name}.lease-{random.choice((1, 2, 10**12))}"
    fields = {
        "owner": "x",
        "host": "h",
        "pid": 1,
        "place": "p",
        "process_start": 1,
        "since": "s",
        "counter": "3",
        "released": True,
    }
    fields[random.choice(list(fields))] = random.choice(NUMBERS)
    path.write_bytes(random.choice(RUBBISH) if random.random() < 0.4 else json.dumps(fields).encode())
    return path.name


def _hurt_file(path: Path, random: Random, *, edit: bool) -> None:
    data = path.read_bytes() if path.is_file() else b""
    kind = random.randrange(6 if edit and data else 3)
    if kind == 0 or not data:
        data = random.choice(RUBBISH)
    elif kind == 1:
        data = data[: random.randrange(len(data))]
    elif kind == 2:
        for _ in range(random.randint(1, 6)):
            place = random.randrange(len(data))
            data = data[:place] + random.randbytes(1) + data[place + 1 :]
    else:
        data = _edited(data, random)
    path.write_bytes(data)


def _edited(data: bytes, random: Random) -> bytes:
    """JSON, or a line of it, with one value replaced."""
    lines = [data] if data.lstrip().startswith(b"{\n") else data.splitlines(keepends=True)
    place = random.randrange(len(lines))
    try:
        document = json.loads(lines[place])
    except ValueError:
        return data
    node = document
    while isinstance(node, dict | list) and node:
        key = random.choice(list(node)) if isinstance(node, dict) else random.randrange(len(node))
        if not isinstance(node[key], dict | list) or not node[key] or random.random() < 0.5:
            if isinstance(node, dict) and random.random() < 0.2:
                del node[key]
            else:
                node[key] = random.choice(NUMBERS)
            break
        node = node[key]
    lines[place] = json.dumps(document).encode() + b"\n"
    return b"".join(lines)
