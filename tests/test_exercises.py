"""Every solution passes, and every wrong answer passes only the example."""

import re
from functools import cache

import matplotlib.pyplot as plt
import nbformat
import pytest
from cases.notebooks import (
    NOTEBOOKS,
    ROOT,
    cells_that_exercises_need,
    example_of,
    exercise_cells,
    run_cell,
)
from nbformat.v4 import new_code_cell, new_notebook

from llm_systems_cookbook.attention.backends import installed
from llm_systems_cookbook.nb import Session

pytestmark = pytest.mark.usefixtures("results_in_tmp")


@pytest.fixture
def results_in_tmp(tmp_path, monkeypatch):
    monkeypatch.setenv("COOKBOOK_RESULTS", str(tmp_path))
    yield
    plt.close("all")


NEEDS_TRITON = pytest.mark.skipif(
    not installed("triton"), reason="Triton is not installed"
)


def answers(kind):
    for path in NOTEBOOKS:
        for file in sorted((ROOT / "solutions" / path.stem).glob("*.py")):
            exercise, _, wrong = file.stem.partition(".")
            if bool(wrong) == (kind == "wrong"):
                name = f"{path.stem}:{file.stem}"
                kernel = "@triton.jit" in file.read_text()
                marks = [NEEDS_TRITON] if kernel else []
                yield pytest.param(path, exercise, file, id=name, marks=marks)


def test_an_exercise_keeps_the_cells_that_bind_what_it_reads(tmp_path):
    """Also what only a function reads, and a name that is bound again."""
    sources = {
        "first": "size = 2",
        "again": "size *= 2",
        "unused": "seen = [size]\ns.measure('sizes', len(seen), '')",
        "changes": "config['size'] = size",
        "helper": "def twice() -> int:\n    return 2 * size",
        "stub": "def answer(size: int) -> int:\n    return size",
        "grade": "s.exercise('answer', lambda: answer(1) == twice())",
        "after": "other = 1",
    }
    cells = [new_code_cell(text, id=name) for name, text in sources.items()]
    cells[5].metadata["exercise"] = "answer"
    path = tmp_path / "notebook.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    kept = [cell.id for cell in cells_that_exercises_need(path)]
    assert kept == ["first", "again", "helper", "stub", "grade"]


@cache
def namespace_of(path):
    """Run the cells that exercises need, once in each process."""
    namespace = {"__name__": "__main__"}
    for cell in cells_that_exercises_need(path):
        run_cell(cell.source, namespace, f"{path.stem}:{cell.id}")
    return namespace


def grade(path, exercise, answer, directory):
    """Return (status, message, passes the example) of an answer."""
    namespace = dict(namespace_of(path))
    namespace["s"] = session = Session(path.stem, directory)
    _, *grading = exercise_cells(path)[exercise]
    run_cell(answer, namespace, f"{exercise}:answer")
    source = "\n".join(cell.source for cell in grading)
    run_cell(source, namespace, f"{exercise}:grading")
    (record,) = session._as_dict("incomplete")["exercises"]
    assert record["name"] == exercise
    grader = re.search(r's\.exercise\(\s*"\w+",\s*(\w+)', source)[1]
    try:
        exec(example_of(source, grader), namespace)
        example = True
    except Exception:
        example = False
    return record["status"], record["message"], example


@pytest.mark.parametrize(("path", "exercise", "file"), list(answers("right")))
def test_solution_passes(path, exercise, file, tmp_path):
    status, message, example = grade(
        path, exercise, file.read_text(), tmp_path
    )
    assert (status, example) == ("passed", True), message


@pytest.mark.parametrize(("path", "exercise", "file"), list(answers("wrong")))
def test_wrong_answer_passes_the_example_and_fails(
    path, exercise, file, tmp_path
):
    status, message, example = grade(
        path, exercise, file.read_text(), tmp_path
    )
    assert example, "the example in the prose already tells it apart"
    assert status == "failed"
    assert message, "a failed answer gets a hint"
    assert "is not defined" not in message, "it fails for its own mistake"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_exercise_has_a_solution_and_wrong_answers(path):
    exercises = exercise_cells(path)
    assert len(exercises) >= 3
    folder = ROOT / "solutions" / path.stem
    for name in exercises:
        assert (folder / f"{name}.py").exists()
        assert len(list(folder.glob(f"{name}.wrong_*.py"))) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stubs_are_todo_and_do_not_fail(path, tmp_path):
    for name, (stub, *_) in exercise_cells(path).items():
        assert "NotImplementedError" in stub.source
        status, _, _ = grade(path, name, stub.source, tmp_path)
        assert status == "todo"
