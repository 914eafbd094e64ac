"""Where keys and values lie: in blocks, or side by side."""

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from llm_systems_cookbook.attention.gather import gather_index_select
from llm_systems_cookbook.attention.inputs import FLOATS, dtype_names
from llm_systems_cookbook.attention.write import write_kv
from llm_systems_cookbook.memory.sequence_table import BlockCopy
from llm_systems_cookbook.validate import cdiv, require_at_least

Slots = Tensor | Sequence[int]


class PagedKVCache:
    """Hold the keys and values of every layer, in blocks.

    Slot s is offset `s % block_size` of block `s // block_size`, in each
    layer. The cache holds bytes and no counts: a `BlockAllocator` says which
    blocks are whose. Memory that was never written holds anything.

    Source: section 4.3 of Kwon et al., SOSP 2023; swapping is section 4.5.

    Args:
        num_layers: layers of the model, at least 1.
        num_blocks: blocks on the device, at least 1.
        block_size: tokens per block, at least 1.
        num_kv_heads: KV heads per layer, at least 1.
        head_dim: numbers per key, at least 1.
        head_dim_v: numbers per value; head_dim when None.
        dtype: float64, float32, float16 or bfloat16.
        device: where the blocks lie.
        num_host_blocks: blocks in the host's memory, to swap to.

    Attributes:
        keys: for each layer [num_blocks, num_kv_heads, block_size, head_dim].
        values: the same with head_dim_v.
        host_keys: for each layer the same with num_host_blocks, on the CPU.
        host_values: the same with head_dim_v.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size below its minimum, or another dtype.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        num_host_blocks: int = 0,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        _check_sizes(num_layers, num_kv_heads, head_dim, head_dim_v, dtype)
        self.num_blocks, self.block_size = require_at_least(
            1, num_blocks=num_blocks, block_size=block_size
        )
        (self.num_host_blocks,) = require_at_least(
            0, num_host_blocks=num_host_blocks
        )

        def layers(blocks: int, dim: int, **where: object) -> list[Tensor]:
            shape = blocks, num_kv_heads, block_size, dim
            return [
                torch.empty(shape, dtype=dtype, **where)
                for _ in range(num_layers)
            ]

        self.keys = layers(num_blocks, head_dim, device=device)
        self.values = layers(num_blocks, head_dim_v, device=device)
        # A GPU copies to and from pinned memory without a detour.
        pinned = self.keys[0].is_cuda and num_host_blocks > 0
        host = {"device": "cpu", "pin_memory": pinned}
        self.host_keys = layers(num_host_blocks, head_dim, **host)
        self.host_values = layers(num_host_blocks, head_dim_v, **host)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: keys and values, all layers."""
        return sum(c[0].nbytes for c in self.keys + self.values)

    def write(
        self, layer: int, slots: Slots, key: Tensor, value: Tensor
    ) -> None:
        """Write the key and value of token i into slot `slots[i]`.

        Args:
            layer: index of the layer.
            slots: [num_tokens] int32 or int64; -1 writes nothing.
            key: [num_tokens, num_kv_heads, head_dim], of the cache's dtype.
            value: [num_tokens, num_kv_heads, head_dim_v].

        Raises:
            TypeError: a slot is not an integer.
            ValueError: no such layer, a slot out of range or given twice,
                shapes, dtypes or devices that do not fit. Nothing was
                written.
        """
        _write(self.keys, self.values, layer, slots, key, value)

    def gather(
        self, layer: int, block_ids: Sequence[int], length: int
    ) -> tuple[Tensor, Tensor]:
        """Return copies of a sequence's keys and values, in token order.

        Args:
            layer: index of the layer.
            block_ids: the sequence's blocks in logical order; those past
                its end are not read.
            length: tokens in the sequence.

        Returns:
            [1, num_kv_heads, length, head_dim] and the same with head_dim_v.

        Raises:
            TypeError: a block or the length is not an integer.
            ValueError: no such layer, a length below 0 or beyond the blocks,
                or a block out of range.
        """
        _require_below("layer", layer, len(self.keys))
        if 0 <= length <= len(block_ids) * self.block_size:
            block_ids = block_ids[: cdiv(length, self.block_size)]
        row = [operator.index(block_id) for block_id in block_ids]
        table = torch.tensor(
            [row], dtype=torch.int64, device=self.keys[layer].device
        )
        return (
            gather_index_select(self.keys[layer], table, length),
            gather_index_select(self.values[layer], table, length),
        )

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks on the device, in every layer, one after another.

        In order, so a copy sees what an earlier one of the list has written:
        a sequence that is forked in the step in which its own tail was
        copied gets the copy's contents.

        Raises:
            TypeError: a block is not an integer.
            ValueError: a block out of range, or the destination of two
                copies. Nothing was copied.
        """
        _copy(copies, self.keys, self.keys, self.values, self.values)

    def swap_out(self, pairs: Iterable[BlockCopy]) -> None:
        """Copy device blocks (source) to host blocks (destination).

        The device's block is free for others as soon as this returns.

        Raises:
            TypeError: as in `copy_blocks`.
            ValueError: as in `copy_blocks`.
        """
        _copy(pairs, self.keys, self.host_keys, self.values, self.host_values)

    def swap_in(self, pairs: Iterable[BlockCopy]) -> None:
        """Copy host blocks (source) to device blocks (destination).

        Any device block will do: the block table names the new ones.

        Raises:
            TypeError: as in `copy_blocks`.
            ValueError: as in `copy_blocks`.
        """
        _copy(pairs, self.host_keys, self.keys, self.host_values, self.values)


class ContiguousKVCache:
    """Hold the keys and values of a request side by side: the baseline.

    The pool is a row of slots, and a request reserves a region of it, as
    `ReservedMemory` does with integers. Each slot is a block of one token:
    to `paged_attention` this is a cache of block size 1. Within a head the
    slots lie one after another, so a region needs no gather: attention reads
    a view.

    Args:
        num_layers: layers of the model, at least 1.
        num_slots: token slots in the pool, at least 1.
        num_kv_heads: KV heads per layer, at least 1.
        head_dim: numbers per key, at least 1.
        head_dim_v: numbers per value; head_dim when None.
        dtype: float64, float32, float16 or bfloat16.
        device: where the slots lie.

    Attributes:
        keys: for each layer [num_slots, num_kv_heads, 1, head_dim], a view
            of [num_kv_heads, num_slots, head_dim].
        values: the same with head_dim_v.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size below 1, or another dtype.
    """

    block_size = 1

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        _check_sizes(num_layers, num_kv_heads, head_dim, head_dim_v, dtype)
        (self.num_slots,) = require_at_least(1, num_slots=num_slots)

        def layers(dim: int) -> list[Tensor]:
            shape = num_kv_heads, num_slots, 1, dim
            return [
                torch.empty(shape, dtype=dtype, device=device).transpose(0, 1)
                for _ in range(num_layers)
            ]

        self.keys, self.values = layers(head_dim), layers(head_dim_v)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token: key and value, all layers."""
        return sum(c[0].nbytes for c in self.keys + self.values)

    def write(
        self, layer: int, slots: Slots, key: Tensor, value: Tensor
    ) -> None:
        """Write the key and value of token i into slot `slots[i]`.

        Takes and raises what `PagedKVCache.write` does.
        """
        _write(self.keys, self.values, layer, slots, key, value)

    def view(
        self, layer: int, start: int, length: int
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a region, without a copy.

        Args:
            layer: index of the layer.
            start: first slot of the region.
            length: tokens in it.

        Returns:
            [1, num_kv_heads, length, head_dim] and the same with head_dim_v,
            both views of the pool.

        Raises:
            ValueError: no such layer, or a region outside the pool.
        """
        _require_below("layer", layer, len(self.keys))
        start, length = require_at_least(0, start=start, length=length)
        if start + length > self.num_slots:
            raise ValueError(
                f"slots {start} to {start + length} are outside "
                f"[0, {self.num_slots}]"
            )
        region = slice(start, start + length)
        return (
            self.keys[layer][region].permute(2, 1, 0, 3),
            self.values[layer][region].permute(2, 1, 0, 3),
        )


def _check_sizes(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
) -> None:
    require_at_least(
        1,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
    )
    if dtype not in FLOATS:
        raise ValueError(
            f"dtype must be one of {dtype_names(FLOATS)}, got {dtype}"
        )


def _require_below(name: str, value: int, limit: int) -> None:
    if not 0 <= operator.index(value) < limit:
        raise ValueError(f"{name} {value} is outside [0, {limit})")


def _write(
    keys: list[Tensor],
    values: list[Tensor],
    layer: int,
    slots: Slots,
    key: Tensor,
    value: Tensor,
) -> None:
    _require_below("layer", layer, len(keys))
    if not isinstance(slots, Tensor):
        numbers = [operator.index(slot) for slot in slots]
        slots = torch.tensor(numbers, dtype=torch.int64, device=key.device)
    write_kv(key, value, keys[layer], values[layer], slots)


def _copy(
    pairs: Iterable[BlockCopy],
    key_sources: list[Tensor],
    key_destinations: list[Tensor],
    value_sources: list[Tensor],
    value_destinations: list[Tensor],
) -> None:
    # Plain integers: a boolean is a mask to a tensor, and tensors of one
    # value are not equal as members of a set.
    pairs = [BlockCopy(*map(operator.index, pair)) for pair in pairs]
    _check_pairs(pairs, len(key_sources[0]), len(key_destinations[0]))
    for old, new in zip(
        key_sources + value_sources,
        key_destinations + value_destinations,
        strict=True,
    ):
        for pair in pairs:
            new[pair.destination] = old[pair.source]


def _check_pairs(
    pairs: list[BlockCopy], num_sources: int, num_destinations: int
) -> None:
    taken: set[int] = set()
    for source, destination in pairs:
        _require_below("source block", source, num_sources)
        _require_below("destination block", destination, num_destinations)
        if destination in taken:
            raise ValueError(
                f"block {destination} is the destination of two copies"
            )
        taken.add(destination)
