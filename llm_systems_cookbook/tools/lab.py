"""Open copies of the notebooks: answers stay, and the checkout stays clean."""

import ast
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from llm_systems_cookbook.tools.notebooks import (
    CookbookError,
    Notebook,
    import_extra,
    notebook_paths,
    read_notebook,
)
from llm_systems_cookbook.tools.results import load_records
from llm_systems_cookbook.validate import folder_from

PACKAGE = "llm_systems_cookbook"
# Jupyter Lab asks the network for news and updates unless told not to.
OFFLINE = (
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
)


def copy_notebooks(root: Path) -> list[str]:
    """Copy to `lab/` what is not there yet; an old copy is never replaced.

    Returns:
        A line for each copy of an older notebook, each copy that imports
        what the package no longer has, and each record of no notebook.
    """
    folder = root / "lab"
    folder.mkdir(exist_ok=True)
    for path in notebook_paths(root):
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    remarks = [
        f"lab/{path.name} {remark}"
        for path in notebook_paths(root, "lab")
        for remark in _remarks(path, root / "notebooks" / path.name)
    ]
    _, ignored = load_records(root)
    return remarks + [f"{name}: a record of no notebook" for name in ignored]


def _remarks(path: Path, original: Path) -> Iterator[str]:
    try:
        copy = read_notebook(path)
        if not original.exists():
            yield "is a copy of a notebook that is gone"
        elif _taught(read_notebook(original)) - _taught(copy):
            yield "is a copy of an older notebook: move it away for the new"
    except CookbookError as error:
        yield f"cannot be compared: {error}"
        return
    for module, name in sorted(_imports(copy)):
        if not _is_there(module, name):
            what = f"{name} from {module}" if name else module
            yield f"imports {what}, which is no longer there"


def _taught(notebook: Notebook) -> set[str]:
    """Return the cells that teach, which no answer changes."""
    return {
        cell.source
        for cell in notebook.cells
        if cell.is_markdown or "source" in cell.metadata
    }


def _imports(notebook: Notebook) -> set[tuple[str, str]]:
    """Return what is imported from the package: (module, name)."""
    return {
        (module, name)
        for cell in notebook.cells
        for node, _ in cell.nodes
        for module, name in _named(node)
        if module.split(".")[0] == PACKAGE
    }


def _named(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what a statement imports: the module, and the name or ""."""
    if isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            yield node.module, alias.name.replace("*", "")
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ""


def _is_there(module: str, name: str) -> bool:
    """Tell whether a module has a name, without running the module."""
    spec = _spec(module)
    if spec is None or spec.origin is None:
        return False
    if not name or _spec(f"{module}.{name}") is not None:
        return True
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return name in set(_bound(tree))


def _bound(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines, assigns or imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _spec(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except ModuleNotFoundError:  # its parent is not a package
        return None


def open_lab(root: Path, arguments: Sequence[str]) -> NoReturn:
    """Become Jupyter Lab, in `lab/`, with folders that mean the same there.

    Raises:
        CookbookError: Jupyter Lab is missing.
    """
    import_extra("jupyterlab")
    env = dict(os.environ)
    for variable in ("COOKBOOK_TRACES", "COOKBOOK_RESULTS"):
        folder = folder_from(variable)
        if folder is not None:
            env[variable] = str(folder)
    command = [sys.executable, "-m", "jupyter", "lab", *OFFLINE, *arguments]
    os.chdir(root / "lab")
    os.execve(sys.executable, command, env)
