"""The page on a large run: 10,000 steps and 100,000 groups by default, generated. Time to each first view, memory, bytes.

    python -m benchmarks.view [--steps N] [--groups-per-step N] [--keep FOLDER]
    python -m benchmarks.view --beside [--pairs N]

The server runs in a process of its own, as `rollcall view` does. The last line is JSON.

``--beside`` measures what the page costs a run: the demo's steps without it, and with a page that looks at each view in turn as
often as an open one does. Pairs in alternating order; the median of the steps counts.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
shown: Any = import_module("shown_runs")
COMPLETIONS = 8
WORDS = "let me add the tens first and then the ones so that the carry is not lost in between "


def generate(run_dir: Path, *, steps: int, groups: int) -> None:
    run_dir.mkdir(parents=True)
    shown.write_run_file(run_dir, trainer={"steps": steps})
    shown.write_tokenizer(run_dir)
    shown.write_metrics(run_dir, range(steps + 1), num_steps=steps, eval_every=50)
    shown.write_events(run_dir, range(1, steps + 1))
    draw = 0
    for step in range(1, steps + 1):
        made = []
        for _ in range(groups):
            texts = [WORDS * 2 + str((draw + number) % 100) for number in range(COMPLETIONS)]
            rewards = [float((draw + number) % 3 == 0) for number in range(COMPLETIONS)]
            one = shown.make_group(
                step,
                draw,
                texts=texts,
                rewards=rewards,
                prompt=f"{draw % 1000}+{draw % 77}=",
                prompt_id=f"row-{draw % 5000}",
            )
            made.append(one)
            draw += 1
        shown.append_groups(run_dir, made)
        shown.mark_trained(run_dir, step, [group.draw for group in made])


class Browser:
    """Asks as the page does: with a cookie, and for compressed answers."""

    def __init__(self, address: str) -> None:
        found = re.fullmatch(r"http://(127\.0\.0\.1):(\d+)(/open/\S+)", address)
        assert found, address
        self._connection = http.client.HTTPConnection(found[1], int(found[2]), timeout=120)
        self._cookie = ""
        _, headers = self._get(found[3])
        self._cookie = headers["set-cookie"].partition(";")[0]

    def _get(self, path: str) -> tuple[bytes, Any]:
        self._connection.request("GET", path, headers={"cookie": self._cookie, "accept-encoding": "gzip"})
        answer = self._connection.getresponse()
        data = answer.read()
        assert answer.status == 200, (path, answer.status, data[:200])
        return data, answer.headers

    def ask(self, path: str, **parameters: Any) -> tuple[Any, int, float]:
        """The answer, its bytes on the wire, and the seconds until it was there."""
        import gzip

        began = time.perf_counter()
        data, headers = self._get(f"{path}?{urlencode(parameters, doseq=True)}" if parameters else path)
        took = time.perf_counter() - began
        body = gzip.decompress(data) if headers.get("content-encoding") == "gzip" else data
        return (json.loads(body) if path.startswith("/api/") else body), len(data), took


def memory_mib(pid: int, name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1024


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used: on a busy machine they say more than a clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(run_dir: Path) -> dict[str, Any]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "rollcall", "view", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            browser = Browser(server.stdout.readline().strip())
            up_s = time.perf_counter() - began
            up_cpu_s = cpu_s(server.pid)
            views, total = look(browser, pid=server.pid)
            return {
                "server_up_s": round(up_s, 2),
                "server_up_cpu_s": round(up_cpu_s, 2),
                "cpu_s": round(cpu_s(server.pid), 1), "views": views, "index_s": total,
                "memory_mib": round(memory_mib(server.pid, "VmRSS")), "peak_memory_mib": round(memory_mib(server.pid, "VmHWM")),
            }  # fmt: skip
        finally:
            server.terminate()


def look(browser: Browser, *, pid: int) -> tuple[dict[str, Any], float]:
    """Each view for the first time, in the order of a reader, then samples again once the journal is indexed."""
    views: dict[str, Any] = {}

    def note(name: str, *asked: tuple[str, dict[str, Any]]) -> Any:
        before = cpu_s(pid)
        answers = [browser.ask(path, **parameters) for path, parameters in asked]
        views[name] = {
            "s": round(sum(took for _, _, took in answers), 3),
            "cpu_s": round(cpu_s(pid) - before, 2),
            "kb": round(sum(size for _, size, _ in answers) / 1000, 1),
        }
        return answers[-1][0]

    note("page", ("/", {}), ("/page/main.js", {}), ("/page/style.css", {}), ("/plotly.js", {}))
    run = note("runs", ("/api/runs", {}))["runs"][0]["id"]
    names = [metric["name"] for metric in browser.ask("/api/metrics", run=run)[0]["metrics"]]
    note(
        "curves, all",
        ("/api/metrics", {"run": run}),
        ("/api/curves", {"run": run, "name": names, "points": 400}),
    )
    note("curves, smoothed", ("/api/curves", {"run": run, "name": names, "points": 400, "smooth": 0.9}))
    note("curves, no news", ("/api/runs", {}))
    began = time.perf_counter()
    first = note("samples, first look", ("/api/groups", {"run": run}))
    while not first["rows"]:
        time.sleep(0.05)
        first = browser.ask("/api/groups", run=run)[0]
    views["samples, first rows"] = {"s": round(time.perf_counter() - began, 3)}
    while (index := browser.ask("/api/groups", run=run)[0]["index"])["files"] < index["total"] or not index["total"]:
        time.sleep(0.2)
    index_s = round(time.perf_counter() - began, 1)
    note("samples", ("/api/groups", {"run": run}))
    note("samples, worst", ("/api/groups", {"run": run, "sort": "worst"}))
    note("samples, zero variance", ("/api/groups", {"run": run, "only": "zero"}))
    row = browser.ask("/api/groups", run=run, sort="best")[0]["rows"][0]
    note("group", ("/api/group", {"run": run, "step": row["step"], "draw": row["draw"]}))
    note("prompt across steps", ("/api/groups", {"run": run, "prompt": row["prompt"], "limit": 200}))
    note("search, one request", ("/api/groups", {"run": run, "search": "no such text anywhere"}))
    note("tokens", ("/api/tokens", {"run": run, "step": row["step"], "draw": row["draw"]}))
    note("timeline", ("/api/timeline", {"run": run}))
    note("cluster", ("/api/cluster", {"run": run}))
    return views, index_s


LOOK_EVERY_S = 3.0  # as the page does while a run goes on


def train(folder: Path, *, steps: int, with_page: bool) -> float:
    """The median step of a run of the demo."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "rollcall"]
    settings = (f"run.dir={run_dir}", f"trainer.steps={steps}", "trainer.eval_every=0", "trainer.save_every=0")
    training = [*command, "train", "--fresh", *settings]
    with subprocess.Popen(training, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        if with_page:
            while not (run_dir / "metrics.jsonl").exists():
                assert run.poll() is None
                time.sleep(0.1)
            page = [*command, "view", str(run_dir)]
            with subprocess.Popen(page, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
                assert server.stdout is not None
                watch(Browser(server.stdout.readline().strip()), run)
                server.terminate()
        assert run.wait() == 0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([row["time/step_s"] for row in rows if "time/step_s" in row][steps // 8 :])


def watch(browser: Browser, run: subprocess.Popen[bytes]) -> None:
    """Each view in turn, as long as the run goes on."""
    one = browser.ask("/api/runs")[0]["runs"][0]["id"]
    names = [metric["name"] for metric in browser.ask("/api/metrics", run=one)[0]["metrics"]]
    views: list[tuple[str, dict[str, Any]]] = [
        ("curves", {"name": names, "points": 400}), ("groups", {}), ("timeline", {}), ("cluster", {})
    ]  # fmt: skip
    turn = 0
    while run.poll() is None:
        browser.ask("/api/runs")
        name, parameters = views[turn % len(views)]
        browser.ask(f"/api/{name}", run=one, **parameters)
        turn += 1
        time.sleep(LOOK_EVERY_S)


def beside(*, pairs: int, steps: int) -> None:
    found: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(pairs):
        for with_page in (False, True) if pair % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                found[with_page].append(train(Path(folder), steps=steps, with_page=with_page))
        print(
            f"pair {pair + 1}: {found[False][-1]:.4f} s a step alone, {found[True][-1]:.4f} s with the page", flush=True
        )
    ratios = [page / alone for alone, page in zip(found[False], found[True], strict=True)]
    print(
        json.dumps(
            {
                "benchmark": "view beside a run", "steps": steps, "alone_s": statistics.median(found[False]),
                "page_s": statistics.median(found[True]), "ratio": round(statistics.median(ratios), 4),
                "ratios": [round(ratio, 4) for ratio in ratios],
            }
        )
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", action="store_true", help="measure the steps of a run with and without the page")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--groups-per-step", type=int, default=10)
    parser.add_argument("--keep", type=Path, help="where to make the run, and leave it")
    given = parser.parse_args()
    if given.beside:
        beside(pairs=given.pairs, steps=120)
        return
    with tempfile.TemporaryDirectory() as folder:
        run_dir = (given.keep or Path(folder)) / "large"
        if not run_dir.exists():
            generate(run_dir, steps=given.steps, groups=given.groups_per_step)
        size = sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())
        one = measure(run_dir)
    print(
        f"server up in {one['server_up_s']} s (CPU {one['server_up_cpu_s']} s), index {one['index_s']} s, "
        f"{one['memory_mib']} MiB (peak {one['peak_memory_mib']}), CPU in all {one['cpu_s']} s"
    )
    for view, numbers in one["views"].items():
        print(
            f"  {view:<24} {numbers['s']:8.3f} s  CPU {numbers.get('cpu_s', 0):5.2f} s  {numbers.get('kb', 0):10.1f} kB"
        )
    print(json.dumps({"steps": given.steps, "groups": given.steps * given.groups_per_step, "run_bytes": size, **one}))


if __name__ == "__main__":
    main()
