"""Datasets of the hub, read by the real `datasets` library from folders laid out as one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import a_tokenizer

from rollcall.base.wait import in_silence, speaking
from rollcall.config import DataSection, load_config
from rollcall.config.checks import unused
from rollcall.loop.data.load import DataError, PromptSet, load_prompts

pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def a_dataset(folder: Path) -> str:
    """Two subsets with two splits each, as a repository of the hub declares them."""
    for subset in ("main", "socratic"):
        for split, count in (("train", 5), ("test", 2)):
            path = folder / subset / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [{"question": f"{subset} {split} {n}+1=", "answer": str(n + 1), "level": n} for n in range(count)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    declared = "".join(
        f"- config_name: {subset}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {subset}/{split}.jsonl\n" for split in ("train", "test"))
        for subset in ("main", "socratic")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{declared}---\n")
    return f"hub:{folder}"


def load(source: str, *, part: Any = "train", limit: int | None = None, **fields: Any) -> PromptSet:
    data = DataSection(train=source, **{"subset": "main", "columns": {"question": "prompt"}, **fields})
    return load_prompts(source, data=data, tokenizer=a_tokenizer(), split=part, limit=limit)


def test_a_split_and_a_subset_of_a_dataset_are_prompts_with_columns_by_their_new_names(tmp_path: Path) -> None:
    source = a_dataset(tmp_path / "sums")
    train = load(source)
    assert [prompt.text for prompt in train.prompts] == [f"main train {n}+1=" for n in range(5)]
    assert [prompt.answer for prompt in train.prompts] == ["1", "2", "3", "4", "5"]
    assert train.prompts[0].id == "sums-train:1" and train.prompts[2].metadata == {"level": 2}
    assert [prompt.id for prompt in load(source, part="val").prompts] == ["sums-test:1", "sums-test:2"]
    assert len(load(source, limit=2).prompts) == 2
    other = load(source, subset="socratic", columns={"question": "prompt", "level": "grade"}, val_split="train[:3]")
    assert other.prompts[4].metadata == {"grade": 4}
    sliced = load(source, part="val", val_split="train[1:3]")
    assert [prompt.answer for prompt in sliced.prompts] == ["2", "3"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": "trian"}, r"\(data.subset=main, split trian\): ValueError: .*trian"),
        ({"subset": "other"}, r"\(data.subset=other, split train\): ValueError: .*other.* not found"),
        (
            {"columns": {"questoin": "prompt"}},
            "no column 'questoin', which data.columns renames; its columns are question, answer",
        ),
        ({"columns": {"question": "answer"}}, "already has a column 'answer'"),
        ({"columns": {}}, "has no column 'prompt'; its columns are question, answer, level"),
    ],
)
def test_what_a_dataset_does_not_have_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(a_dataset(tmp_path / "sums"), **fields)


@pytest.mark.parametrize("name", ["", "..", "../..", "/", ".", "~", "a/..", "./nothing"])
def test_what_names_no_dataset_is_refused_before_anything_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("it was looked for"))
    with pytest.raises(DataError, match="is not the name of a dataset; write OWNER/NAME"):
        load(f"hub:{name}")


def test_without_the_library_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'rollcall-rl\[hub\]'"):
        load("hub:openai/gsm8k")


def test_columns_of_a_file_are_renamed_too_and_keys_of_the_hub_do_nothing_there(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"q": "1+1=", "answer": "2"}) + "\n")
    assert load(str(file), columns={"q": "prompt"}).prompts[0].text == "1+1="
    config = load_config(None, [f"data.train={file}", "data.split=test", "data.subset=main"])
    assert unused(config) == ["data.split, data.subset are set but not used: data.train is not a hub: dataset"]


def test_no_progress_bar_is_shown_in_silence_and_the_users_choice_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from datasets.utils import are_progress_bars_disabled

    source = a_dataset(tmp_path / "sums")
    with speaking(in_silence):
        load(source)
    assert capfd.readouterr().err == "" and not are_progress_bars_disabled()
    load(source, subset="socratic")
    assert "Generating train split" in capfd.readouterr().err
