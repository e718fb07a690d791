"""Sampled tokens per second of episodes of many turns, against single-turn completions of the same lengths.

python -m benchmarks.episodes                    64 episodes of 8 turns on the 0.8M model, in the engine's sessions
python -m benchmarks.episodes --spread 0.5       turns and observations of different lengths
python -m benchmarks.episodes --way class --observed 32       a class with a tool, in processes of its own, a call in each turn
python -m benchmarks.episodes --way endpoint --episodes 512   over HTTP, the clients in a process of their own
python -m benchmarks.episodes --without-sessions each turn fills everything again

An episode is a prompt, then turns: sampled tokens, and observation tokens behind all but the last. The single-turn side has the
same number of sampled tokens behind a prompt that holds the observations, so both end with the same length. A way is how the turns reach the
engine; both sides are measured in turn, in one process. With `--way class` the prompt is what the chat template writes. `cpu_s` counts the
processes of clients and environments too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.class_side import ClassSide
from benchmarks.common import WORKLOADS, build_model_dir, print_result
from benchmarks.endpoint import EndpointSide
from benchmarks.ours import make_config, make_workers
from benchmarks.sides import Lengths, Side, cpu_s
from rollcall.base.types import Ints
from rollcall.engine.protocol import Core, Request, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The lengths of one episode."""

    prompt: Ints
    sampled: tuple[int, ...]  # of each turn
    observed: tuple[Ints, ...]  # behind each turn but the last


def make_plans(args: argparse.Namespace, *, prompt_tokens: int, vocabulary: int) -> list[Plan]:
    draw = random.Random("episodes")

    def length(usual: int) -> int:
        spread = round(usual * args.spread)
        return draw.randint(usual - spread, usual + spread)

    def tokens(count: int) -> Ints:
        return np.array([draw.randrange(2, vocabulary) for _ in range(count)], dtype=np.int32)

    return [
        Plan(
            prompt=tokens(prompt_tokens),
            sampled=tuple(max(1, length(args.sampled)) for _ in range(args.turns)),
            observed=tuple(tokens(max(1, length(args.observed))) for _ in range(args.turns - 1)),
        )
        for _ in range(args.episodes)
    ]


def sampling(max_tokens: int) -> Sampling:
    return Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=max_tokens, stop_token_ids=(), stop_strings=())


def single_turn(engine: Core, plans: Sequence[Lengths], *, tag: str) -> int:
    """All sampled tokens in one request of each episode; how many there were."""
    for number, plan in enumerate(plans):
        prompt = np.concatenate((plan.prompt, *plan.observed))
        engine.submit(
            Request(id=f"{tag}/{number}", prompt_ids=prompt, seed=number, sampling=sampling(sum(plan.sampled)))
        )
    count = 0
    while engine.num_unfinished:
        count += sum(len(completion.token_ids) for completion in engine.step().values())
    return count


def through_engine(engine: Core, plans: Sequence[Lengths], *, tag: str, sessions: bool = True) -> int:
    """An environment that answers at once: each turn's request goes out when the one before is back."""
    ids = [plan.prompt for plan in plans]

    def submit(number: int, turn: int) -> None:
        engine.submit(
            Request(
                id=f"{tag}/{number}/{turn}",
                prompt_ids=ids[number],
                seed=number * 100 + turn,
                sampling=sampling(plans[number].sampled[turn]),
                order=(0, number, 0),
                session=f"{tag}/{number}" if sessions else None,
            )
        )

    for number in range(len(plans)):
        submit(number, 0)
    count = 0
    while engine.num_unfinished:
        for request_id, completion in engine.step().items():
            number, turn = map(int, request_id.split("/")[-2:])
            count += len(completion.token_ids)
            if turn + 1 < len(plans[number].sampled):
                ids[number] = np.concatenate((ids[number], completion.token_ids, plans[number].observed[turn]))
                submit(number, turn + 1)
            else:
                engine.end_session(f"{tag}/{number}")
    return count


class EngineSide:
    def __init__(self, engine: Core, *, sessions: bool) -> None:
        self._engine, self._sessions = engine, sessions
        self.pids: list[int] = []

    def round(self, plans: Sequence[Lengths], *, tag: str) -> int:
        return through_engine(self._engine, plans, tag=tag, sessions=self._sessions)

    def close(self) -> None:
        """It has nothing of its own."""


def make_side(engine: Any, args: argparse.Namespace) -> Side:
    if args.way == "endpoint":
        return EndpointSide(engine, running=args.running)
    if args.way == "class":
        return ClassSide(engine, max_turns=args.turns, episodes=args.episodes, running=args.running)
    return EngineSide(engine, sessions=not args.without_sessions)


def prompt_tokens_of(side: Side, args: argparse.Namespace, *, usual: int) -> int:
    if not isinstance(side, ClassSide):
        return usual
    shortest = args.observed - round(args.observed * args.spread)
    if shortest < side.least_observed:
        raise SystemExit(
            f"--observed {args.observed} with --spread {args.spread}: with the chat template an observation has at least "
            f"{side.least_observed} tokens; give more"
        )
    return side.prompt_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("class", "endpoint", "engine"), default="engine")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="rollout-0.8m", help="whose model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--sampled", type=int, default=16, help="tokens of a turn")
    parser.add_argument("--observed", type=int, default=8, help="tokens behind a turn")
    parser.add_argument("--spread", type=float, default=0.0, help="lengths differ by up to this share")
    parser.add_argument("--running", type=int, default=512, help="rollout.max_running, of both sides")
    parser.add_argument("--threads", type=int, help="of the engine; absent: the workload's")
    parser.add_argument("--without-sessions", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = build_model_dir(workload, Path(folder) / "model")
        config = make_config(
            workload, model_dir, Path(folder) / "run", device=args.device, steps=1, max_running=args.running
        )
        workers = make_workers(config)
        torch.set_num_threads(args.threads or workload.threads)
        side = make_side(workers.engine.core, args)
        try:
            prompt_tokens = prompt_tokens_of(side, args, usual=workload.prompt_tokens)
            plans = make_plans(args, prompt_tokens=prompt_tokens, vocabulary=workload.vocab_size)
            episodes, single = measure_pair(workers.engine.core, side, plans, repeats=args.repeats)
        finally:
            side.close()
            workers.close()
    ratio = statistics.median(one / other for one, other in zip(single["seconds"], episodes["seconds"], strict=True))
    print_result("episodes", workload=args.workload, device=args.device, ours=episodes, peer=single, ratio=ratio)


def measure_pair(engine: Core, side: Side, plans: list[Plan], *, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both sides in turn, so that a change of the machine's speed meets both; the first of each is not counted."""
    sides: tuple[Callable[[str], int], ...] = (
        lambda tag: side.round(plans, tag=tag),
        lambda tag: single_turn(engine, plans, tag=tag),
    )
    wanted = sum(sum(plan.sampled) for plan in plans)
    seconds: tuple[list[float], list[float]] = ([], [])
    spent_s: tuple[list[float], list[float]] = ([], [])  # tells more than the clock on a machine with other work
    for repeat in range(repeats + 1):
        for which, run in enumerate(sides):
            start_s, start_cpu_s = time.perf_counter(), cpu_s(side.pids)
            count = run(f"{repeat}-{which}")
            seconds[which].append(time.perf_counter() - start_s)
            spent_s[which].append(cpu_s(side.pids) - start_cpu_s)
            assert count == wanted, f"{count} tokens instead of {wanted}"
    episodes, single = (
        {
            "tokens_per_s": round(wanted / statistics.median(found[1:]), 1),
            "seconds": [round(second, 4) for second in found[1:]],
            "cpu_s": [round(second, 4) for second in spent[1:]],
        }
        for found, spent in zip(seconds, spent_s, strict=True)
    )
    return episodes, single


if __name__ == "__main__":
    main()
