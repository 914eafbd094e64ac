"""Waste: exact small cases, the bound, and the loop against a hand trace."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_systems_cookbook.memory import (
    BlockAllocator,
    FirstFitRegions,
    PagedMemory,
    ReservedMemory,
    Usage,
    expected_waste,
    simulate_workload,
    snapshot_waste,
    time_weighted,
    waste_bound,
    whole_blocks,
)
from llm_systems_cookbook.workloads.generated import lognormal_lengths

lengths_of = st.lists(st.integers(1, 5_000), min_size=1, max_size=50)


def paged(num_blocks, block_size=4):
    return PagedMemory(BlockAllocator(num_blocks, block_size))


def test_seed_0_reproduces_the_published_figures():
    waste = simulate_workload(seed=0)
    assert round(100 * waste.reserve_max, 2) == 96.99
    assert round(100 * waste.paged, 2) == 5.91


def test_the_denominator_is_what_is_reserved():
    assert snapshot_waste([10, 30], [5, 5]) == 0.75
    assert snapshot_waste([16], [16]) == 0


@pytest.mark.parametrize(
    ("reserved", "lengths"),
    [([], []), ([4], [5]), ([4], [-1]), ([4, 4], [4]), ([0], [0])],
)
def test_snapshots_that_cannot_be_are_refused(reserved, lengths):
    with pytest.raises(ValueError, match=r"shapes|lengths must"):
        snapshot_waste(reserved, lengths)


def test_one_token_wastes_fifteen_of_sixteen_slots():
    assert snapshot_waste(whole_blocks([1], 16), [1]) == 15 / 16
    assert waste_bound([1], 16) == 15 / 16


@given(lengths_of, st.integers(1, 256))
def test_the_bound_holds(lengths, block_size):
    waste = snapshot_waste(whole_blocks(lengths, block_size), lengths)
    assert waste <= waste_bound(lengths, block_size) + 1e-12


@given(lengths_of, st.integers(2, 256))
def test_the_bound_is_tight_only_at_one_more_than_a_multiple(lengths, size):
    tight = [n // size * size + 1 for n in lengths]
    waste = snapshot_waste(whole_blocks(tight, size), tight)
    assert waste == pytest.approx(waste_bound(tight, size), abs=1e-12)
    tight[0] += 1
    waste = snapshot_waste(whole_blocks(tight, size), tight)
    assert waste < waste_bound(tight, size) - 1e-9


def test_one_over_block_size_is_no_bound():
    above = [simulate_workload(seed).paged > 1 / 16 for seed in range(1000)]
    assert sum(above) == 222


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
def test_expected_waste_is_that_of_uniform_tails(block_size):
    lengths = np.arange(320, 640)  # every tail equally often
    measured = snapshot_waste(whole_blocks(lengths, block_size), lengths)
    expected = expected_waste(float(lengths.mean()), block_size)
    assert measured == pytest.approx(expected, rel=1e-12)


def test_block_size_below_one_is_refused():
    for call in (
        lambda: whole_blocks([1], 0),
        lambda: waste_bound([1], 0),
        lambda: expected_waste(1.0, 0),
    ):
        with pytest.raises(ValueError, match="block_size must be >= 1"):
            call()


def test_one_request_takes_one_step_per_output_token():
    seen = time_weighted(paged(4), [(3, 4)])
    # Held at each step: 3, 4, 5, 6; the last sampled token is not written.
    assert seen.steps == 4
    assert seen.slot_steps.token_states == 3 + 4 + 5 + 6
    # One block of 4, then two; final length 6.
    assert seen.slot_steps == Usage(18, 1 + 0 + 1 + 0, 2 + 2, 64 - 24)
    assert (seen.finished, seen.preemptions) == (1, 0)


def test_the_newest_is_preempted_and_keeps_its_progress():
    # Two blocks of 2. "0" holds 2 tokens of 4, "1" holds 2 of 3.
    # Step 1: "0" needs a block, "1" gives its own up. Steps 2 and 3 serve
    # "0" alone; "1" comes back with its 2 tokens in step 4.
    seen = time_weighted(paged(2, 2), [(2, 3), (2, 2)])
    assert (seen.preemptions, seen.recomputed_tokens) == (1, 2)
    assert (seen.finished, seen.steps) == (2, 3 + 2)
    assert seen.batch_steps == 2 + 1 + 1 + 1 + 1
    assert seen.slot_steps.token_states == 4 + 3 + 4 + 2 + 3


def test_preempted_requests_resume_before_new_ones_in_their_old_order():
    order = []

    class Recorder(PagedMemory):
        def admit(self, request_id, num_tokens, final_tokens=None):
            admitted = super().admit(request_id, num_tokens, final_tokens)
            if admitted:
                order.append(request_id)
            return admitted

    memory = Recorder(BlockAllocator(3, 2))
    time_weighted(memory, [(2, 5), (2, 2), (2, 2), (2, 2)])
    assert order[:4] == [0, 1, 2, 1]
    assert order[-2:] == [2, 3]
    assert memory.allocator.free_blocks == 3


def test_an_endless_stream_stops_after_num_steps():
    seen = time_weighted(paged(8), itertools.repeat((3, 5)), num_steps=37)
    assert seen.steps == 37
    assert sum(seen.slot_steps) == 37 * 32


def test_a_request_that_never_fits_is_named():
    with pytest.raises(ValueError, match="request 1: 9 tokens can never fit"):
        time_weighted(paged(2), [(4, 1), (4, 6)])


def test_a_refused_request_with_nothing_running_is_an_error_not_a_hang():
    class Unwilling(PagedMemory):
        def admit(self, request_id, num_tokens, final_tokens=None):
            return False

    memory = Unwilling(BlockAllocator(2, 4))
    with pytest.raises(RuntimeError, match=r"nothing runs, and .* refused"):
        time_weighted(memory, [(4, 1)])


def test_an_empty_queue_is_served_in_no_step():
    seen = time_weighted(paged(2), [])
    assert (seen.steps, seen.finished) == (0, 0)


def test_an_empty_output_is_refused():
    with pytest.raises(ValueError, match="output must be >= 1, got 0"):
        time_weighted(paged(2), [(4, 0)])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "make",
    [
        lambda: ReservedMemory(256, 64),
        lambda: ReservedMemory(256, 64, "pow2"),
        lambda: ReservedMemory(256, 64, "oracle"),
        lambda: ReservedMemory(256, 64, "oracle", FirstFitRegions),
        lambda: paged(64),
        lambda: paged(16),
        lambda: paged(256, 1),
    ],
)
def test_every_request_is_served_and_memory_is_whole_at_the_end(make, seed):
    rng = np.random.default_rng(seed)
    lengths = [tuple(p) for p in rng.integers(1, 30, (60, 2)).tolist()]
    memory = make()
    seen = time_weighted(memory, lengths)
    assert seen.finished == 60
    # Each output token is one step of one request, preempted or not.
    assert seen.batch_steps == (
        sum(output for _, output in lengths) + seen.preemptions
    )
    assert memory.usage() == Usage(0, 0, 0, memory.capacity)
    assert sum(seen.percent().values()) == pytest.approx(100)


def test_lengths_are_the_seeded_lognormal_ones():
    lengths = lognormal_lengths(0)
    waste = snapshot_waste(np.full(100, 4096), lengths)
    assert waste == simulate_workload(0).reserve_max


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="num_steps must be >= 0, got -1"):
        time_weighted(paged(2), itertools.repeat((3, 5)), num_steps=-1)


@pytest.mark.parametrize(
    "make", [lambda: ReservedMemory(64, 16), lambda: paged(16)]
)
def test_a_memory_in_use_is_refused_and_left_alone(make):
    memory = make()
    memory.admit("someone else's", 8)
    before = memory.usage()
    with pytest.raises(ValueError, match="the memory is in use: Usage"):
        time_weighted(memory, [(4, 1)])
    assert memory.usage() == before


def test_an_average_over_no_steps_is_refused():
    seen = time_weighted(paged(2), [])
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        seen.percent()
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        _ = seen.mean_batch


@pytest.mark.parametrize("lengths", [[], [0], [5, 0], [-3]])
def test_a_bound_needs_sequences_that_hold_a_token(lengths):
    with pytest.raises(ValueError, match="must"):
        waste_bound(lengths, 16)


@pytest.mark.parametrize("mean", [0, 0.5, -3, float("nan")])
def test_an_expectation_needs_a_mean_of_a_token(mean):
    with pytest.raises(ValueError, match="mean_length must be >= 1, got"):
        expected_waste(mean, 16)


def test_lengths_that_are_no_integers_are_refused():
    for call in (
        lambda: whole_blocks([1.5], 16),
        lambda: whole_blocks([1], 16.0),
        lambda: waste_bound([1.5], 16),
        lambda: waste_bound([1], 16.0),
        lambda: expected_waste(1.5, 16.0),
        lambda: snapshot_waste([4], [1.5]),
        lambda: snapshot_waste([float("nan")], [1]),
        lambda: time_weighted(paged(2), [(1.5, 2)]),
        lambda: time_weighted(paged(2), [(1, 2)], num_steps=1.5),
    ):
        with pytest.raises(TypeError, match="must be"):
            call()


def test_negative_lengths_have_no_blocks():
    with pytest.raises(ValueError, match="lengths must all be >= 0, got -5"):
        whole_blocks([3, -5], 16)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint32])
def test_narrow_lengths_do_not_overflow(kind):
    lengths = np.array([1, 100, 127], dtype=kind)
    wide = lengths.astype(np.int64)
    assert whole_blocks(lengths, 16).tolist() == [16, 112, 128]
    assert whole_blocks(lengths, kind(100)).tolist() == [100, 100, 200]
    assert waste_bound(lengths, kind(16)) == waste_bound(wide, 16)
    assert snapshot_waste(whole_blocks(wide, 16), lengths) == 1 - 228 / 256
    pairs = list(zip(lengths, lengths, strict=True))
    assert (
        time_weighted(paged(200), pairs).slot_steps
        == time_weighted(
            paged(200), zip(wide.tolist(), wide.tolist(), strict=True)
        ).slot_steps
    )
