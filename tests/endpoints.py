"""An endpoint for tests: a sampler that writes what a test decides, a tokenizer of characters with a chat template, a server."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollcall.base.types import Completion, FinishReason, Segment
from rollcall.engine.protocol import Sampling
from rollcall.environments.conversation import Conversations
from rollcall.environments.endpoint import Caller, Endpoint, EndpointServer, Open, in_loop
from rollcall.environments.histories import Histories
from rollcall.model.tokenizers import char_tokenizer

ALPHABET = "".join(chr(code) for code in range(32, 127)) + "\n"
TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }} as <tool_call> ]{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
POSITIONS = 4096
EOS = 0
NAME = "tiny"
WAIT_S = 600.0  # also for a connection: the library has 5 s, which a busy machine may take


def chat_tokenizer() -> Any:
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass(slots=True, kw_only=True)
class Writer:
    """Samples what ``says`` returns for the text of the prompt, with a stop token behind it, up to the limit."""

    tokenizer: Any
    says: Callable[[str], str]
    delay_s: float = 0.0
    prompts: list[list[int]] = field(default_factory=list)
    asked: list[Sampling] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    num_left: int = 0

    async def sample(self, prompt_ids: Any, *, seed: int, sampling: Sampling, session: str) -> Completion:
        self.prompts.append(prompt_ids.tolist())
        self.asked.append(sampling)
        self.seeds.append(seed)
        self.sessions.append(session)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        text = self.says(self.tokenizer.decode(prompt_ids))
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], EOS]
        return made(ids[: sampling.max_tokens], tokenizer=self.tokenizer, seed=seed)


def made(ids: list[int], *, tokenizer: Any, seed: int = 0, version: int = 0) -> Completion:
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.array([-0.5 - 0.01 * place for place in range(len(ids))], dtype=np.float32),
        mask=np.ones(len(ids), dtype=np.bool_),
        segments=(Segment(version=version, num_tokens=len(ids)),),
        finish=FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH,
        seed=seed,
        text=tokenizer.decode(ids, skip_special_tokens=True),
        episode=None,
    )


def plain_sampling(max_tokens: int = POSITIONS) -> Sampling:
    return Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=max_tokens, stop_token_ids=(EOS,), stop_strings=())


@dataclass(slots=True, kw_only=True)
class Standing:
    """A server that runs."""

    server: EndpointServer
    caller: Caller
    rules: Open
    key: str

    @property
    def base(self) -> str:
        return f"{self.server.address}/v1"

    def client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(
            **{"base_url": self.base, "api_key": self.key, "max_retries": 0, "timeout": WAIT_S, **options}
        )


@contextmanager
def loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop for a sampler, beside the test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@contextmanager
def standing(
    writer: Any,
    *,
    tokenizer: Any,
    positions: int = POSITIONS,
    max_kept: int = 1_000_000,
) -> Iterator[Standing]:
    """``rollcall serve`` without its command: one key, and requests say how they are sampled."""
    rules = Open(model=NAME, default=plain_sampling())
    with loop_thread() as loop:
        histories = Histories(Conversations(tokenizer), name=NAME, max_kept=max_kept)
        caller = Caller(rules=rules, histories=histories, sample=in_loop(writer.sample, loop))
        key = secrets.token_urlsafe(32)
        app = Endpoint(
            {key: caller}, name=NAME, max_model_len=positions, vocabulary=len(tokenizer), tokenizer=tokenizer
        )
        server = EndpointServer(app)
        try:
            yield Standing(server=server, caller=caller, rules=rules, key=key)
        finally:
            server.close()
