"""Runs whose actors hold parts of the model: each writes its own part beside the run, and any other gang goes on from it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedBackend
from runs import finish, make_run, metric_rows, sharded_run

from rollcall.checkpoint.store import CheckpointStore
from rollcall.config import Config
from rollcall.loop.callbacks import Callbacks
from rollcall.observe.sinks import read_rows
from rollcall.view.audit import audit

pytestmark = pytest.mark.slow


def losses(config: Config) -> list[float]:
    return [row["train/grad_norm"] for row in read_rows(config.run.dir / "metrics.jsonl") if "train/grad_norm" in row]


def files_of(config: Config, step: int) -> dict[str, Any]:
    path = config.run.dir / "checkpoints" / f"step-{step:06d}" / "manifest.json"
    return json.loads(path.read_text())["files"]


def test_every_actor_writes_its_part_and_one_process_goes_on_from_them(tmp_path: Path) -> None:
    saved: list[int] = []
    config = sharded_run(tmp_path)
    backend = ForkedBackend(tmp_path / "nodes")
    assert (
        finish(config, backend=backend, callbacks=Callbacks(on_save=lambda one: saved.append(one.step)))["steps"] == 6
    )
    assert saved == [2, 4, 6]
    parts = {name: facts for name, facts in files_of(config, 6).items() if "part-" in name}
    assert sorted(parts) == [
        f"{role}/part-0000{rank}-of-00002.safetensors" for role in ("actor", "model") for rank in (0, 1)
    ]
    assert [facts["node"] for facts in parts.values()] == ["0", "1", "0", "1"]
    alone = make_run(tmp_path, "trainer.steps=8", "actor.sharding=fsdp", name="sharded")
    assert finish(alone)["steps"] == 8
    whole = make_run(tmp_path, "trainer.steps=8", name="whole")
    finish(whole)
    assert losses(alone) == pytest.approx(losses(whole), rel=1e-3)
    assert audit(config.run.dir).is_clean


def test_parts_may_stay_on_the_nodes(tmp_path: Path) -> None:
    config = sharded_run(tmp_path, "checkpoint.place=local", "trainer.keep_last=1")
    backend = ForkedBackend(tmp_path / "nodes")
    assert finish(config, backend=backend)["steps"] == 6
    places = [Path(facts["place"]) for facts in files_of(config, 6).values() if "place" in facts]
    assert len(places) == 4 and all(place.is_file() and place.is_relative_to(backend.folder) for place in places)
    left = [path for path in backend.folder.rglob("part-*") if path.is_file()]
    assert sorted(left) == sorted(places), "those of older checkpoints are gone"
    longer = sharded_run(tmp_path, "checkpoint.place=local", "trainer.steps=8")
    assert finish(longer, backend=ForkedBackend(tmp_path / "nodes"))["steps"] == 8


@pytest.mark.parametrize("victim", [0, 1])
def test_an_actor_killed_while_parts_are_written_costs_only_that_checkpoint(tmp_path: Path, victim: int) -> None:
    config = sharded_run(tmp_path, "trainer.max_restarts=3")
    backend = ForkedBackend(tmp_path / "nodes")
    struck = threading.Event()

    def strike() -> None:
        folder = config.run.dir / "checkpoints"
        while not any(folder.glob(".tmp-step-000004-*")):
            if struck.wait(0.002):
                return
        backend.crews[-1].processes[victim].kill()

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        assert finish(config, backend=backend)["steps"] == 6
    finally:
        struck.set()
        thread.join()
    assert len(backend.crews) == 2, "the run began again once"
    assert audit(config.run.dir).is_clean
    store = CheckpointStore(config.run.dir / "checkpoints", keep_last=2, keep_best=1)
    assert [(entry.step, entry.reason) for entry in store.inspect()] == [(4, ""), (6, "")]
    assert not list(store.dir.glob(".tmp-*"))
    assert [row["step"] for row in metric_rows(config)] == sorted(row["step"] for row in metric_rows(config))
