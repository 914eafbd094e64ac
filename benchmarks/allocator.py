"""What the guards of BlockAllocator cost, against a bare deque.

    python benchmarks/allocator.py

The bare version is a deque and a list of counts with no check at all, inline
in the loop. Both take 64 blocks and give them back, block by block, in turns.
The figure is the ratio of the two times: the median of the rounds.
"""

import statistics
import time
from collections import deque
from pathlib import Path

from llm_systems_cookbook.memory import BlockAllocator
from llm_systems_cookbook.nb import Notebook

POOL = 4096
AT_ONCE = 64
RESULTS = Path(__file__).parent / "results"


def bare_seconds(repeats: int) -> float:
    """Time take-and-give-back of 64 blocks with no guard, in seconds."""
    free, counts = deque(range(POOL)), [0] * POOL
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


def guarded_seconds(repeats: int) -> float:
    """Time the same with BlockAllocator, in seconds."""
    allocator = BlockAllocator(POOL)
    start = time.perf_counter()
    for _ in range(repeats):
        for block_id in allocator.allocate(AT_ONCE):
            allocator.free(block_id)
    return time.perf_counter() - start


def ratios(rounds: int, repeats: int) -> list[float]:
    """Return guarded / bare of each round, sorted."""
    pairs = [
        (bare_seconds(repeats), guarded_seconds(repeats))
        for _ in range(rounds)
    ]
    return sorted(guarded / bare for bare, guarded in pairs)


def main(rounds: int = 15, repeats: int = 5_000, to: Path = RESULTS) -> None:
    """Measure, print and write the figure."""
    session = Notebook("allocator", to)
    measured = ratios(rounds, repeats)
    session.measure(
        "allocate_and_free_per_block",
        statistics.median(measured),
        "x the time of a bare deque",
        rounds=rounds,
        blocks_per_round=repeats * AT_ONCE,
        lowest=measured[0],
        highest=measured[-1],
    )
    session.check(
        "guards_cost_at_most_2x", lambda: statistics.median(measured) <= 2
    )
    session.save()


if __name__ == "__main__":
    main()
