"""What all tests share: one torch thread, GPU tests that skip themselves where there is no GPU, and one lab cluster."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
from collections.abc import Generator, Iterator

# Set before torch is imported: on a busy machine a second thread makes every small operation wait for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("RAY_ADDRESS", None)  # tests name their clusters themselves

import pytest  # noqa: E402
import quick_rewards  # noqa: E402
from lab import Lab, missing_for_lab  # noqa: E402
from lab.cluster import SLOTS, LabCluster, bring_up, publish_stale  # noqa: E402
from ranks import Ranks  # noqa: E402

from rollcall.config import Config  # noqa: E402

quick_rewards.owner = os.getpid()

# A shell ignores SIGINT for what it starts in the background, and every process inherits that: a test that interrupts one
# would wait for its end forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def lab_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabCluster]:
    """Four hosts of 8 slots, brought up by hand out of order over a stale rendezvous file; to be left as it is."""
    reason = missing_for_lab()
    if reason is not None:
        pytest.skip(reason)
    shared = tmp_path_factory.mktemp("lab") / "shared"
    with Lab(hosts=5, shared=shared) as lab:
        publish_stale(lab.shared, address=f"{lab.hosts[0].ip}:6379", token="of-another-time")
        hosts = {rank: lab.hosts[rank] for rank in (3, 0, 2, 1)}
        joined = bring_up(hosts, "--rendezvous", str(lab.shared), "--slots", str(SLOTS))
        yield LabCluster(lab=lab, hosts=lab.hosts[:4], outsider=lab.hosts[4], rendezvous=lab.shared, joined=joined)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The run of `runs.make_run` without overrides, trained to its end; to be left as it is."""
    from runs import finish, make_run  # which import torch

    config = make_run(tmp_path_factory.mktemp("undisturbed"))
    finish(config)
    return config


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes of torch that meet again for each function that they run."""
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the collector, and what is there afterwards is looked through no more: torch and transformers stay.

    One process after the other: in a fresh clone the first compiles all files for the others.
    """
    gc.disable()
    try:
        with open(__file__) as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _turn(item: pytest.Item) -> int:
    names = getattr(item, "fixturenames", ())
    if "lab_cluster" in names:
        return 2  # last, so that four Ray nodes do not run beside the rest of the tests
    # This process can drive one Ray after another, but not a second one as if the first had never been: handles of lost
    # actors outlive it.
    return int("node" in names and "test_recovery" in item.nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    for item in items:
        if "lab_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(
                pytest.mark.slow
            )  # four nodes of Ray are four minutes of CPU; a cluster of two is in every run
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
