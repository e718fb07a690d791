"""The node's side of gathering a checkpoint: tells which parts it has, reads them, removes them.

This file is sent to the node, over Ray or ssh, and runs there with any Python from 3.8 on: it imports nothing of this package. What
it is asked comes from a manifest, which is data. It touches only parts in a folder of this user's runs, and nothing that a link
leads to elsewhere.
"""

import json
import os
import re
import stat
import sys

PART = re.compile(r"(?:model|actor|critic)/part-[0-9]+-of-[0-9]+\.[a-z]+")
CHUNK_BYTES = 4 << 20


def checked(place: str, name: str, run: str) -> str:
    """The path of a part, if it is one: ``.../rollcall-UID/parts/RUN/STEP/NAME``, all of it this user's own."""
    if not PART.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a part")
    path = os.path.realpath(place)
    names = path[: -len(name) - 1].split(os.sep)
    of_run = [f"rollcall-{os.getuid()}", "parts", run]
    if not run or not path.endswith(os.sep + name) or names[-4:-1] != of_run:
        raise ValueError(f"{path} is not in the folder of this user's run {run!r}, so it is not read")
    root = os.sep.join(names[:-3])
    if os.lstat(root).st_uid != os.getuid():
        raise ValueError(f"{root} belongs to another user")
    return path


def open_part(place: str, name: str, run: str) -> int:
    descriptor = os.open(checked(place, name, run), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{place} is not a file")
    return descriptor


class NodeFiles:
    """Each part is given as a mapping with its ``name``, ``place``, ``run`` and ``size``."""

    def present(self, parts: list) -> list:
        """The names of those that are here."""
        return [part["name"] for part in parts if self._is_here(part)]

    def _is_here(self, part: dict) -> bool:
        try:
            path = checked(part["place"], part["name"], part["run"])
            found = os.lstat(path)
        except (OSError, ValueError):
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == part["size"]

    def read(self, part: dict, offset: int, size: int) -> bytes:
        descriptor = open_part(part["place"], part["name"], part["run"])
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)

    def remove(self, parts: list) -> None:
        for part in parts:
            path = checked(part["place"], part["name"], part["run"])
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            for folder in (os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
                try:
                    os.rmdir(folder)
                except OSError:
                    break  # there is more in it


def main() -> None:
    """Over ssh: one question from stdin, its answer to stdout, as JSON or the bytes of a part; what went wrong to stderr."""
    asked = json.loads(sys.stdin.buffer.readline().decode())
    try:
        if asked["do"] == "read":
            part, offset = asked["part"], asked["offset"]
            descriptor = open_part(part["place"], part["name"], part["run"])
            while data := os.pread(descriptor, CHUNK_BYTES, offset):
                sys.stdout.buffer.write(data)
                offset += len(data)
        else:
            print(json.dumps(getattr(NodeFiles(), asked["do"])(asked["parts"]) or []))
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
