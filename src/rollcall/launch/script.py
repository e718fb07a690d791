"""The lines of shell that every node of a target runs, around `rollcall node --run`.

Values of the user are quoted once, by ``shlex``; what only the node knows comes from variables that the target's tool sets there.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollcall.launch.container import Container
from rollcall.launch.rendered import exports, shell_path

PORT = 6399  # where rank 0 listens; SkyPilot's own Ray has 6380 on its machines
RUN_FILE_VARIABLE = "ROLLCALL_RUN_FILE_BASE64"  # of a job that gets its run file in a variable


def node_lines(
    *,
    run_file: str,
    cluster: str,
    head: str | None = None,
    activate: Path | None = None,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    options: Sequence[str] = (),
    more: str = "",
    container: Container | None = None,
    variables: Sequence[str] = (),
    guard: Callable[[str], str] = str,
) -> list[str]:
    """``run_file``, ``head`` (the address of rank 0) and ``more`` (options) are shell, such as ``"$HOME"/run.yaml``; ``before``: the
    user's own lines; ``variables``: names that a container gets beside those of ``env``; ``guard`` changes a line with quoted values
    for a tool that reads it before the shell does."""
    # Activate scripts read variables that nobody has set.
    activated = [] if activate is None else [guard(f". {shell_path(activate)} || exit 1")]
    lines = [*([] if container else activated), "set -eu"]
    lines += map(guard, exports(env or {}))
    lines += before
    command = f"exec rollcall node --run {run_file} {shlex.join(['--cluster', cluster, *options])}"
    if more:
        command += f" {more}"
    if head is not None:
        lines.append(f"head={head}")
        lines.append('case $head in *:*) head="[$head]" ;; esac')  # IPv6
        lines.append("export head")
        command += f' --head-address "$head:{PORT}"'
    if container is None:
        return [*lines, command]
    names = [*(env or {}), *variables, *(["head"] if head is not None else [])]
    words = container.run(["sh", "-c", "\n".join([*activated, command])], variables=names)
    return [*lines, *container.before(), *container.exports(names), f"exec {shlex.join(words)}"]
