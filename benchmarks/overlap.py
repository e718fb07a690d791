"""What running ahead brings, and what a slow node costs.

python -m benchmarks.overlap                        in threads of this process
python -m benchmarks.overlap --ray                  in processes on a Ray of this machine

Rollout and actor processes are stand-ins that sleep; the controller, the router and the remote handles are the real ones.
1. Disaggregated, rollout and update of a step taking equal time: steps per hour with `trainer.staleness` 1 over those
   with 0. The bar is 1.6.
2. Eight rollout processes, one of which takes 4 times as long for everything: its step over the balanced one. The bar is
   1.15; dividing the work perfectly would give 8 / 7.25 = 1.10.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import print_result
from benchmarks.standin_worker import Pace
from benchmarks.standins import make_workers, run_steps, stop, team_of, team_on_ray
from rollcall.base.journal import Journal
from rollcall.config import Config, parse_config

SPEEDUP_BAR, SLOW_BAR = 1.6, 1.15
SAMPLES = 8
WARMUP = 2  # steps: the router knows nothing of the first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", action="store_true", help="stand-ins in processes of their own")
    parser.add_argument("--rollout-s", type=float, default=4.0, help="of a step, on equal workers")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    ahead = measure_overlap(args)
    slow = measure_slow(args)
    print_result(
        "overlap",
        workload=f"rollout {args.rollout_s:g} s, update {args.rollout_s:g} s; one of 8 rollout processes 4 times slower",
        device="cpu",
        ours={"overlap": ahead, "slow_node": slow, "workers": "processes" if args.ray else "threads"},
        peer=None,
        ratio=None,
    )


def measure_overlap(args: argparse.Namespace) -> dict[str, Any]:
    num_workers, per_worker = 4, 4
    rollout = Pace(request_s=args.rollout_s / per_worker)
    paces = [rollout] * num_workers + [Pace(update_s=args.rollout_s)]
    step_s = {
        staleness: run(args, paces, prompts=num_workers * per_worker, room=SAMPLES, staleness=staleness)[0]
        for staleness in (0, 1)
    }
    speedup = step_s[0] / step_s[1]
    row = {
        "step_s": step_s[0],
        "step_s_ahead": step_s[1],
        "speedup": round(speedup, 3),
        "bar": SPEEDUP_BAR,
        "met": speedup >= SPEEDUP_BAR,
    }
    print(row, flush=True)
    return row


def measure_slow(args: argparse.Namespace) -> dict[str, Any]:
    num_workers, places, waves = 8, 4, 8
    fast = Pace(request_s=args.rollout_s / waves, places=places)
    slow = Pace(request_s=4 * fast.request_s, places=places)
    found = {}
    for name, first in (("balanced", fast), ("slow", slow)):
        paces = [first] + [fast] * (num_workers - 1) + [Pace(update_s=0.0)]
        found[name] = run(args, paces, prompts=num_workers * places * waves, room=places * SAMPLES, staleness=0)
    cost = found["slow"][0] / found["balanced"][0]
    row = {
        "balanced_step_s": found["balanced"][0],
        "slow_step_s": found["slow"][0],
        "cost": round(cost, 3),
        "bar": SLOW_BAR,
        "met": cost <= SLOW_BAR,
        "cost_over_nominal": round(found["slow"][0] / args.rollout_s, 3),
        "perfect": round(num_workers / (num_workers - 0.75), 3),
        "share_of_the_slow": round(found["slow"][1], 4),
    }
    print(row, flush=True)
    return row


def run(
    args: argparse.Namespace, paces: Sequence[Pace], *, prompts: int, room: int, staleness: int
) -> tuple[float, float]:
    """Median seconds from one step's end to the next, and the share of groups that the first process made."""
    actor = len(paces) - 1
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), prompts=prompts, steps=args.steps, staleness=staleness)
        team = (
            team_on_ray(paces, actors=[actor])
            if args.ray
            else team_of(paces, node_ranks=range(len(paces)), actors=[actor])
        )
        try:
            recorder = run_steps(config, make_workers(config, team, prompts=prompts, room=room))
        finally:
            stop(team)
        made = Counter(
            group.worker
            for step in range(WARMUP + 1, args.steps + 1)
            for group in Journal(config.run.dir / "journal").read(step)
        )
    first = sum(count for name, count in made.items() if name.startswith("rollout-0 "))
    return round(statistics.median(recorder.step_seconds()[WARMUP - 1 :]), 4), first / made.total()


def make_config(folder: Path, *, prompts: int, steps: int, staleness: int) -> Config:
    return parse_config(
        {
            "run": {"dir": str(folder / "run")},
            "data": {"val": None, "prompts_per_step": prompts},
            "rollout": {"samples_per_prompt": SAMPLES, "max_response_tokens": 8},
            "reward": [{"type": "exact"}],
            "trainer": {
                "steps": steps, "save_every": 0, "eval_every": 0, "loggers": [], "staleness": staleness
            },
        }
    )  # fmt: skip


if __name__ == "__main__":
    main()
