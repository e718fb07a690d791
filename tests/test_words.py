"""One of a thing is not several."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rollcall.base.errors import ConfigError
from rollcall.base.words import all_of, are, counted
from rollcall.cli.main import app
from rollcall.config import load_config
from rollcall.nodes import bootstrap


def test_a_noun_is_in_the_plural_unless_there_is_one() -> None:
    assert [counted(count, "slot") for count in (0, 1, 2, 1000)] == ["0 slots", "1 slot", "2 slots", "1,000 slots"]
    assert (counted(2, "process"), all_of(1, "step"), all_of(2, "step")) == (
        "2 processes",
        "the only step",
        "all 2 steps",
    )
    assert (are(1), are(2)) == ("is", "are")


@pytest.mark.parametrize(("count", "said"), [(1, "stopped 1 process of"), (2, "stopped 2 processes of")])
def test_down_counts_what_it_stopped(monkeypatch: pytest.MonkeyPatch, count: int, said: str) -> None:
    monkeypatch.setattr(bootstrap, "stop_node", lambda name, **_: count)
    assert CliRunner().invoke(app, ["down", "--cluster", "mine"]).stdout == f"{said} cluster 'mine'\n"


def test_a_cluster_of_one_node_is_named_as_one() -> None:
    with pytest.raises(ConfigError, match=r"has 2 numbers for 1 node; give one per node"):
        load_config(None, ["cluster={node_weights: [1, 2]}"])
