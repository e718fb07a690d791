"""A run whose checkpoints are on the disks of several nodes, all of them folders here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hub_server import REPO
from learners import learner_of, step
from safetensors.torch import load_file, save_file
from saved import write_parts

from rollcall.checkpoint.store import CheckpointStore
from rollcall.config import dump_config, load_config
from rollcall.launch.finish.nodes_of import Asked, NodeError, ThisNode
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Learner

RUN = "a-run-0123456789ab"


class Disk(ThisNode):
    """A node whose disk is a folder here."""

    def __init__(self, root: Path, where: str) -> None:
        self.root, self.where = root, where
        self.breaks: list[int] = []  # after so many chunks of a transfer the connection breaks
        self.flips = 0  # transfers with a changed byte
        self.sent = 0

    def _mine(self, part: Asked) -> bool:
        return Path(part["place"]).is_relative_to(self.root)

    def present(self, parts: Sequence[Asked]) -> list[str]:
        return super().present([part for part in parts if self._mine(part)])

    def chunks(self, part: Asked, *, offset: int) -> Iterator[bytes]:
        after = self.breaks.pop(0) if self.breaks else None
        flip = self.flips > 0
        self.flips -= flip
        for number, data in enumerate(super().chunks(part, offset=offset)):
            if number == after:
                raise NodeError(f"{self.where}: the connection ended early")
            self.sent += len(data)
            yield bytes([data[0] ^ 1]) + data[1:] if flip and number == 0 else data


class Trained:
    """A run directory, and the learner that its checkpoints are of."""

    def __init__(self, tmp_path: Path) -> None:
        self.dir = tmp_path / "run"
        self.disks = [Disk(tmp_path / f"disk-{rank}", f"node {rank}") for rank in range(2)]
        self.learner: Learner = learner_of(Gang.alone())
        self.dir.mkdir()
        config = load_config(None, [f"run.dir={self.dir}", f"finish.upload.repo={REPO}"])
        (self.dir / "run.yaml").write_text(dump_config(config))

    def save(self, number: int, *, on_nodes: bool) -> Path:
        step(self.learner, number)
        store = CheckpointStore(self.dir / "checkpoints", keep_last=3, keep_best=0)

        write = partial(write_parts, learner=self.learner)
        path = store.save(number, write=write, state={}, score=None)
        if on_nodes:
            self._to_nodes(path)
        return path

    def _to_nodes(self, checkpoint: Path) -> None:
        """The weights as parts on two disks, the way a run with checkpoint.place=local leaves them."""
        (checkpoint.parent / "node-folder").write_text(RUN)
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        whole = checkpoint / "model/model.safetensors"
        tensors = load_file(whole)
        whole.unlink()
        del manifest["files"]["model/model.safetensors"]
        for rank, disk in enumerate(self.disks):
            name = f"model/part-{rank:05}-of-00002.safetensors"
            place = disk.root / f"rollcall-{os.getuid()}/parts" / RUN / f"{checkpoint.name}-ab" / name
            place.parent.mkdir(parents=True)
            manifest["files"][name] = {**_write_half(place, tensors, rank), "node": str(rank), "host": f"host-{rank}"}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def _write_half(place: Path, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    own, parts = {}, {}
    for name, tensor in tensors.items():
        cut = len(tensor) // 2
        own[name] = tensor[cut * rank : cut * (rank + 1)].contiguous()
        start = [cut * rank, *[0] * (tensor.ndim - 1)]
        parts[name] = {"name": name, "start": start, "shape": list(tensor.shape)}
    save_file(own, place, metadata={"parts": json.dumps(parts)})
    data = place.read_bytes()
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return {"size": len(data), "blake2b": digest, "place": str(place), "kind": "weights"}
