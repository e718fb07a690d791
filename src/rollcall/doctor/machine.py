"""`rollcall doctor` without a cluster: is this machine fit for a run in one process, and can the run file's parts be read here?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import TypeAdapter

from rollcall.config import Config
from rollcall.doctor import checks
from rollcall.doctor.checks import Finding, NodeFacts, find
from rollcall.doctor.examine import Diagnosis, checkpoint_bytes, judge_plan
from rollcall.doctor.probe import Probe
from rollcall.plan.memory import GIB
from rollcall.wait import say


def examine_machine(config: Config | None) -> Diagnosis:
    """Examine this machine; with a run file also its model, data and rewards."""
    folder = "." if config is None else str(config.run.dir.absolute())
    packages = [*checks.MUST_AGREE, *checks.SHOULD_AGREE]
    asked = {"packages": packages, "disks": {"run.dir": folder}, "paths": [], "address": "127.0.0.1"}
    facts = Probe().facts(asked)
    seat = {
        "rank": 0,
        "address": "127.0.0.1",
        "slots": 1,
        "is_head": True,
        "accelerator": "gpu" if facts["gpus"] else "cpu",
    }
    node = TypeAdapter(NodeFacts).validate_python(facts | seat)
    findings = [*checks.judge_disks(node, checkpoint_bytes=checkpoint_bytes(config)), *checks.judge_gpus(node)]
    findings += judge_torch(node)
    if config is not None:
        findings += [*judge_plan(config, [node])] if node.gpus else [*judge_memory(node, checkpoint_bytes(config))]
        findings += _judge_parts(config, node)
    return Diagnosis(
        cluster=None, nodes=(node,), findings=tuple(findings), skews={}, shared=None, backend=None, bytes_per_s=None
    )


def judge_torch(node: NodeFacts) -> Iterator[Finding]:
    if node.packages.get("torch") is None:
        yield find(
            node, "breaks", "torch is not installed", why="a run computes with it", fix="pip install torch==2.13.0"
        )
    elif node.gpus and node.torch_cuda is None and node.torch_hip is None:
        yield find(
            node, "breaks", f"{node.gpus[0].name} is there, and torch {node.packages['torch']} is a build for CPUs",
            why="the run would train on the CPU",
            fix=f"{node.executable} -m pip install --force-reinstall torch, from an index with CUDA builds",
        )  # fmt: skip


def judge_memory(node: NodeFacts, state_bytes: int | None) -> Iterator[Finding]:
    """On a CPU. ``state_bytes``: weights and optimizer state; gradients come on top."""
    if state_bytes is not None and state_bytes * 4 / 3 > node.memory_available:
        yield find(
            node, "breaks",
            f"weights, gradients and optimizer state take {state_bytes * 4 / 3 / GIB:.1f} GiB, and {node.memory_available / GIB:.1f} "
            "GiB of memory are available",
            why="the kernel would end the run", fix="train an adapter (model.lora.rank=16), or a smaller model",
        )  # fmt: skip


def _judge_parts(config: Config, node: NodeFacts) -> list[Finding]:
    from rollcall.config.checks import is_hub
    from rollcall.data.load import NO_DATA, read_rows
    from rollcall.model.files import resolve_model
    from rollcall.model.load import check_architecture
    from rollcall.roles.reward_trial import try_run

    def model() -> None:
        check_architecture(resolve_model(config.model.path), trust_remote_code=config.model.trust_remote_code)

    def data_and_rewards() -> None:
        broken = try_run(config, num_rows=1).broken
        if broken:
            raise ValueError(f"{', '.join(broken)} failed on the first row; `rollcall reward test` shows why")

    def data_file() -> None:
        if config.data.train != NO_DATA and not is_hub(config.data.train):
            next(read_rows(config.data.train), None)

    faults = _faults(node, "model", model)
    # Without a model there is no tokenizer to try the rewards with.
    rest = _faults(node, "data", data_file) if faults else _faults(node, "data and rewards", data_and_rewards)
    return [*faults, *rest]


def _faults(node: NodeFacts, what: str, look: Callable[[], None]) -> list[Finding]:
    say(f"reading the {what}")
    try:
        look()
    except (ValueError, OSError) as error:
        why = "the run would end with this error"
        return [find(node, "breaks", str(error), why=why, fix="change the run file as said")]
    return []
