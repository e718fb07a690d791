"""A conversation as token IDs: its opening and the messages that follow each sampled turn.

Sampled tokens are never tokenised again. The next turn's prompt is the exact IDs so far, followed by the IDs of the new
messages. To get the new IDs, we render a stand-in conversation whose assistant message is a marker. Whatever the template writes
after the marker belongs after the model's own tokens.

This works for a chat template only if later messages do not change how it renders earlier messages.
``check_extension`` tests this before the run starts. A plain text prompt needs no template: the environment's text is tokenised and
appended.

In a chat, text from an environment or a program must not be able to act as markup. If it spells a special token, such as the end of a
message, the model must read the letters instead of the token. So we cut each special token in two before rendering, and tokenise the
pieces separately.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollcall.base.errors import ConfigError
from rollcall.base.types import Ints, Prompt
from rollcall.base.wait import warn
from rollcall.environments.protocol import EnvironmentFailed, Message
from rollcall.model.chat_template import TemplateError, render_chats
from rollcall.model.tokenizers import is_plain_fast
from rollcall.reward.trl import MESSAGES

_MARKERS = ("ROLLCALLFIRST", "ROLLCALLSECOND")
_TEXTS_EXAMINED = 64
Tools = Sequence[dict[str, Any]]


class Conversations:
    """Turns messages into token IDs with the run's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # The Rust backend produces the same IDs in half the time, unless the tokenizer does more work in Python. The second
        # condition is for translation tokenizers, which add a language token.
        self._backend: Any = None
        if is_plain_fast(tokenizer, "__call__", "_encode_plus") and not hasattr(tokenizer, "_switch_to_input_mode"):
            tokenizer("")  # turns off truncation and padding, which its file may have turned on
            self._backend = tokenizer.backend_tokenizer
        added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        special = sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        # (?!) matches nothing.
        self._special = re.compile("|".join(re.escape(name) for name in special if len(name) > 1) or r"(?!)")
        self._known: dict[tuple[bytes, str], str] = {}  # cache for why_not_after
        self._num_examined = 0
        self._cut = f"ROLLCALLCUT{secrets.token_hex(8)}"  # random, so no message contains it

    def open(self, prompt: Prompt, *, added: str | None, tools: Tools) -> Ints:
        """Begin an episode with the row's prompt, and add the environment's text to its last message."""
        messages = prompt.metadata.get(MESSAGES)
        if messages is None:
            return self._ids(prompt.text + (added or ""), special=True)
        messages = [dict(message) for message in messages]
        if added:
            last, added = messages[-1]["content"], self._as_data(added)
            messages[-1]["content"] = f"{last}{added}" if last else added
        return self._ids(self._render(messages, tools))

    def open_chat(self, messages: Sequence[dict[str, Any]], *, tools: Tools) -> Ints:
        """Begin a conversation with a program's messages. Leave the model's messages as they are, because templates parse them."""
        said = [message if message["role"] == "assistant" else self._data(message) for message in messages]
        return self._ids(self._render(said, tools))

    def extend(self, messages: Sequence[Message], *, is_chat: bool, tools: Tools, last_id: int) -> Ints:
        """Return the IDs that follow a turn ending with ``last_id``: the end of the model's message, the new messages, and the start
        of the model's next message."""
        if is_chat:
            new = [
                {"role": one.role, "content": one.content} | ({"name": one.name} if one.name else {})
                for one in messages
            ]
            stand_in = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": _MARKERS[0]}]
            text = self._render([*stand_in, *map(self._data, new)], tools)
            text = text.partition(_MARKERS[0])[2]  # the first marker, because an observation may contain the marker too
        else:
            text = "".join(message.content for message in messages)
        ids = self._ids(text)
        if is_chat and len(ids) and ids[0] == last_id:
            ids = ids[1:]  # the model already ended its message
        if not len(ids):
            raise EnvironmentFailed(
                f"the observation {text[:60]!r} has no tokens; return some text, or end the episode"
            )
        return ids

    def check_extension(self, *, tools: Tools, role: str) -> None:
        """Refuse a chat template that renders earlier messages differently after later messages are added."""
        first, second = _MARKERS
        thinks = "<think>\nhm\n</think>\n\n" if "<think>" in (self.tokenizer.chat_template or "") else ""
        said = {"role": role, "content": "seen"}
        opening: list[dict[str, Any]] = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": first}]
        again = {"role": "assistant", "content": f"{thinks}{second}"}
        try:
            before = self._render([*opening, said], tools)
            after = self._render([*opening, said, again, said], tools)
        except EnvironmentFailed as error:
            raise ConfigError(
                f"the chat template cannot be used with an environment: {error}. Set model.chat_template to a template that "
                f"supports messages of role {role!r}"
            ) from None
        expected = f"{before}{thinks}{second}"
        if not after.startswith(expected):
            place = next((i for i, (a, b) in enumerate(zip(after, expected, strict=False)) if a != b), len(after))
            raise ConfigError(
                "the chat template cannot be extended turn by turn: a new message changes how it renders earlier messages, so the model "
                f"would be trained on tokens that it did not sample. It wrote {expected[max(place - 20, 0) : place + 40]!r} "
                f"before and {after[max(place - 20, 0) : place + 40]!r} after. Set model.chat_template to one that leaves earlier "
                "messages unchanged (often one that keeps earlier thoughts)"
            )

    def why_not_after(self, messages: Sequence[dict[str, Any]], *, tools: Tools, key: bytes) -> str:
        """Return why these messages cannot be appended to an answer, or "" if they can. The template is tested once for each role and
        each set of tools. ``key`` identifies the set of tools."""
        for role in sorted({message["role"] for message in messages}):
            if (key, role) not in self._known:
                if len(self._known) >= 1000:
                    self._known.clear()
                try:
                    self.check_extension(tools=tools, role=role)
                    self._known[key, role] = ""
                except ConfigError as error:
                    self._known[key, role] = str(error)
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
        """Cut each special token in the text after its first character."""
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
                    f"the tokenizer has no tokens for {', '.join(map(repr, lost[:8]))} in the environment's text "
                    f"({text[:40]!r}), so the model does not see them; use another model, or words that its tokenizer knows"
                )
        return found


def unknown_characters(text: str, token_ids: Ints, tokenizer: Any) -> list[str]:
    """Return the characters that tokenisation lost, if they are more than a quarter of the text's distinct characters."""
    there = set(text.casefold()) - set(" \t\n")
    lost = sorted(there - set(tokenizer.decode(token_ids).casefold()))
    return lost if len(lost) * 4 > len(there) else []
