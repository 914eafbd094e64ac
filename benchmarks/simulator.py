"""Replay real traffic through the scheduler, with no model behind it.

    COOKBOOK_TRACES=folder python benchmarks/simulator.py

The whole Azure 2023 conversation trace, at its own arrival times, and 100,000
requests with the lengths of Alpaca. The clock is linear: 20 ms a step, 0.05 ms
a token and 0.1 microseconds a key read; with it both loads keep up to 256
sequences running. Each run is a process of its own, so that its peak memory is
its own. Steps with 100 and with 10,000 requests waiting alternate.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from llm_systems_cookbook.memory import BlockAllocator, PagedMemory
from llm_systems_cookbook.nb import Session
from llm_systems_cookbook.nb.environment import peak_memory_mb
from llm_systems_cookbook.serving.replay import replay, requests_from
from llm_systems_cookbook.serving.request import Request
from llm_systems_cookbook.serving.scheduler import Scheduler
from llm_systems_cookbook.serving.simulator import LinearClock, Simulator
from llm_systems_cookbook.workloads import alpaca, traces

NAME = "azure-conv-2023"
BLOCK_SIZE = 16
NUM_BLOCKS = 4_000
CLOCK = LinearClock(0.02, 5e-5, 1e-7)
MANY = 100_000
RESULTS = Path(__file__).parent / "results"


def simulator() -> Simulator:
    memory = PagedMemory(BlockAllocator(NUM_BLOCKS, BLOCK_SIZE))
    scheduler = Scheduler(
        memory, max_num_seqs=256, max_num_batched_tokens=2048
    )
    return Simulator(scheduler, CLOCK)


def requests_of(name: str) -> tuple[Iterator[Request], int]:
    """Return the requests of a load, and how many they are."""
    if name == "trace":
        trace = traces.load(NAME)
        return requests_from(trace), len(trace)
    workload = alpaca(int(name), seed=0, rate=40.0)
    return requests_from(workload), len(workload)


def serve(name: str) -> dict[str, float]:
    """Replay a load; return counts, seconds and memory."""
    requests, expected = requests_of(name)
    driver = simulator()
    start = time.perf_counter()
    report = replay(driver, requests)
    seconds = time.perf_counter() - start
    driver.scheduler.assert_consistent()
    return {
        "seconds": seconds,
        "requests": report.requests,
        "expected": expected,
        "tokens": report.output_tokens,
        "steps": report.steps,
        "mean_batch": report.mean_batch,
        "preemptions": report.counts.preemptions,
        "simulated_seconds": report.seconds,
        "peak_mb": peak_memory_mb(),
        "free_blocks": driver.scheduler.memory.allocator.free_blocks,
    }


def serve_alone(name: str) -> dict[str, float]:
    """Do the same in a new process."""
    run = subprocess.run(
        [sys.executable, __file__, name],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(run.stdout)


def seconds_per_step(num_waiting: int, steps: int = 200) -> float:
    """Time steps of 64 running requests while so many others wait."""
    memory = PagedMemory(BlockAllocator(NUM_BLOCKS, BLOCK_SIZE))
    driver = Simulator(
        Scheduler(memory, max_num_seqs=64, max_num_batched_tokens=2048)
    )
    for i in range(64 + num_waiting):
        driver.add(Request(i, range(8), 10 * steps))
    for _ in range(5):
        driver.step()
    assert len(driver.scheduler.waiting) == num_waiting
    start = time.perf_counter()
    for _ in range(steps):
        driver.step()
    return (time.perf_counter() - start) / steps


def main(rounds: int = 7, to: Path = RESULTS) -> None:
    """Measure, print and write the figures."""
    session = Session("simulator", to)
    origin = {"trace": NAME, "sha256": traces.load(NAME).sha256}
    conditions = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "clock": list(vars(CLOCK).values()),
    }
    whole, many = serve_alone("trace"), serve_alone(str(MANY))
    few = serve_alone(str(MANY // 10))
    for name, seen, more in (
        ("whole_trace", whole, origin),
        ("alpaca_100000", many, {"workload": "Alpaca (fitted), 40/s"}),
    ):
        context = {k: v for k, v in seen.items() if k != "seconds"}
        session.measure(
            name, seen["seconds"], "s", **context, **conditions, **more
        )
    session.measure(
        "peak_memory_with_ten_times_the_requests",
        many["peak_mb"] / few["peak_mb"],
        "x",
        few_mb=few["peak_mb"],
        many_mb=many["peak_mb"],
    )
    pairs = [
        (seconds_per_step(100), seconds_per_step(10_000))
        for _ in range(rounds)
    ]
    ratios = sorted(many / few for few, many in pairs)
    session.measure(
        "step_with_10000_waiting",
        statistics.median(ratios),
        "x a step with 100 waiting",
        rounds=rounds,
        lowest=ratios[0],
        highest=ratios[-1],
    )
    session.check("trace_under_30_s", lambda: whole["seconds"] < 30)
    session.check("many_under_3_minutes", lambda: many["seconds"] < 180)
    session.check(
        "all_are_served",
        lambda: all(
            seen["requests"] == seen["expected"] for seen in (whole, many)
        ),
    )
    session.check(
        "memory_does_not_grow_with_the_requests",
        lambda: many["peak_mb"] < 1.2 * few["peak_mb"],
    )
    session.check("step_is_flat", lambda: statistics.median(ratios) < 1.15)
    session.check(
        "pools_are_whole_at_the_end",
        lambda: whole["free_blocks"] == many["free_blocks"] == NUM_BLOCKS,
    )
    session.save()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(serve(sys.argv[1])))
    else:
        main()
