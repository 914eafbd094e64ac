"""Histograms against numpy; every figure of a report by hand."""

import math
import sys

import numpy as np
import pytest

from llm_systems_cookbook.memory import Usage
from llm_systems_cookbook.serving import (
    SLO,
    Batch,
    Entry,
    Histogram,
    Report,
    Request,
    TokenOutput,
)
from llm_systems_cookbook.serving.metrics import Recorder
from llm_systems_cookbook.serving.request import Sample
from llm_systems_cookbook.serving.scheduler import Counts

# --- Histogram -------------------------------------------------------------

PERCENTS = (0, 1, 10, 25, 50, 75, 90, 99, 100)


def histogram(values):
    result = Histogram()
    for value in values:
        result.add(value)
    return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 3, 10, 100, 1000])
def test_percentiles_are_numpys_within_one_per_cent(seed, count):
    rng = np.random.default_rng(seed)
    for values in (
        rng.lognormal(-3, 2, count),
        rng.exponential(1e-4, count),
        rng.integers(0, 9, count).astype(float),
        10.0 ** rng.uniform(-300, 300, count),
    ):
        result = histogram(values.tolist())
        for percent in PERCENTS:
            exact = np.percentile(values, percent, method="inverted_cdf")
            got = result.percentile(percent)
            assert got == pytest.approx(exact, rel=0.01, abs=0)


@pytest.mark.parametrize("count", [25, 50, 100, 300])
def test_a_percentile_is_the_smallest_value_that_enough_are_at_or_below(
    count,
):
    """Its rank is a whole number and must not suffer from rounding."""
    result = histogram([2.0**i for i in range(count)])
    for percent in range(1, 101):
        rank = -(-percent * count // 100)
        assert result.percentile(percent) == pytest.approx(
            2.0 ** (rank - 1), rel=0.01
        )


def test_mean_count_total_and_extremes_are_exact():
    values = [0.25, 3.0, 0.0, 17.5]
    result = histogram(values)
    assert (result.count, result.total) == (4, 20.75)
    assert result.mean == 20.75 / 4
    assert (result.minimum, result.maximum) == (0.0, 17.5)


def test_a_single_value_is_every_percentile_exactly():
    for value in (0.0, 0.3, 1.0, 12345.678):
        result = histogram([value])
        assert {result.percentile(p) for p in PERCENTS} == {value}


def test_a_value_counted_many_times_is_as_many_values():
    once, often = Histogram(), Histogram()
    once.add(0.5, count=np.int64(7))
    once.add(9.0, count=3)
    for value in [0.5] * 7 + [9.0] * 3:
        often.add(value)
    assert vars(once) == vars(often)


def test_zero_is_a_value_of_its_own():
    result = histogram([0.0] * 9 + [1.0])
    assert result.percentile(50) == 0.0
    assert result.percentile(100) == 1.0


def test_without_values_there_is_no_percentile():
    assert math.isnan(Histogram().mean)
    assert math.isnan(Histogram().percentile(50))


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf])
def test_a_bad_value_is_refused_and_nothing_counted(value):
    result = histogram([1.0])
    before = dict(vars(result))
    with pytest.raises(ValueError, match=f"finite, >= 0, got {value}"):
        result.add(value)
    assert vars(result) == before
    assert result.percentile(100) == 1.0


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (0, ValueError, "count must be >= 1, got 0"),
        (-2, ValueError, "count must be >= 1, got -2"),
        (1.0, TypeError, "count must be an integer"),
    ],
)
def test_a_bad_count_is_refused_and_nothing_counted(count, error, message):
    result = Histogram()
    with pytest.raises(error, match=message):
        result.add(1.0, count)
    assert (result.count, result.maximum) == (0, -math.inf)


@pytest.mark.parametrize("percent", [-0.1, 100.1, math.nan])
def test_a_percent_outside_its_range_is_refused(percent):
    message = rf"percent must be in \[0, 100\], got {percent}"
    for result in (Histogram(), histogram([1.0])):
        with pytest.raises(ValueError, match=message):
            result.percentile(percent)


def test_a_histogram_stays_small():
    rng = np.random.default_rng(0)
    few, many = Histogram(), Histogram()
    for value in rng.lognormal(0, 1, 2_000).tolist():
        few.add(value)
    for value in rng.lognormal(0, 1, 40_000).tolist():
        many.add(value)
    assert len(many._bins) < 1.5 * len(few._bins)
    assert sys.getsizeof(many._bins) <= 2 * sys.getsizeof(few._bins)


# --- Recorder --------------------------------------------------------------

USAGE = Usage(5, 3, 2, 6)


def batch_of(*entries, admitted=()):
    """Make a batch of (request, start, num_tokens, samples) by hand."""
    batch = Batch(100)
    for request, start, num_tokens, produces in entries:
        samples = tuple(Sample(request, i) for i in produces)
        batch.add(
            Entry(request, start, num_tokens, Sample(request, 0), samples)
        )
    batch.admitted = list(admitted)
    return batch


def token(request_id, sample=0, reason=None):
    return TokenOutput(request_id, 9, reason is not None, reason, sample)


def failure(request_id, sample=0):
    return TokenOutput(request_id, None, True, "error", sample, "broken")


def exactly(histogram, *values):
    """Tell whether these are the values, as far as a histogram knows."""
    expected = Histogram()
    for value in values:
        expected.add(value)
    assert histogram.count == expected.count
    assert histogram.total == pytest.approx(expected.total)
    assert histogram._bins == expected._bins
    assert histogram.minimum == expected.minimum
    assert histogram.maximum == expected.maximum


def test_every_figure_of_a_small_run_by_hand():
    """Two requests; a waits a second for its first step, b four.

    Powers of two and sums of them, so that nothing is rounded.
    """
    a = Request("a", range(4), 3, arrival=1.0)
    b = Request("b", range(2), 2, arrival=2.0)
    recorder = Recorder(16, SLO(ttft=4.0, inter_token=1.5))
    recorder.arrived(a)
    recorder.idle(2.0)
    recorder.step(
        2.0, 2.0, batch_of((a, 0, 4, [0]), admitted=[a]), USAGE, [token("a")]
    )
    recorder.arrived(b)
    recorder.step(
        4.0,
        1.0,
        batch_of((a, 4, 1, [0]), (b, 0, 1, []), admitted=[b]),
        Usage(8, 2, 0, 6),
        [token("a")],
    )
    recorder.step(
        5.0,
        4.0,
        batch_of((a, 5, 1, [0]), (b, 1, 1, [0])),
        Usage(8, 2, 0, 6),
        [token("a", reason="length"), token("b")],
    )
    recorder.step(
        9.0, 1.0, batch_of((b, 2, 1, [0])), USAGE, [token("b", 0, "stop")]
    )
    report = recorder.report
    exactly(report.queueing, 1.0, 2.0)
    exactly(report.ttft, 3.0, 7.0)
    exactly(report.inter_token, 1.0, 4.0, 1.0)
    exactly(report.latency, 8.0, 8.0)
    assert (report.steps, report.seconds, report.busy_seconds) == (4, 10, 8)
    assert (report.requests, report.failed, report.refused) == (2, 0, 0)
    assert report.output_tokens == 5
    assert report.throughput == 0.5
    # 2 s x 1 + 1 s x 2 + 4 s x 2 + 1 s x 1
    assert report.batch_seconds == 13.0
    assert report.mean_batch == 13 / 8
    assert report.slot_seconds == [
        5 * 3 + 8 * 5,
        3 * 3 + 2 * 5,
        2 * 3,
        6 * 8,
    ]
    assert report.percent() == {
        "token_states": 100 * 55 / 128,
        "reserved": 100 * 19 / 128,
        "internal": 100 * 6 / 128,
        "external": 100 * 48 / 128,
    }
    # a's mean gap is 2.5 s, too long; b's first token is 7 s late.
    assert (report.good, report.goodput) == (0, 0.0)


def test_computed_tokens_are_those_of_every_entry():
    a, b = Request("a", range(1), 3), Request("b", range(4), 3)
    recorder = Recorder(16)
    recorder.arrived(a)
    recorder.arrived(b)
    recorder.step(
        0, 1, batch_of((a, 0, 1, [0]), (b, 0, 3, [])), USAGE, [token("a")]
    )
    assert recorder.report.computed_tokens == 4
    recorder.step(1, 1, batch_of((b, 0, 4, [0])), USAGE, [token("b")])
    assert recorder.report.computed_tokens == 8, "b's prompt was lost"
    assert recorder.report.output_tokens == 2


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (SLO(3.0, 2.0), 1),  # both are met to the digit
        (SLO(2.9, 2.0), 0),
        (SLO(3.0, 1.9), 0),
        (SLO(0.0, 0.0), 0),
    ],
)
def test_a_good_request_keeps_both_limits(slo, good):
    a = Request("a", range(4), 3, arrival=1.0)
    recorder = Recorder(16, slo)
    recorder.arrived(a)
    step = batch_of((a, 0, 4, [0]))
    recorder.step(1, 3, step, USAGE, [token("a")])
    recorder.step(4, 1, step, USAGE, [token("a")])
    recorder.step(5, 3, step, USAGE, [token("a", reason="length")])
    assert recorder.report.good == good
    assert recorder.report.goodput == good / 7


def test_a_single_token_has_no_gap_to_fail_by():
    a = Request("a", range(4), 1)
    recorder = Recorder(16, SLO(3.0, 0.0))
    recorder.arrived(a)
    step = batch_of((a, 0, 4, [0]))
    recorder.step(0, 3, step, USAGE, [token("a", reason="length")])
    assert recorder.report.good == 1
    assert recorder.report.inter_token.count == 0


def test_gaps_are_between_tokens_of_one_sample():
    a = Request("a", range(4), 3, num_samples=2)
    recorder = Recorder(16, SLO(9.0, 9.0))
    recorder.arrived(a)
    both = batch_of((a, 0, 4, [0, 1]))
    recorder.step(0, 2, both, USAGE, [token("a"), token("a", 1)])
    recorder.step(2, 1, both, USAGE, [token("a")])
    recorder.step(3, 4, both, USAGE, [token("a", 1, "stop")])
    assert recorder.report.requests == 0, "a sample is left"
    recorder.step(7, 1, both, USAGE, [token("a", 0, "length")])
    report = recorder.report
    exactly(report.ttft, 2.0)
    exactly(report.inter_token, 1.0, 5.0, 5.0)
    exactly(report.latency, 8.0)
    assert (report.requests, report.good, report.output_tokens) == (1, 1, 5)


def test_a_failed_request_is_counted_once_and_not_as_finished():
    a = Request("a", range(4), 3)
    recorder = Recorder(16, SLO(9.0, 9.0))
    recorder.arrived(a)
    recorder.step(0, 1, batch_of((a, 0, 4, [0])), USAGE, [token("a")])
    recorder.step(1, 1, batch_of((a, 4, 1, [0])), USAGE, [failure("a")])
    report = recorder.report
    assert (report.failed, report.requests, report.good) == (1, 0, 0)
    assert (report.output_tokens, report.latency.count) == (1, 0)


@pytest.mark.parametrize("finished_before", [False, True])
def test_a_failure_of_several_samples_is_one_failed_request(finished_before):
    a = Request("a", range(4), 3, num_samples=3)
    recorder = Recorder(16)
    recorder.arrived(a)
    step = batch_of((a, 0, 4, [0, 1, 2]))
    first = [token("a", i) for i in range(3)]
    left = [0, 1, 2]
    if finished_before:
        first[1] = token("a", 1, "stop")
        left = [0, 2]
    recorder.step(0, 1, step, USAGE, first)
    recorder.step(1, 1, step, USAGE, [failure("a", i) for i in left])
    assert recorder.report.failed == 1
    assert recorder.report.requests == 0
    assert recorder.report.output_tokens == 3


def test_a_recorder_forgets_what_has_ended():
    recorder = Recorder(16)
    for i in range(20):
        request = Request(i, range(4), 1)
        recorder.arrived(request)
        output = failure(i) if i % 3 == 0 else token(i, reason="length")
        recorder.step(
            i, i + 1, batch_of((request, 0, 4, [0])), USAGE, [output]
        )
        assert not recorder._open
    assert (recorder.report.requests, recorder.report.failed) == (13, 7)


# --- Report ----------------------------------------------------------------


def test_goodput_needs_a_stated_objective():
    with pytest.raises(ValueError, match="no SLO was stated"):
        _ = Report(16).goodput
    report = Report(16, SLO(1, 1), seconds=4.0, good=6)
    assert report.goodput == 1.5


def test_an_empty_report_has_no_ratios():
    report = Report(16, SLO(1, 1))
    for value in (
        report.throughput,
        report.goodput,
        report.mean_batch,
        report.preemptions_per_request,
        *report.percent().values(),
    ):
        assert math.isnan(value)


def test_reports_share_nothing():
    one, other = Report(16), Report(16)
    one.ttft.add(1.0)
    one.slot_seconds[0] += 1
    one.counts.finished += 1
    assert other.ttft.count == 0
    assert other.slot_seconds == [0.0] * 4
    assert other.counts == Counts()


def test_as_dict_has_the_figures_of_a_comparison():
    report = Report(
        10,
        seconds=4.0,
        busy_seconds=2.0,
        requests=2,
        output_tokens=6,
        batch_seconds=3.0,
        slot_seconds=[2.0, 4.0, 6.0, 8.0],
        counts=Counts(preemptions=3, recomputed_tokens=11),
    )
    report.ttft = histogram([1.0] * 90 + [2.0] * 9 + [4.0])
    figures = report.as_dict()
    assert figures["requests"] == 2
    assert figures["throughput"] == 1.5
    assert figures["mean_batch"] == 1.5
    assert figures["kv_occupancy"] == 10.0
    assert figures["preemptions_per_request"] == 1.5
    assert figures["recomputed_tokens"] == 11
    assert figures["ttft_p50"] == figures["ttft_p90"]
    assert figures["ttft_p99"] == pytest.approx(2.0, rel=0.01)
    names = ("ttft", "inter_token", "latency", "queueing")
    for name in names:
        for percent in (50, 90, 99):
            assert f"{name}_p{percent}" in figures
    assert math.isnan(figures["latency_p50"])
    assert len(figures) == 6 + 3 * len(names)


def test_a_rank_that_is_a_whole_number_is_not_rounded_up():
    histogram = Histogram()
    histogram.add(1.0, 161)
    histogram.add(2.0, 839)
    assert histogram.percentile(16.1) < 1.02
    assert histogram.percentile(16.2) > 1.9


def test_an_output_of_a_stranger_is_refused_by_name():
    recorder = Recorder(16)
    step = batch_of((Request("a", range(4), 1), 0, 4, [0]))
    with pytest.raises(ValueError, match="'x' is not one of the replay's"):
        recorder.step(0, 1, step, USAGE, [token("x")])


@pytest.mark.parametrize(
    ("slo", "error", "message"),
    [
        (SLO(math.nan, 1.0), ValueError, "ttft of an SLO .* got nan"),
        (SLO(1.0, -1.0), ValueError, "inter_token of an SLO .* got -1.0"),
        (SLO("1", 1.0), TypeError, "ttft must be a number, got '1'"),
    ],
)
def test_an_slo_that_nothing_could_keep_or_miss_is_refused(
    slo, error, message
):
    with pytest.raises(error, match=message):
        Recorder(16, slo)
    Recorder(16, SLO(math.inf, 0.0))
