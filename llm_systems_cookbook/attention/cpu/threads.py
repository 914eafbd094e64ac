"""Run a parallel kernel on numba's threads, which other libraries share.

Starting them changes settings of OpenMP that torch reads, too. Not every
layer of threads can be used by two Python threads at once, and a forked
process has none of them.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator

import torch
from numba import get_num_threads, set_num_threads, threading_layer

from llm_systems_cookbook.attention import backends

FORKED = (
    "this process was forked after numba had started its threads, which a "
    "fork does not copy: start processes by spawn"
)
# The layer with which numba runs threads, "omp", "tbb" or "workqueue"; "" as
# long as they have not started.
_layer = ""
_is_forked = False
# A thread may take it twice, because a signal's handler may attend, too.
_one_at_a_time = threading.RLock()


def run(kernel: Callable[..., None], threads: int, *arguments: object) -> None:
    """Call a parallel kernel with so many threads working.

    Raises:
        RuntimeError: in a process that was forked after OpenMP's threads had
            started, where the kernel would wait for them for ever.
    """
    if _is_forked:
        raise RuntimeError(FORKED)
    if not _layer:
        _start()
    # What is right already is not set again, because each call costs
    # microseconds, and a layer of a small step takes only a few.
    before = get_num_threads()
    if before != threads:
        set_num_threads(threads)
    try:
        if _layer == "workqueue":  # a second caller would end the process
            with _one_at_a_time:
                kernel(*arguments)
        else:
            kernel(*arguments)
    finally:
        if before != threads:
            set_num_threads(before)


def _start() -> None:
    """Let numba start its threads, and put back what that changes."""
    global _layer
    with _one_at_a_time:
        wanted = torch.get_num_threads()
        with _openmp_as_before():
            get_num_threads()
        if torch.get_num_threads() != wanted:
            # Where both use OpenMP, numba starts its threads by telling
            # OpenMP how many there are, and torch believes it.
            torch.set_num_threads(wanted)
        _layer = threading_layer()


@contextlib.contextmanager
def _openmp_as_before() -> Iterator[None]:
    """Keep OpenMP's rule on threads that start threads of their own.

    numba 0.61 to 0.66 allows it, 0.67 does not. Where torch uses the same
    library, each thread of its attention then starts as many again, and that
    takes many times as long.
    """
    settings = [
        (library, name, getattr(library, f"omp_get_{name}")())
        for library in _openmp_libraries()
        for name in ("nested", "max_active_levels")
        if hasattr(library, f"omp_get_{name}")
    ]
    yield
    for library, name, value in settings:
        getattr(library, f"omp_set_{name}")(value)


def _openmp_libraries() -> list[ctypes.CDLL]:
    """Return where numba finds OpenMP: what is loaded, then its own."""
    libraries = []
    for name in (None, _numbas_openmp()):
        with contextlib.suppress(OSError, TypeError, ImportError):
            libraries.append(ctypes.CDLL(name))
    return libraries


def _numbas_openmp() -> str:
    from numba.np.ufunc import omppool

    return omppool.__file__


def _after_fork() -> None:
    global _is_forked, _one_at_a_time
    # A thread that does not exist in the child may have held the lock.
    _one_at_a_time = threading.RLock()
    if _layer == "omp":
        _is_forked = True
        backends.rule_out("cpu", FORKED)
        # torch may share the threads that do not exist here. With one thread
        # it needs none of them; its own data loaders do the same.
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
