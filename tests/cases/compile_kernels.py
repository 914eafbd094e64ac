"""Compile the CPU kernels, which numba keeps for every later process.

    PYTHONPATH=tests python -m cases.compile_kernels PROCESSES

Tests that run in several processes would each compile them anew, where they
start before the first has finished. What is on disk already only loads.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import torch
from cases.attention import Case, inputs_of
from cases.write import Write, write_problem

from llm_systems_cookbook.attention import attend, why_not

# One kernel each, by the numbers in the cache; a float8 one has bytes.
CASES = (
    Case(dtype=torch.float64),
    Case(),
    Case(dtype=torch.float16),
    Case(dtype=torch.bfloat16),
    Case(cache=torch.float8_e4m3fn),
)


def compile_for(case: Case) -> None:
    inputs = inputs_of(case)
    attend(inputs, "cpu", inputs.output())
    assert write_problem(Write(dtype=case.dtype), "cpu") == ""


def main(processes: int) -> None:
    if reason := why_not("cpu", torch.empty(0)):
        print(f"The CPU kernels are not compiled: {reason}")
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn) as pool:
        list(pool.map(compile_for, CASES))


if __name__ == "__main__":
    main(int(sys.argv[1]))
