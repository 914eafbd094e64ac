"""Every notebook runs twice in one kernel, from a folder not its own."""

import json
import re

import nbformat
import pytest
from cases.notebooks import NOTEBOOKS, ROOT
from nbclient import NotebookClient


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_twice_in_one_kernel_from_another_directory(
    path, tmp_path, monkeypatch
):
    results = tmp_path / "results"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("COOKBOOK_RESULTS", str(results))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(path, as_version=4)
    once = len(notebook.cells)
    again = nbformat.from_dict(notebook).cells
    for cell in again:
        cell.id = f"again-{cell.id}"
    notebook.cells += again
    NotebookClient(
        notebook,
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
    assert {e["status"] for e in record["exercises"]} == {"todo"}
    assert record["measures"], "a notebook measures something"
    assert list(elsewhere.iterdir()) == [], "nothing is left behind"
    for cells in (notebook.cells[:once], notebook.cells[once:]):
        pictures = [
            output
            for cell in cells
            if cell.cell_type == "code"
            for output in cell.outputs
            if "image/png" in output.get("data", {})
        ]
        assert len(pictures) >= 2, "its pictures are shown"
    if path.stem == "05_memory_waste":
        the_readme_shows_what_was_measured(record["measures"])


def the_readme_shows_what_was_measured(measures):
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| ((?:azure|mooncake)-\S+) \|(.+)\|$", readme, re.M)
    assert len(rows) == 4
    found = {measure["name"]: measure for measure in measures}
    for trace, cells in rows:
        context = found[f"paged_tokens_{trace}"]["context"]
        if "sha256" not in context:
            continue  # drawn from quantiles: no trace to compare with
        tokens = [part["token_states"] for part in context["split"].values()]
        assert cells.replace("*", "").split("|") == [
            f" {share:.1f} " for share in tokens
        ]
