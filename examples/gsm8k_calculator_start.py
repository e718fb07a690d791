"""Shows a model how the calculator of gsm8k_calculator.py is used, before it learns when by reinforcement.

GSM8K's solutions have their calculations marked, as in "48/2 = <<48/2=24>>24". Each becomes a call and its result; the sentences
around them are left out. Two passes over the training rows, supervised, on what the model writes itself: calls and the answer.

    python -m examples.gsm8k_calculator_start models/smollm2 data/gsm8k models/smollm2-calculator
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.gsm8k_calculator import work_out

EPOCHS = 2
ROWS_PER_UPDATE = 64
LR = 1e-4
WARMUP = 20
LONGEST = 384  # tokens of a row
IGNORED = -100  # torch's label for what is not learnt
Parts = list[tuple[str, bool]]  # text, and whether the model writes it


def parts_of(question: str, solution: str) -> Parts | None:
    """A row as the model will see it in an episode; None: a mark in it is not arithmetic."""
    steps, _, answer = solution.rpartition("####")
    parts = [(f"Question: {question}\n", False)]
    for expression in re.findall(r"<<([^=<>]*)=[^<>]*>>", steps):
        result = work_out(expression)
        if result is None:
            return None
        parts += [(f'calculate("{expression.strip()}")', True), (f"\n{result}\n", False)]
    return [*parts, (f"Answer: {answer.strip().replace(',', '')}\n", True)] if len(parts) > 1 else None


def encode(parts: Parts, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids and labels. Each part is encoded by itself, as the turns of an episode are."""
    ids: list[int] = []
    labels: list[int] = []
    for text, is_learnt in parts:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += found
        labels += found if is_learnt else [IGNORED] * len(found)
    return ids, labels


def batches(rows: list[tuple[list[int], list[int]]], *, pad: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    order = random.Random(0)
    for _ in range(EPOCHS):
        order.shuffle(rows)
        for start in range(0, len(rows) - ROWS_PER_UPDATE + 1, ROWS_PER_UPDATE):
            part = rows[start : start + ROWS_PER_UPDATE]
            longest = max(len(ids) for ids, _ in part)
            ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in part])
            yield ids, torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in part])


def train(model: Any, rows: list[tuple[list[int], list[int]]], *, pad: int, device: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    updates = EPOCHS * (len(rows) // ROWS_PER_UPDATE)
    for number, (ids, labels) in enumerate(batches(rows, pad=pad), start=1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(number / WARMUP, max(1 - number / updates, 0.05))
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(ids.to(device), labels=labels.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 20 == 0 or number == updates:
            print(f"update {number} of {updates}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model directory to begin with")
    parser.add_argument("data", type=Path, help="folder with GSM8K's train.jsonl")
    parser.add_argument("out", type=Path, help="model directory to make, in bfloat16")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    read = [json.loads(line) for line in (args.data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [parts for row in read if (parts := parts_of(row["question"], row["answer"])) is not None]
    rows = [row for parts in found if len((row := encode(parts, tokenizer))[0]) <= LONGEST]
    print(f"{len(rows)} of {len(read)} rows have marks that can be worked out", flush=True)
    torch.manual_seed(0)
    train(model.to(device), rows, pad=tokenizer.pad_token_id, device=device)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
