"""Faults in the serving room, and the check of a notebook that notices.

Those that no notebook notices are in `serving_checks`.
"""

from cases.faults import Fault

REQUEST = "serving/request.py"
SCHEDULER = "serving/scheduler.py"
ENGINE = "serving/engine.py"
SIMULATOR = "serving/simulator.py"
SAMPLING = "serving/sampling.py"
METRICS = "serving/metrics.py"

FAULTS = [
    Fault(
        "waiting before running",
        "08_continuous_batching",
        SCHEDULER,
        "        batch = Batch(self.max_num_batched_tokens)\n",
        """        batch = Batch(self.max_num_batched_tokens)
        self._admit_waiting(batch)
""",
        "each_step_computes_what_the_table_says",
    ),
    Fault(
        "a static batch is refilled",
        "08_continuous_batching",
        SCHEDULER,
        "self._open = not self.running",
        "self._open = True",
        "the_engine_takes_as_many_steps_as_the_toy",
    ),
    Fault(
        "finished request keeps its region",
        "08_continuous_batching",
        SCHEDULER,
        """                if sample.reason is not None:
                    self.memory.release(sample.sequence_id)
""",
        "                pass\n",
        "each_step_computes_what_the_table_says",
    ),
    Fault(
        "prompt not cut to the budget",
        "08_continuous_batching",
        SCHEDULER,
        "num_tokens = min(left, batch.budget)",
        "num_tokens = left",
        "each_step_computes_what_the_table_says",
    ),
    Fault(
        "budget not charged",
        "08_continuous_batching",
        SCHEDULER,
        "        self.budget -= entry.num_tokens\n",
        "",
        "each_step_computes_what_the_table_says",
    ),
    Fault(
        "token in the middle of a prompt",
        "08_continuous_batching",
        SCHEDULER,
        "if start + num_tokens == sample.num_tokens:",
        "if True:",
        "each_step_computes_what_the_table_says",
    ),
    Fault(
        "one token too many",
        "08_continuous_batching",
        REQUEST,
        "len(self.output_token_ids) >= limit",
        "len(self.output_token_ids) > limit",
        "each_step_computes_what_the_table_says",
    ),
    Fault(
        "the queue turns when its head does not fit",
        "08_continuous_batching",
        SCHEDULER,
        """            if not self._admit(self.waiting[0]):
                return
""",
        """            if not self._admit(self.waiting[0]):
                self.waiting.rotate(-1)
                return
""",
        "the_rules_hold_on_100_random_workloads",
    ),
    Fault(
        "seats not counted",
        "08_continuous_batching",
        SCHEDULER,
        "return batch.budget > 0 and len(state.unfinished) <= free",
        "return batch.budget > 0",
        "the_rules_hold_on_100_random_workloads",
    ),
    Fault(
        "static batch refilled",
        "08_continuous_batching",
        SCHEDULER,
        "self._open = not self.running",
        "self._open = True",
        "the_engine_takes_as_many_steps_as_the_toy",
    ),
    Fault(
        "positions count from the chunk",
        "08_continuous_batching",
        ENGINE,
        "positions += range(start, end)",
        "positions += range(end - start)",
        "static_and_continuous_generate_what_each_does_alone",
    ),
    Fault(
        "logits of a chunk's first token",
        "08_continuous_batching",
        ENGINE,
        "sampled_rows.append(len(token_ids) - 1)",
        "sampled_rows.append(len(token_ids) - entry.num_tokens)",
        "static_and_continuous_generate_what_each_does_alone",
    ),
    Fault(
        "chunk forgets the ones before",
        "08_continuous_batching",
        ENGINE,
        "            [entry.end for entry in entries],\n",
        "            [entry.num_tokens for entry in entries],\n",
        "static_and_continuous_generate_what_each_does_alone",
    ),
    Fault(
        "slots from the region's start",
        "08_continuous_batching",
        ENGINE,
        "        for position in range(start, end)\n",
        "        for position in range(end - start)\n",
        "static_and_continuous_generate_what_each_does_alone",
    ),
    Fault(
        "abort keeps the region",
        "08_continuous_batching",
        SCHEDULER,
        """        if self._holds_memory(state):
            self._release(state)
""",
        "",
        "an_abort_in_mid_prompt_makes_room_at_once",
    ),
    Fault(
        "abort leaves the queue",
        "08_continuous_batching",
        SCHEDULER,
        "        self._queues[state.status].remove(state)\n",
        "",
        "an_abort_in_mid_prompt_makes_room_at_once",
    ),
    Fault(
        "TTFT from the start of the run",
        "08_continuous_batching",
        METRICS,
        "self.report.ttft.add(now - known.request.arrival)",
        "self.report.ttft.add(now)",
        "latencies_are_as_counted_by_hand",
    ),
    Fault(
        "gaps from the first token",
        "08_continuous_batching",
        METRICS,
        "known.last[output.sample] = now",
        "known.last.setdefault(output.sample, now)",
        "latencies_are_as_counted_by_hand",
    ),
    Fault(
        "queueing to the end of the step",
        "08_continuous_batching",
        METRICS,
        "report.queueing.add(began - request.arrival)",
        "report.queueing.add(ended - request.arrival)",
        "latencies_are_as_counted_by_hand",
    ),
    Fault(
        "goodput asks for one of the two",
        "08_continuous_batching",
        METRICS,
        "return in_time and gap <= slo.inter_token",
        "return in_time or gap <= slo.inter_token",
        "throughput_goodput_occupancy_are_as_counted_by_hand",
    ),
    Fault(
        "throughput over requests",
        "08_continuous_batching",
        METRICS,
        "_ratio(self.output_tokens, self.seconds)",
        "_ratio(self.requests, self.seconds)",
        "throughput_goodput_occupancy_are_as_counted_by_hand",
    ),
    Fault(
        "histogram bins of 10 %",
        "08_continuous_batching",
        METRICS,
        "GROWTH = 1.02",
        "GROWTH = 1.1",
        "percentiles_are_within_1_per_cent",
    ),
    Fault(
        "percentile rank off",
        "08_continuous_batching",
        METRICS,
        "percent * self.count / 100, 6",
        "(100 - percent) * self.count / 100, 6",
        "percentiles_are_within_1_per_cent",
    ),
    Fault(
        "clock ignores tokens",
        "08_continuous_batching",
        SIMULATOR,
        "            + self.per_token * batch.num_tokens\n",
        "",
        "waits_of_a_and_of_l_are_as_counted_by_hand",
    ),
    Fault(
        "promised prompt counted as held",
        "08_continuous_batching",
        SCHEDULER,
        """            token_states=usage.token_states - promised,
            reserved=usage.reserved + promised,
""",
        """            token_states=usage.token_states,
            reserved=usage.reserved,
""",
        "throughput_goodput_occupancy_are_as_counted_by_hand",
    ),
    Fault(
        "output cleared on preemption",
        "09_paged_engine",
        SCHEDULER,
        "            sample.num_computed = sample.num_scheduled = 0\n",
        """            sample.num_computed = sample.num_scheduled = 0
            sample.output_token_ids.clear()
            sample.num_tokens = state.request.num_prompt_tokens
""",
        "preemption_keeps_the_output",
    ),
    Fault(
        "resume from the prompt alone",
        "09_paged_engine",
        SCHEDULER,
        "            sample.num_computed = sample.num_scheduled = 0\n",
        """            sample.num_computed = sample.num_scheduled = 0
            sample.num_tokens = state.request.num_prompt_tokens
""",
        "a_resumed_request_computes_its_prompt_and_its_output",
    ),
    Fault(
        "last sampled token charged a slot",
        "09_paged_engine",
        REQUEST,
        "        return self.num_prompt_tokens + self.max_new_tokens - 1",
        "        return self.num_prompt_tokens + self.max_new_tokens",
        "the_last_token_needs_no_slot",
    ),
    Fault(
        "re-prefill's token discarded",
        "09_paged_engine",
        SCHEDULER,
        """                if here:
                    outputs.append(sample.take(token_id))""",
        """                again = entry.start == 0 and sample.output_token_ids
                if here and not again:
                    outputs.append(sample.take(token_id))""",
        "a_resumed_request_gets_its_next_token_at_once",
    ),
    Fault(
        "oldest preempted instead of newest",
        "09_paged_engine",
        SCHEDULER,
        "        state = self.running.pop()\n",
        "        state = self.running.pop(0)\n",
        "the_newest_is_preempted",
    ),
    Fault(
        "finished request requeued",
        "09_paged_engine",
        SCHEDULER,
        """                self._forget(state)
                self.counts.finished += 1""",
        """                state.status = Status.WAITING
                self.waiting.append(state)
                self.counts.finished += 1""",
        "every_request_is_served",
    ),
    Fault(
        "victim left in the batch",
        "09_paged_engine",
        SCHEDULER,
        "        batch.withdraw(state.request)\n",
        "",
        "who_is_preempted_is_not_computed",
    ),
    Fault(
        "swap out copies nothing",
        "09_paged_engine",
        ENGINE,
        "self._moves.append((self.kv_cache.swap_out, batch.swap_out))",
        "pass",
        "swapped_texts_are_the_recomputed_ones",
    ),
    Fault(
        "swap in copies nothing",
        "09_paged_engine",
        ENGINE,
        "self._moves.append((self.kv_cache.swap_in, batch.swap_in))",
        "pass",
        "swapped_texts_are_the_recomputed_ones",
    ),
    Fault(
        "waiting before preempted",
        "09_paged_engine",
        SCHEDULER,
        """        if self.preempted:
            return  # they arrived before all that wait
""",
        "",
        "a_preempted_request_resumes_before_a_new_one_starts",
    ),
    Fault(
        "watermark on running requests",
        "09_paged_engine",
        SCHEDULER,
        "        return self.memory.grow(sample.sequence_id, missing)",
        """        free = self.memory.usage().external
        if free < missing + self._keep_free() and len(self.running) > 1:
            return False
        return self.memory.grow(sample.sequence_id, missing)""",
        "running_requests_use_what_admission_leaves_free",
    ),
    Fault(
        "watermark ignored at admission",
        "09_paged_engine",
        SCHEDULER,
        "math.ceil(share) + growth",
        "growth",
        "admission_leaves_the_watermark_free",
    ),
    Fault(
        "aborted while queued, still in the queue",
        "09_paged_engine",
        SCHEDULER,
        "        self._queues[state.status].remove(state)",
        """        if state.status is not Status.WAITING:
            self._queues[state.status].remove(state)""",
        "pool_is_whole_after_an_abort_in_the_queue",
    ),
    Fault(
        "block leaked on abort mid-chunk",
        "09_paged_engine",
        SCHEDULER,
        """        if self._holds_memory(state):
            self._release(state)""",
        """        done = state.unfinished[0].output_token_ids
        if done and self._holds_memory(state):
            self._release(state)""",
        "pool_is_whole_after_an_abort_in_the_middle_of_a_prompt",
    ),
    Fault(
        "block leaked on abort while swapped",
        "09_paged_engine",
        SCHEDULER,
        """        if self._holds_memory(state):
            self._release(state)""",
        """        if state.status is Status.RUNNING:
            self._release(state)""",
        "both_pools_are_whole_after_an_abort_on_the_host",
    ),
    Fault(
        "head that never fits accepted",
        "09_paged_engine",
        SCHEDULER,
        """        if not self.memory.fits(
            request.max_tokens, request.num_samples, request.num_prompt_tokens
        ):""",
        "        if request.max_tokens < 1:",
        "what_can_never_fit_does_not_block_the_queue",
    ),
    Fault(
        "no fall back when the host is full",
        "09_paged_engine",
        SCHEDULER,
        """        if pairs is None:
            return False  # the host is full
""",
        "",
        "a_full_host_falls_back_to_recomputing",
    ),
    Fault(
        "samples of a request share their randomness",
        "09_paged_engine",
        SAMPLING,
        "[request.seed, sample, position]",
        "[request.seed, position]",
        "samples_of_a_request_go_their_own_ways",
    ),
    Fault(
        "copies of shared tails not made",
        "10_paging_for_free",
        ENGINE,
        "self._moves.append((self.kv_cache.copy_blocks, batch.copies))",
        "pass",
        "every_way_generates_the_same_tokens",
    ),
    Fault(
        "table lacks the partly filled block",
        "10_paging_for_free",
        ENGINE,
        "counts = [cdiv(length, size) for length in inputs.seq_lens]",
        "counts = [max(1, length // size) for length in inputs.seq_lens]",
        "every_way_generates_the_same_tokens",
    ),
    Fault(
        "length without the step's token",
        "10_paging_for_free",
        ENGINE,
        "            [entry.end for entry in entries],\n",
        "            [max(1, entry.start) for entry in entries],\n",
        "every_way_generates_the_same_tokens",
    ),
]
