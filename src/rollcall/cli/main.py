"""`rollcall`: the commands and the main help page."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer import Option

from rollcall.base.redact import OutputError, guard_streams
from rollcall.base.version import __version__, installed
from rollcall.cli import FAILED, reported
from rollcall.cli.cluster import check, down, here, node, status
from rollcall.cli.config import config, data, doctor, fetch_model, init, plan, prepare, reward, simulate
from rollcall.cli.finish import finish, gather, upload
from rollcall.cli.jobs import env, job, submit
from rollcall.cli.launch import launch, ssh, tunnel
from rollcall.cli.models import evaluate, merge, serve
from rollcall.cli.runs import compare, recover, trace, view
from rollcall.cli.stacks import debug, profile, stacks
from rollcall.cli.train import train

HELP = """Reinforcement learning for language models, from one run file.

\b
New here? In a checkout, without a GPU and without a model to download:
  make demo                    install, then train a small model to add
  make test                    run the tests

\b
Once installed:
  rollcall train               the demo: the run file inside the package
  rollcall init                a short run file to start from
  rollcall reward test examples/gsm8k.yaml model.path=MODEL
                               its rewards on a few rows, before training
  rollcall train examples/gsm8k.yaml model.path=MODEL
  rollcall eval runs/gsm8k     accuracy and samples of the trained model
  rollcall status runs/gsm8k   what it is doing; recover: what a resume will do
  rollcall view runs           a page: curves, samples, tokens, timeline, cluster
  rollcall serve runs/gsm8k    the trained model behind the OpenAI API
  rollcall stacks runs/gsm8k   what every process is doing; also trace, profile
  rollcall compare runs/gsm8k runs/other
  rollcall merge runs/gsm8k --out models/gsm8k
                               its newest checkpoint as one model directory

\b
On several machines (docs/launch.md; by hand: docs/clusters.md):
  rollcall plan run.yaml       which role runs on which GPU, and whether it fits
  rollcall launch init slurm   a section for the run file; or ssh, skypilot, ...
  rollcall launch slurm run.yaml --dry-run
                               what it would start; without --dry-run: start it
  rollcall node --rank R --num-nodes N --rendezvous /shared/rollcall
                               on each machine: rank 0 starts, others join
  rollcall check 32            wait for all accelerators
  rollcall submit run.yaml     run it there; then rollcall job logs --follow

Run files to copy are in examples/; docs/configuration.md explains every key.
"""

app = typer.Typer(
    name="rollcall",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    return None


def version() -> None:
    """Print the versions of Rollcall, Python, torch and transformers.

    \b
    Example:
      rollcall version
    """
    libraries = ", ".join(f"{name} {installed(name)}" for name in ("torch", "transformers"))
    print(f"rollcall {__version__} (Python {sys.version.split()[0]}, {libraries})")


app.command("train")(reported(train))
app.command("eval")(reported(evaluate))
for command in (
    recover, compare, trace, view, serve, stacks, profile, merge, init, config, data, plan, simulate, doctor, debug, finish, gather,
    submit, env, node, check, status, down, ssh, tunnel, upload, prepare,
):  # fmt: skip
    app.command(command.__name__)(reported(command))
app.command("fetch-model")(reported(fetch_model))
app.command("here", hidden=True)(reported(here))
app.command("version")(version)
app.add_typer(job, name="job")
app.add_typer(reward, name="reward")
app.add_typer(launch, name="launch")


def main() -> None:
    guard_streams()
    try:
        try:
            app(prog_name="rollcall")
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, OutputError) as error:
        # When Python exits, it tries to flush the rest again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, OutputError):
            print(f"error: {error.strerror}", file=sys.stderr)
        raise SystemExit(FAILED) from None
