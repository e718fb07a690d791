"""Programs of an episode, as a user writes them, but without a library: each is a short script for a bare interpreter."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from endpoints import Writer, plain_sampling

from rollcall.base.types import Completion, Prompt
from rollcall.config.environments import AgentEnvironment
from rollcall.environments.agent import AgentEnvironments
from rollcall.environments.host import make_environments

HEAD = """
import http.client, json, os, sys, time
from urllib.parse import urlparse
base, key = urlparse(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
row = json.loads(os.environ["ROLLCALL_ROW"])
line = http.client.HTTPConnection(base.hostname, base.port, timeout=120)

def post(path, body, key=key):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    line.request("POST", base.path + path, data, {"Authorization": "Bearer " + key, "Content-Type": "application/json"})
    answer = line.getresponse()
    return answer.status, json.loads(answer.read())

def chat(messages, **options):
    status, answer = post("/chat/completions", {"model": "any", "messages": messages, **options})
    return (status, answer["choices"][0]["message"] if status == 200 else answer["error"])
"""


def write(folder: Path, body: str, *, name: str = "program.py") -> str:
    """The command that runs it."""
    path = folder / name
    path.write_text(HEAD + body)
    return f"{sys.executable} -S -E {path}"


TWO_TURNS = """
messages = [{"role": "user", "content": row["prompt"]}]
for text in ("go on", "and on"):
    status, answer = chat(messages)
    messages += [answer, {"role": "user", "content": text}]
print("working")
print(json.dumps({"reward": 0.5, "metrics": {"steps": 2}}))
"""


def prompt_of(text: str, tokenizer: Any, **columns: Any) -> Prompt:
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    return Prompt(id="p", token_ids=ids, text=text, answer="42", metadata=columns)


def play(
    tokenizer: Any,
    command: str,
    *,
    says: Callable[[str], str] = lambda prompt: f"{len(prompt)} read",
    count: int = 1,
    max_tokens: int = 500,
    text: str = "hello",
    **section: Any,
) -> tuple[list[Completion], Writer]:
    writer = Writer(tokenizer=tokenizer, says=says)
    # No template, because the rows are not chats.
    environments = make_environments(AgentEnvironment(run=command, **section), chat_template=None)
    assert isinstance(environments, AgentEnvironments)

    async def work() -> list[Completion]:
        player = environments.player(tokenizer=tokenizer, max_prompt_tokens=1000, max_response_tokens=max_tokens)
        try:
            return await asyncio.gather(
                *(
                    player.play(
                        replace(prompt_of("hello", tokenizer, level=number), text=text),
                        seed=number,
                        sampling=plain_sampling(max_tokens),
                        session=f"episode-{number}",
                        sample=writer.sample,
                    )
                    for number in range(count)
                )
            )
        finally:
            await environments.aclose()

    return asyncio.run(work()), writer
