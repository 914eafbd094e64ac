"""Comparing numbers: what is close, what is not, and what is said of it."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from llm_systems_cookbook.nb.compare import compare, tolerance

NAN, INF = math.nan, math.inf
BIG = 2**53

CLOSE = {
    "numbers": (1.0, 1.0 + 1e-9),
    "int and float": (3, 3.0),
    "nested lists": ([[1, 2], (3, 4)], np.array([[1, 2], [3, 4]])),
    "float32": (np.float32(0.1), 0.1),
    "complex": (1 + 2j, 1 + 2j),
    "complex beside an integer": ([1 + 2j, 3], [1 + 2j, 3]),
    "booleans": (np.array([True, False]), [True, np.bool_(False)]),
    "infinities": ([INF, -INF, 1], [INF, -INF, 1]),
    "large beside infinity": ([BIG * 2, INF], [BIG * 2, INF]),
    "fraction": (Fraction(1, 4), Decimal("0.25")),
    "long double": ([np.longdouble(0.5), BIG * 2], [0.5, BIG * 2]),
    "list of arrays": ([np.ones(2), np.zeros(2)], [[1, 1], [0, 0]]),
    "list of tensors": (
        [torch.tensor(1.0, requires_grad=True), torch.tensor(2)],
        [1, 2],
    ),
    "requires grad": (torch.tensor([0.5], requires_grad=True), [0.5]),
    "conjugate": (torch.tensor([1 + 2j]).conj(), [1 - 2j]),
    "0-d array": (np.array(BIG + 1), torch.tensor(BIG + 1)),
}


@pytest.mark.parametrize("rtol", [1e-6, 0])
@pytest.mark.parametrize(("a", "b"), CLOSE.values(), ids=CLOSE)
def test_close_values_pass(a, b, rtol):
    atol = 0 if rtol else 1e-6  # equal infinities are close at any tolerance
    assert compare(a, b, rtol, atol)[0]
    assert compare(b, a, rtol, atol)[0]


FAR = {
    "numbers": (1.0, 1.0 + 1e-5),
    "one element": ([1, 2, 3], [1, 2, 3.1]),
    "sign": (-1.0, 1.0),
    "complex": (1 + 2j, 1 - 2j),
    "infinite actual": ([1, INF], [1, 2]),
    "infinite expected": ([1, 2], [1, INF]),
    "infinite beside large": ([BIG * 2], [INF]),
    "opposite infinities": (INF, -INF),
    "small against zero": (1e-30, 0.0),
    "requires grad": (torch.tensor([0.5], requires_grad=True), [0.6]),
}


@pytest.mark.parametrize(("a", "b"), FAR.values(), ids=FAR)
def test_distant_values_fail(a, b):
    assert not compare(a, b, 1e-6, 0)[0]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int8,
        torch.int64,
        torch.bool,
    ],
)
def test_tensor_of_any_dtype_is_compared(dtype):
    ones = torch.ones(2, 3).to(dtype)
    assert compare(ones, np.ones((2, 3)), 0, 0) == (True, "equal")
    assert not compare(ones, np.full((2, 3), 2.0), 0, 0)[0]


WIDE = {
    "int and int": (BIG + 1, BIG),
    "int and float": (BIG + 1, float(BIG)),
    "beyond 64 bits": (2**90 + 1, 2**90),
    "mixed list": ([BIG + 1, 0.5], [BIG, 0.5]),
    "int64 arrays": (np.array([BIG + 1]), np.array([BIG])),
    "int64 and float64": (np.array([BIG + 1]), np.array([float(BIG)])),
    "negative": (np.array([-BIG - 1]), np.array([-BIG])),
    "signed and unsigned": (np.uint64(2**63 + 1), 2**63),
    "tensor": (torch.tensor([BIG + 1]), [BIG]),
    "scalars in a list": ([np.int64(BIG + 1)], [np.int64(BIG)]),
    "object array": (
        np.array([np.int64(BIG + 1)], dtype=object),
        np.array([BIG]),
    ),
}


@pytest.mark.parametrize(("a", "b"), WIDE.values(), ids=WIDE)
def test_large_integers_compare_exactly(a, b):
    assert compare(a, a, 0, 0) == (True, "equal")
    assert not compare(a, b, 0, 0)[0]
    assert not compare(b, a, 0, 0)[0]
    assert compare(a, b, 0, 1) == (True, "off by at most 1")


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ([-(2**63)], [2**63 - 1], "error 1.84e+19 at [0]"),
        (np.uint8(1), np.uint8(255), "error 254"),
        (np.int8(-100), np.int8(100), "error 200"),
    ],
)
def test_difference_of_integers_does_not_wrap(a, b, said):
    for cast in (np.asarray, torch.as_tensor):
        close, message = compare(cast(a), cast(b), 0, 10)
        assert not close
        assert said in message


def test_message_has_the_largest_errors_and_where():
    assert compare([[1, 2.5], [100, 0.5]], [[1, 2], [101, 0.25]], 0, 0) == (
        False,
        "largest absolute error 1 at [1, 0], relative 1 at [1, 1]",
    )
    assert compare(3.0, 2.0, 0, 0) == (
        False,
        "largest absolute error 1, relative 0.5",
    )
    assert compare([BIG * 2, 1, 2], [BIG * 2, 0, INF], 0, 0) == (
        False,
        "largest absolute error inf at [2], relative inf at [1]",
    )
    assert compare([10, 20.5], [10, 20], 0, 1) == (True, "off by at most 0.5")


def test_tolerances_add_up_and_are_relative_to_the_expected_value():
    assert compare(10.9, 10.0, 0.1, 0)[0]
    assert not compare(10.0, 9.0, 0.105, 0)[0]
    assert compare(12.0, 10.0, 0.1, 1.0)[0]
    assert not compare(12.1, 10.0, 0.1, 1.0)[0]


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ([1, 2], [1, 2, 3], "shape (2,), expected (3,)"),
        (1, [1], "shape (), expected (1,)"),
        (np.ones((2, 1)), np.ones((1, 2)), "shape (2, 1), expected (1, 2)"),
        ([NAN], [NAN], "NaN in actual"),
        ([1, 2], [1, NAN], "NaN in expected"),
        (torch.tensor(NAN, dtype=torch.bfloat16), 1, "NaN in actual"),
        ([2**60, NAN], [2**60, NAN], "NaN in actual"),
        ([], [], "nothing to compare: shape (0,)"),
        (np.ones((0, 3)), np.ones((0, 3)), "nothing to compare: shape (0, 3)"),
    ],
)
def test_nothing_to_compare_is_not_close(a, b, said):
    assert compare(a, b, 1, 1) == (False, said)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ("1", 1, "actual is not numeric: str"),
        (1, None, "expected is not numeric: NoneType"),
        ([1, "2"], [1, 2], "actual is not numeric: str"),
        ([[1], [1, 2]], [1, 2], r"actual is not numeric: list \(ragged\?\)"),
        ({1: 2}, 1, "actual is not numeric: dict"),
        (abs, [1, 2], "actual is not numeric: .*: forgotten call?"),
        (np.array(["a"]), 1, "actual is not numeric: ndarray"),
        (np.array(["2025-01-01"], "M8[D]"), 1, "actual is not numeric"),
        (np.array(5, "m8[ns]"), 5, "actual is not numeric: timedelta64"),
        ([np.timedelta64(5, "s")], [5], "actual is not numeric: timedelta64"),
    ],
)
def test_what_is_no_number_is_refused_and_named(a, b, said):
    with pytest.raises(TypeError, match=said):
        compare(a, b, 1e-6, 0)


@pytest.mark.parametrize("value", [-1e-9, NAN, INF])
def test_tolerance_that_is_negative_or_not_finite_raises(value):
    with pytest.raises(ValueError, match=f"rtol .* got {value}"):
        tolerance("rtol", value)


@pytest.mark.parametrize("kind", [int, Decimal, Fraction])
@pytest.mark.parametrize("large", [2**53, 2**64, 10**400])
def test_whole_numbers_of_any_size_and_kind_compare_exactly(kind, large):
    same = compare(kind(large + 1), large + 1, 0.0, 0.0)
    assert same == (True, "equal")
    differs, message = compare([kind(large + 1)], [large], 0.0, 0.0)
    assert not differs
    assert message
