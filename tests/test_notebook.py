"""The notebook in examples/, executed as Jupyter executes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbclient: Any = pytest.importorskip("nbclient")
nbformat: Any = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
NOTEBOOK = Path(__file__).parents[1] / "examples" / "python.ipynb"


def test_the_notebook_is_kept_without_outputs_and_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    # A kernel of this Python, whatever kernels the user has.
    monkeypatch.setenv("JUPYTER_PATH", "")
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "loading torch and transformers" in shown and "step 3/3" in shown
    assert (tmp_path / "runs" / "notebook" / "model" / "config.json").exists()
    last = cells[-1].outputs[-1]["data"]["text/plain"]
    assert last.startswith("(") and "4:" in last
