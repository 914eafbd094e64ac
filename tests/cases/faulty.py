"""A copy of the package with one fault, and importing from it."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from cases.notebooks import ROOT

from llm_systems_cookbook.tools.sync import derived_source


def faulty_package(fault, folder: Path) -> None:
    """Write a package with the fault."""
    package = "llm_systems_cookbook"
    shutil.copytree(
        ROOT / package,
        folder / package,
        # What numba has compiled comes along: compiling it again is slow.
        ignore=shutil.ignore_patterns("*.pyc"),
    )
    module = folder / package / fault.module
    text = module.read_text()
    assert text.count(fault.old) == 1, "the code to replace occurs once"
    module.write_text(text.replace(fault.old, fault.new))


def faulty_copy(fault, folder: Path) -> Path:
    """Write a package with the fault, and the notebook filled from it."""
    faulty_package(fault, folder)
    notebook = nbformat.read(
        ROOT / "notebooks" / f"{fault.notebook}.ipynb", as_version=4
    )
    for cell in notebook.cells:
        if "source" in cell.metadata:
            cell.source = derived_source(folder, cell.metadata["source"])
    path = folder / f"{fault.notebook}.ipynb"
    nbformat.write(notebook, path)
    return path


@contextmanager
def package_from(folder: Path) -> Iterator[None]:
    """Import the package from another folder, then forget that again."""
    package = "llm_systems_cookbook"
    ours = {n: m for n, m in sys.modules.items() if n.startswith(package)}
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [n for n in sys.modules if n.startswith(package)]:
            del sys.modules[name]
        sys.modules.update(ours)
