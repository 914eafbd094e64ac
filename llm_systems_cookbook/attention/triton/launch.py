"""Launch the Triton kernels: grids, tiles, and how many splits."""

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm_systems_cookbook.attention.inputs import (
    FP8,
    AttentionInputs,
    as_stored,
    dtype_names,
)
from llm_systems_cookbook.attention.triton import kernels

INTERPRETED = kernels.INTERPRETED

COMPUTE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_FP8_KIND = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}

MAX_SPLITS = 64


class Tiles(NamedTuple):
    """How a kernel is cut for a device.

    Attributes:
        rows: the least rows of a program: query heads of a group times query
            tokens.
        tile: tokens per step, a power of two.
        num_warps: warps per program.
        num_stages: tiles in flight.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def choose_tiles(
    target: str, head_dim: int, itemsize: int, group: int, prefill: bool
) -> Tiles:
    """Return the tiles for a target: "interpreter", "sm_80", "gfx942", ….

    Args:
        target: the architecture that the kernel is compiled for.
        head_dim: numbers per key or value, padded.
        itemsize: bytes of the numbers that are multiplied.
        group: query heads per KV head.
        prefill: several query tokens a sequence.
    """
    if target == "interpreter":
        # A step costs the same whatever its size.
        return Tiles(32 if prefill else 1, 64, num_warps=1, num_stages=1)
    row_bytes = head_dim * itemsize
    if target.startswith("gfx"):
        return Tiles(16, 32, num_warps=4, num_stages=1)
    if target == "sm_75":
        # Without tensor cores, rows that are only padding cost time.
        tile = 32 if row_bytes < 512 else 16
        return Tiles(group, tile, num_warps=4, num_stages=1)
    if itemsize == 4:
        # Multiplied without tensor cores, which takes many registers.
        if row_bytes <= 256:
            return Tiles(16, 32, num_warps=8, num_stages=2)
        return Tiles(16, 16, num_warps=8, num_stages=1)
    # Three stages: the block ids of a tile are loaded before its keys.
    if row_bytes > 256:
        return Tiles(16, 32, num_warps=4, num_stages=3)
    if prefill:
        return Tiles(32, 32, num_warps=4, num_stages=3)
    return Tiles(16, 64, num_warps=4, num_stages=3)


def choose_splits(programs: int, tiles: int, processors: int) -> int:
    """Return how many programs share one sequence's tokens.

    A power of two: enough that every processor has two programs, and no more
    than the tables have room for tiles. Lengths are not looked at, since they
    lie on the device: short sequences in wide tables get empty splits.

    Args:
        programs: programs without splitting.
        tiles: tiles of the longest sequence the tables can hold.
        processors: streaming multiprocessors of the device.
    """
    wanted = triton.cdiv(2 * processors, max(1, programs))
    most = max(1, min(tiles, MAX_SPLITS))
    # Each number is a kernel of its own to compile: only powers of two.
    return min(triton.next_power_of_2(wanted), 1 << most.bit_length() - 1)


def triton_attention(
    inputs: AttentionInputs, out: Tensor, num_splits: int | None = None
) -> Tensor:
    """Run the finished kernel; every element of `out` is written.

    Args:
        inputs: the checked arguments of `paged_attention`.
        out: [num_tokens, num_heads, head_dim_v], any strides.
        num_splits: programs per sequence and KV head; chosen when None.
    """
    if out.numel() == 0:
        return out
    device = inputs.query.device
    target = _target(device)
    plan = plan_launch(inputs, target, _processors(device), num_splits)
    parts, part_lses = split_buffers(inputs, plan.num_splits)
    compute = compute_dtype(inputs)
    arguments = kernel_arguments(inputs, out, plan, compute, parts, part_lses)
    if inputs.query_start_loc is not None:
        out.zero_()  # rows past the last start belong to no program
    with on_device(device):
        kernels.paged_attention_kernel[plan.grid](
            **arguments, **compile_options(plan.tiles, target)
        )
        if plan.num_splits > 1:
            combine(inputs, parts, part_lses, out, plan.num_splits)
    return out


class Plan(NamedTuple):
    """How one call is cut into programs.

    Attributes:
        tiles: the sizes of one program.
        query_tile: query tokens of a program.
        num_splits: programs that share the tokens of one sequence.
        grid: programs along query tiles, KV heads and splits.
    """

    tiles: Tiles
    query_tile: int
    num_splits: int
    grid: tuple[int, int, int]


def plan_launch(
    inputs: AttentionInputs,
    target: str,
    processors: int,
    num_splits: int | None = None,
) -> Plan:
    """Return how to cut a call for a device."""
    prefill = inputs.query_start_loc is not None
    tiles = choose_tiles(
        target,
        padded_dim(max(inputs.head_dim, inputs.head_dim_v)),
        inputs.query.element_size(),
        inputs.group,
        prefill,
    )
    query_tile = max(1, tiles.rows // inputs.group) if prefill else 1
    query_tiles = inputs.num_seqs
    if prefill:
        # A bound that needs no look at the batch: see sequence_of_tile.
        query_tiles += inputs.num_tokens // query_tile
    if num_splits is None:
        num_splits = choose_splits(
            query_tiles * inputs.num_kv_heads,
            triton.cdiv(inputs.max_blocks * inputs.block_size, tiles.tile),
            processors,
        )
    grid = query_tiles, inputs.num_kv_heads, num_splits
    return Plan(tiles, query_tile, num_splits, grid)


def kernel_arguments(
    inputs: AttentionInputs,
    out: Tensor,
    plan: Plan,
    compute: tl.dtype,
    parts: Tensor | None,
    part_lses: Tensor | None,
) -> dict[str, object]:
    """Return the arguments of `paged_attention_kernel`, by name."""
    keys, values = inputs.key_cache, inputs.value_cache
    if keys.dtype in FP8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    tables = inputs.block_tables
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    starts = inputs.query_start_loc
    rows = max(plan.tiles.rows, plan.query_tile * inputs.group)
    return {
        "query": inputs.query,
        "keys": keys,
        "values": values,
        "tables": tables,
        "lengths": inputs.seq_lens.contiguous(),
        "starts": None if starts is None else starts.contiguous(),
        "out": out,
        "parts": parts,
        "part_lses": part_lses,
        "slopes": inputs.alibi_slopes,
        "sinks": inputs.sinks,
        "k_scale": inputs.k_scale,
        "v_scale": inputs.v_scale,
        "scale": inputs.scale,
        "softcap": inputs.softcap,
        "window": inputs.window,
        "num_seqs": inputs.num_seqs,
        "num_blocks": inputs.num_blocks,
        "max_blocks": inputs.max_blocks,
        **_strides("query", inputs.query, "token", "head", "dim"),
        **_strides("key", keys, "block", "head", "slot", "dim"),
        **_strides("value", values, "block", "head", "slot", "dim"),
        "table_stride": tables.stride(0),
        **_strides("out", out, "token", "head", "dim"),
        "NUM_HEADS": inputs.num_heads,
        "GROUP": inputs.group,
        "QUERY_TILE": plan.query_tile,
        "ROWS": triton.next_power_of_2(rows),
        "BLOCK_SIZE": inputs.block_size,
        "HEAD_DIM": inputs.head_dim,
        "HEAD_DIM_V": inputs.head_dim_v,
        "DIMS": padded_dim(inputs.head_dim),
        "DIMS_V": padded_dim(inputs.head_dim_v),
        "TILE": plan.tiles.tile,
        "SPLITS": plan.num_splits,
        "FP8": _FP8_KIND.get(inputs.key_cache.dtype, 0),
        "COMPUTE": compute,
    }


def _strides(name: str, tensor: Tensor, *axes: str) -> dict[str, int]:
    return {
        f"{name}_stride_{axis}": stride
        for axis, stride in zip(axes, tensor.stride(), strict=True)
    }


def padded_dim(head_dim: int) -> int:
    """Return the power of two that a kernel rounds a head dimension up to.

    `tl.dot` wants 16 at the least.
    """
    return max(16, triton.next_power_of_2(head_dim))


def compile_options(tiles: Tiles, target: str) -> dict[str, int]:
    """Return what Triton's compiler is told beside the arguments."""
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    if target.startswith("sm_"):
        # Left to itself, the assembler spills a few registers to fit one
        # more program on a processor.
        options["maxnreg"] = 255
    return options


def split_buffers(
    inputs: AttentionInputs, num_splits: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return room for each split's result and the log of its weight.

    Returns:
        float32 [num_tokens, num_heads, num_splits, head_dim_v] and the same
        without its last dimension; None and None for one split.
    """
    if num_splits == 1:
        return None, None
    shape = inputs.num_tokens, inputs.num_heads, num_splits
    device = inputs.query.device
    parts = torch.empty(
        (*shape, inputs.head_dim_v), dtype=torch.float32, device=device
    )
    return parts, torch.empty(shape, dtype=torch.float32, device=device)


def combine(
    inputs: AttentionInputs,
    parts: Tensor,
    part_lses: Tensor,
    out: Tensor,
    num_splits: int,
) -> None:
    """Weigh the results of the splits into `out`."""
    kernels.combine_kernel[(inputs.num_tokens, inputs.num_heads)](
        parts,
        part_lses,
        inputs.sinks,
        out,
        *out.stride(),
        num_splits,
        NUM_HEADS=inputs.num_heads,
        HEAD_DIM_V=inputs.head_dim_v,
        DIMS=triton.next_power_of_2(inputs.head_dim_v),
        SPLITS=triton.next_power_of_2(num_splits),
    )


def triton_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write keys and values into their slots; slots outside write nothing."""
    for rows, cache, scale in (
        (key, key_cache, k_scale),
        (value, value_cache, v_scale),
    ):
        stored = as_stored(rows, cache.dtype, scale)
        if cache.dtype in FP8:
            stored, cache = stored.view(torch.uint8), cache.view(torch.uint8)
        num_blocks, heads, block_size, head_dim = cache.shape
        if stored.numel() == 0:
            continue
        with on_device(cache.device):
            kernels.write_kernel[(stored.shape[0], heads)](
                stored,
                cache,
                slots.contiguous(),
                num_blocks * block_size,
                *stored.stride(),
                *cache.stride(),
                BLOCK_SIZE=block_size,
                HEAD_DIM=head_dim,
                DIMS=triton.next_power_of_2(head_dim),
            )


# --- The device -------------------------------------------------------------


def _target(device: torch.device) -> str:
    """Return the name of the architecture that kernels are compiled for."""
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[
            0
        ]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count


def compute_dtype(inputs: AttentionInputs) -> tl.dtype:
    """Return the dtype in which a kernel multiplies.

    Raises:
        ValueError: the kernels do not take the query's dtype.
    """
    if inputs.query.dtype not in COMPUTE:
        raise ValueError(
            f"Triton kernels take {dtype_names(tuple(COMPUTE))}, "
            f"got {inputs.query.dtype}"
        )
    # The interpreter multiplies bfloat16 matrices wrongly, without a word.
    return tl.float32 if INTERPRETED else COMPUTE[inputs.query.dtype]


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Launch on this device, whichever is current."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    return contextlib.nullcontext()
