"""A stand-in for `ssh`: a "host" is a folder, in which bash runs with a `rollcall` that answers as the real one would.

The folder of the hosts is next to the program `ssh`. ``hosts/NAME/`` is a host's home. Files in it say how the host is:
``unreachable`` (what ssh says of it), ``drops`` (a line for each connection that a server drops before the login), ``version``, ``python``, ``fails-COMMAND`` (what the command prints before it fails), ``waits-COMMAND``
(it goes on until its stdin ends). ``calls`` gets a line for each `rollcall` command. A forwarded port is really forwarded.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

ROLLCALL = r"""#!/bin/sh
words="$*"; printf '%s\n' "$words" >> ~/calls
printf '%s' "$MINE" > ~/mine
printf '%s' "$ROLLCALL_TOKEN" > ~/token-of-$1
if [ -e ~/fails-$1 ]; then cat ~/fails-$1 >&2; exit 1; fi
if [ -e ~/waits-$1 ]; then echo "waiting in $1"; cat >/dev/null; echo "let go"; exit 130; fi
case $1 in
here)
  version=VERSION; [ -e ~/version ] && version=$(cat ~/version)
  python=3.11.7; [ -e ~/python ] && python=$(cat ~/python)
  rank=null; [ -e ~/rank ] && rank=$(cat ~/rank)
  echo "{\"version\": \"$version\", \"host\": \"$(basename ~)\", \"address\": \"10.0.0.1:7000\", \"is_alone\": false, \"rank\": $rank, \"versions\": {\"Python\": \"$python\", \"torch\": \"2.13.0\"}}" ;;
node) while [ "$1" != --rank ]; do shift; done; echo "$2" > ~/rank; echo "Ray started" ;;
down) rm -f ~/rank; echo "stopped 3 processes" ;;
check) echo "{\"num_slots\": $2, \"dashboard_url\": \"http://127.0.0.1:$(cat ~/../dashboard)\"}" ;;
status) echo "{\"num_nodes\": 2, \"nodes\": [{\"alive\": true}, {\"alive\": false}]}" ;;
esac
"""


SSH = r"""#!/bin/sh
folder=${0%/*}; forwarded=
case "$*" in *StrictHostKeyChecking*) echo "host keys are the user's" >&2; exit 1 ;; esac
while [ "$1" != -- ]; do [ "$1" = -L ] && forwarded=$2; shift; done
home=$folder/hosts/$2
[ "$3" = "bash -s" ] || exit 1
if [ -e "$home/unreachable" ]; then cat "$home/unreachable" >&2; exit 255; fi
if [ -s "$home/drops" ]; then head -n 1 "$home/drops" >&2; sed -i 1d "$home/drops"; exit 255; fi
cd "$home" || exit 1
export HOME="$home" PATH="$home/bin"
[ -n "$forwarded" ] && exec PYTHON -S "$folder/forward.py" "$forwarded"
bash -s
"""


def forward(how: str) -> None:
    _, here, there_host, there = how.split(":")
    server = socket.create_server(("127.0.0.1", int(here)))

    def copy(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        while True:
            client, _ = server.accept()
            other = socket.create_connection((there_host, int(there)))
            for pair in ((client, other), (other, client)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


def make_hosts(folder: Path, names: list[str], *, version: str, dashboard: int) -> Path:
    """The program `ssh` in ``folder`` and hosts that are well; returns the folder of the hosts."""
    from own_path import own_path  # which forward.py, a copy of this file, does not find

    program = folder / "ssh"
    folder.mkdir()
    program.write_text(SSH.replace("PYTHON", sys.executable))
    (folder / "forward.py").write_text(Path(__file__).read_text())
    program.chmod(0o755)
    for name in names:
        binaries = folder / "hosts" / name / "bin"
        binaries.mkdir(parents=True)
        (binaries / "rollcall").write_text(ROLLCALL.replace("VERSION", version))
        (binaries / "rollcall").chmod(0o755)
        (binaries / "python3").symlink_to(sys.executable)
        own_path(binaries)
    (folder / "hosts/dashboard").write_text(str(dashboard))
    return folder / "hosts"


if __name__ == "__main__":
    forward(sys.argv[1])
    sys.exit(subprocess.run(["bash", "-s"]).returncode)
