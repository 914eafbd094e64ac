"""Checks of arguments and variables, and the division that rounds up."""

import operator
import os
from numbers import Real
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

# What models compute in and caches hold, by torch's names: not everything
# that reads them needs torch.
FLOATS = ("float64", "float32", "float16", "bfloat16")


def require_at_least(minimum: int, **values: SupportsIndex) -> list[int]:
    """Return the values as plain integers; refuse any below `minimum`.

    numpy's integers count, of any width. A bool counts as 0 or 1, as
    elsewhere in Python. A float is refused, also a whole one such as 2.0.

    Raises:
        TypeError: naming the first value that is not an integer.
        ValueError: naming the first value that is below `minimum`.
    """
    return [_count(minimum, name, value) for name, value in values.items()]


def _count(minimum: int, name: str, value: SupportsIndex) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if count < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {count}")
    return count


def require_number(**values: float) -> list[float]:
    """Return the values as floats; refuse text and the like.

    Raises:
        TypeError: naming the first value that is not a number.
    """
    for name, value in values.items():
        if not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {value!r}")
    return [float(value) for value in values.values()]


def require_each(minimum: int, **values: ArrayLike) -> list[np.ndarray]:
    """Return arrays of counts as int64; refuse any element below `minimum`.

    Narrow integers would overflow where counts are summed or rounded up.

    Raises:
        TypeError: naming the first array whose elements are no integers.
        ValueError: naming the first array with an element below `minimum`.
    """
    return [_counts(minimum, name, value) for name, value in values.items()]


def _counts(minimum: int, name: str, value: ArrayLike) -> np.ndarray:
    counts = np.asarray(value)
    if counts.size == 0:
        return counts.astype(np.int64)
    if counts.dtype.kind not in "biu":
        raise TypeError(f"{name} must be integers, got {counts.dtype}")
    counts = counts.astype(np.int64)
    if counts.min() < minimum:
        raise ValueError(
            f"{name} must all be >= {minimum}, got {counts.min()}"
        )
    return counts


def cdiv(a: Any, b: Any) -> Any:  # noqa: ANN401
    """Return a / b rounded up, for integers, arrays and tensors of them.

    Floor division rounds towards minus infinity, so twice negated it rounds
    up, and stays exact where a float would not.
    """
    return -(-a // b)


def folder_from(variable: str) -> Path | None:
    """Return the folder that an environment variable names; None if empty.

    `~` is a home folder also where no shell has expanded it. A relative
    folder counts from the working directory, so whoever starts a process
    elsewhere passes on the absolute path that this returns.
    """
    folder = os.environ.get(variable)
    # Unlike Path.expanduser, this leaves an unknown ~user as it is.
    return Path(os.path.expanduser(folder)).absolute() if folder else None
