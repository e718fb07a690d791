"""Reading prompts and the order they are drawn in."""

from __future__ import annotations

import datetime
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import a_tokenizer
from transformers import PreTrainedTokenizerFast

from rollcall.base.errors import ConfigError
from rollcall.config import DataSection, load_config
from rollcall.loop.data import order
from rollcall.loop.data.columns import DataError
from rollcall.loop.data.load import PromptSet, load_prompts
from rollcall.loop.data.order import prompt_index
from rollcall.loop.data.rows import READERS

CHAT_TEMPLATE = (
    "<bos>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def a_file(path: Path, *rows: Any, name: str = "train.jsonl") -> str:
    file = path / name
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    else:
        file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(file)


def load(source: str, *, chat_template: str | None = None, limit: int | None = None, **section: Any) -> PromptSet:
    tokenizer = a_tokenizer(chat_template=chat_template)
    return load_prompts(source, data=DataSection(**section), tokenizer=tokenizer, limit=limit)


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.parquet"])
def test_rows_of_each_format_become_the_same_prompts(name: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+2=", "answer": 3, "level": [1, 2], "id": None},
        {"prompt": "\N{GREEK SMALL LETTER PI}?", "answer": None, "level": [3], "id": "pi"},
    ]
    loaded = load(a_file(tmp_path, *rows, name=name))
    first, second = loaded.prompts
    assert (first.id, first.text, first.answer, first.metadata) == (
        "train:1",
        "1+2=",
        "3",
        {"level": [1, 2], "answer": 3},
    )
    assert (second.id, second.answer) == ("pi", "")
    assert first.token_ids.dtype == np.int32
    assert a_tokenizer().decode(second.token_ids.tolist()) == "<bos>\N{GREEK SMALL LETTER PI}?"


@pytest.mark.parametrize(
    ("value", "expected"), [("46", "46"), (46, "46"), (46.0, "46"), (0.5, "0.5"), (True, "true"), (False, "false")]
)
def test_answers_become_text(value: Any, expected: str, tmp_path: Path) -> None:
    (prompt,) = load(a_file(tmp_path, {"prompt": "p", "answer": value})).prompts
    assert prompt.answer == expected


def test_an_id_of_true_is_written_as_in_json(tmp_path: Path) -> None:
    assert [prompt.id for prompt in load(a_file(tmp_path, {"prompt": "p", "id": True})).prompts] == ["true"]


def test_a_prompt_cannot_be_its_own_answer() -> None:
    with pytest.raises(ConfigError, match=r"data\.answer_key=answer is also data\.prompt_key"):
        load_config(None, ["data.prompt_key=answer"])


def test_plain_text_gets_the_tokenizers_own_special_tokens_once(tmp_path: Path) -> None:
    (prompt,) = load(a_file(tmp_path, {"prompt": "ab"})).prompts
    assert prompt.token_ids.tolist()[0] == 0 and len(prompt.token_ids) == 3


def test_a_chat_prompt_has_its_special_tokens_once(tmp_path: Path) -> None:
    (prompt,) = load(a_file(tmp_path, {"prompt": "ab"}), chat_template=CHAT_TEMPLATE).prompts
    assert prompt.text == "<bos>[user]ab[assistant]"
    assert prompt.token_ids.tolist().count(0) == 1
    assert a_tokenizer().decode(prompt.token_ids.tolist()) == prompt.text
    assert prompt.metadata["prompt_messages"] == [{"role": "user", "content": "ab"}]


def test_chat_false_keeps_text_plain_although_there_is_a_template(tmp_path: Path) -> None:
    (prompt,) = load(a_file(tmp_path, {"prompt": "ab"}), chat_template=CHAT_TEMPLATE, chat=False).prompts
    assert prompt.text == "ab" and "prompt_messages" not in prompt.metadata


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_messages_are_rendered_with_the_system_message_before_them(name: str, tmp_path: Path) -> None:
    own_system = [{"role": "system", "content": "mine", "name": "x"}, {"role": "user", "content": "b", "name": None}]
    rows = [{"prompt": [{"role": "user", "content": "a", "name": None}]}, {"prompt": own_system}]
    source = a_file(tmp_path, *rows, name=name)
    first, second = load(source, chat_template=CHAT_TEMPLATE, system="be brief", template="<{prompt}>").prompts
    assert first.text == "<bos>[system]be brief[user]a[assistant]"
    assert second.text == "<bos>[system]mine[user]b[assistant]"
    assert second.metadata["prompt_messages"][1] == {"role": "user", "content": "b"}


def test_the_template_goes_around_text_prompts_with_braces_in_them(tmp_path: Path) -> None:
    source = a_file(tmp_path, {"prompt": r"\frac{1}{2}"})
    (plain,) = load(source, template="Q: {prompt} {x}\nA:").prompts
    assert plain.text == "Q: \\frac{1}{2} {x}\nA:"
    (chat,) = load(source, chat_template=CHAT_TEMPLATE, template="Q: {prompt}").prompts
    assert chat.text == r"<bos>[user]Q: \frac{1}{2}[assistant]"


def test_overlong_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * length, "id": length} for length in (3, 9, 4, 10)]
    loaded = load(a_file(tmp_path, *rows), max_prompt_tokens=5)
    assert [prompt.id for prompt in loaded.prompts] == ["3", "4"] and loaded.num_overlong == 2


def test_the_limit_counts_prompts(tmp_path: Path) -> None:
    source = a_file(tmp_path, *({"prompt": str(number)} for number in range(5000)))
    assert [prompt.text for prompt in load(source, limit=3).prompts] == ["0", "1", "2"]
    assert len(load(source).prompts) == 5000


def test_the_builtin_task_has_disjoint_splits() -> None:
    tokenizer, section = a_tokenizer(), DataSection()
    train, val = (
        load_prompts("builtin:arithmetic", data=section, tokenizer=tokenizer, split=split) for split in ("train", "val")
    )
    assert train.source == "builtin:arithmetic" and len(train.prompts) > len(val.prompts) > 0
    assert not {prompt.text for prompt in train.prompts} & {prompt.text for prompt in val.prompts}
    assert not {prompt.id for prompt in train.prompts} & {prompt.id for prompt in val.prompts}
    a, b = train.prompts[0].text.rstrip("=").split("+")
    assert train.prompts[0].answer == str(int(a) + int(b))


@pytest.mark.parametrize(
    ("rows", "section", "message"),
    [
        ([], {}, "train.jsonl has no rows"),
        (["\n\n"], {}, "train.jsonl has no rows"),
        ([{"prompt": "a"}, "{nope\n"], {}, "train.jsonl, row 2 is not valid JSON"),
        ([{"prompt": "a"}, "\n", "[1]\n"], {}, "train.jsonl, row 3 is a list"),
        ([{"prompts": "a", "x": 1}], {}, "row 1 has no column 'prompt'; its columns are prompts, x; did you mean 'prompts'?"),
        ([{"question": "a", "solution": 1}], {}, "did you mean 'question'? set data.prompt_key=question"),
        ([{"q": "a"}], {}, "its columns are q; set data.prompt_key to the right column"),
        ([{"prompt": "a"}, {"prompt": 5}], {}, "row 2: the prompt is int (5)"),
        ([{"prompt": None}], {}, "row 1: the prompt is NoneType"),
        ([{"prompt": []}], {}, "row 1: the prompt is an empty list"),
        ([{"prompt": [{"role": "user"}]}], {}, "row 1: message 0 is {'role': 'user'}"),
        ([{"prompt": ""}], {}, "row 1: the prompt is empty"),
        ([{"prompt": [{"role": "user", "content": "a"}]}], {}, "the tokenizer has no chat template"),
        ([{"prompt": "a"}], {"chat": True}, "data.chat=true needs a chat template"),
        ([{"prompt": "a"}], {"system": "s"}, "data.system needs chat prompts"),
        ([{"prompt": "a"}], {"template": "Q:"}, "data.template='Q:' does not contain {prompt}"),
        ([{"prompt": "a"}], {"answer_key": "solution"}, "row 1 has no column 'solution'"),
        ([{"prompt": "a", "answer": [1]}], {}, "row 1: the answer is list ([1])"),
        ([{"prompt": "a", "prompt_messages": 1}], {}, "row 1 has a column 'prompt_messages', a name that Rollcall reserves; rename the "
         "column, for example with data.columns: {prompt_messages: own_prompt_messages}"),
        ([{"prompt": "a", "x": 1}], {"columns": {"x": "prompt_text"}}, "row 1 has a column 'prompt_text', a name that Rollcall reserves"),
        (['{"prompt": "a", "x": ' + "9" * 9000 + "}"], {}, "row 1 is not valid JSON: Exceeds the limit (4300 digits)"),
        ([{"prompt": "abcdef"}], {"max_prompt_tokens": 4}, "the only prompt is longer than data.max_prompt_tokens=4; the shortest has 7"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_row(
    rows: list[Any], section: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        load(a_file(tmp_path, *rows), **section)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "1", "answer": NaN}', "row 1: the answer is nan, which no completion can equal"),
        ('{"prompt": "1", "answer": -Infinity}', "row 1: the answer is -inf, which no completion can equal"),
        ('{"prompt": "\\ud800", "answer": "1"}', r"row 1: prompt contains half a surrogate pair \(\\ud800\)"),
        ('{"prompt": "1", "note": {"a": ["\\udfff"]}}', "row 1: note contains half a surrogate pair"),
        ('{"prompt": "1", "\\ud800": 1}', "row 1: a column's name contains half a surrogate pair"),
        ('{"prompt": "1", "answer": "1", "answer": "2"}', "row 1 has the key 'answer' twice in one object; remove one of them"),
        ('{"prompt": "1", "note": [{"a": 1, "b": 2, "b": 3}]}', "row 1 has the key 'b' twice in one object"),
        ('{"prompt": "1", "x": ' + "[" * 100_000, "row 1 is not valid JSON: maximum recursion depth"),
        ('{"prompt": "1", "x": ' + "[" * 60 + "]" * 60 + "}", "row 1: x has lists and maps nested more than 50 deep"),
        ('{"prompt": "1", "x": Infinity}', "row 1: x is infinite"),
        ('{"prompt": "1", "id": NaN}', "row 1: the id is nan"),
        ('{"prompt": "1", "id": [1]}', r"row 1: the id is list \(\[1\]\)"),
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_a_value_that_would_fail_later_is_refused_by_row_and_column(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(DataError, match=message):
        load_prompts(str(path), data=DataSection(), tokenizer=a_tokenizer())


@pytest.mark.parametrize(
    ("columns", "needs", "message"),
    [
        ({"ground_truth": "1"}, {"answer": "exact"}, "did you mean 'ground_truth'? set data.answer_key=ground_truth"),
        ({"label": "1", "answers": "2"}, {"answer": "exact"}, "set data.answer_key=label"),
        ({"x": "1"}, {"answer": "exact"}, "its columns are prompt, x; set data.answer_key to the right column"),
        ({"answer": None}, {"answer": "math"}, "row 1: answer is empty, but the reward math needs it"),
        ({"answer": " "}, {"answer": "math"}, "row 1: answer is empty, but the reward math needs it"),
        ({"answer": "\u200b"}, {"answer": "math"}, "row 1: answer is empty, but the reward math needs it"),
        ({"number": [1]}, {"numbers": "countdown"}, "row 1 has no column 'numbers', which the reward countdown needs; its columns are prompt, number; "
         "rename one of them, for example with data.columns: {number: numbers}"),
    ],
)  # fmt: skip
def test_a_row_without_what_a_reward_needs_is_refused(
    tmp_path: Path, columns: dict[str, Any], needs: dict[str, str], message: str
) -> None:
    source = a_file(tmp_path, {"prompt": "p", **columns})
    assert len(load(source).prompts) == 1, "a reward that needs nothing takes it"
    with pytest.raises(DataError) as caught:
        load_prompts(source, data=DataSection(), tokenizer=a_tokenizer(), needs=needs)
    assert message in str(caught.value)


def test_a_later_row_without_an_answer_is_refused_too(tmp_path: Path) -> None:
    for lacking in ({"prompt": "q"}, {"prompt": "q", "answer": None}):
        source = a_file(tmp_path, {"prompt": "p", "answer": "1"}, lacking)
        with pytest.raises(DataError, match=r"train\.jsonl, row 2.* the reward exact needs"):
            load_prompts(source, data=DataSection(), tokenizer=a_tokenizer(), needs={"answer": "exact"})


def test_a_file_that_has_the_new_name_already_needs_no_renaming(tmp_path: Path) -> None:
    source = a_file(tmp_path, {"prompt": "p", "answer": "1"})
    data = DataSection(columns={"question": "prompt", "solution": "answer"})
    assert load_prompts(source, data=data, tokenizer=a_tokenizer()).prompts[0].answer == "1"


def test_answers_under_another_name_and_of_any_value_are_answers(tmp_path: Path) -> None:
    source = a_file(tmp_path, {"prompt": "p", "solution": 0}, {"prompt": "q", "solution": False})
    data = DataSection(answer_key="solution")
    found = load_prompts(source, data=data, tokenizer=a_tokenizer(), needs={"answer": "exact"})
    assert [prompt.answer for prompt in found.prompts] == ["0", "false"]
    with pytest.raises(
        DataError, match="rows of builtin:environment have no column 'answer', which the reward exact needs"
    ):
        load_prompts("builtin:environment", data=data, tokenizer=a_tokenizer(), needs={"answer": "exact"})


def test_parquet_columns_that_json_has_no_word_for_become_what_it_has(tmp_path: Path) -> None:
    day = datetime.datetime(2024, 5, 6, 7, 8, tzinfo=datetime.UTC)
    row = {
        "prompt": "1", "answer": Decimal("4.50"), "when": day, "day": day.date(), "at": day.time(), "took": datetime.timedelta(minutes=1),
        "price": Decimal("1.10"), "raw": b"\xff\x00", "gap": float("nan"), "deep": [{"when": day}],
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (prompt,) = load(str(tmp_path / "rows.parquet")).prompts
    assert prompt.answer == "4.50" and json.loads(json.dumps(prompt.metadata)) == prompt.metadata
    assert prompt.metadata == {
        "when": "2024-05-06T07:08:00+00:00", "day": "2024-05-06", "at": "07:08:00", "took": 60.0, "price": "1.10", "raw": "/wA=",
        "gap": None, "deep": [{"when": "2024-05-06T07:08:00+00:00"}],
    }  # fmt: skip


NOT_UTF8 = pyarrow.array([b"1", b"\xff\xfe"]).view(pyarrow.string())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pyarrow.array([None, 0], type=pyarrow.timestamp("us", tz="Mars/Olympus")), r"has a value that Python cannot represent \(timestamp\[us, tz=Mars/Olympus\]\)"),
        (pyarrow.array([0, 2**62], type=pyarrow.timestamp("us")), r"has a value that Python cannot represent \(timestamp\[us\]\): "),
        (pyarrow.array([0, 2**62], type=pyarrow.duration("s")), r"has a value that Python cannot represent \(duration\[s\]\): "),
        (NOT_UTF8, r"has a value that Python cannot represent \(string\): 'utf-8' codec"),
    ],
    ids=["zone", "timestamp", "duration", "text"],
)  # fmt: skip
def test_a_parquet_value_that_python_lacks_is_refused_by_row_and_column(
    values: pyarrow.Array, message: str, tmp_path: Path
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1", "2"], "when": values}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=f"rows.parquet, row 2: when {message}"):
        load(str(tmp_path / "rows.parquet"))


def test_a_pipe_a_device_and_an_endless_line_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.parquet").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "zero.parquet"):
        with pytest.raises(DataError, match=f"{name} is a pipe or a device; write the rows to a regular file"):
            load(str(tmp_path / name))
    monkeypatch.setattr("rollcall.loop.data.rows.MAX_ROW_BYTES", 1 << 20)
    (tmp_path / "long.jsonl").write_bytes(b'{"prompt": "1"}\n' + bytes(1 << 21))
    with pytest.raises(DataError, match=r"long\.jsonl, row 2 is larger than 1 MiB"):
        load(str(tmp_path / "long.jsonl"))


def test_a_chat_template_that_raises_is_named_with_the_row(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].content == 'b' %}{{ raise_exception('roles must alternate') }}{% endif %}{{ messages }}"
    )
    with pytest.raises(ValueError, match="row 2: the chat template rejects the messages: roles must alternate"):
        load(a_file(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}), chat_template=template)


def test_a_chat_template_that_drops_the_prompt_is_refused_with_two_rows(tmp_path: Path) -> None:
    rows = ({"prompt": "1+1="}, {"prompt": "1+1="}, {"prompt": "1+2="})
    for template in ("<bos>[user]Hello[assistant]", "{{ messages[0]['content'][:2] }}"):
        with pytest.raises(
            DataError, match=r"the same text for .*train\.jsonl, row 1 and .*train\.jsonl, row 3, although they differ"
        ):
            load(a_file(tmp_path, *rows), chat_template=template)
    assert len(load(a_file(tmp_path, *rows), chat_template="x", chat=False).prompts) == 3


def test_rows_that_differ_in_spaces_or_in_what_the_model_said_may_render_alike(tmp_path: Path) -> None:
    trims = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}{% endif %}{% endfor %}"
    assert len(load(a_file(tmp_path, {"prompt": "a"}, {"prompt": " a\n"}), chat_template=trims).prompts) == 2
    asked, more = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    rows = [{"prompt": [asked, {"role": "assistant", "content": f"<think>{n}</think>"}, more]} for n in range(2)]
    assert len(load(a_file(tmp_path, *rows), chat_template=trims).prompts) == 2


def test_a_chat_template_that_drops_data_system_is_refused(tmp_path: Path) -> None:
    source = a_file(tmp_path, {"prompt": "a"})
    drops = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match=r"the chat template drops data\.system"):
        load(source, chat_template=drops, system="be brief")
    (prompt,) = load(source, chat_template=CHAT_TEMPLATE, system="be brief").prompts
    assert "[system]be brief[user]a" in prompt.text


def test_a_chat_that_ends_with_the_models_answer_is_refused(tmp_path: Path) -> None:
    asked, answer = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    with pytest.raises(DataError, match="row 2: the last message is the model's own .* would contain an answer"):
        load(a_file(tmp_path, {"prompt": [asked]}, {"prompt": [asked, answer]}), chat_template=CHAT_TEMPLATE)


def test_a_prompt_that_its_chat_template_makes_too_long_is_refused_with_these_words(tmp_path: Path) -> None:
    source = a_file(tmp_path, {"prompt": "abc"})
    with pytest.raises(DataError, match="the shortest has 21 tokens with the model's chat template"):
        load(source, chat_template=CHAT_TEMPLATE, max_prompt_tokens=10)
    assert load(source, chat_template=CHAT_TEMPLATE).with_template == " with the model's chat template"
    assert load(source).with_template == ""


@pytest.mark.parametrize("chat_template", [None, CHAT_TEMPLATE])
@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_prompts_of_far_too_many_characters_are_not_tokenised(
    name: str, chat_template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = a_file(tmp_path, *({"prompt": "a" * 200_000} for _ in range(50)), name=name)
    tokenise = PreTrainedTokenizerFast.__call__

    def few(self: Any, texts: list[str], **options: Any) -> Any:
        assert all(len(text) < 1000 for text in texts)
        return tokenise(self, texts, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", few)
    with pytest.raises(DataError, match="all 50 prompts are longer than data.max_prompt_tokens=[0-9]+$"):
        load(source, chat_template=chat_template)
    other = a_file(tmp_path, *({"prompt": "a" * size} for size in (200_000, 3)), name="other.jsonl")
    found = load(other, chat_template=chat_template)
    assert found.num_overlong == 1 and len(found.prompts) == 1


def test_a_chat_is_as_long_as_its_template_writes_it(tmp_path: Path) -> None:
    messages = [
        {"role": "assistant", "content": "a" * 200_000 + "</think>b"},
        {"role": "user", "content": " " * 200_000 + "c"},
    ]
    cuts = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}{% endfor %}"
    assert load(a_file(tmp_path, {"prompt": messages}), chat_template=cuts).prompts[0].text == "bc"


def test_a_long_prompt_that_its_tokens_can_hold_is_tokenised(tmp_path: Path) -> None:
    loaded = load(a_file(tmp_path, {"prompt": "a" * 100_000}), max_prompt_tokens=100_001)
    assert len(loaded.prompts[0].token_ids) == 100_001


def test_rows_are_tokenised_in_batches_of_so_many_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.loop.data.load._CHARACTERS_PER_BATCH", 100)
    batches: list[int] = []
    tokenise = PreTrainedTokenizerFast.__call__

    def count(self: Any, texts: list[str], **options: Any) -> Any:
        batches.append(len(texts))
        return tokenise(self, texts, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", count)
    assert len(load(a_file(tmp_path, *({"prompt": "a" * 40} for _ in range(7)))).prompts) == 7 and batches == [3, 3, 1]


def test_a_parquet_row_larger_than_a_line_may_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.loop.data.rows.MAX_ROW_BYTES", 1 << 20)
    rows = [{"prompt": "a" * size} for size in (900_000, 900_000, 1 << 21)]
    with pytest.raises(DataError, match=r"rows\.parquet, row 3 is larger than 1 MiB"):
        load(a_file(tmp_path, *rows, name="rows.parquet"))


SHARED = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 64, pyarrow.int32()), pyarrow.array(["a" * 50_000]))


@pytest.mark.parametrize(
    "values",
    [pyarrow.nulls(200_000), pyarrow.repeat(True, 200_000), SHARED],
    ids=["nulls", "truth values", "a dictionary"],
)
def test_a_parquet_row_is_measured_as_it_is_when_unpacked(
    values: pyarrow.Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.loop.data.rows.MAX_ROW_BYTES", 1 << 20)
    lists = pyarrow.ListArray.from_arrays([0, 1, len(values)], values)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1", "2"], "note": lists}), tmp_path / "rows.parquet")
    with pytest.raises(
        DataError, match=r"rows\.parquet, row 2 is larger than 1 MiB when unpacked; shorten or remove it"
    ):
        load(str(tmp_path / "rows.parquet"))


def test_a_text_that_many_parquet_rows_share_is_unpacked_for_a_few_of_them(tmp_path: Path) -> None:
    texts = pyarrow.repeat("a" * 500_000, 64)
    pyarrow.parquet.write_table(pyarrow.table({"note": texts}), tmp_path / "rows.parquet")
    before = pyarrow.total_allocated_bytes()
    rows = READERS[".parquet"](tmp_path / "rows.parquet")
    _, row = next(rows)
    assert len(row["note"]) == 500_000 and pyarrow.total_allocated_bytes() - before < texts.nbytes / 2


def test_a_small_parquet_file_that_unpacks_to_more_than_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pyarrow.table({"prompt": [str(n) for n in range(99)], "note": pyarrow.repeat("a" * 50_000, 99)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert len(load(str(tmp_path / "rows.parquet")).prompts) == 99
    monkeypatch.setattr("rollcall.loop.data.rows._UNPACKED_BYTES", 1 << 20)
    with pytest.raises(
        DataError, match=r"rows\.parquet unpacks to more than 1 MiB by row 17, because it repeats a long text"
    ):
        load(str(tmp_path / "rows.parquet"))


def test_parquet_maps_structs_and_lists_come_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1", "map": [("a", ["x", None])], "struct": {"b": "y"}, "fixed": ["p", "q"]},
        {"prompt": "2", "map": None, "struct": None, "fixed": None},
    ]
    texts = pyarrow.list_(pyarrow.string())
    schema = pyarrow.schema(
        {
            "prompt": pyarrow.large_string(), "map": pyarrow.map_(pyarrow.string(), texts), "struct": pyarrow.struct({"b": pyarrow.string()}),
            "fixed": pyarrow.list_(pyarrow.string(), 2),
        }
    )  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), tmp_path / "rows.parquet")
    assert [columns for _, columns in READERS[".parquet"](tmp_path / "rows.parquet")] == rows


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing.jsonl does not exist"):
        load(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(ValueError, match="is not a data file: the name must end in .jsonl"):
        load(a_file(tmp_path, "a,b\n", name="rows.csv"))
    with pytest.raises(ValueError, match="bad.parquet cannot be read past row 0: Parquet"):
        (tmp_path / "bad.parquet").write_text("no")
        load(str(tmp_path / "bad.parquet"))
    with pytest.raises(ValueError, match="is a directory; name a file in it"):
        load(str(tmp_path))
    with pytest.raises(ValueError, match="the built-in tasks are builtin:arithmetic and"):
        load("builtin:algebra")
    with pytest.raises(ValueError, match="row 1 is not valid JSON"):
        (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
        load(str(tmp_path / "latin.jsonl"))


@given(st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 5), st.booleans())
def test_each_epoch_draws_every_prompt_exactly_once(num_prompts: int, seed: int, epoch: int, shuffle: bool) -> None:
    draws = range(epoch * num_prompts, (epoch + 1) * num_prompts)
    drawn = [prompt_index(draw, num_prompts=num_prompts, seed=seed, shuffle=shuffle) for draw in draws]
    assert sorted(drawn) == list(range(num_prompts))
    assert shuffle or drawn == list(range(num_prompts))


@given(st.lists(st.integers(0, 500), max_size=30))
def test_a_draw_does_not_depend_on_the_draws_before_it(draws: list[int]) -> None:
    def index(draw: int) -> int:
        return prompt_index(draw, num_prompts=37, seed=5, shuffle=True)

    alone: list[int] = []
    for draw in draws:
        order._permutation.cache_clear()
        alone.append(index(draw))
    assert [index(draw) for draw in draws] == alone


def test_epochs_and_seeds_give_different_orders_and_the_order_never_changes() -> None:
    def epoch_of(seed: int, epoch: int) -> list[int]:
        draws = range(epoch * 10, (epoch + 1) * 10)
        return [prompt_index(draw, num_prompts=10, seed=seed, shuffle=True) for draw in draws]

    assert len({tuple(epoch_of(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    # A run that resumes must find the order it started with: this line changes never.
    assert epoch_of(0, 0) == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
