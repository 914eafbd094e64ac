"""The named list of faults: see test_faults.py."""

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    notebook: str
    module: str  # relative to the package
    old: str
    new: str
    check: str


ALLOCATOR = "memory/allocator.py"
TABLE = "memory/sequence_table.py"
REGIONS = "memory/reservation.py"
MANAGER = "memory/paged.py"
RESERVED = "memory/reserved.py"
WASTE = "memory/waste.py"
KV_CACHE = "attention/kv_cache.py"
CACHE_WRITE = "attention/write.py"
CPU = "attention/cpu/kernels.py"
GATHER = "attention/gather.py"
TRITON = "attention/triton/kernels.py"
CONTIGUOUS = "attention/contiguous.py"
REQUEST = "serving/request.py"
SCHEDULER = "serving/scheduler.py"
ENGINE = "serving/engine.py"
SIMULATOR = "serving/simulator.py"
SAMPLING = "serving/sampling.py"
METRICS = "serving/metrics.py"

FAULTS = [
    Fault(
        "double free accepted",
        "02_block_allocator",
        ALLOCATOR,
        """        if owners == 0:
            raise self._refused(block_id)
        self._refcounts[block_id] = owners - 1
        if owners == 1:""",
        """        self._refcounts[block_id] = max(0, owners - 1)
        if owners <= 1:""",
        "double_free_is_refused",
    ),
    Fault(
        "incref on a free block accepted",
        "02_block_allocator",
        ALLOCATOR,
        """        if self.refcount(block_id) == 0:
            raise self._refused(block_id)
        self._refcounts[block_id] += 1""",
        """        self._refcounts[block_id] += 1""",
        "incref_of_a_free_block_is_refused",
    ),
    Fault(
        "negative ids reach the list from its end",
        "02_block_allocator",
        ALLOCATOR,
        """        if not 0 <= block_id < self.num_blocks:
            raise self._refused(block_id)
        owners =""",
        "        owners =",
        "ids_outside_the_pool_are_refused",
    ),
    Fault(
        "leak on a failed allocate",
        "02_block_allocator",
        ALLOCATOR,
        """        if n > len(self._free):
            raise OutOfBlocks(needed=n, free=len(self._free))
        block_ids = [self._free.popleft() for _ in range(n)]
        for block_id in block_ids:
            self._refcounts[block_id] = 1
        return block_ids""",
        """        return [self.alloc() for _ in range(n)]""",
        "error_says_needed_and_free",
    ),
    Fault(
        "leak on a failed allocate that reports well",
        "02_block_allocator",
        ALLOCATOR,
        """        if n > len(self._free):
            raise OutOfBlocks(needed=n, free=len(self._free))
        block_ids =""",
        """        if n > len(self._free):
            free = len(self._free)
            self._refcounts[self._free.popleft()] = 1
            raise OutOfBlocks(needed=n, free=free)
        block_ids =""",
        "failed_allocate_takes_nothing",
    ),
    Fault(
        "free ignores other owners",
        "02_block_allocator",
        ALLOCATOR,
        """        self._refcounts[block_id] = owners - 1
        if owners == 1:""",
        """        self._refcounts[block_id] = 0
        if owners >= 1:""",
        "shared_block_survives_one_free",
    ),
    Fault(
        "last in, first out",
        "02_block_allocator",
        ALLOCATOR,
        "            self._free.append(block_id)",
        "            self._free.appendleft(block_id)",
        "freed_block_comes_back_last",
    ),
    Fault(
        "alloc keeps the block in the free list",
        "02_block_allocator",
        ALLOCATOR,
        "[self._free.popleft() for _ in range(n)]",
        "[self._free[0] for _ in range(n)]",
        "alloc_returns_distinct_blocks",
    ),
    Fault(
        "alloc on an empty pool returns no error",
        "02_block_allocator",
        ALLOCATOR,
        """        if not self._free:
            raise OutOfBlocks(needed=1, free=0)
        block_id = self._free.popleft()""",
        """        block_id = self._free.popleft() if self._free else -1""",
        "alloc_fails_when_pool_empty",
    ),
    Fault(
        "alloc forgets its own count",
        "02_block_allocator",
        ALLOCATOR,
        """        self._refcounts[block_id] = 1
        return block_id
""",
        """        self._refcounts[block_id] += block_id != 3
        return block_id
""",
        "random_operations_match_a_model",
    ),
    Fault(
        "assert_consistent looks at nothing",
        "02_block_allocator",
        ALLOCATOR,
        "for block_id, owners in enumerate(self._refcounts):",
        "for block_id, owners in ():",
        "leak_is_consistent_but_the_pool_is_not_whole",
    ),
    Fault(
        "blocks past the first 64 are never handed out",
        "02_block_allocator",
        ALLOCATOR,
        "deque(range(self.num_blocks))",
        "deque(range(min(64, self.num_blocks)))",
        "bookkeeping_is_tiny_beside_a_block",
    ),
    # --- notebook 03 ---
    Fault(
        "grows a token too late",
        "03_block_tables",
        TABLE,
        "        if self.length == self.capacity:",
        "        if self.length > self.capacity:",
        "block_size_1_takes_a_block_for_every_token",
    ),
    Fault(
        "grows a token too early",
        "03_block_tables",
        TABLE,
        "        if self.length == self.capacity:",
        "        if self.length + 1 >= self.capacity:",
        "full_table_grows_at_the_next_token_not_before",
    ),
    Fault(
        "remainder test fails at block size 1",
        "03_block_tables",
        TABLE,
        "        if self.length == self.capacity:",
        "        if (self.length + 1) % self.block_size == 1:",
        "block_size_1_takes_a_block_for_every_token",
    ),
    Fault(
        "extend takes a block too few at a boundary",
        "03_block_tables",
        TABLE,
        "self._blocks_for(self.length + n) - len",
        "self._blocks_for(self.length + n - 1) - len",
        "growth_by_one_and_at_once_hold_the_same_blocks",
    ),
    Fault(
        "extend takes a block too many",
        "03_block_tables",
        TABLE,
        "self._blocks_for(self.length + n) - len",
        "(self.length + n) // self.block_size + 1 - len",
        "full_table_grows_at_the_next_token_not_before",
    ),
    Fault(
        "wrong block in translate",
        "03_block_tables",
        TABLE,
        "self.block_ids[block], offset",
        "self.block_ids[block - 1], offset",
        "translate_gives_block_and_offset",
    ),
    Fault(
        "logical for physical block in translate",
        "03_block_tables",
        TABLE,
        "self.block_ids[block], offset",
        "block, offset",
        "translate_gives_block_and_offset",
    ),
    Fault(
        "translate past the end",
        "03_block_tables",
        TABLE,
        "if not 0 <= position < self.length:",
        "if not 0 <= position < self.capacity:",
        "positions_without_a_token_are_refused",
    ),
    Fault(
        "negative position counts from the end",
        "03_block_tables",
        TABLE,
        "if not 0 <= position < self.length:",
        "if position >= self.length:",
        "positions_without_a_token_are_refused",
    ),
    Fault(
        "slot without its offset",
        "03_block_tables",
        TABLE,
        "operator.index(block_id) * self.block_size + offset",
        "operator.index(block_id) * self.block_size",
        "slot_is_block_times_size_plus_offset",
    ),
    Fault(
        "truncate keeps a block too many",
        "03_block_tables",
        TABLE,
        "> self._blocks_for(length):",
        "> self._blocks_for(length) + 1:",
        "truncate_keeps_exactly_the_blocks_with_a_token",
    ),
    Fault(
        "truncate frees a block too many",
        "03_block_tables",
        TABLE,
        "> self._blocks_for(length):",
        "> length // self.block_size:",
        "truncate_keeps_exactly_the_blocks_with_a_token",
    ),
    Fault(
        "truncate forgets to free",
        "03_block_tables",
        TABLE,
        """            allocator.free(self.block_ids[-1])
            self.block_ids.pop()""",
        "            self.block_ids.pop()",
        "truncate_keeps_exactly_the_blocks_with_a_token",
    ),
    Fault(
        "free forgets a block",
        "03_block_tables",
        TABLE,
        "self.truncate(allocator, 0)",
        "self.truncate(allocator, min(1, self.length))",
        "free_gives_back_every_block",
    ),
    Fault(
        "leak on a failed extend",
        "03_block_tables",
        TABLE,
        "blocks = allocator.allocate(needed)",
        "blocks = [allocator.alloc() for _ in range(needed)]",
        "extend_without_room_changes_nothing",
    ),
    Fault(
        "failed append counts the token",
        "03_block_tables",
        TABLE,
        """        if self.length == self.capacity:
            self.block_ids.append(allocator.alloc())""",
        """        if self.length == self.capacity:
            self.length += 1
            self.block_ids.append(allocator.alloc())
            self.length -= 1""",
        "append_without_room_changes_nothing",
    ),
    Fault(
        "free stops part way at a lost block",
        "03_block_tables",
        TABLE,
        "            _owners(allocator, block_id, listed)",
        "            pass",
        "its_refused_free_changes_nothing",
    ),
    # --- notebook 04 ---
    Fault(
        "missing incref",
        "04_copy_on_write",
        TABLE,
        """            allocator.incref(block_id)
""",
        "",
        "full_blocks_are_shared_by_refcount",
    ),
    Fault(
        "fork without copy",
        "04_copy_on_write",
        TABLE,
        """        elif self._tail_is_shared(allocator):
            copy = self._replace_tail(allocator, allocator.alloc())
""",
        "",
        "first_writer_copies_the_tail",
    ),
    Fault(
        "tail replaced and the copy forgotten",
        "04_copy_on_write",
        TABLE,
        "copy = self._replace_tail(",
        "self._replace_tail(",
        "first_writer_copies_the_tail",
    ),
    Fault(
        "fork frees the parent's tail",
        "04_copy_on_write",
        TABLE,
        "    return child",
        """    if parent.length < parent.capacity:
        allocator.free(parent.block_ids[-1])
        child.block_ids[-1] = allocator.alloc()
    return child""",
        "child_reads_what_the_parent_wrote",
    ),
    Fault(
        "copy in the wrong direction",
        "04_copy_on_write",
        TABLE,
        "BlockCopy(source=shared, destination=new)",
        "BlockCopy(source=new, destination=shared)",
        "a_write_is_seen_by_its_writer_alone",
    ),
    Fault(
        "copy of a private tail",
        "04_copy_on_write",
        TABLE,
        "_owners(allocator, self.block_ids[-1]) > 1",
        "_owners(allocator, self.block_ids[-1]) > 0",
        "a_lone_writer_copies_nothing",
    ),
    Fault(
        "leak on a failed fork",
        "04_copy_on_write",
        TABLE,
        """        for block_id in shared:
            allocator.free(block_id)
        raise""",
        "        raise",
        "refused_fork_changes_nothing",
    ),
    Fault(
        "leak on a failed extend of a shared tail",
        "04_copy_on_write",
        TABLE,
        "fresh, *blocks = allocator.allocate(1 + needed)",
        """fresh = allocator.alloc()
            blocks = allocator.allocate(needed)""",
        "extend_with_room_only_for_the_copy_changes_nothing",
    ),
    Fault(
        "failed append has let go of the tail",
        "04_copy_on_write",
        TABLE,
        "copy = self._replace_tail(allocator, allocator.alloc())",
        """allocator.free(self.block_ids[-1])
            copy = BlockCopy(self.block_ids[-1], allocator.alloc())
            self.block_ids[-1] = copy.destination""",
        "append_in_a_full_pool_changes_nothing",
    ),
    Fault(
        "append never lets go of the shared tail",
        "04_copy_on_write",
        TABLE,
        """        self.block_ids[-1] = new
        allocator.free(shared)
""",
        """        self.block_ids[-1] = new
""",
        "last_writer_writes_in_place",
    ),
    Fault(
        "truncate forgets its share of a shared block",
        "04_copy_on_write",
        TABLE,
        """            allocator.free(self.block_ids[-1])
            self.block_ids.pop()""",
        """            if allocator.refcount(self.block_ids[-1]) == 1:
                allocator.free(self.block_ids[-1])
            self.block_ids.pop()""",
        "the_last_owner_can_write_in_a_full_pool",
    ),
    Fault(
        "truncate gives up the shared tail it keeps",
        "04_copy_on_write",
        TABLE,
        """            self.block_ids.pop()
        self.length = length""",
        """            self.block_ids.pop()
        self.length = length
        if length and allocator.refcount(self.block_ids[-1]) > 1:
            allocator.free(self.block_ids[-1])""",
        "truncate_drops_an_owner_and_keeps_the_block_it_cuts",
    ),
    Fault(
        "extend does not copy a shared tail",
        "04_copy_on_write",
        TABLE,
        """        if self._tail_is_shared(allocator):
            fresh""",
        """        if False:
            fresh""",
        "extend_with_room_only_for_the_copy_changes_nothing",
    ),
    Fault(
        "extend forgets the copy",
        "04_copy_on_write",
        TABLE,
        "copies.append(self._replace_tail(allocator, fresh))",
        "self._replace_tail(allocator, fresh)",
        "extend_copies_a_shared_tail",
    ),
    # --- notebook 05 ---
    Fault(
        "waste counted against the tokens",
        "05_memory_waste",
        WASTE,
        "float(1 - held.sum() / reserved.sum())",
        "float(reserved.sum() / held.sum() - 1)",
        "waste_is_a_share_of_what_is_reserved",
    ),
    Fault(
        "split counted against the slots in use",
        "05_memory_waste",
        WASTE,
        "whole = self.capacity * self.steps",
        "whole = sum(self.slot_steps[:3])",
        "per_cent_is_of_the_whole_pool",
    ),
    Fault(
        "bound off by one",
        "05_memory_waste",
        WASTE,
        "return (block_size - 1) / float(",
        "return block_size / float(",
        "bound_is_reached_only_one_past_a_block",
    ),
    Fault(
        "expected tail off by a half",
        "05_memory_waste",
        WASTE,
        "empty = (block_size - 1) / 2",
        "empty = block_size / 2",
        "waste_is_as_expected_on_average",
    ),
    Fault(
        "buddy without merging",
        "05_memory_waste",
        REGIONS,
        "while start ^ size in self._free[size]:",
        "while False:",
        "buddies_merge_into_one_hole",
    ),
    Fault(
        "buddy merges only once",
        "05_memory_waste",
        REGIONS,
        "while start ^ size in self._free[size]:",
        "if start ^ size in self._free[size]:",
        "buddies_merge_into_one_hole",
    ),
    Fault(
        "the oldest is preempted",
        "05_memory_waste",
        WASTE,
        "preempted.append(running.pop())",
        "preempted.append(running.pop(0))",
        "loop_does_what_the_pencil_does",
    ),
    Fault(
        "whoever cannot grow is preempted",
        "05_memory_waste",
        WASTE,
        "preempted.append(running.pop())",
        "preempted.append(running.pop(grown))",
        "loop_does_what_the_pencil_does",
    ),
    Fault(
        "preemption loses the progress",
        "05_memory_waste",
        WASTE,
        "            memory.release(preempted[-1].request_id)",
        """            memory.release(preempted[-1].request_id)
            preempted[-1].held = 1""",
        "loop_does_what_the_pencil_does",
    ),
    Fault(
        "preempted requests go last",
        "05_memory_waste",
        WASTE,
        "waiting.appendleft(newest)",
        "waiting.append(newest)",
        "loop_does_what_the_pencil_does",
    ),
    Fault(
        "recomputed tokens not counted",
        "05_memory_waste",
        WASTE,
        "seen.recomputed_tokens += newest.held",
        "seen.recomputed_tokens += 1",
        "preempted_tokens_are_counted",
    ),
    Fault(
        "usage counts reserved slots twice",
        "05_memory_waste",
        RESERVED,
        "internal += region.size - max(final, region.held)",
        "internal += region.size - region.held",
        "usage_is_as_counted_by_hand",
    ),
    Fault(
        "paged usage counts reserved slots twice",
        "05_memory_waste",
        MANAGER,
        "internal += table.capacity - end",
        "internal += table.capacity - table.length",
        "usage_is_as_counted_by_hand",
    ),
    Fault(
        "pow2 without rounding",
        "05_memory_waste",
        RESERVED,
        "rounded = num_tokens + round_up_to_power_of_two(output)",
        "rounded = num_tokens + output",
        "usage_is_as_counted_by_hand",
    ),
    Fault(
        "paged release leaks",
        "05_memory_waste",
        MANAGER,
        """            self._leave(table)
        del self._finals""",
        "        del self._finals",
        "loop_does_what_the_pencil_does",
    ),
    Fault(
        "the last sampled token is written",
        "05_memory_waste",
        WASTE,
        "prompt + output - 1)",
        "prompt + output)",
        "loop_does_what_the_pencil_does",
    ),
    Fault(
        "offset off by one",
        "06_paged_kv_cache",
        CACHE_WRITE,
        "cache[blocks, :, offsets] = rows",
        "cache[blocks, :, offsets - 1] = rows",
        "pytorch_leaves_the_same_bytes",
    ),
    Fault(
        # Stays inside the cache: a write outside would end the process.
        "compiled offset counted from the block's end",
        "06_paged_kv_cache",
        CPU,
        "offset = slot - block * cache.block_size",
        "offset = (block + 1) * cache.block_size - 1 - slot",
        "each_token_lies_in_its_slot_and_nothing_elsewhere",
    ),
    Fault(
        "keys written as values",
        "06_paged_kv_cache",
        CACHE_WRITE,
        "_write(value[used], value_cache, ",
        "_write(key[used], value_cache, ",
        "pytorch_leaves_the_same_bytes",
    ),
    Fault(
        "keys written as values, compiled",
        "06_paged_kv_cache",
        CPU,
        "_write_rows(value, token, values, slot)",
        "_write_rows(key, token, values, slot)",
        "each_token_lies_in_its_slot_and_nothing_elsewhere",
    ),
    Fault(
        "every layer written into the first",
        "06_paged_kv_cache",
        KV_CACHE,
        "write_kv(key, value, keys[layer], values[layer], slots)",
        "write_kv(key, value, keys[0], values[0], slots)",
        "each_token_lies_in_its_slot_and_nothing_elsewhere",
    ),
    Fault(
        "one slot given to two tokens",
        "06_paged_kv_cache",
        CACHE_WRITE,
        "if bool((counts > 1).any()):",
        "if False:",
        "bad_slots_and_layers_are_refused_and_nothing_is_written",
    ),
    Fault(
        "negative numbers count from the end",
        "06_paged_kv_cache",
        KV_CACHE,
        "if not 0 <= operator.index(value) < limit:",
        "if operator.index(value) >= limit:",
        "bad_slots_and_layers_are_refused_and_nothing_is_written",
    ),
    Fault(
        "slot -1 is written",
        "06_paged_kv_cache",
        CACHE_WRITE,
        "used = (slots >= 0) & (",
        "used = (slots >= -1) & (",
        "pytorch_leaves_the_same_bytes",
    ),
    Fault(
        "slot -1 is written, compiled",
        "06_paged_kv_cache",
        CPU,
        "slot = slots[token]",
        "slot = max(0, slots[token])",
        "slot_minus_1_writes_nothing",
    ),
    Fault(
        "loop gathers in the order of the pool",
        "06_paged_kv_cache",
        GATHER,
        "for block_id in tables.flatten().tolist():",
        "for block_id in sorted(tables.flatten().tolist()):",
        "loop_returns_the_tokens_in_order",
    ),
    Fault(
        "partly filled tail not gathered",
        "06_paged_kv_cache",
        GATHER,
        "tables = tables[:, : cdiv(length, block_size)]",
        "tables = tables[:, : length // block_size]",
        "loop_returns_the_tokens_in_order",
    ),
    Fault(
        "heads and blocks mixed up",
        "06_paged_kv_cache",
        GATHER,
        "index = (ids * kv_heads + heads).flatten()",
        "index = (ids + num_blocks * heads).flatten()",
        "index_select_returns_the_tokens_in_order",
    ),
    Fault(
        "slots past the end are returned",
        "06_paged_kv_cache",
        GATHER,
        "    return _select(cache, tables)[:, :, :length]",
        "    return _select(cache, tables)",
        "index_select_returns_the_tokens_in_order",
    ),
    Fault(
        "ids out of range are gathered",
        "06_paged_kv_cache",
        GATHER,
        "    if len(bad) > 0:",
        "    if False:",
        "gathers_refuse_ids_and_lengths_out_of_range",
    ),
    Fault(
        "workspace never grows",
        "06_paged_kv_cache",
        GATHER,
        "if self._bytes.nbytes < needed:",
        "if self._bytes.nbytes == 0:",
        "workspace_returns_the_tokens_in_order",
    ),
    Fault(
        "workspace grows a block at a time",
        "06_paged_kv_cache",
        GATHER,
        "size = max(needed, 2 * self._bytes.nbytes)",
        "size = needed",
        "workspace_takes_memory_only_to_grow_and_then_doubles",
    ),
    Fault(
        "a second copy",
        "06_paged_kv_cache",
        GATHER,
        "    return _select(cache, tables)[:, :, :length]",
        "    return _select(cache, tables)[:, :, :length].clone()",
        "a_gather_moves_three_times_the_cache",
    ),
    Fault(
        "gather reads the first layer",
        "06_paged_kv_cache",
        KV_CACHE,
        "gather_index_select(self.values[layer], table, length)",
        "gather_index_select(self.values[0], table, length)",
        "paged_equals_contiguous_exactly",
    ),
    Fault(
        "region read from the pool's start",
        "06_paged_kv_cache",
        KV_CACHE,
        "region = slice(start, start + length)",
        "region = slice(0, length)",
        "paged_equals_contiguous_exactly",
    ),
    Fault(
        "one workspace for keys and values",
        "06_paged_kv_cache",
        GATHER,
        "(workspaces[1], inputs.value_cache, inputs.v_scale)",
        "(workspaces[0], inputs.value_cache, inputs.v_scale)",
        "paged_attention_equals_the_definition",
    ),
    Fault(
        "attention reads to the end of the block",
        "06_paged_kv_cache",
        GATHER,
        "seen = slice(start - first * size, stop - first * size)",
        "seen = slice(start - first * size, None)",
        "paged_attention_equals_the_definition",
    ),
    Fault(
        "wrong KV head",
        "06_paged_kv_cache",
        GATHER,
        "packed = query.view(num_seqs, num_queries, kv_heads, group, dim)",
        """packed = query.view(num_seqs, num_queries, group, kv_heads, dim)
    packed = packed.transpose(2, 3)""",
        "paged_attention_equals_the_definition",
    ),
    Fault(
        "only the first layer copied",
        "06_paged_kv_cache",
        KV_CACHE,
        """        key_sources + value_sources,
        key_destinations + value_destinations,""",
        """        key_sources[:1] + value_sources[:1],
        key_destinations[:1] + value_destinations[:1],""",
        "the_first_writer_moves_to_a_copy",
    ),
    Fault(
        "values not copied",
        "06_paged_kv_cache",
        KV_CACHE,
        """        key_sources + value_sources,
        key_destinations + value_destinations,""",
        """        key_sources,
        key_destinations,""",
        "the_first_writer_moves_to_a_copy",
    ),
    Fault(
        "block copied in the wrong direction",
        "06_paged_kv_cache",
        KV_CACHE,
        "new[pair.destination] = old[pair.source]",
        "old[pair.source] = new[pair.destination]",
        "the_first_writer_moves_to_a_copy",
    ),
    Fault(
        "copies in reverse order",
        "06_paged_kv_cache",
        KV_CACHE,
        """        for pair in pairs:
            new[""",
        """        for pair in reversed(pairs):
            new[""",
        "copies_are_made_in_order",
    ),
    Fault(
        "two copies into one block",
        "06_paged_kv_cache",
        KV_CACHE,
        "        taken.add(destination)",
        "        taken.clear()",
        "bad_copies_are_refused_and_nothing_is_copied",
    ),
    Fault(
        "host blocks share the device's memory",
        "06_paged_kv_cache",
        KV_CACHE,
        "layers(num_host_blocks, head_dim, **host)",
        "[keys[:num_host_blocks] for keys in self.keys]",
        "swapped_bytes_come_back_equal",
    ),
    Fault(
        "swap in forgets the values",
        "06_paged_kv_cache",
        KV_CACHE,
        "self.host_keys, self.keys, self.host_values, self.values)",
        "self.host_keys, self.keys, self.values, self.values)",
        "swapped_bytes_come_back_equal",
    ),
    # --- notebook 07 ---
    Fault(
        "missing rescale of one head",
        "07_triton_paged_attention",
        TRITON,
        "        mixed = mixed * rescale + tl.sum(weights[:, None] * v, 0)",
        "        mixed = mixed + tl.sum(weights[:, None] * v, 0)",
        "per_head_kernel_equals_float64",
    ),
    Fault(
        "wrong KV head for a query head",
        "07_triton_paged_attention",
        TRITON,
        "    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)",
        "    kv_head = head % NUM_KV_HEADS",
        "per_head_kernel_equals_float64",
    ),
    Fault(
        "values unmasked",
        "07_triton_paged_attention",
        TRITON,
        "values + at, mask=live[:, None], other=0.0).to(tl.float32)",
        "values + at).to(tl.float32)",
        "per_head_kernel_equals_float64",
    ),
    Fault(
        "keys past the end are loaded",
        "07_triton_paged_attention",
        TRITON,
        "keys + at, mask=live[:, None], other=0.0).to(tl.float32)",
        "keys + at).to(tl.float32)",
        "kernels_load_what_was_predicted",
    ),
    Fault(
        "missing rescale of the total",
        "07_triton_paged_attention",
        TRITON,
        "    total = total * rescale + tl.sum(weights, 1)",
        "    total = total + tl.sum(weights, 1)",
        "grouped_kernel_equals_float64",
    ),
    Fault(
        "a row without a token is NaN",
        "07_triton_paged_attention",
        TRITON,
        "    return mixed / tl.where(none, 1.0, total)[:, None]",
        "    return mixed / total[:, None]",
        "grouped_kernel_equals_float64",
    ),
    Fault(
        "remainder by a bit mask",
        "07_triton_paged_attention",
        TRITON,
        "        slot += position % BLOCK_SIZE",
        "        slot += position & (BLOCK_SIZE - 1)",
        "tiled_kernel_equals_float64_at_any_block_size",
    ),
    Fault(
        "tile looks up one block id",
        "07_triton_paged_attention",
        TRITON,
        "tl.load(table + position // BLOCK_SIZE, mask=live, other=0)",
        "tl.load(table + start // BLOCK_SIZE + 0 * position)",
        "tiled_kernel_equals_float64_at_any_block_size",
    ),
    Fault(
        "last partial tile dropped",
        "07_triton_paged_attention",
        TRITON,
        """    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        live = position < end""",
        """    for start in range(begin, end // TILE * TILE, TILE):
        position = start + tl.arange(0, TILE)
        live = position < end""",
        "tiled_kernel_equals_float64_at_any_block_size",
    ),
    Fault(
        "tokens past the last even split lost",
        "07_triton_paged_attention",
        TRITON,
        "    per_split = tl.cdiv(tl.cdiv(length, TILE), SPLITS) * TILE",
        "    per_split = tl.cdiv(length, TILE) // SPLITS * TILE",
        "split_kernels_equal_float64",
    ),
    Fault(
        "last split lost",
        "07_triton_paged_attention",
        TRITON,
        "    used = split < splits",
        "    used = split < splits - 1",
        "split_kernels_equal_float64",
    ),
    Fault(
        "soft cap that cancels where scores are small",
        "07_triton_paged_attention",
        TRITON,
        "    return tl.where(square < 0.04, small, large)",
        "    return large",
        "softcap_is_exact",
    ),
    Fault(
        "largest L not taken off",
        "07_triton_paged_attention",
        TRITON,
        """    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp(lses - base)""",
        """    base = 0.0
    weights = tl.exp(lses - base)""",
        "split_kernels_equal_float64",
    ),
    Fault(
        "empty split weighs as much as a score of 0",
        "07_triton_paged_attention",
        TRITON,
        '    return tl.where(none, float("-inf"), largest + log_total)',
        "    return tl.where(none, 0.0, largest + log_total)",
        "split_kernels_equal_float64",
    ),
    Fault(
        "keys' strides used for values",
        "07_triton_paged_attention",
        TRITON,
        "kv_head * value_stride_head + offset * value_stride_slot",
        "kv_head * key_stride_head + offset * key_stride_slot",
        "strides_are_followed",
    ),
    Fault(
        "a token sees the next one",
        "07_triton_paged_attention",
        TRITON,
        "position[None, :] <= row_position[:, None])",
        "position[None, :] <= row_position[:, None] + 1)",
        "prefill_is_causal",
    ),
    Fault(
        "window a token too long",
        "07_triton_paged_attention",
        TRITON,
        "(position[None, :] > row_position[:, None] - window)",
        "(position[None, :] >= row_position[:, None] - window)",
        "window_is_exact",
    ),
    Fault(
        "ALiBi prefers what is far away",
        "07_triton_paged_attention",
        TRITON,
        "(position - (length - 1)).to(tl.float32)",
        "(length - 1 - position).to(tl.float32)",
        "alibi_is_exact",
    ),
    Fault(
        "sink forgotten in the total",
        "07_triton_paged_attention",
        TRITON,
        "    total = total * rescale + tl.exp(sink - base)",
        "    total = total * rescale",
        "sinks_are_exact",
    ),
    Fault(
        "float8 scale of the values dropped",
        "07_triton_paged_attention",
        TRITON,
        "        mixed = mixed * tl.load(v_scale + kv_head)",
        "        mixed = mixed * 1.0",
        "float8_caches_are_scaled",
    ),
    Fault(
        "a missing block passes for zeros",
        "07_triton_paged_attention",
        TRITON,
        """        scores = tl.where(known[None, :], scores, float("nan"))
""",
        "",
        "a_missing_block_makes_its_sequence_nan_and_no_other",
    ),
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
        "return batch.budget > 0 and len(state.live) <= free",
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
        "promises not counted",
        "09_paged_engine",
        MANAGER,
        """        table.extend(self.allocator, num_tokens)
        self._tables[request_id] = table""",
        "        self._tables[request_id] = table",
        "a_chunked_prompt_has_all_its_blocks_from_the_start",
    ),
    Fault(
        "admission does not look",
        "09_paged_engine",
        MANAGER,
        """        if not self._leaves(needed, keep_free):
            return False
        table.extend""",
        "        table.extend",
        "one_is_admitted_where_one_has_room",
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
            return  # they were here first
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
        """        done = state.live[0].output_token_ids
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
        # All engines write alike, so they agree with each other.
        "keys written as values by every engine",
        "10_paging_for_free",
        CACHE_WRITE,
        "cpu_write(key, value, key_cache, ",
        "cpu_write(key, key, key_cache, ",
        "greedy_texts_are_those_of_the_model_alone",
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
