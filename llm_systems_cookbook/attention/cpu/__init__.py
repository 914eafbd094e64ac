"""How are the blocks read in place on a CPU? By loops that numba compiles."""

from llm_systems_cookbook.attention.cpu.launch import cpu_attention, cpu_write

__all__ = ["cpu_attention", "cpu_write"]
