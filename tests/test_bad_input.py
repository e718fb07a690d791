"""Bad input, as a whole run meets it: a clear message or a clean stop, and nothing written before it is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disks import small_disk, unmount
from runs import (
    IN_UPDATE,
    Kill,
    begin_and_settle,
    column,
    finish,
    groups,
    journal_bytes,
    lean,
    letter_rows,
    make_run,
    metric_rows,
    run_and_be_killed,
    run_in_child,
    weights,
    write_rows,
)
from safetensors.numpy import load_file
from tiny import make_model, make_tokenizer, save_model

from rollcall.base.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    JournalError,
    ModelFilesError,
    NonFiniteError,
    WorkerError,
)
from rollcall.base.journal import Journal
from rollcall.base.types import Completion
from rollcall.checkpoint.saving import Trained
from rollcall.checkpoint.store import CheckpointStore
from rollcall.cli.runs import show_run
from rollcall.config import Config, parse_config
from rollcall.engine import sequence as engine_sequence
from rollcall.learner.learner import Critic, Learner
from rollcall.loop.attempts import RunError
from rollcall.loop.data.load import DataError
from rollcall.loop.record import Saves
from rollcall.observe.events import read_marks
from rollcall.observe.timeline import RUN_FAILED
from rollcall.run.build import load_inputs
from rollcall.run.reward_trial import try_run
from rollcall.run.training import train


def start_weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model" / "model.safetensors")


def assert_unchanged(config: Config, start: dict[str, np.ndarray]) -> None:
    for name, tensor in weights(config).items():
        np.testing.assert_array_equal(tensor, start[name], err_msg=name)


# Data


def test_a_missing_data_file_is_named_and_the_corrected_run_file_starts_in_the_same_directory(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.jsonl"
    with pytest.raises(DataError, match=r"nowhere\.jsonl does not exist"):
        finish(make_run(tmp_path, f"data.train={missing}"))
    assert finish(make_run(tmp_path, "trainer.steps=1"))["steps"] == 1


def test_a_malformed_row_is_named(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"prompt": "a=", "answer": \n')
    with pytest.raises(DataError, match=r"train\.jsonl, row 17 is not valid JSON"):
        finish(config)
    assert not config.run.dir.exists()


def test_a_row_without_a_prompt_is_named(tmp_path: Path) -> None:
    config = make_run(tmp_path, rows=[*letter_rows(3), {"question": "a=", "answer": "a"}])
    with pytest.raises(DataError, match=r"row 4 has no column 'prompt'; its columns are question, answer"):
        finish(config)


@pytest.mark.parametrize("key", ["data.train", "data.val"])
def test_a_row_without_the_answer_that_a_reward_takes_is_refused_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    (tmp_path / "takes_answer.py").write_text("def score(completion, answer): return float(completion == answer)\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"prompt": "a=", "answer": "a"}\n{"prompt": "b=", "solution": "b"}\n')
    monkeypatch.setattr("rollcall.run.worker.load_causal_lm", lambda *_, **__: pytest.fail("the model was read"))
    rewards = [{"type": "function", "path": "takes_answer:score"}]
    config = make_run(tmp_path, f"{key}={tmp_path}/other.jsonl", reward=rewards)
    wanted = (
        r"other\.jsonl, row 2 has no column 'answer', which the reward score needs; its columns are prompt, solution; did you mean "
        r"'solution'\? set data\.answer_key=solution"
    )
    with pytest.raises(DataError, match=wanted):
        finish(config)


def test_an_environment_that_cannot_be_imported_is_refused_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.run.worker.load_causal_lm", lambda *_, **__: pytest.fail("the model was read"))
    config = make_run(
        tmp_path, "environment.type=step", "environment.path=no_such_game:Game", "reward=[{type: environment}]"
    )
    for check in (finish, lambda config: try_run(config, num_rows=1)):
        with pytest.raises(
            ConfigError, match=r"environment\.path='no_such_game:Game': there is no module 'no_such_game'"
        ):
            check(config)


def test_an_environment_ends_when_the_model_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    class Environments:
        async def aclose(self) -> None:
            ended.append(True)

    def cannot_be_read(*_: object, **__: object) -> None:
        raise ModelFilesError("damaged")

    monkeypatch.setattr("rollcall.run.local.build_environments", lambda *_: Environments())
    monkeypatch.setattr("rollcall.run.worker.load_causal_lm", cannot_be_read)
    with pytest.raises(ModelFilesError, match="damaged"):
        finish(make_run(tmp_path))
    assert ended == [True]


def test_prompts_that_become_the_same_tokens_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"1+{letter}=", "answer": "1"} for letter in ("1", "a", "b", "c")]
    load_inputs(make_run(tmp_path, "model.path=builtin:arithmetic", rows=rows))
    assert "2 prompts have the same tokens as another prompt, although the texts" in caplog.text


def test_prompts_that_the_tokenizer_cannot_write_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "12+34= reverse this", "answer": "1"} for _ in range(4)]
    load_inputs(make_run(tmp_path, "model.path=builtin:arithmetic", "data.max_prompt_tokens=99", rows=rows))
    assert "the tokenizer has no tokens for 'e', 'h', 'i', 'r', 's', 't', 'v' in the prompt" in caplog.text
    caplog.clear()
    load_inputs(make_run(tmp_path / "good", rows=letter_rows(4)))
    assert "no tokens for" not in caplog.text


def test_prompts_that_repeat_and_prompts_of_both_files_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "val.jsonl").write_text('{"prompt": "b=", "answer": "b"}\n{"prompt": "zz=", "answer": "z"}\n')
    rows = [{"prompt": f"{letter}=", "answer": letter} for letter in "aabca"]
    load_inputs(make_run(tmp_path, f"data.val={tmp_path}/val.jsonl", rows=rows))
    assert "2 of its 5 prompts are the same as an earlier one; remove" in caplog.text
    assert (
        "val.jsonl: 1 of its 2 prompts is in data.train too, so the evaluation scores prompts that the run trains on"
        in caplog.text
    )
    caplog.clear()
    load_inputs(make_run(tmp_path / "good", rows=letter_rows(4)))
    assert "of its" not in caplog.text


def test_overlong_prompts_are_left_out_counted_and_never_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [{"id": f"long-{index}", "prompt": "1+2" * 10 + "=", "answer": "a"} for index in range(3)]
    config = make_run(tmp_path, "data.max_prompt_tokens=8", "trainer.steps=2", rows=[*letter_rows(8), *long])
    with lean():
        train(config)
    assert "left out 3 prompts longer than 8 tokens" in " ".join(capsys.readouterr().out.split())
    used = {group.prompt.id for step in (1, 2) for group in groups(config, step).values()}
    assert used == {f"row-{index}" for index in range(8)}


def test_data_of_overlong_prompts_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all 16 prompts are longer than data.max_prompt_tokens=2; the shortest has 3"):
        finish(make_run(tmp_path, "data.max_prompt_tokens=2"))


def test_prompts_that_cannot_fit_the_models_positions_are_refused_before_training(tmp_path: Path) -> None:
    rows = [*letter_rows(40), {"id": "long", "prompt": "1" * 250 + "=", "answer": "a"}]
    config = make_run(tmp_path, "data.shuffle=false", "rollout.max_response_tokens=8", rows=rows)
    with pytest.raises(ConfigError, match=r"prompt of 251 tokens.*makes 259 positions, but the model has 256"):
        finish(config)
    assert not config.run.dir.exists()
    assert (
        finish(make_run(tmp_path, "data.max_prompt_tokens=248", "rollout.max_response_tokens=8", "trainer.steps=1"))[
            "steps"
        ]
        == 1
    )


def test_a_held_out_prompt_that_cannot_fit_is_refused_too(tmp_path: Path) -> None:
    config = make_run(tmp_path, val=[{"prompt": "1" * 255, "answer": "a"}])
    with pytest.raises(ConfigError, match=r"val\.jsonl has a prompt of 255 tokens"):
        finish(config)


def test_a_kv_cache_too_small_for_the_longest_prompt_is_refused_before_training(tmp_path: Path) -> None:
    rows = [*letter_rows(40), {"id": "long", "prompt": "1" * 20 + "=", "answer": "a"}]
    config = make_run(tmp_path, "rollout.kv_tokens=24", rows=rows)
    with pytest.raises(
        ConfigError,
        match=r"prompt of 21 tokens; .* makes 25, .* only 24 tokens \(rollout.kv_tokens\); set it to 25 or more",
    ):
        finish(config)
    assert not config.run.dir.exists()
    assert finish(make_run(tmp_path, "rollout.kv_tokens=25", "trainer.steps=1"))["steps"] == 1


def test_fewer_rows_than_prompts_in_a_step_are_drawn_again(tmp_path: Path) -> None:
    config = make_run(tmp_path, "data.prompts_per_step=8", "trainer.steps=1", rows=letter_rows(3))
    finish(config)
    assert sorted(groups(config, 1)) == list(range(8))
    assert {group.prompt.id for group in groups(config, 1).values()} == {"row-0", "row-1", "row-2"}


# Models and tokenizers


def test_a_path_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ModelFilesError, match=r"empty has no config.json, so it is neither a transformers model directory"
    ):
        finish(make_run(tmp_path, model=tmp_path / "empty"))
    with pytest.raises(ModelFilesError, match=r"nowhere is not a directory"):
        finish(make_run(tmp_path, f"model.path={tmp_path}/nowhere"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("lost", "words"), [(1, "cannot be loaded"), (-1000, "its weight files have only 1,000 bytes")]
)
def test_a_model_directory_with_torn_weights_is_named(tmp_path: Path, lost: int, words: str) -> None:
    config = make_run(tmp_path)
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-lost])
    with pytest.raises(ValueError, match=words):
        finish(config)


def edit_tokenizer(model: Path, **changes: Any) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = model / name
        if path.exists():
            values = {**json.loads(path.read_text()), **changes}
            path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_bfloat16_on_a_cpu_without_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.model.load.has_bfloat16", lambda: False)
    with pytest.raises(
        ModelFilesError, match="model.dtype=bfloat16 needs a CUDA device or a CPU with bfloat16 instructions"
    ):
        finish(make_run(tmp_path, "model.dtype=bf16"))


@pytest.mark.parametrize("key", ["actor.compile", "rollout.compile"])
def test_compiling_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=f"{key}: true needs a C\\+\\+ compiler, but 'no-such-compiler'"):
        finish(make_run(tmp_path, f"{key}=true"))


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama-tied")
    edit_tokenizer(tmp_path / "model", eos_token=None)
    with pytest.raises(ModelFilesError, match="has no eos token"):
        finish(make_run(tmp_path))


def test_a_tokenizer_without_a_pad_token_trains(tmp_path: Path) -> None:
    config = make_run(tmp_path, "trainer.steps=2")
    edit_tokenizer(tmp_path / "model", pad_token=None)
    assert finish(config)["steps"] == 2


# Nothing to learn from


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp"])  # one for each kind of baseline
def test_equal_rewards_teach_nothing_and_the_run_goes_on_and_says_so_at_its_end(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    reward = [{"type": "function", "path": "rewards_bad:always_equal"}]
    overrides = (f"algorithm.name={name}", "actor.weight_decay=0.1", "trainer.steps=2")
    config = make_run(tmp_path, *overrides, reward=reward)
    summary = finish(config)
    assert (summary["steps"], summary["no_signal"]) == (2, {"steps": 2, "of": 2})
    assert (
        "no step had a signal, so nothing was learned in 2 steps" in caplog.text and "got the same score" in caplog.text
    )
    show_run(config.run.dir, as_json=False)
    assert "no step had a signal, so nothing was learned in 2 steps" in capsys.readouterr().out
    assert column(config, "train/zero_variance_groups") == [1.0] * 2
    assert column(config, "train/grad_norm") == [0.0] * 2 and column(config, "train/skipped_fraction") == [1.0] * 2
    assert_unchanged(config, start_weights(tmp_path))


def test_dynamic_sampling_gives_up_refilling_when_no_group_has_anything_to_teach(tmp_path: Path) -> None:
    reward = [{"type": "function", "path": "rewards_bad:always_equal"}]
    overrides = ("algorithm.name=dapo", "algorithm.max_refills=2", "trainer.steps=3", "actor.weight_decay=0.1")
    # Lengths differ, and a punishment of length does not make a group one to learn from.
    config = make_run(tmp_path, *overrides, "algorithm.overlong_buffer=4", reward=reward)
    finish(config)
    assert column(config, "train/refills") == [2.0] * 3
    assert [len(groups(config, step)) for step in (1, 2, 3)] == [24] * 3
    assert_unchanged(config, start_weights(tmp_path))


def test_a_run_that_may_open_few_files_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (64, 64))
    config = parse_config({"run": {"dir": str(tmp_path / "run")}})
    for begin in (train, partial(try_run, num_rows=1)):
        with pytest.raises(
            ValueError, match=r"allows only 64 open files per process \(ulimit -Hn\), but a run needs 256"
        ):
            begin(config)
    assert not (tmp_path / "run").exists()


def save_silent_model(directory: Path) -> None:
    """A model that ends every completion at once: the same hidden state everywhere, and a head that says eos to it."""
    tokenizer = make_tokenizer()
    model = make_model("qwen2-untied", vocab_size=len(tokenizer))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight[tokenizer.eos_token_id].fill_(1.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def test_empty_completions_train(tmp_path: Path) -> None:
    save_silent_model(tmp_path / "model")
    reward = [{"type": "function", "path": "rewards_bad:short"}]
    config = make_run(tmp_path, "trainer.steps=2", reward=reward, val=letter_rows(4))
    assert finish(config)["steps"] == 2
    completions = [each for group in groups(config, 1).values() for each in group.completions]
    assert {each.text for each in completions} == {""} and {len(each.token_ids) for each in completions} == {1}
    assert column(config, "rollout/response_length_mean") == [1.0] * 2
    assert column(config, "rollout/truncated_fraction") == [0.0] * 2


# A loss that is not a number


def poison_after(monkeypatch: pytest.MonkeyPatch, *, updates: int) -> None:
    """The policy turns NaN after so many updates, as a diverged one does."""
    original, calls = Learner.update, 0

    def update(self: Learner, samples: Any) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls > updates:
            with torch.no_grad():
                next(self.model.parameters()).fill_(float("nan"))
        return original(self, samples)

    monkeypatch.setattr(Learner, "update", update)


def test_a_nan_loss_stops_the_run_with_everything_before_it_on_disk(
    tmp_path: Path, undisturbed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(tmp_path, name="poisoned")
    with monkeypatch.context() as patch:
        poison_after(patch, updates=4)
        with pytest.raises(RunError, match=r"step 5: .*nan.*not applied.*nothing on disk is lost.*[Ll]ower actor.lr"):
            finish(config)
    assert [row["step"] for row in metric_rows(config) if "train/loss" in row] == [1, 2, 3, 4]
    with Journal(config.run.dir / "journal") as journal:
        assert sorted(journal.trained()) == [1, 2, 3, 4] and journal.steps() == [1, 2, 3, 4, 5]
    latest = CheckpointStore(config.run.dir / "checkpoints", keep_last=2, keep_best=1).latest()
    assert latest is not None and latest.step == 4
    assert not (config.run.dir / "model").exists() and not (config.run.dir / "summary.json").exists()
    failed = read_marks(config.run.dir)[-1]
    assert failed.name == RUN_FAILED and failed.note.startswith("step 5: ")
    finish(config)
    for name, tensor in weights(config).items():
        assert tensor.tobytes() == weights(undisturbed)[name].tobytes(), "the poisoned update left a trace"


@pytest.mark.parametrize(("role", "steps"), [("actor", 1), ("critic", 2)])
@pytest.mark.slow
def test_weights_that_diverge_in_the_last_step_are_neither_saved_nor_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, steps: int
) -> None:
    trained: Any = Learner if role == "actor" else Critic
    original, calls = trained.update, 0

    def update(self: Any, samples: Any) -> dict[str, float]:
        nonlocal calls
        calls += 1
        metrics = original(self, samples)
        if calls == steps:
            with torch.no_grad():
                self.body.named["norm"][3] = float("inf")
        return metrics

    name = "grpo" if role == "actor" else "ppo"
    config = make_run(tmp_path, f"algorithm.name={name}", f"trainer.steps={steps}", "trainer.save_every=1")
    where = r"continues from .*step-000001" if steps == 2 else "begins at step 1"
    tensor = r"actor's model\.norm\.weight" if role == "actor" else r"critic's norm"
    with monkeypatch.context() as patch:
        patch.setattr(trained, "update", update)
        with pytest.raises(
            RunError, match=rf"step {steps}: .*in the {tensor}.*this step was not saved.*Lower actor\.lr.*{where}"
        ):
            finish(config)
    latest = CheckpointStore(config.run.dir / "checkpoints", keep_last=2, keep_best=1).latest()
    assert (latest.step if latest else 0) == steps - 1 and not (config.run.dir / "model").exists()
    assert finish(config)["steps"] == steps


def test_divergence_in_another_process_is_told_as_one_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: Trained) -> None:
        told = WorkerError("actor rank 1 on node 0 raised", role="actor", ranks=[1], node_ranks=[0])
        raise told from NonFiniteError("there are NaN or infinite values in the actor's lm_head.weight")

    monkeypatch.setattr(Trained, "copy_parts", copy)
    with pytest.raises(
        RunError,
        match=r"step 2: there are NaN .* the actor's lm_head\.weight.*this step was not saved.*Lower actor\.lr",
    ):
        finish(make_run(tmp_path))


def test_log_probs_that_are_not_finite_are_never_journaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverged(sequence: Any, tokenizer: Any) -> Completion:
        completion = original(sequence, tokenizer)
        late = completion.segments[-1].version == 1
        return replace(completion, logprobs=completion.logprobs * np.float32("nan")) if late else completion

    config, original = make_run(tmp_path, "trainer.steps=2"), engine_sequence.completion_of
    with monkeypatch.context() as patch:
        patch.setattr(engine_sequence, "completion_of", diverged)
        with pytest.raises(
            RunError, match=r"step 2: the policy's log-probs for prompt 'row-\d+' are not finite.*actor.lr"
        ):
            finish(config)
    assert [len(groups(config, step)) for step in (1, 2)] == [8, 0]
    assert finish(config)["steps"] == 2


# A full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = small_disk(tmp_path / "disk", size="8m")
    try:
        yield path
    finally:
        unmount(path)


def fill(disk: Path) -> Path:
    """A file that takes all the room that is left."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    continue
            except OSError:
                continue
    return ballast


def fill_disk_at(patch: pytest.MonkeyPatch, disk: Path, owner: type, name: str, *, call: int) -> None:
    original, calls = getattr(owner, name), 0

    def method(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            fill(disk)
        return original(*args, **kwargs)

    patch.setattr(owner, name, method)


@pytest.mark.parametrize(
    ("owner", "name", "call", "error", "message"),
    [
        pytest.param(
            Journal, "append", 20, JournalError, r"cannot write the group of draw \d+.*No space left", id="group"
        ),
        pytest.param(
            Trained,
            "write_parts",
            2,
            CheckpointError,
            "cannot write the .*No space left",
            id="save",
        ),
    ],
)
def test_a_disk_that_stays_full_stops_the_run_with_a_clear_message_and_with_room_the_run_finishes(
    tmp_path: Path,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    call: int,
    error: type[Exception],
    message: str,
) -> None:
    config = make_run(tmp_path, f"run.dir={disk}/run", name="tight")
    monkeypatch.setattr("rollcall.base.patience.DEADLINE_S", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Saves, "begin", begin_and_settle)
        fill_disk_at(patch, disk, owner, name, call=call)
        with pytest.raises(error, match=message):
            finish(config)
    before = journal_bytes(config)
    latest = CheckpointStore(config.run.dir / "checkpoints", keep_last=2, keep_best=1).latest()
    assert latest is not None and latest.step == 2
    readable = [draw for step in (1, 2, 3, 4) for draw in groups(config, step)]
    assert readable[:16] == list(range(16)) and 19 <= len(readable) < 48
    (disk / "ballast").unlink()
    assert finish(config)["steps"] == 6
    assert all(data.startswith(before[file]) for file, data in journal_bytes(config).items() if file in before)


def test_a_disk_that_is_full_when_the_run_starts_is_named(tmp_path: Path, disk: Path) -> None:
    config = make_run(tmp_path, f"run.dir={disk}/run", "trainer.steps=1", name="tight")
    ballast = fill(disk)
    with pytest.raises((OSError, ValueError), match="No space left"):
        finish(config)
    ballast.unlink()
    assert finish(config)["steps"] == 1


def test_a_full_disk_at_the_export_is_named_and_with_room_the_run_finishes(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollcall.loop.record import Record

    monkeypatch.setattr("rollcall.base.patience.DEADLINE_S", 0)
    config = make_run(tmp_path, f"run.dir={disk}/run", "trainer.steps=2", name="tight")
    with monkeypatch.context() as patch:
        fill_disk_at(patch, disk, Record, "export", call=1)
        with pytest.raises(CheckpointError, match="cannot write the trained model: No space left"):
            finish(config)
    (disk / "ballast").unlink()
    assert finish(config)["steps"] == 2
    assert weights(config)


# The run directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run, for tests that leave it as it is."""
    config = make_run(tmp_path_factory.mktemp("finished"), "trainer.steps=2")
    finish(config)
    return config


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.seed=8", "run.seed: 7 -> 8"),
        ("data.max_prompt_tokens=9", "data.max_prompt_tokens: 512 -> 9"),
        ("rollout.samples_per_prompt=2", "rollout.samples_per_prompt: 4 -> 2"),
        ("algorithm.name=rloo", "algorithm.name: 'grpo' -> 'rloo'"),
        ("reward.0.weight=2", "reward.0.weight: 1.0 -> 2.0"),
        (
            "actor.optimizer.name=torch.optim.SGD",
            "actor.optimizer.name: 'torch.optim.AdamW' -> 'torch.optim.SGD'",
        ),
    ],
)
def test_a_run_directory_is_not_continued_by_another_run(finished: Config, override: str, key: str) -> None:
    folder = finished.run.dir
    before = journal_bytes(finished), metric_rows(finished), (folder / "run.yaml").read_text()
    with pytest.raises(ConfigError, match=rf"different settings: {key}\. These cannot change.*--fresh"):
        finish(make_run(folder.parent, "trainer.steps=2", override))
    assert before == (journal_bytes(finished), metric_rows(finished), (folder / "run.yaml").read_text())


CHANGES: dict[str, tuple[Callable[[list[dict[str, Any]]], list[dict[str, Any]]], str]] = {
    "a-row-more": (lambda rows: [*rows, {**rows[0], "id": "new"}], "it had 16 rows and now has 17[.]"),
    "a-row-less": (lambda rows: rows[1:], "it had 16 rows and now has 15; 15 rows are different; the first is 'row-1'"),
    "other-text": (lambda rows: [{**row, "prompt": row["prompt"].replace("=", "+")} for row in rows], "16 rows are"),
    "an-answer": (lambda rows: [*rows[:3], {**rows[3], "answer": "z"}, *rows[4:]], "1 row is different; .* 'row-3'"),
    "a-column": (lambda rows: [*rows[:5], {**rows[5], "price": [2]}, *rows[6:]], "1 row is different; .* 'row-5'"),
    "columns-moved": (lambda rows: [{**row, "price": [10 - row["price"][0]]} for row in rows], "16 rows are"),
    "other-order": (lambda rows: rows[::-1], "16 rows are different; the first is 'row-15'"),
}


def priced() -> list[dict[str, Any]]:
    return [{**row, "price": [place % 2]} for place, row in enumerate(letter_rows())]


@pytest.mark.parametrize("split", ["train", "val"])
def test_rows_that_changed_since_the_run_began_are_refused_before_its_first_checkpoint_too(
    tmp_path: Path, split: str
) -> None:
    config = make_run(tmp_path, "trainer.steps=1", "trainer.eval_every=1", rows=priced(), val=priced())
    run_and_be_killed(config, Kill(call=IN_UPDATE, number=1))
    before = journal_bytes(config)
    for name, (change, why) in CHANGES.items():
        write_rows(tmp_path / f"{split}.jsonl", change(priced()))
        with pytest.raises(
            DataError, match=rf"data.{split}=.*{split}.jsonl has changed since the run .*{why}.*--fresh"
        ):
            finish(config)
        assert journal_bytes(config) == before, name
    write_rows(tmp_path / f"{split}.jsonl", priced())
    (config.run.dir / "data.json").write_text('{"train": 1')
    with pytest.raises(CheckpointError, match="data.json is missing, damaged .*JSONDecodeError.*; restore the file"):
        finish(config)
    code = json.loads((config.run.dir / "code.json").read_text())
    (config.run.dir / "code.json").write_text(json.dumps(code | {"format": 1}))
    with pytest.raises(
        CheckpointError, match="code.json .*its format is 1, .*; restore the file, finish the run with that"
    ):
        finish(config)
    (config.run.dir / "code.json").write_text(json.dumps(code))
    (config.run.dir / "data.json").unlink()
    with pytest.raises(CheckpointError, match="data.json .*FileNotFoundError.*; restore the file, finish the run with"):
        finish(config)


def test_another_number_of_held_out_rows_is_compared_in_those_that_the_run_had(tmp_path: Path) -> None:
    def limited(most: int) -> Config:
        return make_run(tmp_path, "trainer.steps=2", "trainer.save_every=1", f"eval.max_prompts={most}", val=priced())

    run_and_be_killed(limited(4), Kill(call=IN_UPDATE, number=2))
    for most in (2, 6):
        config = limited(most)
        write_rows(tmp_path / "val.jsonl", CHANGES["other-text"][0](priced()))
        with pytest.raises(DataError, match=f"data.val=.*: {min(most, 4)} rows are different; the first is 'row-0'"):
            finish(config)
    assert finish(limited(6))["steps"] == 2


def test_fresh_moves_the_old_run_aside_and_starts_over(tmp_path: Path) -> None:
    config = make_run(tmp_path, "trainer.steps=1")
    finish(config)
    first = weights(config)
    for number in (1, 2):
        other = make_run(tmp_path, "trainer.steps=1", f"run.seed={10 + number}")
        assert finish(other, fresh=True)["steps"] == 1
        assert (tmp_path / f"run.old-{number}" / "summary.json").exists()
    for name, tensor in load_file(tmp_path / "run.old-1" / "model" / "model.safetensors").items():
        np.testing.assert_array_equal(tensor, first[name])
    assert finish(make_run(tmp_path, "trainer.steps=1", name="new"), fresh=True)["steps"] == 1, "nothing there to move"


def test_a_directory_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    config.run.dir.mkdir()
    (config.run.dir / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="contains files but no run.yaml"):
        finish(config)
    assert [path.name for path in config.run.dir.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("cluster", ["{num_nodes: 2, num_gpus_per_node: 1}", "{num_nodes: 1, num_gpus_per_node: 8}"])
def test_several_slots_need_a_cluster_that_this_node_is_part_of(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("ROLLCALL_CLUSTER", raising=False)
    config = make_run(tmp_path, f"cluster={cluster}")
    with pytest.raises(
        ClusterError, match="this node is not part of a cluster 'default'; to add it, run `rollcall node`"
    ):
        finish(config)
    assert not config.run.dir.exists()


def test_a_cluster_of_one_slot_trains(tmp_path: Path) -> None:
    config = make_run(tmp_path, "cluster={num_nodes: 1, num_gpus_per_node: 1}", "trainer.steps=2")
    assert finish(config)["steps"] == 2


def test_an_error_ends_a_child_process_with_a_status(tmp_path: Path) -> None:
    config = make_run(tmp_path, f"data.train={tmp_path}/nowhere.jsonl")
    assert run_in_child(config) == 1
