"""Arrivals and lengths: the published figures, the means, bad input."""

import numpy as np
import pytest

from llm_systems_cookbook.workloads import generated as workload
from llm_systems_cookbook.workloads.generated import Workload
from llm_systems_cookbook.workloads.traces import Trace

BLOCK = 16
NAN, INF = float("nan"), float("inf")


def waste(lengths, reserved):
    return 1 - lengths.sum() / np.sum(reserved)


def paged_waste(lengths):
    return waste(lengths, -(-lengths // BLOCK) * BLOCK)


def rng(seed=0):
    return np.random.default_rng(seed)


def small_trace():
    return Trace("t", [0.0, 1.0, 1.0], [5, 6, 7], [1, 2, 3])


def test_lognormal_lengths_reproduce_the_published_waste():
    lengths = workload.lognormal_lengths(seed=0)
    reserved = np.full(100, 4096)
    assert round(100 * waste(lengths, reserved), 2) == 96.99
    assert round(100 * paged_waste(lengths), 3) == 5.914


def test_lognormal_lengths_break_the_false_bound_for_222_of_1000_seeds():
    draws = [workload.lognormal_lengths(seed) for seed in range(1000)]
    assert sum(paged_waste(d) > 1 / BLOCK for d in draws) == 222


def test_lognormal_lengths_are_clipped_at_both_ends():
    low = workload.lognormal_lengths(1, n=50, mu=-5.0, sigma=0.1)
    high = workload.lognormal_lengths(1, n=50, mu=9.0, sigma=0.1, maximum=64)
    assert low.tolist() == [1] * 50
    assert high.tolist() == [64] * 50
    assert low.dtype == np.int64


def test_lognormal_with_mean_has_that_mean():
    lengths = workload.lognormal_with_mean(rng(), 50_000, 161.31, 0.9)
    assert lengths.mean() == pytest.approx(161.31, rel=0.03)
    assert np.log(lengths).std() == pytest.approx(0.9, rel=0.03)
    assert lengths.dtype == np.int64


def test_gamma_with_mean_has_that_mean_and_deviation():
    lengths = workload.gamma_with_mean(rng(), 50_000, 337.99, 296)
    assert lengths.mean() == pytest.approx(337.99, rel=0.02)
    assert lengths.std() == pytest.approx(296, rel=0.03)
    assert lengths.dtype == np.int64


def test_short_lengths_are_at_least_one_token():
    assert workload.gamma_with_mean(rng(), 1000, 0.5, 1.0).min() == 1
    assert workload.lognormal_with_mean(rng(), 1000, 0.5, 1.0).min() == 1


def test_poisson_arrivals_have_the_rate_and_exponential_gaps():
    arrivals = workload.poisson_arrivals(rng(), 50_000, rate=2.0)
    gaps = np.diff(arrivals, prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.5, rel=0.02)
    assert gaps.std() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize(
    ("make", "mean_input", "mean_output", "rate"),
    [
        (workload.sharegpt, 161.31, 337.99, 2.0),
        (workload.alpaca, 19.31, 58.45, 30.0),
    ],
)
def test_fitted_workload_has_the_papers_means(
    make, mean_input, mean_output, rate
):
    made = make(30_000, seed=0)
    assert made.input_len.mean() == pytest.approx(mean_input, rel=0.03)
    assert made.output_len.mean() == pytest.approx(mean_output, rel=0.03)
    assert 30_000 / made.arrival_s[-1] == pytest.approx(rate, rel=0.03)
    assert "fitted" in made.name


def test_sharegpt_output_and_alpaca_output_have_the_fitted_deviation():
    share = workload.sharegpt(30_000, seed=0)
    alpaca = workload.alpaca(30_000, seed=0)
    assert share.output_len.std() == pytest.approx(296, rel=0.05)
    assert alpaca.output_len.std() == pytest.approx(60, rel=0.05)


@pytest.mark.parametrize("make", [workload.sharegpt, workload.alpaca])
@pytest.mark.parametrize("max_tokens", [2, 3, 40, 2048])
def test_fitted_workload_stays_within_max_tokens(make, max_tokens):
    made = make(5000, seed=3, max_tokens=max_tokens)
    assert (made.input_len + made.output_len).max() <= max_tokens
    assert made.input_len.min() >= 1
    assert made.output_len.min() >= 1


@pytest.mark.parametrize("make", [workload.sharegpt, workload.alpaca])
def test_fitted_workload_depends_on_the_seed_alone(make):
    one, same, other = make(200, 1), make(200, 1), make(200, 2)
    for field in ("arrival_s", "input_len", "output_len"):
        assert np.array_equal(getattr(one, field), getattr(same, field))
        assert not np.array_equal(getattr(one, field), getattr(other, field))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: workload.lognormal_lengths(0, n=0), "n .* 0"),
        (lambda: workload.lognormal_lengths(0, maximum=0), "maximum .* 0"),
        (lambda: workload.lognormal_lengths(0, mu=NAN), "mu .* nan"),
        (lambda: workload.lognormal_lengths(0, mu=INF), "mu .* inf"),
        (lambda: workload.lognormal_lengths(0, sigma=-1), "sigma .* -1"),
        (lambda: workload.lognormal_with_mean(rng(), 0, 5, 1), "n .* 0"),
        (lambda: workload.lognormal_with_mean(rng(), 1, 0, 1), "mean .* 0"),
        (lambda: workload.lognormal_with_mean(rng(), 1, 5, NAN), "sigma"),
        (lambda: workload.lognormal_with_mean(rng(), 1, 1e300, 1), "limit"),
        (lambda: workload.gamma_with_mean(rng(), -1, 5, 1), "n .* -1"),
        (lambda: workload.gamma_with_mean(rng(), 1, NAN, 1), "mean .* nan"),
        (lambda: workload.gamma_with_mean(rng(), 1, 5, 0), "std .* 0"),
        (lambda: workload.poisson_arrivals(rng(), 0, 1.0), "n .* 0"),
        (lambda: workload.poisson_arrivals(rng(), 1, 0), "rate .* 0"),
        (lambda: workload.poisson_arrivals(rng(), 1, -2.0), r"rate .* -2\.0"),
        (lambda: workload.poisson_arrivals(rng(), 1, INF), "rate .* inf"),
        (lambda: workload.sharegpt(0, 0), "n .* 0"),
        (lambda: workload.sharegpt(1, 0, max_tokens=1), "max_tokens .* 1"),
        (lambda: workload.sharegpt(1, 0, rate=0), "rate .* 0"),
        (lambda: workload.alpaca(0, 0), "n .* 0"),
        (lambda: workload.alpaca(1, 0, max_tokens=1), "max_tokens .* 1"),
        (lambda: workload.alpaca(1, 0, rate=NAN), "rate .* nan"),
    ],
)
def test_bad_argument_raises_and_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_argument_of_another_type_raises_and_is_named():
    with pytest.raises(TypeError, match=r"n must be an integer, got 1\.5"):
        workload.lognormal_lengths(0, n=1.5)
    with pytest.raises(TypeError, match="max_tokens must be an integer"):
        workload.alpaca(1, 0, max_tokens=40.0)
    with pytest.raises(TypeError, match="rate must be a number, got '2'"):
        workload.poisson_arrivals(rng(), 1, "2")
    with pytest.raises(TypeError, match="mu must be a number, got None"):
        workload.lognormal_lengths(0, mu=None)


@pytest.mark.parametrize(
    ("arrivals", "inputs", "outputs", "words"),
    [
        ([0.0, 1.0], [1], [1, 1], "differ in shape"),
        ([], [], [], "n >= 1"),
        ([[0.0]], [[1]], [[1]], "n >= 1"),
        ([0.0, NAN], [1, 1], [1, 1], r"arrival_s\[1\] is nan"),
        ([0.0, float("inf")], [1, 1], [1, 1], r"arrival_s\[1\] is inf"),
        ([0.0, 2.0, 1.0], [1] * 3, [1] * 3, r"arrival_s\[2\] is 1\.0"),
        ([0.0], [0], [1], r"input_len\[0\] must be >= 1, got 0"),
        ([0.0], [1], [-3], r"output_len\[0\] must be >= 1, got -3"),
        ([0.0], [1.5], [1], "input_len must hold integers"),
        ([0.0], [1], [True], "output_len must hold integers"),
    ],
)
def test_workload_refuses_bad_arrays(arrivals, inputs, outputs, words):
    with pytest.raises(ValueError, match=words):
        Workload("w", arrivals, inputs, outputs)


def test_workload_copies_its_arrays_and_makes_them_read_only():
    lengths = np.array([3, 4])
    made = Workload("w", [0.0, 1.0], lengths, lengths)
    lengths[0] = 9
    assert made.input_len.tolist() == [3, 4]
    with pytest.raises(ValueError, match="read-only"):
        made.output_len[0] = 5


def test_a_trace_is_a_workload():
    whole = small_trace()
    part = whole.first(2)
    assert isinstance(whole, Workload)
    assert (len(whole), len(part)) == (3, 2)
    assert part.arrival_s.tolist() == [0.0, 1.0]
    assert part.input_len.tolist() == [5, 6]
    assert part.output_len.tolist() == [1, 2]
