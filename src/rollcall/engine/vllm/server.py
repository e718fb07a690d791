"""The vLLM process. This file is run by the Python of vLLM's own environment.

It imports the standard library, torch and vLLM. From this package, it imports only process/child.py and nodes/framing.py, which need
nothing but the standard library. It answers the calls of the process that started it (``child.py``) one after another. Calls and answers
are JSON. It exits when its parent hangs up or dies. A call names a method:

    version  import vLLM
    load     create an engine from a model's config, with meaningless weights until the first update
    advance  add completions, decode a few steps, return the new tokens of every completion
    abort    forget completions
    begin    expect new weights; weights from an interrupted update are dropped
    part     load some of the new weights from shared memory, unless they are torn
    end      sample from the new weights; after an interrupted update the engine has no valid weights
    adapt    load the adapter from a folder
    sleep, wake

An update may arrive while completions are running. vLLM then puts them back into its queue and drops all keys and values from the old
weights. So a token and all the KV that it depends on come from the same version of the weights.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import queue
import sys
import tempfile
import threading
import weakref
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

# vLLM's environment does not have this package. Find it by its folder: a folder on sys.path would also offer what lies next to it, for
# example all packages of Rollcall's own environment.
package = ModuleType("rollcall")
package.__path__ = [str(Path(__file__).parents[2])]
sys.modules.setdefault("rollcall", package)

from rollcall.nodes.framing import JSON, Body  # noqa: E402
from rollcall.process import child  # noqa: E402


class Server:
    hears, says = JSON, Body(lambda answer: json.dumps(answer).encode(), json.loads)  # a log-prob may be NaN

    def __init__(self, memory_fd: int):
        self.memory_path = f"/proc/{os.getpid()}/fd/{memory_fd}"  # also valid in tensor-parallel processes
        self.spec: dict[str, Any] | None = None
        self.engine: Any = None
        self.has_weights = False  # or an adapter, if only adapters are sent
        self._is_changing = False  # whether part of an update has been loaded
        self.adapter: Any = None  # vLLM's LoRARequest, or None without an adapter
        self._preemptions: dict[str, int] = {}  # per running completion

    # Methods that a call can name

    def version(self) -> str:
        import vllm  # type: ignore[import-not-found]

        return vllm.__version__  # type: ignore[attr-defined]

    def load(self, spec: dict[str, Any]) -> None:
        """Create the engine. An engine with the same settings is kept, but its completions, weights and adapter become invalid."""
        self.begin()
        if self.engine is not None and spec == self.spec:
            self.engine.abort_request(list(self.engine.output_processor.request_states), internal=True)
            self._forget_context()
        else:
            self.unload()
            with tempfile.TemporaryDirectory(prefix="rollcall-vllm-") as folder:
                with open(os.path.join(folder, "config.json"), "w") as file:
                    json.dump(spec["config"], file)
                self.engine = make_engine(spec, spec["model"] or folder)
            self.spec = spec
        self.has_weights, self.adapter = False, None

    def advance(self, submit: list[dict[str, Any]], steps: int) -> dict[str, Any]:
        if not self.has_weights:
            raise RuntimeError("no weights have been sent yet")
        for row in submit:
            prompt = {"prompt_token_ids": row["prompt"]}
            self.engine.add_request(row["id"], prompt, sampling_params(row["sampling"]), lora_request=self.adapter)
        rows: dict[str, list[Any]] = {}  # id -> tokens, log-probs, finish
        num_preempted = 0
        for _ in range(steps):
            if not self.engine.has_unfinished_requests():
                break
            for output in self.engine.step():
                row, made = rows.setdefault(output.request_id, [[], [], None]), output.outputs[0]
                row[0] += made.token_ids
                row[1] += [
                    entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs or [], strict=True)
                ]
                row[2] = made.finish_reason
            num_preempted += self._count_preemptions()
        return {"rows": [[name, *row] for name, row in rows.items()], "preempted": num_preempted}

    def abort(self, rows: list[str]) -> None:
        self.engine.abort_request(rows)

    def begin(self) -> None:
        """Drop the remains of an interrupted update."""
        if self._is_changing:
            self._is_changing = False
            self.engine.collective_rpc(end_weights, args=(False,))

    def part(self, offset: int, size: int, tensors: list[list[Any]]) -> dict[str, Any]:
        """Load a part. Return the offsets of the parts that are still being read and whose memory must not change."""
        verify(self.memory_path, offset, size, tensors)
        if not self._is_changing:  # the engine has not been changed yet
            self._is_changing, self.has_weights = True, False
            self.engine.collective_rpc(begin_weights)
        held = self.engine.collective_rpc(take_weights, args=(self.memory_path, offset, size, tensors))
        return {"held": sorted({one for each in held for one in each})}

    def end(self) -> None:
        if not self._is_changing:
            raise RuntimeError("no weights were sent for this version")
        self._is_changing = False
        self.engine.collective_rpc(end_weights, args=(True,))
        self._forget_context()
        self.has_weights = True

    def adapt(self, folder: str) -> None:
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

        # Always use the same ID, so that running completions continue with the new adapter. Their own requests must not load it again.
        if not self.engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True)):
            raise RuntimeError(f"vLLM did not load the adapter in {folder}")
        self.adapter = LoRARequest("policy", 1, folder)
        self._forget_context()
        self.has_weights = True

    def sleep(self) -> None:
        self.engine.sleep(level=1)

    def wake(self, tags: list[str]) -> None:
        self.engine.wake_up(tags)

    def _forget_context(self) -> None:
        """Drop all keys and values, even of running completions. They are computed again before the next token."""
        if self.engine.reset_prefix_cache(reset_running_requests=True) is False:
            raise RuntimeError("vLLM could not reset its prefix cache")
        self._count_preemptions()  # discard the result: these preemptions do not mean that memory is short

    def _count_preemptions(self) -> int:
        scheduler = self.engine.engine_core.engine_core.scheduler
        before, now = self._preemptions, {name: one.num_preemptions for name, one in scheduler.requests.items()}
        self._preemptions = now
        return sum(count - before.get(name, 0) for name, count in now.items())

    def unload(self) -> None:
        if self.engine is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found]

        self.engine.engine_core.shutdown()
        self.engine, self._preemptions = None, {}
        gc.collect()
        cleanup_dist_env_and_memory()


def make_engine(spec: dict[str, Any], folder: str) -> Any:
    from vllm import EngineArgs, LLMEngine  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]
    from vllm.usage.usage_lib import UsageContext  # type: ignore[import-not-found]

    size = spec["tensor_parallel_size"]
    args = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,  # only token IDs go in and out, so no second tokenizer can disagree
        generation_config="vllm",  # only the request decides how to sample
        load_format="dummy" if spec["model"] is None else "auto",
        enable_lora=spec["lora_rank"] > 0,
        max_loras=1,
        max_lora_rank=spec["lora_rank"] or 16,
        trust_remote_code=False,  # vLLM has its own class for the architecture; only the learner may run a model's code
        dtype=spec["dtype"],
        max_model_len=spec["max_positions"],
        max_num_seqs=spec["max_running"],
        # If a prompt is filled in two steps, vLLM 0.32 draws a token too early and then rewinds the generator, which fails on a CPU.
        enable_chunked_prefill=False if current_platform.is_cpu() else None,
        block_size=spec["kv_block"],
        num_gpu_blocks_override=spec["kv_blocks"],
        kv_cache_memory_bytes=spec["kv_bytes"],
        # The KV memory is set above. vLLM only compares this fraction with the free memory of the GPU, which a learner may share.
        gpu_memory_utilization=0.01,
        disable_hybrid_kv_cache_manager=True,  # then sliding-window layers take as much memory as other layers, so it can be calculated
        logprobs_mode="processed_logprobs",  # after temperature, top-k and top-p: the distribution that is sampled from
        enforce_eager=spec["enforce_eager"],
        enable_sleep_mode=spec["sleep"],
        tensor_parallel_size=size,
        distributed_executor_backend="uni" if size == 1 else "mp",
        async_scheduling=False,  # no token is computed between two steps, so an update falls between two tokens
        disable_log_stats=True,
        seed=0,
    )
    return LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)


def sampling_params(given: dict[str, Any]) -> Any:
    from vllm import SamplingParams  # type: ignore[import-not-found]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

    return SamplingParams(
        **given,
        ignore_eos=True,  # only the stop tokens end a completion
        logprobs=0,  # only for the sampled token
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


# Weights. A tensor is [name, dtype, shape, where it begins in its part, number of bytes, checksum].


def verify(path: str, offset: int, size: int, tensors: list[list[Any]]) -> None:
    """Check that all bytes of a part have arrived unchanged, before the part changes anything in the engine."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ, offset=offset) as memory,
        memoryview(memory) as view,
    ):
        for name, _, _, begin, length, expected in tensors:
            with view[begin : begin + length] as part:
                if zlib.crc32(part) != expected:
                    raise ValueError(f"torn: {name} differs from what was sent")


# ``Reload`` and the three functions after it run in each process of the engine.


class Reload:
    """Lets vLLM reload the weights. vLLM handles fused, sharded and repacked layouts, and reads from each tensor the data that this
    process needs. The reload runs in a thread, so that the weights can arrive part by part: vLLM asks for the next part and waits for it.

    vLLM keeps views of the data that it still needs from a part: a module's tensors until it has all of them, padded tensors until the
    end. So a part's memory can be reused when its mapping is gone.

    This class works around two flaws of the reload in vLLM 0.32. Parameters for which no tensor was sent are only logged. On a CPU, an
    output layer that is tied to the embeddings keeps a repacked copy of the old embeddings.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model = worker.get_model()
        self._wanted = {name for name, _ in self._model.named_parameters()}
        self._loaded: set[str] = set()
        self._maps: dict[int, Any] = {}  # where a part begins -> a weak reference to its mapping
        self._parts: Any = queue.Queue()
        self._asked: Any = queue.Queue()  # one entry each time vLLM wants more tensors, and one when it is done
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()
        self._until_asked()

    def take(self, path: str, offset: int, size: int, tensors: list[list[Any]]) -> list[int]:
        with open(path, "rb") as file:  # map it copy-on-write, because torch wants a writable buffer
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=offset)
        self._maps[offset] = weakref.ref(memory)
        self._parts.put((memory, tensors))
        del memory
        self._until_asked()
        return [offset for offset, mapping in self._maps.items() if mapping() is not None]

    def _until_asked(self) -> None:
        """Wait until vLLM has read all parts that it was given."""
        if self._asked.get() == "done":
            raise self._error or RuntimeError("vLLM ended its reload before all weights were sent")

    def end(self, *, is_whole: bool) -> None:
        self._parts.put(None)
        self._thread.join()
        if not is_whole:
            return
        if self._error is not None:
            raise self._error
        if missing := sorted(self._wanted - self._loaded):
            raise RuntimeError(
                f"no weights were sent for {', '.join(missing[:3])}; the engine now has a mix of two versions"
            )
        model, config = self._model, self._worker.model_runner.model_config.hf_config
        if getattr(config, "tie_word_embeddings", False) and model.lm_head.weight.device.type == "cpu":
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # type: ignore[import-not-found]

            dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)

    def _run(self) -> None:
        import torch

        model, loaded, load_weights = self._model, self._loaded, self._model.load_weights
        model.load_weights = lambda weights: loaded.update(load_weights(weights)) or loaded
        try:
            if self._worker.device.type == "cuda":
                torch.cuda.set_device(self._worker.device)  # for this thread
            with torch.no_grad():
                self._worker.reload_weights(weights_iterator=self._stream())
        except BaseException as error:  # noqa: BLE001 - raised where the next part arrives
            self._error = error
        finally:
            del model.load_weights  # restore the class's own method
        self._asked.put("done")

    def _stream(self) -> Any:
        import torch

        while True:
            self._asked.put("more")
            part = self._parts.get()
            if part is None:
                return
            memory, tensors = part
            for name, dtype, shape, begin, length, _ in tensors:
                kind = getattr(torch, dtype)
                yield (
                    name,
                    torch.frombuffer(memory, dtype=kind, count=length // kind.itemsize, offset=begin).view(shape),
                )
            del part, memory


def begin_weights(worker: Any) -> None:
    worker.rollcall_reload = Reload(worker)


def take_weights(worker: Any, path: str, offset: int, size: int, tensors: list[list[Any]]) -> list[int]:
    return worker.rollcall_reload.take(path, offset, size, tensors)


def end_weights(worker: Any, is_whole: bool) -> None:
    reload, worker.rollcall_reload = getattr(worker, "rollcall_reload", None), None
    if reload is not None:
        reload.end(is_whole=is_whole)
    elif is_whole:
        raise RuntimeError("vLLM has not begun to load these weights")


def main() -> None:
    socket_fd, lifeline_fd, crash_fd, memory_fd = (int(text) for text in sys.argv[1:])
    child.end_with(lifeline_fd)
    child.dump_stacks_to(crash_fd)
    server = Server(memory_fd)
    child.serve(socket_fd, server)
    server.unload()


if __name__ == "__main__":
    main()
