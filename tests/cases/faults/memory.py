"""Faults in the memory room, and the check of a notebook that notices."""

from cases.faults import Fault

ALLOCATOR = "memory/allocator.py"
TABLE = "memory/sequence_table.py"
REGIONS = "memory/reservation.py"
MANAGER = "memory/paged.py"
RESERVED = "memory/reserved.py"
WASTE = "memory/waste.py"

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
        "float(1 - lengths.sum() / reserved.sum())",
        "float(reserved.sum() / lengths.sum() - 1)",
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
            preempted[-1].length = 1""",
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
        "seen.recomputed_tokens += newest.length",
        "seen.recomputed_tokens += 1",
        "preempted_tokens_are_counted",
    ),
    Fault(
        "usage counts reserved slots twice",
        "05_memory_waste",
        RESERVED,
        "internal += region.size - final",
        "internal += region.size - region.length",
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
        """            self._give_back(table)
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
        "promises not counted",
        "09_paged_engine",
        MANAGER,
        """        table.block_ids = self.allocator.allocate(needed)
        table.length = num_tokens
        self._tables[request_id] = table""",
        "        self._tables[request_id] = table",
        "a_chunked_prompt_has_all_its_blocks_from_the_start",
    ),
    Fault(
        "admission does not look",
        "09_paged_engine",
        MANAGER,
        """        if not self._has_room(needed, keep_free):
            return False
""",
        "",
        "one_is_admitted_where_one_has_room",
    ),
]
