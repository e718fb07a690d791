"""How long a run waits for a checkpoint of a model that four processes share: each its part, or one file of all.

python -m benchmarks.save                              shape of SmolLM2-135M: weights and two moments, 1.6 GB
python -m benchmarks.save --model 11m --turns 3        a smaller model
python -m benchmarks.save --device cuda --processes 1  state on an accelerator, copied to pinned memory (in parts only)

Three ways, in turns, medians count:
  parts   each process copies its blocks to host memory, and the run goes on while they are written
  whole   all tensors are gathered to the first process, which writes one file of each kind; the run waits for the commit
  dcp     torch.distributed.checkpoint.async_save of the same tensors as DTensors

Both of ours also record what the model computes (``probe_s``, a forward of a few rows, for which FSDP gathers each layer) and
refuse weights that are not finite (``finite_s``) while the run waits; ``copy_s`` is what compares with dcp, which does
neither and takes no checksums. ``stands_still_s`` is how long the caller waits before training could go on, ``committed_s`` how long until the checkpoint counts.
The bar: parts make the run wait for at most a quarter of whole.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import print_result
from benchmarks.weight_sync import MODELS, make_model
from rollcall.checkpoint.saving import Saving, Trained
from rollcall.checkpoint.store import CheckpointStore
from rollcall.checkpoint.training import export_learner, files_to_save
from rollcall.config import Grpo, OptimizerSection
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Learner
from rollcall.model.decoder import fuse_parameters
from rollcall.model.tokenizers import ALPHABET, char_tokenizer
from rollcall.nodes.door import listen_at, new_secret
from rollcall.nodes.interfaces import interface_of
from rollcall.nodes.meeting import Place

BAR = 0.25
HOST = "127.0.0.1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="135m")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5, help="of each way, of which the median counts")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; absent: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        gang = Processes(args.processes, model=args.model, device=args.device)
        try:
            ways = ("parts", "whole", "dcp") if args.device == "cpu" else ("parts",)
            rows = measure(gang, Path(folder), ways=ways, turns=args.turns)
        finally:
            gang.close()
    for way, row in rows.items():
        print(way, row, flush=True)
    share = rows["parts"]["stands_still_s"] / rows["whole"]["stands_still_s"] if "whole" in rows else None
    print_result(
        "save",
        workload=f"checkpoint of {args.model} over {args.processes} processes",
        device=args.device,
        ours={**rows["parts"], "share_of_whole": share, "bar": BAR},
        peer={way: row for way, row in rows.items() if way != "parts"},
        ratio=None if share is None else 1 / share,
    )


def measure(gang: Processes, folder: Path, *, ways: Sequence[str], turns: int) -> dict[str, dict[str, float]]:
    saving = Saving(call=gang.call, processes=gang.ranks, place="shared", run_name="save")
    store = CheckpointStore(folder / "checkpoints", keep_last=1, keep_best=0)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way in ways:
            begun = time.perf_counter()
            if way == "parts":
                saving.copy()
                stood = time.perf_counter() - begun
                store.save(turn + 1, write=saving.write, state={}, score=None)
            elif way == "whole":
                store.save(turn + 1, write=partial(_write_whole, gang), state={}, score=None)
                stood = time.perf_counter() - begun
            else:
                gang.call(gang.ranks, "begin_dcp", folder / "dcp")
                stood = time.perf_counter() - begun
                gang.call(gang.ranks, "end_dcp")
            if turn:  # before, memory is met for the first time
                seconds[way].append((stood, time.perf_counter() - begun))
            print(f"turn {turn}: {way}, the run waits for {stood:.3f} s", flush=True)
            shutil.rmtree(folder / "dcp", ignore_errors=True)
    size = gang.call(gang.ranks[:1], "size")[0]
    rows: dict[str, dict[str, float]] = {
        way: {
            "gb": round(size / 1e9, 3),
            "stands_still_s": round(statistics.median(one for one, _ in pairs), 4),
            "committed_s": round(statistics.median(one for _, one in pairs), 4),
        }
        for way, pairs in seconds.items()
    }
    rows["parts"] |= gang.call(gang.ranks[:1], "told")[0]
    return rows


def _write_whole(gang: Processes, folder: Path) -> None:
    gang.call(gang.ranks, "write_gathered", folder)


class Processes:
    """A gang whose processes do what they are told, all at the same time."""

    def __init__(self, count: int, *, model: str, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.ranks = list(range(count))
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        secret, port = new_secret(), 0
        for rank in self.ranks:
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, count, secret, port, model, device), daemon=True
            )
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
            if rank == 0:
                port = here.recv()
        self.call(self.ranks, "size")  # until each has its model: the first save does not wait for that

    def call(self, ranks: Sequence[int], method: str, *args: Any) -> list[Any]:
        for rank in ranks:
            self._pipes[rank].send((method, args))
        answers = [self._pipes[rank].recv() for rank in ranks]
        if failed := next((answer for fine, answer in answers if not fine), None):
            raise RuntimeError(failed)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, rank: int, count: int, secret: Any, port: int, model: str, device: str) -> None:
    torch.set_num_threads(1)
    listener = None
    if rank == 0:
        listener = listen_at(HOST)
        port = listener.getsockname()[1]
        pipe.send(port)
    where = torch.device(device)
    gang = Gang.join(
        Place(address=HOST, port=port, secret=secret), rank=rank, size=count, device=where, listener=listener,
        interface=interface_of(HOST),
    )  # fmt: skip
    seat = Seat(gang, model=model, device=where)
    while True:
        method, args = pipe.recv()
        try:
            pipe.send((True, getattr(seat, method)(*args)))
        except Exception:  # noqa: BLE001 - the parent shows it
            pipe.send((False, traceback.format_exc()))


class Seat(Trained):
    """One process with its part of the model and of a state that a made-up update has left."""

    def __init__(self, gang: Gang, *, model: str, device: torch.device) -> None:
        whole = make_model(model, torch.float32)
        if gang.size == 1:  # it holds everything, as one part
            whole = whole.to(device)
            fuse_parameters(whole)
        learner = Learner(
            whole, OptimizerSection(sharding="fsdp"), algorithm=Grpo(), temperature=1.0, max_response_tokens=8, total_updates=9,
            gang=gang, device=device,
        )  # fmt: skip
        if gang.size > 1:
            whole.to("meta")
            gc.collect()
        super().__init__(tokenizer=char_tokenizer(ALPHABET), learner=learner, critic=None)
        self.spent: list[tuple[float, float, float]] = []
        learner.optimizer.accumulate([torch.ones_like(part) for part in learner.body.named.values()])
        learner.optimizer.step()

    def copy_parts(self) -> None:
        """As ``Trained`` does it, with the time of each of its three parts."""
        assert self.learner is not None
        begun = time.perf_counter()
        config_files = self.config_files()
        probed = time.perf_counter()
        files, facts = files_to_save(self.learner, None, config_files=config_files)
        checked = time.perf_counter()
        self._parts.copy(files, facts=facts)
        self.spent.append((probed - begun, checked - probed, time.perf_counter() - checked))

    def told(self) -> dict[str, float]:
        probe, check, copy = (statistics.median(times) for times in zip(*self.spent[1:], strict=True))
        return {"probe_s": round(probe, 4), "finite_s": round(check, 4), "copy_s": round(copy, 4)}

    def size(self) -> int:
        """Of the whole checkpoint, in bytes."""
        assert self.learner is not None
        return sum(shape.numel() for shape in self.learner.body.shapes.values()) * 3 * 4

    def write_gathered(self, directory: Path) -> None:
        """One file of each kind by the first process, which gets the tensors of all."""
        assert self.learner is not None
        learner, body = self.learner, cast(Any, self.learner.body)
        export_learner(learner, self.tokenizer, directory / "model")
        states: dict[str, dict[str, Any]] = {}
        for name, entry in learner.optimizer.states().items():
            states[name] = {
                key: body.gather(name, value).cpu() if value.ndim else value for key, value in entry.items()
            }
            if learner.gang.rank != 0:
                states.clear()
        if learner.gang.rank == 0:
            torch.save({**learner.optimizer.settings_dict(), "state": states}, directory / "actor.pt")

    def begin_dcp(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        assert self.learner is not None
        body: Any = self.learner.body
        tensors: dict[str, Tensor] = {}
        for name, entry in self.learner.optimizer.states().items():
            weight = body.homes[name].parameter
            tensors[name] = weight.detach()
            for key, value in entry.items():
                tensors[f"{key}/{name}"] = _like(weight, value) if value.ndim else value
        self._dcp: Any = dcp.async_save(tensors, checkpoint_id=str(folder), process_group=dist.group.WORLD)

    def end_dcp(self) -> None:
        self._dcp.result()


def _like(weight: Any, local: Tensor) -> Tensor:
    """A moment as the DTensor that its weight is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


if __name__ == "__main__":
    main()
