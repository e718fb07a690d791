"""The journal: what was appended is read back bit for bit, whatever happened to the process or the disk."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from disks import small_disk, unmount
from hypothesis import given, settings
from hypothesis import strategies as st
from scored import make_group

from rollcall.base.errors import JournalError
from rollcall.base.group_record import MAGIC
from rollcall.base.journal import Journal, TrainedStep
from rollcall.base.types import (
    Branch,
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


def assert_same(left: Group, right: Group) -> None:
    for name in ("step", "draw", "scores", "started_s", "finished_s", "worker"):
        assert getattr(left, name) == getattr(right, name), name
    for name in ("id", "text", "answer", "metadata"):
        assert getattr(left.prompt, name) == getattr(right.prompt, name), name
    assert_same_bits(left.prompt.token_ids, right.prompt.token_ids)
    assert len(left.completions) == len(right.completions)
    for one, other in zip(left.completions, right.completions, strict=True):
        for name in ("segments", "finish", "seed", "text"):
            assert getattr(one, name) == getattr(other, name), name
        for name in ("token_ids", "logprobs", "mask"):
            assert_same_bits(getattr(one, name), getattr(other, name))


def assert_same_bits(left: np.ndarray, right: np.ndarray) -> None:
    assert left.dtype == right.dtype and left.tobytes() == right.tobytes()


def journal_with(dir: Path, *draws: int, step: int = 1) -> Journal:
    journal = Journal(dir)
    for draw in draws:
        journal.append(make_group(draw, step=step))
    journal.close()
    return journal


def record_offsets(path: Path) -> list[int]:
    data, offsets, at = path.read_bytes(), [], -1
    while (at := data.find(MAGIC, at + 1)) >= 0:
        offsets.append(at)
    return offsets


def test_a_group_reads_back_bit_for_bit(tmp_path: Path) -> None:
    group = make_group(7, num_completions=3)
    odd = np.array([0x7FC01234, 0x80000000, 0x00000001, 0xFF800000, 0x3F800000], dtype=np.uint32).view(np.float32)
    group.completions[0].logprobs[:] = odd  # a NaN with a payload, -0, a denormal, -inf
    with Journal(tmp_path) as journal:
        journal.append(group)
        (back,) = journal.read(1)
    assert_same(group, back)
    back.completions[0].logprobs[0] = 1.0  # and is not a read-only view of the file


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), max_size=5), text=st.text(max_size=30), value=st.floats(allow_nan=False))
def test_any_lengths_texts_and_scores_survive(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], text: str, value: float
) -> None:
    group = Group(
        step=0, draw=0, started_s=0.0, finished_s=value, worker=text,
        prompt=Prompt(
            id=text, token_ids=np.ones(1, dtype=np.int32), text=text, answer=text, metadata={text: [text, value]}
        ),
        completions=tuple(
            Completion(
                token_ids=np.full(length, -1, dtype=np.int32), logprobs=np.full(length, -0.5, dtype=np.float32),
                mask=np.ones(length, dtype=np.bool_), segments=(Segment(version=0, num_tokens=length),),
                finish=FinishReason.ABORT, seed=0, text=text, episode=None,
            )
            for length in lengths
        ),
        scores=tuple(Score(value=value, parts={text: value}, errors={}) for _ in lengths),
    )  # fmt: skip
    with Journal(tmp_path_factory.mktemp("journal")) as journal:
        journal.append(group)
        assert_same(group, journal.read(0)[0])


def test_groups_come_back_in_order_of_draw_and_steps_are_listed(tmp_path: Path) -> None:
    journal_with(tmp_path, 9, 2, 5, step=12)
    journal_with(tmp_path, 11, step=3)
    journal = Journal(tmp_path)
    assert [group.draw for group in journal.read(12)] == [2, 5, 9]
    assert journal.steps() == [3, 12]
    assert journal.read(4) == []


def test_more_steps_than_open_files_can_be_filled_in_turn(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for draw in range(60):
            journal.append(make_group(draw, step=draw % 20))
        journal.sync()
        assert [len(journal.read(step)) for step in range(20)] == [3] * 20


@pytest.mark.parametrize("cut", [1, 9, 25, 200])
def test_reading_stops_at_a_torn_tail_and_the_next_append_moves_it_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    journal_with(tmp_path, 0, 1, 2)
    path = tmp_path / "000001.groups"
    offset = record_offsets(path)[2]
    whole = path.read_bytes()
    path.write_bytes(whole[: offset + cut])
    journal = Journal(tmp_path)
    assert [group.draw for group in journal.read(1)] == [0, 1]
    journal.append(make_group(2))
    assert [group.draw for group in journal.read(1)] == [0, 1, 2]
    assert len(caplog.messages) == 1 and f"{path}: torn tail of {cut} bytes at offset {offset}" in caplog.text
    assert path.read_bytes() == whole
    (torn,) = (tmp_path / "torn").iterdir()
    assert torn.read_bytes() == whole[offset : offset + cut]


def test_a_damaged_record_in_the_middle_is_reported_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal_with(tmp_path, 0, 1, 2)
    path = tmp_path / "000001.groups"
    start, end = record_offsets(path)[1:]
    data = bytearray(path.read_bytes())
    data[start + 100] ^= 1
    path.write_bytes(data)
    journal = Journal(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert [group.draw for group in journal.read(1)] == [0, 2]
    assert f"bytes {start} to {end}" in caplog.text
    journal.append(make_group(1))
    assert [group.draw for group in journal.read(1)] == [0, 1, 2]


def test_a_record_whose_length_is_damaged_does_not_hide_the_next(tmp_path: Path) -> None:
    journal_with(tmp_path, 0, 1, 2)
    path = tmp_path / "000001.groups"
    data = bytearray(path.read_bytes())
    data[record_offsets(path)[0] + 14] = 0xFF  # a length of many terabytes
    path.write_bytes(data)
    assert [group.draw for group in Journal(tmp_path).read(1)] == [1, 2]


def test_of_two_records_with_the_same_draw_the_first_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Journal(tmp_path) as journal:
        journal.append(make_group(4, num_completions=1))
        journal.append(make_group(4, num_completions=3))
        with caplog.at_level(logging.WARNING):
            (group,) = journal.read(1)
    assert len(group.completions) == 1
    assert "draw 4" in caplog.text and "more than once" in caplog.text


def test_metadata_that_is_not_json_is_refused_with_the_prompt_named(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        with pytest.raises(JournalError, match=r"prompt 'row-0' .* set .*'when'"):
            journal.append(make_group(0, metadata={"when": {1, 2}}))
        journal.append(make_group(1, metadata={"ids": np.arange(2), "n": np.int64(4)}))
        assert journal.read(1)[0].prompt.metadata == {"ids": [0, 1], "n": 4}


WRITER = """
import sys; sys.path.insert(0, sys.argv[2])
from pathlib import Path
from scored import make_group
from rollcall.base.journal import Journal
journal = Journal(Path(sys.argv[1]))
for draw in range(10**9):
    journal.append(make_group(draw, num_completions=16, num_tokens=400))
    print(draw, flush=True)
"""


def test_kill_minus_nine_loses_no_group_that_append_returned_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "journal"), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(20):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        printed = [line for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    last = int(printed[-1]) if printed else 19
    groups = Journal(tmp_path / "journal").read(1)
    assert [group.draw for group in groups][: last + 1] == list(range(last + 1))
    assert_same(groups[last], make_group(last, num_completions=16, num_tokens=400))


def test_a_full_disk_is_named_and_leaves_no_half_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.base.patience.DEADLINE_S", 0)
    disk = small_disk(tmp_path / "disk", size="64k")
    try:
        with Journal(disk / "journal") as journal:
            (disk / "ballast").write_bytes(bytes(8192))
            draw = 0
            with pytest.raises(
                JournalError, match=r"000001\.groups: cannot write the group of draw \d+.*No space left.*free space"
            ):
                for draw in range(1000):
                    journal.append(make_group(draw, num_tokens=200))
            assert draw > 2
            kept = [group.draw for group in journal.read(1)]
            assert kept == list(range(draw))
            assert "torn" not in caplog.text
            (disk / "ballast").unlink()
            journal.append(make_group(draw, num_tokens=200))
            assert [group.draw for group in journal.read(1)] == [*kept, draw]
        assert not (disk / "journal" / "torn").exists()
    finally:
        unmount(disk)


def test_a_journal_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot write the journal folder"):
        Journal(tmp_path / "file" / "journal")


def test_trained_steps_survive_and_replays_count_once(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.mark_trained(0, draws=[1, 0], version=1)
        journal.mark_trained(1, draws=[2, 3], version=2)
    with Journal(tmp_path) as journal:
        journal.mark_trained(1, draws=[3, 2], version=2)
        journal.mark_trained(2, draws=[4], version=3)
    assert Journal(tmp_path).trained() == {
        0: TrainedStep(step=0, draws=(0, 1), version=1),
        1: TrainedStep(step=1, draws=(2, 3), version=2),
        2: TrainedStep(step=2, draws=(4,), version=3),
    }


def test_training_a_draw_twice_or_a_step_differently_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.mark_trained(0, draws=[0, 1], version=1)
        with pytest.raises(JournalError, match="draw 1 was already trained in step 0, but step 1 contains it"):
            journal.mark_trained(1, draws=[1, 2], version=2)
        with pytest.raises(JournalError, match=r"step 0 was trained on draws \[0, 1\]"):
            journal.mark_trained(0, draws=[0], version=1)
        with pytest.raises(JournalError, match="lists a draw twice"):
            journal.mark_trained(1, draws=[5, 5], version=2)
        journal.mark_trained(1, draws=[2], version=2)
    assert [entry.draws for entry in Journal(tmp_path).trained().values()] == [(0, 1), (2,)]


def test_a_torn_trained_line_is_set_aside_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Journal(tmp_path) as journal:
        journal.mark_trained(0, draws=[0], version=1)
    path = tmp_path / "trained.jsonl"
    with path.open("a") as file:
        file.write('{"step": 1, "dra')
    with Journal(tmp_path) as journal:
        assert list(journal.trained()) == [0]
        journal.mark_trained(1, draws=[1], version=2)
        assert list(journal.trained()) == [0, 1]
    (torn,) = (tmp_path / "torn").iterdir()
    assert torn.read_text() == '{"step": 1, "dra'
    assert len(caplog.messages) == 1 and "trained.jsonl: torn tail of 16 bytes" in caplog.text


def test_a_broken_trained_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "trained.jsonl").write_text('{"step": 0, "draws": [0], "version": 1}\nnonsense\n')
    with pytest.raises(JournalError, match="line 2 is not a trained step"):
        Journal(tmp_path).trained()


def make_episode(seed: int, *, num_branches: int, has_prompt: bool) -> Episode:
    rng = np.random.default_rng(seed)

    def branch(length: int) -> Branch:
        return Branch(
            prompt_ids=rng.integers(0, 50_000, length + 1, dtype=np.int32),
            token_ids=rng.integers(0, 50_000, length, dtype=np.int32),
            logprobs=-rng.random(length, dtype=np.float32),
            mask=rng.random(length) < 0.5,
            segments=(Segment(version=seed, num_tokens=length),),
        )

    call = ToolCall(name="add", arguments={"a": 1, "b": [2, "x"]}, result="3", failed=False)
    return Episode(
        prompt_ids=rng.integers(0, 50_000, 4, dtype=np.int32) if has_prompt else None,
        turns=(Turn(num_sampled=3, num_observed=2, text="call", observation="3 \ud800", calls=(call,), reward=0.1),),
        branches=tuple(branch(length) for length in range(2, 2 + num_branches)),
        reward=1 / 3,
        metrics={"turns": 1.0},
        ended=EndReason.DONE,
        error="",
    )


@pytest.mark.parametrize("kinds", [[(0, True)], [(2, False), None, (1, True)], [None, (3, True), (0, False)]])
def test_episodes_come_back_bit_for_bit(tmp_path: Path, kinds: list[tuple[int, bool] | None]) -> None:
    group = make_group(3, num_completions=len(kinds))
    episodes = [
        None if kind is None else make_episode(place, num_branches=kind[0], has_prompt=kind[1])
        for place, kind in enumerate(kinds)
    ]
    group = replace(
        group,
        completions=tuple(
            replace(completion, episode=episode)
            for completion, episode in zip(group.completions, episodes, strict=True)
        ),
    )
    with Journal(tmp_path / "journal") as journal:
        journal.append(group)
        (back,) = journal.read(1)
    assert_same(group, back)
    for episode, completion in zip(episodes, back.completions, strict=True):
        found = completion.episode
        if episode is None or found is None:
            assert episode is found is None
            continue
        plain = dict(prompt_ids=None, branches=())
        assert replace(episode, **plain) == replace(found, **plain)
        np.testing.assert_array_equal(episode.prompt_ids, found.prompt_ids)  # type: ignore[arg-type]
        for ours, theirs in zip(episode.branches, found.branches, strict=True):
            assert ours.segments == theirs.segments
            for name in ("prompt_ids", "token_ids", "logprobs", "mask"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_attempts_of_unfinished_groups_are_kept_beside_the_groups(tmp_path: Path) -> None:
    whole = make_group(5, step=2, num_completions=3)

    def alone(place: int) -> Group:
        return replace(whole, completions=whole.completions[place : place + 1], scores=whole.scores[place : place + 1])

    with Journal(tmp_path / "journal") as journal:
        journal.append_attempts((place, alone(place)) for place in (2, 0))
        path = tmp_path / "journal" / "000002.attempts"
        with path.open("ab") as file:
            file.write(b"torn")
        found = journal.read_attempts(2)
        assert journal.read(2) == [] and journal.read_attempts(1) == {} and journal.steps() == []
    assert list(found) == [5] and set(found[5]) == {0, 2}
    for place, attempt in found[5].items():
        assert_same(attempt, alone(place))
    with Journal(tmp_path / "journal") as journal:
        journal.append_attempts([(1, alone(1))])
        assert set(journal.read_attempts(2)[5]) == {0, 1, 2}
