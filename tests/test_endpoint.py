"""The endpoint with the official client: chat, tools, streaming, token ids, errors; and with clients that mean harm."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import endpoints
import numpy as np
import openai
import pytest
from debugged import wait_for
from endpoints import NAME, Standing, Writer, standing
from pydantic import ValidationError

from rollcall.base.types import Completion
from rollcall.environments.wire import ChatRequest, GenerateRequest, TextRequest, Worth

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def said(prompt: str) -> str:
    """The model of these tests: it calls a tool once, and otherwise says how long its prompt was."""
    if "[tools" in prompt and "[tool]" not in prompt:
        return f"let me see\n{CALL}"
    return f"{len(prompt)} characters"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return endpoints.chat_tokenizer()


@pytest.fixture
def writer(tokenizer: Any) -> Writer:
    return Writer(tokenizer=tokenizer, says=said)


@pytest.fixture
def stands(writer: Writer, tokenizer: Any) -> Iterator[Standing]:
    with standing(writer, tokenizer=tokenizer) as one:
        yield one


def chat(client: Any, text: str = "hello", **options: Any) -> Any:
    return client.chat.completions.create(**{"model": NAME, "messages": [{"role": "user", "content": text}], **options})


def test_a_chat_answers_with_text_usage_and_reason(stands: Standing) -> None:
    answer = chat(stands.client(), max_tokens=100)
    prompt = "[user]hello<eos>[assistant]"
    assert answer.choices[0].message.content == f"{len(prompt)} characters"
    assert answer.choices[0].finish_reason == "stop" and answer.model == NAME
    assert answer.usage.prompt_tokens == len(prompt) - len("<eos>") + 1
    assert answer.usage.completion_tokens == len("27 characters") + 1


def test_a_chat_that_goes_on_is_the_exact_ids_so_far_and_the_new_message(stands: Standing, writer: Writer) -> None:
    client = stands.client()
    ids: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
    first = chat(client, **ids)
    messages = [
        {"role": "user", "content": "hello"},
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "again"},
    ]
    second = chat(client, messages=messages, **ids)
    before = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(before)] == before == writer.prompts[1][: len(before)]
    new = writer.tokenizer.decode(second.prompt_token_ids[len(before) :])
    assert new == "[user]again<eos>[assistant]"
    assert writer.sessions[0] == writer.sessions[1]


def test_a_tool_call_goes_out_and_its_result_comes_back(stands: Standing, writer: Writer) -> None:
    client = stands.client()
    first = chat(client, tools=TOOLS, tool_choice="auto")
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "let me see"
    call = choice.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    messages = [
        {"role": "user", "content": "hello"},
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    second = chat(client, messages=messages, tools=TOOLS)
    assert second.choices[0].message.content.endswith("characters")
    assert CALL in writer.tokenizer.decode(writer.prompts[1]) and writer.sessions[0] == writer.sessions[1]


def test_without_tool_choice_a_call_stays_text(stands: Standing) -> None:
    answer = chat(stands.client(), tools=TOOLS, tool_choice="none")
    assert CALL in answer.choices[0].message.content and answer.choices[0].message.tool_calls is None


def test_tools_that_the_chat_template_would_leave_out_are_refused(writer: Writer) -> None:
    tokenizer = endpoints.chat_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    with standing(writer, tokenizer=tokenizer) as stands:
        with pytest.raises(openai.BadRequestError, match="chat template does not support tools"):
            chat(stands.client(), tools=TOOLS)
        assert chat(stands.client(), tools=TOOLS, tool_choice="none").choices[0].message.content


def test_a_stream_has_the_text_the_reason_and_the_usage(stands: Standing) -> None:
    whole = chat(stands.client())
    with chat(stands.client(), stream=True, stream_options={"include_usage": True}) as stream:
        parts = list(stream)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "stop"
    assert parts[-1].usage == whole.usage and not parts[-1].choices


def test_a_stream_has_tool_calls_too(stands: Standing) -> None:
    parts = list(chat(stands.client(), tools=TOOLS, stream=True))
    calls = [call for part in parts for call in part.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls] == ["add"]


def test_log_probs_are_those_of_the_sampled_tokens(stands: Standing) -> None:
    answer = chat(stands.client(), logprobs=True, top_logprobs=0)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content + "<eos>"
    assert content[0].logprob == pytest.approx(-0.5) and len(content) == answer.usage.completion_tokens


def test_several_choices_have_seeds_of_their_own(stands: Standing, writer: Writer) -> None:
    answer = chat(stands.client(), n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and sorted(writer.seeds) == [7, 8, 9]


def test_a_request_says_how_it_is_sampled(stands: Standing, writer: Writer) -> None:
    answer = chat(stands.client(), temperature=0.3, top_p=0.5, max_completion_tokens=4, stop=["x"])
    asked = writer.asked[0]
    assert (asked.temperature, asked.top_p, asked.max_tokens, asked.stop_strings) == (0.3, 0.5, 4, ("x",))
    assert answer.choices[0].finish_reason == "length"


def test_completions_take_text_and_ids(stands: Standing, writer: Writer) -> None:
    client = stands.client()
    text = client.completions.create(
        model=NAME, prompt="abc", max_tokens=50, logprobs=0, extra_body={"return_token_ids": True}
    )
    ids = client.completions.create(model=NAME, prompt=[10, 11, 12], max_tokens=50)
    several = client.completions.create(model=NAME, prompt=["a", "bc"], max_tokens=50, n=2)
    assert text.choices[0].text == ids.choices[0].text == "3 characters"
    assert text.choices[0].prompt_token_ids == writer.prompts[0] and len(text.choices[0].logprobs.tokens) == 13
    assert [choice.text[0] for choice in several.choices] == ["1", "1", "2", "2"]


def test_text_that_goes_on_from_an_answer_is_not_tokenised_again(stands: Standing, writer: Writer) -> None:
    client = stands.client()
    cut = client.completions.create(model=NAME, prompt="abc", max_tokens=5, extra_body={"return_token_ids": True})
    client.completions.create(model=NAME, prompt="abc" + cut.choices[0].text + " more", max_tokens=5)
    assert writer.prompts[1][: 3 + 5] == writer.prompts[0] + cut.choices[0].token_ids


def test_generate_has_token_ids_in_and_out(stands: Standing, writer: Writer) -> None:
    body = {
        "model": NAME, "token_ids": [20, 21], "cache_salt": "x", "priority": 0,
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "logprobs": 1, "seed": 3},
    }  # fmt: skip
    client = stands.client(base_url=stands.server.address)
    answer = client.post("/inference/v1/generate", body=body, cast_to=object)
    choice = answer["choices"][0]
    assert writer.prompts[0] == [20, 21] and choice["finish_reason"] == "length"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{id}" for id in choice["token_ids"]
    ]
    again = client.post(
        "/inference/v1/generate", body={**body, "token_ids": [20, 21, *choice["token_ids"], 30]}, cast_to=object
    )
    assert again["choices"] and writer.sessions[0] == writer.sessions[1]


def test_models_say_how_long_a_context_is(stands: Standing) -> None:
    (model,) = stands.client().models.list().data
    assert (model.id, model.max_model_len) == (NAME, endpoints.POSITIONS)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"extra_body": {"guided_regex": "a*"}}, "guided_regex"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"stop": [""]}, "stop[0]"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5, "max_completion_tokens": 9}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": "no"}}, "stream_options.include_usage"),
        ({"stream_options": {"every": 2}}, "stream_options.every"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(stands: Standing, options: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(stands.client(), **options)
    assert refused.value.param == named and named in str(refused.value)


def test_a_long_list_of_rubbish_is_one_mistake() -> None:
    message = {"role": "user", "content": "x"}
    for kind, body in (
        (ChatRequest, {"messages": [1] * 1000}),
        (ChatRequest, {"messages": [message], "tools": [1] * 1000}),
        (ChatRequest, {"messages": [message], "stop": [1] * 1000}),
        (ChatRequest, {"messages": [message], "stop_token_ids": ["x"] * 1000}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * 1000}]}),
        (TextRequest, {"prompt": [[]] * 200}),
        (GenerateRequest, {"token_ids": ["x"] * 1000}),
        (Worth, {"reward": 1, "metrics": dict.fromkeys(map(str, range(1000)), "x")}),
    ):
        with pytest.raises(ValidationError) as refused:
            kind.model_validate(body)
        assert refused.value.error_count() == 1, body


def test_what_asks_for_nothing_is_accepted(stands: Standing) -> None:
    answer = chat(
        stands.client(), frequency_penalty=0, presence_penalty=0.0, logit_bias={}, user="me", store=False,
        response_format={"type": "text"}, parallel_tool_calls=True, metadata={"a": "b"}, top_logprobs=None,
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"


def test_a_wrong_key_model_and_address_are_refused(stands: Standing) -> None:
    with pytest.raises(openai.AuthenticationError):
        chat(stands.client(api_key="not-the-key"))
    with pytest.raises(openai.NotFoundError, match=NAME):
        chat(stands.client(), model="other")
    with pytest.raises(openai.NotFoundError):
        stands.client().embeddings.create(model=NAME, input="x")
    stands.rules.is_stopping = True
    with pytest.raises(openai.InternalServerError) as stopping:
        chat(stands.client())
    assert stopping.value.status_code == 503


def test_a_context_that_is_too_long_is_refused_with_the_numbers(writer: Writer, tokenizer: Any) -> None:
    with standing(writer, tokenizer=tokenizer, positions=64) as short:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens.* 118") as refused:
            chat(short.client(), "x" * 100)
        assert refused.value.code == "context_length_exceeded"
        for ask in (chat, lambda client, text: client.completions.create(model=NAME, prompt=text)):
            with pytest.raises(openai.BadRequestError, match="10,00. characters, which cannot fit"):
                ask(short.client(), "x" * 10_000)
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "x" * 10_000}}
        for messages, words in (
            ([{"role": "user", "content": ""}] * 65, "65 messages; send fewer"),
            ([{"role": "assistant", "content": "", "tool_calls": [call]}], "10,1.. characters, which cannot fit"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                short.client().chat.completions.create(model=NAME, messages=messages)  # type: ignore[arg-type]
        chat(short.client(), "x" * 20, max_tokens=1000)
    assert writer.asked[-1].max_tokens == 64 - 38


@pytest.mark.slow
def test_64_conversations_at_once_are_each_their_own(stands: Standing, writer: Writer) -> None:
    client = stands.client()

    def talk(number: int) -> None:
        messages: list[Any] = [{"role": "user", "content": f"I am {number}"}]
        for turn in range(3):
            answer = chat(client, messages=messages).choices[0].message
            messages += [answer, {"role": "user", "content": f"{number} in turn {turn}"}]

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(talk, range(64)))
    assert len(writer.sessions) == 64 * 3 and len(set(writer.sessions)) == 64


def test_a_client_that_hangs_up_frees_its_work(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.nodes.http_server.LOOK_S", 0.05)
    slow = Writer(tokenizer=tokenizer, says=said, delay_s=600)
    with standing(slow, tokenizer=tokenizer) as one:
        with pytest.raises(openai.APITimeoutError):
            chat(one.client(timeout=0.5))
        for _ in range(600):
            if slow.num_left:
                break
            one.client().models.list()
        assert slow.num_left == 1


def test_a_client_that_sends_no_more_gets_its_answer(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.nodes.http_server.LOOK_S", 0.05)
    with standing(Writer(tokenizer=tokenizer, says=said, delay_s=0.2), tokenizer=tokenizer) as one:
        body = b'{"messages": [{"role": "user", "content": "hello"}]}'
        with socket.create_connection(("127.0.0.1", one.server.port), timeout=60) as line:
            line.sendall(request(one, f"{POST}\nContent-Length: {len(body)}", body))
            line.shutdown(socket.SHUT_WR)
            answer = http.client.HTTPResponse(line)  # it passes over interim answers
            answer.begin()
            assert answer.status == 200 and b"characters" in answer.read()
            assert line.recv(1) == b"", "the server closes what has no more to ask"


# Harm


def request(stands: Standing, head: str, body: bytes, *, key: str | None = None) -> bytes:
    return head.replace("KEY", key or stands.key).replace("\n", "\r\n").encode() + b"\r\n\r\n" + body


def raw(stands: Standing, head: str, body: bytes = b"", *, key: str | None = None) -> bytes:
    """What the server answers to these bytes before it closes the connection or has nothing more to say."""
    text = request(stands, head, body, key=key)
    with socket.create_connection(("127.0.0.1", stands.server.port), timeout=60) as line:
        try:
            line.sendall(text)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has answered already
        received = b""
        while data := line.recv(1 << 16):
            received += data
            if b"\r\n\r\n" in received and b"}" in received:
                break
        return received


POST = "POST /v1/chat/completions HTTP/1.1\nHost: x\nAuthorization: Bearer KEY"


def test_a_body_of_100_mb_is_refused_unread(stands: Standing) -> None:
    assert b" 413 " in raw(stands, f"{POST}\nContent-Length: {100 << 20}")[:20]
    chunk = b"%x\r\n" % (1 << 20) + b"x" * (1 << 20) + b"\r\n"
    assert b" 413 " in raw(stands, f"{POST}\nTransfer-Encoding: chunked", chunk * 18)[:20]
    assert chat(stands.client())


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"model": "tiny", "messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f", "x": '
        + b"[" * 900 + b"]" * 900 + b"}}]}",
        b'{"messages": NaN}',
        b'{"n": ' + b"9" * 10_000 + b"}",
        b"\xff\xfe",
        b"null",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}], "temperature": 1e999}',
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[\\"\\\\ud800\\"]"}}]}]}',
    ],
)  # fmt: skip
def test_rubbish_is_refused_in_the_same_form(stands: Standing, body: bytes) -> None:
    answer = raw(stands, f"{POST}\nContent-Length: {len(body)}", body)
    status, text = answer.split(b" ")[1], answer.partition(b"\r\n\r\n")[2]
    assert status in (b"400", b"200") and (status == b"200" or "message" in json.loads(text)["error"])
    assert status == b"400" or b"[" * 900 in body


class Diverged(Writer):
    async def sample(self, prompt_ids: Any, **given: Any) -> Completion:
        completion = await super().sample(prompt_ids, **given)
        return replace(completion, logprobs=np.full_like(completion.logprobs, np.nan))


def test_an_answer_that_json_cannot_hold_is_refused_in_the_same_form(tokenizer: Any) -> None:
    with standing(Diverged(tokenizer=tokenizer, says=said), tokenizer=tokenizer) as one:
        with pytest.raises(openai.BadRequestError, match="Out of range float"):
            chat(one.client(), logprobs=True)
        assert chat(one.client()).choices[0].message.content


def test_templates_in_messages_are_text(stands: Standing, writer: Writer) -> None:
    chat(stands.client(), "{{ 7 * 7 }}{% raw %}")
    assert "{{ 7 * 7 }}{% raw %}" in writer.tokenizer.decode(writer.prompts[0])


def test_a_smuggled_request_does_not_reach_another_key(stands: Standing) -> None:
    two = f"{POST}\nAuthorization: Bearer KEY\nContent-Length: 2"
    assert b" 401 " in raw(stands, two, b"{}")[:20]
    inner = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n"
    both = f"{POST}\nContent-Length: {len(inner) + 5}\nTransfer-Encoding: chunked"
    answer = raw(stands, both, b"0\r\n\r\n" + inner)
    assert b"max_model_len" not in answer
    assert b" 401 " in raw(stands, "GET /v1/models HTTP/1.1\nHost: x\nAuthorization: Basic KEY")[:20]
    assert b" 401 " in raw(stands, "GET /v1/models HTTP/1.1\nHost: x\nX-Authorization: Bearer KEY")[:20]


def test_a_slow_client_holds_up_nobody(stands: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.environments.endpoint.READ_TIMEOUT_S", 0.3)
    lines = [socket.create_connection(("127.0.0.1", stands.server.port)) for _ in range(20)]
    for line in lines:
        line.sendall(request(stands, f"{POST}\nContent-Length: 100", b"{"))
    assert chat(stands.client())
    for line in lines:
        line.settimeout(60)
        assert b" 408 " in line.recv(1000)
        line.close()


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_never_reads_its_answer_is_dropped(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    monkeypatch.setattr("rollcall.nodes.http_server.READ_S", 0.2)
    with standing(Writer(tokenizer=tokenizer, says=lambda prompt: "x" * 3000), tokenizer=tokenizer) as one:
        one.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", one.server.port))
            body = b'{"prompt": "hello", "max_tokens": 3000, "logprobs": 0, "stream": %s}' % stream.encode()
            line.sendall(request(one, f"{POST}\nContent-Length: {len(body)}".replace("chat/", ""), body))
            wait_for(lambda: one.caller.num_requests)
            wait_for(lambda: not one.server._server.server_state.connections)


def test_a_stranger_who_says_nothing_takes_nobodys_place(
    writer: Writer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.nodes.http_server.MAX_CONNECTIONS", 16)
    with standing(writer, tokenizer=tokenizer) as one:
        lines = [socket.create_connection(("127.0.0.1", one.server.port)) for _ in range(30)]
        for line in lines[::2]:
            line.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert chat(one.client())
        lines[0].settimeout(60)
        assert gone(lines[0]), "the oldest makes way"
        for line in lines:
            line.close()


def test_a_connection_without_a_request_is_closed(
    writer: Writer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.nodes.http_server.HEAD_S", 0.1)
    with standing(writer, tokenizer=tokenizer) as one:
        client = one.client()
        assert chat(client)
        for begun in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost"):
            with socket.create_connection(("127.0.0.1", one.server.port), timeout=60) as line:
                line.sendall(begun)
                assert gone(line)
        assert chat(client), "a client that has asked may think between two requests"


@pytest.mark.parametrize("begun", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"])
def test_a_head_without_an_end_is_refused_without_a_word_on_stderr(
    capsys: pytest.CaptureFixture[str], stands: Standing, begun: bytes
) -> None:
    line_of = b"X-One: 1\r\n" if begun.endswith(b"\n") else b"x" * 10
    with socket.create_connection(("127.0.0.1", stands.server.port), timeout=60) as line:
        try:
            line.sendall(begun)
            for _ in range(100):
                line.sendall(line_of * 1000)
            received = line.recv(1 << 16)
        except ConnectionError:
            received = b" 400 "  # it has closed the connection before all was sent
        assert b" 400 " in received[:20]
    assert chat(stands.client()) and capsys.readouterr().err == ""


def gone(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except ConnectionError:
        return True
