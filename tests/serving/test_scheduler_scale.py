"""A step costs the same, however many requests wait and whoever came before.

Calls of Python functions are counted, not seconds.
"""

import sys
import tracemalloc
from types import FrameType

import pytest

from llm_systems_cookbook.memory import BlockAllocator, PagedMemory
from llm_systems_cookbook.serving import (
    LinearClock,
    Request,
    Scheduler,
    Simulator,
    replay,
)


def simulator(num_blocks: int = 4000, max_num_seqs: int = 8) -> Simulator:
    memory = PagedMemory(BlockAllocator(num_blocks, 16))
    scheduler = Scheduler(
        memory, max_num_seqs=max_num_seqs, max_num_batched_tokens=2048
    )
    return Simulator(scheduler, LinearClock(0.02, 5e-5))


def calls_of_a_step(driver: Simulator) -> int:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        driver.step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("max_num_seqs", [8, 100])
def test_a_step_does_as_much_with_100_and_10_000_waiting(max_num_seqs: int):
    counts = []
    for waiting in (100, 10_000):
        driver = simulator(max_num_seqs=max_num_seqs)
        for i in range(max_num_seqs + waiting):
            driver.add(Request(i, range(8), 1000))
        driver.step()
        driver.step()
        assert len(driver.scheduler.waiting) == waiting
        counts.append(calls_of_a_step(driver))
    assert counts[0] == counts[1]
    assert counts[0] > 10 * max_num_seqs


def test_memory_of_a_replay_grows_with_who_runs_not_with_the_trace():
    peaks = []
    for count in (400, 1600):
        requests = (
            Request(i, range(20), 30, arrival=i / 30) for i in range(count)
        )
        driver = simulator(max_num_seqs=256)
        tracemalloc.start()
        try:
            report = replay(driver, requests)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert report.requests == count
    assert peaks[1] < 1.5 * peaks[0]
