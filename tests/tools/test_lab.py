"""Copies for the reader: made once, never replaced, and looked at."""

import json
from pathlib import Path

import pytest

from llm_systems_cookbook.tools.lab import prepare_lab


def cell(name: str, source: str, **metadata: str) -> dict:
    return {
        "cell_type": "code",
        "id": name,
        "metadata": metadata,
        "source": source,
        "outputs": [],
        "execution_count": None,
    }


def write(path: Path, *cells: dict) -> Path:
    path.parent.mkdir(exist_ok=True)
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {},
        "cells": list(cells),
    }
    path.write_text(json.dumps(notebook))
    return path


STUB = cell("answer", "raise NotImplementedError", exercise="answer")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "notebooks" / "01_a.ipynb", cell("one", "x = 1"), STUB)
    return tmp_path


def test_each_notebook_is_copied_once(root: Path):
    assert prepare_lab(root) == []
    copy = root / "lab" / "01_a.ipynb"
    assert copy.read_text() == (root / "notebooks" / "01_a.ipynb").read_text()


def test_an_answer_in_a_copy_stays_and_is_no_difference(root: Path):
    answer = cell("answer", "x = 2", exercise="answer")
    copy = write(root / "lab" / "01_a.ipynb", cell("one", "x = 1"), answer)
    before = copy.read_text()
    assert prepare_lab(root) == []
    assert copy.read_text() == before


def test_a_copy_of_an_older_notebook_is_named_and_kept(root: Path):
    copy = write(root / "lab" / "01_a.ipynb", cell("one", "x = 0"), STUB)
    before = copy.read_text()
    (remark,) = prepare_lab(root)
    assert remark == "lab/01_a.ipynb: differs from the notebook in one"
    assert copy.read_text() == before


@pytest.mark.parametrize(
    "line",
    [
        "from llm_systems_cookbook import plots, traces",
        "from llm_systems_cookbook.workload import alpaca",
        "from llm_systems_cookbook.attention import triton_kernels",
        "from llm_systems_cookbook.attention.compiled import Spec",
        "from llm_systems_cookbook.memory.memory_manager import Usage",
    ],
)
def test_an_import_that_has_moved_is_named(root: Path, line: str):
    write(root / "lab" / "01_a.ipynb", cell("one", line), STUB)
    (remark,) = prepare_lab(root)
    assert "imports what is no longer there: llm_systems_cook" in remark


@pytest.mark.parametrize(
    "line",
    [
        "from llm_systems_cookbook import plots, workloads",
        "from llm_systems_cookbook.workloads import load, traces",
        "from llm_systems_cookbook.attention.triton import kernels",
    ],
)
def test_an_import_of_today_is_not(root: Path, line: str):
    write(root / "notebooks" / "01_a.ipynb", cell("one", line))
    write(root / "lab" / "01_a.ipynb", cell("one", line))
    assert prepare_lab(root) == []


def test_a_copy_without_a_notebook_and_a_broken_one_are_named(root: Path):
    write(root / "lab" / "09_gone.ipynb", cell("one", "x = 1"))
    (root / "lab" / "01_a.ipynb").write_text("{")
    first, second = prepare_lab(root)
    assert first.startswith("lab/01_a.ipynb: cannot be read")
    assert second == "lab/09_gone.ipynb: no notebook has this name now"
