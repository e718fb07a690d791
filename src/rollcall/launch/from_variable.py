"""The entrypoint of a job whose run file comes in a variable: `python -m rollcall.launch.from_variable`.

It writes the run file into the job's folder and becomes `rollcall train` of it.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

VARIABLE = "ROLLCALL_RUN_FILE_BASE64"


def main() -> None:
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        raise SystemExit(f"{VARIABLE} is not set: this command is for jobs that `rollcall launch` made")
    run_file = Path("rollcall-run.yaml").absolute()
    run_file.write_bytes(base64.b64decode(text, validate=True))
    os.execv(sys.executable, [sys.executable, "-m", "rollcall", "train", str(run_file)])


if __name__ == "__main__":
    main()
