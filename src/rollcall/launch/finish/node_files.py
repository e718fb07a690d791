"""The node's side of gathering a checkpoint: reports which parts it has, reads them and removes them.

This file is sent to the node over Ray or ssh and runs there on any Python from 3.8 on, so it imports nothing from this package.
Its requests come from a manifest, which is untrusted data, so it resolves links and touches only parts of this user's runs.
"""

import json
import os
import re
import sys
from contextlib import suppress

PART = re.compile(r"(?:model|actor|critic)/part-[0-9]+-of-[0-9]+\.[a-z]+")
CHUNK_BYTES = 4 << 20


def checked(part: dict) -> str:
    """Return a part's path after checking that it has this form: ``.../rollcall-UID/parts/RUN/STEP/NAME``."""
    name, run = part["name"], part["run"]
    if not PART.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a part")
    path = os.path.realpath(part["place"])
    of_run = [f"rollcall-{os.getuid()}", "parts", run]
    if not run or not path.endswith(os.sep + name) or path[: -len(name) - 1].split(os.sep)[-4:-1] != of_run:
        raise ValueError(f"{path} is not in the folder of this user's run {run!r}, so it is not read")
    return path


class NodeFiles:
    """Serves parts. Each part is passed as a dict with its ``name``, ``place``, ``run`` and ``size``."""

    def present(self, parts: list) -> list:
        """Return the names of the parts that this node has."""
        found = []
        for part in parts:
            with suppress(OSError, ValueError):
                if os.path.getsize(checked(part)) == part["size"]:
                    found.append(part["name"])
        return found

    def read(self, part: dict, offset: int, size: int) -> bytes:
        with open(checked(part), "rb") as file:
            file.seek(offset)
            return file.read(size)

    def remove(self, parts: list) -> None:
        for part in parts:
            path = checked(part)
            with suppress(FileNotFoundError):
                os.unlink(path)
            with suppress(OSError):  # the folder is not empty
                os.rmdir(os.path.dirname(path))
                os.rmdir(os.path.dirname(os.path.dirname(path)))


def main() -> None:
    """Answer one request over ssh: read it from stdin and print JSON or a part's bytes; errors go to stderr."""
    asked = json.loads(sys.stdin.buffer.readline().decode())
    try:
        if asked["do"] == "read":
            offset = asked["offset"]
            while data := NodeFiles().read(asked["part"], offset, CHUNK_BYTES):
                sys.stdout.buffer.write(data)
                offset += len(data)
        else:
            print(json.dumps(getattr(NodeFiles(), asked["do"])(asked["parts"]) or []))
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
