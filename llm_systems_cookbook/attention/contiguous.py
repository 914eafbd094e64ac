"""Attention over regions: each sequence is a view, and SDPA reads it.

The baseline of the engine. No key is copied, but every sequence is a call of
its own: regions have other lengths and lie anywhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from llm_systems_cookbook.attention.kv_cache import ContiguousKVCache


@torch.no_grad()
def contiguous_attention(
    cache: ContiguousKVCache,
    layer: int,
    query: Tensor,
    starts: Sequence[int],
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
) -> Tensor:
    """Let the newest tokens of each sequence attend to its region.

    Args:
        cache: holds the keys and values, those of this step included.
        layer: index of the layer.
        query: [num_tokens, num_heads, head_dim], sequence after sequence.
        starts: first slot of each region.
        seq_lens: tokens in each region, at least its query_len.
        query_lens: query rows of each sequence; together num_tokens.

    Returns:
        [num_tokens, num_heads, head_dim_v].

    Raises:
        ValueError: a region outside the pool, or rows that do not add up.
    """
    if sum(query_lens) != len(query):
        raise ValueError(
            f"query_lens add up to {sum(query_lens)}, query has {len(query)}"
        )
    parts = [
        _attend(rows, *cache.view(layer, start, length))
        for rows, start, length in zip(
            query.split(list(query_lens)), starts, seq_lens, strict=True
        )
    ]
    return torch.cat(parts)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return [num_queries, num_heads, head_dim_v], causal from the end.

    The query heads of a group are rows against the same keys.
    """
    num_queries, num_heads, _ = query.shape
    kv_heads, length = keys.shape[1:3]
    if num_queries == 1:  # sees everything: no mask
        rows = query.view(1, kv_heads, num_heads // kv_heads, -1)
        out = scaled_dot_product_attention(rows, keys, values)
        return out.view(1, num_heads, -1)
    seen = torch.ones(
        num_queries, length, dtype=torch.bool, device=query.device
    ).tril(length - num_queries)
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=seen,
        enable_gqa=num_heads != kv_heads,
    )
    return out[0].transpose(0, 1)
