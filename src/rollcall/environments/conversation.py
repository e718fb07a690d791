"""A conversation as token ids: how it opens, and the ids of the messages that follow a sampled turn.

Nothing sampled is ever tokenised again. The next turn's prompt is the exact ids so far and, behind them, the ids of the new
messages. These come from rendering a stand-in conversation, whose assistant message is a marker: what the template writes
after the marker is what belongs after the model's own tokens.

A chat template can be extended this way only if later messages do not change how earlier ones are written.
``check_extension`` tries it before the run begins. Prompts of plain text are extended by the text itself.

In a chat, what an environment or a program says is data. Where it spells a special token, such as the end of a message, the model reads
these letters and not the token: they are cut inside it before the template sees them, and the pieces are tokenised one by one.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollcall.base.errors import ConfigError
from rollcall.base.types import Ints, Prompt
from rollcall.base.wait import warn
from rollcall.environments.protocol import EnvironmentFailed, Message
from rollcall.model.chat_template import TemplateError, render_chats
from rollcall.reward.trl import MESSAGES

_MARKERS = ("ROLLCALLFIRST", "ROLLCALLSECOND")
_THINKS = "<think>\nhm\n</think>\n\n"
_TEXTS_EXAMINED = 64
Tools = Sequence[dict[str, Any]]


class Conversations:
    """Turns messages into token ids with the tokenizer of a run."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)
        self._special = _special_tokens(tokenizer)
        self._known: OrderedDict[tuple[bytes, str], str] = OrderedDict()  # of why_not_after
        self._num_examined = 0
        self._cut = f"ROLLCALLCUT{secrets.token_hex(8)}"  # in nothing that anybody says

    def open(self, prompt: Prompt, *, added: str | None, tools: Tools) -> Ints:
        """Begin an episode: the row's prompt, with the text of the environment added to its last message."""
        messages = prompt.metadata.get(MESSAGES)
        if messages is None:
            return self._ids(prompt.text + (added or ""), special=True)
        messages = [dict(message) for message in messages]
        if added:
            last, added = messages[-1]["content"], self._as_data(added)
            messages[-1]["content"] = f"{last}{added}" if last else added
        return self._ids(self._render(messages, tools))

    def open_chat(self, messages: Sequence[dict[str, Any]], *, tools: Tools) -> Ints:
        """Begin a conversation with a program's messages. Those of the model are left as they are: templates look into them."""
        said = [message if message["role"] == "assistant" else self._data(message) for message in messages]
        return self._ids(self._render(said, tools))

    def extend(self, messages: Sequence[Message], *, is_chat: bool, tools: Tools, last_id: int) -> Ints:
        """The ids behind a turn that ended with ``last_id``: the end of the model's message, the new messages, and the beginning
        of the model's next one."""
        if is_chat:
            new = [
                {"role": one.role, "content": one.content} | ({"name": one.name} if one.name else {})
                for one in messages
            ]
            stand_in = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": _MARKERS[0]}]
            text = self._render([*stand_in, *map(self._data, new)], tools)
            text = text.partition(_MARKERS[0])[2]  # the first: an observation may hold the marker too
        else:
            text = "".join(message.content for message in messages)
        ids = self._ids(text)
        if is_chat and len(ids) and ids[0] == last_id:
            ids = ids[1:]  # the model has ended its message itself
        if not len(ids):
            raise EnvironmentFailed(
                f"the observation {text[:60]!r} has no tokens; return some text, or end the episode"
            )
        return ids

    def check_extension(self, *, tools: Tools, role: str) -> None:
        """Refuse a chat template that writes earlier messages differently once later ones follow."""
        first, second = _MARKERS
        thinks = _THINKS if "<think>" in (self.tokenizer.chat_template or "") else ""
        said = {"role": role, "content": "seen"}
        opening: list[dict[str, Any]] = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": first}]
        again = {"role": "assistant", "content": f"{thinks}{second}"}
        try:
            before = self._render([*opening, said], tools)
            after = self._render([*opening, said, again, said], tools)
        except EnvironmentFailed as error:
            raise ConfigError(
                f"the chat template cannot be used with an environment: {error}. Set model.chat_template to one that has "
                f"messages of role {role!r}"
            ) from None
        expected = f"{before}{thinks}{second}"
        if not after.startswith(expected):
            place = next((i for i, (a, b) in enumerate(zip(after, expected, strict=False)) if a != b), len(after))
            raise ConfigError(
                "the chat template cannot be extended turn by turn: with one more message it writes earlier ones differently, so "
                f"the model would be trained on other tokens than it sampled. It wrote {expected[max(place - 20, 0) : place + 40]!r} "
                f"before and {after[max(place - 20, 0) : place + 40]!r} after. Set model.chat_template to one that leaves earlier "
                "messages as they are (often a template that keeps earlier thoughts)"
            )

    def why_not_after(self, messages: Sequence[dict[str, Any]], *, tools: Tools, key: bytes) -> str:
        """Why these messages cannot follow an answer as they are; empty: they can. The template is tried once for each set of tools, which
        ``key`` stands for, and role."""
        for role in sorted({message["role"] for message in messages}):
            if (key, role) not in self._known:
                try:
                    self.check_extension(tools=tools, role=role)
                    self._known[key, role] = ""
                except ConfigError as error:
                    self._known[key, role] = str(error)
                while len(self._known) > 1000:
                    self._known.popitem(last=False)
            if why := self._known[key, role]:
                return why
        return ""

    def _render(self, messages: Sequence[dict[str, Any]], tools: Tools) -> str:
        try:
            return render_chats(self.tokenizer, [messages], tools=tools)[0]
        except TemplateError as error:
            raise EnvironmentFailed(f"the chat template refuses the messages: {error}") from None

    def _data(self, message: dict[str, Any]) -> dict[str, Any]:
        said = {name: self._as_data(message[name]) for name in ("content", "name") if name in message}
        return {**message, **said}

    def _as_data(self, text: str) -> str:
        """Cut each special token that the text spells behind its first character."""
        return self._special.sub(lambda match: f"{match[0][0]}{self._cut}{match[0][1:]}", text)

    def _ids(self, text: str, *, special: bool = False) -> Ints:
        ids: list[int] = []
        for place, piece in enumerate(text.split(self._cut)):
            begins = special and not place
            if self._backend is None:
                ids += self.tokenizer(piece, add_special_tokens=begins)["input_ids"]
            else:
                ids += self._backend.encode(piece, add_special_tokens=begins).ids
        found = np.array(ids, dtype=np.int32)
        if self._num_examined < _TEXTS_EXAMINED:
            self._num_examined += 1
            if lost := unknown_characters(text.replace(self._cut, ""), found, self.tokenizer):
                self._num_examined = _TEXTS_EXAMINED
                warn(
                    f"the tokenizer has no tokens for {', '.join(map(repr, lost[:8]))} of what the environment says "
                    f"({text[:40]!r}), so the model does not see them; use another model, or words that its tokenizer can write"
                )
        return found


def unknown_characters(text: str, token_ids: Ints, tokenizer: Any) -> list[str]:
    """Characters that the tokens of a text have lost, if they are more than a quarter of those in it."""
    there = set(text.casefold()) - set(" \t\n")
    lost = sorted(there - set(tokenizer.decode(token_ids).casefold()))
    return lost if len(lost) * 4 > len(there) else []


def _plain_backend(tokenizer: Any) -> Any:
    """The part of the tokenizer that gives the same ids in half the time; None if the tokenizer does more in Python."""
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    if not isinstance(tokenizer, plain) or (kind.__call__, kind._encode_plus) != (plain.__call__, plain._encode_plus):
        return None
    if hasattr(tokenizer, "_switch_to_input_mode"):  # of translation, where a text's language is a token
        return None
    tokenizer("")  # it turns off what its file may say of truncation and padding
    return tokenizer.backend_tokenizer


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    names = (name for name in {*tokenizer.all_special_tokens, *added} if len(name) > 1)
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")  # the last: nothing
