"""Attention over a paged cache as the definition says, in float64.

One sequence, one query row at a time. It shares only the checked inputs with
the backends it judges: tokens are fetched one by one through the block table,
and the softmax is written out.
"""

import torch
from torch import Tensor

from llm_systems_cookbook.attention.inputs import AttentionInputs


def reference_attention(inputs: AttentionInputs) -> Tensor:
    """Return the exact result, [num_tokens, num_heads, head_dim_v] float64.

    A block id outside the pool counts as keys and values of NaN.
    """
    shape = inputs.num_tokens, inputs.num_heads, inputs.head_dim_v
    out = torch.zeros(shape, dtype=torch.float64, device=inputs.query.device)
    starts = inputs.query_start_loc
    for seq in range(inputs.num_seqs):
        length = int(inputs.seq_lens[seq])
        first, end = seq, seq + 1
        if starts is not None:
            first, end = int(starts[seq]), int(starts[seq + 1])
        if length == 0:
            continue
        for row in range(first, end):
            position = length - (end - row)
            out[row] = _attend(inputs, seq, row, position, length)
    return out


def _attend(
    inputs: AttentionInputs, seq: int, row: int, position: int, length: int
) -> Tensor:
    """Return one row's result: [num_heads, head_dim_v]."""
    oldest = 0
    if inputs.window is not None:
        oldest = max(0, position - inputs.window + 1)
    positions = range(oldest, position + 1)
    keys, values = _fetch(inputs, seq, positions)
    heads = [h // inputs.group for h in range(inputs.num_heads)]
    query = inputs.query[row].double()
    # [num_heads, tokens]: every query head against its own KV head.
    scores = torch.einsum("hd,thd->ht", query, keys[:, heads])
    scores = scores * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    if inputs.alibi_slopes is not None:
        distance = torch.tensor(
            [float(j - (length - 1)) for j in positions],
            dtype=torch.float64,
            device=scores.device,
        )
        scores = scores + inputs.alibi_slopes.double()[:, None] * distance
    weights = _softmax(scores, inputs.sinks)
    return torch.einsum("ht,thd->hd", weights, values[:, heads])


def _fetch(
    inputs: AttentionInputs, seq: int, positions: range
) -> tuple[Tensor, Tensor]:
    """Return keys and values, [tokens, num_kv_heads, head_dim] float64."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for position in positions:
        block, offset = divmod(position, inputs.block_size)
        block_id = -1
        if block < inputs.max_blocks:
            block_id = int(inputs.block_tables[seq, block])
        for cache, rows in (
            (inputs.key_cache, keys),
            (inputs.value_cache, values),
        ):
            rows.append(_token(cache, block_id, offset))
    return (
        _scaled(torch.stack(keys), inputs.k_scale),
        _scaled(torch.stack(values), inputs.v_scale),
    )


def _scaled(stored: Tensor, scale: Tensor | None) -> Tensor:
    return stored if scale is None else stored * scale.double()[:, None]


def _token(cache: Tensor, block_id: int, offset: int) -> Tensor:
    """Return one token of the cache: [num_kv_heads, head_dim]."""
    if 0 <= block_id < cache.shape[0]:
        return cache[block_id, :, offset].double()
    shape = cache.shape[1], cache.shape[3]
    return torch.full(
        shape, torch.nan, dtype=torch.float64, device=cache.device
    )


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return weights over the tokens; a sink takes its share and is left."""
    largest = scores.max(dim=1, keepdim=True).values
    if sinks is not None:
        largest = torch.maximum(largest, sinks.double()[:, None])
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double()[:, None] - largest)
    return weights / total
