"""The entrypoint of a job whose run file comes in a variable: `python -m rollcall.launch.from_variable`.

It writes the run file into a folder of its own (a job's may be read-only), makes the nodes ready, and becomes `rollcall train` of it.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
from pathlib import Path

from rollcall.config import load_config
from rollcall.errors import ClusterError
from rollcall.wait import say

VARIABLE = "ROLLCALL_RUN_FILE_BASE64"


def main() -> None:
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        raise SystemExit(f"{VARIABLE} is not set: this command is for jobs that `rollcall launch` made")
    run_file = Path(tempfile.mkdtemp(prefix="rollcall-run-")) / "run.yaml"
    run_file.write_bytes(base64.b64decode(text, validate=True))
    try:
        config = load_config(run_file)
        if config.cluster is None:
            raise ClusterError("the run file has no `cluster:` section")
        from rollcall.launch.ready import make_ready

        make_ready(config, config.cluster)
    except (ClusterError, ValueError, OSError) as error:
        say(f"error: {error}")
        raise SystemExit(1) from None
    os.execv(sys.executable, [sys.executable, "-m", "rollcall", "train", str(run_file)])


if __name__ == "__main__":
    main()
