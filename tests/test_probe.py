"""What a save records of the trained model, and what verify makes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learners import learner_of, step
from ranks import Ranks
from tiny import make_tokenizer, reference_logprobs
from transformers import AutoModelForCausalLM

from rollcall.base.errors import CheckpointError
from rollcall.checkpoint.probe import probe_of, probe_rows, read_probe
from rollcall.checkpoint.training import export_learner
from rollcall.learner.gang import Gang
from rollcall.model.stored.find import PROBE


def floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def probed(gang: Gang, changes: dict[str, Any], folder: Path) -> None:
    learner = learner_of(gang, **changes)
    step(learner, 1)
    if (probe := probe_of(learner)) is not None:  # on the first rank
        (folder / PROBE).write_text(probe.dump())


def test_the_exported_model_has_the_log_probs_of_its_probe(tmp_path: Path) -> None:
    learner = learner_of(Gang.alone())
    step(learner, 1)
    export_learner(learner, make_tokenizer(), tmp_path / "model")
    probe = read_probe(tmp_path / "model" / PROBE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for row, logprobs in zip(probe.rows, probe.logprobs, strict=True):
        ids = np.array(row)
        np.testing.assert_allclose(floats(logprobs), reference_logprobs(model, ids[:1], ids[1:]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, dict(sharding="fsdp"), dict(tensor_parallel_size=2)])
def test_all_ways_to_divide_a_model_record_the_same(ranks: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    probed(Gang.alone(), {}, one)
    ranks.run(probed, changes, two, size=2)
    alone, divided = read_probe(one / PROBE), read_probe(two / PROBE)
    assert alone.rows == divided.rows and alone.dtype == divided.dtype == "float32"
    for a, b in zip(alone.logprobs, divided.logprobs, strict=True):
        np.testing.assert_allclose(floats(a), floats(b), rtol=1e-4, atol=1e-4)


def test_rows_fit_the_vocabulary_and_the_positions_of_a_model() -> None:
    for vocabulary, longest in ((2, 2), (40, 256), (151_936, 32_768)):
        rows = probe_rows(vocabulary, longest=longest)
        assert all(0 <= token < vocabulary for row in rows for token in row)
        assert max(map(len, rows)) <= longest


def test_a_file_that_is_no_probe_is_refused(tmp_path: Path) -> None:
    probed(Gang.alone(), {}, tmp_path)
    path = tmp_path / PROBE
    whole = json.loads(path.read_text())
    for change in ({"rows": []}, {"dtype": "zeros"}, {"logprobs": whole["logprobs"][:-1]}, {"rows": 3}, {"format": 2}):
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(CheckpointError, match=r"is not a probe of a saved model: [^\n]*$"):
            read_probe(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        read_probe(path)
