"""Task makers and the command that writes their files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import typer
from typer.testing import CliRunner

from rollcall.cli.config import data
from rollcall.config import DataSection
from rollcall.loop.data import make
from rollcall.loop.data.arithmetic import arithmetic
from rollcall.loop.data.load import load_prompts
from rollcall.loop.data.make import countdown, gsm8k, make_task, write_parquet
from rollcall.loop.data.rows import Row, read_rows
from rollcall.reward.functions import build_function


def run_data(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(data)
    return CliRunner().invoke(app, list(arguments))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(path).to_pylist()


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def needs_carry(a: int, b: int) -> bool:
    return a % 10 + b % 10 >= 10


def test_arithmetic_splits_its_sums_into_disjoint_parts() -> None:
    train = [row["prompt"] for row in arithmetic(split="train", seed=1)]
    val = [row["prompt"] for row in arithmetic(split="val", seed=1)]
    sums = [(a, b) for a in range(50) for b in range(50) if needs_carry(a, b) or (a + b) % 2]
    assert sorted(train + val) == sorted(f"{a}+{b}=" for a, b in sums)
    assert sum(needs_carry(a, b) for a, b in sums) > len(sums) / 2
    assert 0.03 < len(val) / len(sums) < 0.25
    held_out = set(val)
    assert all(f"{b}+{a}=" in held_out for a, b in (prompt[:-1].split("+") for prompt in val))
    assert train != [row["prompt"] for row in arithmetic(split="train", seed=2)]


@pytest.mark.parametrize("seed", [1, 2])
def test_no_seed_holds_out_sums_that_the_embedded_model_has_seen(seed: int) -> None:
    made = make_task("arithmetic", num=None, seed=seed, source=None)
    seen = {row["prompt"] for row in arithmetic(split="train")}  # scripts/make_arithmetic_model.py shows these
    assert made.test and not seen & {row["prompt"] for row in made.test}


def test_the_files_of_arithmetic_hold_the_rows_of_the_demo() -> None:
    made = make_task("arithmetic", num=None, seed=0, source=None)
    assert list(made.train) == [row.columns for row in read_rows("builtin:arithmetic", split="train")]
    assert list(made.test) == [row.columns for row in read_rows("builtin:arithmetic", split="val")]


def test_every_countdown_puzzle_is_distinct_and_has_the_solution_it_says() -> None:
    score = build_function({"type": "countdown", "format_score": 0.1})
    rows = list(countdown(300, seed=3))
    assert rows == list(countdown(300, seed=3))
    assert len({(tuple(sorted(row["numbers"])), row["target"]) for row in rows}) == 300
    for row in rows:
        assert score(row["prompt"], f"<answer>{row['answer']}</answer>", row["answer"], row) == 1
        assert all(str(number) in row["prompt"] for number in [*row["numbers"], row["target"]])


def test_gsm8k_takes_the_result_after_the_hashes(tmp_path: Path) -> None:
    for split, count in (("train", 5), ("test", 3)):
        rows = [{"question": f"q{index}?", "answer": f"1+1=2\n#### 1,{index:03}"} for index in range(count)]
        jsonl(tmp_path / "source" / f"{split}.jsonl", rows)
    result = run_data("gsm8k", "--source", str(tmp_path / "source"), "--num", "4", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    train, test = rows_of(tmp_path / "out" / "train.parquet"), rows_of(tmp_path / "out" / "test.parquet")
    assert [row["answer"] for row in train] == ["1000", "1001", "1002", "1003"] and len(test) == 3
    assert train[0]["prompt"].startswith("q0?") and train[0]["solution"] == "1+1=2"


def test_a_single_source_file_is_split_without_overlap(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "all.jsonl", [{"question": f"q{n}?", "answer": f"#### {n}"} for n in range(200)])
    made = make_task("gsm8k", num=None, seed=0, source=source)
    train, test = {row["answer"] for row in made.train}, {row["answer"] for row in made.test}
    assert train | test == {str(n) for n in range(200)} and not train & test and len(train) > len(test) > 0


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"so $\boxed{1}$ or $\boxed{2}$", "2"),
        (r"so $\boxed 7$.", "7"),
        (r"so \fbox{9}", "9"),
    ],
)
def test_math_takes_what_is_boxed(solution: str, answer: str) -> None:
    (row,) = make.math([Row("m, row 1", "m:1", {"problem": "p", "solution": solution, "level": "Level 5"})])
    assert (row["answer"], row["level"], row["type"]) == (answer, "Level 5", "")


def test_rows_without_a_marked_result_are_named() -> None:
    with pytest.raises(ValueError, match="g, row 4: the answer has no '####'"):
        list(gsm8k([Row("g, row 4", "g:4", {"question": "q", "answer": "5"})]))
    with pytest.raises(ValueError, match=r"m, row 2: the solution has no \\boxed"):
        list(make.math([Row("m, row 2", "m:2", {"problem": "q", "solution": "5"})]))
    with pytest.raises(ValueError, match="no text in column 'question'; its columns are a, b"):
        list(gsm8k([Row("g, row 1", "g:1", {"a": 1, "b": 2})]))


def test_an_unreachable_hub_is_reported_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    result = run_data("gsm8k", "--out", str(tmp_path))
    assert isinstance(result.exception, ValueError)
    assert "no route to host" in str(result.exception) and "--source FILE" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_files_from_the_hub_are_read_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    names = ["README.md", "main/test-0.parquet", "main/train-0.parquet", "socratic/train-0.parquet"]
    for name in names[1:]:
        write_parquet([{"question": name, "answer": "#### 1"}], tmp_path / "hub" / name)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: names)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name, **__: str(tmp_path / "hub" / name))
    made = make_task("gsm8k", num=None, seed=0, source=None)
    assert [row["prompt"].splitlines()[0] for row in made.train] == ["main/train-0.parquet"]
    assert [row["prompt"].splitlines()[0] for row in made.test] == ["main/test-0.parquet"]


@pytest.mark.parametrize("task", ["chain_sum", "rearc"])
def test_reasoning_gym_rows_survive_the_file_and_score_their_reference(task: str, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    result = run_data(f"reasoning-gym:{task}", "--num", "4", "--seed", "3", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    score = build_function({"type": "reasoning_gym"})
    rows = rows_of(tmp_path / "train.parquet") + rows_of(tmp_path / "test.parquet")
    assert len(rows) == 5
    for row in rows:
        assert score(row["prompt"], f"<answer>{row['answer']}</answer>", row["answer"], row) == 1
        assert score(row["prompt"], "<answer>zz</answer>", row["answer"], row) < 0.1


def test_reasoning_gym_tests_on_nothing_it_trains_on() -> None:
    pytest.importorskip("reasoning_gym")
    made = make_task("reasoning-gym:coin_flip", num=200, seed=0, source=None)
    trained = {row["prompt"] for row in made.train}
    assert not trained & {row["prompt"] for row in made.test}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("arithmetics", "the tasks are arithmetic, countdown"),
        ("chess", "the tasks are arithmetic, countdown"),
        ("reasoning-gym:chain_sums", "chain_sum"),
        ("reasoning-gym:boxnet", "no reference answers"),
        ("reasoning-gym:composite", "default settings"),
        ("reasoning-gym", "has no task ''"),
    ],
)
def test_tasks_that_cannot_be_made_are_refused(task: str, message: str) -> None:
    if task.startswith("reasoning-gym"):
        pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError) as caught:
        make_task(task, num=2, seed=0, source=None)
    assert message in str(caught.value)


def test_options_that_do_not_fit_the_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reads no file"):
        make_task("countdown", num=2, seed=0, source=tmp_path)
    with pytest.raises(ValueError, match="has only .* training rows"):
        make_task("arithmetic", num=100_000, seed=0, source=None)
    with pytest.raises(ValueError, match="contains no train.jsonl"):
        list(make_task("math", num=2, seed=0, source=tmp_path).train)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def failing() -> Any:
        yield {"prompt": "a"}
        raise RuntimeError("half way")

    assert write_parquet([{"prompt": "old"}], tmp_path / "train.parquet") == 1
    with pytest.raises(RuntimeError):
        write_parquet(failing(), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="no rows"):
        write_parquet([], tmp_path / "train.parquet")
    assert [file.name for file in tmp_path.iterdir()] == ["train.parquet"]
    assert rows_of(tmp_path / "train.parquet") == [{"prompt": "old"}]


def test_the_command_says_what_it_wrote_and_json_is_one_object(tmp_path: Path) -> None:
    text = run_data("countdown", "--num", "30", "--out", str(tmp_path))
    assert "30 rows" in text.stdout and "3 rows" in text.stdout and "[{type: countdown}]" in text.stdout
    result = json.loads(run_data("countdown", "--num", "30", "--out", str(tmp_path), "--json").stdout)
    assert [file["rows"] for file in result["files"]] == [30, 3]
    assert result["example"] == rows_of(tmp_path / "train.parquet")[0]


def test_help_shows_examples() -> None:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", run_data("--help").stdout)  # colours depend on where the test runs
    assert "rollcall data countdown --num 20000" in plain


def test_made_files_load_with_their_metadata(tmp_path: Path) -> None:
    class Bytes:
        chat_template = None

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
            return {"input_ids": [list(text.encode()) for text in texts]}

    run_data("countdown", "--num", "5", "--out", str(tmp_path))
    loaded = load_prompts(str(tmp_path / "train.parquet"), data=DataSection(), tokenizer=Bytes())
    prompt = loaded.prompts[0]
    assert prompt.id == "train:1" and set(prompt.metadata) == {"numbers", "target"}
    score = build_function({"type": "countdown", "format_score": 0.1})
    assert score(prompt.text, f"<answer>{prompt.answer}</answer>", prompt.answer, prompt.metadata) == 1
