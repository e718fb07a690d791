"""Writes docs/metrics.md from the table in rollcall.observe.metrics.

python scripts/write_metrics.py
"""

from __future__ import annotations

from pathlib import Path

from rollcall.observe.metrics import METRICS

GROUPS = {
    "train": "What each update trained on, and what it changed.",
    "rollout": "What the engine sampled.",
    "reward": "One metric for each reward in the run file.",
    "reward_errors": "A reward that fails scores 0 and is counted. The run stops only if a reward fails on every completion of a step.",
    "episode": "How episodes went. These metrics exist only in runs with an `environment`.",
    "env": "One metric for each metric that the environment reports.",
    "eval": "Evaluations on held-out prompts: before the first step, every `trainer.eval_every` steps, and after the last.",
    "time": "How long each part of a step takes.",
    "perf": "Speed and memory.",
}


def render_docs() -> str:
    lines = [
        "# Metrics",
        "",
        "<!-- Written by `python scripts/write_metrics.py`; edit the table in src/rollcall/observe/metrics.py. -->",
        "",
        "`metrics.jsonl` in the run directory has one row per step: `step`, `time` (unix seconds) and the metrics below that apply",
        "to the step. TensorBoard and Weights & Biases use the same names. A value that is not finite is `null`. An evaluation has",
        "the number of the step before it; step 0 is the model before training.",
        "",
    ]
    for group, meaning in GROUPS.items():
        lines += [f"## {group}/", "", meaning, "", "| metric | unit | meaning |", "|---|---|---|"]
        own = ((name, *about) for name, about in METRICS.items() if name.startswith(f"{group}/"))
        lines += [*(f"| `{name}` | {unit} | {text} |" for name, unit, text in own), ""]
    return "\n".join(lines)


def main() -> None:
    path = Path("docs/metrics.md")
    path.write_text(render_docs())
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
