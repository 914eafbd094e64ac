"""Time decode attention against what else could compute it.

Every candidate computes the same result from the same numbers, and is timed
in the same rounds, in turns: what disturbs the machine disturbs all of them.
Figures are a candidate's time, the bytes that any of them has to move at
least, and how both compare with a plain copy on the same device.
"""

import importlib.metadata
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from llm_systems_cookbook.attention.dispatch import attend
from llm_systems_cookbook.attention.inputs import (
    AttentionInputs,
    checked_inputs,
)
from llm_systems_cookbook.validate import cdiv, require_at_least

if TYPE_CHECKING:
    from llm_systems_cookbook.workloads import Trace

TRACE = "azure-conv-2023"
FLEX_PAGE = 128  # tokens; FlexAttention's masks have blocks of this size
FLASH_PAGE = 256  # tokens; the least that flash-attn takes
COPY_BYTES = 64 * 2**20
GPU_REPLAYS = 20
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

Run = Callable[[], Tensor]


class NotHere(RuntimeError):
    """Raised when a candidate cannot run here; the message says why."""


# --- The problem ------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One decode step: a query row for each sequence.

    Attributes:
        lengths: tokens in each sequence, at least 1 each.
        num_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: heads of the cache.
        head_dim: numbers per query, key and value.
        block_size: tokens per block.
        dtype: a name in DTYPES.
        device: as torch names it.

    Raises:
        ValueError: no sequence, a size below 1, heads that do not divide, an
            unknown dtype.
    """

    lengths: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_at_least(
            1,
            num_sequences=len(self.lengths),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
        )
        require_at_least(1, length=min(self.lengths))
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"{self.num_heads} query heads are not a multiple of "
                f"{self.num_kv_heads} KV heads"
            )
        if self.dtype not in DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}"
            )

    @property
    def uniform(self) -> bool:
        """Whether all sequences are equally long."""
        return len(set(self.lengths)) == 1

    @property
    def num_blocks(self) -> int:
        """Blocks that hold all sequences, none shared."""
        return sum(cdiv(n, self.block_size) for n in self.lengths)

    def minimal_bytes(self) -> int:
        """Return the bytes that attention cannot do without moving.

        Each key and value once, the query, the output, and one int32 table
        entry for each block.
        """
        itemsize = DTYPES[self.dtype].itemsize
        per_token = 2 * self.num_kv_heads * self.head_dim * itemsize
        rows = len(self.lengths) * self.num_heads * self.head_dim * itemsize
        return sum(self.lengths) * per_token + 2 * rows + 4 * self.num_blocks


def mixed_lengths(
    count: int, seed: int = 0, longest: int | None = None
) -> tuple[tuple[int, ...], "Trace"]:
    """Draw sequences as a server meets them in the middle of decoding.

    A request of the Azure 2023 conversation trace is drawn at random, and a
    point of its output: the length is its prompt and the tokens so far.

    Args:
        count: how many, at least 1.
        seed: of the draw.
        longest: cut off longer sequences here; None for never.

    Returns:
        The lengths, and the trace, which says whether it was generated.

    Raises:
        ValueError: count or longest below 1.
    """
    # Who times equal lengths needs no trace, nor what downloads one.
    from llm_systems_cookbook import workloads

    require_at_least(1, count=count)
    trace = workloads.load_or_generate(TRACE)
    rng = np.random.default_rng(seed)
    request = rng.integers(len(trace), size=count)
    done = rng.integers(1, trace.output_len[request] + 1)
    lengths = trace.input_len[request] + done
    if longest is not None:
        require_at_least(1, longest=longest)
        lengths = np.minimum(lengths, longest)
    return tuple(lengths.tolist()), trace


@dataclass(frozen=True)
class Problem:
    """The numbers of a shape, in blocks and side by side.

    Attributes:
        shape: the sizes.
        keys: [num_seqs, num_kv_heads, longest, head_dim], 0 past the end.
        values: the same.
        inputs: the same in blocks, in random order.
        exact: [num_seqs, num_heads, head_dim] float32, the result.
    """

    shape: Shape
    keys: Tensor
    values: Tensor
    inputs: AttentionInputs
    exact: Tensor = field(repr=False)

    @classmethod
    def draw(cls, shape: Shape, seed: int = 0) -> "Problem":
        """Return random numbers of a shape."""
        device, dtype = shape.device, DTYPES[shape.dtype]
        lens = torch.tensor(shape.lengths)
        # There: a CPU takes minutes for as many numbers as a GPU can hold.
        there = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            rows = torch.randn(size, generator=there, device=device)
            return rows.to(dtype)

        size = len(lens), shape.num_kv_heads, max(shape.lengths)
        keys = normal(*size, shape.head_dim)
        values = normal(*size, shape.head_dim)
        past = torch.arange(size[2]) >= lens[:, None]
        past = past[:, None, :, None].to(device)
        keys.masked_fill_(past, 0)
        values.masked_fill_(past, 0)
        here = torch.Generator().manual_seed(seed)
        tables = block_tables(shape.lengths, shape.block_size, here)
        inputs = checked_inputs(
            normal(len(lens), shape.num_heads, shape.head_dim),
            into_blocks(keys, tables, shape.block_size),
            into_blocks(values, tables, shape.block_size),
            tables.to(device),
            lens.int().to(device),
        )
        exact = _padded_sdpa(inputs.query, keys, values, lens).float()
        return cls(shape, keys, values, inputs, exact)


def block_tables(
    lengths: Sequence[int], block_size: int, generator: torch.Generator
) -> Tensor:
    """Return tables of blocks in random order: int32, padded with -1."""
    counts = [cdiv(n, block_size) for n in lengths]
    ids = torch.randperm(sum(counts), generator=generator).int()
    tables = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    for row, own in zip(tables, ids.split(counts), strict=True):
        row[: len(own)] = own
    return tables


def into_blocks(rows: Tensor, tables: Tensor, block_size: int) -> Tensor:
    """Return padded rows as a cache: [num_blocks, heads, block_size, dim].

    Args:
        rows: [num_seqs, num_kv_heads, longest, head_dim].
        tables: [num_seqs, max_blocks] int32, -1 where there is no block.
        block_size: tokens per block.
    """
    missing = tables.shape[1] * block_size - rows.shape[2]
    padded = F.pad(rows, (0, 0, 0, missing))
    blocks = padded.unflatten(2, (-1, block_size)).transpose(1, 2)
    used = (tables >= 0).to(rows.device)
    cache = torch.empty_like(blocks[used])
    cache[tables[tables >= 0].long().to(rows.device)] = blocks[used]
    return cache


def _padded_sdpa(
    query: Tensor, keys: Tensor, values: Tensor, lens: Tensor
) -> Tensor:
    mask = _mask(lens, keys.shape[2]).to(keys.device)
    grouped = query.unflatten(1, (keys.shape[1], -1))
    out = F.scaled_dot_product_attention(
        grouped.float(), keys.float(), values.float(), attn_mask=mask
    )
    return out.flatten(1, 2)


def _mask(lens: Tensor, longest: int) -> Tensor:
    """Return which positions exist: [num_seqs, 1, 1, longest] bool."""
    return (torch.arange(longest) < lens[:, None])[:, None, None, :]


# --- The candidates ----------------------------------------------------------
# Each is made ready once for a problem, and returns what is to be timed.


def backend_candidate(backend: str) -> Callable[[Problem], Run]:
    """Return the candidate that is one of our own backends."""

    def ready(problem: Problem) -> Run:
        out = problem.inputs.output()
        return lambda: attend(problem.inputs, backend, out)

    return ready


def sdpa_candidate(problem: Problem) -> Run:
    """Return SDPA over keys that lie side by side, in its fastest form.

    The query heads of a group are taken for query rows of one head: no
    `enable_gqa`, which copies. Sequences of mixed lengths are padded and
    masked, by the faster of a Boolean and an additive mask.
    """
    query = problem.inputs.query
    keys, values = problem.keys, problem.values
    grouped = query.unflatten(1, (keys.shape[1], -1))

    def masked_by(mask: Tensor | None) -> Run:
        return lambda: F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask
        ).flatten(1, 2)

    if problem.shape.uniform:
        return masked_by(None)
    mask = _mask(torch.tensor(problem.shape.lengths), keys.shape[2])
    mask = mask.to(keys.device)
    added = torch.zeros(mask.shape, dtype=keys.dtype, device=keys.device)
    added.masked_fill_(~mask, -torch.inf)
    return _fastest([masked_by(mask), masked_by(added)], keys.device)


def _fastest(runs: list[Run], device: torch.device) -> Run:
    times = []
    for run in runs:
        run()
        times.append(min(_seconds(run, device) for _ in range(3)))
    return runs[times.index(min(times))]


def flex_candidate(problem: Problem) -> Run:
    """Return compiled FlexAttention whose mask follows a block table.

    Its keys are one long row of pages of FLEX_PAGE tokens. The mask turns a
    physical position into a sequence's own position, or refuses it.
    """
    from torch.nn.attention.flex_attention import (
        create_block_mask,
        flex_attention,
    )

    shape, device = problem.shape, problem.keys.device
    generator = torch.Generator().manual_seed(0)
    tables = block_tables(shape.lengths, FLEX_PAGE, generator)
    pages = int(tables.max()) + 1
    first = torch.full((len(tables), pages), -1, dtype=torch.int64)
    for row, own in zip(first, tables.long(), strict=True):
        own = own[own >= 0]
        row[own] = torch.arange(len(own)) * FLEX_PAGE
    first = first.to(device)
    lens = problem.inputs.seq_lens

    def visible(b: Tensor, h: Tensor, q: Tensor, slot: Tensor) -> Tensor:
        start = first[b, slot // FLEX_PAGE]
        return (start >= 0) & (start + slot % FLEX_PAGE < lens[b])

    def one_row(rows: Tensor) -> Tensor:
        cache = into_blocks(rows, tables, FLEX_PAGE)
        return cache.transpose(0, 1).flatten(1, 2)[None].contiguous()

    mask = create_block_mask(
        visible, len(tables), None, 1, pages * FLEX_PAGE, device=str(device)
    )
    keys, values = one_row(problem.keys), one_row(problem.values)
    query = problem.inputs.query[:, :, None]
    # Compiled afresh for each shape: past its limit of versions, torch would
    # quietly run the slow one.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, fullgraph=True)

    def run() -> Tensor:
        return compiled(query, keys, values, block_mask=mask, enable_gqa=True)[
            :, :, 0
        ]

    return run


def flashinfer_candidate(problem: Problem) -> Run:
    """Return FlashInfer's paged decode, where it is installed."""
    _require("flashinfer", problem)
    import flashinfer

    shape, inputs = problem.shape, problem.inputs
    lens = inputs.seq_lens
    counts = (lens + shape.block_size - 1) // shape.block_size
    starts = F.pad(counts.cumsum(0), (1, 0)).int()
    ids = inputs.block_tables[inputs.block_tables >= 0].int()
    room = torch.empty(2**27, dtype=torch.uint8, device=inputs.query.device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "HND")
    decode.plan(
        starts,
        ids,
        ((lens - 1) % shape.block_size + 1).int(),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        q_data_type=inputs.query.dtype,
        kv_data_type=inputs.query.dtype,
    )
    caches = inputs.key_cache, inputs.value_cache
    return lambda: decode.run(inputs.query, caches)


def flash_attn_candidate(problem: Problem) -> Run:
    """Return flash-attn over pages of FLASH_PAGE tokens, where installed."""
    _require("flash_attn", problem)
    from flash_attn import flash_attn_with_kvcache

    generator = torch.Generator().manual_seed(0)
    tables = block_tables(problem.shape.lengths, FLASH_PAGE, generator)

    def tokens_first(rows: Tensor) -> Tensor:
        cache = into_blocks(rows, tables, FLASH_PAGE)
        return cache.transpose(1, 2).contiguous()

    keys, values = tokens_first(problem.keys), tokens_first(problem.values)
    query = problem.inputs.query[:, None]
    tables = tables.clamp(min=0).to(keys.device)
    return lambda: flash_attn_with_kvcache(
        query,
        keys,
        values,
        cache_seqlens=problem.inputs.seq_lens,
        block_table=tables,
    )[:, 0]


def _require(package: str, problem: Problem) -> None:
    if importlib.util.find_spec(package) is None:
        raise NotHere("not installed")
    if problem.keys.device.type != "cuda":
        raise NotHere("needs a GPU")
    if problem.keys.dtype == torch.float32:
        raise NotHere("takes no float32")


CANDIDATES: dict[str, Callable[[Problem], Run]] = {
    "sdpa": sdpa_candidate,
    "cpu": backend_candidate("cpu"),
    "triton": backend_candidate("triton"),
    "gather": backend_candidate("gather"),
    "flex": flex_candidate,
    "flashinfer": flashinfer_candidate,
    "flash-attn": flash_attn_candidate,
}
BASE = "sdpa"
NUMBA = "cpu"  # the candidate whose threads numba starts


def default_candidates(device: str) -> list[str]:
    """Return every candidate that makes sense on a device."""
    other = "cpu" if torch.device(device).type == "cuda" else "triton"
    return [name for name in CANDIDATES if name != other]


# --- Timing ------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """What the rounds found about one candidate.

    Attributes:
        name: in CANDIDATES.
        seconds: of one call, for each round.
        ratios: its time over that of contiguous SDPA, for each round.
        minimal_bytes: see Shape.
        copy_rates: bytes per second of a plain copy, for each round.
        problem: why there are no figures, or "".
        sdpa_slowdown: SDPA's time with numba's threads over that before they
            started; None where they had started before, or do not matter.
    """

    name: str
    seconds: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    minimal_bytes: int = 0
    copy_rates: tuple[float, ...] = ()
    problem: str = ""
    sdpa_slowdown: float | None = None

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The slowest round less the fastest, over the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    @property
    def rate(self) -> float:
        """Minimal bytes per second."""
        return self.minimal_bytes / self.median

    @property
    def of_copy(self) -> float:
        """The rate over that of a plain copy, 1 for as fast."""
        return self.rate / statistics.median(self.copy_rates)


def measure(
    shape: Shape,
    names: Sequence[str] | None = None,
    *,
    rounds: int = 5,
    repeats: int = 3,
    pause: float = 0.02,
    seed: int = 0,
) -> list[Timing]:
    """Time candidates on one shape, in turns.

    Args:
        shape: what to compute.
        names: of candidates; all that make sense on the device when None.
            Contiguous SDPA always runs: it is what the ratios are against.
        rounds: how often each has its turn, at least 1.
        repeats: calls in a turn; on a CPU the fastest counts.
        pause: seconds before each turn. Threads of one library spin for a
            moment after their work, and would slow down the next one's.
        seed: of the numbers.

    Raises:
        ValueError: an unknown name, rounds or repeats below 1.
        AssertionError: a candidate's result is wrong.
        RuntimeError: numba's threads made SDPA slower; see `SDPAWatch`.
    """
    require_at_least(1, rounds=rounds, repeats=repeats)
    names = default_candidates(shape.device) if names is None else list(names)
    for name in names:
        if name not in CANDIDATES:
            raise ValueError(
                f"candidate must be one of {', '.join(CANDIDATES)}, "
                f"got {name!r}"
            )
    names = [BASE, *(name for name in names if name != BASE)]
    device = torch.device(shape.device)
    copies = _copies(shape, seed)
    runs, problems = _ready([BASE], copies)
    watch = SDPAWatch(runs[BASE], device, pause)
    more, more_problems = _ready(names[1:], copies)
    runs, problems = runs | more, problems | more_problems
    slowdown = watch.slowdown() if NUMBA in runs else None
    copy, copied_bytes = _plain_copy(device)
    runs = {"copy": copy, **runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(pause)
            spent = [_seconds(run, device) for _ in range(repeats)]
            seconds[name].append(_of_a_turn(spent, device))
    rates = tuple(copied_bytes / s for s in seconds.pop("copy"))
    return [
        Timing(
            name,
            tuple(seconds[name]),
            tuple(
                own / base
                for own, base in zip(seconds[name], seconds[BASE], strict=True)
            ),
            shape.minimal_bytes(),
            rates,
            sdpa_slowdown=slowdown if name == NUMBA else None,
        )
        if name in seconds
        else Timing(name, problem=problems[name])
        for name in names
    ]


class SDPAWatch:
    """Notice when numba's threads make SDPA slower.

    When numba starts OpenMP's threads, some of its versions (0.65 among them)
    also allow parallel regions within parallel regions. SDPA then starts
    threads from its threads, takes many times as long, and whatever stands
    beside it in a table looks fast.

    Args:
        sdpa: one call.
        device: where it runs.
        pause: seconds before each look, for other threads to fall asleep.
    """

    LIMIT = 2.0
    LOOKS = 5

    def __init__(
        self, sdpa: Run, device: torch.device, pause: float = 0.0
    ) -> None:
        self._sdpa, self._device, self._pause = sdpa, device, pause
        self._before: float | None = None
        if device.type == "cpu" and not numba_started():
            self._before = self._fastest()

    def slowdown(self) -> float | None:
        """Return SDPA's time now over that before; None where unknown.

        Raises:
            RuntimeError: SDPA takes more than LIMIT times as long.
        """
        if self._before is None:
            return None
        # Another process may slow down one look; numba slows down each.
        for _ in range(self.LOOKS):
            ratio = self._fastest() / self._before
            if ratio <= self.LIMIT:
                return ratio
        raise RuntimeError(
            f"SDPA takes {ratio:.1f} times as long since numba "
            f"{importlib.metadata.version('numba')} started its threads, at "
            f"most {self.LIMIT:g} is due, and a comparison with it would "
            f"flatter every other candidate; numba 0.65 does this where its "
            f"threads are OpenMP's, 0.68.1 does not: take numba 0.68.1 or "
            f"later, or set NUMBA_THREADING_LAYER=workqueue"
        )

    def _fastest(self) -> float:
        time.sleep(self._pause)
        return min(_seconds(self._sdpa, self._device) for _ in range(3))


def numba_started() -> bool:
    """Tell whether numba's threads run in this process; imports nothing."""
    parallel = sys.modules.get("numba.np.ufunc.parallel")
    # Numba has no public name for it. Without the private one it counts as
    # started, so that a time with threads never passes for one without.
    return parallel is not None and getattr(parallel, "_is_initialized", True)


def _of_a_turn(spent: list[float], device: torch.device) -> float:
    """Return the median on a GPU, the least on a CPU.

    On a CPU, other processes only ever add to a time.
    """
    return statistics.median(spent) if device.type == "cuda" else min(spent)


def _copies(shape: Shape, seed: int) -> list[Problem]:
    """Return the problem; on a GPU as often as its L2 cannot hold twice."""
    first = Problem.draw(shape, seed)
    if first.keys.device.type != "cuda":
        return [first]
    cached = torch.cuda.get_device_properties(first.keys.device).L2_cache_size
    count = 1 + math.ceil(2 * cached / shape.minimal_bytes())
    return [first, *(Problem.draw(shape, seed + i) for i in range(1, count))]


def _ready(
    names: Sequence[str], problems: list[Problem]
) -> tuple[dict[str, Run], dict[str, str]]:
    """Return what to time, and why some candidates cannot be."""
    runs, reasons = {}, {}
    for name in names:
        try:
            each = [CANDIDATES[name](problem) for problem in problems]
            results = [run().float() for run in each]
            run = each[0] if len(each) == 1 else _rotated(name, each)
        except Exception as error:
            # Other libraries raise what they like: it is shown, in its row.
            if name == BASE:
                raise
            reasons[name] = _first_line(error)
            continue
        for result, problem in zip(results, problems, strict=True):
            _require_close(name, result, problem)
        runs[name] = run
    return runs, reasons


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def _require_close(name: str, result: Tensor, problem: Problem) -> None:
    error = (result - problem.exact).norm() / problem.exact.norm()
    limit = 1e-4 if problem.keys.dtype == torch.float32 else 2e-2
    if not error < limit:
        raise AssertionError(
            f"{name} is wrong by {float(error):.1e}, at most {limit} is due"
        )


def _rotated(name: str, runs: list[Run]) -> Run:
    """Return one call for all copies: a CUDA graph, where one can be made."""

    def all_of_them() -> Tensor:
        for run in runs:
            out = run()
        return out

    all_of_them.calls = len(runs)
    if name == "gather":  # reads lengths on the host: no graph
        return all_of_them
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = all_of_them()

    def replay() -> Tensor:
        graph.replay()
        return out

    replay.calls = len(runs)
    return replay


def _seconds(run: Run, device: torch.device) -> float:
    """Return the seconds of one call."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(GPU_REPLAYS):
        run()
    events[1].record()
    torch.cuda.synchronize(device)
    calls = GPU_REPLAYS * getattr(run, "calls", 1)
    return events[0].elapsed_time(events[1]) / 1000 / calls


def _plain_copy(device: torch.device) -> tuple[Run, int]:
    """Return a copy, and the bytes it reads and writes."""
    size = COPY_BYTES * (16 if device.type == "cuda" else 1)
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source), 2 * size


# --- Tables ------------------------------------------------------------------


def copy_rate(timings: Sequence[Timing]) -> float:
    """Return the bytes per second of a plain copy in the same rounds."""
    return statistics.median(timings[0].copy_rates)


def rows_of(timings: Sequence[Timing]) -> list[list[str]]:
    """Return a table's rows: name, time, rate, of copy, spread, ratio."""
    rows = []
    for timing in timings:
        if timing.problem:
            rows.append([timing.name, *["–"] * 4, timing.problem])
            continue
        rows.append(
            [
                timing.name,
                f"{timing.median * 1e3:.3f} ms",
                f"{timing.rate / 1e9:.1f} GB/s",
                f"{timing.of_copy:.0%}",
                f"{timing.spread:.0%}",
                f"{statistics.median(timing.ratios):.2f} x",
            ]
        )
    return rows


def context_of(timing: Timing) -> dict[str, Any]:
    """Return what a measure says beside its median ratio."""
    context = {
        "rounds": len(timing.seconds),
        "lowest": min(timing.ratios),
        "highest": max(timing.ratios),
        "milliseconds": timing.median * 1e3,
        "minimal_bytes": timing.minimal_bytes,
        "gigabytes_per_second": timing.rate / 1e9,
        "of_copy_bandwidth": timing.of_copy,
    }
    if timing.name == NUMBA:
        # Numba's threads start once in a process: only the first shape of a
        # run can tell.
        context["sdpa_slowed_down_by_numba"] = (
            "cannot be told: its threads ran before"
            if timing.sdpa_slowdown is None
            else timing.sdpa_slowdown
        )
    return context
