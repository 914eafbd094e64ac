"""Values of numpy, torch and Python as plain numbers, JSON and text."""

import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from llm_systems_cookbook.nb.values import (
    measurement,
    plain_value,
    shown_measure,
)

NAN, INF = math.nan, math.inf

PLAIN = {
    "none": (None, None),
    "bool": (True, True),
    "int": (2**70, 2**70),
    "float": (0.1, 0.1),
    "str": ("text", "text"),
    "list": ([1, [2.5]], [1, [2.5]]),
    "tuple": ((1, (2,)), [1, [2]]),
    "dict": ({"a": {"b": 1}}, {"a": {"b": 1}}),
    "fraction": (Fraction(1, 4), 0.25),
    "decimal": (Decimal("0.25"), 0.25),
    "np.bool": (np.bool_(True), True),
    "np.int8": (np.int8(-3), -3),
    "np.uint64": (np.uint64(2**64 - 1), 2**64 - 1),
    "np.float16": (np.float16(0.5), 0.5),
    "np.float64": (np.float64(0.1), 0.1),
    "np.longdouble": (np.longdouble(0.5), 0.5),
    "np.str": (np.str_("text"), "text"),
    "0-d array": (np.array(7), 7),
    "array": (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    "tensor scalar": (torch.tensor(7), 7),
    "bfloat16 scalar": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "requires_grad": (torch.tensor([0.5], requires_grad=True), [0.5]),
    "bool tensor": (torch.tensor([True]), [True]),
    "scalars inside": ({"a": [np.int64(1), torch.tensor(2)]}, {"a": [1, 2]}),
}


def with_types(value):
    """Return the value with the type of each part, to compare both."""
    if isinstance(value, list):
        return [with_types(item) for item in value]
    if isinstance(value, dict):
        return {key: with_types(item) for key, item in value.items()}
    return type(value), value


@pytest.mark.parametrize(("value", "plain"), PLAIN.values(), ids=PLAIN)
def test_values_become_plain_python(value, plain):
    assert with_types(plain_value(value)) == with_types(plain)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (np.complex64(1), "complex64"),
        (range(3), "range"),
        (Path("x"), "Path"),
        (len, "builtin_function_or_method"),
        (np.timedelta64(5, "s"), "timedelta64"),
        (np.datetime64("2025-01-01"), "datetime64"),
        (np.array([5], "m8[ns]"), "ndarray"),
        (np.array([5], "M8[ns]"), "ndarray"),
        ([1, {"a": object()}], "object"),
        ({(1, 2): 3}, "tuple"),
        ({None: 3}, "NoneType"),
    ],
)
def test_other_types_raise_naming_the_type(value, kind):
    with pytest.raises(TypeError, match=kind):
        plain_value(value)


def record(value, unit="s", **context):
    return measurement("name", plain_value(value), unit, plain_value(context))


def test_measurement_is_strict_json_that_says_where_a_number_is_missing():
    values = [1.0, np.array([NAN, 2.0]), Decimal("nan"), torch.tensor(-INF)]
    assert record(values, rate=INF, deep={"a": (0, -INF)}) == {
        "name": "name",
        "value": [1.0, [None, 2.0], None, None],
        "unit": "s",
        "context": {"rate": None, "deep": {"a": [0, None]}},
        "non_finite": {
            "value[1][0]": "nan",
            "value[2]": "nan",
            "value[3]": "-inf",
            "context.rate": "inf",
            "context.deep.a[1]": "-inf",
        },
    }
    assert "non_finite" not in record(1.0)


def test_numbers_may_be_keys_that_read_differently_in_json():
    by_size = {16: 1, np.int64(32): 2, 0.5: 3}
    assert record(by_size)["value"] == {"16": 1, "32": 2, "0.5": 3}
    with pytest.raises(ValueError, match=r"value.*\[16, '16'\]"):
        record({16: 1, "16": 2})


def test_integer_too_long_to_write_raises_before_it_is_saved():
    with pytest.raises(ValueError, match="digits"):
        record(10**10_000)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (5.91, "%", "5.91 %"),
        (96.9876, "%", "96.99 %"),
        (19366, "requests", "19,366 requests"),
        (123456.78, "tokens/s", "123,456.8 tokens/s"),
        (1.25e-6, "s", "1.25e-06 s"),
        (3, "", "3"),
        (True, "", "True"),
        ([1, 2], "blocks", "1, 2 blocks"),
        ({1: 4.0, 16: 0.25}, "bytes", "1: 4, 16: 0.25 bytes"),
        (NAN, "s", "nan s"),
        (-INF, "s", "-inf s"),
    ],
)
def test_measure_reads_with_four_digits_and_thousands_apart(value, unit, text):
    assert shown_measure(record(value, unit)) == text


def test_measure_shows_the_spread_it_was_given():
    given = record(1.5, "x", rounds=5, lowest=1.25, highest=2)
    assert shown_measure(given) == "1.5 x (1.25 to 2)"
