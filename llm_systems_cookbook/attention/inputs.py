"""What a call of paged attention is given, and what may be wrong with it.

Every backend takes the same `AttentionInputs`. It is made once by
`checked_inputs`, so no backend checks shapes again, and bad input raises the
same error on each.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from llm_systems_cookbook import validate
from llm_systems_cookbook.validate import cdiv

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = tuple(getattr(torch, name) for name in validate.FLOATS)
INDEX = (torch.int32, torch.int64)
LONGEST = 2**31 - 1  # tokens in a sequence
_FLOAT32 = torch.finfo(torch.float32)


class Options(TypedDict, total=False):
    """What `paged_attention` takes by name; see there. None is the default."""

    query_start_loc: Tensor | None
    scale: float | None
    window: int | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None


@dataclass(frozen=True)
class AttentionInputs:
    """The arguments of `paged_attention`, checked, and the sizes they imply.

    Attributes:
        query: [num_tokens, num_heads, head_dim].
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim].
        value_cache: [num_blocks, num_kv_heads, block_size, head_dim_v].
        block_tables: [num_seqs, max_blocks] int32 or int64.
        seq_lens: [num_seqs] int32 or int64, this step's tokens included.
        query_start_loc: [num_seqs + 1], the rows of sequence i are
            `query[query_start_loc[i]:query_start_loc[i + 1]]`; None in
            decode, where sequence i has row i.
        scale: multiplies every score.
        window: how many tokens a query sees, itself included; None for all.
        softcap: scores become `softcap * tanh(score / softcap)`; or None.
        alibi_slopes: [num_heads] float32, or None.
        sinks: [num_heads] float32 scores that take weight and give no value,
            or None.
        k_scale: [num_kv_heads] float32, a key is its stored value times it,
            or None for 1.
        v_scale: [num_kv_heads] float32, the same for values.
        plan: where a backend keeps what it has worked out from the tables,
            the lengths and the options, for a caller that attends with the
            same ones again: the layers of a step. None keeps nothing. Tables
            and lengths are written by torch, if at all: not through numpy.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    scale: float
    window: int | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    plan: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Rows of the query."""
        return self.query.shape[0]

    @property
    def num_seqs(self) -> int:
        """Sequences, each with a row of the block tables."""
        return self.seq_lens.shape[0]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of the cache."""
        return self.key_cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.key_cache.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.key_cache.shape[2]

    @property
    def head_dim(self) -> int:
        """Numbers per query and key."""
        return self.query.shape[2]

    @property
    def head_dim_v(self) -> int:
        """Numbers per value."""
        return self.value_cache.shape[3]

    @property
    def max_blocks(self) -> int:
        """Width of the block tables."""
        return self.block_tables.shape[1]

    def query_lens(self) -> Tensor:
        """Return how many query rows each sequence has: [num_seqs]."""
        if self.query_start_loc is None:
            return torch.ones_like(self.seq_lens)
        return self.query_start_loc.long().diff()

    def for_layer(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> "AttentionInputs":
        """Return the inputs of another layer: the same but for these three.

        Args:
            query: of the shape, dtype and device that it has here.
            key_cache: the same.
            value_cache: the same.

        Raises:
            ValueError: the shape, dtype or device of one is another.
        """
        for name, mine, other in (
            ("query", self.query, query),
            ("key_cache", self.key_cache, key_cache),
            ("value_cache", self.value_cache, value_cache),
        ):
            if (
                other.shape != mine.shape
                or other.dtype != mine.dtype
                or other.device != mine.device
            ):
                raise ValueError(
                    f"{name} is {_described(other)}, in another layer "
                    f"{_described(mine)}"
                )
        # Not by replace(), which takes twice as long, in every layer.
        return AttentionInputs(
            query,
            key_cache,
            value_cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            self.scale,
            self.window,
            self.softcap,
            self.alibi_slopes,
            self.sinks,
            self.k_scale,
            self.v_scale,
            self.plan,
        )

    def output(self) -> Tensor:
        """Return an unwritten output: [num_tokens, num_heads, head_dim_v]."""
        return self.query.new_empty(
            (self.num_tokens, self.num_heads, self.head_dim_v)
        )


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def checked_inputs(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    validate: bool = True,
    plan: dict[str, Any] | None = None,
    **options: Unpack[Options],
) -> AttentionInputs:
    """Return the arguments of `paged_attention` as a backend takes them.

    `plan` is shared by calls that differ in query and caches alone.

    Raises:
        TypeError, ValueError: see `paged_attention`.
    """
    given: dict[str, Any] = dict.fromkeys(Options.__annotations__) | options
    unknown = given.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown options {sorted(unknown)}, not in "
            f"{list(Options.__annotations__)}"
        )
    starts = given["query_start_loc"]
    _check_floats(query, key_cache, value_cache)
    _check_sequences(query, block_tables, seq_lens, starts)
    heads, kv_heads = query.shape[1], key_cache.shape[1]
    inputs = AttentionInputs(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        starts,
        _finite("scale", given["scale"], 1 / math.sqrt(query.shape[2])),
        _window(given["window"]),
        _softcap(given["softcap"]),
        *(
            _per_head(name, given[name], heads, query)
            for name in ("alibi_slopes", "sinks")
        ),
        *(
            cache_scale(name, given[name], kv_heads, query)
            for name in ("k_scale", "v_scale")
        ),
        plan,
    )
    if validate:
        _check_values(inputs)
    return inputs


# --- Shapes and dtypes: known without reading a tensor ----------------------


def check_caches(keys: Tensor, values: Tensor) -> None:
    """Refuse a pair of caches that do not fit each other.

    Raises:
        ValueError: naming the shape, dtype or size.
    """
    cache = "[num_blocks, num_kv_heads, block_size, head_dim]"
    require_shape("key_cache", keys, cache, 4)
    require_shape("value_cache", values, cache, 4)
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"key_cache {list(keys.shape)} and value_cache "
            f"{list(values.shape)} differ before head_dim"
        )
    for name, size in (
        ("num_kv_heads", keys.shape[1]),
        ("block_size", keys.shape[2]),
        ("head_dim", keys.shape[3]),
        ("head_dim_v", values.shape[3]),
    ):
        if size < 1:
            raise ValueError(f"{name} must be >= 1, got {size}")
    if keys.dtype != values.dtype:
        raise ValueError(
            f"key_cache is {keys.dtype}, value_cache {values.dtype}"
        )


def _check_floats(query: Tensor, keys: Tensor, values: Tensor) -> None:
    require_shape("query", query, "[num_tokens, num_heads, head_dim]", 3)
    check_caches(keys, values)
    if query.shape[2] != keys.shape[3]:
        raise ValueError(
            f"query has head_dim {query.shape[2]}, key_cache {keys.shape[3]}"
        )
    if query.shape[1] < 1:
        raise ValueError(f"num_heads must be >= 1, got {query.shape[1]}")
    if query.shape[1] % keys.shape[1] != 0:
        raise ValueError(
            f"{query.shape[1]} query heads are not a multiple of "
            f"{keys.shape[1]} KV heads"
        )
    if query.dtype not in FLOATS:
        raise ValueError(
            f"query must be one of {dtype_names(FLOATS)}, got {query.dtype}"
        )
    if keys.dtype not in FP8 and keys.dtype != query.dtype:
        raise ValueError(
            f"query is {query.dtype}, the caches {keys.dtype}: they must be "
            f"the same, or the caches one of {dtype_names(FP8)}"
        )
    require_device(query, key_cache=keys, value_cache=values)


def _check_sequences(
    query: Tensor, tables: Tensor, lens: Tensor, starts: Tensor | None
) -> None:
    require_shape("block_tables", tables, "[num_seqs, max_blocks]", 2)
    require_shape("seq_lens", lens, "[num_seqs]", 1)
    given = {"block_tables": tables, "seq_lens": lens}
    if starts is not None:
        require_shape("query_start_loc", starts, "[num_seqs + 1]", 1)
        given["query_start_loc"] = starts
    for name, tensor in given.items():
        if tensor.dtype not in INDEX:
            raise ValueError(f"{name} must be int32 or int64")
    require_device(query, **given)
    num_seqs = lens.shape[0]
    if tables.shape[0] != num_seqs:
        raise ValueError(
            f"block_tables has {tables.shape[0]} rows, seq_lens {num_seqs}"
        )
    if starts is None and query.shape[0] != num_seqs:
        raise ValueError(
            f"query has {query.shape[0]} rows for {num_seqs} sequences; "
            f"more than one each needs query_start_loc"
        )
    if starts is not None and starts.shape[0] != num_seqs + 1:
        raise ValueError(
            f"query_start_loc has {starts.shape[0]} entries for {num_seqs} "
            f"sequences, needs {num_seqs + 1}"
        )


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Return the names of dtypes for a message."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def require_shape(name: str, tensor: Tensor, shape: str, dims: int) -> None:
    """Refuse what is no tensor of so many dimensions.

    Raises:
        ValueError: naming the shape that was wanted.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor)}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must be {shape}, got {list(tensor.shape)}")


def require_device(first: Tensor, **others: Tensor) -> None:
    """Refuse a tensor that is not on the first one's device.

    Raises:
        ValueError: naming both devices.
    """
    for name, tensor in others.items():
        if tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device}, the others on {first.device}"
            )


def _finite(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if not abs(value) <= _FLOAT32.max:
        raise ValueError(f"{name} must be finite in float32, got {value}")
    return float(value)


def _window(window: int | None) -> int | None:
    if window is None:
        return None
    window = operator.index(window)
    if window < 1:
        raise ValueError(f"window must be >= 1, got {window}")
    return min(window, LONGEST)


def _softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if not _FLOAT32.tiny <= softcap <= _FLOAT32.max:
        raise ValueError(
            f"softcap must be > 0 and finite in float32, got {softcap}"
        )
    return float(softcap)


def _per_head(
    name: str, value: Tensor | None, heads: int, like: Tensor
) -> Tensor | None:
    if value is None:
        return None
    require_shape(name, value, "[num_heads]", 1)
    if value.shape[0] != heads:
        raise ValueError(f"{name} has {value.shape[0]} of {heads} heads")
    require_device(like, **{name: value})
    return value.float().contiguous()


def cache_scale(
    name: str, value: Tensor | float | None, kv_heads: int, like: Tensor
) -> Tensor | None:
    """Return one scale for each KV head: [num_kv_heads] float32, or None.

    Raises:
        ValueError: neither one number nor one for each KV head.
    """
    if value is None:
        return None
    if isinstance(value, int | float):  # filled on the device: no copy
        return torch.full((kv_heads,), float(value), device=like.device)
    scale = torch.as_tensor(value, dtype=torch.float32, device=like.device)
    if scale.numel() != 1 and list(scale.shape) != [kv_heads]:
        raise ValueError(
            f"{name} must be one number or [num_kv_heads] = [{kv_heads}], "
            f"got {list(scale.shape)}"
        )
    return scale.reshape(-1).expand(kv_heads).contiguous()


def as_stored(
    rows: Tensor, dtype: torch.dtype, scale: Tensor | None
) -> Tensor:
    """Return [num_tokens, num_kv_heads, head_dim] as a cache stores them."""
    if scale is not None:
        rows = rows / scale[:, None]
    if dtype in FP8:
        largest = torch.finfo(dtype).max
        rows = rows.clamp(-largest, largest)
    return rows.to(dtype)


# --- Values: reading them from a GPU waits for it ---------------------------


def check_cache_scale(name: str, scale: Tensor | None) -> None:
    """Refuse scales that no stored number survives.

    Raises:
        ValueError: one is not above 0 and finite.
    """
    if scale is None:
        return
    bad = ~((scale > 0) & scale.isfinite())
    if bool(bad.any()):
        raise ValueError(
            f"{name} must be above 0 and finite, got {float(scale[bad][0])}"
        )


def _check_values(inputs: AttentionInputs) -> None:
    check_cache_scale("k_scale", inputs.k_scale)
    check_cache_scale("v_scale", inputs.v_scale)
    if inputs.query_start_loc is not None:
        _check_starts(inputs.query_start_loc, inputs.num_tokens)
    lens = inputs.seq_lens.long()
    _refuse_first(lens < 0, lens, "seq_lens[{0}] is negative: {1}")
    capacity = inputs.max_blocks * inputs.block_size
    _refuse_first(
        lens > capacity,
        lens,
        f"seq_lens[{{0}}] is {{1}}, but the block table holds "
        f"{inputs.max_blocks} blocks of {inputs.block_size} = {capacity}",
    )
    query_lens = inputs.query_lens().long()
    _refuse_first(
        (query_lens > lens) & (lens > 0),
        query_lens,
        "sequence {0} has {1} query rows, more than its length",
    )
    _check_block_ids(inputs, lens, query_lens)


def _check_starts(starts: Tensor, num_tokens: int) -> None:
    first, last = int(starts[0]), int(starts[-1])
    falls = bool((starts.long().diff() < 0).any())
    if first != 0 or last != num_tokens or falls:
        raise ValueError(
            f"query_start_loc must rise from 0 to {num_tokens}, "
            f"got {starts.tolist()}"
        )


def _check_block_ids(
    inputs: AttentionInputs, lens: Tensor, query_lens: Tensor
) -> None:
    """Refuse a bad id among those that a query can see."""
    size = inputs.block_size
    first = torch.zeros_like(lens)
    if inputs.window is not None:
        first = (lens - query_lens - inputs.window + 1).clamp(min=0) // size
    column = torch.arange(inputs.max_blocks, device=lens.device)
    end = cdiv(lens, size)
    live = (column >= first[:, None]) & (column < end[:, None])
    tables = inputs.block_tables
    bad = live & ((tables < 0) | (tables >= inputs.num_blocks))
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables[{row}, {column}] is {int(tables[row, column])}, "
            f"outside [0, {inputs.num_blocks}), and sequence {row} of "
            f"length {int(lens[row])} reads it"
        )


def _refuse_first(bad: Tensor, values: Tensor, message: str) -> None:
    if bool(bad.any()):
        index = int(bad.nonzero()[0, 0])
        raise ValueError(message.format(index, int(values[index])))
