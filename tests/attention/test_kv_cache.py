"""Keys and values in blocks, or side by side: bytes, and refusals."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from llm_systems_cookbook.attention import (
    ContiguousKVCache,
    PagedKVCache,
    paged_attention,
)
from llm_systems_cookbook.memory import (
    BlockAllocator,
    BlockCopy,
    ReservedMemory,
    SequenceTable,
    fork_sequence,
)

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LAYERS, HEADS, DIM, DIM_V = 2, 2, 4, 3


def paged(block_size=4, num_blocks=6, num_host_blocks=3, **options):
    """Return a small cache in which everything is NaN."""
    cache = PagedKVCache(
        LAYERS,
        num_blocks,
        block_size,
        HEADS,
        DIM,
        DIM_V,
        num_host_blocks=num_host_blocks,
        **options,
    )
    for pool in pools(cache):
        pool.fill_(torch.nan)
    return cache


def pools(cache):
    return cache.keys + cache.values + cache.host_keys + cache.host_values


def contents(cache):
    return [pool.clone() for pool in pools(cache)]


def same(a, b):
    return all(
        torch.equal(x.nan_to_num(nan=-7.0), y.nan_to_num(nan=-7.0))
        for x, y in zip(a, b, strict=True)
    )


def tokens(count, seed=0, dtype=torch.float32):
    """Return keys and values of `count` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(count, HEADS, dim, generator=generator).to(dtype)
        for dim in (DIM, DIM_V)
    )


def numbered(cache):
    """Write `100 * pool + block` into each block of each pool."""
    for i, pool in enumerate(pools(cache)):
        for block in range(len(pool)):
            pool[block] = 100 * i + block


def assert_refused(cache, message, call, *arguments, error=ValueError):
    before = contents(cache)
    with pytest.raises(error, match=message):
        call(*arguments)
    assert same(contents(cache), before), "a refused call changed bytes"


# --- Shapes, dtypes, sizes -------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_dtypes_and_bytes_of_the_pools(dtype):
    cache = PagedKVCache(3, 5, 8, 2, 16, 12, dtype=dtype, num_host_blocks=2)
    assert [list(k.shape) for k in cache.keys] == [[5, 2, 8, 16]] * 3
    assert [list(v.shape) for v in cache.values] == [[5, 2, 8, 12]] * 3
    assert [list(k.shape) for k in cache.host_keys] == [[2, 2, 8, 16]] * 3
    assert [list(v.shape) for v in cache.host_values] == [[2, 2, 8, 12]] * 3
    assert {pool.dtype for pool in pools(cache)} == {dtype}
    assert cache.bytes_per_block == 3 * 2 * 8 * (16 + 12) * dtype.itemsize


def test_head_dim_v_is_head_dim_when_left_out():
    cache = PagedKVCache(1, 2, 4, 2, 8)
    assert cache.values[0].shape == cache.keys[0].shape
    assert cache.keys[0].dtype == torch.float32
    assert len(cache.host_keys[0]) == 0


def test_no_two_pools_share_memory():
    cache = paged()
    numbered(cache)
    for i, pool in enumerate(pools(cache)):
        for block in range(len(pool)):
            assert (pool[block] == 100 * i + block).all()


@pytest.mark.parametrize(
    ("position", "name"),
    list(
        enumerate(
            (
                "num_layers",
                "num_blocks",
                "block_size",
                "num_kv_heads",
                "head_dim",
                "head_dim_v",
            )
        )
    ),
)
def test_a_size_below_1_is_refused(position, name):
    sizes = [2, 2, 2, 2, 2, 2]
    sizes[position] = 0
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        PagedKVCache(*sizes)


def test_host_blocks_below_0_and_sizes_that_are_no_integers_are_refused():
    with pytest.raises(ValueError, match="num_host_blocks must be >= 0"):
        PagedKVCache(1, 2, 4, 2, 8, num_host_blocks=-1)
    with pytest.raises(TypeError, match="block_size must be an integer"):
        PagedKVCache(1, 2, 4.0, 2, 8)


@pytest.mark.parametrize("cache", [PagedKVCache, ContiguousKVCache])
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64]
)
def test_another_dtype_is_refused(cache, dtype):
    sizes = (1, 2, 4, 2, 8) if cache is PagedKVCache else (1, 8, 2, 8)
    with pytest.raises(ValueError, match=f"got {dtype}"):
        cache(*sizes, dtype=dtype)


# --- Write and gather ------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 13])
def test_gather_returns_what_was_written(block_size, length, dtype):
    cache = paged(block_size, num_blocks=16, dtype=dtype)
    needed = -(-length // block_size)
    ids = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    table = SequenceTable(block_size, ids[:needed].tolist(), length)
    slots = [table.slot(i) for i in range(length)]
    for layer in range(LAYERS):
        cache.write(layer, slots, *tokens(length, seed=layer, dtype=dtype))
    for layer in range(LAYERS):
        key, value = tokens(length, seed=layer, dtype=dtype)
        k, v = cache.gather(layer, table.block_ids, length)
        assert list(k.shape) == [1, HEADS, length, DIM]
        assert torch.equal(k[0].transpose(0, 1), key)
        assert torch.equal(v[0].transpose(0, 1), value)


def test_a_write_touches_only_its_slots():
    cache = paged()
    key, value = tokens(3)
    cache.write(1, [9, 2, 4], key, value)
    expected = contents(paged())
    for i, slot in enumerate((9, 2, 4)):
        expected[1][slot // 4, :, slot % 4] = key[i]
        expected[3][slot // 4, :, slot % 4] = value[i]
    assert same(contents(cache), expected)


def test_slots_may_be_a_list_an_array_or_a_tensor_and_minus_1_is_skipped():
    key, value = tokens(3)
    written = []
    for slots in (
        [5, -1, 6],
        np.array([5, -1, 6]),
        torch.tensor([5, -1, 6], dtype=torch.int32),
    ):
        cache = paged()
        cache.write(0, slots, key, value)
        written.append(contents(cache))
    assert same(written[0], written[1])
    assert same(written[0], written[2])
    assert int((~written[0][0].isnan()).sum()) == 2 * HEADS * DIM


def test_gather_returns_a_copy():
    cache = paged()
    cache.write(0, [0, 1], *tokens(2))
    k, _ = cache.gather(0, [0], 2)
    before = k.clone()
    cache.keys[0].fill_(5)
    assert torch.equal(k, before)


def test_gather_reads_no_block_past_the_end():
    cache = paged()
    cache.write(0, [4, 5], *tokens(2))
    k, v = cache.gather(0, [1, -1, 99], 2)
    assert not k.isnan().any()
    assert not v.isnan().any()


def test_a_bad_write_is_refused_and_changes_nothing():
    cache = paged()
    key, value = tokens(2)
    for message, layer, slots in (
        (r"layer 2 is outside \[0, 2\)", 2, [0, 1]),
        (r"layer -1 is outside \[0, 2\)", -1, [0, 1]),
        (r"slot_mapping\[1\] is 24, outside \[0, 24\)", 0, [0, 24]),
        (r"slot_mapping\[0\] is -2", 0, [-2, 1]),
        ("slot 3 is given to two tokens", 0, [3, 3]),
        (r"slot_mapping must be \[2\]", 0, [0]),
    ):
        assert_refused(cache, message, cache.write, layer, slots, key, value)
    assert_refused(
        cache, "integer", cache.write, 0, [0.5, 1], key, value, error=TypeError
    )
    assert_refused(
        cache, "float64", cache.write, 0, [0, 1], key.double(), value.double()
    )
    assert_refused(cache, "value must be", cache.write, 0, [0, 1], key, key)


def test_a_bad_gather_is_refused():
    cache = paged()
    for message, layer, ids, length in (
        (r"layer 2 is outside \[0, 2\)", 2, [0], 1),
        (r"block 6 is outside \[0, 6\)", 0, [0, 6], 5),
        (r"block -1 is outside \[0, 6\)", 0, [-1], 1),
        (r"length 9 is outside \[0, 8\]", 0, [0, 1], 9),
        (r"length -1 is outside \[0, 4\]", 0, [0], -1),
    ):
        assert_refused(cache, message, cache.gather, layer, ids, length)
    assert_refused(
        cache, "integer", cache.gather, 0, [0.5], 1, error=TypeError
    )
    assert_refused(
        cache, "integer", cache.gather, 0, [0], 1.5, error=TypeError
    )


# --- Copies and swaps ------------------------------------------------------


def test_copy_blocks_copies_every_layer_keys_and_values():
    cache = paged()
    numbered(cache)
    expected = contents(cache)
    for pool in expected[: 2 * LAYERS]:
        pool[5], pool[0] = pool[2].clone(), pool[3].clone()
    cache.copy_blocks([BlockCopy(2, 5), BlockCopy(3, 0)])
    assert same(contents(cache), expected)


def test_copies_are_made_in_order():
    cache = paged()
    numbered(cache)
    cache.copy_blocks(iter([BlockCopy(0, 1), BlockCopy(1, 2)]))
    assert (cache.keys[0][2] == 0).all(), "the second copy sees the first"
    numbered(cache)
    cache.copy_blocks([BlockCopy(1, 2), BlockCopy(0, 1)])
    assert (cache.keys[0][2] == 1).all()
    assert (cache.keys[0][1] == 0).all()


def test_no_copies_and_a_copy_onto_itself_change_nothing():
    cache = paged()
    numbered(cache)
    before = contents(cache)
    cache.copy_blocks([])
    cache.copy_blocks([BlockCopy(3, 3)])
    assert same(contents(cache), before)


def test_swap_out_overwrite_swap_in_elsewhere_gives_the_same_bytes():
    cache = paged()
    slots = [4, 5, 6, 7, 12]  # blocks 1 and 3
    for layer in range(LAYERS):
        cache.write(layer, slots, *tokens(5, seed=layer))
    before = [cache.gather(layer, [1, 3], 5) for layer in range(LAYERS)]
    cache.swap_out([BlockCopy(1, 2), BlockCopy(3, 0)])
    for pool in cache.keys + cache.values:
        pool.fill_(torch.nan)
    cache.swap_in([BlockCopy(0, 1), BlockCopy(2, 5)])
    for layer in range(LAYERS):
        after = cache.gather(layer, [5, 1], 5)
        assert torch.equal(before[layer][0], after[0])
        assert torch.equal(before[layer][1], after[1])


def test_swaps_touch_only_their_blocks():
    cache = paged()
    numbered(cache)
    expected = contents(cache)
    for device, host in zip(
        expected[: 2 * LAYERS], expected[2 * LAYERS :], strict=True
    ):
        host[1] = device[4]
    cache.swap_out([BlockCopy(4, 1)])
    assert same(contents(cache), expected)
    for device, host in zip(
        expected[: 2 * LAYERS], expected[2 * LAYERS :], strict=True
    ):
        device[0] = host[2]
    cache.swap_in([BlockCopy(2, 0)])
    assert same(contents(cache), expected)


@pytest.mark.parametrize(
    ("method", "sources", "destinations"),
    [("copy_blocks", 6, 6), ("swap_out", 6, 3), ("swap_in", 3, 6)],
)
def test_bad_copies_are_refused_and_nothing_is_copied(
    method, sources, destinations
):
    cache = paged()
    numbered(cache)
    call = getattr(cache, method)
    good = BlockCopy(0, 1)
    for bad, message in (
        (BlockCopy(sources, 0), f"source block {sources} is outside"),
        (BlockCopy(-1, 0), "source block -1 is outside"),
        (BlockCopy(0, destinations), f"block {destinations} is outside"),
        (BlockCopy(0, -1), "destination block -1 is outside"),
        (BlockCopy(2, 1), "block 1 is the destination of two copies"),
    ):
        assert_refused(cache, message, call, [good, bad])
    assert_refused(
        cache, "integer", call, [good, BlockCopy(0.5, 0)], error=TypeError
    )


def test_without_host_blocks_a_swap_is_refused():
    cache = paged(num_host_blocks=0)
    assert_refused(
        cache, r"outside \[0, 0\)", cache.swap_out, [BlockCopy(0, 0)]
    )


def test_a_fork_of_a_copied_tail_in_one_step_gets_the_copy():
    cache, a = paged(), BlockAllocator(6, 4)
    table = SequenceTable(4)
    table.extend(a, 2)
    cache.write(0, [0, 1], *tokens(2))
    a.incref(0)
    copies = [table.append(a)]  # its tail moves to block 1 ...
    a.incref(1)
    copies.append(table.append(a))  # ... and on to block 2
    cache.copy_blocks(copies)
    assert copies == [BlockCopy(0, 1), BlockCopy(1, 2)]
    assert torch.equal(cache.gather(0, [2], 2)[0], cache.gather(0, [0], 2)[0])


# --- Side by side ----------------------------------------------------------


def contiguous(num_slots=12, **options):
    cache = ContiguousKVCache(LAYERS, num_slots, HEADS, DIM, DIM_V, **options)
    for pool in cache.keys + cache.values:
        pool.fill_(torch.nan)
    return cache


def test_a_view_is_what_was_written_without_a_copy():
    cache = contiguous()
    key, value = tokens(5)
    cache.write(1, range(3, 8), key, value)
    k, v = cache.view(1, 3, 5)
    assert list(k.shape) == [1, HEADS, 5, DIM]
    assert list(v.shape) == [1, HEADS, 5, DIM_V]
    assert torch.equal(k[0].transpose(0, 1), key)
    assert torch.equal(v[0].transpose(0, 1), value)
    k.fill_(9)
    assert (cache.keys[1][3:8] == 9).all()
    assert cache.keys[1][:3].isnan().all()
    assert cache.keys[1][8:].isnan().all()
    assert cache.keys[0].isnan().all()


def test_a_view_lies_unbroken_within_each_head():
    k, _ = contiguous().view(0, 3, 5)
    assert k[0, 0].is_contiguous()
    assert k.stride(1) == 12 * DIM


def test_bytes_per_slot_counts_keys_and_values_of_all_layers():
    cache = contiguous(dtype=torch.float16)
    assert cache.bytes_per_slot == LAYERS * HEADS * (DIM + DIM_V) * 2


def test_bad_regions_writes_and_sizes_are_refused():
    cache = contiguous()
    for message, layer, start, length in (
        (r"layer 2 is outside \[0, 2\)", 2, 0, 1),
        ("start must be >= 0, got -1", 0, -1, 1),
        ("length must be >= 0, got -1", 0, 0, -1),
        (r"slots 8 to 13 are outside \[0, 12\]", 0, 8, 5),
    ):
        with pytest.raises(ValueError, match=message):
            cache.view(layer, start, length)
    with pytest.raises(ValueError, match=r"is 12, outside \[0, 12\)"):
        cache.write(0, [12], *tokens(1))
    with pytest.raises(ValueError, match="num_slots must be >= 1, got 0"):
        ContiguousKVCache(1, 0, 2, 8)


def test_both_caches_serve_the_same_attention():
    """One table of blocks or one of slots: the engine need not know which."""
    lengths, seed = [7, 3], 3
    memory = ReservedMemory(24, max_tokens=8)
    a = BlockAllocator(6, 4)
    paged_cache = paged(num_blocks=6)
    flat = contiguous(num_slots=24)
    tables, regions = [], []
    for i, length in enumerate(lengths):
        table = SequenceTable(4)
        table.extend(a, length)
        assert memory.admit(i, length)
        start = memory._reservations[i].start
        key, value = tokens(length, seed=seed + i)
        paged_cache.write(
            0, [table.slot(p) for p in range(length)], key, value
        )
        flat.write(0, range(start, start + length), key, value)
        tables.append([*table.block_ids, -1][:2])
        regions.append(range(start, start + 8))
    query = torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(9))
    lens = torch.tensor(lengths)
    for backend in ("reference", "gather", "cpu"):
        outs = [
            paged_attention(
                query,
                cache.keys[0],
                cache.values[0],
                torch.tensor([list(row) for row in rows]),
                lens,
                backend=backend,
            )
            for cache, rows in ((paged_cache, tables), (flat, regions))
        ]
        torch.testing.assert_close(*outs)


# --- Against plain tensors -------------------------------------------------


class Story:
    """A sequence, and what was written through its table."""

    def __init__(self, table, truth):
        self.table, self.truth = table, truth

    def grow(self, cache, a, count, seed):
        start = self.table.length
        cache.copy_blocks(self.table.extend(a, count))
        slots = [self.table.slot(start + i) for i in range(count)]
        new = [tokens(count, seed=seed + layer) for layer in range(LAYERS)]
        for layer, (key, value) in enumerate(new):
            cache.write(layer, slots, key, value)
        self.truth = [
            [torch.cat(both) for both in zip(old, fresh, strict=True)]
            for old, fresh in zip(self.truth, new, strict=True)
        ]

    def is_intact(self, cache):
        ids, length = self.table.block_ids, self.table.length
        return all(
            torch.equal(got[0].transpose(0, 1), written)
            for layer in range(LAYERS)
            for got, written in zip(
                cache.gather(layer, ids, length),
                self.truth[layer],
                strict=True,
            )
        )


def move(story, swap, source, destination):
    """Swap a sequence to the other pool; False when it has no room."""
    ids = story.table.block_ids
    if len(ids) > destination.free_blocks:
        return False
    story.table.block_ids = destination.allocate(len(ids))
    swap(map(BlockCopy, ids, story.table.block_ids))
    for block_id in ids:
        source.free(block_id)
    return True


def test_random_growth_forks_and_swaps_keep_every_byte():
    rng, cache = random.Random(0), paged(num_blocks=12, num_host_blocks=6)
    a, host = BlockAllocator(12, 4), BlockAllocator(6, 4)
    live, away, done = [], [], Counter()
    actions = ("grow", "grow", "grow", "fork", "swap", "swap", "free")
    for step in range(1_000):
        if not live:
            live.append(Story(SequenceTable(4), [list(tokens(0))] * LAYERS))
        rng.shuffle(live)
        story, action = live[0], rng.choice(actions)
        if action == "grow" and a.free_blocks >= 3:
            story.grow(cache, a, rng.randint(1, 6), seed=10 * step)
        elif action == "fork" and len(live) < 4:
            table = fork_sequence(story.table, a)
            live.append(Story(table, story.truth))
        elif action == "swap" and away:
            if not move(away[0], cache.swap_in, host, a):
                continue
            live.append(away.pop())
        elif action == "swap":
            if not move(story, cache.swap_out, a, host):
                continue
            away.append(live.pop(0))
        elif action == "free":
            live.pop(0).table.free(a)
        else:
            continue
        done[action] += 1
        free = [b for b in range(12) if a.refcount(b) == 0]
        for pool in cache.keys + cache.values:
            pool[free] = torch.nan
        assert all(story.is_intact(cache) for story in live), action
    assert min(done[k] for k in ("grow", "fork", "swap", "free")) > 30, done


@pytest.mark.parametrize("name", ["copy_blocks", "swap_out", "swap_in"])
def test_a_boolean_is_a_number_and_no_mask(name: str):
    cache = PagedKVCache(1, 4, 2, 1, 2, num_host_blocks=4)
    plain = PagedKVCache(1, 4, 2, 1, 2, num_host_blocks=4)
    for one in (cache, plain):
        pools = one.keys + one.values + one.host_keys + one.host_values
        for i, pool in enumerate(pools):
            pool[:] = torch.arange(4.0).view(4, 1, 1, 1) + 10 * i
    getattr(cache, name)([(False, True), (np.int8(2), torch.tensor(3))])
    getattr(plain, name)([(0, 1), (2, 3)])
    assert torch.equal(cache.keys[0], plain.keys[0])
    assert torch.equal(cache.host_keys[0], plain.host_keys[0])


def test_two_tensors_of_one_destination_are_refused():
    cache = PagedKVCache(1, 4, 2, 1, 2)
    with pytest.raises(ValueError, match="destination of two copies"):
        cache.copy_blocks(torch.tensor([[0, 2], [1, 2]]))


def test_entries_past_the_end_may_be_anything():
    cache = PagedKVCache(1, 4, 2, 1, 2)
    cache.keys[0].zero_()
    keys, _ = cache.gather(0, [0, 2**70, -7], 2)
    assert keys.shape == (1, 1, 2, 2)


def test_host_blocks_are_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        cache = PagedKVCache(1, 4, 2, 1, 2, num_host_blocks=2)
    assert cache.host_keys[0].device.type == "cpu"
    assert cache.host_values[0].device.type == "cpu"
