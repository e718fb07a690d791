"""The placement of a run and what sits on each slot: its role, what it does and since when, its memory, its last lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollcall.config import Config
from rollcall.errors import PlacementError
from rollcall.observe.events import Mark
from rollcall.observe.live import ProcessState, read_live
from rollcall.observe.logs import read_log
from rollcall.plan.placement import plan_for
from rollcall.redact import redact
from rollcall.view.timeline import recent_marks
from rollcall.words import ranges


def show_cluster(root: Path, config: Config | None, *, marks: Sequence[Mark]) -> dict[str, Any]:
    live = read_live(root)
    problem = ""
    try:
        nodes = _planned(config) if config is not None else {}
    except PlacementError as error:
        nodes, problem = {}, str(error)
    workers = [] if live is None else [_worker(root, one) for one in live.processes]
    return {
        "nodes": _with_workers(nodes, workers),
        "workers": workers,
        "live": None
        if live is None
        else {
            "time_s": live.time_s,
            "host": live.host,
            "is_over": live.is_over,
            "is_stale": live.is_stale,
            "missing_nodes": live.missing_nodes,
        },
        "marks": recent_marks(marks),
        "problem": problem,
    }


def _planned(config: Config) -> dict[int, list[dict[str, Any]]]:
    """Node -> its slots with their roles, as the run file places them."""
    if config.cluster is None:
        return {0: [{"slot": 0, "roles": ["actor", "rollout"]}]}
    plan = plan_for(config, config.cluster)
    return {
        node: [{"slot": slot.local, "roles": [str(role) for role in slot.roles]} for slot in plan.node_slots(node)]
        for node in range(plan.num_nodes)
    }


def _worker(root: Path, one: ProcessState) -> dict[str, Any]:
    return asdict(one) | {
        "slots_text": ranges(one.slots),
        **{name: redact(getattr(one, name)) for name in ("doing", "why", "log")},
        "lines": read_log(root, one.lane, lines=12),
    }


def _with_workers(nodes: dict[int, list[dict[str, Any]]], workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The nodes with the worker of each slot; a node that the run file does not place is shown too."""
    at: dict[tuple[int, int], str] = {}
    addresses: dict[int, str] = {}
    extra: dict[int, set[int]] = defaultdict(set)
    for worker in workers:
        for slot in worker["slots"]:
            at[worker["node"], slot] = worker["lane"]
            extra[worker["node"]].add(slot)
        if worker["address"]:
            addresses[worker["node"]] = worker["address"]
    shown = []
    for node in sorted({*nodes, *extra}):
        slots = {slot["slot"]: slot for slot in nodes.get(node, [])}
        for slot in extra[node]:
            slots.setdefault(slot, {"slot": slot, "roles": []})
        rows = [{**slots[slot], "lane": at.get((node, slot))} for slot in sorted(slots)]
        shown.append({"node": node, "address": addresses.get(node, ""), "slots": rows})
    return shown
