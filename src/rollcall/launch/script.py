"""The lines of shell that every node of a target runs, around `rollcall node --run`.

Values of the user are quoted once, by ``shlex``; what only the node knows comes from variables that the target's tool sets there.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollcall.launch.rendered import exports

PORT = 6380  # where rank 0 listens


def node_lines(
    *,
    run_file: str,
    cluster: str,
    head: str | None = None,
    activate: Path | None = None,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    options: Sequence[str] = (),
) -> list[str]:
    """``run_file`` and ``head`` (the address of rank 0) are shell, such as ``"$HOME"/run.yaml``; ``before``: the user's own lines."""
    lines = ["set -eu"]
    if activate is not None:
        lines.append(f". {shlex.quote(str(activate))}")
    lines += exports(env or {})
    lines += before
    command = f"exec rollcall node --run {run_file} {shlex.join(['--cluster', cluster, *options])}"
    if head is not None:
        lines.append(f"head={head}")
        lines.append('case $head in *:*) head="[$head]" ;; esac')  # IPv6
        command += f' --head-address "$head:{PORT}"'
    return [*lines, command]
