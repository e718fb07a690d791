"""Turns rows (``loop/data/rows.py``) into tokenised prompts. Every error names the file and the row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from rollcall.base.types import Prompt
from rollcall.base.words import all_of, are
from rollcall.config import DataSection
from rollcall.loop.data.columns import DataError, answer_text, check_texts, nearest, plain, row_name
from rollcall.loop.data.rows import NO_DATA, Row, Split, of_column, section_rows
from rollcall.model.chat_template import TemplateError, render_chats

NUM_ROWS = 1024
_ROWS_PER_BATCH = 1024
_CHARACTERS_PER_BATCH = 1 << 20
_FEW_CHARACTERS = 1 << 16  # a prompt up to this length is always tokenised
_OURS = ("prompt_messages", "prompt_text")  # metadata keys for prompts that a chat template rendered
_IN_TEMPLATE = " with the model's chat template"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    prompts: list[Prompt]
    num_overlong: int  # number of prompts left out because they exceed data.max_prompt_tokens
    source: str

    @property
    def with_template(self) -> str:
        """Words to add after a token count in a message. They mention the chat template, because it makes a prompt longer than its
        row."""
        return _IN_TEMPLATE if any("prompt_messages" in prompt.metadata for prompt in self.prompts) else ""


@dataclass(slots=True)
class _Asked:
    """A row that is being turned into a prompt."""

    row: Row
    text: str  # empty for a chat until it is rendered
    messages: list[dict[str, Any]] | None  # None for plain text, which needs no rendering
    answer: str
    token_ids: list[int] | None = None  # None if the text is far too long


def load_prompts(
    source: str,
    *,
    data: DataSection,
    tokenizer: Any,
    limit: int | None = None,
    split: Split = "train",
    needs: Mapping[str, str] = MappingProxyType({}),
) -> PromptSet:
    """Load the prompts from ``source``, at most ``limit``. ``split`` selects the split of a built-in task. ``needs`` maps each required
    column to the reward that reads it."""
    _check_section(data, tokenizer)
    if source == NO_DATA:
        for column, reward in needs.items():
            raise DataError(
                f"rows of {NO_DATA} have no column {column!r}, which the reward {reward} needs; use a data file, or a reward that does "
                "not need it"
            )
        return _without_data(data, tokenizer, split=split, limit=limit)
    prompts: list[Prompt] = []
    num_overlong, shortest, words = 0, math.inf, ""
    seen: dict[str, tuple[str, int]] = {}
    # Tokenising takes a second and 250 MB per million characters, and cannot be interrupted. A text is certainly too long if it exceeds
    # the token limit times the length of the longest token, times four because a token may combine a letter with its accents.
    most = max(_FEW_CHARACTERS, 4 * data.max_prompt_tokens * max(map(len, tokenizer.get_vocab())))
    for batch in _batches(_asked_rows(source, data=data, tokenizer=tokenizer, split=split, needs=needs)):
        _render(batch, tokenizer)
        _encode([asked for asked in batch if len(asked.text) <= most], tokenizer)
        for asked in batch:
            if asked.token_ids is None or len(asked.token_ids) > data.max_prompt_tokens:
                num_overlong, shortest = num_overlong + 1, min(shortest, len(asked.token_ids or ()) or math.inf)
                words = _IN_TEMPLATE if asked.messages is not None else ""
                continue
            _refuse_same_text(asked, seen)
            prompts.append(_prompt(asked, asked.token_ids, data))
            if len(prompts) == limit:
                return PromptSet(prompts=prompts, num_overlong=num_overlong, source=source)
    if not prompts and num_overlong:
        known = f"; the shortest has {shortest} tokens{words}" if shortest < math.inf else ""
        raise DataError(
            f"{source}: {all_of(num_overlong, 'prompt')} {are(num_overlong)} longer than "
            f"data.max_prompt_tokens={data.max_prompt_tokens}{known}"
        )
    if not prompts:
        raise DataError(f"{source} has no rows, but needs at least one")
    return PromptSet(prompts=prompts, num_overlong=num_overlong, source=source)


def _without_data(data: DataSection, tokenizer: Any, *, split: str, limit: int | None) -> PromptSet:
    """Build rows that contain only an index. Their tokens are never read, because the environment determines how an episode begins."""
    is_chat = data.chat if data.chat is not None else bool(tokenizer.chat_template)
    system = [{"role": "system", "content": data.system}] if data.system is not None else []
    chat = {"prompt_messages": [*system, {"role": "user", "content": ""}]} if is_chat else {}
    first = 0 if split == "train" else NUM_ROWS
    ids = np.zeros(1, dtype=np.int32)
    prompts = [
        Prompt(id=f"environment-{split}:{index}", token_ids=ids, text="", answer="", metadata={"index": index, **chat})
        for index in range(first, first + (limit or (NUM_ROWS if split == "train" else NUM_ROWS // 8)))
    ]
    return PromptSet(prompts=prompts, num_overlong=0, source=NO_DATA)


def _check_section(data: DataSection, tokenizer: Any) -> None:
    if data.template is not None and "{prompt}" not in data.template:
        raise DataError(f"data.template={data.template!r} does not contain {{prompt}}; put it where the prompt belongs")
    if data.chat and not tokenizer.chat_template:
        raise DataError(
            "data.chat=true needs a chat template, but the tokenizer has none; set model.chat_template, or data.chat=false"
        )
    if data.system is not None and tokenizer.chat_template:
        asked = [{"role": "user", "content": "a"}]
        with suppress(TemplateError):  # if the template refuses system messages, rendering a row raises later
            with_it, without = render_chats(tokenizer, [[{"role": "system", "content": data.system}, *asked], asked])
            if with_it == without:
                raise DataError(
                    "the chat template drops data.system: it renders the same text with and without it. Put the text in data.template, "
                    "or set model.chat_template to one that renders system messages"
                )


# Rendering


def _asked_rows(
    source: str, *, data: DataSection, tokenizer: Any, split: Split, needs: Mapping[str, str]
) -> Iterator[_Asked]:
    for row in section_rows(source, data=data, split=split):
        if data.prompt_key not in row.columns:
            raise DataError(
                f"{row.where} has no column {data.prompt_key!r}; {nearest(data.prompt_key, row.columns, 'prompt_key')}"
            )
        _check_needs(row, data, needs)
        messages = _messages(row, data, has_template=bool(tokenizer.chat_template))
        text = _with_template(row.columns[data.prompt_key], data) if messages is None else ""
        if messages is None and not text:
            raise DataError(f"{row.where}: the prompt is empty")
        yield _Asked(row, text, messages, _answer(row, data))


def _batches(rows: Iterable[_Asked]) -> Iterator[list[_Asked]]:
    batch: list[_Asked] = []
    room = _CHARACTERS_PER_BATCH
    for asked in rows:
        batch.append(asked)
        room -= max(len(asked.text), sum(len(message["content"]) for message in asked.messages or ()))
        if room < 0 or len(batch) == _ROWS_PER_BATCH:
            yield batch
            batch, room = [], _CHARACTERS_PER_BATCH
    if batch:
        yield batch


def _messages(row: Row, data: DataSection, *, has_template: bool) -> list[dict[str, Any]] | None:
    """Return the chat messages to render, or None if the prompt stays plain text."""
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
                f"{row.where} contains chat messages, but the tokenizer has no chat template; "
                "set model.chat_template, or write the prompt as text"
            )
    if data.system is not None and messages[0]["role"] != "system":  # a row's own system message takes precedence
        messages = [{"role": "system", "content": data.system}, *messages]
    return messages


def _checked_messages(value: Any, row: Row) -> list[dict[str, Any]]:
    wanted = 'text, or chat messages such as [{"role": "user", "content": "..."}]'
    if not isinstance(value, list) or not value:
        shown = "an empty list" if value == [] else f"{type(value).__name__} ({str(value)[:60]})"
        raise DataError(f"{row.where}: the prompt is {shown}; it must be {wanted}")
    for place, message in enumerate(value):
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise DataError(f"{row.where}: message {place} is {str(message)[:80]}; the prompt must be {wanted}")
    if value[-1]["role"] == "assistant":
        raise DataError(
            f"{row.where}: the last message is the model's own (role 'assistant'), so the prompt would contain an answer and the model "
            "would learn to repeat it; end each prompt with a message from the user"
        )
    # In Parquet, each message has the keys of all messages, with null for its missing ones.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _render(batch: list[_Asked], tokenizer: Any) -> None:
    """Render the batch's chats."""
    chats = [asked for asked in batch if asked.messages is not None]
    try:
        texts = render_chats(tokenizer, [asked.messages or [] for asked in chats]) if chats else []
    except TemplateError as error:
        first, last = (chats[0], chats[-1]) if error.place is None else (chats[error.place],) * 2
        where = first.row.where if first is last else f"{first.row.where} to {last.row.where}"
        raise DataError(f"{where}: the chat template rejects the messages: {error}") from None
    for asked, text in zip(chats, texts, strict=True):
        asked.text = text
        of_column(asked.row, "the text that the chat template renders", check_texts, text)


def _refuse_same_text(asked: _Asked, seen: dict[str, tuple[str, int]]) -> None:
    """Refuse a chat template that renders different rows to the same text. Ignores spaces and the model's messages, because templates
    trim spaces and remove thoughts from the model's messages."""
    if asked.messages is None:
        return
    asks = hash(tuple(tuple(each["content"].split()) for each in asked.messages if each["role"] != "assistant"))
    where, other = seen.setdefault(asked.text, (asked.row.where, asks))
    if other != asks:
        raise DataError(
            f"the chat template renders the same text for {where} and {asked.row.where}, although they differ. It drops "
            "their questions. Set model.chat_template to one that keeps them, or data.chat=false"
        )


def _with_template(text: str, data: DataSection) -> str:
    # Not str.format: prompts and templates are full of braces.
    return text if data.template is None else data.template.replace("{prompt}", text)


def _answer(row: Row, data: DataSection) -> str:
    if data.answer_key not in row.columns:
        if data.answer_key == DataSection.model_fields["answer_key"].default:
            return ""  # rewards that need an answer check it themselves
        raise DataError(
            f"{row.where} has no column {data.answer_key!r}; {nearest(data.answer_key, row.columns, 'answer_key')}"
        )
    return of_column(row, "the answer", answer_text, row.columns[data.answer_key])


def _check_needs(row: Row, data: DataSection, needs: Mapping[str, str]) -> None:
    """Refuse a row that lacks a column that a reward reads, because an empty completion would match an empty answer."""
    for column, reward in needs.items():
        key = data.answer_key if column == "answer" else column
        if key not in row.columns:
            hint = nearest(key, row.columns, "answer_key" if column == "answer" else "columns")
            raise DataError(f"{row.where} has no column {key!r}, which the reward {reward} needs; {hint}")
        value = row.columns[key]
        shown = isinstance(value, str) and any(char.isprintable() and not char.isspace() for char in value)
        if value is None or (isinstance(value, str) and not shown):
            raise DataError(
                f"{row.where}: {key} is empty, but the reward {reward} needs it; fill it in, or leave such rows out. If a function can "
                "do without it, give the parameter a default"
            )


# Tokens


def _encode(batch: list[_Asked], tokenizer: Any) -> None:
    """Tokenise the batch. Plain text gets the tokenizer's special tokens; a chat template has already written its own."""
    for is_chat in (False, True):
        some = [asked for asked in batch if (asked.messages is not None) == is_chat]
        if some:
            try:
                encoded = tokenizer([asked.text for asked in some], add_special_tokens=not is_chat)["input_ids"]
            except Exception as error:  # the tokenizers library raises nothing more specific
                raise DataError(
                    f"the tokenizer cannot encode the prompts from {some[0].row.where} on: {error}; check its tokenizer.json"
                ) from error
            for asked, ids in zip(some, encoded, strict=True):
                asked.token_ids = ids


def _prompt(asked: _Asked, token_ids: list[int], data: DataSection) -> Prompt:
    row = asked.row
    if not token_ids:
        raise DataError(f"{row.where}: the prompt {asked.text[:40]!r} has no tokens")
    own = {data.prompt_key, "id"}
    metadata = {key: of_column(row, key, plain, value) for key, value in row.columns.items() if key not in own}
    if metadata.get("answer") == asked.answer:
        del metadata["answer"]  # a number, or an answer under another name, is kept because TRL's functions expect it
    for name in _OURS:
        if name in metadata:
            raise DataError(
                f"{row.where} has a column {name!r}, a name that Rollcall reserves; rename the column, for example "
                f"with data.columns: {{{name}: own_{name}}}"
            )
    if asked.messages is not None:
        metadata["prompt_messages"] = asked.messages  # a reward model renders them with its own template
        if isinstance(given := row.columns[data.prompt_key], str):
            metadata["prompt_text"] = given  # TRL passes the unrendered prompt to functions
    identity = row.columns.get("id")
    return Prompt(
        id=row.default_id if identity is None else of_column(row, "the id", row_name, identity),
        token_ids=np.array(token_ids, dtype=np.int32),
        text=asked.text,
        answer=asked.answer,
        metadata=metadata,
    )
