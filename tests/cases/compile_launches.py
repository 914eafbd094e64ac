"""Compile every kernel as the package launches it, for GPUs not here.

    python -m cases.compile_launches TARGET   (in tests/)

Each launch is recorded instead of run, and compiled with its own arguments.
A process of its own, because the interpreter must be off.
"""

import sys
from typing import Any

import torch
from cases.attention import Case, build

from llm_systems_cookbook.attention.inputs import checked_inputs
from llm_systems_cookbook.attention.triton import launch, rungs
from llm_systems_cookbook.attention.triton.offline import (
    _resources,
    compile_call,
)

KERNELS = (
    "per_head_kernel",
    "grouped_kernel",
    "split_kernel",
    "tiled_kernel",
    "combine_kernel",
    "paged_attention_kernel",
    "write_kernel",
)
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Recorder:
    """Stand in for a kernel: compile each launch."""

    def __init__(self, kernel: Any, target: str) -> None:
        self.kernel, self.target = kernel, target
        self.launches = self.spilled = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return self.launch

    def launch(self, *args: Any, **named: Any) -> None:
        options = {k: named.pop(k) for k in OPTIONS if k in named}
        names = self.kernel.arg_names
        arguments = dict(zip(names, args, strict=False)) | named
        found = compile_call(self.kernel, arguments, self.target, options)
        self.spilled += _resources(found, self.target)["spilled"]
        self.launches += 1


def main(target: str) -> None:
    kernels = launch.kernels
    recorders = {n: Recorder(getattr(kernels, n), target) for n in KERNELS}
    for name, recorder in recorders.items():
        setattr(kernels, name, recorder)
    launch._target = lambda device: target
    for dtype in (torch.float16, torch.float32):
        for index in (torch.int32, torch.int64):
            plain = on_meta(Case(dtype=dtype, index=index, lengths="many"))
            for rung in rungs.RUNGS.values():
                rung(plain, plain.output())
            for case in (
                Case(dtype=dtype, index=index),
                Case(dtype=dtype, index=index, mode="prefill", splits=8),
                Case(dtype=dtype, index=index, head_dim=256, splits=64),
            ):
                inputs = on_meta(case)
                launch.triton_attention(inputs, inputs.output(), case.splits)
            rows = plain.query[:, : plain.num_kv_heads]
            launch.triton_write(
                rows,
                rows,
                plain.key_cache,
                plain.value_cache,
                plain.seq_lens,
                None,
                None,
            )
    for name, recorder in recorders.items():
        print(name, recorder.launches, recorder.spilled)


def on_meta(case: Case) -> Any:
    arguments = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in build(case).items()
    }
    return checked_inputs(**arguments, validate=False)


if __name__ == "__main__":
    main(sys.argv[1])
