"""Faulty versions of the taught code, and the check that notices each.

A fault replaces one piece of the package's source. The notebook's source
cells are filled from that faulty package, and its cells run until a check
fails: it must be the check named in the list. A fault that nothing notices
means that a check cannot fail.
"""

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
from faults import FAULTS, Fault
from notebook_cells import ROOT, first_failed_check

from llm_systems_cookbook.authoring import derived_source
from llm_systems_cookbook.triton_mode import installed


@pytest.fixture(autouse=True)
def figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


def faulty_package(fault: Fault, folder: Path) -> None:
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


def faulty_copy(fault: Fault, folder: Path) -> Path:
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


@pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda f: f"{f.notebook}: {f.name}"
)
def test_a_check_of_its_notebook_notices(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if "triton" in fault.module and not installed("triton"):
        pytest.skip("Triton is not installed")
    path = faulty_copy(fault, tmp_path)
    monkeypatch.setenv("COOKBOOK_RESULTS", str(tmp_path / "results"))
    with package_from(tmp_path):
        noticed = first_failed_check(path)
        package = sys.modules["llm_systems_cookbook"].__file__
    assert package.startswith(str(tmp_path)), "the faulty package was run"
    assert noticed == fault.check


def test_fault_names_are_unique():
    names = [(fault.notebook, fault.name) for fault in FAULTS]
    assert len(set(names)) == len(names)
