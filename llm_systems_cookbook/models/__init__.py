"""What computes? A small model, which does not know how its cache is laid out.

The layout is left to the engine, so the same model runs with each of them.
"""

from llm_systems_cookbook.models.tiny_gpt import (
    Attention,
    ByteTokenizer,
    TinyGPT,
    TinyGPTConfig,
)

__all__ = ["Attention", "ByteTokenizer", "TinyGPT", "TinyGPTConfig"]
