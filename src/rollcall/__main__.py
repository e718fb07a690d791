"""The `rollcall` command, also as `python -m rollcall`: it can be told to stop before all of its imports are done."""

from __future__ import annotations

import sys

from rollcall.stop import INTERRUPTED, STOPPED, Stopped, heed


def main() -> None:
    try:
        with heed():
            from rollcall.cli.main import main as run
    except KeyboardInterrupt as stopped:
        is_told = isinstance(stopped, Stopped)
        print(f"stopped by {stopped if is_told else 'Ctrl-C'}", file=sys.stderr, flush=True)
        raise SystemExit(STOPPED if is_told else INTERRUPTED) from None
    run()


if __name__ == "__main__":
    main()
