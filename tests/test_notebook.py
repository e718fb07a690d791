"""The notebook in examples/: its cells in this process, and with `make slow` in a kernel, as Jupyter executes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import lean

nbclient: Any = pytest.importorskip("nbclient")
nbformat: Any = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
NOTEBOOK = Path(__file__).parents[1] / "examples" / "python.ipynb"


def read_notebook() -> tuple[Any, list[Any]]:
    """The notebook and its cells of code."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
def test_the_notebook_is_kept_without_outputs_and_its_cells_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    _, cells = read_notebook()
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)  # the tests that follow have one thread
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell()
    with lean():
        for cell in cells:
            shell.run_cell(cell.source).raise_error()
    assert (tmp_path / "runs" / "notebook" / "model" / "config.json").exists()
    assert 4 in shell.user_ns["report"].evaluation.pass_at


@pytest.mark.slow  # the cells without a kernel, above
def test_the_notebook_runs_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, cells = read_notebook()
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
