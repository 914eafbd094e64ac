"""Counts: plain integers come out, anything else is named and refused."""

import numpy as np
import pytest

from llm_systems_cookbook.validate import (
    require_at_least,
    require_each,
    require_number,
)

NO_INTEGERS = [2.0, 2.5, float("nan"), float("inf"), np.float32(2), "2", None]


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_what_is_no_integer_is_refused_by_name(value):
    with pytest.raises(TypeError, match="b must be an integer, got") as error:
        require_at_least(0, a=1, b=value)
    assert repr(value) in str(error.value)


def test_a_value_below_the_minimum_is_refused_by_name():
    with pytest.raises(ValueError, match="b must be >= 2, got 1"):
        require_at_least(2, a=2, b=1)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, bool, int])
def test_integers_of_every_width_come_out_plain(kind):
    values = require_at_least(0, a=kind(1), b=kind(0))
    assert values == [1, 0]
    assert [type(value) for value in values] == [int, int]


def test_arrays_of_narrow_integers_come_out_wide():
    for kind in (np.int8, np.uint8, np.uint64, np.int64):
        (counts,) = require_each(0, lengths=np.array([3, 100], dtype=kind))
        assert (counts.dtype, counts.tolist()) == (np.int64, [3, 100])


@pytest.mark.parametrize("values", [[1, 2.5], [float("nan")], ["a"]])
def test_arrays_without_integers_are_refused_by_name(values):
    with pytest.raises(TypeError, match="lengths must be integers, got"):
        require_each(0, lengths=values)


def test_an_element_below_the_minimum_is_refused_by_name():
    with pytest.raises(ValueError, match="lengths must all be >= 1, got 0"):
        require_each(1, lengths=[1, 0, 3])


def test_no_elements_are_none_of_them_refused():
    (counts,) = require_each(1, lengths=[])
    assert (counts.dtype, counts.size) == (np.int64, 0)


@pytest.mark.parametrize("value", [3, 2.5, np.float32(0.5), np.int64(2)])
def test_numbers_come_out_as_floats(value):
    (number,) = require_number(a=value)
    assert (type(number), number) == (float, value)


@pytest.mark.parametrize("value", ["3", None, [1.0], 1j])
def test_what_is_no_number_is_refused_by_name(value):
    with pytest.raises(TypeError, match="b must be a number, got") as error:
        require_number(a=1, b=value)
    assert repr(value) in str(error.value)
