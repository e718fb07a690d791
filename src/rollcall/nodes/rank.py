"""Finds a node's rank from the options or, if they do not give it, from the launcher's variables or by address."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from itertools import count

from rollcall.base.errors import ClusterError

# The rank variable and its matching variables for the number of nodes, in the order in which they are read.
LAUNCHERS = (
    ("RANK", ("WORLD_SIZE",)),
    ("NODE_RANK", ("NNODES", "NUM_NODES")),
    ("SLURM_NODEID", ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    ("SLURM_PROCID", ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    ("SKYPILOT_NODE_RANK", ("SKYPILOT_NUM_NODES",)),
    ("DSTACK_NODE_RANK", ("DSTACK_NODES_NUM",)),
)
# These are read if the rank comes from an option. WORLD_SIZE is left out, because it may then count processes rather than nodes.
COUNTS = ("NNODES", "NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SKYPILOT_NUM_NODES", "DSTACK_NODES_NUM")


def find_identity(
    *,
    rank: int | None,
    master: bool,
    worker: int | None,
    num_nodes: int | None,
    environ: Mapping[str, str],
    of_run: int | None = None,
) -> tuple[int, int | None]:
    """Return the node's rank and the number of nodes, which is `None` if only the head knows it.

    Options come first, then the launchers' variables (an empty one counts as absent), then ``of_run``, the run file's number of nodes.
    """
    asked = {"--rank": rank, "--master": 0 if master else None, "--worker": worker}
    given = {option: value for option, value in asked.items() if value is not None}
    if len(given) > 1:
        raise ClusterError(f"{' and '.join(given)} all set the rank; give only one of them")
    if given:
        (option, value), *_ = given.items()
        if option == "--worker" and value == 0:
            raise ClusterError("--worker 0 would be the master; workers start at 1 (--master is rank 0)")
        return _checked(value, num_nodes or _first(COUNTS, environ) or of_run)
    for name, counts in LAUNCHERS:
        found = _integer(name, environ)
        if found is not None:
            return _checked(found, num_nodes or _first(counts, environ) or of_run)
    names = ", ".join(name for name, _ in LAUNCHERS)
    raise ClusterError(
        f"the rank of this node is unknown; give --rank R (or --master, or --worker R), or set one of {names}"
    )


def _checked(rank: int, num_nodes: int | None) -> tuple[int, int | None]:
    if num_nodes is not None and not 0 <= rank < num_nodes:
        raise ClusterError(f"there is no rank {rank} in a cluster of {num_nodes} nodes; ranks are 0 to {num_nodes - 1}")
    if rank < 0:
        raise ClusterError(f"rank {rank} is negative; ranks start at 0")
    if rank == 0 and num_nodes is None:
        raise ClusterError(f"rank 0 needs the number of nodes: give --num-nodes N, or set one of {', '.join(COUNTS)}")
    return rank, num_nodes


def _first(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    return next((value for name in names if (value := _integer(name, environ)) is not None), None)


def _integer(name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise ClusterError(f"{name}={text!r} in the environment is not a rank or a number of nodes")
    return int(text)


def rank_by_address(
    nodes: Mapping[str, tuple[int | None, str, bool]], *, known: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Assign each node a rank. ``nodes`` maps a name to the node's own rank (if any), its address, and whether it has slots.

    Nodes without a rank come after nodes with a rank: nodes with slots first, then by numeric address. A node in ``known`` keeps its
    earlier rank; a new node gets the lowest free rank.

    >>> rank_by_address({"a": (None, "10.0.0.10", True), "b": (None, "10.0.0.9", True)})
    {'b': 0, 'a': 1}
    """
    ranks = {name: rank for name, (rank, _, _) in nodes.items() if rank is not None}
    first = max(ranks.values(), default=-1) + 1
    others = sorted(
        nodes.keys() - ranks.keys(), key=lambda name: (not nodes[name][2], _by_number(nodes[name][1]), name)
    )
    kept = {name: known[name] for name in others if known and known.get(name, -1) >= first}
    free = (rank for rank in count(first) if rank not in kept.values())
    ranks |= {name: kept[name] if name in kept else next(free) for name in others}
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _by_number(address: str) -> tuple[int, int, str]:
    try:
        number = ipaddress.ip_address(address)
    except ValueError:  # a host name
        return 9, 0, address
    return number.version, int(number), address
