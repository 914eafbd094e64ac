"""Cut a step's work into pieces, and share them among threads.

A range of positions is cut by how much work there is, never by how many
threads there are, so one thread and many give the same bits.
"""

import operator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numba import config
from torch import Tensor

from llm_systems_cookbook.attention.cpu.jit import compiled, inlined
from llm_systems_cookbook.attention.cpu.kernels import Scoring
from llm_systems_cookbook.attention.inputs import AttentionInputs

QUERY_ROWS = 32  # rows x heads of a piece: each key is used so many times
MIN_PIECE = 512  # positions: below, combining costs more than it gains
PIECES = 1024  # pieces to cut the work into, where it is long enough
NO_WINDOW = 2**62


def _fields(*names: str) -> np.dtype:
    return np.dtype([(name, np.int64) for name in names])


# Neighbouring query rows of one sequence.
QUERY_TILE = _fields(
    "seq",  # which sequence
    "row",  # first row of the query
    "rows",  # how many
    "position",  # of the first row, in its sequence
    "length",  # of the sequence
    "low",  # first position that any of the rows sees
    "end",  # past the last such position
    "splits",  # into how many pieces [low, end) is cut, for each KV head
    "first",  # the first of them
)
# A range of a tile's positions, for one KV head.
PIECE = _fields("tile", "head", "low", "end")


class Plan(NamedTuple):
    """What follows from tables, lengths and options, not from numbers."""

    sizes: tuple[object, ...]  # see `_sizes`
    given: tuple[Tensor | None, ...]  # the very tensors, see `_given`
    versions: list[int] | None  # how often each was written, see `_versions`
    tables: np.ndarray  # [num_seqs, max_blocks] int64
    scoring: Scoring
    tiles: np.ndarray  # of QUERY_TILE
    pieces: np.ndarray  # of PIECE
    shares: np.ndarray  # [threads + 1] int64, where each thread's begin

    @property
    def threads(self) -> int:
        """How many threads work."""
        return len(self.shares) - 1


# --- One plan for the layers of a step ---------------------------------------


def plan_of(inputs: AttentionInputs, exact: torch.dtype) -> Plan:
    """Return the plan; the layers of a step share one.

    It is made again when torch has written into one of its tensors since. A
    write that torch does not count (through numpy, or `.data`) is not seen.
    """
    if inputs.plan is None:
        return _new_plan(inputs, exact)
    plan = inputs.plan.get("cpu")
    if plan is None:
        plan = inputs.plan["cpu"] = _new_plan(inputs, exact)
        return plan
    # Rows of another step would be written outside of this one's output.
    if plan.sizes != _sizes(inputs) or not all(
        map(operator.is_, plan.given, _given(inputs))
    ):
        raise ValueError(
            "the plan was made for other tables, lengths, heads or options"
        )
    if plan.versions is None or plan.versions != _versions(plan.given):
        plan = inputs.plan["cpu"] = _new_plan(inputs, exact)
    return plan


def _sizes(inputs: AttentionInputs) -> tuple[object, ...]:
    return (
        inputs.query.dtype,
        *inputs.query.shape[:2],
        inputs.num_kv_heads,
        inputs.scale,
        inputs.window,
        inputs.softcap,
    )


def _given(inputs: AttentionInputs) -> tuple[Tensor | None, ...]:
    return (
        inputs.block_tables,
        inputs.seq_lens,
        inputs.query_start_loc,
        inputs.alibi_slopes,
        inputs.sinks,
        inputs.k_scale,
        inputs.v_scale,
    )


def _versions(given: tuple[Tensor | None, ...]) -> list[int] | None:
    """Return torch's count of the writes into each tensor.

    None where torch does not count them, in inference mode.
    """
    try:
        return [tensor._version for tensor in given if tensor is not None]
    except RuntimeError:
        return None


def _new_plan(inputs: AttentionInputs, exact: torch.dtype) -> Plan:
    threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS)
    return Plan(
        _sizes(inputs),
        _given(inputs),
        _versions(_given(inputs)),
        inputs.block_tables.long().contiguous().numpy(),
        _scoring(inputs, np.float64 if exact == torch.float64 else np.float32),
        *_cut(
            inputs.seq_lens.long().contiguous().numpy(),
            _starts(inputs),
            max(1, QUERY_ROWS // inputs.group),
            NO_WINDOW if inputs.window is None else inputs.window,
            # One position beyond the table is enough to make a row NaN.
            inputs.max_blocks * inputs.block_size + 1,
            inputs.num_kv_heads,
            threads,
        ),
    )


def _starts(inputs: AttentionInputs) -> np.ndarray:
    """Return the first row of each sequence, and the end: [num_seqs + 1]."""
    if inputs.query_start_loc is None:
        return np.arange(inputs.num_seqs + 1)
    # Not checked without `validate`; a wrong one must not reach outside.
    return inputs.query_start_loc.long().clamp(0, inputs.num_tokens).numpy()


def _scoring(inputs: AttentionInputs, dtype: type[np.floating]) -> Scoring:
    def per_head(
        given: Tensor | None, otherwise: float, count: int
    ) -> np.ndarray:
        if given is None:
            return _constant(count, otherwise, dtype)
        return given.detach().numpy().astype(dtype)

    kv_heads, heads = inputs.num_kv_heads, inputs.num_heads
    return Scoring(
        per_head(inputs.k_scale, 1, kv_heads) * dtype(inputs.scale),
        per_head(inputs.v_scale, 1, kv_heads),
        per_head(inputs.alibi_slopes, 0, heads),
        per_head(inputs.sinks, -np.inf, heads),
        NO_WINDOW if inputs.window is None else inputs.window,
        dtype(inputs.softcap or 0),
    )


@lru_cache
def _constant(
    count: int, value: float, dtype: type[np.floating]
) -> np.ndarray:
    """Return one number, `count` times: made once, and only read."""
    return np.full(count, value, dtype)


# --- Cutting -----------------------------------------------------------------


@compiled()
def _cut(
    lengths: np.ndarray,
    starts: np.ndarray,
    height: int,
    window: int,
    limit: int,
    kv_heads: int,
    threads: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the work: tiles of rows, pieces of their positions, and shares.

    Compiled, because a step of few sequences would wait for numpy's calls.

    Args:
        lengths: [num_seqs] int64.
        starts: [num_seqs + 1] int64, each sequence's first row, and the end.
        height: rows of a tile at most.
        window: positions that a row sees at most.
        limit: no piece goes beyond this position.
        kv_heads: each has pieces of its own.
        threads: among how many the pieces are shared.

    Returns:
        [num_tiles] QUERY_TILE, [num_pieces] PIECE and [threads + 1] int64.
    """
    tiles = _cut_rows(lengths, starts, height, window, limit)
    pieces = _pieces(tiles, kv_heads)
    return tiles, pieces, _shares(tiles, pieces, threads)


# Here and not from `validate`: numba's cache sees no change in another file.
@inlined()
def _cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


@inlined()
def _cut_rows(
    lengths: np.ndarray,
    starts: np.ndarray,
    height: int,
    window: int,
    limit: int,
) -> np.ndarray:
    """Cut each sequence's rows into tiles of at most `height`."""
    count = 0
    for seq in range(len(lengths)):
        if lengths[seq] > 0:
            rows = max(0, starts[seq + 1] - starts[seq])
            count += _cdiv(rows, height)
    tiles = np.empty(count, QUERY_TILE)
    count = 0
    for seq in range(len(lengths)):
        if lengths[seq] > 0:
            stop = starts[seq + 1]
            for row in range(starts[seq], stop, height):
                tile = tiles[count]
                tile.seq, tile.length = seq, lengths[seq]
                tile.row, tile.rows = row, min(height, stop - row)
                tile.position = tile.length - (stop - row)
                end = tile.position + tile.rows
                tile.end = min(max(end, 0), limit)
                low = min(tile.position, limit - 1) - window + 1
                tile.low = min(max(low, 0), tile.end)
                count += 1
    return tiles


@inlined()
def _pieces(tiles: np.ndarray, kv_heads: int) -> np.ndarray:
    """Cut the tiles' ranges into pieces; write into the tiles which."""
    positions = 0
    for nth in range(len(tiles)):
        positions += tiles[nth].end - tiles[nth].low
    size = max(MIN_PIECE, _cdiv(positions * kv_heads, PIECES))
    count = 0
    for nth in range(len(tiles)):
        tile = tiles[nth]
        tile.splits = max(1, _cdiv(tile.end - tile.low, size))
        tile.first = count
        count += tile.splits * kv_heads
    pieces = np.empty(count, PIECE)
    for nth in range(len(tiles)):
        tile = tiles[nth]
        each = _cdiv(tile.end - tile.low, tile.splits)
        for i in range(tile.splits * kv_heads):
            piece = pieces[tile.first + i]
            piece.tile, piece.head = nth, i // tile.splits
            low = tile.low + i % tile.splits * each
            piece.low = min(low, tile.end)
            piece.end = min(low + each, tile.end)
    return pieces


@inlined()
def _shares(tiles: np.ndarray, pieces: np.ndarray, threads: int) -> np.ndarray:
    """Return where to cut the pieces so that all threads have equal work."""
    shares = np.full(threads + 1, len(pieces))
    shares[0] = 0
    total = 0
    for piece in pieces:
        total += (piece.end - piece.low) * tiles[piece.tile].rows
    done, thread = 0, 1
    for nth in range(len(pieces)):
        piece = pieces[nth]
        work = (piece.end - piece.low) * tiles[piece.tile].rows
        # The piece across a cut goes to the side that has more of it.
        while thread < threads and (
            (2 * done + work) * threads > 2 * total * thread
        ):
            shares[thread] = nth
            thread += 1
        done += work
    return shares
