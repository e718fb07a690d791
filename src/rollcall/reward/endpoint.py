"""Asks a service for scores until it answers.

    try ──ok──▶ answer
     │ a broken connection, status 429 or 5xx, no answer in time
     ▼
    again after a pause, ``retries`` times
     │ still no answer
     ▼
    does it answer other questions? (a different question in the meantime, or a repeat of the last answered question)
     ├─ yes, twice in a row: the question is the cause, and only its own completions get an error
     └─ no: an outage. All questions wait, and one at a time is retried until there is an answer or ``outage_s`` is over

Status 429 does not count as the question's fault unless it lasts longer than ``outage_s``. A wrong key, address or model affects every
question, so if no question has been answered yet, the run stops at once.

Everything here runs in the event loop of ``Asker`` (services.py). The key is sent only to the address in the run file.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import ssl
import time
import urllib.request
from enum import StrEnum
from typing import Any
from urllib.parse import urljoin, urlsplit

from rollcall.base.errors import ConfigError
from rollcall.base.redact import redact, remember
from rollcall.base.wait import Wait, warn
from rollcall.base.words import visible
from rollcall.config.rewards import AskedReward
from rollcall.reward.confine import refuse_unset
from rollcall.reward.worker import FailureKind

MAX_ANSWER_BYTES = 4 << 20
FIRST_PAUSE_S = 0.5  # before the second try; each pause is twice as long as the previous one
LONGEST_PAUSE_S = 15.0
SAY_FIRST_S = 2.0  # shorter outages are not reported
_SAY_EVERY_S = 60.0
_MAX_REDIRECTS = 3
# 403 is included because some services return it for a single text that they reject.
_LATER = (403, 408, 409, 425, 500, 502, 503, 504)


class EndpointLostError(RuntimeError, ValueError):
    """The service does not return scores. The message says why and what to do. Existing scores are kept."""


class Cause(StrEnum):
    """The reason why a question got no answer."""

    PASSING = "passing"  # ask again
    LIMIT = "limit"  # too many questions: ask again later
    REFUSED = "refused"  # wrong key, address or model, so probably every question fails
    QUESTION = "question"  # only this question fails


class Problem(Exception):  # noqa: N818 - an outcome, not a bug in Rollcall
    def __init__(
        self, text: str, cause: Cause, *, kind: FailureKind = "raised", retry_after_s: float | None = None
    ) -> None:
        super().__init__(redact(visible(text)))
        self.cause = cause
        self.kind: FailureKind = kind
        self.retry_after_s = retry_after_s


class _Outage:
    def __init__(self) -> None:
        self.wait = Wait(every_s=_SAY_EVERY_S)
        self.since = time.strftime("%H:%M:%S")
        self.back = asyncio.Event()
        self.said_s = -math.inf
        self.num_pauses = 0


class Endpoint:
    """``what`` is the service's name in messages, such as "the judge". ``place`` is the reward's index in the run file's list."""

    def __init__(self, section: AskedReward, *, url: str, what: str, place: int) -> None:
        self._section, self._url, self._place = section, url, place
        self._name = f"{what} at {url}"
        self._headers = {
            "Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity",
            **_authorization(section.key_env, place=place),
        }  # fmt: skip
        self._proxy = _proxy_for(url, place=place)
        self._room = asyncio.Semaphore(section.concurrency)
        self._one_probes = asyncio.Lock()
        self._one_checks = asyncio.Lock()
        self.outage: _Outage | None = None  # the service is down, and all questions wait for it
        self._answered: bytes | None = None  # the last question that was answered
        self._answered_began_s = -math.inf  # when the latest request that was answered began
        self._unanswered_began_s = -math.inf  # when the latest repeat of a question that failed began
        self._not_before_s = -math.inf  # from Retry-After
        self._sessions: dict[bool, Any] = {}  # aiohttp sessions; [True] opens a fresh connection for each question

    def _session(self, *, is_fresh: bool) -> Any:
        import aiohttp

        if is_fresh not in self._sessions:
            self._sessions[is_fresh] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=is_fresh),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # a small answer must not expand to a large one
            )
        return self._sessions[is_fresh]

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def ask(self, question: bytes) -> bytes:
        """Return the answer's body. Raise Problem if only this question gets no answer, and EndpointLostError if no question gets one."""
        async with self._room:
            began_s, num_failed, num_blamed = time.monotonic(), 0, 0
            while True:
                try:
                    return await self._once(question, is_first=num_failed == 0)
                except Problem as problem:
                    if problem.cause is Cause.QUESTION:
                        raise
                    failed_s, failure = time.monotonic(), problem
                num_failed += 1
                if num_failed <= self._section.retries and failure.cause is not Cause.REFUSED:
                    await self._pause(num_failed, failure)
                elif await self._answers_others(after_s=failed_s):
                    num_blamed += 1
                    may_wait = failure.cause is Cause.LIMIT and failed_s - began_s < self._section.outage_s
                    if num_blamed > 1 and not may_wait:
                        raise failure
                    await self._pause(num_failed, failure)
                else:
                    num_blamed = 0
                    if await self._wait_until_back(failure):
                        num_failed = 0

    async def _pause(self, num_failed: int, problem: Problem) -> None:
        if problem.retry_after_s is not None:
            self._not_before_s = max(self._not_before_s, time.monotonic() + problem.retry_after_s)
        await asyncio.sleep(_pause_s(num_failed))

    async def _once(self, question: bytes, *, is_first: bool) -> bytes:
        while (early_s := self._not_before_s - time.monotonic()) > 0:
            await asyncio.sleep(early_s)
        began_s = time.monotonic()
        # A retry uses a fresh connection, because an existing one may be to a machine that is gone.
        answer = await self._post(question, session=self._session(is_fresh=not is_first))
        self._answered, self._answered_began_s = question, max(began_s, self._answered_began_s)
        if (outage := self.outage) is not None:
            self.outage = None
            outage.back.set()
            if outage.said_s > -math.inf:
                warn(f"{self._name} is answering again after {outage.wait.waited_s:.0f} s; the run continues")
        return answer

    async def _answers_others(self, *, after_s: float) -> bool:
        """Return whether a request that began after ``after_s`` was answered. To find out, repeat the last question that was answered."""
        async with self._one_checks:
            if max(self._answered_began_s, self._unanswered_began_s) < after_s and self._answered is not None:
                began_s = time.monotonic()
                try:
                    await self._once(self._answered, is_first=False)
                except Problem:
                    self._unanswered_began_s = began_s
            return self._answered_began_s >= after_s

    async def _wait_until_back(self, problem: Problem) -> bool:
        """Wait for the service. Return True if a different question was answered, or False if it is this question's turn to try again."""
        advice = _advice(problem.cause, self._place)
        if problem.cause is Cause.REFUSED and self._answered is None:
            told = f"{self._name} refuses requests: {problem}"
            raise EndpointLostError(f"{told}. {advice}, then run the same command again")
        outage = self.outage = self.outage or _Outage()
        async with self._one_probes:
            if self.outage is not outage:
                return True
            most_s, lasted_s = self._section.outage_s, outage.wait.waited_s
            limit = f"at most {most_s:g} s (reward.{self._place}.outage_s)"
            if lasted_s >= most_s:
                raise EndpointLostError(
                    f"{self._name} has not answered since {outage.since}, and the run waits only {limit}: {problem}. {advice}, then run "
                    "the same command again without --fresh: the run resumes and keeps all scores"
                )
            if lasted_s >= SAY_FIRST_S:
                outage.wait.note(f"{self._name} is not answering: {problem}")
                if time.monotonic() - outage.said_s >= _SAY_EVERY_S:
                    outage.said_s = time.monotonic()
                    warn(
                        f"{self._name} has not answered since {outage.since} ({problem}); waiting for it, {limit}. {advice}. "
                        "The run loses no work while it waits"
                    )
            outage.num_pauses += 1
            pause_s = min(max(_pause_s(outage.num_pauses), problem.retry_after_s or 0), most_s - lasted_s)
            try:
                async with asyncio.timeout(max(pause_s, 0)):
                    return await outage.back.wait()
            except TimeoutError:
                return False

    async def _post(self, question: bytes, *, session: Any) -> bytes:
        import aiohttp

        limit_s = self._section.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._follow(question, session=session)
        except TimeoutError as error:  # also raised while connecting
            raise Problem(str(error) or f"no answer within timeout_s={limit_s:g}", Cause.PASSING, kind="hung") from None
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            raise Problem(f"its certificate is not trusted: {error}", Cause.REFUSED) from None
        except (aiohttp.ClientError, OSError) as error:
            raise Problem(f"{type(error).__name__}: {error}", Cause.PASSING) from None

    async def _follow(self, question: bytes, *, session: Any) -> bytes:
        """Post the question and follow redirects within the same service."""
        url = self._url
        for _ in range(_MAX_REDIRECTS + 1):
            async with session.post(
                url, data=question, headers=self._headers, proxy=self._proxy, allow_redirects=False
            ) as answer:
                if not 300 <= answer.status < 400:
                    return await _body(answer)
                url = _redirected(url, answer.status, answer.headers.get("Location", ""))
        raise Problem(f"it redirects more than {_MAX_REDIRECTS} times", Cause.REFUSED)


async def _body(answer: Any) -> bytes:
    """Read an answer's body. Raise Problem if it cannot be used."""
    is_good = 200 <= answer.status < 300
    said, most = bytearray(), MAX_ANSWER_BYTES if is_good else 4096
    async for piece in answer.content.iter_chunked(1 << 16):
        said += piece
        if len(said) > most:
            answer.close()  # the rest is never read
            break
    if not is_good:
        text = " ".join(said.decode(errors="replace").split())[:300]
        told = f"status {answer.status}{f': {text}' if text else ''}"
        if answer.status == 429 or answer.status in _LATER or answer.status > 504:
            cause = Cause.LIMIT if answer.status == 429 else Cause.PASSING
            raise Problem(told, cause, retry_after_s=_retry_after_s(answer.headers.get("Retry-After")))
        raise Problem(told, Cause.REFUSED if answer.status in (401, 402, 404, 405, 407) else Cause.QUESTION)
    if len(said) > most:
        raise Problem(f"its answer is longer than {most >> 20} MiB", Cause.QUESTION)
    if (encoding := answer.headers.get("Content-Encoding", "identity").lower()) != "identity":
        raise Problem(f"its answer is encoded as {encoding[:40]}, which the request does not allow", Cause.QUESTION)
    return bytes(said)


def _redirected(url: str, status: int, location: str) -> str:
    """Return the redirect address if it is on the same service. The key and the completions must not go to any other service."""
    try:
        target = urljoin(url, location)
        before, after = urlsplit(url), urlsplit(target)
    except ValueError:
        raise Problem(f"it redirects to {location[:80]!r}, which is not an address", Cause.REFUSED) from None
    if status not in (307, 308) or (before.scheme, before.netloc) != (after.scheme, after.netloc):
        told = f"it redirects to {after.scheme}://{after.hostname}{after.path}, which Rollcall does not follow"
        raise Problem(f"{told}; set url to the final address", Cause.REFUSED)
    return target


def _retry_after_s(value: str | None) -> float | None:
    """Parse the number of seconds in a Retry-After header. A date in the header is not supported.

    >>> _retry_after_s("3"), _retry_after_s("1e9"), _retry_after_s("-1"), _retry_after_s("soon"), _retry_after_s(None)
    (3.0, 120.0, 0.0, None, None)
    """
    try:
        seconds = float(value or "nan")
    except ValueError:
        return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), 120.0)


def _pause_s(number: int) -> float:
    """Return the pause before try ``number`` + 1. It is randomised so that the questions are not all asked again at the same time."""
    return min(FIRST_PAUSE_S * 2 ** min(number - 1, 30), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)


def _advice(cause: Cause, place: int) -> str:
    if cause is Cause.REFUSED:
        return f"Check reward.{place}: its url, its model, and the key in the variable that key_env names"
    if cause is Cause.LIMIT:
        return f"Raise the service's rate limit, or lower reward.{place}.concurrency"
    return f"Start the service again, or correct reward.{place}.url or timeout_s"


def _authorization(key_env: str | None, *, place: int) -> dict[str, str]:
    if key_env is None:
        return {}
    refuse_unset([key_env], key=f"reward.{place}.key_env")
    key = os.environ[key_env].strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"reward.{place}.key_env names {key_env}, which does not contain a key; export the correct key"
        )
    remember([key])
    return {"Authorization": f"Bearer {key}"}


def _proxy_for(url: str, *, place: int) -> str | None:
    """Return the proxy for an address, according to HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY."""
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.netloc):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and urlsplit(proxy if "://" in proxy else f"http://{proxy}").scheme not in ("http", "https"):
        raise ConfigError(
            f"reward.{place}.url={url} would go through the proxy {redact(proxy)}, but only http and https proxies are supported; set "
            f"{parts.scheme.upper()}_PROXY to such a proxy, or add {parts.hostname} to NO_PROXY"
        )
    return proxy and (proxy if "://" in proxy else f"http://{proxy}")
