"""The generated pages say what the code says."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from rollcall import docs_config
from rollcall.config import Config
from rollcall.docs_config import section_classes, type_name
from rollcall.observe import metrics

DOCS = Path(__file__).parents[1] / "docs"


def test_the_configuration_page_is_up_to_date() -> None:
    assert (DOCS / "configuration.md").read_text() == docs_config.render_docs(), "run python -m rollcall.docs_config"


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
