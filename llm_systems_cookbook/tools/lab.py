"""Copies of the notebooks to work in, and what has become of older copies."""

import ast
import re
import shutil
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from llm_systems_cookbook.tools.notebooks import (
    Cell,
    CookbookError,
    notebook_paths,
    read_notebook,
)

PACKAGE = "llm_systems_cookbook"


def prepare_lab(root: Path) -> list[str]:
    """Copy each notebook into `lab/`, unless a copy is there already.

    A copy holds the reader's answers, so none is replaced or deleted.

    Args:
        root: the repository.

    Returns:
        A line for each older copy that differs from its notebook elsewhere
        than in an answer, and says how.

    Raises:
        CookbookError: the repository has no notebooks.
        OSError: a copy cannot be written.
    """
    lab = root / "lab"
    lab.mkdir(exist_ok=True)
    remarks = []
    for path in notebook_paths(root):
        copy = lab / path.name
        if copy.exists():
            remark = _remark(path, copy)
            remarks += [f"lab/{copy.name}: {remark}"] if remark else []
        else:
            shutil.copyfile(path, copy)
    names = {path.name for path in notebook_paths(root)}
    for copy in sorted(lab.glob("*.ipynb")):
        if copy.name not in names:
            remarks.append(f"lab/{copy.name}: no notebook has this name now")
    return remarks


def _remark(path: Path, copy: Path) -> str:
    """Say how a copy differs from its notebook; "" when only in answers."""
    try:
        old = _taught(copy)
    except CookbookError as error:
        return f"cannot be read ({error})"
    gone = [name for cell in old.values() for name in _gone(cell)]
    if gone:
        return f"imports what is no longer there: {_few(gone)}"
    new = _taught(path)
    differ = [
        label
        for label in {**new, **old}
        if _source(new.get(label)) != _source(old.get(label))
    ]
    return f"differs from the notebook in {_few(differ)}" if differ else ""


def _taught(path: Path) -> dict[str, Cell]:
    """Return the code cells by id; an answer is the reader's, and left out."""
    return {
        cell.label: cell
        for cell in read_notebook(path).code_cells
        if "exercise" not in cell.metadata and cell.source.strip()
    }


def _source(cell: Cell | None) -> str:
    return "" if cell is None else cell.source.strip()


def _gone(cell: Cell) -> Iterator[str]:
    """Yield what a cell imports from the package and is not there."""
    for node, _ in cell.nodes:
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module.partition(".")[0] != PACKAGE:
            continue
        for alias in node.names:
            if not _is_there(node.module, alias.name):
                yield f"{node.module}.{alias.name}"


def _is_there(module: str, name: str) -> bool:
    """Tell whether a module has a name, without running the module."""
    spec = _spec(module)
    if spec is None or spec.origin is None:
        return False
    if _spec(f"{module}.{name}") is not None:
        return True
    text = Path(spec.origin).read_text(encoding="utf-8")
    return re.search(rf"\b{name}\b", text) is not None


def _spec(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except ModuleNotFoundError:  # what should hold it is no package
        return None


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
