"""Four memories, one protocol: room, refusals, and where the slots are."""

import pickle
import random

import numpy as np
import pytest

from llm_systems_cookbook.memory import (
    BlockAllocator,
    BuddyRegions,
    FirstFitRegions,
    NoFreeRegion,
    PagedMemory,
    ReservedMemory,
    Usage,
)


def paged(num_blocks=4, block_size=4):
    return PagedMemory(BlockAllocator(num_blocks, block_size))


def every_memory():
    return {
        "max": ReservedMemory(64, 16),
        "pow2": ReservedMemory(64, 16, "pow2"),
        "oracle": ReservedMemory(64, 16, "oracle"),
        "first_fit": ReservedMemory(64, 16, "oracle", FirstFitRegions),
        "paged": paged(16, 4),
    }


names = pytest.mark.parametrize("name", every_memory())


@names
def test_usage_adds_up_to_the_capacity_and_release_empties_it(name):
    memory = every_memory()[name]
    rng = random.Random(1)
    running, refused = {}, 0
    for step in range(2_000):
        if running and rng.random() < 0.5:
            request_id = rng.choice(sorted(running))
            held, final = running[request_id]
            if held == final:
                memory.release(request_id)
                del running[request_id]
            elif memory.grow(request_id):
                running[request_id] = held + 1, final
            else:
                refused += 1
        else:
            prompt = rng.randint(1, 12)
            final = rng.randint(prompt, 16)
            if memory.admit(step, prompt, final):
                running[step] = prompt, final
            else:
                refused += 1
        usage = memory.usage()
        assert sum(usage) == memory.capacity == 64
        assert min(usage) >= 0
        assert usage.token_states == sum(h for h, _ in running.values())
    assert refused > 100
    for request_id in running:
        memory.release(request_id)
    assert memory.usage() == Usage(0, 0, 0, 64)


@names
def test_refused_admission_changes_nothing(name):
    memory = every_memory()[name]
    admitted = 0
    while memory.admit(admitted, 12, 16):
        admitted += 1
    assert admitted == (5 if name == "paged" else 4)
    before = memory.usage()
    assert not memory.admit("late", 12, 16)
    assert memory.usage() == before
    with pytest.raises(KeyError, match="late"):
        memory.release("late")


@names
def test_ids_in_use_and_unknown_ids_are_refused(name):
    memory = every_memory()[name]
    memory.admit("a", 3, 9)
    before = memory.usage()
    with pytest.raises(ValueError, match="'a' is already in memory"):
        memory.admit("a", 3, 9)
    for call in (memory.grow, memory.release):
        with pytest.raises(KeyError, match="'b' is not in memory"):
            call("b")
    assert memory.usage() == before


@names
def test_lengths_out_of_order_are_refused(name):
    memory = every_memory()[name]
    for prompt, final in [(0, 4), (-1, 4), (5, 4)]:
        with pytest.raises(ValueError, match="must be >="):
            memory.admit("a", prompt, final)
    memory.admit("a", 3, 9)
    with pytest.raises(ValueError, match="must be >= 0, got -1"):
        memory.grow("a", -1)
    with pytest.raises(ValueError, match="num_tokens must be >= 1"):
        memory.fits(0)
    assert memory.usage().token_states == 3


@pytest.mark.parametrize(
    ("policy", "prompt", "final", "slots"),
    [
        ("max", 3, 5, 16),
        ("max", 3, 16, 16),
        ("oracle", 3, 5, 5),
        # final 5 = prompt 3 + output 3 - 1; the output rounds up to 4.
        ("pow2", 3, 5, 3 + 4),
        ("pow2", 3, 3, 3 + 1),
        ("pow2", 3, 6, 3 + 4),
        ("pow2", 3, 7, 3 + 8),
        # 10 + 16 would pass the maximum.
        ("pow2", 10, 16, 16),
    ],
)
def test_policies_reserve_what_they_say(policy, prompt, final, slots):
    memory = ReservedMemory(64, 16, policy)
    memory.admit("a", prompt, final)
    assert memory.usage() == Usage(
        prompt, final - prompt, slots - final, 64 - slots
    )


def test_a_reservation_without_a_final_length_counts_as_reserved():
    memory = ReservedMemory(64, 16)
    memory.admit("a", 3)
    assert memory.usage() == Usage(3, 13, 0, 48)


@pytest.mark.parametrize("policy", ["pow2", "oracle"])
def test_policies_that_need_a_final_length_ask_for_it(policy):
    memory = ReservedMemory(64, 16, policy)
    with pytest.raises(ValueError, match=f"{policy} needs final_tokens"):
        memory.admit("a", 3)
    assert memory.usage().external == 64


def test_growth_past_a_reservation_is_an_error_and_changes_nothing():
    memory = ReservedMemory(64, 16, "oracle")
    memory.admit("a", 3, 5)
    assert memory.grow("a", 2)
    with pytest.raises(ValueError, match="6 tokens in a reservation of 5"):
        memory.grow("a")
    assert memory.usage().token_states == 5


def test_a_request_above_the_maximum_never_fits_and_is_refused():
    memory = ReservedMemory(64, 16)
    assert memory.fits(16)
    assert not memory.fits(17)
    with pytest.raises(ValueError, match="17 tokens, maximum 16"):
        memory.admit("a", 3, 17)


def test_fits_knows_the_largest_region_of_an_empty_pool():
    # A pool of 12 is a buddy region of 8 and one of 4.
    assert ReservedMemory(12, 12, "oracle").fits(8)
    assert not ReservedMemory(12, 12, "oracle").fits(9)
    assert not ReservedMemory(12, 12, "max").fits(1)
    assert ReservedMemory(12, 12, "max", FirstFitRegions).fits(1)


@pytest.mark.parametrize("num_slots", [7, 12, 64, 100])
@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
@pytest.mark.parametrize("regions", [BuddyRegions, FirstFitRegions])
def test_what_fits_is_admitted_and_grows_to_its_end(
    num_slots, policy, regions
):
    memory = ReservedMemory(num_slots, 40, policy, regions)
    fitting = [final for final in range(1, 45) if memory.fits(final)]
    for final in fitting:
        for prompt in range(1, final + 1):
            assert memory.admit("alone", prompt, final)
            assert memory.grow("alone", final - prompt)
            memory.release("alone")
    assert fitting == list(range(1, len(fitting) + 1))


def test_unknown_policy_and_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="got 'min'"):
        ReservedMemory(64, 16, "min")
    with pytest.raises(ValueError, match="max_tokens must be >= 1"):
        ReservedMemory(64, 0)


def test_buddy_rounding_counts_as_external():
    memory = ReservedMemory(64, 64, "oracle")
    memory.admit("a", 5, 33)
    assert memory.regions.free_slots == 0
    assert memory.usage() == Usage(5, 28, 0, 31)


def test_paged_usage_splits_the_tail_by_the_final_length():
    memory = paged()
    memory.admit("ends in this block", 5, 6)
    assert memory.usage() == Usage(5, 1, 2, 8)
    memory.release("ends in this block")
    memory.admit("goes on", 5, 60)
    assert memory.usage() == Usage(5, 3, 0, 8)
    memory.release("goes on")
    memory.admit("unknown", 5)
    assert memory.usage() == Usage(5, 3, 0, 8)


def test_paged_growth_is_all_or_nothing():
    memory = paged(num_blocks=2)
    memory.admit("a", 3)
    assert not memory.grow("a", 6)
    assert memory.usage().token_states == 3
    assert memory.grow("a", 5)
    assert not memory.grow("a")
    assert memory.allocator.free_blocks == 0
    memory.release("a")
    assert memory.allocator.free_blocks == 2


def test_paged_fits_counts_whole_blocks():
    memory = paged(num_blocks=2, block_size=4)
    assert memory.fits(8)
    assert not memory.fits(9)


def test_a_promise_is_an_allocation():
    memory = paged(num_blocks=3)
    assert memory.admit("a", 8)
    assert memory.admit("b", 1)
    assert not memory.admit("c", 1)
    assert not memory.grow("a")
    assert memory.grow("b", 3)


def test_the_table_of_a_request_is_readable():
    memory = paged()
    memory.admit("a", 5)
    assert memory.table("a").length == 5
    assert len(memory.table("a").block_ids) == 2
    with pytest.raises(KeyError, match="'b'"):
        memory.table("b")


@names
def test_lengths_of_numpy_are_lengths(name):
    memory = every_memory()[name]
    assert memory.admit("a", np.int64(3), np.int64(9))
    assert memory.grow("a", np.int64(6))
    assert memory.usage().token_states == 9


@names
def test_growth_by_no_token_changes_nothing(name):
    memory = every_memory()[name]
    memory.admit("a", 4, 9)
    before = memory.usage()
    assert memory.grow("a", 0)
    assert memory.usage() == before


def test_growth_by_no_token_works_in_a_full_pool():
    memory = paged(num_blocks=1)
    memory.admit("a", 4)
    assert memory.grow("a", 0)
    assert not memory.grow("a", 1)


@names
@pytest.mark.parametrize("n", [1.0, 2.5, float("nan")])
def test_lengths_that_are_no_integers_are_refused(name, n):
    memory = every_memory()[name]
    memory.admit("a", 3, 9)
    before = memory.usage()
    for call in (
        lambda: memory.admit("b", n, 9),
        lambda: memory.admit("b", 1, n),
        lambda: memory.grow("a", n),
        lambda: memory.fits(n),
    ):
        with pytest.raises(TypeError, match=f"must be an integer, got {n}"):
            call()
    assert memory.usage() == before


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
@pytest.mark.parametrize("regions", [BuddyRegions, FirstFitRegions])
def test_narrow_lengths_do_not_overflow_in_regions(policy, regions):
    memory = ReservedMemory(1024, np.int16(400), policy, regions)
    assert memory.admit("a", np.uint8(200), np.uint8(201))
    assert memory.admit("b", np.uint8(200), np.int16(399))
    assert memory.grow("b", np.uint8(199))
    assert memory.usage().token_states == 200 + 399
    assert sum(memory.usage()) == 1024


def test_narrow_lengths_do_not_overflow_in_pages():
    memory = paged(num_blocks=256, block_size=4)
    assert memory.admit("a", np.uint8(200), np.int16(600))
    assert memory.grow("a", np.uint8(200))
    assert memory.grow("a", np.uint8(1))
    assert memory.usage() == Usage(401, 3, 0, 620)


@pytest.mark.parametrize("regions", [BuddyRegions, FirstFitRegions])
def test_regions_take_narrow_integers_and_refuse_floats(regions):
    pool = regions(np.int16(1024))
    first, second = (pool.allocate(np.uint8(200)) for _ in range(2))
    for call in (pool.allocate, pool.free, pool.ever_fits, regions):
        with pytest.raises(TypeError, match=r"must be an integer, got 0\.0"):
            call(0.0)
    pool.assert_consistent()
    pool.free(np.int16(second))
    pool.free(np.uint8(first))
    pool.assert_consistent()
    assert (pool.free_slots, pool.largest_hole) == (1024, 1024)


def first_fit_with(holes, used):
    pool = FirstFitRegions(16)
    pool._holes, pool._used = holes, used
    return pool


def buddies_with(free, used):
    pool = BuddyRegions(16)
    pool._free, pool._used = free, used
    return pool


@pytest.mark.parametrize(
    ("pool", "complaint"),
    [
        (first_fit_with([(4, 12)], {}), "slot 0: next region is 12 slots"),
        (first_fit_with([(4, 8)], {0: 4}), "regions end at 12, not 16"),
        (first_fit_with([(0, 16)], {4: 4}), "slot 16: next region is 4"),
        (first_fit_with([(0, 0), (0, 16)], {}), "next region is 0 slots"),
        (first_fit_with([(0, 4), (4, 12)], {}), "not merged"),
        (buddies_with({8: {0}}, {}), "regions end at 8, not 16"),
        (buddies_with({8: {8}}, {}), "slot 0: next region is 8 slots at 8"),
        (buddies_with({8: {8}}, {0: 4}), "slot 4: next region is 8"),
        (buddies_with({16: {0}}, {8: 8}), "slot 16: next region is 8"),
        (buddies_with({8: {0, 8}}, {}), "free buddies of 8 slots"),
    ],
)
def test_assert_consistent_names_corrupted_regions(pool, complaint):
    with pytest.raises(AssertionError, match=complaint):
        pool.assert_consistent()


@pytest.mark.parametrize("regions", [BuddyRegions, FirstFitRegions])
def test_no_free_region_says_what_was_needed_and_survives_pickling(regions):
    pool = regions(16)
    pool.allocate(8)
    with pytest.raises(NoFreeRegion) as error:
        pool.allocate(16)
    told = pickle.loads(pickle.dumps(error.value))
    assert (told.needed, told.free, told.largest) == (16, 8, 8)
    assert str(told) == str(error.value)
    assert str(told) == "needed a region of 16 slots; 8 free, largest hole 8"


@pytest.mark.parametrize("slots", range(1, 20))
def test_pow2_promises_room_for_any_prompt_of_a_length(slots):
    """Without the prompt, the least favourable one decides."""
    for final in range(1, slots + 1):
        memory = ReservedMemory(slots, 100, "pow2", FirstFitRegions)
        outcomes = []
        for prompt in range(1, final + 1):
            outcomes.append(memory.admit("a", prompt, final))
            fits = memory.fits(final, shared_tokens=prompt)
            assert fits == outcomes[-1]
            if outcomes[-1]:
                memory.release("a")
        assert memory.fits(final) == all(outcomes)
