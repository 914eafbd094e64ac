"""The named list of faults of scheduler, memory and engine.

See test_serving_faults.py. Each names the check that must notice it.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    module: str  # relative to the package
    old: str
    new: str
    check: str  # of serving_checks


SCHEDULER = "serving/scheduler.py"
REQUEST = "serving/request.py"
ENGINE = "serving/engine.py"
SAMPLING = "serving/sampling.py"
MANAGER = "memory/memory_manager.py"

FAULTS = [
    Fault(
        "promises not counted",
        SCHEDULER,
        """                sample.sequence_id,
                state.target(sample),
                state.request.final_tokens,""",
        """                sample.sequence_id,
                1,
                state.request.final_tokens,""",
        "what_admission_promises_is_taken",
    ),
    Fault(
        "output cleared on preemption",
        SCHEDULER,
        """            sample.num_computed = sample.num_scheduled = 0
""",
        """            sample.num_computed = sample.num_scheduled = 0
            sample.output_token_ids.clear()
            sample.num_tokens = state.request.num_prompt_tokens
""",
        "preempted_is_unpreempted",
    ),
    Fault(
        "resume from the prompt alone",
        SCHEDULER,
        """            sample.num_computed = sample.num_scheduled = 0
""",
        """            sample.num_computed = sample.num_scheduled = 0
            sample.num_tokens = state.request.num_prompt_tokens
""",
        "preempted_is_unpreempted",
    ),
    Fault(
        "last sampled token charged a slot",
        REQUEST,
        "return self.num_prompt_tokens + self.max_new_tokens - 1",
        "return self.num_prompt_tokens + self.max_new_tokens",
        "a_request_that_just_fits_is_served",
    ),
    Fault(
        "re-prefill's token discarded",
        SCHEDULER,
        "        if start + num_tokens == sample.num_tokens:",
        """        again = num_tokens > 1 and sample.output_token_ids
        if start + num_tokens == sample.num_tokens and not again:""",
        "preempted_is_unpreempted",
    ),
    Fault(
        "oldest preempted instead of newest",
        SCHEDULER,
        "        state = self.running.pop()\n",
        "        state = self.running.pop(0)\n",
        "preempted_is_unpreempted",
    ),
    Fault(
        "finished request requeued",
        SCHEDULER,
        "                self.counts.finished += 1\n",
        """                self.counts.finished += 1
                self.waiting.append(state)
""",
        "finished_requests_leave",
    ),
    Fault(
        "victim left in the batch",
        SCHEDULER,
        "        batch.withdraw(state.request)\n",
        "",
        "forked_under_pressure_is_independent",
    ),
    Fault(
        "withdrawn tokens not returned to the budget",
        SCHEDULER,
        "            self.budget += sum(entry.num_tokens for entry in ours)\n",
        "",
        "forked_under_pressure_is_independent",
    ),
    Fault(
        "swap out copies nothing",
        ENGINE,
        "self._moves.append((self.kv_cache.swap_out, batch.swap_out))",
        "pass",
        "swapped_is_recomputed",
    ),
    Fault(
        "swap in copies nothing",
        ENGINE,
        "self._moves.append((self.kv_cache.swap_in, batch.swap_in))",
        "pass",
        "swapped_is_recomputed",
    ),
    Fault(
        "waiting before preempted",
        SCHEDULER,
        """        if self.preempted:
            return  # they were here first
""",
        "",
        "preempted_requests_resume_before_new_ones",
    ),
    Fault(
        "watermark on running requests",
        SCHEDULER,
        "        return self.memory.grow(sample.sequence_id, missing)",
        """        kept = self._keep_free() + missing
        if len(self.running) > 1 and self.memory.usage().external < kept:
            return False
        return self.memory.grow(sample.sequence_id, missing)""",
        "running_requests_ignore_the_watermark",
    ),
    Fault(
        "no watermark at admission",
        SCHEDULER,
        "math.ceil(self.watermark * self.memory.capacity) + growth",
        "growth",
        "admission_leaves_the_watermark",
    ),
    Fault(
        "aborted request stays queued",
        SCHEDULER,
        "        for queue in (self.waiting, self.preempted, self.running):",
        "        for queue in (self.preempted, self.running):",
        "abort_while_queued_leaves_nothing",
    ),
    Fault(
        "block leaked on abort in the middle of a prompt",
        SCHEDULER,
        """        if self._holds_memory(state):
            self._release(state)
        for""",
        """        sample = state.live[0]
        if sample.num_computed >= state.request.num_prompt_tokens:
            self._release(state)
        for""",
        "abort_in_the_middle_of_a_prompt_leaves_nothing",
    ),
    Fault(
        "block leaked on abort while swapped",
        SCHEDULER,
        "return state.status is Status.RUNNING or state.swapped",
        "return state.status is Status.RUNNING",
        "abort_while_preempted_leaves_nothing",
    ),
    Fault(
        "a head that never fits blocks the queue",
        SCHEDULER,
        "        self._require_fits(request)\n",
        "",
        "a_request_that_never_fits_is_refused_and_blocks_nobody",
    ),
    Fault(
        "the last running request is preempted",
        SCHEDULER,
        "        return self.memory.grow(sample.sequence_id, missing)",
        """        if self.memory.usage().external < self.memory.block_size:
            return False
        return self.memory.grow(sample.sequence_id, missing)""",
        "a_request_that_just_fits_is_served",
    ),
    Fault(
        "copies of shared tails not made",
        ENGINE,
        "self._moves.append((self.kv_cache.copy_blocks, batch.copies))",
        "pass",
        "forked_is_independent",
    ),
    Fault(
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
    Fault(
        "swapped out before its copy was made",
        MANAGER,
        "BlockCopy(self._filled_by(block_id), host_id)",
        "BlockCopy(block_id, host_id)",
        "forked_under_pressure_is_independent",
    ),
    Fault(
        "samples fork before the prompt is computed",
        SCHEDULER,
        "if not state.forked and entry.end == state.target(entry.sample):",
        "if not state.forked:",
        "samples_compute_their_prompt_once",
    ),
    Fault(
        "a token in the middle of a prompt",
        SCHEDULER,
        "        if start + num_tokens == sample.num_tokens:",
        "        if start + num_tokens > 0:",
        "chunked_is_unchunked",
    ),
    Fault(
        "randomness shared by the batch",
        SAMPLING,
        "    rng = np.random.default_rng([request.seed, sample, position])",
        "    rng = np.random",
        "batched_is_one_at_a_time",
    ),
    Fault(
        "a victim keeps its place in memory",
        SCHEDULER,
        """        self._release(state)
        for sample in state.live:
            sample.num_computed""",
        """        for sample in state.live:
            sample.num_computed""",
        "preempted_is_unpreempted",
    ),
    Fault(
        "positions start at the chunk",
        ENGINE,
        "            positions += range(start, end)",
        "            positions += range(end - start)",
        "chunked_is_unchunked",
    ),
]
