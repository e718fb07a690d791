"""The `rollcall` command, also as `python -m rollcall`. A signal can stop it even while it is still importing modules."""

from __future__ import annotations

import sys

from rollcall.base.stop import ended_by, heed


def main() -> None:
    try:
        with heed() as stop:
            from rollcall.cli.main import main as run

            stop.check()  # a module may swallow what a signal handler raises while the module is imported
    except KeyboardInterrupt as heard:
        by, status = ended_by(heard)
        print(f"stopped by {by}", file=sys.stderr, flush=True)
        raise SystemExit(status) from None
    run()


if __name__ == "__main__":
    main()
