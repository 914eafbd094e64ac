"""Workloads: when requests arrive, and how long they are.

Arrivals are Poisson or replayed; lengths are drawn from a fitted distribution
or replayed from a trace.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_systems_cookbook.validate import require_at_least, require_number

SHAREGPT_MEAN_INPUT = 161.31
SHAREGPT_MEAN_OUTPUT = 337.99
ALPACA_MEAN_INPUT = 19.31
ALPACA_MEAN_OUTPUT = 58.45
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in order of arrival, each with a prompt and an output length.

    The arrays are copied and read-only.

    Attributes:
        name: what a figure calls this workload.
        arrival_s: float64 [n], seconds, non-decreasing.
        input_len: int64 [n], prompt tokens, at least 1 each.
        output_len: int64 [n], generated tokens, at least 1 each.

    Raises:
        ValueError: no request, arrays of unequal shape, a length below 1 or
            not an integer, an arrival that is not finite or goes back in
            time.
    """

    name: str
    arrival_s: np.ndarray
    input_len: np.ndarray
    output_len: np.ndarray

    def __post_init__(self) -> None:
        arrays = {
            "arrival_s": _arrivals(self.arrival_s),
            "input_len": _lengths("input_len", self.input_len),
            "output_len": _lengths("output_len", self.output_len),
        }
        shapes = {name: array.shape for name, array in arrays.items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"arrays differ in shape: {shapes}")
        for name, array in arrays.items():
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        return len(self.arrival_s)


def _arrivals(values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.array(values, dtype=np.float64)
    _require_one_dimension("arrival_s", array)
    for index in np.flatnonzero(~np.isfinite(array)):
        raise ValueError(f"arrival_s[{index}] is {array[index]}, not finite")
    for index in np.flatnonzero(np.diff(array) < 0) + 1:
        raise ValueError(
            f"arrival_s[{index}] is {array[index]}, "
            f"before the one ahead of it, {array[index - 1]}"
        )
    return array


def _lengths(name: str, values: Sequence[int] | np.ndarray) -> np.ndarray:
    given = np.asarray(values)
    _require_one_dimension(name, given)
    if given.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got {given.dtype}")
    array = given.astype(np.int64)
    for index in np.flatnonzero(array < 1):
        raise ValueError(f"{name}[{index}] must be >= 1, got {array[index]}")
    return array


def _require_one_dimension(name: str, array: np.ndarray) -> None:
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be [n], n >= 1, got {array.shape}")


def lognormal_lengths(
    seed: int,
    n: int = 100,
    mu: float = 4.5,
    sigma: float = 0.8,
    maximum: int = 4096,
) -> np.ndarray:
    """Draw `n` lengths from a lognormal, cut to integers in [1, maximum].

    Python's own generator draws them, so a seed gives the same lengths with
    every numpy version.

    Args:
        seed: of the random generator.
        n: lengths to draw, at least 1.
        mu: mean of the logarithm of the length in tokens.
        sigma: standard deviation of that logarithm, above 0.
        maximum: the longest length, in tokens, at least 1.

    Returns:
        int64 [n].

    Raises:
        TypeError: a count that is not an integer, or another value that is
            not a number.
        ValueError: a value outside its limit, or not finite.
    """
    require_at_least(1, n=n, maximum=maximum)
    require_number(mu=mu)
    if not math.isfinite(mu):
        raise ValueError(f"mu must be finite, got {mu}")
    _require_positive(sigma=sigma)
    rng = random.Random(seed)
    draws = [rng.lognormvariate(mu, sigma) for _ in range(n)]
    return np.array([_clip(x, maximum) for x in draws], dtype=np.int64)


def _clip(length: float, maximum: int) -> int:
    return int(min(max(length, 1), maximum))


def lognormal_with_mean(
    rng: np.random.Generator, n: int, mean: float, sigma: float
) -> np.ndarray:
    """Draw `n` lengths from a lognormal with this mean.

    Rounded to the nearest integer, at least 1.

    Args:
        rng: the random generator.
        n: lengths to draw, at least 1.
        mean: of the length in tokens, above 0.
        sigma: standard deviation of the logarithm of the length, above 0.

    Returns:
        int64 [n].

    Raises:
        TypeError: a count that is not an integer, or another value that is
            not a number.
        ValueError: a value outside its limit or not finite, or a length
            drawn above MAX_TOKENS.
    """
    require_at_least(1, n=n)
    _require_positive(mean=mean, sigma=sigma)
    mu = math.log(mean) - sigma**2 / 2
    return _whole_tokens(rng.lognormal(mu, sigma, n))


def gamma_with_mean(
    rng: np.random.Generator, n: int, mean: float, std: float
) -> np.ndarray:
    """Draw `n` lengths from a gamma with this mean and standard deviation.

    Rounded to the nearest integer, at least 1.

    Args:
        rng: the random generator.
        n: lengths to draw, at least 1.
        mean: of the length in tokens, above 0.
        std: standard deviation of the length in tokens, above 0.

    Returns:
        int64 [n].

    Raises:
        TypeError: a count that is not an integer, or another value that is
            not a number.
        ValueError: a value outside its limit or not finite, or a length
            drawn above MAX_TOKENS.
    """
    require_at_least(1, n=n)
    _require_positive(mean=mean, std=std)
    return _whole_tokens(rng.gamma((mean / std) ** 2, std**2 / mean, n))


def _whole_tokens(lengths: np.ndarray) -> np.ndarray:
    longest = lengths.max()
    if longest > MAX_TOKENS:
        raise ValueError(f"drew {longest:g} tokens, limit {MAX_TOKENS}")
    return np.maximum(np.rint(lengths), 1).astype(np.int64)


def poisson_arrivals(
    rng: np.random.Generator, n: int, rate: float
) -> np.ndarray:
    """Draw `n` arrival times of a Poisson process that starts at 0.

    The gaps are exponential with mean 1 / rate; the first request comes
    after one gap, not at 0.

    Args:
        rng: the random generator.
        n: arrivals to draw, at least 1.
        rate: requests per second, above 0.

    Returns:
        float64 [n], seconds, non-decreasing.

    Raises:
        TypeError: a count that is not an integer, or another value that is
            not a number.
        ValueError: a value outside its limit, or not finite.
    """
    require_at_least(1, n=n)
    _require_positive(rate=rate)
    return np.cumsum(rng.exponential(1 / rate, n))


def sharegpt(
    n: int,
    seed: int,
    max_tokens: int = 2048,
    rate: float = 2.0,
    sigma: float = 1.2,
) -> Workload:
    """Draw a workload with the ShareGPT means of the PagedAttention paper.

    Inputs are lognormal with mean 161.31, outputs gamma with mean 337.99 and
    standard deviation 296. The paper gives the means alone (Fig. 11). The
    shapes are assumed; the output's deviation is fitted to the Orca (Max)
    bar of Fig. 2 and the input's `sigma` to the Orca (Pow2) bar. Each
    request is then cut to `max_tokens`; 2048 lowers the means by 1 to 3 %.

    Source: Kwon et al., SOSP 2023.

    Args:
        n: requests, at least 1.
        seed: of the random generator.
        max_tokens: the most input and output tokens together, at least 2.
        rate: Poisson arrivals per second (the paper's Fig. 13a has 2).
        sigma: standard deviation of the logarithm of the input length.

    Raises:
        TypeError: a count that is not an integer, or another value that is
            not a number.
        ValueError: a value outside its limit, or not finite.
    """
    require_at_least(2, max_tokens=max_tokens)
    rng = np.random.default_rng(seed)
    inputs = lognormal_with_mean(rng, n, SHAREGPT_MEAN_INPUT, sigma)
    outputs = gamma_with_mean(rng, n, SHAREGPT_MEAN_OUTPUT, std=296)
    inputs, outputs = _cut(inputs, outputs, max_tokens)
    arrivals = poisson_arrivals(rng, n, rate)
    return Workload("ShareGPT (fitted)", arrivals, inputs, outputs)


def alpaca(
    n: int, seed: int, max_tokens: int = 2048, rate: float = 30.0
) -> Workload:
    """Draw a workload with the Alpaca means of the PagedAttention paper.

    Inputs are lognormal with mean 19.31, outputs lognormal with mean 58.45
    and standard deviation 60. The paper gives the means alone (Fig. 11). The
    output's spread is fitted; the input's sigma, 0.5, is assumed.

    Source: Kwon et al., SOSP 2023.

    Args:
        n: requests, at least 1.
        seed: of the random generator.
        max_tokens: the most input and output tokens together, at least 2.
        rate: Poisson arrivals per second (the paper's Fig. 13b has 30).

    Raises:
        TypeError: a count that is not an integer, or another value that is
            not a number.
        ValueError: a value outside its limit, or not finite.
    """
    require_at_least(2, max_tokens=max_tokens)
    rng = np.random.default_rng(seed)
    inputs = lognormal_with_mean(rng, n, ALPACA_MEAN_INPUT, sigma=0.5)
    # A lognormal's sigma follows from its mean and standard deviation.
    sigma = math.sqrt(math.log(1 + (60 / ALPACA_MEAN_OUTPUT) ** 2))
    outputs = lognormal_with_mean(rng, n, ALPACA_MEAN_OUTPUT, sigma)
    inputs, outputs = _cut(inputs, outputs, max_tokens)
    arrivals = poisson_arrivals(rng, n, rate)
    return Workload("Alpaca (fitted)", arrivals, inputs, outputs)


def _cut(
    inputs: np.ndarray, outputs: np.ndarray, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Shorten the input first, so that one output token always fits."""
    inputs = np.minimum(inputs, max_tokens - 1)
    return inputs, np.minimum(outputs, max_tokens - inputs)


def _require_positive(**values: float) -> None:
    for name, value in zip(values, require_number(**values), strict=True):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be finite and > 0, got {value}")
