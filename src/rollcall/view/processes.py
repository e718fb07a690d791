"""Prepares a run's processes for the page: their timeline, the marks for faults and recoveries, and the placement with each slot's
worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rollcall.base.errors import PlacementError
from rollcall.base.redact import redact
from rollcall.config import Config
from rollcall.observe.events import Mark, MarkKind
from rollcall.observe.live import read_live
from rollcall.observe.logs import read_log
from rollcall.observe.timeline import idle_shares, read_timeline
from rollcall.plan.placement import plan_for
from rollcall.view.growing import MetricsTable

MOST_SPANS = 5000  # limits on what the page shows at once
MOST_LANES = 600
MOST_MARKS = 300


def show_timeline(root: Path, table: MetricsTable, *, first_step: int | None, last_step: int | None) -> dict[str, Any]:
    """Return the spans of these steps. If there are too many to show, the shortest are left out, and their number is returned."""
    table.refresh()
    steps, _, _ = table.column("step")
    newest = int(steps[-1]) if len(steps) else 0
    if first_step is None and last_step is None:
        first_step = max(newest - 6, 0)  # by default the last few steps
    found = read_timeline(root, first_step=first_step, last_step=last_step)
    lanes = dict.fromkeys(found.lanes[:MOST_LANES])
    spans = sorted((span for span in found.spans if span.lane in lanes), key=lambda span: span.start_s - span.end_s)
    left_out = max(len(found.spans) - MOST_SPANS, len(found.spans) - len(spans))
    spans = sorted(spans[:MOST_SPANS], key=lambda span: span.start_s)
    return {
        "lanes": list(lanes),
        "spans": [
            [one.lane, one.name, round(one.start_s, 3), round(one.end_s, 3), one.kind, one.step, redact(one.note)]
            for one in spans
        ],
        "marks": [_show_mark(mark) for mark in found.marks[:MOST_MARKS]],
        "idle": {lane: round(share, 4) for lane, share in idle_shares(found).items() if lane in lanes},
        "left_out": left_out,
        "first": first_step,
        "last": last_step,
        "newest": newest,
    }


def _show_mark(mark: Mark) -> dict[str, Any]:
    lane = None if mark.lane is None else redact(mark.lane)
    return {"at_s": mark.at_s, "name": redact(mark.name), "kind": mark.kind, "lane": lane, "note": redact(mark.note)}


def show_marks(marks: Sequence[Mark], table: MetricsTable, *, axis: str) -> list[dict[str, Any]]:
    """Return faults and recoveries with their position on the curves' axis, as a time or as the step at that time."""
    steps, times, _ = table.column("step")
    known = np.isfinite(times)
    steps, times = steps[known], times[known]
    shown = []
    for mark in [mark for mark in marks if mark.kind != MarkKind.NOTE][-MOST_MARKS:]:
        at = float(np.interp(mark.at_s, times, steps)) if len(times) else 0.0
        shown.append({**_show_mark(mark), "x": mark.at_s if axis == "time" else round(at, 2)})
    return shown


def show_cluster(root: Path, config: Config | None, *, marks: Sequence[Mark]) -> dict[str, Any]:
    live = read_live(root)
    problem = ""
    try:
        nodes = _planned(config) if config is not None else {}
    except PlacementError as error:
        nodes, problem = {}, str(error)
    workers: list[dict[str, Any]] = [
        asdict(one)
        | {name: redact(getattr(one, name)) for name in ("doing", "why", "log")}
        | {"lines": read_log(root, one.lane, lines=12)}
        for one in ([] if live is None else live.processes)
    ]
    return {
        "nodes": _with_workers(nodes, workers),
        "workers": workers,
        "live": None
        if live is None
        else {name: getattr(live, name) for name in ("time_s", "host", "is_over", "is_stale", "missing_nodes")},
        "marks": [_show_mark(mark) for mark in reversed(marks[-12:])],  # newest first
        "problem": problem,
    }


def _planned(config: Config) -> dict[int, list[dict[str, Any]]]:
    """Return the slots of each node with their roles, as the run file places them."""
    if config.cluster is None:
        return {0: [{"slot": 0, "roles": ["actor", "rollout"]}]}
    plan = plan_for(config, config.cluster)
    return {
        node: [{"slot": slot.local, "roles": [str(role) for role in slot.roles]} for slot in plan.node_slots(node)]
        for node in range(plan.num_nodes)
    }


def _with_workers(nodes: dict[int, list[dict[str, Any]]], workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes with the worker of each slot, including nodes that are not in the run file's placement."""
    addresses: dict[int, str] = {}
    slots = {(node, slot["slot"]): {**slot, "lane": None} for node, own in nodes.items() for slot in own}
    for worker in workers:
        node = worker["node"]
        addresses[node] = worker["address"] or addresses.get(node, "")
        for slot in worker["slots"]:
            slots.setdefault((node, slot), {"slot": slot, "roles": []})["lane"] = worker["lane"]
    numbers = sorted({*nodes, *(node for node, _ in slots)})
    own = {node: [slots[place] for place in sorted(slots) if place[0] == node] for node in numbers}
    return [{"node": node, "address": addresses.get(node, ""), "slots": found} for node, found in own.items()]
