"""GB/s of each weight transport against plainly moving the same bytes, and what a delta sends after a real update.

python -m benchmarks.weight_sync                          shape of SmolLM2-135M, float32 and bfloat16
python -m benchmarks.weight_sync --model 11m --turns 20   a smaller model

The sender is this process and the receiver another one. Ours is the whole update: told, moved, applied to the receiver's
tensors, checksums of both sides compared. The plain side moves as many bytes in one flat tensor and checks nothing: a
memory copy for shared memory, a gloo broadcast for broadcast, a file written and read for file. Turns alternate and
medians count; the bar is 0.8.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import SMALL, SMOLLM2, TINY, WORKLOADS, print_result
from benchmarks.learner import make_samples
from rollcall.config import Grpo, OptimizerSection, WeightTransport
from rollcall.engine.weights import delta
from rollcall.engine.weights.layout import Layout, Views
from rollcall.engine.weights.transports import FanOut, open_receiver, open_sender
from rollcall.learner.learner import Learner
from rollcall.model.decoder import Decoder, fuse_parameters

MODELS: dict[str, tuple[dict[str, Any], int]] = {"0.8m": (TINY, 128), "11m": (SMALL, 128), "135m": (SMOLLM2, 49152)}
PLAIN = {"shared_memory": "memory copy", "broadcast": "broadcast", "file": "file written and read"}
BAR = 0.8
RATES = (1e-6, 1e-5)  # learning rates of the updates whose delta is taken
HOST = "127.0.0.1"
LONGEST_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="135m")
    parser.add_argument("--turns", type=int, default=9, help="of each side, of which the median counts")
    parser.add_argument("--folder", type=Path, help="for the file transport; absent: a temporary folder")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the copy is one core's on either side
    rows: list[dict[str, Any]] = []
    with Peer(args.model) as peer, tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        for dtype in (torch.float32, torch.bfloat16):
            tensors = policy(args.model, dtype)
            for transport in ("shared_memory", "broadcast", "file"):
                rows.append(compare(peer, transport, tensors, turns=args.turns, folder=folder))
                print(rows[-1], flush=True)
            gc.collect()
    deltas = [real_delta(dtype, rate) for dtype in (torch.bfloat16, torch.float32) for rate in RATES]
    for row in deltas:
        print(row, flush=True)
    worst = min(row["share"] for row in rows)
    print_result(
        "weight_sync",
        workload=f"weights of {args.model} to one process",
        device="cpu",
        ours={"rows": rows, "delta": deltas, "worst_share": worst, "bar": BAR},
        peer={"plain": PLAIN},
        ratio=worst,
    )


def policy(model: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a model of this shape, laid out as engine and learner have them."""
    return Decoder.of(make_model(model, dtype)).named_tensors()


def make_model(model: str, dtype: torch.dtype) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape, vocabulary = MODELS[model]
    torch.manual_seed(0)
    config: Any = Qwen2Config(**shape, vocab_size=vocabulary, tie_word_embeddings=True)
    made: Any = Qwen2ForCausalLM(config)
    made = made.to(dtype).eval().requires_grad_(False)
    fuse_parameters(made)
    return made


# The two sides of a turn


class Peer:
    """The receiving process; it does what it is told and says when it is done."""

    def __init__(self, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_receive, args=(there, model), daemon=True)
        self._process.start()

    def tell(self, what: str, *args: Any) -> None:
        self._here.send((what, args))

    def hear(self) -> Any:
        if not self._here.poll(LONGEST_S):
            raise RuntimeError(f"the receiving process has not answered within {LONGEST_S:g} s")
        return self._here.recv()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.tell("end")
        self._process.join(30)
        self._process.kill()


def _receive(pipe: Connection, model: str) -> None:
    torch.set_num_threads(1)
    tensors: dict[str, Tensor] = {}
    receiver: Any = None
    group: Any = None
    flat = torch.empty(0)
    while True:
        what, args = pipe.recv()
        if what == "end":
            return
        if what == "invitation":
            invitation, dtype = args
            if not tensors or next(iter(tensors.values())).dtype != dtype:
                tensors = {name: torch.zeros_like(tensor) for name, tensor in policy(model, dtype).items()}
            receiver = open_receiver(invitation, name="receiver", tensors=tensors)
        elif what == "receive":
            receiver.receive(version=args[0])
        elif what == "group":
            port, num_bytes = args
            flat = torch.zeros(num_bytes, dtype=torch.uint8)
            group = _group(dist.TCPStore(HOST, port, is_master=False), rank=1)
        elif what == "broadcast":
            _broadcast(group, flat)
        elif what == "read":
            path, num_bytes = args
            if len(flat) != num_bytes:
                flat = torch.zeros(num_bytes, dtype=torch.uint8)
            with open(path, "rb", buffering=0) as file:
                file.readinto(flat.numpy().data)
            pipe.send("read")


def compare(
    peer: Peer, transport: WeightTransport, tensors: dict[str, Tensor], *, turns: int, folder: Path
) -> dict[str, Any]:
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    dtype = next(iter(tensors.values())).dtype
    sender = open_sender(
        transport,
        receivers={"receiver": transport == "shared_memory"},
        name="sender",
        host=HOST,
        on_gpu=False,
        folder=folder,
    )
    peer.tell("invitation", sender.invitations["receiver"], dtype)
    ours = _ours(peer, sender, tensors)
    plain = {"shared_memory": _plain_copy, "broadcast": _plain_broadcast, "file": _plain_file}[transport](
        peer, num_bytes, folder
    )
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 2):
        for side in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            (ours, plain)[side]()
            if turn >= 2:  # before, memory is met for the first time
                seconds[side].append(time.perf_counter() - start)
    sender.close()
    our_s, plain_s = map(statistics.median, seconds)
    return {
        "transport": transport,
        "dtype": str(dtype).removeprefix("torch."),
        "mb": round(num_bytes / 1e6, 1),
        "gb_per_s": round(num_bytes / our_s / 1e9, 3),
        "plain": PLAIN[transport],
        "plain_gb_per_s": round(num_bytes / plain_s / 1e9, 3),
        "share": round(plain_s / our_s, 3),
    }


def _ours(peer: Peer, sender: FanOut, tensors: dict[str, Tensor]) -> Callable[[], object]:
    versions = iter(range(1_000_000))

    def run() -> None:
        version = next(versions)
        peer.tell("receive", version)
        sender.send(tensors, version=version)

    return run


def _plain_copy(peer: Peer, num_bytes: int, folder: Path) -> Callable[[], object]:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    return lambda: target.copy_(source)


def _plain_broadcast(peer: Peer, num_bytes: int, folder: Path) -> Callable[[], object]:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    peer.tell("group", store.port, num_bytes)
    group = _group(store, rank=0)
    flat = torch.ones(num_bytes, dtype=torch.uint8)

    def run() -> None:
        peer.tell("broadcast")
        _broadcast(group, flat)

    return run


def _plain_file(peer: Peer, num_bytes: int, folder: Path) -> Callable[[], object]:
    flat = torch.ones(num_bytes, dtype=torch.uint8)
    path = folder / "plain"

    def run() -> None:
        with path.open("wb") as file:
            file.write(flat.numpy().data)
        peer.tell("read", str(path), num_bytes)
        peer.hear()
        os.unlink(path)

    return run


def _group(store: dist.Store, *, rank: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's stubs
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=LONGEST_S)
    return gloo(store, rank, 2, options)


def _broadcast(group: Any, flat: Tensor) -> None:
    """And a byte back: sent is not yet received."""
    for tensor, root in ((flat, 0), (torch.zeros(1, dtype=torch.uint8), 1)):
        options = dist.BroadcastOptions()
        options.rootRank = root
        group.broadcast([tensor], options).wait()


# Delta


def real_delta(dtype: torch.dtype, rate: float) -> dict[str, Any]:
    """Bytes that a delta sends after each of two updates by the learner itself, of a small model.

    The learner trains in float32, and in bfloat16 the weights are rounded from there, as from its master weights.
    """
    workload = WORKLOADS["grpo-0.8m"]
    model = make_model("0.8m", torch.float32)
    learner = Learner(
        model,
        OptimizerSection(lr=rate),
        algorithm=Grpo(),
        temperature=1.0,
        max_response_tokens=max(workload.new_tokens),
        total_updates=2,
    )
    samples = make_samples(workload)[:32]
    trained = Decoder.of(model).named_tensors()
    tensors = {name: tensor.to(dtype) for name, tensor in trained.items()}
    held = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    sent = []
    with tempfile.TemporaryDirectory() as folder:
        sender = open_sender(
            "delta", receivers={"receiver": True}, name="sender", host=HOST, on_gpu=False, folder=Path(folder)
        )
        receiver = open_receiver(sender.invitations["receiver"], name="receiver", tensors=held)
        for version in range(3):
            if version:
                learner.update(samples)
                tensors = {name: tensor.to(dtype) for name, tensor in trained.items()}
                sent.append(_delta_bytes(tensors, held))
            _send_here(sender, receiver, tensors, version)
        sender.close()
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items()), "the receiver has other weights"
    full = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "lr": rate,
        "full_bytes": full,
        "sent_bytes": sent,
        "share_sent": round(statistics.mean(sent) / full, 4),
    }


def _send_here(sender: FanOut, receiver: Any, tensors: dict[str, Tensor], version: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(receiver.receive, version=version)
        sender.send(tensors, version=version)
        waiting.result()


def _delta_bytes(new: dict[str, Tensor], held: dict[str, Tensor]) -> int:
    layout = Layout.of(new)
    flat, base = (Views(tensors, layout).flat for tensors in (new, held))
    return len(delta.encode(layout, new=flat, base=base).payload)


if __name__ == "__main__":
    main()
