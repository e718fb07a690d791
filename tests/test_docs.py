"""The generated pages say what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import typer

from rollcall.cli.main import app
from rollcall.config import Config
from rollcall.config import docs as docs_config
from rollcall.config.docs import section_classes, type_name
from rollcall.observe import metrics

DOCS = Path(__file__).parents[1] / "docs"


def test_the_configuration_page_is_up_to_date() -> None:
    assert (DOCS / "configuration.md").read_text() == docs_config.render_docs(), "run python -m rollcall.config.docs"


def test_the_metrics_page_is_up_to_date() -> None:
    assert (DOCS / "metrics.md").read_text() == metrics.render_docs(), "run python -m rollcall.observe.metrics"


def test_every_key_of_every_section_is_on_the_page_with_a_meaning() -> None:
    page = docs_config.render_docs()
    for name, info in Config.model_fields.items():
        assert f"\n## {name}\n" in page
        for section in section_classes(info.annotation):
            for key, field in section.model_fields.items():
                if field.description:
                    assert f"| `{key}` |" in page and field.description in page
                else:
                    assert f"### {name}: {field.default}" in page, f"{name}.{key} has no description"


def test_the_cluster_page_names_verbs_and_options_that_exist() -> None:
    command: Any = typer.main.get_command(app)
    verbs = dict(command.commands)
    verbs |= {f"job {name}": verb for name, verb in verbs["job"].commands.items()}
    page = (DOCS / "clusters.md").read_text()
    named = set(re.findall(r"rollcall (job [a-z]+|[a-z]+)", page))
    assert named <= set(verbs), named - set(verbs)
    assert {"node", "check", "status", "down", "doctor", "plan", "simulate", "submit", "env"} <= named
    options = {option for verb in verbs.values() for parameter in verb.params for option in parameter.opts}
    asked = {option for line in page.splitlines() if "ssh " not in line for option in re.findall(r"`(--[a-z-]+)", line)}
    assert asked and asked <= options, asked - options


def test_every_link_leads_somewhere() -> None:
    for page in (*DOCS.glob("*.md"), DOCS.parent / "README.md"):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_metric_is_on_the_page() -> None:
    page = metrics.render_docs()
    for name, metric in metrics.METRICS.items():
        assert f"| `{name}` | {metric.unit} | {metric.meaning} |" in page


@pytest.mark.parametrize("module", [docs_config, metrics])
def test_the_generators_write_into_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    module.main()  # type: ignore[attr-defined]
    (page,) = (tmp_path / "docs").iterdir()
    assert page.read_text() == module.render_docs()  # type: ignore[attr-defined]


def test_types_read_as_yaml_users_say_them() -> None:
    assert type_name(int | None) == "integer or `null`"
    assert type_name(list[str]) == "list of text"
    assert type_name(tuple[float, float] | None) == "[number, number] or `null`"
    assert type_name(Literal["a", "b"]) == "`a`, `b`"
    assert type_name(dict[str, str | int]) == "map of text to text or integer"
