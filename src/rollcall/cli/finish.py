"""`rollcall gather`, `finish` and `upload`: commands to use after a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rollcall.base.wait import say
from rollcall.base.words import counted, size
from rollcall.cli import Json, Overrides, answer, calm_libraries, print_table, progress_bar

if TYPE_CHECKING:
    from rollcall.launch.finish.finish import FinishedRun
    from rollcall.launch.finish.gather import Gathered
    from rollcall.launch.finish.upload import Uploaded

Hosts = Annotated[
    str | None,
    Option(metavar="HOST,HOST", help="Hosts to ask over ssh. Default: the nodes of the cluster or the ssh launch."),
]


def gather(
    checkpoint: Annotated[
        Path, Argument(metavar="CHECKPOINT", help="Checkpoint, or a run directory for its newest checkpoint.")
    ],
    hosts: Hosts = None,
    delete: Annotated[
        bool, Option("--delete", help="Remove the parts from the nodes once all parts have been copied.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy the parts of a checkpoint that are on the nodes' own disks (checkpoint.place=local) to the checkpoint's folder.

    It uses the cluster, or ssh if the cluster is down. The checksum of every part is verified. After an interruption, run the same
    command again to continue.

    \b
    Examples:
      rollcall gather runs/gsm8k
      rollcall gather runs/gsm8k/checkpoints/step-000040 --hosts node1,node2
      rollcall gather runs/gsm8k --delete
    """
    from rollcall.launch.finish.finish import checkpoint_at
    from rollcall.launch.finish.gather import gather as bring
    from rollcall.launch.finish.nodes_of import find_nodes

    chosen = checkpoint_at(checkpoint)
    done = bring(chosen, lambda: find_nodes(chosen.parent.parent, hosts=split_hosts(hosts)), delete=delete)
    answer(done, _show_gathered, as_json=as_json)


def split_hosts(hosts: str | None) -> list[str]:
    return [host.strip() for host in (hosts or "").split(",") if host.strip()]


def _show_gathered(done: Gathered) -> None:
    if done.parts:
        print(f"gathered {counted(len(done.parts), 'part')} ({size(done.num_bytes)}) in {done.checkpoint}")
    else:
        print(f"all parts are in {done.checkpoint}")
    if done.removed:
        print(f"removed {counted(len(done.removed), 'part')} from the nodes")


def finish(
    run: Annotated[Path, Argument(metavar="RUN", help="Run directory or run file.")],
    overrides: Overrides = None,
    hosts: Hosts = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the steps that would run, and do nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Turn a run's newest checkpoint into a model: gather its parts, merge and verify them, and upload the model.

    The model is in RUN/merged. Finished steps are skipped, unless their inputs have changed. The section
    `finish` of the run file sets how the model is merged and where it is uploaded. Without it, weights keep their stored
    precision, and nothing is uploaded.

    \b
    Examples:
      rollcall finish runs/gsm8k --dry-run
      rollcall finish runs/gsm8k
      rollcall finish runs/gsm8k finish.dtype=bf16 finish.upload.repo=me/gsm8k-model
    """
    say("loading torch and transformers")
    calm_libraries()
    from rollcall.launch.finish.finish import finish as work

    with progress_bar("finish") as progress:
        done = work(run, overrides=overrides or [], hosts=split_hosts(hosts), dry_run=dry_run, progress=progress)
    answer(done, _show_finished, as_json=as_json)


def _show_finished(done: FinishedRun) -> None:
    print_table([(step.name, step.state, step.words) for step in done.steps])
    if done.uploaded is not None:
        _show_uploaded(done.uploaded)


def upload(
    model_dir: Annotated[Path, Argument(metavar="DIR", help="Model directory, such as one from `rollcall merge`.")],
    repo: Annotated[str, Argument(metavar="REPO", help="OWNER/NAME on the hub; created if it does not exist.")],
    private: Annotated[
        bool, Option("--private", help="Create a private repository; refuse an existing public one.")
    ] = False,
    revision: Annotated[str | None, Option(help="Branch to upload to.")] = None,
    as_json: Json = False,
) -> None:
    """Upload a model directory to the hub. It is verified first: only a model that matches the trained one is uploaded.

    The token comes from HF_TOKEN or from `hf auth login`. HF_ENDPOINT chooses another hub.

    \b
    Examples:
      rollcall upload runs/gsm8k/model me/gsm8k-model --private
      rollcall upload runs/gsm8k/merged me/gsm8k-model --revision step-200
    """
    calm_libraries()
    from rollcall.launch.finish.upload import upload as send

    answer(send(model_dir, repo, private=private, revision=revision), _show_uploaded, as_json=as_json)


def _show_uploaded(done: Uploaded) -> None:
    print(f"uploaded {done.num_files} files: {done.url}")
