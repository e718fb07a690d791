"""What the controller adds to a step: its wall time over the known durations of rollout and update.

python -m benchmarks.controller                     1 to 32 workers, and 4,096 completions of 4,096 tokens; in threads
python -m benchmarks.controller --ray               stand-ins in processes on a Ray of this machine
python -m benchmarks.controller --profile FILE      cProfile of the event loop's thread, of the large case alone

Stand-ins sleep; everything else is real: router, remote handles, reward processes, journal (with its fsync), samples,
metrics. Every worker does its requests one after the other, so they come back spread over the rollout. The bar: a step
takes at most 5% longer than rollout and update add up to.
"""

from __future__ import annotations

import argparse
import cProfile
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import print_result
from benchmarks.standin_worker import Pace
from benchmarks.standins import make_workers, run_steps, stop, team_of, team_on_ray
from rollcall.config import Config, parse_config

BAR = 0.05
WARMUP = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--ray", action="store_true", help="stand-ins in processes of their own")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--half-s", type=float, default=2.0, help="rollout and update of a small step, each")
    parser.add_argument("--large-half-s", type=float, default=20.0, help="the same of the large step; 0 leaves it out")
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    rows = []
    if args.profile is None:
        for num_workers in args.workers:
            rows.append(measure(args, num_workers=num_workers, per_worker=4, num_tokens=256, half_s=args.half_s))
    if args.large_half_s:
        most = max(args.workers)
        rows.append(
            measure(args, num_workers=most, per_worker=512 // most, num_tokens=4096, half_s=args.large_half_s, steps=3)
        )
    worst = max(row["over"] for row in rows)
    print_result(
        "controller",
        workload="stand-ins: rollout, then update; 8 completions a group",
        device="cpu",
        ours={
            "rows": rows,
            "worst_over": worst,
            "bar": BAR,
            "met": worst <= BAR,
            "workers": "processes" if args.ray else "threads",
        },
        peer=None,
        ratio=None,
    )


def measure(
    args: argparse.Namespace, *, num_workers: int, per_worker: int, num_tokens: int, half_s: float, steps: int = 0
) -> dict[str, Any]:
    prompts, samples = num_workers * per_worker, 8
    rollout = Pace(request_s=half_s / per_worker, num_tokens=num_tokens)
    paces = [*[rollout] * num_workers, Pace(update_s=half_s)]
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            Path(folder), prompts=prompts, samples=samples, num_tokens=num_tokens, steps=steps or args.steps
        )
        team = (
            team_on_ray(paces, actors=[num_workers])
            if args.ray
            else team_of(paces, node_ranks=range(num_workers + 1), actors=[num_workers])
        )
        profile = cProfile.Profile() if args.profile else None
        try:
            workers = make_workers(config, team, prompts=prompts, room=samples, prompt_tokens=256)
            if profile is not None:
                profile.enable()
            recorder = run_steps(config, workers)
        finally:
            if profile is not None:
                profile.disable()
                profile.dump_stats(args.profile)
            stop(team)
    step_s = statistics.median(recorder.step_seconds()[WARMUP - 1 :])
    row = {
        "workers": num_workers,
        "completions": prompts * samples,
        "tokens": num_tokens,
        "durations_s": 2 * half_s,
        "step_s": round(step_s, 4),
        "over": round(step_s / (2 * half_s) - 1, 4),
    }
    print(row, flush=True)
    return row


def make_config(folder: Path, *, prompts: int, samples: int, num_tokens: int, steps: int) -> Config:
    return parse_config(
        {
            "run": {"dir": str(folder / "run")},
            "data": {"val": None, "prompts_per_step": prompts},
            "rollout": {"samples_per_prompt": samples, "max_response_tokens": num_tokens},
            "reward": [{"type": "exact"}],
            "trainer": {"steps": steps, "save_every": 0, "eval_every": 0, "loggers": []},
        }
    )  # fmt: skip


if __name__ == "__main__":
    main()
