"""The docs say what the code says: generated pages, links, file names, commands. And they say it in plain English."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import typer

from rollcall.cli.main import app
from rollcall.config import Config
from rollcall.config.errors import section_classes
from rollcall.config.launch import SlurmSection
from rollcall.observe import metrics
from scripts import write_configuration, write_metrics

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
PRESENT = [page for page in PAGES if page.name != "log.md"]  # the log names the files and uses the words of its day

# A reader stumbles over these; the second part of each is what to write.
NOT_PLAIN = {
    r"\banew\b": "again",
    r"\b(is|are) no (?!longer\b)\w": "is not a",
    r"\bso many\b": "the first N",
    r"\bwhoever\b": "the person, process or shell that",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\b(is|are) not to be (had|seen|found)\b": "does not exist, cannot be found",
    r"\bwhat is there\b": "what exists, or its name",
}
THERE_IS_NO = re.compile(r"\bthere (is|are) no\b", re.IGNORECASE)


def test_the_configuration_page_is_up_to_date() -> None:
    assert (DOCS / "configuration.md").read_text() == write_configuration.render_docs(), (
        "run python scripts/write_configuration.py"
    )


def test_the_metrics_page_is_up_to_date() -> None:
    assert (DOCS / "metrics.md").read_text() == write_metrics.render_docs(), "run python scripts/write_metrics.py"


def test_every_key_of_every_section_is_on_the_page_with_a_meaning() -> None:
    page = write_configuration.render_docs()
    for name, info in Config.model_fields.items():
        assert f"\n## {name}\n" in page
        for section in section_classes(info.annotation):
            for key, field in section.model_fields.items():
                if field.description:
                    assert f"| `{key}` |" in page and field.description in page
                else:
                    assert f"### {name}: {field.default}" in page, f"{name}.{key} has no description"


def verbs() -> dict[str, Any]:
    """Every command by its name, such as "train" and "job list"."""
    command: Any = typer.main.get_command(app)
    found = dict(command.commands)
    nested = {name: inner.commands for name, inner in found.items() if hasattr(inner, "commands")}
    return found | {f"{name} {verb}": inner for name, all_of in nested.items() for verb, inner in all_of.items()}


def code_of(page: Path) -> str:
    """What a page shows as code: its blocks and its spans."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return "\n".join(
        [*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))]
    )


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    code = code_of(page)
    named = set(re.findall(r"(?:^|[$(] ?|`|&& )rollcall ((?:job|reward) [a-z]+|[a-z-]+)", code, re.MULTILINE))
    assert named <= set(verbs()), named - set(verbs())
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert (made := set(re.findall(r"^make ([a-z]+)", code, re.MULTILINE))) <= targets, made - targets
    for module in set(re.findall(r"python -m ((?:rollcall|benchmarks)[\w.]*)", code)):
        assert find_spec(module) is not None, f"{page.name} shows python -m {module}"


def test_the_cluster_page_has_every_command_of_a_cluster_and_options_that_exist() -> None:
    page = (DOCS / "clusters.md").read_text()
    named = set(re.findall(r"rollcall ([a-z]+)", page))
    assert {"node", "check", "status", "down", "doctor", "plan", "simulate", "submit", "env"} <= named
    options = {option for verb in verbs().values() for parameter in verb.params for option in parameter.opts}
    asked = {option for line in page.splitlines() if "ssh " not in line for option in re.findall(r"`(--[a-z-]+)", line)}
    assert asked and asked <= options, asked - options


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", page.read_text())):
            if "://" in target:
                continue
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_every_python_file_that_a_page_names_exists(page: Path) -> None:
    for name in re.findall(r"(?<![\w/<*])([\w./]+\.py)\b", page.read_text()):
        assert any((folder / name).is_file() for folder in (ROOT, ROOT / "src/rollcall", ROOT / "src")), (
            f"{page.name} names {name}, which is not a file of the repository or of src/rollcall"
        )


def test_every_metric_that_the_debugging_page_names_exists() -> None:
    groups = "|".join(re.findall(r"^## (\w+)/$", write_metrics.render_docs(), re.MULTILINE))
    named = set(re.findall(rf"`((?:{groups})/[\w<>*]+)`", (DOCS / "debugging.md").read_text()))
    known = set(re.findall(r"^\| `([^`]+)`", write_metrics.render_docs(), re.MULTILINE))
    missing = {name for name in named if name not in known and not name.endswith("*")}
    assert len(named) > 20 and not missing, missing


def test_a_name_after_a_file_on_the_architecture_page_is_in_that_file() -> None:
    found = re.findall(r"`([\w/]+\.py)` \(`(\w+)`\)", (DOCS / "architecture.md").read_text())
    assert len(found) >= 2
    for name, inside in found:
        text = (ROOT / "src/rollcall" / name).read_text()
        assert re.search(rf"^(def|class) {inside}\b", text, re.MULTILINE), f"{name} has no {inside}"


def help_texts() -> dict[str, str]:
    """The help of every command and every option, by its name."""

    def texts(command: Any, name: str) -> dict[str, str]:
        found = {name: command.help or ""}
        found |= {f"{name} {param.name}": getattr(param, "help", None) or "" for param in command.params}
        for verb, inner in getattr(command, "commands", {}).items():
            found |= texts(inner, f"{name} {verb}")
        return found

    return texts(typer.main.get_command(app), "rollcall")


def test_what_a_user_reads_first_is_plain_english() -> None:
    read_first = {page.name: page.read_text() for page in PRESENT}
    read_first |= {path.name: path.read_text() for path in (ROOT / "examples").glob("*.yaml")}
    read_first |= {path.name: path.read_text() for path in (ROOT / "src/rollcall/config").glob("*.yaml")}
    for name, text in (read_first | help_texts()).items():
        for pattern, better in NOT_PLAIN.items():
            found = re.search(pattern, THERE_IS_NO.sub("", text), re.IGNORECASE)
            assert found is None, f"{name}: {found[0]!r}; write: {better}"


def test_the_readme_explains_its_words_before_it_uses_them() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    for word in ("slot", "role", "group", "journal"):
        first = re.search(rf"\b{word}s?\b", readme, re.IGNORECASE)
        assert first is not None and readme[first.start() - 2 : first.start()] == "**", (
            f"{word} is used before it is explained"
        )


@pytest.mark.parametrize("page", ["from-trl.md", "from-verl.md"])
def test_a_page_for_users_of_another_system_names_keys_that_exist(page: str) -> None:
    known = write_configuration.render_docs()
    sections = "|".join(Config.model_fields)
    for row in re.findall(r"^\| [^|]+ \| ([^|]+) \|", (DOCS / page).read_text(), re.MULTILINE):
        for section, key in re.findall(rf"`({sections})\.(?:\d\.)?([a-z_.]+)", row):
            table = known.split(f"\n## {section}\n")[1].split("\n## ")[0]
            keys = table if section != "critic" else known
            assert f"| `{key}` |" in keys or f"| `{key.split('.')[-1]}` |" in known, f"{page}: {section}.{key}"


def test_every_documented_metric_is_written_and_every_metric_in_the_code_is_documented() -> None:
    code = {path: path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "metrics.py"}
    rooms = ("loop", "learner", "algo")
    writers = "".join(text for path, text in code.items() if path.parent.name in rooms or path.name == "headline.py")
    for name in metrics.METRICS:
        group, _, rest = name.partition("/")
        written = (f'"{group}/{{',) if rest == "<part>" else (f'"{name}"', f'"{rest}"')
        assert any(text in writers for text in written), f"{name} is documented and never written"
    groups = "|".join({name.partition("/")[0] for name in metrics.METRICS})
    for name in re.findall(rf'"((?:{groups})/[a-z_]+)"', "".join(code.values())):
        is_one = any(known.startswith(name) for known in metrics.METRICS)  # the page groups curves by how names begin
        assert is_one, f"{name} is in the code and not documented"


@pytest.mark.parametrize("module", [write_configuration, write_metrics])
def test_the_generators_write_into_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    module.main()  # type: ignore[attr-defined]
    (page,) = (tmp_path / "docs").iterdir()
    assert page.read_text() == module.render_docs()  # type: ignore[attr-defined]


def test_types_read_as_yaml_users_say_them() -> None:
    assert write_configuration.type_name(int | None) == "integer or `null`"
    assert write_configuration.type_name(list[str]) == "list of text"
    assert write_configuration.type_name(tuple[float, float] | None) == "[number, number] or `null`"
    assert write_configuration.type_name(Literal["a", "b"]) == "`a`, `b`"
    assert write_configuration.type_name(dict[str, str | int]) == "map of text to text or integer"


def test_the_page_of_keys_explains_the_keys_of_inner_sections() -> None:
    page = write_configuration.render_docs()
    table = page.split("### launch.slurm\n")[1].split("\n### ")[0]
    for key in SlurmSection.model_fields:
        assert f"| `{key}` |" in table
    assert "### trainer.elastic\n" in page
