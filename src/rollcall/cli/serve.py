"""`rollcall serve`: a model behind the OpenAI API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rollcall.cli import Overrides, calm_libraries
from rollcall.stop import heed
from rollcall.wait import on_stdout, say


def serve(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="Model directory, hub name, run directory or run file.")
    ],
    overrides: Overrides = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. 0: one that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. Default: this machine alone.")] = "127.0.0.1",
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with the key. Default: ROLLCALL_SERVE_KEY, else a new key, which is printed."),
    ] = None,
    engine: Annotated[
        Literal["native", "vllm"] | None, typer.Option(help="Which engine samples. Default: the run's, else native.")
    ] = None,
) -> None:
    """Serve a model behind the OpenAI API: chat, completions, and token ids in and out.

    Of a run directory or a run file it serves the trained model, else the newest checkpoint, else the model that the run starts from.
    Every request needs the key. docs/serving.md has what is answered and what is refused.

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
        from rollcall.serving import plan_serving, read_key
        from rollcall.serving import serve as run_server

        plan = plan_serving(target, overrides=overrides or [], engine=engine)
        run_server(plan, host=host, port=port, key=read_key(key_file), show=on_stdout)
