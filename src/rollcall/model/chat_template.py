"""Chat templates are rendered in a process with limits on time, memory and output.

A template comes with a model from a hub, so it is a program by a stranger. Jinja's sandbox keeps it from files and from Python's
insides, but not from endless loops and huge texts, and Python cannot interrupt one long multiplication. The kernel can: it ends the
process, and the next request starts another. The process imports Jinja and nothing of Rollcall (this module as a script).
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import IO, Any

LIMIT_S = 10.0  # of CPU time for one request; a thousand ordinary chats take a tenth of a second
MAX_MEMORY = 1 << 31
MAX_CHARACTERS = 1 << 26  # of all texts of a request
_LENGTH = struct.Struct("<Q")
_KEPT = ("LD_LIBRARY_PATH", "TZ")  # of the environment; other variables may hold secrets


class TemplateError(ValueError):
    """A chat template cannot be rendered. ``place`` says for which conversation, if that is known."""

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
    """The text of each conversation, as ``tokenizer.apply_chat_template`` writes it."""
    from transformers import PreTrainedTokenizerBase

    options: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return [_by_itself(tokenizer, place, chat, options) for place, chat in enumerate(conversations)]
    variables = {"documents": None, **options, **tokenizer.special_tokens_map}
    try:
        template = tokenizer.get_chat_template(tools=options["tools"])
    except ValueError as error:  # it has several, and none of them is the default
        raise TemplateError(str(error)) from None
    request = pickle.dumps((template, variables, [list(chat) for chat in conversations]))
    # All completions of a group open with the same text.
    return list((_texts_again if len(conversations) == 1 else _texts)(request))


def _by_itself(tokenizer: Any, place: int, chat: Sequence[dict[str, Any]], options: dict[str, Any]) -> str:
    """Render with a tokenizer that has its own code for it."""
    try:
        return tokenizer.apply_chat_template(list(chat), tokenize=False, **options)
    except Exception as error:  # noqa: BLE001 - it may raise anything
        raise TemplateError(str(error), place=place) from None


def _texts(request: bytes) -> list[str]:
    answer = json.loads(_renderer.ask(request))
    if isinstance(answer, list):
        return answer
    raise TemplateError(answer["why"], place=answer["place"])


_texts_again = lru_cache(maxsize=256)(_texts)


class _Renderer:
    """The process, from the first request until this process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> bytes:
        with self._lock:
            self._process = process = self._process or _start()
            try:
                assert process.stdin is not None and process.stdout is not None
                unsent = memoryview(_LENGTH.pack(len(request)) + request)
                while unsent:
                    unsent = unsent[process.stdin.write(unsent) :]
                return _read(process.stdout)
            except (EOFError, BrokenPipeError):
                status = process.wait()
                self.close()
                late = status == -signal.SIGPROF
                raise TemplateError(
                    f"it takes more than {LIMIT_S:g} s" if late else f"its process ended with status {status}"
                ) from None
            except BaseException:  # Ctrl-C: the answer would be taken for the next one
                self.close()
                raise

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _start() -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", __file__, str(LIMIT_S)],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C is for this process
    )


def _read(source: IO[bytes]) -> bytes:
    """One message; EOFError: the other process has ended."""
    (size,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    return _exactly(source, size)


def _exactly(source: IO[bytes], size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        if not (data := source.read(min(size - len(found), 1 << 20))):
            raise EOFError
        found += data
    return bytes(found)


def _forget() -> None:
    """Drop the renderer in a forked process: it is the parent's."""
    global _renderer
    if _renderer._process is not None:
        _renderer._process.returncode = 0  # this process does not wait for it
    _renderer = _Renderer()


_renderer = _Renderer()
os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _renderer.close())


# In the process


def _serve(source: IO[bytes], sink: IO[bytes], *, limit_s: float) -> None:
    import resource

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    compiled = lru_cache(maxsize=8)(environment().from_string)
    while True:
        try:
            template, variables, conversations = pickle.loads(_read(source))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends this process, in C code too
        texts: list[str] = []
        try:
            room = MAX_CHARACTERS
            for messages in conversations:
                text = compiled(template).render(messages=messages, **variables)
                room -= len(text)
                if room < 0:
                    raise ValueError(f"it writes more than {MAX_CHARACTERS:,} characters")
                texts.append(text)
            answer: Any = texts
        except Exception as error:  # noqa: BLE001 - templates are programs and raise what they like
            memory = f"it takes more than {MAX_MEMORY >> 30} GiB of memory" if isinstance(error, MemoryError) else ""
            answer = {"why": memory or str(error)[:1000] or type(error).__name__, "place": len(texts)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = json.dumps(answer).encode()
        sink.write(_LENGTH.pack(len(data)) + data)
        sink.flush()


def environment() -> Any:
    """Jinja as transformers sets it up for chat templates (``utils/chat_template_utils.py``, 5.19)."""
    import datetime

    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}``, which marks what the model has written."""

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


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer, limit_s=float(sys.argv[1]))
