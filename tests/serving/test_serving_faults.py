"""Faulty schedulers, memories and engines, and the check that notices each.

A fault replaces one piece of the package's source, in a copy. The check that
the list names must fail on the copy; all checks pass on the package.
"""

import importlib
import sys
from pathlib import Path

import pytest
from cases.faults.serving_checks import FAULTS, OF_NOTEBOOKS, CheckFault
from cases.faulty import faulty_package, package_from
from cases.serving_checks import CHECKS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", CHECKS)
def test_sound_code_passes(name: str):
    CHECKS[name]()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_check_notices(
    fault: CheckFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    faulty_package(fault, tmp_path)
    for name in ("cases.serving", "cases.serving_checks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with package_from(tmp_path):
        checks = importlib.import_module("cases.serving_checks")
        module = sys.modules["llm_systems_cookbook.serving.scheduler"]
        assert module.__file__.startswith(str(tmp_path))
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            checks.CHECKS[fault.check]()


def test_fault_names_are_unique():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert set(OF_NOTEBOOKS) <= set(names)
