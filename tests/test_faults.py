"""Faulty versions of the taught code, and the check that notices each.

A fault replaces one piece of the package's source. The notebook's source
cells are filled from that faulty package, and its cells run until a check
fails: it must be the check named here. A fault that nothing notices means
that a check cannot fail.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from notebook_cells import ROOT

from llm_systems_cookbook.authoring import derived_source


class Fault(NamedTuple):
    name: str
    notebook: str
    module: str
    old: str
    new: str
    check: str


ALLOCATOR = "memory/allocator.py"
TABLE = "memory/sequence_table.py"
REGIONS = "memory/reservation.py"
MANAGER = "memory/memory_manager.py"
WASTE = "memory/waste.py"

FAULTS = [
    Fault(
        "double free accepted",
        "02_block_allocator",
        ALLOCATOR,
        """        if owners == 0:
            raise self._refused(block_id)
        self._refcounts[block_id] = owners - 1
        if owners == 1:""",
        """        self._refcounts[block_id] = max(0, owners - 1)
        if owners <= 1:""",
        "double_free_is_refused",
    ),
    Fault(
        "incref on a free block accepted",
        "02_block_allocator",
        ALLOCATOR,
        """        if self.refcount(block_id) == 0:
            raise self._refused(block_id)
        self._refcounts[block_id] += 1""",
        """        self._refcounts[block_id] += 1""",
        "incref_of_a_free_block_is_refused",
    ),
    Fault(
        "negative ids reach the list from its end",
        "02_block_allocator",
        ALLOCATOR,
        """        if not 0 <= block_id < self.num_blocks:
            raise self._refused(block_id)
        owners =""",
        "        owners =",
        "ids_outside_the_pool_are_refused",
    ),
    Fault(
        "leak on a failed allocate",
        "02_block_allocator",
        ALLOCATOR,
        """        if n > len(self._free):
            raise OutOfBlocks(needed=n, free=len(self._free))
        block_ids = [self._free.popleft() for _ in range(n)]
        for block_id in block_ids:
            self._refcounts[block_id] = 1
        return block_ids""",
        """        return [self.alloc() for _ in range(n)]""",
        "error_says_needed_and_free",
    ),
    Fault(
        "leak on a failed allocate that reports well",
        "02_block_allocator",
        ALLOCATOR,
        """        if n > len(self._free):
            raise OutOfBlocks(needed=n, free=len(self._free))
        block_ids =""",
        """        if n > len(self._free):
            free = len(self._free)
            self._refcounts[self._free.popleft()] = 1
            raise OutOfBlocks(needed=n, free=free)
        block_ids =""",
        "failed_allocate_takes_nothing",
    ),
    Fault(
        "free ignores other owners",
        "02_block_allocator",
        ALLOCATOR,
        """        self._refcounts[block_id] = owners - 1
        if owners == 1:""",
        """        self._refcounts[block_id] = 0
        if owners >= 1:""",
        "shared_block_survives_one_free",
    ),
    Fault(
        "last in, first out",
        "02_block_allocator",
        ALLOCATOR,
        "            self._free.append(block_id)",
        "            self._free.appendleft(block_id)",
        "freed_block_comes_back_last",
    ),
    Fault(
        "alloc keeps the block in the free list",
        "02_block_allocator",
        ALLOCATOR,
        "[self._free.popleft() for _ in range(n)]",
        "[self._free[0] for _ in range(n)]",
        "alloc_returns_distinct_blocks",
    ),
    Fault(
        "alloc on an empty pool returns no error",
        "02_block_allocator",
        ALLOCATOR,
        """        if not self._free:
            raise OutOfBlocks(needed=1, free=0)
        block_id = self._free.popleft()""",
        """        block_id = self._free.popleft() if self._free else -1""",
        "alloc_fails_when_pool_empty",
    ),
    Fault(
        "alloc forgets its own count",
        "02_block_allocator",
        ALLOCATOR,
        """        self._refcounts[block_id] = 1
        return block_id
""",
        """        self._refcounts[block_id] += block_id != 3
        return block_id
""",
        "random_operations_match_a_model",
    ),
]


def faulty_copy(fault: Fault, folder: Path) -> Path:
    """Write a package with the fault, and the notebook filled from it."""
    package = "llm_systems_cookbook"
    shutil.copytree(
        ROOT / package,
        folder / package,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    module = folder / package / fault.module
    text = module.read_text()
    assert text.count(fault.old) == 1, "the code to replace occurs once"
    module.write_text(text.replace(fault.old, fault.new))

    notebook = nbformat.read(
        ROOT / "notebooks" / f"{fault.notebook}.ipynb", as_version=4
    )
    for cell in notebook.cells:
        if "source" in cell.metadata:
            cell.source = derived_source(folder, cell.metadata["source"])
    path = folder / f"{fault.notebook}.ipynb"
    nbformat.write(notebook, path)
    return path


@pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda f: f"{f.notebook}: {f.name}"
)
def test_a_check_of_its_notebook_notices(fault: Fault, tmp_path: Path):
    path = faulty_copy(fault, tmp_path)
    run = subprocess.run(
        [sys.executable, ROOT / "tests" / "notebook_cells.py", path],
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "COOKBOOK_RESULTS": str(tmp_path / "results"),
            "MPLBACKEND": "Agg",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1]) == fault.check


def test_fault_names_are_unique():
    names = [(fault.notebook, fault.name) for fault in FAULTS]
    assert len(set(names)) == len(names)
