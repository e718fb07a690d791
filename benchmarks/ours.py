"""Our side of the benchmarks: the real workers and the real controller on a workload, nothing stopping early."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Workload
from rollcall.base.journal import Journal
from rollcall.checkpoint.store import CheckpointStore
from rollcall.config import Config, parse_config
from rollcall.loop.controller import Controller
from rollcall.loop.record import Record
from rollcall.loop.workers import Workers
from rollcall.observe.calls import BusySpans
from rollcall.observe.console import Console
from rollcall.observe.events import Events
from rollcall.observe.live import REWARDS
from rollcall.observe.progress import Progress
from rollcall.observe.recorder import Recorder as ProcessRecorder
from rollcall.run.local import build_workers


class Recorder:
    """A sink that keeps each step's metrics and when they came."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, dict[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "time/step_s" in metrics:
            self.rows.append((time.perf_counter(), dict(metrics)))

    def close(self) -> None:
        pass

    def step_seconds(self) -> list[float]:
        """Whole steps, from one step's log to the next: everything between is in it."""
        times = [when for when, _ in self.rows]
        return [after - before for before, after in zip(times, times[1:], strict=False)]


def make_config(
    workload: Workload,
    model_dir: Path,
    run_dir: Path,
    *,
    device: str,
    steps: int,
    engine: str = "native",
    compile: bool = False,
    max_running: int | None = None,
    **actor: Any,
) -> Config:
    """The workload as a run file, all its completions at once unless ``max_running`` is given; prompts of all steps in one data file."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    data = run_dir / "prompts.jsonl"
    prompts = [prompt for step in range(steps) for prompt in workload.prompts(step)]
    data.write_text("".join(json.dumps({"prompt": tokenizer.decode(prompt)}) + "\n" for prompt in prompts))
    return parse_config(
        {
            "run": {"dir": str(run_dir)},
            "model": {"path": str(model_dir), "dtype": workload.dtype, "device": device},
            "data": {
                "train": str(data), "val": None, "prompts_per_step": workload.num_prompts, "shuffle": False,
                "max_prompt_tokens": workload.prompt_tokens,
            },
            "rollout": {
                "engine": engine,
                "compile": compile,
                "samples_per_prompt": workload.samples_per_prompt,
                "max_response_tokens": max(workload.new_tokens),
                "max_running": max_running or workload.num_completions,
            },
            "reward": [{"type": "function", "path": "benchmarks.rewards:noise"}],
            "actor": {"lr": 1e-6, "compile": compile or None, **actor},
            "trainer": {"steps": steps, "save_every": 0, "eval_every": 0, "num_threads": workload.threads, "loggers": []},
        }
    )  # fmt: skip


def make_workers(config: Config) -> Any:
    """In this process, or in one of the cluster's where the run file has a cluster."""
    if config.cluster is None:
        workers: Any = build_workers(config)
    else:
        from rollcall.run.on_cluster import build_workers_on_cluster

        workers = build_workers_on_cluster(config, backend=None)
    workers.stop_token_ids = ()  # both sides sample exactly the workload's tokens
    return workers


@contextmanager
def one_node(folder: Path) -> Iterator[None]:
    """A cluster of this machine alone, with one slot, for as long as the block lasts."""
    os.environ |= {"ROLLCALL_STATE_DIR": str(folder / "state"), "ROLLCALL_CLUSTER": "bench"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    rollcall = [sys.executable, "-m", "rollcall"]
    place = ["--rank", "0", "--num-nodes", "1", "--rendezvous", str(folder / "meet"), "--slots", "1"]
    subprocess.run([*rollcall, "node", "--cluster", "bench", *place], check=True, timeout=300)
    try:
        yield
    finally:
        subprocess.run([*rollcall, "down", "--cluster", "bench"], check=True, timeout=120)


def run_steps(config: Config, workers: Workers) -> Recorder:
    """The training loop, journal and rewards included."""
    recorder, rewards = Recorder(), BusySpans(REWARDS)
    run_dir = config.run.dir
    store = CheckpointStore(run_dir / "checkpoints", keep_last=1, keep_best=0)
    console = Console(Progress(name=config.run.name, num_steps=config.trainer.steps))
    with Journal(run_dir / "journal") as journal, closing(Events(run_dir)) as events:
        controller = Controller(
            config,
            workers,
            journal=journal,
            record=Record(
                run_dir,
                config.trainer,
                workers,
                threshold=config.eval.threshold,
                store=store,
                sinks=[recorder],
                console=console,
            ),
            console=console,
            resume=None,
            events=events,
            rewards=rewards,
        )
        with closing(ProcessRecorder(run_dir, events=events, look=workers.look, rewards=rewards)):
            asyncio.run(controller.run())
    return recorder
