"""Hostile data files: JSON lines and Parquet; and what prompts must be to be accepted."""

from __future__ import annotations

import datetime
import json
import os
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet

from rollcall.loop.data.load import PromptSet

# JSON as it is written into a line.
PIECES = (
    '"1+1="', '""', '" "', "null", "true", "0", "-1", "1.5", "1e999", "-Infinity", "NaN", "12345678901234567890123", "9" * 5000, "[]", "{}",
    '["3", "5"]', '[3, 5.0]', '"[1, 2]"', '[1, "x"]', '"24"', '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\n"', '"' + "1" * 3000 + '"',
    '[{"role": "user", "content": "1"}]', '[{"role": "user"}]', '[{"role": 1, "content": "x"}]', "[1, 2]", '{"a": {"b": [1]}}',
    "[" * 60 + "]" * 60, "[" * 3000 + "]" * 3000, "[" * 100_000, '{"a": ' * 500 + "1" + "}" * 500, '"\\x"', "'x'", "undefined", "",
)  # fmt: skip
COLUMNS = ("prompt", "answer", "id", "numbers", "target", "note", "prompt_messages", "\\ud800", "", "Prompt", "a" * 200)
OBJECTS: tuple[Any, ...] = (
    "1+1=", "", 0, -1, 1.5, float("nan"), float("inf"), True, None, Decimal("1.10"), Decimal("24"), b"\xff\x00", b"text",
    datetime.datetime(2024, 1, 2, 3), datetime.date(2024, 1, 2), datetime.time(1, 2), datetime.timedelta(days=1), [1, 2], ["1", "2"],
    [1.0, 2.5], {"a": 1}, {"a": [b"\x00", None]}, [[1], [2]], [{"role": "user", "content": "1"}], 2**62, "\u202e",
)  # fmt: skip


def data_file(folder: Path, random: Random) -> Path:
    kind = random.randrange(12)
    if kind < 6:
        path = folder / random.choice(("rows.jsonl", "rows.json"))
        data = "\n".join(_line(random) for _ in range(random.randint(1, 4))).encode("utf-8", "surrogatepass")
        path.write_bytes(_damaged(data, random) if random.random() < 0.3 else data)
    elif kind < 10:
        path = folder / "rows.parquet"
        _write_parquet(path, random)
        if random.random() < 0.4:
            path.write_bytes(_damaged(path.read_bytes(), random))
    else:
        path = folder / random.choice(("odd.jsonl", "odd.parquet", "odd.txt", "odd"))
        _make_odd(path, random)
    return path


def unsound(prompts: PromptSet) -> str | None:
    for prompt in prompts.prompts:
        try:
            json.dumps(prompt.metadata, allow_nan=False)
            for text in (prompt.id, prompt.text, prompt.answer, json.dumps(prompt.metadata, ensure_ascii=False)):
                text.encode()
        except (ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        if prompt.answer.lower() in ("nan", "inf", "-inf") or prompt.answer in ("True", "False", "None"):
            return f"the answer {prompt.answer}"
    return None


def _line(random: Random) -> str:
    if random.random() < 0.1:
        return random.choice(PIECES)
    columns = {"prompt": '"1+1="', "answer": '"2"'}
    for _ in range(random.randint(1, 3)):
        columns[random.choice(COLUMNS)] = random.choice(PIECES)
    if random.random() < 0.2:
        columns.pop("prompt")
    pairs = [*columns.items(), *random.sample(list(columns.items()), random.random() < 0.1)]  # at times a key twice
    return "{" + ", ".join(f'"{name}": {value}' for name, value in pairs) + "}"


# Pieces of chat templates: some end, some never do, some take all memory.
_STATEMENTS = (
    "{% for m in messages %}BODY{% endfor %}", "{% for i in range(99999) %}BODY{% endfor %}", "{% if messages %}BODY{% endif %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "{% macro f(x) %}{{ f(x) }}BODY{% endmacro %}{{ f(1) }}",
    "{{ messages }}", "{{ messages[0].content }}", "{{ 'a' * 10**10 }}", "{{ 9 ** 9 ** 9 }}", "{{ '%999999999d' % 1 }}", "{{ '{:>999999999}'.format(1) }}",
    "{{ 'x' | center(10**10) }}", "{{ lipsum(n=10**7) }}", "{{ [1] * 10**10 }}", "{{ ([[messages] * 999] * 999) | tojson }}", "{% generation %}BODY",
    "{{ raise_exception('no') }}", "{{ ''.__class__ }}", "{{ x.y.z }}", "{% for", "{{", "{% include 'x' %}", "\ud800", "{{ '\\ud800' }}", "",
)  # fmt: skip


def chat_template(random: Random) -> str:
    """A hostile one."""
    made = "BODY"
    for _ in range(random.randint(1, 4)):
        made = made.replace("BODY", random.choice(_STATEMENTS) + random.choice(("", "BODY")))
    return made.replace("BODY", "")


def _write_parquet(path: Path, random: Random) -> None:
    """Columns of one type each; what Arrow itself refuses is left out."""
    arrays: dict[str, pyarrow.Array] = {"prompt": pyarrow.array(["1+1="])}
    for _ in range(random.randint(1, 4)):
        column = random.choice([name for name in COLUMNS if "\\" not in name])
        arrays[column] = pyarrow.array([random.choice(OBJECTS)])
    if random.random() < 0.15:
        far = pyarrow.array([2**62], type=pyarrow.timestamp(random.choice(("us", "ns"))))
        arrays["note"] = far
    if random.random() < 0.05:
        arrays["note"] = pyarrow.array(
            [0], type=pyarrow.timestamp("us", tz=random.choice(("Mars/Olympus", "", "+99:99")))
        )
    if random.random() < 0.1:
        arrays["note"] = pyarrow.Array.from_buffers(
            pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
        )
    names = list(arrays)
    if random.random() < 0.1:
        names[-1] = names[0]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(list(arrays.values()), names=names), path)


def _damaged(data: bytes, random: Random) -> bytes:
    if random.random() < 0.4 or not data:
        return data[: random.randrange(len(data) + 1)]
    places = {random.randrange(len(data)): random.randrange(256) for _ in range(random.randint(1, 12))}
    return bytes(places.get(index, byte) for index, byte in enumerate(data))


def _make_odd(path: Path, random: Random) -> None:
    kind = random.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.write_bytes(b"")
    elif kind == 4:
        path.symlink_to(path)
    else:
        path.write_bytes(random.randbytes(random.randrange(300)))
