"""numba's threads: one caller at a time, none after a fork, and OpenMP kept.

Each in a process of its own, which would hang or end without the guard.
"""

import os
import subprocess
import sys

import pytest

ATTEND = """
import ctypes, multiprocessing, threading
import torch
from numba import get_num_threads, threading_layer
from llm_systems_cookbook.attention import (
    choose_backend, paged_attention, write_kv
)
from llm_systems_cookbook.attention.cpu import threads

cache = torch.ones(4, 2, 16, 32)
tables, lengths = torch.tensor([[0, 1, 2]]), torch.tensor([40])

def attend(backend="auto"):
    return paged_attention(
        torch.ones(1, 8, 32), cache, cache, tables, lengths, backend=backend
    )

"""


def lines(code: str, layer: str = "default", seconds: int = 300) -> list[str]:
    """Return what the code prints, in a new process with two threads."""
    done = subprocess.run(
        [sys.executable, "-c", ATTEND + code],
        env=os.environ
        | {"OMP_NUM_THREADS": "2", "NUMBA_THREADING_LAYER": layer},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("layer", ["workqueue", "default"])
def test_threads_that_attend_at_once_do_not_end_the_process(layer: str):
    code = """
def often():
    for _ in range(2000):
        attend("cpu")

callers = [threading.Thread(target=often) for _ in range(4)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
print(attend("cpu").sum().item())
"""
    assert lines(code, layer) == ["256.0"]


FORKED = """
attend("cpu")

def child():
    print(choose_backend(cache), flush=True)
    print(attend().sum().item(), flush=True)
    # Large enough for torch to share it among threads.
    print(torch.ones(3000, 3000).softmax(1).sum().item() > 0, flush=True)
    fresh = torch.zeros(4, 2, 16, 32)
    row = torch.ones(1, 2, 32)
    write_kv(row, row, fresh, fresh.clone(), torch.tensor([3]))
    print(fresh.sum().item(), flush=True)
    try:
        inputs = checked_inputs(
            torch.ones(1, 8, 32), cache, cache, tables, lengths
        )
        cpu_attention(inputs, inputs.output())
        print("attended", flush=True)
    except RuntimeError as error:
        print(error, flush=True)

from llm_systems_cookbook.attention import checked_inputs
from llm_systems_cookbook.attention.cpu import cpu_attention
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(60)
print(process.exitcode, attend("cpu").sum().item())
process.kill()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_takes_another_backend_where_threads_are_openmp():
    pytest.importorskip("numba.np.ufunc.omppool")
    backend, out, torch_ran, written, error, parent = lines(FORKED, "omp")
    assert (backend, out, torch_ran) == ("gather", "256.0", "True")
    assert written == "64.0"
    assert "forked" in error
    assert "spawn" in error
    assert parent == "0 256.0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_attends_where_threads_are_numbas_own():
    backend, out, *_, error, parent = lines(FORKED, "workqueue")
    assert (backend, out, error) == ("cpu", "256.0", "attended")
    assert parent == "0 256.0"


def test_starting_the_threads_leaves_openmp_as_it_was():
    """numba 0.61 to 0.66 lets threads of OpenMP start threads of their own."""
    code = """
openmp = ctypes.CDLL(None)

def settings():
    names = "nested", "max_active_levels"
    return [
        getattr(openmp, f"omp_get_{name}")()
        for name in names
        if hasattr(openmp, f"omp_get_{name}")
    ]

def broken_start():
    for name, value in (("nested", 1), ("max_active_levels", 9)):
        if hasattr(openmp, f"omp_set_{name}"):
            getattr(openmp, f"omp_set_{name}")(value)
    torch.set_num_threads(1)
    return get_num_threads()

before = settings(), torch.get_num_threads()
threads.get_num_threads = broken_start
threads._start()
print(before == (settings(), torch.get_num_threads()), threading_layer())
"""
    ((same, _),) = [line.split() for line in lines(code)]
    assert same == "True"


def test_without_numbas_compiler_another_backend_is_chosen():
    code = """
import os, sys
assert "numba" not in sys.modules
os.environ["NUMBA_DISABLE_JIT"] = given = sys.argv[1]
import torch
from llm_systems_cookbook.attention import choose_backend, why_not
print(choose_backend(torch.ones(1)))
print(why_not("cpu", torch.ones(1)))
import numba
print(choose_backend(torch.ones(1)))
"""
    for given, expected in (("1", "gather"), ("0", "cpu"), ("", "cpu")):
        done = subprocess.run(
            [sys.executable, "-c", code, given],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        before, reason, after = done.stdout.splitlines()
        assert (before, after) == (expected, expected)
        off = "numba's compiler is off (NUMBA_DISABLE_JIT)"
        assert reason == (off if expected == "gather" else "")
