"""Every notebook runs twice in one kernel, from a folder not its own.

Without the cells that take long: nbmake runs those, and once is enough.
"""

import json
import re

import nbformat
import pytest
from cases.notebooks import (
    LONG,
    NOTEBOOKS,
    ROOT,
    code_cells,
    exercise_cells,
    needed_cells,
    run_cell,
    short_cells,
)
from nbclient import NotebookClient
from nbformat.v4 import new_notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_twice_in_one_kernel_from_another_directory(
    path, tmp_path, monkeypatch
):
    results = tmp_path / "results"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("COOKBOOK_RESULTS", str(results))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    once = short_cells(path)
    again = [nbformat.from_dict(cell) for cell in once]
    for cell in again:
        cell.id = f"again-{cell.id}"
    NotebookClient(
        new_notebook(cells=once + again),
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(elsewhere)}},
    ).execute()

    record = json.loads((results / f"{path.stem}.json").read_text())
    assert record["status"] == "passed"
    assert {check["status"] for check in record["checks"]} <= {
        "passed",
        "skipped",
    }
    todo = {e["name"] for e in record["exercises"] if e["status"] == "todo"}
    assert todo == set(exercise_cells(path))
    assert bool(record["measures"]) == measures_something(once)
    assert list(elsewhere.iterdir()) == [], "nothing is left behind"
    for cells in (once, again):
        pictures = [
            output
            for cell in cells
            for output in cell.outputs
            if "image/png" in output.get("data", {})
        ]
        assert len(pictures) >= 2, "its pictures are shown"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_most_cells_run_twice(path):
    """And what is named as long exists, and each notebook measures."""
    cells = code_cells(path)
    assert measures_something(cells)
    assert LONG.get(path.stem, set()) <= {cell.id for cell in cells}
    assert len(short_cells(path)) > 0.6 * len(cells)


def measures_something(cells):
    return any("s.measure(" in cell.source for cell in cells)


def test_the_readme_shows_what_notebook_05_measures(tmp_path, monkeypatch):
    monkeypatch.setenv("COOKBOOK_RESULTS", str(tmp_path))
    (path,) = (path for path in NOTEBOOKS if path.stem == "05_memory_waste")
    namespace = {"__name__": "__main__"}
    for cell in needed_cells(path, {"traces-run"}):
        run_cell(cell.source, namespace, f"{path.stem}:{cell.id}")
    readme = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| ((?:azure|mooncake)-\S+) \|(.+)\|$", readme, re.M)
    assert len(rows) == 4
    for trace, cells in rows:
        if namespace["trace_of"][trace].generated:
            continue  # drawn from quantiles: no trace to compare with
        runs = namespace["trace_runs"][trace].values()
        tokens = [run.percent()["token_states"] for run in runs]
        assert cells.replace("*", "").split("|") == [
            f" {share:.1f} " for share in tokens
        ]
