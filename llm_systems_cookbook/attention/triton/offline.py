"""Compile the finished kernel for GPUs that are not here, and read the result.

Triton needs no GPU to compile. It cannot compile in a process that runs its
interpreter, so `compile_report` starts another one.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from llm_systems_cookbook.attention.inputs import (
    AttentionInputs,
    checked_inputs,
)

# Shared memory that one program may take, in bytes. Source: CUDA C++
# programming guide, table of compute capabilities; AMD CDNA3 ISA guide (LDS).
SHARED_LIMIT = {
    "sm_75": 64 * 1024,
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}


@dataclass(frozen=True)
class Spec:
    """One version of the kernel to compile.

    Attributes:
        target: "sm_75", "sm_80", "sm_89", "sm_90", "sm_100" or "gfx942".
        dtype: of the query: "float32", "float16" or "bfloat16".
        cache: dtype of the cache; the query's when None.
        head_dim: numbers per key and value.
        group: query heads per KV head.
        block_size: tokens per block.
        prefill: several query tokens a sequence, instead of one.
        num_splits: programs that share a sequence.
        options: window, softcap, ALiBi and sinks are compiled in.
        hints: tell the compiler which arguments are divisible by 16, as a
            launch does.
        unhinted: no hint for arguments whose names begin like this.
    """

    target: str
    dtype: str = "float16"
    cache: str | None = None
    head_dim: int = 128
    group: int = 4
    block_size: int = 16
    prefill: bool = False
    num_splits: int = 1
    options: bool = False
    hints: bool = True
    unhinted: str | None = None


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a `Spec`.

    Attributes:
        registers: per thread.
        spilled: bytes of memory per thread that stand in for registers; 0
            when everything fits.
        scalar_spills: on AMD, scalar registers kept in lanes of vector ones,
            which costs no memory; 0 on NVIDIA, which has no such registers.
        shared: bytes of shared memory per program.
        loads: instructions that load from global memory, by the bytes that a
            thread gets of each.
        tensor_core: matrix instructions in the listing.
        tf32: instructions that round float32 to TF32.
        rows: query rows of a program.
        tile: tokens per step.
        num_warps: warps per program.
    """

    registers: int
    spilled: int
    scalar_spills: int
    shared: int
    loads: dict[int, int]
    tensor_core: int
    tf32: int
    rows: int
    tile: int
    num_warps: int

    @property
    def widest_load(self) -> int:
        """Bytes that a thread gets of one load, at the most."""
        return max(self.loads)

    @property
    def wide_share(self) -> float:
        """Share of the bytes, as listed, that come 16 or more at a time."""
        sizes = self.loads.items()
        wide = sum(size * count for size, count in sizes if size >= 16)
        return wide / sum(size * count for size, count in sizes)


def compile_report(specs: list[Spec]) -> list[Compiled]:
    """Compile each spec in a process without the interpreter.

    Raises:
        RuntimeError: the compiler failed; with its message.
    """
    done = _compile_elsewhere(specs, {})
    if done.returncode != 0:
        # It may be Triton's cache: damaged, full, or not to be written.
        with tempfile.TemporaryDirectory() as folder:
            done = _compile_elsewhere(specs, {"TRITON_CACHE_DIR": folder})
    if done.returncode != 0:
        raise RuntimeError(f"could not compile: {done.stderr.strip()}")
    return [_from_json(found) for found in json.loads(done.stdout)]


def _compile_elsewhere(
    specs: list[Spec], changes: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | changes
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([asdict(spec) for spec in specs]),
        env=environment,
        capture_output=True,
        text=True,
    )


def _from_json(found: dict[str, Any]) -> Compiled:
    loads = {int(size): count for size, count in found.pop("loads").items()}
    return Compiled(**found, loads=loads)


def compile_one(spec: Spec, kernel: Any = None) -> Compiled:  # noqa: ANN401
    """Compile in this process, where the interpreter must be off.

    Args:
        spec: the version to compile.
        kernel: in place of `paged_attention_kernel`, with its arguments.
    """
    from llm_systems_cookbook.attention.triton import launch as backend
    from llm_systems_cookbook.attention.triton.kernels import (
        paged_attention_kernel,
    )

    inputs = _meta_inputs(spec)
    plan = backend.plan_launch(
        inputs, spec.target, processors=1, num_splits=spec.num_splits
    )
    arguments = backend.kernel_arguments(
        inputs,
        inputs.output(),
        plan,
        backend.COMPUTE[inputs.query.dtype],
        *backend.split_buffers(inputs, spec.num_splits),
    )
    compiled = compile_call(
        kernel or paged_attention_kernel,
        arguments,
        spec.target,
        backend.compile_options(plan.tiles, spec.target),
        lambda name: _is_hinted(name, spec),
    )
    return Compiled(
        **_resources(compiled, spec.target),
        shared=compiled.metadata.shared,
        rows=arguments["ROWS"],
        tile=arguments["TILE"],
        num_warps=plan.tiles.num_warps,
    )


def compile_call(
    kernel: Any,  # noqa: ANN401
    arguments: dict[str, Any],
    target: str,
    options: dict[str, int],
    is_hinted: Callable[[str], bool] = lambda name: True,
) -> Any:  # noqa: ANN401
    """Compile a kernel as a launch with these arguments would.

    Args:
        kernel: a function under `triton.jit`.
        arguments: by name; tensors may be on the "meta" device.
        target: as in `Spec`.
        options: of Triton's compiler, such as num_warps.
        is_hinted: whether an argument's divisibility is told.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    general = {p.name for p in kernel.params if p.do_not_specialize}
    types, constants, hints = _signature(arguments, general)
    at = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        {at[name]: value for name, value in constants.items()},
        {
            at[name]: [["tt.divisibility", 16]]
            for name in hints
            if is_hinted(name)
        },
    )
    if target.startswith("sm_"):
        gpu = GPUTarget("cuda", int(target[3:]), 32)
    else:
        gpu = GPUTarget("hip", target, 64)
    return triton.compile(source, target=gpu, options=options)


def _is_hinted(name: str, spec: Spec) -> bool:
    if spec.unhinted is not None and name.startswith(spec.unhinted):
        return False
    return spec.hints


def _meta_inputs(spec: Spec) -> AttentionInputs:
    """Return inputs of the right shapes that take no memory."""
    kv_heads, num_seqs = 8, 64
    heads = kv_heads * spec.group
    dtype = getattr(torch, spec.dtype)
    cache_dtype = getattr(torch, spec.cache or spec.dtype)
    shape = 4096, kv_heads, spec.block_size, spec.head_dim
    rows = num_seqs * (100 if spec.prefill else 1)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    starts = None
    if spec.prefill:
        starts = empty(num_seqs + 1, dtype=torch.int32)
    scale = None if spec.cache is None else empty(1)
    return checked_inputs(
        empty(rows, heads, spec.head_dim, dtype=dtype),
        empty(*shape, dtype=cache_dtype),
        empty(*shape, dtype=cache_dtype),
        empty(num_seqs, 256, dtype=torch.int32),
        empty(num_seqs, dtype=torch.int32),
        query_start_loc=starts,
        window=1000 if spec.options else None,
        softcap=50.0 if spec.options else None,
        alibi_slopes=empty(heads) if spec.options else None,
        sinks=empty(heads) if spec.options else None,
        k_scale=scale,
        v_scale=scale,
        validate=False,
    )


_POINTER = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def _signature(
    arguments: dict[str, Any], general: set[str]
) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """Return types, constants and what is divisible by 16, as a launch does.

    Source: Triton's own rules: None and the integer 1 are constants, but for
    arguments that are not to be specialized (`general`), and a tensor's
    address is divisible by 16 where torch allocates it.
    """
    types: dict[str, str] = {}
    hints = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            types[name] = _POINTER[value.dtype]
            hints.append(name)
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value is None or name.isupper():
            types[name] = "constexpr"
        else:
            types[name] = "i32" if value < 2**31 else "i64"
            if name in general:
                continue
            if value == 1:
                types[name] = "constexpr"
            elif value % 16 == 0:
                hints.append(name)
    constants = {n: arguments[n] for n, t in types.items() if t == "constexpr"}
    return types, constants, hints


def _resources(compiled: Any, target: str) -> dict[str, Any]:  # noqa: ANN401
    if target.startswith("sm_"):
        return _nvidia(compiled)
    return _amd(compiled.asm["amdgcn"])


_NVIDIA_LOAD = re.compile(r"ld\.global[.\w]*?(?:\.v(\d))?\.[a-z](\d+)\b")
_NVIDIA_COPY = re.compile(
    r"cp\.async\.c[ag]\.shared\.global [^;]*?, (\w+)[,;]"
)
_TENSOR_CORE = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")


def _nvidia(compiled: Any) -> dict[str, Any]:  # noqa: ANN401
    ptx = compiled.asm["ptx"]
    usage = _cuobjdump(compiled.asm["cubin"])
    loads = [
        int(count or 1) * int(bits) // 8
        for count, bits in _NVIDIA_LOAD.findall(ptx)
    ] + [int(size, 0) for size in _NVIDIA_COPY.findall(ptx)]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled": int(re.search(r"STACK:(\d+)", usage)[1]),
        "scalar_spills": 0,
        "loads": dict(Counter(loads)),
        "tensor_core": len(_TENSOR_CORE.findall(ptx)),
        "tf32": ptx.count("tf32"),
    }


def _cuobjdump(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run(
            [tool, "-res-usage", path],
            capture_output=True,
            text=True,
            check=True,
        ).stdout


_AMD_LOAD = re.compile(r"(?:global|buffer)_load_(\w+)")
_AMD_BYTES = {
    "ubyte": 1,
    "sbyte": 1,
    "ushort": 2,
    "sshort": 2,
    "short_d16": 2,
    "short_d16_hi": 2,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}


def _amd(listing: str) -> dict[str, Any]:
    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s*(\d+)", listing)[1])

    loads = [_AMD_BYTES[kind] for kind in _AMD_LOAD.findall(listing)]
    return {
        "registers": number("vgpr_count"),
        "spilled": number("private_segment_fixed_size"),
        "scalar_spills": number("sgpr_spill_count"),
        "loads": dict(Counter(loads)),
        "tensor_core": len(re.findall(r"\bv_mfma", listing)),
        "tf32": listing.count("xf32"),
    }


def main() -> None:
    """Read specs as JSON from standard input, and write what was compiled."""
    specs = [Spec(**spec) for spec in json.load(sys.stdin)]
    json.dump([asdict(compile_one(spec)) for spec in specs], sys.stdout)


if __name__ == "__main__":
    main()
