"""Copies of the notebooks in lab/: made once, kept, and looked at."""

import os
import shutil
from pathlib import Path

import nbformat
import pytest
from cases.notebooks import NOTEBOOKS

from llm_systems_cookbook.tools import lab
from llm_systems_cookbook.tools.lab import copy_notebooks, open_lab
from llm_systems_cookbook.tools.notebooks import read_notebook


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    write(tmp_path / "notebooks" / "01_a.ipynb")
    return tmp_path


def write(path, prose="# Build", code="x = 1"):
    cells = [
        nbformat.v4.new_markdown_cell(prose, id="title"),
        nbformat.v4.new_code_cell(code, id="stub"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def test_an_answer_in_a_copy_stays_and_is_no_cause_for_a_remark(root):
    assert copy_notebooks(root) == []
    copy = root / "lab" / "01_a.ipynb"
    write(copy, code="from llm_systems_cookbook.memory import BlockAllocator")
    before = copy.read_bytes()
    assert copy_notebooks(root) == []
    assert copy.read_bytes() == before


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_the_notebooks_import_today_is_there(path):
    imports = lab._imports(read_notebook(path))
    assert imports
    assert [one for one in imports if not lab._is_there(*one)] == []


def rewritten(root):
    write(root / "notebooks" / "01_a.ipynb", prose="# Build more")


def renumbered(root):
    shutil.move(root / "notebooks" / "01_a.ipynb", root / "notebooks" / "02_a")
    write(root / "notebooks" / "02_a.ipynb")


def moved_import(root):
    code = "from llm_systems_cookbook.paged_cache import PagedKVCache"
    write(root / "lab" / "01_a.ipynb", code=code)


def moved_name(root):
    code = "from llm_systems_cookbook import plots, traces"
    write(root / "lab" / "01_a.ipynb", code=code)


def moved_module(root):
    code = "import llm_systems_cookbook.traces\n"
    code += "from llm_systems_cookbook.memory import *"
    write(root / "lab" / "01_a.ipynb", code=code)


def broken(root):
    (root / "lab" / "01_a.ipynb").write_text("{")


def stale_record(root):
    (root / "results").mkdir()
    (root / "results" / "09_gone.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        (rewritten, "lab/01_a.ipynb is a copy of an older notebook"),
        (renumbered, "lab/01_a.ipynb is a copy of a notebook that is gone"),
        (
            moved_import,
            "lab/01_a.ipynb imports PagedKVCache from llm_systems_cookbook",
        ),
        (
            moved_name,
            "lab/01_a.ipynb imports traces from llm_systems_cookbook, which",
        ),
        (
            moved_module,
            "lab/01_a.ipynb imports llm_systems_cookbook.traces, which",
        ),
        (broken, "lab/01_a.ipynb cannot be compared"),
        (stale_record, "09_gone.json: a record of no notebook"),
    ],
)
def test_what_is_out_of_step_is_said_and_kept(root, change, remark):
    copy_notebooks(root)
    change(root)
    before = (root / "lab" / "01_a.ipynb").read_bytes()
    (line,) = copy_notebooks(root)
    assert line.startswith(remark)
    assert (root / "lab" / "01_a.ipynb").read_bytes() == before


def test_folders_given_by_a_variable_mean_the_same_in_lab(root, monkeypatch):
    copy_notebooks(root)
    became = []
    monkeypatch.setattr(lab.os, "execve", lambda *call: became.append(call))
    monkeypatch.setenv("HOME", str(root / "home"))
    monkeypatch.setenv("COOKBOOK_TRACES", "~/traces")
    monkeypatch.setenv("COOKBOOK_RESULTS", "records")
    here = Path.cwd()
    open_lab(root, ["--no-browser"])
    ((_, command, env),) = became
    assert env["COOKBOOK_TRACES"] == str(root / "home" / "traces")
    assert env["COOKBOOK_RESULTS"] == str(here / "records")
    assert command[-1] == "--no-browser"
    assert os.path.samefile(Path.cwd(), root / "lab")
