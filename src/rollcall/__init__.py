"""Rollcall: reinforcement learning for language models. ``rollcall --help`` is the way in."""

import os

__version__ = "0.1.0"

# torch for ARM brings an allocator of its own (mimalloc), which gives freed tensors back to the kernel after 10 ms: an update
# on a CPU then spends a seventh of its time on fresh pages. It reads its settings once, when torch is loaded, so this stands
# before everything else; ``host_memory`` does the same for glibc.
if "MIMALLOC_PURGE_DELAY" not in os.environ:
    os.putenv("MIMALLOC_PURGE_DELAY", "-1")
# torch's kernels for ARM otherwise leave a map of their code in /tmp for each process, for a profiler that nobody runs.
if "ONEDNN_JIT_PROFILE" not in os.environ:
    os.putenv("ONEDNN_JIT_PROFILE", "0")
