"""Copies the parts of a checkpoint that are on the nodes' own disks to the checkpoint's folder.

A thread for each node fetches the node's parts one after the other, so a slow node delays only its own parts. At any time, only a
few chunks from each node are in memory. A part is written to ``.gather/`` and moves to its place once its size and checksum match the
manifest. After an interruption, the same call continues at the byte where it stopped. Parts are removed from the nodes only on
request, and only when all of them have been copied.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollcall.base.atomic import fsync, take_lock
from rollcall.base.patience import free_bytes, plain_disk_errors
from rollcall.base.wait import Wait, say
from rollcall.base.words import counted, size
from rollcall.checkpoint.local import FOLDER_NAME, names_of_run
from rollcall.launch.finish.node_files import PART
from rollcall.launch.finish.nodes_of import Node, NodeError
from rollcall.model.stored.files import file_checksum, new_checksum
from rollcall.model.stored.find import Manifest, read_manifest

FOLDER = ".gather"  # in the checkpoint's folder
WAITS_S = (1.0, 3.0, 10.0, 30.0)  # before a broken transfer continues
OnBytes = Callable[[int, int], None]  # gets the number of bytes copied so far and the total


class GatherError(RuntimeError, ValueError):
    """Parts could not be gathered; the message names each part with its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    name: str  # its path in the checkpoint
    place: str  # its path on the node
    run: str  # the name of the run's folder on the node
    size: int
    blake2b: str
    node: str
    host: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name} of node {self.node} ({self.host}, {self.place})"


@dataclass(slots=True, kw_only=True)
class Gathered:
    checkpoint: str
    parts: list[str] = field(default_factory=list)  # names of the parts that were copied here
    num_bytes: int = 0  # received over the network or from another folder
    removed: list[str] = field(default_factory=list)  # names of the parts that were removed from their nodes


def parts_elsewhere(checkpoint: Path, *, kinds: Collection[str] | None = None) -> list[NodePart]:
    """Return the parts that a checkpoint's manifest places on nodes, even if they have been gathered already."""
    manifest = read_manifest(checkpoint)
    parts = [_part(manifest, name, facts) for name, facts in manifest.fields["files"].items() if "place" in facts]
    return [part for part in parts if kinds is None or part.kind in kinds]


def is_here(checkpoint: Path, part: NodePart) -> bool:
    path = checkpoint / part.name
    return path.is_file() and path.stat().st_size == part.size


def _part(manifest: Manifest, name: str, facts: dict[str, Any]) -> NodePart:
    """Build a part from the manifest's data, which is untrusted: refuse a name that is not the name of a part."""
    source, folder = manifest.path / "manifest.json", manifest.path.parent
    if not PART.fullmatch(name):
        raise GatherError(
            f"{source} lists {name!r} on a node, but that is not the name of a part; nothing was gathered"
        )
    try:
        names, _ = names_of_run(folder)
    except OSError as error:
        raise GatherError(
            f"{folder / FOLDER_NAME} cannot be read ({error.strerror}), so the run's folder on the nodes is unknown; restore the file "
            "from where the run was saved"
        ) from error
    run = next((one for one in names if one in Path(facts["place"]).parts), names[0])
    keys = ("place", "size", "blake2b", "node", "host", "kind")
    return NodePart(name=name, run=run, **{key: facts[key] for key in keys})


def gather(
    checkpoint: Path,
    find: Callable[[], Sequence[Node]],
    *,
    kinds: Collection[str] | None = None,
    delete: bool = False,
    progress: OnBytes = lambda done, total: None,
) -> Gathered:
    """Copy parts (of these ``kinds``) to the checkpoint's folder. ``find`` returns the nodes to ask; it is called only if a part
    has to be copied from a node or removed from it."""
    parts = parts_elsewhere(checkpoint, kinds=kinds)
    missing = [part for part in parts if not is_here(checkpoint, part)]
    done = Gathered(checkpoint=str(checkpoint))
    if not parts or (not missing and not delete):
        return done
    if delete:
        _refuse_parts_of_another(checkpoint, parts)
    folder = checkpoint / FOLDER
    with plain_disk_errors(folder):
        folder.mkdir(exist_ok=True)
        lock = take_lock(folder / "lock")
    if lock is None:  # two processes would write to the same files
        raise GatherError(f"{checkpoint} is being gathered by another process; wait until it has finished")
    with lock:
        holders, faults = _holders(find(), parts)
        if missing:
            _refuse_absent(missing, holders, faults)
            _refuse_too_large(checkpoint, missing)
            work = _Work(checkpoint, total=sum(part.size for part in missing), progress=progress)
            work.run({part: holders[part.name] for part in missing})
            done.parts, done.num_bytes = [part.name for part in missing], work.num_received
        if delete:
            done.removed = _remove(checkpoint, parts, holders, gathered=done.parts)
    shutil.rmtree(folder, ignore_errors=True)
    return done


def _refuse_parts_of_another(checkpoint: Path, parts: Sequence[NodePart]) -> None:
    """Refuse to remove files through a copy of a run, because its manifest names files that the original run still needs."""
    checkpoints = checkpoint.parent
    names, inode = names_of_run(checkpoints)
    is_copy = inode not in (None, (checkpoints / FOLDER_NAME).stat().st_ino)
    own = set() if is_copy else {names[0]}
    if others := [part for part in parts if part.run not in own]:
        raise GatherError(
            f"{checkpoints.parent} is a copy of another run, and {counted(len(others), 'part')} on the nodes, such as {others[0]}, "
            "belong to the original; nothing was removed. Gather without --delete, or gather in the run that saved the parts"
        )


def _holders(nodes: Sequence[Node], parts: Sequence[NodePart]) -> tuple[dict[str, Node], list[str]]:
    """For each part, return a node that has it; also return the reasons why nodes did not answer."""
    asked = [asdict(part) for part in parts]
    holders: dict[str, Node] = {}
    faults: list[str] = []

    def ask(node: Node) -> list[str]:
        try:
            return node.present(asked)
        except NodeError as error:
            faults.append(str(error))
            return []

    with ThreadPoolExecutor(max_workers=max(1, min(len(nodes), 32))) as pool:
        for node, names in zip(nodes, pool.map(ask, nodes), strict=True):
            for name in names:
                holders.setdefault(name, node)
    return holders, faults


def _refuse_absent(missing: Sequence[NodePart], holders: dict[str, Node], faults: Sequence[str]) -> None:
    absent = [part for part in missing if part.name not in holders]
    if absent:
        lines = [f"no node has a complete copy of {part}" for part in absent[:5]]
        lines += [f"and {len(absent) - 5} more parts"] if len(absent) > 5 else []
        raise GatherError(
            "\n  ".join([f"{counted(len(absent), 'part')} cannot be gathered:", *lines, *faults])
            + "\nbring these nodes back, or use an earlier checkpoint"
        )


def _refuse_too_large(checkpoint: Path, missing: Sequence[NodePart]) -> None:
    needed = sum(part.size - _size(checkpoint / FOLDER / part.name) for part in missing)
    free = free_bytes(checkpoint)
    if free is not None and needed > free:
        raise GatherError(
            f"{counted(len(missing), 'part')} need {size(needed)} in {checkpoint}, but its disk has only {size(free)} free; "
            "free some space"
        )


class _Work:
    """Transfers the parts for one call of ``gather``."""

    def __init__(self, checkpoint: Path, *, total: int, progress: OnBytes) -> None:
        self._checkpoint, self._total, self._progress = checkpoint, total, progress
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._here = self.num_received = 0
        self._wait = Wait(first_s=10.0)

    def run(self, parts: dict[NodePart, Node]) -> None:
        nodes = {id(node): node for node in parts.values()}.values()
        faults: list[str] = []
        pool = ThreadPoolExecutor(max_workers=8)
        try:
            for fault in pool.map(lambda node: self._of_node(node, [p for p in parts if parts[p] is node]), nodes):
                faults += fault
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)
        if faults:
            raise GatherError(
                "\n  ".join([f"{counted(len(faults), 'part')} could not be gathered:", *faults])
                + "\nthe bytes received so far are kept; run the same command again to continue"
            )

    def _of_node(self, node: Node, parts: Sequence[NodePart]) -> list[str]:
        """Fetch a node's parts and return the reasons why some could not be fetched."""
        faults: list[str] = []
        for part in parts:
            if self._stop.is_set():
                break
            try:
                self._fetch(node, part)
            except (NodeError, GatherError) as error:
                faults.append(f"{part}: {error}")
        return faults

    def _fetch(self, node: Node, part: NodePart) -> None:
        begun, target = self._checkpoint / FOLDER / part.name, self._checkpoint / part.name
        with plain_disk_errors(begun):
            begun.parent.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
        for wait_s in (*WAITS_S, None):
            offset, digest = _begun(begun, part)
            self._advance(offset, received=0)
            try:
                self._receive(node, part, begun, digest, offset=offset)
            except NodeError as error:
                if wait_s is None:
                    raise
                self._advance(-_size(begun), received=0)
                say(f"{part.name}: {error}; continuing in {wait_s:.0f} s")
                if self._stop.wait(wait_s):
                    raise
                continue
            if digest.hexdigest() == part.blake2b:
                with plain_disk_errors(target):
                    os.replace(begun, target)
                    fsync(target.parent)
                return
            self._advance(-_size(begun), received=0)
            begun.unlink()
            if not offset:  # otherwise the bytes from an earlier attempt may be wrong
                break
        raise GatherError("its size or checksum differs from the one in the manifest")

    def _receive(self, node: Node, part: NodePart, begun: Path, digest: Any, *, offset: int) -> None:
        with plain_disk_errors(begun), begun.open("ab") as file:
            for data in node.chunks(asdict(part), offset=offset):
                if self._stop.is_set():
                    raise GatherError("the transfer was stopped")
                file.write(data)
                digest.update(data)
                self._advance(len(data), received=len(data))
            file.flush()
            os.fsync(file.fileno())

    def _advance(self, num_bytes: int, *, received: int) -> None:
        with self._lock:
            self._here += num_bytes
            self.num_received += received
            self._progress(self._here, self._total)
            self._wait.tell(f"gathered {size(self._here)} of {size(self._total)}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _begun(path: Path, part: NodePart) -> tuple[int, Any]:
    """Return how many bytes of a part an earlier attempt received, and their checksum."""
    if _size(path) > part.size:
        path.unlink()
    if not path.exists():
        return 0, new_checksum()
    with path.open("rb") as file:
        return _size(path), hashlib.file_digest(file, new_checksum)


def _remove(
    checkpoint: Path, parts: Sequence[NodePart], holders: dict[str, Node], *, gathered: Collection[str]
) -> list[str]:
    """Remove parts from their nodes if all of them were copied. Parts that an earlier call copied are verified again."""
    for part in parts:
        path = checkpoint / part.name
        if part.name not in gathered and not (is_here(checkpoint, part) and file_checksum(path) == part.blake2b):
            raise GatherError(
                f"{path} does not match the manifest, so no part was removed from the nodes; delete that file and gather again"
            )
    removed: list[str] = []
    for node in {id(node): node for node in holders.values()}.values():
        own = [part for part in parts if holders.get(part.name) is node]
        node.remove([asdict(part) for part in own])
        removed += [part.name for part in own]
    return sorted(removed)
