"""No backend reads or writes past a tensor, or counts in 32 bits."""

import subprocess
import sys
from pathlib import Path

import pytest
from cases.attention import device_of

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs mprotect"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cases.edge_of_memory", *arguments],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("backend", ["gather", "cpu", "triton"])
def test_nothing_is_read_or_written_past_a_tensor(backend: str):
    if backend == "triton":
        pytest.importorskip("triton")
        if device_of(backend) != "cpu":
            pytest.skip("a GPU has no guard pages")
    done = run("guard", backend)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", ["gather", "cpu", "triton"])
def test_a_block_beyond_2_to_the_31_elements_is_found(backend: str):
    if backend == "triton":
        pytest.importorskip("triton")
    done = run("int32", backend)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("offset", "returncode"), [(0, 0), (-1, -11)])
def test_the_guard_pages_stop_a_step_too_far(offset: int, returncode: int):
    code = (
        "import ctypes, mmap, torch\n"
        "from cases import edge_of_memory\n"
        "one_page = torch.zeros(mmap.PAGESIZE, dtype=torch.uint8)\n"
        "page = edge_of_memory.guarded(one_page)\n"
        f"ctypes.string_at(page.data_ptr() + {offset}, 1)\n"
        f"ctypes.string_at(page.data_ptr() + len(page) - 1 - {offset}, 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=TESTS, capture_output=True
    )
    assert done.returncode == returncode
