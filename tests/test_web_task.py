"""The task in a browser: eight of them at once, driven by a script, and one that is killed in the middle."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Any

import psutil
import pytest

from rollcall.config.environments import ClassEnvironment
from rollcall.environments.host import make_environments
from rollcall.environments.processes import ProcessEnvironments
from rollcall.environments.protocol import Environment, EnvironmentFailed

pytest.importorskip("playwright")
CHROMIUM = os.environ.get("ROLLCALL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.view,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium (Debian: apt install chromium)"),
]
NUM_BROWSERS = 8


async def order(environment: Environment, index: int, *, is_at_product: Any = None) -> float | None:
    """What a good model would do: read the order, open the product, type the quantity, order."""
    opening = await environment.reset({"index": index})
    quantity, _, product = str(opening).split("\n")[0].removeprefix("Order ").removesuffix(".").partition(" of ")
    assert f'link "{product}"' in str(opening)
    seen = await environment.step(f'click(name="{product}")', [])
    assert 'textbox "Quantity"' in seen.messages[0].content
    if is_at_product is not None:
        await is_at_product(index)
    seen = await environment.step(f'type(field="Quantity", text="{quantity}")', [])
    seen = await environment.step('click(name="Order")', [])
    if "Thank you" in seen.messages[0].content:
        assert (await environment.step("Done.", [])).done
    return await environment.reward()


def browser_of(pid: int) -> psutil.Process:
    for process in psutil.Process(pid).children(recursive=True):
        line = process.cmdline()
        is_driven = any(part.startswith("--remote-debugging-") for part in line)
        if is_driven and not any(part.startswith("--type=") for part in line):
            return process
    raise AssertionError("no browser runs there")


def test_eight_browsers_at_once_and_one_that_is_killed_fails_its_own_episode_alone() -> None:
    async def check() -> None:
        section = ClassEnvironment(path="examples.web_task:WebTask", call_format="text", call_timeout_s=120)
        before = psutil.Process().children(recursive=True)
        environments = make_environments(section, chat_template=None)
        assert isinstance(environments, ProcessEnvironments)
        started: list[Any] = [await environments.start("") for _ in range(NUM_BROWSERS)]

        async def kill_the_third(index: int) -> None:
            if index == 3:
                browser_of(started[3].worker.pid).kill()

        try:
            worth = await asyncio.gather(
                *(order(one, index, is_at_product=kill_the_third) for index, one in enumerate(started)),
                return_exceptions=True,
            )
            assert isinstance(worth[3], EnvironmentFailed) and "the browser died" in str(worth[3])
            assert [each for index, each in enumerate(worth) if index != 3] == [1.0] * (NUM_BROWSERS - 1)
            await started[3].close(broken=True)
            again = await environments.start("")
            assert await order(again, 3) == 1.0
        finally:
            children = [child for child in psutil.Process().children(recursive=True) if child not in before]
            await environments.aclose()
        _, left = psutil.wait_procs(children, timeout=60)  # what a browser started is reaped by init
        assert left == []

    asyncio.run(check())
