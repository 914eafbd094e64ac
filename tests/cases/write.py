"""Cases for the cache write, and what is wrong with a backend on one."""

from dataclasses import dataclass, fields

import torch
from cases.attention import device_of, moved_tensor

from llm_systems_cookbook.attention.write import write_kv


@dataclass(frozen=True)
class Write:
    """One write; the defaults are the plain one."""

    dtype: torch.dtype = torch.float32
    index: torch.dtype = torch.int64
    heads: int = 2
    head_dim: int = 32
    head_dim_v: int = 32
    block_size: int = 16
    tokens: int = 9
    layout: str = "plain"  # plain, strided, tokens_first, dims_apart
    rows: str = "plain"  # plain, strided
    padding: bool = False

    def __str__(self) -> str:
        plain = Write()
        parts = [
            f"{field.name}={getattr(self, field.name)}".replace("torch.", "")
            for field in fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        ]
        return " ".join(parts) or "plain"


WRITES = [
    Write(),
    Write(padding=True),
    Write(dtype=torch.float16, padding=True, index=torch.int32),
    Write(dtype=torch.bfloat16, rows="strided", block_size=24),
    Write(layout="strided", rows="strided", padding=True, head_dim_v=48),
    Write(layout="tokens_first", head_dim=80, head_dim_v=96, block_size=1),
    Write(head_dim=1, head_dim_v=3, block_size=5, heads=1),
    Write(head_dim=192, head_dim_v=128, block_size=256, heads=3),
    Write(layout="dims_apart", rows="strided", padding=True, head_dim_v=48),
    Write(layout="dims_apart", dtype=torch.bfloat16, block_size=1),
    Write(tokens=0),
    Write(tokens=1, block_size=8, padding=True),
]


def write_problem(case: Write, backend: str) -> str:
    """Write a case; return what differs from one copy at a time, or ""."""
    generator = torch.Generator().manual_seed(0)
    device = device_of(backend)
    key = moved_tensor(_rows(case, case.head_dim, generator), device)
    value = moved_tensor(_rows(case, case.head_dim_v, generator), device)
    num_blocks = 2 + case.tokens // case.block_size
    slots = torch.randperm(num_blocks * case.block_size, generator=generator)
    slots = slots[: case.tokens].to(device, case.index)
    if case.padding:
        slots[::3] = -1
    keys, whole_keys = _cache(case, num_blocks, case.head_dim, device)
    values, whole_values = _cache(case, num_blocks, case.head_dim_v, device)
    write_kv(key, value, keys, values, slots, backend=backend)
    for name, rows, cache, whole in (
        ("keys", key, keys, whole_keys),
        ("values", value, values, whole_values),
    ):
        for token, slot in enumerate(slots.tolist()):
            if slot == -1:
                continue
            at = cache[slot // case.block_size, :, slot % case.block_size]
            if not torch.equal(at, rows[token]):
                return f"{name}: token {token} is not in slot {slot}"
            at.fill_(torch.nan)
        if not whole.isnan().all():
            return f"{name}: something else was written"
    return ""


def _rows(case: Write, dim: int, generator: torch.Generator) -> torch.Tensor:
    shape = case.tokens, case.heads, dim
    rows = torch.randn(shape, generator=generator).to(case.dtype)
    if case.rows == "plain":
        return rows
    wide = torch.full((case.heads, case.tokens, dim + 8), torch.nan)
    strided = wide.to(case.dtype).transpose(0, 1)[..., 4 : dim + 4]
    return strided.copy_(rows)


def _cache(
    case: Write, num_blocks: int, dim: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache of NaN, and all of the memory that it lies in."""
    heads, size = case.heads, case.block_size
    if case.layout == "tokens_first":
        whole = torch.full((num_blocks, size, heads, dim), torch.nan)
        whole = whole.to(device, case.dtype)
        return whole.transpose(1, 2), whole
    if case.layout == "dims_apart":
        whole = torch.full((num_blocks, dim, heads, size), torch.nan)
        whole = whole.to(device, case.dtype)
        return whole.permute(0, 2, 3, 1), whole
    extra = 3 if case.layout == "strided" else 0
    shape = num_blocks, heads + extra, size + extra, dim + extra
    whole = torch.full(shape, torch.nan).to(device, case.dtype)
    return whole[:, extra:, extra:, extra:], whole
