"""The ways to Ray's job API: HTTP to the dashboard, or through Ray to a dashboard that only its own node reaches.

The dashboard listens on the head's loopback unless asked otherwise. A node of the cluster still gets there: an actor on the
head node asks for it, and lives as long as the command that needs it. Every question has a limit.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from rollcall.errors import ClusterError
from rollcall.nodes.processes import raylets_here
from rollcall.nodes.which import Cluster, is_same_address
from rollcall.on_ray.connect import connect
from rollcall.on_ray.each_node import NoAnswerError, Pinned, answer_of
from rollcall.redact import redact, remember
from rollcall.worker_env.declared import process_token
from rollcall.worker_env.node_shell import TOKEN

ANSWER_S = 20.0  # the head answers a question within this
RELAY_S = 60.0  # the head node starts a process to answer for it
LOOK_EVERY_S = 1.0
SLOWEST = 32 << 10  # bytes per second, of what is sent and of an answer
MOST_BYTES = 1 << 30  # of an answer


class Unreachable(ClusterError):
    """The head does not answer."""


class Question(NamedTuple):
    method: str
    path: str
    json: Any = None
    data: bytes | None = None
    timeout_s: float = ANSWER_S


class Reply(NamedTuple):
    status: int
    text: str


class Channel(Protocol):
    where: str  # for messages

    def ask(self, question: Question) -> Reply: ...

    def tail(self, job_id: str, *, skip: int, take: Callable[[str], None]) -> str:
        """Pass on a log as it grows, past its first ``skip`` characters; returns why that broke off, "" at the log's end."""
        ...


class HttpChannel:
    """Ray's own client (2.60) has no limits, and lets ``RAY_ADDRESS`` override the address it is given."""

    def __init__(self, url: str, *, token: str | None, token_source: str) -> None:
        self.where = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._token_source = token_source
        remember([token] if token else [])

    def ask(self, question: Question) -> Reply:
        import requests

        began = time.monotonic()
        try:
            status, text = _within(question, lambda got: self._request(question, got))
        except (requests.ConnectionError, requests.Timeout) as error:
            after = f" after {time.monotonic() - began:.0f} s" if isinstance(error, requests.Timeout) else ""
            raise Unreachable(
                f"no answer from the cluster's head at {self.where}{after} ({_reason(error)}); is the cluster "
                "up (`rollcall status` on a node), does its dashboard listen on that address, and does this machine reach it?"
            ) from None
        except requests.RequestException as error:
            raise ClusterError(f"{self.where} is not the address of a cluster's dashboard: {_reason(error)}") from None
        if status in (401, 403):
            if not self._headers:
                raise ClusterError(
                    f"the head at {self.where} wants a token, and none is known here: set {TOKEN} and give --address (for a Ray that "
                    "someone else started, its RAY_AUTH_TOKEN), or give --rendezvous DIR, the folder that its nodes meet in"
                )
            raise ClusterError(
                f"the head at {self.where} refuses the token from {self._token_source}; it is another cluster's, or an older one"
            )
        return Reply(status, text)

    def _request(self, question: Question, got: list[bytes]) -> int:
        """The status; ``got`` gets what is answered, as it comes."""
        import requests

        # A proxy is for other machines: one that the shell names would be asked for its own loopback, and get the token.
        host = urllib.parse.urlsplit(self.where).hostname or ""
        is_here = host in ("localhost", "::1") or host.startswith("127.")
        proxies = {"http": "", "https": ""} if is_here else None
        with requests.request(
            question.method, self.where + question.path, json=question.json, data=question.data, auth=self._authorize,
            timeout=(ANSWER_S, question.timeout_s), allow_redirects=False, stream=True, proxies=proxies,
        ) as response:  # fmt: skip
            num_bytes = 0
            for data in response.iter_content(1 << 16):
                got.append(data)
                num_bytes += len(data)
                if num_bytes > MOST_BYTES:
                    raise requests.RequestException(f"its answer has more than {MOST_BYTES >> 20} MiB")
            return response.status_code

    def tail(self, job_id: str, *, skip: int, take: Callable[[str], None]) -> str:
        return asyncio.run(self._tail(job_id, skip=skip, take=take))

    async def _tail(self, job_id: str, *, skip: int, take: Callable[[str], None]) -> str:
        import aiohttp

        timeout = aiohttp.ClientTimeout(sock_connect=ANSWER_S)
        url = f"{self.where}/api/jobs/{job_id}/logs/tail"
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.ws_connect(url, max_msg_size=0) as socket,
            ):
                while True:
                    try:
                        message = await socket.receive(timeout=ANSWER_S)
                    except TimeoutError:
                        # The job is quiet, or the head is gone. Ray's side (2.60) does not answer pings, so the head is asked.
                        reply = await asyncio.to_thread(self.ask, Question("GET", f"/api/jobs/{job_id}"))
                        if reply.status == 200 and _is_over(reply.text):
                            return ""
                        continue
                    if message.type != aiohttp.WSMsgType.TEXT:
                        break
                    if len(message.data) > skip:
                        take(message.data[skip:])
                    skip = max(0, skip - len(message.data))
                return "" if socket.close_code in (1000, 1005) else f"closed with code {socket.close_code}"
        except (aiohttp.ClientError, OSError, TimeoutError, Unreachable) as error:
            return redact(str(error) or type(error).__name__)

    def _authorize(self, request: Any) -> Any:
        """As an ``auth`` of its own, because requests would put a password from ~/.netrc over a header."""
        request.headers.update(self._headers)
        return request


class RelayChannel:
    """From a node of the cluster, through Ray, to the dashboard on the head's loopback."""

    def __init__(self, cluster: Cluster) -> None:
        self._head_address = cluster.head_address
        self.where = f"{cluster.head_address} ({cluster.title})"
        answer = cluster.ask()
        if not answer.dashboard or answer.head is None:
            raise ClusterError(f"the head at {cluster.head_address} has no dashboard, so it cannot run jobs")
        connect(cluster, log_to_driver=False)
        self._relay = Pinned(answer.head.node_id, AtHead, f"http://{answer.dashboard}")

    def ask(self, question: Question) -> Reply:
        return Reply(*self._call("ask", question, timeout_s=question.timeout_s))

    def tail(self, job_id: str, *, skip: int, take: Callable[[str], None]) -> str:
        while True:
            try:
                text, is_over = self._call("read", job_id, skip, timeout_s=ANSWER_S)
            except Unreachable as error:
                return str(error)
            if text:
                take(text)
                skip += len(text)
            if is_over:
                return ""
            time.sleep(LOOK_EVERY_S)

    def _call(self, method: str, *args: Any, timeout_s: float) -> tuple[Any, ...]:
        began = time.monotonic()
        try:
            said, *rest = answer_of(self._relay.call(method, *args), timeout_s=timeout_s + RELAY_S)
        except NoAnswerError as error:
            if not any(is_same_address(self._head_address, one) for one in raylets_here().values()):
                raise ClusterError(
                    f"Ray on this node has ended, and jobs of {self.where} are reached through it; a job may be going on: look from "
                    "another node, or start this one again"
                ) from None
            raise Unreachable(
                f"the head node of {self.where} has not answered in {time.monotonic() - began:.0f} s: {error}"
            ) from None
        if said:
            raise ClusterError(said)
        return tuple(rest)


class AtHead:
    """Runs on the head node. Every answer begins with what went wrong, "" when nothing did."""

    def __init__(self, url: str) -> None:
        self._channel = HttpChannel(url, token=process_token(), token_source="the head node")

    def ask(self, question: Question) -> tuple[str, int, str]:
        try:
            reply = self._channel.ask(question)
            return "", reply.status, reply.text
        except ClusterError as error:
            return str(error), 0, ""

    def read(self, job_id: str, skip: int) -> tuple[str, str, bool]:
        """The log past its first ``skip`` characters, and whether the job was over before it was read."""
        wrong, _, details = self.ask(Question("GET", f"/api/jobs/{job_id}"))
        if wrong:
            return wrong, "", False
        wrong, status, text = self.ask(Question("GET", f"/api/jobs/{job_id}/logs"))
        if wrong or status != 200:
            return wrong or f"the log of {job_id} cannot be read: {text[-200:]}", "", False
        return "", json.loads(text)["logs"][skip:], _is_over(details)


def _within(question: Question, request: Callable[[list[bytes]], int]) -> tuple[int, str]:
    """The request's status and text. Its library limits the wait for each byte; here all of them together are limited."""
    import requests

    got: list[bytes] = []
    ended: list[int | Exception] = []

    def work() -> None:
        try:
            ended.append(request(got))
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            ended.append(error)

    thread = threading.Thread(target=work, name="question", daemon=True)
    thread.start()
    began, sent = time.monotonic(), len(question.data or b"")
    while thread.is_alive():
        thread.join(0.2)
        moved = (sent + sum(map(len, got))) / SLOWEST
        if thread.is_alive() and time.monotonic() - began > ANSWER_S + question.timeout_s + moved:
            raise requests.Timeout("timed out")
    if isinstance(ended[0], Exception):
        raise ended[0]
    return ended[0], b"".join(got).decode(errors="replace")


def _is_over(details: str) -> bool:
    """Of a job as the API describes it."""
    return json.loads(details)["status"] in ("SUCCEEDED", "FAILED", "STOPPED")


def _reason(error: Exception) -> str:
    """The innermost reason of a requests error, without the addresses it repeats."""
    text = str(error)
    found = re.search(r"\[Errno -?\d+\] ([^'\")]+)|(timed out)", text)
    return (found[1] or found[2]).strip() if found else redact(text)[:200]
