"""Attention over regions: equal to the reference, and no key is copied."""

import math

import pytest
import torch

from llm_systems_cookbook.attention import ContiguousKVCache, paged_attention
from llm_systems_cookbook.attention.contiguous import contiguous_attention

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


def filled(num_slots=64, kv_heads=2, dim=8, dim_v=8, dtype=torch.float64):
    """Return a cache with random numbers in each layer."""
    generator = torch.Generator().manual_seed(7)
    cache = ContiguousKVCache(2, num_slots, kv_heads, dim, dim_v, dtype=dtype)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def queries(num_tokens, num_heads=6, dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(11)
    return torch.randn(num_tokens, num_heads, dim, generator=generator).to(
        dtype
    )


def by_hand(cache, layer, query, starts, seq_lens, query_lens):
    """Compute one row and head at a time, in float64."""
    rows, out = iter(query.double()), []
    group = query.shape[1] // cache.keys[layer].shape[1]
    for start, length, count in zip(starts, seq_lens, query_lens, strict=True):
        for i in range(count):
            seen = range(start, start + length - count + i + 1)
            row = next(rows)
            heads = []
            for head, vector in enumerate(row):
                keys = cache.keys[layer][seen, head // group, 0].double()
                values = cache.values[layer][seen, head // group, 0].double()
                scores = keys @ vector / math.sqrt(len(vector))
                heads.append(scores.softmax(0) @ values)
            out.append(torch.stack(heads))
    return torch.stack(out)


def assert_near(result, exact):
    assert result.shape == exact.shape
    error = (result.double() - exact).norm() / exact.norm()
    assert error <= TOLERANCE[result.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("starts", "seq_lens", "query_lens"),
    [
        ([3], [1], [1]),
        ([20, 0, 40], [9, 17, 1], [1, 1, 1]),  # decode
        ([20, 0], [9, 17], [9, 17]),  # whole prompts
        ([20, 0, 40], [9, 17, 5], [4, 1, 5]),  # a chunk, a decode, a prompt
    ],
)
def test_every_row_sees_its_own_region_up_to_itself(
    dtype, starts, seq_lens, query_lens
):
    cache = filled(dtype=dtype)
    query = queries(sum(query_lens), dtype=dtype)
    for layer in range(2):
        arguments = cache, layer, query, starts, seq_lens, query_lens
        result = contiguous_attention(*arguments)
        assert result.dtype == dtype
        assert_near(result, by_hand(*arguments))


@pytest.mark.parametrize(
    ("kv_heads", "num_heads", "dim_v"), [(1, 1, 8), (1, 4, 8), (3, 6, 5)]
)
@pytest.mark.parametrize("query_lens", [[1, 1], [3, 1], [2, 5]])
def test_groups_of_heads_share_keys_and_values_may_be_narrower(
    kv_heads, num_heads, dim_v, query_lens
):
    cache = filled(kv_heads=kv_heads, dim_v=dim_v)
    query = queries(sum(query_lens), num_heads)
    arguments = cache, 1, query, [9, 30], [6, 11], query_lens
    assert_near(contiguous_attention(*arguments), by_hand(*arguments))


def test_it_agrees_with_the_reference_through_block_tables():
    cache = filled()
    starts, seq_lens, query_lens = [20, 0, 40], [9, 17, 5], [4, 1, 5]
    query = queries(10)
    tables = torch.full((3, 17), -1)
    for row, start, length in zip(tables, starts, seq_lens, strict=True):
        row[:length] = torch.arange(start, start + length)
    exact = paged_attention(
        query,
        cache.keys[0],
        cache.values[0],
        tables,
        torch.tensor(seq_lens),
        query_start_loc=torch.tensor([0, 4, 5, 10]),
        backend="reference",
    )
    result = contiguous_attention(
        cache, 0, query, starts, seq_lens, query_lens
    )
    assert_near(result, exact.double())


def test_nothing_outside_a_region_is_read():
    clean = filled()
    starts, seq_lens, query_lens = [4, 30], [7, 12], [3, 1]
    query = queries(4)
    before = contiguous_attention(
        clean, 0, query, starts, seq_lens, query_lens
    )
    inside = [*range(4, 11), *range(30, 42)]
    outside = [slot for slot in range(64) if slot not in inside]
    for tensor in (clean.keys[0], clean.values[0]):
        tensor[outside] = torch.nan
    after = contiguous_attention(clean, 0, query, starts, seq_lens, query_lens)
    assert torch.equal(before, after)


@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [2, 2]])
def test_a_query_of_any_strides_is_taken(query_lens):
    """Models hand over views; how they lie in memory is their business."""
    cache, query = filled(), queries(4)
    starts, seq_lens = [0, 10, 20, 30], [5, 6, 7, 8]
    count = len(query_lens)
    rest = starts[:count], seq_lens[:count], query_lens
    exact = contiguous_attention(cache, 0, query, *rest)
    for view in (
        query.transpose(0, 1).contiguous().transpose(0, 1),
        query.mT.contiguous().mT,
        torch.stack([query, query], 1)[:, 1],
    ):
        assert not view.is_contiguous()
        result = contiguous_attention(cache, 0, view, *rest)
        torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)


def test_rows_that_do_not_add_up_are_refused():
    cache = filled()
    for query_lens in ([1, 2], [2, 2, 1]):
        total = sum(query_lens)
        with pytest.raises(ValueError, match=f"add up to {total}, query has"):
            contiguous_attention(
                cache, 0, queries(4), [0, 8], [4, 4], query_lens
            )


@pytest.mark.parametrize(
    ("starts", "seq_lens"), [([0], [4, 4]), ([0, 8], [4]), ([], [])]
)
def test_lists_of_unequal_length_are_refused(starts, seq_lens):
    with pytest.raises(ValueError, match=r"zip\(\)|shorter|longer"):
        contiguous_attention(filled(), 0, queries(2), starts, seq_lens, [1, 1])


@pytest.mark.parametrize(
    ("layer", "start", "length", "message"),
    [
        (0, 60, 5, r"slots 60 to 65 are outside \[0, 64\]"),
        (0, -1, 4, "start must be >= 0, got -1"),
        (2, 0, 4, r"layer 2 is outside \[0, 2\)"),
        (-1, 0, 4, r"layer -1 is outside \[0, 2\)"),
    ],
)
def test_a_region_outside_the_pool_is_refused(layer, start, length, message):
    with pytest.raises(ValueError, match=message):
        contiguous_attention(
            filled(), layer, queries(1), [start], [length], [1]
        )


def test_results_want_no_gradient():
    query = queries(2).requires_grad_()
    out = contiguous_attention(filled(), 0, query, [0, 8], [4, 4], [1, 1])
    assert not out.requires_grad
