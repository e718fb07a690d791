"""What the benchmarks and their peers share: workloads, model directories, timing, peers in their own Python, results.

A peer script runs as `python -m benchmarks.peer_X` in another environment, so this module imports nothing of Rollcall
and needs torch and transformers only where it builds a model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Qwen2's tokenizer class, which transformers puts beside a qwen2 config, adds its <|endoftext|> where it is missing.
PAD, EOS = "<|pad|>", "<|endoftext|>"
# Prompts are made of these: one token each, and none that a tokenizer might strip or join.
PROMPT_CHARACTERS = [chr(code) for code in range(33, 127)]


def _shape(*, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, int]:
    """Sizes under the names of transformers' config."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
    }


TINY = _shape(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=384)
SMALL = _shape(hidden=384, layers=6, heads=6, kv_heads=2, intermediate=1280)
SMOLLM2 = _shape(hidden=576, layers=30, heads=9, kv_heads=3, intermediate=1536)
QWEN = _shape(hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864)
QWEN_1_5B = _shape(hidden=1536, layers=28, heads=12, kv_heads=2, intermediate=8960)
QWEN_7B = _shape(hidden=3584, layers=28, heads=28, kv_heads=4, intermediate=18944)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One amount of work that both sides do: this model, these prompts, exactly so many new tokens."""

    name: str
    model_type: str  # qwen2 or llama
    shape: dict[str, int]  # sizes as transformers' config names them
    vocab_size: int
    rope_theta: float
    num_prompts: int
    samples_per_prompt: int
    prompt_tokens: int
    new_tokens: tuple[int, ...]  # one per completion, the completions of a prompt side by side
    dtype: str
    threads: int  # CPU threads
    tied: bool = True  # the output head is the embeddings
    seed: int = 0

    def __post_init__(self) -> None:
        assert len(self.new_tokens) == self.num_completions, "one length per completion"

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.samples_per_prompt

    @property
    def num_new_tokens(self) -> int:
        return sum(self.new_tokens)

    @property
    def max_tokens(self) -> int:
        """Longest prompt and completion together."""
        return self.prompt_tokens + max(self.new_tokens)

    def prompts(self, step: int = 0) -> list[list[int]]:
        """The step's prompts as token ids; the same on every machine."""
        draw = random.Random(f"{self.seed}/{step}")
        ids = [_vocabulary(self.vocab_size)[character] for character in PROMPT_CHARACTERS]
        return [draw.choices(ids, k=self.prompt_tokens) for _ in range(self.num_prompts)]

    def completion_prompts(self, step: int = 0) -> list[list[int]]:
        """Each prompt as often as it has completions: one row per entry of `new_tokens`."""
        return [prompt for prompt in self.prompts(step) for _ in range(self.samples_per_prompt)]


def _mixed_lengths(count: int, *, low: int, high: int) -> tuple[int, ...]:
    draw = random.Random("lengths")
    return tuple(draw.randint(low, high) for _ in range(count))


def _long_tail(count: int, *, low: int, high: int) -> tuple[int, ...]:
    """Log-normal lengths around 256, one of them as long as may be."""
    draw = random.Random("tail")
    lengths = [min(max(round(draw.lognormvariate(math.log(256), 1.0)), low), high) for _ in range(count - 1)]
    return (*lengths, high)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="grpo-0.8m", model_type="qwen2", shape=TINY, vocab_size=128, rope_theta=1e4, num_prompts=16,
            samples_per_prompt=8, prompt_tokens=16, new_tokens=(64,) * 128, dtype="float32", threads=2,
        ),
        Workload(
            name="rollout-0.8m", model_type="qwen2", shape=TINY, vocab_size=128, rope_theta=1e4, num_prompts=8,
            samples_per_prompt=8, prompt_tokens=16, new_tokens=(64,) * 64, dtype="float32", threads=2,
        ),
        Workload(
            name="rollout-11m-mixed", model_type="qwen2", shape=SMALL, vocab_size=128, rope_theta=1e4, num_prompts=8,
            samples_per_prompt=8, prompt_tokens=16, new_tokens=_mixed_lengths(64, low=8, high=128), dtype="float32",
            threads=2,
        ),
        Workload(
            name="rollout-135m", model_type="llama", shape=SMOLLM2, vocab_size=49152, rope_theta=1e5, num_prompts=8,
            samples_per_prompt=8, prompt_tokens=16, new_tokens=(32,) * 64, dtype="float32", threads=2,
        ),
        Workload(
            name="qwen-0.5b", model_type="qwen2", shape=QWEN, vocab_size=151936, rope_theta=1e6, num_prompts=32,
            samples_per_prompt=8, prompt_tokens=128, new_tokens=(512,) * 256, dtype="bfloat16", threads=8,
        ),
        Workload(
            name="qwen-0.5b-tail", model_type="qwen2", shape=QWEN, vocab_size=151936, rope_theta=1e6, num_prompts=32,
            samples_per_prompt=8, prompt_tokens=128, new_tokens=_long_tail(256, low=16, high=2048), dtype="bfloat16",
            threads=8,
        ),
        Workload(
            name="qwen-1.5b", model_type="qwen2", shape=QWEN_1_5B, vocab_size=151936, rope_theta=1e6, num_prompts=32,
            samples_per_prompt=8, prompt_tokens=128, new_tokens=(512,) * 256, dtype="bfloat16", threads=8,
        ),
        Workload(
            name="qwen-7b", model_type="qwen2", shape=QWEN_7B, vocab_size=152064, rope_theta=1e6, num_prompts=32,
            samples_per_prompt=8, prompt_tokens=128, new_tokens=(512,) * 256, dtype="bfloat16", threads=8, tied=False,
        ),
    )
}  # fmt: skip


@cache
def _vocabulary(vocab_size: int) -> dict[str, int]:
    """Pad, eos, then single bytes as byte-level BPE writes them, then entries that no text reaches."""
    # Byte-level BPE shows printable bytes as themselves and moves the others above 256, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) if byte in printable else chr(256 + moved.index(byte)) for byte in range(256)}
    order = [*range(32, 127), ord("\n"), ord("\t")]
    if vocab_size >= 300:  # room for every byte, so that any text survives
        order += [byte for byte in range(256) if byte not in order]
    names = [PAD, EOS, *(symbols[byte] for byte in order)]
    names += [f"<unused{index}>" for index in range(vocab_size - len(names))]
    assert len(names) == vocab_size, f"{vocab_size} tokens are too few for the characters of a prompt"
    return {name: index for index, name in enumerate(names)}


def build_model_dir(workload: Workload, directory: Path) -> Path:
    """Save the workload's model with random weights and its tokenizer; a directory already made is kept."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    done = directory / "workload.json"
    stamp = json.dumps([workload.name, workload.shape, workload.vocab_size, workload.dtype, workload.seed])
    if done.exists() and done.read_text() == stamp:
        return directory
    _build_tokenizer(workload).save_pretrained(directory)
    vocabulary = _vocabulary(workload.vocab_size)
    special = {"pad_token_id": vocabulary[PAD], "bos_token_id": None, "eos_token_id": vocabulary[EOS]}
    config = AutoConfig.for_model(
        workload.model_type, vocab_size=workload.vocab_size, tie_word_embeddings=workload.tied,
        max_position_embeddings=max(1024, workload.max_tokens), dtype=workload.dtype,
        rope_parameters={"rope_type": "default", "rope_theta": workload.rope_theta}, **special, **workload.shape,
    )  # fmt: skip
    torch.manual_seed(workload.seed)
    with torch.device("cuda" if workload.dtype == "bfloat16" and torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(getattr(torch, workload.dtype))
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(directory)
    _check_tokenizer(AutoTokenizer.from_pretrained(directory), workload)
    done.write_text(stamp)
    return directory


def _build_tokenizer(workload: Workload) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level BPE without merges is the one home-made tokenizer that survives transformers' rebuilding of it as the
    # class that belongs to the model type.
    backend = Tokenizer(models.BPE(vocab=_vocabulary(workload.vocab_size), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(PAD, special=True), AddedToken(EOS, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, padding_side="left",
        clean_up_tokenization_spaces=False, model_max_length=max(1024, workload.max_tokens),
    )  # fmt: skip


def _check_tokenizer(tokenizer: Any, workload: Workload) -> None:
    assert len(tokenizer) == workload.vocab_size, f"{len(tokenizer)} tokens for {workload.vocab_size} embeddings"
    vocabulary = _vocabulary(workload.vocab_size)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (vocabulary[PAD], vocabulary[EOS])
    text = "7 + 5 =\n\t 12,  then  spaces "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text, "text does not survive"
    for prompt in workload.prompts():
        assert tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False) == prompt, "prompt does not survive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure(run: Callable[[], object], *, warmup: int, repeats: int) -> Timing:
    """Time `run` after some untimed calls. A run on an accelerator must itself wait for its work to end."""
    for _ in range(warmup):
        run()
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start_s)
    return Timing(seconds=tuple(seconds))


def peer_parser(description: str | None, *, workload: str) -> argparse.ArgumentParser:
    """The arguments that every peer script takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default=workload)
    parser.add_argument("--model-dir", type=Path, help="made by build_model_dir; absent: built in a temporary folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, of which the median counts")
    return parser


@contextlib.contextmanager
def model_dir(workload: Workload, given: Path | None) -> Iterator[Path]:
    """The model directory given, or one that is built and thrown away."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield build_model_dir(workload, Path(folder))


def peer_python(peer: str, given: str | None = None) -> str:
    """The Python that has `peer` installed: the one given, else its environment under $ROLLCALL_PEERS or .peers."""
    if given is not None:
        return given
    path = Path(os.environ.get("ROLLCALL_PEERS", ROOT / ".peers")) / peer / "bin" / "python"
    if not path.exists():
        raise ValueError(
            f"peer {peer} has no Python at {path}; run scripts/setup_peers.sh, name one with --peer-python, or measure "
            "without it by --peer none"
        )
    return str(path)


def run_peer(module: str, *, python: str, workload: Workload, args: list[str], deadline_s: float) -> dict[str, Any]:
    """Run `python -m benchmarks.<module>` to its end and return the JSON object on its last line."""
    command = [python, "-m", f"benchmarks.{module}", "--workload", workload.name, *args]
    env = {**os.environ, "OMP_NUM_THREADS": str(workload.threads)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # Files, not pipes, and a session of its own: vLLM's engine process outlives its parent and would hold a pipe.
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            code = process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_session(process)
        stdout, stderr = (_read(stream) for stream in (out, err))
    if code != 0:
        ended = f"did not end within {deadline_s:.0f} s" if code is None else f"ended with status {code}"
        raise RuntimeError(f"peer {' '.join(command)} {ended}; its last words:\n{(stdout + stderr)[-3000:]}")
    return last_json(stdout)


def _read(stream: Any) -> str:
    stream.seek(0)
    return stream.read()


def _end_session(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # everyone has left already, as they should
    process.wait(timeout=30)


def last_json(text: str) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"no line of JSON in the output; its end is:\n{text[-2000:]}")


def hardware(device: str) -> str:
    """The processor that did the work, in words."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name} x {os.cpu_count()}"


def commit() -> str:
    """The checkout's commit, with `+` when the tree differs from it; `unknown` outside of git."""
    answers = [
        subprocess.run(["git", *args], check=False, cwd=ROOT, capture_output=True, text=True, timeout=30)
        for args in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
    ]
    if any(answer.returncode for answer in answers):
        return "unknown"
    return answers[0].stdout.strip() + ("+" if answers[1].stdout.strip() else "")


def print_result(
    benchmark: str,
    *,
    workload: str,
    device: str,
    ours: dict[str, Any],
    peer: dict[str, Any] | None,
    ratio: float | None,
) -> None:
    """The benchmark's last line. `ratio` is how many times faster ours is; both it and `peer` are null without one."""
    result = {
        "benchmark": benchmark,
        "workload": workload,
        "device": device,
        "ours": ours,
        "peer": peer,
        "ratio": None if ratio is None else round(ratio, 3),
        "commit": commit(),
        "hardware": hardware(device),
    }
    print(json.dumps(result), flush=True)
