"""Renders chat templates in a process with limits on time, memory and output.

A template comes with a model from the hub, so it is untrusted code. Jinja's sandbox keeps it away from files and Python internals, but
does not stop endless loops or huge strings, and Python cannot interrupt one long multiplication. The kernel can: it kills the process,
and the next request starts a new one.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rollcall.nodes.framing import Body

if TYPE_CHECKING:
    from rollcall.process.worker import Worker

LIMIT_S = 10.0  # of CPU time for one request; a thousand ordinary chats take a tenth of a second
MAX_MEMORY = 1 << 31
MAX_CHARACTERS = 1 << 26  # in total for one request
_KEPT = ("LD_LIBRARY_PATH", "TZ")  # environment variables to keep; all others may contain secrets


class TemplateError(ValueError):
    """A chat template cannot be rendered. ``place`` is the index of the conversation, if known."""

    def __init__(self, why: str, *, place: int | None = None) -> None:
        super().__init__(why)
        self.place = place


def render_chats(
    tokenizer: Any,
    conversations: Sequence[Sequence[dict[str, Any]]],
    *,
    tools: Sequence[dict[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> list[str]:
    """Render each conversation as ``tokenizer.apply_chat_template`` would."""
    from transformers import PreTrainedTokenizerBase

    options: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        texts: list[str] = []
        for chat in conversations:
            try:
                texts.append(tokenizer.apply_chat_template(list(chat), tokenize=False, **options))
            except Exception as error:  # noqa: BLE001 - a tokenizer's own code may raise anything
                raise TemplateError(str(error), place=len(texts)) from None
        return texts
    variables = {"documents": None, **options, **tokenizer.special_tokens_map}
    try:
        template = tokenizer.get_chat_template(tools=options["tools"])
    except ValueError as error:  # it has several templates, but no default
        raise TemplateError(str(error)) from None
    request = pickle.dumps((template, variables, [list(chat) for chat in conversations]))
    # All completions of a group start with the same prompt.
    return list((_texts_again if len(conversations) == 1 else _texts)(request))


_worker: Worker | None = None  # started by the first request
_lock = threading.Lock()


def _texts(request: bytes) -> list[str]:
    global _worker
    from rollcall.process.here import spawn  # imported here because the spawned process must start fast
    from rollcall.process.worker import Lost

    with _lock:
        if _worker is None:
            kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
            _worker = spawn(
                "rollcall.model.chat_template:Renderer",
                name="the chat template process",
                env=kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                answers={"render": json.loads},
            )
        try:
            answer = _worker.ask("render", request, LIMIT_S, deadline_s=30 * LIMIT_S)
        except Lost as lost:
            _worker = None
            late = lost.is_late or lost.status == -signal.SIGPROF
            raise TemplateError(f"it takes more than {LIMIT_S:g} s" if late else lost.why) from None
    if isinstance(answer, list):
        return answer
    raise TemplateError(answer["why"], place=answer["place"])


_texts_again = lru_cache(maxsize=256)(_texts)


def close() -> None:
    """Stop the process. The next request starts a new one."""
    global _worker
    if _worker is not None:
        _worker.close()
    _worker = None


def _forget() -> None:
    """Drop the worker in a forked process, because it belongs to the parent."""
    global _worker, _lock
    _worker, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


class Renderer:
    """Runs in the separate process."""

    says = Body(lambda value: json.dumps(value).encode(), json.loads)  # JSON can contain lone surrogates

    def __init__(self) -> None:
        import resource

        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        self._compiled = lru_cache(maxsize=8)(environment().from_string)

    def render(self, request: bytes, limit_s: float) -> list[str] | dict[str, Any]:
        """Return the rendered strings, or the error and the index of the conversation that caused it."""
        template, variables, conversations = pickle.loads(request)
        texts: list[str] = []
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF kills this process, even inside C code
        try:
            room = MAX_CHARACTERS
            for messages in conversations:
                text = self._compiled(template).render(messages=messages, **variables)
                room -= len(text)
                if room < 0:
                    raise ValueError(f"it writes more than {MAX_CHARACTERS:,} characters")
                texts.append(text)
        except Exception as error:  # noqa: BLE001 - a template is a program and may raise anything
            memory = f"it takes more than {MAX_MEMORY >> 30} GiB of memory" if isinstance(error, MemoryError) else ""
            return {"why": memory or str(error)[:1000] or type(error).__name__, "place": len(texts)}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return texts


def environment() -> Any:
    """Configure Jinja as transformers does for chat templates (``utils/chat_template_utils.py``, 5.19)."""
    import datetime

    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}``, which marks the model's own output."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

        def _as_it_is(self, caller: Any) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return made
