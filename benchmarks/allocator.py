"""What the guards of BlockAllocator cost, against a bare deque.

    python benchmarks/allocator.py

The bare version is a deque and a list of counts with no check at all, inline
in the loop. Both take 64 blocks and give them back, block by block, in turns.
The figure is the ratio of the two times: the median of the rounds. Taken one
by one, with a method call for each, a block costs more: a second figure.
"""

import statistics
import time
from collections import deque
from pathlib import Path

from llm_systems_cookbook.memory import BlockAllocator
from llm_systems_cookbook.nb import Session

POOL = 4096
AT_ONCE = 64
RESULTS = Path(__file__).parent / "results"


class Bare:
    """A deque and a list of counts."""

    def __init__(self) -> None:
        self.free = deque(range(POOL))
        self.counts = [0] * POOL

    def seconds(self, repeats: int) -> float:
        """Time take-and-give-back of 64 blocks, in seconds."""
        free, counts = self.free, self.counts
        start = time.perf_counter()
        for _ in range(repeats):
            block_ids = []
            for _ in range(AT_ONCE):
                block_id = free.popleft()
                counts[block_id] = 1
                block_ids.append(block_id)
            for block_id in block_ids:
                counts[block_id] -= 1
                if counts[block_id] == 0:
                    free.append(block_id)
        return time.perf_counter() - start


def seconds_at_once(allocator: BlockAllocator, repeats: int) -> float:
    """Time the same with allocate(64), in seconds."""
    start = time.perf_counter()
    for _ in range(repeats):
        for block_id in allocator.allocate(AT_ONCE):
            allocator.free(block_id)
    return time.perf_counter() - start


def seconds_one_by_one(allocator: BlockAllocator, repeats: int) -> float:
    """Time the same with 64 calls of alloc(), in seconds."""
    start = time.perf_counter()
    for _ in range(repeats):
        for block_id in [allocator.alloc() for _ in range(AT_ONCE)]:
            allocator.free(block_id)
    return time.perf_counter() - start


def ratios(rounds: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return guarded / bare of each round, sorted: at once, one by one."""
    bare, guarded = Bare(), BlockAllocator(POOL)
    at_once, one_by_one = [], []
    for _ in range(rounds):
        base = bare.seconds(repeats)
        at_once.append(seconds_at_once(guarded, repeats) / base)
        one_by_one.append(seconds_one_by_one(guarded, repeats) / base)
    return sorted(at_once), sorted(one_by_one)


def main(rounds: int = 15, repeats: int = 5_000, to: Path = RESULTS) -> None:
    """Measure, print and write the figure."""
    session = Session("allocator", to)
    at_once, one_by_one = ratios(rounds, repeats)
    for name, measured in {
        "allocate_and_free_per_block": at_once,
        "alloc_and_free_one_by_one": one_by_one,
    }.items():
        session.measure(
            name,
            statistics.median(measured),
            "x the time of a bare deque",
            rounds=rounds,
            blocks_per_round=repeats * AT_ONCE,
            lowest=measured[0],
            highest=measured[-1],
        )
    session.check(
        "guards_cost_at_most_2x", lambda: statistics.median(at_once) <= 2
    )
    session.save()


if __name__ == "__main__":
    main()
