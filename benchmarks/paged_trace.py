"""The whole Azure conversation trace through PagedMemory.

    python benchmarks/paged_trace.py

Serves all 19,366 requests by the rule "one iteration, one token", with a pool
of 8 times the trace's longest request. Each run is a process of its own, so
that its peak memory is its own. Runs of 1,000 and of 19,000 requests alternate
to see whether the time per token grows with the trace.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from llm_systems_cookbook.memory import (
    BlockAllocator,
    PagedMemory,
    time_weighted,
)
from llm_systems_cookbook.nb import Session
from llm_systems_cookbook.nb.environment import peak_memory_mb
from llm_systems_cookbook.workloads import traces

NAME = "azure-conv-2023"
BLOCK_SIZE = 16
RESULTS = Path(__file__).parent / "results"


def serve(num_requests: int | None = None) -> dict[str, float]:
    """Serve the first requests of the trace; return counts and seconds.

    The pool is the same for every number of requests.
    """
    trace = traces.load(NAME)
    longest = int((trace.input_len + trace.output_len).max())
    if num_requests is not None:
        trace = trace.first(num_requests)
    num_blocks = 8 * longest // BLOCK_SIZE
    memory = PagedMemory(BlockAllocator(num_blocks, BLOCK_SIZE))
    lengths = zip(
        trace.input_len.tolist(), trace.output_len.tolist(), strict=True
    )
    start = time.perf_counter()
    seen = time_weighted(memory, lengths)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "tokens": seen.batch_steps,
        "finished": seen.finished,
        "preemptions": seen.preemptions,
        "free_blocks": memory.allocator.free_blocks,
        "num_blocks": num_blocks,
        "peak_mb": peak_memory_mb(),
    }


def serve_alone(num_requests: int | None = None) -> dict[str, float]:
    """Do the same in a new process."""
    argument = "all" if num_requests is None else str(num_requests)
    run = subprocess.run(
        [sys.executable, __file__, argument],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(run.stdout)


def main(
    rounds: int = 5, short: int = 1_000, long: int = 19_000, to: Path = RESULTS
) -> None:
    """Measure, print and write the figures."""
    session = Session("paged_trace", to)
    whole = serve_alone()
    origin = {"trace": NAME, "sha256": traces.load(NAME).sha256}
    session.measure(
        "whole_trace",
        whole["seconds"],
        "s",
        requests=whole["finished"],
        tokens=whole["tokens"],
        preemptions=whole["preemptions"],
        num_blocks=whole["num_blocks"],
        block_size=BLOCK_SIZE,
        **origin,
    )
    session.measure("peak_memory", whole["peak_mb"], "MB", **origin)
    pairs = [(serve_alone(short), serve_alone(long)) for _ in range(rounds)]
    growth = sorted(
        (b["seconds"] / b["tokens"]) / (a["seconds"] / a["tokens"])
        for a, b in pairs
    )
    session.measure(
        "time_per_token",
        statistics.median(growth),
        f"x from {short:,} to {long:,} requests",
        rounds=rounds,
        lowest=growth[0],
        highest=growth[-1],
        **origin,
    )
    session.check("under_60_seconds", lambda: whole["seconds"] < 60)
    session.check(
        "time_per_token_is_flat", lambda: statistics.median(growth) < 1.25
    )
    session.check("under_300_mb", lambda: whole["peak_mb"] < 300)
    session.check(
        "pool_is_whole_at_the_end",
        lambda: whole["free_blocks"] == whole["num_blocks"],
    )
    session.save()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        some = None if sys.argv[1] == "all" else int(sys.argv[1])
        print(json.dumps(serve(some)))
    else:
        main()
