"""The words of `launch.container` with `runtime: podman`, run by podman itself.

The image is made here, of this machine's own shell. podman gets a folder of its own for images and containers, and a mount
namespace without cgroups: it runs where nobody has set up cgroups for it, and nothing of it is left.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollcall.config.launch import LaunchSection
from rollcall.config.sections import ClusterSection
from rollcall.launch.container import Container, container_of

TOOLS = ("podman", "crun", "unshare", "nsenter", "ldd")
INIT = [Path("/usr/libexec/podman/catatonit"), Path("/usr/bin/catatonit"), Path("/usr/lib/podman/catatonit")]
WAIT_S = 120.0
VALUE = "a b'c\"d$HOME`date`\\\nü✓*;#"
PROGRAMS = ("sh", "cat", "env", "sleep", "touch")


def missing() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "podman without cgroups needs root on Linux"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not installed (apt install podman crun catatonit)"
    if not any(path.exists() for path in INIT):
        return "catatonit is not installed (apt install catatonit)"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no mount namespace can be made: {tried.stderr.strip()}"


pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=missing() or "")]


@dataclass(frozen=True, kw_only=True)
class Node:
    """Where podman runs."""

    folder: Path
    keeper: subprocess.Popen[bytes]

    def words(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.keeper.pid), "--mount", *words]

    def env(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        ours = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
        files = {name: str(self.folder / file) for name, file in ours.items()}
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), **files, **(more or {})}

    def run(
        self, words: Sequence[str], *, env: Mapping[str, str] | None = None, expect: int = 0, stdin: bytes | None = None
    ) -> str:
        ended = subprocess.run(
            self.words(words), env=self.env(env), input=stdin, capture_output=True, timeout=WAIT_S, cwd=self.folder
        )
        assert ended.returncode == expect, (ended.returncode, ended.stdout, ended.stderr)
        return ended.stdout.decode()

    def shell(self, lines: Sequence[str]) -> str:
        return self.run(["sh", "-euc", "\n".join(lines)])


def tar_of_a_system(folder: Path) -> bytes:
    """A root of a few of this machine's programs with their libraries."""
    for name in PROGRAMS:
        found = shutil.which(name)
        assert found is not None
        libraries = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout.split()
        for path in (Path(found), *(Path(word) for word in libraries if word.startswith("/"))):
            inside = folder / ("bin" if path.name == name else str(path.parent).lstrip("/")) / path.name
            inside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.resolve(), inside)
    return subprocess.run(["tar", "-C", str(folder), "-c", "."], capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("podman")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # As root podman asks for a million files and processes, which this machine may not give.
    limits = f'default_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]'
    (folder / "containers.conf").write_text(
        f'[containers]\ncgroups = "disabled"\n{limits}\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nruntime = "crun"\nevents_logger = "none"\n'
    )
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    ready = "mount -t tmpfs none /sys/fs/cgroup && echo ready && exec sleep infinity"
    keeper = subprocess.Popen(["unshare", "--mount", "sh", "-c", ready], stdout=subprocess.PIPE)
    made = Node(folder=folder, keeper=keeper)
    try:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"ready\n"
        made.run(["podman", "import", "-", "localhost/system"], stdin=tar_of_a_system(folder / "system"))
        yield made
    finally:
        made.run(["podman", "rm", "--all", "--force", "--time", "0"])
        keeper.kill()
        keeper.wait()


def container(node: Node, **section: Any) -> Container:
    given = {"runtime": "podman", "image": "localhost/system", "shm": "48m", **section}
    launch = LaunchSection.model_validate({"container": given})
    made = container_of(launch, ClusterSection(accelerator="cpu"), name="one", folders=[node.folder / "launch"])
    assert made is not None
    return made


@pytest.fixture(autouse=True)
def launch_folder(node: Node) -> Path:
    (node.folder / "launch").mkdir(exist_ok=True)
    return node.folder / "launch"


def names(node: Node) -> list[str]:
    return node.run(["podman", "ps", "--all", "--format", "{{.Names}} {{.ID}}"]).splitlines()


def test_only_named_variables_get_in_with_any_value(node: Node) -> None:
    words = container(node).run(["env", "-0"], variables=["NAMED", "ROLLCALL_TOKEN", "NOT_SET"])
    seen = node.run(words, env={"NAMED": VALUE, "ROLLCALL_TOKEN": "t", "OTHER": "x"})
    inside = dict(line.split("=", 1) for line in seen.split("\0") if line)
    assert inside["NAMED"] == VALUE and inside["ROLLCALL_TOKEN"] == "t"
    assert not {"OTHER", "NOT_SET", "CONTAINERS_CONF"} & inside.keys()
    assert names(node) == [], "it ends with its command"


def test_the_network_is_the_hosts_and_shm_and_mounts_are_as_declared(node: Node) -> None:
    data = node.folder / "my data"
    data.mkdir(exist_ok=True)
    (data / "rows").write_text("one")
    made = container(node, mounts=[str(data), f"{data}:/read only:ro"], devices=["/dev/null:/dev/mine"])
    look = "\n".join([
        'cat "$1/rows" "/read only/rows"; echo', 'touch "$1/new" "$2/new"', 'touch "/read only/no" 2>/dev/null || echo refused',
        "[ -c /dev/mine ] && echo device", "cat /proc/mounts /proc/net/route",
    ])  # fmt: skip
    seen = node.run(made.run(["sh", "-c", look, "sh", str(data), str(node.folder / "launch")], variables=[]))
    assert seen.splitlines()[:3] == ["oneone", "refused", "device"]
    assert (data / "new").exists() and (node.folder / "launch/new").exists() and not (data / "no").exists()
    shm = next(line.split() for line in seen.splitlines() if line.startswith("shm /dev/shm "))
    assert f"size={48 * 1024}k" in shm[3].split(",")
    assert seen.endswith(Path("/proc/net/route").read_text())


def test_an_old_container_is_replaced_entered_and_ended(node: Node) -> None:
    made = container(node)
    hold = made.run(["sleep", "infinity"], variables=["NAMED"], detach=True)
    node.run(hold, env={"NAMED": "first"})
    (old,) = names(node)
    node.run(hold, expect=125)  # the name is taken
    node.shell(made.before())
    node.run(hold, env={"NAMED": "second"})
    (new,) = names(node)
    assert old != new and new.split()[0] == made.name == "rollcall-one"
    shell = ["sh" if word == "bash" else word for word in made.shell()]  # the image has no other
    assert node.run(shell, stdin=b"echo $NAMED; exit 3", expect=3) == "second\n"
    stop = made.stop()
    assert stop is not None
    node.run(stop)
    node.run(stop)  # what has ended already is fine
    assert names(node) == []


def test_an_image_that_is_missing_is_built_once(node: Node) -> None:
    folder = node.folder / "my build"
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text("FROM localhost/system\nENV BAKED=first\n")
    made = container(node, image="localhost/built", build=str(folder))
    node.shell(made.before())
    (folder / "Dockerfile").write_text("FROM localhost/system\nENV BAKED=second\n")
    node.shell(made.before())
    assert node.run(made.run(["sh", "-c", 'echo "$BAKED"'], variables=[])) == "first\n"


def test_a_signal_reaches_the_command_and_its_status_comes_back(node: Node) -> None:
    """As under Slurm, where the batch script becomes the runtime's command."""
    ready = node.folder / "launch/ready"
    script = f'trap "exit 75" TERM; touch {shlex.quote(str(ready))}; while :; do sleep 0.1; done'
    words = container(node).run(["sh", "-c", script], variables=[])
    started = subprocess.Popen(node.words(words), env=node.env())
    give_up = time.monotonic() + WAIT_S
    while not ready.exists():
        assert started.poll() is None and time.monotonic() < give_up
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    assert started.wait(WAIT_S) == 75
    assert names(node) == []
