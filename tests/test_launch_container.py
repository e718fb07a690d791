"""The words that container runtimes get from `rollcall launch`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rollcall.config.launch import ContainerSection, LaunchSection
from rollcall.config.sections import ClusterSection
from rollcall.launch.container import Container, container_of


def container(*, gpu: str = "cuda", accelerator: str = "gpu", **section: object) -> Container:
    launch = LaunchSection.model_validate({"gpu": gpu, "container": {"image": "my/image", **section}})
    cluster = ClusterSection.model_validate({"accelerator": accelerator})
    made = container_of(launch, cluster, name="one", folders=[Path("/launches/one")])
    assert made is not None
    return made


def options(words: list[str], name: str) -> list[str]:
    return [value for option, value in zip(words, words[1:], strict=False) if option == name]


def test_without_a_section_there_is_no_container() -> None:
    assert container_of(LaunchSection(), ClusterSection(), name="one") is None


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_a_node_runs_in_a_container_of_its_own_name_on_the_hosts_network(runtime: str) -> None:
    words = container(runtime=runtime, mounts=["/data", "/a b:/b:ro"], devices=["/dev/infiniband"]).run(
        ["rollcall", "node"], variables=["ROLLCALL_TOKEN", "NCCL_DEBUG"]
    )
    assert words[:2] == [runtime, "run"] and words[-3:] == ["my/image", "rollcall", "node"]
    assert options(words, "--network") == ["host"]
    assert options(words, "--name") == ["rollcall-one"]
    assert options(words, "--volume") == ["/data:/data", "/a b:/b:ro", "/launches/one:/launches/one"]
    assert options(words, "--env") == ["ROLLCALL_TOKEN", "NCCL_DEBUG"], "names, never values"
    gpu = ["nvidia.com/gpu=all"] if runtime == "podman" else []
    assert options(words, "--device") == ["/dev/infiniband", *gpu] and ("--gpus" in words) == (runtime == "docker")


def test_amd_cards_are_devices_and_a_cpu_needs_none() -> None:
    words = container(gpu="rocm").run(["x"], variables=[])
    assert options(words, "--device") == ["/dev/kfd", "/dev/dri"] and "--gpus" not in words
    plain = container(gpu="rocm", accelerator="cpu").run(["x"], variables=[])
    assert "--device" not in plain and "--gpus" not in plain
    assert container(runtime="apptainer", gpu="rocm").run(["x"], variables=[])[:4] == [
        "apptainer", "exec", "--cleanenv", "--rocm",
    ]  # fmt: skip


def test_an_image_is_built_where_it_is_missing_and_an_old_container_is_replaced() -> None:
    lines = container(build="/my folder").before()
    assert lines[0].endswith("|| docker build --tag my/image '/my folder'")
    assert lines[1].startswith("docker rm --force rollcall-one")
    (line,) = container(runtime="apptainer", image="a b.sif", build="x.def").before()
    assert shlex.split(line) == ["test", "-e", "a b.sif", "||", "apptainer", "build", "a b.sif", "x.def"]


def test_what_runs_beside_the_node_enters_its_container() -> None:
    assert container().shell() == ["docker", "exec", "--interactive", "rollcall-one", "bash", "-s"]
    assert container().stop() == ["docker", "rm", "--force", "rollcall-one"]
    plain = container(runtime="apptainer")
    assert plain.stop() is None and plain.exports(["A"]) == ['[ -z "${A+set}" ] || export APPTAINERENV_A="$A"']


def test_a_section_needs_an_image() -> None:
    with pytest.raises(ValueError, match="image"):
        ContainerSection.model_validate({})
