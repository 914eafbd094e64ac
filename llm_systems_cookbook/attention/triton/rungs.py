"""Launch the first four rungs: what each can do, and what it refuses.

They decode from a cache that lies in one piece. Strides, options and prefill
come with the finished kernel, in `launch`.
"""

from collections.abc import Callable
from functools import wraps

import torch
import triton
from torch import Tensor

from llm_systems_cookbook.attention.inputs import FP8, AttentionInputs
from llm_systems_cookbook.attention.triton import kernels
from llm_systems_cookbook.attention.triton.launch import (
    combine,
    compute_dtype,
    on_device,
    padded_dim,
    split_buffers,
)

TILE = 32

Rung = Callable[..., Tensor]


def _on_its_device(launch: Rung) -> Rung:
    @wraps(launch)
    def launched(inputs: AttentionInputs, out: Tensor, *more: int) -> Tensor:
        compute_dtype(inputs)  # refuses what the kernels do not take
        with on_device(inputs.query.device):
            return launch(inputs, out, *more)

    return launched


@_on_its_device
def per_head_attention(inputs: AttentionInputs, out: Tensor) -> Tensor:
    """Rung 1: one program per query head.

    Raises:
        ValueError: not a plain decode, or a block size or head dimension that
            is no power of two.
    """
    _require_plain(inputs)
    _require_powers_of_two(inputs, least=1)
    grid = inputs.num_seqs, inputs.num_heads
    kernels.per_head_kernel[grid](
        *_pointers(inputs, out),
        NUM_HEADS=inputs.num_heads,
        NUM_KV_HEADS=inputs.num_kv_heads,
        BLOCK_SIZE=inputs.block_size,
        HEAD_DIM=inputs.head_dim,
    )
    return out


@_on_its_device
def grouped_attention(inputs: AttentionInputs, out: Tensor) -> Tensor:
    """Rung 2: the query heads of a KV head in one program.

    Raises:
        ValueError: not a plain decode, a block size or head dimension that is
            no power of two, or one below 16: `tl.dot` takes no less.
    """
    _require_plain(inputs)
    _require_powers_of_two(inputs, least=16)
    grid = inputs.num_seqs, inputs.num_kv_heads
    kernels.grouped_kernel[grid](
        *_pointers(inputs, out),
        NUM_KV_HEADS=inputs.num_kv_heads,
        GROUP=inputs.group,
        ROWS=_rows(inputs),
        BLOCK_SIZE=inputs.block_size,
        HEAD_DIM=inputs.head_dim,
        COMPUTE=compute_dtype(inputs),
    )
    return out


@_on_its_device
def tiled_attention(inputs: AttentionInputs, out: Tensor) -> Tensor:
    """Rung 3: tiles of 32 tokens, whatever the block size.

    Raises:
        ValueError: not a plain decode.
    """
    _require_plain(inputs)
    grid = inputs.num_seqs, inputs.num_kv_heads
    kernels.tiled_kernel[grid](*_pointers(inputs, out), **_tiled(inputs))
    return out


@_on_its_device
def split_attention(
    inputs: AttentionInputs, out: Tensor, num_splits: int = 2
) -> Tensor:
    """Rung 4: `num_splits` programs share the tokens of a sequence.

    Raises:
        ValueError: not a plain decode, or num_splits below 2.
    """
    _require_plain(inputs)
    if num_splits < 2:
        raise ValueError(f"num_splits must be >= 2, got {num_splits}")
    parts, part_lses = split_buffers(inputs, num_splits)
    *pointers, _, scale, max_blocks = _pointers(inputs, out)
    grid = inputs.num_seqs, inputs.num_kv_heads, num_splits
    kernels.split_kernel[grid](
        *pointers,
        parts,
        part_lses,
        scale,
        max_blocks,
        **_tiled(inputs),
        SPLITS=num_splits,
    )
    combine(inputs, parts, part_lses, out, num_splits)
    return out


RUNGS: dict[str, Rung] = {
    "per_head": per_head_attention,
    "grouped": grouped_attention,
    "tiled": tiled_attention,
    "split": split_attention,
}


def _pointers(inputs: AttentionInputs, out: Tensor) -> tuple[object, ...]:
    return (
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables,
        inputs.seq_lens,
        out,
        inputs.scale,
        inputs.max_blocks,
    )


def _tiled(inputs: AttentionInputs) -> dict[str, object]:
    return {
        "NUM_KV_HEADS": inputs.num_kv_heads,
        "GROUP": inputs.group,
        "ROWS": _rows(inputs),
        "BLOCK_SIZE": inputs.block_size,
        "HEAD_DIM": inputs.head_dim,
        "DIMS": padded_dim(inputs.head_dim),
        "TILE": TILE,
        "COMPUTE": compute_dtype(inputs),
    }


def _rows(inputs: AttentionInputs) -> int:
    return triton.next_power_of_2(inputs.group)


def _require_plain(inputs: AttentionInputs) -> None:
    """Refuse what the first rungs do not know."""
    if inputs.query_start_loc is not None:
        raise ValueError("this rung decodes: one query row per sequence")
    for name in (
        "window",
        "softcap",
        "alibi_slopes",
        "sinks",
        "k_scale",
        "v_scale",
    ):
        if getattr(inputs, name) is not None:
            raise ValueError(f"this rung does not know {name}")
    if inputs.key_cache.dtype in FP8:
        raise ValueError("this rung does not know float8 caches")
    if inputs.head_dim != inputs.head_dim_v:
        raise ValueError(
            f"this rung wants keys and values of one size, got "
            f"{inputs.head_dim} and {inputs.head_dim_v}"
        )
    largest = torch.iinfo(torch.int32).max
    if inputs.key_cache.numel() > largest:
        raise ValueError(
            f"this rung counts to {largest}; the cache has "
            f"{inputs.key_cache.numel()} elements"
        )
    for name in ("query", "key_cache", "value_cache", "block_tables"):
        if not getattr(inputs, name).is_contiguous():
            raise ValueError(f"this rung wants {name} in one piece")


def _require_powers_of_two(inputs: AttentionInputs, least: int) -> None:
    for name in ("block_size", "head_dim"):
        size = getattr(inputs, name)
        if size < least or size != triton.next_power_of_2(size):
            raise ValueError(
                f"{name} must be a power of two, and at least {least}, "
                f"got {size}"
            )
