"""Serves a sampler over the OpenAI API: an ASGI app and the thread that runs it.

    POST /v1/chat/completions    messages in, a message out; tools, streaming, token ids, log-probs
    POST /v1/completions         text or token ids in, text out
    POST /inference/v1/generate  token ids in and out
    GET  /v1/models              the served model, with `max_model_len`
    POST /v1/reward              an episode's reward, reported by its program

Every request needs a key. Each key belongs to one caller with its own histories: an episode, or a user of `rollcall serve`. The body is
read only if the key is valid, up to ``MAX_BODY_BYTES``.

The server is uvicorn in a thread with its own event loop. An engine in this process blocks the run's event loop while it decodes a
chunk of tokens. Meanwhile, this thread parses, renders and tokenises requests, so they can all join the next chunk. For each
completion, the two event loops communicate only twice: once for the request and once for the result.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np

from rollcall.base.errors import ConfigError
from rollcall.base.types import Completion, FinishReason, Ints
from rollcall.engine.protocol import Sampling
from rollcall.environments.answers import Answered, Choice, chat_body, events_of, generate_body, text_body, to_bytes
from rollcall.environments.calls import Call, CallFormat, format_of, parse_calls
from rollcall.environments.histories import Asked, Histories
from rollcall.environments.protocol import EnvironmentFailed, SampleTurn, add_metrics
from rollcall.environments.wire import ChatRequest, GenerateRequest, Refused, TextRequest, Wanted, Worth, read
from rollcall.nodes.http_server import http_server, listen

MAX_BODY_BYTES = 16 << 20  # a million token IDs take up half of it
READ_TIMEOUT_S = 60.0  # time limit for receiving a request's body
LOOPBACK = "127.0.0.1"
T = TypeVar("T")

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Reply = bytes | Iterator[bytes]  # a JSON object, or stream events


class Endpoint:
    """``callers`` maps keys to callers and is looked up on every request. ``name`` is the name of the served model."""

    def __init__(
        self, callers: Mapping[str, Caller], *, name: str, max_model_len: int, vocabulary: int, tokenizer: Any
    ) -> None:
        self._callers, self._name, self._max_model_len, self._vocabulary = callers, name, max_model_len, vocabulary
        self._tokenizer = tokenizer
        self._most_chars = max_model_len * max(map(len, tokenizer.get_vocab()))
        self._call_format: CallFormat
        try:
            self._call_format = format_of(tokenizer.chat_template)
        except ConfigError:  # unknown, so use the most common format; calls in other formats then stay text
            self._call_format = "hermes"
        self._posts: dict[str, Callable[[Caller, bytes], Coroutine[Any, Any, Reply]]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._text,
            "/inference/v1/generate": self._generate,
            "/v1/reward": self._reward,
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server does not support lifespan events or websockets"
        caller: Caller | None = None
        status, closes = 200, False
        try:
            caller = self._caller_of(scope)
            reply = await self._reply(caller, scope, receive)
        except _Left:
            return
        except Exception as error:
            if not isinstance(error, Refused):
                logging.getLogger("rollcall").exception("the endpoint failed while answering a request")
                why = "the server failed to answer this request; its log has the reason"
                error = Refused(500, why, code="internal_error")
            elif caller is not None:
                caller.num_refused += 1
            if caller is not None:
                caller.last_error = str(error)
            reply, status = to_bytes(error.body()), error.status
            # If the body was not read, this connection cannot take another request.
            closes = status in (401, 408, 413, 500)
        await _send(reply, send, status=status, closes=closes)

    # Callers and routing

    def _caller_of(self, scope: Message) -> Caller:
        """Return the key's owner. Refuse a request without a key, with two keys or with an unknown key."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = given[0].decode("latin-1").partition(" ") if len(given) == 1 else ("", "", "")
        caller = self._callers.get(key.strip()) if kind.lower() == "bearer" else None
        if caller is None:
            raise Refused(
                401,
                "send a valid key in one header `Authorization: Bearer KEY`; an episode's key expires with the episode",
                code="invalid_api_key",
            )
        return caller

    async def _reply(self, caller: Caller, scope: Message, receive: Receive) -> Reply:
        method, path = scope["method"], scope["path"]
        if path == "/v1/models" and method == "GET":
            model = {"id": self._name, "object": "model", "created": 0, "owned_by": "rollcall"}
            return to_bytes({"object": "list", "data": [model | {"max_model_len": self._max_model_len}]})
        if (work := self._posts.get(path)) is None or (path == "/v1/reward" and not caller.takes_reward):
            raise Refused(404, f"{method} {path[:200]} is not served", code="not_found")
        if method != "POST":
            raise Refused(405, f"{path} accepts only POST", code="method_not_allowed")
        body = await _body(scope, receive)
        caller.num_requests += path != "/v1/reward"
        return await self._unless_left(caller, work(caller, body), receive)

    async def _unless_left(self, caller: Caller, work: Coroutine[Any, Any, Reply], receive: Receive) -> Reply:
        """Await the reply. Cancel the work if the client hangs up or the key expires first."""
        task = asyncio.current_task()
        assert task is not None

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.create_task(until_gone())
        gone.add_done_callback(lambda done: None if done.cancelled() else task.cancel())
        caller.tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if gone.done():
                raise _Left from None
            if not caller.is_ended:
                raise  # the server is stopping
            task.uncancel()
            raise Refused(503, "the episode has ended", code="episode_over") from None
        except (EnvironmentFailed, RecursionError, ValueError) as error:
            too_deep = "the request has lists or objects that are nested too deeply"
            why = too_deep if isinstance(error, RecursionError) else str(error)
            raise Refused(400, why, code="invalid_value") from None
        finally:
            caller.tasks.discard(task)
            gone.cancel()

    # Requests

    async def _chat(self, caller: Caller, body: bytes) -> Reply:
        request = read(ChatRequest, body)
        self._check_model(caller, request.model)
        if not self._tokenizer.chat_template:
            raise Refused(
                400,
                "the model has no chat template, so it cannot read messages; use /v1/completions, or set model.chat_template",
                code="no_chat_template",
            )
        messages = request.conversation()
        if len(messages) > self._max_model_len:
            raise self._too_long(f"the request has {len(messages):,} messages")
        # Count the arguments of calls as the template may render them, including names and keys.
        others = [{key: value for key, value in message.items() if key != "content"} for message in messages]
        written = [
            json.dumps(one, ensure_ascii=False) for one in (request.tools, *(one for one in others if len(one) > 1))
        ]
        self._refuse_endless([*(message["content"] for message in messages), *written])
        if request.finds_calls and self._call_format == "text":  # the template would silently leave the tools out
            raise Refused(
                400,
                "the model's chat template does not support tools, so the model would not see them; leave tools out and describe in a "
                "message what the model can do, or set model.chat_template",
                param="tools",
                code="no_tools",
            )
        asked = caller.histories.chat(messages, tools=request.tools)
        return _reply_to(request, chat_body(await self._sample(caller, [asked], request, request), request))

    async def _text(self, caller: Caller, body: bytes) -> Reply:
        request = read(TextRequest, body)
        self._check_model(caller, request.model)
        for prompt in request.prompt:
            self._refuse_endless([prompt] if isinstance(prompt, str) else [])
        asked = [
            caller.histories.plain(prompt) if isinstance(prompt, str) else self._by_ids(caller, prompt)
            for prompt in request.prompt
        ]
        return _reply_to(request, text_body(await self._sample(caller, asked, request, None), request))

    async def _generate(self, caller: Caller, body: bytes) -> Reply:
        request = read(GenerateRequest, body)
        self._check_model(caller, request.model)
        asked = [self._by_ids(caller, request.token_ids)]
        return to_bytes(generate_body(await self._sample(caller, asked, request.sampling_params, None), request))

    async def _reward(self, caller: Caller, body: bytes) -> Reply:
        take_reward(caller, body)
        return to_bytes({"reward": caller.reward})

    def _check_model(self, caller: Caller, name: str | None) -> None:
        if name is not None and caller.rules.model not in (None, name):
            why = f"the model {name[:200]!r} is not served; this endpoint serves {caller.rules.model!r}"
            raise Refused(404, why, code="model_not_found", param="model")

    def _too_long(self, what: str) -> Refused:
        text = f"This model's maximum context length is {self._max_model_len} tokens, and {what}; send fewer"
        return Refused(400, text, code="context_length_exceeded", param="messages")

    def _refuse_endless(self, texts: Sequence[str]) -> None:
        """Refuse text that is too long for any tokenisation. Tokenising it could take minutes and would block all other requests."""
        if (num_chars := sum(map(len, texts))) > self._most_chars:
            raise self._too_long(f"the request has {num_chars:,} characters, which cannot fit")

    def _by_ids(self, caller: Caller, given: list[int]) -> Asked:
        asked = caller.histories.ids(np.array(given, dtype=np.int32))
        # Sampled IDs may be outside the tokenizer's range, because some models have more outputs than tokens.
        ids = asked.prompt_ids if asked.behind is None else asked.added
        if len(ids) and (largest := int(ids.max())) >= self._vocabulary:
            why = f"token id {largest} is unknown: the model has {self._vocabulary} tokens; send ids from its tokenizer"
            raise Refused(400, why, code="invalid_value", param="prompt")
        return asked

    # Sampling

    async def _sample(self, caller: Caller, asked: list[Asked], wanted: Wanted, chat: ChatRequest | None) -> Answered:
        """Sample ``wanted.n`` completions for each prompt concurrently."""
        turns: list[asyncio.Future[Completion]] = []
        try:
            # Check before admission, because a refused request does not count as a turn.
            samplings: list[Sampling] = []
            for one in asked:
                if (room := self._max_model_len - len(one.prompt_ids)) < 1:
                    raise self._too_long(f"the prompt already has {len(one.prompt_ids)}")
                samplings.append(caller.rules.sampling(wanted, room=room, num_added=len(one.added)))
            caller.rules.admit(len(asked) * wanted.n)
            sessions: list[str] = []
            for one, sampling in zip(asked, samplings, strict=True):
                for place in range(wanted.n):
                    sessions.append(one.session if place == 0 else caller.histories.new_session())
                    seed = caller.rules.seed(wanted, len(turns))
                    turn = caller.sample(one.prompt_ids, seed=seed, sampling=sampling, session=sessions[-1])
                    turns.append(asyncio.ensure_future(turn))
            completions = await asyncio.gather(*turns)
        except BaseException:
            for turn in turns:  # the first failure cancels the other turns
                turn.cancel()
            for one in asked:
                caller.histories.give_up(one)
            raise
        choices: list[Choice] = []
        for index, (completion, session) in enumerate(zip(completions, sessions, strict=True)):
            content, calls = completion.text, ()
            if completion.finish is FinishReason.STOP:  # the API does not return the stop string
                content = content[: min((at for stop in wanted.stop if (at := content.find(stop)) >= 0), default=None)]
            if chat is not None and chat.finds_calls:
                content, calls = self._find_calls(content)
            place = index // wanted.n
            choice = Choice(index=index, prompt=place, completion=completion, content=content, calls=calls)
            message = choice.message(as_text=False) if chat is not None else None
            caller.histories.note(asked[place], completion, session=session, message=message, calls=calls)
            choices.append(choice)
        prompts = tuple(one.prompt_ids for one in asked)
        return Answered(model=self._name, prompts=prompts, choices=tuple(choices), tokenizer=self._tokenizer)

    def _find_calls(self, text: str) -> tuple[str, tuple[Call, ...]]:
        """Split text into content and calls. If any call cannot be parsed, everything stays text."""
        found = parse_calls(text, call_format=self._call_format, tools={})  # only the format `text` needs tool names
        if not found or any(call.error for call in found):
            return text, ()
        before = text.partition("<tool_call>")[0].rstrip() if self._call_format == "hermes" else ""
        return before, tuple(replace(call, id=f"call_{secrets.token_hex(12)}") for call in found)


def _reply_to(request: ChatRequest | TextRequest, body: dict[str, Any]) -> Reply:
    return events_of(body, has_usage=request.stream_options.include_usage) if request.stream else to_bytes(body)


def take_reward(caller: Caller, body: bytes) -> None:
    """Store the reward that a program reports. A later report replaces an earlier one."""
    worth = read(Worth, body)
    caller.reward = worth.reward
    add_metrics(caller.metrics, worth.metrics or {})


class _Left(Exception):  # noqa: N818 - an outcome
    """The client hung up."""


# Bytes


async def _body(scope: Message, receive: Receive) -> bytes:
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    too_long = Refused(413, f"the body has more than {MAX_BODY_BYTES >> 20} MiB; send less", code="body_too_long")
    if announced.isdigit() and int(announced[:20]) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            while True:
                if (message := await receive())["type"] == "http.disconnect":
                    raise _Left
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise too_long
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {READ_TIMEOUT_S:g} s", code="too_slow") from None


async def _send(reply: Reply, send: Send, *, status: int, closes: bool) -> None:
    body, kind = (reply, b"application/json") if isinstance(reply, bytes) else (b"", b"text/event-stream")
    headers = [(b"content-type", kind), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
    if isinstance(reply, bytes):
        headers.append((b"content-length", str(len(body)).encode()))
    if closes:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for event in () if isinstance(reply, bytes) else reply:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": body})


# The thread


def refuse_without_packages() -> None:
    if find_spec("uvicorn") is None:
        raise ValueError("the endpoint needs uvicorn, which is not installed; run: pip install 'rollcall-rl[view]'")


class EndpointServer:
    """Serves an app in a thread, starting when it is created. Coroutines that use the app's state must run in its loop (``run``)."""

    def __init__(self, app: Any, *, host: str = LOOPBACK, listener: socket.socket | None = None) -> None:
        refuse_without_packages()
        self._socket = listener or listen(host, 0)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._server = http_server(app)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="endpoint", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in this server's loop. May be called from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """End open requests. The caller must first stop everything else in the loop."""
        self._server.should_exit = True
        self._thread.join(10.0)

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._server.serve(sockets=[self._socket]))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self._socket.close()
            self.loop.close()


def in_loop(sample: SampleTurn, loop: asyncio.AbstractEventLoop) -> SampleTurn:
    """Make ``sample``, which belongs to ``loop``, callable from a different loop."""

    async def crossing(prompt_ids: Ints, /, **given: Any) -> Completion:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sample(prompt_ids, **given), loop))

    return crossing


@dataclass(slots=True, kw_only=True, eq=False)
class Caller:
    rules: Open
    histories: Histories
    sample: SampleTurn
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # the open requests
    num_requests: int = 0
    num_refused: int = 0
    reward: float | None = None  # reported by the program
    metrics: dict[str, float] = field(default_factory=dict)
    takes_reward: bool = False
    last_error: str = ""  # of a request that was refused, or that failed in the server
    is_ended: bool = False

    async def end_requests(self) -> None:
        """Refuse the open requests, because the episode has ended."""
        self.is_ended = True
        for task in (tasks := list(self.tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@dataclass(slots=True, kw_only=True)
class Open:
    """Decides which of a caller's requests are allowed, and refuses the others by raising ``Refused``. This class lets each request
    choose its sampling parameters. ``default`` supplies the missing values."""

    model: str | None  # the model name that requests may use; None allows any name
    default: Sampling
    is_stopping: bool = False

    def sampling(self, wanted: Wanted, *, room: int, num_added: int) -> Sampling:
        """``room``: how many tokens fit after the prompt. ``num_added``: how many of the prompt's tokens follow the answer that it extends."""
        default = self.default
        return Sampling(
            temperature=default.temperature if wanted.temperature is None else wanted.temperature,
            top_p=default.top_p if wanted.top_p is None else wanted.top_p,
            top_k=default.top_k if wanted.top_k is None else wanted.top_k,
            max_tokens=min(wanted.token_limit or room, room),
            stop_token_ids=tuple(dict.fromkeys((*default.stop_token_ids, *wanted.stop_token_ids))),
            stop_strings=(*default.stop_strings, *wanted.stop),
        )

    def admit(self, num_choices: int) -> None:
        if self.is_stopping:
            raise Refused(503, "this server is stopping", code="stopping")

    def seed(self, wanted: Wanted, place: int) -> int:
        if wanted.seed is None:
            return secrets.randbits(64) - (1 << 63)
        return (wanted.seed + place + (1 << 63)) % (1 << 64) - (1 << 63)
