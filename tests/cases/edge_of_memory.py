"""Run a backend where a step too far would crash: a process of its own.

    python -m cases.edge_of_memory guard|int32 BACKEND [KERNELS]   (in tests/)

`guard` puts every tensor between two pages that must not be touched. `int32`
reads a block beyond 2**31 elements of a cache that is never filled. KERNELS
is a file to use in place of the package's Triton kernels.
"""

import ctypes
import importlib.util
import math
import mmap
import sys
from dataclasses import replace
from pathlib import Path

import torch
from cases.attention import device_of

from llm_systems_cookbook.attention.dispatch import attend
from llm_systems_cookbook.attention.inputs import (
    AttentionInputs,
    checked_inputs,
)
from llm_systems_cookbook.attention.reference import reference_attention
from llm_systems_cookbook.attention.write import write_kv

PROT_NONE = 0
PAGE = mmap.PAGESIZE
KEPT = []  # mappings live as long as the process


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that fills its pages, with a forbidden page around it."""
    size = tensor.numel() * tensor.element_size()
    assert size % PAGE == 0, f"{size} bytes do not fill their pages"
    pages = mmap.mmap(-1, size + 2 * PAGE)
    KEPT.append(pages)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (start, start + PAGE + size):
        if libc.mprotect(ctypes.c_void_p(page), PAGE, PROT_NONE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    inside = torch.frombuffer(
        pages, dtype=tensor.dtype, count=tensor.numel(), offset=PAGE
    )
    return inside.view(tensor.shape).copy_(tensor)


def guarded_inputs(block_size: int, **options: object) -> AttentionInputs:
    """Return inputs that fill whole pages; the last row fills its table."""
    generator = torch.Generator().manual_seed(block_size)
    columns, num_blocks = 32, 64
    num_seqs = PAGE // 4 // columns
    lengths = torch.arange(num_seqs) * 7 % (columns * block_size + 1)
    lengths[-1] = columns * block_size
    tables = torch.full((num_seqs, columns), -1, dtype=torch.int32)
    ids = torch.arange(num_blocks, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        count = -(-length // block_size)
        # The first and the last block of the pool are often the last of a row.
        turned = ids.roll(count - row % 2)
        tables[row, :count] = turned[:count]
    shape = num_blocks, 2, block_size, 32
    starts = None
    query_lens = torch.ones_like(lengths)
    if options.pop("prefill", False):
        query_lens = lengths.clamp(max=2)
        query_lens[-1] = 64 - query_lens[:-1].sum() % 64
        query_lens[-1] = min(int(query_lens[-1]), columns * block_size)
        starts = torch.cat([torch.zeros(1), query_lens.cumsum(0)]).int()
    query = torch.randn(int(query_lens.sum()), 8, 32, generator=generator)
    return checked_inputs(
        query if starts is not None else guarded(query),
        guarded(torch.randn(shape, generator=generator)),
        guarded(torch.randn(shape, generator=generator)),
        guarded(tables),
        lengths.int(),
        query_start_loc=starts,
        **options,
    )


def run_guarded(backend: str) -> None:
    one_token_past_the_table(backend)
    for block_size, options in (
        (1, {}),
        (3, {"prefill": True}),
        (3, {"window": 5}),
        (1, {"window": 3, "prefill": True}),
    ):
        inputs = guarded_inputs(block_size, **options)
        out = torch.full_like(inputs.query, torch.nan)
        if inputs.query_start_loc is None:
            out = guarded(out)
        check(attend(inputs, backend, out), inputs)


def one_token_past_the_table(backend: str) -> None:
    inputs = guarded_inputs(1)
    lengths = inputs.seq_lens.clone()
    lengths[-1] += 1
    inputs = replace(inputs, seq_lens=lengths)
    out = attend(inputs, backend, torch.zeros_like(inputs.query))
    if not out[-1].isnan().all():
        raise SystemExit("relative error: a token past the table was found")


def run_beyond_int32(backend: str) -> None:
    for far in ("block", "head", "slot"):
        attend_far_away(backend, far)
    if backend != "gather":
        write_far_away(backend)


def attend_far_away(backend: str, far: str) -> None:
    """Read the last block, head or slot of a cache of over 2**31 elements.

    A head or a slot lies less than 2**31 elements from the next one, so that
    only the product with its index outgrows 32 bits.
    """
    block_size, head_dim = 16, 64
    count = 2**31 // (block_size * head_dim) + 4
    heads = 3 if far == "head" else 1
    # Memory of the host that is never touched takes no room.
    shape, order = {
        "block": ((count, 1, block_size, head_dim), (0, 1, 2, 3)),
        "head": ((heads, count // 4 * 3, block_size, head_dim), (1, 0, 2, 3)),
        "slot": ((block_size, 2 * count, 1, head_dim), (1, 2, 0, 3)),
    }[far]
    device = device_of(backend)
    cache = torch.empty(shape, dtype=torch.float16, device=device)
    cache = cache.permute(order)
    last = count - 1 if far == "block" else 2
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(cache[last].shape, generator=generator)
    cache[last] = rows.to(device)
    inputs = checked_inputs(
        torch.randn(1, 2 * heads, head_dim, generator=generator).to(cache),
        cache,
        cache,
        torch.tensor([[last]], dtype=torch.int32, device=device),
        torch.tensor([block_size], dtype=torch.int32, device=device),
    )
    out = torch.full_like(inputs.query, torch.nan)
    check(attend(inputs, backend, out), inputs)


def write_far_away(backend: str) -> None:
    head_dim, device = 64, device_of(backend)
    count = 2**31 // head_dim + 4
    keys, values = (
        torch.empty(count, 1, 1, head_dim, dtype=torch.float16, device=device)
        for _ in range(2)
    )
    key = torch.ones(1, 1, head_dim).to(keys)
    slots = torch.tensor([count - 1], dtype=torch.int32, device=device)
    write_kv(key, 2 * key, keys, values, slots, backend=backend)
    if not ((keys[-1] == 1).all() and (values[-1] == 2).all()):
        raise SystemExit("relative error: the last slot was not written")


def check(out: torch.Tensor, inputs: AttentionInputs) -> None:
    exact = reference_attention(inputs)
    error = float((out.double() - exact).norm() / exact.norm())
    limit = 1e-5 if out.dtype == torch.float32 else 2e-3
    if not error < limit or not math.isfinite(error):
        raise SystemExit(f"relative error {error}")


def use_kernels(path: str) -> None:
    """Replace the package's Triton kernels by those of a file."""
    from llm_systems_cookbook.attention.triton import launch

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    launch.kernels = module


if __name__ == "__main__":
    what, backend, *kernels = sys.argv[1:]
    if kernels:
        use_kernels(kernels[0])
    {"guard": run_guarded, "int32": run_beyond_int32}[what](backend)
