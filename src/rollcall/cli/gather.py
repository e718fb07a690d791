"""`rollcall gather`: the parts of a checkpoint from the nodes' own disks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcall.cli import Json, answer
from rollcall.words import counted, size

if TYPE_CHECKING:
    from rollcall.finish.gather import Gathered

Hosts = Annotated[
    str | None,
    typer.Option("--hosts", metavar="HOST,HOST", help="Ask these over ssh. Without it: the cluster, or the run's ssh launch."),
]  # fmt: skip


def gather(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint, or a run directory: its newest one.")
    ],
    hosts: Hosts = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Then remove the parts from the nodes, if all of them are here.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring the parts of a checkpoint from the nodes' own disks (checkpoint.place=local) to its folder.

    Over the cluster, or over ssh when it is down. Every part is compared with its checksum. The same command goes on after an
    interruption.

    \b
    Examples:
      rollcall gather runs/gsm8k
      rollcall gather runs/gsm8k/checkpoints/step-000040 --hosts node1,node2
      rollcall gather runs/gsm8k --delete
    """
    from rollcall.finish.finish import checkpoint_at
    from rollcall.finish.gather import gather as bring
    from rollcall.finish.nodes_of import find_nodes

    chosen = checkpoint_at(checkpoint)
    done = bring(chosen, lambda: find_nodes(chosen.parent.parent, hosts=split_hosts(hosts)), delete=delete)
    answer(done, _show, as_json=as_json)


def split_hosts(hosts: str | None) -> list[str]:
    return [host.strip() for host in (hosts or "").split(",") if host.strip()]


def _show(done: Gathered) -> None:
    if done.parts:
        print(f"gathered {counted(len(done.parts), 'part')} ({size(done.num_bytes)}) in {done.checkpoint}")
    else:
        print(f"all parts are in {done.checkpoint}")
    if done.removed:
        print(f"removed {counted(len(done.removed), 'part')} from the nodes")
