"""The simulator: the scheduler's own steps, timed by a clock."""

import math
import random
from collections import deque

import numpy as np
import pytest

from llm_systems_cookbook.memory import (
    BlockAllocator,
    FirstFitRegions,
    PagedMemory,
    ReservedMemory,
)
from llm_systems_cookbook.memory.waste import Occupancy, time_weighted
from llm_systems_cookbook.serving import (
    Batch,
    Entry,
    LinearClock,
    Request,
    Scheduler,
    Simulator,
    TokenOutput,
    one_iteration,
    replay,
)
from llm_systems_cookbook.serving.request import Sample
from llm_systems_cookbook.serving.simulator import StepTime


def paged(num_blocks=16, block_size=4):
    return PagedMemory(BlockAllocator(num_blocks, block_size))


def make(memory=None, clock=one_iteration, **options):
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 100,
        "watermark": 0.0,
    } | options
    scheduler = Scheduler(paged() if memory is None else memory, **options)
    return Simulator(scheduler, clock)


def batch_of(*spans):
    batch = Batch(1000)
    for start, num_tokens in spans:
        request = Request("a", range(5), 3)
        batch.add(Entry(request, start, num_tokens, Sample(request, 0), ()))
    return batch


# --- A step ----------------------------------------------------------------


def test_what_is_aborted_before_its_step_takes_no_time():
    """As in an engine: it is not computed."""
    batches = []
    simulator = make(clock=lambda b: batches.append(b.num_tokens) or 1.0)
    simulator.add(Request("a", range(3), 4))
    simulator.add(Request("b", range(1), 1))
    simulator.on_batch = lambda _: simulator.scheduler.abort("a")
    (output,) = simulator.step()
    assert (output.request_id, output.finished) == ("b", True)
    assert batches == [1]
    assert simulator.last_batch.num_tokens == 1


def test_every_token_is_zero_and_the_length_ends_a_request():
    simulator = make()
    simulator.add(Request("a", range(5), 9, output_len=2))
    assert simulator.step() == [TokenOutput("a", 0, False, None)]
    assert simulator.step() == [TokenOutput("a", 0, True, "length")]
    assert not simulator.has_unfinished
    assert simulator.step() == []


def test_stop_tokens_are_refused_and_nothing_is_added():
    simulator = make()
    with pytest.raises(ValueError, match="'a' has stop tokens: give output"):
        simulator.add(Request("a", range(5), 9, stop_token_ids=[0]))
    assert not simulator.has_unfinished


def test_what_the_scheduler_refuses_is_refused():
    simulator = make()
    with pytest.raises(ValueError, match="can never fit in 64 slots"):
        simulator.add(Request("a", range(60), 9))
    assert not simulator.has_unfinished


def test_a_step_shows_its_batch_before_and_after_and_its_time():
    simulator = make(clock=LinearClock(1.0, 0.5, 0.125))
    seen = []
    simulator.on_batch = seen.append
    simulator.add(Request("a", range(4), 3))
    assert (simulator.last_batch, simulator.step_seconds) == (None, 0.0)
    simulator.step()
    assert simulator.last_batch is seen[0]
    assert simulator.step_seconds == 1.0 + 4 * 0.5 + 4 * 0.125
    simulator.step()
    assert simulator.last_batch is seen[1]
    assert simulator.step_seconds == 1.0 + 0.5 + 5 * 0.125


def test_an_observer_that_raises_loses_no_token():
    simulator = make()
    simulator.add(Request("a", range(4), 3, num_samples=2))
    outputs = simulator.step()

    def broken(batch):
        raise RuntimeError("not now")

    simulator.on_batch = broken
    with pytest.raises(RuntimeError, match="not now"):
        simulator.step()
    simulator.on_batch = None
    for _ in range(10):
        if simulator.has_unfinished:
            outputs += simulator.step()
            simulator.scheduler.assert_consistent()
    assert not simulator.has_unfinished
    assert len(outputs) == 6


# --- Clocks ----------------------------------------------------------------


def test_one_iteration_is_one_whatever_the_batch():
    assert one_iteration(batch_of((0, 5))) == 1.0
    assert one_iteration(Batch(1)) == 1.0


def test_a_linear_clock_counts_tokens_and_what_they_read():
    clock = LinearClock(2.0, 0.5, 0.25)
    # 5 + 1 + 2 tokens; sequences of 5, 8 and 6 tokens are read.
    assert clock(batch_of((0, 5), (7, 1), (4, 2))) == 2 + 8 * 0.5 + 19 * 0.25
    assert clock(Batch(10)) == 2.0


@pytest.mark.parametrize(
    "times",
    [
        (-1.0, 1.0, 1.0),
        (1.0, -1e-9, 0.0),
        (1.0, 0.0, math.nan),
        (math.inf, 0.0, 0.0),
        (0.0, 0.0, 0.0),
    ],
)
def test_times_that_cannot_be_are_refused(times):
    with pytest.raises(ValueError, match="finite, >= 0 and not all 0, got"):
        LinearClock(*times)


def test_a_measured_step_keeps_its_batch_and_time():
    assert StepTime.of(batch_of((0, 5), (7, 1)), 0.25) == (6, 13, 0.25)


def steps_of(times, seed=0, noise=0.0):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        tokens = int(rng.integers(1, 500))
        kv_tokens = tokens + int(rng.integers(0, 5000))
        exact = times[0] + times[1] * tokens + times[2] * kv_tokens
        yield StepTime(tokens, kv_tokens, exact + noise * rng.normal())


@pytest.mark.parametrize(
    "times", [(3.0, 0.5, 0.25), (0.0, 0.1, 0.0), (2.0, 0.0, 0.0)]
)
def test_a_fitted_clock_finds_the_times_that_were(times):
    clock = LinearClock.fit(steps_of(times))
    found = clock.per_step, clock.per_token, clock.per_kv_token
    assert found == pytest.approx(times, abs=1e-9)


def test_a_fitted_clock_is_nearest_in_least_squares():
    steps = list(steps_of((3.0, 0.05, 0.002), noise=0.5))
    rows = np.array(steps)
    columns = np.column_stack([np.ones(len(rows)), rows[:, :2]])
    exact, *_ = np.linalg.lstsq(columns, rows[:, 2])
    assert exact.min() > 0
    clock = LinearClock.fit(steps)
    found = clock.per_step, clock.per_token, clock.per_kv_token
    assert found == pytest.approx(exact.tolist())


def test_what_would_be_negative_is_zero_and_the_rest_fitted_anew():
    steps = [
        StepTime(tokens, kv, 4.0 + 0.5 * tokens - 0.001 * kv)
        for tokens, kv, _ in steps_of((1, 1, 1))
    ]
    clock = LinearClock.fit(steps)
    assert clock.per_kv_token == 0.0
    rows = np.array(steps)
    columns = np.column_stack([np.ones(len(rows)), rows[:, 0]])
    exact, *_ = np.linalg.lstsq(columns, rows[:, 2])
    assert (clock.per_step, clock.per_token) == pytest.approx(exact.tolist())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_step_that_cannot_have_been_measured_fits_no_clock(bad, place):
    steps = [list(step) for step in steps_of((1.0, 1.0, 1.0))]
    steps[1][place] = bad
    with pytest.raises(ValueError, match=f"finite and >= 0, got .*{bad}"):
        LinearClock.fit(StepTime(*step) for step in steps)


def test_fewer_than_three_steps_fit_no_clock():
    steps = list(steps_of((1.0, 1.0, 1.0)))
    for count in range(3):
        with pytest.raises(ValueError, match=f"at least 3 steps, got {count}"):
            LinearClock.fit(steps[:count])
    assert LinearClock.fit(iter(steps[:3])).per_step == pytest.approx(1.0)


# --- Against the simulation of memory alone --------------------------------


def lengths_of(seed, count=60, longest=30):
    rng = random.Random(seed)
    return [
        (rng.randint(1, longest), rng.randint(1, longest))
        for _ in range(count)
    ]


def simulated(memory, lengths):
    """Return what the simulator counts, every request there from the start.

    No watermark, and prompts are computed whole: as in `time_weighted`.
    """
    simulator = make(memory, max_num_seqs=10**6, max_num_batched_tokens=10**9)
    requests = (
        Request(i, range(prompt), output)
        for i, (prompt, output) in enumerate(lengths)
    )
    report = replay(simulator, requests)
    return Occupancy(
        report.capacity,
        report.steps,
        tuple(int(slots) for slots in report.slot_seconds),
        int(report.batch_seconds),
        report.requests,
        report.counts.preemptions,
        report.counts.recomputed_tokens,
    )


MEMORIES = {
    "max": lambda: ReservedMemory(256, 64),
    "pow2": lambda: ReservedMemory(256, 64, "pow2"),
    "oracle": lambda: ReservedMemory(256, 64, "oracle"),
    "first fit": lambda: ReservedMemory(256, 64, "pow2", FirstFitRegions),
    "paged, with room for all": lambda: paged(60 * 15, 4),
}


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("seed", range(3))
def test_without_preemption_it_counts_what_time_weighted_counts(name, seed):
    lengths = lengths_of(seed)
    seen = simulated(MEMORIES[name](), lengths)
    exact = time_weighted(MEMORIES[name](), lengths)
    assert seen == exact
    assert seen.finished == 60
    assert seen.preemptions == 0
    assert seen.mean_batch > 1


def by_the_schedulers_rules(memory, lengths):
    """Count like `time_weighted`, with two rules of the scheduler.

    A step that preempts admits nobody. And the token that a request got in
    the step before it was preempted is kept: it comes back one token longer.
    `time_weighted` admits at once, and computes that token again.
    """
    waiting = deque(
        [i, prompt, prompt + output - 1]
        for i, (prompt, output) in enumerate(lengths)
    )
    running, seen, preempted = [], Occupancy(memory.capacity), False
    while waiting or running:
        while waiting and not preempted and memory.admit(*waiting[0]):
            running.append(waiting.popleft())
        seen.count(memory.usage(), len(running))
        for sequence in [s for s in running if s[1] == s[2]]:
            memory.release(sequence[0])
            running.remove(sequence)
            seen.finished += 1
        grown, preempted = 0, False
        while grown < len(running):
            if memory.grow(running[grown][0]):
                running[grown][1] += 1
                grown += 1
                continue
            newest = running.pop()
            memory.release(newest[0])
            seen.preemptions += 1
            seen.recomputed_tokens += newest[1]
            newest[1] += 1
            waiting.appendleft(newest)
            preempted = True
    return seen


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_slots", [64, 96, 240])
def test_with_preemption_two_rules_make_the_whole_difference(
    block_size, num_slots
):
    preemptions = 0
    for seed in range(3):
        lengths = lengths_of(seed)
        seen = simulated(paged(num_slots // block_size, block_size), lengths)
        memory = paged(num_slots // block_size, block_size)
        assert seen == by_the_schedulers_rules(memory, lengths)
        assert seen.finished == 60
        preemptions += seen.preemptions
    assert preemptions > 0


def test_a_fit_is_the_nearest_of_all_clocks_without_negative_times():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows = rng.uniform(0, 9, size=(5, 3))
        columns = np.column_stack([np.ones(5), rows[:, :2]])
        clock = LinearClock.fit([StepTime(*row) for row in rows])
        found = np.array(list(vars(clock).values()))
        error = np.square(columns @ found - rows[:, 2]).sum()
        for _ in range(50):
            other = np.abs(found + rng.normal(0, 0.1, 3) * rng.integers(2))
            near = np.square(columns @ other - rows[:, 2]).sum()
            assert error <= near + 1e-9
