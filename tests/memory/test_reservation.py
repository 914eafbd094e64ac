"""Regions: integers of any width, damage that is named, and what is told."""

import pickle

import numpy as np
import pytest

from llm_systems_cookbook.memory import (
    BuddyRegions,
    FirstFitRegions,
    NoFreeRegion,
)


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
