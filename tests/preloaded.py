"""What the processes that tests fork have imported. None of it is looked through by their collectors, nor copied for that."""

from __future__ import annotations

import gc
import importlib

MODULES = [
    "rollcall.run.training", "rollcall.run.evaluation", "rollcall.cli.main", "rollcall.run.train_in_folder", "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto", "tiny", "ranks",
    # What these import when they need it.
    "rollcall.run.api", "rollcall.engine.native.rows", "rollcall.nodes.cluster", "rollcall.reward.worker", "matplotlib.figure",
    "torch.utils.tensorboard",
]  # fmt: skip

gc.disable()
for name in MODULES:
    try:
        importlib.import_module(name)
    except ImportError as error:  # which multiprocessing would pass over
        raise RuntimeError(f"{name} cannot be imported") from error
gc.freeze()
gc.enable()
