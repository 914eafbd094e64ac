"""Are two numbers, arrays or tensors close, and if not, where not?"""

import math
import numbers
from contextlib import suppress
from decimal import Decimal

import numpy as np

from llm_systems_cookbook.nb.values import is_tensor, tensor_to_numpy

_EXACT_FLOAT_LIMIT = 2**53


def tolerance(name: str, value: float) -> float:
    """Return a tolerance as a float.

    Raises:
        ValueError: it is negative, infinite or NaN: nothing could fail.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and >= 0, got {value}")
    return float(value)


def compare(
    actual: object, expected: object, rtol: float, atol: float
) -> tuple[bool, str]:
    """Return whether two values are close, and how far apart they are."""
    a, b = _numbers("actual", actual), _numbers("expected", expected)
    if a.shape != b.shape:
        return False, f"shape {a.shape}, expected {b.shape}"
    if a.size == 0:
        return False, f"nothing to compare: shape {a.shape}"
    for name, array in (("actual", a), ("expected", b)):
        if np.any(array != array):
            return False, f"NaN in {name}"
    floats = _fit_floats(a) and _fit_floats(b)
    convert = _as_floats if floats else _as_python
    shape, a, b = a.shape, convert(a), convert(b)
    if (a == b).all():
        return True, "equal"
    try:
        return _compare(a, b, shape, rtol, atol)
    except OverflowError:
        return False, "they differ, and are too large for a float"


def _compare(
    a: np.ndarray,
    b: np.ndarray,
    shape: tuple[int, ...],
    rtol: float,
    atol: float,
) -> tuple[bool, str]:
    """Compare flat arrays that came in this shape."""
    with np.errstate(all="ignore"):
        # Infinities are equal, though their difference is NaN.
        error, scale = np.where(a == b, 0, np.abs(a - b)), np.abs(b)
        # An infinite error is never close, whatever the limit.
        close = (error <= atol + rtol * scale) & (error < math.inf)
        close |= error == 0
    if close.all():
        return True, f"off by at most {float(error.max()):.2g}"
    return False, _farthest(error, scale, shape)


def _farthest(
    error: np.ndarray, scale: np.ndarray, shape: tuple[int, ...]
) -> str:
    error, scale = error.astype(np.float64), scale.astype(np.float64)
    with np.errstate(all="ignore"):
        relative = np.where(error == 0, 0, error / scale)
    relative[np.isnan(relative)] = math.inf  # infinity beside infinity
    return (
        f"largest absolute error {_largest(error, shape)}, "
        f"relative {_largest(relative, shape)}"
    )


def _largest(values: np.ndarray, shape: tuple[int, ...]) -> str:
    worst = int(np.argmax(values))
    index = [int(i) for i in np.unravel_index(worst, shape)]
    where = f" at {index}" if index else ""
    return f"{values[worst]:.3g}{where}"


def _numbers(name: str, value: object) -> np.ndarray:
    """Return a numeric array; a list's stays exact, with dtype object."""
    value = _without_tensors(value)
    # In a list that mixes them, a float would round the large integers.
    dtype = object if isinstance(value, list) else None
    array = np.asarray(value, dtype=dtype)
    if array.dtype.kind == "O":
        for item in array.flat:
            if not _is_number(item):
                raise TypeError(_not_numbers(name, item))
    elif array.dtype.kind not in "biufc":
        raise TypeError(_not_numbers(name, value))
    return array


def _without_tensors(value: object) -> object:
    """Return tensors as arrays, single numbers as such, also in lists."""
    if isinstance(value, list | tuple):
        return [_without_tensors(item) for item in value]
    if is_tensor(value):
        value = tensor_to_numpy(value)
    single = isinstance(value, np.ndarray) and value.ndim == 0
    return value[()] if single else value


def _is_number(item: object) -> bool:
    # A numpy duration calls itself a number, and would lose its unit.
    return isinstance(item, numbers.Number | np.bool_) and not isinstance(
        item, np.timedelta64
    )


def _not_numbers(name: str, value: object) -> str:
    hint = ""
    if isinstance(value, list):
        hint = " (ragged?)"
    if callable(value):
        hint = ": forgotten call?"
    return f"{name} is not numeric: {type(value).__name__}{hint}"


def _fit_floats(array: np.ndarray) -> bool:
    """Return whether float64 holds every number of an array exactly."""
    if array.dtype.kind in "fc":
        return True
    # A list may hold anything, and lists are short, so they stay exact.
    return array.dtype.kind != "O" and (
        int(array.min()) >= -_EXACT_FLOAT_LIMIT
        and int(array.max()) <= _EXACT_FLOAT_LIMIT
    )


def _as_floats(array: np.ndarray) -> np.ndarray:
    """Return a flat array of float64, complex128 or a wider type."""
    return array.ravel().astype(np.result_type(array.dtype, np.float64))


def _as_python(array: np.ndarray) -> np.ndarray:
    """Return a flat array of Python's numbers: its integers never round."""
    result = np.empty(array.size, dtype=object)
    result[:] = [_python_number(item) for item in array.ravel().tolist()]
    return result


def _python_number(item: numbers.Number) -> int | float | complex:
    if isinstance(item, numbers.Integral | np.bool_):
        return int(item)
    if isinstance(item, numbers.Real | Decimal):
        # A large integer minus a float is rounded; minus an integer it is not.
        with suppress(OverflowError, ValueError):  # infinite, or NaN
            if int(item) == item:
                return int(item)
        return float(item)
    return complex(item)
