"""Differential runs: whatever the engine does, the texts are the same.

The plain run has contiguous memory for everyone, whole prompts, and samples
that compute their own prompts. Every other way to serve the same requests
must give the same tokens and the same reasons, greedy and sampled. The model
is float64: see serving_cases.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from cases.serving import (
    Run,
    Setup,
    Texts,
    Workload,
    random_workload,
    run,
    smallest_pool,
)
from cases.serving_checks import assert_simulator_agrees

from llm_systems_cookbook.attention.backends import installed
from llm_systems_cookbook.attention.gather import gather_loop_attention

WORKLOADS = 500
PARTS = 20
BLOCK_SIZE = 4
ENOUGH = 0.8


pytestmark = pytest.mark.usefixtures("one_thread")


def seeds_of(part: int) -> range:
    return range(part, WORKLOADS, PARTS)


@cache
def plain(seed: int, kind: str) -> Texts:
    """Return the texts of the plain run."""
    return run(Setup(contiguous=True), draw(seed, kind)).texts


def draw(seed: int, kind: str) -> Workload:
    if kind == "tight":
        return random_workload(seed, tight=True)
    if kind == "samples":
        return random_workload(seed, samples=4)
    if kind == "tight samples":
        return random_workload(seed, samples=3, tight=True)
    return random_workload(seed)


def compare(
    part: int, kind: str, setup_for: object, happened: object = None
) -> None:
    """Run each workload of a part; compare, and count what happened."""
    count = 0
    for seed in seeds_of(part):
        workload = draw(seed, kind)
        result = run(setup_for(seed, workload), workload)
        assert result.texts == plain(seed, kind), f"workload {seed}"
        count += happened is None or bool(happened(result))
    assert count >= ENOUGH * len(seeds_of(part)), f"only {count} happened"


def preempted(result: Run) -> int:
    counts = result.engine.scheduler.counts
    return counts.preemptions - counts.swaps


def swapped(result: Run) -> int:
    return result.engine.scheduler.counts.swaps


in_parts = pytest.mark.parametrize("part", range(PARTS))
in_some_parts = pytest.mark.parametrize("part", range(4))


@in_parts
def test_paged_is_contiguous(part: int):
    sizes = [1, 2, 4, 16]
    compare(
        part,
        "plain",
        lambda seed, _: Setup(
            num_blocks=400 // sizes[seed % 4], block_size=sizes[seed % 4]
        ),
    )


@in_parts
def test_preempted_is_unpreempted(part: int):
    def tight(seed: int, workload: Workload) -> Setup:
        pool = smallest_pool(workload, BLOCK_SIZE) + seed % 2
        return Setup(num_blocks=pool, watermark=0.05 * (seed % 3))

    compare(part, "tight", tight, preempted)


@in_parts
def test_swapped_is_recomputed(part: int):
    def tight(seed: int, workload: Workload) -> Setup:
        pool = smallest_pool(workload, BLOCK_SIZE) + seed % 2
        return Setup(num_blocks=pool, host_blocks=64, preemption="swap")

    compare(part, "tight", tight, swapped)


@in_some_parts
def test_swap_that_falls_back_to_recompute_changes_nothing(part: int):
    def tight(seed: int, workload: Workload) -> Setup:
        pool = smallest_pool(workload, BLOCK_SIZE)
        return Setup(num_blocks=pool, host_blocks=1, preemption="swap")

    compare(part, "tight", tight, preempted)


@in_parts
def test_chunked_is_unchunked(part: int):
    compare(
        part,
        "plain",
        lambda seed, _: Setup(max_num_batched_tokens=1 + seed % 5),
        lambda result: result.chunks,
    )


@in_parts
def test_forked_is_independent(part: int):
    """Forks happen; so do copies, which only a shared tail needs."""
    compare(
        part,
        "samples",
        lambda seed, _: Setup(),
        lambda result: result.forks and result.copies,
    )


@in_some_parts
def test_forked_under_pressure_is_independent(part: int):
    """Samples are preempted together, swapped together, forked again."""

    def tight(seed: int, workload: Workload) -> Setup:
        return Setup(
            num_blocks=smallest_pool(workload, BLOCK_SIZE),
            host_blocks=[0, 60, 6][seed % 3],
            preemption=["recompute", "swap", "swap"][seed % 3],
            max_num_batched_tokens=[4, 1024][seed % 2],
        )

    compare(
        part,
        "tight samples",
        tight,
        lambda r: r.engine.scheduler.counts.preemptions,
    )


@in_parts
def test_batched_is_one_at_a_time(part: int):
    for seed in seeds_of(part):
        texts: Texts = {}
        for request in draw(seed, "plain").requests:
            alone = run(Setup(), Workload([request], [0]))
            texts |= alone.texts
        assert texts == plain(seed, "plain"), f"workload {seed}"


@in_some_parts
def test_simulator_takes_the_engine_s_every_step(part: int):
    """Most runs preempt; swaps, and swaps of samples, are among them."""
    counts = []
    for seed in range(part, 100, 4):
        result = assert_simulator_agrees(seed)
        counts.append(result.engine.scheduler.counts)
    assert sum(c.preemptions > 0 for c in counts) >= ENOUGH * len(counts)
    assert sum(c.swaps > 0 for c in counts) >= 3


@pytest.mark.parametrize(
    "backend", ["reference", "cpu", gather_loop_attention]
)
def test_any_backend_gives_the_same_texts(backend: object):
    for seed in range(12):
        workload = random_workload(seed, samples=2)
        pool = smallest_pool(workload, BLOCK_SIZE) + 2
        setup = Setup(num_blocks=pool, backend=backend)
        assert (
            run(setup, workload).texts
            == run(Setup(contiguous=True), workload).texts
        )


def test_contiguous_memory_through_block_tables_gives_the_same_texts():
    """A region is a table of blocks of one token."""
    for seed in range(6):
        workload = random_workload(seed)
        setup = Setup(contiguous=True, backend="reference")
        assert (
            run(setup, workload).texts
            == run(Setup(contiguous=True), workload).texts
        )


def test_the_triton_kernels_serve_the_same_texts():
    """In float32: two workloads in which no two logits come that close."""
    if not installed("triton"):
        pytest.skip("Triton is not installed")
    for seed in (1, 2):
        workload = random_workload(seed, samples=2)
        setup = Setup(num_blocks=80, dtype=torch.float32)
        expected = run(setup, workload)
        assert (
            run(replace(setup, backend="triton"), workload).texts
            == expected.texts
        )
        assert expected.texts == plain_samples(seed)


def plain_samples(seed: int) -> Texts:
    workload = random_workload(seed, samples=2)
    return run(Setup(contiguous=True), workload).texts
