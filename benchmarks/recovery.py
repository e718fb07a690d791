"""What a fault costs: time to notice it, time until the next update has ended, updates done again, per fault and mode.

python -m benchmarks.recovery                                       the faults of one process and of a node
python -m benchmarks.recovery --fault "worker killed" --mode collocated

Two lab hosts of two slots (tests/lab: root and iproute2), a tiny model, real kills. The clock starts with the blow.
Noticed is when the run says so, or when its events say that the phase under way has failed; of a killed controller nobody in
the run can tell. A node is to be noticed within 10 s, a process within 2 s; one that is stopped is judged at its
second look, and tells its stacks first. There is no peer: other systems wait for a person.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, print_result

sys.path.insert(0, str(ROOT / "tests"))

MODES = ("collocated", "disaggregated")
FAULTS = ("worker killed", "worker stopped", "node lost and back", "controller killed")
STEP = 3
NOTICED = re.compile(r"is lost; the other workers take over its work")  # as roles/ words it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", help="one of the arena's; several times for several")
    parser.add_argument("--mode", action="append", choices=MODES)
    args = parser.parse_args()
    from chaos.arena import open_arena  # pyright: ignore[reportMissingImports] - of the tests

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, open_arena(Path(folder)) as arena:
        for mode in args.mode or MODES:
            for fault in args.fault or FAULTS:
                rows.append(measure(arena, mode, fault))
                print(rows[-1], flush=True)
    print_result("recovery", workload="2 x 2 slots", device="cpu", ours={"rows": rows}, peer=None, ratio=None)


def measure(arena: Any, mode: str, fault: str) -> dict[str, Any]:
    from chaos.faults import strike  # pyright: ignore[reportMissingImports]

    from rollcall.observe.events import read_phases
    from rollcall.view.audit import audit

    with arena.run(mode) as run:
        run.wait_for("rollout", step=STEP)
        said = len(run.said)
        struck_s, noticed = time.time(), []
        mending = threading.Thread(target=strike, args=(run, fault), kwargs={"phase": "rollout", "step": STEP})
        mending.start()  # some take their time
        while mending.is_alive() or run.command.poll() is None:
            if not noticed and NOTICED.search(run.said[said:]):
                noticed.append(time.time())
            time.sleep(0.02)
        run.end()
        groups_again = audit(run.dir).counts()["groups_regenerated"]
        phases = [(event, event.end_s) for event in read_phases(run.dir) if event.end_s is not None]
    failed = [end_s for event, end_s in phases if (event.result or "").startswith("failed") and end_s > struck_s]
    updates = [(event.step, end_s) for event, end_s in phases if event.phase == "update" and event.result is None]
    again = sum(count - 1 for count in Counter(step for step, _ in updates).values())
    return {
        "mode": mode,
        "fault": fault,
        **cost(
            struck_s,
            told=[*noticed, *failed],
            updates=[end_s for _, end_s in updates],
            by_run=fault != "controller killed",
        ),
        "updates_again": again,
        "groups_again": groups_again,
    }


def cost(struck_s: float, *, told: list[float], updates: list[float], by_run: bool) -> dict[str, float | None]:
    """Seconds from the blow until the run tells of it and until the next update has ended.

    A run that never tells of it has neither: the next update that ended may have been under way before the blow. With
    `by_run` false nobody in the run can tell, and the first update after the blow counts.
    """
    known_s = min(told, default=None) if by_run else struck_s
    ended = [end_s for end_s in updates if known_s is not None and end_s > known_s]
    return {
        "noticed_s": round(known_s - struck_s, 2) if by_run and known_s is not None else None,
        "next_update_s": round(min(ended) - struck_s, 1) if ended else None,
    }


if __name__ == "__main__":
    main()
