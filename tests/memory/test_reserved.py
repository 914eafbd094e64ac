"""Memory that reserves: what each policy takes, and where the slots are."""

import numpy as np
import pytest

from llm_systems_cookbook.memory import (
    BuddyRegions,
    FirstFitRegions,
    ReservedMemory,
    Usage,
)


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


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
@pytest.mark.parametrize("regions", [BuddyRegions, FirstFitRegions])
def test_narrow_lengths_do_not_overflow_in_regions(policy, regions):
    memory = ReservedMemory(1024, np.int16(400), policy, regions)
    assert memory.admit("a", np.uint8(200), np.uint8(201))
    assert memory.admit("b", np.uint8(200), np.int16(399))
    assert memory.grow("b", np.uint8(199))
    assert memory.usage().token_states == 200 + 399
    assert sum(memory.usage()) == 1024


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


def test_reserved_memory_lists_the_slots_that_are_used():
    memory = ReservedMemory(32, 8, "oracle")
    memory.admit("a", 3, 8)
    memory.admit("b", 2, 5)
    assert memory.block_ids("a") == range(0, 3)
    assert memory.block_ids("b") == range(8, 10)
    memory.grow("b")
    assert memory.block_ids("b") == range(8, 11)
    assert (memory.length("b"), memory.request_ids) == (3, {"a", "b"})
    memory.assert_consistent()


def test_assert_consistent_names_a_region_that_nobody_holds():
    memory = ReservedMemory(32, 8, "oracle")
    memory.admit("a", 3, 8)
    memory.assert_consistent()
    memory.regions.allocate(4)
    with pytest.raises(AssertionError, match=r"\[0, 8\] are in use.*\[0\]"):
        memory.assert_consistent()
