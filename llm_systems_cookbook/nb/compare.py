"""Are two numbers, arrays or tensors close, and if not, where not?"""

import math
import numbers
from fractions import Fraction

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
    exact = _beyond_float(a) or _beyond_float(b)
    convert = _as_fractions if exact else _as_floats
    error, scale = _errors(convert(a), convert(b))
    if exact:
        rtol, atol = Fraction(rtol), Fraction(atol)
    # An infinite error is never close, though the limit may be infinite too.
    with np.errstate(all="ignore"):
        close = (error == 0) | (error < math.inf) & (
            error <= atol + rtol * scale
        )
    if close.all():
        return True, _agreement(float(error.max()))
    return False, _farthest(error, scale, a.shape)


def _agreement(largest: float) -> str:
    return f"off by at most {largest:.2g}" if largest else "equal"


def _errors(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return |a - b|, 0 where equal (infinities too), and |b|."""
    with np.errstate(all="ignore"):
        return np.where(a == b, 0, np.abs(a - b)), np.abs(b)


def _farthest(
    error: np.ndarray, scale: np.ndarray, shape: tuple[int, ...]
) -> str:
    relative = np.full_like(error, math.inf)
    relative[error == 0] = 0
    finite = (error > 0) & (error < math.inf) & (scale > 0)
    with np.errstate(all="ignore"):
        relative[finite] = error[finite] / scale[finite]
    return (
        f"largest absolute error {_largest(error, shape)}, "
        f"relative {_largest(relative, shape)}"
    )


def _largest(values: np.ndarray, shape: tuple[int, ...]) -> str:
    worst = int(np.argmax(values))
    index = [int(i) for i in np.unravel_index(worst, shape)]
    where = f" at {index}" if index else ""
    return f"{float(values[worst]):.3g}{where}"


def _numbers(name: str, value: object) -> np.ndarray:
    """Return a numeric array; a list's stays exact, with dtype object."""
    value = _without_tensors(value)
    # In a list that mixes them, a float would round the large integers.
    dtype = object if isinstance(value, list) else None
    array = np.asarray(value, dtype=dtype)
    if array.dtype.kind == "O":
        for item in array.flat:
            if not isinstance(item, numbers.Number):
                raise TypeError(_not_numbers(name, item))
    elif array.dtype.kind not in "biufc":
        raise TypeError(_not_numbers(name, value))
    return array


def _not_numbers(name: str, value: object) -> str:
    kind = type(value).__name__
    hint = ""
    if isinstance(value, list | np.ndarray):
        hint = " (ragged?)"
    if callable(value):
        hint = ": forgotten call?"
    return f"{name} is not numeric: {kind}{hint}"


def _without_tensors(value: object) -> object:
    """Return tensors as arrays, numpy scalars as numbers, also in lists."""
    if isinstance(value, list | tuple):
        return [_without_tensors(item) for item in value]
    if is_tensor(value):
        value = tensor_to_numpy(value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return _without_tensors(value.tolist())
    if isinstance(value, np.timedelta64 | np.datetime64):
        raise TypeError(f"a {type(value).__name__} is no plain number")
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        return value.item()
    return value


def _beyond_float(array: np.ndarray) -> bool:
    """Return whether an integer is too large for float64 to hold exactly."""
    if array.dtype.kind == "O":
        integers = (x for x in array.flat if isinstance(x, int))
        return any(abs(x) > _EXACT_FLOAT_LIMIT for x in integers)
    if array.dtype.kind not in "iu":
        return False
    extremes = int(array.min()), int(array.max())
    return max(map(abs, extremes)) > _EXACT_FLOAT_LIMIT


def _as_floats(array: np.ndarray) -> np.ndarray:
    """Return a flat array of float64, complex128 or a wider type."""
    if array.dtype.kind == "O":
        array = np.array(array.ravel().tolist())
    if array.dtype.kind == "O":
        array = array.astype(np.float64)
    return array.ravel().astype(np.result_type(array.dtype, np.float64))


def _as_fractions(array: np.ndarray) -> np.ndarray:
    """Return a flat array of exact fractions; infinities stay floats."""
    result = np.empty(array.size, dtype=object)
    result[:] = [_exact(x) for x in array.ravel().tolist()]
    return result


def _exact(number: int | float) -> Fraction | float:
    if isinstance(number, float) and math.isinf(number):
        return number
    return Fraction(number)
