"""Programs of an episode, as a user writes them, but without a library: each is a short script for a bare interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

HEAD = """
import http.client, json, os, sys, time
from urllib.parse import urlparse
base, key = urlparse(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
row = json.loads(os.environ["ROLLCALL_ROW"])
line = http.client.HTTPConnection(base.hostname, base.port, timeout=120)

def post(path, body, key=key, base_path=base.path):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    line.request("POST", base_path + path, data, {"Authorization": "Bearer " + key, "Content-Type": "application/json"})
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
