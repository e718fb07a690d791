"""What a job does before a run on a Ray that someone else has started. tests/test_launch_nodes_lab.py does it for real."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from sleeping import set_sleep

from rollcall.base import wait
from rollcall.base.errors import ClusterError
from rollcall.config import load_config
from rollcall.launch import ready
from rollcall.launch.rendered import RUN_FILE_VARIABLE


def config(**sections: Any) -> Any:
    return load_config({"cluster": {"num_nodes": 2, "num_gpus_per_node": 1, "accelerator": "cpu"}, **sections})


class Nodes:
    """Two nodes on which tasks run here and now; the second joins when it has been asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.connected: list[Any] = []
        cluster = SimpleNamespace(wait_until_known=lambda wait: None)
        monkeypatch.setattr(ready, "find_cluster", lambda **_: cluster)
        monkeypatch.setattr(ready, "list_nodes", self.list_nodes)
        monkeypatch.setattr(ready, "describe", lambda found, num_slots: f"{found.num_slots} of {num_slots}")
        monkeypatch.setattr(ready, "connected", lambda cluster: nullcontext(self.connected.append(cluster)))
        monkeypatch.setattr(ready, "run_on", self.run_on)
        monkeypatch.setattr(ready, "answers_of", lambda calls, wait, to: (calls, {}))
        set_sleep(monkeypatch, wait, lambda seconds: None)

    def list_nodes(self, cluster: Any) -> Any:
        self.asked += 1
        nodes = [SimpleNamespace(node_id=str(rank), host=f"node{rank}", address="", slots=1) for rank in (0, 1)]
        return SimpleNamespace(num_slots=min(self.asked, 2), alive=nodes[: self.asked])

    def run_on(self, node_id: str, function: Callable[[], str], *, env: dict[str, str]) -> str:
        return function()


@pytest.mark.slow
def test_every_node_is_prepared_once_all_slots_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch)
    monkeypatch.setattr(ready, "examine", lambda cluster, config, quick: SimpleNamespace(breaks=[]))
    monkeypatch.setattr(ready, "show", lambda report: None)
    log = tmp_path / "my log"
    made = config(prepare={"each_node": [f"echo node >> '{log}'"], "once": [f"echo once >> '{log}'"]})
    ready.make_ready(made, made.cluster)
    assert log.read_text().split() == ["node", "node", "once"]
    assert nodes.asked == 2 and len(nodes.connected) == 1


@pytest.mark.slow
def test_a_node_that_cannot_be_prepared_is_named_with_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = Nodes(monkeypatch)
    made = config(prepare={"each_node": ["echo the disk is full >&2; exit 3"], "fetch_model": False})
    with pytest.raises(ClusterError, match="a node could not be prepared"):
        ready.make_ready(made, made.cluster)
    said = capsys.readouterr().err
    assert "node1" in said and "the disk is full" in said and "status 3" in said
    assert len(nodes.connected) == 1


def test_a_run_that_the_doctor_would_not_start_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    Nodes(monkeypatch)
    monkeypatch.setattr(ready, "examine", lambda cluster, config, quick: SimpleNamespace(breaks=["clocks"]))
    monkeypatch.setattr(ready, "show", lambda report: None)
    made = config(prepare={"fetch_model": False})
    with pytest.raises(ClusterError, match="doctor"):
        ready.make_ready(made, made.cluster)


@pytest.mark.parametrize(
    ("text", "said"),
    [("trainer: {stps: 1}", "trainer.stps"), (":", "error")],
)
def test_a_job_whose_run_file_is_no_good_says_so(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(RUN_FILE_VARIABLE, base64.b64encode(text.encode()).decode())
    with pytest.raises(SystemExit) as ended:
        ready.main()
    assert ended.value.code == 1 and said in capsys.readouterr().err


def test_a_job_becomes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit, match=RUN_FILE_VARIABLE):
        ready.main()
    text = yaml.safe_dump({"run": {"name": "ü $x"}, "cluster": {"num_nodes": 2}}, allow_unicode=True)
    monkeypatch.setenv(RUN_FILE_VARIABLE, base64.b64encode(text.encode()).decode())
    done: list[Any] = []
    monkeypatch.setattr(ready, "make_ready", lambda config, section: done.append(config.run.name))
    monkeypatch.setattr(ready.os, "execv", lambda program, words: done.append(words[1:]))
    ready.main()
    (run_file,) = tmp_path.glob("*/run.yaml")
    assert done == ["ü $x", ["-m", "rollcall", "train", str(run_file)]]
    assert run_file.read_text() == text
