"""Rows of a JSONL or Parquet file (or a hub dataset, or a built-in task) as tokenised Prompts.

Every refusal names the file and the row; rows count from 1, as an editor shows the lines of a JSONL file.
"""

from __future__ import annotations

import difflib
import json
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from rollcall.config import DataSection
from rollcall.config.checks import is_hub
from rollcall.data.arithmetic import arithmetic
from rollcall.data.columns import (
    ColumnError,
    DataError,
    answer_text,
    check_texts,
    countdown_columns,
    plain,
    row_name,
    unique_keys,
)
from rollcall.data.hub import default_name, read_dataset
from rollcall.types import Prompt
from rollcall.words import all_of, are

MAX_LINE_BYTES = 1 << 26  # of a JSON line; a prompt of a million tokens has a tenth of it
NO_DATA = "builtin:environment"  # the environment owns the task
NUM_ROWS = 1024
_ROWS_PER_ENCODE = 1024
_COLUMNS_SHOWN = 20
_ANSWERS = ("solution", "target", "ground_truth", "label")  # what others call the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    prompts: list[Prompt]
    num_overlong: int  # left out, longer than data.max_prompt_tokens
    source: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it is in the file."""

    where: str  # "train.jsonl, row 7"
    default_id: str
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Rendered:
    row: Row
    text: str
    messages: list[dict[str, Any]] | None  # None: plain text, not rendered by a chat template
    answer: str


def load_prompts(
    source: str,
    *,
    data: DataSection,
    tokenizer: Any,
    limit: int | None = None,
    split: Literal["train", "val"] = "train",
    rewards: Collection[str] = (),
    needs: Mapping[str, str] = MappingProxyType({}),
) -> PromptSet:
    """The prompts of ``source``, at most ``limit``. ``split`` says which part of a built-in task is meant; ``rewards`` are the
    types of the run's, some of which read columns of their own; ``needs`` are the columns that a row must have, each with the
    reward that reads it."""
    _check_section(data, tokenizer)
    if source == NO_DATA:
        for column, reward in needs.items():
            raise DataError(
                f"{NO_DATA} has rows without {column!r}, which the reward {reward} needs; give a data file, or a reward that does "
                "not take it"
            )
        return _without_data(data, tokenizer, split=split, limit=limit)
    prompts: list[Prompt] = []
    num_overlong, shortest = 0, None
    rows = _rendered_rows(source, data=data, tokenizer=tokenizer, split=split, needs=needs)
    while batch := list(islice(rows, _ROWS_PER_ENCODE)):
        for rendered, token_ids in zip(batch, _encode(batch, tokenizer), strict=True):
            if len(token_ids) > data.max_prompt_tokens:
                num_overlong += 1
                shortest = min(shortest or len(token_ids), len(token_ids))
                continue
            prompts.append(_prompt(rendered, token_ids, data, rewards))
            if len(prompts) == limit:
                return PromptSet(prompts=prompts, num_overlong=num_overlong, source=source)
    if not prompts and num_overlong:
        raise DataError(
            f"{source}: {all_of(num_overlong, 'prompt')} {are(num_overlong)} longer than "
            f"data.max_prompt_tokens={data.max_prompt_tokens}; the shortest has {shortest} tokens"
        )
    if not prompts:
        raise DataError(f"{source} has no rows; give at least one")
    return PromptSet(prompts=prompts, num_overlong=num_overlong, source=source)


def _without_data(data: DataSection, tokenizer: Any, *, split: str, limit: int | None) -> PromptSet:
    """Rows with nothing but a number: the environment says how an episode begins, so their tokens are never read."""
    is_chat = data.chat if data.chat is not None else bool(tokenizer.chat_template)
    system = [{"role": "system", "content": data.system}] if data.system is not None else []
    chat = {"prompt_messages": [*system, {"role": "user", "content": ""}]} if is_chat else {}
    first = 0 if split == "train" else NUM_ROWS
    prompts = [
        Prompt(
            id=f"environment-{split}:{index}",
            token_ids=np.zeros(1, dtype=np.int32),
            text="",
            answer="",
            metadata={"index": index, **chat},
        )
        for index in range(first, first + (limit or (NUM_ROWS if split == "train" else NUM_ROWS // 8)))
    ]
    return PromptSet(prompts=prompts, num_overlong=0, source=NO_DATA)


def _check_section(data: DataSection, tokenizer: Any) -> None:
    if data.template is not None and "{prompt}" not in data.template:
        raise DataError(f"data.template={data.template!r} has no {{prompt}} in it; put it where the prompt goes")
    if data.chat and not tokenizer.chat_template:
        raise DataError(
            "data.chat=true needs a chat template and the tokenizer has none; set model.chat_template, or data.chat=false"
        )


# Reading


def read_rows(source: str, *, split: Literal["train", "val"] = "train") -> Iterator[Row]:
    """The rows of a file or of a built-in task, untouched."""
    if source == "builtin:arithmetic":
        for number, columns in enumerate(arithmetic(split=split), start=1):
            yield Row(f"{source}, row {number}", f"arithmetic-{split}:{number}", columns)
        return
    if source.startswith("builtin:"):
        raise DataError(f"{source} is not a built-in task; there are builtin:arithmetic and {NO_DATA}")
    path = Path(source)
    if path.is_dir():
        found = ", ".join(sorted(each.name for each in path.iterdir() if each.suffix in _READERS)) or "no data file"
        raise DataError(f"{source} is a directory; name one file ({found} in it)")
    if path.suffix not in _READERS:
        raise DataError(
            f"{source} ends in {path.suffix or 'nothing'!r}; data files are .jsonl, .json (JSON lines) or .parquet"
        )
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for, and a device has no end
            raise DataError(f"data file {source} is a pipe or a device; write the rows to a regular file")
        for number, columns in _READERS[path.suffix](path):
            row = Row(f"{source}, row {number}", f"{path.stem}:{number}", columns)
            _check_columns(row)
            yield row
    except FileNotFoundError:
        raise DataError(
            f"data file {source} does not exist; `rollcall data arithmetic --out DIR` makes one to try"
        ) from None
    except OSError as error:
        raise DataError(f"data file {source} cannot be read: {error}") from None


def _data_rows(source: str, *, data: DataSection, split: Literal["train", "val"]) -> Iterator[Row]:
    """The rows that the section means, with the columns named as it says."""
    rows = _hub_rows(source, data=data, split=split) if is_hub(source) else read_rows(source, split=split)
    for row in rows:
        yield replace(row, columns=_renamed(row, data.columns)) if data.columns else row


def _hub_rows(source: str, *, data: DataSection, split: Literal["train", "val"]) -> Iterator[Row]:
    part = data.split if split == "train" else data.val_split
    for number, columns in enumerate(read_dataset(source, subset=data.subset, split=part), start=1):
        row = Row(f"{source} ({part}), row {number}", f"{default_name(source, split=part)}:{number}", dict(columns))
        _check_columns(row)
        yield row


def _renamed(row: Row, names: Mapping[str, str]) -> dict[str, Any]:
    """``names`` is from a column of the data to the name that it gets."""
    columns = {name: value for name, value in row.columns.items() if name not in names}
    for before, after in names.items():
        if before not in row.columns:
            raise DataError(
                f"{row.where} has no column {before!r}, which data.columns renames; it has {_listed(row.columns)}"
            )
        if after in columns:
            raise DataError(
                f"{row.where} has a column {after!r} already, and data.columns gives {before!r} that name too; rename the other "
                f"as well, such as {after}: {after}_before"
            )
        columns[after] = row.columns[before]
    return columns


def _check_columns(row: Row) -> None:
    for column, value in row.columns.items():
        _of_column(row, "a column's name", check_texts, column)
        _of_column(row, column, check_texts, value)


def _of_column(row: Row, column: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except ColumnError as error:
        raise DataError(f"{row.where}: {column} {error}") from None


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if not line.strip():
                continue
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}, row {number} has more than {MAX_LINE_BYTES >> 20} MiB; each line holds one JSON object"
                )
            try:
                columns = json.loads(line, object_pairs_hook=unique_keys)
            except ColumnError as error:
                raise DataError(f"{path}, row {number} has {error}") from None
            except RecursionError:
                raise DataError(f"{path}, row {number} has lists or maps too deep in each other to be read") from None
            except ValueError as error:  # not JSON, or not UTF-8
                raise DataError(f"{path}, row {number} is not JSON: {error}; each line holds one JSON object") from None
            if not isinstance(columns, dict):
                raise DataError(
                    f"{path}, row {number} is a {type(columns).__name__}; each line holds one JSON object, "
                    'such as {"prompt": "12+34=", "answer": "46"}'
                )
            yield number, columns


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"{path} has the column {twice[0]!r} twice; leave one of them out")
            for batch in file.iter_batches(batch_size=_ROWS_PER_ENCODE):
                for columns in batch.to_pylist():
                    number += 1
                    yield number, columns
    except DataError:
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError, MemoryError) as error:
        # A damaged file shows itself at its footer or at any page of it; text that is not UTF-8 and dates that Python does not
        # have when their rows are read.
        first = (str(error) or type(error).__name__).splitlines()[0]
        where = f"{path} is not a Parquet file" if not number else f"{path} cannot be read past row {number}"
        raise DataError(f"{where}: {first}") from None


_READERS = {".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}


# Rendering


def _rendered_rows(
    source: str, *, data: DataSection, tokenizer: Any, split: Literal["train", "val"], needs: Mapping[str, str]
) -> Iterator[_Rendered]:
    for row in _data_rows(source, data=data, split=split):
        if data.prompt_key not in row.columns:
            raise DataError(
                f"{row.where} has no column {data.prompt_key!r}; {_nearest(data.prompt_key, row, 'prompt_key')}"
            )
        _check_needs(row, data, needs)
        messages = _messages(row, data, has_template=bool(tokenizer.chat_template))
        if messages is not None:
            text = _apply_chat_template(row, messages, tokenizer)
        else:
            text = _with_template(row.columns[data.prompt_key], data)
            if not text:
                raise DataError(f"{row.where}: the prompt is empty")
        yield _Rendered(row, text, messages, _answer(row, data))


def _messages(row: Row, data: DataSection, *, has_template: bool) -> list[dict[str, Any]] | None:
    """The chat messages to render; None when the prompt stays plain text."""
    value = row.columns[data.prompt_key]
    if isinstance(value, str):
        if not (data.chat if data.chat is not None else has_template):
            if data.system is not None:
                raise DataError(f"data.system needs chat prompts, and {row.where} is plain text; set data.chat=true")
            return None
        messages = [{"role": "user", "content": _with_template(value, data)}]
    else:
        messages = _checked_messages(value, row)
        if not has_template:
            raise DataError(
                f"{row.where} holds chat messages and the tokenizer has no chat template; "
                "set model.chat_template, or give the prompt as text"
            )
    if data.system is not None and messages[0]["role"] != "system":  # a row's own system message stands
        messages = [{"role": "system", "content": data.system}, *messages]
    return messages


def _checked_messages(value: Any, row: Row) -> list[dict[str, Any]]:
    wanted = 'text, or chat messages such as [{"role": "user", "content": "..."}]'
    if not isinstance(value, list) or not value:
        shown = "an empty list" if value == [] else f"{type(value).__name__} ({str(value)[:60]})"
        raise DataError(f"{row.where}: the prompt is {shown}; it must be {wanted}")
    for place, message in enumerate(value):
        valid = (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        )
        if not valid:
            raise DataError(f"{row.where}: message {place} is {str(message)[:80]}; the prompt must be {wanted}")
    # Parquet gives every message every key that any message has, as null.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _apply_chat_template(row: Row, messages: list[dict[str, Any]], tokenizer: Any) -> str:
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # noqa: BLE001 - templates are programs and raise what they like
        raise DataError(f"{row.where}: the chat template refuses the messages: {error}") from None


def _with_template(text: str, data: DataSection) -> str:
    # Not str.format: prompts and templates are full of braces.
    return text if data.template is None else data.template.replace("{prompt}", text)


def _answer(row: Row, data: DataSection) -> str:
    if data.answer_key not in row.columns:
        if data.answer_key == DataSection.model_fields["answer_key"].default:
            return ""  # some rewards need none; those that do say so
        raise DataError(
            f"{row.where} has no column {data.answer_key!r}; {_nearest(data.answer_key, row, 'answer_key')}"
        )
    return _of_column(row, "the answer", answer_text, row.columns[data.answer_key])


def _check_needs(row: Row, data: DataSection, needs: Mapping[str, str]) -> None:
    """Refuse a row without what a reward reads: an empty completion equals an empty answer."""
    for column, reward in needs.items():
        key = data.answer_key if column == "answer" else column
        value = row.columns.get(key)
        if key not in row.columns:
            option = "answer_key" if column == "answer" else "columns"
            raise DataError(
                f"{row.where} has no column {key!r}, which the reward {reward} needs; {_nearest(key, row, option)}"
            )
        if value is None or (isinstance(value, str) and not value.strip()):
            raise DataError(
                f"{row.where}: {key} is empty, and the reward {reward} needs it; fill it in, or leave the row out. A function that can "
                "do without it gives it a default"
            )


def _nearest(key: str, row: Row, option: str) -> str:
    names = [name for name in list(row.columns)[:1000] if len(name) < 60]
    near = [name for name in _ANSWERS if name in names] if option == "answer_key" else []
    near += difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    if option == "columns":
        hint = f"rename one of them to it, such as data.columns: {{{near[0] if near else 'NAME'}: {key}}}"
    else:
        hint = (
            f"did you mean {near[0]!r}? set data.{option}={near[0]}" if near else f"name the right one in data.{option}"
        )
    return f"it has {_listed(row.columns)}; {hint}"


def _listed(columns: Mapping[str, Any]) -> str:
    listed = [str(name)[:60] for name in list(columns)[:_COLUMNS_SHOWN]]
    listed += [f"{len(columns) - _COLUMNS_SHOWN:,} more"] if len(columns) > _COLUMNS_SHOWN else []
    return ", ".join(listed) or "none"


# Tokens


def _encode(batch: list[_Rendered], tokenizer: Any) -> list[list[int]]:
    """Token ids of each row. A chat template writes the special tokens itself; plain text gets the tokenizer's own."""
    encoded: list[list[int]] = [[] for _ in batch]
    for chat in (False, True):
        places = [place for place, rendered in enumerate(batch) if (rendered.messages is not None) == chat]
        if places:
            texts = [batch[place].text for place in places]
            for place, ids in zip(places, tokenizer(texts, add_special_tokens=not chat)["input_ids"], strict=True):
                encoded[place] = ids
    return encoded


def _prompt(rendered: _Rendered, token_ids: list[int], data: DataSection, rewards: Collection[str]) -> Prompt:
    row = rendered.row
    if not token_ids:
        raise DataError(f"{row.where}: the prompt {rendered.text[:40]!r} has no tokens")
    own = {data.prompt_key, "id"}
    metadata = {key: _of_column(row, key, plain, value) for key, value in row.columns.items() if key not in own}
    if metadata.get("answer") == rendered.answer:
        del metadata["answer"]  # a number, or an answer under another name, stays as TRL's functions expect it
    if "countdown" in rewards:
        metadata = _of_column(row, "column", countdown_columns, metadata)
    if rendered.messages is not None:
        metadata["prompt_messages"] = rendered.messages  # a reward model renders them by its own template
        if isinstance(row.columns[data.prompt_key], str):
            metadata["prompt_text"] = row.columns[
                data.prompt_key
            ]  # TRL gives functions the prompt as it is in the data
    identity = row.columns.get("id")
    return Prompt(
        id=row.default_id if identity is None else _of_column(row, "the id", row_name, identity),
        token_ids=np.array(token_ids, dtype=np.int32),
        text=rendered.text,
        answer=rendered.answer,
        metadata=metadata,
    )
