"""What computes? Models, which know nothing of where a cache lies."""

from llm_systems_cookbook.models.tiny_gpt import (
    Attention,
    ByteTokenizer,
    TinyGPT,
    TinyGPTConfig,
)

__all__ = ["Attention", "ByteTokenizer", "TinyGPT", "TinyGPTConfig"]
