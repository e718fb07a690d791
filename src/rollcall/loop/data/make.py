"""Builds task files: train and test Parquet files with `prompt`, `answer` and the columns that the task's reward reads.

Each builder is deterministic for a given seed and keeps train and test disjoint.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.base.atomic import replacing
from rollcall.base.errors import in_one_line
from rollcall.loop.data.arithmetic import TEST_FRACTION, arithmetic, fraction
from rollcall.loop.data.columns import DataError
from rollcall.loop.data.rows import Row, read_rows
from rollcall.reward.functions import decode_entry, encode_entry
from rollcall.reward.math_answer import last_boxed

RowDict = dict[str, Any]

_ANSWER_TAG_ADVICE = "Put the final answer between <answer> and </answer>."
_HUB = {  # task -> repository, folder with the wanted configuration
    "gsm8k": ("openai/gsm8k", "main/"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", "data/"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """A task's rows, generated as they are read."""

    train: Iterable[RowDict]
    test: Iterable[RowDict]
    num_rows: int | None  # number of train and test rows together, if known before reading
    reward: str  # the type of reward that grades the task


def make_task(task: str, *, num: int | None, seed: int, source: Path | None) -> TaskRows:
    """Build a task's rows from its name on the command line; ``num`` is the number of training rows."""
    name, _, gym_task = task.partition(":")
    if source is not None and name not in _HUB:
        raise DataError(f"{task} is generated and reads no file; remove --source")
    if name == "reasoning-gym":
        return _make_generated(name, partial(reasoning_gym, gym_task, seed=seed), num_train=num or 1_000)
    if task == "countdown":
        return _make_generated(task, partial(countdown, seed=seed), num_train=num or 10_000)
    if task == "arithmetic":
        train, test = list(arithmetic(split="train", seed=seed)), list(arithmetic(split="val", seed=seed))
        if num is not None and num > len(train):
            raise DataError(f"--num {num}: arithmetic has only {len(train)} training rows; ask for at most that many")
        return TaskRows(train=train[:num], test=test, num_rows=len(train[:num]) + len(test), reward="exact")
    if task in _HUB:
        return _make_from_files(task, source=source, num=num, seed=seed)
    raise DataError(f"{task!r} is not a task; the tasks are arithmetic, countdown, gsm8k, math, reasoning-gym:TASK")


def write_parquet(rows: Iterable[RowDict], path: Path) -> int:
    """Write all rows atomically. Returns the number of rows."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(list(rows))
    if table.num_rows == 0:
        raise DataError(f"there are no rows for {path}; ask for more with --num, or give a larger --source")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        pyarrow.parquet.write_table(table, file)
    return table.num_rows


# Countdown


def countdown(num_rows: int, *, seed: int) -> Iterator[RowDict]:
    """Yield distinct puzzles with three or four numbers up to 99 and two-digit targets. Each is built from a solution, so it can be
    solved.

    ``answer`` is one solution; the reward reads ``numbers`` and ``target``.
    """
    rng = random.Random(seed)
    seen: set[tuple[tuple[int, ...], int]] = set()
    while len(seen) < num_rows:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice((3, 4)))]
        target, solution = _combine(numbers, rng)
        puzzle = (tuple(sorted(numbers)), target)
        if not 10 <= target <= 99 or puzzle in seen:
            continue
        seen.add(puzzle)
        shown = ", ".join(map(str, numbers))
        prompt = (
            f"Use each of the numbers {shown} exactly once, with + - * / and brackets, to make {target}. "
            f"Think first. {_ANSWER_TAG_ADVICE[:-1]} as one expression, for example <answer>(1+2)*3</answer>."
        )
        yield {"prompt": prompt, "answer": solution, "numbers": numbers, "target": target}


def _combine(numbers: list[int], rng: random.Random) -> tuple[int, str]:
    """Combine the numbers at random, two at a time, so that every result is a positive integer. Returns the result and its expression."""
    terms = [(number, str(number)) for number in numbers]
    while len(terms) > 1:
        (a, left), (b, right) = sorted((terms.pop(rng.randrange(len(terms))) for _ in range(2)), reverse=True)
        choices = [(a + b, "+"), (a * b, "*")]
        if a > b:
            choices.append((a - b, "-"))
        if a % b == 0:
            choices.append((a // b, "/"))
        value, sign = rng.choice(choices)
        terms.append((value, f"({left}{sign}{right})"))
    value, expression = terms[0]
    return value, expression[1:-1]


# GSM8K and MATH, from files or the hub


def gsm8k(rows: Iterable[Row]) -> Iterator[RowDict]:
    """Convert GSM8K's `question` and `answer` ("... #### 72"). Commas are removed from the number."""
    for row in rows:
        question, solution = _text(row, "question"), _text(row, "answer")
        reasoning, mark, answer = solution.rpartition("####")
        if not mark:
            raise DataError(
                f"{row.where}: the answer has no '####' before its result; GSM8K rows end with one, such as '#### 72'"
            )
        prompt = f"{question}\n\nThink step by step and end with the result after ####."
        yield {"prompt": prompt, "answer": answer.strip().replace(",", ""), "solution": reasoning.strip()}


def math(rows: Iterable[Row]) -> Iterator[RowDict]:
    r"""Convert MATH's `problem` and `solution`. The answer is the solution's last ``\boxed{...}``."""
    for row in rows:
        problem, solution = _text(row, "problem"), _text(row, "solution")
        answer = last_boxed(solution)
        if not answer:  # a few rows write ``\boxed 2`` or ``\fbox{2}``
            found = re.findall(r"\\(?:boxed|fbox)\s*\{?\s*([^\s{}$]+)", solution)
            answer = found[-1].rstrip(".") if found else None
        if answer is None:
            raise DataError(
                f"{row.where}: the solution has no \\boxed{{...}}; MATH solutions mark their result with it"
            )
        prompt = f"{problem}\n\nThink step by step and put the final answer in \\boxed{{}}."
        extra = {key: str(row.columns.get(key) or "") for key in ("level", "type")}
        yield {"prompt": prompt, "answer": answer, "solution": solution, **extra}


def _text(row: Row, key: str) -> str:
    value = row.columns.get(key)
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{row.where} has no text in column {key!r}; its columns are {', '.join(map(str, row.columns)) or 'none'}"
        )
    return value.strip()


def _make_from_files(task: str, *, source: Path | None, num: int | None, seed: int) -> TaskRows:
    maker, reward = {"gsm8k": (gsm8k, "number"), "math": (math, "math")}[task]
    if source is None:
        train, test = (_hub_rows(task, split) for split in ("train", "test"))
    elif source.is_dir():
        train, test = (read_rows(str(_split_file(source, split))) for split in ("train", "test"))
    else:
        rows = list(read_rows(str(source)))
        held_out = [fraction(f"{seed}:{row.columns}") < TEST_FRACTION for row in rows]
        train = (row for row, out in zip(rows, held_out, strict=True) if not out)
        test = (row for row, out in zip(rows, held_out, strict=True) if out)
    return TaskRows(train=maker(itertools.islice(train, num)), test=maker(test), num_rows=None, reward=reward)


def _split_file(folder: Path, split: str) -> Path:
    for suffix in (".jsonl", ".parquet", ".json"):
        if (folder / f"{split}{suffix}").exists():
            return folder / f"{split}{suffix}"
    raise DataError(f"--source {folder} contains no {split}.jsonl, {split}.parquet or {split}.json")


def _hub_rows(task: str, split: str) -> Iterator[Row]:
    from huggingface_hub import HfApi, hf_hub_download

    from rollcall.model.hub import hub_fault

    repository, folder = _HUB[task]
    try:
        if fault := hub_fault(repository, file="README.md", kind="dataset"):
            raise OSError(fault)
        names = HfApi().list_repo_files(repository, repo_type="dataset")
        wanted = [name for name in names if name.startswith(f"{folder}{split}") and name.endswith(".parquet")]
        files = [hf_hub_download(repository, name, repo_type="dataset") for name in wanted]
    except Exception as error:  # noqa: BLE001 - the hub client raises its own errors, its HTTP library's and the system's
        raise DataError(
            f"dataset {repository} cannot be fetched from the hub ({in_one_line(error)}); get its files elsewhere and pass "
            "--source FILE (or a folder with train.jsonl and test.jsonl), or name a mirror in HF_ENDPOINT"
        ) from None
    if not files:
        raise DataError(f"dataset {repository} has no {folder}{split}*.parquet; pass its files with --source")
    for file in files:
        yield from read_rows(file)


# Reasoning gym


def reasoning_gym(task: str, *, num_rows: int, seed: int) -> Iterator[RowDict]:
    """Yield rows from a reasoning-gym task, whose own scorer grades answers. Refuses tasks whose scorer cannot do this."""
    try:
        import reasoning_gym as gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError:
        raise DataError("reasoning-gym is not installed; pip install reasoning-gym") from None
    if task not in DATASETS:
        raise DataError(f"reasoning-gym has no task {task!r}; its tasks are {', '.join(sorted(DATASETS))}")
    try:
        dataset: Any = gym.create_dataset(task, size=num_rows, seed=seed)
    except Exception as error:  # noqa: BLE001 - each task checks its own settings in its own way
        raise DataError(f"reasoning-gym cannot make {task} with its default settings: {error}") from None
    entries = (dataset[index] for index in range(num_rows))
    first = next(entries)
    if first["answer"] is None:
        raise DataError(f"reasoning-gym's {task} has no reference answers; choose a task that has them")
    if dataset.score_answer(answer=str(first["answer"]), entry=decode_entry(encode_entry(first))) < 1:
        raise DataError(
            f"reasoning-gym's {task} does not give its own reference answer the full score; choose another task"
        )
    return (
        {
            "prompt": f"{entry['question']}\n\n{_ANSWER_TAG_ADVICE}",
            "answer": str(entry["answer"]),
            "reasoning_gym": {"task": task, "entry": encode_entry(entry)},
        }
        for entry in itertools.chain([first], entries)
    )


# Generated tasks


def _make_generated(name: str, make: Callable[..., Iterator[RowDict]], *, num_train: int) -> TaskRows:
    num_rows = num_train + max(1, min(1000, int(num_train * TEST_FRACTION)))
    rows = make(num_rows=num_rows)
    seen: set[str] = set()

    def train() -> Iterator[RowDict]:
        for row in itertools.islice(rows, num_train):
            seen.add(row["prompt"])
            yield row

    # A task with few distinct questions repeats them. A training question must not be in the test rows.
    test = (row for row in rows if row["prompt"] not in seen)
    return TaskRows(train=train(), test=test, num_rows=num_rows, reward=name.replace("-", "_"))
