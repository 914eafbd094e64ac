"""Copy the blocks of sequences together, then let SDPA attend.

All three ways to gather move the same bytes: they read the cache and write
what attention then reads again, three times the cache in all. They differ in
what else they cost: Python's loop, fresh memory, or neither.
"""

import math
import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from llm_systems_cookbook.attention.inputs import (
    FP8,
    INDEX,
    AttentionInputs,
    require_shape,
)
from llm_systems_cookbook.validate import cdiv, require_at_least

# What is gathered at a time. On a CPU a portion should still be in its cache
# when attention reads it; on a GPU few large calls are faster.
PORTION_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30}
QUERY_ROWS = 256  # query rows at a time: bounds the mask and the scores


# --- Three ways to gather --------------------------------------------------


def gather_loop(cache: Tensor, block_tables: Tensor, length: int) -> Tensor:
    """Return the tokens of sequences, fetched block by block in Python.

    Args:
        cache: [num_blocks, num_kv_heads, block_size, head_dim].
        block_tables: [num_seqs, blocks_per_seq] int32 or int64.
        length: tokens in every sequence; blocks past it are not read.

    Returns:
        [num_seqs, num_kv_heads, length, head_dim], a copy.

    Raises:
        ValueError: shapes that do not fit, a length below 0 or beyond the
            tables, or a block id out of range.
    """
    tables = _checked_tables(cache, block_tables, length)
    num_seqs, width = tables.shape
    _, kv_heads, block_size, dim = cache.shape
    blocks = [cache.new_empty(kv_heads, 0, dim)]
    for block_id in tables.flatten().tolist():
        blocks.append(cache[block_id])
    tokens = torch.cat(blocks, dim=1)
    tokens = tokens.view(kv_heads, num_seqs, width * block_size, dim)
    return tokens.transpose(0, 1)[:, :, :length]


def gather_index_select(
    cache: Tensor, block_tables: Tensor, length: int
) -> Tensor:
    """Return the tokens of sequences, fetched by one call into new memory.

    Takes, returns and raises what `gather_loop` does.
    """
    tables = _checked_tables(cache, block_tables, length)
    return _select(cache, tables)[:, :, :length]


class Workspace:
    """Memory to gather into that is used again, and grows when too small.

    It holds bytes, so any dtype can use it. It keeps at most twice what the
    largest gather needed, until `release`. What a gather returns is valid
    until the next one. Not for two threads at once.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._bytes.nbytes

    def gather(
        self, cache: Tensor, block_tables: Tensor, length: int
    ) -> Tensor:
        """Return the tokens of sequences, fetched into the workspace.

        Takes, returns and raises what `gather_loop` does, but the result
        lies in the workspace: the next gather overwrites it.
        """
        tables = _checked_tables(cache, block_tables, length)
        return self._gather(cache, tables, length)

    def _gather(self, cache: Tensor, tables: Tensor, length: int) -> Tensor:
        _, kv_heads, block_size, dim = cache.shape
        rows = tables.numel() * kv_heads, block_size * dim
        out = self._take(rows, cache) if cache.is_contiguous() else None
        return _select(cache, tables, out)[:, :, :length]

    def _take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return memory of a shape, with anything in it."""
        needed = math.prod(shape) * like.element_size()
        if self._bytes.device != like.device:
            self.release()
        if self._bytes.nbytes < needed:
            size = max(needed, 2 * self._bytes.nbytes)
            self.release()  # first, so that both are never held at once
            self._bytes = torch.empty(
                size, dtype=torch.uint8, device=like.device
            )
        return self._bytes[:needed].view(like.dtype).view(shape)

    def release(self) -> None:
        """Give the memory back; the next gather takes new memory."""
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")


def _select(
    cache: Tensor, tables: Tensor, out: Tensor | None = None
) -> Tensor:
    """Return [num_seqs, num_kv_heads, tokens, head_dim], in one copy.

    Block by block, the heads would lie between the tokens, and putting them
    first would copy again. So a row here is one head of one block.
    """
    num_blocks, kv_heads, block_size, dim = cache.shape
    heads = torch.arange(kv_heads, device=cache.device)[:, None]
    ids = tables.long()[:, None]
    if cache.is_contiguous():
        rows = cache.view(num_blocks * kv_heads, block_size * dim)
        index = (ids * kv_heads + heads).flatten()
        picked = torch.index_select(rows, 0, index, out=out)
    else:  # index_select would copy the whole cache first
        picked = cache[ids, heads]
    tokens = tables.shape[1] * block_size
    return picked.reshape(len(tables), kv_heads, tokens, dim)


def _checked_tables(cache: Tensor, tables: Tensor, length: int) -> Tensor:
    """Return the part of the tables that the length needs."""
    require_shape(
        "cache", cache, "[num_blocks, num_kv_heads, block_size, head_dim]", 4
    )
    require_shape("block_tables", tables, "[num_seqs, blocks_per_seq]", 2)
    if tables.dtype not in INDEX:
        raise ValueError("block_tables must be int32 or int64")
    num_blocks, _, block_size, _ = cache.shape
    require_at_least(1, block_size=block_size)
    capacity = tables.shape[1] * block_size
    length = operator.index(length)
    if not 0 <= length <= capacity:
        raise ValueError(
            f"length {length} is outside [0, {capacity}], what "
            f"{tables.shape[1]} blocks of {block_size} hold"
        )
    tables = tables[:, : cdiv(length, block_size)]
    bad = tables[(tables < 0) | (tables >= num_blocks)]
    if len(bad) > 0:
        raise ValueError(f"block {int(bad[0])} is outside [0, {num_blocks})")
    return tables


# --- The backend -----------------------------------------------------------


class _Default(threading.local):
    """The workspaces of one thread, by device; they live as long as it."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, tuple[Workspace, Workspace]] = {}


_default = _Default()


@dataclass(frozen=True)
class _Portion:
    """Sequences of one length with as many query rows, gathered together."""

    seqs: list[int]
    length: int
    num_queries: int


@torch.no_grad()
def gather_attention(
    inputs: AttentionInputs,
    out: Tensor,
    workspaces: tuple[Workspace, Workspace] | None = None,
) -> Tensor:
    """Gather the visible tokens of each sequence and attend with SDPA.

    Sequences of equal length go together; there is no padding. Lengths and
    query starts are read on the host, so a GPU is waited for.

    Args:
        inputs: the checked arguments of `paged_attention`.
        out: [num_tokens, num_heads, head_dim_v], overwritten.
        workspaces: for keys and for values. When None, a pair that each
            thread keeps for each device; it grows to at most twice a portion
            (`PORTION_BYTES`, or one sequence where that is more).

    Returns:
        `out`.
    """
    device = inputs.query.device
    if workspaces is None:
        workspaces = _default.by_device.setdefault(
            device, (Workspace(), Workspace())
        )
    starts = inputs.query_start_loc
    if starts is None:
        starts = torch.arange(inputs.num_seqs, device=device)
    out.zero_()
    for portion in _portions(inputs):
        step = torch.arange(portion.num_queries, device=device)
        rows = starts[portion.seqs][:, None] + step
        _attend_portion(inputs, portion, rows, out, workspaces)
    return out


def _portions(inputs: AttentionInputs) -> Iterator[_Portion]:
    """Yield all sequences that have tokens and query rows."""
    groups: dict[tuple[int, int], list[int]] = {}
    lens, query_lens = inputs.seq_lens.tolist(), inputs.query_lens().tolist()
    for seq, key in enumerate(zip(lens, query_lens, strict=True)):
        if min(key) > 0:
            groups.setdefault(key, []).append(seq)
    limit = PORTION_BYTES.get(inputs.query.device.type, 1 << 30)
    for (length, num_queries), seqs in groups.items():
        token = inputs.key_cache[:1, :, :1].nbytes
        count = max(1, limit // max(1, token * length))
        for i in range(0, len(seqs), count):
            yield _Portion(seqs[i : i + count], length, num_queries)


def _attend_portion(
    inputs: AttentionInputs,
    portion: _Portion,
    rows: Tensor,
    out: Tensor,
    workspaces: tuple[Workspace, Workspace],
) -> None:
    size, length = inputs.block_size, portion.length
    before = length - portion.num_queries  # position of the first query row
    oldest = _oldest_seen(inputs, before)
    first, end = oldest // size, cdiv(length, size)
    if end > inputs.max_blocks or inputs.num_blocks == 0:
        out[rows] = torch.nan
        return
    tables = inputs.block_tables[portion.seqs, first:end]
    # Only without validation can an id be out of range here. It must not
    # become an index, and no other block's data may stand in for it.
    bad = ((tables < 0) | (tables >= inputs.num_blocks)).any(dim=1)
    tables = tables.clamp(0, inputs.num_blocks - 1)
    keys, values = (
        _as_computed(workspace, cache, tables, scale, inputs)
        for workspace, cache, scale in (
            (workspaces[0], inputs.key_cache, inputs.k_scale),
            (workspaces[1], inputs.value_cache, inputs.v_scale),
        )
    )
    for i in range(0, portion.num_queries, QUERY_ROWS):
        part = rows[:, i : i + QUERY_ROWS]
        stop = before + i + part.shape[1]
        start = _oldest_seen(inputs, before + i)
        seen = slice(start - first * size, stop - first * size)
        result = _attend(
            inputs,
            inputs.query[part].to(keys.dtype),
            keys[:, :, seen],
            values[:, :, seen],
            _bias(inputs, part.shape[1], start, stop, length, keys.dtype),
        )
        result = result.masked_fill(bad[:, None, None, None], torch.nan)
        out[part] = result.to(out.dtype)


def _oldest_seen(inputs: AttentionInputs, position: int) -> int:
    if inputs.window is None:
        return 0
    return max(0, position - inputs.window + 1)


def _as_computed(
    workspace: Workspace,
    cache: Tensor,
    tables: Tensor,
    scale: Tensor | None,
    inputs: AttentionInputs,
) -> Tensor:
    """Return gathered tokens as they enter the arithmetic."""
    dtype = inputs.query.dtype
    options = inputs.softcap, inputs.alibi_slopes, inputs.sinks
    scales = inputs.k_scale, inputs.v_scale
    plain = all(x is None for x in (*options, *scales))
    if dtype != torch.float64 and not (plain and cache.dtype == dtype):
        dtype = torch.float32
    # Indexing knows no float8; its bytes are as good.
    stored = cache.view(torch.uint8) if cache.dtype in FP8 else cache
    length = tables.shape[1] * inputs.block_size
    tokens = workspace._gather(stored, tables, length)
    tokens = tokens.view(cache.dtype).to(dtype)
    return tokens if scale is None else tokens * scale[:, None, None]


def _bias(
    inputs: AttentionInputs,
    num_queries: int,
    start: int,
    stop: int,
    length: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return what is added to the scores of tokens start to stop, or None.

    [num_kv_heads or 1, group * num_queries, tokens]. The query rows are the
    last ones before `stop`. One row sees every token it was given, so only
    more rows need a mask.
    """
    device = inputs.query.device
    key = torch.arange(start, stop, device=device)
    bias = torch.zeros(num_queries, stop - start, dtype=dtype, device=device)
    if num_queries > 1:
        query = torch.arange(stop - num_queries, stop, device=device)[:, None]
        hidden = key > query
        if inputs.window is not None:
            hidden |= key <= query - inputs.window
        bias = bias.masked_fill(hidden, -torch.inf)
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes.to(dtype).view(-1, inputs.group, 1, 1)
        bias = bias + slopes * (key - (length - 1))
    elif num_queries == 1:
        return None
    else:
        bias = bias.expand(1, inputs.group, *bias.shape)
    return bias.flatten(1, 2)


def _attend(
    inputs: AttentionInputs,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Return [num_seqs, num_queries, num_heads, head_dim_v].

    The query heads of a group are rows against the same keys, so no key is
    read twice: [num_seqs, num_kv_heads, group * num_queries, head_dim].
    """
    num_seqs, num_queries, _, dim = query.shape
    kv_heads, group = inputs.num_kv_heads, inputs.group
    packed = query.view(num_seqs, num_queries, kv_heads, group, dim)
    packed = packed.permute(0, 2, 3, 1, 4).flatten(2, 3)
    plain = inputs.softcap is None and inputs.sinks is None
    if plain:
        result = scaled_dot_product_attention(
            packed, keys, values, attn_mask=bias, scale=inputs.scale
        )
    if not plain or bool((result == 0).all(dim=-1).any()):
        # SDPA has no such option; and a row whose scores are all NaN it may
        # turn into zeros, which has to stay visible.
        result = _softmax(inputs, packed @ keys.mT, bias) @ values
    result = result.unflatten(2, (group, num_queries))
    return result.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _softmax(
    inputs: AttentionInputs, scores: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the weights that SDPA has no option for."""
    scores = scores * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    if bias is not None:
        scores = scores + bias
    if inputs.sinks is None:
        return scores.softmax(dim=-1)
    num_seqs, kv_heads, rows, _ = scores.shape
    sinks = inputs.sinks.to(scores.dtype).view(kv_heads, inputs.group, 1)
    sinks = sinks.expand(-1, -1, rows // inputs.group).reshape(1, -1, rows, 1)
    sinks = sinks.expand(num_seqs, -1, -1, -1)
    # A sink is one more column: it takes its share, and has no value.
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


@torch.no_grad()
def gather_loop_attention(inputs: AttentionInputs, out: Tensor) -> Tensor:
    """Attend the naive way: copy each sequence together, then call SDPA.

    What an engine does that pages its memory and changes nothing else: for
    every sequence, `gather_loop` into fresh memory, then attention as before.
    Takes softcap, ALiBi and sinks, but no window and no scaled or float8
    cache.

    Args:
        inputs: checked arguments, of `paged_attention`.
        out: [num_tokens, num_heads, head_dim_v], overwritten.

    Returns:
        `out`.

    Raises:
        ValueError: a window, a scale of the cache or a float8 cache, or a
            block id out of range.
    """
    scaled = inputs.k_scale is not None or inputs.v_scale is not None
    if inputs.window is not None or scaled or inputs.key_cache.dtype in FP8:
        raise ValueError(
            f"the naive gather takes no window (got {inputs.window}) and no "
            f"scaled or float8 cache (got {inputs.key_cache.dtype})"
        )
    starts = inputs.query_start_loc
    if starts is None:
        starts = torch.arange(inputs.num_seqs + 1)
    rows = starts.tolist()
    out.zero_()
    for i, length in enumerate(inputs.seq_lens.tolist()):
        query = inputs.query[rows[i] : rows[i + 1]]
        if length == 0 or len(query) == 0:
            continue
        table = inputs.block_tables[i : i + 1]
        keys = gather_loop(inputs.key_cache, table, length)
        values = gather_loop(inputs.value_cache, table, length)
        bias = _bias(inputs, len(query), 0, length, length, query.dtype)
        result = _attend(inputs, query[None], keys, values, bias)
        out[rows[i] : rows[i + 1]] = result[0]
    return out
