"""The rules of the scheduler, one by one, and random runs that break none."""

import random
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from cases.serving import blocks_for

from llm_systems_cookbook.memory import (
    BlockAllocator,
    BlockCopy,
    FirstFitRegions,
    PagedMemory,
    ReservedMemory,
    Usage,
)
from llm_systems_cookbook.serving import (
    Batch,
    Entry,
    Request,
    Scheduler,
    StaticScheduler,
    TokenOutput,
)
from llm_systems_cookbook.serving.request import Sample, Status


def paged(num_blocks=16, block_size=4, host_blocks=0):
    return PagedMemory(
        BlockAllocator(num_blocks, block_size), host_blocks=host_blocks
    )


def make(memory=None, kind=Scheduler, **options):
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 100,
        "watermark": 0.0,
    } | options
    return kind(paged() if memory is None else memory, **options)


def request(name, prompt=4, new=4, **options):
    return Request(name, range(prompt), new, **options)


def snapshot(scheduler):
    """Return all that a refused call must leave as it was."""
    memory = scheduler.memory
    free = tables = None
    if isinstance(memory, PagedMemory):
        free = list(memory.allocator._free)
        tables = {i: list(t.block_ids) for i, t in memory._tables.items()}
    return (
        [s.request for s in scheduler.running],
        [s.request for s in scheduler.preempted],
        [s.request for s in scheduler.waiting],
        [
            (s.sequence_id, s.num_computed, s.num_scheduled, s.num_tokens)
            for state in scheduler._states.values()
            for s in state.unfinished
        ],
        vars(scheduler.counts).copy(),
        (free, tables, memory.usage(), memory.request_ids),
    )


def step(scheduler):
    assert scheduler.has_unfinished, "a loop would not end"
    batch = scheduler.schedule()
    outputs = scheduler.update(batch, [0] * len(batch.sampled))
    scheduler.assert_consistent()
    return batch, outputs


def drain(scheduler, limit=1000):
    """Run to the end; return the batches and the number of tokens by id."""
    batches, tokens = [], {}
    while scheduler.has_unfinished:
        assert len(batches) < limit, "it hangs"
        batch, outputs = step(scheduler)
        batches.append(batch)
        for output in outputs:
            key = output.request_id, output.sample
            tokens[key] = tokens.get(key, 0) + 1
    assert_whole(scheduler)
    return batches, tokens


def assert_whole(scheduler):
    memory = scheduler.memory
    scheduler.assert_consistent()
    assert memory.request_ids == set()
    assert memory.usage() == Usage(0, 0, 0, memory.capacity)
    assert getattr(memory, "host", None) is None or (
        memory.host.used_blocks == 0
    )


def spans(batch):
    return [(e.request.request_id, e.start, e.end) for e in batch.entries]


def ids(requests):
    return [r.request_id for r in requests]


# --- Imports ---------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "import llm_systems_cookbook.serving.scheduler",
        "import llm_systems_cookbook.serving",
        "from llm_systems_cookbook.serving import Simulator, replay",
    ],
)
def test_importing_the_scheduler_leaves_torch_out(statement):
    code = f"{statement}\nimport sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_engine_is_found_and_a_name_that_is_not_there_is_not():
    import llm_systems_cookbook.serving as serving
    from llm_systems_cookbook.serving.engine import Engine

    assert serving.Engine is Engine
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = serving.Motor
    assert all(hasattr(serving, name) for name in serving.__all__)


# --- Construction ----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be >= 1, got 0"),
        ({"max_num_seqs": 2.0}, TypeError, "max_num_seqs must be an integer"),
        (
            {"max_num_batched_tokens": 0},
            ValueError,
            "max_num_batched_tokens must be >= 1, got 0",
        ),
        ({"watermark": 1.0}, ValueError, r"in \[0, 1\), got 1\.0"),
        ({"watermark": -0.1}, ValueError, r"in \[0, 1\), got -0\.1"),
        ({"watermark": float("nan")}, ValueError, "got nan"),
        ({"watermark": "a"}, TypeError, "watermark must be a number, got 'a'"),
        ({"watermark": None}, TypeError, "must be a number, got None"),
        ({"preemption": "drop"}, ValueError, "swap, got 'drop'"),
    ],
)
def test_a_bad_option_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


# --- Adding ----------------------------------------------------------------


def test_a_request_that_could_never_fit_is_refused_and_blocks_nobody():
    scheduler = make(paged(num_blocks=2))
    scheduler.add(request("a"))
    before = snapshot(scheduler)
    # 6 + 4 - 1 = 9 tokens; the pool has 8 slots.
    with pytest.raises(ValueError, match=r"'big': 1 x 9 tokens.* 8 slots"):
        scheduler.add(request("big", 6, 4))
    assert snapshot(scheduler) == before
    scheduler.add(request("fits", 6, 3))
    _, tokens = drain(scheduler)
    assert tokens == {("a", 0): 4, ("fits", 0): 3}


def test_the_last_token_needs_no_slot():
    scheduler = make(paged(num_blocks=2))
    scheduler.add(request("a", 5, 4))
    batches, tokens = drain(scheduler)
    assert tokens == {("a", 0): 4}
    assert max(b.entries[-1].end for b in batches) == 8


def test_samples_that_never_fit_together_are_refused():
    # 2 shared blocks and 3 x 1 of their own.
    scheduler = make(paged(num_blocks=5))
    scheduler.add(request("a", 8, 5, num_samples=3))
    before = snapshot(scheduler)
    with pytest.raises(ValueError, match="'b': 4 x 12 tokens"):
        scheduler.add(request("b", 8, 5, num_samples=4))
    assert snapshot(scheduler) == before
    assert drain(scheduler)[1] == {("a", i): 5 for i in range(3)}


def test_more_samples_than_may_run_are_refused():
    scheduler = make(max_num_seqs=2)
    before = snapshot(scheduler)
    with pytest.raises(ValueError, match="'a': 3 samples, at most 2"):
        scheduler.add(request("a", num_samples=3))
    assert snapshot(scheduler) == before


def test_an_id_in_use_is_refused_and_free_again_at_the_end():
    scheduler = make()
    scheduler.add(request("a", 2, 1))
    before = snapshot(scheduler)
    with pytest.raises(ValueError, match="'a' is here already"):
        scheduler.add(request("a", 3))
    assert snapshot(scheduler) == before
    step(scheduler)
    scheduler.add(request("a", 3, 2))
    assert drain(scheduler)[1] == {("a", 0): 2}


def test_the_state_of_an_unfinished_request_can_be_read():
    scheduler = make()
    scheduler.add(request("a", 2, 2))
    assert scheduler.state("a").status is Status.WAITING
    state = scheduler.state("a")
    step(scheduler)
    assert state.status is Status.RUNNING
    step(scheduler)
    assert state.status is Status.FINISHED
    for name in ("a", "b"):
        with pytest.raises(KeyError, match=f"'{name}' is not unfinished"):
            scheduler.state(name)


# --- A step ----------------------------------------------------------------


def test_nothing_to_do_is_an_empty_batch():
    scheduler = make()
    batch = scheduler.schedule()
    assert batch == Batch(100)
    assert (batch.num_tokens, batch.sampled) == (0, [])
    assert scheduler.update(batch, []) == []


def test_a_prompt_is_computed_whole_then_a_token_a_step():
    scheduler = make()
    scheduler.add(request("a", 5, 3))
    batches, _ = drain(scheduler)
    assert [spans(b) for b in batches] == [
        [("a", 0, 5)],
        [("a", 5, 6)],
        [("a", 6, 7)],
    ]
    assert ids(batches[0].admitted) == ["a"]
    assert all(not b.admitted for b in batches[1:])
    assert [len(b.sampled) for b in batches] == [1, 1, 1]


def test_a_long_prompt_is_computed_in_chunks_and_sampled_at_its_end():
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(request("a", 10, 2))
    batches, _ = drain(scheduler)
    assert [spans(b) for b in batches] == [
        [("a", 0, 4)],
        [("a", 4, 8)],
        [("a", 8, 10)],
        [("a", 10, 11)],
    ]
    assert [len(b.sampled) for b in batches] == [0, 0, 1, 1]
    assert [b.budget for b in batches] == [0, 0, 2, 3]


def test_running_requests_go_before_waiting_ones():
    scheduler = make(max_num_batched_tokens=5)
    scheduler.add(request("a", 3, 4))
    step(scheduler)
    scheduler.add(request("b", 9, 2))
    scheduler.add(request("c", 1, 2))
    found = [spans(step(scheduler)[0]) for _ in range(3)]
    assert found == [
        [("a", 3, 4), ("b", 0, 4)],
        [("a", 4, 5), ("b", 4, 8)],
        [("a", 5, 6), ("b", 8, 9), ("c", 0, 1)],
    ]


def test_nobody_overtakes_in_the_queue():
    scheduler = make(paged(num_blocks=4))
    scheduler.add(request("a", 8, 2))
    step(scheduler)
    scheduler.add(request("long", 12, 1))
    scheduler.add(request("short", 1, 1))
    batch, _ = step(scheduler)
    assert spans(batch) == [("a", 8, 9)]
    assert [s.request.request_id for s in scheduler.waiting] == [
        "long",
        "short",
    ]


def test_a_promise_is_taken_before_the_next_is_looked_at():
    """Three free blocks are not enough for two requests of two."""
    scheduler = make(paged(num_blocks=3))
    scheduler.add(request("a", 8, 1))
    scheduler.add(request("b", 8, 1))
    batch, _ = step(scheduler)
    assert ids(batch.admitted) == ["a"]


def test_at_most_so_many_samples_run_at_once():
    scheduler = make(max_num_seqs=3)
    scheduler.add(request("a", 2, 3, num_samples=2))
    scheduler.add(request("b", 2, 3, num_samples=2))
    scheduler.add(request("c", 2, 3))
    batch, _ = step(scheduler)
    # c has a seat, but b was here first.
    assert ids(batch.admitted) == ["a"]
    batches, _ = drain(scheduler)
    assert max(len(b.entries) for b in batches) <= 3
    assert ids(batches[2].admitted) == ["b", "c"]


def test_a_step_scheduled_again_promises_the_same():
    """After an interrupt: what was not updated is simply done again."""
    scheduler = make(max_num_batched_tokens=6)
    scheduler.add(request("a", 4, 3))
    scheduler.add(request("b", 7, 3))
    for _ in range(2):
        first = scheduler.schedule()
        usage = scheduler.usage()
        again = scheduler.schedule()
        assert spans(again) == spans(first)
        assert scheduler.usage() == usage
        scheduler.update(again, [0] * len(again.sampled))
    assert drain(scheduler)[1] == {("a", 0): 1, ("b", 0): 2}


def test_memory_held_by_a_stranger_is_an_error_that_can_be_mended():
    memory = paged(num_blocks=4)
    stolen = memory.allocator.allocate(4)
    scheduler = make(memory)
    scheduler.add(request("a"))
    before = snapshot(scheduler)
    with pytest.raises(RuntimeError, match="nothing can run, 1 unfinished"):
        scheduler.schedule()
    assert snapshot(scheduler) == before
    for block in stolen:
        memory.allocator.free(block)
    assert drain(scheduler)[1] == {("a", 0): 4}


def test_growth_into_a_strangers_memory_is_an_error():
    memory = paged(num_blocks=2)
    scheduler = make(memory)
    scheduler.add(request("a", 4, 4))
    step(scheduler)
    memory.allocator.allocate(1)
    before = snapshot(scheduler)
    with pytest.raises(RuntimeError, match="'a' runs alone and cannot grow"):
        scheduler.schedule()
    assert snapshot(scheduler) == before


# --- The watermark ---------------------------------------------------------


def test_admission_leaves_the_watermark_free_and_growth_does_not():
    scheduler = make(paged(num_blocks=10), watermark=0.2)
    scheduler.add(request("a", 24, 17))
    scheduler.add(request("b", 8, 1))
    scheduler.add(request("c", 4, 1))
    batch, _ = step(scheduler)
    # a has 6 of 10 blocks, and b 2: the last two are to stay free.
    assert ids(batch.admitted) == ["a", "b"]
    batch, _ = step(scheduler)
    assert ids(batch.admitted) == ["c"], "b has gone"
    for _ in range(14):
        step(scheduler)
    # a has grown into them.
    assert scheduler.memory.allocator.used_blocks == 10
    assert scheduler.counts.preemptions == 0


@pytest.mark.parametrize("blocks", [1, 3])
def test_who_would_run_alone_does_not_wait_for_the_watermark(blocks):
    scheduler = make(paged(num_blocks=blocks), watermark=0.99)
    for name in "abc":
        scheduler.add(request(name, 4 * blocks - 1, 2))
    batches, tokens = drain(scheduler)
    assert tokens == {(name, 0): 2 for name in "abc"}
    assert all(len(b.entries) == 1 for b in batches)


# --- Preemption ------------------------------------------------------------


def three_in_a_full_pool(**options):
    """Three requests of one full block each; the pool has four."""
    host = options.pop("host_blocks", 0)
    scheduler = make(paged(num_blocks=4, host_blocks=host), **options)
    for name in "abc":
        scheduler.add(request(name, 4, 5))
    step(scheduler)
    return scheduler


def test_the_newest_running_request_is_preempted_first():
    scheduler = three_in_a_full_pool()
    batch = scheduler.schedule()
    # a takes the last block, b the one of c.
    assert ids(batch.preempted) == ["c"]
    assert spans(batch) == [("a", 4, 5), ("b", 4, 5)]
    assert scheduler.state("c").status is Status.PREEMPTED
    assert scheduler.counts.preemptions == 1
    assert scheduler.counts.recomputed_tokens == 4


def test_a_preempted_request_keeps_its_output_and_computes_it_again():
    scheduler = three_in_a_full_pool()
    batches, tokens = drain(scheduler)
    assert tokens == {(name, 0): 4 for name in "abc"}
    resumed = next(b for b in batches if b.resumed)
    assert ids(resumed.resumed) == ["c"]
    # Its prompt and the token that it had: what follows is its second.
    assert ("c", 0, 5) in spans(resumed)
    assert scheduler.counts.finished == 3


def test_preempted_requests_resume_before_new_ones():
    scheduler = three_in_a_full_pool()
    scheduler.add(request("tiny", 1, 1))
    batches, _ = drain(scheduler)
    started = [n for b in batches for n in ids(b.resumed + b.admitted)]
    assert started == ["c", "tiny"]


def test_a_preempted_head_that_does_not_fit_keeps_new_ones_out():
    scheduler = make(paged(num_blocks=6))
    scheduler.add(request("a", 12, 9))  # grows to 5 blocks
    scheduler.add(request("b", 11, 9))
    step(scheduler)
    step(scheduler)
    scheduler.add(request("tiny", 1, 1))
    while not scheduler.preempted:
        step(scheduler)
    names = []
    while "b" not in names:
        batch, _ = step(scheduler)
        names += ids(batch.resumed + batch.admitted)
    assert names[0] == "b"


def test_a_step_that_preempts_admits_nobody():
    scheduler = three_in_a_full_pool()
    scheduler.add(request("tiny", 1, 1))
    batch = scheduler.schedule()
    assert batch.preempted
    assert not batch.admitted
    assert not batch.resumed


def test_several_preempted_requests_come_back_oldest_first():
    scheduler = make(paged(num_blocks=6, block_size=2))
    for name in "abcdef":
        scheduler.add(request(name, 2, 11 if name == "a" else 3))
    batches, tokens = drain(scheduler)
    gone = [n for b in batches for n in ids(b.preempted)]
    assert gone[:3] == ["f", "e", "d"]
    back = [n for b in batches for n in ids(b.resumed)]
    assert back[:3] == ["d", "e", "f"]
    assert tokens == {(n, 0): 11 if n == "a" else 3 for n in "abcdef"}


def test_the_last_one_running_is_never_preempted():
    """Each fills the whole pool at its end."""
    scheduler = make(paged(num_blocks=4))
    for name in "abcd":
        scheduler.add(request(name, 4, 13))
    batches, tokens = drain(scheduler)
    assert scheduler.counts.preemptions > 3
    assert tokens == {(name, 0): 13 for name in "abcd"}
    for batch in batches:
        assert batch.entries, "someone runs in every step"


def test_a_victim_already_scheduled_is_withdrawn_and_its_budget_returned():
    """Of two samples the first grew; the second found no block."""
    scheduler = make(paged(num_blocks=4))
    scheduler.add(request("a", 5, 4))
    scheduler.add(request("b", 4, 3, num_samples=2))
    step(scheduler)
    # a holds two blocks and b one, shared. One is left, and b needs two.
    assert scheduler.memory.allocator.free_blocks == 1
    batch = scheduler.schedule()
    assert ids(batch.preempted) == ["b"]
    assert spans(batch) == [("a", 5, 6)]
    assert batch.budget == 99
    assert scheduler.memory.request_ids == {("a", 0)}
    scheduler.update(batch, [0])
    assert drain(scheduler)[1] == {("a", 0): 2, ("b", 0): 2, ("b", 1): 2}


def test_a_withdrawn_request_leaves_the_others_entries():
    a, b = request("a"), request("b")
    batch = Batch(10)
    for owner, tokens in ((a, 3), (b, 2), (a, 1)):
        batch.add(Entry(owner, 0, tokens, Sample(owner, 0), ()))
    assert batch.budget == 4
    batch.withdraw(a)
    assert (batch.budget, ids(e.request for e in batch.entries)) == (8, ["b"])
    batch.withdraw(request("c"))
    assert (batch.budget, batch.num_tokens) == (8, 2)


def test_a_shared_prompt_counts_once_among_recomputed_tokens():
    scheduler = make(paged(num_blocks=5))
    scheduler.add(request("a", 4, 9))
    scheduler.add(request("b", 6, 6, num_samples=2))
    while not scheduler.counts.preemptions:
        before = [s.num_computed for s in scheduler.state("b").unfinished]
        step(scheduler)
    assert scheduler.counts.recomputed_tokens == 6 + sum(n - 6 for n in before)


def test_a_group_resumes_only_with_room_for_its_outputs():
    """Its prompt ends in the middle of a block, so outputs take more."""
    scheduler = make(paged(num_blocks=7))
    scheduler.add(request("a", 12, 8))
    scheduler.add(request("b", 3, 6, num_samples=2))
    batches, _ = drain(scheduler)
    held = [
        (ids(b.resumed), ids(later.preempted))
        for b, later in pairwise(batches)
        if b.resumed
    ]
    # Meanwhile a takes no block: nobody else is to blame.
    assert held[0] == (["b"], []), "preempted again at once"


# --- Swapping --------------------------------------------------------------


def test_a_swapped_request_goes_on_where_it_was():
    scheduler = three_in_a_full_pool(preemption="swap", host_blocks=4)
    batch, _ = step(scheduler)
    assert ids(batch.preempted) == ["c"]
    assert batch.swap_out == [BlockCopy(2, 0)]
    assert scheduler.state("c").swapped
    batches, tokens = drain(scheduler)
    resumed = next(b for b in batches if b.resumed)
    assert len(resumed.swap_in) == 1
    assert resumed.swap_in[0].source == 0
    assert ("c", 4, 5) in spans(resumed), "nothing is computed again"
    assert tokens[("c", 0)] == 4
    counts = scheduler.counts
    assert (counts.swaps, counts.swapped_blocks) == (1, 1)
    assert (counts.preemptions, counts.recomputed_tokens) == (1, 0)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_prompt_half_computed_comes_back_once_its_blocks_are_free(
    preemption,
):
    """It has room for all of it, so it needs no more than that."""
    scheduler = make(
        paged(num_blocks=7, host_blocks=7),
        preemption=preemption,
        max_num_batched_tokens=6,
    )
    scheduler.add(request("a", 3, 9))
    scheduler.add(request("c", 1, 4))
    scheduler.add(request("b", 20, 1))  # five blocks
    batches = [step(scheduler)[0] for _ in range(5)]
    assert ids(batches[2].preempted) == ["b"]
    assert spans(batches[1])[-1] == ("b", 2, 6)
    # At its end c leaves the fifth block, and a still runs.
    start = 6 if preemption == "swap" else 0
    assert spans(batches[3]) == [("a", 5, 6), ("c", 3, 4)]
    assert spans(batches[4]) == [("a", 6, 7), ("b", start, start + 5)]


def test_a_full_host_means_to_compute_again():
    scheduler = make(
        paged(num_blocks=4, host_blocks=1, block_size=2), preemption="swap"
    )
    for name in "ab":
        scheduler.add(request(name, 3, 6))
    batches, tokens = drain(scheduler)
    assert tokens == {(name, 0): 6 for name in "ab"}
    counts = scheduler.counts
    assert counts.preemptions == 1
    assert (counts.swaps, counts.swapped_blocks) == (0, 0)
    assert counts.recomputed_tokens > 0
    assert not any(b.swap_out or b.swap_in for b in batches)


class Impatient(PagedMemory):
    """Memory that fails where a scheduler would swap for ever."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.swaps_in = 0

    def swap_in(self, *args):
        self.swaps_in += 1
        assert self.swaps_in < 5000, "in and out again without an end"
        return super().swap_in(*args)


def test_a_group_that_computes_its_outputs_again_is_swapped_in_with_room():
    """Its first step needs more than a block for each sample.

    b loses its cache, as the host has no room for all of it. It forks again
    and is swapped out before its outputs are computed again.
    """
    scheduler = make(
        Impatient(BlockAllocator(11, 2), host_blocks=3), preemption="swap"
    )
    scheduler.add(request("a", 1, 8, num_samples=2))
    scheduler.add(request("b", 1, 6, num_samples=2))
    batches, tokens = drain(scheduler)
    assert scheduler.counts.preemptions > 0
    for batch in batches:
        assert not (batch.preempted and batch.resumed)
    assert tokens == {
        ("a", 0): 8,
        ("a", 1): 8,
        ("b", 0): 6,
        ("b", 1): 6,
    }


# --- Samples ---------------------------------------------------------------


def test_samples_share_the_prompt_and_then_copy_the_tail():
    scheduler = make()
    scheduler.add(request("a", 6, 3, num_samples=3))
    batch, outputs = step(scheduler)
    assert spans(batch) == [("a", 0, 6)]
    assert [s.index for s in batch.sampled] == [0, 1, 2]
    assert [o.sample for o in outputs] == [0, 1, 2]
    assert scheduler.memory.allocator.used_blocks == 2
    batch, _ = step(scheduler)
    assert spans(batch) == [("a", 6, 7)] * 3
    assert batch.copies == [BlockCopy(1, 2), BlockCopy(1, 3)]
    assert [s.index for s in batch.sampled] == [0, 1, 2]
    batch, _ = step(scheduler)
    assert batch.copies == []
    assert_whole(scheduler)


def test_samples_of_a_chunked_prompt_fork_at_its_end():
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(request("a", 6, 2, num_samples=2))
    batch, outputs = step(scheduler)
    assert (len(batch.sampled), outputs) == (0, [])
    assert scheduler.memory.request_ids == {("a", 0)}
    batch, outputs = step(scheduler)
    assert len(outputs) == 2
    assert scheduler.memory.request_ids == {("a", 0), ("a", 1)}


def test_samples_end_one_by_one_and_the_request_with_the_last():
    scheduler = make()
    scheduler.add(request("a", 2, 4, num_samples=2, stop_token_ids=[7]))
    step(scheduler)
    batch = scheduler.schedule()
    outputs = scheduler.update(batch, [7, 5])
    assert outputs == [
        TokenOutput("a", 7, True, "stop", 0),
        TokenOutput("a", 5, False, None, 1),
    ]
    scheduler.assert_consistent()
    assert scheduler.memory.request_ids == {("a", 1)}
    assert scheduler.counts.finished == 0
    assert drain(scheduler)[1] == {("a", 1): 2}
    assert scheduler.counts.finished == 1


def test_samples_that_all_end_at_once_leave_nothing():
    scheduler = make()
    scheduler.add(request("a", 6, 1, num_samples=4))
    _, outputs = step(scheduler)
    assert [o.reason for o in outputs] == ["length"] * 4
    assert_whole(scheduler)


def test_samples_of_reserved_memory_have_a_region_each():
    memory = ReservedMemory(32, 8, regions=FirstFitRegions)
    scheduler = make(memory)
    scheduler.add(request("a", 4, 3, num_samples=3))
    scheduler.add(request("b", 4, 3, num_samples=2))
    batch, _ = step(scheduler)
    # The pool has four regions: a's are all or none, so are b's.
    assert spans(batch) == [("a", 0, 4)] * 3
    assert memory.request_ids == {("a", i) for i in range(3)}
    batches, tokens = drain(scheduler)
    assert tokens == {
        **{("a", i): 2 for i in range(3)},
        **{("b", i): 3 for i in range(2)},
    }
    assert not any(b.copies for b in batches)


# --- Update ----------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_another_number_of_tokens_is_refused_and_changes_nothing(tokens):
    scheduler = make()
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    batch = scheduler.schedule()
    before = snapshot(scheduler)
    with pytest.raises(ValueError, match=f"{len(tokens)} tokens for 2"):
        scheduler.update(batch, tokens)
    assert snapshot(scheduler) == before
    assert len(scheduler.update(batch, [1, 2])) == 2


@pytest.mark.parametrize(
    "token", [None, 5.5, 5.0, "5", np.float64(5), torch.tensor(5), [5]]
)
def test_a_token_that_is_no_integer_is_refused_and_changes_nothing(token):
    scheduler = make()
    scheduler.add(request("a", stop_token_ids=[5]))
    scheduler.add(request("b"))
    batch = scheduler.schedule()
    before = snapshot(scheduler)
    with pytest.raises(TypeError, match="tokens must be integers, got"):
        scheduler.update(batch, [5, token])
    with pytest.raises(TypeError, match="in order, got a set"):
        scheduler.update(batch, {5, 6})
    assert snapshot(scheduler) == before
    outputs = scheduler.update(batch, np.array([5, 6]))
    assert [(o.token_id, o.reason) for o in outputs] == [
        (5, "stop"),
        (6, None),
    ]
    assert all(type(o.token_id) is int for o in outputs)


def test_a_batch_that_is_not_the_last_is_refused_and_changes_nothing():
    """Its requests may have lost the memory that it was scheduled for."""
    scheduler = make(paged(num_blocks=4))
    for name in "ab":
        scheduler.add(request(name, 8, 9))
    first = scheduler.schedule()
    again = scheduler.schedule()
    assert again.entries == first.entries
    with pytest.raises(ValueError, match="schedule returned last, and once"):
        scheduler.update(first, [1, 2])
    scheduler.update(again, [1, 2])
    before = snapshot(scheduler)
    for batch in (first, again, Batch(100)):
        with pytest.raises(ValueError, match="schedule returned last"):
            scheduler.update(batch, [1] * len(batch.sampled))
        assert snapshot(scheduler) == before
    batch = scheduler.schedule()
    assert ids(batch.preempted) == ["b"]
    scheduler.update(batch, [3])
    assert scheduler.state("a").unfinished[0].output_token_ids == [1, 3]
    assert drain(scheduler)[1] == {("a", 0): 7, ("b", 0): 8}


def test_a_schedule_that_raises_leaves_no_batch_to_update():
    memory = paged(num_blocks=2)
    scheduler = make(memory)
    scheduler.add(request("a", 4, 4))
    step(scheduler)
    batch = scheduler.schedule()
    memory.release(("a", 0))  # what the batch was promised
    memory.admit(("a", 0), 4)
    memory.allocator.allocate(1)
    with pytest.raises(RuntimeError, match="cannot grow"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="schedule returned last"):
        scheduler.update(batch, [0])


def test_each_sample_gets_its_own_token():
    scheduler = make()
    scheduler.add(request("a", num_samples=2))
    scheduler.add(request("b"))
    batch = scheduler.schedule()
    outputs = scheduler.update(batch, [7, 8, 9])
    assert [(o.request_id, o.sample, o.token_id) for o in outputs] == [
        ("a", 0, 7),
        ("a", 1, 8),
        ("b", 0, 9),
    ]
    assert scheduler.state("a").unfinished[1].output_token_ids == [8]


# --- Abort -----------------------------------------------------------------


def at_queued(scheduler):
    scheduler.add(request("other"))
    scheduler.add(request("x", 8, 4))


def at_mid_chunk(scheduler):
    scheduler.max_num_batched_tokens = 5
    at_queued(scheduler)
    step(scheduler)
    step(scheduler)
    assert 0 < scheduler.state("x").unfinished[0].num_computed < 8


def at_running(scheduler):
    at_queued(scheduler)
    step(scheduler)
    step(scheduler)
    assert scheduler.state("x").status is Status.RUNNING


def at_forked(scheduler):
    scheduler.add(request("other"))
    scheduler.add(request("x", 6, 4, num_samples=3))
    step(scheduler)
    step(scheduler)
    assert scheduler.state("x").forked


def at_preempted(scheduler):
    scheduler.add(request("other", 4, 30))
    scheduler.add(request("x", 4, 30))
    while not scheduler.preempted:
        step(scheduler)
    assert scheduler.state("x").status is Status.PREEMPTED


def at_unknown(scheduler):
    scheduler.add(request("other"))


def at_finished(scheduler):
    scheduler.add(request("other", 4, 9))
    scheduler.add(request("x", 4, 1))
    step(scheduler)


MOMENTS = (
    at_queued,
    at_mid_chunk,
    at_running,
    at_forked,
    at_preempted,
    at_unknown,
    at_finished,
)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_abort_works_at_any_moment_and_again(moment, preemption):
    scheduler = make(
        paged(num_blocks=12, host_blocks=12), preemption=preemption
    )
    moment(scheduler)
    was_here = moment not in (at_unknown, at_finished)
    if moment is at_preempted:
        assert scheduler.state("x").swapped is (preemption == "swap")
    aborted = scheduler.counts.aborted
    assert scheduler.abort("x") is was_here
    scheduler.assert_consistent()
    assert not any(i[0] == "x" for i in scheduler.memory.request_ids)
    before = snapshot(scheduler)
    assert scheduler.abort("x") is False
    assert snapshot(scheduler) == before
    assert scheduler.counts.aborted == aborted + was_here
    _, tokens = drain(scheduler)
    assert {name for name, _ in tokens} == {"other"}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("steps", [0, 1])
def test_tokens_of_a_request_aborted_since_are_ignored(samples, steps):
    scheduler = make()
    scheduler.add(request("x", 6, 4, num_samples=samples))
    scheduler.add(request("other", 4, 4))
    for _ in range(steps):
        step(scheduler)
    batch = scheduler.schedule()
    scheduler.abort("x")
    numbers = list(range(len(batch.sampled)))
    outputs = scheduler.update(batch, numbers)
    assert [(o.request_id, o.token_id) for o in outputs] == [
        ("other", numbers[-1])
    ]
    scheduler.assert_consistent()
    assert {name for name, _ in drain(scheduler)[1]} == {"other"}


@pytest.mark.parametrize("samples", [1, 2])
def test_a_request_aborted_and_added_again_takes_no_old_token(samples):
    """Also when it is the very same object."""
    scheduler = make()
    again = request("x", 6, 4, num_samples=samples)
    scheduler.add(again)
    batch = scheduler.schedule()
    scheduler.abort("x")
    scheduler.add(again)
    outputs = scheduler.update(batch, [5] * len(batch.sampled))
    assert outputs == []
    scheduler.assert_consistent()
    assert drain(scheduler)[1] == {("x", i): 4 for i in range(samples)}


def test_abort_everything_leaves_the_pool_whole():
    scheduler = make(paged(num_blocks=12, host_blocks=2), preemption="swap")
    for i in range(8):
        scheduler.add(request(i, 4, 20, num_samples=1 + i % 2))
    for _ in range(12):
        step(scheduler)
    assert scheduler.preempted
    assert scheduler.waiting or scheduler.counts.preemptions > 2
    for i in range(8):
        scheduler.abort(i)
        scheduler.assert_consistent()
    assert_whole(scheduler)
    assert not scheduler.has_unfinished
    assert scheduler.counts.aborted == 8


# --- Usage -----------------------------------------------------------------


def test_a_prompt_that_is_not_computed_yet_is_reserved():
    scheduler = make(paged(num_blocks=8), max_num_batched_tokens=3)
    scheduler.add(request("a", 8, 3, output_len=3))
    batch = scheduler.schedule()
    # 3 of 8 tokens are in this step; the last block is for 2 more.
    assert scheduler.usage() == Usage(3, 5, 0, 24)
    scheduler.update(batch, [])
    assert scheduler.usage() == Usage(3, 5, 0, 24)
    batch = scheduler.schedule()
    assert scheduler.usage() == Usage(6, 2, 0, 24)
    scheduler.update(batch, [])
    batch = scheduler.schedule()
    assert scheduler.usage() == Usage(8, 0, 0, 24)
    scheduler.update(batch, [0])
    scheduler.schedule()
    assert scheduler.usage() == Usage(9, 1, 2, 20)


# --- assert_consistent -----------------------------------------------------


def leak_memory(scheduler):
    scheduler.memory.admit(("ghost", 0), 1)


def lose_memory(scheduler):
    scheduler.memory.release(("a", 0))


def queue_twice(scheduler):
    scheduler.running.append(scheduler.running[0])


def forget(scheduler):
    scheduler.waiting.clear()


def mislabel(scheduler):
    scheduler.waiting[0].status = Status.PREEMPTED


def compute_too_much(scheduler):
    scheduler.running[0].unfinished[0].num_computed = 99


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (leak_memory, "memory without running.*ghost"),
        (lose_memory, r"running without memory.*'a'"),
        (queue_twice, "two queues"),
        (forget, "queues are not the unfinished"),
        (mislabel, "'w' is Status.PREEMPTED"),
        (compute_too_much, "'a' has room for 4 tokens, 99 computed"),
    ],
)
def test_assert_consistent_names_what_is_wrong(damage, message):
    scheduler = make(max_num_seqs=1)
    scheduler.add(request("a"))
    scheduler.add(request("w"))
    step(scheduler)
    damage(scheduler)
    with pytest.raises(AssertionError, match=message):
        scheduler.assert_consistent()


# --- The static batcher ----------------------------------------------------


def test_a_static_batch_runs_until_its_last_request_has_finished():
    scheduler = make(kind=StaticScheduler, max_num_seqs=2)
    for name, new in (("a", 5), ("b", 1), ("c", 1)):
        scheduler.add(request(name, 2, new))
    batches, tokens = drain(scheduler)
    assert [len(b.entries) for b in batches] == [2, 1, 1, 1, 1, 1]
    assert [ids(b.admitted) for b in batches if b.admitted] == [
        ["a", "b"],
        ["c"],
    ]
    assert tokens == {("a", 0): 5, ("b", 0): 1, ("c", 0): 1}
    scheduler = make(max_num_seqs=2)
    for name, new in (("a", 5), ("b", 1), ("c", 1)):
        scheduler.add(request(name, 2, new))
    assert len(drain(scheduler)[0]) == 5


def test_a_static_batch_that_preempts_ends_as_well():
    scheduler = make(paged(num_blocks=4), kind=StaticScheduler)
    for name in "abcd":
        scheduler.add(request(name, 4, 12))
    _, tokens = drain(scheduler)
    assert scheduler.counts.preemptions > 0
    assert tokens == {(name, 0): 12 for name in "abcd"}


# --- Random runs -----------------------------------------------------------


def random_scheduler(rng, requests):
    size = rng.choice([1, 2, 4])
    blocks = max(blocks_for(r, size) for r in requests) + rng.randint(0, 2)
    return make(
        Impatient(
            BlockAllocator(blocks, size),
            host_blocks=rng.choice([1, 2, 8, 16]),
        ),
        max_num_seqs=rng.choice([3, 4, 8]),
        max_num_batched_tokens=rng.choice([1, 4, 9, 100, 100]),
        watermark=rng.choice([0.0, 0.0, 0.1, 0.99]),
        preemption=rng.choice(["recompute", "swap"]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_runs_keep_every_rule(seed):
    rng = random.Random(seed)
    preemptions = swaps = aborts = 0
    for _ in range(40):
        requests = [
            Request(
                i,
                range(rng.randint(1, 7)),
                rng.randint(4, 16),
                num_samples=rng.choice([1, 1, 2, 3]),
            )
            for i in range(rng.randint(3, 7))
        ]
        scheduler = random_scheduler(rng, requests)
        aborted = check_a_run(rng, scheduler, list(requests))
        preemptions += scheduler.counts.preemptions
        swaps += scheduler.counts.swaps
        aborts += len(aborted)
    assert min(preemptions, swaps, aborts) > 0


def check_a_run(rng, scheduler, requests):
    tokens = {(r.request_id, i): 0 for r in requests for i in range(9)}
    pending, aborted = list(requests), set()
    for _ in range(3000):
        while pending and rng.random() < 0.8:
            scheduler.add(pending.pop(0))
        if not scheduler.has_unfinished and not pending:
            break
        running = [s.request.request_id for s in scheduler.running]
        batch = scheduler.schedule()
        check_batch(scheduler, batch, running)
        if scheduler.has_unfinished and rng.random() < 0.01:
            victim = rng.choice(sorted(scheduler._states))
            aborted.add(victim)
            scheduler.abort(victim)
        for output in scheduler.update(batch, [0] * len(batch.sampled)):
            assert output.request_id not in aborted
            tokens[output.request_id, output.sample] += 1
        scheduler.assert_consistent()
        usage = scheduler.usage()
        assert min(usage) >= 0
        assert sum(usage) == scheduler.memory.capacity
    assert not scheduler.has_unfinished, "it hangs"
    assert_whole(scheduler)
    for given in requests:
        if given.request_id not in aborted:
            for i in range(given.num_samples):
                assert tokens[given.request_id, i] == given.max_new_tokens
    return aborted


def check_batch(scheduler, batch, running):
    assert batch.num_tokens <= scheduler.max_num_batched_tokens
    assert batch.budget == scheduler.max_num_batched_tokens - batch.num_tokens
    assert len(batch.entries) <= scheduler.max_num_seqs
    gone = ids(batch.preempted)
    assert gone == running[::-1][: len(gone)], "newest first, not the last"
    assert len(gone) < max(1, len(running))
    started = ids(batch.resumed + batch.admitted)
    assert not (gone and started)
    assert not (batch.admitted and scheduler.preempted)
    served = {e.request.request_id for e in batch.entries}
    assert not served & set(gone)
    assert served <= set(running) | set(started)
    for entry in batch.entries:
        held = scheduler.memory.length(entry.sample.sequence_id)
        assert entry.end <= held, "what is computed has room"


# --- Corners ---------------------------------------------------------------


def test_the_oracle_is_told_the_true_length():
    memory = ReservedMemory(32, 16, "oracle", FirstFitRegions)
    scheduler = make(memory)
    scheduler.add(Request("a", [1], 10, output_len=2))
    scheduler.schedule()
    assert 32 - memory.usage().external == 2


def test_a_sample_that_has_finished_leaves_its_seat():
    scheduler = make(paged(num_blocks=20), max_num_seqs=2)
    scheduler.add(Request("a", range(4), 9, num_samples=2, stop_token_ids=[7]))
    scheduler.add(request("b", 4, 2))
    batch = scheduler.schedule()
    scheduler.update(batch, [7, 0])
    assert ids(scheduler.schedule().admitted) == ["b"]


def test_a_preempted_group_needs_seats_for_its_live_samples_only():
    scheduler = make(paged(num_blocks=8), max_num_seqs=3)
    scheduler.add(request("x", 4, 20))
    scheduler.add(
        Request("a", range(8), 12, num_samples=2, stop_token_ids=[7])
    )
    scheduler.update(scheduler.schedule(), [0, 7, 0])
    assert len(scheduler.state("a").unfinished) == 1
    while not scheduler.preempted:
        step(scheduler)
    assert drain(scheduler)[1]["a", 1] > 0


def test_swapped_blocks_are_counted():
    scheduler = make(paged(num_blocks=5, host_blocks=8), preemption="swap")
    for name in "ab":
        scheduler.add(request(name, 7, 9))
    drain(scheduler)
    assert (scheduler.counts.swaps, scheduler.counts.swapped_blocks) == (1, 2)


def test_the_watermark_is_rounded_up():
    """5 % of 84 slots are 4.2: two blocks of 4 stay free."""
    scheduler = make(paged(num_blocks=21), watermark=0.05)
    scheduler.add(request("a", 76, 2))
    scheduler.add(request("b", 1, 2))
    assert ids(scheduler.schedule().admitted) == ["a"]


def test_the_watermark_is_not_rounded_up_for_a_digit_of_a_float():
    """7 % of 100 slots are 7, though 0.07 * 100 is a little more."""
    scheduler = make(paged(num_blocks=100, block_size=1), watermark=0.07)
    scheduler.add(request("a", 50, 2))
    scheduler.add(request("b", 43, 2))
    assert ids(scheduler.schedule().admitted) == ["a", "b"]


def test_a_lost_reference_is_noticed():
    scheduler = make(paged())
    scheduler.add(request("a"))
    step(scheduler)
    scheduler.memory.allocator.incref(0)
    with pytest.raises(AssertionError, match="block 0 has 2 references"):
        scheduler.assert_consistent()


def test_too_much_room_is_noticed():
    scheduler = make(paged())
    scheduler.add(request("a", 4, 2))
    step(scheduler)
    scheduler.memory.grow(("a", 0), 3)
    with pytest.raises(AssertionError, match="has room for 7 tokens"):
        scheduler.assert_consistent()


def test_pow2_refuses_what_it_could_never_reserve():
    """2 tokens and 3 outputs, rounded up to 4, need 6 slots, not 5."""
    memory = ReservedMemory(5, 100, "pow2", FirstFitRegions)
    scheduler = make(memory)
    with pytest.raises(ValueError, match="can never fit in 5 slots"):
        scheduler.add(request("a", 2, 3))
    scheduler.add(request("b", 1, 4))
    assert drain(scheduler)[1] == {("b", 0): 4}
