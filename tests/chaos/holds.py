"""Copied to the hosts' Python path as ``sitecustomize``: holds a worker at a point of its work, to be struck there.

The first worker that reaches POINT while a file ``hold-POINT`` lies beside this one, and names its node or none, writes its
node and rank into ``held-POINT`` and waits for its end; the others go on, and find it missing. It changes nothing unless it
is asked to.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HELD_S = 600.0


def hold(point: str) -> None:
    if "RANK" not in os.environ:
        return
    try:
        node = (HERE / f"hold-{point}").read_text()
    except FileNotFoundError:
        return
    if node not in ("", os.environ["NODE_RANK"]):
        return
    scratch = HERE / f"held-{point}-{os.environ['RANK']}"
    scratch.write_text(f"{os.environ['NODE_RANK']} {os.environ['RANK']}")
    try:
        os.link(scratch, HERE / f"held-{point}")  # appears whole, and to one of them
    except FileExistsError:
        return
    time.sleep(HELD_S)


def before(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def held(*args: Any, **kwargs: Any) -> Any:
        hold(point)
        return function(*args, **kwargs)

    return held


def inside_backward(grad: Callable[..., Any]) -> Callable[..., Any]:
    def held(loss: Any, *args: Any, **kwargs: Any) -> Any:
        loss.register_hook(lambda gradient: hold("backward"))
        return grad(loss, *args, **kwargs)

    return held


def hold_learner(module: Any) -> None:
    module.Learner._loss = before("forward", module.Learner._loss)


def hold_whole(module: Any) -> None:
    module.torch.autograd.grad = inside_backward(module.torch.autograd.grad)


def hold_gang(module: Any) -> None:
    module.Gang._sum_bucket = before("all-reduce", module.Gang._sum_bucket)


def hold_parts(module: Any) -> None:
    """Beside the run: the controller waits for this part, and all others are written."""
    module.write_image = before("save", module.write_image)


def hold_weights(module: Any) -> None:
    module.WorkerWeights.send = before("sending weights", module.WorkerWeights.send)
    module.WorkerWeights.receiver = before("receiving weights", module.WorkerWeights.receiver)


AFTER_IMPORT = {
    "rollcall.learner.learner": hold_learner,
    "rollcall.learner.body": hold_whole,
    "rollcall.learner.gang": hold_gang,
    "rollcall.checkpoint.parts": hold_parts,
    "rollcall.run.weight_sync": hold_weights,
}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = AFTER_IMPORT.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: Any) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Finder())
