"""Faulty versions of the taught code, and the check that notices each.

A fault replaces one piece of the package's source. The notebook's source
cells are filled from that faulty package, and its cells run until a check
fails: it must be the check named in the list. A fault that nothing notices
means that a check cannot fail.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from cases.faults import Fault, attention, memory, serving
from cases.faulty import faulty_copy, package_from
from cases.notebooks import first_failed_check

from llm_systems_cookbook.attention.backends import installed

FAULTS = memory.FAULTS + attention.FAULTS + serving.FAULTS


@pytest.fixture(autouse=True)
def figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


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
