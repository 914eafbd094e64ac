"""Attention compiled by numba: the blocks are read in place, on the CPU."""

from llm_systems_cookbook.attention.cpu.launch import cpu_attention, cpu_write

__all__ = ["cpu_attention", "cpu_write"]
