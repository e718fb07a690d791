"""Run directories for the page, written without training: metrics, events, a journal, a tokenizer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rollcall.base.group_record import encode
from rollcall.base.types import (
    Completion,
    EndReason,
    Episode,
    FinishReason,
    Group,
    Prompt,
    Score,
    Segment,
    ToolCall,
    Turn,
)
from rollcall.config import default_run

BEGAN_S = float(int(time.time()) - 3600)
LETTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz:\n"
SPECIAL = ("<eos>", "<pad>")


def ids_of(text: str) -> np.ndarray:
    """Token ids of a text, one for each character, by the tokenizer of ``write_tokenizer``."""
    places = {letter: place for place, letter in enumerate(LETTERS)}
    return np.array([len(SPECIAL) + places.get(letter, 0) for letter in text], dtype=np.int32)


def write_tokenizer(run_dir: Path) -> None:
    """One token for each character; as text of the library, so that no test has to import it."""
    words = {word: place for place, word in enumerate([*SPECIAL, *LETTERS])}
    added = [
        {"id": place, "content": word, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for place, word in enumerate(SPECIAL)
    ]  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<pad>"}
    decoder = {"type": "Fuse"}
    whole = {"version": "1.0", "added_tokens": added, "pre_tokenizer": split, "model": model, "decoder": decoder}
    (run_dir / "tokenizer.json").write_text(json.dumps(whole))


def make_group(
    step: int,
    draw: int,
    *,
    texts: Sequence[str] = ("12", "13"),
    rewards: Sequence[float] = (1.0, 0.0),
    prompt: str = "5+7=",
    prompt_id: str = "",
    answer: str = "12",
    finish: FinishReason = FinishReason.STOP,
    errors: dict[str, str] | None = None,
    worker: str = "rollout 0 @ node 0",
    ids: np.ndarray | None = None,
) -> Group:
    completions = []
    for number, text in enumerate(texts):
        own = np.append(ids_of(text), 0).astype(np.int32) if ids is None else ids
        half = len(own) // 2
        completions.append(
            Completion(
                token_ids=own,
                logprobs=-np.random.default_rng([step, draw, number]).exponential(0.5, len(own)).astype(np.float32),
                mask=np.arange(len(own)) != 1,
                segments=(
                    Segment(version=max(step - 2, 0), num_tokens=half),
                    Segment(version=max(step - 1, 0), num_tokens=len(own) - half),
                ),
                finish=finish,
                seed=number,
                text=text,
                episode=None,
            )
        )
    scores = tuple(Score(value=value, parts={"exact": value}, errors=errors or {}) for value in rewards)
    return Group(
        step=step,
        draw=draw,
        prompt=Prompt(
            id=prompt_id or f"row-{draw % 7}",
            token_ids=ids_of(prompt),
            text=prompt,
            answer=answer,
            metadata={"level": draw % 3},
        ),
        completions=tuple(completions),
        scores=scores,
        started_s=BEGAN_S + step,
        finished_s=BEGAN_S + step + 0.5,
        worker=worker,
    )


def make_episodes(step: int, draw: int) -> Group:
    """Two attempts at a task that only the environment gives: one calls a tool, one says nothing."""
    call = ToolCall(name="add", arguments={"a": 1}, result="it is 3", failed=False)
    asks = Turn(num_sampled=1, num_observed=1, text="let me add", observation="it is 3", calls=(call,), reward=None)
    tells = Turn(num_sampled=1, num_observed=0, text="3", observation="", calls=(), reward=0.5)
    group = make_group(step, draw, texts=("3", ""), prompt="=", prompt_id="environment-train:609", answer="")

    def played(one: Completion, *turns: Turn) -> Completion:
        prompt_ids = ids_of("add 1 and 2")
        episode = Episode(
            prompt_ids=prompt_ids, turns=turns, branches=(), reward=None, metrics={}, ended=EndReason.DONE, error="",
            opening="add 1 and 2",
        )  # fmt: skip
        return replace(one, episode=episode)

    first, second = group.completions
    completions = (played(first, asks, tells), played(second, replace(tells, text="", reward=0.0)))
    return replace(group, prompt=replace(group.prompt, text=""), completions=completions)


def write_run_file(run_dir: Path, **sections: dict[str, Any]) -> None:
    """The default run file with some keys changed."""
    run = default_run()
    run["run"] = {**run["run"], "name": run_dir.name, "dir": str(run_dir)}
    for name, keys in sections.items():
        run[name] = {**(run.get(name) or {}), **keys}
    (run_dir / "run.yaml").write_text(yaml.safe_dump(run))


def metrics_row(step: int, *, num_steps: int, seed: int = 0) -> dict[str, Any]:
    share, wave = step / max(num_steps, 1), np.sin(step * 1.7 + seed)
    reward = 0.2 + 0.6 * (1 - np.exp(-3 * share)) + 0.05 * wave
    return {
        "step": step, "time": BEGAN_S + 2.0 * step, "train/reward_mean": reward, "train/reward_std": 0.3 - 0.1 * share,
        "train/accuracy": reward, "train/loss": 0.02 * wave, "train/entropy": 1.5 * np.exp(-share) + 0.02 * wave,
        "train/approx_kl": 0.001 * (1 + wave), "train/grad_norm": 1 + 0.4 * wave, "train/lr": 1e-5, "train/clip_fraction": 0.01,
        "rollout/tokens": 4096.0, "rollout/tokens_per_s": 2000 + 100 * wave, "rollout/response_length_mean": 60 + 40 * share,
        "rollout/truncated_fraction": 0.1 * share, "rollout/logprob_mismatch": 0.002 + 0.0005 * wave,
        "rollout/logprob_mismatch_max": 0.05, "rollout/staleness_mean": 0.0, "reward/exact": reward, "time/step_s": 2.0 + 0.1 * wave,
        "time/rollout_s": 1.2, "time/update_s": 0.7, "time/sync_s": 0.1, "perf/train_tokens_per_s": 9000.0,
        "perf/peak_memory_gib": 1.25,
    }  # fmt: skip


def write_metrics(run_dir: Path, steps: Iterable[int], *, num_steps: int, seed: int = 0, eval_every: int = 10) -> None:
    """Appended, as a run does."""
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = metrics_row(step, num_steps=num_steps, seed=seed)
            if step == 0:
                row = {"step": 0, "time": BEGAN_S}
            if step % eval_every == 0:
                row |= {
                    "eval/accuracy": 0.1 + 0.8 * (step / num_steps) ** (1 / (1 + seed)),
                    "eval/graded_fraction": 0.0,
                }
            file.write(
                json.dumps({name: float(value) if name != "step" else value for name, value in row.items()}) + "\n"
            )


def write_events(run_dir: Path, steps: Iterable[int]) -> None:
    phases = (("rollout", 1.2), ("aggregate", 0.01), ("update", 0.7), ("sync", 0.09))
    with (run_dir / "events.jsonl").open("a") as file:
        for step in steps:
            at = BEGAN_S + 2.0 * (step - 1)
            for phase, took in phases:
                begun = {"phase": phase, "step": step, "start_s": round(at, 3)}
                whom = "rollout 0 @ node 0" if phase == "rollout" else None
                over = {"end_s": round(at + took, 3), "duration_s": took, "waited_for": whom, "result": None}
                file.write(json.dumps(begun) + "\n" + json.dumps(begun | over) + "\n")
                at += took


def append_groups(run_dir: Path, groups: Iterable[Group], *, again: bool = False) -> None:
    folder = run_dir / "journal"
    folder.mkdir(exist_ok=True)
    for group in groups:
        with (folder / f"{group.step:06d}.groups").open("ab") as file:
            file.write(encode(group, again=again))


def mark_trained(run_dir: Path, step: int, draws: Sequence[int]) -> None:
    with (run_dir / "journal" / "trained.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "draws": list(draws), "version": step}) + "\n")


def write_run(
    folder: Path, name: str = "run", *, steps: int = 20, groups: int = 3, seed: int = 0, **sections: dict[str, Any]
) -> Path:
    """A run with ``groups`` groups in each of its steps."""
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    write_run_file(run_dir, **{"trainer": {"steps": steps}, **sections})
    write_tokenizer(run_dir)
    write_metrics(run_dir, range(steps + 1), num_steps=steps, seed=seed)
    write_events(run_dir, range(1, steps + 1))
    draw = 0
    for step in range(1, steps + 1):
        made = []
        for place in range(groups):
            one, other = (draw * 3 + seed) % 50, (draw * 7) % 50
            right = str(one + other)
            wrong = str(one + other + 1)
            texts = [right, wrong, right if draw % 2 else wrong, wrong]
            rewards = [float(text == right) for text in texts]
            if place == 0 and step % 5 == 0:
                texts, rewards = [wrong] * 4, [0.0] * 4
            made.append(make_group(step, draw, texts=texts, rewards=rewards, prompt=f"{one}+{other}=", answer=right))
            draw += 1
        append_groups(run_dir, made)
        mark_trained(run_dir, step, [group.draw for group in made])
    return run_dir
