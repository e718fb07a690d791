"""The page in a real Chromium: what a reader sees and does. `make view` runs these."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shown_runs
from commands import start
from shown_runs import append_groups, ids_of, make_episodes, make_group, write_metrics, write_run

from rollcall.base.lease import hold
from rollcall.observe import live
from rollcall.observe.calls import CallFile, RecordedCall
from rollcall.observe.events import Events, Mark, MarkKind
from rollcall.observe.live import Live, ProcessState, read_live, write_live
from rollcall.observe.samples import TOKEN_SCORES, write_token_scores
from rollcall.view.api import ShownRuns
from rollcall.view.server import PageServer

playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'rollcall-rl[browser]'")
CHROMIUM = os.environ.get("ROLLCALL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.view,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium (Debian: apt install chromium)"),
]
WAIT_MS = 120_000
HOSTILE = (
    "<script>window.harmed=1</script><img src=x onerror='window.harmed=1'>\u202e reversed \u2066\u0000\ud83d \x1b[31m"
    "<a href='javascript:window.harmed=1'>here</a>"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # As root in a container Chromium has no sandbox of its own; what it opens here is this page alone.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=[*options, "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture()
def page(browser: Any) -> Iterator[Any]:
    """A browser that fails the test on an error of a script, and on anything that it asks of another place."""
    context = browser.new_context(viewport={"width": 1360, "height": 860}, color_scheme="light")
    context.set_default_timeout(WAIT_MS)
    opened, problems = context.new_page(), []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    opened.on("request", lambda asked: None if _is_here(asked.url) else problems.append(asked.url))
    opened.on("dialog", lambda dialog: problems.append(dialog.message))
    yield opened
    context.close()
    assert problems == []


def _is_here(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "blob:http://127.0.0.1:"))


class Served:
    """A server in a thread. It stops after the pages that were opened there: a page that polls would see it go."""

    def __init__(self, *paths: Path) -> None:
        self.pages: list[Any] = []
        self.server = PageServer(ShownRuns(paths))
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        for page in self.pages:
            page.close()
        self.server.stop()
        self._thread.join()


def go(page: Any, view: str) -> None:
    page.evaluate("address => { location.hash = address }", f"#/{view}")


def until(page: Any, is_so: str) -> None:
    """Wait for an expression to hold. Playwright's own way evaluates it in the page, which the page's policy forbids."""
    end = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(is_so):
        assert time.monotonic() < end, f"never: {is_so}"
        page.wait_for_timeout(100)


def open_runs(page: Any, served: Served) -> None:
    served.pages.append(page)
    page.goto(served.server.new_address())
    page.wait_for_selector("table.runs tbody tr")


def points(page: Any, metric: str) -> int:
    return int(page.get_attribute(f'[data-metric="{metric}"]', "data-points") or 0)


def drawn(page: Any, metric: str) -> None:
    page.wait_for_selector(f'[data-metric="{metric}"] .js-plotly-plot .scatterlayer path')


def test_without_an_address_the_browser_sees_401(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    with Served(tmp_path) as served:
        context = browser.new_context()
        opened = context.new_page()
        for path in ("/", "/api/runs", "/page/main.js"):
            answer = opened.goto(f"http://127.0.0.1:{served.server.port}{path}")
            assert answer.status == 401 and "Open this page with the newest address" in opened.inner_text("body")
        context.close()


def test_two_runs_are_listed_compared_and_overlaid(page: Any, tmp_path: Path) -> None:
    write_run(tmp_path, "grpo-small-lr", steps=60)
    write_run(tmp_path, "grpo-large-lr", steps=60, seed=5, actor={"lr": 3e-5})
    with Served(tmp_path) as served:
        open_runs(page, served)
        assert "60 / 60" in page.inner_text("table.runs") and "90.0 %" in page.inner_text("table.runs")
        for box in page.query_selector_all("table.runs input[type=checkbox]"):
            box.check()
        page.click("text=Compare 2 runs")
        page.wait_for_selector("#settings td")
        assert "actor.lr" in page.inner_text("#settings") and "3e-05" in page.inner_text("#settings")
        drawn(page, "train/reward_mean")
        assert len(page.query_selector_all('[data-metric="train/reward_mean"] .scatterlayer .trace')) == 2
        page.click("text=all curves overlaid")
        drawn(page, "eval/accuracy")
        assert len(page.query_selector_all(".legend .dot")) == 2


def test_curves_of_a_live_run_move(page: Any, tmp_path: Path) -> None:
    """A real run, which serves its own page."""
    options = [
        "trainer.steps=150",
        "trainer.eval_every=20",
        "trainer.page=true",
        "run.dir=live",
        "trainer.num_threads=1",
    ]
    command = start("train", *options, cwd=tmp_path)
    try:
        while (found := re.search(r"page +(http://\S+)", command.stdout)) is None:
            assert command.poll() is None, command.stderr
            time.sleep(0.2)
        assert "works once" in command.stdout
        page.goto(found[1])
        page.wait_for_selector("table.runs tbody tr")
        go(page, "curves")
        drawn(page, "train/reward_mean")
        before = points(page, "train/reward_mean")
        until(page, f"Number(document.querySelector('[data-metric=\"train/reward_mean\"]').dataset.points) > {before}")
        assert "live" in page.inner_text("#live")
        kept = json.loads((tmp_path / "live" / "page.json").read_text())
        assert str(kept["port"]) in found[1] and (tmp_path / "live" / "page.json").stat().st_mode & 0o777 == 0o600
    finally:
        page.goto("about:blank")
        command.kill()


def test_a_run_that_appends_is_followed_and_smoothing_log_and_zoom_work(page: Any, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, "gsm8k", steps=200, groups=1)
    events = Events(run_dir)
    events.mark(
        Mark(shown_runs.BEGAN_S + 160.0, "worker lost", MarkKind.FAULT, "rollout 1 @ node 1", "killed by SIGKILL")
    )
    events.mark(Mark(shown_runs.BEGAN_S + 175.0, "attempt 2 begins", MarkKind.RECOVERY, None, "from step 80"))
    events.close()
    with Served(tmp_path) as served:
        open_runs(page, served)
        go(page, "curves?smooth=0.8")
        drawn(page, "train/reward_mean")
        assert len(page.query_selector_all('[data-metric="train/reward_mean"] .shapelayer path')) == 2  # the marks
        assert len(page.query_selector_all('[data-metric="train/reward_mean"] .scatterlayer .trace')) == 3
        write_metrics(run_dir, range(201, 231), num_steps=200)
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        until(page, "document.querySelector('[data-metric=\"train/reward_mean\"]').dataset.points === '230'")
        page.check("text=log scale")
        until(page, "document.querySelector('[data-metric=\"train/reward_mean\"] .plot').layout.yaxis.type === 'log'")
        page.evaluate(
            "Plotly.relayout(document.querySelector('[data-metric=\"train/reward_mean\"] .plot'), {'xaxis.range': [50, 100]})"
        )
        until(page, "location.hash.includes('low=50')")
        until(page, "document.querySelector('[data-metric=\"eval/accuracy\"] .plot').layout.xaxis.range?.[0] === 50")
        page.click("text=Whole run")
        until(page, "!location.hash.includes('low=')")
        page.select_option("select[aria-label='Horizontal axis']", "time")
        until(
            page,
            "document.querySelector('[data-metric=\"train/reward_mean\"] .plot').layout.xaxis.type === 'date' || document.querySelector('[data-metric=\"train/reward_mean\"] .plot')._fullLayout.xaxis.type === 'date'",
        )


THOUGHT = (
    "let me add {one} and {other} (first the ones)\nones: {a} + {b} = {ab} so write {w} and carry {k}\n"
    "tens: {c} + {d} + {k} = {t} and that is the rest\ncheck: {one} + {other} is about {r}\nanswer = {sum}"
)


def sums(run_dir: Path) -> None:
    """Groups that look like those of a run on sums, with what a learner said of their tokens."""
    groups, offsets = [], (0, 10, 0, -10, 0, 1)
    for place in range(12):
        one, other = 17 + 3 * place, 25 + 5 * place
        a, b, c, d = one % 10, other % 10, one // 10, other // 10
        parts = {
            "one": one,
            "other": other,
            "a": a,
            "b": b,
            "ab": a + b,
            "w": (a + b) % 10,
            "k": (a + b) // 10,
            "c": c,
            "d": d,
        }
        parts |= {"t": c + d + (a + b) // 10, "r": round(one + other, -1)}
        texts = [THOUGHT.format(**parts, sum=one + other + wrong) for wrong in offsets]
        rewards = [float(wrong == 0) for wrong in offsets]
        prompt = f"what is {one} + {other} (think first)"
        groups.append(
            make_group(61, 400 + place, texts=texts, rewards=rewards, prompt=prompt, answer=str(one + other), prompt_id=f"row-{place}")
        )  # fmt: skip
    append_groups(run_dir, groups)
    rng, rows = np.random.default_rng(0), [one for group in groups for one in group.completions]
    logprobs = [one.logprobs + rng.normal(0, 0.08, len(one.logprobs)).astype(np.float32) for one in rows]
    entropy = [(-0.8 * one.logprobs + rng.exponential(0.2, len(one.logprobs))).astype(np.float32) for one in rows]
    write_token_scores(run_dir / TOKEN_SCORES, step=61, groups=groups, logprobs=logprobs, entropy=entropy)


def test_a_sample_is_found_by_search_and_its_tokens_show_their_numbers(page: Any, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, "sums", steps=60, groups=3)
    sums(run_dir)
    append_groups(run_dir, [make_group(30, 300, texts=("the needle is here", "no"), prompt="find me", prompt_id="hay")])
    with Served(tmp_path) as served:
        open_runs(page, served)
        go(page, "samples")
        page.wait_for_selector(".completion")
        page.fill("input[aria-label='Search']", "NEEDLE")
        page.press("input[aria-label='Search']", "Enter")
        until(page, "document.querySelectorAll('.entry').length === 1")
        assert "find me" not in page.inner_text(".entry") and "needle" in page.inner_text(".entry")
        page.click(".entry")
        page.wait_for_selector("text=Step 30, draw 300")
        page.click(".completion >> text=tokens")
        page.wait_for_selector(".t.special")
        page.hover(".t[data-place='4']")
        numbers = page.inner_text("#numbers")
        assert "5 of 19" in numbers and '"n"' in numbers and "log-prob" in numbers and "probability" in numbers
        page.click(".t[data-place='1']")
        page.hover(".t[data-place='4']")
        assert "not from the policy" in page.inner_text("#numbers")  # a click keeps a token
        page.select_option("select[aria-label='colour by']", "version")
        assert page.evaluate("document.querySelector('.t[data-place=\"4\"]').style.backgroundColor") != ""
        go(page, "tokens?step=61&draw=405&n=1&by=mismatch")
        page.wait_for_selector(".t.special")
        page.hover(".t[data-place='130']")
        assert "entropy" in page.inner_text("#numbers") and "ratio" in page.inner_text("#numbers")
        go(page, "samples?prompt=row-3&sort=oldest")
        page.wait_for_selector("text=Reward of this prompt across steps")


def test_an_episode_is_drawn_as_a_conversation(page: Any, tmp_path: Path) -> None:
    append_groups(write_run(tmp_path, steps=2), [make_episodes(3, 90)])
    with Served(tmp_path) as served:
        open_runs(page, served)
        go(page, "samples")
        page.wait_for_selector(".completion .said")
        assert "add 1 and 2" in page.inner_text(".entry") and "add 1 and 2" in page.inner_text(".detail .card .text")
        said = "[...document.querySelector('.completion').querySelectorAll('.talk > *')].map(one => one.innerText)"
        assert page.evaluate(said) == ["model\nlet me add", "tool call\nadd(a=1) -> it is 3", "model\n3", "reward 0.5"]
        assert "(nothing)" in page.inner_text(".completion[data-completion='1']")
        assert "1 token " in page.inner_text(".completion[data-completion='1']")
        assert re.match(r"\d+ groups\.", page.inner_text("aside"))


def test_groups_are_filtered_and_the_worst_come_first(page: Any, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=10)
    append_groups(
        run_dir, [make_group(4, 90, texts=("a", "b"), rewards=(-3.0, 0.0), errors={"exact": "raised: <b>KeyError</b>"})]
    )
    with Served(tmp_path) as served:
        open_runs(page, served)
        go(page, "samples?sort=worst")
        page.wait_for_selector(".entry[data-draw='90']")
        assert page.get_attribute(".entry", "data-draw") == "90"
        page.select_option("select[aria-label='show']", "zero")
        until(page, "location.hash.includes('only=zero') && document.querySelectorAll('.entry').length === 2")
        page.select_option("select[aria-label='show']", "truncated")
        page.wait_for_selector("text=No group matches")


def test_a_hostile_completion_harms_nothing(page: Any, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, "run<img src=x onerror=window.harmed=1>", steps=3)
    long = "x" * (1 << 20)
    append_groups(run_dir, [make_group(4, 50, texts=(HOSTILE, long), prompt=HOSTILE, prompt_id=HOSTILE, answer=HOSTILE, worker=HOSTILE, errors={HOSTILE: HOSTILE}, ids=ids_of("abc"))])  # fmt: skip
    path = run_dir / "journal" / "000004.groups"
    path.write_bytes(path.read_bytes() + b"\xff\xfe broken \xc3\x28")
    events = Events(run_dir)
    events.mark(Mark(shown_runs.BEGAN_S + 3.0, HOSTILE, MarkKind.FAULT, HOSTILE, HOSTILE))
    events.close()
    with Served(tmp_path) as served:
        open_runs(page, served)
        go(page, "samples")
        page.wait_for_selector(".completion")
        assert "<script>window.harmed=1</script>" in page.inner_text(".completion")
        assert "U+202E" in page.inner_text(".completion") and "U+0000" in page.inner_text(".completion")
        page.click("text=show all 1,048,576 characters")
        until(page, "[...document.querySelectorAll('.text')].some(one => one.textContent.length >= 1048576)")
        for view in ("tokens?step=4&draw=50", "timeline?first=0", "cluster", "curves", "runs", "samples?q=window"):
            go(page, view)
            page.wait_for_selector("main > *")
            page.wait_for_timeout(700)
        assert page.evaluate("window.harmed") is None
        assert page.query_selector("main script, main img") is None


def test_long_completions_stay_fast(page: Any, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=2)
    ids = np.tile(ids_of("a long thought (about nothing) = 42 "), 230)[:8000].astype(np.int32)
    append_groups(run_dir, [make_group(3, 70, texts=("long",), rewards=(1.0,), ids=ids)])
    with Served(tmp_path) as served:
        open_runs(page, served)
        go(page, "tokens?step=3&draw=70")
        page.wait_for_selector(".t[data-place='7999']")
        page.select_option("select[aria-label='colour by']", "mask")
        page.hover(".t[data-place='1']")
        assert "2 of 8,000" in page.inner_text("#numbers")


def on_two_nodes(run_dir: Path) -> None:
    """What a controller writes when one of its rollout processes was killed and came back."""
    lanes = ["actor 0 @ node 0", "rollout 0 @ node 0", "rollout 1 @ node 1"]
    calls, file = {lane: [] for lane in lanes}, CallFile(run_dir)
    for step in range(13, 21):
        at = shown_runs.BEGAN_S + 2.0 * (step - 1)
        calls[lanes[0]] += [
            RecordedCall("update", at + 1.21, at + 1.9),
            RecordedCall("send_weights", at + 1.92, at + 1.99),
        ]
        for place, lane in enumerate(lanes[1:]):
            if not (lane == lanes[2] and step in (16, 17)):
                calls[lane] += [
                    RecordedCall("exchange", at + 0.01, at + 1.1 - 0.3 * place, 40),
                    RecordedCall("use_weights", at + 1.93, at + 1.98),
                ]
    file.append(calls, time_s=shown_runs.BEGAN_S + 40.0)
    file.close()
    events = Events(run_dir)
    events.mark(
        Mark(
            shown_runs.BEGAN_S + 30.2,
            "worker lost",
            MarkKind.FAULT,
            lanes[2],
            "pid 4711 on node 1 ended: killed by SIGKILL",
        )
    )
    events.mark(
        Mark(shown_runs.BEGAN_S + 34.0, "worker back", MarkKind.RECOVERY, lanes[2], "a new process took its seat")
    )
    events.close()
    now = time.time()
    states = [
        ProcessState(
            lane="controller",
            pid=100,
            state="busy",
            doing="rollout of step 21",
            since_s=now - 3,
            memory_bytes=900_000_000,
        )
    ]
    for place, lane in enumerate(lanes):
        role, node = lane.split()[0], int(lane[-1])
        doing = "exchange" if role == "rollout" else ""
        states.append(ProcessState(lane=lane, roles={role: int(lane.split()[1])}, node=node, address=f"10.0.0.{node + 1}", slots=(place % 2 if node == 0 else 0,), pid=4700 + place, state="busy" if doing else "idle", doing=doing, since_s=now - 2, num_calls=120 + place, memory_bytes=2_400_000_000, device_bytes=31_000_000_000))  # fmt: skip
    write_live(run_dir, Live(time_s=now, host="node0", is_over=False, processes=tuple(states)))


def test_the_timeline_shows_a_killed_worker_and_the_cluster_its_slots(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_runs, "BEGAN_S", time.time() - 41.5)
    monkeypatch.setattr(live, "STALE_S", WAIT_MS)  # however slow this machine is
    run_dir = write_run(
        tmp_path, "two-nodes", steps=20,
        cluster={"nodes": [{"gpus": 2}, {"gpus": 1}], "component_placement": {"actor": "0", "rollout": "1-2"}},
    )  # fmt: skip
    on_two_nodes(run_dir)
    with Served(tmp_path) as served:
        open_runs(page, served)
        go(page, "timeline")
        page.wait_for_selector(".gantt .bars path", state="attached")
        marks = page.inner_text("#marks")
        assert "worker lost" in marks and "killed by SIGKILL" in marks and "worker back" in marks
        lanes = [text.text_content() for text in page.query_selector_all(".gantt .ytick text")]
        assert "rollout 1 @ node 1" in lanes and "controller" in lanes
        assert "idle" in page.inner_text("main") and "rollout 0 @ node 0" in page.inner_text("main")
        go(page, "cluster")
        page.wait_for_selector(".slot.busy")
        assert len(page.query_selector_all(".slot")) == 3 and "10.0.0.2" in page.inner_text("main")
        last = read_live(run_dir)
        assert last is not None
        write_live(run_dir, replace(last, time_s=last.time_s - 2 * WAIT_MS))
        page.wait_for_selector("text=nothing is running now")
        assert not page.query_selector_all(".slot.busy") and "ended" in page.inner_text(".slots")
        with hold(run_dir):  # its disk is full
            page.wait_for_selector("text=the run continues, but has written no report since")
            assert "not known" in page.inner_text(".slots")


def test_addresses_can_be_kept_and_wrong_ones_say_so(page: Any, tmp_path: Path) -> None:
    write_run(tmp_path, steps=6)
    with Served(tmp_path) as served:
        open_runs(page, served)
        go(page, "nothing")
        page.wait_for_selector("text=No such view")
        go(page, "tokens")
        page.wait_for_selector("text=Choose a completion")
        go(page, "samples?s=5&draw=13")
        page.wait_for_selector("text=Step 5, draw 13")
        page.reload()
        page.wait_for_selector("text=Step 5, draw 13")
        go(page, "timeline?first=900&last=901")
        page.wait_for_selector("text=Nothing to show")
