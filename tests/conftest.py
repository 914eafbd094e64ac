"""What every test shares: no window, no clock, no results in the checkout."""

import os
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
import torch
from hypothesis import settings

from llm_systems_cookbook.validate import folder_from

# Set here rather than as MPLBACKEND, which the notebooks' kernels would
# inherit and then draw nothing.
matplotlib.use("Agg")

# The notebooks' kernels start in another folder.
for variable in ("COOKBOOK_TRACES", "COOKBOOK_RESULTS"):
    if folder := folder_from(variable):
        os.environ[variable] = str(folder)

# Triton reads it when it is first imported. With a GPU the kernels run there.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples on every run, and none fails for being slow.
settings.register_profile("cookbook", derandomize=True, deadline=None)
settings.load_profile("cookbook")

HERE = Path(__file__).parent
# Files and folders that `make quick` leaves out: they run cells of notebooks,
# faulty copies, grids under Triton's interpreter, compilers or benchmarks.
SLOW = (
    "test_notebooks.py",
    "test_exercises.py",
    "test_faults.py",
    "test_benchmarks.py",
    "attention/cpu",
    "attention/triton",
    "attention/test_attention_backends.py",
    "attention/test_edge_of_memory.py",
    "attention/test_write_kv.py",
    "serving/test_serving_faults.py",
    "serving/test_serving_oracles.py",
    "tools/test_run.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, by where it lies.

    Raises:
        UsageError: a name of `SLOW` is not there.
    """
    slow = [HERE / name for name in SLOW]
    if gone := [str(path) for path in slow if not path.exists()]:
        raise pytest.UsageError(f"SLOW names what is not there: {gone}")
    for item in items:
        if any(item.path.is_relative_to(path) for path in slow):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def no_results_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test choose its own: `make test` sets one for notebooks."""
    monkeypatch.delenv("COOKBOOK_RESULTS", raising=False)
    monkeypatch.delenv("COOKBOOK_STRICT", raising=False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch use one thread: for tensors so small that more would wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
