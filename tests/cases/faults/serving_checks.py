"""Faults that the checks of `cases.serving_checks` must notice.

See test_serving_faults.py. A fault that notebook 08 or 09 notices, too,
stands in `serving` or `memory`.
"""

from typing import NamedTuple

from cases.faults import memory, serving


class CheckFault(NamedTuple):
    """A fault as in `Fault`, noticed by a check and by no notebook."""

    name: str
    module: str
    old: str
    new: str
    check: str


SCHEDULER = "serving/scheduler.py"
REQUEST = "serving/request.py"
ENGINE = "serving/engine.py"
SAMPLING = "serving/sampling.py"
MANAGER = "memory/paged.py"

OWN_FAULTS = [
    CheckFault(
        "withdrawn tokens not returned to the budget",
        SCHEDULER,
        "            self.budget += sum(entry.num_tokens for entry in ours)\n",
        "",
        "forked_under_pressure_is_independent",
    ),
    CheckFault(
        "the last running request is preempted",
        SCHEDULER,
        "        return self.memory.grow(sample.sequence_id, missing)",
        """        if self.memory.usage().external < self.memory.block_size:
            return False
        return self.memory.grow(sample.sequence_id, missing)""",
        "a_request_that_just_fits_is_served",
    ),
    CheckFault(
        "copies of shared tails not made",
        ENGINE,
        "self._moves.append((self.kv_cache.copy_blocks, batch.copies))",
        "pass",
        "forked_is_independent",
    ),
    CheckFault(
        "copies before the blocks are swapped out",
        ENGINE,
        """        if batch.swap_out:
            self._moves""",
        """        if batch.copies:
            self._moves.append((self.kv_cache.copy_blocks, batch.copies))
        if batch.swap_out:
            self._moves""",
        "forked_under_pressure_is_independent",
    ),
    CheckFault(
        "swapped out before its copy was made",
        MANAGER,
        "BlockCopy(self._filled_by(block_id), host_id)",
        "BlockCopy(block_id, host_id)",
        "forked_under_pressure_is_independent",
    ),
    CheckFault(
        "samples fork before the prompt is computed",
        SCHEDULER,
        "if not state.forked and entry.end == state.target(entry.sample):",
        "if not state.forked:",
        "samples_compute_their_prompt_once",
    ),
    CheckFault(
        "randomness shared by the batch",
        SAMPLING,
        "    rng = np.random.default_rng([request.seed, sample, position])",
        "    rng = np.random",
        "batched_is_one_at_a_time",
    ),
    CheckFault(
        "a victim keeps its place in memory",
        SCHEDULER,
        """        self._release(state)
        for sample in state.unfinished:
            sample.num_computed""",
        """        for sample in state.unfinished:
            sample.num_computed""",
        "preempted_is_unpreempted",
    ),
]

# Faults of the notebooks, by name, and the check that must notice them here.
NOTICED_HERE = [
    (
        "promises not counted",
        "what_admission_promises_is_taken",
    ),
    (
        "output cleared on preemption",
        "preempted_is_unpreempted",
    ),
    (
        "resume from the prompt alone",
        "preempted_is_unpreempted",
    ),
    (
        "last sampled token charged a slot",
        "a_request_that_just_fits_is_served",
    ),
    (
        "re-prefill's token discarded",
        "preempted_is_unpreempted",
    ),
    (
        "oldest preempted instead of newest",
        "preempted_is_unpreempted",
    ),
    (
        "finished request requeued",
        "finished_requests_leave",
    ),
    (
        "victim left in the batch",
        "forked_under_pressure_is_independent",
    ),
    (
        "swap out copies nothing",
        "swapped_is_recomputed",
    ),
    (
        "swap in copies nothing",
        "swapped_is_recomputed",
    ),
    (
        "waiting before preempted",
        "preempted_requests_resume_before_new_ones",
    ),
    (
        "watermark on running requests",
        "running_requests_ignore_the_watermark",
    ),
    (
        "watermark ignored at admission",
        "admission_leaves_the_watermark",
    ),
    (
        "aborted while queued, still in the queue",
        "abort_while_queued_leaves_nothing",
    ),
    (
        "block leaked on abort mid-chunk",
        "abort_in_the_middle_of_a_prompt_leaves_nothing",
    ),
    (
        "block leaked on abort while swapped",
        "abort_while_preempted_leaves_nothing",
    ),
    (
        "head that never fits accepted",
        "a_request_that_never_fits_is_refused_and_blocks_nobody",
    ),
    (
        "token in the middle of a prompt",
        "chunked_is_unchunked",
    ),
    (
        "positions count from the chunk",
        "chunked_is_unchunked",
    ),
    (
        "admission does not look",
        "admission_leaves_the_watermark",
    ),
]
OF_NOTEBOOKS = dict(NOTICED_HERE)

FAULTS = OWN_FAULTS + [
    CheckFault(f.name, f.module, f.old, f.new, OF_NOTEBOOKS[f.name])
    for f in memory.FAULTS + serving.FAULTS
    if f.name in OF_NOTEBOOKS
]
