"""Ray's own job client with time limits. It connects over HTTP or, if only the head node can reach the dashboard, through Ray.

The dashboard listens on the head's loopback unless configured otherwise. A node of the cluster can still use it: an actor on the
head node runs the client, and exits with the command that started it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import aiohttp
import requests
from ray.dashboard.modules import dashboard_sdk  # the client's base class is not in the public module
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails as JobDetails
from ray.job_submission import JobSubmissionClient

from rollcall.base.errors import ClusterError
from rollcall.base.redact import redact, redact_end, remember
from rollcall.base.words import visible
from rollcall.nodes.cluster import Cluster, is_same_address
from rollcall.nodes.declared import process_token
from rollcall.nodes.processes import raylets_here
from rollcall.nodes.state import TOKEN
from rollcall.process.ray.connect import connect
from rollcall.process.ray.each_node import NoAnswerError, Pinned, answer_of

ANSWER_S = 20.0  # for the head to answer a request
UPLOAD_S = 120.0  # for the head to accept a package and a job
RELAY_S = 60.0  # for starting the actor on the head node


class Unreachable(ClusterError):
    """The head did not answer."""


class HttpClient(JobSubmissionClient):
    def __init__(
        self, url: str, *, token: str | None, token_source: str, connect: Callable[[], str] = lambda: ""
    ) -> None:
        """``connect`` runs before each request, and returns why the head cannot be reached, or ""."""
        remember([token] if token else [])
        self.where = url
        self._token_source = token_source
        self._connect = connect
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # This skips the constructor of Ray's own client (2.60), which lets RAY_ADDRESS override the address that was passed.
        dashboard_sdk.SubmissionClient.__init__(self, url, headers=headers)
        for name in ("dashboard_sdk", "job.sdk"):  # these loggers report each upload, and the end of each log
            logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method that this class defines or inherits from Ray's client."""
        if why := self._connect():
            raise Unreachable(why)
        began = time.monotonic()
        try:
            return getattr(self, method)(*args, **options)
        except (requests.ConnectionError, requests.Timeout) as error:
            after = f" after {time.monotonic() - began:.0f} s" if isinstance(error, requests.Timeout) else ""
            # The innermost cause, without the addresses that the error repeats.
            found = re.search(r"\[Errno -?\d+\] ([^'\")]+)|(timed out)", str(error))
            reason = (found[1] or found[2]).strip() if found else redact(str(error))[:200]
            raise Unreachable(
                f"no answer from the cluster's head at {self.where}{after} ({reason}); check that the cluster is "
                "up (`rollcall status` on a node), that its dashboard listens on that address, and that this machine can reach it"
            ) from None
        except AuthenticationError:
            raise ClusterError(self._refused()) from None
        except (requests.RequestException, ValueError, TypeError):
            raise ClusterError(
                f"the program at {self.where} does not answer like a cluster's dashboard; check the address"
            ) from None
        except RuntimeError as error:  # the client raises this for every error status
            text = redact_end(str(error).strip(), 10_000)
            raise ClusterError(f"the head at {self.where} answered: {visible(text).splitlines()[-1]}") from None

    def submit_package(self, package: bytes, *, runtime_env: dict[str, Any], **options: Any) -> str:
        """Submit a job whose working directory is this zip archive."""
        with tempfile.NamedTemporaryFile(suffix=".zip") as file:
            file.write(package)
            file.flush()
            return self.submit_job(runtime_env={**runtime_env, "working_dir": file.name}, **options)

    def read(self, job_id: str, skip: int) -> str:
        """Return the log without its first ``skip`` characters."""
        return self.get_job_logs(job_id)[skip:]

    def tail(self, job_id: str, *, skip: int, take: Callable[[str], None]) -> str:
        """Pass a log to ``take`` as it grows, without its first ``skip`` characters. Return "" at the log's end, or why this
        stopped early."""
        return self._connect() or asyncio.run(self._tail(job_id, skip=skip, take=take))

    async def _tail(self, job_id: str, *, skip: int, take: Callable[[str], None]) -> str:
        pieces = self.tail_job_logs(job_id)
        try:
            while True:
                waiting = asyncio.ensure_future(anext(pieces, None))
                while not (await asyncio.wait({waiting}, timeout=ANSWER_S))[0]:
                    # The job is quiet, or the head is gone. Ray (2.60) does not answer pings, so ask the head.
                    if (await asyncio.to_thread(self.call, "get_job_status", job_id)).is_terminal():
                        return ""
                if (piece := waiting.result()) is None:
                    return ""
                if len(piece) > skip:
                    take(piece[skip:])
                skip = max(0, skip - len(piece))
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            return redact(str(error) or type(error).__name__)

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        """Add a time limit, which Ray's client does not set."""
        # Do not use the shell's proxy for a loopback address: it would connect to its own loopback, and it would see the token.
        host = urllib.parse.urlsplit(self.where).hostname or ""
        is_here = host in ("localhost", "::1") or host.startswith("127.")
        return super()._do_request(
            method,
            endpoint,
            timeout=(ANSWER_S, ANSWER_S if method == "GET" else UPLOAD_S),
            auth=lambda request: request,  # otherwise requests replaces the header with a password from ~/.netrc
            proxies={"http": "", "https": ""} if is_here else None,
            **options,
        )

    def _refused(self) -> str:
        if self._headers:
            return (
                f"the head at {self.where} refuses the token from {self._token_source}, which is outdated or belongs to another "
                "cluster"
            )
        return (
            f"the head at {self.where} requires a token, but none is set: set {TOKEN} and give --address (for a Ray cluster that "
            "Rollcall did not start, set RAY_AUTH_TOKEN), or give --rendezvous DIR, the folder that its nodes share"
        )


class RelayClient:
    """Reaches the dashboard on the head's loopback from a node of the cluster, through Ray."""

    def __init__(self, cluster: Cluster) -> None:
        self._head_address = cluster.head_address
        self.where = f"{cluster.head_address} ({cluster.title})"
        answer = cluster.ask()
        if not answer.dashboard or answer.head is None:
            raise ClusterError(f"the head at {cluster.head_address} has no dashboard, so it cannot run jobs")
        connect(cluster, log_to_driver=False)
        self._relay = Pinned(answer.head.node_id, AtHead, f"http://{answer.dashboard}")

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        began = time.monotonic()
        try:
            error, answer = answer_of(self._relay.call("call", method, args, options), timeout_s=UPLOAD_S + RELAY_S)
        except NoAnswerError as gone:
            if not any(is_same_address(self._head_address, one) for one in raylets_here().values()):
                raise ClusterError(
                    f"Ray on this node has ended, so the jobs of {self.where} cannot be reached; a job may still be running: run this on "
                    "another node, or start this node again"
                ) from None
            raise Unreachable(
                f"the head node of {self.where} has not answered in {time.monotonic() - began:.0f} s: {gone}"
            ) from None
        if error is not None:
            raise error
        return answer

    def tail(self, job_id: str, *, skip: int, take: Callable[[str], None]) -> str:
        """Pass what is new in the log to ``take``, and wait a moment. Return "", or why the log cannot be read."""
        try:
            take(self.call("read", job_id, skip))
        except Unreachable as error:
            return str(error)
        time.sleep(1.0)
        return ""


JobClient = HttpClient | RelayClient


class AtHead:
    """Runs on the head node. It returns errors, because Ray would wrap an error that it raises."""

    def __init__(self, url: str) -> None:
        self._client = HttpClient(url, token=process_token(), token_source="the head node")

    def call(self, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[ClusterError | None, Any]:
        try:
            return None, self._client.call(method, *args, **options)
        except ClusterError as error:
            return error, None
