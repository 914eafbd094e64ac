"""Where are the bytes of keys and values, and how does a query meet them?

A name is imported only when it is asked for, because most of them need torch.
`attention.backends` only says what could run here, so it does not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_systems_cookbook.attention.backends import (
        BACKENDS,
        choose_backend,
        why_not,
    )
    from llm_systems_cookbook.attention.contiguous import contiguous_attention
    from llm_systems_cookbook.attention.dispatch import attend, paged_attention
    from llm_systems_cookbook.attention.gather import (
        Workspace,
        gather_index_select,
        gather_loop,
        gather_loop_attention,
    )
    from llm_systems_cookbook.attention.inputs import (
        INDEX,
        AttentionInputs,
        checked_inputs,
        require_shape,
    )
    from llm_systems_cookbook.attention.kv_cache import (
        ContiguousKVCache,
        PagedKVCache,
    )
    from llm_systems_cookbook.attention.reference import reference_attention
    from llm_systems_cookbook.attention.write import CacheWrite, write_kv

_HOME = {
    "BACKENDS": "backends",
    "choose_backend": "backends",
    "why_not": "backends",
    "contiguous_attention": "contiguous",
    "attend": "dispatch",
    "paged_attention": "dispatch",
    "Workspace": "gather",
    "gather_index_select": "gather",
    "gather_loop": "gather",
    "gather_loop_attention": "gather",
    "INDEX": "inputs",
    "AttentionInputs": "inputs",
    "checked_inputs": "inputs",
    "require_shape": "inputs",
    "ContiguousKVCache": "kv_cache",
    "PagedKVCache": "kv_cache",
    "reference_attention": "reference",
    "CacheWrite": "write",
    "write_kv": "write",
}

__all__ = [
    "BACKENDS",
    "INDEX",
    "AttentionInputs",
    "CacheWrite",
    "ContiguousKVCache",
    "PagedKVCache",
    "Workspace",
    "attend",
    "checked_inputs",
    "choose_backend",
    "contiguous_attention",
    "gather_index_select",
    "gather_loop",
    "gather_loop_attention",
    "paged_attention",
    "reference_attention",
    "require_shape",
    "why_not",
    "write_kv",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
