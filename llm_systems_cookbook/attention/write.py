"""Write a step's keys and values into their slots."""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from llm_systems_cookbook.attention.backends import choose_backend
from llm_systems_cookbook.attention.inputs import (
    FLOATS,
    FP8,
    INDEX,
    as_stored,
    cache_scale,
    check_cache_scale,
    check_caches,
    dtype_names,
    require_device,
    require_shape,
)


@torch.no_grad()
def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    backend: str = "auto",
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    validate: bool = True,
) -> None:
    """Write the key and value of token i into slot `slot_mapping[i]`.

    Slot s is offset `s % block_size` of block `s // block_size`. Slot -1
    writes nothing: it pads a batch. Numbers are rounded to the cache's dtype;
    a float8 cache saturates at its largest number. No gradient passes.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], any strides, in other
            memory than the caches; float64 (not on triton), float32, float16
            or bfloat16.
        value: [num_tokens, num_kv_heads, head_dim_v], of key's dtype.
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim], any
            strides but 0; of key's dtype, or float8_e4m3fn or float8_e5m2.
        value_cache: the same with head_dim_v, of key_cache's dtype.
        slot_mapping: [num_tokens] int32 or int64.
        backend: "triton" and "cpu" have writes of their own, "gather" and
            "reference" write by PyTorch's indexing; "auto" chooses as in
            `paged_attention`.
        k_scale: keys are divided by it before they are stored: one number,
            or [num_kv_heads]; rounded to float32.
        v_scale: the same for values.
        validate: read the slots and refuse bad ones; on a GPU that waits for
            the device. Without it, a slot out of range writes nothing, and
            if two tokens have the same slot, either of them may be kept.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, one cache for
            both, a cache that is expanded, or was made in inference mode and
            is written outside of it, a slot out of range or given twice, a
            scale that is not above 0 and finite, an unknown backend. Nothing
            was written.
    """
    write = CacheWrite(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        backend,
        k_scale=k_scale,
        v_scale=v_scale,
        validate=validate,
    )
    write(key, value, key_cache, value_cache)


class CacheWrite:
    """Where the tokens of a step go: checked once, then written per layer.

    Takes and raises what `write_kv` does, for the layer that it is made with.
    Making one writes nothing; calling it does, for this layer and for any
    other whose tensors are alike.
    """

    @torch.no_grad()
    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        backend: str = "auto",
        *,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        validate: bool = True,
    ) -> None:
        _check(key, value, key_cache, value_cache, slot_mapping)
        self._backend = choose_backend(key, backend)
        num_blocks, kv_heads, block_size, _ = key_cache.shape
        self._k_scale = cache_scale("k_scale", k_scale, kv_heads, key)
        self._v_scale = cache_scale("v_scale", v_scale, kv_heads, key)
        self._slots = slot_mapping.long()
        if validate:
            check_cache_scale("k_scale", self._k_scale)
            check_cache_scale("v_scale", self._v_scale)
            _check_slots(self._slots, num_blocks * block_size)
        self._places = None  # see `_by_indexing`
        self._kinds = _kinds(key, value, key_cache, value_cache)

    @torch.no_grad()
    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> None:
        """Write the keys and values of one layer.

        Args:
            key: of the shape, dtype and device that it had in the first.
            value: the same.
            key_cache: the same, and of the same strides.
            value_cache: the same.

        Raises:
            ValueError: a tensor differs in one of these. Nothing was written.
        """
        kinds = _kinds(key, value, key_cache, value_cache)
        if kinds != self._kinds:
            _refuse_another(kinds, self._kinds)
        if self._backend in ("cpu", "triton"):
            # torch does not see that a kernel writes. Without this, a backward
            # pass that needs the old numbers would not raise.
            increment_version((key_cache, value_cache))
        if self._backend == "triton":
            from llm_systems_cookbook.attention.triton.launch import (
                triton_write,
            )

            triton_write(
                key,
                value,
                key_cache,
                value_cache,
                self._slots,
                self._k_scale,
                self._v_scale,
            )
            return
        key = as_stored(key, key_cache.dtype, self._k_scale)
        value = as_stored(value, value_cache.dtype, self._v_scale)
        if self._backend == "cpu":
            # Imported only when it is used, because numba takes a moment.
            from llm_systems_cookbook.attention.cpu import cpu_write

            cpu_write(key, value, key_cache, value_cache, self._slots)
        else:
            self._by_indexing(key, value, key_cache, value_cache)

    def _by_indexing(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> None:
        if self._places is None:
            self._places = _places(self._slots, key_cache)
        used, blocks, offsets = self._places
        _write(key[used], key_cache, blocks, offsets)
        _write(value[used], value_cache, blocks, offsets)


def _kinds(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor
) -> tuple[tuple[object, ...], ...]:
    """Return what must be the same in each layer, by tensor.

    Of the caches also the strides, and whether they are one memory or were
    made in inference mode: what `write_kv` refuses, no later layer may be.
    """
    return (
        (key.shape, key.dtype, key.device),
        (value.shape, value.dtype, value.device),
        *(
            (
                cache.shape,
                cache.dtype,
                cache.device,
                cache.stride(),
                cache.is_inference(),
                other.data_ptr() == cache.data_ptr(),
            )
            for cache, other in (
                (key_cache, value_cache),
                (value_cache, key_cache),
            )
        ),
    )


def _refuse_another(
    kinds: tuple[tuple[object, ...], ...],
    first: tuple[tuple[object, ...], ...],
) -> None:
    names = "key", "value", "key_cache", "value_cache"
    for name, other, mine in zip(names, kinds, first, strict=True):
        if other != mine:
            raise ValueError(
                f"{name} is {_described(*other)}, in another layer "
                f"{_described(*mine)}"
            )


def _described(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    strides: tuple[int, ...] | None = None,
    is_inference: bool = False,
    is_shared: bool = False,
) -> str:
    of = "" if strides is None else f" with strides {strides}"
    of += ", made in inference mode" if is_inference else ""
    of += ", the memory of both caches" if is_shared else ""
    return f"{list(shape)} {dtype} on {device}{of}"


def _places(slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens are written, and the block and offset of each."""
    num_blocks, _, block_size, _ = cache.shape
    used = (slots >= 0) & (slots < num_blocks * block_size)
    slots = slots[used]
    return used, slots // block_size, slots % block_size


def _write(
    rows: Tensor, cache: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """Write rows[i], of the cache's dtype, into blocks[i] at offsets[i]."""
    if cache.dtype in FP8:
        # Advanced indexing knows no float8; its bytes are as good.
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache[blocks, :, offsets] = rows


def _check(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> None:
    check_caches(keys, values)
    _require_writable("key_cache", keys)
    _require_writable("value_cache", values)
    if keys.numel() > 0 and keys.data_ptr() == values.data_ptr():
        raise ValueError("key_cache and value_cache are the same memory")
    for name, rows, cache in (("key", key, keys), ("value", value, values)):
        require_shape(name, rows, "[num_tokens, num_kv_heads, head_dim]", 3)
        wanted = [key.shape[0], cache.shape[1], cache.shape[3]]
        if list(rows.shape) != wanted:
            raise ValueError(
                f"{name} must be {wanted} for a cache of "
                f"{list(cache.shape)}, got {list(rows.shape)}"
            )
        if rows.dtype not in FLOATS:
            raise ValueError(
                f"{name} must be one of {dtype_names(FLOATS)}, "
                f"got {rows.dtype}"
            )
        if rows.dtype != cache.dtype and cache.dtype not in FP8:
            raise ValueError(
                f"{name} is {rows.dtype}, its cache {cache.dtype}"
            )
    if key.dtype != value.dtype:
        raise ValueError(f"key is {key.dtype}, value {value.dtype}")
    require_shape("slot_mapping", slots, "[num_tokens]", 1)
    if slots.shape[0] != key.shape[0] or slots.dtype not in INDEX:
        raise ValueError(
            f"slot_mapping must be [{key.shape[0]}] int32 or int64, "
            f"got {list(slots.shape)} {slots.dtype}"
        )
    require_device(
        key,
        value=value,
        key_cache=keys,
        value_cache=values,
        slot_mapping=slots,
    )


def _require_writable(name: str, cache: Tensor) -> None:
    """Refuse an expanded cache, whose slots share memory, and a frozen one."""
    if cache.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name} was made in inference mode: write it there")
    for size, stride in zip(cache.shape, cache.stride(), strict=True):
        if size > 1 and stride == 0:
            raise ValueError(f"{name} is expanded: strides {cache.stride()}")


def _check_slots(slots: Tensor, num_slots: int) -> None:
    bad = (slots < -1) | (slots >= num_slots)
    if bool(bad.any()):
        index = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"slot_mapping[{index}] is {int(slots[index])}, outside "
            f"[0, {num_slots}), and not -1"
        )
    used = slots[slots >= 0]
    given, counts = used.unique(return_counts=True)
    if bool((counts > 1).any()):
        slot = int(given[counts > 1][0])
        raise ValueError(f"slot {slot} is given to two tokens")
