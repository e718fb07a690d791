"""`rollcall eval`, `rollcall serve` and `rollcall merge`: evaluate a model, serve it, turn a checkpoint into one model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from rollcall.base.stop import heed
from rollcall.base.wait import on_stdout, say
from rollcall.base.words import counted, size
from rollcall.cli import Json, Overrides, answer, calm_libraries, print_rows, progress_bar

if TYPE_CHECKING:
    from rollcall.checkpoint.merge.merge import Merged
    from rollcall.checkpoint.verify import Verified
    from rollcall.run.evaluation import EvalReport


def evaluate(
    target: Annotated[Path, Argument(metavar="RUN.yaml|RUN_DIR|MODEL_DIR|CHECKPOINT", help="What to evaluate.")],
    overrides: Overrides = None,
    data: Annotated[str | None, Option(help="JSONL or Parquet file. Default: the run's data.val.")] = None,
    samples: Annotated[int | None, Option(min=1, help="Completions per prompt. More than one gives pass@k.")] = None,
    temperature: Annotated[float | None, Option(min=0, help="Sampling temperature. 0 is greedy.")] = None,
    max_prompts: Annotated[int | None, Option(min=1, help="Evaluate on the first N prompts only.")] = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy, pass@k and lengths, and show samples.

    For a run file or a run directory, this evaluates the trained model, else the newest checkpoint, else the model that
    the run starts from. A model directory or a checkpoint needs --data. Only the exact answer scores unless reward=[...] is set.

    \b
    Examples:
      rollcall eval runs/arithmetic
      rollcall eval runs/gsm8k --samples 8 --temperature 0.8 --max-prompts 200
      rollcall eval MODEL --data data/gsm8k/test.parquet 'reward=[{type: math}]'
      rollcall eval runs/gsm8k/checkpoints/step-000040 --data data/gsm8k/test.parquet 'reward=[{type: math}]'
    """
    say("loading torch and transformers")
    with heed():
        calm_libraries()
        from rollcall.run.evaluation import plan_evaluation, run_evaluation

        plan = plan_evaluation(
            target,
            overrides=overrides or [],
            data=data,
            samples=samples,
            temperature=temperature,
            max_prompts=max_prompts,
        )
        with progress_bar("evaluation", unit="prompts") as progress:
            report = run_evaluation(plan, on_progress=progress)
    answer(report, _show_evaluation, as_json=as_json)


def _show_evaluation(report: EvalReport) -> None:
    from rollcall.base.screen import Screen
    from rollcall.observe.console import samples_table
    from rollcall.observe.headline import REWARD

    evaluation, section = report.evaluation, report.plan.config.eval
    how = "greedy" if section.temperature == 0 else f"temperature {section.temperature:g}"
    means = f"   (share with a first reward of at least {section.threshold:g})" if report.headline is REWARD else ""
    at_k = [(f"pass@{k}", f"{value:.3f}") for k, value in evaluation.pass_at.items() if k > 1]
    accuracy = [("accuracy", f"{evaluation.accuracy:.3f}{means}"), *at_k]
    reward = [("mean reward", f"{evaluation.reward_mean:.3f}")]
    prompts = counted(len(evaluation.groups), "prompt")
    limit, cut_off = f"at most {report.max_response_tokens:,}", evaluation.truncated_fraction
    rows = [
        ("model", f"{report.plan.model_path}   ({report.plan.origin})"),
        ("data", f"{report.prompts.source}   {prompts} x {section.samples_per_prompt}, {how}"),
        *([*reward, *accuracy] if report.headline is REWARD else [*accuracy, *reward]),
        ("mean length", f"{evaluation.response_length_mean:.1f} tokens ({limit}), {cut_off:.1%} cut off"),
        ("time", f"{report.seconds:.1f} s"),
    ]
    if report.prompts.num_overlong:
        overlong = counted(report.prompts.num_overlong, "prompt")
        rows.append(("left out", f"{overlong} longer than data.max_prompt_tokens"))
    if evaluation.num_unscored:
        first = report.failures[0]
        rows.append(("not scored", f"{evaluation.num_unscored}, the first by {first.reward} on {first.prompt_id}"))
    Screen(soft_wrap=True).print(samples_table("samples", report.samples))
    print_rows(rows, width=11)


def serve(
    target: Annotated[str, Argument(metavar="MODEL|RUN", help="Model directory, hub name, run directory or run file.")],
    overrides: Overrides = None,
    port: Annotated[int, Option(min=0, max=65535, help="Port. 0: a free port.")] = 8000,
    host: Annotated[
        str, Option(help="Address to listen on. The default is reachable only from this machine.")
    ] = "127.0.0.1",
    key_file: Annotated[
        Path | None, Option(help="File with the key. Default: ROLLCALL_SERVE_KEY, else a new key, which is printed.")
    ] = None,
    engine: Annotated[
        Literal["native", "vllm"] | None, Option(help="Inference engine. Default: the run's engine, else native.")
    ] = None,
) -> None:
    """Serve a model behind the OpenAI API: chat, completions, and token ids in and out.

    For a run directory or a run file, this serves the trained model, else the newest checkpoint, else the model that the run starts from.
    Every request needs the key. docs/serving.md lists which requests it answers and which it refuses.

    \b
    Examples:
      rollcall serve runs/gsm8k
      rollcall serve Qwen/Qwen3-0.6B --port 8080
      rollcall serve builtin:arithmetic rollout.max_running=64
      rollcall serve models/mine --engine vllm --key-file serve.key --host 0.0.0.0
    """
    from rollcall.environments.endpoint import refuse_without_packages

    refuse_without_packages()
    say("loading torch and transformers")
    with heed():
        calm_libraries()
        from rollcall.run.serving import plan_serving, read_key
        from rollcall.run.serving import serve as run_server

        plan = plan_serving(target, overrides=overrides or [], engine=engine)
        run_server(plan, host=host, port=port, key=read_key(key_file), show=on_stdout)


def merge(
    checkpoint: Annotated[
        Path, Argument(metavar="CHECKPOINT", help="Run directory, or checkpoint of Rollcall, verl or PyTorch.")
    ],
    out: Annotated[Path, Option(metavar="DIR", help="Model directory to write.")],
    dtype: Annotated[str, Option(help="Precision to write: keep (as stored), bf16, fp16 or fp32.")] = "keep",
    max_shard_size: Annotated[str, Option(metavar="SIZE", help="Largest file, such as 5GB or 512MiB.")] = "5GB",
    base: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Model directory to take config and tokenizer from, if there is none next to the weights.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        Option(
            "--verify", help="Then load the model with transformers and compare its log-probs with the trained model's."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Merge a checkpoint into one directory that transformers and vllm can open.

    Reads a run directory (its newest checkpoint), a checkpoint of Rollcall, verl (FSDP shards) or PyTorch (DCP), or a model
    directory. Every file is checked while it is read. DIR appears only when it is complete. Run the same command again after an
    interruption.

    \b
    Examples:
      rollcall merge runs/gsm8k --out models/gsm8k --verify
      rollcall merge runs/gsm8k/checkpoints/step-000040 --out models/gsm8k-40 --dtype bf16
      rollcall merge checkpoints/global_step_100/actor --out models/from-verl
      rollcall merge dcp-folder --base models/Qwen3-0.6B --out models/from-dcp --max-shard-size 2GB
    """
    from rollcall.checkpoint.merge.merge import DTYPES
    from rollcall.checkpoint.merge.merge import merge as merge_stored
    from rollcall.model.stored.find import PROBE, adapter_folder
    from rollcall.model.stored.open import open_stored

    if verify:  # check for the reference first: a merge may take an hour
        folder = adapter_folder(checkpoint) or open_stored(checkpoint).folder
        if folder is None or not (folder / PROBE).is_file():
            raise ValueError(
                f"{checkpoint} has no {PROBE}, so --verify has nothing to compare with; leave --verify out. Only checkpoints and models "
                "that Rollcall saved have one"
            )
    with progress_bar("merge") as progress:
        merged = merge_stored(checkpoint, out, dtype=dtype, max_shard_size=max_shard_size, base=base, progress=progress)
    verified: Verified | None = None
    if verify:
        say(f"loading {merged.out} to verify it")
        calm_libraries()
        from rollcall.checkpoint.verify import verify as compare

        wanted = DTYPES.get(dtype)
        verified = compare(merged.out, dtype=None if wanted is None else wanted.name)
    found = merged.as_json() | ({} if verified is None else {"verified": asdict(verified)})
    answer(found, lambda _: _show_merged(merged, verified), as_json=as_json)


def _show_merged(merged: Merged, verified: Verified | None) -> None:
    rate, before = round(merged.num_bytes / max(merged.duration_s, 1e-9)), merged.continued_bytes
    took = f"{merged.duration_s:.1f} s ({size(rate)}/s)"
    tensors, files = counted(merged.num_tensors, "tensor"), counted(merged.num_files, "file")
    rows = [
        ("from", f"{merged.origin} ({merged.kind})"),
        ("run", ", ".join(f"{key} {value}" for key, value in merged.facts.items())),
        ("model", f"{merged.out}: {tensors}, {size(merged.num_bytes)} in {files}, {took}"),
        ("", f"{size(before)} had already been written by an earlier attempt" if before else ""),
        *(("note", note) for note in merged.notes),
        ("verified", "" if verified is None else verified.words),
    ]
    print_rows([(label, text) for label, text in rows if text], width=8)
