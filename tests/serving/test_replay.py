"""A replay: arrivals on a clock that only steps move, and what it measured."""

import math
import random

import numpy as np
import pytest
from cases.serving import Setup, small_model

from llm_systems_cookbook.memory import BlockAllocator, PagedMemory, Usage
from llm_systems_cookbook.serving import (
    SLO,
    Histogram,
    LinearClock,
    Request,
    Scheduler,
    Simulator,
    replay,
    requests_from,
)
from llm_systems_cookbook.serving.scheduler import Counts
from llm_systems_cookbook.workloads.generated import Workload, alpaca


def make(clock=lambda batch: 1.0, num_blocks=16, **options):
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 100,
        "watermark": 0.0,
    } | options
    memory = PagedMemory(BlockAllocator(num_blocks, 4))
    return Simulator(Scheduler(memory, **options), clock)


def request(name, arrival=0.0, prompt=4, new=2, **options):
    return Request(name, range(prompt), new, arrival=arrival, **options)


def of(*values):
    result = Histogram()
    for value in values:
        result.add(value)
    return vars(result)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_clock_that_goes_back_or_nowhere_is_refused(seconds):
    times = iter([1.0, seconds, 1.0])
    with pytest.raises(ValueError, match=f"step_seconds .* got {seconds}"):
        replay(make(lambda batch: next(times)), [request("a", new=3)])


# --- Arrivals --------------------------------------------------------------


def test_a_request_that_arrives_in_a_step_is_added_after_it():
    report = replay(
        make(lambda batch: 2.0), [request("a"), request("b", 1.0, new=1)]
    )
    # Steps at 0, 2: b waits from 1 to 2 and has its token at 4.
    assert report.steps == 2
    assert vars(report.queueing) == of(0.0, 1.0)
    assert vars(report.ttft) == of(2.0, 3.0)
    assert vars(report.latency) == of(4.0, 3.0)
    assert vars(report.inter_token) == of(2.0)
    assert report.seconds == report.busy_seconds == 4.0


def test_an_arrival_at_the_end_of_a_step_is_in_the_next():
    report = replay(make(), [request("a"), request("b", 1.0)])
    assert vars(report.queueing) == of(0.0, 0.0)


def test_an_idle_driver_jumps_to_the_next_arrival():
    report = replay(make(), [request("a", 5.0), request("b", 100.0)])
    assert report.steps == 4
    assert report.busy_seconds == 4.0
    assert report.seconds == 102.0
    assert vars(report.ttft) == of(1.0, 1.0)
    # Waiting for arrivals counts in what users see, not in the batch.
    assert report.throughput == 4 / 102
    assert report.mean_batch == 1.0


def test_latencies_are_measured_by_a_clock_of_tokens():
    clock = LinearClock(1.0, per_token=0.5)
    report = replay(make(clock), [request("a", new=3), request("b", 2.0)])
    # a: 4 tokens, ends at 3; then a and b: 5 tokens, at 6.5; both, at 8.5.
    assert vars(report.ttft) == of(3.0, 4.5)
    assert vars(report.inter_token) == of(3.5, 2.0, 2.0)
    assert vars(report.latency) == of(8.5, 6.5)
    assert vars(report.queueing) == of(0.0, 1.0)
    assert report.computed_tokens == 4 + 5 + 2
    assert report.output_tokens == 5
    assert report.batch_seconds == 3 * 1 + 3.5 * 2 + 2 * 2


def test_goodput_counts_who_kept_the_objective():
    requests = [request(i, 0.0, new=3) for i in range(3)]
    report = replay(make(max_num_seqs=2), requests, slo=SLO(1.0, 1.0))
    # Two run at once; the third waits three steps for its first.
    assert (report.requests, report.good, report.seconds) == (3, 2, 6.0)
    assert report.goodput == 2 / 6


def test_arrivals_that_go_back_in_time_are_refused():
    driver = make()
    with pytest.raises(
        ValueError, match=r"'b' arrives at 1\.5, the one before it at 2\.0"
    ):
        replay(driver, [request("a", 2.0), request("b", 1.5)])


def test_requests_are_read_one_by_one_as_time_goes_on():
    read = []

    def requests():
        for i in range(20):
            read.append(i)
            yield request(i, 10.0 * i)

    seen = []
    replay(
        make(),
        requests(),
        on_step=lambda now, *rest: seen.append((now, len(read))),
    )
    # One ahead: its arrival says how long to wait.
    assert all(count <= now // 10 + 2 for now, count in seen)
    assert len(read) == 20


def test_nothing_to_serve_is_an_empty_report():
    report = replay(make(), [])
    assert (report.steps, report.requests, report.seconds) == (0, 0, 0.0)


# --- Limits and refusals ---------------------------------------------------


def test_a_driver_with_something_to_do_is_refused():
    driver = make()
    driver.add(request("a"))
    with pytest.raises(ValueError, match="driver with nothing to do"):
        replay(driver, [])
    assert driver.on_batch is None


@pytest.mark.parametrize(
    ("max_steps", "error"), [(-1, ValueError), (1.5, TypeError)]
)
def test_a_bad_number_of_steps_is_refused(max_steps, error):
    driver = make()
    with pytest.raises(error, match="max_steps must be"):
        replay(driver, [request("a")], max_steps=max_steps)
    assert not driver.has_unfinished


@pytest.mark.parametrize("max_steps", [0, 1, 3])
def test_a_replay_stops_after_so_many_steps(max_steps):
    driver = make()
    report = replay(driver, [request("a", new=9)], max_steps=max_steps)
    assert report.steps == max_steps
    assert report.output_tokens == max_steps
    assert report.requests == 0
    assert driver.has_unfinished is (max_steps > 0)


def test_a_request_that_can_never_run_stops_the_replay_or_is_counted():
    requests = [
        request("a"),
        request("big", 0.0, prompt=100),
        request("b", 0.5),
        request("huge", 50.0, prompt=1000),
    ]
    with pytest.raises(ValueError, match="'big': 1 x 101 tokens"):
        replay(make(), requests)
    report = replay(make(), requests, skip_refused=True)
    assert (report.requests, report.refused) == (2, 2)
    assert report.ttft.count == 2
    assert report.seconds == 50.0


def test_what_was_observed_before_is_observed_after_also_when_it_fails():
    driver = make()
    seen = []
    driver.on_batch = observer = seen.append
    replay(driver, [request("a")])
    assert driver.on_batch is observer
    with pytest.raises(ValueError, match="never fit"):
        replay(driver, [request("big", prompt=100)])
    assert driver.on_batch is observer


def test_an_observer_goes_on_observing_during_a_replay():
    driver = make()
    seen = []
    driver.on_batch = seen.append
    replay(driver, [request("a", new=3)])
    assert len(seen) == 3


# --- What is shown and counted ---------------------------------------------


def test_each_step_is_shown_with_its_end_batch_usage_and_outputs():
    shown = []
    replay(
        make(),
        [request("a", 3.0, prompt=5, new=2)],
        on_step=lambda *step: shown.append(step),
    )
    assert [now for now, *_ in shown] == [4.0, 5.0]
    assert [batch.num_tokens for _, batch, _, _ in shown] == [5, 1]
    # While it is computed: the second step holds the first's token as well.
    assert [usage for _, _, usage, _ in shown] == [
        Usage(5, 1, 2, 56),
        Usage(6, 0, 2, 56),
    ]
    assert [len(outputs) for *_, outputs in shown] == [1, 1]
    assert shown[-1][3][0].finished


def test_slots_are_summed_over_time():
    report = replay(make(lambda batch: 0.5), [request("a", prompt=5, new=2)])
    assert report.slot_seconds == [5.5, 0.5, 2.0, 56.0]
    assert sum(report.percent().values()) == pytest.approx(100.0)
    assert report.percent()["token_states"] == 100 * 5.5 / 64


def test_counts_are_those_of_this_replay():
    driver = make(num_blocks=4)
    requests = [request(i, prompt=4, new=9) for i in range(4)]
    first = replay(driver, requests)
    second = replay(driver, requests)
    assert first.counts == second.counts
    assert first.counts.finished == first.requests == 4
    assert first.counts.preemptions > 0
    assert first.preemptions_per_request == first.counts.preemptions / 4
    assert driver.scheduler.counts.finished == 8
    assert replay(driver, []).counts == Counts()


def test_a_replay_of_a_simulator_is_the_same_again():
    rng = random.Random(3)
    requests = [
        request(i, i * 0.7, rng.randint(1, 9), rng.randint(1, 9))
        for i in range(60)
    ]
    clock = LinearClock(1.0, 0.01, 0.003)
    one, other = (
        replay(make(clock, num_blocks=8), requests) for _ in range(2)
    )
    assert one.as_dict() == other.as_dict()
    assert one.counts.preemptions > 0


# --- An engine -------------------------------------------------------------


class Broken:
    """A model that fails on texts that begin with one token."""

    def __init__(self, model, token):
        self.model, self.token = model, token

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, token_ids, positions, *rest):
        if (self.token, 0) in zip(
            token_ids.tolist(), positions.tolist(), strict=True
        ):
            raise ValueError(f"no {self.token}")
        return self.model(token_ids, positions, *rest)


def engine_requests(samples=1):
    return [
        Request("a", [1, 2, 3], 4),
        Request("bad", [23, 2, 3], 4, num_samples=samples),
        Request("b", [4, 5], 4, temperature=1.0),
    ]


def scripted_engine(times, model=None):
    engine = Setup().make_engine(model)
    engine.clock = iter(times).__next__
    return engine


@pytest.mark.usefixtures("one_thread")
def test_an_engine_is_timed_by_its_clock_without_the_observer():
    # Each step looks four times: around scheduling and around the rest.
    engine = scripted_engine([0, 1, 5, 7, 10, 10, 90, 94])
    report = replay(engine, [Request("a", [1, 2], 2)])
    assert report.steps == 2
    assert vars(report.ttft) == of(3.0)
    assert vars(report.inter_token) == of(4.0)
    assert report.seconds == 7.0


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("samples", [1, 3])
def test_a_request_that_fails_in_an_engine_is_counted_and_others_go_on(
    samples,
):
    engine = Setup().make_engine(Broken(small_model(), 23))
    requests = engine_requests(samples)
    tokens = {}

    def collect(now, batch, usage, outputs):
        for output in outputs:
            if output.token_id is not None:
                tokens.setdefault(output.request_id, []).append(
                    output.token_id
                )

    report = replay(engine, requests, slo=SLO(1e9, 1e9), on_step=collect)
    assert (report.requests, report.failed) == (2, 1)
    assert report.good == report.requests
    assert report.counts.finished == report.requests
    assert {name: len(text) for name, text in tokens.items()} == {
        "a": 4,
        "b": 4,
    }
    assert engine.scheduler.memory.request_ids == set()


# --- Requests of a workload ------------------------------------------------


def workload():
    return Workload("w", [0.5, 1.0, 2.5], [3, 1, 4], [2, 7, 1])


def test_requests_have_the_workloads_lengths_and_arrivals():
    requests = list(requests_from(workload()))
    assert [r.request_id for r in requests] == [0, 1, 2]
    assert [r.arrival for r in requests] == [0.5, 1.0, 2.5]
    assert [r.prompt_token_ids for r in requests] == [
        range(3),
        range(1),
        range(4),
    ]
    assert [r.max_new_tokens for r in requests] == [2, 7, 1]
    assert [r.output_len for r in requests] == [2, 7, 1]


def test_a_larger_limit_does_not_change_where_outputs_end():
    requests = list(requests_from(workload(), max_new_tokens=np.int64(9)))
    assert [r.max_new_tokens for r in requests] == [9, 9, 9]
    assert [r.output_len for r in requests] == [2, 7, 1]
    with pytest.raises(ValueError, match="output_len 7 is above max_new"):
        list(requests_from(workload(), max_new_tokens=6))


def test_prompts_are_drawn_from_the_vocabulary_by_the_seed():
    draws = [
        [r.prompt_token_ids for r in requests_from(w, vocab_size=9, seed=seed)]
        for w in [Workload("w", [0.0] * 3, [40] * 3, [1] * 3)]
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert {token for prompt in draws[0] for token in prompt} == set(range(9))
    assert len(set(draws[0])) == 3


def test_requests_are_made_one_by_one():
    size = 10**9
    long = Workload("w", [0.0, 0.0], [size, size], [1, 1])
    first = next(requests_from(long))
    assert first.num_prompt_tokens == size


@pytest.mark.usefixtures("one_thread")
def test_a_workload_goes_through_simulator_and_engine_alike():
    """Same batches: lengths decide, not the text."""
    given = Workload("w", [0.0] * 6, [5, 9, 3, 12, 7, 2], [4, 6, 9, 2, 5, 8])
    setup = Setup(num_blocks=8, block_size=2, max_num_batched_tokens=16)
    spans = []
    for driver in (Simulator(setup.make_scheduler()), setup.make_engine()):
        seen = []
        report = replay(
            driver,
            requests_from(given, vocab_size=24),
            on_step=lambda now, batch, usage, outputs, seen=seen: seen.append(
                (
                    [(e.request.request_id, *e[1:3]) for e in batch.entries],
                    usage,
                )
            ),
        )
        assert report.requests == 6
        spans.append(seen)
    assert spans[0] == spans[1]
    assert len(spans[0]) > 9


def test_a_duplicate_is_a_mistake_also_when_refused_ones_are_skipped():
    twice = [Request("a", range(4), 3), Request("a", range(4), 3)]
    with pytest.raises(ValueError, match="'a' is here already"):
        replay(make(), twice, skip_refused=True)


def test_a_short_step_counts_at_a_late_time():
    driver = make(clock=lambda batch: 1e-9)
    report = replay(driver, [Request("a", range(4), 3, arrival=1e9)])
    assert report.busy_seconds == pytest.approx(3e-9)


def test_a_vocabulary_of_nothing_is_refused_at_once():
    with pytest.raises(ValueError, match="vocab_size must be >= 1"):
        requests_from(alpaca(2, seed=0), vocab_size=0)
