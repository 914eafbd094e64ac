"""The numba kernels: attention that reads blocks in place, and the write.

The work is cut into pieces: one KV head, a few query rows, a range of
positions (see `plan`). A piece goes through its range tile by tile with an
online softmax and leaves three things for each row and head, by their usual
names: `m`, the largest score; `l`, the total of the weights exp(score - m);
`acc`, the sum of the values with these weights. A tile that the
sums can take as it is stays where it is; any other is copied, and widened on
the way. Pieces of the same rows are then combined.

What compiled functions share stays in this file: constants, the tuples that
they are given, and each other. numba keeps what it compiled on disk until this
file changes, and does not look at the files that it imports.
"""

import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic, overload

from llm_systems_cookbook.attention.cpu.jit import compiled, inlined

TILE = 16  # positions: a tile of keys and one of values fit the L1 cache
CACHE_LINE = 64  # bytes
# Values of head_dim for which the sums have a version of their own.
SMALL_WIDTH, USUAL_WIDTH = np.uint64(32), np.uint64(64)


# --- What the kernels are given ----------------------------------------------


class Scoring(NamedTuple):
    """How a score becomes a weight; floats in the dtype of the sums."""

    scale: np.ndarray  # [num_kv_heads], the keys' scale included
    value_scale: np.ndarray  # [num_kv_heads]
    slopes: np.ndarray  # [num_heads], 0 for none
    sinks: np.ndarray  # [num_heads], -inf for none
    window: int
    softcap: float  # 0 for none


class Cache(NamedTuple):
    """One cache as compiled code reads and writes it."""

    numbers: np.ndarray  # all of its memory, one-dimensional
    block_stride: int  # strides count numbers, not bytes
    head_stride: int
    token_stride: int
    step: int  # from one number of a row to the next
    num_blocks: int
    block_size: int
    per_line: int  # numbers in 64 bytes
    whole: bool  # a tile's rows lie side by side, in the dtype of the sums
    table: np.ndarray  # [256] float32, what an 8-bit number stands for


# m, l and acc of all pieces: m and l [num_pieces, rows * group], acc
# [num_pieces, rows * group, head_dim_v].
Partial = tuple[np.ndarray, np.ndarray, np.ndarray]


# --- Attention ---------------------------------------------------------------


# Sums may be reordered, which vector units need; NaN and infinity stay. What a
# function calls inherits this, and `_exp32` must not: these call nothing.
REORDER = {"reassoc", "contract", "nsz"}


@compiled(parallel=True)
def attend_all(
    query: np.ndarray,
    keys: Cache,
    values: Cache,
    tables: np.ndarray,
    scoring: Scoring,
    tiles: np.ndarray,
    pieces: np.ndarray,
    shares: np.ndarray,
    out: np.ndarray,
) -> None:
    """Let each thread work through its share of the pieces; combine them."""
    heads, threads = len(scoring.scale), len(shares) - 1
    partial = _unwritten(tiles, len(pieces), heads, out)
    _clear(out)
    # Where no rows are cut, no thread waits for another one's pieces.
    cut = len(pieces) > len(tiles) * heads
    for thread in prange(threads):
        for nth in range(shares[thread], shares[thread + 1]):
            _attend(
                query,
                keys,
                values,
                tables,
                scoring,
                tiles,
                pieces,
                nth,
                partial,
            )
            if not cut:
                piece = pieces[nth]
                _combine(tiles, piece.tile, piece.head, scoring, partial, out)
    if cut:
        for job in prange(len(tiles) * heads):
            _combine(tiles, job // heads, job % heads, scoring, partial, out)


@inlined()
def _unwritten(
    tiles: np.ndarray, num_pieces: int, heads: int, out: np.ndarray
) -> Partial:
    """Return room for what the pieces leave behind."""
    rows = 0
    for tile in range(len(tiles)):
        rows = max(rows, tiles[tile].rows)
    rows *= out.shape[1] // heads
    return (
        np.empty((num_pieces, rows), out.dtype),
        np.empty((num_pieces, rows), out.dtype),
        np.empty((num_pieces, rows, out.shape[2]), out.dtype),
    )


@inlined()
def _clear(out: np.ndarray) -> None:
    """Set all to 0: sums are added to it, and some rows are in no tile."""
    for row in range(out.shape[0]):
        out[row] = 0


@compiled()
def _attend(
    query: np.ndarray,
    keys: Cache,
    values: Cache,
    tables: np.ndarray,
    scoring: Scoring,
    tiles: np.ndarray,
    pieces: np.ndarray,
    nth: int,
    partial: Partial,
) -> None:
    """Attend from a few query rows to a range of positions, tile by tile."""
    piece = pieces[nth]
    own, head = tiles[piece.tile], piece.head
    position, length = own.position, own.length
    blocks = tables[own.seq]
    limit = len(blocks) * keys.block_size + 1
    group = query.shape[1] // len(scoring.scale)
    queries = _rows(query, own.row, own.rows, head, group)
    m, l, acc = partial[0][nth], partial[1][nth], partial[2][nth]
    for i in range(len(queries)):
        m[i], l[i], acc[i] = -np.inf, 0, 0
    # Taken out here: each call that is given arrays counts their users.
    scale, window = scoring.scale[head], scoring.window
    slopes, softcap = scoring.slopes, scoring.softcap
    weights = np.empty(TILE, query.dtype)
    key_rows = np.empty(TILE, np.int64)
    value_rows = np.empty(TILE, np.int64)
    key_tile = _aligned(TILE, queries.shape[1], query)
    value_tile = _aligned(TILE, acc.shape[1], query)
    end, last = piece.low, piece.end
    keys_stay = _stay(keys, blocks, end, last)
    values_stay = _stay(values, blocks, end, last)
    key_numbers = _source(keys_stay, keys.numbers, key_tile)
    value_numbers = _source(values_stay, values.numbers, value_tile)
    next_end = min(_tile_end(end), last)
    _translate(keys, blocks, head, end, next_end, key_rows)
    _translate(values, blocks, head, end, next_end, value_rows)
    while end < last:
        first, end = end, next_end
        key_at = _fetch(keys, keys_stay, key_rows, end - first, key_tile)
        value_at = _fetch(
            values, values_stay, value_rows, end - first, value_tile
        )
        next_end = min(_tile_end(end), last)
        _translate(keys, blocks, head, end, next_end, key_rows)
        _translate(values, blocks, head, end, next_end, value_rows)
        for i in range(len(queries)):
            a, b = _part(next_end - end, i, len(queries))
            _prefetch_rows(keys, keys_stay, key_rows, a, b, queries.shape[1])
            _prefetch_rows(values, values_stay, value_rows, a, b, acc.shape[1])
            # Positions up to its own; at most one that no block holds.
            seen = min(position + i // group + 1, limit)
            low = max(first, seen - window)
            count = min(end, seen) - low
            if count <= 0:
                continue
            key = key_at + (low - first) * queries.shape[1]
            _score(queries, i, key_numbers, key, count, scale, weights)
            distance = low - length + 1
            slope = slopes[head * group + i % group]
            _cap_and_bias(weights, count, distance, slope, softcap)
            _softmax_step(weights, count, m, l, acc, i)
            value = value_at + (low - first) * acc.shape[1]
            _add_values(weights, count, value_numbers, value, acc, i)


@inlined()
def _tile_end(position: int) -> int:
    """Return where a position's tile ends: within a block of whole tiles."""
    return (position // TILE + 1) * TILE


@inlined()
def _stay(cache: Cache, blocks: np.ndarray, first: int, end: int) -> bool:
    """Return whether every tile of a range can be read where it is."""
    if not cache.whole or first >= end:
        return False
    after = (end - 1) // cache.block_size + 1
    if after > len(blocks):
        return False
    for column in range(first // cache.block_size, after):
        if not 0 <= blocks[column] < cache.num_blocks:
            return False
    return True


def _source(stay: bool, numbers: np.ndarray, tile: np.ndarray) -> np.ndarray:
    """Return the numbers to read: the cache's, or those of copied tiles."""


# numba wants the two signatures alike: no types here.
@overload(_source)
def _source_of(stay, numbers, tile):  # noqa: ANN001, ANN202
    if numbers.dtype == tile.dtype:
        return lambda stay, numbers, tile: (
            numbers if stay else tile.reshape(tile.size)
        )
    return lambda stay, numbers, tile: tile.reshape(tile.size)


@inlined()
def _fetch(
    cache: Cache, stay: bool, rows: np.ndarray, count: int, tile: np.ndarray
) -> int:
    """Return where a tile starts in its source, copied there if it must be."""
    if stay:
        return rows[0]
    _copy_rows(cache, rows, count, tile)
    return 0


@inlined()
def _part(count: int, i: int, parts: int) -> tuple[int, int]:
    """Return from where to where the i-th of equal parts goes."""
    # Rounded up here: numba's cache would not see a change in another file.
    share = -(-count // parts)
    return min(i * share, count), min((i + 1) * share, count)


@inlined()
def _aligned(rows: int, width: int, like: np.ndarray) -> np.ndarray:
    """Return an empty array that starts with a cache line."""
    numbers = np.empty(rows * width + CACHE_LINE // like.itemsize, like.dtype)
    skip = -numbers.ctypes.data % CACHE_LINE // like.itemsize
    return numbers[skip : skip + rows * width].reshape(rows, width)


@inlined()
def _rows(
    query: np.ndarray, row: int, rows: int, head: int, group: int
) -> np.ndarray:
    """Copy the queries of one KV head: [rows * group, head_dim]."""
    queries = np.empty((rows * group, query.shape[2]), query.dtype)
    for i in range(rows * group):
        # Number by number: numba takes long to compile a row's assignment.
        for d in range(query.shape[2]):
            queries[i, d] = query[
                row + i // group, head * group + i % group, d
            ]
    return queries


@inlined()
def _translate(
    cache: Cache,
    blocks: np.ndarray,
    head: int,
    first: int,
    end: int,
    rows: np.ndarray,
) -> None:
    """Find where the rows of positions [first, end) start; -1 is nowhere."""
    done = 0
    while first + done < end:
        column = (first + done) // cache.block_size
        offset = first + done - column * cache.block_size
        count = min(cache.block_size - offset, end - first - done)
        block = blocks[column] if column < len(blocks) else -1
        start, step = -1, 0
        if 0 <= block < cache.num_blocks:
            step = cache.token_stride
            start = (
                block * cache.block_stride
                + head * cache.head_stride
                + offset * step
            )
        for i in range(count):
            rows[done + i] = start + i * step
        done += count


@inlined()
def _copy_rows(
    cache: Cache, rows: np.ndarray, count: int, tile: np.ndarray
) -> None:
    """Copy rows of the cache into a tile, as floating-point numbers."""
    numbers, table, step = cache.numbers, cache.table, cache.step
    width = tile.shape[1]
    for i in range(count):
        start = rows[i]
        if start < 0:
            for d in range(width):
                tile[i, d] = np.nan
        elif step == 1:
            at = np.uint64(start)
            for d in range(np.uint64(width)):
                tile[i, d] = _number(numbers[at + d], table)
        else:
            for d in range(width):
                tile[i, d] = _number(numbers[start + d * step], table)


@inlined()
def _prefetch_rows(
    cache: Cache,
    stay: bool,
    rows: np.ndarray,
    first: int,
    end: int,
    width: int,
) -> None:
    """Ask for rows that come next, while there is other work to do."""
    if stay:  # side by side: as one
        for d in range(first * width, end * width, cache.per_line):
            _prefetch(cache.numbers, rows[0] + d)
        return
    for i in range(first, end):
        if rows[i] >= 0:
            for d in range(0, width, cache.per_line):
                _prefetch(cache.numbers, rows[i] + d)


# For a width that the compiler knows, it drops the loop over a row and what
# is there for the numbers left over. Places are unsigned: of a signed index,
# numba asks whether it counts from the end, and then uses no vector unit.


@inlined()
def _score(
    queries: np.ndarray,
    i: int,
    keys: np.ndarray,
    first: int,
    count: int,
    scale: float,
    scores: np.ndarray,
) -> None:
    """Compare one query with the keys that start at `first`."""
    at, width = np.uint64(first), np.uint64(queries.shape[1])
    if width == SMALL_WIDTH:
        _score_by(SMALL_WIDTH, queries, i, keys, at, count, scale, scores)
    elif width == USUAL_WIDTH:
        _score_by(USUAL_WIDTH, queries, i, keys, at, count, scale, scores)
    else:
        _score_by(width, queries, i, keys, at, count, scale, scores)


@inlined(fastmath=REORDER)
def _score_by(
    width: int,
    queries: np.ndarray,
    i: int,
    keys: np.ndarray,
    k0: int,
    count: int,
    scale: float,
    scores: np.ndarray,
) -> None:
    """Compare one query with keys of a tile, four at a time."""
    zero = scores.dtype.type(0)
    whole = count - count % 4
    for j in range(0, whole, 4):
        s0 = s1 = s2 = s3 = zero
        k1 = k0 + width
        k2 = k1 + width
        k3 = k2 + width
        for d in range(width):
            number = queries[i, d]
            s0 += number * keys[k0 + d]
            s1 += number * keys[k1 + d]
            s2 += number * keys[k2 + d]
            s3 += number * keys[k3 + d]
        scores[j], scores[j + 1] = s0 * scale, s1 * scale
        scores[j + 2], scores[j + 3] = s2 * scale, s3 * scale
        k0 = k3 + width
    for j in range(whole, count):
        s0 = zero
        for d in range(width):
            s0 += queries[i, d] * keys[k0 + d]
        scores[j] = s0 * scale
        k0 += width


@inlined()
def _cap_and_bias(
    scores: np.ndarray,
    count: int,
    distance: int,
    slope: float,
    softcap: float,
) -> None:
    """Cap the scores, then lower those of tokens far back."""
    if softcap > 0:
        for j in range(count):
            scores[j] = softcap * math.tanh(scores[j] / softcap)
    if slope != 0:
        for j in range(count):
            scores[j] += slope * (distance + j)


@inlined()
def _softmax_step(
    weights: np.ndarray,
    count: int,
    m: np.ndarray,
    l: np.ndarray,
    acc: np.ndarray,
    i: int,
) -> None:
    """Turn scores into weights against the largest score so far."""
    m_new = m[i]
    above = False  # rarely: vector units can tell, but not name the largest
    for j in range(count):
        above |= weights[j] > m_new
    if above:
        for j in range(count):
            m_new = max(m_new, weights[j])
    base = _base(m_new)
    for j in range(count):
        weights[j] = _exp(weights[j] - base)
    if above:  # what was summed against a smaller one shrinks
        shrink = _exp(m[i] - base)
        l[i] *= shrink
        for d in range(acc.shape[1]):
            acc[i, d] *= shrink
        m[i] = m_new
    l[i] += _sum(weights, count)


@inlined(fastmath=REORDER)
def _sum(weights: np.ndarray, count: int) -> float:
    """Add up the weights of a tile."""
    total = weights.dtype.type(0)
    for j in range(count):
        total += weights[j]
    return total


@inlined()
def _base(m: float) -> float:
    """Return what is taken off every score: the largest, where it is one."""
    # Where all scores are -inf, against 0 their weights are 0, not NaN.
    return np.float32(0) if m == -np.inf else m


@inlined()
def _add_values(
    weights: np.ndarray,
    count: int,
    values: np.ndarray,
    first: int,
    acc: np.ndarray,
    i: int,
) -> None:
    """Add the values that start at `first`, each times its weight."""
    at, width = np.uint64(first), np.uint64(acc.shape[1])
    if width == SMALL_WIDTH:
        _add_values_by(SMALL_WIDTH, weights, count, values, at, acc, i)
    elif width == USUAL_WIDTH:
        _add_values_by(USUAL_WIDTH, weights, count, values, at, acc, i)
    else:
        _add_values_by(width, weights, count, values, at, acc, i)


@inlined(fastmath=REORDER)
def _add_values_by(
    width: int,
    weights: np.ndarray,
    count: int,
    values: np.ndarray,
    v0: int,
    acc: np.ndarray,
    i: int,
) -> None:
    """Add values of a tile, each times its weight, eight at a time."""
    whole = count - count % 8
    for j in range(0, whole, 8):
        w0, w1, w2, w3 = (
            weights[j],
            weights[j + 1],
            weights[j + 2],
            weights[j + 3],
        )
        w4, w5, w6, w7 = (
            weights[j + 4],
            weights[j + 5],
            weights[j + 6],
            weights[j + 7],
        )
        v1 = v0 + width
        v2 = v1 + width
        v3 = v2 + width
        v4 = v3 + width
        v5 = v4 + width
        v6 = v5 + width
        v7 = v6 + width
        for d in range(width):
            acc[i, d] += (
                w0 * values[v0 + d]
                + w1 * values[v1 + d]
                + w2 * values[v2 + d]
                + w3 * values[v3 + d]
                + w4 * values[v4 + d]
                + w5 * values[v5 + d]
                + w6 * values[v6 + d]
                + w7 * values[v7 + d]
            )
        v0 = v7 + width
    for j in range(whole, count):
        for d in range(width):
            acc[i, d] += weights[j] * values[v0 + d]
        v0 += width


@inlined()
def _combine(
    tiles: np.ndarray,
    nth: int,
    head: int,
    scoring: Scoring,
    partial: Partial,
    out: np.ndarray,
) -> None:
    """Bring the pieces of the same rows to one scale, and add them."""
    tile = tiles[nth]
    group = out.shape[1] // len(scoring.scale)
    begin = tile.first + head * tile.splits
    for i in range(tile.rows * group):
        _merge(
            partial,
            begin,
            begin + tile.splits,
            i,
            scoring.sinks[head * group + i % group],
            scoring.value_scale[head],
            out[tile.row + i // group, head * group + i % group],
        )


@inlined()
def _merge(
    partial: Partial,
    first: int,
    end: int,
    i: int,
    sink: float,
    scale: float,
    row: np.ndarray,
) -> None:
    """Write one row's weighted mean of values; a sink adds to the total."""
    m, l, acc = partial
    m_all = sink
    for piece in range(first, end):
        m_all = max(m_all, m[piece, i])
    base = _base(m_all)
    l_all = _exp(sink - base)
    for piece in range(first, end):
        l_all += l[piece, i] * _exp(m[piece, i] - base)
    for piece in range(first, end):
        share = _exp(m[piece, i] - base) / l_all * scale
        for d in range(len(row)):
            row[d] += share * acc[piece, i, d]


@intrinsic
def _prefetch(
    typing_context: object, numbers: object, index: object
) -> object:
    """Ask for the cache line of `numbers[index]` without waiting for it."""

    def generate(
        context: object, builder: object, signature: object, arguments: object
    ) -> object:
        array_type = signature.args[0]
        array = context.make_array(array_type)(context, builder, arguments[0])
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            (byte,),
            ir.FunctionType(ir.VoidType(), [byte, number, number, number]),
        )
        address = builder.bitcast(
            builder.gep(array.data, [arguments[1]]), byte
        )
        builder.call(function, [address, number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.void(numbers, types.int64), generate


# --- The write --------------------------------------------------------------


@compiled()
def write_all(
    key: np.ndarray,
    value: np.ndarray,
    keys: Cache,
    values: Cache,
    slots: np.ndarray,
) -> None:
    """Write each token's rows where its slot says."""
    num_slots = keys.num_blocks * keys.block_size
    for token in range(len(slots)):
        slot = slots[token]
        if 0 <= slot < num_slots:
            _write_rows(key, token, keys, slot)
            _write_rows(value, token, values, slot)


@inlined()
def _write_rows(rows: np.ndarray, token: int, cache: Cache, slot: int) -> None:
    """Copy rows[token], [num_kv_heads, head_dim], into a slot."""
    numbers, step, width = cache.numbers, cache.step, rows.shape[2]
    block = slot // cache.block_size
    offset = slot - block * cache.block_size
    start = block * cache.block_stride + offset * cache.token_stride
    for head in range(rows.shape[1]):
        if step == 1:
            at = np.uint64(start)
            for d in range(np.uint64(width)):
                numbers[at + d] = rows[token, head, d]
        else:
            for d in range(width):
                numbers[start + d * step] = rows[token, head, d]
        start += cache.head_stride


# --- Numbers ----------------------------------------------------------------


def _number(stored: object, table: np.ndarray) -> float:
    """Return a stored number as floating point."""


# numba wants the two signatures alike: no types here.
@overload(_number)
def _number_of(stored, table):  # noqa: ANN001, ANN202
    if stored == types.int16:
        return lambda stored, table: _from_float16(stored)
    if stored == types.uint16:
        return lambda stored, table: np.uint32(
            np.uint32(stored) << np.uint32(16)
        ).view(np.float32)
    if stored == types.uint8:
        return lambda stored, table: table[stored]
    return lambda stored, table: stored


@inlined()
def _from_float16(stored: int) -> float:
    """Widen a float16's sign, 5 bits of exponent and 10 of fraction."""
    bits = np.uint32(np.uint16(stored))
    sign = np.uint32((bits & np.uint32(0x8000)) << np.uint32(16))
    rest = np.uint32(bits & np.uint32(0x7FFF))
    shifted = np.uint32(rest << np.uint32(13))
    if rest < 0x0400:  # below the normal range
        size = np.float32(np.float32(rest) * TINY).view(np.uint32)
    elif rest < 0x7C00:
        size = np.uint32(shifted + np.uint32(112 << 23))
    else:
        size = np.uint32(shifted | np.uint32(0x7F800000))
    return np.uint32(size | sign).view(np.float32)


def _exp(x: float) -> float:
    """Return e**x for x <= 0."""


# numba wants the two signatures alike: no types here.
@overload(_exp)
def _exp_of(x):  # noqa: ANN001, ANN202
    if x == types.float32:
        return lambda x: _exp32(x)
    return lambda x: math.exp(x)


TINY = np.float32(2.0**-24)
LOG2E = np.float32(1.44269504)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
ROUND = np.float32(1.5 * 2**23)
LEAST = np.float32(-87.0)


@inlined()
def _exp32(x: float) -> float:
    """Return e**x for x <= 0 by a polynomial, which vector units can do."""
    shifted = x * LOG2E + ROUND
    whole = shifted - ROUND
    r = x - whole * LN2_HIGH - whole * LN2_LOW
    series = np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(1 / 2)
    series = series * r + np.float32(1)
    series = series * r + np.float32(1)
    bits = np.float32(shifted).view(np.uint32)
    power = np.uint32((bits + np.uint32(127)) << np.uint32(23))
    result = series * np.uint32(power).view(np.float32)
    return np.float32(0) if x < LEAST else result
