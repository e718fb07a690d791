"""A merged model directory in vLLM itself: it opens, gives the log-probs of the trained model, and answers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gathered import Trained
from learners import make_learner, trainable

from rollcall.checkpoint.merge.merge import merge
from rollcall.checkpoint.probe import read_probe
from rollcall.checkpoint.verify import verify
from rollcall.engine.vllm.child import child_environment
from rollcall.engine.vllm.setup import PYTHON_VARIABLE, VllmUnavailable, find_python
from rollcall.launch.finish.gather import gather
from rollcall.model.stored.find import PROBE

pytestmark = pytest.mark.vllm

# As a user would: the directory's path, and nothing else of the model.
OPEN = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    folder, rows = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=64 << 20, seed=0)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows], asked, use_tqdm=False)
    logprobs = [
        [found[token].logprob for found, token in zip(output.prompt_logprobs[1:], row[1:])] for output, row in zip(outputs, rows)
    ]
    answer = llm.generate("1+2=", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0].outputs[0]
    print("FOUND " + json.dumps({"logprobs": logprobs, "tokens": len(answer.token_ids), "text": answer.text}))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("architecture", ["qwen3-tied", "qwen2-untied"])
def test_vllm_opens_a_merged_model_and_has_the_log_probs_of_the_trained_one(tmp_path: Path, architecture: str) -> None:
    try:
        python = find_python(None)
    except VllmUnavailable as error:
        pytest.skip(f"{error}, or in {PYTHON_VARIABLE}")
    run = Trained(tmp_path)
    shape = {"head_dim": 32} if architecture.startswith("qwen3") else {}  # vLLM's kernels for CPUs begin at heads of 32
    run.learner = make_learner(trainable(architecture, hidden_size=128, **shape))
    checkpoint = run.save(1, on_nodes=True)
    gather(checkpoint, lambda: run.disks)
    merge(checkpoint, tmp_path / "merged", max_shard_size="200KB")
    verify(tmp_path / "merged")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    probe = read_probe(tmp_path / "merged" / PROBE)
    said = subprocess.run(
        [python, "-c", OPEN, str(tmp_path / "merged"), json.dumps(probe.rows)],
        env=child_environment(num_threads=1), cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    line = next((line for line in said.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert said.returncode == 0 and line is not None, said.stdout + said.stderr
    found = json.loads(line.removeprefix("FOUND "))
    for theirs, ours in zip(found["logprobs"], probe.logprobs, strict=True):
        np.testing.assert_allclose(theirs, np.array(ours, dtype=np.float32), rtol=1e-3, atol=1e-3)
    assert found["tokens"] >= 1
