"""What every test shares: no window, no clock, no results in the checkout."""

import os
from collections.abc import Iterator

import matplotlib
import pytest
import torch
from hypothesis import settings

# Set here rather than as MPLBACKEND, which the notebooks' kernels would
# inherit and then draw nothing.
matplotlib.use("Agg")

# The notebooks' kernels start in another folder.
if os.environ.get("COOKBOOK_TRACES"):
    os.environ["COOKBOOK_TRACES"] = os.path.abspath(
        os.environ["COOKBOOK_TRACES"]
    )

# Triton reads it when it is first imported. With a GPU the kernels run there.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples on every run, and none fails for being slow.
settings.register_profile("cookbook", derandomize=True, deadline=None)
settings.load_profile("cookbook")


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
