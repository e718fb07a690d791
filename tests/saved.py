"""Checkpoints of gangs, as a run writes them: every rank its part, then the manifest."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny import make_model, make_tokenizer, save_model

from rollcall.checkpoint.saving import Trained, join_written
from rollcall.checkpoint.store import CheckpointStore, Written
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Critic, Learner


def save(gang: Gang, directory: Path, *, learner: Learner | None = None, critic: Critic | None = None) -> None:
    """All ranks call this. ``directory`` then holds the checkpoint."""
    written = write_parts(directory, learner=learner, critic=critic)
    everyone = [Written(**one) for one in gang.gather(asdict(written))]
    if gang.rank == 0:
        joined = join_written(everyone)
        manifest = {"step": 1, "score": None, **joined.facts, "files": joined.files}
        (directory / "manifest.json").write_text(json.dumps(manifest))
    gang.gather(None)  # nobody reads before it is there


def write_parts(directory: Path, *, learner: Learner | None, critic: Critic | None = None) -> Written:
    trained = Trained(tokenizer=make_tokenizer(), learner=learner, critic=critic)
    trained.copy_parts()
    trained.write_parts(directory)
    while (written := trained.parts_written()) is None:
        time.sleep(0.01)
    return written


def commit(store: CheckpointStore, step: int, source: Path, **about: Any) -> Path:
    """A checkpoint that was saved to ``source``, as the store's own of that step."""
    manifest = json.loads((source / "manifest.json").read_text())

    def write(folder: Path) -> Written:
        for name in manifest["files"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((source / name).read_bytes())
        facts = {key: value for key, value in manifest.items() if key not in ("step", "score", "files")}
        return Written(files=manifest["files"], facts=facts)

    return store.save(step, write=write, state={"next_draw": 0}, score=None, **about)


def write_manifest(folder: Path, *, step: int, **changes: dict[str, Any]) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"):
        name = path.relative_to(folder).as_posix()
        digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        files[name] = {"size": path.stat().st_size, "blake2b": digest, "node": "node-1", **changes.get(name, {})}
    manifest = {"step": step, "score": 0.5, "scores": {}, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def save_dcp(state: Any, folder: Path) -> None:
    with pytest.warns(UserWarning):  # that one process saves alone
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def a_state(name: str = "qwen2-untied", *, dtype: torch.dtype = torch.float32, **shape: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.to(dtype) for key, tensor in make_model(name, **shape).state_dict().items()}


def our_checkpoint(tmp_path: Path, *, parts: int = 3) -> Path:
    """A sharded checkpoint of ours in a run directory, cut by rows."""
    from safetensors.torch import save_file

    step = tmp_path / "run" / "checkpoints" / "step-000007"
    save_model(step / "model", "qwen2-untied")
    (step / "model" / "model.safetensors").unlink()
    for rank in range(parts):
        own, about = {}, {}
        for name, tensor in a_state().items():
            rows = -(-tensor.shape[0] // parts)
            block = tensor[rank * rows : (rank + 1) * rows]
            if block.numel():
                own[name] = block.clone()
                about[name] = {
                    "name": name,
                    "start": [rank * rows, *(0 for _ in tensor.shape[1:])],
                    "shape": list(tensor.shape),
                }
        path = step / "model" / f"part-{rank:05d}-of-{parts:05d}.safetensors"
        save_file(own, path, metadata={"parts": json.dumps(about)})
    (step / "critic").mkdir()
    (step / "critic" / "part-00000-of-00001.safetensors").write_bytes(b"x")
    (tmp_path / "run" / "run.yaml").write_text(
        "model: {path: /secret/place/model}\nalgorithm: {name: grpo}\nlogging: {token: hf_x}\n"
    )
    write_manifest(step, step=7)
    return step
