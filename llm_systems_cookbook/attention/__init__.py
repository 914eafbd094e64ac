"""Bytes: where keys and values lie, and how a query meets them."""

from llm_systems_cookbook.attention.cache_write import write_kv
from llm_systems_cookbook.attention.dispatch import (
    BACKENDS,
    choose_backend,
    paged_attention,
)
from llm_systems_cookbook.attention.gather import (
    Workspace,
    gather_index_select,
    gather_loop,
)
from llm_systems_cookbook.attention.kv_cache import (
    ContiguousKVCache,
    PagedKVCache,
)

__all__ = [
    "BACKENDS",
    "ContiguousKVCache",
    "PagedKVCache",
    "Workspace",
    "choose_backend",
    "gather_index_select",
    "gather_loop",
    "paged_attention",
    "write_kv",
]
