"""How long a batch of very different lengths takes, against its longest completion alone.

256 completions with log-normal lengths, 16 to 2,048 tokens. The longest sets a floor: nothing can be done before it ends.

python -m benchmarks.tail --device cuda
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from benchmarks.common import WORKLOADS, build_model_dir, print_result
from benchmarks.rollout import measure_ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="qwen-0.5b-tail")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model-dir", type=Path, help="keep the workload's model here; absent: built and thrown away")
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    # The second ends at the first look; an algorithm that compares completions wants two.
    longest = dataclasses.replace(
        workload, num_prompts=1, samples_per_prompt=2, new_tokens=(max(workload.new_tokens), 1)
    )
    with tempfile.TemporaryDirectory() as folder:
        model_dir = build_model_dir(workload, args.model_dir or Path(folder) / "model")
        alone = measure_ours(longest, model_dir, Path(folder) / "alone", args)
        print("the longest alone", alone, flush=True)
        ours = measure_ours(workload, model_dir, Path(folder) / "run", args)
    ratio = ours["median_s"] / alone["median_s"]
    print_result("tail", workload=workload.name, device=args.device, ours=ours, peer=alone, ratio=ratio)


if __name__ == "__main__":
    main()
