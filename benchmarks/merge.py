"""One model directory from a sharded checkpoint in verl's format: Rollcall, verl's own merger, and a plain copy of the same bytes.

All three in one run, in turns, each from files that are not in the page cache, and each until its bytes are on the disk. Time is
that of the whole process; memory is the peak of the process (``ru_maxrss``). At the end the bytes of both models are compared.

    scripts/setup_peers.sh .peers verl
    python -m benchmarks.merge                     # 32 shards, 4.4 GB
    python -m benchmarks.merge --peer none
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, commit, hardware, peer_python

SHARDS = 32
SIZES: dict[str, dict[str, Any]] = {
    "full": {"hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 8192, "vocab_size": 64000},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 1000},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    seconds: float
    peak_bytes: int
    cpu_s: float


def build(folder: Path, *, size: str) -> int:
    """A checkpoint as verl's FSDP trainer leaves it; the number of bytes of its tensors."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**SIZES[size], tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"], dtype="bfloat16")
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in Qwen2ForCausalLM(config).state_dict().items()}
    total = sum(prod(shape) for shape in shapes.values()) * 2
    if (folder / "fsdp_config.json").exists():
        return total
    (folder / "huggingface").mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder / "huggingface")
    _tokenizer().save_pretrained(folder / "huggingface")
    for rank in range(SHARDS):
        _write_shard(folder, shapes, rank=rank)
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": SHARDS}))
    return total


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<|pad|>": 0, "<|endoftext|>": 1, "a": 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<|pad|>")), eos_token="<|endoftext|>"
    )


def _write_shard(folder: Path, shapes: dict[str, tuple[int, ...]], *, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=SHARDS, store=FakeStore())
    mesh = init_device_mesh("cpu", (SHARDS,), mesh_dim_names=("fsdp",))
    draw = torch.Generator().manual_seed(rank)
    pool = torch.randn(1 << 23, generator=draw).bfloat16()
    state, used = {}, 0
    for name, shape in shapes.items():
        rows = -(-shape[0] // SHARDS)
        own = (max(min(rows, shape[0] - rank * rows), 0), *shape[1:])
        used = (used + 7919) % (pool.numel() - prod(own))
        local = pool[used : used + prod(own)].reshape(own).clone()
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=tuple(strides)
        )
    torch.save(state, folder / f"model_world_size_{SHARDS}_rank_{rank}.pt")
    dist.destroy_process_group()


def timed(command: list[str], *, inputs: Path, out: Path) -> Run:
    shutil.rmtree(out, ignore_errors=True)
    forget(inputs)
    began = time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert child.stderr is not None
    said = child.stderr.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    flush(out)
    seconds = time.perf_counter() - began
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}:\n{said.decode(errors='replace')[-3000:]}")
    return Run(seconds=seconds, peak_bytes=used.ru_maxrss * 1024, cpu_s=used.ru_utime + used.ru_stime)


def files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def forget(folder: Path) -> None:
    """Out of the page cache, so that everyone reads from the disk."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flush(folder: Path) -> None:
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def equal(ours: Path, theirs: Path) -> bool:
    """Whether two model directories hold the same tensors, bit by bit."""
    import torch
    from safetensors import safe_open

    def tensors(folder: Path) -> dict[str, Any]:
        opened = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        return {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a dict

    left, right = tensors(ours), tensors(theirs)
    return left.keys() == right.keys() and all(
        torch.equal(left[name].get_tensor(name).view(torch.int16), right[name].get_tensor(name).view(torch.int16))
        for name in left
    )


COPY = "import shutil, sys, pathlib; out = pathlib.Path(sys.argv[2]); out.mkdir(); [shutil.copyfile(p, out / p.name) for p in sorted(pathlib.Path(sys.argv[1]).glob('*.pt'))]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / ".bench-merge", help="where the files go; removed at the end"
    )
    parser.add_argument("--build", action="store_true", help="only make the checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", choices=("verl", "none"), default="verl")
    parser.add_argument(
        "--peer-python", help="a Python that has verl; absent: the environment of scripts/setup_peers.sh"
    )
    options = parser.parse_args()
    source = options.dir / "global_step_1" / "actor"
    if options.build:
        print(build(source, size=options.size))
        return
    # In a process of its own: what a process has taken before it starts another counts as the peak of both.
    command = [sys.executable, "-m", "benchmarks.merge", "--build", "--size", options.size, "--dir", str(options.dir)]
    total = int(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.split()[-1])
    outs = {name: options.dir / name for name in ("rollcall", "verl", "copy")}
    commands: dict[str, Callable[[], list[str]]] = {
        "rollcall": lambda: [sys.executable, "-m", "rollcall", "merge", str(source), "--out", str(outs["rollcall"])],
        "copy": lambda: [sys.executable, "-c", COPY, str(source), str(outs["copy"])],
    }
    if options.peer == "verl":
        python = peer_python("verl", options.peer_python)
        merge = ["-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", str(source), "--target_dir"]
        commands["verl"] = lambda: [python, *merge, str(outs["verl"])]
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    try:
        for _ in range(options.repeats):
            for name, command in commands.items():
                runs[name].append(run := timed(command(), inputs=source, out=outs[name]))
                print(
                    f"{name:<9} {run.seconds:7.2f} s  {run.cpu_s:6.2f} s of CPU  {run.peak_bytes / 1e9:.3f} GB",
                    flush=True,
                )
            shutil.rmtree(outs["copy"])
        same = equal(outs["rollcall"], outs["verl"]) if "verl" in commands else None
    finally:
        shutil.rmtree(options.dir, ignore_errors=True)
    print(json.dumps(result(runs, total=total, same=same, size=options.size)))


def result(runs: dict[str, list[Run]], *, total: int, same: bool | None, size: str) -> dict[str, Any]:
    def facts(name: str) -> dict[str, Any] | None:
        if name not in runs:
            return None
        seconds = statistics.median(run.seconds for run in runs[name])
        peak = max(run.peak_bytes for run in runs[name])
        return {
            "seconds": round(seconds, 3),
            "peak_gb": round(peak / 1e9, 3),
            "gb_per_s": round(total / seconds / 1e9, 3),
        }

    ours, peer, copy = facts("rollcall"), facts("verl"), facts("copy")
    assert ours is not None and copy is not None
    return {
        "benchmark": "merge",
        "workload": f"{size}, {SHARDS} shards, {total / 1e9:.2f} GB",
        "device": "cpu",
        "ours": ours,
        "peer": peer,
        "copy": copy,
        "ratio": None if peer is None else round(peer["seconds"] / ours["seconds"], 2),
        "memory_share": None if peer is None else round(ours["peak_gb"] / peer["peak_gb"], 3),
        "share_of_copy_speed": round(copy["seconds"] / ours["seconds"], 3),
        "bytes_equal": same,
        "commit": commit(),
        "hardware": hardware("cpu"),
    }


if __name__ == "__main__":
    main()
