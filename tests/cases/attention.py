"""Attention cases for every backend: pairwise over many options, and random.

Each case is small. Every slot that no query may see holds NaN, and so does
the output before the run: what is read or left out by mistake shows.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations, product
from types import ModuleType

import pytest
import torch

from llm_systems_cookbook.attention.inputs import (
    FP8,
    AttentionInputs,
    checked_inputs,
)
from llm_systems_cookbook.attention.reference import reference_attention

# Relative norm of the error, by the query's dtype.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
# Triton runs on a GPU where there is one, else in its interpreter.
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MANY = 70  # tokens of a sequence over several blocks, at the least


def counted_calls(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> list[tuple]:
    """Let a function of a module note each call; return the notes."""
    calls, function = [], getattr(module, name)

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(module, name, counted)
    return calls


@dataclass(frozen=True)
class Case:
    """One attention problem; the defaults are the plain one."""

    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None  # of query's dtype when None
    group: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None  # head_dim when None
    block_size: int = 16
    lengths: str = "edges"  # edges, around, many, single, zeros
    table: str = "padded"  # padded, stale, shared, exact
    index: torch.dtype = torch.int32
    layout: str = "plain"  # see OPTIONS
    query_layout: str = "plain"
    mode: str = "decode"  # decode, prefill
    window: str | None = None  # None, one, block, over, beyond
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    splits: int = 1
    seed: int = 0

    def __str__(self) -> str:
        plain = Case()
        parts = [
            f"{field.name}={getattr(self, field.name)}".replace("torch.", "")
            for field in fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        ]
        return " ".join(parts) or "plain"


OPTIONS: dict[str, Sequence[object]] = {
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "cache": (None, *FP8),
    "group": (1, 4, 6, 7, 8, 16),
    "num_kv_heads": (1, 2),
    "head_dim": (32, 64, 80, 96, 128, 256),
    "head_dim_v": (None, 48),
    "block_size": (1, 8, 16, 24, 64, 256),
    "lengths": ("edges", "around", "many", "zeros"),
    "table": ("padded", "stale", "shared", "exact"),
    "index": (torch.int32, torch.int64),
    "layout": (
        "plain",
        "strided",
        "interleaved",
        "tokens_first",
        "dims_apart",
    ),
    "query_layout": ("plain", "strided", "dims_apart"),
    "mode": ("decode", "prefill"),
    "window": (None, "one", "block", "over", "beyond"),
    "softcap": (False, True),
    "alibi": (False, True),
    "sinks": (False, True),
    "splits": (1, 2, 8),
}


def pairwise(options: Mapping[str, Sequence[object]]) -> list[dict]:
    """Return choices in which every two values of two options meet."""
    rng = random.Random(0)
    missing = {
        ((a, x), (b, y))
        for a, b in combinations(options, 2)
        for x, y in product(options[a], options[b])
    }
    choices = []
    while missing:
        first = min(missing, key=repr)
        candidates = [
            {n: rng.choice(options[n]) for n in options} | dict(first)
            for _ in range(40)
        ]
        best = max(candidates, key=lambda c: len(missing & _pairs(c)))
        missing -= _pairs(best)
        choices.append(best)
    return choices


def _pairs(choice: dict[str, object]) -> set:
    return set(combinations(choice.items(), 2))


def random_cases(count: int, seed: int) -> list[Case]:
    """Return cases drawn at random, rare options not too often."""
    rng = random.Random(seed)
    cases = []
    for i in range(count):
        choice = {name: rng.choice(vs) for name, vs in OPTIONS.items()}
        if rng.random() < 0.5:
            choice["cache"] = None
        choice["block_size"] = rng.choice((1, 2, 3, 5, 8, 16, 24, 32, 64))
        choice["head_dim"] = rng.choice((8, 32, 40, 64, 80, 96, 128))
        choice["group"] = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 16))
        cases.append(Case(**choice, seed=1000 + i))
    return cases


def covered_pairs(cases: Sequence[Case]) -> Iterator[set]:
    for case in cases:
        choice = {n: asdict(case)[n] for n in OPTIONS}
        yield _pairs(choice)


# --- From a case to tensors ------------------------------------------------


def build(case: Case) -> dict:
    """Return the arguments of `paged_attention` for a case."""
    rng = random.Random(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    block = case.block_size
    lengths = _lengths(case)
    starts = None
    query_lens = [1] * len(lengths)
    if case.mode == "prefill":
        query_lens = [_query_len(rng, n) for n in lengths]
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(case.index)
    window = {
        None: None,
        "one": 1,
        "block": block,
        "over": block + 1,
        "beyond": 10_000,
    }[case.window]
    oldest = [
        max(0, n - q - (window or n) + 1) if window else 0
        for n, q in zip(lengths, query_lens, strict=True)
    ]
    tables, num_blocks, live = _tables(case, rng, lengths, oldest)
    dim_v = case.head_dim_v or case.head_dim
    cache_dtype = case.cache or case.dtype
    keys, values = _caches(
        case, generator, num_blocks, dim_v, cache_dtype, live
    )
    num_heads = case.group * case.num_kv_heads
    query = _random(
        generator, (sum(query_lens), num_heads, case.head_dim), case.dtype
    )
    if case.query_layout == "strided":
        wide = torch.full((query.shape[0], 3, *query.shape[1:]), torch.nan).to(
            case.dtype
        )
        wide[:, 1] = query
        query = wide[:, 1]
    if case.query_layout == "dims_apart":
        query = query.mT.contiguous().mT
    per_head = torch.randn(num_heads, generator=generator)
    scales = {}
    if case.cache is not None:
        scales = {
            "k_scale": torch.rand(case.num_kv_heads, generator=generator)
            + 0.5,
            "v_scale": torch.rand(case.num_kv_heads, generator=generator)
            + 0.5,
        }
    return {
        "query": query,
        "key_cache": keys,
        "value_cache": values,
        "block_tables": torch.tensor(tables, dtype=case.index).reshape(
            len(lengths), -1
        ),
        "seq_lens": torch.tensor(lengths, dtype=case.index),
        "query_start_loc": starts,
        "window": window,
        "softcap": 2.0 if case.softcap else None,
        "alibi_slopes": 2.0 ** -(1 + torch.arange(num_heads) % 8).float()
        if case.alibi
        else None,
        "sinks": per_head if case.sinks else None,
        **scales,
    }


def decode(
    lengths: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    block: int = 16,
    seed: int = 0,
) -> dict:
    """Return arguments of a plain float32 decode with random tables."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(lengths, default=0) // block)
    count = len(lengths) * width
    shape = count, kv_heads, block, dim
    return {
        "query": torch.randn(len(lengths), heads, dim, generator=generator),
        "key_cache": torch.randn(shape, generator=generator),
        "value_cache": torch.randn(shape, generator=generator),
        "block_tables": torch.randperm(count, generator=generator).view(
            len(lengths), width
        ),
        "seq_lens": torch.tensor(lengths, dtype=torch.int64),
    }


def _lengths(case: Case) -> list[int]:
    block = case.block_size
    many = max(MANY, 2 * block + 3) if block < 256 else block + 40
    return {
        "edges": [0, 1, max(1, block - 1), block],
        "around": [block + 1, block, 2 * block],
        "many": [many, 5, many - 1],
        "single": [many],
        "zeros": [0, 0, 1],
    }[case.lengths]


def _query_len(rng: random.Random, length: int) -> int:
    if length <= 6:
        return length
    return rng.choice((0, 1, 2, 5, 6))


def _tables(
    case: Case, rng: random.Random, lengths: list[int], oldest: list[int]
) -> tuple[list[list[int]], int, set[tuple[int, int]]]:
    """Return rows, the size of the pool, and the slots that may be read."""
    block = case.block_size
    counts = [-(-n // block) for n in lengths]
    num_blocks = sum(counts) + 3
    free = rng.sample(range(num_blocks), num_blocks)
    rows = [[free.pop() for _ in range(count)] for count in counts]
    if case.table == "shared":
        longest = max(rows, key=len)
        for row, n in zip(rows, lengths, strict=True):
            full = n // block if row is not longest else 0
            row[:full] = longest[:full]
    live = set()
    for row, n, first in zip(rows, lengths, oldest, strict=True):
        live |= {(row[p // block], p % block) for p in range(first, n)}
        for i in range(first // block):
            row[i] = -1  # before the window: given back
    width = max(counts) + (0 if case.table == "exact" else 2)
    padding = {
        "padded": [-1],
        "shared": [-1],
        "exact": [-1],  # of the shorter rows
        "stale": [free[0], num_blocks + 7, free[1]],
    }[case.table]
    for row in rows:
        row += [rng.choice(padding) for _ in range(width - len(row))]
    return rows, num_blocks, live


def _caches(
    case: Case,
    generator: torch.Generator,
    num_blocks: int,
    dim_v: int,
    dtype: torch.dtype,
    live: set[tuple[int, int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, block = case.num_kv_heads, case.block_size
    keys, values = _storage(case, num_blocks, dim_v, dtype)
    if live:
        ids, offsets = torch.tensor(sorted(live)).T
        for cache in (keys, values):
            shape = len(live), heads, cache.shape[3]
            rows = _random(generator, shape, dtype)
            if dtype in FP8:
                cache.view(torch.uint8)[ids, :, offsets] = rows.view(
                    torch.uint8
                )
            else:
                cache[ids, :, offsets] = rows
    assert keys.shape[:3] == (num_blocks, heads, block)
    return keys, values


def _storage(
    case: Case, num_blocks: int, dim_v: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two caches of NaN, in the case's layout."""
    heads, block, dim = case.num_kv_heads, case.block_size, case.head_dim

    def nan(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=torch.float32).to(dtype)

    if case.layout == "strided":
        keys = nan(num_blocks, heads + 1, block + 2, dim + 16)
        values = nan(num_blocks, heads, block + 1, dim_v + 8)
        return (
            keys[:, 1:, 1 : block + 1, 8 : dim + 8],
            values[:, :, 1:, :dim_v],
        )
    if case.layout == "interleaved":
        both = nan(num_blocks, heads, block, dim + dim_v)
        return both[..., :dim], both[..., dim:]
    if case.layout == "dims_apart":
        keys = nan(num_blocks, heads, dim, block).mT
        return keys, nan(dim_v, num_blocks, heads, block).movedim(0, 3)
    if case.layout == "tokens_first":
        keys = nan(num_blocks, block, heads, dim).transpose(1, 2)
        values = nan(num_blocks, block, heads, dim_v).transpose(1, 2)
        return keys, values
    return (
        nan(num_blocks, heads, block, dim),
        nan(num_blocks, heads, block, dim_v),
    )


def _random(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    if dtype == torch.float64:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


# --- Judging a result ------------------------------------------------------


def inputs_of(case: Case) -> AttentionInputs:
    return checked_inputs(**build(case))


def device_of(backend: str) -> str:
    return TRITON_DEVICE if backend == "triton" else "cpu"


def moved(inputs: AttentionInputs, device: str) -> AttentionInputs:
    """Return inputs on a device, with the strides they have."""
    tensors = {
        field.name: moved_tensor(value, device)
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), torch.Tensor)
    }
    return replace(inputs, **tensors)


def moved_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((size,), (1,), 0).to(device)
    return whole.as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )


def poisoned_output(inputs: AttentionInputs) -> torch.Tensor:
    return inputs.output().fill_(torch.nan)


def poison_parts(monkeypatch: pytest.MonkeyPatch, user: ModuleType) -> None:
    """Fill with NaN what the splits of a kernel are to write."""
    unpoisoned = user.split_buffers

    def poisoned(*args: object) -> list[torch.Tensor | None]:
        parts = unpoisoned(*args)
        return [p if p is None else p.fill_(torch.nan) for p in parts]

    monkeypatch.setattr(user, "split_buffers", poisoned)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return |actual - exact| / |exact|; NaN where actual has one."""
    difference = (actual.cpu().double() - exact).norm()
    if not difference.isnan() and exact.norm() == 0:
        return float(difference)
    return float(difference / exact.norm())


def assert_matches_reference(
    actual: torch.Tensor, inputs: AttentionInputs
) -> None:
    exact = reference_attention(inputs)
    actual = actual.cpu()
    assert actual.shape == exact.shape
    assert actual.dtype == inputs.query.dtype
    error = relative_error(actual, exact)
    assert error < TOLERANCE[inputs.query.dtype], f"relative error {error}"


PAIRWISE = [
    Case(**choice, seed=seed) for seed, choice in enumerate(pairwise(OPTIONS))
]
RANDOM = random_cases(200, seed=0)
