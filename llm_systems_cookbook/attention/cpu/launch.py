"""Give the CPU kernels what they need: arrays, a plan and threads."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from llm_systems_cookbook.attention.cpu import threads
from llm_systems_cookbook.attention.cpu.kernels import (
    CACHE_LINE,
    TILE,
    Cache,
    attend_all,
    write_all,
)
from llm_systems_cookbook.attention.cpu.plan import plan_of
from llm_systems_cookbook.attention.inputs import FP8, AttentionInputs


def cpu_attention(inputs: AttentionInputs, out: Tensor) -> Tensor:
    """Attend through the block tables without copying the cache together.

    Sums are float64 for a float64 query, float32 for every other. As many
    threads work as torch has (`torch.set_num_threads`), at most as numba
    started.

    Args:
        inputs: on the CPU.
        out: [num_tokens, num_heads, head_dim_v], every element is written.

    Returns:
        out. A block id outside the pool, or a position beyond the table,
        makes the rows that see it NaN.

    Raises:
        ValueError: out has another shape, or a plan of other inputs.
        RuntimeError: see `threads.run`.
    """
    shape = inputs.num_tokens, inputs.num_heads, inputs.head_dim_v
    if out.shape != shape:
        raise ValueError(f"out must be {list(shape)}, got {list(out.shape)}")
    exact = torch.float64 if out.dtype == torch.float64 else torch.float32
    plan = plan_of(inputs, exact)
    in_place = out.dtype == exact and out.is_contiguous()
    result = out if in_place else torch.empty(out.shape, dtype=exact)
    threads.run(
        attend_all,
        plan.threads,
        _array(inputs.query.to(exact)),
        _cache(inputs.key_cache, exact),
        _cache(inputs.value_cache, exact),
        plan.tables,
        plan.scoring,
        plan.tiles,
        plan.pieces,
        plan.shares,
        result.numpy(),
    )
    return out if in_place else out.copy_(result)


def cpu_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> None:
    """Copy the key and value of token i into slot `slots[i]`.

    Nothing is checked here: `write_kv` has, and rows of another shape would
    be written outside the caches.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], of key_cache's dtype.
        value: [num_tokens, num_kv_heads, head_dim_v], of value_cache's.
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim], any
            strides but 0.
        value_cache: the same with head_dim_v.
        slots: [num_tokens] int32 or int64; one outside the cache writes
            nothing.
    """
    write_all(
        _array(key),
        _array(value),
        _cache(key_cache, key.dtype),
        _cache(value_cache, value.dtype),
        slots.long().contiguous().numpy(),
    )


# --- Tensors as numpy knows them ---------------------------------------------

# What numpy does not know is given as bits.
BITS = dict.fromkeys(FP8, torch.uint8) | {
    torch.float16: torch.int16,
    torch.bfloat16: torch.uint16,
}
NO_TABLE = np.empty(0, np.float32)


def _array(rows: Tensor) -> np.ndarray:
    """Return rows as numpy knows them, of the same shape; see `_numbers`."""
    return _numbers(rows.resolve_neg().contiguous()).reshape(rows.shape)


def _numbers(tensor: Tensor) -> np.ndarray:
    """Return a view of a tensor's memory from its first number to its last.

    One-dimensional; bits, where numpy does not know the dtype.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.as_strided((_span(tensor),), (1,))
    if tensor.dtype in BITS:
        tensor = tensor.view(BITS[tensor.dtype])
    return tensor.numpy().reshape(-1)


def _span(tensor: Tensor) -> int:
    """Return how many numbers lie from a tensor's first to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _cache(cache: Tensor, exact: torch.dtype) -> Cache:
    """Describe a cache; `exact` is the dtype of the sums."""
    num_blocks, _, block_size, _ = cache.shape
    whole = cache.dtype == exact and block_size % TILE == 0
    return Cache(
        _numbers(cache),
        *cache.stride(),
        num_blocks,
        block_size,
        CACHE_LINE // cache.element_size(),
        whole and cache.is_contiguous(),
        _meanings(cache.dtype) if cache.dtype in FP8 else NO_TABLE,
    )


@lru_cache
def _meanings(dtype: torch.dtype) -> np.ndarray:
    """Return what each 8-bit number stands for: [256] float32."""
    bits = torch.arange(256, dtype=torch.uint8, device="cpu")
    return bits.view(dtype).float().numpy()
