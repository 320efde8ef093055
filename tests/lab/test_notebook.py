"""The notebook runs from top to bottom, and is kept without outputs."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "why-sqrt-dk.ipynb"


def test_the_notebook_is_kept_without_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert [cell for cell in cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)] == []


@pytest.mark.filterwarnings("ignore")  # of zmq and traitlets, about event loops
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    charts = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/svg+xml" in output.get("data", {})
    ]
    assert len(charts) == 6
    last = notebook.cells[-1].outputs[0]["data"]["text/plain"]
    assert "'false'" in last
