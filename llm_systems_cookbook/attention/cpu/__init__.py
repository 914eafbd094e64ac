"""How does a CPU read the blocks in place? With loops that numba compiles."""

from llm_systems_cookbook.attention.cpu.launch import cpu_attention, cpu_write

__all__ = ["cpu_attention", "cpu_write"]
