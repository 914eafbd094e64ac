"""The finished kernel, compiled for GPUs that are not here."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from cases.attention import pairwise

from llm_systems_cookbook.attention.triton import offline as compiled_module
from llm_systems_cookbook.attention.triton.offline import (
    SHARED_LIMIT,
    Compiled,
    Spec,
    compile_report,
)

pytest.importorskip("triton")

OPTIONS = {
    "dtype": ("float16", "bfloat16", "float32"),
    "cache": (None, "float8_e4m3fn", "float8_e5m2"),
    "head_dim": (64, 80, 128, 256),
    "group": (1, 4, 7, 16),
    "block_size": (1, 16, 24),
    "prefill": (False, True),
    "num_splits": (1, 8),
    "options": (False, True),
}
CHOICES = pairwise(OPTIONS)
# What most models are served with, on every target.
USUAL = [
    {"dtype": "float16", "head_dim": 128, "prefill": prefill}
    for prefill in (False, True)
]
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def specs(target: str) -> list[Spec]:
    found = [Spec(target, **choice) for choice in USUAL + CHOICES]
    if target == "sm_75":  # which has no bfloat16
        found = [spec for spec in found if spec.dtype != "bfloat16"]
    return found


def itemsize(spec: Spec) -> int:
    return 1 if spec.cache else ITEMSIZE[spec.dtype]


def bytes_per_thread(spec: Spec, found: Compiled) -> int:
    """Return how much of a tile of keys one thread loads."""
    dims = 1
    while dims < spec.head_dim:
        dims *= 2
    threads = found.num_warps * (64 if spec.target.startswith("gfx") else 32)
    return found.tile * dims * itemsize(spec) // threads


def narrow(spec: Spec, found: Compiled) -> str:
    """Return what is loaded in small pieces, or "".

    A block id takes 4 bytes, so for a cache of 1 or 2 bytes per number
    anything smaller is a key or a value by itself; one such load may be the
    query's, whose tile is small.
    """
    wanted = min(16, bytes_per_thread(spec, found))
    if found.widest_load < wanted:
        return f"no load of {wanted} bytes"
    small = sum(n for size, n in found.loads.items() if size < 4)
    if itemsize(spec) < 4 and small > 1:
        return f"{small} loads of less than 4 bytes"
    if itemsize(spec) == 4 and found.wide_share < 0.5:
        return f"{found.wide_share:.0%} of the bytes in wide loads"
    return ""


def problems(spec: Spec, found: Compiled) -> list[str]:
    """Return what a GPU would not like about a compiled kernel."""
    amd = spec.target.startswith("gfx")
    tensor_cores = amd or (spec.target != "sm_75" and spec.dtype != "float32")
    limit = SHARED_LIMIT[spec.target]
    wrong = {
        f"{found.spilled} bytes spilled": found.spilled > 0,
        f"{found.registers} registers": found.registers
        > (512 if amd else 255),
        f"{found.shared} of {limit} bytes shared": found.shared > limit,
        f"{found.tensor_core} matrix instructions": tensor_cores
        != (found.tensor_core > 0),
        f"{found.tf32} instructions in TF32": found.tf32 > 0,
        narrow(spec, found): narrow(spec, found) != "",
    }
    return [what for what, is_wrong in wrong.items() if is_wrong]


@pytest.mark.parametrize("target", SHARED_LIMIT)
def test_compiles_without_spills_with_wide_loads_and_tensor_cores(target: str):
    wanted = specs(target)
    assert len(wanted) > 10
    found = compile_report(wanted)
    wrong = {
        spec: what
        for spec, one in zip(wanted, found, strict=True)
        if (what := problems(spec, one))
    }
    assert wrong == {}


UNHINTED = [
    Spec("sm_80", hints=False),
    Spec("sm_75", hints=False),
    Spec("gfx942", hints=False),
    Spec("sm_90", dtype="float32", hints=False),
    Spec("sm_90", cache="float8_e4m3fn", hints=False),
]
HALF_HINTED = [
    Spec("sm_80", unhinted=which) for which in ("key_stride", "value_stride")
]
# 64 rows of registers without tensor cores, and no hints, do not fit.
SPILLING = [Spec("sm_75", group=64), Spec("sm_80", hints=False)]
TOO_LARGE = Spec("sm_75", dtype="float32", head_dim=1024)


@cache
def report() -> dict[Spec, Compiled]:
    """Compile all of these in one process, which imports Triton once."""
    hinted = [replace(spec, hints=True) for spec in UNHINTED]
    wanted = [*hinted, *UNHINTED, *HALF_HINTED, *SPILLING, TOO_LARGE]
    wanted = list(dict.fromkeys(wanted))
    return dict(zip(wanted, compile_report(wanted), strict=True))


@pytest.mark.parametrize("spec", UNHINTED, ids=str)
def test_without_hints_the_loads_are_narrow(spec: Spec):
    assert narrow(spec, report()[replace(spec, hints=True)]) == ""
    assert narrow(spec, report()[spec]) != ""


@pytest.mark.parametrize("spec", HALF_HINTED, ids=str)
def test_one_narrow_cache_is_enough_to_be_noticed(spec: Spec):
    assert narrow(spec, report()[spec]) != ""


@pytest.mark.parametrize("target", ["sm_75", "sm_90", "gfx942"])
def test_every_kernel_compiles_as_it_is_launched(target: str):
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "cases.compile_launches", target],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 7
    assert all(int(launches) >= 4 for _, launches, _ in lines)
    spilled = {name: int(count) for name, _, count in lines}
    assert set(spilled.values()) == {0}, spilled


def test_spills_would_be_noticed():
    for spec in SPILLING:
        assert any(
            "spilled" in what for what in problems(spec, report()[spec])
        )


def test_too_much_shared_memory_would_be_noticed():
    found = problems(TOO_LARGE, report()[TOO_LARGE])
    assert any("bytes shared" in what for what in found)


def test_tf32_would_be_noticed(tmp_path):
    kernels = Path(compiled_module.__file__).with_name("kernels.py")
    source = kernels.read_text()
    assert source.count('input_precision="ieee"') > 1
    path = tmp_path / "rounding_kernels.py"
    path.write_text(source.replace('="ieee"', '="tf32"'))
    code = (
        "import rounding_kernels\n"
        "from llm_systems_cookbook.attention.triton.offline import *\n"
        "spec = Spec('sm_80', dtype='float32')\n"
        "kernel = rounding_kernels.paged_attention_kernel\n"
        "print(compile_one(spec, kernel).tf32)"
    )
    environment = dict(os.environ, PYTHONPATH=str(tmp_path))
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) > 0, done.stderr


def test_a_failing_compilation_is_told():
    with pytest.raises(RuntimeError, match="sm_1"):
        compile_report([Spec("sm_1")])


def test_a_cache_of_tritons_that_cannot_be_written_costs_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    no_folder = tmp_path / "cache"
    no_folder.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(no_folder))
    (found,) = compile_report([Spec("sm_80")])
    assert found.registers > 0
