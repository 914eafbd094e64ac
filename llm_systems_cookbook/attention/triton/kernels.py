"""Paged attention in Triton: from one program per head to the whole thing.

The rungs, each a kernel that runs:

1. `per_head_kernel`: one program per query head, reading its blocks in place.
2. `grouped_kernel`: the query heads that share a KV head in one program, so
   that each key and value is read once.
3. `tiled_kernel`: a tile of any size spans blocks of any size.
4. `split_kernel` and `combine_kernel`: several programs per sequence.
5. `paged_attention_kernel`: any strides, 64-bit offsets, tiles chosen for the
   device; decode and ragged causal prefill.
6. The same kernel with its options. An argument that is None is known when
   the kernel is compiled, and leaves no code behind.

`write_kernel` puts new keys and values into their slots. The functions that
launch all of these are in `launch`.

Tensors arrive as pointers, and offsets count elements. Their shapes are those
of `paged_attention`: `query` and `out` [num_tokens, num_heads, head_dim],
`keys` and `values` [num_blocks, num_kv_heads, block_size, head_dim], `tables`
[num_seqs, max_blocks], `lengths` [num_seqs], and `starts`, its
query_start_loc, [num_seqs + 1]. A split leaves `parts`
[num_tokens, num_heads, splits, head_dim_v] and `part_lses`, the log-sum-exp
of its scores, [num_tokens, num_heads, splits], both float32.

Without a GPU the kernels run in Triton's interpreter, which has to be on
(`TRITON_INTERPRET=1`) before `triton` is first imported.

Sources: Dao, "FlashAttention-2" (2023), for the softmax over tiles; Dao,
Haziza, Massa and Sizov, "Flash-Decoding" (2023), for splitting the keys.
"""

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

# --- The steps that the rungs share -----------------------------------------


@triton.jit
def softmax_step(scores, values, m, l, acc):
    """Add a tile of tokens to a running softmax, one row per query head.

    Args:
        scores: [rows, tile] float32, -inf where the row sees no token.
        values: [tile, head_dim_v].
        m: [rows], the largest score so far.
        l: [rows], the total weight so far: the sum of exp(score - m).
        acc: [rows, head_dim_v], the values so far, summed with these weights.

    Returns:
        m, l and acc with the tile in them.
    """
    m_new = tl.maximum(m, tl.max(scores, 1))
    # A row that has seen no token yet: -inf - -inf would be NaN.
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    rescale = tl.exp(m - base)
    weights = tl.exp(scores - base[:, None])
    l = l * rescale + tl.sum(weights, 1)
    fresh = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    acc = acc * rescale[:, None] + fresh
    return m_new, l, acc


@triton.jit
def normalized(acc, l):
    """Return the weighted mean of the values; zeros where no token was."""
    # False for NaN, which has to stay visible. Without a token, acc is 0.
    none = l == 0.0
    return acc / tl.where(none, 1.0, l)[:, None]


# --- Rung 1: one program per query head -------------------------------------


@triton.jit
def per_head_kernel(
    query,
    keys,
    values,
    tables,
    lengths,
    out,
    scale,
    max_blocks,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Attend with one query head, one block at a time."""
    seq, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    length = tl.load(lengths + seq)
    dim = tl.arange(0, HEAD_DIM)
    offset = tl.arange(0, BLOCK_SIZE)
    row = (seq * NUM_HEADS + head) * HEAD_DIM + dim
    q = tl.load(query + row).to(tl.float32) * scale

    m = float("-inf")
    l = 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for block in range(tl.cdiv(length, BLOCK_SIZE)):
        block_id = tl.load(tables + seq * max_blocks + block)
        slot = (block_id * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offset
        at = slot[:, None] * HEAD_DIM + dim[None, :]
        live = block * BLOCK_SIZE + offset < length
        k = tl.load(keys + at, mask=live[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=live[:, None], other=0.0).to(tl.float32)

        scores = tl.where(live, tl.sum(q[None, :] * k, 1), float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 0))
        rescale = tl.exp(m - m_new)
        weights = tl.exp(scores - m_new)
        l = l * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * v, 0)
        m = m_new
    if length > 0:
        acc = acc / l
    tl.store(out + row, acc.to(out.dtype.element_ty))


# --- Rung 2: the heads that share a KV head, together -----------------------


@triton.jit
def grouped_kernel(
    query,
    keys,
    values,
    tables,
    lengths,
    out,
    scale,
    max_blocks,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Attend with a group of query heads: each key is read once for all."""
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + seq)
    dim = tl.arange(0, HEAD_DIM)
    offset = tl.arange(0, BLOCK_SIZE)
    rows = tl.arange(0, ROWS)
    head = (seq * NUM_KV_HEADS + kv_head) * GROUP + rows
    at_query = head[:, None] * HEAD_DIM + dim[None, :]
    in_group = (rows < GROUP)[:, None]
    q = tl.load(query + at_query, mask=in_group, other=0.0).to(COMPUTE)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for block in range(tl.cdiv(length, BLOCK_SIZE)):
        block_id = tl.load(tables + seq * max_blocks + block)
        slot = (block_id * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offset
        at = slot[:, None] * HEAD_DIM + dim[None, :]
        live = block * BLOCK_SIZE + offset < length
        k = tl.load(keys + at, mask=live[:, None], other=0.0).to(COMPUTE)
        v = tl.load(values + at, mask=live[:, None], other=0.0).to(COMPUTE)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        m, l, acc = softmax_step(scores, v, m, l, acc)
    result = normalized(acc, l).to(out.dtype.element_ty)
    tl.store(out + at_query, result, mask=in_group)


# --- Rung 3: a tile that knows no blocks ------------------------------------


@triton.jit
def attend_range(
    q,
    keys,
    values,
    table,
    begin,
    end,
    kv_head,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Attend to the tokens [begin, end), whatever blocks they lie in."""
    dim = tl.arange(0, DIMS)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        live = position < end
        block_id = tl.load(table + position // BLOCK_SIZE, mask=live, other=0)
        slot = (block_id * NUM_KV_HEADS + kv_head) * BLOCK_SIZE
        slot += position % BLOCK_SIZE
        at = slot[:, None] * HEAD_DIM + dim[None, :]
        stored = live[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys + at, mask=stored, other=0.0).to(COMPUTE)
        v = tl.load(values + at, mask=stored, other=0.0).to(COMPUTE)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        m, l, acc = softmax_step(scores, v, m, l, acc)
    return m, l, acc


@triton.jit
def tiled_kernel(
    query,
    keys,
    values,
    tables,
    lengths,
    out,
    scale,
    max_blocks,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Attend with a group of query heads, TILE tokens at a time."""
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, DIMS)
    rows = tl.arange(0, ROWS)
    head = (seq * NUM_KV_HEADS + kv_head) * GROUP + rows
    at_query = head[:, None] * HEAD_DIM + dim[None, :]
    in_query = (rows < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + at_query, mask=in_query, other=0.0).to(COMPUTE)

    _, l, acc = attend_range(
        q,
        keys,
        values,
        tables + seq * max_blocks,
        0,
        tl.load(lengths + seq),
        kv_head,
        scale,
        NUM_KV_HEADS,
        ROWS,
        BLOCK_SIZE,
        HEAD_DIM,
        DIMS,
        TILE,
        COMPUTE,
    )
    result = normalized(acc, l).to(out.dtype.element_ty)
    tl.store(out + at_query, result, mask=in_query)


# --- Rung 4: several programs per sequence ----------------------------------


@triton.jit
def split_kernel(
    query,
    keys,
    values,
    tables,
    lengths,
    parts,
    part_lses,
    scale,
    max_blocks,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Attend to one split of the tokens; leave its result and log-sum-exp."""
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + seq)
    per_split = tl.cdiv(tl.cdiv(length, TILE), SPLITS) * TILE
    begin = split * per_split
    dim = tl.arange(0, DIMS)
    rows = tl.arange(0, ROWS)
    head = (seq * NUM_KV_HEADS + kv_head) * GROUP + rows
    at_query = head[:, None] * HEAD_DIM + dim[None, :]
    in_query = (rows < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + at_query, mask=in_query, other=0.0).to(COMPUTE)

    m, l, acc = attend_range(
        q,
        keys,
        values,
        tables + seq * max_blocks,
        begin,
        tl.minimum(begin + per_split, length),
        kv_head,
        scale,
        NUM_KV_HEADS,
        ROWS,
        BLOCK_SIZE,
        HEAD_DIM,
        DIMS,
        TILE,
        COMPUTE,
    )
    part = head * SPLITS + split
    at_part = part[:, None] * HEAD_DIM + dim[None, :]
    tl.store(parts + at_part, normalized(acc, l), mask=in_query)
    tl.store(part_lses + part, log_sum_exp(m, l), mask=rows < GROUP)


@triton.jit
def log_sum_exp(m, l):
    """Return log(sum(exp(score))) of each row: -inf where no token was."""
    none = l == 0.0
    log_l = tl.log(tl.where(none, 1.0, l))
    return tl.where(none, float("-inf"), m + log_l)


@triton.jit
def combine_kernel(
    parts,
    part_lses,
    sinks,
    out,
    out_stride_token,
    out_stride_head,
    out_stride_dim,
    splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Weigh the parts of one query head by their share of the softmax."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIMS)
    part = (token * NUM_HEADS + head) * splits + split
    used = split < splits
    lses = tl.load(part_lses + part, mask=used, other=float("-inf"))
    m = tl.max(lses, 0)
    if sinks is not None:
        sink = tl.load(sinks + head)
        m = tl.maximum(m, sink)
    base = tl.where(m == float("-inf"), 0.0, m)
    weights = tl.exp(lses - base)
    l = tl.sum(weights, 0)
    if sinks is not None:
        l += tl.exp(sink - base)
    at = part[:, None] * HEAD_DIM_V + dim[None, :]
    stored = used[:, None] & (dim < HEAD_DIM_V)[None, :]
    part_values = tl.load(parts + at, mask=stored, other=0.0)
    acc = tl.sum(weights[:, None] * part_values, 0)
    result = acc / tl.where(l == 0.0, 1.0, l)
    row = out + token * out_stride_token + head * out_stride_head
    tl.store(
        row + dim * out_stride_dim,
        result.to(out.dtype.element_ty),
        mask=dim < HEAD_DIM_V,
    )


# --- Rungs 5 and 6: the whole thing -----------------------------------------


@triton.jit
def sequence_of_tile(starts, tile, num_seqs, QUERY_TILE: tl.constexpr):
    """Return whose query tile this is, by bisection.

    Sequence i has the tiles from `starts[i] // QUERY_TILE + i` on: always
    enough of them, and where they begin needs no pass over the batch.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // QUERY_TILE + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def from_fp8(bits, E5M2: tl.constexpr):
    """Return the float16 that a byte of a float8 cache stands for.

    float8_e5m2 is the upper byte of a float16. float8_e4m3fn has a bias of 7
    where float16 has 15: read as a float16, it is 2**8 times too small.
    """
    wide = bits.to(tl.uint16)
    if E5M2:
        return (wide << 8).to(tl.float16, bitcast=True)
    magnitude = wide & 0x7F
    shifted = ((wide & 0x80) << 8) | (magnitude << 7)
    number = shifted.to(tl.float16, bitcast=True) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), number)


@triton.jit
def tanh(x):
    """Return tanh by exp, which every version of Triton has."""
    # Tends to 1 where exp overflows, but cancels where x is small.
    large = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    square = x * x
    series = 2.0 / 15.0 - 17.0 / 315.0 * square
    small = x * (1.0 - square * (1.0 / 3.0 - square * series))
    return tl.where(square < 0.04, small, large)


@triton.jit
def shaped_scores(scores, position, length, slope, softcap):
    """Cap the scores, then bias them by distance (ALiBi), where asked for."""
    if softcap is not None:
        scores = softcap * tanh(scores / softcap)
    if slope is not None:
        distance = (position - (length - 1)).to(tl.float32)
        scores += slope[:, None] * distance[None, :]
    return scores


@triton.jit
def with_sink(m, l, acc, sink):
    """Let a sink take its share of the softmax; it adds no value."""
    m_new = tl.maximum(m, sink)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    rescale = tl.exp(m - base)
    l = l * rescale + tl.exp(sink - base)
    return l, acc * rescale[:, None]


@triton.jit
def load_tile(
    cache,
    slot_at,
    known,
    stride_dim,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Return the tile's keys or values, [tile, DIMS], zeros where unknown."""
    dim = tl.arange(0, DIMS)
    at = slot_at[:, None] + dim[None, :] * stride_dim
    stored = known[:, None] & (dim < DIM)[None, :]
    if FP8 == 0:
        return tl.load(cache + at, mask=stored, other=0.0).to(COMPUTE)
    bits = tl.load(cache + at, mask=stored, other=0)
    return from_fp8(bits, FP8 == 2).to(COMPUTE)


# These change from step to step: a version for each value would be compiled
# in the middle of serving.
@triton.jit(
    do_not_specialize=(
        "num_seqs",
        "num_blocks",
        "max_blocks",
        "table_stride",
        "window",
    )
)
def paged_attention_kernel(
    query,
    keys,
    values,
    tables,
    lengths,
    starts,
    out,
    parts,
    part_lses,
    slopes,
    sinks,
    k_scale,
    v_scale,
    scale,
    softcap,
    window,
    num_seqs,
    num_blocks,
    max_blocks,
    query_stride_token,
    query_stride_head,
    query_stride_dim,
    key_stride_block,
    key_stride_head,
    key_stride_slot,
    key_stride_dim,
    value_stride_block,
    value_stride_head,
    value_stride_slot,
    value_stride_dim,
    table_stride,
    out_stride_token,
    out_stride_head,
    out_stride_dim,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_V: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Attend with a tile of one sequence's query rows, for one KV head.

    Row r of the program is query head `r % GROUP` of the group, of the query
    tile's token `r // GROUP`.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    # Whose tokens are these, and which of them?
    seq, first_token, first, query_len = tile, tile, 0, 1
    if starts is not None:
        seq = sequence_of_tile(starts, tile, num_seqs, QUERY_TILE)
        first_token = tl.load(starts + seq)
        query_len = tl.load(starts + seq + 1) - first_token
        first = (tile - (first_token // QUERY_TILE + seq)) * QUERY_TILE
        if first >= query_len:
            return
    # One token past the table is enough to make a result NaN.
    length = tl.minimum(tl.load(lengths + seq), max_blocks * BLOCK_SIZE + 1)
    rows = tl.arange(0, ROWS)
    index = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_used = (rows < QUERY_TILE * GROUP) & (index < query_len)
    row_position = length - query_len + index
    token = (first_token + index).to(tl.int64)
    dim = tl.arange(0, DIMS)
    at_query = token * query_stride_token + head * query_stride_head
    q = tl.load(
        query + at_query[:, None] + dim[None, :] * query_stride_dim,
        mask=row_used[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    ).to(COMPUTE)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=row_used, other=0.0)
    if k_scale is not None:
        scale = scale * tl.load(k_scale + kv_head)

    # Which tokens does any of the rows see, and which are this split's?
    newest = length - query_len + tl.minimum(first + QUERY_TILE, query_len)
    oldest = 0
    if window is not None:
        oldest = tl.maximum(length - query_len + first - window + 1, 0)
    first_tile = oldest // TILE
    per_split = tl.cdiv(tl.cdiv(newest, TILE) - first_tile, SPLITS)
    begin = (first_tile + split * per_split) * TILE
    end = tl.minimum(begin + per_split * TILE, newest)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS_V], tl.float32)
    table = tables + seq.to(tl.int64) * table_stride
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        wanted = (position >= oldest) & (position < end)
        block = position // BLOCK_SIZE
        in_table = wanted & (block < max_blocks)
        block_id = tl.load(table + block, mask=in_table, other=-1)
        block_id = block_id.to(tl.int64)
        known = (block_id >= 0) & (block_id < num_blocks)
        offset = (position % BLOCK_SIZE).to(tl.int64)
        at_key = block_id * key_stride_block + kv_head * key_stride_head
        at_key += offset * key_stride_slot
        at_value = block_id * value_stride_block
        at_value += kv_head * value_stride_head + offset * value_stride_slot
        k = load_tile(
            keys, at_key, known, key_stride_dim, HEAD_DIM, DIMS, FP8, COMPUTE
        )
        v = load_tile(
            values,
            at_value,
            known,
            value_stride_dim,
            HEAD_DIM_V,
            DIMS_V,
            FP8,
            COMPUTE,
        )

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = shaped_scores(scores, position, length, slope, softcap)
        # A block that is not there must not pass for one of zeros.
        scores = tl.where(known[None, :], scores, float("nan"))
        seen = wanted[None, :]
        seen = seen & (position[None, :] <= row_position[:, None])
        if window is not None:
            seen = seen & (position[None, :] > row_position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        m, l, acc = softmax_step(scores, v, m, l, acc)

    if v_scale is not None:
        acc = acc * tl.load(v_scale + kv_head)
    dim_v = tl.arange(0, DIMS_V)
    stored = row_used[:, None] & (dim_v < HEAD_DIM_V)[None, :]
    if SPLITS == 1:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=row_used, other=0.0)
            l, acc = with_sink(m, l, acc, sink)
        at_out = token * out_stride_token + head * out_stride_head
        tl.store(
            out + at_out[:, None] + dim_v[None, :] * out_stride_dim,
            normalized(acc, l).to(out.dtype.element_ty),
            mask=stored,
        )
    else:
        part = (token * NUM_HEADS + head) * SPLITS + split
        at_part = part[:, None] * HEAD_DIM_V + dim_v[None, :]
        tl.store(parts + at_part, normalized(acc, l), mask=stored)
        tl.store(part_lses + part, log_sum_exp(m, l), mask=row_used)


# --- The cache write --------------------------------------------------------


@triton.jit
def write_kernel(
    rows,
    cache,
    slots,
    num_slots,
    row_stride_token,
    row_stride_head,
    row_stride_dim,
    cache_stride_block,
    cache_stride_head,
    cache_stride_slot,
    cache_stride_dim,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Copy one token of one head into its slot; slot -1 writes nothing."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    if slot >= num_slots:
        return
    dim = tl.arange(0, DIMS)
    at_row = token * row_stride_token + head * row_stride_head
    row = tl.load(rows + at_row + dim * row_stride_dim, mask=dim < HEAD_DIM)
    at = slot // BLOCK_SIZE * cache_stride_block + head * cache_stride_head
    at += slot % BLOCK_SIZE * cache_stride_slot
    tl.store(cache + at + dim * cache_stride_dim, row, mask=dim < HEAD_DIM)


INTERPRETED = not isinstance(write_kernel, JITFunction)
