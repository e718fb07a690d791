"""Imports point in one direction: the contracts in pyproject.toml hold, and each of them notices when it is broken."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lint(source: Path) -> str:
    """What import-linter says of the package in that folder. It reads the files and imports none of them."""
    command = [
        Path(sys.executable).with_name("lint-imports"),
        "--config",
        ROOT / "pyproject.toml",
        "--no-cache",
        "--no-logo",
    ]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120).stdout


def contracts(said: str, state: str) -> set[str]:
    return set(re.findall(rf"^(.+?) {state}\b", said, re.MULTILINE))


def test_every_contract_holds() -> None:
    said = lint(ROOT / "src")
    assert contracts(said, "BROKEN") == set(), said
    assert len(contracts(said, "KEPT")) == 9, said


def copy_of_the_package(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "embedded")
    return Path(shutil.copytree(ROOT / "src/rollcall", folder / "rollcall", ignore=ignored))


# For each contract a line that breaks it, the file that gets it, and how it is named.
BREACHES = {
    "Imports point downward": (
        "base/append_file.py", "import rollcall.model.kernels.attention", "rollcall.base.append_file -> rollcall.model.kernels.attention"
    ),
    "No room, and no file in a room, imports what imports it": (
        "loop/attempts.py", "import rollcall.loop.controller", ".attempts -> .controller"
    ),
    "Only process.ray imports ray": (
        "process/groups/backend.py", "def later(): import ray.util", "rollcall.process.groups.backend -> ray"
    ),
    "Plans, run files and processes need neither torch nor ray": (
        "config/algorithms.py", "def later(): import torch", "rollcall.config.algorithms -> torch"
    ),
    "A run in one process needs neither ray nor cryptography": (
        "run/local.py", "def later(): import cryptography", "rollcall.run.local -> cryptography"
    ),
    "The loop knows run only through protocols": (
        "loop/attempts.py", "def later(): import rollcall.run.api", "rollcall.loop.attempts -> rollcall.run.api"
    ),
    "Below run nobody imports a carrier": (
        "engine/ticker.py", "def later(): import rollcall.process.ray.carrier", "rollcall.engine.ticker -> rollcall.process.ray.carrier"
    ),
    "Processes and nodes know nothing of training": (
        "process/groups/backend.py", "import rollcall.algo.advantages", "rollcall.process.groups.backend -> rollcall.algo.advantages"
    ),
}  # fmt: skip


def test_each_contract_names_what_breaks_it_and_a_new_room_must_be_given_its_place(tmp_path: Path) -> None:
    package = copy_of_the_package(tmp_path)
    (package / "cellar.py").write_text('"""Nobody knows where this belongs."""\n')
    for file, line, _ in BREACHES.values():
        (package / file).write_text(f"{(package / file).read_text()}\n{line}\n")
    said = lint(tmp_path)
    for contract, (_, _, named) in BREACHES.items():
        section = said.partition(f"\n{contract}\n{'-' * len(contract)}\n")[2].partition("\n---")[0]
        assert named in section, said
    assert "rollcall.cellar" in said


def rooms_on_the_page() -> dict[str, str]:
    """Room or file to the cell with its files, in the order of the table in docs/architecture.md."""
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("\n## Packages\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| .+? \|(.*?)\|$", section, re.MULTILINE)
    return {name: files for names, files in rows for name in re.findall(r"`([\w./]+)`", names)}


def test_the_table_of_rooms_names_files_that_exist_in_the_order_of_the_contract() -> None:
    found = rooms_on_the_page()
    package = ROOT / "src/rollcall"
    named = [*found, *(f"{room}{file}" for room, files in found.items() for file in re.findall(r"`(\w+)`", files))]
    missing = [path for path in named if not (package / path).exists() and not (package / f"{path}.py").exists()]
    assert missing == []
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.findall(r"\w+", layer) for layer in contracts[0]["layers"]]
    depth = {name: number for number, names in enumerate(layers) for name in names if name != "__main__"}
    on_page = [name.removesuffix("/").removesuffix(".py") for name in found]
    assert set(on_page) == set(depth)
    assert on_page == sorted(on_page, key=depth.__getitem__)
